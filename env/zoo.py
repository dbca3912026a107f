"""The corpus made ready: from an entry to a prepared model, and back to what is checked in.

Owns the making, the exports, the check and the listing; `zoo_entries.py` owns the entries,
`zoo_splits.json` the splits, `zoo_export.py` the definitions' export.
"""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from routepilot.env.errors import InputError, MissingExtraError
from routepilot.env.models import Model, prepare
from routepilot.env.zoo_entries import ENTRIES as ENTRIES
from routepilot.env.zoo_entries import VARIANTS as VARIANTS
from routepilot.env.zoo_entries import ZooEntry as ZooEntry
from routepilot.env.zoo_entries import families_of as families_of

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Fixed seed of every corpus input.
SEED = 20261201

#: Input sets a model: four for the search, then two for the final check.
SETS = 6

#: Outputs whose scale lies outside are a collapse or an overflow.
SANE_SCALE = (1e-6, 1e6)


@dataclass(frozen=True)
class Checked:
    """What `check` found of a model.

    Attributes:
        name: Model.
        ok: Whether its fingerprint is the one checked in and its outputs are sane.
        detail: What is wrong, or the fingerprint's first digits.
        licence: Licence of its weights.
        parameters: Number of weights.
        megabytes: Size of the prepared file.
    """

    name: str
    ok: bool
    detail: str
    licence: str
    parameters: int = 0
    megabytes: float = 0.0


def entry(name: str) -> ZooEntry:
    """The entry of a name.

    Raises:
        InputError: There is none; the message names near ones.
    """
    for candidate in (*ENTRIES, *VARIANTS):
        if candidate.name == name:
            return candidate
    names = [candidate.name for candidate in (*ENTRIES, *VARIANTS)]
    near = difflib.get_close_matches(name, names, n=3) or names
    raise InputError(f"no model {name!r} in the zoo; there is: {', '.join(near)}")


def described(name: str) -> tuple[str, bool]:
    """Family of a model and whether its weights are trained; unknown and True for other models."""
    for candidate in (*ENTRIES, *VARIANTS):
        if candidate.name == name:
            return candidate.family, candidate.trained
    return "unknown", True


def available(wanted: ZooEntry) -> str | None:
    """None when the entry can be made here, else what to install."""
    if wanted.package:
        if _packaged_file(wanted) is None:
            return f"pip install {wanted.package}, or 'routepilot[zoo]' for all"
    elif any(find_spec(name) is None for name in ("torch", "onnxscript", "sklearn")):
        return "pip install 'routepilot[zoo]'"
    return None


def load_model(name: str, cache: Path | None = None) -> Model:
    """Make a corpus model ready: its file, input sets with fixed seeds, references.

    Raises:
        InputError: No such model.
        MissingExtraError: What carries or defines it is not installed.
    """
    wanted = entry(name)
    missing = available(wanted)
    if missing is not None:
        raise MissingExtraError(f"model {name} is not available here: {missing}")
    sets = input_sets(wanted)
    if wanted.package:
        file = _packaged_file(wanted)
        assert file is not None
        return prepare(file, name=name, shapes=wanted.shapes, inputs=sets, cache=cache)
    with tempfile.TemporaryDirectory(prefix="routepilot-zoo-") as folder:
        file = Path(folder) / f"{name}.onnx"
        _export(wanted, file)
        return prepare(file, name=name, shapes=wanted.shapes, inputs=sets, cache=cache)


def input_sets(wanted: ZooEntry) -> list[Mapping[str, NDArray[np.generic]]]:
    """The entry's input sets, the same everywhere."""
    seed = [SEED, *wanted.name.encode()]
    return [wanted.draw(np.random.default_rng([*seed, i])) for i in range(SETS)]


def export(names: Sequence[str], out: Path, hear: Callable[[str], None]) -> list[Path]:
    """Make models ready in a folder of the user's.

    Args:
        names: Models.
        out: Folder; each model gets a folder of its own there.
        hear: Told each name when it is done.
    """
    folders = []
    for name in names:
        folders.append(load_model(name, cache=out).folder)
        hear(name)
    return folders


