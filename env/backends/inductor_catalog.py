"""The knobs of torch.compile (Inductor), read from the installed PyTorch.

Owns which of Inductor's settings are knobs, their values and sentences, and how a route becomes a
configuration. A knob is named as the library names the setting (`-triton.persistent_reductions` is
`torch._inductor.config.triton.persistent_reductions`); its default is whatever the installed
version has, and a setting that the version lacks is left out. Compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from routepilot.env.routes import Catalog, Knob, Requirement

#: Devices that Inductor compiles for here.
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Setting:
    """A setting of Inductor that may be a knob.

    Attributes:
        path: Where it is, below `torch._inductor.config`.
        values: Values to try, as the library takes them.
        help: One sentence.
        marks: As `Knob.marks`.
        devices: Devices on which it acts.
    """

    path: str
    values: tuple[Any, ...]
    help: str
    marks: tuple[str, ...]
    devices: tuple[str, ...] = DEVICES

    @property
    def knob(self) -> str:
        """Name of the knob."""
        return f"-{self.path}"


_SWITCH = (False, True)
_CUDA, _CPU = ("cuda",), ("cpu",)

#: Every setting that changes code, in the order of the catalog.
SETTINGS: tuple[Setting, ...] = (
    # Graph and layout.
    Setting(
        "freezing", _SWITCH, "Treat weights as constants and fold what they allow.",
        ("graph",),
    ),
    Setting(
        "layout_optimization", _SWITCH,
        "Choose channels-last for convolutions where a rule of the compiler says so.", ("layout",),
    ),
    Setting("pattern_matcher", _SWITCH, "Rewrite known patterns of operators.", ("graph",)),
    Setting(
        "conv_1x1_as_mm", _SWITCH, "Compute 1x1 convolutions as matrix products.",
        ("algorithm", "layout"),
    ),
    Setting(
        "shape_padding", _SWITCH, "Pad matrix products to sizes that run better.",
        ("layout",), _CUDA,
    ),
    Setting(
        "comprehensive_padding", _SWITCH, "Pad the strides of large intermediate tensors.",
        ("layout",), _CUDA,
    ),
    Setting(
        "permute_fusion", _SWITCH, "Fuse permutations into the matrix products that read them.",
        ("fusion",), _CUDA,
    ),
    Setting(
        "decompose_mem_bound_mm", _SWITCH,
        "Compute matrix products that memory bounds by elementwise code.", ("algorithm",),
    ),
    Setting("split_cat_fx_passes", _SWITCH, "Simplify splits and concatenations.", ("graph",)),
    # Fusion and scheduling.
    Setting("epilogue_fusion", _SWITCH, "Fuse what follows into templates.", ("fusion",)),
    Setting("prologue_fusion", _SWITCH, "Fuse what precedes into templates.", ("fusion",), _CUDA),
    Setting("max_fusion_size", (8, 64, 256), "Most nodes of one fused kernel.", ("fusion",)),
    Setting(
        "aggressive_fusion", _SWITCH, "Fuse even where no memory traffic is saved.",
        ("fusion",),
    ),
    Setting(
        "benchmark_fusion", _SWITCH, "Time fused against separate kernels at build.",
        ("fusion", "search"), _CUDA,
    ),
    Setting(
        "loop_ordering_after_fusion", _SWITCH, "Reorder loops where that lets kernels fuse.",
        ("fusion",),
    ),
    Setting("pick_loop_orders", _SWITCH, "Order the loops of each kernel by strides.", ("tiling",)),
    Setting(
        "realize_reads_threshold", (2, 4, 16),
        "Reads from which an intermediate result is kept in memory.", ("fusion",),
    ),
    Setting(
        "realize_opcount_threshold", (10, 30, 120),
        "Operations from which an intermediate result is kept in memory.", ("fusion",), _CUDA,
    ),
    Setting(
        "realize_cpu_opcount_threshold", (20, 50, 200),
        "Operations from which an intermediate result is kept in memory, on a CPU.",
        ("fusion",), _CPU,
    ),
    Setting(
        "max_pointwise_cat_inputs", (0, 8, 16),
        "Most inputs of a concatenation that becomes elementwise code.", ("fusion",),
    ),
    Setting(
        "unroll_reductions_threshold", (1, 8, 32), "Reductions up to this length are unrolled.",
        ("reduction",),
    ),
    Setting(
        "reorder_for_locality", _SWITCH, "Move operators next to what they read.", ("schedule",)
    ),
    Setting(
        "reorder_for_peak_memory", _SWITCH, "Order kernels for the least memory.", ("schedule",)
    ),
    Setting("combo_kernels", _SWITCH, "Launch independent kernels as one.", ("fusion",), _CUDA),
    # Reductions and tiles.
    Setting("split_reductions", _SWITCH, "Split long reductions in two steps.", ("reduction",)),
    Setting(
        "triton.persistent_reductions", _SWITCH, "Keep short reductions in registers.",
        ("reduction",), _CUDA,
    ),
    Setting(
        "triton.cooperative_reductions", _SWITCH, "Let blocks share one long reduction.",
        ("reduction",), _CUDA,
    ),
    Setting(
        "triton.mix_order_reduction", _SWITCH, "Fuse reductions over different axes.",
        ("reduction",), _CUDA,
    ),
    Setting(
        "triton.multi_kernel", (0, 1), "Make two versions of a reduction and keep the faster.",
        ("reduction", "search"), _CUDA,
    ),
    Setting(
        "triton.max_tiles", (None, 1, 2, 3), "Most axes of the tiles of an elementwise kernel.",
        ("tiling",), _CUDA,
    ),
    Setting("triton.prefer_nd_tiling", _SWITCH, "Prefer tiles of more axes.", ("tiling",), _CUDA),
    Setting("triton.tile_reductions", _SWITCH, "Tile reductions too.", ("tiling",), _CUDA),
    Setting(
        "triton.coalesce_tiling_analysis", _SWITCH, "Choose tiles by how reads coalesce.",
        ("tiling",), _CUDA,
    ),
    Setting(
        "triton.tiling_prevents_pointwise_fusion", _SWITCH,
        "Leave elementwise kernels of different tiles apart.", ("tiling", "fusion"), _CUDA,
    ),
    Setting(
        "triton.tiling_prevents_reduction_fusion", _SWITCH,
        "Leave reductions of different tiles apart.", ("tiling", "fusion"), _CUDA,
    ),
    Setting(
        "triton.use_block_ptr", _SWITCH, "Address memory by block pointers.",
        ("tiling",), _CUDA,
    ),
    Setting(
        "use_fast_math", _SWITCH, "Let kernels use fast, less exact functions.",
        ("math",), _CUDA,
    ),
    # Search at build.
    Setting(
        "coordinate_descent_tuning", _SWITCH, "Search each kernel's configuration coordinate-wise.",
        ("search",), _CUDA,
    ),
    Setting(
        "coordinate_descent_check_all_directions", _SWITCH,
        "Also step several coordinates at once.",
        ("search",), _CUDA,
    ),
    Setting(
        "max_autotune_pointwise", _SWITCH, "Time more configurations of elementwise kernels.",
        ("search",), _CUDA,
    ),
    Setting(
        "max_autotune_gemm", _SWITCH, "Time templates against the library's matrix products.",
        ("search", "algorithm"),
    ),
    Setting(
        "max_autotune_gemm_backends", ("TRITON",), "Where matrix products may come from.",
        ("search", "algorithm"), _CUDA,
    ),
    Setting(
        "max_autotune_conv_backends", ("ATEN", "ATEN,TRITON"),
        "Where convolutions may come from when convolutions are autotuned.",
        ("search", "algorithm"), _CUDA,
    ),
    Setting(
        "max_autotune", _SWITCH, "Autotune matrix products, convolutions and elementwise kernels.",
        ("search", "algorithm"), _CUDA,
    ),
    # The C++ code generator.
    Setting(
        "cpp.simdlen", (None, 0, 256, 512), "Vector width in bits; 0 is scalar code.",
        ("vector",), _CPU,
    ),
    Setting("cpp.weight_prepack", _SWITCH, "Lay weights out for oneDNN.", ("layout",), _CPU),
    Setting(
        "cpp.max_horizontal_fusion_size", (1, 16, 64), "Most loops fused side by side.",
        ("fusion",), _CPU,
    ),
    Setting(
        "cpp.min_chunk_size", (64, 512, 4096), "Fewest elements of a thread.",
        ("threads",), _CPU,
    ),
    Setting("cpp.dynamic_threads", _SWITCH, "Ask for the threads at run time.", ("threads",), _CPU),
    Setting(
        "cpp.no_redundant_loops", _SWITCH, "Leave out loops over one element.",
        ("tiling",), _CPU,
    ),
    Setting(
        "cpp.enable_tiling_heuristics", _SWITCH, "Vectorise only where a rule says it pays.",
        ("vector", "tiling"), _CPU,
    ),
    Setting("cpp.enable_loop_tail_vec", _SWITCH, "Vectorise the ends of loops.", ("vector",), _CPU),
    Setting(
        "cpp.enable_concat_linear", _SWITCH, "Join linear layers that share their input.",
        ("fusion",), _CPU,
    ),
    Setting(
        "cpp.enable_grouped_gemm_template", _SWITCH,
        "Compute matrix products of one input by one template.", ("fusion", "algorithm"), _CPU,
    ),
    Setting(
        "cpp.gemm_max_k_slices", (1, 4), "Most slices of the inner axis of a matrix product.",
        ("algorithm", "threads"), _CPU,
    ),
    Setting(
        "cpp.enable_unsafe_math_opt_flag", _SWITCH, "Compile with -funsafe-math-optimizations.",
        ("math",), _CPU,
    ),
    Setting(
        "cpp.enable_floating_point_contract_flag", ("off", "fast"),
        "Value of the compiler flag -ffp-contract.", ("math",), _CPU,
    ),
    Setting(
        "cpp.use_decompose_tanh", _SWITCH, "Compute tanh by exponentials.", ("math",), _CPU
    ),
    Setting(
        "cpp.force_inline_kernel", _SWITCH, "Inline every kernel into its caller.", ("vector",),
        _CPU,
    ),
)  # fmt: skip

#: What a knob's value needs beside it; rules whose knobs are absent are left out.
RULES: tuple[Requirement, ...] = (
    Requirement(
        "-coordinate_descent_check_all_directions", "on", "-coordinate_descent_tuning", ("on",),
        "there is no descent otherwise",
    ),
    Requirement(
        "-max_autotune_gemm_backends", None, "-max_autotune_gemm", ("on",),
        "matrix products are not autotuned otherwise",
    ),
    Requirement(
        "-max_autotune_conv_backends", None, "-max_autotune", ("on",),
        "convolutions are not autotuned otherwise",
    ),
    Requirement(
        "-cpp.enable_concat_linear", "on", "-freezing", ("on",),
        "weights are no constants otherwise",
    ),
    Requirement(
        "-cpp.weight_prepack", "off", "-freezing", ("on",), "weights are not packed otherwise"
    ),
    Requirement(
        "-cpp.enable_grouped_gemm_template", "on", "-max_autotune_gemm", ("on",),
        "templates are not tried otherwise",
    ),
    Requirement(
        "-cpp.gemm_max_k_slices", None, "-max_autotune_gemm", ("on",),
        "templates are not tried otherwise",
    ),
)  # fmt: skip

PRECISION, CHANNELS_LAST = "-precision", "-channels_last"
CUDNN_BENCHMARK, BLAS = "-cudnn.benchmark", "-blas"

#: Most configurations of a matrix product that are timed when the search is bounded. The full
#: list has more than twice as many and a build then takes minutes.
BOUNDED_CONFIGS = 8


def surroundings(device: str) -> tuple[Knob, ...]:
    """Knobs that are no settings of Inductor: they change the program or the libraries it calls."""
    lay = Knob(
        CHANNELS_LAST,
        ("off", "on"),
        "off",
        "Hold images and convolution weights with the channels last.",
        ("layout",),
    )
    if device == "cpu":
        words = "Type that weights and activations are computed in."
        return (Knob(PRECISION, ("highest", "bf16", "fp16"), "highest", words, ("precision",)), lay)
    words = "Type that is computed in; tf32 rounds the factors of float32 products."
    values = ("highest", "tf32", "fp16", "bf16")
    return (
        Knob(PRECISION, values, "tf32", words, ("precision",)),
        lay,
        Knob(
            CUDNN_BENCHMARK,
            ("off", "on"),
            "off",
            "Time cuDNN's convolution algorithms when the engine first runs.",
            ("algorithm", "search"),
        ),
        Knob(
            BLAS,
            ("default", "cublas", "cublaslt"),
            "default",
            "Library of the matrix products that Inductor does not write itself.",
            ("algorithm",),
        ),
    )


def word(value: Any) -> str:
    """A setting's value as the word that stands in a route."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def installed_value(config: Any, path: str) -> tuple[bool, Any]:
    """Whether a configuration has a setting, and its value."""
    try:
        return True, reduce(getattr, path.split("."), config)
    except AttributeError:
        return False, None


