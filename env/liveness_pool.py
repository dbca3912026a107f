"""Children that compile single changes, for one model or many at once.

Owns the processes of a liveness sweep: who compiles what next, what a crash or a hang costs, when
an answer is believed, and the time limit. Knows no cache and no table; `liveness.py` and
`training/liveness_sweep.py` say what to compile and keep what is found.

An answer is a dictionary of strings: `hash` and `bytes` of an engine, or `status` and `reason`;
both have `seconds`. The default engine is under the empty change.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepilot.env import errors
from routepilot.env.child import Child, Ended, machine_memory_bytes
from routepilot.env.errors import InputError, MachineError, ModelError, RoutePilotError
from routepilot.env.outcomes import Status

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: A change may take this long, or twenty times the default build if that is longer, seconds.
DEADLINE_SECONDS = 120.0

#: Share of the machine's memory all children together may use, and the least one child gets.
MEMORY_SHARE, CHILD_BYTES = 0.6, 2 << 30

#: Answers are checked and handed over after so many, so that a killed sweep loses few.
KEEP_EVERY = 25

#: A second child joins a model with at least so many changes left for each: one costs a start
#: and two builds of the default.
JOIN_AT = 12

#: How long after the time limit a compile may still end, seconds.
GRACE = 10.0

#: glibc gives memory back to the system after every compile and faults it in again for the next:
#: up to half of the time of a small network, a tenth of that of a large one.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

#: What was found for one change.
Found = dict[str, str]


@dataclass
class Unit:
    """One model for one target: what is left to compile, and what was found.

    Attributes:
        opening: What a child is told first: path, shapes, compute capability.
        log: Where the children's output goes, each with a suffix of its own.
        waiting: Changes left, in order.
        results: Change -> answer, those that were checked.
        error: Why the unit was given up.
        busy: Children at work on it.
    """

    opening: Mapping[str, Any]
    log: Path
    waiting: deque[str]
    results: dict[str, Found] = field(default_factory=dict)
    error: RoutePilotError | None = None
    busy: int = 0

    @property
    def open(self) -> bool:
        """Whether something is left to compile."""
        return self.error is None and (bool(self.waiting) or ("" not in self.results))


def opening(model: Model, compute_capability: str) -> dict[str, Any]:
    """What a child must know of a model.

    Args:
        model: Prepared model.
        compute_capability: GPU generation to compile for.
    """
    return {
        "path": str(model.path.absolute()),
        "compute_capability": compute_capability,
        "shapes": {spec.name: list(spec.shape) for spec in model.inputs},
    }


class _Compiling:
    """One child that compiles; replaced after every failure.

    Raises:
        ModelError: The compiler refuses the model itself.
    """

    def __init__(self, unit: Unit, number: int, memory_limit: int, until: float) -> None:
        self._unit, self._log = unit, unit.log.with_suffix(f".{number}.log")
        self._memory_limit, self._until = memory_limit, until
        self._child: Child | None = None
        self._deadline = DEADLINE_SECONDS
        self._was_killed = False
        self.default: Found = unit.results.get("", {})

    def start(self) -> None:
        """Start a child if there is none, and compile the default."""
        if self._child is not None:
            return
        built = self._start_once()
        if self._was_killed:
            # Want of memory comes again; somebody's kill, or a machine that was full then, not.
            built = self._start_once()
        if "hash" not in built:
            self.close()
            if self.overdue:
                raise _TimeIsUpError
            if not lasting({"": built}):
                raise MachineError(
                    f"the model's default engine did not come to be here: {built['reason']}; try"
                    " again with fewer --jobs"
                )
            raise ModelError(
                f"TensorRT-RTX does not compile the model: {built['reason']}; repair the model or"
                " choose another compute capability"
            )
        self._deadline = max(DEADLINE_SECONDS, 20 * float(built["seconds"]))
        if self.default and self.default["hash"] != built["hash"]:
            self.close()
            raise MachineError(
                "two builds of the default gave different engines, so liveness cannot be told;"
                " please report this model"
            )
        self.default = self.default or built

    def _start_once(self) -> Found:
        """A new child, and what it says of the default."""
        kept = {k: v for k, v in os.environ.items() if k != "__LUNOWUD"}
        environment = {**kept, **KEEP_MEMORY}
        self._child = Child(
            "routepilot.env.liveness_child", self._log, environment, self._memory_limit
        )
        opened = self._ask(self._unit.opening)
        if "error" in opened:
            self.close()
            raise getattr(errors, opened["error"], MachineError)(opened["message"])
        return opened if "reason" in opened else self._ask({"flags": ""})

    @property
    def overdue(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() >= self._until

    def change(self, flags: str) -> Found:
        """Compile with one change.

        Raises:
            _TimeIsUpError: The time limit cut it off.
        """
        self.start()
        answer = self._ask({"flags": flags})
        if self._was_killed:  # once more, as the default
            self.start()
            answer = self._ask({"flags": flags})
        if "hash" not in answer and answer["status"] != Status.REFUSED.value:
            self.close()  # a compiler that threw may be damaged
        if answer.get("status") == Status.TIMED_OUT.value and self.overdue:
            raise _TimeIsUpError
        return answer

    def check(self) -> None:
        """Compile the default again in the used child, to see that nothing leaked into it.

        Raises:
            _TimeIsUpError: The time limit cut it off.
            MachineError: Something leaked, or the child ended.
        """
        if self._child is None:
            return
        again = self._ask({"flags": ""})
        if again.get("hash") == self.default["hash"]:
            return
        if again.get("status") == Status.TIMED_OUT.value and self.overdue:
            raise _TimeIsUpError
        if "hash" not in again:
            raise MachineError(
                f"the default engine could not be compiled again ({again['reason']}), so the last"
                " answers are not believed; give the command again, which goes on from the others"
            )
        raise MachineError(
            "the compiler's default engine changed within one process, so liveness cannot be"
            " told; please report this model"
        )

    def _ask(self, request: Mapping[str, Any]) -> Found:
        assert self._child is not None
        begin = time.monotonic()
        deadline = min(self._deadline, max(self._until - begin, 0.0) + GRACE)
        answer = self._child.ask(request, deadline)
        self._was_killed = isinstance(answer, Ended) and answer.by_sigkill
        if isinstance(answer, Ended):
            self._child = None
            answer = {"status": answer.status.value, "reason": answer.reason}
        found = {key: str(value) for key, value in answer.items()}
        return {**found, "seconds": str(round(time.monotonic() - begin, 3))}

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child = None


class _TimeIsUpError(Exception):
    """The time limit ended a compile: nothing is known of its change."""


class Pool:
    """Children at work on units; idle ones join the unit with most left for each.

    Args:
        units: What to compile, in order of urgency.
        jobs: Children at once.
        until: When to stop, by `time.monotonic`.
        heard: Called after each change, under a lock.
        kept: Called after answers went into a unit's `results`, under the same lock.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        jobs: int,
        *,
        until: float = math.inf,
        heard: Callable[[Unit], None] = lambda unit: None,
        kept: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        self._units, self._jobs, self._until = units, jobs, until
        self._heard, self._kept = heard, kept
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._memory_limit = max(int(MEMORY_SHARE * machine_memory_bytes() / jobs), CHILD_BYTES)

    def run(self) -> None:
        """Compile until nothing is left or the time is up; what is done is kept anyhow.

        A unit that cannot go on has its `error`; the others go on, unless the request itself is at
        fault (an `InputError` that is no `ModelError`).
        """
        with ThreadPoolExecutor(self._jobs) as pool:
            # A child dies with the thread that started it, so each thread has its own.
            tasks = [pool.submit(self._work, number) for number in range(self._jobs)]
            try:
                for task in tasks:
                    task.result()
            finally:
                self._stop.set()

    def _work(self, number: int) -> None:
        try:
            while (unit := self._take()) is not None:
                try:
                    self._serve(unit, number)
                except _TimeIsUpError:
                    return
                except RoutePilotError as error:
                    with self._lock:
                        unit.error = unit.error or error
                    if isinstance(error, InputError) and not isinstance(error, ModelError):
                        self._stop.set()  # the request is at fault, not one model
                finally:
                    with self._lock:
                        unit.busy -= 1
        except BaseException:
            self._stop.set()
            raise

    def _take(self) -> Unit | None:
        with self._lock:
            if self._stop.is_set() or time.monotonic() >= self._until:
                return None
            left = [unit for unit in self._units if unit.open]
            unit = next((unit for unit in left if not unit.busy), None)
            if unit is None and left:
                most = max(left, key=lambda unit: len(unit.waiting) / (unit.busy + 1))
                unit = most if len(most.waiting) >= JOIN_AT * (most.busy + 1) else None
            if unit is not None:
                unit.busy += 1
            return unit

    def _serve(self, unit: Unit, number: int) -> None:
        compiling = _Compiling(unit, number, self._memory_limit, self._until)
        found: dict[str, Found] = {}
        try:
            compiling.start()
            if "" not in unit.results:
                found[""] = compiling.default
            while (change := self._next(unit)) is not None:
                found[change] = compiling.change(change)
                with self._lock:
                    self._heard(unit)
                if len(found) >= KEEP_EVERY:
                    self._keep(unit, compiling, found)
            self._keep(unit, compiling, found)
        finally:
            compiling.close()

    def _next(self, unit: Unit) -> str | None:
        with self._lock:
            over = self._stop.is_set() or time.monotonic() >= self._until
            done = over or unit.error is not None or not unit.waiting
            return None if done else unit.waiting.popleft()

    def _keep(self, unit: Unit, compiling: _Compiling, found: dict[str, Found]) -> None:
        compiling.check()
        with self._lock:
            unit.results.update(found)
            self._kept(unit)
        found.clear()


def lasting(results: Mapping[str, Mapping[str, str]]) -> dict[str, Found]:
    """The answers that say something of the model: no hang, no want of memory, no kill.

    A child that ran out of time or memory may say something of the machine alone.
    """
    fleeting = (Status.TIMED_OUT.value, Status.OUT_OF_MEMORY.value, Status.KILLED.value)
    return {c: dict(r) for c, r in results.items() if r.get("status") not in fleeting}


def is_sound(results: Iterable[Mapping[str, str]]) -> bool:
    """Whether answers have the parts that answers have."""
    return all("hash" in r or {"status", "reason"} <= set(r) for r in results)
