"""Doctor's checks of TensorRT, on the fake and on the real compiler of TensorRT-RTX."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import fake_tensorrt
import pytest
from fake_tensorrt import FakeTensorRT

from routepilot.env.checks_tensorrt import run_checks
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
    assert "byte-identical" in found["timing cache"]["detail"]
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
