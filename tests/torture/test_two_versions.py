"""Two versions of the package on one store, each a process of its own with its own files."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import hostile_backend
import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(hostile_backend.__file__).parent

#: What the newer version's store has more.
MORE = '    (\n        "ALTER TABLE records ADD COLUMN watts REAL",\n    ),\n'


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with a store of the next schema, to be put on `PYTHONPATH`."""
    place = tmp_path_factory.mktemp("newer")
    package = place / "routepilot"
    shutil.copytree(ROOT / "training" / "public", package)
    for room in ("env", "agents", "training", "checkpoints"):
        shutil.copytree(
            ROOT / room, package / room, ignore=shutil.ignore_patterns("__pycache__", "public")
        )
    store = package / "env" / "store.py"
    text = store.read_text(encoding="utf-8")
    before, found, after = text.partition("\n)\n\nSCHEMA_VERSION")
    assert found, "the list of migrations is not where it was"
    store.write_text(f"{before}\n{MORE.rstrip()}{found}{after}", encoding="utf-8")
    return place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    options = {"noise": "none", "slow": "0.05", "deeds": "work fail nan"}
    monkeypatch.setenv("ROUTEPILOT_HOSTILE", json.dumps(options))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hostile_backend.hostile_model(tmp_path / "m.onnx")
    return tmp_path


def start(
    place: Path, version: Path | None, builds: int, out: str = "out"
) -> subprocess.Popen[str]:
    path = [str(p) for p in (version, HERE) if p is not None]
    command = [sys.executable, "-m", "routepilot", "tune", str(place / "m.onnx"), "--json"]
    command += ["-o", str(place / out), "-b", "hostile_backend:make", "--agent", "random"]
    return subprocess.Popen(
        [*command, "--max-builds", str(builds)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def schema(place: Path) -> int:
    with closing(sqlite3.connect(place / "out" / "records.sqlite")) as base, base:
        return int(base.execute("PRAGMA user_version").fetchone()[0])


def test_the_newer_goes_on_where_the_older_was_and_the_older_refuses(
    place: Path, newer: Path
) -> None:
    run = start(place, None, 3)
    output, errors = run.communicate(timeout=240)
    assert run.returncode == 0, errors
    old = schema(place)
    first = json.loads(output)
    run = start(place, newer, 6)
    output, errors = run.communicate(timeout=240)
    assert run.returncode == 0, errors
    second = json.loads(output)
    assert schema(place) == old + 1, "the newer version should have lifted the store"
    assert second["trials"][:3] == first["trials"], "what the older one built is not built again"
    assert second["manifest"]["fresh_builds"] == 3
    run = start(place, None, 6)
    _, errors = run.communicate(timeout=240)
    assert run.returncode == 2
    assert "newer RoutePilot" in errors and "Traceback" not in errors
    with closing(sqlite3.connect(place / "out" / "records.sqlite")) as base, base:
        assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert base.execute("SELECT count(*) FROM records").fetchone() == (7,)


def test_an_older_run_under_way_outlives_the_migration(place: Path, newer: Path) -> None:
    """The older process has the store open; the newer one lifts it, and both write on."""
    older = start(place, None, 14)
    store = place / "out" / "records.sqlite"
    end = time.monotonic() + 120
    while True:
        assert time.monotonic() < end and older.poll() is None, older.communicate()
        try:
            with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as base, base:
                if base.execute("SELECT count(*) FROM records").fetchone()[0] >= 2:
                    break
        except sqlite3.Error:
            pass
        time.sleep(0.01)
    code = (
        "import sys; from pathlib import Path\n"
        "from routepilot.env import store\n"
        "with store.RecordStore(Path(sys.argv[1])) as s: print(store.SCHEMA_VERSION, s.count())\n"
    )
    lift = subprocess.run(
        [sys.executable, "-c", code, str(store)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(newer)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert lift.returncode == 0, lift.stderr
    version, seen = map(int, lift.stdout.split())
    meanwhile = older.poll() is None
    output, errors = older.communicate(timeout=240)
    assert older.returncode == 0, errors
    assert "Traceback" not in errors
    assert schema(place) == version
    assert meanwhile and seen < 15, "the older run was over too soon to say anything"
    result = json.loads(output)
    assert len(result["trials"]) == 14
    with closing(sqlite3.connect(store)) as base, base:
        assert base.execute("SELECT count(*) FROM records").fetchone() == (15,)
