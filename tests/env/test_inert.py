"""What cannot matter to a model leaves the catalog, and only that."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from routepilot.env.backends import load_backend
from routepilot.env.backends.base import Narrows
from routepilot.env.backends.tensorrt_catalog import make_catalog, shipped_routes_json
from routepilot.env.backends.tensorrt_compiler import Compiler, Plan, Settings, find_module
from routepilot.env.inert import narrow
from routepilot.env.liveness import Liveness, live, recalled
from routepilot.env.models import Model
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Knob, Requirement

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="the extra rtx is not installed"
)

CATALOG = make_catalog("tensorrt", "11.1.0.106", shipped_routes_json())


def swept(identical: tuple[str, ...], failed: dict[str, str]) -> Liveness:
    changes = (*identical, *failed)
    return Liveness(changes, (), identical, failed, (), 1, 0.0, "RTX 1", "8.9")


def test_operators_take_knobs_out(tiny: Model) -> None:
    found = narrow(CATALOG, tiny, None)
    assert "-mha_fusion:v2" in found.dropped  # a convolution network has no attention
    assert "-mha_fusion:v2" not in found.catalog
    assert "-kgen:tiling" in found.catalog
    assert "-precision" in found.catalog
    assert found.masked == {}
    # Routes of what is left are routes of the whole.
    for route in found.catalog.neighbours(DEFAULT_ROUTE):
        assert CATALOG.is_legal(CATALOG.route(route.values))


def test_knobs_of_variants_stay(tiny: Model) -> None:
    """int8 adds Q/DQ to any model, so quantization may matter."""
    assert "-quantize_ppg" in narrow(CATALOG, tiny, None).catalog


def test_what_is_proved_is_masked_and_no_more(tiny: Model) -> None:
    sweep = swept(("-slice_fusion=off",), {"-kgen:tiling=1": "CHECK failed"})
    catalog = narrow(CATALOG, tiny, sweep).catalog
    assert "byte-identical" in (catalog.objection(catalog.parse("-slice_fusion=off")) or "")
    # Beside another change it may act.
    assert catalog.is_legal(catalog.parse("-slice_fusion=off -kgen:tiling=0"))
    assert catalog.is_legal(catalog.parse("-slice_fusion=off -tf32=off"))
    assert catalog.is_legal(catalog.parse("-precision=fp16 -slice_fusion=off"))
    # What breaks the compiler is left out beside others too, at the model's precision.
    assert "CHECK failed" in (catalog.objection(catalog.parse("-kgen:tiling=1")) or "")
    assert not catalog.is_legal(catalog.parse("-kgen:tiling=1 -slice_elim=off"))
    assert catalog.is_legal(catalog.parse("-precision=fp16 -kgen:tiling=1"))
    assert catalog.is_legal(catalog.parse("-kgen:tiling=0"))
    assert hash(catalog) != hash(CATALOG)  # the knobs differ; what is settled has no hash


def test_a_siblings_sweep_is_a_hint_and_masks_nothing(tiny: Model) -> None:
    hint = Liveness(
        ("-kgen:tiling=0", "-slice_fusion=off", "-mha_fusion:v2=off"),
        ("-kgen:tiling=0", "-mha_fusion:v2=off"),
        ("-slice_fusion=off",),
        *({}, (), 2, 0.0, "RTX 1", "8.9"),
    )
    found = narrow(CATALOG, tiny, None, hint)
    assert found.masked == {}
    assert found.live == {"-kgen:tiling"}  # what the operators rule out is no hint


def test_engines_of_several_outputs_prove_no_equality(tiny: Model) -> None:
    sweep = swept(("-slice_fusion=off",), {"-kgen:tiling=1": "CHECK failed"})
    twice = replace(tiny, outputs=(*tiny.outputs, *tiny.outputs))
    assert set(narrow(CATALOG, twice, sweep).masked) == {"-kgen:tiling=1"}


def test_a_knob_that_needs_one_that_went_goes_too(tiny: Model) -> None:
    """A child whose parent cannot be switched on any more means nothing."""
    words = ("on", "off")
    attention = Knob("-mha_fusion:extra", words, "off", "Attention.")
    child, free = Knob("-kgen:child", words, "off", "C."), Knob("-kgen:free", words, "off", "F.")
    rules = (
        Requirement(child.name, None, attention.name, ("on",), "a part of it"),
        Requirement(free.name, None, attention.name, ("off",), "excludes it"),
    )
    found = narrow(Catalog("tensorrt", "1", (attention, child, free), rules), tiny, None)
    assert [knob.name for knob in found.catalog.knobs] == ["-kgen:free"]
    assert found.catalog.requirements == ()


@needs_rtx
def test_a_sweep_is_recalled_and_counts_for_its_own_compiler_alone(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend = load_backend("tensorrt_rtx", {"capability": "8.9"})
    assert isinstance(backend, Narrows)
    assert recalled(tiny) is None
    assert backend.narrowed(tiny).masked == {}
    found = live(tiny, knobs=["-kgen:tiling"], jobs=1)
    again = recalled(tiny)
    assert again is not None
    assert (again.live, again.identical) == (found.live, found.identical)
    assert set(backend.narrowed(tiny).masked) == {"-kgen:tiling=1"}
    other = load_backend("tensorrt_rtx", {"capability": "8.6"})
    assert isinstance(other, Narrows)
    assert other.narrowed(tiny).masked == {}
    # The sweep was made without limits: with one its engines may be others.
    limited = load_backend("tensorrt_rtx", {"capability": "8.9", "workspace_mib": "64"})
    assert isinstance(limited, Narrows)
    hinted = limited.narrowed(tiny)
    assert hinted.masked == {} and hinted.live == {"-kgen:tiling"}
    # Nor does it count where another version is loaded than the one that is installed.
    monkeypatch.setattr(limited._trt, "__version__", "1.8.0.1")  # type: ignore[attr-defined]
    assert limited.narrowed(tiny).swept is None
    assert backend.narrowed(tiny).masked == {}


@needs_rtx
def test_equal_alone_is_not_equal_in_company(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why a byte-identical change is masked alone: beside another this one acts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    inert, other = "-kgen:red_epilog_fusion:lvl=0", "-kgen:fuse_copy=off"
    found = live(tiny, knobs=[inert.partition("=")[0], other.partition("=")[0]], jobs=1)
    assert inert in found.identical and other in found.live
    compiler = Compiler(find_module("tensorrt_rtx"), Settings(compute_capability="8.9"))
    network = compiler.parse(tiny.path, {})
    alone, both = (compiler.compile(network, flags=f) for f in (other, f"{inert} {other}"))
    assert isinstance(alone, Plan) and isinstance(both, Plan) and alone.hash != both.hash
    backend = load_backend("tensorrt_rtx", {})
    assert isinstance(backend, Narrows)
    catalog = backend.narrowed(tiny).catalog
    assert not catalog.is_legal(catalog.parse(inert))
    assert catalog.is_legal(catalog.parse(f"{inert} {other}"))
