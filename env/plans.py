"""Plans on disk: kept by content hash, remembered as ours, and read only if they may be.

Owns where the engines of a run lie, beside the files they were built from. A plan is executable
code, so one that this installation did not make (`ours.py`) is refused. Knows no compiler, no route
and no GPU.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from pathlib import Path

from routepilot.env import ours
from routepilot.env.drafts import whole_file
from routepilot.env.errors import InputError, MachineError

#: Folders of a work folder: plans as `HASH.plan`, and `PRECISION/model.onnx` that they were built
#: from.
PLANS, SOURCES = "plans", "onnx"

#: No room.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def keep_plan(data: bytes, digest: str, workdir: Path) -> Path:
    """Write a plan into a work folder under its hash, once, and remember that it is ours.

    Args:
        data: Serialized engine.
        digest: Its SHA-256.
        workdir: Work folder of a run.

    Raises:
        MachineError: It cannot be written.
        OSError: The disk is full.
    """
    place = workdir / PLANS / f"{digest}.plan"
    if not place.is_file():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(place) as draft:
                draft.write_bytes(data)
        except OSError as error:
            if error.errno in _FULL:  # whose fault that is, the worker decides
                raise
            raise MachineError(f"the plan {place} cannot be kept: {error}") from None
    remember_plan(digest)
    return place


def source_name(precision: str) -> str:
    """Where, within a work folder, the ONNX file of a precision lies that plans are built from."""
    return f"{SOURCES}/{precision}/model.onnx"


def keep_source(source: Path, precision: str, workdir: Path) -> Path:
    """Put the ONNX file that plans are built from into a work folder, where trtexec can read it.

    Copied, not linked: onnx refuses weights that have several links.

    Args:
        source: ONNX file, with its external weights beside it.
        precision: A value of the precision knob.
        workdir: Work folder of a run.
    """
    place = workdir / source_name(precision)
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        copy_onnx(source, place.parent)
    return place


def copy_onnx(source: Path, folder: Path) -> list[str]:
    """Put an ONNX file, with its external weights, into a folder as `model.onnx`.

    Returns:
        Names of the files written.
    """
    import onnx
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    proto = onnx.load(str(source), load_external_data=False)
    tensors = [t for t in proto.graph.initializer if uses_external_data(t)]
    weights = {n: source.parent / n for n in {ExternalDataInfo(t).location for t in tensors}}
    for name, file in {**weights, "model.onnx": source}.items():  # the graph last: it says all done
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    return sorted([*weights, "model.onnx"])


def remember_plan(digest: str) -> None:
    """Note that this installation made a plan with this hash.

    Raises:
        MachineError: The note cannot be written.
    """
    if not ours.is_ours(ours.PLANS, digest):
        ours.remember(ours.PLANS, digest)


def read_plan(path: Path, *, trust: bool = False, expected: str = "") -> bytes:
    """The bytes of a plan file that may be loaded.

    Args:
        path: The file.
        trust: Load a plan that this installation did not make.
        expected: Hash the plan must have; empty for any.

    Raises:
        InputError: The file cannot be read, was changed, or is not ours.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"plan file {str(path)!r} cannot be read: {error}") from None
    digest = hashlib.sha256(data).hexdigest()
    if expected and digest != expected:
        raise InputError(f"plan file {str(path)!r} was changed since it was saved; build it again")
    if not trust and not ours.is_ours(ours.PLANS, digest):
        raise InputError(
            f"plan file {str(path)!r} was not made by this installation, and a plan is code that"
            " runs; load it with --trust only if you know who built it"
        )
    return data
