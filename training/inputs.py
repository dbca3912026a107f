"""What the user types, turned into models, gates and families; every refusal is one clear line.

Owns the reading of options shared by the verbs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from routepilot.env.accuracy import Gate
from routepilot.env.errors import InputError
from routepilot.env.models import Model, is_bundle, parse_shape, prepare, read_input_sets

#: Family of a model that is not of the corpus.
UNKNOWN_FAMILY = "unknown"


@dataclass(frozen=True)
class NamedModel:
    """A prepared model with what the corpus knows of it.

    Attributes:
        model: The prepared model.
        family: Architecture family; `unknown` for a user's own.
        trained: Whether its weights are trained; a user's own model is taken to be.
    """

    model: Model
    family: str = UNKNOWN_FAMILY
    trained: bool = True


def prepare_model(
    text: str,
    shapes: Sequence[str] | None,
    inputs: Sequence[Path] | None,
    seed: int,
    *,
    trust: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> NamedModel:
    """Prepare `zoo:NAME`, an ONNX file, or a PyTorch program: `torch:NAME` or a `.pt2` file.

    A folder that is prepared already (`zoo export` makes such) is taken as it is. With `trust`, a
    program that is code as well as data is read all the same. `meanwhile` is called where there is
    time for it, if there is (see `prepare`).

    Raises:
        InputError: Anything that cannot be used.
    """
    if text.startswith("zoo:"):
        import routepilot.env.zoo as zoo

        if shapes or inputs:
            raise InputError(
                f"{text!r} brings its own shapes and inputs; drop --shape and --inputs"
            )
        entry = zoo.entry(text.removeprefix("zoo:"))
        return NamedModel(zoo.load_model(entry.name), entry.family, entry.trained)
    if is_bundle(Path(text)):
        return _prepared(Path(text), shapes, inputs)
    if text.startswith("torch:") or text.endswith(".pt2"):
        return _prepare_program(text, shapes, inputs, seed, trust)
    given = dict(parse_shape(item) for item in shapes or ())
    sets = read_input_sets(inputs) if inputs else None
    return NamedModel(
        prepare(Path(text), shapes=given or None, inputs=sets, seed=seed, meanwhile=meanwhile)
    )


def _prepared(
    folder: Path, shapes: Sequence[str] | None, inputs: Sequence[Path] | None
) -> NamedModel:
    from routepilot.env import zoo

    if shapes or inputs:
        raise InputError(
            f"{str(folder)!r} is prepared, with shapes and inputs; drop --shape and --inputs"
        )
    model = Model.load(folder)
    return NamedModel(model, *zoo.described(model.name))


def _prepare_program(
    text: str,
    shapes: Sequence[str] | None,
    inputs: Sequence[Path] | None,
    seed: int,
    trust: bool,
) -> NamedModel:
    from routepilot.env import programs, zoo

    if shapes or (inputs and text.startswith("torch:")):
        raise InputError(f"{text!r} brings its own shapes; drop --shape, and --inputs for torch:")
    if text.startswith("torch:"):
        entry = zoo.entry(text.removeprefix("torch:"))
        return NamedModel(programs.prepare_zoo_program(entry.name), entry.family, entry.trained)
    sets = read_input_sets(inputs) if inputs else None
    return NamedModel(programs.prepare_program(Path(text), inputs=sets, seed=seed, trust=trust))


def gate_from_options(metric: str, tolerance: float, limits: Sequence[str] | None) -> Gate:
    """The accuracy gate of `--metric`, `--tolerance` and `--limit name=value`.

    Raises:
        InputError: Unknown metric, a negative or NaN limit, or a malformed `--limit`.
    """
    per_output = {}
    for item in limits or ():
        name, equals, value = item.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not equals or not name or math.isnan(number):
            raise InputError(f"--limit {item!r} is not of the form output=0.05")
        per_output[name] = number
    return Gate(metric=metric, limit=tolerance, per_output=per_output)


def backend_options(given: Sequence[str] | None, threads: int | None = None) -> dict[str, str]:
    """Backend options of `--option name=value`, which the backend itself checks.

    Args:
        given: The texts.
        threads: Threads an engine may use; None leaves them out.

    Raises:
        InputError: A text is not of the form, or names an option twice.
    """
    options = {} if threads is None else {"threads": str(threads)}
    for item in given or ():
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise InputError(f"--option {item!r} is not of the form name=value")
        if name in options:
            hint = "; use --threads" if name == "threads" else "; give it once"
            raise InputError(f"--option {item!r} sets {name} a second time{hint}")
        options[name] = value
    return options


def route_expression(text: str | None, file: Path | None) -> str | Path | None:
    """What `--expression` or `--expression-file` says.

    Raises:
        InputError: Both are given.
    """
    if text is not None and file is not None:
        raise InputError("--expression and --expression-file exclude each other; give one")
    return text if file is None else file
