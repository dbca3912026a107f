"""Agents that act on the surrogate: the shared walk, and who needs no policy.

Owns the live episode: which routes are candidates, and how the belief follows the outcomes. The
policy agent (`ppo.py` trains it, `policy.py` runs it), greedy expected improvement and Thompson
sampling differ in one function: which row to build.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from routepilot.agents.base import AgentFactory, OrderedAgent, Problem
from routepilot.agents.policy import LoadedPolicy
from routepilot.agents.sweeps import random_route
from routepilot.env.episode import ROW_FEATURES, Episode, Observation, loss_of
from routepilot.env.forecast import Calibration, Forecast, forecast
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route
from routepilot.env.surrogate import Surrogate, joint

#: Random legal routes among the candidates of a live catalog.
RANDOM_CANDIDATES = 48

#: Price of an average build when a policy acts, in log speed-up: half a per cent of speed.
PRICE = 0.005

#: Column of a row that holds its promise.
PROMISE = [name for name, _ in ROW_FEATURES].index("promise")

#: Chooses a row of an observation; None stops.
Chooser = Callable[[Episode, Observation], int | None]


class BelieverAgent(OrderedAgent):
    """Keeps an episode up to date and builds the row that `choose` names.

    On a live catalog the candidates are the table's routes that are legal there, some random ones,
    and the single changes of every new best route.

    Args:
        name: Name for people.
        problem: The problem.
        surrogate: What is believed.
        choose: Which row to build.
    """

    def __init__(self, name: str, problem: Problem, surrogate: Surrogate, choose: Chooser) -> None:
        super().__init__(name, problem)
        self._surrogate, self._choose = surrogate, choose
        self._rng = np.random.default_rng(problem.seed)
        self._history: list[tuple[Route, Outcome]] = []
        self._begin(self._first_candidates())

    def ask(self) -> Route | None:
        """See `Agent`."""
        if self._pending is None and self._episode.left > 0:
            seen = self._episode.observation()
            row = self._choose(self._episode, seen) if seen.mask[:-1].any() else None
            self._pending = None if row is None else self._episode.routes[int(seen.places[row])]
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

    def _first_candidates(self) -> list[Route]:
        if self.problem.candidates is not None:
            return [r for r in self.problem.candidates if self.problem.may_ask(r)]
        catalog = self.problem.catalog
        found: dict[Route, None] = {}
        for route in dict.fromkeys(r for m in self._surrogate.models for r in m.routes):
            if all(n in catalog and catalog[n].allows(v) for n, v in route.settings):
                found[catalog.route(route.values)] = None
        found.update(dict.fromkeys(catalog.neighbours(catalog.route({}))))
        generator = random.Random(self.problem.seed)
        for _ in range(RANDOM_CANDIDATES):
            found[random_route(catalog, generator)] = None
        return [route for route in found if self.problem.may_ask(route)]

    def _begin(self, routes: list[Route]) -> None:
        """Start the episode over these candidates and go through what was told so far."""
        self._places = {route: place for place, route in enumerate(routes)}
        catalog = self.problem.catalog
        belief = self._surrogate.belief(self.problem.features, routes, catalog)
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
    """The row of largest expected feasible improvement, which is laid out first."""
    del episode, seen
    return 0


def choose_promising(episode: Episode, seen: Observation) -> int | None:
    """The row of largest improvement weighed by what happened on models alike."""
    del episode
    used = int(seen.mask[:-1].sum())
    return int(np.argmax(seen.rows[:used, PROMISE]))


def choose_by(policy: LoadedPolicy) -> Chooser:
    """The row or the stop that a policy scores highest."""

    def choose(episode: Episode, seen: Observation) -> int | None:
        del episode
        action = int(np.argmax(policy.network.logits(seen)))
        return None if action == len(seen.rows) else action

    return choose


def two_way_gp(surrogate: Surrogate) -> AgentFactory:
    """Greedy expected feasible improvement on the surrogate: the rival without a policy."""
    return lambda problem: BelieverAgent("two-way-gp", problem, surrogate, choose_greedy)


def greedy(surrogate: Surrogate) -> AgentFactory:
    """Greedy on the surrogate and the precedents: what the policy knows, without the policy."""
    return lambda problem: BelieverAgent("greedy", problem, surrogate, choose_promising)


def thompson(surrogate: Surrogate) -> AgentFactory:
    """Thompson sampling on the surrogate: the best row of one draw from the belief."""

    def make(problem: Problem) -> BelieverAgent:
        rng = np.random.default_rng([problem.seed, 1])

        def choose(episode: Episode, seen: Observation) -> int | None:
            used = np.flatnonzero(seen.mask[:-1])
            places = seen.places[used]
            belief = episode.belief
            speed = rng.multivariate_normal(
                belief.speed.mean[places], belief.speed.cov[np.ix_(places, places)], method="eigh"
            )
            loss = belief.loss.mean[places] + belief.loss.sd[places] * rng.standard_normal(
                len(places)
            )
            passes = loss < np.log10(episode.tolerance)
            return int(used[np.argmax(np.where(passes, speed, -10.0))])

        return BelieverAgent("thompson", problem, surrogate, choose)

    return make


def by_policy(policy: LoadedPolicy) -> AgentFactory:
    """The PPO policy at work."""
    return lambda problem: BelieverAgent("ppo", problem, policy.surrogate, choose_by(policy))
