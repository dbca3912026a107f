"""A liveness table: every change on every model for every target, resumed and cut at will.

Owns the order of the work, the time limit and what is written meanwhile. `env/liveness_pool.py`
owns the children, `env/liveness_table.py` the file. Needs the models as folders, TensorRT-RTX and
few packages, so that it also runs where the corpus cannot be made.

Small models come first, and children that have none left join those of the others. Within a model,
changes that its operators rule out come last: they are expected to do nothing, and are tried all
the same, since the table is what the rule is held against.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from routepilot.env.errors import InputError, ModelError
from routepilot.env.liveness import compiler_version, single_changes
from routepilot.env.liveness_pool import Found, Pool, Unit, lasting, opening
from routepilot.env.liveness_table import (
    Key,
    LivenessCard,
    LivenessTable,
    load_liveness,
    merge_liveness,
    save_liveness,
)
from routepilot.env.models import Model, is_bundle
from routepilot.env.operator_rules import operator_types, ruled_out
from routepilot.training.manifest import manifest

#: How often the table is written, seconds.
FLUSH_SECONDS = 15.0


@dataclass(frozen=True)
class LivenessOptions:
    """Everything that shapes a sweep.

    Attributes:
        out: Table to write; what it holds already is not compiled again.
        targets: Compute capabilities.
        jobs: Children at once.
        seconds: Wall-clock limit; the table then holds what there is.
        knobs: Knob names; all when None.
        resume: Tables of earlier sweeps, taken in.
    """

    out: Path
    targets: tuple[str, ...] = ("8.9", "12.0")
    jobs: int = 2
    seconds: float = math.inf
    knobs: tuple[str, ...] | None = None
    resume: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Swept:
    """What came of a sweep.

    Attributes:
        table: The table.
        left: Changes not compiled yet, over models and targets.
        given_up: Model name and target -> why it was given up on this machine.
    """

    table: LivenessTable
    left: int
    given_up: Mapping[str, str] = field(default_factory=dict)


def models_in(folder: Path) -> list[Model]:
    """The prepared models inside a folder, as `routepilot zoo export` leaves them.

    Raises:
        InputError: There is none.
    """
    found = [Model.load(place) for place in sorted(folder.iterdir()) if is_bundle(place)]
    if not found:
        raise InputError(
            f"no prepared model in {str(folder)!r}; `routepilot zoo export -o FOLDER` makes such a"
            " folder"
        )
    return found


def card_of(model: Model) -> LivenessCard:
    """What the table says of a model; family and split are the corpus's, if it is of the corpus."""
    from routepilot.env.zoo_entries import ENTRIES, VARIANTS

    known = next((e for e in (*ENTRIES, *VARIANTS) if e.name == model.name), None)
    return LivenessCard(
        name=model.name,
        fingerprint=model.fingerprint,
        family=known.family if known else "",
        split=known.split if known else "",
        trained=bool(known and known.trained),
        operators=tuple(sorted(operator_types(model.path))),
        exact=len(model.outputs) == 1,
    )


def order_of(changes: Sequence[str], operators: Sequence[str]) -> list[str]:
    """Changes in order of urgency: those that the operators rule out come last."""
    silent = ruled_out(operators, {change.partition("=")[0] for change in changes})
    return sorted(changes, key=lambda change: change.partition("=")[0] in silent)


def sweep_liveness(
    models: Sequence[Model],
    options: LivenessOptions,
    on_change: Callable[[int, int], None] = lambda done, total: None,
) -> Swept:
    """Compile every change of every model for every target; what is on disk is kept.

    Args:
        models: Prepared models.
        options: Everything else.
        on_change: Told after each change how many are done and how many there are.

    Raises:
        MissingExtraError: TensorRT-RTX is not installed.
        InputError: No target, no job, an unknown knob, or a compute capability that the compiler
            does not know.
        TableError: A table to resume cannot be used.
    """
    if options.jobs < 1:
        raise InputError(f"jobs {options.jobs} is not allowed; give 1 or more")
    if not options.targets:
        raise InputError("no target; give compute capabilities, e.g. --targets 8.9,12.0")
    compiler = f"TensorRT-RTX {compiler_version()}"
    changes = tuple(single_changes(options.knobs))
    cards = {model.fingerprint: card_of(model) for model in models}
    run: dict[str, Any] = manifest(jobs=options.jobs, targets=list(options.targets))
    empty = LivenessTable(compiler, changes, tuple(cards.values()), {}, {}, run)
    before = [*([options.out] if options.out.exists() else []), *options.resume]
    known = merge_liveness([empty, *map(load_liveness, before)])
    found: dict[Key, dict[str, Found]] = {key: lasting(a) for key, a in known.found.items()}
    refusals = dict(known.refusals)
    units = {}
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="routepilot-live-") as logs:
        for model in sorted(models, key=lambda model: model.path.stat().st_size):
            for target in options.targets:
                key = (model.fingerprint, target)
                results = found.get(key, {})
                left = order_of(changes, cards[model.fingerprint].operators)
                waiting = deque(change for change in left if change not in results)
                if waiting and key not in refusals:
                    log = Path(logs) / f"{model.fingerprint[:16]}-{target}"
                    units[key] = Unit(opening(model, target), log, waiting, results)
        total = sum(len(unit.waiting) for unit in units.values())
        done, written = [0], [time.monotonic()]

        def heard(_unit: Unit) -> None:
            done[0] += 1
            on_change(done[0], total)

        def table() -> LivenessTable:
            held = {**found, **{key: unit.results for key, unit in units.items() if unit.results}}
            return LivenessTable(
                compiler, known.changes, known.models, held, refusals, known.manifest
            )

        def kept(_unit: Unit) -> None:
            if time.monotonic() - written[0] > FLUSH_SECONDS:
                save_liveness(table(), options.out)
                written[0] = time.monotonic()

        try:
            Pool(list(units.values()), options.jobs, until=until, heard=heard, kept=kept).run()
        finally:
            given_up = _given_up(units, cards, refusals)
            save_liveness(table(), options.out)
    left_over = sum(
        change not in unit.results
        for key, unit in units.items()
        if key not in refusals
        for change in changes
    )
    return Swept(table(), left_over, given_up)


def _given_up(
    units: Mapping[Key, Unit], cards: Mapping[str, LivenessCard], refusals: dict[Key, str]
) -> dict[str, str]:
    """Why units ended early; models that the compiler refuses are written down as refused.

    Raises:
        InputError: The fault is not the model's, e.g. an unknown compute capability.
    """
    given_up = {}
    for (fingerprint, target), unit in units.items():
        if unit.error is None:
            continue
        if isinstance(unit.error, ModelError):
            refusals[fingerprint, target] = str(unit.error)
        elif isinstance(unit.error, InputError):
            raise unit.error
        given_up[f"{cards[fingerprint].name} for {target}"] = str(unit.error)
    return given_up
