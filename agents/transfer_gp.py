"""A Gaussian process over routes alone, with the covariance that the training models show.

Owns the rival `transfer-gp`. It knows which routes rise and fall together over the training models
and nothing of the new model but its outcomes: no model features, one way of the two that
`env/surrogate.py` has. It asks for the route of the largest expected improvement. What a route is
worth is its log speed-up, and 0 where it fails the accuracy gate, since the default stands then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from routepilot.agents.base import AgentFactory, Problem
from routepilot.agents.pool import ScoringAgent
from routepilot.env.backends.recorded import ModelReplay, Replay, noise_of
from routepilot.env.beliefs import CLIP, SPEED_NOISE, Signal, expected_excess
from routepilot.env.likeness import Kernel, encode, route_likeness
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Catalog, Route

Floats = NDArray[np.float64]

#: Shares of the covariance that may come from the knobs in which routes differ; the rest is what
#: the training models show. Of these the likeliest for training models unseen is taken.
SHRINKAGES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)

#: What is taken when there are too few families to choose by.
DEFAULT_SHRINKAGE = 0.4

#: Parts into which the families are dealt for that choice.
PARTS = 5

#: Least variance of a route's worth, where no training model gains anything from any.
SMALLEST = 1e-4

#: Variance of a record beyond the process, against 1 for the process, where routes are filled in.
NUGGET = 0.1


class Filled:
    """One signal of every training model at any route, recorded or not.

    What a model has no record of is filled in by a Gaussian process over the knobs, around the
    mean of the models that have one.

    Args:
        values: Shape (models, routes), NaN where there is no record; a model has one at least.
        codes: The routes as value numbers, shape (routes, knobs).
        catalog: The knobs.
    """

    def __init__(self, values: Floats, codes: NDArray[np.int64], catalog: Catalog) -> None:
        self._catalog, self._codes = catalog, codes
        self._alike = route_likeness(self._catalog, codes, codes, Kernel())
        known = ~np.isnan(values)
        sums, counts = np.where(known, values, 0.0).sum(axis=0), known.sum(axis=0)
        seen = counts > 0
        mean = np.full(values.shape[1], np.nan)
        mean[seen] = sums[seen] / counts[seen]
        self._mean = self._fill(mean, self._alike)
        self._rest = np.array([self._fill(row, self._alike) for row in values - self._mean])

    def at(self, codes: NDArray[np.int64], places: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Mean over the models at routes, and each model's difference from it.

        Args:
            codes: Routes as value numbers, shape (routes, knobs).
            places: Column of each route on record; -1 for the others.

        Returns:
            Shapes (routes,) and (models, routes).
        """
        mean, rest = self._mean[places], self._rest[:, places]
        new = np.flatnonzero(places < 0)
        if len(new):
            cross = route_likeness(self._catalog, self._codes, codes[new], Kernel())
            solve = self._solve(np.arange(len(self._codes)), cross)
            centre = self._mean.mean()
            mean[new] = centre + (self._mean - centre) @ solve
            rest[:, new] = self._rest @ solve
        return mean, rest

    def _fill(self, row: Floats, alike: Floats) -> Floats:
        known = np.flatnonzero(~np.isnan(row))
        missing = np.flatnonzero(np.isnan(row))
        if not len(missing) or not len(known):
            return np.nan_to_num(row)
        filled = row.copy()
        centre = row[known].mean()
        solve = self._solve(known, alike[np.ix_(known, missing)])
        filled[missing] = centre + (row[known] - centre) @ solve
        return np.asarray(filled)

    def _solve(self, known: NDArray[np.int64], cross: Floats) -> Floats:
        cov = self._alike[np.ix_(known, known)] + NUGGET * np.eye(len(known))
        return np.asarray(np.linalg.solve(cov, cross))


