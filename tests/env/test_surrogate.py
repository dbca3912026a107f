"""The surrogate: exact conditioning, families unseen, gains found early, any route."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import synthetic

from routepilot.env.backends.recorded import LOST, ModelReplay, Replay
from routepilot.env.beliefs import Signal
from routepilot.env.likeness import encode, joint
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import Catalog, Knob, Route
from routepilot.env.surrogate import Surrogate, greedy_share, leave_family_out


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


OTHER = Catalog(
    "other",
    "1",
    (
        Knob("-kernel", ("slow", "fast"), "slow", "Kernels.", ("precision",)),
        Knob("-level", ("0", "1", "2", "3"), "0", "Level, of another default.", ("graph",)),
        Knob("-stream", ("1", "2"), "1", "Streams."),
    ),
)


def test_a_joint_catalog_tells_routes_of_both_apart() -> None:
    ours = synthetic.CATALOG
    assert joint(ours, ours) is ours
    assert joint(ours, replace(ours, knobs=ours.knobs[:3], requirements=())) is ours
    both = joint(ours, OTHER)
    assert [k.name for k in both.knobs] == [k.name for k in ours.knobs] + ["-kernel", "-stream"]
    assert both["-level"].values == ("2", "1", "0", "3")
    assert both["-kernel"].marks == ("precision",)


def test_a_default_is_unchanged_whatever_its_value() -> None:
    both = joint(synthetic.CATALOG, OTHER)
    ours = [Route(), Route.read("-level=1"), Route.read("-level=0"), Route.read("-engine=b")]
    theirs = [Route(), *map(Route.read, ("-level=1", "-level=2", "-level=3", "-kernel=fast"))]
    first, second = encode(both, ours, synthetic.CATALOG), encode(both, theirs, OTHER)
    assert (first[0] == second[0]).all()
    assert (first[1] == second[1]).all()  # the same change
    assert (first[0] != second[2]).sum() == 1  # their 2 is a change, though it is our default
    assert (first[2] != second[0]).sum() == 1  # and our 0 one, though it is theirs
    assert len({tuple(row) for row in [*first, *second]}) == len(ours) + len(theirs) - 2


def test_another_catalog_is_learned_from_this_models_builds() -> None:
    surrogate = Surrogate(Replay(synthetic.table()))
    routes = [Route.read(t) for t in ("-kernel=fast", "-kernel=fast -stream=2", "-stream=2")]
    belief = surrogate.belief(surrogate.models[0].card.features, routes, OTHER)
    likeness = belief.speed.cov[0] / np.sqrt(belief.speed.cov[0, 0] * np.diag(belief.speed.cov))
    assert likeness[1] < 0.99 and likeness[1] > likeness[2]  # a shared strong change is more alike
    before = belief.speed.mean.copy()
    made = Outcome(routes[0], Status.OK, measurement=synthetic.measurement(0.6))
    belief.observe(0, made, 1e-5)
    rise = belief.speed.mean - before
    assert belief.speed.mean[0] == pytest.approx(0.6, abs=0.05)
    assert rise[1] > 0.5 * rise[0] > rise[2]


def test_the_same_catalog_by_name_changes_no_belief() -> None:
    surrogate = Surrogate(Replay(synthetic.table()))
    model = surrogate.models[0]
    plain = surrogate.belief(model.card.features, model.routes)
    named = surrogate.belief(model.card.features, model.routes, synthetic.CATALOG)
    np.testing.assert_array_equal(plain.speed.mean, named.speed.mean)
    np.testing.assert_array_equal(plain.loss.cov, named.loss.cov)
    np.testing.assert_array_equal(plain.codes, named.codes)


def test_a_large_table_is_told_by_its_telling_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    from routepilot.env import surrogate as module

    replay = Replay(synthetic.table())
    whole = Surrogate(replay)
    monkeypatch.setattr(module, "MOST_OUTCOMES", 6 * len(replay.models))
    thinned = Surrogate(replay)
    model = replay.models[0]
    sure = [s.prior(model).speed.sd.mean() for s in (whole, thinned)]
    assert (
        sure[0]
        < sure[1]
        < Surrogate(replay.without_families(replay.table.families)).prior(model).speed.sd.mean()
    )


def test_telling_routes_are_unlike_each_other_and_known_to_many() -> None:
    from routepilot.env.likeness import telling

    alike = np.array([[1.0, 0.99, 0.1], [0.99, 1.0, 0.1], [0.1, 0.1, 1.0]])
    assert telling(alike, np.array([4, 4, 4]), 2).tolist() == [True, False, True]
    assert telling(alike, np.array([1, 4, 4]), 2).tolist() == [False, True, True]
    assert telling(alike, np.array([1, 1, 1]), 9).all()
