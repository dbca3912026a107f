"""TensorRT's adapter on a fake of its properties: routes, versions, engines."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fake_tensorrt
import numpy as np
import pytest
from fake_tensorrt import FakeTensorRT
from onnx import load, save

from routepilot.env.backends import conformance as suite
from routepilot.env.backends import load_backend
from routepilot.env.backends import tensorrt_catalog as knobs
from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.tensorrt import TensorRtBackend
from routepilot.env.backends.tensorrt_compiler import (
    Compiler,
    Settings,
    find_module,
)
from routepilot.env.backends.tensorrt_engine import TensorRtEngine, open_plan
from routepilot.env.errors import InputError, MachineError, MissingExtraError, ModelError
from routepilot.env.models import Model
from routepilot.env.outcomes import Status
from routepilot.env.plans import read_plan


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    monkeypatch.delenv("__LUNOWUD", raising=False)
    return fake_tensorrt.install(monkeypatch)


def build(model: Model, route: str, workdir: Path, **options: str) -> TensorRtEngine | BuildFailure:
    backend = load_backend("tensorrt", options)
    built = backend.build(model, backend.catalog().parse(route), workdir)
    assert isinstance(built, TensorRtEngine | BuildFailure)
    return built


# --- the build_route channel, on the fake ---


def test_route_is_set_beside_levers(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    route = "-builder_optimization_level=5 -tiling_optimization_level=full -tf32=off"
    engine = build(tiny, f"{route} -kgen:tiling=0 -conv_lowering=off", tmp_path)
    assert isinstance(engine, TensorRtEngine)
    config = trt.built[-1]
    assert config.build_route == "-conv_lowering=off -kgen:tiling=0"  # catalog order
    assert vars(config)["builder_optimization_level"] == 5
    assert vars(config)["tiling_optimization_level"] == 3
    assert "TF32" not in config.flags
    assert engine.notes == []
    assert isinstance(build(tiny, "", tmp_path), TensorRtEngine)
    assert trt.built[-1].build_route == ""


def test_setter_that_drops_is_noticed(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.dropped.add("-kgen:tiling=0")
    built = build(tiny, "-kgen:tiling=0", tmp_path)
    assert isinstance(built, BuildFailure)
    assert built.status is Status.REFUSED
    assert "reads back ''" in built.reason
    assert trt.built == []


def test_silent_library_is_reported(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.silent = True
    engine = build(tiny, "-kgen:tiling=0", tmp_path)
    assert isinstance(engine, TensorRtEngine)
    assert engine.notes == ["no log line says that the build route is in use"]


def test_another_route_in_use_is_reported(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.used = "-conv_lowering=off"
    engine = build(tiny, "-conv_lowering=off -kgen:tiling=0", tmp_path)
    assert isinstance(engine, TensorRtEngine)
    said = "the log says that another build route is in use, without -kgen:tiling=0"
    assert engine.notes == [said]
    trt.used = "-conv_lowering=off -kgen:tiling=0 -peep:max=0"
    engine = build(tiny, "-conv_lowering=off -kgen:tiling=0", tmp_path)
    assert isinstance(engine, TensorRtEngine)
    assert engine.notes == []


def test_failure_keeps_the_compilers_words(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.broken = {
        "-kgen:tiling=0": "Error Code 1: CHECK(x)\nfailed",
        "-kgen:tiling=1": "OutOfMemory",
    }
    built = build(tiny, "-kgen:tiling=0", tmp_path)
    assert built == BuildFailure(Status.BUILD_FAILED, "Error Code 1: CHECK(x) failed")
    built = build(tiny, "-kgen:tiling=1", tmp_path)
    assert isinstance(built, BuildFailure)
    assert built.status is Status.OUT_OF_MEMORY
    # What only the error recorder is told.
    trt.recorded["-conv_lowering=off"] = "INVALID_CONFIG: workspace too small"
    built = build(tiny, "-conv_lowering=off", tmp_path)
    assert built == BuildFailure(Status.BUILD_FAILED, "INVALID_CONFIG: workspace too small")


def test_illegal_combination_is_refused(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    built = build(tiny, "-force_conv_nhwc=on -force_conv_nchw=on", tmp_path)
    assert isinstance(built, BuildFailure)
    assert built.status is Status.REFUSED


def test_deadline_cancels_the_build(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.seconds = 5.0
    settings = Settings(deadline_seconds=0.05)
    compiler = Compiler(find_module("tensorrt"), settings)
    built = compiler.compile(compiler.parse(tiny.path, {}))
    assert isinstance(built, BuildFailure)
    assert built.status is Status.TIMED_OUT


def test_stray_flags_are_kept_out(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    original = fake_tensorrt.Builder.build_serialized_network

    def spy(*arguments: object) -> bytes | None:
        seen.append(os.environ.get("__LUNOWUD"))
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fake_tensorrt.Builder, "build_serialized_network", spy)
    monkeypatch.setenv("__LUNOWUD", "-stray=1")
    build(tiny, "-kgen:tiling=0", tmp_path)
    build(tiny, "-kgen:tiling=0", tmp_path, channel="lunowud")
    assert seen == [None, "-kgen:tiling=0"]
    assert os.environ["__LUNOWUD"] == "-stray=1"


def test_the_second_channel_is_marked_experimental(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path
) -> None:
    engine = build(tiny, "-kgen:tiling=0", tmp_path, channel="lunowud")
    assert isinstance(engine, TensorRtEngine)
    assert engine.notes == ["its flags went through __LUNOWUD, which is experimental"]
    plain = build(tiny, "", tmp_path, channel="lunowud")
    assert isinstance(plain, TensorRtEngine)
    assert plain.notes == []


def test_both_channels_are_refused(trt: FakeTensorRT, tiny: Model) -> None:
    compiler = Compiler(find_module("tensorrt"))
    network = compiler.parse(tiny.path, {})
    with pytest.raises(InputError, match="not through both"):
        compiler.compile(network, build_route="-kgen:tiling=0", flags="-kgen:tiling=0")


def test_timing_cache_is_shared_or_fresh(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    build(tiny, "", tmp_path, timing_cache="fresh")
    assert not (tmp_path / "timing.cache").exists()
    taken = trt.timed
    assert taken > 0
    build(tiny, "", tmp_path)
    assert "EDITABLE_TIMING_CACHE" in trt.built[-1].flags
    assert (tmp_path / "timing.cache").read_bytes().startswith(fake_tensorrt.CACHE)
    assert trt.timed == 2 * taken
    build(tiny, "-kgen:tiling=0", tmp_path)
    assert trt.timed == 2 * taken  # trials share what was timed
    (tmp_path / "timing.cache").write_bytes(b"of another GPU")
    with pytest.raises(InputError, match=r"timing cache .* does not fit"):
        build(tiny, "", tmp_path)


def test_a_winner_is_replayed_from_its_timings_and_a_miss_is_told(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path
) -> None:
    trt.keyed_by_route = True
    winner = build(tiny, "-kgen:tiling=0", tmp_path)
    assert isinstance(winner, TensorRtEngine)
    kept = tmp_path / "kept.cache"
    kept.write_bytes(winner._plan.timing_cache)
    before, taken = kept.read_bytes(), trt.timed
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    replay = {"timing_cache": "replay", "cache_file": str(kept)}
    again = build(tiny, "-kgen:tiling=0", elsewhere, **replay)
    assert isinstance(again, TensorRtEngine)
    assert again.hash == winner.hash
    assert "ERROR_ON_TIMING_CACHE_MISS" in trt.built[-1].flags
    assert trt.timed == taken  # nothing was timed anew
    missed = build(tiny, "-kgen:tiling=1", elsewhere, **replay)
    assert isinstance(missed, BuildFailure)
    assert missed.status is Status.BUILD_FAILED
    assert "timing cache miss" in missed.reason
    # The default, against which a winner is measured, is timed anew where it must be, and says so.
    default = build(tiny, "", elsewhere, **replay)
    assert isinstance(default, TensorRtEngine)
    assert default.notes == ["the timing cache lacks the default route, which was timed anew"]
    assert "ERROR_ON_TIMING_CACHE_MISS" not in trt.built[-1].flags
    assert kept.read_bytes() == before
    assert not (elsewhere / "timing.cache").exists()


def test_finalists_are_built_from_fresh_timings(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path
) -> None:
    """What a search timed shapes no finalist, unless that is asked for."""
    for kind, shared in (("shared", False), ("always-shared", True)):
        (tmp_path / "timing.cache").write_bytes(fake_tensorrt.CACHE)
        backend = TensorRtBackend("tensorrt", {"timing_cache": kind})
        backend.confirming()
        built = backend.build(tiny, backend.catalog().parse(""), tmp_path)
        assert isinstance(built, TensorRtEngine)
        assert (trt.built[-1].given == fake_tensorrt.CACHE) is shared
        assert built._plan.timing_cache  # and what was timed can be kept beside the engine


def test_fixed_level_is_no_knob(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    backend = TensorRtBackend("tensorrt", {"optimization_level": "4"})
    assert "-builder_optimization_level" not in backend.catalog()
    assert "-tiling_optimization_level" in backend.catalog()
    backend.build(tiny, backend.catalog().parse(""), tmp_path)
    assert vars(trt.built[-1])["builder_optimization_level"] == 4


def test_limits_of_pools_reach_the_builder(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    build(tiny, "", tmp_path, workspace_mib="64", tactic_shared_kib="48")
    assert trt.built[-1].pools == {"WORKSPACE": 64 << 20, "TACTIC_SHARED_MEMORY": 48 << 10}


def test_parser_errors_name_node_and_operator(trt: FakeTensorRT, tmp_path: Path) -> None:
    path = fake_tensorrt.if_model(tmp_path / "if.onnx")
    with pytest.raises(ModelError, match=r"node 'fork' \(If\): not supported"):
        Compiler(find_module("tensorrt")).parse(path, {})


def test_dynamic_inputs_get_a_profile(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    proto = load(str(tiny.path))
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    save(proto, tmp_path / "dynamic.onnx")
    compiler = Compiler(find_module("tensorrt"))
    shape = tiny.inputs[0].shape
    compiler.compile(compiler.parse(tmp_path / "dynamic.onnx", {"x": shape}))
    assert trt.built[-1].profiles[0].shapes == {"x": (shape, shape, shape)}
    with pytest.raises(ModelError, match="--shape x="):
        compiler.compile(compiler.parse(tmp_path / "dynamic.onnx", {}))


# --- versions and platforms ---


def test_old_versions(monkeypatch: pytest.MonkeyPatch, tiny: Model, tmp_path: Path) -> None:
    fake_tensorrt.install(monkeypatch, "8.6.1")
    with pytest.raises(InputError, match=r"tensorrt 8\.6\.1 is too old"):
        load_backend("tensorrt")
    old = fake_tensorrt.install(monkeypatch, "10.13.0")
    catalog = load_backend("tensorrt").catalog()
    assert [k.name for k in catalog.knobs if knobs.is_build_route_knob(k.name)] == []
    assert isinstance(build(tiny, "-tf32=off", tmp_path), TensorRtEngine)
    network = Compiler(old).parse(tiny.path, {})
    assert network.definition.flags == 1  # strongly typed, as every network of 11
    assert len(load_backend("tensorrt", {"channel": "lunowud"}).catalog().knobs) > 190
    refused = Compiler(old).compile(network, build_route="-kgen:tiling=0")
    assert isinstance(refused, BuildFailure)
    assert "came with TensorRT 11.1" in refused.reason


def test_windows_has_no_tuner(trt: FakeTensorRT) -> None:
    trt.routes = {"tuner_version": "", "tuner_options": []}
    with pytest.raises(InputError, match="channel=lunowud"):
        load_backend("tensorrt").catalog()


def test_missing_module_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(MissingExtraError, match=r"routepilot\[tensorrt\]"):
        load_backend("tensorrt")


# --- engines, on the fake ---

#: `load.py` of a saved engine starts a process of its own, in which there is no fake.
FAKE_CHECKS = [c for c in suite.CHECKS if c is not suite.saved_engines_load]


@pytest.mark.parametrize("check", FAKE_CHECKS, ids=lambda check: check.__name__)
def test_adapter_conforms(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path, check: Callable[[suite.Case], None]
) -> None:
    check(suite.Case(partial(load_backend, "tensorrt"), tiny, tmp_path))


def test_only_own_plans_are_loaded(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    engine = build(tiny, "", tmp_path, plans="winner")
    assert isinstance(engine, TensorRtEngine)
    inputs = tiny.selection()[0]
    wanted = engine.run(inputs)
    stranger = tmp_path / "stranger.plan"
    stranger.write_bytes(engine._plan.data)
    with pytest.raises(InputError, match="--trust"):
        read_plan(stranger)
    np.testing.assert_equal(open_plan(stranger, trust=True).run(inputs), wanted)
    out = tmp_path / "out"
    out.mkdir()
    written = {"engine.plan", "inputs.npz", "load.py", "model.onnx", "timing.cache"}
    assert set(engine.save(out)) == written
    np.testing.assert_equal(open_plan(out / "engine.plan").run(inputs), wanted)
    compile((out / "load.py").read_text(), "load.py", "exec")
    with pytest.raises(InputError, match="was changed"):
        read_plan(out / "engine.plan", expected="0" * 64)
    with pytest.raises(InputError, match="cannot be read"):
        read_plan(tmp_path / "none.plan")
    stranger.write_bytes(b"no plan")
    with pytest.raises(MachineError, match="Magic tag"):
        open_plan(stranger, trust=True)


def test_plans_of_trials_are_kept_and_run_again(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path
) -> None:
    for route in ("", "-kgen:tiling=0", "-kgen:tiling=0"):
        engine = build(tiny, route, tmp_path)
        assert isinstance(engine, TensorRtEngine)
    kept = sorted((tmp_path / "plans").iterdir())
    assert len(kept) == 2  # equal bytes are one file
    inputs = tiny.selection()[0]
    again = open_plan(tmp_path / "plans" / f"{engine.hash}.plan")  # no --trust: it is ours
    np.testing.assert_equal(again.run(inputs), engine.run(inputs))
