"""kill -9 on the real compilers: ONNX Runtime, OpenVINO, and Inductor (marked `compiler`).

Their clocks are real, so a resumed run must repeat what does not hang on them: the routes in their
order, what came of each, engine hashes and losses.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sizes import report, size
from test_kill import drafts, finish, nothing_runs, recorded, routepilot, start, strike, workers

BUILDS = 6

#: Seconds in which what a dead parent left must end; a C++ compiler ends its file first.
ENDING = 60.0

#: A file of 51 bytes that ONNX Runtime makes when it is imported, one for all processes.
ORT_SESSION = ".ses"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cache, a data folder and temporary files of its own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def facts(text: str) -> list[tuple[object, ...]]:
    """Of a result, what equal builds give whatever the clock says."""
    return [
        (
            trial["route"],
            trial["status"],
            trial["engine_hash"],
            {k: pytest.approx(v, rel=1e-5, abs=1e-9) for k, v in trial["losses"].items()},
        )
        for trial in json.loads(text)["trials"]
    ]


def until_something_builds(process: Any, seconds: float) -> None:
    """Wait so long, or until the run is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        time.sleep(0.003)


def nothing_is_left(place: Path, out: Path) -> None:
    assert not drafts(out, place / "cache")
    assert not list((out / "work").glob("**/.building/*"))
    left = {path.name for path in (place / "tmp").iterdir()} - {ORT_SESSION}
    assert not left, "temporary files were left behind"


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "cpu"])
def test_tune_killed_at_any_moment(backend: str, place: Path, tiny_file: Path) -> None:
    if backend != "onnxruntime":
        pytest.importorskip("openvino")
    kills, done, runs = size("kills_of_compilers", 2, 40), 0, 0
    killed: Counter[str] = Counter()
    rng = random.Random(size("seed", 11, 11))

    def command(out: Path, seed: int) -> list[str]:
        backends = ("--backend", backend, "--agent", "random", "--deadline", "60")
        numbers = ("--max-builds", BUILDS, "--seed", seed, "--json")
        return routepilot("tune", tiny_file, "-o", out, *backends, *numbers)

    known: dict[int, tuple[list[tuple[object, ...]], float]] = {}
    while done < kills:
        seed = runs % 3
        if seed not in known:
            begun = time.monotonic()
            wanted = facts(finish(command(place / f"whole-{seed}", seed)))
            known[seed] = wanted, time.monotonic() - begun
        wanted, seconds = known[seed]
        out, struck, kept, text = place / f"out-{runs}", 0, 0, None
        while text is None:
            whom = rng.choice(("parent", "child"))
            process = start(command(out, seed))
            if struck < 5 and done < kills:
                until_something_builds(process, rng.uniform(0.15, 0.9) * seconds)
                if strike(process, whom):
                    done, struck = done + 1, struck + 1
                    killed[whom] += 1
            output, errors = process.communicate(timeout=240)
            assert "Traceback" not in errors
            nothing_runs(process.pid)
            now = recorded(out / "records.sqlite")
            assert now >= kept, "records were lost"
            kept = now
            if process.returncode == 0:
                text = output
            else:
                assert whom == "parent", f"a killed child ended the run: {errors}"
        assert facts(text) == wanted
        nothing_is_left(place, out)
        runs += 1
    report(f"kill tune on {backend}", kills=done, runs=runs, **killed)


@pytest.mark.compiler
def test_an_inductor_build_killed_under_way_is_made_again(place: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    if not any(shutil.which(name) for name in ("g++", "clang++")):
        pytest.skip("no C++ compiler")
    torch.manual_seed(0)
    program = torch.export.export(torch.nn.Linear(8, 4).eval(), (torch.randn(2, 8),))
    torch.export.save(program, str(place / "net.pt2"))
    command = routepilot(
        "tune", place / "net.pt2", "-o", place / "out", "--backend", "inductor", "--agent",
        "random", "--max-builds", 1, "--option", "device=cpu", "--deadline", "300", "--json",
    )  # fmt: skip
    kills = size("kills_of_inductor", 1, 4)
    rng = random.Random(size("seed", 12, 12))
    for number in range(kills):
        process = start(command)
        end = time.monotonic() + 240
        while not any("inductor_build" in " ".join(w.cmdline()) for w in workers(process.pid)):
            assert process.poll() is None and time.monotonic() < end, "no build was seen"
            time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 8.0))
        if process.poll() is None:
            process.kill()
        process.communicate()
        nothing_runs(process.pid, ENDING)
        assert recorded(place / "out" / "records.sqlite") <= 2, number
    done = json.loads(finish(command))
    assert done["builds"] == 1 and done["outcomes"]
    assert not drafts(place / "out", place / "cache")
    assert sum(p.stat().st_size for p in (place / "tmp").rglob("*") if p.is_file()) < 1 << 20
    report("kill tune on inductor", kills=kills)
    assert os.path.isdir(place / "out" / "work")
