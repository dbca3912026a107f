"""The deploy folder: the winning engine or model, what loads it, and what its figures depend on.

Owns the folder as a whole: it is filled aside and put in place at the end, so that there is always
the old one or the new one. What an engine writes into it is the backend's business.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from routepilot.training import apply_route
from routepilot.training.files import write_json
from routepilot.training.runs import DEPLOY

#: Facts of a result that go with the engine.
FACTS = (
    "model fingerprint backend target route is_default speedup speedup_low speedup_high losses"
    " default_latency_ms note trtexec manifest"
).split()


def draft(run: Path) -> Path:
    """An empty folder for the engine's files, beside the deploy folder."""
    folder = run / f".{DEPLOY}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def finish(run: Path, result: Mapping[str, object]) -> Path | None:
    """Put what lies in the draft in place, with its manifest.

    Args:
        run: The run's folder.
        result: Content of `result.json`.

    Returns:
        The deploy folder; None when the engine wrote nothing, and what was there stays.
    """
    folder, place, old = run / f".{DEPLOY}", run / DEPLOY, run / f".{DEPLOY}-old"
    if not any(p.is_file() for p in folder.rglob("*")):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    if result.get("trtexec"):  # an answer that other front ends of TensorRT can apply
        shutil.copyfile(Path(apply_route.__file__), folder / "apply_route.py")
    written = sorted(p for p in folder.rglob("*") if p.is_file())
    facts = {name: result[name] for name in FACTS if name in result}
    hashes = {str(path.relative_to(folder)): _sha256(path) for path in written}
    write_json(folder / "manifest.json", {**facts, "files": hashes})
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    folder.rename(place)
    shutil.rmtree(old, ignore_errors=True)
    return place


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
