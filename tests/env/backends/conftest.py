"""Small networks of three kinds, prepared once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper, save_model

from routepilot.env.models import Model, prepare


class Net:
    """Nodes and weights as they are added."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def weight(self, *shape: int, scale: float = 0.1) -> str:
        return self.constant(self.rng.normal(0, scale, shape).astype(np.float32))

    def constant(self, values: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def linear(self, x: str, inner: int, outer: int) -> str:
        product = self.node("MatMul", x, self.weight(inner, outer))
        return self.node("Add", product, self.weight(outer))

    def save(self, path: Path, shape: list[int], last: str, out: list[int]) -> Path:
        self.nodes.append(helper.make_node("Identity", [last], ["y"], name="last"))
        graph = helper.make_graph(
            self.nodes,
            path.stem,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
            self.weights,
        )
        opsets = [helper.make_opsetid("", 17)]
        save_model(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
        return path


def convolutions(path: Path) -> Path:
    net, x, width = Net(), "x", 3
    for _ in range(3):
        x = net.node("Conv", x, net.weight(16, width, 3, 3), net.weight(16), pads=[1, 1, 1, 1])
        x, width = net.node("Relu", x), 16
    x = net.node("Flatten", net.node("GlobalAveragePool", x))
    return net.save(path, [1, 3, 24, 24], net.linear(x, 16, 10), [1, 10])


def transformer(path: Path) -> Path:
    net, width, heads, tokens = Net(), 32, 4, 16
    split = net.constant(np.array([1, tokens, heads, width // heads]))
    join = net.constant(np.array([1, tokens, width]))
    parts = []
    for order in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
        part = net.node("Reshape", net.linear("x", width, width), split)
        parts.append(net.node("Transpose", part, perm=order))
    scale = net.constant(np.float32(1 / np.sqrt(width // heads)))
    scores = net.node("Mul", net.node("MatMul", parts[0], parts[1]), scale)
    x = net.node("MatMul", net.node("Softmax", scores, axis=-1), parts[2])
    x = net.node("Reshape", net.node("Transpose", x, perm=[0, 2, 1, 3]), join)

    def norm(x: str, residual: str) -> str:
        one = net.constant(np.ones(width, np.float32))
        zero = net.constant(np.zeros(width, np.float32))
        return net.node("LayerNormalization", net.node("Add", x, residual), one, zero)

    x = norm(net.linear(x, width, width), "x")
    inner = net.linear(x, width, 4 * width)
    erf = net.node("Erf", net.node("Div", inner, net.constant(np.float32(np.sqrt(2)))))
    gate = net.node("Add", erf, net.constant(np.float32(1)))
    gelu = net.node("Mul", net.node("Mul", inner, gate), net.constant(np.float32(0.5)))
    x = norm(net.linear(gelu, 4 * width, width), x)
    return net.save(path, [1, tokens, width], x, [1, tokens, width])


def recurrent(path: Path) -> Path:
    net, steps, width, hidden = Net(), 12, 16, 24
    weights = [net.weight(1, 4 * hidden, width), net.weight(1, 4 * hidden, hidden)]
    x = net.node("LSTM", "x", *weights, net.weight(1, 8 * hidden), hidden_size=hidden)
    x = net.node("Reshape", x, net.constant(np.array([steps, hidden])))
    return net.save(path, [steps, 1, width], net.linear(x, hidden, 8), [steps, 8])


def _fixture(make: Callable[[Path], Path]) -> Any:
    def prepared(tmp_path_factory: pytest.TempPathFactory) -> Model:
        folder = tmp_path_factory.mktemp(make.__name__)
        return prepare(make(folder / f"{make.__name__}.onnx"), cache=folder)

    return pytest.fixture(scope="session", name=make.__name__)(prepared)


convolutions_model = _fixture(convolutions)
transformer_model = _fixture(transformer)
recurrent_model = _fixture(recurrent)
