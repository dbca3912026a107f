from dataclasses import replace

import numpy as np
import pytest
from synthetic import table

from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import Replay
from routepilot.env.precedents import FLOOR, PrecedentTable
from routepilot.env.routes import Route


def test_gains_are_averaged_at_any_limit():
    known = table()
    replay = Replay(known, Gate(limit=1e-2))
    routes = [*replay.models[0].routes, Route.read("-unknown=1")]
    precedents = PrecedentTable(replay.models).of(routes, np.ones(len(replay.models)))
    for limit in (1e-3, 1e-2, 1e-1):
        strict = Replay(known, Gate(limit=limit))
        for place, route in enumerate(routes[:-1]):
            gains = [m.gain[m.index[route]] for m in strict if route in m.index]
            assert precedents.common(limit)[place] == pytest.approx(np.mean(gains))
            wins = np.mean([gain > 0 for gain in gains])
            assert precedents.wins(limit)[place] == pytest.approx(wins)
        assert precedents.common(limit)[-1] == precedents.near(limit)[-1] == 0


def test_models_alike_count_more():
    replay = Replay(table(), Gate(limit=1.0))
    routes = replay.models[0].routes
    for number, model in enumerate(replay):
        likeness = np.zeros(len(replay.models))
        likeness[number] = 1.0
        found = PrecedentTable(replay.models).of(routes, likeness)
        others = found.common(1.0)
        own = np.array([model.gain[model.index[route]] for route in routes])
        count = len(replay.models)
        expected = (own + FLOOR * count * others) / (1 + FLOOR * count)
        assert found.near(1.0) == pytest.approx(expected)


def test_the_chance_to_act_is_the_share_of_models_alike_with_another_engine():
    replay = Replay(table(), Gate())
    first = replay.models[0]
    idle = first.routes[0]

    def engine(outcome):
        return replace(outcome, engine_hash=first.default.engine_hash)

    same = replace(first, outcomes=tuple(engine(o) for o in first.outcomes))
    assert (same.other == 0).all() and set(first.other[~np.isnan(first.other)]) == {1.0}
    models, routes = [same, *replay.models[1:]], [idle, Route.read("-unknown=1")]
    count = len(models)
    for likeness, idles in ((0.0, FLOOR), (1.0, 1 + FLOOR)):
        weight = np.zeros(count)
        weight[0] = likeness
        acts = PrecedentTable(models).of(routes, weight).acts()
        others = FLOOR * (count - 1)
        assert acts[0] == pytest.approx((others + 0.25) / (others + idles + 0.5))
        assert acts[1] == pytest.approx(0.5)


def test_some_of_the_routes():
    replay = Replay(table(), Gate())
    routes = replay.models[0].routes
    whole = PrecedentTable(replay.models).of(routes, np.ones(len(replay.models)))
    places = np.array([2, 0])
    assert whole.only(places).near(1e-2) == pytest.approx(whole.near(1e-2)[places])
