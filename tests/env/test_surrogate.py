"""The surrogate: exact conditioning, families unseen, gains found early, any route."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic

from routepilot.env.backends.recorded import LOST, ModelReplay, Replay
from routepilot.env.routes import Route
from routepilot.env.surrogate import Signal, Surrogate, greedy_share, leave_family_out


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(synthetic.table())


def test_observe_is_gaussian_conditioning() -> None:
    rng = np.random.default_rng(1)
    root = rng.normal(size=(5, 5))
    cov, mean = root @ root.T, rng.normal(size=5)
    signal = Signal(mean.copy(), cov.copy())
    signal.observe(2, 1.5, 0.3)
    signal.observe(4, -0.5, 0.1)
    picked, values, noise = [2, 4], np.array([1.5, -0.5]), np.diag([0.09, 0.01])
    inner = np.linalg.inv(cov[np.ix_(picked, picked)] + noise)
    gain = cov[:, picked] @ inner
    np.testing.assert_allclose(signal.mean, mean + gain @ (values - mean[picked]), atol=1e-9)
    np.testing.assert_allclose(signal.cov, cov - gain @ cov[picked], atol=1e-9)


def test_prior_of_a_known_model_fits_its_own_outcomes(replay: Replay) -> None:
    model = replay.models[0]
    belief = Surrogate(replay).belief(model.card.features, model.routes)
    timed = ~np.isnan(model.log_speedup)
    error = belief.speed.mean[timed] - model.log_speedup[timed]
    assert np.sqrt(np.mean(error**2)) < 0.1


def test_unseen_family_is_predicted_from_features(replay: Replay) -> None:
    def right(
        features: tuple[float, ...] | None, surrogate: Surrogate, model: ModelReplay
    ) -> float:
        mean = surrogate.belief(features, model.routes).speed.mean
        timed = ~np.isnan(model.log_speedup)
        return float(np.corrcoef(mean[timed], model.log_speedup[timed])[0, 1])

    informed, blind = [], []
    for model in replay.models:
        surrogate = Surrogate(replay.without_families((model.card.family,)))
        informed.append(right(model.card.features, surrogate, model))
        blind.append(right(None, surrogate, model))
    assert min(informed) > 0.6
    assert np.mean(informed) > np.mean(blind) + 0.3


def test_chance_to_pass_follows_the_limit(replay: Replay) -> None:
    model = replay.models[1]
    belief = Surrogate(replay).belief(model.card.features, model.routes)
    tight, loose = belief.p_feasible(1e-4), belief.p_feasible(0.5)
    assert (tight <= loose).all()
    exact = [i for i, r in enumerate(model.routes) if "-precision" not in r.values]
    works = [i for i in exact if model.loss[i] < LOST]
    assert belief.p_feasible(1e-2)[works].min() > 0.5
    assert tight.mean() < loose.mean()


def test_routes_outside_the_table_are_believed_too(replay: Replay) -> None:
    thin = Replay(synthetic.table())
    surrogate = Surrogate(thin)
    unknown = Route((("-engine", "never heard of"),))
    belief = surrogate.belief(None, [unknown])
    assert np.isfinite(belief.speed.mean).all()
    assert belief.speed.sd[0] > 0


def test_greedy_on_unseen_families_beats_chance(replay: Replay) -> None:
    share = greedy_share(replay.models, leave_family_out(replay), builds=2)
    random_share = np.mean([m.gain.mean() / m.oracle for m in replay.models])
    assert share > 0.8 > random_share


def test_nearest_model_is_one_of_the_same_kind(replay: Replay) -> None:
    model = replay.models[0]
    known = replay.without_families((model.card.family,))
    names = [name for name, _ in Surrogate(known).nearest(model.card.features)]
    assert all(int(name.removeprefix("model")) % 2 == 0 for name in names)
