"""What rounding costs a route: the errors of its knobs' roundings, which add up.

Owns one estimate of the log10 loss of any route on any model, from what rounding alone did to the
model (`probes.py`). Independent errors add in their squares, so the squared loss of a route is
taken as a sum over the knob values that it changes and over the probes: weight times squared error
of the probe. The weights, none of them negative, are fitted to recorded losses and hold for every
model. What is wrong with the estimate is left to the surrogate's process (`surrogate.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.recorded import LOST, ModelReplay
from routepilot.env.beliefs import SMALLEST_LOSS, Floats, log_loss
from routepilot.env.features import PROBES
from routepilot.env.likeness import encode
from routepilot.env.routes import DEFAULT_ROUTE, Catalog

#: What a log weight is drawn to, and how much that counts beside one outcome: a knob that was
#: seldom built is thought to round little.
LITTLE, PULL = -8.0, 0.02

#: Decades beyond which an outcome that does not fit counts linearly.
STRAY = 0.4

#: Squared loss of a route without any rounding.
EXACT = 10.0 ** (2 * SMALLEST_LOSS)

#: Most steps of the fit.
STEPS = 150


class Roundings:
    """The estimate, fitted to a table.

    Args:
        catalog: The table's.
        models: Its models.
        codes: Routes of each as value numbers (`encode`), shape (routes, knobs).
        told: Which of them to fit, boolean, shape (routes,).
    """

    def __init__(
        self,
        catalog: Catalog,
        models: Sequence[ModelReplay],
        codes: Sequence[NDArray[np.int64]],
        told: Sequence[NDArray[np.bool_]],
    ) -> None:
        self._sizes = np.array([len(knob.all_values) for knob in catalog.knobs], int)
        self._default = encode(catalog, [DEFAULT_ROUTE])[0]
        kept = [t & (m.loss < LOST) for m, t in zip(models, told, strict=True)]
        probes = [_probes(m.card.features) for m in models]
        #: Probes of a model that nothing is known of: the mean of the table's.
        self._usual = np.mean(probes, axis=0) if probes else np.zeros(0)
        losses = [
            np.array([log_loss(x) for x in m.loss[k]]) for m, k in zip(models, kept, strict=True)
        ]
        flat = np.concatenate([*losses, []])
        #: Mean and standard deviation of the log10 losses.
        self.scale = (float(flat.mean()), max(float(flat.std()), 1e-6)) if len(flat) else (0.0, 1.0)
        self._weights: Floats | None = None
        if len(flat) and len(self._usual):
            changed = np.concatenate(
                [self._changed(c[k]) for c, k in zip(codes, kept, strict=True)]
            )
            squares = np.repeat(10.0 ** (2 * np.array(probes)), [len(x) for x in losses], axis=0)
            self._weights = _fit(changed, squares, flat)

    def knows(self, codes: NDArray[np.int64], unchanged: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the table has each value that a route changes a knob to, shape (routes,).

        Args:
            codes: Routes over the table's catalog or one that adds to it (`joint`).
            unchanged: The default route over that catalog.
        """
        own = len(self._sizes)
        values = ((codes[:, :own] >= 0) & (codes[:, :own] < self._sizes)).all(axis=1)
        found: NDArray[np.bool_] = values & (codes[:, own:] == unchanged[own:]).all(axis=1)
        return found

    def expected(self, codes: NDArray[np.int64], features: Sequence[float] | None) -> Floats:
        """Log10 losses of routes on a model by the values that the table has, shape (routes,).

        Args:
            codes: Routes over the table's catalog or one that adds to it (`joint`).
            features: The model's; None where they are not known.
        """
        if self._weights is None:
            return np.full(len(codes), self.scale[0])
        probes = self._usual if features is None else _probes(features)
        squares = self._changed(codes[:, : len(self._sizes)]) @ self._weights @ 10.0 ** (2 * probes)
        found: Floats = np.maximum(0.5 * np.log10(squares + EXACT), SMALLEST_LOSS)
        return found

    def _changed(self, codes: NDArray[np.int64]) -> Floats:
        """1 for each value that a route changes a knob to; the last column is 1 for all routes."""
        columns = [
            codes[:, knob] == value
            for knob, size in enumerate(self._sizes)
            for value in range(size)
            if value != self._default[knob]
        ]
        return np.stack([*columns, np.ones(len(codes), bool)], axis=1).astype(float)


def _probes(features: Sequence[float]) -> Floats:
    return np.asarray(features, float)[PROBES]


def _fit(changed: Floats, squares: Floats, losses: Floats) -> Floats:
    """Weights of values and probes, shape (values + 1, probes)."""
    from scipy.optimize import minimize

    shape, count = (changed.shape[1], squares.shape[1]), len(losses)

    def cost(logs: Floats) -> tuple[float, Floats]:
        weights = np.exp(np.clip(logs, -40.0, 5.0)).reshape(shape)
        total = ((changed @ weights) * squares).sum(axis=1) + EXACT
        off = 0.5 * np.log10(total) - losses
        size = np.abs(off)
        each = np.where(size < STRAY, 0.5 * off**2, STRAY * (size - 0.5 * STRAY))
        slope = np.clip(off, -STRAY, STRAY) * 0.5 / np.log(10.0) / total
        gradient = (changed.T @ (slope[:, None] * squares) * weights).ravel()
        pull = logs - LITTLE
        return (
            float(each.sum() + PULL * (pull**2).sum()) / count,
            (gradient + 2 * PULL * pull) / count,
        )

    start = np.full(shape[0] * shape[1], LITTLE + 1.0)
    done = minimize(cost, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
    found: Floats = np.exp(np.clip(done.x, -40.0, 5.0)).reshape(shape)
    return found
