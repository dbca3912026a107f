"""The TensorRT catalog: knobs of the Global Performance Tuner, builder levers, what is left out.

Owns how the JSON of `IBuilderConfig.all_build_routes` becomes a catalog: values, marks, masks, and
which knobs are kept out because they can break the mathematics. Never imports TensorRT.

The list shipped as `env/tensorrt_knobs.json` serves TensorRT-RTX and the `__LUNOWUD` channel, and
reading old tuning caches. A catalog for the `build_route` channel always comes from the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib import resources

from routepilot.env.errors import InputError
from routepilot.env.routes import UNBOUNDED_FORMS, Catalog, Knob, Requirement

#: Knobs whose other values can change the mathematics or drop a safety check. Sorted out from
#: their names and help texts; none of it was found by measuring.
UNSAFE: dict[str, str] = {
    "-mha_fusion:v2:causal_mask": "asserts a causal mask",
    "-mha_fusion:v2:skip_causal": "asserts a causal mask",
    "-mha_fusion:v2:allow_imprecise_pred_identify": "matches mask predicates imprecisely",
    "-mha_fusion:v2:war": "drops or forces a workaround for wrong kernels",
    "-slice_elim_copy:ignore_io_check": "skips the check of slices that touch inputs or outputs",
    "-formats:assume_0_padded_for_first_conv": "assumes zeros in the padding of an input",
    "-formats:ignore_norm_for_padded_tens": "leaves padding of tensors undefined",
    "-custom_layer_transform:noop": "is a testing aid of the compiler",
    "-kgen:lower_gelu": "is needed for the compiler to function",
    "-kgen:lower_gelu_erf": "is needed for the compiler to function",
    "-kgen:rewrite_operations_with_large_ios": "is needed by operators with many inputs",
}

#: Knobs that change precision; a route with one of them lives by the accuracy gate.
PRECISION = frozenset(
    """
    -cask:fp16_acc -cask_fusion:fp16_acc -mha_fusion:fp32_acc -mha_fusion:emulate_fp32_acc
    -mha_fusion:v2:bmm1_acc -mha_fusion:v2:bmm2_acc -mha_fusion:v2:ws:mixed_acc
    -mha_fusion:fp8_fmha_fp16_acc -mha_fusion:gemv_pw_chain_fp32 -s2hgemm -promote_gelu
    -rewrite_fp_div -rewrite_fp_div_for_constant -kgen:sigmoid_approx -quantize_lowering:use_reshape
    -quantize_lowering:lower_dynq -quantize_ppg -quantize_ppg:reduce -quantize_ppg_conv
    -quantize_ppg_pool -quantize_ppg:fc_fusion -mha_fusion:v2:allow_imprecise_skipping
    """.split()
)

#: Parts of a name by which a knob that is not in the shipped list changes precision all the same:
#: every tuner version brings new ones.
PRECISION_PARTS = ("_acc", "fp32", "approx", "imprecise", "precision", "rewrite_fp", "quantize_")

#: The same for knobs that can break the mathematics, each with how.
UNSAFE_PARTS = {
    "causal": "asserts a causal mask",
    "ignore_": "drops a check, by its name",
    "assume_": "assumes something of the data, by its name",
    "imprecise_pred": "matches mask predicates imprecisely",
}

#: Prefix of a knob name -> what the knob is about. The first that fits counts.
AREAS: tuple[tuple[str, str], ...] = (
    ("-mha_fusion", "attention"),
    ("-match_ragged_mha", "attention"),
    ("-peep:match_gemv_mha", "attention"),
    ("-kgen:", "kernel_generator"),
    ("-cask", "tactics"),
    ("-tactic:", "tactics"),
    ("-formats:", "layout"),
    ("-force_conv", "layout"),
    ("-group_norm", "normalization"),
    ("-inst_norm", "normalization"),
    ("-quantize", "quantization"),
    ("-peep:", "fusion"),
    ("-", "rewriting"),
)

#: Values to try for knobs that take any integer, from their help texts.
TRIES: dict[str, tuple[str, ...]] = {
    "-peep:max": ("1", "2"),
    "-kgen:red_epilog_fusion:lvl": ("0", "1", "2"),
    "-cask_fusion:num_tactics": ("5", "20", "60"),
    "-kgen:reduction_algo": ("0", "1", "2", "4"),
    "-kgen:topk_algo": ("0", "16", "32", "64"),
    "-mha_fusion:v2:bmm1_acc": ("0", "1", "2"),
    "-mha_fusion:v2:bmm2_acc": ("0", "1", "2"),
    "-mha_fusion:v2:compute_groups": ("0", "1", "2"),
    "-mha_fusion:v2:mutex": ("0", "1", "2"),
    "-mha_fusion:v2:war": ("0", "1", "2"),
    "-mha_fusion:v2:noloop_step": ("0", "16", "32"),
    "-mha_fusion:v2:kv_loop_step": ("0", "64", "128"),
    "-mha_fusion:v2:q_loop_step": ("0", "64", "128"),
    "-mha_fusion:v2:ws:grid_strategy": ("0", "1", "2", "3"),
}

#: Combinations by meaning: knob, value, parent, parent's values, why.
PAIRS: tuple[tuple[str, str, str, tuple[str, ...], str], ...] = (
    ("-force_conv_nhwc", "on", "-force_conv_nchw", ("off",), "only one layout can be forced"),
    ("-mha_fusion:v2:force_ws", "on", "-mha_fusion:v2:ws", ("on",), "forces what is off"),
    (
        "-mha_fusion:v2:force_flash_tiled",
        "on",
        "-mha_fusion:v2:flash_tiled",
        ("on",),
        "forces what is off",
    ),
    ("-force_lower_grouped_deconv", "on", "-lower_grouped_deconv", ("on",), "forces what is off"),
)

#: Builder levers that act in TensorRT 11; `tensorrt_compiler.LEVERS` says how each is set.
LEVER_KNOBS: tuple[Knob, ...] = (
    Knob(
        "-builder_optimization_level",
        ("0", "1", "2", "3", "4", "5"),
        "3",
        "How long the builder searches: 0 takes the first tactic that works, 5 compares most.",
        ("lever",),
    ),
    Knob(
        "-tiling_optimization_level",
        ("none", "fast", "moderate", "full"),
        "none",
        "How hard the builder tries to tile layers through the L2 cache.",
        ("lever",),
    ),
    Knob(
        "-max_num_tactics",
        ("auto", "8", "32", "128"),
        "auto",
        "How many tactics are timed for a layer.",
        ("lever",),
    ),
    Knob(
        "-max_aux_streams",
        ("auto", "0", "1", "3"),
        "auto",
        "How many auxiliary streams an engine may use.",
        ("lever",),
    ),
    Knob("-tf32", ("on", "off"), "on", "TF32 for float32 products.", ("lever", "precision")),
    Knob(
        "-sparse_weights",
        ("off", "on"),
        "off",
        "Kernels for 2:4 sparse weights may be chosen.",
        ("lever", "precision"),
    ),
)

#: Levers that change an engine of TensorRT-RTX; the others were seen to leave it byte-identical.
RTX_LEVERS = ("-tf32",)

#: The ONNX file in other precisions; `tensorrt_precision` makes them.
PRECISION_KNOB = Knob(
    "-precision",
    ("model", "fp16", "bf16", "int8"),
    "model",
    "Precision of the ONNX file: as given, float16 or bfloat16 body, or explicit int8 Q/DQ.",
    ("precision", "variant"),
)


def read_build_routes(text: str) -> tuple[str, tuple[Knob, ...]]:
    """Tuner version and knobs from the JSON text of `all_build_routes`.

    Raises:
        InputError: The text is blank (Windows, TensorRT-RTX) or not of the published shape.
    """
    if not text.strip():
        raise InputError(
            "this TensorRT lists no build routes (TensorRT-RTX and Windows builds have no Global"
            " Performance Tuner); use TensorRT >= 11.1 on Linux, or the option channel=lunowud"
        )
    try:
        data = json.loads(text)
        version = str(data["tuner_version"])
        knobs = tuple(_read_knob(option) for option in data["tuner_options"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"all_build_routes is not of the known shape ({type(error).__name__}: {error}); report"
            " it together with `routepilot doctor --backend tensorrt --json`"
        ) from None
    return version, knobs


def _read_knob(option: dict[str, str]) -> Knob:
    name, allowed = option["option"], option["allowed_values"]
    _, opened, rest = allowed.partition("[")
    listed = tuple(v.strip() for v in rest.partition("]")[0].split("|")) if opened else ()
    bounded = bool(opened) and "..." not in listed
    values = tuple(v for v in listed if v and v != "..." and v not in UNBOUNDED_FORMS)
    if not bounded:
        values = TRIES.get(name, values)
    return Knob(name, values, option["default_value"], option.get("help", ""), (), bounded)


@cache
def shipped_routes_json() -> str:
    """The shipped list of the 209 knobs of TensorRT 11.1.0.106, as that version prints it."""
    place = resources.files("routepilot.env") / "tensorrt_knobs.json"
    return place.read_text(encoding="utf-8")


@cache
def _shipped_names() -> frozenset[str]:
    return frozenset(
        option["option"] for option in json.loads(shipped_routes_json())["tuner_options"]
    )


def _danger(name: str) -> str:
    """How a knob can break the mathematics; empty for one that is not known to."""
    if name in UNSAFE or name in _shipped_names():
        return UNSAFE.get(name, "")
    return next((why for part, why in UNSAFE_PARTS.items() if part in name), "")


def unsafe_knobs(routes_json: str) -> dict[str, str]:
    """The knobs of a list that stay out of the default catalog, each with the reason.

    Raises:
        InputError: As `read_build_routes`.
    """
    routes = read_build_routes(routes_json)[1] if routes_json.strip() else ()
    return {knob.name: why for knob in routes if (why := _danger(knob.name))}


def marked(knob: Knob) -> Knob:
    """The knob with its help as a sentence and marks that say what to watch.

    Knobs of the shipped list were sorted one by one; others go by their names, and are `new`.
    """
    area = next(area for prefix, area in AREAS if knob.name.startswith(prefix))
    marks: tuple[str, ...] = (area,)
    new = knob.name not in _shipped_names()
    by_name = new and any(part in knob.name for part in PRECISION_PARTS)
    marks += ("precision",) if knob.name in PRECISION or by_name else ()
    marks += ("unsafe",) if _danger(knob.name) else ()
    marks += ("new",) if new else ()
    text = knob.help.strip().rstrip(".")
    return replace(knob, help=f"{text[:1].upper()}{text[1:]}.", marks=marks)


def requirements(knobs: Iterable[Knob]) -> Iterator[Requirement]:
    """Masks: a child knob needs its parent on; pairs that exclude each other."""
    by_name = {knob.name: knob for knob in knobs}
    for name in by_name:
        parts = name.split(":")
        for length in range(len(parts) - 1, 0, -1):
            parent = by_name.get(":".join(parts[:length]))
            if parent is not None and set(parent.values) == {"on", "off"}:
                why = f"{name} is a part of {parent.name}"
                yield Requirement(name, None, parent.name, ("on",), why)
    for name, value, other, values, why in PAIRS:
        if name in by_name and other in by_name:
            yield Requirement(name, value, other, values, why)


def make_catalog(
    backend: str,
    compiler_version: str,
    routes_json: str,
    *,
    levers: Iterable[str] | None = None,
    unsafe: bool = False,
    fp8: bool = False,
) -> Catalog:
    """The catalog of one compiler.

    Args:
        backend: Backend name.
        compiler_version: TensorRT's version; with the tuner's it is the catalog's version.
        routes_json: `all_build_routes`; blank gives levers and precision only.
        levers: Names of the levers that act; None for all.
        unsafe: Take in the knobs that can break the mathematics too, marked as such.
        fp8: The precision knob has explicit float8 Q/DQ too.

    Raises:
        InputError: As `read_build_routes`.
    """
    tuner, routes = read_build_routes(routes_json) if routes_json.strip() else ("none", ())
    knobs = [k for k in map(marked, routes) if unsafe or "unsafe" not in k.marks]
    acting = [k for k in LEVER_KNOBS if levers is None or k.name in set(levers)]
    precision = replace(PRECISION_KNOB, values=(*PRECISION_KNOB.values, "fp8"))
    everything = (precision if fp8 else PRECISION_KNOB, *acting, *knobs)
    return Catalog(
        backend, f"{compiler_version} tuner {tuner}", everything, tuple(requirements(everything))
    )


def is_build_route_knob(name: str) -> bool:
    """True for a knob of the compiler's own; False for levers and the precision variant."""
    return name != PRECISION_KNOB.name and all(name != k.name for k in LEVER_KNOBS)
