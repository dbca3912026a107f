"""The wheel and the source archive: built from a copy of the tree, looked into, installed, run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: What a checkout has beside the sources, which no build should see.
BESIDE = shutil.ignore_patterns(
    ".*", "runs", "evaluation", "build", "dist", "*.egg-info", "__pycache__", "routepilot-*"
)

BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools changes them
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Source archive, wheel, and what was said while they were built."""
    pytest.importorskip("setuptools", "77")
    place = tmp_path_factory.mktemp("distributions")
    tree, out = place / "tree", place / "dist"
    shutil.copytree(ROOT, tree, ignore=BESIDE)
    out.mkdir()
    # Setuptools warns where Python is told to write no bytecode.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (archive,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return archive, wheel, done.stdout + done.stderr


def released() -> set[str]:
    """Files of `checkpoints/` that are released."""
    kinds = {".safetensors", ".json", ".yaml", ".parquet"}
    files = [p for p in (ROOT / "checkpoints").rglob("*") if p.suffix in kinds]
    return {p.relative_to(ROOT).as_posix() for p in files if "resume" not in p.parts}


def test_the_build_warns_of_nothing(built: tuple[Path, Path, str]) -> None:
    said = [line for line in built[2].splitlines() if "warning" in line.lower()]
    assert not said, said


def test_the_wheel_holds_what_runs_and_nothing_else(built: tuple[Path, Path, str]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
    modules = {
        f"routepilot/{p.relative_to(ROOT).as_posix()}"
        for room in ("env", "agents", "training", "checkpoints")
        for p in (ROOT / room).rglob("*.py")
        if "public" not in p.parts
    }
    data = {f"routepilot/{name}" for name in released()}
    templates = {f"routepilot/training/{p.name}" for p in (ROOT / "training").glob("*.j2")}
    wanted = modules | data | templates
    wanted |= {"routepilot/py.typed", "routepilot/env/zoo_splits.json", "routepilot/__init__.py"}
    assert len(templates) >= 2 and len(data) >= 10 and not wanted - names, wanted - names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"routepilot"}
    assert not [name for name in names if "test" in name.split("/")[-1] or name.endswith(".pyc")]


def test_the_source_archive_holds_enough_to_read_test_and_cite(
    built: tuple[Path, Path, str],
) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tested = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("*.py")}
    pages = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*") if p.is_file()}
    files = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "pyproject.toml"}
    wanted = tested | pages | released() | files | {"tests/lowest.txt", "training/public/py.typed"}
    assert not wanted - names, wanted - names
    assert not [name for name in names if name.endswith((".pyc", ".pyo")) or ".venv" in name]


def test_the_wheel_runs_from_a_bare_folder(built: tuple[Path, Path, str], tmp_path: Path) -> None:
    target = tmp_path / "target"
    options = ["--target", str(target), "--no-deps", "--no-index", "--no-compile", "--quiet"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    put = subprocess.run([*pip, *options, str(built[1])], capture_output=True, text=True)
    assert put.returncode == 0, put.stderr
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "import routepilot; print(routepilot.__path__[0])\n"
        "from routepilot.training.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(target), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    where, *shown = done.stdout.splitlines()
    assert Path(where).resolve() == (target / "routepilot").resolve()
    assert any("tune" in line for line in shown) and (target / "bin" / "routepilot").is_file()
