"""How good a policy is on recorded models, and the best weights so far.

Owns the score by which weights are kept and training stops. Trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.agents.policy import Network
from routepilot.env.episode import ROWS, Observation
from routepilot.env.route_env import RouteSelectionEnv

#: Budgets at which a policy is scored.
BUDGETS = (1, 2, 4, 8, 16)

#: What one build is worth when weights are compared, as a share of the oracle's gain.
BUILD_PRICE = 0.005

#: Share of the oracle's gain that counts as having it, and builds in which a stop is in time: after
#: it was reached, and on a model with nothing to gain.
REACHED, BUILDS_AFTER, BUILDS_FOR_NOTHING = 0.95, 1, 2


@dataclass(frozen=True)
class Play:
    """A policy on one recorded model.

    Attributes:
        gains: Best gain after each build up to the budget; a stop repeats the last.
        builds: Builds used.
        failed: Builds that were not feasible.
    """

    gains: tuple[float, ...]
    builds: int
    failed: int

    def stops_in_time(self, oracle: float) -> bool:
        """Whether it had what there was, and stopped then."""
        if oracle <= 0:
            return self.builds <= BUILDS_FOR_NOTHING
        reached = [n for n, gain in enumerate(self.gains, 1) if gain >= REACHED * oracle]
        return bool(reached) and self.builds <= reached[0] + BUILDS_AFTER


def play(env: RouteSelectionEnv, network: Network, model: str, budget: int) -> Play:
    """Let a policy tune one recorded model."""
    seen, _ = env.reset(seed=0, options={"model": model})
    gains: list[float] = []
    failed = 0
    while len(gains) < budget:
        observation = Observation(
            seen["candidates"], seen["context"], seen["mask"], np.zeros(ROWS, np.int64)
        )
        action = network.action(observation)
        seen, _, done, _, info = env.step(np.int64(action))
        failed = int(info["failed"])
        if action != ROWS:
            gains.append(float(info["log_speedup"]))
        if done:
            break
    used = len(gains)
    gains += [gains[-1] if gains else 0.0] * (budget - used)
    return Play(tuple(gains), used, failed)


@dataclass(frozen=True)
class Score:
    """A policy on the models of an exam.

    Attributes:
        gain_share: Share of the oracle's gain by budget.
        stop_builds: Mean builds before the stop.
        stops_in_time: Share of models on which it stopped within one build of having 95 % of what
            there was, or after two builds at most where there was nothing.
        infeasible: Share of builds that were not feasible.
    """

    gain_share: Mapping[str, float]
    stop_builds: float
    stops_in_time: float
    infeasible: float

    @property
    def value(self) -> float:
        """Mean share over the budgets, less what the builds cost."""
        return float(np.mean(list(self.gain_share.values()))) - BUILD_PRICE * self.stop_builds

    def as_json(self) -> dict[str, Any]:
        """The score as plain data."""
        return {
            "gain_share": dict(self.gain_share),
            "stop_builds": self.stop_builds,
            "stops_in_time": self.stops_in_time,
            "infeasible": self.infeasible,
        }

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Score:
        """What `as_json` gave."""
        return cls(**data)

    @classmethod
    def mean(cls, scores: Sequence[Score]) -> Score:
        """The mean of several exams, each counting the same."""
        if len(scores) == 1:
            return scores[0]
        return cls(
            {b: float(np.mean([s.gain_share[b] for s in scores])) for b in scores[0].gain_share},
            float(np.mean([s.stop_builds for s in scores])),
            float(np.mean([s.stops_in_time for s in scores])),
            float(np.mean([s.infeasible for s in scores])),
        )


def score(env: RouteSelectionEnv, network: Network) -> Score:
    """Score a policy on every model of an exam."""
    found = {str(budget): 0.0 for budget in BUDGETS}
    oracle, builds, failed, in_time = 0.0, 0, 0, 0
    for model in env.replay:
        done = play(env, network, model.card.name, max(BUDGETS))
        oracle += model.oracle
        builds += done.builds
        failed += done.failed
        in_time += done.stops_in_time(model.oracle)
        for budget in BUDGETS:
            found[str(budget)] += done.gains[budget - 1]
    models = len(env.replay.models)
    return Score(
        {budget: gain / max(oracle, 1e-9) for budget, gain in found.items()},
        builds / models,
        in_time / models,
        failed / max(builds, 1),
    )


class Best:
    """The best weights so far, by their score over tables and limits.

    Args:
        exams: Where policies are scored; the first `tables` of them are at the policy's own limit.
        tables: Route tables among them.
        validation: Families of the exams where nothing is trained on them.
    """

    def __init__(
        self, exams: Sequence[RouteSelectionEnv], tables: int, validation: Sequence[str]
    ) -> None:
        self._exams, self._tables, self._validation = exams, tables, tuple(validation)
        self.value = -np.inf
        #: Scores of the best weights by table, and of those considered last.
        self.scores: list[Score] = []
        self.last: list[Score] = []
        self.weights: dict[str, NDArray[np.float32]] = {}
        #: Considerations since the last better one.
        self.stale = 0

    def consider(self, weights: Mapping[str, NDArray[np.float32]]) -> float:
        """Score weights and keep them if they are the best; returns their value."""
        network = Network(weights)
        # One limit alone would decide by the luck of a model or two.
        scores = [score(env, network) for env in self._exams]
        self.last = scores[: self._tables]
        value = float(np.mean([s.value for s in scores]))
        self.stale += 1
        if value > self.value:
            self.value, self.scores, self.stale = value, self.last, 0
            self.weights = {name: array.copy() for name, array in weights.items()}
        return value

    def text(self) -> str:
        """The best shares, for people."""
        mean = Score.mean(self.scores)
        shares = ", ".join(f"{100 * s:.0f} % after {b}" for b, s in mean.gain_share.items())
        unseen = "validation families" if self._validation else "families unseen by the surrogate"
        return f"{shares} builds, {unseen}; stops after {mean.stop_builds:.1f}"

    def as_json(self) -> dict[str, Any]:
        """The best scores as plain data, for a card."""
        on = "the training models, each family unseen by its surrogate but not by the policy"
        if self._validation:
            on = "the validation families, which chose among the weights and trained nothing"
        found = {"on": on, **Score.mean(self.scores).as_json()}
        if self._tables > 1:
            catalogs = [env.replay.catalog.name for env in self._exams[: self._tables]]
            found["tables"] = [
                {"catalog": catalog, **one.as_json()}
                for catalog, one in zip(catalogs, self.scores, strict=True)
            ]
        return found

    def notes(self) -> dict[str, Any]:
        """Its state but for the weights, as plain data."""
        return {
            "value": self.value,
            "scores": [s.as_json() for s in self.scores],
            "stale": self.stale,
        }

    def restore(self, notes: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]]) -> None:
        """Take up what `notes` and `weights` were."""
        self.value, self.stale = float(notes["value"]), int(notes["stale"])
        self.scores = self.last = [Score.read(s) for s in notes["scores"]]
        self.weights = dict(weights)
