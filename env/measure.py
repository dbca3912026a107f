"""Paired timing: how much faster a route's engine is than the default's, and how sure that is.

Owns the timing plan, the blocks, the interval and the rules for stopping early. Knows no backend,
no model and no process: it times two things that can time themselves.

Medians of separate sessions minutes apart differ by 3 % and more, so the two engines are timed in
short interleaved blocks of the same process; a round is one block of each. A round gives one log
ratio, and the estimate is the median over rounds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from routepilot.env.errors import InputError
from routepilot.env.outcomes import Measurement
from routepilot.env.wording import counted, verb

#: Fewest rounds for which two order statistics cover the median with 95 %.
SMALLEST_SAMPLE = 6

#: Rounds after which a route that is slower by `hopeless` or `worse` is given up.
HOPELESS_ROUNDS, WORSE_ROUNDS = 2, 4


class Timeable(Protocol):
    """Something that can be timed: an engine bound to one input set."""

    def time(self, seconds: float) -> list[float]:
        """Run for about `seconds`, one inference at least; milliseconds of each inference."""
        ...

    def quiesce(self) -> None:
        """Leave no thread spinning until the next `time`."""
        ...


@dataclass(frozen=True)
class TimingPlan:
    """How long and how carefully to measure.

    Attributes:
        block_seconds: Length of one block; one inference when that takes longer. 22 ms needed the
            fewest rounds on the CPU backend.
        warmup_seconds: Each engine runs this long, once at least, before the first block.
        min_rounds: Fewest rounds of a measurement that is not given up early.
        max_rounds: Most rounds.
        precision: Stop once the interval's half width, before `margin`, is below this log ratio.
        margin: What the interval is widened by on each side: identical engines alive in one
            process differ, by their place in memory and the order of their builds, for as long as
            they live, which more rounds do not show. 1 % covered 31 of 32 A/A pairs whose bare
            interval was 0.5 % wide on each side; 0.6 % covered 28 (ONNX Runtime, one thread,
            ShuffleNet and SqueezeNet; `training/aa_study.py` repeats the study).
        hopeless: Give up after 2 rounds when both are slower than the incumbent by this log ratio.
        worse: Give up after 4 rounds and more when all are slower than the incumbent by this.
        max_seconds: Wall-clock cap of one measurement; 2 rounds are always made. A confirmation
            has three times as long and always makes 6 quadruples.
        quadruples: Default-route-route-default quadruples of a confirmation.
        seed: Seed of the order within rounds.
    """

    block_seconds: float = 0.022
    warmup_seconds: float = 0.05
    min_rounds: int = SMALLEST_SAMPLE
    max_rounds: int = 14
    precision: float = 0.015
    margin: float = 0.01
    hopeless: float = math.log(2)
    worse: float = 0.05
    max_seconds: float = 20.0
    quadruples: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_seconds", "max_seconds", "precision", "hopeless", "worse"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} {getattr(self, name)} is not allowed; give more than 0")
        for name in ("margin", "warmup_seconds"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} {getattr(self, name)} is not allowed; give 0 or more")
        if not SMALLEST_SAMPLE <= self.min_rounds <= self.max_rounds:
            raise InputError(
                f"{self.min_rounds} to {self.max_rounds} rounds are not allowed; a 95 % interval"
                f" of the median needs {SMALLEST_SAMPLE} rounds or more, max_rounds no fewer"
            )
        if self.quadruples < SMALLEST_SAMPLE:
            raise InputError(
                f"{counted(self.quadruples, 'quadruple')} {verb(self.quadruples, 'is', 'are')} not"
                f" allowed; give {SMALLEST_SAMPLE} or more"
            )

    @property
    def half_width(self) -> float:
        """Log ratio that a measurement can just tell from nothing: its interval's half width."""
        return self.precision + self.margin


@lru_cache
def interval_rank(count: int) -> tuple[int, float]:
    """Which order statistics bound the median of `count` draws with 95 %.

    The interval from the k-th smallest to the k-th largest value covers the median of any
    distribution with chance 1 - 2 P(Bin(count, 1/2) < k). The largest k that keeps 95 % and its
    exact coverage: 6 draws k=1 96.9 %, 7 98.4 %, 8 99.2 %, 9 k=2 96.1 %, 10 97.9 %, 11 98.8 %,
    12 k=3 96.1 %, 13 97.8 %, 14 98.7 %. Below 6 the whole range covers less: 5 draws 93.8 %,
    4 87.5 %, 3 75 %, 2 50 %.

    Returns:
        k and the coverage; k is 1 when even the whole range does not reach 95 %.
    """
    below = list(itertools.accumulate(math.comb(count, i) / 2**count for i in range(count)))
    rank = max(1, sum(chance <= 0.025 for chance in below))
    return rank, 1.0 - 2.0 * below[rank - 1]


