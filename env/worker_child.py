"""The child's side of a worker: build, check and time routes of one model, one after another.

Owns what happens inside the process that may crash. Keeps the default engine alive between
requests. Knows no agent, no store and no search; run as `python -m routepilot.env.worker_child`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepilot.env import measure
from routepilot.env.accuracy import Gate, Verdict, judge
from routepilot.env.backends import load_backend
from routepilot.env.backends.base import Backend, BuildFailure, Confirming, Engine, Tensors, Warming
from routepilot.env.backends.layers import Layered
from routepilot.env.child import Line, one_line
from routepilot.env.drafts import draft_folder
from routepilot.env.errors import MachineError, RouteError, RoutePilotError
from routepilot.env.measure import TimingPlan
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Route

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: Reason of an outcome that was not measured because its engine is the default's.
SAME_AS_DEFAULT = "same engine as the default route"


#: A build that wrote this much before the disk was full is at fault itself, not the machine.
GREEDY_BYTES = 256 << 20

#: No room: on the disk, in the user's quota, in the largest file allowed.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def pack_outcome(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain data for JSON."""
    return {**asdict(outcome), "route": str(outcome.route), "losses": dict(outcome.losses)}


def unpack_outcome(data: Mapping[str, Any]) -> Outcome:
    """The outcome that `pack_outcome` was given."""
    measurement = data["measurement"]
    return Outcome(
        **{
            **data,
            "route": Route.read(data["route"]),
            "status": Status(data["status"]),
            "measurement": Measurement(**measurement) if measurement else None,
        }
    )


@dataclass(frozen=True)
class Bound:
    """An engine bound to the input set it is timed with."""

    engine: Engine
    inputs: Tensors

    def time(self, seconds: float) -> list[float]:
        """Time the engine."""
        return self.engine.time(self.inputs, seconds)

    def quiesce(self) -> None:
        """Quiet the engine."""
        self.engine.quiesce()


class _Fault(Exception):
    """The candidate's code raised; this process may be damaged."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@contextmanager
def _faults_are(status: Status, doing: str) -> Iterator[None]:
    """Turn what a candidate raises into a `_Fault`; faults of the machine stay errors."""
    try:
        yield
    except RouteError as error:
        raise _Fault(Status.REFUSED, one_line(str(error))) from error
    except RoutePilotError:
        raise
    except MemoryError as error:
        raise _Fault(Status.OUT_OF_MEMORY, f"out of memory while {doing}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _DiskFull(f"the disk is full ({one_line(str(error))}); free space") from error
        words = one_line(f"{type(error).__name__}: {error}")
        raise _Fault(status, f"{words} (raised while {doing})") from error


class _DiskFull(MachineError):
    """There was no room left to write, through whosever fault."""


def _files(folder: Path) -> dict[Path, int]:
    """Every file below a folder with its bytes."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            with suppress(OSError):
                found[path] = path.lstat().st_size
    return found


def _take_back(folder: Path, before: Mapping[Path, int]) -> int:
    """Remove what a build that filled the disk has written; returns its bytes."""
    written = {p: size for p, size in _files(folder).items() if p not in before}
    for path in written:
        with suppress(OSError):
            path.unlink()
    return sum(written.values())


def _unwritable(sets: Sequence[Tensors]) -> list[Tensors]:
    """Input sets that an engine cannot change for those after it."""
    for one in sets:
        for array in one.values():
            array.setflags(write=False)
    return list(sets)


def _digest(outputs: Tensors) -> str:
    """Hash of names and bytes of outputs."""
    digest = hashlib.sha256()
    for name in sorted(outputs):
        digest.update(name.encode() + b"\0" + outputs[name].tobytes())
    return digest.hexdigest()


