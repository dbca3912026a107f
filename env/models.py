"""Models: an ONNX file made ready for tuning, as a folder that child processes can open.

Owns the folder, its cache and the references; `normalise.py` owns the graph, `inputs.py` the input
sets. Knows no backend and no route. Nothing here runs a model in this process: references come from
a child (`python -m routepilot.env.models`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from routepilot.env.child import die_with_parent
from routepilot.env.drafts import draft_folder
from routepilot.env.errors import ModelError
from routepilot.env.inputs import (
    CONFIRMATION_SETS,
    SELECTION_SETS,
    InputSet,
    check_set,
    generate,
    hash_sets,
    read_npz,
)
from routepilot.env.inputs import TensorSpec as TensorSpec
from routepilot.env.inputs import read_input_sets as read_input_sets
from routepilot.env.interpreter import module_command
from routepilot.env.normalise import fingerprint_of as fingerprint_of
from routepilot.env.normalise import (
    fix_inputs,
    is_large,
    normalise,
    read_model,
    reference_precision,
)

if TYPE_CHECKING:
    import onnx

#: File of a model's PyTorch program, in the folders that have one (`programs.py` makes them).
PROGRAM = "program.pt2"

#: Longest reference run, seconds; one thread and no optimisations.
REFERENCE_SECONDS = 600


@dataclass(frozen=True)
class Model:
    """A prepared model: a folder with the normalised graph, input sets and references.

    Attributes:
        name: Name for people.
        fingerprint: Hash over graph, weights and input shapes; not over names or places of files.
        folder: The folder.
        inputs: What the graph takes.
        outputs: What it gives; unknown dimensions are those of the reference.
    """

    name: str
    fingerprint: str
    folder: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def path(self) -> Path:
        """The normalised ONNX file."""
        return self.folder / "model.onnx"

    @property
    def program(self) -> Path | None:
        """The PyTorch program beside the ONNX file, or None."""
        place = self.folder / PROGRAM
        return place if place.is_file() else None

    def selection(self) -> list[InputSet]:
        """Input sets that a search decides on."""
        return self._sets("selection")

    def confirmation(self) -> list[InputSet]:
        """Input sets kept for the final check."""
        return self._sets("confirmation")

    def selection_reference(self) -> list[InputSet]:
        """Float32 outputs for `selection`, in the same order."""
        return self._sets("reference_selection")

    def confirmation_reference(self) -> list[InputSet]:
        """Float32 outputs for `confirmation`, in the same order."""
        return self._sets("reference_confirmation")

    def _sets(self, kind: str) -> list[InputSet]:
        found = sorted(self.folder.glob(f"{kind}_*.npz"), key=lambda p: int(p.stem.split("_")[-1]))
        return [read_npz(path) for path in found]

    @classmethod
    def load(cls, folder: Path) -> Model:
        """Open a folder that `prepare` made.

        Raises:
            ModelError: It is not such a folder.
        """
        try:
            data = json.loads((folder / "model.json").read_text(encoding="utf-8"))
            specs = {
                side: tuple(
                    TensorSpec(s["name"], s["dtype"], tuple(s["shape"])) for s in data[side]
                )
                for side in ("inputs", "outputs")
            }
            return cls(data["name"], data["fingerprint"], folder, **specs)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{str(folder)!r} is not a prepared model ({error}); prepare the ONNX file again"
            ) from None


def is_bundle(folder: Path) -> bool:
    """True when `folder` is a finished prepared model."""
    return os.path.isfile(folder / "model.json")  # which a name that is too long answers too


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read `name=1x3x224x224`.

    Raises:
        ModelError: It is not of that form.
    """
    name, equals, dims = text.rpartition("=")
    if not equals or not name or not re.fullmatch(r"[0-9]+(x[0-9]+)*", dims):
        raise ModelError(f"shape {text!r} is not of the form name=1x3x224x224")
    shape = tuple(int(d) for d in dims.split("x"))
    if 0 in shape:
        raise ModelError(f"shape {text!r} has a dimension of 0; dimensions are 1 or more")
    return name, shape


def prepare(
    path: Path,
    *,
    name: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Sequence[Mapping[str, NDArray[np.generic]]] | None = None,
    seed: int = 0,
    cache: Path | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Model:
    """Check and normalise an ONNX file and make its folder; a second call finds it made.

    Args:
        path: ONNX file; external data beside it is read too.
        name: Name for people; the file's stem when None.
        shapes: Shapes for inputs that the file leaves open.
        inputs: Input sets; the last third is kept for confirmation. None generates them.
        seed: Seed of generated inputs.
        cache: Folder for prepared models; the user's cache folder when None.
        meanwhile: Called while another process computes the references, if they are computed.

    Raises:
        ModelError: The file, a shape or an input set cannot be used.
    """
    given = [{k: np.asarray(v) for k, v in one.items()} for one in inputs or ()]
    proto = read_model(path)
    specs = fix_inputs(proto, shapes or {}, given)
    proto = normalise(proto, path)
    fingerprint = fingerprint_of(proto)
    sets = given or generate(proto, specs, seed, SELECTION_SETS + CONFIRMATION_SETS)
    for one in sets:
        check_set(one, specs)
    place = cache_folder(cache) / f"{fingerprint[:16]}-{hash_sets(sets)[:8]}"
    title = name or path.stem
    if is_bundle(place):
        known = Model.load(place)
        if known.name == title:
            return known
        place = place.with_name(f"{place.name}-{hashlib.sha256(title.encode()).hexdigest()[:6]}")
        if is_bundle(place):
            return Model.load(place)
    return _make_bundle(proto, place, title, fingerprint, specs, sets, meanwhile)


def cache_folder(cache: Path | None) -> Path:
    """The folder of prepared models, made if need be; the user's when None.

    Raises:
        ModelError: It cannot be made.
    """
    from platformdirs import user_cache_dir

    folder = cache or Path(user_cache_dir("routepilot")) / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"the cache folder {str(folder)!r} cannot be made: {error}") from None
    return folder


