"""What candidate routes did on the models of a table: the record itself, without a model of it.

Owns two averages of recorded gains at any limit: over all models alike, and over the models that
are like the one at hand; and how often a route gave another engine than the default's. The
surrogate's Gaussian beliefs know little of how many routes do nothing at all; these counts do.
Knows no agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.recorded import ModelReplay
from routepilot.env.routes import Route

Floats = NDArray[np.float64]

#: Weight of a model that is like the one at hand in nothing, against 1 for its like.
FLOOR = 0.1

#: Chance to act of a route that is not on record, and how many models it is worth.
EVEN_CHANCE, EVEN_WEIGHT = 0.5, 0.5


@dataclass(frozen=True)
class Precedents:
    """Recorded gains and losses of routes on the models of a table.

    Attributes:
        gain: Log speed-up of each route on each model were it accurate enough, 0 where it does not
            clear the default; NaN where it is not on record. Shape (models, routes).
        loss: Its loss in the gate's metric, of the same shape.
        other: 1 where its engine was another than the default's, 0 where it was the same, NaN where
            that is not on record; of the same shape.
        weight: How much each model counts, shape (models,).
    """

    gain: Floats
    loss: Floats
    other: Floats
    weight: Floats

    def only(self, places: NDArray[np.int64]) -> Precedents:
        """The precedents of some of the routes."""
        return Precedents(
            self.gain[:, places], self.loss[:, places], self.other[:, places], self.weight
        )

    def common(self, tolerance: float) -> Floats:
        """Mean gain of each route at a limit over all models; 0 without a record."""
        return self._mean(tolerance, np.ones(len(self.weight)))

    def near(self, tolerance: float) -> Floats:
        """Mean gain of each route at a limit, each model by its weight; 0 without a record."""
        return self._mean(tolerance, self.weight)

    def wins(self, tolerance: float) -> Floats:
        """Weighted share of models on which each route was accurate and faster."""
        return self._mean(tolerance, self.weight, np.sign(self.gain))

    def acts(self) -> Floats:
        """Chance of each route to give another engine than the default's."""
        known = ~np.isnan(self.other)
        acted = self.weight @ np.where(known, self.other, 0.0) + EVEN_WEIGHT * EVEN_CHANCE
        found: Floats = acted / (self.weight @ known + EVEN_WEIGHT)
        return found

    def _mean(self, tolerance: float, weight: Floats, what: Floats | None = None) -> Floats:
        known = ~np.isnan(self.gain)
        value = np.where(known & (self.loss < tolerance), self.gain if what is None else what, 0.0)
        found: Floats = (weight @ value) / np.maximum(weight @ known, 1e-9)
        return found


class PrecedentTable:
    """What a table's models say of routes, to be looked up by route.

    Args:
        models: The models.
    """

    def __init__(self, models: Sequence[ModelReplay]) -> None:
        #: Number of each route on record.
        self.places: dict[Route, int] = {}
        for model in models:
            for route in model.routes:
                self.places.setdefault(route, len(self.places))
        shape = (len(models), len(self.places) + 1)  # the last column is of unknown routes
        self._gain, self._loss = np.full(shape, np.nan), np.full(shape, np.inf)
        self._other = np.full(shape, np.nan)
        for row, model in enumerate(models):
            columns = [self.places[route] for route in model.routes]
            faster = [o.measurement is not None and o.measurement.low > 0 for o in model.outcomes]
            self._gain[row, columns] = np.where(faster, model.log_speedup, 0.0)
            self._loss[row, columns] = model.loss
            self._other[row, columns] = model.other

    def of(self, routes: Sequence[Route], likeness: Floats) -> Precedents:
        """The precedents of candidate routes.

        Args:
            routes: Candidates, on record or not.
            likeness: Of each model with the one at hand, in 0..1.
        """
        columns = [self.places.get(route, -1) for route in routes]
        return Precedents(
            self._gain[:, columns],
            self._loss[:, columns],
            self._other[:, columns],
            likeness + FLOOR,
        )
