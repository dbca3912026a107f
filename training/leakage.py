"""Leakage: models on two sides of a split that are nearly the same.

Owns the distances between models, by what is known of them before a build and by what their routes
did, and the thresholds under which a pair is flagged. A pair like that would let an agent answer
from memory what it is said to have inferred. Knows no agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import LOST, ModelReplay, Replay
from routepilot.env.beliefs import CLIP
from routepilot.env.records import RouteTable
from routepilot.env.routes import Route
from routepilot.training.folds import folds

Floats = NDArray[np.float64]

#: Root mean square distance of standardised features under which two models are near-duplicates:
#: the two sampling rates of one denoiser in the released tables are 0.28 apart.
NEAR_FEATURES = 0.3

#: Distance of outcomes (`_outcome_distance`) under which two models are near-duplicates: 0 is the
#: same, 1 unrelated, and two records of one model that differ by noise alone are near 0.3 apart
#: where their routes differ from the average by three times the noise.
NEAR_OUTCOMES = 0.3

#: Routes timed on both models below which their outcomes are not compared.
FEWEST = 12

#: Nearest pairs that are listed, by each distance.
LISTED = 10


@dataclass(frozen=True)
class Pair:
    """A judged model and one that agents may know meanwhile.

    Attributes:
        judged: Name of the judged model.
        known: Name of the other.
        judged_family: Its family.
        known_family: That of the other.
        features: Root mean square distance of features, in standard deviations over the table.
        outcomes: Distance of what the routes timed on both did, beyond what they do on average:
            0 is the same, 1 unrelated; None where these are fewer than `FEWEST`.
        agree: Share of the routes on record for both on which the gate says the same; None
            likewise.
        routes: Routes timed on both.
        same: Both have the same fingerprint.
        flags: Which distances are under their thresholds: `features`, `outcomes`, or `same`.
    """

    judged: str
    known: str
    judged_family: str
    known_family: str
    features: float
    outcomes: float | None
    agree: float | None
    routes: int
    same: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """What makes the pair suspect; empty when nothing does."""
        found: tuple[str, ...] = ("same",) if self.same else ()
        if self.features < NEAR_FEATURES:
            found += ("features",)
        if self.outcomes is not None and self.outcomes < NEAR_OUTCOMES:
            found += ("outcomes",)
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "flags": list(self.flags)}


@dataclass(frozen=True)
class Leakage:
    """What was found.

    Attributes:
        split: As `folds` takes it; None for one family at a time.
        pairs: The nearest pairs by features and by outcomes, and every flagged one, nearest by
            features first.
        compared: Pairs compared.
        within: Pairs of one family for scale, which are never across a split.
    """

    split: str | None
    pairs: tuple[Pair, ...]
    compared: int
    within: tuple[Pair, ...]

    @property
    def duplicates(self) -> tuple[Pair, ...]:
        """Pairs that are the same model, or near by features and by outcomes alike."""
        return tuple(p for p in self.pairs if p.same or len(p.flags) == 2)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "split": self.split or "leave one family out",
            "compared": self.compared,
            "thresholds": {"features": NEAR_FEATURES, "outcomes": NEAR_OUTCOMES},
            "duplicates": [[p.judged, p.known] for p in self.duplicates],
            "pairs": [p.as_json() for p in self.pairs],
            "within_families": [p.as_json() for p in self.within],
        }


def find_leakage(table: RouteTable, split: str | None = None, gate: Gate | None = None) -> Leakage:
    """The nearest pairs of models across a split.

    Args:
        table: Route table.
        split: As `folds` takes it.
        gate: Gate by which outcomes are compared; the standard one when None.

    Raises:
        InputError: A split that the table lacks.
    """
    models = Replay(table, gate).models
    features = _standard(models)
    places = range(len(models))
    across: dict[tuple[int, int], None] = {}
    for fold in folds(table.families, split):
        for i in places:
            if models[i].card.family in fold.judged:
                known = [j for j in places if models[j].card.family not in fold.hidden]
                # One family at a time meets every pair from both sides: once is enough.
                across.update(((i, j), None) for j in known if (j, i) not in across)
    usual = _usual(models)
    pairs = [_pair(models, features, usual, pair) for pair in across]
    within = [
        _pair(models, features, usual, (i, j))
        for i in places
        for j in places[i + 1 :]
        if models[i].card.family == models[j].card.family
    ]
    by_features = sorted(pairs, key=lambda p: p.features)
    compared = [p for p in pairs if p.outcomes is not None]
    by_outcomes = sorted(compared, key=lambda p: p.outcomes or 0.0)
    flagged = [p for p in by_features if p.flags]
    listed = dict.fromkeys([*flagged, *by_features[:LISTED], *by_outcomes[:LISTED]])
    return Leakage(
        split,
        tuple(sorted(listed, key=lambda p: p.features)),
        len(pairs),
        tuple(sorted(within, key=lambda p: p.features)[:LISTED]),
    )


def _standard(models: Sequence[ModelReplay]) -> Floats:
    features = np.array([m.card.features for m in models], dtype=float)
    spread = features.std(axis=0)
    varied = spread > 1e-6
    found: Floats = (features[:, varied] - features[:, varied].mean(axis=0)) / spread[varied]
    return np.clip(found, -3, 3)


def _pair(
    models: Sequence[ModelReplay],
    features: Floats,
    usual: Mapping[Route, float],
    places: tuple[int, int],
) -> Pair:
    a, b = (models[place] for place in places)
    both = [route for route in a.routes if route in b.index]
    ours = np.array([a.index[route] for route in both], int)
    theirs = np.array([b.index[route] for route in both], int)
    centre = np.array([usual[route] for route in both])
    first, second = _clipped(a)[ours] - centre, _clipped(b)[theirs] - centre
    timed = np.isfinite(first) & np.isfinite(second)
    enough = int(timed.sum()) >= FEWEST
    built = (a.loss[ours] < LOST) | (b.loss[theirs] < LOST)
    agree = (a.feasible[ours] == b.feasible[theirs])[built]
    gap = features[places[0]] - features[places[1]]
    return Pair(
        a.card.name,
        b.card.name,
        a.card.family,
        b.card.family,
        float(np.sqrt(np.mean(gap**2))) if gap.size else 0.0,
        _outcome_distance(first[timed], second[timed]) if enough else None,
        float(agree.mean()) if enough and agree.size else None,
        int(timed.sum()),
        a.card.fingerprint == b.card.fingerprint,
    )


def _outcome_distance(first: Floats, second: Floats) -> float:
    """Root mean square difference over what two unrelated vectors of that size would have."""
    unrelated = np.sqrt(np.mean(first**2) + np.mean(second**2))
    return float(np.sqrt(np.mean((first - second) ** 2)) / max(unrelated, 1e-9))


def _usual(models: Sequence[ModelReplay]) -> dict[Route, float]:
    """Mean log speed-up of each route over the models it was timed on."""
    found: dict[Route, list[float]] = {}
    for model in models:
        for route, speed in zip(model.routes, _clipped(model), strict=True):
            found.setdefault(route, []).extend([float(speed)] if np.isfinite(speed) else [])
    return {route: float(np.mean(speeds)) if speeds else 0.0 for route, speeds in found.items()}


def _clipped(model: ModelReplay) -> Floats:
    return np.clip(model.log_speedup, -CLIP, CLIP)
