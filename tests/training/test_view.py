"""The live view says what is best, what failed, and what is being built and why."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import measurement

from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import Route
from routepilot.training.view import SearchView, why_text


def test_lines_tell_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    view = SearchView("tune m", 3)
    assert view.lines() == ["best so far: the default route"]
    view.asking(1, Route.read("-a=1"), why_text(0.4, 0.1, 0.9))
    assert "expected 1.49x, 1.22 to 1.82, 90 % likely accurate" in view.lines()[-1]
    view.outcome(1, Outcome(Route.read("-a=1"), Status.OK, "", measurement(0.5)))
    view.outcome(2, Outcome(Route.read("-a=2"), Status.CRASHED, "ended by SIGSEGV"))
    assert view.lines() == ["best so far: 1.65x (1.62 to 1.68) with -a=1", "failed: 1 crashed"]
    told = capsys.readouterr().err
    assert "[1/3] next: -a=1 (expected" in told and "[2/3] -a=2  crashed" in told
    assert "\x1b" not in told


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with SearchView("tune m", 3, quiet=True) as view:
        view.say("a remark")
        view.asking(1, Route.read("-a=1"), "why")
        view.outcome(1, Outcome(Route.read("-a=1"), Status.CRASHED, "no"))
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_the_live_view(tiny_file: Path, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "routepilot", "tune", str(tiny_file), "-o", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--max-builds", "2"],
        stdout=subprocess.DEVNULL,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160"},
    )
    os.close(slave)
    seen = b""
    try:
        while block := os.read(master, 65536):
            seen += block
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(master)
    assert process.wait(timeout=60) == 0
    text = seen.decode(errors="replace")
    assert "\x1b[" in text and "best so far" in text
    assert "likely accurate" in text and "2/2" in text
