"""The live views say what is best, what failed, and what is being built and why."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import measurement

from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.training.collect import Progress
from routepilot.training.view import CollectView, CompareView, SearchView, duration_text

BELIEF = (0.4, 0.1, 0.9)
FAST = Outcome(Route.read("-a=1"), Status.OK, "", measurement(0.5))
CRASHED = Outcome(Route.read("-a=2"), Status.CRASHED, "ended by SIGSEGV")


def test_lines_tell_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    view = SearchView("tune m", 3)
    assert view.lines() == ["best so far: the default route"]
    view.asking(1, Route.read("-a=1"), BELIEF)
    assert "expected 1.49x, 1.22 to 1.82, 90 % likely accurate" in view.lines()[-1]
    view.outcome(1, FAST)
    view.outcome(2, CRASHED)
    assert view.lines() == ["best so far: 1.65x (1.62 to 1.68) with -a=1", "failed: 1 crashed"]
    told = capsys.readouterr().err
    assert "[1/3] building -a=1 (expected" in told and "[2/3] -a=2  crashed" in told
    assert "\x1b" not in told
    view.outcome(3, Outcome(Route.read("-a=3"), Status.ACCURACY_FAILED, "rel_l2 is 0.1"))
    assert view.lines()[-1] == "failed: 1 crashed, 1 accuracy failed"


def test_a_comparison_tells_each_agents_best_and_counts_over_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = CompareView("compare", ["default", "ppo", "random"], 4)
    view.asking("ppo", 1, Route.read("-a=1"), BELIEF)
    assert view.lines()[-1].startswith("ppo: building -a=1 (expected 1.49x")
    view.outcome("ppo", 1, FAST)
    view.asking("random", 1, Route.read("-a=2"), None)
    assert view.lines()[-1] == "random: building -a=2"
    view.outcome("random", 1, CRASHED)
    assert view.lines() == [
        "ppo: 1.65x (1.62 to 1.68) with -a=1",
        "random: the default route",
        "failed: 1 crashed",
    ]
    told = capsys.readouterr().err.splitlines()
    # `default` built nothing and `ppo` left three builds over: they are behind the bar, not ahead.
    assert told[1].startswith("[5/12] ppo: -a=1  1.65x")
    assert told[-1].startswith("[9/12] random: -a=2  crashed")
    assert not any("building -a=2" in line for line in told), "no reason, no line"


def test_a_collection_tells_of_every_model_in_work(capsys: pytest.CaptureFixture[str]) -> None:
    view = CollectView("collect", 12)
    view.step(Progress("one", 0, 4, building=DEFAULT_ROUTE, why="the default"))
    assert view.lines() == ["one 0/4: building the default route (the default)"]
    view.step(Progress("one", 1, 4))
    view.step(Progress("one", 1, 4, building=Route.read("-a=1"), why="common to all models"))
    view.step(Progress("two", 1, 4, building=Route.read("-a=2"), why="common to all models"))
    view.step(Progress("one", 2, 4, FAST))
    view.step(Progress("two", 2, 4, CRASHED))
    view.step(Progress("one", 2, 4, building=Route.read("-a=3"), why="one knob from a fast route"))
    assert view.lines() == [
        "best of one: 1.65x (1.62 to 1.68) with -a=1",
        "failed: 1 crashed",
        "one 2/4: building -a=3 (one knob from a fast route)",
    ]
    view.step(Progress("one", 3, 4, FAST))
    view.step(Progress("one", 3, 4, is_last=True))  # one build was not needed
    view.step(Progress("two", 2, 4, error="the disk is full"))
    view.step(Progress("three", 4, 4, CRASHED))
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "[2/12] one 2/4 -a=1  1.65x (1.62 to 1.68)"
    assert "[7/12] two 2/4 given up: the disk is full" in told
    assert told[-1].startswith("[8/12] three 4/4")
    assert view.lines() == ["given up: two", "failed: 2 crashed"]


def test_time_left_is_bounded_by_the_seconds_of_the_budget() -> None:
    slow = Outcome(Route.read("-a=1"), Status.BUILD_FAILED, "no", build_seconds=60.0)
    free, bound = SearchView("t", 100, quiet=True), SearchView("t", 100, max_seconds=90, quiet=True)
    for view in (free, bound):
        view.outcome(1, slow)
    assert free._left(1) == "at most 99 min left"
    assert bound._left(1) == "at most 30 s left"
    assert duration_text(3 * 3600 + 300) == "3 h 05 min"


@pytest.mark.parametrize("kind", ["search", "compare", "collect"])
def test_quiet_says_nothing(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "search":
        with SearchView("tune m", 3, quiet=True) as view:
            view.say("a remark")
            view.asking(1, Route.read("-a=1"), BELIEF)
            view.outcome(1, CRASHED)
    elif kind == "compare":
        with CompareView("compare", ["ppo"], 3, quiet=True) as comparison:
            comparison.asking("ppo", 1, Route.read("-a=1"), BELIEF)
            comparison.outcome("ppo", 1, CRASHED)
    else:
        with CollectView("collect", 3, quiet=True) as collection:
            collection.step(Progress("m", 1, 3, CRASHED))
            collection.step(Progress("m", 1, 3, error="lost"))
    assert capsys.readouterr() == ("", "")


def on_a_terminal(*words: object) -> str:
    """What a verb shows on a terminal, its escape codes included."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "routepilot", *map(str, words)],
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
    return seen.decode(errors="replace")


def test_a_terminal_gets_the_live_view(tiny_file: Path, tmp_path: Path) -> None:
    text = on_a_terminal("tune", tiny_file, "-o", tmp_path, "--max-builds", 2)
    assert "\x1b[" in text and "best so far" in text
    assert "likely accurate" in text and "2/2" in text


def test_a_terminal_gets_the_live_view_of_a_comparison(tiny_file: Path, tmp_path: Path) -> None:
    agents = ("--agents", "ppo,random", "--max-builds", 2)
    text = on_a_terminal("compare", tiny_file, "-o", tmp_path, *agents)
    assert "\x1b[" in text and "4/4" in text
    assert "ppo: building" in text and "likely accurate" in text and "random: building" in text


def test_a_terminal_gets_the_live_view_of_a_collection(tiny_file: Path, tmp_path: Path) -> None:
    few = ("--expression", "-graph=[all|basic]", "--controls", 1, "--recheck", 0)
    text = on_a_terminal("collect", "--models", tiny_file, "-o", tmp_path / "t.parquet", *few)
    assert "\x1b[" in text and "3/3" in text
    assert "common to all models" in text and "timed again" in text


def test_collect_is_quiet_when_asked(tiny_file: Path, tmp_path: Path) -> None:
    few = ["--expression", "-graph=[all|basic]", "--controls", "0", "--recheck", "0"]
    command = ["collect", "--models", str(tiny_file), "-o", str(tmp_path / "t.parquet"), *few]
    run = [sys.executable, "-m", "routepilot", *command]
    done = subprocess.run([*run, "--quiet"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and "written" in done.stdout
    done = subprocess.run([*run, "--json"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["models"] == 1 and done.stderr == ""
