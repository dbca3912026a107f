"""Features against models computed by hand."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from routepilot.env.features import FEATURE_NAMES, count, describe, graph_features


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int]],
    weights: dict[str, np.ndarray],
    output: str = "y",
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return onnx.shape_inference.infer_shapes(proto, data_prop=True)


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def features(proto: onnx.ModelProto) -> dict[str, float]:
    return dict(zip(FEATURE_NAMES, graph_features(proto), strict=True))


def test_every_feature_is_described_once() -> None:
    names = [name for name, _ in describe()]
    assert tuple(names) == FEATURE_NAMES
    assert len(set(names)) == len(names)
    assert all(text for _, text in describe())


def test_convolutions() -> None:
    proto = model(
        [
            helper.make_node("Conv", ["x", "a"], ["h"], pads=[1, 1, 1, 1], strides=[2, 2]),
            helper.make_node("Conv", ["h", "b"], ["k"], group=8, pads=[1, 1, 1, 1]),
            helper.make_node("Conv", ["k", "c"], ["y"]),
        ],
        {"x": [1, 3, 16, 16]},
        {"a": weight(8, 3, 3, 3), "b": weight(8, 1, 3, 3), "c": weight(4, 8, 1, 1)},
    )
    full, depthwise, pointwise = (
        2 * 8 * 64 * 27,  # 8 channels of 8x8, each a sum of 3*3*3 products
        2 * 8 * 64 * 9,
        2 * 4 * 64 * 8,
    )
    facts = count(proto.graph)
    assert [w.flops for w in facts.work] == [full, depthwise, pointwise]
    assert facts.parameters == 216 + 72 + 32
    found = features(proto)
    total = full + depthwise + pointwise
    assert found["flops_conv_full"] == pytest.approx(full / total)
    assert found["flops_conv_depthwise"] == pytest.approx(depthwise / total)
    assert found["flops_conv_pointwise"] == pytest.approx(pointwise / total)
    assert found["log_flops"] == pytest.approx(math.log10(total))
    assert found["strided"] == pytest.approx(full / total)
    assert found["log_depth"] == pytest.approx(math.log10(3))
    assert found["unknown_shapes"] == 0


def test_attention() -> None:
    proto = model(
        [
            helper.make_node("MatMul", ["x", "q"], ["a"]),
            helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
            helper.make_node("MatMul", ["a", "t"], ["s"]),
            helper.make_node("Softmax", ["s"], ["p"]),
            helper.make_node("MatMul", ["p", "x"], ["y"]),
        ],
        {"x": [2, 5, 6]},
        {"q": weight(6, 6)},
    )
    facts = count(proto.graph)
    heavy = [w.flops for w in facts.work if w.kind]
    assert heavy == [2 * 2 * 5 * 6 * 6, 2 * 2 * 5 * 5 * 6, 2 * 2 * 5 * 6 * 5]
    found = features(proto)
    assert found["attention"] == pytest.approx(math.log10(2))
    dynamic = heavy[1] + heavy[2]
    assert found["flops_matmul_dynamic"] == pytest.approx(dynamic / facts.flops)
    assert found["nodes_softmax"] == pytest.approx(1 / 5)


def test_dense_layers_with_transposed_weights() -> None:
    proto = model(
        [
            helper.make_node("Gemm", ["x", "a"], ["h"], transB=1),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("Gemm", ["r", "b"], ["y"]),
        ],
        {"x": [3, 10]},
        {"a": weight(20, 10), "b": weight(20, 5)},
    )
    facts = count(proto.graph)
    assert [w.flops for w in facts.work] == [2 * 3 * 20 * 10, 60, 2 * 3 * 5 * 20]
    assert features(proto)["weights_matmul_weight"] == 1.0


def test_lstm() -> None:
    proto = model(
        [
            helper.make_node(
                "LSTM", ["x", "w", "r"], ["y"], hidden_size=7, direction="bidirectional"
            )
        ],
        {"x": [11, 2, 5]},
        {"w": weight(2, 28, 5), "r": weight(2, 28, 7)},
    )
    (work,) = count(proto.graph).work
    assert work.parameters == 2 * 28 * 12
    assert work.flops == 2 * 11 * 2 * 2 * 28 * 12
    assert features(proto)["flops_recurrent"] == 1.0


def test_rounding_errors_know_outlier_channels() -> None:
    even = weight(64, 64)
    spiky = even.copy()
    spiky[:, 3] *= 100
    node = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    calm = features(model(node, {"x": [1, 64]}, {"w": even}))
    wild = features(model(node, {"x": [1, 64]}, {"w": spiky}))
    assert wild["channel_spread"] > calm["channel_spread"] + 1
    assert wild["weight_tails"] > calm["weight_tails"] + 0.5
    assert wild["int8_channel_mean"] < -1.9


def test_a_model_without_weights_has_finite_features() -> None:
    proto = model([helper.make_node("Relu", ["x"], ["y"])], {"x": [1]}, {})
    assert all(math.isfinite(v) for v in graph_features(proto))


def test_a_recurrent_layer_may_leave_out_its_sequence() -> None:
    node = helper.make_node("LSTM", ["x", "w", "r"], ["", "y"], hidden_size=7)
    proto = model([node], {"x": [11, 2, 5]}, {"w": weight(1, 28, 5), "r": weight(1, 28, 7)})
    (work,) = count(proto.graph).work
    assert work.flops == 2 * 11 * 2 * 28 * 12
    assert features(proto)["unknown_shapes"] == 0


def test_convolutions_that_are_quantised_already() -> None:
    names = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"]
    scales = {name: np.float32(0.1) for name in ("xs", "ws", "ys")}
    zeros = {name: np.uint8(3) for name in ("xz", "yz")} | {"wz": np.int8(0)}
    proto = model(
        [
            helper.make_node("QuantizeLinear", ["f", "xs", "xz"], ["x"]),
            helper.make_node("QLinearConv", names, ["q"]),
            helper.make_node("DequantizeLinear", ["q", "ys", "yz"], ["y"]),
        ],
        {"f": [1, 3, 8, 8]},
        {**scales, **zeros, "w": np.ones((4, 3, 3, 3), np.int8)},
    )
    heavy = [w for w in count(proto.graph).work if w.kind]
    assert [(w.kind, w.flops, w.parameters) for w in heavy] == [
        ("conv_full", 2 * 4 * 36 * 27, 4 * 27)
    ]
    found = features(proto)
    assert found["nodes_quantized"] == 1.0
    assert found["integer_weights"] == pytest.approx(1.0)


def test_dilated_and_one_dimensional_convolutions() -> None:
    proto = model(
        [
            helper.make_node("Conv", ["x", "a"], ["h"], dilations=[4], pads=[4, 4]),
            helper.make_node("Conv", ["h", "b"], ["y"], pads=[1, 1]),
        ],
        {"x": [1, 2, 100]},
        {"a": weight(6, 2, 3), "b": weight(6, 6, 3)},
    )
    wide, plain = 2 * 6 * 100 * 6, 2 * 6 * 100 * 18
    assert [w.flops for w in count(proto.graph).work] == [wide, plain]
    found = features(proto)
    assert found["flops_conv_1d"] == 1.0
    assert found["dilated"] == pytest.approx(wide / (wide + plain))


def test_depth_and_branching_of_a_diamond() -> None:
    proto = model(
        [
            helper.make_node("Relu", ["x"], ["a"]),
            helper.make_node("Sigmoid", ["a"], ["b"]),
            helper.make_node("Tanh", ["b"], ["c"]),
            helper.make_node("Add", ["a", "c"], ["y"]),
        ],
        {"x": [2, 3]},
        {},
    )
    found = features(proto)
    assert found["log_depth"] == pytest.approx(math.log10(4))
    assert found["branching"] == pytest.approx(1 / 3)  # `a` of `a`, `b`, `c`


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1e200, -1e-200], [1.0, 1.0]]),
        np.array([[1e-310, 0.0], [0.0, 0.0]]),
        np.array([[np.inf, 1.0], [0.0, np.nan]]),
        np.zeros((2, 2)),
        np.full((2, 2), 0.5),
    ],
    ids=["huge", "denormal", "not finite", "zeros", "constant"],
)
def test_odd_weights_have_finite_features(array: np.ndarray) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    proto = model([node], {"x": [1, 2]}, {"w": array.astype(np.float64)})
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    assert all(math.isfinite(v) for v in graph_features(proto))


def test_operators_without_a_known_shape_are_told() -> None:
    proto = model(
        [
            helper.make_node("NonZero", ["x"], ["n"]),
            helper.make_node("Cast", ["n"], ["y"], to=TensorProto.FLOAT),
        ],
        {"x": [3, 3]},
        {},
    )
    found = features(proto)
    assert found["unknown_shapes"] == 1.0
    assert found["log_flops"] == 0.0
