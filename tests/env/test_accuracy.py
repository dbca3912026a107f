import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from routepilot.env.accuracy import METRICS, Gate, judge, losses, regate
from routepilot.env.errors import InputError
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import Route

ROUTE = Route((("-a", "1"),))


def slow_losses(a, r, atol, rtol):
    """The formulas over exact fractions; only the roots are rounded."""
    a, r = [Fraction(float(x)) for x in a.ravel()], [Fraction(float(x)) for x in r.ravel()]
    atol, rtol, n = Fraction(atol), Fraction(rtol), len(r)
    errors = [abs(x - y) for x, y in zip(a, r, strict=True)]

    def root(x):
        scale = 10**400
        return Fraction(math.isqrt(int(x * scale * scale)), scale)

    norm_a, norm_r = root(sum(x * x for x in a)), root(sum(y * y for y in r))
    error = root(sum(e * e for e in errors))
    dot = sum(x * y for x, y in zip(a, r, strict=True))
    small = norm_a * norm_r < Fraction(1, 10**12)
    return {
        "l0": sum(e > atol + rtol * abs(y) for e, y in zip(errors, r, strict=True)) / n,
        "l1": float(sum(errors) / n),
        "l2": float(sum(e * e for e in errors) / n),
        "lInf": float(max(errors)),
        "cos": 1.0 if small else float(1 - dot / (norm_a * norm_r)),
        "rel_l2": (0.0 if error == 0 else math.inf) if norm_r == 0 else float(error / norm_r),
    }


# Tolerances are powers of two and values floats of 32 bits, so that `l0` has no rounding ties.
floats = st.floats(-(2.0**99), 2.0**99, width=32)
pairs = hnp.array_shapes(max_dims=3, max_side=4).flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.float32, shape, elements=floats),
        hnp.arrays(np.float32, shape, elements=floats | st.sampled_from([0.0, 1.0])),
    )
)


@settings(max_examples=150, deadline=None)
@given(pairs)
def test_losses_agree_with_exact_arithmetic(pair):
    a, r = pair
    fast, slow = losses(a, r, 2**-10, 2**-7), slow_losses(a, r, 2**-10, 2**-7)
    for metric in METRICS:
        assert fast[metric] == pytest.approx(slow[metric], rel=1e-9, abs=1e-12), metric


@settings(max_examples=50, deadline=None)
@given(pairs)
def test_equal_outputs_have_no_loss_but_the_cosine_rule(pair):
    found = losses(pair[1], pair[1], 1e-5, 1e-5)
    size = float(np.linalg.norm(pair[1].astype(np.float64)))
    assert [found[m] for m in METRICS if m != "cos"] == [0.0] * 5
    if not 0.99e-12 < size * size < 1.01e-12:
        assert found["cos"] == (1.0 if size * size < 1e-12 else pytest.approx(0, abs=1e-12))


def test_known_values_of_a_single_mismatch():
    found = losses(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0]), 1e-5, 1e-5)
    assert found["l0"] == found["l1"] == found["l2"] == pytest.approx(1 / 3)
    assert found["lInf"] == 1.0
    assert found["cos"] == pytest.approx(1 - 17 / math.sqrt(14 * 21))
    assert found["rel_l2"] == pytest.approx(1 / math.sqrt(21))


def test_squares_neither_overflow_nor_vanish():
    for scale in (1e-200, 1e200):
        found = losses(np.array([1.1, 0.0]) * scale, np.array([1.0, 0.0]) * scale, 0, 0)
        assert found["rel_l2"] == pytest.approx(0.1)


def test_an_element_on_the_tolerance_is_no_mismatch():
    assert losses(np.array([1.5]), np.array([1.0]), 0.25, 0.25)["l0"] == 0.0
    assert losses(np.array([1.5]), np.array([1.0]), 0.25, 0.2)["l0"] == 1.0


def test_losses_of_zeros_and_of_nothing():
    zero, one = np.zeros(2), np.ones(2)
    assert losses(one, zero, 0, 0)["rel_l2"] == math.inf
    assert losses(zero, zero, 0, 0) == {**dict.fromkeys(METRICS, 0.0), "cos": 1.0}
    assert losses(np.zeros((0, 3)), np.zeros((0, 3)), 0, 0) == dict.fromkeys(METRICS, 0.0)


def test_integers_and_booleans_are_checked_without_wrapping():
    found = losses(np.array([255, 0], np.uint8), np.array([0, 255], np.uint8), 0, 0)
    assert (found["lInf"], found["l1"]) == (255.0, 255.0)
    assert losses(np.array([True, False]), np.array([True, True]), 0, 0)["l0"] == 0.5


