"""The public suite that any agent must pass: `check_agent`.

Owns the checks of the contract in `base.py`. Third-party agents can run it in their own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from routepilot.agents.base import AgentFactory, Problem
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route

#: Answers an agent must live with: route and number of the build -> outcome.
Answers = Callable[[Route, int], Outcome]


def check_agent(
    factory: AgentFactory,
    catalog: Catalog,
    features: Sequence[float] | None,
    *,
    budget: int = 12,
) -> None:
    """Run an agent through problems of every kind.

    Args:
        factory: Makes the agent.
        catalog: Catalog to ask about.
        features: Model features to offer.
        budget: Builds a problem.

    Raises:
        AssertionError: The contract is broken; the message says where.
    """
    known = tuple(features) if features is not None else None
    some = tuple(catalog.neighbours(DEFAULT_ROUTE))[::2]
    for answers in (_improving, _all_failing, _every_status):
        for candidates in (None, some, some[:1], ()):
            for seed in (0, 1):
                problem = Problem(catalog, known, candidates, budget, seed)
                first = _walk(factory, problem, answers)
                assert first == _walk(factory, problem, answers), "equal seeds, other routes"
                if candidates is not None:
                    assert set(first) <= set(candidates), "asked what is no candidate"
    _walk(factory, Problem(catalog, None, None, budget, 0), _improving)
    assert not _walk(factory, Problem(catalog, known, None, 0, 0), _improving)


def _walk(factory: AgentFactory, problem: Problem, answers: Answers) -> list[Route]:
    agent = factory(problem)
    assert agent.name, "an agent has a name"
    agent.tell(DEFAULT_ROUTE, _timed(DEFAULT_ROUTE, 0.0))
    asked: list[Route] = []
    while len(asked) < problem.budget:
        route = agent.ask()
        if route is None:
            assert agent.ask() is None, "an agent that stopped asks again"
            break
        assert agent.ask() == route, "asked twice, another route"
        assert not route.is_default, "asked the default route"
        assert route not in asked, f"asked {route} twice"
        assert problem.catalog.route(route.values) == route, f"{route} is not canonical"
        assert problem.catalog.is_legal(route), f"asked {route}, which means nothing"
        asked.append(route)
        agent.tell(route, answers(route, len(asked)))
    return asked


def _timed(route: Route, log_speedup: float) -> Outcome:
    measured = Measurement(log_speedup, log_speedup - 0.02, log_speedup + 0.02, 1.0, 1.0, 8, 0.01)
    return Outcome(route, Status.OK, "", measured, {"rel_l2": 1e-4}, 0.5, 0.5, route.key)


def _improving(route: Route, number: int) -> Outcome:
    return _timed(route, 0.1 * np.sqrt(number) - 0.1 * (len(str(route)) % 3))


def _all_failing(route: Route, number: int) -> Outcome:
    return Outcome(route, Status.BUILD_FAILED, f"build {number} failed", build_seconds=0.1)


def _every_status(route: Route, number: int) -> Outcome:
    statuses = list(Status)
    status = statuses[number % len(statuses)]
    if status is Status.OK:
        return _timed(route, 0.05)
    losses = {"rel_l2": float("nan")} if status is Status.INVALID_OUTPUT else {"rel_l2": 0.3}
    return Outcome(route, status, "as told", losses=losses, build_seconds=0.1)
