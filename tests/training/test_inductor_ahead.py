"""Builds ahead of their timing: side by side, never while something is timed, paid for once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from routepilot.env.backends.base import BuildFailure  # noqa: E402
from routepilot.env.backends.inductor_build import RESULT  # noqa: E402
from routepilot.env.backends.inductor_package import Build, Package  # noqa: E402
from routepilot.env.errors import InputError  # noqa: E402
from routepilot.training import inductor_builders  # noqa: E402
from routepilot.training.inductor_ahead import Ahead  # noqa: E402

RESULT_TEXT = json.dumps({"status": "ok", "hash": "h", "reason": "", "seconds": 1.0})
WRITES = f"open({RESULT!r}, 'w').write({RESULT_TEXT!r})"
COUNTS = """
import time
for i in range(100000):
    open('count', 'w').write(str(i))
    time.sleep(0.01)
"""


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ahead]:
    """Builds are fakes: small programs in the place of the compiler, two at once."""

    def start(code: Any, place: Path, *, own_group: bool) -> Build:
        assert own_group
        folder = place / f"build{len(list(place.glob('build*')))}"
        folder.mkdir(parents=True)
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, cwd=folder)
        return Build(folder, process)

    monkeypatch.setattr(inductor_builders, "start_build", start)
    with Ahead(tmp_path / "builds", 2, 20.0) as found:
        yield found


def test_builds_of_several_sessions_run_side_by_side(ahead: Ahead, tmp_path: Path) -> None:
    meets = f"""
import pathlib, time
own, other = {{}}, {{}}
place = pathlib.Path.cwd()
(place / 'here').touch()
while len(list(place.parent.glob('build*/here'))) < 2:
    time.sleep(0.01)
{WRITES}
"""
    first, second = ahead.build(meets), ahead.build(meets)  # type: ignore[arg-type]
    for promise in (first, second):
        built = promise.result(timeout=20)
        assert isinstance(built.result, Package) and built.result.hash == "h"


def test_more_builds_than_workers_wait_their_turn(ahead: Ahead) -> None:
    promises = [ahead.build(WRITES) for _ in range(5)]  # type: ignore[arg-type]
    assert all(isinstance(p.result(timeout=20).result, Package) for p in promises)


def test_a_failed_build_is_told(ahead: Ahead) -> None:
    built = ahead.build("raise SystemExit('no')").result(timeout=20)  # type: ignore[arg-type]
    assert isinstance(built.result, BuildFailure) and "with code 1" in built.result.reason


def test_nothing_builds_while_a_session_is_alone(ahead: Ahead, tmp_path: Path) -> None:
    ahead.build(COUNTS)  # type: ignore[arg-type]
    count = tmp_path / "builds" / "build0" / "count"
    while not count.exists():
        time.sleep(0.02)
    with ahead.alone():
        before = count.read_text()
        waiting = threading.Thread(target=ahead.build, args=(WRITES,))
        waiting.start()
        time.sleep(0.3)
        assert count.read_text() == before
        assert not (tmp_path / "builds" / "build1").exists(), "a build began while one timed"
    waiting.join(timeout=5)
    time.sleep(0.3)
    assert count.read_text() != before


def test_two_sessions_are_never_alone_at_once(ahead: Ahead) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with ahead.alone():
                inside += 1
                most = max(most, inside)
                time.sleep(0.01)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_what_cannot_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give 1 or more"):
        Ahead(tmp_path, 0, 1.0)