class Bench:
    """One model on one backend, with the default engine kept alive.

    Args:
        backend: The backend.
        model: Prepared model.
        workdir: Folder for intermediate files.
        gate: Accuracy gate.
        plan: Timing plan.
        event: Called with each thing worth telling before the answer.
    """

    def __init__(
        self,
        backend: Backend,
        model: Model,
        workdir: Path,
        gate: Gate,
        plan: TimingPlan,
        event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._backend = backend
        self._model, self._workdir, self._gate, self._plan = model, workdir, gate, plan
        self._event = event
        # A backend whose engines share a device keeps other processes off it during a measurement.
        self._alone: Callable[[], AbstractContextManager[Any]] = getattr(
            self._backend, "alone", nullcontext
        )
        self._inputs = _unwritable(model.selection())
        self._references: list[Tensors] = list(model.selection_reference())
        self._default: Engine | None = None
        self._default_outcome = Outcome(DEFAULT_ROUTE, Status.BUILD_FAILED, "not built yet")
        self._default_digest = ""

    def default(self) -> dict[str, Any]:
        """Build, check and time the default route."""
        return self._outcome(DEFAULT_ROUTE, self._try_default, keep=True)

    def trial(self, route: Route, incumbent: float | None, known: Sequence[str]) -> dict[str, Any]:
        """Build, check and time a route; an engine hash in `known` is only reported."""
        answer: dict[str, Any] = {}

        def attempt(engine: Engine) -> tuple[Verdict, Measurement | None]:
            if engine.hash == self._default_engine.hash:
                return self._same_as_default()
            if engine.hash in known:
                answer["same_as"] = engine.hash
                return Verdict({}, Status.OK), None
            verdict = self._check(engine, self._inputs, self._references)
            if verdict.status is not Status.OK:
                return verdict, None
            with _faults_are(Status.CRASHED, "timing"), self._alone():
                measurement = measure.measure_paired(
                    *self._pair(engine, self._inputs), self._plan, incumbent_log_speedup=incumbent
                )
            return _with_caveats(verdict, engine), measurement

        return {**self._outcome(route, attempt), **answer}

    def confirm(self, route: Route, save_to: Path | None) -> dict[str, Any]:
        """Build a route beside a default that is fresh, and decide on the other input sets."""
        inputs = _unwritable(self._model.confirmation())
        references = list(self._model.confirmation_reference())

        def attempt(engine: Engine) -> tuple[Verdict, Measurement | None]:
            verdict = self._check(engine, inputs, references)
            measurement = None
            if verdict.status is Status.OK and engine.hash == self._default_engine.hash:
                measurement = self._same_as_default()[1]
                verdict = Verdict(verdict.losses, Status.OK, SAME_AS_DEFAULT)
            elif verdict.status is Status.OK:
                with _faults_are(Status.CRASHED, "timing"), self._alone():
                    measurement = measure.confirm(*self._pair(engine, inputs), self._plan)
                verdict = _with_caveats(verdict, engine)
            if save_to and measurement and (measurement.low > 0 or route.is_default):
                _save(engine, save_to)
            return verdict, measurement

        return self._outcome(route, attempt)

    def noise_floor(self) -> dict[str, Any]:
        """Time a second default engine against the first."""
        with _faults_are(Status.BUILD_FAILED, "building"):
            second = self._backend.build(self._model, DEFAULT_ROUTE, self._workdir)
        if isinstance(second, BuildFailure):
            raise MachineError(f"the default route built once but not twice: {second.reason}")
        try:
            with self._alone():
                value = measure.noise_floor(*self._pair(second, self._inputs), self._plan)
            return {"value": value, "healthy": True}
        finally:
            second.close()

    def control(self) -> dict[str, Any]:
        """Build the default route again and time it against the first, as a route is timed."""

        def attempt(engine: Engine) -> tuple[Verdict, Measurement | None]:
            verdict = self._check(engine, self._inputs, self._references)
            with _faults_are(Status.CRASHED, "timing"), self._alone():
                pair = self._pair(engine, self._inputs)
                return verdict, measure.measure_paired(*pair, self._plan)

        return self._outcome(DEFAULT_ROUTE, attempt)

    def layers(self, route: Route, inferences: int) -> dict[str, Any]:
        """Build a route and look inside: its layers, or None if its engine does not show them."""
        answer: dict[str, Any] = {"layers": None}

        def attempt(engine: Engine) -> tuple[Verdict, Measurement | None]:
            if isinstance(engine, Layered):
                with _faults_are(Status.CRASHED, "profiling"):
                    answer["layers"] = engine.layers(self._inputs[0], inferences).as_json()
            return Verdict({}, Status.OK), None

        return {**self._outcome(route, attempt), **answer}

    def check(self) -> dict[str, Any]:
        """Whether the default engine still gives what it gave at first."""
        return {
            "healthy": _digest(self._default_engine.run(self._inputs[0])) == self._default_digest
        }

    @property
    def _default_engine(self) -> Engine:
        if self._default is None:
            raise MachineError("the worker child was asked for a route before the default route")
        return self._default

    def _pair(self, engine: Engine, inputs: Sequence[Tensors]) -> tuple[Bound, Bound]:
        return Bound(self._default_engine, inputs[0]), Bound(engine, inputs[0])

    def _same_as_default(self) -> tuple[Verdict, Measurement]:
        measured = self._default_outcome.measurement
        latency = measured.latency_ms if measured else 0.0
        return (
            Verdict(self._default_outcome.losses, Status.OK, SAME_AS_DEFAULT),
            Measurement(0.0, 0.0, 0.0, latency, latency, rounds=0, spread=0.0),
        )

    def _try_default(self, engine: Engine) -> tuple[Verdict, Measurement | None]:
        verdict = self._check(engine, self._inputs, self._references)
        if verdict.status is not Status.OK:
            return verdict, None
        with _faults_are(Status.CRASHED, "timing"), self._alone():
            self._default_digest = _digest(engine.run(self._inputs[0]))
            latency = measure.latency_ms(Bound(engine, self._inputs[0]), self._plan)
        return _with_caveats(verdict, engine), Measurement(
            0.0, 0.0, 0.0, latency, latency, rounds=0, spread=0.0
        )

    def _check(
        self, engine: Engine, inputs: Sequence[Tensors], references: Sequence[Tensors]
    ) -> Verdict:
        with _faults_are(Status.CRASHED, "running"):
            outputs = [dict(engine.run(one)) for one in inputs]
        return judge(outputs, references, self._gate)

    def _outcome(
        self,
        route: Route,
        attempt: Callable[[Engine], tuple[Verdict, Measurement | None]],
        *,
        keep: bool = False,
    ) -> dict[str, Any]:
        """Build a route, attempt something with its engine, and put both into an answer.

        A feasible engine becomes the default one when `keep`; any other is closed.
        """
        before = _files(self._workdir)
        start = built = time.perf_counter()
        verdict, measurement, digest, healthy = Verdict({}, Status.OK), None, "", True
        engine: Engine | None = None
        try:
            with _faults_are(Status.BUILD_FAILED, "building"):
                made = self._backend.build(self._model, route, self._workdir)
            built = time.perf_counter()
            if isinstance(made, BuildFailure):
                verdict = Verdict({}, made.status, one_line(made.reason))
            else:
                engine, digest = made, made.hash
                self._event({"event": "built", "seconds": built - start, "hash": digest})
                verdict, measurement = attempt(engine)
        except _Fault as fault:
            built = built if engine is not None else time.perf_counter()
            verdict, healthy = Verdict({}, fault.status, fault.reason), False
        except _DiskFull as full:
            took = _take_back(self._workdir, before)
            if took < GREEDY_BYTES:
                raise MachineError(str(full)) from full
            reason = f"filled the disk; the {took >> 20} MiB that it wrote were removed"
            verdict, healthy = Verdict({}, Status.BUILD_FAILED, reason), False
        end = time.perf_counter()
        outcome = Outcome(
            route,
            verdict.status,
            verdict.reason or "; ".join(getattr(engine, "notes", ())),
            measurement,
            verdict.losses,
            build_seconds=engine.build_seconds if engine is not None else built - start,
            measure_seconds=end - built,
            engine_hash=digest,
        )
        if keep and outcome.is_feasible:
            self._default, self._default_outcome = engine, outcome
        elif engine is not None:
            healthy = _closes(engine) and healthy
        return {"outcome": pack_outcome(outcome), "healthy": healthy}


def _with_caveats(verdict: Verdict, engine: Engine) -> Verdict:
    """The verdict with what the engine says of its own figures, where it says anything."""
    caveats = getattr(engine, "caveats", ())
    return replace(verdict, reason=one_line("; ".join(caveats))) if caveats else verdict


def _closes(engine: Engine) -> bool:
    try:
        engine.close()
    except Exception:
        return False
    return True


def _save(engine: Engine, folder: Path) -> None:
    """Let an engine write itself beside `folder`, then move its files in."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with draft_folder(folder) as draft:
            engine.save(draft)
            for item in sorted(draft.iterdir()):
                place = folder / item.name
                if item.is_dir() and place.is_dir():
                    shutil.rmtree(place)
                os.replace(item, place)
    except OSError as error:
        raise MachineError(f"the engine cannot be saved in {folder}: {error}") from error


def _open(request: Mapping[str, Any], event: Callable[[dict[str, Any]], None]) -> Bench:
    if request["cpu"] is not None:
        # Before any library makes a thread: threads take over the affinity of their maker.
        os.sched_setaffinity(0, {request["cpu"]})
    from routepilot.env.models import Model

    backend = load_backend(request["backend"], request["options"])
    if request["confirming"] and isinstance(backend, Confirming):
        backend.confirming()
    if isinstance(backend, Warming):
        backend.warm()
    return Bench(
        backend,
        Model.load(Path(request["model"])),
        Path(request["workdir"]),
        Gate(**request["gate"]),
        TimingPlan(**request["plan"]),
        event,
    )


def _answer(bench: Bench, request: Mapping[str, Any]) -> dict[str, Any]:
    action = request["do"]
    if action == "default":
        return bench.default()
    if action == "check":
        return bench.check()
    if action == "noise_floor":
        return bench.noise_floor()
    if action == "control":
        return bench.control()
    route = Route.read(request["route"])
    if action == "layers":
        return bench.layers(route, request["inferences"])
    if action == "confirm":
        return bench.confirm(route, Path(request["save_to"]) if request["save_to"] else None)
    return bench.trial(route, request["incumbent"], request["known"])


def main(arguments: list[str]) -> None:
    """Serve requests until the parent closes the line."""
    line = Line(arguments)
    bench: Bench | None = None
    while (request := line.next()) is not None:
        try:
            if bench is None:
                bench = _open(request, line.send)
                # Linux has one monotonic clock for all processes: the parent can compare.
                line.send({"healthy": True, "ready": time.monotonic()})
            else:
                line.send(_answer(bench, request))
        except RoutePilotError as error:
            line.send({"error": type(error).__name__, "message": str(error)})
        except _Fault as fault:
            line.send({"error": "MachineError", "message": fault.reason})
    os._exit(0)  # engines of a healthy child need no farewell, and some crash at it


if __name__ == "__main__":
    main(sys.argv[1:])
