"""The Gymnasium environments `RouteSelection-v0` and `LiveRouteSelection-v0`, and nothing else.

The first replays a route table: an episode tunes one recorded model under a budget. The second
asks a function for outcomes, which may build and time real engines. What is seen and what the rows
are is `episode.py`'s; what is believed is `surrogate.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import ModelReplay, Replay
from routepilot.env.episode import (
    CONTEXT_FEATURES,
    ROW_FEATURES,
    ROWS,
    Episode,
    Observation,
    loss_of,
)
from routepilot.env.errors import InputError
from routepilot.env.likeness import encode
from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route
from routepilot.env.surrogate import Surrogate, leave_family_out

#: Names under which the environments are registered.
ENV_ID = "RoutePilot/RouteSelection-v0"
LIVE_ENV_ID = "RoutePilot/LiveRouteSelection-v0"

#: Fewest routes that a random sub-catalog offers, where a model has as many.
LEAST_ROUTES = 8

Seen = dict[str, Any]


@dataclass(frozen=True)
class Randomness:
    """What varies between episodes, so that one policy serves any budget, limit and noise.

    Attributes:
        budgets: Smallest and largest budget; drawn uniformly.
        prices: Least and largest price of an average build, in log speed-up.
        noise: Draw each recorded log speed-up anew within its interval.
        share: Least share of a model's routes that an episode offers.
        knobs: Least share of the catalog's knobs that an episode may change: with less than 1 an
            episode sees a random sub-catalog.
        blind: Share of episodes whose surrogate knows no records, as on a catalog never seen.
    """

    budgets: tuple[int, int] = (4, 12)
    prices: tuple[float, float] = (0.005, 0.005)
    noise: bool = False
    share: float = 1.0
    knobs: float = 1.0
    blind: float = 0.0


class _SelectionEnv(gymnasium.Env[Seen, np.int64]):
    """What both environments share: spaces, masks, rewards and ends.

    Subclasses begin an episode and say what comes of a route.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own form)

    def __init__(self) -> None:
        shape = (ROWS, len(ROW_FEATURES))
        self.observation_space = spaces.Dict(
            {
                "candidates": spaces.Box(-20.0, 20.0, shape, np.float32),
                "context": spaces.Box(-20.0, 20.0, (len(CONTEXT_FEATURES),), np.float32),
                "mask": spaces.Box(0, 1, (ROWS + 1,), np.int8),
            }
        )
        self.action_space = spaces.Discrete(ROWS + 1)
        self._episode: Episode | None = None
        self._seen: Observation | None = None

    def _outcome(self, route: Route) -> tuple[Outcome, float, float]:
        """What comes of a route: outcome, loss in the gate's metric, cost in average builds."""
        raise NotImplementedError

    def _start(self, episode: Episode) -> Seen:
        self._episode, self._seen = episode, episode.observation()
        return _as_dict(self._seen)

    def step(self, action: np.int64) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """Build a row's route, or stop.

        Raises:
            InputError: Not reset, or a masked action; nothing is built then.
        """
        if self._episode is None or self._seen is None:
            raise InputError("the environment must be reset before a step")
        if not 0 <= int(action) <= ROWS or not self._seen.mask[int(action)]:
            raise InputError(f"action {action} is masked; legal are those whose mask is 1")
        if int(action) == ROWS:
            return self._finish(0.0, stopped=True)
        place = int(self._seen.places[int(action)])
        outcome, loss, cost = self._outcome(self._episode.routes[place])
        reward = self._episode.observe(place, outcome, loss) - self._episode.price * cost
        self._seen = self._episode.observation()
        if self._episode.left == 0 or not self._seen.mask[:-1].any():
            return self._finish(reward, stopped=False)
        return _as_dict(self._seen), reward, False, False, self._info()

    def _finish(
        self, reward: float, *, stopped: bool
    ) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        assert self._seen is not None
        info = {**self._info(), "stopped": stopped}
        self._episode = None
        last = {name: part.copy() for name, part in _as_dict(self._seen).items()}
        return last, reward, True, False, info

    def _info(self) -> dict[str, Any]:
        assert self._episode is not None
        return {
            "log_speedup": self._episode.best,
            "route": str(self._episode.incumbent),
            "builds": self._episode.used,
            "failed": self._episode.failed,
        }


