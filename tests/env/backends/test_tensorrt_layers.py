"""TensorRT engines from the inside: on the fake, and on the real module as far as that goes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import fake_gpu
import fake_tensorrt
import pytest

from routepilot.env.backends import load_backend
from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.layers import Layered, Layers
from routepilot.env.backends.tensorrt_compiler import Compiler, Plan, Settings, find_module
from routepilot.env.backends.tensorrt_engine import Execution
from routepilot.env.backends.tensorrt_layers import UNKNOWN, make_profiler, mean_times, read_layers
from routepilot.env.errors import MachineError
from routepilot.env.models import Model

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="the extra rtx is not installed"
)


def read(information: object, times: dict[str, float]) -> Layers:
    return read_layers(
        json.dumps(information), times, end_to_end_ms=1.0, profiled_ms=1.2, inferences=4
    )


def test_the_inspector_and_the_profiler_are_joined_by_name() -> None:
    information = {
        "Layers": [
            {"Name": "conv1", "LayerType": "CaskConvolution", "TacticName": "sm90_xmma"},
            {"Name": "{ForeignNode[a...b]}", "LayerType": "Myelin", "TacticName": ""},
            {"Name": "idle", "LayerType": "NoOp", "ParameterType": "NoOp"},
            "told by name alone",
        ],
        "Bindings": ["x", "y"],
    }
    times = {"conv1": 0.5, "{ForeignNode[a...b]}": 0.25, "copy": 0.125, "told by name alone": 0.0}
    found = read(information, times)
    assert [layer.kind for layer in found.layers] == [
        "CaskConvolution",
        "Myelin",
        "NoOp",
        UNKNOWN,
        UNKNOWN,
    ]
    assert found.layers[0].kernel == "sm90_xmma" and found.layers[2].kernel == "NoOp"
    assert found.sum_ms == pytest.approx(0.875)
    assert found.nodes == {UNKNOWN: 2, "CaskConvolution": 1, "Myelin": 1, "NoOp": 1}
    assert [layer.name for layer in found.costliest(2)] == ["conv1", "{ForeignNode[a...b]}"]
    assert Layers.read(found.as_json()) == found


def test_a_name_that_comes_again_begins_the_next_inference() -> None:
    profiler = make_profiler(fake_tensorrt.FakeTensorRT())
    for name, ms in [("a", 9.0), ("b", 9.0), ("a", 1.0), ("b", 2.0), ("a", 3.0), ("b", 2.0)]:
        profiler.report_layer_time(name, ms)
    assert mean_times(profiler.rounds[-2:]) == {"a": 2.0, "b": 2.0}
    assert mean_times([]) == {}


def test_an_engine_on_the_fake_tells_kinds_tactics_and_times(
    monkeypatch: pytest.MonkeyPatch, tiny: Model, tmp_path: Path
) -> None:
    module = fake_tensorrt.install(monkeypatch)
    module.delays = {"-kgen:tiling=0": 3.0}
    backend = load_backend("tensorrt", {})
    route = backend.catalog().parse("-kgen:tiling=0")
    engine = backend.build(tiny, route, tmp_path)
    assert not isinstance(engine, BuildFailure) and isinstance(engine, Layered)
    found = engine.layers(tiny.selection()[0], 5)
    assert [config.profiling_verbosity for config in module.built] == [
        "LAYER_NAMES_ONLY",
        "DETAILED",
    ]
    assert [config.build_route for config in module.built] == ["-kgen:tiling=0"] * 2
    assert found.builds == 1 and found.nodes["CaskConvolution"] == 1
    assert all("-kgen:tiling=0" in layer.kernel for layer in found.layers if layer.kernel)
    copy = found.layers[-1]
    assert (copy.name, copy.kind) == ("Reformatting CopyNode", UNKNOWN)
    assert found.sum_ms - copy.milliseconds == pytest.approx(3.0)
    assert found.end_to_end_ms >= 3.0 and found.profiled_ms >= 3.0
    engine.close()


def test_a_second_build_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, tiny: Model, tmp_path: Path
) -> None:
    module = fake_tensorrt.install(monkeypatch)
    backend = load_backend("tensorrt", {})
    engine = backend.build(tiny, backend.catalog().parse("-kgen:tiling=0"), tmp_path)
    assert not isinstance(engine, BuildFailure)
    module.broken = {"-kgen:tiling=0": "no tactic"}
    with pytest.raises(MachineError, match="looked into: .*no tactic"):
        engine.layers(tiny.selection()[0], 2)  # type: ignore[union-attr]
    engine.close()


@needs_rtx
def test_the_real_compiler_builds_detailed_engines_that_repeat(tiny: Model) -> None:
    rtx = Compiler(find_module("tensorrt_rtx"), Settings(compute_capability="8.9"))
    network = rtx.parse(tiny.path, {})
    plain, told, again = (rtx.compile(network, detailed=d) for d in (False, True, True))
    assert isinstance(plain, Plan) and isinstance(told, Plan) and isinstance(again, Plan)
    assert told.hash == again.hash != plain.hash


@needs_rtx
def test_the_real_module_has_what_is_asked_of_it() -> None:
    trt = find_module("tensorrt_rtx")
    assert hasattr(trt.ICudaEngine, "create_engine_inspector")
    assert hasattr(trt.EngineInspector, "get_engine_information")
    assert (
        hasattr(trt.IExecutionContext, "profiler") and trt.LayerInformationFormat.JSON is not None
    )
    profiler = make_profiler(trt)
    profiler.report_layer_time("a", 1.0)
    assert profiler.rounds == [{"a": 1.0}]


@needs_rtx
@pytest.mark.skipif(find_spec("cuda") is not None, reason="may have a GPU")
def test_the_real_runtime_says_why_it_cannot_load_an_engine_here(tiny: Model) -> None:
    trt = find_module("tensorrt_rtx")
    rtx = Compiler(trt, Settings(compute_capability="8.9"))
    plan = rtx.compile(rtx.parse(tiny.path, {}), detailed=True)
    assert isinstance(plan, Plan)
    with pytest.raises(MachineError, match="does not load this engine on Fake GPU.*"):
        Execution(trt, plan.data, fake_gpu.FakeGpu())  # type: ignore[arg-type]
