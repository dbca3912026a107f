"""A random forest as surrogate and a classifier of what is feasible, in the manner of SMAC.

Owns the rivals `forest` and `forest-scratch` (Hutter, Hoos and Leyton-Brown, LION 2011; the chance
to be feasible as in BaCO, ASPLOS 2024). A tree takes a route's knobs and a model's features, so one
forest speaks of all models; the spread over its trees is the doubt, expected improvement weighed by
the chance to be feasible is the score, and every few builds one is taken at random. A new model's
own outcomes go on where the trees left off: each tree grows a further tree on what it got wrong,
which costs milliseconds where growing the whole forest anew would cost a second. Needs the extra
`bayes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.agents.base import AgentFactory, Problem
from routepilot.agents.pool import ScoringAgent
from routepilot.env.backends.recorded import ModelReplay, Replay
from routepilot.env.beliefs import CLIP, expected_excess
from routepilot.env.errors import MissingExtraError
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route

Floats = NDArray[np.float64]

#: Trees of a forest, of one from nothing, and of those by which a setting is chosen. SMAC has 10.
TREES, SCRATCH_TREES, FEW_TREES = 40, 16, 10

#: Rows that a tree is grown on, drawn from the models drawn for it.
POINTS = 1000

#: Share of the columns that a split may use, and principal components of the model features, as
#: SMAC has them.
COLUMNS, COMPONENTS = 5 / 6, 7

#: Smallest leaves chosen among; SMAC's is 3.
LEAVES = (3, 6, 10)

#: One build in so many is random.
INTERLEAVE = 5

#: Random builds before `forest-scratch` believes its trees.
STARTUP = 1

#: What `forest-scratch` holds of a route before any outcome: log speed-up's standard deviation and
#: chance to be feasible.
PRIOR_SD, PRIOR_CHANCE = 0.1, 0.5

#: Least chance to be feasible, so that no route is written off.
LEAST_CHANCE = 0.01

#: A wrong log speed-up of 0.2 weighs as much as a chance of 1 that was 0.
SPEED_WEIGHT = 5.0

#: Parts into which the families are dealt for the choice of a leaf.
PARTS = 5


@dataclass(frozen=True)
class Leaning:
    """What each tree holds of routes of one model, before its own outcomes.

    Attributes:
        speed: Log speed-up, shape (trees, routes).
        variance: Variance within the leaf, of the same shape.
        chance: Chance to be feasible, of the same shape.
    """

    speed: Floats
    variance: Floats
    chance: Floats


def columns_of(catalog: Catalog, routes: Sequence[Route]) -> NDArray[np.float32]:
    """Routes as rows of zeros and ones, a column for each value that a knob may have."""
    places: dict[tuple[str, str], int] = {}
    for knob in catalog.knobs:
        for value in knob.alternatives:
            places[knob.name, value] = len(places)
    found = np.zeros((len(routes), len(places)), np.float32)
    for row, route in enumerate(routes):
        found[row, [places[s] for s in route.settings if s in places]] = 1.0
    return found


class Forest:
    """Trees over routes and models.

    Args:
        replay: Training models.
        leaf: Fewest rows of a leaf.
        trees: How many.
    """

    def __init__(self, replay: Replay, leaf: int, trees: int = TREES) -> None:
        self.catalog = replay.catalog
        routes = list(dict.fromkeys(r for m in replay for r in (DEFAULT_ROUTE, *m.routes)))
        self.routes = routes
        features = np.array([m.card.features for m in replay], dtype=float)
        self._centre, spread = features.mean(axis=0), features.std(axis=0)
        self._spread = np.where(spread > 1e-6, spread, np.inf)
        standard = self._standard(features)
        self._axes = np.linalg.svd(standard, full_matrices=False)[2][:COMPONENTS].T
        knobs = dict(zip(routes, columns_of(self.catalog, routes), strict=True))
        rows = [
            np.concatenate([knobs[route], place])
            for m, place in zip(replay, standard @ self._axes, strict=True)
            for route in (DEFAULT_ROUTE, *m.routes)
        ]
        # The default is on record for every model: as fast as itself, and feasible.
        data = _Data(
            np.array(rows, np.float32),
            np.concatenate([[0.0, *np.clip(m.log_speedup, -CLIP, CLIP)] for m in replay]),
            np.concatenate([[True, *m.feasible] for m in replay]),
            np.repeat(np.arange(len(replay.models)), [1 + len(m.routes) for m in replay]),
        )
        rng = np.random.default_rng(0)
        self._trees = [_grow(data, leaf, rng) for _ in range(trees)]

    def leaning(self, features: Sequence[float] | None, routes: Sequence[Route]) -> Leaning:
        """What each tree holds of routes of a new model.

        Args:
            features: Its features; None for those of an average model.
            routes: The routes.
        """
        known = self._centre if features is None else np.array(features, dtype=float)
        place = self._standard(known[None])[0] @ self._axes
        knobs = columns_of(self.catalog, routes)
        rows = np.hstack([knobs, np.tile(place, (len(routes), 1))]).astype(np.float32)
        shape = (len(self._trees), len(routes))
        speed, variance, chance = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        if len(routes):
            for number, (regressor, classifier) in enumerate(self._trees):
                leaves = regressor.apply(rows, check_input=False)
                speed[number] = regressor.tree_.value[leaves, 0, 0]
                variance[number] = regressor.tree_.impurity[leaves]
                classes = classifier.classes_.tolist()
                if True in classes:
                    chances = classifier.predict_proba(rows, check_input=False)
                    chance[number] = chances[:, classes.index(True)]
        return Leaning(speed, variance, chance)

    def _standard(self, features: Floats) -> Floats:
        found: Floats = np.clip((features - self._centre) / self._spread, -3, 3)
        return found


@dataclass(frozen=True)
class _Data:
    """Rows (knobs and model), log speed-ups (NaN: not timed), feasible or not, model number."""

    rows: NDArray[np.float32]
    speed: Floats
    feasible: NDArray[np.bool_]
    owner: NDArray[np.int64]


def _grow(data: _Data, leaf: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """A tree of speed and one of what is feasible, on models and rows drawn with replacement.

    Models are drawn before rows: the spread over the trees shall tell how little 20 models say of
    another, not how little is left to know of those 20.
    """
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    models = int(data.owner.max()) + 1
    weight = np.bincount(rng.integers(models, size=models), minlength=models)[data.owner]
    drawn = rng.choice(len(weight), min(POINTS, len(weight)), p=weight / weight.sum())
    options = {"min_samples_leaf": leaf, "max_features": COLUMNS}
    seed = int(rng.integers(2**31))
    timed = drawn[~np.isnan(data.speed[drawn])]
    regressor = DecisionTreeRegressor(random_state=seed, **options)
    if len(timed):
        regressor.fit(data.rows[timed], data.speed[timed])
    else:
        regressor.fit(data.rows[drawn], np.zeros(len(drawn)))
    classifier = DecisionTreeClassifier(random_state=seed, **options)
    classifier.fit(data.rows[drawn], data.feasible[drawn])
    return regressor, classifier


def further(
    leaning: Leaning,
    knobs: NDArray[np.float32],
    told: NDArray[np.int64],
    speed: Floats,
    feasible: NDArray[np.bool_],
) -> tuple[Floats, Floats]:
    """What further trees, one for each, make of the outcomes that were told.

    Args:
        leaning: What the trees hold.
        knobs: Routes as `columns_of` gives them.
        told: Row of each route that was told.
        speed: Their log speed-ups; NaN where nothing was timed.
        feasible: Whether each was feasible.

    Returns:
        Corrections to `leaning.speed` and `leaning.chance`, of their shape.
    """
    from sklearn.tree import DecisionTreeRegressor

    shape = leaning.speed.shape
    speed_found, chance_found = np.zeros(shape), np.zeros(shape)
    # What was not timed is no news of speed.
    wrong = np.nan_to_num(speed - leaning.speed[:, told])
    missed = feasible - leaning.chance[:, told]
    for number in range(shape[0]):
        rng = np.random.default_rng([number, len(told)])
        drawn = rng.integers(len(told), size=len(told))
        tree = DecisionTreeRegressor(max_features=COLUMNS, random_state=number)
        targets = np.stack([SPEED_WEIGHT * wrong[number, drawn], missed[number, drawn]], axis=1)
        tree.fit(knobs[told[drawn]], targets, check_input=False)
        speed_found[number], chance_found[number] = tree.predict(knobs, check_input=False).T
    return speed_found / SPEED_WEIGHT, chance_found


class ForestAgent(ScoringAgent):
    """Expected improvement over the trees, times the chance to be feasible.

    Args:
        name: Name for people.
        problem: The problem.
        forest: Trees over other models; None to begin from nothing.
    """

    def __init__(self, name: str, problem: Problem, forest: Forest | None) -> None:
        super().__init__(name, problem, forest.routes if forest else ())
        self._forest = forest
        self._rng = np.random.default_rng(problem.seed)
        self._told: list[tuple[int, float, bool]] = []
        self.widen(())

    def scores(self) -> Floats:
        """Expected feasible improvement; chance alone decides the random builds."""
        builds = int(self.tried.sum())
        starting = self._forest is None and builds < STARTUP
        if starting or builds % INTERLEAVE == INTERLEAVE - 1:
            return self._rng.random(len(self.routes))
        speed, chance = self._leaning.speed, self._leaning.chance
        if self._told:
            told, speeds, feasible = (np.array(x) for x in zip(*self._told, strict=True))
            more, likelier = further(self._leaning, self._knobs, told, speeds, feasible)
            speed, chance = speed + more, chance + likelier
        sd = np.sqrt(speed.var(axis=0) + self._leaning.variance.mean(axis=0) + 1e-9)
        improvement = expected_excess(speed.mean(axis=0) - self.best, sd)
        weighed = improvement * np.clip(chance.mean(axis=0), LEAST_CHANCE, 1)
        # Routes that no tree tells apart are equals, not first come first served.
        return np.asarray(weighed + 1e-12 * self._rng.random(len(weighed)))[:-1]

    def tell(self, route: Route, outcome: Outcome) -> None:
        """See `Agent`; the default is an outcome like any other, the last row."""
        if route.is_default and route not in self.told:
            self._told.append((-1, 0.0, True))
        super().tell(route, outcome)

    def learn(self, place: int, outcome: Outcome) -> None:
        """See `ScoringAgent`."""
        measured = outcome.measurement
        speed = float(np.clip(measured.log_speedup, -CLIP, CLIP)) if measured else np.nan
        self._told.append((place, speed, outcome.is_feasible))

    def widen(self, routes: Sequence[Route]) -> None:
        """See `ScoringAgent`."""
        del routes
        rows = [*self.routes, DEFAULT_ROUTE]
        if self._forest is None:
            self._knobs = columns_of(self.problem.catalog, rows)
            self._leaning = _no_leaning(len(rows))
            return
        self._knobs = columns_of(self._forest.catalog, rows)
        self._leaning = self._forest.leaning(self.problem.features, rows)


def _no_leaning(routes: int) -> Leaning:
    shape = (SCRATCH_TREES, routes)
    return Leaning(np.zeros(shape), np.full(shape, PRIOR_SD**2), np.full(shape, PRIOR_CHANCE))


def choose_leaf(replay: Replay) -> int:
    """The smallest leaf of the least squared error on families unseen."""
    families = list(dict.fromkeys(m.card.family for m in replay))
    if len(families) < 3:
        return LEAVES[0]
    parts = [tuple(families[i::PARTS]) for i in range(min(PARTS, len(families)))]
    plan = [(replay.without_families(part), replay.only_families(part)) for part in parts]

    def error(leaf: int) -> float:
        total = 0.0
        for known, unseen in plan:
            grown = Forest(known, leaf, FEW_TREES)
            total += sum(_error(grown, model) for model in unseen)
        return total

    return min(LEAVES, key=error)


def _error(forest: Forest, model: ModelReplay) -> float:
    """Mean squared error of speed, where it was timed, and of the chance to be feasible."""
    leaning = forest.leaning(model.card.features, model.routes)
    wrong = SPEED_WEIGHT * (leaning.speed.mean(axis=0) - np.clip(model.log_speedup, -CLIP, CLIP))
    missed = leaning.chance.mean(axis=0) - model.feasible
    timed = wrong[~np.isnan(wrong)]
    return float((timed**2).sum() + (missed**2).sum()) / max(len(model.routes), 1)


def forest(replay: Replay) -> AgentFactory:
    """The rival that knows other models."""
    _require()
    grown = Forest(replay, choose_leaf(replay))
    return lambda problem: ForestAgent("forest", problem, grown)


def forest_scratch(problem: Problem) -> ForestAgent:
    """The rival that knows nothing but what it is told."""
    _require()
    return ForestAgent("forest-scratch", problem, None)


def _require() -> None:
    try:
        import sklearn.tree  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"the forest agents need {error.name}; pip install 'routepilot[bayes]'"
        ) from None
