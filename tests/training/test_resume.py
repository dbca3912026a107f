"""Interrupted and killed runs: nothing recorded is lost, nothing is left running."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BUILDS = 10


def command(model: Path, out: Path) -> list[str]:
    run = [sys.executable, "-m", "routepilot", "tune", str(model), "-o", str(out)]
    return [*run, "--agent", "random", "--max-builds", str(BUILDS), "--json"]


def recorded(out: Path) -> int:
    try:
        with sqlite3.connect(f"file:{out}/records.sqlite?mode=ro", uri=True) as base:
            (number,) = base.execute("SELECT COUNT(*) FROM records").fetchone()
            return int(number)
    except sqlite3.Error:
        return 0


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_run_goes_on_where_it_was(
    sent: signal.Signals, code: int, tiny_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(tiny_file, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 90
    while recorded(out) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "the worker child should be alive"
    process.send_signal(sent)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in errors
    if sent is signal.SIGINT:
        assert "saved" in errors and len(errors.strip().splitlines()) == 1
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, "a worker child outlived its parent"

    kept = recorded(out)
    assert kept >= 3
    done = subprocess.run(command(tiny_file, out), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["builds"] == BUILDS
    # The default and every build on record is not made again.
    assert result["manifest"]["fresh_builds"] == BUILDS + 1 - kept
    assert not list((out / "work").glob("**/.building/*"))
