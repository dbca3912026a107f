"""The routes that a scoring agent chooses among, and the walk from the best score to the next.

Owns which routes of an open catalog are candidates: a table's, single changes of the default, some
at random, and single changes of every new best. Knows no score.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from routepilot.agents.base import OrderedAgent, Problem
from routepilot.agents.sweeps import random_route
from routepilot.env.liveness_prior import EVEN_CHANCE
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Route

Floats = NDArray[np.float64]

#: Changes of a random route where it is known what is likely to act, least and most.
LIKELY_CHANGES = 2, 4

#: Random legal routes among the candidates of an open catalog.
RANDOM_CANDIDATES = 48


def first_candidates(problem: Problem, known: Iterable[Route] = ()) -> list[Route]:
    """Routes to begin with, each once and askable.

    Args:
        problem: The problem; where it names its candidates, they are all there is.
        known: Routes of a table, each as often as models know it. Those that the catalog lacks are
            left out, and those that only few models know: they lie around what was fast there, and
            are so many and so alike that they would crowd out the rest.
    """
    if problem.candidates is not None:
        return [r for r in dict.fromkeys(problem.candidates) if problem.may_ask(r)]
    catalog = problem.catalog
    found: dict[Route, None] = {}
    counts = Counter(known)
    common = max(counts.values(), default=0) / 2
    for route, count in counts.items():
        if count >= common and all(
            n in catalog and catalog[n].allows(v) for n, v in route.settings
        ):
            found[catalog.route(route.values)] = None
    found.update(dict.fromkeys(catalog.neighbours(DEFAULT_ROUTE)))
    generator = random.Random(problem.seed)
    for _ in range(RANDOM_CANDIDATES):
        route = (
            likely_route(problem, generator) if problem.acts else random_route(catalog, generator)
        )
        found[route] = None
    return [route for route in found if problem.may_ask(route)]


def likely_route(problem: Problem, generator: random.Random) -> Route:
    """A route of a few changes, each drawn by its chance to act; legal or not.

    A route that draws every knob at random changes half of them, of which few act.
    """
    acts = problem.acts
    knobs = {
        knob.name: [acts.get(f"{knob.name}={v}", EVEN_CHANCE) for v in knob.alternatives]
        for knob in problem.catalog.knobs
    }
    weights = {name: max(chances, default=0.0) for name, chances in knobs.items()}
    settings: dict[str, str] = {}
    for _ in range(generator.randint(*LIKELY_CHANGES)):
        left = {name: weight for name, weight in weights.items() if weight and name not in settings}
        if not left:
            break
        (name,) = generator.choices(list(left), list(left.values()))
        alternatives = problem.catalog[name].alternatives
        (settings[name],) = generator.choices(alternatives, knobs[name])
    return problem.catalog.route(settings)


class ScoringAgent(OrderedAgent):
    """Asks for the untried candidate of the highest score.

    Subclasses say what a candidate is worth through `scores`, and keep what they know of the
    candidates up to date through `learn` and `widen`.

    Args:
        name: Name for people.
        problem: The problem.
        known: Routes of a table.
    """

    def __init__(self, name: str, problem: Problem, known: Iterable[Route] = ()) -> None:
        super().__init__(name, problem)
        self.routes = first_candidates(problem, known)
        self.places = {route: place for place, route in enumerate(self.routes)}
        self.tried = np.zeros(len(self.routes), bool)
        self.best = 0.0
        self.best_route = DEFAULT_ROUTE

    def scores(self) -> Floats:
        """Worth of each candidate, shape (candidates,); the tried ones' are ignored."""
        raise NotImplementedError

    def learn(self, place: int, outcome: Outcome) -> None:
        """Take in the outcome of a candidate."""
        raise NotImplementedError

    def widen(self, routes: Sequence[Route]) -> None:
        """Take in candidates that were appended to `self.routes`."""
        raise NotImplementedError

    def upcoming(self) -> Route | None:
        """The best untried candidate."""
        free = np.flatnonzero(~self.tried)
        if not len(free):
            return None
        return self.routes[int(free[np.argmax(self.scores()[free])])]

    def tell(self, route: Route, outcome: Outcome) -> None:
        """See `Agent`."""
        super().tell(route, outcome)
        place = self.places.get(route)
        if place is None or self.tried[place]:
            return
        self.tried[place] = True
        self.learn(place, outcome)
        if outcome.gain > self.best:
            self.best, self.best_route = outcome.gain, route
            self._widen_around(route)

    def _widen_around(self, route: Route) -> None:
        if self.problem.candidates is not None:
            return
        near = self.problem.catalog.neighbours(route)
        new = [r for r in near if r not in self.places and self.problem.may_ask(r)]
        if not new:
            return
        self.places.update({r: len(self.routes) + i for i, r in enumerate(new)})
        self.routes += new
        self.tried = np.append(self.tried, np.zeros(len(new), bool))
        self.widen(new)
