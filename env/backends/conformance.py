"""The conformance suite: what any backend must do, as functions that raise `AssertionError`.

Owns the promises of `base.py` in a form that can be run, on real models, by whoever writes a
backend: `for check in CHECKS: check(case)`, or parametrised in pytest over `CHECKS`. Knows no
backend by name.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from routepilot.env.backends.base import Backend, BuildFailure, Engine, Tensors
from routepilot.env.models import Model
from routepilot.env.outcomes import Status
from routepilot.env.routes import DEFAULT_ROUTE, Route

#: Relative L2 error that the default route of any backend must stay below.
DEFAULT_TOLERANCE = 1e-3

#: How a build may end without an engine.
FAILURES = (Status.BUILD_FAILED, Status.REFUSED, Status.OUT_OF_MEMORY)


@dataclass(frozen=True)
class Case:
    """A backend to try, and what on.

    Attributes:
        make: Makes the backend; called more than once, every time with the same options.
        model: A small prepared model.
        workdir: Folder for the builds; may be shared by the checks of one backend and model.
    """

    make: Callable[[], Backend]
    model: Model
    workdir: Path

    def build(self, route: Route) -> Engine | BuildFailure:
        """Build a route with a backend made for it."""
        return self.make().build(self.model, route, self.workdir)

    @contextmanager
    def engine(self, route: Route = DEFAULT_ROUTE) -> Iterator[Engine]:
        """The engine of a route that must build."""
        built = self.build(route)
        assert not isinstance(built, BuildFailure), f"route {route} gives no engine: {built.reason}"
        try:
            yield built
        finally:
            built.close()


def catalog_is_well_formed(case: Case) -> None:
    """Knobs are documented, rules name what exists, and routes survive being written."""
    catalog = case.make().catalog()
    assert catalog.knobs, "the catalog is empty"
    for knob in catalog.knobs:
        assert knob.help.endswith(".") and "\n" not in knob.help, f"{knob.name} has no sentence"
        for value in knob.all_values:
            route = catalog.route({knob.name: value})
            assert catalog.parse(str(route)) == route, f"{route} is not read as it is written"
    for rule in catalog.requirements:
        assert rule.value is None or catalog[rule.knob].allows(rule.value), rule
        assert rule.parent_values and all(map(catalog[rule.parent].allows, rule.parent_values)), (
            f"{rule} can never be met"
        )


def catalog_and_target_are_stable(case: Case) -> None:
    """Two backends of the same options speak of the same thing."""
    first, second = case.make(), case.make()
    assert first.catalog() == second.catalog()
    assert first.catalog().key == second.catalog().key
    assert first.target().key == second.target().key, first.target().difference(second.target())
    assert first.target().backend == first.name
    assert first.target().catalog_key == first.catalog().key
    assert first.target().device and first.target().versions


def default_route_reproduces_the_reference(case: Case) -> None:
    """The default route is legal, builds, and computes what the model means."""
    assert case.make().catalog().objection(DEFAULT_ROUTE) is None
    with case.engine() as engine:
        for inputs, wanted in zip(
            case.model.selection(), case.model.selection_reference(), strict=True
        ):
            given = engine.run(inputs)
            assert set(given) == set(wanted), f"outputs are {sorted(given)}, not {sorted(wanted)}"
            for name, reference in wanted.items():
                assert given[name].shape == reference.shape, name
                assert given[name].dtype == reference.dtype, name
                error = _relative_error(given, wanted, name)
                assert error <= DEFAULT_TOLERANCE, f"{name} is off by {error:.2g}"


def legal_changes_end_well(case: Case) -> None:
    """Every legal change of one knob gives an engine that runs, or a reason on one line."""
    inputs = case.model.selection()[0]
    for route in case.make().catalog().neighbours(DEFAULT_ROUTE):
        built = case.build(route)
        if isinstance(built, BuildFailure):
            _assert_reason(route, built)
            continue
        try:
            assert built.hash, f"{route} has no engine hash"
            assert built.build_seconds > 0, f"{route} costs nothing"
            assert set(built.run(inputs)) == {spec.name for spec in case.model.outputs}, str(route)
        finally:
            built.close()


def illegal_changes_are_refused(case: Case) -> None:
    """A change of one knob that the catalog objects to is refused in the catalog's words."""
    catalog = case.make().catalog()
    for knob in catalog.knobs:
        for value in knob.alternatives:
            route = catalog.route({knob.name: value})
            objection = catalog.objection(route)
            if objection is not None:
                built = case.build(route)
                assert isinstance(built, BuildFailure), f"{route} was built: {objection}"
                assert built.status is Status.REFUSED, f"{route} ended {built.status.value}"
                _assert_reason(route, built)


