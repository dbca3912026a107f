"""One agent on one recorded model: what it had gained after each build, and what that took.

Owns the replayed run. Knows no split and no statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.agents.base import AgentFactory, Problem, search
from routepilot.env.backends.recorded import ModelReplay, Replay
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route

Floats = NDArray[np.float64]

#: Builds at which agents are compared.
BUDGETS = (1, 2, 4, 8, 16)

#: Share of the oracle's gain that counts as having it.
ENOUGH = 0.95


@dataclass(frozen=True)
class Trace:
    """One agent on one model with one search seed.

    Attributes:
        gains: Best gain after each build, shape (max(BUDGETS),); a stop repeats the last.
        builds: Builds used before it stopped.
        oracle: Best recorded gain of the model.
        seconds: Seconds of building and measuring up to each build, shape (max(BUDGETS),); a stop
            repeats the last. The default engine, which everyone needs, is not counted.
    """

    gains: Floats
    builds: int
    oracle: float
    seconds: Floats

    @property
    def builds_to_95(self) -> float:
        """Builds to 95 % of the oracle's gain; infinity when it never got there."""
        reached = np.flatnonzero(self.gains >= ENOUGH * self.oracle)
        if self.oracle <= 0:
            return 0.0
        return float(reached[0] + 1) if len(reached) else math.inf

    def as_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` reads."""
        return {
            "gains": self.gains.tolist(),
            "builds": self.builds,
            "oracle": self.oracle,
            "seconds": self.seconds.tolist(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Trace:
        """From plain data."""
        gains, seconds = np.array(data["gains"]), np.array(data["seconds"])
        return Trace(gains, data["builds"], data["oracle"], seconds)


#: Traces of one agent on one model: one row a policy (agents that are not trained have one), in it
#: one a search seed.
Runs = Sequence[Sequence[Trace]]

#: Traces of many agents: agent -> model -> runs.
Found = Mapping[str, Mapping[str, Runs]]


def trace(
    factory: AgentFactory,
    replay: Replay,
    model: ModelReplay,
    seed: int,
    builds: int = max(BUDGETS),
) -> Trace:
    """Let an agent tune one recorded model.

    Args:
        factory: Makes the agent.
        replay: The table.
        model: The model, one of the replay's.
        seed: Seed of the agent.
        builds: Builds it may spend, at most `max(BUDGETS)`.
    """
    problem = Problem(
        replay.catalog,
        model.card.features,
        model.routes,
        builds,
        seed,
        replay.gate.limit,
    )

    def evaluate_route(route: Route) -> Outcome:
        return model.default if route.is_default else model.outcome(route)

    outcomes = search(factory(problem), evaluate_route, builds)
    return trace_of(outcomes, model.oracle)


def trace_of(outcomes: Sequence[Outcome], oracle: float) -> Trace:
    """The trace of outcomes in the order built.

    Args:
        outcomes: The first `max(BUDGETS)` count; the default's is not among them.
        oracle: Best gain known of the model.
    """
    longest = max(BUDGETS)
    gains, seconds = np.zeros(longest), np.zeros(longest)
    best = spent = 0.0
    for build in range(longest):
        if build < len(outcomes):
            outcome = outcomes[build]
            best = max(best, outcome.gain)
            spent += outcome.build_seconds + outcome.measure_seconds
        gains[build], seconds[build] = best, spent
    return Trace(gains, min(len(outcomes), longest), oracle, seconds)
