"""Exported programs: PyTorch models made ready for tuning, with ONNX models that describe them.

Owns the folder of a model that carries `program.pt2`. Such a folder is a prepared model as
`models.py` makes it: the ONNX export gives fingerprint, features and input sets; the program is
what a PyTorch backend compiles; references are the program's own float32 results on the CPU,
uncompiled. Knows no backend and no route.

PyTorch runs code that is in a program's file when it reads it. So a program is read only if this
installation wrote it, if the user trusts it, or as the data that `program_screen.py` finds in it;
and always in a child process (`python -m routepilot.env.programs`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env import ours
from routepilot.env.errors import MissingExtraError, ModelError
from routepilot.env.inputs import hash_sets
from routepilot.env.interpreter import module_command
from routepilot.env.models import (
    PROGRAM,
    REFERENCE_SECONDS,
    Model,
    cache_folder,
    is_bundle,
    prepare,
)
from routepilot.env.program_screen import screened_copy

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: PyTorch's environment variables that force `weights_only` of `torch.load` on, and off.
_LOAD_VARIABLES = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")

#: Relative L2 error between the program and its ONNX export beyond which they are not one model.
SAME_MODEL = 1e-3


def prepare_program(
    path: Path,
    *,
    name: str | None = None,
    inputs: Sequence[Mapping[str, NDArray[np.generic]]] | None = None,
    seed: int = 0,
    cache: Path | None = None,
    trust: bool = False,
) -> Model:
    """Make a program file (`torch.export.save`) ready; a second call finds it made.

    Args:
        path: The file.
        name: Name for people; the file's stem when None.
        inputs: Input sets, by the names of the program's inputs; None generates them.
        seed: Seed of generated inputs.
        cache: Folder for prepared models; the user's cache folder when None.
        trust: Read it even if that runs code that is in it.

    Raises:
        ModelError: The file or an input set cannot be used.
        MissingExtraError: torch or onnxscript is not installed.
    """
    if not path.is_file():
        raise ModelError(f"program {str(path)!r} does not exist; give a file of torch.export.save")
    title = name or path.stem
    sets = [{k: np.asarray(v) for k, v in one.items()} for one in inputs or ()]
    digest = _digest(path)
    if trust:
        ours.remember(ours.PROGRAMS, digest)
    text = f"{digest} {hash_sets(sets) if sets else seed} {title}"
    known = cache_folder(cache) / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}-program"
    if is_bundle(known):
        return Model.load(known)
    return _prepare(["file", str(path.absolute())], title, sets or None, seed, cache, known)


def prepare_zoo_program(name: str, cache: Path | None = None) -> Model:
    """Make a corpus model that is defined in PyTorch ready, with its program.

    Raises:
        InputError: No such model.
        ModelError: The model comes as an ONNX file and has no program.
        MissingExtraError: What defines it is not installed.
    """
    from routepilot.env import zoo

    wanted = zoo.entry(name)
    if wanted.package:
        raise ModelError(
            f"model {name} comes as an ONNX file, and this backend compiles PyTorch programs;"
            " choose one that is defined in PyTorch, or give a .pt2 file"
        )
    missing = zoo.available(wanted)
    if missing is not None:
        raise MissingExtraError(f"model {name} is not available here: {missing}")
    return _prepare(["zoo", name], name, zoo.input_sets(wanted), 0, cache, None)


def _digest(path: Path) -> str:
    try:
        return ours.digest_of(path)
    except OSError as error:
        raise ModelError(f"program {str(path)!r} cannot be read: {error}") from None


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Let `torch.load` read plain tensors and nothing else, whatever it is asked for."""
    before = {name: os.environ.pop(name, None) for name in _LOAD_VARIABLES}
    os.environ[_LOAD_VARIABLES[0]] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def read_program(path: Path) -> ExportedProgram:
    """Read a program file in this process: one of ours as it is, another as data.

    Raises:
        ModelError: It is none, reading it could run code, or its shapes are not fixed.
    """
    import torch

    try:
        if ours.is_ours(ours.PROGRAMS, _digest(path)):
            program = torch.export.load(str(path))
        else:
            with tempfile.TemporaryDirectory(prefix="routepilot-") as folder, _tensors_only():
                screened_copy(path, Path(folder) / PROGRAM)
                program = torch.export.load(str(Path(folder) / PROGRAM))
    except ModelError:
        raise
    except Exception as error:  # the reader raises whatever it likes
        words = " ".join(str(error).split())[:200]
        raise ModelError(
            f"program {str(path)!r} cannot be read ({words}); write it with torch.export.save"
        ) from None
    if program.range_constraints:
        raise ModelError(
            f"program {str(path)!r} has shapes that vary; export it again without dynamic_shapes"
        )
    return program


