"""Command lines over TensorRT, on a fake of it.

They run in processes of their own, so that no other test finds the fake installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="the extra rtx is not installed"
)
no_gpu = pytest.mark.skipif(find_spec("cuda") is not None, reason="may have a GPU")

FAKE = ("--backend", "fake_tensorrt_backends:make")


def routepilot(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    tests = str(Path(__file__).parent)
    return subprocess.run(
        [sys.executable, "-m", "routepilot", *arguments],
        env={**os.environ, "PYTHONPATH": tests, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("routepilot: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0], done.stderr


def tuned(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result