class RouteProcess:
    """Worths of routes over the training models: their mean and covariance.

    Args:
        replay: Training models.
    """

    def __init__(self, replay: Replay) -> None:
        self.catalog = replay.catalog
        self._places: dict[Route, int] = {}
        for model in replay:
            for route in model.routes:
                self._places.setdefault(route, len(self._places))
        values = np.full((len(replay.models), len(self._places)), np.nan)
        for row, model in enumerate(replay):
            values[row, [self._places[route] for route in model.routes]] = worths(model)
        self._filled = Filled(values, encode(self.catalog, self.routes), self.catalog)

    @property
    def routes(self) -> list[Route]:
        """Every route on record."""
        return list(self._places)

    def prior(self, routes: Sequence[Route], shrinkage: float) -> Signal:
        """What is believed of routes before any outcome.

        Args:
            routes: The routes, on record or not.
            shrinkage: Share of the covariance that comes from the knobs.
        """
        codes = encode(self.catalog, routes)
        places = np.array([self._places.get(route, -1) for route in routes], int)
        mean, rest = self._filled.at(codes, places)
        shown = rest.T @ rest / max(len(rest) - 1, 1)
        level = max(float(shown.diagonal().mean()), SMALLEST) if len(routes) else 0.0
        alike = route_likeness(self.catalog, codes, codes, Kernel())
        return Signal(mean, (1 - shrinkage) * shown + shrinkage * level * alike)


def worth(outcome: Outcome) -> float:
    """What an outcome is to the process: its log speed-up; 0 where the default stands instead."""
    return float(np.clip(outcome.log_speedup, -CLIP, CLIP)) if outcome.is_feasible else 0.0


def worths(model: ModelReplay) -> Floats:
    """The worth of each route of a recorded model."""
    return np.array([worth(outcome) for outcome in model.outcomes])


def choose_shrinkage(replay: Replay) -> float:
    """The shrinkage under which models of families unseen are likeliest."""
    families = list(dict.fromkeys(m.card.family for m in replay))
    if len(families) < 3:
        return DEFAULT_SHRINKAGE
    found = np.zeros(len(SHRINKAGES))
    for part in (tuple(families[i::PARTS]) for i in range(min(PARTS, len(families)))):
        process = RouteProcess(replay.without_families(part))
        for place, shrinkage in enumerate(SHRINKAGES):
            for model in replay.only_families(part):
                prior = process.prior(model.routes, shrinkage)
                found[place] += log_likelihood(prior, worths(model))
    return SHRINKAGES[int(found.argmax())]


def log_likelihood(prior: Signal, values: Floats) -> float:
    """Log density of a model's worths under a prior, up to a constant."""
    factor = np.linalg.cholesky(prior.cov + SPEED_NOISE**2 * np.eye(len(values)))
    white = np.linalg.solve(factor, values - prior.mean)
    return float(-0.5 * white @ white - np.log(factor.diagonal()).sum())


class TransferGpAgent(ScoringAgent):
    """Expected improvement on the process.

    Args:
        problem: The problem.
        process: What the training models show.
        shrinkage: Share of the covariance that comes from the knobs.
    """

    def __init__(self, problem: Problem, process: RouteProcess, shrinkage: float) -> None:
        super().__init__("transfer-gp", problem, process.routes)
        self._process, self._shrinkage = process, shrinkage
        self._history: list[tuple[int, Outcome]] = []
        self.widen(())

    def scores(self) -> Floats:
        """Expected improvement of each candidate over the best so far."""
        return expected_excess(self._belief.mean - self.best, self._belief.sd)

    def learn(self, place: int, outcome: Outcome) -> None:
        """See `ScoringAgent`."""
        self._history.append((place, outcome))
        self._observe(place, outcome)

    def widen(self, routes: Sequence[Route]) -> None:
        """See `ScoringAgent`: the prior anew, and what was told once more."""
        del routes
        self._belief = self._process.prior(self.routes, self._shrinkage)
        for place, outcome in self._history:
            self._observe(place, outcome)

    def _observe(self, place: int, outcome: Outcome) -> None:
        measured = outcome.measurement
        noise = math.hypot(noise_of(measured), SPEED_NOISE) if measured else SPEED_NOISE
        self._belief.observe(place, worth(outcome), noise)


def transfer_gp(replay: Replay) -> AgentFactory:
    """The rival, its shrinkage chosen inside the training models."""
    process, shrinkage = RouteProcess(replay), choose_shrinkage(replay)
    return lambda problem: TransferGpAgent(problem, process, shrinkage)
