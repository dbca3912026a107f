"""Graph work: what each operator of an ONNX graph costs and which weights it owns.

Owns the counting of FLOPs, weights and shapes. Runs nothing; knows no feature and no route.

Shapes come from ONNX's own inference. FLOPs are counted here rather than by a library: the
libraries looked at (onnx-tool, onnx-opcounter) give one total, and what decides between routes is
which operators the work sits in. Tests hold the counts to models computed by hand.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx

#: Kinds of heavy operators: shares of FLOPs and of parameters are given for each.
KINDS: dict[str, str] = {
    "conv_full": "dense 2-D convolutions with kernels above 1x1",
    "conv_pointwise": "1x1 convolutions",
    "conv_depthwise": "depthwise and grouped convolutions",
    "conv_1d": "1-D convolutions",
    "conv_transposed": "transposed convolutions",
    "matmul_weight": "matrix products with constant weights",
    "matmul_dynamic": "matrix products of two activations, as in attention",
    "recurrent": "LSTM, GRU and RNN cells",
    "embedding": "table look-ups",
}

#: Where operators that are quantised already keep their second factor.
_SECOND = {"QLinearConv": 3, "QLinearMatMul": 3}
_RECURRENT_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_CHANNEL_AXES = {"Conv": 0, "ConvTranspose": 1, "MatMul": -1, "Gemm": -1}


@dataclass(frozen=True)
class Work:
    """What one operator does.

    Attributes:
        kind: Key of `KINDS`, or empty for light operators.
        flops: Floating-point operations; a multiply-add counts two.
        parameters: Weights it owns.
        rows: Output positions that share the weights.
        reduction: Length of its sums.
        dilated: A convolution with holes.
        strided: A convolution that skips.
        kernel: Largest kernel side.
    """

    kind: str
    flops: float
    parameters: float
    rows: float = 1.0
    reduction: float = 1.0
    dilated: bool = False
    strided: bool = False
    kernel: int = 1


@dataclass
class Facts:
    """What one walk over the graph finds.

    Attributes:
        work: Each operator's work.
        operators: Operator counts by type.
        shapes: Tensor shapes by name.
        weights: Float weights of heavy operators with the axis of their output channels.
        weight_bits: Number of weights by numpy dtype name.
        unknown: Operators without an inferred output shape.
    """

    work: list[Work] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    weights: list[tuple[NDArray[np.floating[Any]], int, float]] = field(default_factory=list)
    weight_bits: Counter[str] = field(default_factory=Counter)
    unknown: int = 0

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return sum(w.flops for w in self.work)

    @property
    def parameters(self) -> float:
        """All weights."""
        return float(sum(self.weight_bits.values()))


def count(graph: onnx.GraphProto) -> Facts:
    """Walk the graph once and count."""
    facts = Facts()
    arrays = _arrays(graph)
    facts.shapes = _shapes(graph, arrays)
    for array in arrays.values():
        if array.ndim > 0 and array.size > 1:
            facts.weight_bits[array.dtype.name] += array.size
    constant = _constants(graph, arrays)
    for node in graph.node:
        if node.op_type == "Constant":
            continue
        facts.operators[node.op_type] += 1
        # An optional first output may be left out, as an LSTM's is that gives its last state alone.
        output = next((name for name in node.output if name), "")
        if output not in facts.shapes:
            facts.unknown += 1
            continue
        work = _work(node, facts.shapes[output], facts.shapes, constant)
        facts.work.append(work)
        array = next((arrays[n] for n in node.input[1:2] if n in arrays), None)
        if work.kind and array is not None and array.ndim >= 2 and array.dtype.kind == "f":
            axis = _channel_axis(node)
            if axis is not None:
                facts.weights.append((array, axis, work.flops))
    return facts


def _arrays(graph: onnx.GraphProto) -> dict[str, Any]:
    """Weights by name, those in Constant nodes included."""
    from onnx import numpy_helper

    arrays: dict[str, Any] = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                arrays[node.output[0]] = numpy_helper.to_array(attribute.t)
    return arrays


def _shapes(graph: onnx.GraphProto, arrays: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Fully known shapes by tensor name."""
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    for value in (*graph.input, *graph.output, *graph.value_info):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            shapes[value.name] = tuple(d.dim_value for d in dims)
    return shapes


def _channel_axis(node: onnx.NodeProto) -> int | None:
    if node.op_type == "Gemm" and _attribute(node, "transB", 0):
        return 0
    return _CHANNEL_AXES.get(node.op_type)


def _constants(graph: onnx.GraphProto, arrays: dict[str, Any]) -> set[str]:
    """Tensors that do not depend on the inputs: weights, and what is computed from them alone."""
    known = set(arrays)
    for node in graph.node:
        if node.input and all(name in known or not name for name in node.input):
            known.update(node.output)
    return known


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    from onnx import helper

    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default


def _work(
    node: onnx.NodeProto,
    output: tuple[int, ...],
    shapes: dict[str, tuple[int, ...]],
    constant: set[str],
) -> Work:
    out = float(math.prod(output))
    kind = node.op_type
    sources = [shapes.get(name) for name in node.input]
    place = _SECOND.get(kind, 1)
    first, second = sources[0] if sources else None, sources[place] if sources[place:] else None
    if kind in ("Conv", "ConvTranspose", "ConvInteger", "QLinearConv") and second:
        return _convolution(node, out, first or (), second)
    if kind in ("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul") and first and second:
        fixed = node.input[place] in constant
        reduction = first[0] if _attribute(node, "transA", 0) else first[-1]
        return Work(
            "matmul_weight" if fixed else "matmul_dynamic",
            2 * out * reduction,
            float(math.prod(second)) if fixed else 0.0,
            rows=out / max(output[-1] if output else 1, 1),
            reduction=reduction,
        )
    if kind in _RECURRENT_GATES and first and len(sources) > 2 and sources[2]:
        return _recurrent(node, sources)
    if kind in ("Gather", "GatherElements") and node.input[0] in constant and first:
        table = float(math.prod(first))
        return Work("embedding" if len(first) > 1 else "", out, table if table > 64 else 0.0)
    return Work("", out, 0.0)


def _convolution(
    node: onnx.NodeProto, out: float, image: tuple[int, ...], kernel: tuple[int, ...]
) -> Work:
    groups = _attribute(node, "group", 1)
    window = math.prod(kernel[2:])
    if node.op_type == "ConvTranspose":
        # Each input element meets the kernel once for each output channel of its group.
        flops = 2.0 * math.prod(image) * kernel[1] * window
        return Work("conv_transposed", flops, math.prod(kernel), out / max(kernel[1], 1), kernel[0])
    reduction = kernel[1] * window
    if groups > 1:
        kind = "conv_depthwise"
    elif len(kernel) == 3:
        kind = "conv_1d"
    else:
        kind = "conv_pointwise" if window == 1 else "conv_full"
    return Work(
        kind,
        2.0 * out * reduction,
        math.prod(kernel),
        rows=out / max(kernel[0], 1),
        reduction=reduction,
        dilated=any(d > 1 for d in _attribute(node, "dilations", [1])),
        strided=any(s > 1 for s in _attribute(node, "strides", [1])),
        kernel=max(kernel[2:], default=1),
    )


def _recurrent(node: onnx.NodeProto, sources: list[tuple[int, ...] | None]) -> Work:
    steps, batch, width = sources[0] or (1, 1, 1)
    directions, _, hidden = sources[2] or (1, 1, 1)
    weights = directions * _RECURRENT_GATES[node.op_type] * hidden * (width + hidden)
    return Work("recurrent", 2.0 * steps * batch * weights, weights, batch, width + hidden)
