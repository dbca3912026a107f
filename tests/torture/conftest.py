"""Fixtures of the torture tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hostile_backend
import psutil
import pytest

from routepilot.env.child import MARK_VARIABLE
from routepilot.env.models import Model, prepare

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def hostile_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The model of the hostile backend, prepared once."""
    folder = tmp_path_factory.mktemp("hostile")
    return prepare(hostile_backend.hostile_model(folder / "hostile.onnx"), cache=folder / "cache")


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children import the hostile backend."""
    folder = str(Path(hostile_backend.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)


@pytest.fixture(autouse=True)
def no_process_is_left():
    """No marked process outlives a test."""
    yield
    left = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK_VARIABLE, "")
            if mark.startswith(f"{os.getpid()}-") and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
        except psutil.Error:
            continue
    assert not left, left
