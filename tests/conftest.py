"""Shared fixtures: tiny real models, prepared once a session."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from routepilot.env import child
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
def in_small_group() -> Iterator[Callable[[int], type[child.Child]]]:
    """A maker of `Child` classes whose processes live in a control group of so many bytes.

    Beyond them the kernel kills for want of memory, for real. Skips where no group can be made.
    """
    made: list[Path] = []

    def limited(limit_bytes: int) -> type[child.Child]:
        group = _make_group(limit_bytes)
        made.append(group)

        class Limited(child.Child):
            def __init__(self, *arguments: object) -> None:
                super().__init__(*arguments)  # type: ignore[arg-type]
                (group / "cgroup.procs").write_text(str(self.process.pid))

        return Limited

    yield limited
    for group in made:
        for _ in range(100):  # what was killed may take a moment to leave it
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)
        assert not group.exists(), "a process is still in it"


def _make_group(limit_bytes: int) -> Path:
    refusals = []
    for place in child.memory_groups()[:2]:  # our own, or in version 2 the one it is in
        group = place / f"routepilot-test-{os.getpid()}-{limit_bytes}"
        try:
            group.mkdir()
        except OSError as error:
            refusals.append(str(error))
            continue
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                (group / name).write_text(str(limit_bytes))
            except OSError as error:
                refusals.append(str(error))
                continue
            if (group / "memory.swap.max").exists():
                (group / "memory.swap.max").write_text("0")
            return group
        group.rmdir()
    pytest.skip(
        f"no control group with a memory limit here: {'; '.join(refusals) or 'none listed'}"
    )


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `routepilot live` found on this machine before would order the walks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
