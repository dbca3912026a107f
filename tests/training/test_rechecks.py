"""What must be built once more: the best on one build, at either limit, and nothing else."""

from __future__ import annotations

import synthetic

from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.training.rechecks import unconfirmed_best

A, B, C = (Route.read(f"-made={name}") for name in "abc")


def built(route: Route, *gains: float, loss: float = 0.0) -> tuple[Outcome, ...]:
    return tuple(
        Outcome(
            route,
            Status.OK,
            losses={"rel_l2": loss},
            measurement=synthetic.measurement(gain),
        )
        for gain in gains
    )


def test_the_luckiest_figure_is_the_one_to_build_again() -> None:
    builds = {DEFAULT_ROUTE: built(DEFAULT_ROUTE, 0.9), A: built(A, 0.5), B: built(B, 0.4)}
    assert unconfirmed_best(builds) == A
    builds[A] = built(A, 0.5, 0.1)  # the second figure is worse, and B is the best on one build
    assert unconfirmed_best(builds) == B
    builds[B] = built(B, 0.4, 0.3)
    assert unconfirmed_best(builds) is None


def test_each_limit_has_its_best_and_what_gains_nothing_is_left() -> None:
    builds = {A: built(A, 0.2, 0.2), B: built(B, 0.6, loss=0.02), C: built(C, 0.9, loss=0.2)}
    assert unconfirmed_best(builds) == B
    assert unconfirmed_best(builds, limits=(1e-2,)) is None
    assert unconfirmed_best({A: built(A, 0.01)}) is None
    assert unconfirmed_best({A: (Outcome(A, Status.CRASHED, "gone"),)}) is None
    assert unconfirmed_best({}) is None
