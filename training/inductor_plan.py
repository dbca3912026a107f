"""Which Inductor routes a sweep measures on every model, most telling first.

Owns the list of routes. A route that the installed catalog does not have is left out, so the list
serves every version and device; what is missing to the wanted number is drawn at random.
"""

from __future__ import annotations

from pathlib import Path

from routepilot.env.errors import InputError, RouteError
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route
from routepilot.training.collect import plan_routes

#: Routes in the order of what they can tell: types and layouts, algorithms, then code generation;
#: pairs of what a type makes possible stand behind the single changes.
ROUTES: tuple[str, ...] = (
    "-precision=fp16",
    "-precision=bf16",
    "-freezing=on",
    "-channels_last=on",
    "-max_autotune_gemm=on",
    "-conv_1x1_as_mm=on",
    "-precision=fp16 -freezing=on",
    "-precision=fp16 -channels_last=on",
    "-precision=highest",
    "-coordinate_descent_tuning=on",
    "-max_autotune_pointwise=on",
    "-cudnn.benchmark=on",
    "-precision=fp16 -max_autotune_gemm=on",
    "-precision=fp16 -conv_1x1_as_mm=on",
    "-combo_kernels=on",
    "-precision=fp16 -freezing=on -channels_last=on",
    "-layout_optimization=off",
    "-blas=cublaslt",
    "-shape_padding=off",
    "-triton.persistent_reductions=off",
    "-precision=fp16 -coordinate_descent_tuning=on",
    "-precision=bf16 -freezing=on",
    "-freezing=on -conv_1x1_as_mm=on",
    "-triton.cooperative_reductions=on",
    "-split_reductions=off",
    "-pattern_matcher=off",
    "-triton.multi_kernel=1",
    "-precision=fp16 -cudnn.benchmark=on",
    "-max_autotune=on",
    "-precision=fp16 -max_autotune=on",
    "-benchmark_fusion=on",
    "-precision=fp16 -freezing=on -conv_1x1_as_mm=on -max_autotune_gemm=on",
    "-max_fusion_size=8",
    "-precision=fp16 -combo_kernels=on",
    "-epilogue_fusion=off",
    "-triton.prefer_nd_tiling=on",
    "-triton.max_tiles=1",
    "-aggressive_fusion=on",
    "-loop_ordering_after_fusion=off",
    "-loop_ordering_after_fusion=on",
    "-realize_reads_threshold=16",
    "-max_pointwise_cat_inputs=0",
    "-comprehensive_padding=off",
    "-precision=fp16 -freezing=on -channels_last=on -cudnn.benchmark=on",
    "-precision=fp16 -blas=cublaslt",
    "-unroll_reductions_threshold=1",
    "-use_fast_math=on",
    "-precision=fp16 -freezing=on -coordinate_descent_tuning=on -combo_kernels=on",
    "-decompose_mem_bound_mm=on",
    "-triton.mix_order_reduction=off",
    "-triton.use_block_ptr=on",
    "-max_autotune_gemm=on -max_autotune_gemm_backends=TRITON",
    "-cpp.simdlen=256",
    "-cpp.simdlen=0",
    "-freezing=on -cpp.weight_prepack=off",
    "-freezing=on -cpp.enable_concat_linear=on",
    "-cpp.force_inline_kernel=on",
    "-cpp.max_horizontal_fusion_size=1",
    "-cpp.enable_tiling_heuristics=off",
    "-cpp.enable_unsafe_math_opt_flag=on",
    "-cpp.enable_floating_point_contract_flag=fast",
    "-cpp.no_redundant_loops=off",
)


def planned(
    catalog: Catalog, count: int, seed: int = 0, texts: tuple[str, ...] = ()
) -> list[Route]:
    """The routes of a sweep, the default not among them.

    Args:
        catalog: The installed catalog.
        count: How many.
        seed: Seed of the random rest.
        texts: Routes to take in the place of `ROUTES`.
    """
    routes: dict[Route, None] = {}
    for text in texts or ROUTES:
        try:
            route = catalog.parse(text)
        except RouteError:
            continue
        if route != DEFAULT_ROUTE and catalog.is_legal(route):
            routes.setdefault(route)
    if len(routes) < count and not texts:
        # Singles come first there, then crosses with types and random combinations.
        for route in plan_routes(catalog, count + len(routes) + len(catalog.knobs) * 2, seed):
            if len(routes) < count:
                routes.setdefault(route)
    return list(routes)[:count]


def read_plan(path: Path) -> tuple[str, ...]:
    """Routes of a file, one a line.

    Raises:
        InputError: The file cannot be read or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"plan {str(path)!r} cannot be read: {error}") from None
    texts = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not texts:
        raise InputError(f"plan {str(path)!r} holds no route; write one a line")
    return texts