def _make_bundle(
    proto: onnx.ModelProto,
    place: Path,
    title: str,
    fingerprint: str,
    specs: tuple[TensorSpec, ...],
    sets: Sequence[InputSet],
    meanwhile: Callable[[], None] | None,
) -> Model:
    try:
        with draft_folder(place.parent) as draft:
            return _fill_bundle(draft, proto, place, title, fingerprint, specs, sets, meanwhile)
    except OSError as error:
        raise ModelError(f"the prepared model cannot be written: {error}") from None


def _fill_bundle(
    draft: Path,
    proto: onnx.ModelProto,
    place: Path,
    title: str,
    fingerprint: str,
    specs: tuple[TensorSpec, ...],
    sets: Sequence[InputSet],
    meanwhile: Callable[[], None] | None,
) -> Model:
    import onnx

    precision = reference_precision(proto)  # before the weights may leave the graph
    onnx.save(
        proto,
        str(draft / "model.onnx"),
        save_as_external_data=is_large(proto),
        location="model.onnx.data",
    )
    kept = max(len(sets) // 3, 1) if len(sets) > 1 else 0
    cut = len(sets) - kept
    # A single set serves both ends; the second look is then weaker, and nothing can be done.
    for kind, some in (("selection", sets[:cut]), ("confirmation", sets[cut:] or sets)):
        for number, one in enumerate(some):
            np.savez(draft / f"{kind}_{number}.npz", **one)  # type: ignore[arg-type]
    outputs = _run_reference(draft, title, meanwhile)
    description = {
        "name": title,
        "fingerprint": fingerprint,
        "inputs": [asdict(spec) for spec in specs],
        "outputs": outputs,
        "reference": "ONNX Runtime, optimisations off, one thread",
        "reference_precision": precision,
    }
    (draft / "model.json").write_text(json.dumps(description, indent=2), encoding="utf-8")
    try:
        os.replace(draft, place)
    except OSError:
        if not is_bundle(place):  # another process made it meanwhile
            raise
    return Model.load(place)


def _run_reference(
    folder: Path, title: str, meanwhile: Callable[[], None] | None
) -> list[dict[str, object]]:
    """Compute the references in a child and return the outputs' specs."""
    command = [*module_command("routepilot.env.models"), str(folder), str(os.getpid())]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace") as child:
        try:
            if meanwhile is not None:
                meanwhile()
            output, words = child.communicate(timeout=REFERENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ModelError(
                f"the reference run of {title} took more than {REFERENCE_SECONDS} s;"
                " give smaller --shape"
            ) from None
        finally:
            child.kill()  # what has ended stays ended
    if child.returncode < 0:
        raise ModelError(
            f"the reference run of {title} crashed (signal {-child.returncode}): out of memory, or"
            " an operator that ends the process; give smaller --shape or repair the model"
        )
    if child.returncode != 0:
        lines = [line for line in words.splitlines() if line.strip()]
        words = " ".join((lines or [f"exit {child.returncode}"])[-1].split())[:300]
        raise ModelError(f"the reference run of {title} failed: {words}; repair the model")
    outputs: list[dict[str, object]] = json.loads(output)
    return outputs


def _reference_child(folder: Path) -> None:
    """Run the model on every input set with optimisations off and write what it gives."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        names = [output.name for output in session.get_outputs()]
        described: list[dict[str, object]] = []
        for path in sorted([*folder.glob("selection_*.npz"), *folder.glob("confirmation_*.npz")]):
            outputs = dict(zip(names, session.run(names, read_npz(path)), strict=True))
            _check_outputs(outputs)
            np.savez(folder / f"reference_{path.name}", **outputs)
            described = [
                {"name": n, "dtype": a.dtype.name, "shape": list(a.shape)}
                for n, a in outputs.items()
            ]
    except Exception as error:  # the parent shows the last line alone
        raise SystemExit(" ".join(str(error).split())) from None
    print(json.dumps(described))


def _check_outputs(outputs: Mapping[str, object]) -> None:
    for name, array in outputs.items():
        if not isinstance(array, np.ndarray) or array.dtype == object:
            raise SystemExit(f"output {name} is not a tensor of numbers")
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            raise SystemExit(f"output {name} of the reference holds NaN or Inf")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    _reference_child(Path(sys.argv[1]))