def check(names: Sequence[str]) -> list[Checked]:
    """Make models anew; hold them against what is checked in, and look at what they give.

    Args:
        names: Models.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="routepilot-zoo-") as folder:
        for name in names:
            wanted = entry(name)
            missing = available(wanted)
            if missing is not None:
                rows.append(Checked(name, False, missing, wanted.licence))
                continue
            model = load_model(name, cache=Path(folder))
            known = str(_facts().get(name, {}).get("fingerprint", "none"))
            found = model.fingerprint
            wrong = insane(model)
            if found != known:
                wrong = f"{found[:16]}, checked in: {known[:16]}"
            size = model.path.stat().st_size / 1e6
            weights = int(str(_facts().get(name, {}).get("parameters", 0)))
            detail = wrong or found[:16]
            rows.append(Checked(name, not wrong, detail, wanted.licence, weights, size))
    return rows


def insane(model: Model) -> str:
    """What is wrong with a model's reference outputs; empty when nothing is.

    Outputs must have a scale within `SANE_SCALE`, not be constant, and depend on the inputs.
    """
    first, *others = model.selection_reference()
    moved = False
    for name, array in first.items():
        if array.dtype.kind != "f":
            continue
        values = array.astype(np.float64)
        scale = float(np.sqrt(np.mean(values**2)))
        if not SANE_SCALE[0] < scale < SANE_SCALE[1]:
            return f"output {name} has the scale {scale:.3g}"
        if values.size > 1 and float(values.std()) < 1e-6 * scale:
            return f"output {name} is constant"
        moved |= any(
            not np.allclose(array, other[name], rtol=1e-3, atol=1e-3 * scale) for other in others
        )
    return "" if moved else "no output depends on the inputs"


def listing(split: str | None = None, variants: bool = True) -> list[dict[str, object]]:
    """The corpus as plain data, for `routepilot zoo list`.

    Args:
        split: This split alone; all when None.
        variants: Whether other shapes of models are listed too.

    Raises:
        InputError: There is no such split.
    """
    if split is not None and not families_of(split):
        raise InputError(f"split {split!r} is not known; choose train, validation or test")
    facts, reached = _facts(), quality()
    return [
        {
            "name": e.name,
            "family": e.family,
            "split": e.split,
            "trained": e.trained,
            "origin": e.origin,
            "licence": e.licence,
            "package": e.package or "defined here",
            "parameters": facts.get(e.name, {}).get("parameters", 0),
            "shapes": {name: list(shape) for name, shape in e.shapes.items()},
            "variant_of": e.variant_of,
            "quality": reached.get(e.variant_of or e.name),
        }
        for e in (*ENTRIES, *(VARIANTS if variants else ()))
        if split in (None, e.split)
    ]


def quality() -> Mapping[str, Mapping[str, object]]:
    """What the models that are trained here reached, by name (`checkpoints/zoo/quality.json`)."""
    place = files("routepilot.checkpoints").joinpath("zoo").joinpath("quality.json")
    found: dict[str, dict[str, object]] = json.loads(place.read_text(encoding="utf-8"))
    return found


def measure_facts(names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Fingerprint and number of weights of each model, as kept in `zoo_fingerprints.json`."""
    import onnx

    from routepilot.env.features import count

    facts: dict[str, dict[str, object]] = {}
    for name in names:
        model = load_model(name)
        weights = count(onnx.load(str(model.path)).graph).parameters
        facts[name] = {"fingerprint": model.fingerprint, "parameters": int(weights)}
    return facts


def measure_statistics(names: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Batch statistics of the random models among these, by name, from their own inputs.

    What is released was measured on one processor and is read everywhere (`zoo_export.py`).
    """
    import torch

    from routepilot.env import zoo_export

    found = {}
    for wanted in map(entry, names):
        if wanted.trained or wanted.variant_of:
            continue
        example = wanted.draw(np.random.default_rng([SEED, 0]))
        warm = [torch.from_numpy(np.asarray(example[name])) for name in wanted.shapes]
        statistics = zoo_export.measure_statistics(wanted.path, warm)
        if statistics:
            found[wanted.name] = statistics
    return found


@lru_cache(maxsize=1)
def _facts() -> Mapping[str, Mapping[str, object]]:
    text = files("routepilot.env").joinpath("zoo_fingerprints.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, object]] = json.loads(text)
    return found


def _packaged_file(wanted: ZooEntry) -> Path | None:
    """The file inside an installed package, which is not imported for it."""
    module, _, inside = wanted.path.partition("/")
    spec = find_spec(module)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(place) / inside).is_file():
            return Path(place) / inside
    return None


def definition(wanted: ZooEntry) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model that is defined here, ready to run, and the inputs it is exported with."""
    import torch

    from routepilot.env import zoo_export

    weights = zoo_export.weights_file(wanted.path) if wanted.trained else None
    example = wanted.draw(np.random.default_rng([SEED, 0]))
    inputs = [torch.from_numpy(np.asarray(example[name])) for name in wanted.shapes]
    return zoo_export.make(wanted.path, weights), inputs


def _export(wanted: ZooEntry, file: Path) -> None:
    from routepilot.env import zoo_export

    model, inputs = definition(wanted)
    zoo_export.write_onnx(
        model, inputs, list(wanted.shapes), zoo_export.outputs(model, inputs), file
    )
