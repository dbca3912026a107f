"""The knobs of ONNX Runtime's CUDA provider, and the session settings that a route means.

Owns names, values, which combinations mean something, and what decides that an option can act on a
graph at all. Knows no GPU and builds nothing.

Knobs of the provider carry the provider's own option names; defaults are those of ONNX Runtime
1.31 (`session.get_provider_options()` reads back what was taken).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from routepilot.env.backends.onnxruntime import LEVELS, SWITCHES
from routepilot.env.routes import Catalog, Knob, Requirement

#: Version of the catalog itself: raised when a knob or the meaning of a value changes.
CATALOG_VERSION = "1"

#: Values of `-precision`, each with its words.
PRECISIONS: dict[str, str] = {
    "model": "as the file has it",
    "fp16": "float16 where the ranges seen on the input sets allow it",
    "fp16_mixed": "the same, with normalisations, softmax and reductions kept in float32",
    "bf16": "bfloat16 in the operators whose CUDA kernels and ONNX schema take it",
}

#: Operators that `fp16_mixed` keeps in float32: sums and exponentials lose most in 16 bits.
WIDE_OPERATORS = (
    *("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"),
    *("Softmax", "LogSoftmax", "ReduceMean", "ReduceSum", "ReduceL2", "ReduceProd"),
    *("Exp", "Log", "Pow", "Sqrt", "Erf", "Softplus", "LpNormalization"),
)

#: Operators with a bfloat16 kernel in the CUDA provider of ONNX Runtime 1.31 (its own symbols).
#: Whether a model's opset allows the type is asked of the ONNX schema.
BF16_OPERATORS = frozenset(
    "Add Sub Mul Div Pow MatMul Gemm Conv Relu Sigmoid Tanh HardSigmoid HardSwish Softplus Softsign"
    " Erf Exp Neg Abs Sqrt Softmax LayerNormalization ReduceMean ReduceSum Where Gelu Max Min"
    " Cast Concat Expand Flatten Gather Identity Reshape Slice Split Squeeze Transpose Unsqueeze"
    " Shape".split()
)

#: Switches over groups of optimizers that act on this provider: sentence, and names turned off.
CUDA_SWITCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    name: SWITCHES[name]
    for name in (
        "-fuse:norm",
        "-fuse:gelu",
        "-fuse:activation",
        "-fuse:matmul",
        "-fuse:transpose",
        "-fold:constants",
    )
} | {
    "-fuse:batchnorm": (
        "Fold batch normalisations, scales and additions into convolutions and matrix products.",
        (
            "ConvBNFusion",
            "ConvMulFusion",
            "ConvAddFusion",
            "MatMul_BatchNormalization_Fusion",
            "GemmSumFusion",
        ),
    ),
    "-fuse:attention": (
        "Fuse the operators of an attention layer into one.",
        ("AttentionFusion", "GroupQueryAttentionFusion", "RotaryEmbeddingFusion"),
    ),
    "-fuse:softmax": ("Fuse an added bias into a softmax.", ("BiasSoftmaxFusion",)),
    "-fuse:cast": (
        "Remove and merge casts, and move them towards where they vanish.",
        ("CastElimination", "CastChainElimination", "PropagateCastOps"),
    ),
}

#: Options of the provider that are knobs: default, other values, sentence, mark, and the operators
#: that ask for it (a part of their names; any operator when empty).
PROVIDER: dict[str, tuple[str, tuple[str, ...], str, str, tuple[str, ...]]] = {
    "prefer_nhwc": (
        *("0", ("1",), "Lay convolutions out with channels last.", "layout"),
        ("NoOperatorAsks",),  # seen in the optimised graph
    ),
    "use_tf32": (
        *("1", ("0",), "Round float32 products to 10 bits of fraction on tensor cores."),
        *("precision_mode", ("Conv", "MatMul", "Gemm", "Attention", "LSTM", "GRU", "RNN")),
    ),
    "cudnn_conv_algo_search": (
        *("EXHAUSTIVE", ("HEURISTIC", "DEFAULT"), "How cuDNN picks a convolution's algorithm."),
        *("search", ("Conv",)),
    ),
    "cudnn_conv_use_max_workspace": (
        *("1", ("0",), "Let convolutions take as much workspace as they ask for."),
        *("memory", ("Conv",)),
    ),
    "cudnn_conv1d_pad_to_nc1d": (
        *("0", ("1",), "Pad one-dimensional convolutions as N, C, 1, D instead of N, C, D, 1."),
        *("layout", ("Conv",)),
    ),
    "fuse_conv_bias": (
        *("0", ("1",), "Compile a convolution with its bias and activation through cuDNN."),
        *("fusion", ("Conv",)),
    ),
    "sdpa_kernel": (
        *("0", ("1", "2", "8", "16")),
        "Attention kernel (0: the library's choice, 1: flash, 2: memory-efficient, 8: cuDNN's,"
        " 16: plain products).",
        *("attention", ("Attention",)),
    ),
    "enable_skip_layer_norm_strict_mode": (
        *("0", ("1",), "Sum skip-layer-normalisations in float32."),
        *("precision_mode", ("SkipLayerNorm", "SkipSimplifiedLayerNorm")),
    ),
}

#: Session entries that are knobs: knob, its sentence.
ENTRIES: dict[str, tuple[str, str]] = {
    "-gelu:approximation": (
        "optimization.enable_gelu_approximation",
        "Replace GELU by its approximation with a hyperbolic tangent.",
    ),
    "-cast:chains": (
        "optimization.enable_cast_chain_elimination",
        "Remove chains of casts even where they round.",
    ),
}


@dataclass(frozen=True)
class CudaSettings:
    """What a session is made with.

    Attributes:
        level: Graph optimisation level, by its name in the library.
        disabled_optimizers: Optimizers switched off.
        entries: Session configuration entries.
        provider_options: Options of the provider that a route decides on, all of them.
    """

    level: str
    disabled_optimizers: tuple[str, ...]
    entries: Mapping[str, str]
    provider_options: Mapping[str, str]

    def acting(self, operators: Iterable[str]) -> dict[str, str]:
        """The provider options that operators of an optimised graph ask for.

        An option that no operator reads cannot change the engine, so it is left out of its hash.

        Args:
            operators: Operator types of the optimised graph.
        """
        present = set(operators)
        return {
            name: value
            for name, value in self.provider_options.items()
            if any(part in operator for part in PROVIDER[name][4] for operator in present)
        }


def make_catalog(name: str) -> Catalog:
    """The catalog of the backend."""
    words = "; ".join(f"{value}: {text}" for value, text in PRECISIONS.items())
    precision = Knob(
        "-precision",
        tuple(PRECISIONS),
        "model",
        f"Precision recipe applied to the model as part of the build ({words}).",
        ("precision",),
    )
    knobs = [precision]
    for option, (default, others, text, mark, _) in PROVIDER.items():
        # Crossing every one of these with the precision is what the tables are about.
        strong = ("precision",) if option == "prefer_nhwc" else ()
        knobs.append(Knob(f"-{option}", (default, *others), default, text, (mark, *strong)))
    knobs.append(
        Knob("-graph", tuple(LEVELS), "all", "How far the graph is optimised.", ("graph",))
    )
    knobs += [
        Knob(switch, ("on", "off"), "on", text, ("fusion",))
        for switch, (text, _) in CUDA_SWITCHES.items()
    ]
    knobs += [
        Knob(knob, ("off", "on"), "off", text, ("fusion",)) for knob, (_, text) in ENTRIES.items()
    ]
    knobs.append(
        Knob(
            "-transformer",
            ("off", "on"),
            "off",
            "Fuse attention, normalisation and GELU offline, before the build.",
            ("fusion", "transform"),
        )
    )
    some = ("all", "extended", "basic")
    rules = [Requirement(s, "off", "-graph", some, "nothing is optimised") for s in CUDA_SWITCHES]
    rules.append(
        Requirement(
            "-gelu:approximation", "on", "-graph", some[:2], "no GELU is fused at this level"
        )
    )
    halves = tuple(value for value in PRECISIONS if value != "model")
    rules.append(
        Requirement("-cast:chains", "on", "-precision", halves, "only a recipe brings casts")
    )
    return Catalog(name, CATALOG_VERSION, tuple(knobs), tuple(rules))


def settings_of(values: Mapping[str, str]) -> CudaSettings:
    """Session settings of a route.

    Args:
        values: Every knob's value, defaults included.
    """
    off = tuple(
        name
        for switch, (_, names) in CUDA_SWITCHES.items()
        if values[switch] == "off"
        for name in names
    )
    entries = {entry: "1" for knob, (entry, _) in ENTRIES.items() if values[knob] == "on"}
    options = {option: values[f"-{option}"] for option in PROVIDER}
    return CudaSettings(LEVELS[values["-graph"]], off, entries, options)
