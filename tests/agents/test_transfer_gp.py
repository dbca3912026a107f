"""The route process: what the training models show, filled in where they show nothing."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic

from routepilot.agents.base import Problem, search
from routepilot.agents.transfer_gp import (
    SHRINKAGES,
    Filled,
    RouteProcess,
    TransferGpAgent,
    choose_shrinkage,
    log_likelihood,
    transfer_gp,
    worth,
    worths,
)
from routepilot.env.backends.recorded import Replay
from routepilot.env.beliefs import Signal
from routepilot.env.likeness import encode
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import Route

REPLAY = Replay(synthetic.table())
ROUTES = list(REPLAY.models[0].routes)


def test_prior_is_the_mean_and_covariance_of_the_training_models() -> None:
    values = np.array([worths(model) for model in REPLAY])
    prior = RouteProcess(REPLAY).prior(ROUTES, 0.0)
    np.testing.assert_allclose(prior.mean, values.mean(axis=0))
    np.testing.assert_allclose(prior.cov, np.cov(values.T), atol=1e-12)


def test_a_route_that_fails_the_gate_is_worth_the_default() -> None:
    timed = synthetic.measurement(0.7)
    failed = Outcome(ROUTES[0], Status.ACCURACY_FAILED, "off", timed)
    assert worth(failed) == 0.0 and worth(Outcome(ROUTES[0], Status.OK, "", timed)) == 0.7


def test_missing_records_are_filled_from_like_routes() -> None:
    codes = encode(synthetic.CATALOG, ROUTES)
    values = np.tile((codes[:, 0] == 1) * 1.0, (3, 1)) + np.arange(3)[:, None]
    place = int(np.flatnonzero(codes[:, 0] == 1)[0])
    values[1, place] = np.nan
    mean, rest = Filled(values, codes, synthetic.CATALOG).at(codes, np.arange(len(codes)))
    found = mean[place] + rest[1, place]
    assert found == pytest.approx(2.0, abs=0.2)  # 1 of its engine, 1 of its model
    assert not np.isnan(mean + rest).any()


def test_routes_on_no_record_are_foreseen_by_their_knobs() -> None:
    known = [route for route in ROUTES if len(route.settings) < 3]
    new = next(r for r in ROUTES if r not in known and r.values.get("-engine") == "b")
    codes = encode(synthetic.CATALOG, known)
    values = np.tile((codes[:, 0] == 1) * 1.0, (2, 1))
    filled = Filled(values, codes, synthetic.CATALOG)
    mean, _ = filled.at(encode(synthetic.CATALOG, [new]), np.array([-1]))
    assert mean[0] > values.mean() + 0.2


def test_the_covariance_carries_one_outcome_to_its_like() -> None:
    """Models gain from engine b or from integers: one slow build of b points to the others."""
    process = RouteProcess(REPLAY.without_families(("family3",)))
    agent = TransferGpAgent(Problem(REPLAY.catalog, None, tuple(ROUTES), 8, 0), process, 0.2)
    first = agent.ask()
    assert first is not None
    engine = first.values.get("-engine", "a")
    before = agent.scores()
    slow = Outcome(first, Status.OK, "", synthetic.measurement(-0.5))
    agent.tell(first, slow)
    like = [i for i, r in enumerate(ROUTES) if r.values.get("-engine", "a") == engine]
    assert agent.scores()[like].mean() < before[like].mean()


def test_likelihood_is_that_of_a_normal() -> None:
    from scipy.stats import multivariate_normal

    rng = np.random.default_rng(0)
    half = rng.normal(size=(5, 5))
    prior = Signal(rng.normal(size=5), half @ half.T)
    one, two = rng.normal(size=5), rng.normal(size=5)
    exact = multivariate_normal(prior.mean, prior.cov + 0.02**2 * np.eye(5))
    difference = log_likelihood(prior, one) - log_likelihood(prior, two)
    assert difference == pytest.approx(exact.logpdf(one) - exact.logpdf(two))


def test_shrinkage_is_chosen_without_the_models_left_out() -> None:
    assert choose_shrinkage(REPLAY) in SHRINKAGES
    few = REPLAY.only_families(("family0",))
    assert 0 < choose_shrinkage(few) < 1


def test_it_finds_what_pays_within_four_builds() -> None:
    known = REPLAY.without_families(("family3",))
    for model in REPLAY.only_families(("family3",)):
        problem = Problem(REPLAY.catalog, None, model.routes, 4, 0)

        def evaluate(route: Route, model=model) -> Outcome:  # type: ignore[no-untyped-def]
            return model.default if route.is_default else model.outcome(route)

        outcomes = search(transfer_gp(known)(problem), evaluate, 4)
        assert max(o.gain for o in outcomes) > 0.8 * model.oracle