def median_interval(
    ratios: Sequence[float] | NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Median and its distribution-free 95 % interval along the last axis.

    Args:
        ratios: Log ratios, shape (..., rounds).

    Returns:
        Median, lower end, upper end, each of shape (...).
    """
    ordered = np.sort(np.asarray(ratios, np.float64), axis=-1)
    rank, _ = interval_rank(ordered.shape[-1])
    return np.median(ordered, axis=-1), ordered[..., rank - 1], ordered[..., -rank]


def is_settled(ratios: Sequence[float], plan: TimingPlan, incumbent: float) -> bool:
    """True when more rounds would not change what is done with the answer.

    Far slower than the incumbent: `HOPELESS_ROUNDS` rounds, all beyond `plan.hopeless`, or
    `WORSE_ROUNDS`, all beyond `plan.worse`. Otherwise: the interval is narrow enough.

    Args:
        ratios: Log ratios so far, above zero is faster.
        plan: Settings.
        incumbent: Log speed-up of the best route so far; 0 is the default route's.
    """
    count, best = len(ratios), max(ratios) - incumbent
    if count >= HOPELESS_ROUNDS and best < -plan.hopeless:
        return True
    if count >= WORSE_ROUNDS and best < -plan.worse:
        return True
    if count < plan.min_rounds:
        return False
    _, low, high = median_interval(ratios)
    return count >= plan.max_rounds or float(high - low) / 2 <= plan.precision


def measure_paired(
    default: Timeable,
    route: Timeable,
    plan: TimingPlan,
    *,
    incumbent_log_speedup: float | None = None,
) -> Measurement:
    """Time a route against the default in rounds of two blocks, in random order.

    Args:
        default: Engine of the default route.
        route: Engine of the route.
        plan: Settings.
        incumbent_log_speedup: Best log speed-up so far; the timing of a route clearly below it
            stops early. None, or a value below 0, stands for the default route.

    Returns:
        The measurement. `rounds` says how it ended: 2 to 5 rounds mean that the route was given
        up as clearly slower (or the cap of seconds was reached), and `low` and `high` are then
        the extremes over rounds, whose coverage is below 95 % (`interval_rank`); from 6 rounds on
        they are the 95 % interval. Both are widened by `plan.margin`.
    """
    incumbent = max(0.0, incumbent_log_speedup or 0.0)
    order = np.random.default_rng(plan.seed)
    give_up = time.perf_counter() + plan.max_seconds
    clock = _Blocks((default, route), plan)
    ratios: list[float] = []
    while len(ratios) < HOPELESS_ROUNDS or (
        not is_settled(ratios, plan, incumbent) and time.perf_counter() < give_up
    ):
        pair = (0, 1) if order.random() < 0.5 else (1, 0)
        spent = {which: clock.block(which) for which in pair}
        ratios.append(math.log(spent[0] / spent[1]))
    return _measurement(ratios, clock, plan)


def confirm(default: Timeable, route: Timeable, plan: TimingPlan) -> Measurement:
    """Time a route against the default in ABBA order; linear drift cancels in each quadruple.

    The caller builds both engines afresh. A win is `low > 0`.

    Returns:
        The measurement; `rounds` counts quadruples, each one log ratio of two blocks against two.
    """
    give_up = time.perf_counter() + 3 * plan.max_seconds
    clock = _Blocks((default, route), plan)
    ratios: list[float] = []
    # Fewer would leave an interval below 95 %, and a win is what this interval says it is.
    while len(ratios) < SMALLEST_SAMPLE or (
        len(ratios) < plan.quadruples and time.perf_counter() < give_up
    ):
        first, second, third, fourth = (clock.block(which) for which in (0, 1, 1, 0))
        ratios.append((math.log(first / second) + math.log(fourth / third)) / 2)
    return _measurement(ratios, clock, plan)


def noise_floor(default_a: Timeable, default_b: Timeable, plan: TimingPlan) -> float:
    """Log ratio that two builds of the default route reach by noise alone in this session.

    Returns:
        The farther end of the A/A interval from zero, `plan.margin` included.
    """
    found = confirm(default_a, default_b, plan)
    return max(abs(found.low), abs(found.high))


def latency_ms(engine: Timeable, plan: TimingPlan) -> float:
    """Median milliseconds of one inference over `min_rounds` blocks of one engine alone."""
    give_up = time.perf_counter() + plan.max_seconds
    clock = _Blocks((engine,), plan)
    clock.block(0)
    for _ in range(plan.min_rounds - 1):
        if time.perf_counter() < give_up:
            clock.block(0)
    return clock.latency_ms(0)


class _Blocks:
    """Engines taking turns: warm-up, quiet for the one that rests, and each block's median."""

    def __init__(self, engines: tuple[Timeable, ...], plan: TimingPlan) -> None:
        self._engines = engines
        self._seconds = plan.block_seconds
        self._running: int | None = None
        for which in range(len(engines)):
            self._turn(which).time(plan.warmup_seconds)
        self._medians: tuple[list[float], ...] = tuple([] for _ in engines)

    def _turn(self, which: int) -> Timeable:
        if self._running is not None and self._running != which:
            self._engines[self._running].quiesce()
        self._running = which
        return self._engines[which]

    def block(self, which: int) -> float:
        """Median milliseconds of one inference over a block."""
        times = self._turn(which).time(self._seconds)
        spent = float(np.median(times)) if len(times) else math.nan
        if not (math.isfinite(spent) and spent >= 0):
            raise ValueError(f"the engine says that an inference took {spent} ms")
        # A clock too coarse for the engine reads 0, which has no logarithm.
        spent = max(spent, 1e-6)
        self._medians[which].append(spent)
        return spent

    def latency_ms(self, which: int) -> float:
        """Median over the blocks so far."""
        return float(np.median(self._medians[which]))


def _measurement(ratios: Sequence[float], clock: _Blocks, plan: TimingPlan) -> Measurement:
    middle, low, high = median_interval(ratios)
    deviations = np.abs(np.asarray(ratios) - middle)
    return Measurement(
        log_speedup=float(middle),
        low=float(low) - plan.margin,
        high=float(high) + plan.margin,
        latency_ms=clock.latency_ms(1),
        default_latency_ms=clock.latency_ms(0),
        rounds=len(ratios),
        # 1.4826 makes the median deviation of a normal distribution its standard deviation.
        spread=1.4826 * float(np.median(deviations)),
    )