def _prepare(
    source: list[str],
    title: str,
    inputs: Sequence[Mapping[str, NDArray[np.generic]]] | None,
    seed: int,
    cache: Path | None,
    target: Path | None,
) -> Model:
    place = cache_folder(cache)
    with tempfile.TemporaryDirectory(dir=place, prefix=".program-") as draft:
        folder = Path(draft)
        _child(["export", str(folder), *source], title)
        base = prepare(
            folder / "model.onnx", name=title, inputs=inputs, seed=seed, cache=folder / "plain"
        )
        target = target or place / f"{base.folder.name}-program"
        if is_bundle(target):
            return Model.load(target)
        shutil.move(folder / PROGRAM, base.folder / PROGRAM)
        _child(["reference", str(base.folder)], title)
        try:
            os.replace(base.folder, target)
        except OSError as error:
            if not is_bundle(target):  # another process made it meanwhile
                raise ModelError(f"the prepared model cannot be written: {error}") from None
    return Model.load(target)


def _child(arguments: list[str], title: str) -> None:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        done = subprocess.run(
            [*module_command("routepilot.env.programs"), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=REFERENCE_SECONDS,
            env={**os.environ, **threads},
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"making {title} ready took more than {REFERENCE_SECONDS} s; give a smaller program"
        ) from None
    if done.returncode == 0:
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    words = " ".join((lines or [f"exit {done.returncode}"])[-1].split())[:400]
    if "No module named" in words:
        raise MissingExtraError(f"{words}; pip install 'routepilot[inductor]'")
    raise ModelError(f"{title} cannot be made ready: {words}")


def _export(folder: Path, kind: str, source: str) -> None:
    """Write `program.pt2` and `model.onnx`."""
    import torch

    if kind == "zoo":
        program = _zoo_program(source)
    else:
        program = read_program(Path(source))
    values = program.example_inputs
    if values is None or values[1] or not all(isinstance(v, torch.Tensor) for v in values[0]):
        raise SystemExit(
            "a program takes tensors by position here, with example inputs kept; export it so"
        )
    from routepilot.env import zoo_export

    outputs = len(program.graph_signature.user_outputs)
    zoo_export.write_onnx(
        program,
        values[0],
        [str(n) for n in program.graph_signature.user_inputs] if kind == "file" else _names(source),
        ["output"] if outputs == 1 else [f"output_{i}" for i in range(outputs)],
        folder / "model.onnx",
    )
    torch.export.save(program, str(folder / PROGRAM))
    ours.remember(ours.PROGRAMS, ours.digest_of(folder / PROGRAM))


def _zoo_program(name: str) -> ExportedProgram:
    import torch

    from routepilot.env import zoo

    module, inputs = zoo.definition(zoo.entry(name))
    with torch.no_grad():
        return torch.export.export(module, tuple(inputs))


def _names(name: str) -> list[str]:
    from routepilot.env import zoo

    return list(zoo.entry(name).shapes)


def run_eager(program: Any, arrays: Sequence[NDArray[np.generic]]) -> list[NDArray[np.generic]]:
    """The uncompiled program's outputs, in order."""
    import torch

    with torch.no_grad():
        given = program(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
    outputs = (given,) if isinstance(given, torch.Tensor) else tuple(given)
    return [np.array(output.numpy()) for output in outputs]


def _reference(folder: Path) -> None:
    """Put the program's own results in the place of the ONNX model's, which they must equal."""
    model = Model.load(folder)
    program: Any = read_program(folder / PROGRAM).module()
    for kind in ("selection", "confirmation"):
        for number, one in enumerate(getattr(model, kind)()):
            path = folder / f"reference_{kind}_{number}.npz"
            with np.load(path) as held:
                known = {spec.name: held[spec.name] for spec in model.outputs}
            given = run_eager(program, [one[spec.name] for spec in model.inputs])
            outputs = dict(zip(known, given, strict=True))
            for name, array in outputs.items():
                _compare(name, array, known[name])
            np.savez(path, **outputs)  # type: ignore[arg-type]
    file = folder / "model.json"
    description = json.loads(file.read_text(encoding="utf-8"))
    description["reference"] = "PyTorch, uncompiled, float32, CPU, one thread"
    file.write_text(json.dumps(description, indent=2), encoding="utf-8")


def _compare(name: str, given: NDArray[np.generic], known: NDArray[np.generic]) -> None:
    if given.shape != known.shape or given.dtype != known.dtype:
        raise SystemExit(f"output {name} is {given.dtype}{given.shape} in PyTorch, not so in ONNX")
    wanted = known.astype(np.float64)
    error = np.linalg.norm(given.astype(np.float64) - wanted) / max(np.linalg.norm(wanted), 1e-12)
    if not error <= SAME_MODEL:
        raise SystemExit(f"output {name} differs from the ONNX export's by {error:.2g}")


def _main(arguments: list[str]) -> None:
    action, folder, *rest = arguments
    try:
        if action == "export":
            _export(Path(folder), *rest)
        else:
            _reference(Path(folder))
    except Exception as error:  # the parent shows the last line alone
        raise SystemExit(" ".join(str(error).split())) from None


if __name__ == "__main__":
    _main(sys.argv[1:])