@pytest.mark.parametrize(
    ("loss", "limit", "status"),
    [
        (0.25, 0.25, Status.ACCURACY_FAILED),  # trtexec fails at equality
        (0.25, 0.2500001, Status.OK),
        (0.0, 0.0, Status.OK),  # our one exception
        (1e-300, 0.0, Status.ACCURACY_FAILED),
        (1e300, math.inf, Status.OK),
    ],
)
def test_the_limit_itself(loss, limit, status):
    verdict = judge([{"y": np.array([loss])}], [{"y": np.zeros(1)}], Gate("lInf", limit))
    assert verdict.status is status
    assert bool(verdict.reason) == (status is not Status.OK)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "missing"),
        ({"y": np.zeros((1, 2), np.float32)}, "shape"),
        ({"y": np.zeros(2, np.float64)}, "float64"),
        ({"y": np.zeros(2, np.float16)}, "float16"),
        ({"y": np.array([np.nan, 0], np.float32)}, "NaN"),
        ({"y": np.array([0, -np.inf], np.float32)}, "Inf"),
    ],
)
@pytest.mark.parametrize("metric", METRICS)
def test_invalid_outputs_fail_at_any_limit(given, words, metric):
    verdict = judge([given], [{"y": np.zeros(2, np.float32)}], Gate(metric, math.inf))
    assert verdict.status is Status.INVALID_OUTPUT
    assert words in verdict.reason and "'y'" in verdict.reason
    assert verdict.losses == {}


def test_non_finite_values_of_the_reference_must_come_back():
    reference = [{"y": np.array([np.inf, -np.inf, np.nan, 1.0])}]
    assert judge([{"y": reference[0]["y"].copy()}], reference, Gate(limit=0)).status is Status.OK
    for wrong in ([np.inf, np.inf, np.nan, 1], [np.nan, -np.inf, np.nan, 1], [1, 1, 1, 1]):
        verdict = judge([{"y": np.array(wrong, float)}], reference, Gate(limit=math.inf))
        assert verdict.status is Status.INVALID_OUTPUT


def test_the_worst_output_and_input_set_count():
    outputs = [{"y": np.array([1.0]), "z": np.array([1.0])} for _ in range(2)]
    references = [
        {"y": np.array([1.0]), "z": np.array([1.25])},
        {"y": np.array([2.0]), "z": np.array([1.0])},
    ]
    verdict = judge(outputs, references, Gate("rel_l2", 0.3))
    assert verdict.status is Status.ACCURACY_FAILED
    assert verdict.losses["rel_l2"] == 0.5 and verdict.losses["lInf"] == 1.0
    assert "'y'" in verdict.reason
    gate = Gate("rel_l2", 0.3, per_output={"y": 0.6})
    assert judge(outputs, references, gate).status is Status.OK
    gate = Gate("rel_l2", 0.6, per_output={"z": 0.1})
    assert "'z'" in judge(outputs, references, gate).reason


def test_an_unknown_output_is_an_input_error():
    with pytest.raises(InputError, match="'w'.*y, z"):
        judge([{}], [{"y": np.zeros(1), "z": np.zeros(1)}], Gate(per_output={"w": 1.0}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"metric": "mse"},
        {"limit": -1.0},
        {"limit": math.nan},
        {"atol": -1e-9},
        {"rtol": math.nan},
        {"per_output": {"y": -1.0}},
    ],
)
def test_a_gate_that_means_nothing_is_refused_in_one_line(wrong):
    with pytest.raises(InputError) as refusal:
        Gate(**wrong)
    assert "\n" not in str(refusal.value)
    if "metric" in wrong:
        assert all(metric in str(refusal.value) for metric in METRICS)


@given(loss=st.floats(0, 2), first=st.floats(0, 2), second=st.floats(0, 2))
def test_regating_equals_judging_anew(loss, first, second):
    outputs, references = [{"y": np.array([1 + loss])}], [{"y": np.array([1.0])}]
    before, after = (judge(outputs, references, Gate(limit=limit)) for limit in (first, second))
    stored = Outcome(ROUTE, before.status, before.reason, losses=before.losses)
    again = regate(stored, Gate(limit=second))
    assert again.status is after.status
    assert again.losses == before.losses
    assert bool(again.reason) == (after.status is Status.ACCURACY_FAILED)


def test_regate_keeps_the_words_of_a_verdict_that_stands():
    """A resumed run says what the first one said, the output's name included."""
    reason = "rel_l2 of output 'y' is 0.02, the limit is 0.01"
    made = Outcome(ROUTE, Status.ACCURACY_FAILED, reason, losses={"rel_l2": 0.02})
    assert regate(made, Gate(limit=1e-2)) is made
    assert "worst output" in regate(made, Gate(limit=1e-3)).reason


def test_regate_leaves_other_statuses_and_refuses_missing_losses():
    crashed = Outcome(ROUTE, Status.CRASHED, "SIGSEGV")
    assert regate(crashed, Gate(limit=math.inf)) is crashed
    with pytest.raises(InputError, match="rel_l2"):
        regate(Outcome(ROUTE, Status.OK, losses={"l0": 0.0}), Gate())
    same = Outcome(ROUTE, Status.OK, "same engine as -b=1", losses={"rel_l2": 0.001})
    assert regate(same, Gate()) is same


def test_regate_with_limits_per_output():
    outputs = [{"y": np.array([1.0]), "z": np.array([1.2])}]
    references = [{"y": np.array([1.0]), "z": np.array([1.0])}]
    gate = Gate(limit=0.01, per_output={"z": 0.5})
    verdict = judge(outputs, references, gate)
    stored = Outcome(ROUTE, verdict.status, losses=verdict.losses)
    assert regate(stored, gate).status is Status.OK
    assert regate(stored, Gate(limit=0.01, per_output={"z": 0.1})).status is Status.ACCURACY_FAILED
    # Without each output's loss the smallest limit decides: never too lenient.
    plain = Outcome(ROUTE, Status.OK, losses={"rel_l2": 0.2})
    assert regate(plain, gate).status is Status.ACCURACY_FAILED
