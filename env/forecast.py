"""What is foreseen of routes before anything is built, with chances that hold.

Owns the chance that a route is accurate and faster, its calibration, and how calibration is judged.
Gaussian beliefs overrate routes that do nothing at all, and the record of models alike knows
nothing of a model that is like no other; a logistic curve over the log odds of both, fitted on
families that neither saw, brings the chances to the frequencies (after Platt, 1999).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit, ndtr

from routepilot.env.backends.recorded import ModelReplay, Replay
from routepilot.env.beliefs import Belief
from routepilot.env.routes import Route
from routepilot.env.surrogate import Surrogate

Floats = NDArray[np.float64]

#: Log speed-up below which a route is not called faster: what one measurement tells apart.
FASTER = 0.02

#: Chances are kept this far from 0 and 1, whose odds are infinite: those believed, those recorded.
EDGES = 1e-4, 0.02

#: Bins of the reliability diagram.
BINS = 10

#: Weight of the squared slopes in a fit, against families that cannot tell the two apart.
RIDGE = 1e-3


@dataclass(frozen=True)
class Calibration:
    """Slopes and intercept over log odds; the defaults are what both released tables come to.

    Attributes:
        belief: Slope of what the surrogate believes.
        record: Slope of what happened on models alike.
        intercept: Log odds where both are even.
    """

    belief: float = 0.9
    record: float = 1.0
    intercept: float = 0.35

    def chance(self, odds: Floats) -> Floats:
        """Calibrated chances of log odds as `win_odds` gives them."""
        found: Floats = expit(odds @ np.array([self.belief, self.record]) + self.intercept)
        return found


@dataclass(frozen=True)
class Forecast:
    """One route before it is built.

    Attributes:
        route: Canonical route.
        chance: Chance that it is accurate and faster.
        speedup: Expected speed-up were it accurate.
        low: Lower end of the central 95 % of that belief.
        high: Upper end.
    """

    route: str
    chance: float
    speedup: float
    low: float
    high: float

    def as_json(self) -> dict[str, object]:
        """The forecast as plain data."""
        return asdict(self)


def win_odds(belief: Belief, tolerance: float) -> Floats:
    """Log odds of each route to be accurate and faster: believed, recorded; shape (routes, 2)."""
    faster = ndtr((belief.speed.mean - FASTER) / belief.speed.sd)
    chances = belief.p_feasible(tolerance) * faster, belief.precedents.wins(tolerance)
    pairs = zip(chances, EDGES, strict=True)
    return np.stack([logit(np.clip(chance, edge, 1 - edge)) for chance, edge in pairs], axis=1)


def forecast(
    belief: Belief,
    routes: Sequence[Route],
    tolerance: float,
    calibration: Calibration,
    count: int = 5,
) -> list[Forecast]:
    """The routes with most expected gain, most first.

    Args:
        belief: What is believed of them.
        routes: Candidate routes.
        tolerance: Limit of the gate's metric.
        calibration: Of the chances.
        count: Routes wanted.
    """
    chance = calibration.chance(win_odds(belief, tolerance))
    mean, sd = belief.speed.mean, belief.speed.sd
    order = np.argsort(-chance * np.maximum(mean, 0.0), kind="stable")[:count]
    return [
        Forecast(
            str(routes[place]),
            float(chance[place]),
            math.exp(mean[place]),
            math.exp(mean[place] - 1.96 * sd[place]),
            math.exp(mean[place] + 1.96 * sd[place]),
        )
        for place in order
    ]


def seen_odds(
    models: Sequence[ModelReplay], surrogates: Mapping[str, Surrogate], tolerance: float
) -> tuple[Floats, Floats]:
    """Log odds of recorded routes, each family unseen by its surrogate, and what came (1 or 0)."""
    odds = [win_odds(surrogates[m.card.family].prior(m), tolerance) for m in models]
    hits = [(m.gain > 0).astype(float) for m in models]
    if not odds:
        return np.zeros((0, 2)), np.zeros(0)
    return np.concatenate(odds), np.concatenate(hits)


def fit(odds: Floats, hits: Floats) -> Calibration:
    """The curve of most likelihood; the default when there is nothing to tell apart."""
    from scipy.optimize import minimize

    if len(hits) == 0 or hits.min() == hits.max():
        return Calibration()

    def cost(curve: Floats) -> float:
        signed = (2 * hits - 1) * (odds @ curve[:2] + curve[2])
        return float(np.mean(np.logaddexp(0.0, -signed)) + RIDGE * np.sum(curve[:2] ** 2))

    return Calibration(*(float(x) for x in minimize(cost, np.array([1.0, 1.0, 0.0])).x))


def reliability(chances: Floats, hits: Floats) -> list[dict[str, float]]:
    """The reliability diagram: per bin of equal width its count, mean chance and frequency."""
    bins = np.minimum((chances * BINS).astype(int), BINS - 1)
    return [
        {
            "count": int(mask.sum()),
            "chance": float(chances[mask].mean()),
            "frequency": float(hits[mask].mean()),
        }
        for mask in (bins == number for number in range(BINS))
        if mask.any()
    ]


def calibration_error(diagram: Sequence[Mapping[str, float]]) -> float:
    """Expected calibration error: mean distance of chance and frequency, by count."""
    total = sum(row["count"] for row in diagram)
    off = sum(row["count"] * abs(row["chance"] - row["frequency"]) for row in diagram)
    return off / max(total, 1)


def held_out_reliability(
    replay: Replay, surrogates: Mapping[str, Surrogate]
) -> list[dict[str, float]]:
    """The diagram of chances calibrated without the family they are about.

    Args:
        replay: Recorded models, judged by one gate.
        surrogates: By family, each blind to it (`leave_family_out`).
    """
    tolerance = replay.gate.limit
    chances, hits = [], []
    for family in replay.table.families:
        others = [m for m in replay if m.card.family != family]
        curve = fit(*seen_odds(others, surrogates, tolerance))
        odds, came = seen_odds(
            [m for m in replay if m.card.family == family], surrogates, tolerance
        )
        chances.append(curve.chance(odds))
        hits.append(came)
    return reliability(np.concatenate(chances), np.concatenate(hits))
