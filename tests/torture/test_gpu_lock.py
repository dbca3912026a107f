"""Several processes on one GPU lock: one at a time, and none waits for the dead."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from lock_holder import UUID
from sizes import report, size

from routepilot.env.child import MARK_VARIABLE, end_orphans

HOLDER = Path(__file__).with_name("lock_holder.py")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of its own, where the lock lies."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def hold(
    log: Path, times: int, seconds: float, deed: str = "", **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            str(HOLDER),
            str(log),
            str(times),
            str(seconds),
            *([deed] if deed else []),
        ],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def end(holder: subprocess.Popen[str]) -> None:
    """Kill a holder, as nothing that it does can catch."""
    holder.send_signal(signal.SIGKILL)
    holder.communicate()


def until_entered(log: Path, count: int = 1, seconds: float = 60.0) -> None:
    late = time.monotonic() + seconds
    while not log.exists() or log.read_text().count("enter") < count:
        assert time.monotonic() < late, "nobody got the lock"
        time.sleep(0.01)


def test_one_process_at_a_time(place: Path) -> None:
    processes, times, log = 4, size("lock_times"), place / "log"
    running = [hold(log, times, 0.0005) for _ in range(processes)]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    lines = log.read_text().splitlines()
    assert len(lines) == 2 * times * processes
    for enter, leave in zip(lines[::2], lines[1::2], strict=True):
        assert enter.replace("enter", "leave") == leave, "two processes held the lock at once"
    turns = [line.split()[1] for line in lines[::2]]
    assert len(set(turns)) == processes
    report("gpu lock", processes=processes, turns=len(turns))


def test_a_lock_of_a_dead_process_is_free_at_once(place: Path) -> None:
    kills = size("lock_kills")
    log, slowest = place / "log", 0.0
    for number in range(kills):
        holder = hold(log, 1, 0, "hang")
        until_entered(log, 2 * number + 1)
        waiting = hold(log, 1, 0.0)
        time.sleep(0.2)
        end(holder)
        died = time.monotonic()
        _, errors = waiting.communicate(timeout=60)
        assert waiting.returncode == 0, errors
        slowest = max(slowest, time.monotonic() - died)
    (lock,) = place.glob("routepilot-gpu-*.lock")
    assert lock.name == f"routepilot-gpu-{UUID.hex()}.lock" and lock.stat().st_size == 0
    report("gpu lock of the dead", kills=kills, slowest_seconds=round(slowest, 2))


def test_a_helper_of_the_dead_does_not_keep_the_lock(place: Path) -> None:
    """A compiler's forked helper shares the lock; by its mark the next child ends it."""
    log = place / "log"
    parent = subprocess.Popen(["sleep", "1000"])
    holder = hold(log, 1, 0, "fork", **{MARK_VARIABLE: f"{parent.pid}-0123"})
    until_entered(log)
    while not psutil.Process(holder.pid).children():
        time.sleep(0.01)
    (helper,) = psutil.Process(holder.pid).children()
    assert holder.stderr is not None
    holder.stderr.close()  # its helper holds the other end
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    waiting = hold(log, 1, 0.0)
    time.sleep(1.0)
    assert waiting.poll() is None and helper.is_running(), "the helper should hold the lock"
    parent.kill()
    parent.wait()
    end_orphans()
    _, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, errors
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE


def test_a_lock_that_cannot_be_opened_is_named(place: Path) -> None:
    (place / f"routepilot-gpu-{UUID.hex()}.lock").symlink_to(place / "none" / "lock")
    refused = hold(place / "log", 1, 0.0)
    _, errors = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert "MachineError: the GPU lock" in errors.splitlines()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_another_user_waits_for_the_same_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made the file, another user can lock by it: it guards a device of all."""
    place = Path(tempfile.mkdtemp(prefix="lock-"))
    try:
        place.chmod(0o1777)
        monkeypatch.setenv("TMPDIR", str(place))
        log = place / "log"
        log.touch()
        log.chmod(0o666)
        holder = hold(log, 1, 0, "hang")
        until_entered(log)
        other = hold(log, 1, 0.0, "nobody")
        time.sleep(1.5)
        assert other.poll() is None, other.communicate()[1]
        assert log.read_text().count("enter") == 1
        end(holder)
        _, errors = other.communicate(timeout=60)
        assert other.returncode == 0, errors
    finally:
        shutil.rmtree(place)
