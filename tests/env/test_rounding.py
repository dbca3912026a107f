"""Rounded graphs against numpy: the values by hand, each rewriting on graphs of a few operators.

The expected numbers come from ml_dtypes, struct and integer arithmetic, never from the module.
"""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from routepilot.env.rounding import (
    CONVOLUTIONS,
    PRODUCTS,
    in_16_bits,
    in_int8,
    in_tf32,
    to_bf16,
    to_fp16,
    to_int8,
    to_tf32,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
#: Numbers whose scale of int8 is no denormal, which has fewer digits.
ORDINARY = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)
ARRAYS = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=4, max_side=4), elements=FLOATS
)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0, 1.0),
        (1 + 2**-9, 1.0),  # 7 bits behind the point: a step is 2^-7
        (1 + 2**-8, 1.0),  # half way, to the even one below
        (1 + 3 * 2**-8, 1 + 2**-6),  # half way, to the even one above
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (-(1 + 3 * 2**-8), -(1 + 2**-6)),
        (65504.0, 65536.0),
        (0.0, 0.0),
        (3.4028234e38, np.inf),  # nearer to 2^128 than to the largest bf16
        (np.inf, np.inf),
        (-np.inf, -np.inf),
    ],
)
def test_bf16_by_hand(value: float, rounded: float) -> None:
    assert to_bf16(f32(value)).tolist() == [rounded]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1 + 2**-11, 1.0),  # 10 bits behind the point: half way, to the even one below
        (1 + 3 * 2**-11, 1 + 2**-9),  # half way, to the even one above
        (1 + 2**-10, 1 + 2**-10),
        (2**-24, 2**-24),  # the least denormal
        (2**-26, 0.0),
        (70000.0, 65504.0),
        (-70000.0, -65504.0),
        (np.inf, 65504.0),
    ],
)
def test_fp16_by_hand(value: float, rounded: float) -> None:
    assert to_fp16(f32(value)).tolist() == [rounded]


@pytest.mark.parametrize("rounded", [to_bf16, to_fp16])
def test_not_a_number_stays_none(rounded) -> None:
    payloads = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(rounded(payloads)).all()


def test_int8_by_hand() -> None:
    weight = np.array([[127.0, -1.4, 63.6], [12.7, 0.15, -6.36]], np.float32)
    np.testing.assert_allclose(
        to_int8(weight, None), [[127, -1, 64], [13, 0, -6]], rtol=1e-6
    )  # one scale, of 1
    np.testing.assert_allclose(
        to_int8(weight, 0), [[127, -1, 64], [12.7, 0.2, -6.4]], rtol=1e-6
    )  # 1 and 0.1
    columns = to_int8(weight, 1)  # 1, 1.4 / 127 and 63.6 / 127
    np.testing.assert_allclose(columns[0], weight[0], rtol=1e-6)
    np.testing.assert_allclose(columns[1], [13, 14 * 1.4 / 127, -13 * 63.6 / 127], rtol=1e-6)


def test_int8_has_no_scale_of_nothing() -> None:
    zeros = np.array([[0.0, 0.0], [1.0, -2.0], [1e-45, 0.0]], np.float32)
    rounded = to_int8(zeros, 0)
    np.testing.assert_allclose(rounded, [[0, 0], [64 * 2 / 127, -2], [0, 0]], rtol=1e-6)


