"""Agents that learn nothing: the default, trtexec-style sweeps, and random search.

Owns the sweeps with trtexec's counts and order (`fast`, `full`, `mixed`). What the agents leave
out costs trtexec a build and brings it nothing: the default route again, and combinations that
mean nothing. Two faults of `mixed` are not copied: a knob goes on to the second phase only if its
route passed the accuracy gate and its interval clears the default, and no knob twice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping

from routepilot.agents.base import OrderedAgent, Problem
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Expression, Route, sweep_expression

#: Most knobs that `mixed` multiplies out, as trtexec's own text has it.
MIXED_KNOBS = 10

#: Draws before a random agent concludes that nothing new is left.
RANDOM_TRIES = 2000


class DefaultAgent(OrderedAgent):
    """Stops at once."""

    def __init__(self, problem: Problem) -> None:
        super().__init__("default", problem)

    def upcoming(self) -> Route | None:
        """Nothing."""
        return None


class SweepAgent(OrderedAgent):
    """Walks a fixed order of settings.

    Args:
        name: Name for people.
        problem: The problem.
        settings: The order; taken as it goes, so it may be astronomically long.
    """

    def __init__(self, name: str, problem: Problem, settings: Iterable[Mapping[str, str]]) -> None:
        super().__init__(name, problem)
        self._settings = iter(settings)

    def upcoming(self) -> Route | None:
        """The next of the order."""
        settings = next(self._settings, None)
        return None if settings is None else self.problem.catalog.route(settings)


def _expression(problem: Problem, expression: Expression | None) -> Expression:
    return expression or problem.expression or sweep_expression(problem.catalog)


def fast(problem: Problem, expression: Expression | None = None) -> SweepAgent:
    """The `fast` sweep of trtexec: one change at a time, knobs right to left."""
    chosen = _expression(problem, expression)
    return SweepAgent("fast", problem, chosen.fast(problem.catalog))


def full(problem: Problem, expression: Expression | None = None) -> SweepAgent:
    """The `full` sweep of trtexec: the product of all values, last knob fastest."""
    chosen = _expression(problem, expression)
    return SweepAgent("full", problem, chosen.full())


def mixed_second_phase(
    expression: Expression, catalog: Catalog, positive: Iterable[str]
) -> Iterator[dict[str, str]]:
    """The second phase of trtexec's `mixed`: the product over the positive knobs' complete lists.

    Args:
        expression: The expression of the first phase.
        catalog: The catalog, for the defaults of the other knobs.
        positive: Names of the knobs that helped.
    """
    chosen = set(positive)
    baseline = {name: catalog[name].default for name, _ in expression.variables}
    lists = [(name, values) for name, values in expression.variables if name in chosen]
    names = [name for name, _ in lists]
    for values in itertools.product(*(values for _, values in lists)):
        yield {**expression.pinned, **baseline, **dict(zip(names, values, strict=True))}


class MixedAgent(SweepAgent):
    """trtexec's `mixed`: `fast`, then `full` over the knobs that helped."""

    def __init__(self, problem: Problem, expression: Expression | None = None) -> None:
        self._expression = _expression(problem, expression)
        super().__init__("mixed", problem, self._phases())

    def _phases(self) -> Iterator[Mapping[str, str]]:
        yield from self._expression.fast(self.problem.catalog)
        positive = self.positive_knobs()
        if len(positive) > 1:
            yield from mixed_second_phase(self._expression, self.problem.catalog, positive)

    def positive_knobs(self) -> list[str]:
        """Knobs whose single change was accurate and clearly faster, best first, ten at most.

        A change is one from the route that the expression pins, and faster is faster than that.
        """
        pinned = self.problem.catalog.route(self._expression.pinned)
        start = self.told.get(pinned)
        already = start.gain if start is not None else 0.0
        best: dict[str, float] = {}
        for route, outcome in self.told.items():
            changes = set(route.settings) ^ set(pinned.settings)
            names = {name for name, _ in changes}
            if len(names) == 1 and _is_win(outcome, already):
                (name,) = names
                best[name] = max(best.get(name, 0.0), outcome.log_speedup)
        return sorted(best, key=lambda name: -best[name])[:MIXED_KNOBS]


def _is_win(outcome: Outcome, already: float) -> bool:
    measured = outcome.measurement
    return outcome.is_feasible and measured is not None and measured.low > already


class RecentredAgent(OrderedAgent):
    """`fast` around the best so far: coordinate descent that moves as soon as a change helps.

    It starts from the route that the expression pins.
    """

    def __init__(self, problem: Problem, expression: Expression | None = None) -> None:
        super().__init__("recentred", problem)
        self._expression = _expression(problem, expression)
        self._pinned = problem.catalog.route(self._expression.pinned)
        self._walk = self._changes()
        self._inert: set[tuple[str, str]] = set()

    def upcoming(self) -> Route | None:
        """The next single change of the incumbent."""
        return next(self._walk, None)

    def tell(self, route: Route, outcome: Outcome) -> None:
        """See `Agent`."""
        super().tell(route, outcome)
        default = self.told.get(DEFAULT_ROUTE)
        same = default is not None and outcome.engine_hash == default.engine_hash != ""
        if self.problem.skips_inert and same and len(route.settings) == 1:
            self._inert.update(route.settings)

    def _is_moot(self, route: Route) -> bool:
        """True when the route holds a setting that changes nothing at the model's precision."""
        catalog = self.problem.catalog
        precise = any("precision" in catalog[name].marks for name in route.values)
        return not (precise or self._inert.isdisjoint(route.settings))

    def _changes(self) -> Iterator[Route]:
        if not self._pinned.is_default:
            yield self._pinned
        while True:
            start = self._centre()
            for name, values in reversed(self._expression.variables):
                for value in values:
                    route = self.problem.catalog.changed(self._centre(), name, value)
                    if not self._is_moot(route):
                        yield route
            if self._centre() == start:
                return

    def _centre(self) -> Route:
        best = self.incumbent
        return best.route if best is not None else self._pinned


class RandomAgent(OrderedAgent):
    """Uniform over the candidates, or over the values of each knob, until it is legal and new."""

    def __init__(self, problem: Problem) -> None:
        super().__init__("random", problem)
        self._random = random.Random(problem.seed)
        self._order: list[Route] | None = None
        if problem.candidates is not None:
            self._order = list(problem.candidates)
            self._random.shuffle(self._order)

    def upcoming(self) -> Route | None:
        """A random route."""
        if self._order is not None:
            return self._order.pop() if self._order else None
        for _ in range(RANDOM_TRIES):
            route = random_route(self.problem.catalog, self._random)
            if self.problem.may_ask(route) and route not in self.told:
                return route
        return None


def random_route(catalog: Catalog, generator: random.Random) -> Route:
    """A route with every knob's value drawn uniformly; settings that mean nothing are dropped."""
    settings = {k.name: generator.choice(k.all_values) for k in catalog.knobs}
    for rule in catalog.requirements:
        value = settings[rule.knob]
        constrained = value == rule.value if rule.value is not None else True
        if constrained and settings[rule.parent] not in rule.parent_values:
            settings[rule.knob] = catalog[rule.knob].default
    return catalog.route(settings)
