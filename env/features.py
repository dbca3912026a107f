"""Features: what an agent may know of a model before the first build.

Owns a fixed-length vector: most of it is read off the ONNX graph and its weights, the last part is
what rounding does to the outputs (`probes.py`). Knows no route.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from routepilot.env import probes
from routepilot.env.graph_work import KINDS, Facts
from routepilot.env.graph_work import count as count
from routepilot.env.models import Model
from routepilot.env.normalise import infer_shapes

if TYPE_CHECKING:
    import onnx

#: Groups of light operators: each gives its share of the nodes.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "softmax": ("softmax", ("Softmax", "LogSoftmax")),
    "layer_norm": (
        "layer and other run-time normalisations",
        ("LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization"),
    ),
    "batch_norm": ("batch normalisations not yet folded", ("BatchNormalization",)),
    "relu": ("ReLU-like clamps", ("Relu", "Clip", "LeakyRelu", "PRelu")),
    "sigmoid": (
        "sigmoid, tanh and swish parts",
        ("Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Swish", "Exp"),
    ),
    "gelu": ("GELU and its error function", ("Gelu", "Erf")),
    "elementwise": (
        "additions, products and other pointwise arithmetic",
        ("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Where", "Neg", "Min", "Max"),
    ),
    "reduction": (
        "reductions",
        ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ArgMax"),
    ),
    "pooling": ("pooling", ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")),
    "movement": (
        "reshapes, transposes, slices and concatenations",
        (
            "Reshape",
            "Transpose",
            "Slice",
            "Concat",
            "Split",
            "Squeeze",
            "Unsqueeze",
            "Flatten",
            "Expand",
            "Pad",
            "Tile",
        ),
    ),
    "resize": ("resizing", ("Resize", "Upsample", "DepthToSpace", "SpaceToDepth")),
    "quantized": (
        "operators that are quantised already",
        (
            "QuantizeLinear",
            "DequantizeLinear",
            "DynamicQuantizeLinear",
            "MatMulInteger",
            "ConvInteger",
            "QLinearConv",
            "QLinearMatMul",
        ),
    ),
    "control": ("branches and loops", ("If", "Loop", "Scan")),
}

_SCALARS: tuple[tuple[str, str], ...] = (
    ("log_nodes", "log10 of the number of operators"),
    ("log_parameters", "log10 of the number of weights"),
    ("log_flops", "log10 of floating-point operations of one inference"),
    ("log_bytes", "log10 of bytes moved: weights and every activation once, float32"),
    ("log_intensity", "log10 of FLOPs per byte moved"),
    ("log_depth", "log10 of operators on the longest path"),
    (
        "log_flops_per_node",
        "log10 of FLOPs per operator: how much overhead of small kernels weighs",
    ),
    ("branching", "share of tensors that more than one operator reads"),
    ("log_batch", "log10 of the first dimension of the first input"),
    ("log_input", "log10 of elements of all inputs"),
    ("log_output", "log10 of elements of all outputs"),
    ("log_largest", "log10 of elements of the largest activation"),
    ("log_rows", "log10 of the FLOP-weighted rows of matrix products and pixels of convolutions"),
    ("log_channels", "log10 of the FLOP-weighted reduction length of products and convolutions"),
    ("dilated", "share of FLOPs in dilated convolutions"),
    ("strided", "share of FLOPs in strided convolutions"),
    ("large_kernel", "share of FLOPs in convolutions with kernels of 5 and more"),
    ("attention", "softmaxes that sit between two products of activations, log10(1 + n)"),
    ("integer_input", "share of inputs that are integers"),
    ("half_weights", "share of weights in 16-bit floats"),
    ("integer_weights", "share of weights in 8-bit integers"),
    ("unknown_shapes", "share of operators whose output shape could not be inferred"),
    ("int8_tensor_mean", "mean relative error of weights rounded to int8 per tensor, log10"),
    ("int8_tensor_worst", "largest of those errors over the tensors, log10"),
    ("int8_channel_mean", "the mean with a scale per output channel, log10"),
    ("int8_channel_worst", "the largest with a scale per output channel, log10"),
    ("weight_tails", "log10 of the mean kurtosis of weights: trained weights have tails"),
    ("channel_spread", "mean log10 ratio of the largest to the median channel scale"),
)

#: Names of the features, in the order of the vector.
FEATURE_NAMES: tuple[str, ...] = (
    *(f"flops_{kind}" for kind in KINDS if kind != "embedding"),
    *(f"weights_{kind}" for kind in KINDS if kind not in ("matmul_dynamic",)),
    *(f"nodes_{group}" for group in GROUPS),
    *(name for name, _ in _SCALARS),
    *(f"probe_{name}" for name in probes.NAMES),
)

#: Where the probes stand in the vector.
PROBES = slice(len(FEATURE_NAMES) - len(probes.NAMES), len(FEATURE_NAMES))


def describe() -> list[tuple[str, str]]:
    """Each feature's name and meaning, in the order of the vector."""
    texts = {f"flops_{kind}": f"share of FLOPs in {text}" for kind, text in KINDS.items()}
    texts |= {f"weights_{kind}": f"share of weights in {text}" for kind, text in KINDS.items()}
    texts |= {
        f"nodes_{group}": f"share of operators: {text}" for group, (text, _) in GROUPS.items()
    }
    texts |= dict(_SCALARS)
    texts |= {
        f"probe_{name}": f"log10 relative L2 error of the worst output, {text}"
        for name, text, _ in probes.PROBES
    }
    return [(name, texts[name]) for name in FEATURE_NAMES]


