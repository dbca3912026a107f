"""How alike routes are, and models: the kernel of the surrogate.

Owns its hyperparameters, routes as numbers over one catalog or two, and how much each feature of a
model counts. Fits nothing to outcomes but those weights; `surrogate.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.recorded import ModelReplay
from routepilot.env.beliefs import CLIP, Floats, log_loss
from routepilot.env.routes import Catalog, Knob, Route

#: Knobs whose marks say that they change the engine as a whole.
STRONG = frozenset({"engine", "precision"})


@dataclass(frozen=True)
class Kernel:
    """Hyperparameters, in units of standardised signals.

    The defaults did best of 14 settings (13 random, and a first guess) in share of the oracle's
    gain after 1, 2 and 4 greedy builds at limits 1e-2 and 3e-2, each family unseen by its
    surrogate, on 22 of the 26 models of the first table (docs/experiments.md).

    Attributes:
        shared: Variance of what all models share.
        alike: Variance of what models of like features share.
        own: Variance of what is a model's own.
        width: Length scale of features, in root-mean-square standard deviations.
        strong: Decay of likeness for each differing knob marked as strong.
        weak: Decay for each other differing knob.
        probes: Variance of what the added errors (`roundings.py`) get wrong of the loss, linear in
            the probes.
        beside: Share of the other variances that the loss keeps beside it.
    """

    shared: float = 0.3
    alike: float = 2.0
    own: float = 0.2
    width: float = 0.5
    strong: float = 1.0
    weak: float = 0.12
    probes: float = 0.3
    beside: float = 0.05


def joint(ours: Catalog, other: Catalog) -> Catalog:
    """A catalog in which routes of both can be told apart; ours when the other adds nothing.

    Knobs of one name are one knob. What a knob adds keeps its marks, so that the likeness of routes
    over another compiler's knobs is as defined as over our own.
    """
    knobs = []
    for knob in ours.knobs:
        values = other[knob.name].all_values if knob.name in other else ()
        new = tuple(value for value in values if value not in knob.all_values)
        knobs.append(replace(knob, values=(*knob.values, *new)) if new else knob)
    extra = tuple(knob for knob in other.knobs if knob.name not in ours)
    if not extra and tuple(knobs) == ours.knobs:
        return ours
    return replace(ours, knobs=(*knobs, *extra))


def encode(
    catalog: Catalog, routes: Sequence[Route], home: Catalog | None = None
) -> NDArray[np.int64]:
    """Routes as value numbers, shape (routes, knobs); values the catalog lacks share one number.

    Args:
        catalog: The knobs, one a column.
        routes: The routes.
        home: Catalog the routes are of, where it is another: a knob at its default there counts as
            unchanged, whatever the value.
    """
    tables = [_numbers(knob, home) for knob in catalog.knobs]
    rows = []
    for route in routes:
        values = route.values
        rows.append(
            [
                table.get(values.get(knob.name, unchanged), -1)
                for knob, (unchanged, table) in zip(catalog.knobs, tables, strict=True)
            ]
        )
    return np.array(rows, dtype=np.int64).reshape(len(routes), len(catalog.knobs))


def _numbers(knob: Knob, home: Catalog | None) -> tuple[str, dict[str, int]]:
    """The default of a knob in a catalog, and a number for each value; the default's is ours."""
    table = {value: number for number, value in enumerate(knob.all_values)}
    if home is None or knob.name not in home or home[knob.name].default == knob.default:
        return knob.default, table
    unchanged = home[knob.name].default
    changed = {**table, knob.default: len(table)}
    return unchanged, {**changed, unchanged: table[knob.default]}


def route_likeness(
    catalog: Catalog, a: NDArray[np.int64], b: NDArray[np.int64], kernel: Kernel
) -> Floats:
    """Likeness of routes in (0, 1], shape (len(a), len(b))."""
    decay = np.array(
        [kernel.strong if STRONG & set(k.marks) else kernel.weak for k in catalog.knobs]
    )
    distance = np.zeros((len(a), len(b)))
    for knob, weight in enumerate(decay):
        distance += weight * (a[:, knob, None] != b[None, :, knob])
    return np.exp(-distance)


def telling(alike: Floats, known: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """Which routes to be told of, when there are too many.

    One after the other, that which leaves the least unknown of all, as in a pivoted Cholesky
    decomposition; routes that few models know count less.

    Args:
        alike: Likeness of the routes, shape (routes, routes).
        known: How many models know each.
        count: How many to choose.
    """
    chosen = np.zeros(len(alike), bool)
    weight = np.sqrt(known / max(int(known.max(initial=1)), 1))
    left, columns = alike.diagonal().copy(), np.zeros((count, len(alike)))
    for step in range(min(count, len(alike))):
        place = int(np.argmax(np.where(chosen, -1.0, weight * left)))
        chosen[place] = True
        column = alike[place] - columns[:step, place] @ columns[:step]
        columns[step] = column / math.sqrt(max(left[place], 1e-9))
        left = np.maximum(left - columns[step] ** 2, 0.0)
    return chosen


def relevance(features: Floats, models: Sequence[ModelReplay]) -> Floats:
    """How much each feature says about which routes work, as weights that sum to 1.

    The weight of a feature is the alignment (Cristianini et al., NIPS 2001) of the likeness it
    gives the training models with the likeness of their outcomes, squared; features that say
    nothing or the opposite get none. Few models cannot weigh many features: a tenth of the weight
    stays spread evenly.

    Args:
        features: Standardised features, shape (models, features).
        models: The models, for their outcomes.
    """
    count = features.shape[1] if features.ndim == 2 else 0
    even = np.full(count, 1.0 / max(count, 1))
    if len(models) < 4:
        return even
    routes = list(dict.fromkeys(r for m in models for r in m.routes))
    place = {route: i for i, route in enumerate(routes)}
    outcomes = np.full((len(models), 2 * len(routes)), np.nan)
    for row, model in enumerate(models):
        columns = np.array([place[r] for r in model.routes])
        outcomes[row, columns] = np.clip(model.log_speedup, -CLIP, CLIP)
        outcomes[row, len(routes) + columns] = [0.15 * log_loss(x) for x in model.loss]
    known = ~np.isnan(outcomes)
    mean = np.where(known, outcomes, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    outcomes = np.where(known, outcomes - mean, 0.0)
    alike = _centred(outcomes @ outcomes.T)
    weights = np.zeros(count)
    for number in range(count):
        column = features[:, number]
        if column.std() > 1e-6:
            likeness = _centred(np.exp(-((column[:, None] - column) ** 2) / 2))
            scale = np.linalg.norm(likeness) * np.linalg.norm(alike)
            weights[number] = max(0.0, float((likeness * alike).sum() / max(scale, 1e-12))) ** 2
    total = weights.sum()
    return 0.9 * weights / total + 0.1 * even if total > 0 else even


def _centred(kernel: Floats) -> Floats:
    """A kernel with its row and column means taken out and its diagonal left unused."""
    off = kernel - np.diag(np.diag(kernel))
    found: Floats = off - off.mean(axis=0) - off.mean(axis=1)[:, None] + off.mean()
    return found
