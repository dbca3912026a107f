import math
from dataclasses import replace

import numpy as np
import pytest

from routepilot.env.errors import InputError
from routepilot.env.measure import (
    SMALLEST_SAMPLE,
    TimingPlan,
    confirm,
    interval_rank,
    is_settled,
    latency_ms,
    measure_paired,
    median_interval,
    noise_floor,
)

PLAN = TimingPlan()


class Clock:
    """Synthetic time shared by two engines: drift of the machine, and what ran when."""

    def __init__(self, seed=0, drift=0.0):
        self.rng = np.random.default_rng(seed)
        self.drift = drift
        self.blocks = 0
        self.calls = []

    def engine(self, milliseconds, noise=0.01, outliers=0.0):
        return SyntheticEngine(self, milliseconds, noise, outliers)


class SyntheticEngine:
    def __init__(self, clock, milliseconds, noise, outliers):
        self.clock, self.milliseconds, self.noise, self.outliers = (
            clock,
            milliseconds,
            noise,
            outliers,
        )

    def time(self, seconds):
        clock = self.clock
        clock.calls.append((self, "time"))
        clock.blocks += 1
        level = self.milliseconds * math.exp(clock.drift * clock.blocks)
        level *= math.exp(clock.rng.normal(0, self.noise))
        if clock.rng.random() < self.outliers:
            level *= clock.rng.uniform(1.2, 3)
        return [level] * max(1, int(seconds * 1000 / self.milliseconds))

    def quiesce(self):
        self.clock.calls.append((self, "quiesce"))


def aa(function, count, **clock):
    """Many A/A measurements by `function(default, route, plan)`."""
    noise = {k: clock.pop(k) for k in ("noise", "outliers") if k in clock}
    found = []
    for seed in range(count):
        c = Clock(seed, **clock)
        plan = replace(PLAN, margin=0.0, seed=seed)
        found.append(function(c.engine(5, **noise), c.engine(5, **noise), plan))
    return found


def rates(found):
    false_wins = sum(m.low > 0 for m in found) / len(found)
    coverage = sum(m.low <= 0 <= m.high for m in found) / len(found)
    return false_wins, coverage


@pytest.mark.parametrize(
    ("count", "rank", "coverage"),
    [(2, 1, 0.5), (4, 1, 0.875), (6, 1, 0.96875), (9, 2, 0.9609375), (12, 3, 0.96142578125)],
)
def test_documented_coverages_are_exact(count, rank, coverage):
    assert interval_rank(count) == (rank, coverage)


def test_ranks_are_the_narrowest_with_95_percent():
    from scipy.stats import binom

    for count in range(SMALLEST_SAMPLE, 60):
        rank, coverage = interval_rank(count)
        assert coverage >= 0.95 > 1 - 2 * binom.cdf(rank, count, 0.5)
        assert coverage == pytest.approx(1 - 2 * binom.cdf(rank - 1, count, 0.5))
    assert interval_rank(SMALLEST_SAMPLE - 1)[1] < 0.95


@pytest.mark.parametrize("count", [6, 9, 12, 14])
@pytest.mark.parametrize("draw", ["normal", "skewed", "outliers"])
def test_interval_covers_the_median_as_documented(count, draw):
    rng = np.random.default_rng(count)
    shape = (20_000, count)
    sample = {
        "normal": lambda: rng.normal(0, 0.01, shape),
        "skewed": lambda: rng.exponential(1, shape) - math.log(2),
        "outliers": lambda: np.where(rng.random(shape) < 0.2, 5, 1) * rng.normal(0, 0.01, shape),
    }[draw]()
    middle, low, high = median_interval(sample)
    assert np.all((low <= middle) & (middle <= high))
    covered = float(np.mean((low <= 0) & (high >= 0)))
    assert covered == pytest.approx(interval_rank(count)[1], abs=0.006)


def test_paired_false_wins_and_coverage_with_noise_drift_and_outliers():
    # Stopping when the interval is narrow costs some coverage; the session margin (0 here) pays.
    for clock in (
        {"noise": 0.012},
        {"noise": 0.012, "drift": 0.002},
        {"noise": 0.02, "outliers": 0.15},
    ):
        false_wins, coverage = rates(aa(measure_paired, 600, **clock))
        assert false_wins <= 0.05, clock
        assert coverage >= 0.90, clock


def test_confirm_false_wins_and_coverage_with_noise_drift_and_outliers():
    for clock in (
        {"noise": 0.012},
        {"noise": 0.012, "drift": 0.01},
        {"noise": 0.02, "outliers": 0.15},
    ):
        false_wins, coverage = rates(aa(confirm, 600, **clock))
        assert false_wins <= 0.035, clock
        assert coverage >= 0.94, clock


def test_drift_cancels_in_abba_exactly():
    clock = Clock(drift=0.05)
    found = confirm(clock.engine(5, noise=0), clock.engine(4, noise=0), PLAN)
    assert found.log_speedup == pytest.approx(math.log(5 / 4))
    assert found.rounds == PLAN.quadruples
    assert found.spread == pytest.approx(0, abs=1e-12)


def test_abba_order():
    clock = Clock()
    default, route = clock.engine(5), clock.engine(5)
    confirm(default, route, PLAN)
    timed = ["AB"[e is route] for e, what in clock.calls if what == "time"]
    assert "".join(timed[2:]) == "ABBA" * PLAN.quadruples  # after the warm-up of both


