"""Graphs whose numbers are rounded as a compiler's precision would round them.

Owns the rewriting: ONNX graph in, ONNX graph out, which still computes in float32 but lets through
only what bf16, fp16, TF32 or int8 can hold. Runs nothing; `probes.py` does. Branches and loops keep
their inner graphs as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
PRODUCTS = frozenset({"MatMul", "Gemm", "LSTM", "GRU", "RNN"})
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})

#: Operators whose results are no activations.
_NOT_ROUNDED = frozenset({"Constant", "ConstantOfShape", "Cast", "Shape", "If", "Loop", "Scan"})

#: Operators that read sizes, not numbers, from all inputs but the first.
_SIZED = frozenset({"Resize", "Upsample"})

#: Axis of the output channels of a weight, each of which has a scale; the weights of other
#: operators have a scale for the whole tensor. A Gemm may transpose its weight.
_CHANNELS = {"Conv": 0, "ConvTranspose": 1, "MatMul": -1, "Gemm": -1}

Array = NDArray[np.float32]

#: What a float32 is multiplied with to be split behind its eleventh bit.
SPLITTER = np.array(2**13 + 1, np.float32)


def to_bf16(values: Array) -> Array:
    """Round to the nearest bf16, ties to even; what is not finite stays."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    up = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    rounded = ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values).reshape(np.shape(values))


def to_fp16(values: Array) -> Array:
    """Round to the nearest fp16; what is too large becomes the largest."""
    largest = float(np.finfo(np.float16).max)
    return np.clip(values, -largest, largest).astype(np.float16).astype(np.float32)


def to_tf32(values: Array) -> Array:
    """Round to the ten bits of TF32, at float32's range; what would overflow on the way stays."""
    with np.errstate(over="ignore", invalid="ignore"):
        large = np.asarray(values, np.float32) * SPLITTER
        rounded = large - (large - values)
    return np.where(np.isfinite(rounded), rounded, values).astype(np.float32)


def to_int8(values: Array, axis: int | None) -> Array:
    """Round to symmetric int8, with a scale for each index of an axis, or one for all.

    Args:
        values: Finite, at least one.
        axis: The axis, counted from the first; None for one scale.
    """
    other = None if axis is None else tuple(i for i in range(values.ndim) if i != axis)
    scale = np.abs(values).max(axis=other, keepdims=True) / np.float32(127.0)
    scale = np.where(scale == 0, np.float32(1.0), scale)  # the least denormals have no scale either
    codes = np.clip(np.round(values / scale), -127, 127)
    return np.asarray(codes * scale, np.float32)


def in_16_bits(model: onnx.ModelProto, *, brain: bool) -> onnx.ModelProto:
    """Every weight and every activation in bf16 (`brain`) or fp16; what the graph is fed stays.

    Args:
        model: A graph with inferred shapes, so that the type of each value is known.
        brain: bf16 rather than fp16.
    """
    from onnx import TensorProto, helper

    wanted = TensorProto.BFLOAT16 if brain else TensorProto.FLOAT16

    def cast(exact: str, name: str) -> list[onnx.NodeProto]:
        return [
            helper.make_node("Cast", [exact], [f"{name}::16"], to=wanted),
            helper.make_node("Cast", [f"{name}::16"], [name], to=TensorProto.FLOAT),
        ]

    return _everywhere(model, to_bf16 if brain else to_fp16, cast)


