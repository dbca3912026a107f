"""Which engines of a table are timed again, and how their figures replace the old."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import synthetic

from routepilot.env.errors import InputError
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.training.second_sitting import (
    check_machine,
    engines,
    with_sitting,
    worth_again,
)

FAST, TWIN, HALF, SLOW, LOSSY, FAILED = (
    Route.read(text)
    for text in (
        "-engine=b",
        "-engine=b -fuse=off",
        "-precision=half",
        "-level=1",
        "-precision=int",
        "-level=0",
    )
)


def outcome(route: Route, speed: float, loss: float, engine: str) -> Outcome:
    return Outcome(
        route,
        Status.OK,
        measurement=synthetic.measurement(speed),
        losses={"rel_l2": loss},
        build_seconds=2.0,
        engine_hash=engine,
    )


def built() -> dict[Route, tuple[Outcome, ...]]:
    return {
        DEFAULT_ROUTE: (outcome(DEFAULT_ROUTE, 0.0, 0.0, "default"),),
        FAST: (outcome(FAST, 0.3, 1e-6, "x"), outcome(FAST, 0.5, 1e-6, "x")),
        TWIN: (outcome(TWIN, 0.3, 1e-6, "x"),),
        HALF: (outcome(HALF, 0.2, 2e-3, "y"),),
        SLOW: (outcome(SLOW, -0.1, 1e-6, "z"),),
        LOSSY: (outcome(LOSSY, 0.9, 0.4, "w"),),
        FAILED: (Outcome(FAILED, Status.CRASHED, "ended by SIGSEGV"),),
    }


def test_an_engine_is_timed_by_its_shortest_route() -> None:
    assert engines(built())["x"] == [FAST, TWIN]
    assert DEFAULT_ROUTE not in [r for some in engines(built()).values() for r in some]


def test_the_fastest_at_each_limit_and_the_marked_are_worth_it() -> None:
    assert worth_again(built(), 1, (), limits=(1e-3,)) == [FAST]
    assert worth_again(built(), 1, (), limits=(1e-3, 0.5)) == [LOSSY, FAST]
    assert worth_again(built(), 1, ("half",), limits=(1e-2,)) == [FAST, HALF]
    assert worth_again(built(), 9, ("int",), limits=(1e-2,)) == [FAST, HALF, SLOW]


def test_new_figures_replace_the_old_of_the_same_engine() -> None:
    card = replace(synthetic.table(1).models[0], default_latency_ms=9.0)
    table = RouteTable(
        synthetic.CATALOG, synthetic.TARGET, (card,), {card.fingerprint: built()}, {"seed": 0}
    )
    default = outcome(DEFAULT_ROUTE, 0.0, 0.0, "default")
    new = {DEFAULT_ROUTE: (default, default), FAST: (outcome(FAST, 0.4, 1e-6, "x"),)}
    again = RouteTable(
        synthetic.CATALOG,
        synthetic.TARGET,
        (replace(card, default_latency_ms=5.0),),
        {card.fingerprint: new},
    )
    merged = with_sitting(table, again)
    found = merged.outcomes[card.fingerprint]
    assert found[FAST] == new[FAST] and found[DEFAULT_ROUTE] == new[DEFAULT_ROUTE]
    (twin,) = found[TWIN]
    assert twin.route == TWIN and twin.measurement is not None
    assert math.isclose(twin.measurement.log_speedup, 0.4)
    for route in (HALF, SLOW, LOSSY, FAILED):
        assert found[route] == built()[route]
    assert merged.models[0].default_latency_ms == pytest.approx(5.0)
    assert merged.manifest == table.manifest


def test_figures_of_two_machines_are_not_mixed() -> None:
    table = synthetic.table(1)
    check_machine(table, lambda: table.target)
    with pytest.raises(InputError, match="measured on no device and this is Other"):
        check_machine(table, lambda: replace(table.target, device="Other"))
    on_gpu = replace(table, target=replace(table.target, backend="cuda", settings={}))
    with pytest.raises(InputError, match="table is of backend cuda"):
        check_machine(on_gpu, lambda: table.target)
