"""The forest: what it reads, what it learns of others, and how a model's own outcomes move it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import synthetic

from routepilot.agents import make_factory
from routepilot.agents.base import Problem, search
from routepilot.agents.forest import (
    INTERLEAVE,
    LEAVES,
    Forest,
    ForestAgent,
    Leaning,
    choose_leaf,
    columns_of,
    further,
)
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import MissingExtraError
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Route

pytest.importorskip("sklearn")

REPLAY = Replay(synthetic.table())
KNOWN = REPLAY.without_families(("family3",))
FOREST = Forest(KNOWN, 3)
MODEL = REPLAY.model("model7")


def problem(seed: int = 0) -> Problem:
    return Problem(REPLAY.catalog, MODEL.card.features, MODEL.routes, 16, seed)


def fine(route: Route, gain: float) -> Outcome:
    return Outcome(route, Status.OK, "", synthetic.measurement(gain))


def test_columns_name_each_value_but_the_default() -> None:
    route = synthetic.CATALOG.route({"-precision": "int", "-fuse": "off"})
    rows = columns_of(synthetic.CATALOG, [DEFAULT_ROUTE, route])
    assert rows.shape == (2, 7)  # 1 + 2 + 2 + 1 + 1 alternatives
    assert rows[0].sum() == 0 and rows[1].sum() == 2


def test_trees_tell_models_apart_by_their_features() -> None:
    """Odd kinds gain from integers, which even kinds may not use."""
    integers = [synthetic.CATALOG.route({"-precision": "int"})]
    odd = FOREST.leaning(REPLAY.model("model7").card.features, integers)
    even = FOREST.leaning(REPLAY.model("model6").card.features, integers)
    assert odd.speed.mean() > even.speed.mean() + 0.1
    assert odd.chance.mean() > even.chance.mean() + 0.3
    assert FOREST.leaning(None, integers).speed.shape == (40, 1)


def test_further_trees_learn_what_the_forest_got_wrong() -> None:
    routes = list(MODEL.routes)
    knobs = columns_of(synthetic.CATALOG, routes)
    shape = (40, len(routes))
    flat = Leaning(np.zeros(shape), np.ones(shape), np.full(shape, 0.5))
    values = [r.values for r in routes]
    slow = np.array([v.get("-engine") == "b" for v in values])
    told = np.random.default_rng(0).choice(len(routes), 20, replace=False)
    speed = np.where(slow[told], -0.5, 0.2)
    more, likelier = further(flat, knobs, told, speed, ~slow[told])
    rest = np.setdiff1d(np.arange(len(routes)), told)
    for found in (more.mean(axis=0)[rest], likelier.mean(axis=0)[rest]):
        assert found[slow[rest]].mean() < -0.2 < 0.1 < found[~slow[rest]].mean()


def test_what_was_not_timed_is_no_news_of_speed() -> None:
    knobs = columns_of(synthetic.CATALOG, MODEL.routes)
    shape = (4, len(MODEL.routes))
    flat = Leaning(np.full(shape, 0.3), np.ones(shape), np.full(shape, 0.5))
    more, likelier = further(flat, knobs, np.array([0]), np.array([np.nan]), np.array([False]))
    assert (more == 0).all() and (likelier == -0.5).all()


def test_failures_turn_it_away_from_their_like() -> None:
    agent = ForestAgent("forest", problem(), FOREST)
    agent.tell(DEFAULT_ROUTE, MODEL.default)
    integers = 0
    for _ in range(4):
        route = agent.ask()
        assert route is not None
        failed = route.values.get("-precision") == "int"
        integers += failed
        agent.tell(
            route, Outcome(route, Status.BUILD_FAILED, "no") if failed else fine(route, 0.01)
        )
    assert 1 <= integers <= 3


def test_every_fifth_build_is_random_and_the_others_are_not() -> None:
    def walk(seed: int) -> list[Route]:
        agent = ForestAgent("forest", problem(seed), FOREST)
        return [o.route for o in search(agent, lambda r: fine(r, -0.1), INTERLEAVE)]

    walks = [walk(seed) for seed in range(6)]
    assert len({tuple(w[: INTERLEAVE - 1]) for w in walks}) == 1
    assert len({w[INTERLEAVE - 1] for w in walks}) > 1


def test_from_nothing_it_learns_which_engine_pays() -> None:
    def outcome(route: Route) -> Outcome:
        gain = 0.4 if route.values.get("-engine") == "b" else -0.2
        return fine(route, 0.0 if route.is_default else gain)

    found = []
    for seed in range(6):
        agent = make_factory("forest-scratch")(problem(seed))
        outcomes = search(agent, outcome, 12)
        found.append(np.mean([o.log_speedup > 0 for o in outcomes[5:]]))
    share = np.mean([r.values.get("-engine") == "b" for r in MODEL.routes])
    assert np.mean(found) > share + 0.2


def test_it_starts_well_on_a_family_it_never_saw() -> None:
    agent = make_factory("forest", replay=KNOWN)(problem())
    outcomes = search(agent, lambda r: MODEL.default if r.is_default else MODEL.outcome(r), 3)
    assert max(o.gain for o in outcomes) > 0.8 * MODEL.oracle
    assert choose_leaf(KNOWN) in LEAVES


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.tree", None)
    for make in (lambda: make_factory("forest", replay=KNOWN), lambda: scratch()(problem())):
        with pytest.raises(MissingExtraError, match=r"routepilot\[bayes\]"):
            make()


def scratch():  # type: ignore[no-untyped-def]
    return make_factory("forest-scratch")