@given(ARRAYS)
def test_bf16_is_what_others_round_to(values: np.ndarray) -> None:
    rounded = to_bf16(values)
    assert rounded.dtype == np.float32 and rounded.shape == values.shape
    np.testing.assert_array_equal(rounded, values.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert not (rounded.view(np.uint32) & 0xFFFF).any()


@given(FLOATS.filter(lambda x: abs(x) < 65520))
def test_fp16_is_what_others_round_to(value: float) -> None:
    assert to_fp16(f32(value))[0] == struct.unpack("e", struct.pack("e", value))[0]


@given(st.data(), hnp.array_shapes(min_dims=2, max_dims=4, max_side=4))
def test_int8_keeps_within_half_a_step_of_each_channel(data, shape: tuple[int, ...]) -> None:
    values = data.draw(hnp.arrays(np.float32, shape, elements=ORDINARY))
    axis = data.draw(st.none() | st.integers(0, values.ndim - 1))
    rounded = to_int8(values, axis)
    assert rounded.dtype == np.float32 and rounded.shape == values.shape
    rows = values.reshape(1, -1) if axis is None else np.moveaxis(values, axis, 0)
    found = rounded.reshape(1, -1) if axis is None else np.moveaxis(rounded, axis, 0)
    for row, now in zip(rows, found, strict=True):
        step = np.abs(row).astype(float).max() / 127
        assert np.abs(now.astype(float) - row).max() <= step / 2 * (1 + 1e-4)
        codes = now / step if step else now
        assert np.abs(codes - np.round(codes)).max() < 1e-3 and np.abs(codes).max() < 127.5
    np.testing.assert_allclose(to_int8(-values, axis), -rounded, rtol=1e-6)


@given(ARRAYS)
def test_rounding_again_changes_nothing(values: np.ndarray) -> None:
    for rounded in (to_bf16, to_fp16):
        once = rounded(values)
        finite = np.isfinite(once)
        np.testing.assert_array_equal(rounded(once)[finite], once[finite])


# Graphs ------------------------------------------------------------------------------------------


def graph(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int]],
    weights: dict[str, np.ndarray],
    outputs: tuple[str, ...] = ("y",),
) -> onnx.ModelProto:
    """A model with inferred shapes, as a prepared one has."""
    proto = helper.make_model(
        helper.make_graph(
            nodes,
            "made",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
            [numpy_helper.from_array(w, n) for n, w in weights.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    return onnx.shape_inference.infer_shapes(proto, data_prop=True)


def run(proto: onnx.ModelProto, **inputs: np.ndarray) -> np.ndarray:
    """The first output, on ONNX Runtime as the probes run it."""
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)[0]


def weights_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def fed(values: np.ndarray) -> np.ndarray:
    """Unsigned int8 with a range of its own that holds zero, as DynamicQuantizeLinear has it."""
    low, high = min(values.min(), 0.0), max(values.max(), 0.0)
    scale = (high - low) / 255.0
    zero = np.round(-low / scale)
    return (np.clip(np.round(values / scale) + zero, 0, 255) - zero) * scale


def by_column(weight: np.ndarray) -> np.ndarray:
    scale = np.abs(weight).max(axis=0) / 127
    return np.round(weight / scale) * scale


def convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A convolution of stride 1 without padding, by its definition."""
    high, wide = (x.shape[i] - weight.shape[i] + 1 for i in (2, 3))
    found = np.zeros((x.shape[0], weight.shape[0], high, wide))
    for row in range(weight.shape[2]):
        for column in range(weight.shape[3]):
            part = x[:, :, row : row + high, column : column + wide]
            found += np.einsum("nchw,oc->nohw", part, weight[:, :, row, column])
    return found


@pytest.mark.parametrize("brain", [True, False])
def test_16_bits_round_every_weight_and_result(brain: bool) -> None:
    kind = ml_dtypes.bfloat16 if brain else np.float16

    def low(values: np.ndarray) -> np.ndarray:
        return values.astype(kind).astype(np.float32)

    # Numbers of few bits, so that no order of summation matters: only the rounding can.
    rng = np.random.default_rng(0)
    x = (rng.integers(-999, 999, (2, 4)) / 64).astype(np.float32)
    w = (rng.integers(-4095, 4095, (4, 3)) / 256).astype(np.float32)
    b = (rng.integers(-4095, 4095, 3) / 256).astype(np.float32)
    proto = graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["p"]),
            helper.make_node("Add", ["p", "b"], ["s"]),
            helper.make_node("Relu", ["s"], ["y"]),
        ],
        {"x": [2, 4]},
        {"w": w, "b": b},
    )
    before = proto.SerializeToString(deterministic=True)
    expected = low(np.maximum(low(low(x @ low(w)) + low(b)), 0))
    found = run(in_16_bits(proto, brain=brain), x=x)
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(found, run(proto, x=x))
    assert proto.SerializeToString(deterministic=True) == before  # which stays as it was


def test_an_activation_too_large_for_fp16_shows() -> None:
    proto = graph([helper.make_node("Mul", ["x", "w"], ["y"])], {"x": [2]}, {"w": f32(1000.0, 1e6)})
    found = run(in_16_bits(proto, brain=False), x=f32(2.0, 1.0))
    assert found.tolist() == [2000.0, 65504.0]  # the weight is held
    assert run(in_16_bits(proto, brain=False), x=f32(66.0, 2.0)).tolist() == [np.inf, np.inf]


def test_16_bits_leave_numbers_that_are_no_activations() -> None:
    steps = f32(1.0, 1.0, 1 + 2**-9, 1 + 2**-9)
    proto = graph(
        [
            helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(f32(1 + 2**-9))),
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
            helper.make_node("Gather", ["shape", "first"], ["size"]),
            helper.make_node("Cast", ["size"], ["number"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["zeros", "number"], ["numbers"]),
            helper.make_node("Resize", ["numbers", "", "steps"], ["larger"]),
            helper.make_node("Mul", ["larger", "k"], ["y"]),
        ],
        {"x": [1, 1, 2, 2]},
        {"steps": steps, "first": np.array([0], np.int64)},
    )
    rounded = in_16_bits(proto, brain=True)
    np.testing.assert_array_equal(weights_of(rounded)["steps"], steps)  # sizes are no numbers
    assert weights_of(rounded)["first"].dtype == np.int64
    casts = {n.output[0] for n in rounded.graph.node if n.op_type == "Cast"}
    assert {f"{name}::16" for name in ("numbers", "larger", "y")} <= casts
    assert not {f"{name}::16" for name in ("k", "shape", "zeros", "size", "number")} & casts
    found = run(rounded, x=np.zeros((1, 1, 2, 2), np.float32))
    assert set(found.ravel().tolist()) == {1.0}  # the constant is a weight, rounded to 1


def test_inner_graphs_stay() -> None:
    def side(name: str) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node("Add", ["x", name], [f"{name}_y"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [2])],
            [numpy_helper.from_array(f32(1 + 2**-9, 1), name)],
        )

    nodes = [
        helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
        helper.make_node("Greater", ["m", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=side("a"), else_branch=side("b")),
    ]
    proto = graph(nodes, {"x": [2]}, {"zero": np.array(0, np.float32)})
    for rounded in (
        in_16_bits(proto, brain=True),
        in_int8(proto, CONVOLUTIONS | PRODUCTS, activations=True),
    ):
        np.testing.assert_array_equal(run(rounded, x=f32(1, 0)), f32(2 + 2**-9, 1))


@pytest.mark.parametrize("activations", [False, True])
def test_int8_rounds_products_by_column(activations: bool) -> None:
    x, w = normal(0, 5, 8), normal(1, 8, 6) * np.logspace(-2, 2, 6, dtype=np.float32)
    proto = graph([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [5, 8]}, {"w": w})
    rounded = in_int8(proto, PRODUCTS, activations=activations)
    expected = (fed(x) if activations else x) @ by_column(w)
    np.testing.assert_allclose(run(rounded, x=x), expected, rtol=2e-5, atol=2e-5)
    assert np.abs(expected - x @ w).max() > 1e-2  # so that the above says something
    np.testing.assert_array_equal(
        run(in_int8(proto, CONVOLUTIONS, activations=True), x=x), run(proto, x=x)
    )


@pytest.mark.parametrize("activations", [False, True])
def test_int8_rounds_convolutions_by_output_channel(activations: bool) -> None:
    x, w = normal(0, 1, 3, 6, 7), normal(1, 4, 3, 3, 2)
    w *= np.logspace(-2, 1, 4, dtype=np.float32)[:, None, None, None]
    proto = graph([helper.make_node("Conv", ["x", "w"], ["y"])], {"x": [1, 3, 6, 7]}, {"w": w})
    rounded = in_int8(proto, CONVOLUTIONS, activations=activations)
    rows = by_column(w.reshape(4, -1).T).T.reshape(w.shape)
    expected = convolved(fed(x) if activations else x, rows)
    np.testing.assert_allclose(run(rounded, x=x), expected, rtol=1e-4, atol=1e-4)
    assert np.abs(expected - convolved(x, w)).max() > 1e-2
    np.testing.assert_array_equal(
        run(in_int8(proto, PRODUCTS, activations=True), x=x), run(proto, x=x)
    )


def one_scale(weight: np.ndarray) -> np.ndarray:
    return by_column(weight.reshape(-1, 1)).reshape(weight.shape)


def test_the_scales_of_each_weight() -> None:
    """By output channel: transposed convolutions by their second axis, products by the last or,
    where they transpose the weight, the first; recurrences by none."""
    t, g, r = normal(0, 2, 3, 2, 2), normal(1, 3, 4), normal(2, 1, 8, 4)
    bias, state = normal(3, 1, 16), normal(4, 1, 8, 2)
    nodes = [
        helper.make_node("ConvTranspose", ["x", "t"], ["c"]),
        helper.make_node("Reshape", ["c", "flat"], ["f"]),
        helper.make_node("Gemm", ["f", "g", "shift"], ["p"], transB=1),
        helper.make_node("Reshape", ["p", "steps"], ["s"]),
        helper.make_node("LSTM", ["s", "r", "state", "bias"], ["", "y"], hidden_size=2),
    ]
    g = normal(1, 4, 27)
    weights = {"t": t, "g": g, "r": r, "state": state, "bias": bias, "shift": normal(5, 1, 4)}
    shapes = {"flat": np.array([1, 27]), "steps": np.array([1, 1, 4])}
    proto = graph(nodes, {"x": [1, 2, 2, 2]}, weights | shapes)
    found = weights_of(in_int8(proto, CONVOLUTIONS | PRODUCTS, activations=False))
    middle = by_column(np.moveaxis(t, 1, -1).reshape(-1, 3)).reshape(2, 2, 2, 3)
    np.testing.assert_allclose(found["t"], np.moveaxis(middle, -1, 1), rtol=1e-5)
    np.testing.assert_allclose(found["g"], by_column(g.T).T, rtol=1e-5)
    np.testing.assert_allclose(found["r"], one_scale(r), rtol=1e-5)
    np.testing.assert_allclose(found["state"], one_scale(state), rtol=1e-5)
    for name in ("bias", "shift", "flat", "steps"):  # what is added, and sizes
        np.testing.assert_array_equal(found[name], (weights | shapes)[name])


def test_a_weight_that_many_read_is_rounded_once() -> None:
    w = normal(0, 4, 4)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("MatMul", ["p", "w"], ["y"]),
    ]
    proto = graph(nodes, {"x": [2, 4]}, {"w": w})
    rounded, x = in_int8(proto, PRODUCTS, activations=False), normal(1, 2, 4)
    np.testing.assert_allclose(run(rounded, x=x), x @ by_column(w) @ by_column(w), rtol=1e-4)


def test_a_product_of_activations_is_rounded_on_both_sides() -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    x = normal(0, 3, 5)
    rounded = in_int8(graph(nodes, {"x": [3, 5]}, {}), PRODUCTS, activations=True)
    np.testing.assert_allclose(run(rounded, x=x), fed(x) @ fed(x).T, rtol=1e-4, atol=1e-5)


def test_recurrences_that_leave_their_first_result_out() -> None:
    """Two of them: what is put before each needs names of its own."""
    w, r = normal(0, 1, 8, 3), normal(1, 1, 8, 2)
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["", "a"], hidden_size=2),
        helper.make_node("LSTM", ["x", "w", "r"], ["", "b"], hidden_size=2, direction="reverse"),
        helper.make_node("Sub", ["a", "b"], ["y"]),
    ]
    proto = graph(nodes, {"x": [4, 1, 3]}, {"w": w, "r": r})
    x = normal(2, 4, 1, 3)
    found = run(in_int8(proto, PRODUCTS, activations=True), x=x)
    by_hand = graph(nodes, {"x": [4, 1, 3]}, {"w": one_scale(w), "r": one_scale(r)})
    expected = run(by_hand, x=fed(x).astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - run(proto, x=x)).max() > 1e-4


def test_what_int8_leaves_alone() -> None:
    """Vectors, 16-bit floats, other operators' weights, and constants that come first."""
    vector, half = normal(0, 4), normal(1, 4, 4).astype(np.float16)
    added, first = normal(2, 4), normal(3, 3, 4)
    nodes = [
        helper.make_node("Add", ["x", "added"], ["s"]),
        helper.make_node("Cast", ["s"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["h", "half"], ["m"]),
        helper.make_node("Cast", ["m"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["first", "f"], ["p"]),
        helper.make_node("MatMul", ["p", "vector"], ["y"]),
    ]
    weights = {"vector": vector, "half": half, "added": added, "first": first}
    rounded = in_int8(graph(nodes, {"x": [4, 4]}, weights), PRODUCTS, activations=False)
    for name, weight in weights.items():
        np.testing.assert_array_equal(weights_of(rounded)[name], weight)
    assert [n.op_type for n in rounded.graph.node] == [n.op_type for n in nodes]


@given(ORDINARY)
def test_tf32_keeps_ten_bits(value: float) -> None:
    (found,) = to_tf32(f32(value))
    (bits,) = struct.unpack("<I", struct.pack("<f", found))
    assert bits & 0x1FFF == 0
    assert abs(float(found) - value) <= 2.0**-11 * abs(value)


def test_tf32_has_the_range_of_float32() -> None:
    large = f32(1e5, -3e38, 1e38, -1e-30)
    np.testing.assert_allclose(to_tf32(large), large, rtol=2.0**-11)
    assert np.isinf(to_tf32(f32(np.inf)))[0]


def test_tf32_rounds_weights_and_every_result() -> None:
    weight = normal(0, 4, 5)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Relu", ["m"], ["y"]),
    ]
    proto = graph(nodes, {"x": [3, 4]}, {"w": weight})
    x = normal(1, 3, 4)
    exact = x @ to_tf32(weight)
    expected = np.maximum(to_tf32(exact.astype(np.float32)), 0)
    found = run(in_tf32(proto), x=x)
    np.testing.assert_allclose(found, expected, rtol=2.0**-10)  # sums in another order
    assert (np.ascontiguousarray(found).view(np.uint32) & 0x1FFF == 0).all()