def in_tf32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Every weight and every activation to the ten bits of TF32; what the graph is fed stays.

    No ONNX type holds TF32; x * (2**13 + 1) - (x * (2**13 + 1) - x) rounds to its bits in float32
    (Veltkamp's splitting).

    Args:
        model: A graph with inferred shapes, so that the type of each value is known.
    """
    from onnx import helper, numpy_helper

    def split(exact: str, name: str) -> list[onnx.NodeProto]:
        return [
            helper.make_node("Mul", [exact, "::splitter"], [f"{name}::large"]),
            helper.make_node("Sub", [f"{name}::large", exact], [f"{name}::rest"]),
            helper.make_node("Sub", [f"{name}::large", f"{name}::rest"], [name]),
        ]

    rounded = _everywhere(model, to_tf32, split)
    rounded.graph.initializer.append(numpy_helper.from_array(SPLITTER, "::splitter"))
    return rounded


def _everywhere(
    model: onnx.ModelProto,
    change: Callable[[Array], Array],
    nodes: Callable[[str, str], list[onnx.NodeProto]],
) -> onnx.ModelProto:
    """A graph whose float32 weights are changed and whose float32 results go through nodes.

    Args:
        model: A graph with inferred shapes.
        change: Of a weight.
        nodes: The nodes from the name of a result to the name that others read.
    """
    from onnx import TensorProto

    rounded, found = _copy(model), []
    kinds = _kinds(model)
    _change_weights(rounded, None, lambda array, _: change(array))
    for node in rounded.graph.node:
        found.append(node)
        for place, name in enumerate(node.output):
            if node.op_type not in _NOT_ROUNDED and kinds.get(name) == TensorProto.FLOAT:
                node.output[place] = f"{name}::exact"
                found.extend(nodes(f"{name}::exact", name))
    return _with_nodes(rounded, found)


def in_int8(
    model: onnx.ModelProto, operators: Collection[str], *, activations: bool
) -> onnx.ModelProto:
    """The weights of some operators in int8 by channel, and what goes into them by tensor.

    Args:
        model: The graph.
        operators: Types of operators.
        activations: Round what goes into them too, each tensor by its own range.
    """
    from onnx import helper

    rounded, found = _copy(model), []
    _change_weights(rounded, operators, lambda array, axis: to_int8(array, axis))
    constant = _constants(rounded)
    for node in rounded.graph.node:
        if activations and node.op_type in operators:
            places = (0,) if node.op_type in _RECURRENT else (0, 1)
            for place in places:
                name = node.input[place]
                if not name or name in constant:
                    continue
                result = next(filter(None, node.output))  # a recurrence may leave the first out
                codes = [f"{result}::{place}::{part}" for part in ("q", "scale", "zero")]
                found.append(helper.make_node("DynamicQuantizeLinear", [name], codes))
                found.append(helper.make_node("DequantizeLinear", codes, [f"{codes[0]}::x"]))
                node.input[place] = f"{codes[0]}::x"
        found.append(node)
    return _with_nodes(rounded, found)


def _channels(node: onnx.NodeProto) -> int | None:
    """Axis of the output channels of an operator's weight; None where it has one scale."""
    if node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute):
        return 0
    return _CHANNELS.get(node.op_type)


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    import onnx

    found = onnx.ModelProto()
    found.CopyFrom(model)
    return found


def _with_nodes(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    import onnx

    kept = []
    for node in nodes:  # clearing the graph would empty those it owns
        mine = onnx.NodeProto()
        mine.CopyFrom(node)
        kept.append(mine)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def _kinds(model: onnx.ModelProto) -> dict[str, int]:
    """Element type of each value that the graph names."""
    graph = model.graph
    values = [*graph.value_info, *graph.input, *graph.output]
    return {value.name: value.type.tensor_type.elem_type for value in values}


def _constants(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Tensors that are fixed: initializers and constant nodes."""
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            found.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    return found


def _change_weights(
    model: onnx.ModelProto,
    operators: Collection[str] | None,
    change: Callable[[Array, int | None], Array],
) -> None:
    """Change float32 tensors in place: all, or the weights of some operators, each once."""
    from onnx import TensorProto, numpy_helper

    constant = _constants(model)
    axes: dict[str, int | None] = dict.fromkeys(constant) if operators is None else {}
    for node in model.graph.node:
        if operators is None and node.op_type in _SIZED:
            for name in node.input[1:]:
                axes.pop(name, None)
        elif operators is not None and node.op_type in operators:
            for name in node.input[1 : 3 if node.op_type in _RECURRENT else 2]:
                if name in constant:
                    axes.setdefault(name, _channels(node))
    for name, axis in axes.items():
        tensor = constant[name]
        if tensor.data_type != TensorProto.FLOAT:
            continue
        array = numpy_helper.to_array(tensor)
        if array.size == 0 or (operators is not None and array.ndim < 2):
            continue
        axis = None if axis is None else axis % array.ndim
        tensor.CopyFrom(numpy_helper.from_array(change(array, axis), tensor.name))
