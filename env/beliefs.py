"""What is believed of candidate routes: normal variables that outcomes narrow.

Owns the two signals of a belief, log speed-up and log10 of the loss, how an outcome changes them,
and what they say of a route: its chance to pass the gate, its expected improvement. Knows no
records; where a belief comes from is `surrogate.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from routepilot.env.backends.recorded import LOST, noise_of
from routepilot.env.outcomes import Outcome
from routepilot.env.precedents import Precedents

Floats = NDArray[np.float64]

#: Log speed-ups beyond this are told apart no further: a disaster is a disaster.
CLIP = 1.2

#: Smallest loss told apart, log10.
SMALLEST_LOSS = -7.0

#: Standard deviation of a log10 loss beyond what inputs and rounding move it.
LOSS_NOISE = 0.1

#: The same where a build gave no outputs: that says little of what rounding does to routes like it.
LOST_NOISE = 2.0

#: Standard deviation of a log speed-up beyond what one session's interval shows.
SPEED_NOISE = 0.02


@dataclass
class Signal:
    """One signal's belief over the candidate routes of a model.

    Attributes:
        mean: Expected value of each route.
        cov: Covariance between routes.
    """

    mean: Floats
    cov: Floats

    def observe(self, place: int, value: float, noise: float) -> None:
        """Condition on a measured value, exactly, in place."""
        column = self.cov[place].copy()
        scale = column[place] + noise * noise
        self.mean += column * ((value - self.mean[place]) / scale)
        self.cov -= column[:, None] * (column / scale)

    @property
    def sd(self) -> Floats:
        """Standard deviation of each route."""
        found: Floats = np.sqrt(np.maximum(self.cov.diagonal(), 1e-9))
        return found

    def copy(self) -> Signal:
        """An independent copy."""
        return Signal(self.mean.copy(), self.cov.copy())


@dataclass
class Belief:
    """What is believed of the candidate routes of one model.

    Attributes:
        speed: Log speed-up over the default route.
        loss: Log10 of the loss.
        codes: The routes as value numbers (`encode`), shape (routes, knobs of the table's catalog
            and of theirs, `joint`).
        seconds: Expected seconds of building and measuring.
        precedents: What they did on the training models.
        acts: Chance of each to change the engine at all; that of the precedents when None is given.
        prior_sd: Standard deviations of the speed before any observation.
    """

    speed: Signal
    loss: Signal
    codes: NDArray[np.int64]
    seconds: Floats
    precedents: Precedents
    acts: Floats = None  # type: ignore[assignment]
    prior_sd: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.prior_sd = self.speed.sd
        if self.acts is None:
            self.acts = self.precedents.acts()

    def copy(self) -> Belief:
        """An independent copy, for an episode."""
        return Belief(
            self.speed.copy(),
            self.loss.copy(),
            self.codes,
            self.seconds,
            self.precedents,
            self.acts,
        )

    def only(self, places: NDArray[np.int64]) -> Belief:
        """An independent belief about some of the routes."""
        grid = np.ix_(places, places)
        return Belief(
            Signal(self.speed.mean[places], self.speed.cov[grid]),
            Signal(self.loss.mean[places], self.loss.cov[grid]),
            self.codes[places],
            self.seconds[places],
            self.precedents.only(places),
            self.acts[places],
        )

    def observe(self, place: int, outcome: Outcome, loss: float) -> None:
        """Condition on an outcome.

        Args:
            place: Index of the route.
            outcome: What came of it.
            loss: Its loss in the gate's metric, `LOST` where there is none.
        """
        measured = outcome.measurement
        if measured is not None:
            noise = math.hypot(noise_of(measured), SPEED_NOISE)
            self.speed.observe(place, float(np.clip(measured.log_speedup, -CLIP, CLIP)), noise)
        self.loss.observe(place, log_loss(loss), loss_noise(loss))

    def p_feasible(self, tolerance: float) -> Floats:
        """Chance of each route to pass a limit."""
        return chance_below(math.log10(tolerance), self.loss.mean, self.loss.sd)

    def expected_improvement(self, best: float) -> Floats:
        """Expected gain of each route over `best`, were it feasible."""
        return expected_excess(self.speed.mean - best, self.speed.sd)


def chance_below(limit: float, mean: Floats, sd: Floats) -> Floats:
    """Chance that normal variables are below a limit."""
    found: Floats = ndtr((limit - mean) / sd)
    return found


def expected_excess(mean: Floats, sd: Floats) -> Floats:
    """Expected positive part of normal variables: expected improvement over zero."""
    z = mean / sd
    found: Floats = sd * (z * ndtr(z) + np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))
    return found


def log_loss(loss: float) -> float:
    """Log10 of a loss, within what is told apart."""
    return max(math.log10(max(min(loss, LOST), 1e-12)), SMALLEST_LOSS)


def loss_noise(loss: float) -> float:
    """Standard deviation of what a log10 loss says."""
    return LOST_NOISE if loss >= LOST else LOSS_NOISE
