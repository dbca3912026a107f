"""The Gymnasium environment `RoutePilot/RouteSelection-v0`, and nothing else.

It replays a route table: an episode tunes one recorded model under a budget. What is seen and what
the rows are is `episode.py`'s; what is believed is `surrogate.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import ModelReplay, Replay
from routepilot.env.episode import CONTEXT_FEATURES, ROW_FEATURES, ROWS, Episode, Observation
from routepilot.env.errors import InputError
from routepilot.env.records import RouteTable
from routepilot.env.surrogate import Surrogate, leave_family_out

#: Name under which the environment is registered.
ENV_ID = "RoutePilot/RouteSelection-v0"


@dataclass(frozen=True)
class Randomness:
    """What varies between episodes, so that one policy serves any budget, limit and noise.

    Attributes:
        budgets: Smallest and largest budget; drawn uniformly.
        prices: Least and largest price of an average build, in log speed-up.
        noise: Draw each recorded log speed-up anew within its interval.
        share: Least share of a model's routes that an episode offers.
    """

    budgets: tuple[int, int] = (4, 12)
    prices: tuple[float, float] = (0.005, 0.005)
    noise: bool = False
    share: float = 1.0


class RouteSelectionEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """Choose routes to build for one model after another.

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

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own form)

    def __init__(
        self,
        table: RouteTable,
        gate: Gate | None = None,
        randomness: Randomness | None = None,
        surrogates: Mapping[str, Surrogate] | None = None,
        models: tuple[str, ...] | None = None,
    ) -> None:
        self.replay = Replay(table, gate)
        self.randomness = randomness or Randomness()
        self._models = [m for m in self.replay if models is None or m.card.name in models]
        if not self._models:
            raise InputError("the table holds no model to train on; collect one, or hold out less")
        self.surrogates = dict(surrogates or leave_family_out(self.replay))
        self._mean_seconds = float(np.mean(np.concatenate([m.build_seconds for m in self._models])))
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
        self._episode = self._begin(self.model, budget, price)
        self._seen = self._episode.observation()
        return self._as_dict(self._seen), {"model": self.model.card.name, "budget": budget}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Build a row's route, or stop.

        Raises:
            InputError: Not reset, or a masked action.
        """
        if self._episode is None or self._seen is None:
            raise InputError("the environment must be reset before a step")
        if not 0 <= int(action) <= ROWS or not self._seen.mask[int(action)]:
            raise InputError(f"action {action} is masked; legal are those whose mask is 1")
        if int(action) == ROWS:
            return self._finish(0.0, stopped=True)
        place = int(self._seen.places[int(action)])
        route = self._episode.routes[place]
        recorded = self.model.index[route]
        rng = self.np_random if self.randomness.noise else None
        gain = self._episode.observe(
            place, self.model.outcome(route, rng), float(self.model.loss[recorded])
        )
        cost = float(self.model.build_seconds[recorded]) / self._mean_seconds
        reward = gain - self._episode.price * cost
        self._seen = self._episode.observation()
        if self._episode.left == 0 or not self._seen.mask[:-1].any():
            return self._finish(reward, stopped=False)
        return self._as_dict(self._seen), reward, False, False, self._info()

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
        belief = self.surrogates[model.card.family].prior(model)
        routes = model.routes
        if self.randomness.share < 1.0:
            share = self.np_random.uniform(self.randomness.share, 1.0)
            count = max(1, round(share * len(routes)))
            kept = np.sort(self.np_random.choice(len(routes), count, replace=False))
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

    def _finish(
        self, reward: float, *, stopped: bool
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        assert self._seen is not None
        seen = self._as_dict(self._seen)
        info = {**self._info(), "stopped": stopped, "oracle": self.model.oracle}
        self._episode = None
        return seen, reward, True, False, info

    def _info(self) -> dict[str, Any]:
        assert self._episode is not None
        return {
            "log_speedup": self._episode.best,
            "route": str(self._episode.incumbent),
            "builds": self._episode.used,
        }

    @staticmethod
    def _as_dict(seen: Observation) -> dict[str, Any]:
        return {"candidates": seen.rows, "context": seen.context, "mask": seen.mask}


def register() -> None:
    """Make `gymnasium.make` know the environment; importing `routepilot.env.route_env` does it."""
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(ENV_ID, entry_point="routepilot.env.route_env:RouteSelectionEnv")


register()
