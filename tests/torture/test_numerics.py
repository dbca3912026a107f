"""Numerics: losses against trtexec's formulas in 60 digits, intervals against scipy, masks."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import synthetic
from sizes import report, size

from routepilot.env.accuracy import losses
from routepilot.env.measure import median_interval

ATOL, RTOL = 1e-5, 1e-5

#: Values that break sums, squares and quotients.
NASTY = np.array(
    [0.0, -0.0, 1e-45, -1e-40, 1e-38, 1e-12, 1e-5, 1e-5 * (1 + 2**-20), 1.0, -1.0, 1 + 2**-23,
     65504.0, 1e19, -1e19, 3.4e38, -3.4e38, 1e-20, 7.0, 1e10, 1e-10],
    np.float32,
)  # fmt: skip


def exact(a: np.ndarray, r: np.ndarray) -> dict[str, mpmath.mpf]:
    """The formulas of trtexec 11.1 and the relative L2 error, in 60 digits."""
    with mpmath.workdps(60):
        x = [mpmath.mpf(float(v)) for v in a.ravel()]
        y = [mpmath.mpf(float(v)) for v in r.ravel()]
        error = [abs(p - q) for p, q in zip(x, y, strict=True)]
        n = len(x)
        norm = {k: mpmath.sqrt(mpmath.fsum(v * v for v in z)) for k, z in (("a", x), ("r", y))}
        size_of_error = mpmath.sqrt(mpmath.fsum(v * v for v in error))
        dot = mpmath.fsum(p * q for p, q in zip(x, y, strict=True))
        pairs = list(zip(error, y, strict=True))
        product = norm["a"] * norm["r"]
        endless = mpmath.mpf("inf") if size_of_error else mpmath.mpf(0)
        atol, rtol = mpmath.mpf(ATOL), mpmath.mpf(RTOL)
        return {
            "l0": mpmath.mpf(sum(e > atol + rtol * abs(q) for e, q in pairs)) / n,
            "l1": mpmath.fsum(error) / n,
            "l2": mpmath.fsum(e * e for e in error) / n,
            "lInf": max(error),
            "cos": 1 - dot / product if product >= 1e-12 else mpmath.mpf(1),
            "rel_l2": size_of_error / norm["r"] if norm["r"] else endless,
        }


def test_losses_agree_with_the_formulas_in_sixty_digits() -> None:
    rng = np.random.default_rng(0)
    count = size("losses", 300, 20_000)
    worst = 0.0
    for number in range(count):
        n = int(rng.integers(1, 9))
        if number % 2:
            a, r = (rng.choice(NASTY, n) for _ in "ar")
        else:
            r = rng.normal(0, 10.0 ** rng.integers(-30, 30), n).astype(np.float32)
            a = (r * (1 + rng.normal(0, 10.0 ** rng.integers(-9, 1), n))).astype(np.float32)
        found, wanted = losses(a, r, ATOL, RTOL), exact(a, r)
        for metric, value in wanted.items():
            mine = found[metric]
            if metric == "l0":  # counts may differ only where the tolerance is met to a rounding
                near = sum(
                    abs(abs(float(p) - float(q)) - (ATOL + RTOL * abs(float(q))))
                    <= 1e-12 * (ATOL + RTOL * abs(float(q)))
                    for p, q in zip(a, r, strict=True)
                )
                assert abs(mine - float(value)) * n <= near + 1e-9, (a, r)
                continue
            # The cosine loss is a difference of numbers near 1, so its error is absolute.
            scale = max(abs(value), mpmath.mpf(1)) if metric == "cos" else abs(value)
            if value == 0 or mpmath.isinf(value):
                assert mine == float(value) or (metric == "cos" and abs(mine) < 1e-14), (
                    metric,
                    a,
                    r,
                )
                continue
            error = float(abs(mpmath.mpf(mine) - value) / scale)
            worst = max(worst, error)
            assert error < 1e-13, (metric, mine, value, a, r)
    report("losses", pairs=count, worst_relative_error=worst)


@pytest.mark.parametrize("count", [6, 7, 9, 12, 14, 25, 40])
def test_intervals_of_the_median_agree_with_scipy(count: int) -> None:
    from scipy.stats import quantile_test

    rng = np.random.default_rng(count)
    for _ in range(20):
        sample = rng.standard_t(2, count)
        _, low, high = median_interval(sample)
        theirs = quantile_test(sample, p=0.5).confidence_interval(0.95)
        # scipy's interval ends where the test stops rejecting; ours is never wider than needed.
        assert (float(low), float(high)) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize(
    "name", ["fast", "mixed", "full", "recentred", "random", "best-on-average", "knn", "coreset",
             "grace", "forest", "forest-scratch", "transfer-gp", "two-way-gp", "greedy",
             "thompson", "tpe"],
)  # fmt: skip
def test_no_agent_sends_an_illegal_route_or_one_twice(name: str) -> None:
    from routepilot.agents import make_factory
    from routepilot.agents.base import Problem
    from routepilot.env.accuracy import Gate
    from routepilot.env.backends.recorded import Replay

    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    steps = size("agent_steps", 60, 2_000)
    if name in ("forest", "forest-scratch", "two-way-gp", "greedy", "thompson", "tpe"):
        steps = min(steps, size("slow_agent_steps", 20, 300))
    table, rng, sent, seed = synthetic.table(), np.random.default_rng(0), 0, 0
    factory = make_factory(name, replay=Replay(table, Gate()))
    while sent < steps:
        card = table.models[seed % len(table.models)]
        agent = factory(Problem(table.catalog, card.features, None, 16, seed, 1e-2))
        agent.tell(synthetic.Route(), synthetic.outcome(synthetic.Route(), seed % 4, rng))
        seen = set()
        for _ in range(16):
            route = agent.ask()
            if route is None:
                break
            assert table.catalog.is_legal(route) and not route.is_default and route not in seen
            seen.add(route)
            agent.tell(route, synthetic.outcome(route, seed % 4, rng))
            sent += 1
        seed += 1
        if seed > steps:
            break
    report("agent", agent=name, routes=sent)


def test_masked_actions_are_never_taken_by_the_policy() -> None:
    """Random weights and random masks: the greedy action and every sampled one is allowed."""
    from routepilot.agents import policy
    from routepilot.env.episode import CONTEXT_FEATURES, ROW_FEATURES, ROWS, Observation

    rng = np.random.default_rng(0)
    steps = size("mask_steps", 3_000, 1_000_000)
    weights = {n: rng.normal(0, 1, s).astype(np.float32) for n, s in policy.shapes().items()}
    network = policy.Network(weights)
    for number in range(steps):
        if number % 1000 == 0:
            weights = {
                n: rng.normal(0, 3, s).astype(np.float32) for n, s in policy.shapes().items()
            }
            network = policy.Network(weights)
        mask = np.ones(ROWS + 1, np.int8)
        mask[:-1] = rng.random(ROWS) < rng.random()
        seen = Observation(
            rng.normal(0, 5, (ROWS, len(ROW_FEATURES))).astype(np.float32),
            rng.normal(0, 5, len(CONTEXT_FEATURES)).astype(np.float32),
            mask,
            np.zeros(ROWS, np.int64),
        )
        logits = network.logits(seen)
        assert mask[int(np.argmax(logits))] == 1
        assert np.all(np.isneginf(logits) == (mask == 0))
    report("masks", steps=steps)
    assert math.isfinite(float(logits.max()))
