"""Workers: outcomes of routes, each paid for in a child process that may do what it likes.

Owns the parent's side: when a child is started, kept or replaced, and what its end means for a
route. Knows no backend (the child loads it), no agent and no store.

Faults of a route are outcomes. Faults of the machine, of the backend and of the default route are
errors.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

from routepilot.env import errors
from routepilot.env.accuracy import Gate
from routepilot.env.backends.layers import Layers
from routepilot.env.child import Child, Ended, machine_memory_bytes
from routepilot.env.drafts import sweep
from routepilot.env.errors import InputError, MachineError, ModelError
from routepilot.env.measure import TimingPlan
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.worker_child import unpack_outcome

#: Share of the machine's memory a child may use when nobody says otherwise.
MEMORY_SHARE = 0.6

#: Environment variable through which TensorRT takes compiler flags; it would change every route.
STRAY_VARIABLE = "__LUNOWUD"

#: Thread pools that would start beside an engine's own threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

#: Outcomes an engine has earned for good: another route with that engine gets the same.
LASTING = (Status.OK, Status.ACCURACY_FAILED, Status.INVALID_OUTPUT)


class RouteWorker(Protocol):
    """What a session asks of whoever builds and times its routes; `Worker` says what each means."""

    deadline_seconds: float

    @property
    def starting_seconds(self) -> float: ...  # noqa: D102

    @property
    def stray_flags(self) -> str | None: ...  # noqa: D102

    @property
    def is_starting(self) -> bool: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102

    def wake(self) -> None: ...  # noqa: D102

    def default_outcome(self) -> Outcome: ...  # noqa: D102

    def trial(  # noqa: D102
        self,
        route: Route,
        *,
        incumbent_log_speedup: float | None = None,
        known: Mapping[str, Outcome] | None = None,
    ) -> Outcome: ...

    def confirm(self, route: Route, save_to: Path | None = None) -> Outcome: ...  # noqa: D102

    def control(self) -> Outcome: ...  # noqa: D102

    def layers(self, route: Route, inferences: int = 20) -> Layers | None: ...  # noqa: D102

    def noise_floor(self) -> float: ...  # noqa: D102


class Worker:
    """One model on one backend, built and measured in a child process.

    A child that gives a clean answer is used again and keeps its default engine; after a crash,
    a hang, an exception or any answer other than `OK` it must first show that its default engine
    still computes what it computed, or is replaced. A child ends with the thread that started it.

    Args:
        backend: Backend name, or `module:factory` of a backend that is not ours.
        options: Backend options, e.g. `{"threads": "1"}`.
        model: Prepared model.
        workdir: Folder for intermediate files and the child's log `worker.log`; not shared with
            another live worker.
        gate: Accuracy gate. A gate with a large limit collects losses of inaccurate routes too,
            with their timing.
        plan: Timing plan.
        deadline_seconds: Wall-clock limit of one request (a build with its measurement), after
            which the child's process group is killed. A confirmation has as much again as its
            timing may take.
        memory_limit_bytes: Limit on the resident memory of the child and its descendants; 60 % of
            the machine (or of the control group) when None.
        cpu: Core the child is pinned to; None leaves it free.

    Raises:
        InputError: A limit or the core cannot be used.
        MachineError: The folder cannot be made.
    """

    def __init__(
        self,
        backend: str,
        options: Mapping[str, str],
        model: Model,
        workdir: Path,
        *,
        gate: Gate,
        plan: TimingPlan,
        deadline_seconds: float = 120.0,
        memory_limit_bytes: int | None = None,
        cpu: int | None = None,
    ) -> None:
        if not 0 < deadline_seconds < math.inf:
            raise InputError(f"deadline of {deadline_seconds} s is not allowed; give more than 0")
        if memory_limit_bytes is not None and memory_limit_bytes <= 0:
            raise InputError(
                f"memory limit of {memory_limit_bytes} bytes is not allowed; give more than 0"
            )
        if cpu is not None and cpu not in os.sched_getaffinity(0):
            allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            raise InputError(f"core {cpu} is not available; choose one of {allowed}")
        try:
            workdir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(f"the work folder {workdir} cannot be made: {error}") from None
        self._model, self._workdir, self._plan = model, workdir, plan
        self._opening = {
            "backend": backend,
            "options": dict(options),
            "model": str(model.folder.absolute()),
            "workdir": str(workdir.absolute()),
            "gate": asdict(gate),
            "plan": asdict(plan),
            "cpu": cpu,
            "confirming": False,
        }
        self._environment = _child_environment(options)
        #: Seconds a request may take; may be changed between requests.
        self.deadline_seconds = deadline_seconds
        self._memory_limit = memory_limit_bytes or int(MEMORY_SHARE * machine_memory_bytes())
        self._child: Child | None = None
        self._waking: Child | None = None
        self._woken = 0.0
        #: Seconds that a child was starting while nobody waited for it.
        self.starting_seconds = 0.0
        self._suspect = self._was_killed = False
        self._default: Outcome | None = None
        #: Compiler flags found in the environment and kept from the children; None if there were
        #: none. Belongs into the manifest of whatever is measured.
        self.stray_flags = os.environ.get(STRAY_VARIABLE)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child, and remove what engines that were alive in it have left."""
        for child in (self._child, self._waking):
            if child is not None:
                child.close()
        self._child = self._waking = None
        sweep(self._workdir)

    def wake(self) -> None:
        """Let a child start meanwhile; it builds and times nothing before it is asked to."""
        if self._child is None and self._waking is None:
            self._woken, self._waking = time.monotonic(), self._open()

    @property
    def is_starting(self) -> bool:
        """True while a child that was woken is not up yet; its deadline passed, nobody waits."""
        late = time.monotonic() - self._woken > self.deadline_seconds
        return self._waking is not None and not late and not self._waking.has_words

    def default_outcome(self) -> Outcome:
        """The default route's outcome: its losses and latency, with a log speed-up of exactly 0.

        Raises:
            ModelError: The default route fails; the message says how.
            MachineError: The child or the backend cannot start.
        """
        if self._default is None:
            self._ready()
        assert self._default is not None
        return self._default

    def trial(
        self,
        route: Route,
        *,
        incumbent_log_speedup: float | None = None,
        known: Mapping[str, Outcome] | None = None,
    ) -> Outcome:
        """Build a route, check it on the selection inputs, and time it if it passed.

        Args:
            route: Legal canonical route.
            incumbent_log_speedup: Best so far; lets the timing of a slower route stop early.
            known: Outcomes by engine hash. An engine among them is not measured again; nor is the
                default route's, whose log speed-up is exactly 0.

        Returns:
            The outcome; whatever the candidate did is in its status and reason.
        """
        usable = {
            digest: outcome
            for digest, outcome in (known or {}).items()
            if outcome.status in LASTING
            and (outcome.measurement is not None or outcome.status is not Status.OK)
        }
        request = {
            "do": "trial",
            "route": str(route),
            "incumbent": incumbent_log_speedup,
            "known": list(usable),
        }
        outcome, same_as = self._outcome(route, request, self.deadline_seconds)
        if same_as is None:
            return outcome
        twin = usable[same_as]
        return replace(
            twin,
            route=route,
            reason=f"same engine as {twin.route if str(twin.route) else 'the default route'}"
            + (f": {twin.reason}" if twin.status is not Status.OK else ""),
            build_seconds=outcome.build_seconds,
            measure_seconds=outcome.measure_seconds,
            engine_hash=same_as,
        )

    def confirm(self, route: Route, save_to: Path | None = None) -> Outcome:
        """Build the default and the route afresh in a new child and time them in ABBA order.

        The confirmation inputs decide on accuracy. A win is `measurement.low > 0`.

        Args:
            route: The winner of a search.
            save_to: Folder for the engine's files; written when the route wins or is the default.
        """
        self.close()
        request = {
            "do": "confirm",
            "route": str(route),
            "save_to": str(save_to.absolute()) if save_to is not None else None,
        }
        deadline = self.deadline_seconds + 3 * self._plan.max_seconds
        self._opening["confirming"] = True
        try:
            return self._outcome(route, request, deadline)[0]
        finally:
            self._opening["confirming"] = False
            self.close()

    def control(self) -> Outcome:
        """The default route built again and timed against itself, as any route is."""
        return self._outcome(DEFAULT_ROUTE, {"do": "control"}, self.deadline_seconds)[0]

    def layers(self, route: Route, inferences: int = 20) -> Layers | None:
        """Build a route and look inside; None if its engine does not show its layers, or fails."""
        request = {"do": "layers", "route": str(route), "inferences": inferences}
        answer = self._ask(request, self.deadline_seconds)
        if isinstance(answer, Ended) or answer["layers"] is None:
            return None
        return Layers.read(answer["layers"])

    def noise_floor(self) -> float:
        """Log ratio that a second default engine reaches against the first by noise alone.

        Raises:
            MachineError: The second default engine cannot be built or timed.
        """
        answer = self._ask({"do": "noise_floor"}, self.deadline_seconds)
        if isinstance(answer, Ended):
            raise MachineError(f"the noise floor cannot be measured: {answer.reason}")
        return float(answer["value"])

    def _outcome(
        self, route: Route, request: Mapping[str, Any], deadline: float
    ) -> tuple[Outcome, str | None]:
        child = self._ready()
        start = time.perf_counter()
        answer = self._ask(request, deadline)
        if isinstance(answer, Ended) and answer.by_sigkill:
            # Want of memory comes again; somebody's kill, or a machine that was full then, not.
            child = self._ready()
            answer = self._ask(request, deadline)  # its seconds count as well
        seconds = time.perf_counter() - start
        if not isinstance(answer, Ended):
            try:
                return unpack_outcome(answer["outcome"]), answer.get("same_as")
            except (KeyError, TypeError, ValueError):
                self.close()
                answer = Ended(Status.CRASHED, "the child answered with what is no outcome")
        built = next((e for e in child.events if e["event"] == "built"), None)
        phase = "running or timing it" if built else "building"
        build_seconds = float(built["seconds"]) if built else seconds
        outcome = Outcome(
            route,
            answer.status,
            f"{answer.reason} (while {phase})",
            build_seconds=build_seconds,
            measure_seconds=seconds - build_seconds,
            engine_hash=str(built["hash"]) if built else "",
        )
        return outcome, None

    def _ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any] | Ended:
        """Ask the child, starting one if there is none, and let it go unless it stayed healthy."""
        child = self._ready()
        answer = child.ask(request, deadline)
        if isinstance(answer, Ended):
            self._child = None
            return answer
        if not answer.get("healthy", False):
            child.kill()
            self._child = None
        if "error" in answer:
            raise_reported(answer)
        outcome = answer.get("outcome")
        self._suspect = isinstance(outcome, dict) and outcome.get("status") != Status.OK.value
        return answer

    def _ready(self) -> Child:
        """A child whose default engine is built and sound."""
        if self._child is not None and not self._child.alive:  # it went while nobody asked
            self.close()
        if self._child is not None and self._suspect:
            answer = self._child.ask({"do": "check"}, self.deadline_seconds)
            if isinstance(answer, Ended) or not answer.get("healthy", False):
                self._child.kill()
                self._child = None
        self._suspect = False
        if self._child is None:
            self._child = self._start()
        return self._child

    def _open(self) -> Child:
        child = Child(
            "routepilot.env.worker_child",
            self._workdir / "worker.log",
            self._environment,
            self._memory_limit,
        )
        child.post(self._opening)
        return child

    def _start(self) -> Child:
        """A child with its default engine; one more try when the system killed the first."""
        self._was_killed = False
        try:
            return self._start_once()
        except (MachineError, ModelError):
            if not self._was_killed:
                raise
        return self._start_once()

    def _start_once(self) -> Child:
        woken, asked = self._waking is not None, time.monotonic()
        child, self._waking = self._waking or self._open(), None
        try:
            answer = child.answer(self.deadline_seconds)
            if isinstance(answer, Ended):
                self._was_killed = answer.by_sigkill
                raise MachineError(f"the worker child cannot start: {answer.reason}")
            if "error" in answer:
                raise_reported(answer)
            if woken:
                self.starting_seconds += min(answer["ready"], asked) - self._woken
            answer = child.ask({"do": "default"}, self.deadline_seconds)
            if isinstance(answer, Ended):
                self._was_killed = answer.by_sigkill
                if answer.status is Status.KILLED:  # no fault of the model
                    raise MachineError(
                        f"the default route of {self._model.name} was not built: {answer.reason};"
                        " see what kills processes here, and give the command again"
                    )
                raise self._default_failed(answer.status, answer.reason)
            if "error" in answer:
                raise_reported(answer)
            outcome = unpack_outcome(answer["outcome"])
            if not outcome.is_feasible:
                raise self._default_failed(outcome.status, outcome.reason)
        except BaseException:
            child.kill()
            raise
        # The figures of the first child stand: later defaults are the same engine built again.
        self._default = self._default or outcome
        return child

    def _default_failed(self, status: Status, reason: str) -> ModelError:
        advice = {
            Status.ACCURACY_FAILED: "give a larger tolerance",
            Status.TIMED_OUT: "give a longer deadline",
            Status.OUT_OF_MEMORY: "give a larger memory limit or a smaller model",
        }.get(status, "use another backend, or repair the model")
        return ModelError(
            f"the default route of {self._model.name} on {self._opening['backend']} failed"
            f" ({status.value}): {reason}; {advice}"
        )


def _child_environment(options: Mapping[str, str]) -> dict[str, str]:
    """The parent's environment without stray compiler flags and with bounded thread pools."""
    environment = {k: v for k, v in os.environ.items() if k != STRAY_VARIABLE}
    threads = options.get("threads", "1")
    return {**environment, **dict.fromkeys(THREAD_VARIABLES, threads)}


def raise_reported(answer: Mapping[str, Any]) -> NoReturn:
    """Raise the error that another process reports, as the class it was there."""
    kind = getattr(errors, answer["error"], MachineError)
    raise kind(answer["message"])
