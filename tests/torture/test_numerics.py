"""Numerics: losses against trtexec's formulas in 60 digits, intervals against scipy."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
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
    count = size("losses")
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
