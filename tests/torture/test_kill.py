"""kill -9 at random moments: at most the build in flight is lost, nothing is left behind.

Runs of the command line with the hostile backend and no noise, so that a resumed run must end with
exactly the figures of an uninterrupted one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import hostile_backend
import psutil
import pytest
import synthetic
from sizes import report, size

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
    deeds = "work segv nan shape inaccurate run_raise fail poison overfit close_raise"
    options = {"noise": "none", "slow": "0.03", "deeds": deeds}
    monkeypatch.setenv("ROUTEPILOT_HOSTILE", json.dumps(options))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    hostile_backend.hostile_model(tmp_path / "hostile.onnx")
    return tmp_path


def routepilot(*words: object) -> list[str]:
    return [sys.executable, "-m", "routepilot", *map(str, words)]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def workers(pid: int) -> list[psutil.Process]:
    try:
        return [
            p
            for p in psutil.Process(pid).children(recursive=True)
            if "routepilot.env" in " ".join(p.cmdline())
        ]
    except psutil.Error:
        return []


def strike(process: subprocess.Popen[str], whom: str) -> bool:
    """Kill the run, or one of its children; returns whether somebody was there to be killed."""
    if process.poll() is not None:
        return False
    if whom == "parent":
        process.kill()
        process.wait()
        return True
    for child in workers(process.pid):
        try:
            child.send_signal(signal.SIGKILL)
            return True
        except psutil.Error:
            continue
    return False


def recorded(store: Path) -> int:
    """Records in the store, which must be sound."""
    if not store.exists():
        return 0
    with closing(sqlite3.connect(store)) as base, base:
        assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if not base.execute("SELECT 1 FROM sqlite_master WHERE name = 'records'").fetchone():
            return 0
        return int(base.execute("SELECT count(*) FROM records").fetchone()[0])


def nothing_runs(parent: int, seconds: float = 10.0) -> None:
    """No child of a dead parent lives on."""
    end = time.monotonic() + seconds
    while True:
        left = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK_VARIABLE, "").startswith(f"{parent}-"):
                    left.append(process)
            except psutil.Error:
                continue
        if not left:
            return
        assert time.monotonic() < end, left
        time.sleep(0.02)


def drafts(*folders: Path) -> list[Path]:
    return [p for folder in folders for p in folder.rglob(".*") if p.name.startswith(".draft")]


def facts(text: str) -> dict[str, Any]:
    result = json.loads(text)
    found = {key: result[key] for key in SAME}
    found["trials"] = [{key: trial[key] for key in SAME_TRIAL} for trial in result["trials"]]
    return found


def builds_of(out: Path) -> Counter[str]:
    lines = (out / "work" / "builds.jsonl").read_text().splitlines()
    return Counter(json.loads(line)[1] for line in lines)


def tune(place: Path, out: Path, seed: int) -> list[str]:
    backend = ("--backend", "hostile_backend:make", "--agent", "random", "--deadline", "20")
    size_and_seed = ("--max-builds", BUILDS, "--seed", seed, "--json")
    return routepilot("tune", place / "hostile.onnx", "-o", out, *backend, *size_and_seed)


@pytest.mark.parametrize("whom", ["parent", "child"])
def test_tune_killed_at_any_moment(whom: str, place: Path) -> None:
    kills = size(f"kills_of_{whom}", 3, 120 if whom == "parent" else 200)
    rng = random.Random(size("seed", 7, 7))
    done = runs = 0
    lost: Counter[int] = Counter()
    while done < kills:
        seed = runs % 5
        whole = place / f"whole-{seed}"
        if not (whole / "result.json").exists():
            begun = time.monotonic()
            wanted = facts(finish(tune(place, whole, seed)))
            (whole / "facts.json").write_text(json.dumps([wanted, time.monotonic() - begun]))
        wanted, seconds = json.loads((whole / "facts.json").read_text())
        out = place / f"out-{runs}"
        struck, kept, text = 0, 0, None
        while text is None:
            process = start(tune(place, out, seed))
            while struck < 6 and done < kills:
                # The moment goes by what is on record: the machine may be slower or faster now.
                end = time.monotonic() + rng.uniform(0.1, 0.9) * seconds
                enough = recorded(out / "records.sqlite") + rng.randrange(BUILDS)
                while time.monotonic() < end and process.poll() is None:
                    if recorded(out / "records.sqlite") > enough:
                        time.sleep(rng.uniform(0.0, 0.1))
                        break
                    time.sleep(0.003)
                before = recorded(out / "records.sqlite")
                if not strike(process, whom):
                    break
                done, struck = done + 1, struck + 1
                # The build in flight is made again; killed twice, it would count as greedy.
                while recorded(out / "records.sqlite") < before + 2 and process.poll() is None:
                    time.sleep(0.02)
            output, errors = process.communicate(timeout=240)
            assert "Traceback" not in errors
            nothing_runs(process.pid)
            now = recorded(out / "records.sqlite")
            assert now >= kept, "records were lost"
            kept = now
            if process.returncode == 0:
                text = output
            elif whom == "child":
                raise AssertionError(f"a killed child ended the run: {errors}")
        assert facts(text) == wanted
        assert not drafts(out, place / "cache")
        assert not list((out / "work").glob("**/.building/*"))
        # Every route is built once, the winners once more, and once more for each kill at most.
        again = sum(builds_of(out).values()) - sum(builds_of(whole).values())
        defaults = builds_of(out)[""] - builds_of(whole)[""]
        assert again - defaults <= struck, (again, defaults, struck)
        lost[again - defaults] += 1
        runs += 1
    report(
        f"kill {whom} of tune",
        kills=done,
        runs=runs,
        builds_lost=sum(k * v for k, v in lost.items()),
    )


def compare(place: Path, out: Path, agents: str) -> list[str]:
    backend = ("--backend", "hostile_backend:make", "--agents", agents, "--deadline", "20")
    return routepilot(
        "compare", place / "hostile.onnx", "-o", out, *backend, "--max-builds", 6, "--json"
    )


def rows_of(text: str) -> dict[str, Any]:
    """A comparison without its clock."""
    rows = json.loads(text)["agents"]
    return {n: {k: v for k, v in row.items() if k != "seconds"} for n, row in rows.items()}


def test_compare_killed_at_any_moment(place: Path) -> None:
    """Agents share outcomes, so a kill in one agent's search must not change another's."""
    pytest.importorskip("optuna")
    kills, done, runs = size("kills_of_compare", 3, 60), 0, 0
    rng = random.Random(size("seed", 10, 10))
    agents = "default,random,fast,recentred,tpe"
    begun = time.monotonic()
    wanted = rows_of(finish(compare(place, place / "whole", agents)))
    seconds = time.monotonic() - begun
    assert len(wanted) == 5
    while done < kills:
        out, struck, kept = place / f"compared-{runs}", 0, 0
        while True:
            process = start(compare(place, out, agents))
            end = time.monotonic() + rng.uniform(0.2, 0.9) * seconds
            while time.monotonic() < end and process.poll() is None:
                time.sleep(0.003)
            if process.poll() is None and struck < 3 and done < kills:
                process.kill()
                done, struck = done + 1, struck + 1
            output, errors = process.communicate(timeout=240)
            assert "Traceback" not in errors
            nothing_runs(process.pid)
            now = recorded(out / "records.sqlite")
            assert now >= kept, "records were lost"
            kept = now
            if process.returncode == 0:
                break
        assert rows_of(output) == wanted
        written = json.loads((out / "comparison.json").read_text())
        assert rows_of(json.dumps(written)) == wanted
        assert not drafts(out)
        runs += 1
    report("kill compare", kills=done, runs=runs)


def test_collect_killed_at_any_moment(place: Path) -> None:
    kills, done, runs = size("kills_of_collect", 2, 50), 0, 0
    rng = random.Random(size("seed", 8, 8))

    def command(out: Path) -> list[str]:
        backend = (
            "--backend",
            "hostile_backend:make",
            "--routes",
            12,
            "--controls",
            1,
            "--recheck",
            1,
        )
        return routepilot("collect", "--models", place / "hostile.onnx", "-o", out, *backend)

    begun = time.monotonic()
    finish(command(place / "whole.parquet"))
    seconds = time.monotonic() - begun
    wanted = outcomes(place / "whole.parquet")
    while done < kills:
        out, struck = place / f"t{runs}.parquet", 0
        while True:
            process = start(command(out))
            end = time.monotonic() + rng.uniform(0.2, 1.1) * seconds
            while time.monotonic() < end and process.poll() is None:
                time.sleep(0.003)
            if process.poll() is None and struck < 5 and done < kills:
                process.kill()
                done, struck = done + 1, struck + 1
            _, errors = process.communicate(timeout=240)
            assert "Traceback" not in errors
            nothing_runs(process.pid)
            if out.exists():
                load_table(out)  # whole or not at all
            if process.returncode == 0:
                break
        assert outcomes(out) == wanted
        assert not drafts(place)
        runs += 1
    report("kill collect", kills=done, runs=runs)


def outcomes(path: Path) -> dict[str, list[tuple[object, ...]]]:
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


def test_train_killed_at_any_moment(place: Path) -> None:
    """A killed run leaves a checkpoint or nothing; a repeated one gives the same bytes."""
    pytest.importorskip("stable_baselines3")
    kills, done, runs = size("kills_of_train", 1, 30), 0, 0
    rng = random.Random(size("seed", 9, 9))
    save_table(synthetic.table(), place / "table.parquet")

    code = (
        "import sys; from pathlib import Path\n"
        "from routepilot.env.tables import load_table\n"
        "from routepilot.training.train import TrainConfig, train\n"
        "config = TrainConfig(steps=256, environments=2, rollout=64, batch=64, epochs=1,"
        " teacher_episodes=20, teacher_epochs=2, evaluate_every=64)\n"
        "train(load_table(Path(sys.argv[1])), config, out=Path(sys.argv[2]))\n"
    )

    def command(out: Path) -> list[str]:
        return [sys.executable, "-c", code, str(place / "table.parquet"), str(out)]

    begun = time.monotonic()
    finish(command(place / "whole"))
    seconds = time.monotonic() - begun
    wanted = {p.name: p.read_bytes() for p in (place / "whole").glob("*.safetensors")}
    assert wanted
    while done < kills:
        out = place / f"out-{runs}"
        process = start(command(out))
        time.sleep(rng.uniform(0.3, 1.0) * seconds)
        if process.poll() is None:
            process.kill()
            done += 1
        process.communicate(timeout=60)
        nothing_runs(process.pid)
        for weights in out.glob("*.safetensors"):
            assert weights.read_bytes() == wanted[weights.name]
        if done % 5 == 1 or done == kills:
            finish(command(out))
            assert {p.name: p.read_bytes() for p in out.glob("*.safetensors")} == wanted
            assert not drafts(out)
        runs += 1
    report("kill train", kills=done)


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
    child.end_orphans()
    assert helper.wait(5) == -signal.SIGKILL


def test_a_store_under_fire(place: Path) -> None:
    """Writers killed between and inside transactions: the store opens, sound, with what it had."""
    kills = size("kills_of_writers", 10, 200)
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
