"""kill -9 on the real compilers: ONNX Runtime, OpenVINO, and Inductor (marked `compiler`).

Their clocks are real, so a resumed run must repeat what does not hang on them: the routes in their
order, what came of each, engine hashes and losses. The loop is `killing.py`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killing import (
    Course,
    Killer,
    drafts,
    finish,
    nothing_runs,
    recorded,
    routepilot,
    start,
    warm,
    workers,
)
from sizes import report, sequence, size

from routepilot.env.tables import load_table

BUILDS = 3

#: Seconds in which what a dead parent left must end; a C++ compiler ends its file first.
ENDING = 60.0

#: A file of 51 bytes that ONNX Runtime makes when it is imported, one for all processes.
ORT_SESSION = ".ses"

#: Backend -> the routes of its collections.
PLANS = {
    "onnxruntime": "-graph=[all|basic|off] -quantize=[none|dynamic]",
    "openvino": "-snippets=[on|off] -quantize=[none|dynamic|weights8]",
    "cpu": "-engine=[ort|openvino] -quantize=[none|dynamic|weights8]",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cache, a data folder and temporary files of its own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def near(losses: Any) -> dict[str, Any]:
    return {k: pytest.approx(v, rel=1e-5, abs=1e-9) for k, v in dict(losses).items()}


def facts_of_tune(out: Path, text: str) -> list[tuple[object, ...]]:
    """Of a result, what equal builds give whatever the clock says."""
    return [
        (trial["route"], trial["status"], trial["engine_hash"], near(trial["losses"]))
        for trial in json.loads(text)["trials"]
    ]


def facts_of_collect(out: Path, text: str) -> list[tuple[object, ...]]:
    """The same of a table."""
    (outcomes,) = load_table(out).outcomes.values()
    return [
        (str(route), repeat, one.status, one.engine_hash, near(one.losses))
        for route in sorted(outcomes, key=str)
        for repeat, one in enumerate(outcomes[route])
    ]


def nothing_is_left(place: Path, work: Path) -> None:
    assert not drafts(place)
    assert not list(work.glob("**/.building/*"))
    left = {path.name for path in (place / "tmp").iterdir()} - {ORT_SESSION}
    assert not left, "temporary files were left behind"


def tune(backend: str, model: Path, place: Path) -> Course:
    backends = ("--backend", backend, "--agent", "random", "--deadline", 60)
    return Course(
        "tune",
        lambda out, seed: [
            "tune", model, "-o", out, *backends, "--effort", "quick", "--max-builds", BUILDS,
            "--seed", seed, "--json",
        ],
        lambda word: word,
        facts_of_tune,
        lambda out: nothing_is_left(place, out),
        lambda out: out / "records.sqlite",
        seeds=1,
        builds=BUILDS,
        ending=ENDING,
    )  # fmt: skip


def collect(backend: str, model: Path, place: Path) -> Course:
    backends = ("--backend", backend, "--deadline", 60, "--effort", "quick")
    return Course(
        "collect",
        lambda out, seed: [
            "collect", "--models", model, "-o", out, *backends, "--expression", PLANS[backend],
            "--controls", 1, "--recheck", 0, "--seed", seed,
        ],
        lambda word: f"{word}.parquet",
        facts_of_collect,
        lambda out: nothing_is_left(place, out.with_name(f"{out.stem}-work")),
        lambda out: out.with_suffix(".sqlite"),
        seeds=1,
        builds=7,
        ending=ENDING,
    )  # fmt: skip


#: Every verb on every backend; `make test` has no time for more than some.
PAIRS = [(make, backend) for make in (tune, collect) for backend in PLANS]
if not size("all_compilers"):
    PAIRS = [(tune, "cpu"), (collect, "onnxruntime")]


@pytest.mark.parametrize(("make", "backend"), PAIRS, ids=lambda x: getattr(x, "__name__", x))
def test_killed_at_any_moment(
    make: Callable[[str, Path, Path], Course], backend: str, place: Path, tiny_file: Path
) -> None:
    if backend != "onnxruntime":
        pytest.importorskip("openvino")
    kills = size("kills_of_compilers")
    with warm(place) as begin:
        course = make(backend, tiny_file, place)
        rng = random.Random(sequence(11))
        killer = Killer(course, place, begin, {"parent": kills, "child": kills}, rng)
        killer.kill_all()
    report(f"kill {course.name} on {backend}", **killer.figures())


def live(model: Path, place: Path) -> Course:
    """TensorRT-RTX compiles without a GPU; it can time nothing there, so only `live` runs on it."""
    knobs = "-kgen:tiling,-mha_fusion:v2"

    def facts(out: Path, text: str) -> dict[str, Any]:
        keys = ("changes", "live", "identical", "failed", "refused", "distinct_engines")
        return {key: json.loads(text)[key] for key in keys}

    def left(out: Path) -> None:
        assert not drafts(place)
        assert not [p.name for p in (place / "tmp").iterdir() if p.name != ORT_SESSION]

    return Course(
        "live",
        lambda out, seed: ["live", model, "--cache", out, "--knobs", knobs, "--json"],
        lambda word: word,
        facts,
        left,
        seeds=1,
        ending=ENDING,
    )


def test_compiles_of_tensorrt_rtx_killed_at_any_moment(place: Path, tiny_file: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    kills = size("kills_of_rtx")
    with warm(place) as begin:
        rng = random.Random(sequence(13))
        killer = Killer(live(tiny_file, place), place, begin, {"parent": kills}, rng)
        killer.kill_all()
    report("kill live on tensorrt_rtx", **killer.figures())


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
    kills = size("kills_of_inductor")
    rng = random.Random(sequence(12))
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