def make_catalog(config: Any, version: str, device: str, only: tuple[str, ...] = ()) -> Catalog:
    """The catalog of an installed Inductor.

    Args:
        config: `torch._inductor.config`, or something with the same attributes.
        version: Version of torch.
        device: `cpu` or `cuda`.
        only: Names of the knobs to keep; all when empty.
    """
    knobs = list(surroundings(device))
    for setting in SETTINGS:
        there, default = installed_value(config, setting.path)
        if not there or device not in setting.devices:
            continue
        values = tuple(dict.fromkeys(word(v) for v in (default, *setting.values)))
        knobs.append(Knob(setting.knob, values, word(default), setting.help, setting.marks))
    kept = [knob for knob in knobs if not only or knob.name in only]
    names = {knob.name for knob in kept}
    rules = tuple(rule for rule in RULES if {rule.knob, rule.parent} <= names)
    return Catalog("inductor", f"{version}-{device}", tuple(kept), rules)


def configuration(config: Any, settings: Mapping[str, str]) -> dict[str, Any]:
    """Inductor's settings for a route, as `inductor_configs` takes them.

    Args:
        config: `torch._inductor.config`.
        settings: The route's settings; those that are not Inductor's are passed over.
    """
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        if setting.knob in settings:
            _, default = installed_value(config, setting.path)
            words = {word(value): value for value in (default, *setting.values)}
            found[setting.path] = words[settings[setting.knob]]
    return found
