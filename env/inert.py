"""What cannot matter to a model, taken out of a catalog before anything is built.

Owns the masks that liveness gives. A knob goes when the model's operators rule it out, whatever
else a route says. A change is masked where the user's own compiler gave the default engine for it,
byte by byte: that change alone, since beside another it may act all the same (of some 2,480 pairs
of a live and an identical change of the corpus model `unet` 7 do). A value with which the compiler
gave no engine is masked beside others too; that was seen on the model as it is, so it holds only
while a route leaves the precision alone. Knows no agent and compiles nothing. What a run itself
finds equal is left out by its agent (`agents/base.py`), in the order told, so that a run that is
resumed asks what it asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from routepilot.env.backends.tensorrt_catalog import PRECISION_KNOB, is_build_route_knob
from routepilot.env.liveness import Liveness
from routepilot.env.operator_rules import operator_types, ruled_out
from routepilot.env.routes import Catalog, Requirement

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: Operators that a precision variant can add to a model.
VARIANT_OPERATORS = frozenset({"Cast", "DequantizeLinear", "QuantizeLinear"})


@dataclass(frozen=True)
class Narrowed:
    """A catalog without what cannot matter.

    Attributes:
        catalog: What is left; its routes are routes of the full catalog.
        dropped: Knob -> why it went.
        masked: Change (`-name=value`) -> why it is masked: alone where it is byte-identical, and
            while the precision is the model's where it does not compile.
        live: Knobs of which a sweep found a value live, by this compiler or a sibling: a hint where
            to begin, and no proof.
        swept: That sweep; None where there is none.
        own: Sweeps are by the compiler at hand, and not by a sibling of it.
    """

    catalog: Catalog
    dropped: Mapping[str, str]
    masked: Mapping[str, str]
    live: frozenset[str] = frozenset()
    swept: Liveness | None = None
    own: bool = False


def narrow(
    catalog: Catalog,
    model: Model,
    liveness: Liveness | None,
    hint: Liveness | None = None,
    *,
    own: bool = False,
) -> Narrowed:
    """Leave out what is proved not to matter.

    Args:
        catalog: Full catalog of TensorRT or TensorRT-RTX.
        model: The model.
        liveness: Sweep by this very compiler; None where there is none.
        hint: Sweep by a sibling of it.
        own: The catalog is of the compiler that sweeps.
    """
    names = [k.name for k in catalog.knobs if is_build_route_knob(k.name)]
    dropped = ruled_out(operator_types(model.path) | VARIANT_OPERATORS, names)
    kept = _without(catalog, dropped)
    same, failed = _proved_by_sweep(liveness, exact=len(model.outputs) == 1)
    same, failed = (
        {change: why for change, why in found.items() if change.partition("=")[0] in kept}
        for found in (same, failed)
    )
    if PRECISION_KNOB.name in kept:
        kept = replace(kept, requirements=(*kept.requirements, *_masks(kept, failed)))
    kept = replace(kept, settled=same)
    told = liveness or hint
    live = frozenset(change.partition("=")[0] for change in (told.live if told else ()))
    live = frozenset(name for name in live if name in kept)
    return Narrowed(kept, dropped, {**same, **failed}, live, told, own=own)


def _proved_by_sweep(
    liveness: Liveness | None, *, exact: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Changes that alone give the default engine, and those that give none, each with the reason.

    Unless `exact`, equal engines were not equal byte by byte.
    """
    if liveness is None:
        return {}, {}
    same = f"it leaves the engine byte-identical in {liveness.compiler}"
    failed = {change: f"it does not compile: {why}" for change, why in liveness.failed.items()}
    return dict.fromkeys(liveness.identical if exact else (), same), failed


def _masks(catalog: Catalog, masked: Mapping[str, str]) -> Iterable[Requirement]:
    precision = catalog[PRECISION_KNOB.name]
    for change, why in masked.items():
        name, _, value = change.partition("=")
        if catalog[name].allows(value):
            yield Requirement(name, value, precision.name, precision.alternatives, why)


def _without(catalog: Catalog, dropped: Iterable[str]) -> Catalog:
    """The catalog without some knobs, which stay at their defaults."""
    gone = {name for name in dropped if name in catalog}
    while True:
        # What needs another value than the default of a knob that is gone goes too.
        more = {
            rule.knob
            for rule in catalog.requirements
            if rule.parent in gone
            and rule.knob not in gone
            and catalog[rule.parent].default not in rule.parent_values
        }
        if not more:
            break
        gone |= more
    return replace(
        catalog,
        knobs=tuple(k for k in catalog.knobs if k.name not in gone),
        requirements=tuple(
            r for r in catalog.requirements if r.knob not in gone and r.parent not in gone
        ),
    )
