"""Features: what an agent may know of a model before the first build.

Owns a fixed-length vector read off the ONNX graph and its weights. Runs nothing and knows no route.

Shapes come from ONNX's own inference. FLOPs are counted here rather than by a library: the
libraries looked at (onnx-tool, onnx-opcounter) give one total, and what decides between routes is
which operators the work sits in. Tests hold the counts to models computed by hand.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.models import Model

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
)

_RECURRENT_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_CHANNEL_AXES = {"Conv": 0, "ConvTranspose": 1, "MatMul": -1, "Gemm": -1}


def describe() -> list[tuple[str, str]]:
    """Each feature's name and meaning, in the order of the vector."""
    texts = {f"flops_{kind}": f"share of FLOPs in {text}" for kind, text in KINDS.items()}
    texts |= {f"weights_{kind}": f"share of weights in {text}" for kind, text in KINDS.items()}
    texts |= {
        f"nodes_{group}": f"share of operators: {text}" for group, (text, _) in GROUPS.items()
    }
    texts |= dict(_SCALARS)
    return [(name, texts[name]) for name in FEATURE_NAMES]


def model_features(model: Model) -> tuple[float, ...]:
    """The feature vector of a prepared model, in the order of `FEATURE_NAMES`.

    Every value is finite; shares are in [0, 1], logarithms about -4 to 10.
    """
    import onnx

    return graph_features(onnx.load(str(model.path)))


def graph_features(proto: onnx.ModelProto) -> tuple[float, ...]:
    """The feature vector of a graph with inferred shapes."""
    from onnx import shape_inference

    graph = shape_inference.infer_shapes(proto, data_prop=True).graph
    facts = count(graph)
    values = {**_shares(facts), **_sizes(graph, facts), **_weights(facts)}
    return tuple(float(values[name]) for name in FEATURE_NAMES)


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
    weights: list[tuple[NDArray[np.float64], int, float]] = field(default_factory=list)
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
        if any(name and name not in facts.shapes for name in node.output[:1]):
            facts.unknown += 1
            continue
        work = _work(node, facts.shapes, constant)
        facts.work.append(work)
        array = next((arrays[n] for n in node.input[1:2] if n in arrays), None)
        if work.kind and array is not None and array.ndim >= 2 and array.dtype.kind == "f":
            axis = _channel_axis(node)
            if axis is not None:
                facts.weights.append((array.astype(np.float64), axis, work.flops))
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


def _work(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]], constant: set[str]) -> Work:
    out = float(math.prod(shapes[node.output[0]]))
    sources = [shapes.get(name) for name in node.input]
    if node.op_type in ("Conv", "ConvTranspose", "ConvInteger") and sources[1]:
        return _convolution(node, out, sources[0] or (), sources[1])
    if node.op_type in ("MatMul", "Gemm", "MatMulInteger") and sources[0] and sources[1]:
        left = sources[0]
        reduction = left[0] if _attribute(node, "transA", 0) else left[-1]
        fixed = node.input[1] in constant
        weights = float(math.prod(sources[1])) if fixed else 0.0
        columns = shapes[node.output[0]][-1] if shapes[node.output[0]] else 1
        return Work(
            "matmul_weight" if fixed else "matmul_dynamic",
            2 * out * reduction,
            weights,
            rows=out / max(columns, 1),
            reduction=reduction,
        )
    if node.op_type in _RECURRENT_GATES and sources[0] and len(sources) > 2 and sources[2]:
        return _recurrent(node, sources)
    if node.op_type in ("Gather", "GatherElements") and node.input[0] in constant and sources[0]:
        table = float(math.prod(sources[0]))
        return Work("embedding" if len(sources[0]) > 1 else "", out, table if table > 64 else 0.0)
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
        rows=out / kernel[0],
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
        scale = float(np.abs(array).max())
        norm = float(np.linalg.norm(array))
        if scale == 0.0 or not math.isfinite(norm):
            continue
        other = tuple(i for i in range(array.ndim) if i != axis % array.ndim)
        scales = np.abs(array).max(axis=other, keepdims=True)
        scales = np.where(scales == 0, 1.0, scales)
        tensor.append(_rounding_error(array, np.asarray(scale)) / norm)
        channel.append(_rounding_error(array, scales) / norm)
        centred = array - array.mean()
        variance = float((centred**2).mean())
        tails.append(float((centred**4).mean()) / variance**2 if variance > 0 else 1.0)
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


def _small_log(value: float) -> float:
    return math.log10(max(value, 1e-4))
