"""Agents that carry routes over from other models without a surrogate.

Owns best-on-average, nearest neighbours, and coreset with predicted values: the rivals a learned
policy must beat. Each is made from the replay of a route table that does not know the new model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from routepilot.agents.base import AgentFactory, OrderedAgent, Problem
from routepilot.agents.sweeps import random_route
from routepilot.env.backends.recorded import Replay
from routepilot.env.routes import Route

Floats = NDArray[np.float64]

#: Scores of all routes for a new model: (features, gains, its features) -> scores.
Scorer = Callable[[Floats, Floats, Floats], Floats]

#: Members of a coreset.
CORESET = 16

#: Ridge penalties and neighbour counts chosen among, by leave-one-family-out on the table.
PENALTIES, NEIGHBOURS = (0.3, 1.0, 3.0, 10.0), (2, 3, 5, 8)


class ListedAgent(OrderedAgent):
    """Walks a ranking; afterwards what the table does not rank, in random order.

    Args:
        name: Name for people.
        problem: The problem.
        ranking: Routes, best first.
    """

    def __init__(self, name: str, problem: Problem, ranking: Iterable[Route]) -> None:
        super().__init__(name, problem)
        catalog = problem.catalog
        self._ranking = iter(
            [
                catalog.route(route.values)
                for route in ranking
                if all(n in catalog and catalog[n].allows(v) for n, v in route.settings)
            ]
        )
        generator = random.Random(problem.seed)
        self._generator = generator
        self._rest = list(problem.candidates or ())
        generator.shuffle(self._rest)
        self._tries = 500 if problem.candidates is None else 0

    def upcoming(self) -> Route | None:
        """The next of the ranking, then of the rest."""
        route = next(self._ranking, None)
        if route is not None:
            return route
        if self._rest:
            return self._rest.pop()
        if self._tries > 0:
            self._tries -= 1
            return random_route(self.problem.catalog, self._generator)
        return None


class GainTable:
    """Gains of every route on every model of a replay; missing ones count as 0.

    Args:
        replay: The table.
    """

    def __init__(self, replay: Replay) -> None:
        self.routes = list(dict.fromkeys(r for m in replay for r in m.routes))
        place = {route: i for i, route in enumerate(self.routes)}
        self.gains: Floats = np.zeros((len(replay.models), len(self.routes)))
        for i, model in enumerate(replay):
            self.gains[i, [place[r] for r in model.routes]] = model.gain
        self.families = np.array([m.card.family for m in replay])
        features = np.array([m.card.features for m in replay], dtype=float)
        self._centre = features.mean(axis=0)
        spread = features.std(axis=0)
        self._spread = np.where(spread > 1e-6, spread, np.inf)
        self.features = self.standard(features)

    def standard(self, features: Floats) -> Floats:
        """Features in standard deviations, clipped at 3."""
        found: Floats = np.clip((features - self._centre) / self._spread, -3, 3)
        return found

    def ranked(self, score: Floats) -> list[Route]:
        """Routes by falling score; ties by their order in the table."""
        return [self.routes[i] for i in np.argsort(-score, kind="stable")]

    def folds(self) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
        """Training and left-out models, one family left out at a time."""
        return [(self.families != f, self.families == f) for f in dict.fromkeys(self.families)]


def best_on_average(replay: Replay) -> AgentFactory:
    """Routes by their mean gain over the table's models."""
    table = GainTable(replay)
    ranking = table.ranked(table.gains.mean(axis=0))
    return lambda problem: ListedAgent("best-on-average", problem, ranking)


def nearest(replay: Replay) -> AgentFactory:
    """Routes by their mean gain over the models most like the new one."""
    table = GainTable(replay)
    count = max(NEIGHBOURS, key=lambda k: _first_gain(table, lambda f, g, x: _nearest(f, g, x, k)))

    def make(problem: Problem) -> ListedAgent:
        if problem.features is None:
            return ListedAgent("knn", problem, table.ranked(table.gains.mean(axis=0)))
        one = table.standard(np.array(problem.features, dtype=float))
        score = _nearest(table.features, table.gains, one, count)
        return ListedAgent("knn", problem, table.ranked(score))

    return make


def coreset(replay: Replay) -> AgentFactory:
    """A complementary set of routes, asked in the order of their predicted value.

    After Liang et al. (ICML 2023): choose greedily the routes that together serve the training
    models best, then predict each one's share of a model's best gain from the model's features.
    """
    table = GainTable(replay)
    members = greedy_coreset(table.gains, CORESET)
    best = np.maximum(table.gains.max(axis=1, keepdims=True), 1e-9)
    shares = table.gains[:, members] / best
    penalty = max(PENALTIES, key=lambda p: _first_gain(table, lambda f, g, x: _coreset(f, g, x, p)))

    def make(problem: Problem) -> ListedAgent:
        order = np.arange(len(members))
        if problem.features is not None:
            one = table.standard(np.array(problem.features, dtype=float))
            order = np.argsort(-_ridge(table.features, shares, one, penalty), kind="stable")
        chosen = [table.routes[members[i]] for i in order]
        rest = [r for r in table.ranked(table.gains.mean(axis=0)) if r not in set(chosen)]
        return ListedAgent("coreset", problem, [*chosen, *rest])

    return make


def greedy_coreset(gains: Floats, size: int) -> list[int]:
    """Columns that together give the largest mean of row maxima, chosen one after another.

    Args:
        gains: Shape (models, routes), 0 or more.
        size: How many.
    """
    chosen: list[int] = []
    reached = np.zeros(len(gains))
    for _ in range(min(size, gains.shape[1])):
        worth = np.maximum(gains, reached[:, None]).mean(axis=0)
        worth[chosen] = -1.0
        chosen.append(int(np.argmax(worth)))
        reached = np.maximum(reached, gains[:, chosen[-1]])
    return chosen


def _nearest(features: Floats, gains: Floats, one: Floats, count: int) -> Floats:
    distance = np.mean((features - one) ** 2, axis=1)
    near = np.argsort(distance, kind="stable")[:count]
    weight = 1.0 / (0.1 + distance[near])
    return np.asarray(weight @ gains[near] / weight.sum() + 1e-3 * gains.mean(axis=0))


def _coreset(features: Floats, gains: Floats, one: Floats, penalty: float) -> Floats:
    members = greedy_coreset(gains, CORESET)
    best = np.maximum(gains.max(axis=1, keepdims=True), 1e-9)
    score = np.full(gains.shape[1], -10.0)
    score[members] = _ridge(features, gains[:, members] / best, one, penalty)
    return score


def _ridge(features: Floats, targets: Floats, one: Floats, penalty: float) -> Floats:
    """Kernel ridge regression of several targets at one new point, around their means."""
    centre = targets.mean(axis=0)
    gram = features @ features.T / features.shape[1]
    cross = features @ one / features.shape[1]
    weights = np.linalg.solve(gram + penalty * np.eye(len(gram)) / 10, targets - centre)
    return np.asarray(centre + cross @ weights)


def _first_gain(table: GainTable, score: Scorer) -> float:
    """Mean gain of a scorer's first two routes on left-out families."""
    found = 0.0
    for train, test in table.folds():
        if not train.any():
            continue
        for model in np.flatnonzero(test):
            values = score(table.features[train], table.gains[train], table.features[model])
            first = np.argsort(-values, kind="stable")[:2]
            found += float(table.gains[model, first[0]] + table.gains[model, first].max())
    return found
