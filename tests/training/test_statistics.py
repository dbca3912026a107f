"""The measures against `rliable`, scipy and cases worked out by hand; intervals hold what they say.

rliable 1.2.0 is archived; it works beside `arch<8` and `pandas<3`, and its tests are skipped where
it is not installed.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from routepilot.training.statistics import (
    bootstrap,
    estimate,
    interquartile_mean,
    mean,
    performance_profile,
    probability_of_improvement,
    share,
)

RNG = np.random.default_rng(7)
OURS = RNG.uniform(0, 1.2, (3, 6, 4)).round(2)
THEIRS = RNG.uniform(0, 1.0, (1, 6, 4)).round(2)


def as_runs(scores: np.ndarray) -> np.ndarray:
    """As rliable has them: (runs, tasks)."""
    return scores.transpose(0, 2, 1).reshape(-1, scores.shape[1])


def test_against_rliable() -> None:
    pytest.importorskip("rliable")
    from rliable import library, metrics

    assert interquartile_mean(OURS[None])[0] == pytest.approx(metrics.aggregate_iqm(as_runs(OURS)))
    # rliable pairs every run with every one of its model, we those of the same search seed: the
    # same thing seed by seed.
    seeds = range(OURS.shape[2])
    theirs = [metrics.probability_of_improvement(OURS[:, :, s], THEIRS[:, :, s]) for s in seeds]
    found = probability_of_improvement(OURS[None], THEIRS[None])[0]
    assert found == pytest.approx(np.mean(theirs))
    levels = np.array([0.1234, 0.4321, 0.7777, 1.1111])  # between scores, where > is >=
    profiles, _ = library.create_performance_profile({"a": as_runs(OURS)}, levels, reps=10)
    np.testing.assert_allclose(performance_profile(OURS[None], levels)[0], profiles["a"])


def test_stratified_intervals_agree_with_rliable() -> None:
    """With the models held, redrawing runs within each is rliable's stratified bootstrap."""
    pytest.importorskip("rliable")
    from rliable import library, metrics

    runs = np.random.default_rng(1).normal(0.6, 0.2, (40, 1))
    _, ends = library.get_interval_estimates(
        {"a": runs}, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=4000
    )
    found = estimate(interquartile_mean, runs.T[None], draws=4000)
    assert (found.low, found.high) == pytest.approx(ends["a"][:, 0].tolist(), abs=0.015)


def test_by_hand() -> None:
    scores = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 9.0]).reshape(1, 1, 4, 2)
    assert interquartile_mean(scores)[0] == pytest.approx((0.2 + 0.3 + 0.4 + 0.5) / 4)
    assert performance_profile(scores, [0.0, 0.3, 0.31, 9.0, 9.1])[0].tolist() == [
        *(1.0, 5 / 8, 4 / 8, 1 / 8, 0.0)
    ]
    ours = np.array([[0.5, 0.5], [0.2, 0.9]]).reshape(1, 1, 2, 2)
    theirs = np.array([[0.5, 0.4], [0.3, 0.1]]).reshape(1, 1, 2, 2)
    assert probability_of_improvement(ours, theirs)[0] == pytest.approx((0.5 + 1 + 0 + 1) / 4)
    oracle = np.array([1.0, 3.0]).reshape(1, 1, 2, 1)
    assert share(ours, oracle)[0] == pytest.approx((0.5 + 0.55) / 4)
    assert share(0 * ours, 0 * oracle)[0] == 0.0


def test_one_seed_makes_it_a_sign_statistic() -> None:
    """Against scipy: with one run a model, P(improvement) is Mann-Whitney's U of each pair."""
    ours, theirs = OURS[:1, :, :1], THEIRS[:, :, :1]
    expected = np.mean(
        [
            stats.mannwhitneyu(ours[0, m], theirs[0, m], method="exact").statistic
            for m in range(ours.shape[1])
        ]
    )
    assert probability_of_improvement(ours[None], theirs[None])[0] == pytest.approx(expected)


def test_an_agent_against_itself_ties() -> None:
    found = estimate(probability_of_improvement, THEIRS, THEIRS)
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)
    difference = estimate(lambda a, b: mean(a) - mean(b), THEIRS, THEIRS)
    assert (difference.low, difference.high) == (0.0, 0.0)  # paired: chance cannot tell them apart


def test_interval_of_a_mean_over_models_agrees_with_scipy() -> None:
    scores = np.random.default_rng(3).normal(0.5, 0.1, (1, 30, 1))
    found = estimate(mean, scores, draws=4000)
    theirs = stats.bootstrap(
        (scores.ravel(),),
        np.mean,
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_seeds_and_trainings_widen_the_interval() -> None:
    """Models all alike: what is left is chance of search and of training."""
    noise = np.random.default_rng(5).normal(0, 0.2, (5, 1, 1))
    by_training = np.broadcast_to(0.5 + noise, (5, 8, 3))
    one = estimate(mean, by_training[:1])
    several = estimate(mean, by_training)
    assert one.high - one.low < 1e-12
    assert several.high - several.low > 0.1
    by_seed = np.broadcast_to(np.array([0.0, 1.0]), (1, 4, 2))
    assert estimate(mean, by_seed).high - estimate(mean, by_seed).low > 0.3


def test_interval_covers() -> None:
    """Of 95 % intervals over 25 models about nine in ten hold the mean, percentile bootstrap."""
    rng = np.random.default_rng(11)
    hits = 0
    for trial in range(200):
        scores = rng.normal(0.5, 0.2, (1, 25, 1)) + rng.normal(0, 0.1, (1, 25, 2))
        found = estimate(mean, scores, draws=300, seed=trial)
        hits += found.low <= 0.5 <= found.high
    assert 175 <= hits <= 199


def test_several_figures_at_once() -> None:
    value, low, high = bootstrap(lambda x: performance_profile(x, [0.2, 0.5]), OURS, draws=200)
    assert value.shape == low.shape == high.shape == (2,)
    assert (low <= value).all() and (value <= high).all()
    with pytest.raises(ValueError, match="nothing to draw"):
        estimate(mean, np.zeros((1, 0, 2)))
