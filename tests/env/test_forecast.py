import math

import numpy as np
import pytest
from scipy.special import expit, logit
from synthetic import table

from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import Replay
from routepilot.env.forecast import (
    Calibration,
    calibration_error,
    fit,
    forecast,
    held_out_reliability,
    reliability,
    win_odds,
)
from routepilot.env.surrogate import leave_family_out


@pytest.fixture(scope="module")
def replay():
    return Replay(table(), Gate())


@pytest.fixture(scope="module")
def surrogates(replay):
    return leave_family_out(replay)


def test_a_fit_finds_the_curve_that_made_the_outcomes():
    rng = np.random.default_rng(0)
    odds = rng.normal(0, 2, (40_000, 2))
    true = Calibration(0.5, 1.5, -1.0)
    hits = (rng.random(len(odds)) < true.chance(odds)).astype(float)
    found = fit(odds, hits)
    assert (found.belief, found.record) == (
        pytest.approx(0.5, abs=0.05),
        pytest.approx(1.5, abs=0.05),
    )
    assert calibration_error(reliability(found.chance(odds), hits)) < 0.01
    assert fit(odds, np.zeros(len(odds))) == Calibration()


def test_the_error_is_what_it_says():
    chances = np.array([0.05, 0.05, 0.95, 0.95])
    assert calibration_error(reliability(chances, np.array([0, 0, 1, 1.0]))) == pytest.approx(0.05)
    assert calibration_error(reliability(chances, np.array([1, 1, 0, 0.0]))) == pytest.approx(0.95)
    diagram = reliability(np.array([1.0, 0.0]), np.array([1.0, 0.0]))
    assert [row["count"] for row in diagram] == [1, 1] and calibration_error(diagram) == 0


def test_routes_come_by_expected_gain(replay, surrogates):
    model = replay.models[0]
    belief = surrogates[model.card.family].prior(model)
    curve = Calibration(1.0, 0.0, 0.0)
    found = forecast(belief, model.routes, 1e-2, curve, count=len(model.routes))
    assert {one.route for one in found} == {str(route) for route in model.routes}
    worth = [one.chance * max(0.0, math.log(one.speedup)) for one in found]
    assert worth == sorted(worth, reverse=True)
    odds = win_odds(belief, 1e-2)
    for one in found:
        place = [str(route) for route in model.routes].index(one.route)
        assert one.chance == pytest.approx(expit(odds[place, 0]))
        assert one.low < one.speedup < one.high
    assert logit(0.5) == 0


def test_chances_hold_on_families_that_nobody_saw(replay, surrogates):
    diagram = held_out_reliability(replay, surrogates)
    assert sum(row["count"] for row in diagram) == sum(len(m.routes) for m in replay)
    assert calibration_error(diagram) < 0.2
