"""Interrupted and killed runs: nothing recorded is lost, nothing is left running."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from hostile_backend import hostile_model

from routepilot.agents import make_factory
from routepilot.agents.base import Problem
from routepilot.agents.policy import load_policy
from routepilot.env.backends.recorded import Replay
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE
from routepilot.env.tables import load_table
from routepilot.training.defaults import find_policy, find_table

BUILDS = 10


def command(model: Path, out: Path) -> list[str]:
    run = [sys.executable, "-m", "routepilot", "tune", str(model), "-o", str(out)]
    return [*run, "--agent", "random", "--max-builds", str(BUILDS), "--json"]


def recorded(out: Path) -> int:
    try:
        with closing(sqlite3.connect(f"file:{out}/records.sqlite?mode=ro", uri=True)) as base, base:
            (number,) = base.execute("SELECT COUNT(*) FROM records").fetchone()
            return int(number)
    except sqlite3.Error:
        return 0


def hear_interrupts() -> None:
    """Undo, in a child, what a shell without job control does to the jobs it sends behind."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def sent_behind() -> Iterator[None]:
    """As where pytest is a background job of a script: SIGINT is ignored, and so inherited."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sent_behind")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_run_goes_on_where_it_was(
    sent: signal.Signals, code: int, tiny_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(tiny_file, out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
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


@pytest.mark.usefixtures("sent_behind")
def test_a_run_sent_behind_by_a_script_ignores_interrupts_as_nohup_does(
    tiny_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(tiny_file, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 90
    while recorded(out) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert json.loads(text)["builds"] == BUILDS


def made_command(model: Path, out: Path) -> list[str]:
    run = [sys.executable, "-m", "routepilot", "tune", str(model), "-o", str(out), "--json"]
    return [*run, "--backend", "calm_backend:make", "--agent", "random", "--max-builds", "12"]


def test_killed_again_and_again_it_ends_as_if_it_had_run_through(tmp_path: Path) -> None:
    """On a backend whose clock is made, the killed run's answer is the uninterrupted one's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    model = hostile_model(tmp_path / "hostile.onnx")
    whole = subprocess.run(
        made_command(model, tmp_path / "whole"),
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert whole.returncode == 0, whole.stderr
    expected = json.loads(whole.stdout)

    rng = random.Random(1)
    out, kills = tmp_path / "killed", 0
    for goal in (1, 4, 7, 10):
        process = subprocess.Popen(
            made_command(model, out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        while recorded(out) < goal and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        kills += process.poll() is None
        process.kill()
        process.wait()
        if (out / "result.json").exists():  # whatever is there can be read and promises nothing
            found = json.loads((out / "result.json").read_text())
            assert found["state"] == "done" or found["speedup"] == 1.0
    assert kills >= 2, "the kills came too late to say anything"
    done = subprocess.run(
        made_command(model, out), capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("route", "is_default", "speedup", "builds", "outcomes", "ended_by"):
        assert found[name] == expected[name], name
    for mine, theirs in zip(found["trials"], expected["trials"], strict=True):
        for name in ("route", "status", "speedup", "losses", "engine_hash"):
            assert mine[name] == theirs[name], name


#: Agents with a state worth losing: the surrogate, its random draws, the policy.
BELIEVERS = ("two-way-gp", "greedy", "thompson", "ppo")


@pytest.mark.parametrize("name", BELIEVERS)
def test_an_agent_that_is_told_again_goes_on_as_if_never_stopped(name: str) -> None:
    """A resumed run makes its agent anew and tells it what is on record, build by build."""
    replay = Replay(load_table(find_table("cpu")))
    loaded = load_policy(find_policy("cpu"))
    for model in replay.models[:1]:
        rest = replay.without_families((model.card.family,))
        factory = make_factory(name, replay=rest, policy=loaded)
        problem = Problem(replay.catalog, model.card.features, model.routes, 12, seed=3)

        def asked(stops: tuple[int, ...], model=model, factory=factory, problem=problem):  # type: ignore[no-untyped-def]
            """Routes in order, the run cut off after each of these counts of builds."""
            known: list[Outcome] = []
            for stop in (*stops, 12):
                agent = factory(problem)
                agent.tell(DEFAULT_ROUTE, model.default)
                for number in range(stop):
                    route = agent.ask()
                    if route is None:
                        break
                    if number < len(known):
                        assert known[number].route == route, f"{name} asks another {number}"
                    else:
                        known.append(model.outcome(route))
                    agent.tell(route, known[number])
            return [outcome.route for outcome in known]

        whole = asked(())
        rng = random.Random(model.card.name)
        for _ in range(2):
            assert asked(tuple(sorted(rng.sample(range(1, 12), 3)))) == whole


def test_the_policy_killed_again_and_again_ends_as_if_it_had_run_through(
    tiny_file: Path, tmp_path: Path
) -> None:
    """The real policy on real engines: what it asks after a kill is what the record makes it ask.

    Real clocks never repeat, so the resumed run is held to a run over the very same records.
    """
    out = tmp_path / "out"
    run = [
        sys.executable,
        "-m",
        "routepilot",
        "tune",
        str(tiny_file),
        "--max-builds",
        "5",
        "--json",
    ]
    for goal in (1, 2, 4):
        process = subprocess.Popen(
            [*run, "-o", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 90
        while recorded(out) < goal and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.wait()
    done = subprocess.run([*run, "-o", str(out)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)
    again = subprocess.run([*run, "-o", str(out)], capture_output=True, text=True, timeout=240)
    second = json.loads(again.stdout)
    assert second["manifest"]["fresh_builds"] == 0, "all of it was on record"
    assert first["trials"] == second["trials"]
    assert first["ended_by"] == second["ended_by"]
