"""Statistics of runs: robust means, who beats whom, profiles, and what chance could have done.

Owns the arithmetic on scores of many runs, and the bootstrap behind every interval of an
evaluation. Scores come in one shape, (policies, models, seeds): policies are trainings that differ
in their seed (one for agents that are not trained), seeds are search seeds. Knows no agent and no
table. The measures are those of Agarwal et al. (NeurIPS 2021); a test holds them to `rliable`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import trim_mean

from routepilot.env.wording import counted

Floats = NDArray[np.float64]

#: Bootstrap draws behind an interval.
DRAWS = 2000

#: Figures of many scores: arrays of shape (draws, policies, models, seeds), one or several, to an
#: array whose first axis is draws.
Statistic = Callable[..., Floats]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval.

    Attributes:
        value: The figure.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        """Plain data."""
        return asdict(self)


def mean(scores: Floats) -> Floats:
    """Mean over all runs, one a draw."""
    found: Floats = scores.mean(axis=(1, 2, 3))
    return found


def interquartile_mean(scores: Floats) -> Floats:
    """Mean of the middle half of all runs, one a draw."""
    return np.asarray(trim_mean(scores.reshape(len(scores), -1), 0.25, axis=1), np.float64)


def probability_of_improvement(ours: Floats, theirs: Floats) -> Floats:
    """Chance that a run of ours beats theirs on the same model with the same search seed.

    Ties count one half. Where both were trained several times, every training of ours meets every
    one of theirs.
    """
    difference = ours[:, :, None] - theirs[:, None]
    found: Floats = (0.5 + 0.5 * np.sign(difference)).mean(axis=(1, 2, 3, 4))
    return found


def performance_profile(scores: Floats, levels: Sequence[float] | Floats) -> Floats:
    """Share of runs that score at least each level, shape (draws, levels)."""
    flat = np.sort(scores.reshape(len(scores), -1), axis=1)
    below = np.array([np.searchsorted(row, levels, side="left") for row in flat])
    return np.asarray(1.0 - below / flat.shape[1], np.float64)


def share(gains: Floats, oracle: Floats) -> Floats:
    """Sum of gains over the sum of the best possible ones, one a draw; 0 where none is possible.

    Args:
        gains: Shape (draws, policies, models, seeds).
        oracle: Best possible gain of each run's model, of a shape that broadcasts with it.
    """
    reached = gains.mean(axis=(1, 3)).sum(axis=-1)
    possible = oracle.mean(axis=(1, 3)).sum(axis=-1)
    found: Floats = reached / np.maximum(possible, 1e-9)
    return found


class Resamples:
    """What a bootstrap draws: models, then search seeds within each, and trainings.

    Models are redrawn because the claim is about models nobody has seen; search seeds are redrawn
    within each model (stratified). Models and seeds are drawn once for all agents, so that a
    difference of two is paired; each agent's trainings are drawn for itself.

    Args:
        models: How many models.
        seeds: How many search seeds.
        draws: How many times.
        seed: Seed of the draws.

    Raises:
        ValueError: There is nothing to draw from.
    """

    def __init__(self, models: int, seeds: int, draws: int = DRAWS, seed: int = 0) -> None:
        if models < 1 or seeds < 1:
            raise ValueError(
                f"nothing to draw from {counted(models, 'model')} and {counted(seeds, 'seed')}"
            )
        self._rng = np.random.default_rng(seed)
        self._draws = draws
        self._rows = self._rng.integers(models, size=(draws, models))
        self._columns = self._rng.integers(seeds, size=(draws, models, seeds))

    def of(self, scores: Floats) -> Floats:
        """Redrawn scores, shape (draws, policies, models, seeds), of (policies, models, seeds)."""
        policies = len(scores)
        chosen = self._rng.integers(policies, size=(self._draws, policies))
        return np.asarray(
            scores[
                chosen[:, :, None, None],
                self._rows[:, None, :, None],
                self._columns[:, None, :, :],
            ],
            np.float64,
        )


def bootstrap(
    statistic: Statistic, *scores: Floats, draws: int = DRAWS, seed: int = 0
) -> tuple[Floats, Floats, Floats]:
    """A statistic with its 95 % percentile interval.

    Args:
        statistic: What is asked of the scores.
        scores: One array an agent, each of shape (policies, models, seeds) with the same models and
            seeds.
        draws: Bootstrap draws.
        seed: Seed of the draws.

    Returns:
        Value, lower and upper end, each of the statistic's shape without its first axis.
    """
    whole = [np.asarray(one, np.float64) for one in scores]
    _, models, seeds = whole[0].shape
    resamples = Resamples(models, seeds, draws, seed)
    drawn = statistic(*(resamples.of(one) for one in whole))
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    return statistic(*(one[None] for one in whole))[0], low, high


def estimate(statistic: Statistic, *scores: Floats, **options: Any) -> Estimate:
    """`bootstrap` of a statistic that is one number."""
    value, low, high = bootstrap(statistic, *scores, **options)
    return Estimate(float(value), float(low), float(high))