def model_features(model: Model) -> tuple[float, ...]:
    """The feature vector of a prepared model, in the order of `FEATURE_NAMES`.

    Every value is finite; shares are in [0, 1], logarithms about -6 to 10. The first call runs the
    model's probes, which are then kept in its folder.
    """
    import onnx

    graph = onnx.load(str(model.path)).graph  # shapes were inferred when it was prepared
    return _features(graph, probes.probes_of(model.folder))


def graph_features(proto: onnx.ModelProto) -> tuple[float, ...]:
    """The feature vector of a graph alone: shapes not inferred yet, and probes not made."""
    return _features(infer_shapes(proto).graph, dict.fromkeys(probes.NAMES, probes.UNKNOWN))


def _features(graph: onnx.GraphProto, tried: Mapping[str, float]) -> tuple[float, ...]:
    facts = count(graph)
    values = {**_shares(facts), **_sizes(graph, facts), **_weights(facts)}
    values |= {f"probe_{name}": value for name, value in tried.items()}
    return tuple(float(values[name]) for name in FEATURE_NAMES)


def _shares(facts: Facts) -> dict[str, float]:
    flops: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for work in facts.work:
        flops[work.kind] += work.flops
        weights[work.kind] += work.parameters
    all_flops, all_weights = max(facts.flops, 1.0), max(sum(weights.values()), 1.0)
    nodes = max(sum(facts.operators.values()), 1)
    values = {f"flops_{kind}": flops[kind] / all_flops for kind in KINDS}
    values |= {f"weights_{kind}": weights[kind] / all_weights for kind in KINDS}
    for group, (_, names) in GROUPS.items():
        values[f"nodes_{group}"] = sum(facts.operators[name] for name in names) / nodes
    return values


def _log(value: float) -> float:
    return math.log10(max(value, 1.0))