def test_order_within_rounds_is_random_but_seeded():
    def order(seed):
        clock = Clock()
        default, route = clock.engine(5), clock.engine(5)
        measure_paired(default, route, replace(PLAN, seed=seed, precision=1e-9))
        timed = ["AB"[e is route] for e, what in clock.calls if what == "time"][2:]
        return ["".join(timed[i : i + 2]) for i in range(0, len(timed), 2)]

    assert order(0) == order(0) != order(1)
    assert set(order(0)) == {"AB", "BA"}


def test_an_engine_is_quiet_whenever_the_other_runs():
    for function in (measure_paired, confirm):
        clock = Clock()
        function(clock.engine(5), clock.engine(5), PLAN)
        for (before, what), (after, then) in zip(clock.calls, clock.calls[1:], strict=False):
            if what == "time" and then == "time":
                assert before is after


def test_a_known_speedup_is_found_with_its_figures():
    clock = Clock(3)
    found = measure_paired(clock.engine(5), clock.engine(4), PLAN)
    assert found.low < math.log(5 / 4) < found.high
    assert found.log_speedup == pytest.approx(math.log(5 / 4), abs=0.02)
    assert found.latency_ms == pytest.approx(4, rel=0.02)
    assert found.default_latency_ms == pytest.approx(5, rel=0.02)
    assert 0.003 < found.spread < 0.04


def test_the_margin_widens_both_ends():
    a, b = (
        measure_paired(*(lambda c: (c.engine(5), c.engine(4)))(Clock(1)), replace(PLAN, margin=m))
        for m in (0.0, 0.01)
    )
    assert (a.low - b.low, b.high - a.high) == pytest.approx((0.01, 0.01))
    assert a.log_speedup == b.log_speedup


@pytest.mark.parametrize(
    ("milliseconds", "incumbent", "rounds"),
    [
        (50.0, None, 2),  # ten times slower than the default: four blocks
        (5.6, None, 4),  # 12 % slower
        (5.6, -1.0, 4),  # an incumbent below the default is the default
        (4.0, 1.0, 2),  # far slower than the incumbent
        (4.0, math.log(5 / 4) + 0.1, 4),
    ],
)
def test_hopeless_routes_cost_few_blocks(milliseconds, incumbent, rounds):
    clock = Clock(5)
    route = clock.engine(milliseconds, noise=0.005)
    found = measure_paired(
        clock.engine(5, noise=0.005), route, PLAN, incumbent_log_speedup=incumbent
    )
    assert found.rounds == rounds
    assert sum(e is route and what == "time" for e, what in clock.calls) == rounds + 1
    assert found.low < found.log_speedup < found.high


def test_precise_measurements_stop_early_and_noisy_ones_at_the_maximum():
    quiet, loud = Clock(), Clock()
    assert measure_paired(quiet.engine(5, 0.002), quiet.engine(5, 0.002), PLAN).rounds == 6
    assert measure_paired(loud.engine(5, 0.1), loud.engine(5, 0.1), PLAN).rounds == 14


def test_a_route_near_the_incumbent_is_not_given_up():
    assert not is_settled([-0.04] * 5, PLAN, 0.0)
    assert not is_settled([-0.06, -0.06, -0.04, -0.06], PLAN, 0.0)
    assert is_settled([-0.06] * 4, PLAN, 0.0)
    assert not is_settled([-0.6] * 3, PLAN, 0.0)
    assert is_settled([-0.7, -0.7], PLAN, 0.0)
    assert is_settled([0.1] * 6, PLAN, 0.0)


def test_seconds_are_capped():
    class Slow(SyntheticEngine):
        def time(self, seconds):
            import time

            time.sleep(0.01)
            return super().time(seconds)

    clock = Clock()
    default, route = Slow(clock, 5, 0.05, 0), Slow(clock, 5, 0.05, 0)
    plan = replace(PLAN, max_seconds=0.04)
    assert measure_paired(default, route, plan).rounds == 2
    assert confirm(default, route, plan).rounds == SMALLEST_SAMPLE  # a win needs its 95 %
    before = clock.blocks
    latency_ms(default, replace(plan, max_seconds=1e-6))
    assert clock.blocks == before + 2


def test_noise_floor_is_what_identical_engines_reach():
    clock = Clock(2)
    quiet = noise_floor(clock.engine(5, 0.002), clock.engine(5, 0.002), PLAN)
    loud = noise_floor(clock.engine(5, 0.05), clock.engine(5, 0.05), PLAN)
    assert PLAN.margin < quiet < PLAN.margin + 0.005 < loud


def test_a_clock_that_reads_zero_is_survived():
    class Instant(SyntheticEngine):
        def time(self, seconds):
            return [0.0]

    found = measure_paired(Instant(Clock(), 1, 0, 0), Instant(Clock(), 1, 0, 0), PLAN)
    assert found.log_speedup == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_seconds": 0.0},
        {"max_seconds": math.nan},
        {"margin": -0.1},
        {"min_rounds": 5},
        {"min_rounds": 9, "max_rounds": 8},
        {"quadruples": 5},
    ],
)
def test_a_plan_that_means_nothing_is_refused(wrong):
    with pytest.raises(InputError) as refusal:
        TimingPlan(**wrong)
    assert "\n" not in str(refusal.value)
