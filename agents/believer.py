"""Agents that act on the surrogate: the shared walk, and who needs no policy.

Owns the live episode: which routes are candidates, and how the belief follows the outcomes. The
policy agent (`ppo.py` trains it, `policy.py` runs it), greedy expected improvement and Thompson
sampling differ in one function: which row to build.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from routepilot.agents.base import AgentFactory, OrderedAgent, Problem
from routepilot.agents.policy import LoadedPolicy
from routepilot.agents.pool import first_candidates
from routepilot.env.beliefs import Signal
from routepilot.env.episode import ROW_FEATURES, Episode, Observation, loss_of
from routepilot.env.forecast import Calibration, Forecast, forecast
from routepilot.env.likeness import joint
from routepilot.env.liveness_prior import weighed
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route
from routepilot.env.surrogate import Surrogate

#: Price of an average build when a policy acts, in log speed-up: half a per cent of speed.
PRICE = 0.005

#: Share of the largest variance that keeps a covariance positive definite in floating point.
JITTER = 1e-6

#: Column of a row that holds its promise.
PROMISE = [name for name, _ in ROW_FEATURES].index("promise")

#: Chooses a candidate by its place among the episode's routes; None stops.
Chooser = Callable[[Episode, Observation], int | None]


class BelieverAgent(OrderedAgent):
    """Keeps an episode up to date and builds the candidate that `choose` names.

    On a live catalog the candidates are the table's routes that are legal there, some random ones,
    and the single changes of every new best route.

    Args:
        name: Name for people.
        problem: The problem.
        surrogate: What is believed.
        choose: Which candidate to build.
    """

    def __init__(self, name: str, problem: Problem, surrogate: Surrogate, choose: Chooser) -> None:
        super().__init__(name, problem)
        self._surrogate, self._choose = surrogate, choose
        self._rng = np.random.default_rng(problem.seed)
        self._history: list[tuple[Route, Outcome]] = []
        known = (route for model in surrogate.models for route in model.routes)
        self._begin(first_candidates(problem, known))

    def ask(self) -> Route | None:
        """See `Agent`."""
        if self._pending is None and self._episode.left > 0:
            seen = self._episode.observation()
            place = self._choose(self._episode, seen) if seen.mask[:-1].any() else None
            self._pending = None if place is None else self._episode.routes[place]
        return self._pending

    def tell(self, route: Route, outcome: Outcome) -> None:
        """See `Agent`."""
        super().tell(route, outcome)
        if route.is_default or route not in self._places:
            return
        self._history.append((route, outcome))
        gain = self._observe(route, outcome)
        if gain > 0 and self.problem.candidates is None:
            near = self.problem.catalog.neighbours(self._episode.incumbent)
            new = [r for r in near if r not in self._places and self.problem.may_ask(r)]
            if new:
                self._begin([*self._episode.routes, *new])

    def why(self) -> tuple[float, float, float] | None:
        """See `Reasoned`."""
        if self._pending is None:
            return None
        place, belief = self._places[self._pending], self._episode.belief
        feasible = belief.p_feasible(self.problem.tolerance)[place]
        return float(belief.speed.mean[place]), float(belief.speed.sd[place]), float(feasible)

    def foresee(self, calibration: Calibration) -> list[Forecast]:
        """The most promising routes as believed now, with calibrated chances."""
        episode = self._episode
        return forecast(episode.belief, episode.routes, self.problem.tolerance, calibration)

    def expected_gain(self) -> float:
        """See `Expecting`: the largest expected feasible improvement of an untried candidate."""
        belief = self._episode.belief
        improvement = belief.p_feasible(self.problem.tolerance) * belief.expected_improvement(
            self._episode.best
        )
        free = np.array([route not in self.told for route in self._episode.routes], bool)
        return float(improvement[free].max(initial=0.0))

    def _begin(self, routes: list[Route]) -> None:
        """Start the episode over these candidates and go through what was told so far."""
        self._places = {route: place for place, route in enumerate(routes)}
        catalog = self.problem.catalog
        belief = self._surrogate.belief(self.problem.features, routes, catalog)
        belief = weighed(belief, routes, self.problem.acts)
        self._episode = Episode(
            joint(self._surrogate.catalog, catalog),
            routes,
            belief,
            self.problem.budget,
            self.problem.tolerance,
            PRICE,
            self._rng,
        )
        for route, outcome in self._history:
            self._observe(route, outcome)

    def _observe(self, route: Route, outcome: Outcome) -> float:
        loss = loss_of(outcome, self._surrogate.gate.metric)
        return self._episode.observe(self._places[route], outcome, loss)


def choose_greedy(episode: Episode, seen: Observation) -> int | None:
    """The candidate of largest expected feasible improvement, whose row is the first."""
    del episode
    return int(seen.places[0])


def choose_promising(episode: Episode, seen: Observation) -> int | None:
    """The candidate of largest improvement weighed by what happened on models alike."""
    del episode
    used = int(seen.mask[:-1].sum())
    return int(seen.places[np.argmax(seen.rows[:used, PROMISE])])


def choose_by(policy: LoadedPolicy, *, may_stop: bool = True) -> Chooser:
    """The candidate that a policy scores highest, or its stop."""

    def choose(episode: Episode, seen: Observation) -> int | None:
        del episode
        action = policy.network.action(seen, may_stop=may_stop)
        return None if action == len(seen.rows) else int(seen.places[action])

    return choose


def two_way_gp(surrogate: Surrogate) -> AgentFactory:
    """Greedy expected feasible improvement on the surrogate: the rival without a policy."""
    return lambda problem: BelieverAgent("two-way-gp", problem, surrogate, choose_greedy)


def greedy(surrogate: Surrogate) -> AgentFactory:
    """Greedy on the surrogate and the precedents: what the policy knows, without the policy."""
    return lambda problem: BelieverAgent("greedy", problem, surrogate, choose_promising)


def thompson(surrogate: Surrogate) -> AgentFactory:
    """Thompson sampling on the surrogate: the best candidate of one draw from the belief.

    Speed and loss are drawn over all rows together, so that routes that are believed to rise and
    fall together do so in a draw. Where none passes the gate in it, the smallest loss is built.
    Draws over every candidate reached less: among a hundred wide beliefs one is always lucky.
    """

    def make(problem: Problem) -> BelieverAgent:
        rng = np.random.default_rng([problem.seed, 1])

        def draw(signal: Signal, places: NDArray[np.int64]) -> NDArray[np.float64]:
            cov = signal.cov[np.ix_(places, places)]
            jitter = JITTER * cov.diagonal().max() * np.eye(len(places))
            half = np.linalg.cholesky(cov + jitter)
            return signal.mean[places] + half @ rng.standard_normal(len(places))

        def choose(episode: Episode, seen: Observation) -> int | None:
            places = seen.places[seen.mask[:-1].astype(bool)]
            speed = draw(episode.belief.speed, places)
            loss = draw(episode.belief.loss, places)
            passes = loss < np.log10(episode.tolerance)
            if not passes.any():
                return int(places[np.argmin(loss)])
            return int(places[np.argmax(np.where(passes, speed, -np.inf))])

        return BelieverAgent("thompson", problem, surrogate, choose)

    return make


def by_policy(policy: LoadedPolicy, name: str = "ppo") -> AgentFactory:
    """A policy at work, on the records of the problem's catalog where it has some."""
    return lambda problem: BelieverAgent(
        name,
        problem,
        policy.surrogate_for(problem.catalog),
        choose_by(policy, may_stop=name != "ppo-no-stop"),
    )
