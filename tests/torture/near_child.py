"""A fake of `routepilot.env.child.Child` that works in this process where a child is needless.

Serves requests by the worker's own `Bench`. A route whose deed could harm this process goes to a
real child, started for it alone; so a torture of thousands of trials pays for children only where
they are what is tested.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hostile_backend

from routepilot.env.child import Child, Ended
from routepilot.env.errors import RoutePilotError
from routepilot.env.routes import Route
from routepilot.env.worker_child import Bench, _answer, _Fault, _open

#: Deeds that are done in a real child only.
LETHAL = frozenset(
    "segv abort exit sigkill hang helpers daemon eat garbage silence run_segv run_hang time_hang"
    " fill pipe pipe_json pipe_flood".split()
)

#: Seconds that a real child which hangs is given, in the build or after it.
HANGING_SECONDS = {"hang": 2.5, "helpers": 2.5, "daemon": 2.5, "run_hang": 5.0, "time_hang": 5.0}

#: Seconds of the others, which end by themselves however busy the machine is.
ENDING_SECONDS = 120.0


class NearChild:
    """See the module; counts what went to real children in `real`."""

    real = 0

    def __init__(
        self, module: str, log: Path, environment: Mapping[str, str], memory_limit_bytes: int
    ) -> None:
        self._arguments = (module, log, environment, memory_limit_bytes)
        self._opening: Mapping[str, Any] | None = None
        self._bench: Bench | None = None
        self._posted: Mapping[str, Any] = {}
        self.alive = True
        self.events: list[dict[str, Any]] = []

    def post(self, request: Mapping[str, Any]) -> None:
        self._posted = request

    def ask(self, request: Mapping[str, Any], deadline_seconds: float) -> dict[str, Any] | Ended:
        self.post(request)
        return self.answer(deadline_seconds)

    def answer(self, deadline_seconds: float) -> dict[str, Any] | Ended:
        request, self.events = self._posted, []
        deed = Route.read(request.get("route", "")).values.get("-do", "work")
        if deed in LETHAL:
            return self._really(request, HANGING_SECONDS.get(deed, ENDING_SECONDS))
        try:
            if self._bench is None:
                self._opening = request
                self._bench = _open(request, self.events.append)
                return {"healthy": True, "ready": time.monotonic()}
            return _answer(self._bench, request)
        except RoutePilotError as error:
            return {"error": type(error).__name__, "message": str(error)}
        except _Fault as fault:
            return {"error": "MachineError", "message": fault.reason}

    def _really(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | Ended:
        type(self).real += 1
        child = Child(*self._arguments)
        try:
            assert self._opening is not None
            for first in (self._opening, {"do": "default"}):
                answer = child.ask(first, 120.0)
                assert not isinstance(answer, Ended), answer
            answer = child.ask(request, seconds)
            self.events = child.events
        finally:
            child.kill()
        self.alive = not isinstance(answer, Ended)
        return answer

    def kill(self) -> None:
        self.alive = False
        hostile_backend.POISONED.clear()

    def close(self) -> None:
        self.kill()
