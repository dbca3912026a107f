"""The state of one tuning run as a policy sees it: candidate rows, context, mask.

Owns the observation, and nothing that decides or measures. The Gymnasium environment and the live
agent share it, so that a policy sees live what it saw in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.recorded import LOST
from routepilot.env.beliefs import Belief, chance_below, expected_excess
from routepilot.env.likeness import STRONG, encode
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route

Floats = NDArray[np.float64]

#: Rows laid out at each step.
ROWS = 16

#: Of these, rows by expected feasible improvement, the same weighed by precedent, optimism, mean
#: gain on models alike and on all; the rest by chance.
GREEDY_ROWS, PROMISING_ROWS, OPTIMISTIC_ROWS, NEAR_ROWS, POPULAR_ROWS = 6, 4, 2, 2, 1

#: What an improvement without precedent keeps, and how much precedent weighs: of the exponents 0.3,
#: 1, 3 and 10 the first did best (docs/experiments.md).
NO_PRECEDENT, PRECEDENT_WEIGHT = 1e-3, 0.3

#: What a row says of its candidate: name and meaning.
ROW_FEATURES: tuple[tuple[str, str], ...] = (
    ("mean", "expected log speed-up"),
    ("sd", "its standard deviation"),
    ("gain", "expected log speed-up over the best so far"),
    ("feasible", "chance to pass the accuracy gate"),
    ("improvement", "expected feasible improvement over the best so far"),
    ("relative", "the same as a share of the best row's"),
    ("optimism", "mean plus one standard deviation over the best so far, times feasible"),
    ("margin", "decades between limit and expected loss, over 3, in -1..1"),
    ("loss_sd", "standard deviation of the log10 loss"),
    ("changed", "knobs changed from the default, over 4"),
    ("strong", "strong knobs changed from the default, over 4"),
    ("moved", "knobs changed from the best so far, over 4"),
    ("evidence", "share of the prior variance that this run's outcomes removed"),
    ("popularity", "mean gain over the training models at this limit"),
    ("near", "the same, the models weighed by their likeness to this one"),
    ("promise", "how much of the best improvement, weighed by what happened on models alike"),
    ("wins", "weighted share of those models on which it was accurate and faster"),
    ("acts", "chance that its engine is another than the default's: liveness"),
    ("seconds", "log10 of expected build seconds, over 2"),
)

#: What the context says of the run: name and meaning.
CONTEXT_FEATURES: tuple[tuple[str, str], ...] = (
    ("left", "builds left, over 16"),
    ("used", "builds used, over 16"),
    ("best", "log speed-up of the best so far"),
    ("improvement", "largest expected feasible improvement"),
    ("total", "sum of the rows' expected feasible improvements"),
    ("hope", "largest chance that a row is feasible and faster than the best so far"),
    ("tolerance", "log10 of the limit, over 4"),
    ("price", "price of a build, times 20"),
    ("last_gain", "gain of the last build"),
    ("last_failed", "1 when the last build was not feasible"),
    ("failed", "share of builds that were not feasible"),
    ("stale", "builds since the last gain, over 8"),
)

#: What an expected improvement, mostly far under 1, is multiplied with for a network.
IMPROVEMENT_SCALE = 10

_IMPROVEMENT = [name for name, _ in CONTEXT_FEATURES].index("improvement")


@dataclass(frozen=True)
class Observation:
    """What a policy sees.

    Attributes:
        rows: Shape (ROWS, len(ROW_FEATURES)), float32; unused rows are 0.
        context: Shape (len(CONTEXT_FEATURES),), float32.
        mask: Shape (ROWS + 1,), int8; 1 where an action is legal. The last is to stop, always so.
        places: Index of each row's route among the episode's routes; -1 for unused rows.
    """

    rows: NDArray[np.float32]
    context: NDArray[np.float32]
    mask: NDArray[np.int8]
    places: NDArray[np.int64]

    @property
    def expected_gain(self) -> float:
        """Largest expected feasible improvement of a row over the best so far, log speed-up."""
        return float(self.context[_IMPROVEMENT]) / IMPROVEMENT_SCALE


class Episode:
    """One run on one model.

    Args:
        catalog: The knobs, for what a route changes.
        routes: Candidate routes.
        belief: Belief about them; conditioned in place.
        budget: Builds that may be spent.
        tolerance: Limit of the gate's metric.
        price: Price of an average build, in log speed-up.
        rng: For the rows laid out by chance.
    """

    def __init__(
        self,
        catalog: Catalog,
        routes: Sequence[Route],
        belief: Belief,
        budget: int,
        tolerance: float,
        price: float,
        rng: np.random.Generator,
    ) -> None:
        self.routes, self.belief = routes, belief
        self.budget, self.tolerance, self.price = budget, tolerance, price
        self.best, self.incumbent = 0.0, DEFAULT_ROUTE
        self.used = self.failed = self.stale = 0
        self.last_gain, self.last_failed = 0.0, False
        self._rng = rng
        self._tried = np.zeros(len(routes), bool)
        changed = belief.codes != encode(catalog, [DEFAULT_ROUTE])
        strong = np.array([bool(STRONG & set(k.marks)) for k in catalog.knobs])
        self._changed = changed.sum(axis=1) / 4
        self._strong_changed = (changed & strong).sum(axis=1) / 4
        self._moved = self._changed
        self._popularity = belief.precedents.common(tolerance)
        self._near = belief.precedents.near(tolerance)
        self._wins = belief.precedents.wins(tolerance)
        self._seconds = np.log10(np.maximum(belief.seconds, 0.01)) / 2

    @property
    def left(self) -> int:
        """Builds left."""
        return self.budget - self.used

    def observe(self, place: int, outcome: Outcome, loss: float) -> float:
        """Take in the outcome of a route.

        Args:
            place: Index of the route.
            outcome: What came of it.
            loss: Its loss in the gate's metric; `LOST` where there is none.

        Returns:
            log(new best / old best), 0 when it did not improve.
        """
        self.belief.observe(place, outcome, loss)
        self._tried[place] = True
        self.used += 1
        gain = max(0.0, outcome.gain - self.best)
        self.last_gain, self.last_failed = gain, not outcome.is_feasible
        self.failed += self.last_failed
        self.stale = 0 if gain > 0 else self.stale + 1
        if gain > 0:
            self.best, self.incumbent = self.best + gain, self.routes[place]
            codes = self.belief.codes
            self._moved = (codes != codes[place]).sum(axis=1) / 4
        return gain

    def observation(self) -> Observation:
        """Lay out the candidates as they stand now."""
        belief = self.belief
        speed, loss = belief.speed, belief.loss
        sd, loss_sd = speed.sd, loss.sd
        over = speed.mean - self.best
        feasible = chance_below(math.log10(self.tolerance), loss.mean, loss_sd)
        improvement = feasible * expected_excess(over, sd)
        optimism = feasible * (over + sd)
        promise = self.promise(improvement)
        places = self._lay_out(improvement, promise, optimism)
        used = len(places)
        top = max(float(improvement[places].max(initial=0.0)), 1e-9)
        columns = (
            speed.mean,
            sd,
            over,
            feasible,
            IMPROVEMENT_SCALE * improvement,
            improvement / top,
            optimism,
            np.minimum(np.maximum((math.log10(self.tolerance) - loss.mean) / 3, -1), 1),
            loss_sd,
            self._changed,
            self._strong_changed,
            self._moved,
            1 - (sd / belief.prior_sd) ** 2,
            self._popularity,
            self._near,
            promise / max(float(promise[places].max(initial=0.0)), 1e-9),
            self._wins,
            belief.acts,
            self._seconds,
        )
        rows = np.zeros((ROWS, len(ROW_FEATURES)), np.float32)
        for number, column in enumerate(columns):
            rows[:used, number] = column[places]
        mask = np.zeros(ROWS + 1, np.int8)
        mask[:used] = 1
        mask[-1] = 1
        context = self._context(improvement[places], feasible[places], over[places], sd[places])
        padded = np.full(ROWS, -1, np.int64)
        padded[:used] = places
        return Observation(rows, context, mask, padded)

    def promise(self, improvement: Floats) -> Floats:
        """Expected improvements weighed by what the routes did on models alike."""
        found: Floats = improvement * (NO_PRECEDENT + self._near) ** PRECEDENT_WEIGHT
        return found

    def _lay_out(self, improvement: Floats, promise: Floats, optimism: Floats) -> NDArray[np.int64]:
        """Untried routes worth a row, best first; each once."""
        free = (~self._tried).nonzero()[0]
        if len(free) <= ROWS:
            return free[(-improvement[free]).argsort(kind="stable")]
        chosen: list[int] = []
        taken = self._tried.copy()
        for score, count in (
            (improvement, GREEDY_ROWS),
            (promise, PROMISING_ROWS),
            (optimism, OPTIMISTIC_ROWS),
            (self._near, NEAR_ROWS),
            (self._popularity, POPULAR_ROWS),
        ):
            best = np.where(taken, np.inf, -score).argsort(kind="stable")[:count]
            taken[best] = True
            chosen += best.tolist()
        rest = (~taken).nonzero()[0]
        extra = self._rng.random(len(rest)).argsort()[: ROWS - len(chosen)]
        return np.array([*chosen, *rest[extra].tolist()], np.int64)

    def _context(
        self, improvement: Floats, feasible: Floats, over: Floats, sd: Floats
    ) -> NDArray[np.float32]:
        hope = feasible / (1 + np.exp(-1.7 * over / sd))  # logistic stand-in for the normal
        return np.array(
            [
                self.left / 16,
                self.used / 16,
                self.best,
                IMPROVEMENT_SCALE * improvement.max(initial=0.0),
                improvement.sum(),
                hope.max(initial=0.0),
                math.log10(self.tolerance) / 4,
                20 * self.price,
                self.last_gain,
                float(self.last_failed),
                self.failed / max(self.used, 1),
                self.stale / 8,
            ],
            np.float32,
        )


def loss_of(outcome: Outcome, metric: str) -> float:
    """An outcome's loss in a metric; `LOST` where the build failed or the output was invalid."""
    loss = outcome.losses.get(metric, LOST)
    return min(loss, LOST) if math.isfinite(loss) else LOST
