"""Doctor's checks of TensorRT, on the fake and on the real compiler of TensorRT-RTX."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from pathlib import Path

import fake_tensorrt
import pytest
from fake_tensorrt import FakeTensorRT

from routepilot.env.backends import tensorrt
from routepilot.env.checks_tensorrt import run_checks
from routepilot.env.errors import MachineError
from routepilot.env.models import Model

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="the extra rtx is not installed"
)
no_gpu = pytest.mark.skipif(find_spec("cuda") is not None, reason="may have a GPU")


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    monkeypatch.delenv("__LUNOWUD", raising=False)
    return fake_tensorrt.install(monkeypatch)


def test_doctor_on_the_fake(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.dropped.add("-kgen:tiling=banana")
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path)}
    assert found["set and read back a route"]["status"] == "pass"
    assert found["accuracy against ONNX Runtime"]["status"] == "pass"
    cached = found["timing cache"]["detail"]
    assert "s and byte-identical" in cached
    assert "a route is served by the default's cache" in cached
    trt.keyed_by_route = True
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path / "keyed")}
    assert "a route misses the default's cache" in found["timing cache"]["detail"]
    assert "reads back" in found["unknown knob"]["detail"]
    trt.inert.add("-kgen:tiling=0")
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path)}
    assert found["build a live route"]["status"] == "fail"


@needs_rtx
def test_doctor_on_rtx(tiny: Model, tmp_path: Path) -> None:
    found = {c["check"]: c for c in run_checks("tensorrt_rtx", tiny, tmp_path)}
    failed = [c for c in found.values() if c["status"] == "fail"]
    assert failed == []
    assert found["build a live route"]["detail"].endswith("the engine changed")
    assert "unknown option" in found["unknown knob"]["detail"]


def test_open_questions_are_answered(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path)}
    answers = {n.removeprefix("open: "): c for n, c in found.items() if n.startswith("open: ")}
    assert {c["status"] for c in answers.values()} == {"pass"}
    assert "the route set before" in answers["what a refusal leaves"]["detail"]
    assert "takes values unchecked" in answers["are values checked"]["detail"]
    ways = answers["way past the knob list"]["detail"]
    assert "-peep:fc_h_fusion=off" in ways
    assert ways.count("does not open it") == 2
    versions = answers["knobs of this version"]["detail"]
    assert "tuner 2.19.45 lists 9 knobs, the shipped 2.19.45 209" in versions
    assert "1 new (-conv_lowering:part)" in versions
    assert "gone" in versions
    assert "build_route wins" in found["both channels"]["detail"]
    assert "cache" in found["timing cache"]["detail"]
    trt.dropped.add("-kgen:tiling=banana")
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path)}
    assert "checks values" in found["open: are values checked"]["detail"]


def test_without_a_gpu_the_builder_is_not_tried(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: int) -> None:
        raise MachineError("there is no CUDA device 0")

    monkeypatch.setattr(tensorrt, "Gpu", none)
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path)}
    assert found["GPU and driver"]["status"] == "fail"
    assert found["build default"]["status"] == "unavailable"
    assert trt.built == []
    with pytest.raises(MachineError, match=r"no CUDA device 0\. What needs none: .routepilot live"):
        tensorrt.TensorRtBackend("tensorrt").require_device()


def test_stray_flags_are_told(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("__LUNOWUD", "-stray=1")
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path)}
    assert found["stray compiler flags"]["status"] == "fail"
    assert "-stray=1" in found["stray compiler flags"]["detail"]


#: What a user is promised to be told of, and the check that tells it.
PROMISED = {
    "import": "import",
    "versions": "versions",
    "GPU": "GPU and driver",
    "driver": "GPU and driver",
    "catalog size and tuner version": "catalog",
    "set and read back": "set and read back a route",
    "unknown knob": "unknown knob",
    "unknown value": "unknown value",
    "build default": "build default",
    "build one live route": "build a live route",
    "determinism of two builds": "determinism",
    "timing A/A noise": "timing A/A",
    "accuracy against ONNX Runtime": "accuracy against ONNX Runtime",
    "timing cache effect": "timing cache",
    "kill and resume": "kill and resume a compile",
    "both channels": "both channels",
}


def test_every_promised_check_is_run_with_what_to_do(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path
) -> None:
    begin = time.monotonic()
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path)}
    assert set(PROMISED.values()) <= set(found)
    assert time.monotonic() - begin < 120
    for check in found.values():
        assert check["status"] in ("pass", "fail", "unavailable")
        assert check["detail"]
        assert check["hint"] or check["status"] == "pass"
    assert "11.1.0.106 tuner 2.19.45" in found["catalog"]["detail"]
    assert "two builds of the default differ by" in found["timing A/A"]["detail"]
    assert "a route" in found["timing cache"]["detail"]


@needs_rtx
@no_gpu
def test_without_a_gpu_every_check_says_what_to_do(tiny: Model, tmp_path: Path) -> None:
    begin = time.monotonic()
    found = {c["check"]: c for c in run_checks("tensorrt_rtx", tiny, tmp_path)}
    assert set(PROMISED.values()) <= set(found)
    assert time.monotonic() - begin < 120
    away = {name for name, c in found.items() if c["status"] == "unavailable"}
    assert {"timing A/A", "accuracy against ONNX Runtime", "timing cache"} <= away
    assert all(found[name]["hint"] for name in away)


def test_without_the_module_every_check_is_named(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path)}
    assert set(PROMISED.values()) <= set(found)
    assert found.pop("import")["status"] == "fail"
    assert {c["status"] for c in found.values()} == {"unavailable"}
    assert all(c["hint"] for c in found.values())