def hash_is_deterministic(case: Case) -> None:
    """The same build has the same hash, in the same work folder and in a fresh one."""
    with tempfile.TemporaryDirectory(dir=case.workdir) as fresh:
        elsewhere = Case(case.make, case.model, Path(fresh))
        with case.engine() as a, case.engine() as b, elsewhere.engine() as c:
            assert a.hash == b.hash == c.hash


def some_change_changes_the_engine(case: Case) -> None:
    """The hash tells engines apart: not every knob is without effect."""
    with case.engine() as engine:
        default = engine.hash
    for route in case.make().catalog().neighbours(DEFAULT_ROUTE):
        built = case.build(route)
        if not isinstance(built, BuildFailure):
            digest = built.hash
            built.close()
            if digest != default:
                return
    raise AssertionError("every change of one knob gives the default engine")


def timing_is_in_milliseconds(case: Case) -> None:
    """At least one inference is timed, and as many as fit."""
    inputs = case.model.selection()[0]
    with case.engine() as engine:
        assert len(engine.time(inputs, 0.0)) >= 1
        spent = engine.time(inputs, 0.05)
    assert all(milliseconds > 0 for milliseconds in spent)
    assert sum(spent) / 1000 < 5 * (0.05 + max(spent) / 1000), "the unit is not milliseconds"


def outputs_are_copies(case: Case) -> None:
    """What an engine gave stays as it is, and what it was given too."""
    first, second = case.model.selection()[:2]
    kept = {name: array.copy() for name, array in first.items()}
    with case.engine() as engine:
        given = engine.run(first)
        before = {name: array.copy() for name, array in given.items()}
        engine.run(second)
        engine.time(second, 0.0)
        _assert_equal(given, before, "a later inference changed earlier outputs")
        for array in given.values():
            array.fill(0)  # the caller owns it
        _assert_equal(engine.run(first), before, "the engine looks at arrays it gave away")
        _assert_equal(first, kept, "an inference changed its inputs")


def quiet_engines_come_back(case: Case) -> None:
    """After `quiesce`, and after two, an engine computes and times as before."""
    inputs = case.model.selection()[0]
    with case.engine() as engine:
        before = engine.run(inputs)
        engine.quiesce()
        engine.quiesce()
        assert engine.time(inputs, 0.0)
        engine.quiesce()
        _assert_equal(engine.run(inputs), before, "quiesce changed what the engine computes")


def saved_engines_load(case: Case) -> None:
    """What `save` writes is what it says, and its `load.py` runs as it stands, anywhere."""
    with tempfile.TemporaryDirectory(dir=case.workdir) as place:
        folder = Path(place)
        with case.engine() as engine:
            names = engine.save(folder)
        written = {item.name for item in folder.iterdir()}
        assert written == set(names), f"save wrote {sorted(written)} and told of {sorted(names)}"
        assert all((folder / name).stat().st_size > 0 for name in names)
        if "load.py" in names:
            load = [sys.executable, str(folder / "load.py")]
            done = subprocess.run(load, capture_output=True, text=True, cwd="/", timeout=120)
            assert done.returncode == 0, done.stderr
            for spec in case.model.outputs:
                assert str(spec.shape) in done.stdout, f"{spec} is not in {done.stdout!r}"


def close_can_be_repeated(case: Case) -> None:
    """Closing twice is closing once, and leaves other engines alive."""
    inputs = case.model.selection()[0]
    with case.engine() as other:
        before = other.run(inputs)
        with case.engine() as engine:
            engine.close()
            engine.close()
        _assert_equal(other.run(inputs), before, "closing one engine changed another")


#: Every check, cheap ones first.
CHECKS: tuple[Callable[[Case], None], ...] = (
    catalog_is_well_formed,
    catalog_and_target_are_stable,
    default_route_reproduces_the_reference,
    illegal_changes_are_refused,
    hash_is_deterministic,
    some_change_changes_the_engine,
    timing_is_in_milliseconds,
    outputs_are_copies,
    quiet_engines_come_back,
    close_can_be_repeated,
    saved_engines_load,
    legal_changes_end_well,
)


def _assert_reason(route: Route, failure: BuildFailure) -> None:
    assert failure.status in FAILURES, f"{route} ended {failure.status.value}"
    reason = failure.reason
    assert reason.strip() and len(reason.splitlines()) == 1, f"{route} gives the reason {reason!r}"


def _assert_equal(given: Tensors, wanted: Tensors, message: str) -> None:
    assert set(given) == set(wanted), message
    for name, array in wanted.items():
        np.testing.assert_array_equal(given[name], array, err_msg=f"{message} ({name})")


def _relative_error(given: Tensors, wanted: Tensors, name: str) -> float:
    reference = wanted[name].astype(np.float64)
    distance = np.linalg.norm(given[name].astype(np.float64) - reference)
    return float(distance / max(float(np.linalg.norm(reference)), 1e-12))