def _as_dict(seen: Observation) -> Seen:
    return {"candidates": seen.rows, "context": seen.context, "mask": seen.mask}


class RouteSelectionEnv(_SelectionEnv):
    """Choose routes to build for one recorded model after another.

    **Observation** (`Dict`): `candidates` (rows of `episode.ROW_FEATURES`, float32), `context`
    (`episode.CONTEXT_FEATURES`, float32), `mask` (1 where an action is legal). The mask is part of
    the observation, so whoever predicts cannot forget it.

    **Action** (`Discrete`): the row to build, or the last number to stop; stopping is always
    legal.

    **Reward**: for a build, log(new best / old best) minus its price: `price` times its recorded
    seconds over the table's mean. A route that is not feasible, or not faster, earns its price
    alone. Stopping earns 0. So the sum of an episode's rewards is the log speed-up of its answer
    minus what was paid. With `noise`, what is seen and what counts is the drawn value.

    **End**: stopping, the budget spent, or nothing left to build; always `terminated`, since the
    budget is part of the problem. The answer is never slower than the default route (0) and never
    an infeasible one.

    Args:
        table: Route table to replay.
        gate: Accuracy gate; relative L2 error below 1e-2 when None.
        randomness: What varies between episodes.
        surrogates: Surrogate for each family, blind to it; fitted here when None.
        models: Names of the models to draw from; all when None.

    Raises:
        InputError: Nothing to draw from.
    """

    def __init__(
        self,
        table: RouteTable,
        gate: Gate | None = None,
        randomness: Randomness | None = None,
        surrogates: Mapping[str, Surrogate] | None = None,
        models: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        self.replay = Replay(table, gate)
        self.randomness = randomness or Randomness()
        self._models = [m for m in self.replay if models is None or m.card.name in models]
        if not self._models:
            raise InputError("the table holds no model to train on; collect one, or hold out less")
        self.surrogates = dict(surrogates or leave_family_out(self.replay))
        self._blank: dict[str, Surrogate] = {}
        self._mean_seconds = float(np.mean(np.concatenate([m.build_seconds for m in self._models])))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode; `options={"model": name}` chooses the model."""
        super().reset(seed=seed)
        wanted = (options or {}).get("model")
        if wanted is None:
            self.model = self._models[int(self.np_random.integers(len(self._models)))]
        else:
            self.model = self.replay.model(wanted)
        low, high = self.randomness.budgets
        budget = int(self.np_random.integers(low, high + 1))
        price = float(self.np_random.uniform(*self.randomness.prices))
        seen = self._start(self._begin(self.model, budget, price))
        return seen, {"model": self.model.card.name, "budget": budget}

    def _outcome(self, route: Route) -> tuple[Outcome, float, float]:
        recorded = self.model.index[route]
        rng = self.np_random if self.randomness.noise else None
        cost = float(self.model.build_seconds[recorded]) / self._mean_seconds
        return self.model.outcome(route, rng), float(self.model.loss[recorded]), cost

    def teacher(self, temperature: float) -> NDArray[np.float64]:
        """Probabilities of a teacher that knows the recorded outcomes, for a warm start.

        It prefers rows by the gain they bring and stops when none is worth its price.

        Args:
            temperature: Of its choice, in log speed-up.

        Returns:
            Shape (ROWS + 1,), summing to 1 over legal actions.
        """
        assert self._episode is not None and self._seen is not None
        worth = np.full(ROWS + 1, -np.inf)
        worth[-1] = 0.0
        for row, place in enumerate(self._seen.places):
            if place >= 0:
                recorded = self.model.index[self._episode.routes[int(place)]]
                gain = max(0.0, float(self.model.gain[recorded]) - self._episode.best)
                cost = float(self.model.build_seconds[recorded]) / self._mean_seconds
                worth[row] = gain - self._episode.price * cost
        chances = np.exp((worth - worth.max()) / temperature)
        return np.asarray(chances / chances.sum())

    def _begin(self, model: ModelReplay, budget: int, price: float) -> Episode:
        belief = self._surrogate(model.card.family).prior(model)
        routes = model.routes
        kept = np.arange(len(routes))
        if self.randomness.knobs < 1.0:
            kept = kept[self._within_open_knobs(belief.codes)]
        if self.randomness.share < 1.0:
            share = self.np_random.uniform(self.randomness.share, 1.0)
            count = max(1, round(share * len(kept)))
            kept = np.sort(self.np_random.choice(kept, count, replace=False))
        if len(kept) < len(routes):
            routes = tuple(routes[i] for i in kept)
            belief = belief.only(kept)
        else:
            belief = belief.copy()
        return Episode(
            self.replay.catalog,
            routes,
            belief,
            budget,
            self.replay.gate.limit,
            price,
            self.np_random,
        )

    def _surrogate(self, family: str) -> Surrogate:
        """What is believed of a family's models in this episode."""
        blind = self.randomness.blind
        if blind == 0.0 or self.np_random.random() >= blind:
            return self.surrogates[family]
        if family not in self._blank:
            self._blank[family] = self.surrogates[family].blank(self.replay.catalog)
        return self._blank[family]

    def _within_open_knobs(self, codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which routes change none but the knobs that this episode opens.

        Args:
            codes: The routes as value numbers, shape (routes, knobs).
        """
        changed = codes != encode(self.replay.catalog, [DEFAULT_ROUTE])
        rank = self.np_random.permutation(changed.shape[1])
        share = self.np_random.uniform(self.randomness.knobs, 1.0)
        # Knobs open in the order of their rank; a route needs the last of those it changes.
        needed = np.where(changed, rank, -1).max(axis=1)
        fewest = min(LEAST_ROUTES, len(needed)) - 1
        opened = max(round(share * changed.shape[1]), int(np.partition(needed, fewest)[fewest]) + 1)
        found: NDArray[np.bool_] = needed < opened
        return found


class LiveRouteSelectionEnv(_SelectionEnv):
    """Choose routes to build for one model, with outcomes from a function.

    Observation, action, reward and end are those of `RouteSelectionEnv`; the cost of a build is
    its measured seconds over `mean_seconds`. Timing is not deterministic, and the environment is
    registered so.

    Args:
        catalog: The knobs.
        routes: Candidate routes.
        surrogate: What is believed; fitted to a table without this model.
        features: Model features.
        evaluate: Gives the outcome of a route, e.g. `Session.outcome`.
        budget: Builds an episode.
        price: Price of an average build, in log speed-up.
        mean_seconds: Seconds of an average build.
    """

    def __init__(
        self,
        catalog: Catalog,
        routes: Sequence[Route],
        surrogate: Surrogate,
        features: Sequence[float],
        evaluate: Callable[[Route], Outcome],
        budget: int = 8,
        price: float = 0.005,
        mean_seconds: float = 1.0,
    ) -> None:
        super().__init__()
        self._catalog, self._routes = catalog, tuple(routes)
        self._surrogate, self._evaluate = surrogate, evaluate
        self._belief = surrogate.belief(features, self._routes)
        self._budget, self._price, self._mean_seconds = budget, price, mean_seconds

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Seen, dict[str, Any]]:
        """Begin an episode anew; what was built before is asked for again."""
        super().reset(seed=seed)
        limit = self._surrogate.gate.limit
        belief = self._belief.copy()
        budget, price, rng = self._budget, self._price, self.np_random
        return self._start(
            Episode(self._catalog, self._routes, belief, budget, limit, price, rng)
        ), {"budget": budget}

    def _outcome(self, route: Route) -> tuple[Outcome, float, float]:
        outcome = self._evaluate(route)
        seconds = outcome.build_seconds + outcome.measure_seconds
        loss = loss_of(outcome, self._surrogate.gate.metric)
        return outcome, loss, seconds / self._mean_seconds


def register() -> None:
    """Make `gymnasium.make` know both; importing `routepilot.env.route_env` does it."""
    here = "routepilot.env.route_env"
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(ENV_ID, entry_point=f"{here}:RouteSelectionEnv")
        gymnasium.register(
            LIVE_ENV_ID, entry_point=f"{here}:LiveRouteSelectionEnv", nondeterministic=True
        )


register()
