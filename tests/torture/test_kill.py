"""kill -9 at random moments: at most the build in flight is lost, nothing is left behind.

Runs of the command line with the hostile backend and no noise, so that a resumed run must end with
exactly the figures of an uninterrupted one. The loop is `killing.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile_backend
import psutil
import pytest
import synthetic
from killing import (
    Course,
    Killer,
    drafts,
    finish,
    recorded,
    routepilot,
    start,
    warm,
    workers,
)
from sizes import report, sequence, size

from routepilot.env.child import MARK_VARIABLE
from routepilot.env.store import RecordStore
from routepilot.env.tables import load_table, save_table

BUILDS = 10

#: Keys of a result and of its trials that a resumed run must repeat exactly.
SAME = ("route", "is_default", "speedup", "speedup_low", "speedup_high", "losses", "builds")
SAME_TRIAL = ("route", "status", "speedup", "speedup_low", "speedup_high", "losses", "engine_hash")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model, a cache of its own, and the hostile backend in reach."""
    monkeypatch.setenv("PYTHONPATH", str(Path(hostile_backend.__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    deeds = "work segv nan shape inaccurate fail overfit close_raise"
    options = {"noise": "none", "slow": "0.03", "deeds": deeds}
    monkeypatch.setenv("ROUTEPILOT_HOSTILE", json.dumps(options))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    hostile_backend.hostile_model(tmp_path / "hostile.onnx")
    return tmp_path


def builds_of(out: Path) -> Counter[str]:
    """The builds of a work folder by route, from the hostile backend's log."""
    lines = [line for log in out.rglob("builds.jsonl") for line in log.read_text().splitlines()]
    return Counter(json.loads(line)[1] for line in lines)


def built_again(out: Path, whole: Path) -> int:
    """Builds that the sound run did not make; each new process makes the default anew."""
    again = sum(builds_of(out).values()) - sum(builds_of(whole).values())
    return again - (builds_of(out)[""] - builds_of(whole)[""])


def nothing_is_left(place: Path, work: Path) -> None:
    assert not drafts(place)
    assert not list(work.glob("**/.building/*"))


def facts_of_tune(out: Path, text: str) -> dict[str, Any]:
    result = json.loads(text)
    found = {key: result[key] for key in SAME}
    found["trials"] = [{key: trial[key] for key in SAME_TRIAL} for trial in result["trials"]]
    return found


def tune(place: Path) -> Course:
    backend = ("--backend", "hostile_backend:make", "--agent", "random", "--deadline", 20)
    return Course(
        "tune",
        lambda out, seed: [
            "tune", place / "hostile.onnx", "-o", out, *backend, "--max-builds", BUILDS,
            "--seed", seed, "--json",
        ],
        lambda word: word,
        facts_of_tune,
        lambda out: nothing_is_left(place, out),
        lambda out: out / "records.sqlite",
        built_again,
        seeds=5,
        builds=BUILDS,
    )  # fmt: skip


def outcomes(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """All that a table of the hostile backend says, without its clock."""
    table = load_table(path)
    return {
        fingerprint: sorted(
            (str(o.route), repeat, o.status.value, o.reason if not o.measurement else "",
             o.measurement.log_speedup if o.measurement else None)
            for found in routes.values()
            for repeat, o in enumerate(found)
        )
        for fingerprint, routes in table.outcomes.items()
    }  # fmt: skip


def collect(place: Path) -> Course:
    backend = ("--backend", "hostile_backend:make", "--routes", 12, "--controls", 1)

    def work(out: Path) -> Path:
        return out.with_name(f"{out.stem}-work")

    return Course(
        "collect",
        lambda out, seed: [
            "collect", "--models", place / "hostile.onnx", "-o", out, *backend, "--recheck", 1,
            "--deadline", 20, "--seed", seed,
        ],
        lambda word: f"{word}.parquet",
        lambda out, text: outcomes(out),
        lambda out: nothing_is_left(place, work(out)),
        lambda out: out.with_suffix(".sqlite"),
        lambda out, whole: built_again(work(out), work(whole)),
        builds=14,
    )  # fmt: skip


def compare(place: Path) -> Course:
    """Agents share outcomes, so a kill in one agent's search must not change another's."""
    backend = ("--backend", "hostile_backend:make", "--deadline", 20)
    agents = "default,random,fast,recentred,tpe"

    def rows(out: Path, text: str) -> dict[str, Any]:
        for said in (text, (out / "comparison.json").read_text()):
            rows = json.loads(said)["agents"]
            assert len(rows) == 5
            found = {n: {k: v for k, v in r.items() if k != "seconds"} for n, r in rows.items()}
        return found

    return Course(
        "compare",
        lambda out, seed: [
            "compare", place / "hostile.onnx", "-o", out, *backend, "--agents", agents,
            "--max-builds", 6, "--json",
        ],
        lambda word: word,
        rows,
        lambda out: nothing_is_left(place, out),
        lambda out: out / "records.sqlite",
        seeds=1,
        builds=20,
    )  # fmt: skip


def train(place: Path) -> Course:
    """On the recorded backend; it starts no child. A run gives the same bytes, killed or not."""
    whole = synthetic.table(6)
    few = {  # routes of one change: a run of a second or two, most of it in files and checkpoints
        fingerprint: {route: found for route, found in known.items() if len(route.values) < 2}
        for fingerprint, known in whole.outcomes.items()
    }
    table = place / "table.parquet"
    save_table(replace(whole, outcomes=few), table)
    settings = {
        "environments": 2, "rollout": 32, "batch": 32, "epochs": 1, "teacher_episodes": 10,
        "teacher_epochs": 2, "evaluate_every": 64,
    }  # fmt: skip
    given = [word for pair in settings.items() for word in ("--set", "{}={}".format(*pair))]

    def left(out: Path) -> None:
        assert not drafts(place)
        assert not (out / "resume").exists(), "a checkpoint was left behind"

    return Course(
        "train",
        lambda out, seed: [
            "train", "--table", table, "-o", out, "--name", "p", "--steps", 128, "--seed", seed,
            *given, "-q",
        ],
        lambda word: word,
        lambda out, text: {p.name: p.read_bytes() for p in out.glob("*.safetensors")},
        left,
    )  # fmt: skip


BOTH = ("parent", "child")

#: Course, and who is killed of it.
COURSES = [(tune, BOTH), (collect, BOTH), (compare, BOTH), (train, ("parent",))]


@pytest.mark.parametrize(("make", "victims"), COURSES, ids=lambda x: getattr(x, "__name__", ""))
def test_killed_at_any_moment(make: Any, victims: tuple[str, ...], place: Path) -> None:
    name = make.__name__
    if name == "compare":
        pytest.importorskip("optuna")
    if name == "train":
        pytest.importorskip("stable_baselines3")
    kills = dict.fromkeys(victims, size(f"kills_of_{name}"))
    loaded = (
        ["torch._dynamo", "stable_baselines3", "routepilot.training.train"]
        if name == "train"
        else []
    )
    with warm(place, *loaded) as begin:
        rng = random.Random(sequence(7))
        killer = Killer(make(place), place, begin, kills, rng)
        killer.kill_all()
    report(f"kill {name}", **killer.figures())


def test_a_kill_while_the_model_is_prepared_leaves_nothing(place: Path) -> None:
    import numpy as np
    from onnx import TensorProto, helper, save

    weights = np.ones((512, 512), np.float32)
    nodes = [helper.make_node("MatMul", [f"a{i}", "w"], [f"a{i + 1}"]) for i in range(150)]
    graph = helper.make_graph(
        nodes,
        "slow",
        [helper.make_tensor_value_info("a0", TensorProto.FLOAT, [512, 512])],
        [helper.make_tensor_value_info("a150", TensorProto.FLOAT, [512, 512])],
        [
            helper.make_tensor(
                "w", TensorProto.FLOAT, (512, 512), (weights / 512).tobytes(), raw=True
            )
        ],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
         place / "slow.onnx")  # fmt: skip
    command = routepilot("features", place / "slow.onnx", "--json")
    process = start(command)
    found: list[psutil.Process] = []
    end = time.monotonic() + 30
    while not found and process.poll() is None and time.monotonic() < end:
        found = workers(process.pid)
        time.sleep(0.01)
    assert found, "the reference child was never seen"
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(found, timeout=10)
    assert not alive, "the reference child outlived its parent"
    assert drafts(place / "cache")
    finish(command)
    assert not drafts(place / "cache")


def test_helpers_of_a_killed_run_end_with_the_next() -> None:
    """A compiler's daemon cannot be reached when the parent is killed; the next worker ends it."""
    from routepilot.env import child

    environment = {**os.environ, MARK_VARIABLE: "999999999-0123"}
    helper = subprocess.Popen(["sleep", "1000"], env=environment, start_new_session=True)
    while MARK_VARIABLE.encode() not in Path(f"/proc/{helper.pid}/environ").read_bytes():
        time.sleep(0.01)  # a program that has just begun shows nothing yet
    child.end_orphans()
    assert helper.wait(5) == -signal.SIGKILL


def test_a_store_under_fire(place: Path) -> None:
    """Writers killed between and inside transactions: the store opens, sound, with what it had."""
    kills = size("kills_of_writers")
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); import synthetic\n"
        "from pathlib import Path\n"
        "from routepilot.env.store import RecordStore\n"
        "from routepilot.env.records import Record\n"
        "from routepilot.env.outcomes import Outcome, Status\n"
        "from routepilot.env.routes import Route\n"
        "with RecordStore(Path(sys.argv[1])) as store:\n"
        "    store.add_target(synthetic.TARGET, synthetic.CATALOG)\n"
        "    n = store.count()\n"
        "    print('go', flush=True)\n"
        "    while True:\n"
        "        store.add(Record('f', synthetic.TARGET.key,"
        " Outcome(Route((('-n', str(n)),)), Status.OK)))\n"
        "        n += 1\n"
        "        print(n, flush=True)\n"
    )
    path, kept = place / "s.sqlite", 0
    rng = random.Random(3)
    tests = str(Path(synthetic.__file__).parent)
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path), tests], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        with process.stdout:
            said = [int(line) for line in process.stdout.read().split("\n") if line.isdigit()]
        process.wait()
        with RecordStore(path) as store:
            now = store.count()
        assert now >= max([kept, *said[:-1]]), "an acknowledged record was lost"
        kept = now
    assert recorded(path) == kept
    report("kill writers", kills=kills, records=kept)
