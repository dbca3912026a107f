"""The deploy folder: whole, with its manifest, and loadable as it stands."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_backend import hostile_model

from routepilot.env.backends import load_backend
from routepilot.env.backends.base import BuildFailure
from routepilot.env.models import prepare
from routepilot.env.routes import Route
from routepilot.training import deploy
from routepilot.training.tune import tune


def test_what_was_there_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (deploy.draft(tmp_path) / f"{name}.bin").write_text(name)
        deploy.finish(tmp_path, {"route": name})
    written = {path.name for path in (tmp_path / "deploy").iterdir()}
    assert written == {"second.bin", "manifest.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"deploy"}


def test_an_engine_that_writes_nothing_leaves_the_old_folder(tmp_path: Path) -> None:
    (deploy.draft(tmp_path) / "engine").write_text("old")
    deploy.finish(tmp_path, {"route": "old"})
    deploy.draft(tmp_path)
    assert deploy.finish(tmp_path, {"route": "new"}) is None
    assert json.loads((tmp_path / "deploy/manifest.json").read_text())["route"] == "old"


@pytest.mark.parametrize("engine", ["ort", "openvino"])
def test_load_runs_where_it_lies(engine: str, tiny_file: Path, tmp_path: Path) -> None:
    model = prepare(tiny_file)
    route = Route.read("" if engine == "ort" else "-engine=openvino")
    built = load_backend("cpu").build(model, route, tmp_path / "work")
    assert not isinstance(built, BuildFailure)
    built.save(deploy.draft(tmp_path))
    place = deploy.finish(tmp_path, {"route": str(route)})
    assert place is not None
    moved = place.rename(tmp_path / "elsewhere")
    done = subprocess.run(
        [sys.executable, str(moved / "load.py")], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == model.outputs[0].name
    facts = json.loads((moved / "manifest.json").read_text())
    for name, digest in facts["files"].items():
        assert hashlib.sha256((moved / name).read_bytes()).hexdigest() == digest
    assert {"load.py", "model.onnx"} <= set(facts["files"])


def test_the_confirmed_answer_is_on_disk_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    model = hostile_model(tmp_path / "hostile.onnx")
    out = tmp_path / "out"
    states = []

    def look(number: int, outcome: object) -> None:
        del outcome
        found = json.loads((out / "result.json").read_text())
        states.append((found["state"], found["builds"], found["route"], found["speedup"]))

    def run(builds: int) -> None:
        tune(
            model,
            backend="hostile_backend:make",
            agent="fast",
            max_builds=builds,
            out=out,
            on_outcome=look,
        )

    run(2)
    # Nothing is confirmed while it searches, so the answer is the default route.
    assert states == [("searching", 1, "", 1.0), ("searching", 2, "", 1.0)]
    first = json.loads((out / "result.json").read_text())
    assert first["state"] == "done"
    states.clear()
    run(4)
    # A confirmed answer stands until there is another.
    assert {(state, builds) for state, builds, _, _ in states} == {("done", 2)}
    assert json.loads((out / "result.json").read_text())["builds"] == 4
