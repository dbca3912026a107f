"""Shared fixtures: tiny real models, prepared once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from routepilot.env.models import Model
from routepilot.training.doctor import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A prepared convolution network of a few hundred weights."""
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_file(tmp_path: Path) -> Iterator[Path]:
    """The same network as an ONNX file."""
    tiny_model(tmp_path)
    yield tmp_path / "tiny.onnx"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `routepilot live` found on this machine before would order the walks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