def _sizes(graph: onnx.GraphProto, facts: Facts) -> dict[str, float]:
    flops, nodes = facts.flops, max(sum(facts.operators.values()), 1)
    produced = {n for node in graph.node for n in node.output if n in facts.shapes}
    activations = [float(math.prod(facts.shapes[n])) for n in produced]
    moved = 4.0 * (facts.parameters + 2 * sum(activations))
    heavy = [w for w in facts.work if w.kind and w.kind != "embedding"]
    total = max(sum(w.flops for w in heavy), 1.0)

    def weighted(values: Iterator[float]) -> float:
        return sum(w.flops * v for w, v in zip(heavy, values, strict=True)) / total

    readers = Counter(name for node in graph.node for name in node.input if name in produced)
    inputs = [facts.shapes.get(v.name, ()) for v in graph.input]
    bits = max(facts.parameters, 1.0)
    return {
        "log_nodes": _log(nodes),
        "log_parameters": _log(facts.parameters),
        "log_flops": _log(flops),
        "log_bytes": _log(moved),
        "log_intensity": math.log10(max(flops, 1.0) / max(moved, 1.0)),
        "log_depth": _log(_depth(graph)),
        "log_flops_per_node": _log(flops / nodes),
        "branching": sum(n > 1 for n in readers.values()) / max(len(readers), 1),
        "log_batch": _log(inputs[0][0]) if inputs and inputs[0] else 0.0,
        "log_input": _log(sum(float(math.prod(shape)) for shape in inputs)),
        "log_output": _log(
            sum(float(math.prod(facts.shapes.get(v.name, ()))) for v in graph.output)
        ),
        "log_largest": _log(max(activations, default=1.0)),
        "log_rows": weighted(_log(w.rows) for w in heavy),
        "log_channels": weighted(_log(w.reduction) for w in heavy),
        "dilated": weighted(float(w.dilated) for w in heavy),
        "strided": weighted(float(w.strided) for w in heavy),
        "large_kernel": weighted(float(w.kernel >= 5) for w in heavy),
        "attention": math.log10(1 + _attentions(graph)),
        "integer_input": sum(
            v.type.tensor_type.elem_type not in (1, 10, 11, 16) for v in graph.input
        )
        / max(len(graph.input), 1),
        "half_weights": (facts.weight_bits["float16"] + facts.weight_bits["bfloat16"]) / bits,
        "integer_weights": (facts.weight_bits["int8"] + facts.weight_bits["uint8"]) / bits,
        "unknown_shapes": facts.unknown / nodes,
    }


def _depth(graph: onnx.GraphProto) -> int:
    depth: dict[str, int] = {}
    for node in graph.node:
        level = 1 + max((depth.get(name, 0) for name in node.input), default=0)
        for name in node.output:
            depth[name] = level
    return max(depth.values(), default=1)


def _attentions(graph: onnx.GraphProto) -> int:
    """Softmaxes whose result goes into a product of two activations."""
    weights = {tensor.name for tensor in graph.initializer}
    normalised = {n.output[0] for n in graph.node if n.op_type == "Softmax"}
    return sum(
        node.op_type == "MatMul" and node.input[0] in normalised and node.input[1] not in weights
        for node in graph.node
    )


def _weights(facts: Facts) -> dict[str, float]:
    """How much weights lose by rounding to int8, and how heavy their tails are."""
    tensor, channel, tails, spread, share = [], [], [], [], []
    for array, axis, flops in facts.weights:
        if array.size == 0:
            continue
        weights = array.astype(np.float64)
        size = np.abs(weights)
        largest = float(size.max())
        if largest == 0.0 or not math.isfinite(largest):
            continue
        other = tuple(i for i in range(array.ndim) if i != axis % array.ndim)
        scales = size.max(axis=other, keepdims=True)
        weights /= largest  # errors and tails do not depend on it, and nothing can overflow
        norm = float(np.linalg.norm(weights))
        tensor.append(_rounding_error(weights, np.ones(())) / norm)
        channel.append(_rounding_error(weights, np.maximum(scales / largest, 1e-30)) / norm)
        tails.append(_kurtosis(weights))
        scales = np.where(scales == 0, 1.0, scales)
        spread.append(math.log10(float(scales.max()) / float(np.median(scales))))
        share.append(flops)
    if not tensor:
        names = [name for name, _ in _SCALARS[-6:]]
        return dict.fromkeys(names, 0.0) | {name: -4.0 for name in names if "int8" in name}
    weight = np.asarray(share) / max(sum(share), 1.0) if sum(share) > 0 else None
    return {
        "int8_tensor_mean": _small_log(float(np.average(tensor, weights=weight))),
        "int8_tensor_worst": _small_log(max(tensor)),
        "int8_channel_mean": _small_log(float(np.average(channel, weights=weight))),
        "int8_channel_worst": _small_log(max(channel)),
        "weight_tails": math.log10(max(float(np.average(tails, weights=weight)), 1.0)),
        "channel_spread": float(np.average(spread, weights=weight)),
    }


def _rounding_error(array: NDArray[np.float64], scale: NDArray[np.float64]) -> float:
    step = scale / 127.0
    return float(np.linalg.norm(array - np.round(array / step) * step))


def _kurtosis(array: NDArray[np.float64]) -> float:
    squares = np.square(array - array.mean())
    variance = float(squares.mean())
    return float(np.square(squares).mean()) / variance**2 if variance > 1e-30 else 1.0


def _small_log(value: float) -> float:
    return math.log10(max(value, 1e-4))
