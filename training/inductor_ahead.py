"""Sessions on Inductor whose builds run ahead: many at once, and none while anything is timed.

Owns the builders that sessions of several models share, and when each builds or times. A session
names the routes it will ask for next, their packages are compiled side by side with those of other
sessions (`inductor_builders.py`), and every timing has the machine to itself. What a route is
charged is the seconds of its own build, as everywhere.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.inductor import InductorBackend
from routepilot.env.backends.inductor_package import READY, Package, Request, put_ready
from routepilot.env.errors import InputError, ModelError
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.store import RecordStore
from routepilot.training.inductor_builders import Builders, Built
from routepilot.training.session import Session, SessionConfig

#: Seconds between two looks at the builds under way.
LOOK = 0.1

Promise = Future[Built[Any]]


class Ahead:
    """Builders shared by the threads of several sessions.

    Args:
        place: Folder for the builds.
        workers: Builds at once.
        deadline_seconds: Limit of one build, pauses not counted.

    Raises:
        InputError: No builds at once are asked for.
    """

    def __init__(self, place: Path, workers: int, deadline_seconds: float) -> None:
        if workers < 1:
            raise InputError(f"{workers} builds at once were asked for; give 1 or more")
        place.mkdir(parents=True, exist_ok=True)
        #: File under whose lock builds time kernels.
        self.lock = place / "benchmark.lock"
        self._builders: Builders[Promise] = Builders(place, self.lock, workers, deadline_seconds)
        self._asked: list[tuple[Promise, Request]] = []
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._pump = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Ahead:
        self._pump.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._pump.join()
        self._builders.close()
        for promise, _ in self._asked:
            promise.cancel()

    def build(self, request: Request) -> Promise:
        """Start a build as soon as there is room; the answer comes when it has ended."""
        promise: Promise = Future()
        with self._turn:
            self._asked.append((promise, request))
        return promise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Every build stopped and no other session timing."""
        with self._turn, self._builders.paused():
            yield

    def _look(self) -> None:
        while not self._closing.wait(LOOK):
            with self._turn:
                for built in self._builders.finished():
                    built.job.set_result(built)
                while self._asked and self._builders.has_room:
                    self._builders.start(*self._asked.pop(0))


class AheadSession(Session):
    """A session that compiles what it will be asked for before it is asked.

    Args:
        model: A model with a PyTorch program.
        config: Settings, of the backend `inductor`.
        store: Record store.
        workdir: Folder for packages and the child's log.
        ahead: Where builds run.
        family: As in `Session`.
        trained: As in `Session`.

    Raises:
        InputError: The backend is another one.
    """

    def __init__(
        self,
        model: Model,
        config: SessionConfig,
        store: RecordStore,
        workdir: Path,
        *,
        ahead: Ahead,
        family: str = "unknown",
        trained: bool = True,
    ) -> None:
        shutil.rmtree(workdir, ignore_errors=True)  # packages of a run that was cut
        super().__init__(model, config, store, workdir, family=family, trained=trained)
        if not isinstance(self.backend, InductorBackend):
            raise InputError(
                f"builds run ahead of their timing on the backend inductor alone, and"
                f" {config.backend!r} was given; leave --build-workers out"
            )
        self._compiler, self._ahead = self.backend, ahead
        self._promised: dict[Route, Promise] = {}
        self._default_package: Package | None = None

    def expect(self, routes: Sequence[Route]) -> None:
        """Start the builds of routes that will be asked for next."""
        for route in routes:
            if not self.is_known(route) and self.catalog.objection(route) is None:
                if route not in self._promised:
                    self._promised[route] = self._start(route)

    def default(self) -> Outcome:
        """The default route's outcome; see `Session.default`."""
        if self.is_known(DEFAULT_ROUTE):
            return super().default()
        _ = self.features  # now, while nobody waits for the machine
        built = self._start(DEFAULT_ROUTE).result()
        if isinstance(built.result, BuildFailure):
            raise ModelError(
                f"the default route of {self.model.name} failed"
                f" ({built.result.status.value}): {built.result.reason}"
            )
        self._default_package = built.result
        self.worker.wake()
        while self.worker.is_starting:
            time.sleep(LOOK)
        with self._beside_default():
            return super().default()

    def outcome(self, route: Route, incumbent_log_speedup: float | None = None) -> Outcome:
        """The outcome of a route, whose package was compiled ahead; see `Session.outcome`."""
        if self.is_known(route) or self.catalog.objection(route) is not None:
            return super().outcome(route, incumbent_log_speedup)
        self.expect([route])
        built = self._promised.pop(route).result()
        if isinstance(built.result, BuildFailure):
            failed = built.result
            self._keep(Outcome(route, failed.status, failed.reason, build_seconds=built.seconds))
            return super().outcome(route)
        with self._beside_default():
            self._put(route, built.result)
            return super().outcome(route, incumbent_log_speedup)

    def confirm(self, route: Route, save_to: Path | None = None) -> Outcome:
        """Fresh packages of the route and the default, timed on other inputs."""
        fresh = {one: self._start(one) for one in {route, DEFAULT_ROUTE}}
        found = {one: promise.result() for one, promise in fresh.items()}
        with self._ahead.alone():
            for one, built in found.items():
                if isinstance(built.result, BuildFailure):
                    failed = built.result
                    return Outcome(route, failed.status, failed.reason, build_seconds=built.seconds)
                self._put(one, built.result, fresh=True)
            return super().confirm(route, save_to)

    def close(self) -> None:
        """End the child and forget what was promised."""
        super().close()
        if self._default_package is not None:
            shutil.rmtree(self._default_package.folder, ignore_errors=True)
            self._default_package = None

    def _start(self, route: Route) -> Promise:
        return self._ahead.build(self._compiler.request(self.model, route, str(self._ahead.lock)))

    @contextmanager
    def _beside_default(self) -> Iterator[None]:
        """The machine alone, with a package of the default for a child that starts."""
        if self._default_package is None:
            built = self._start(DEFAULT_ROUTE).result()
            if isinstance(built.result, Package):
                self._default_package = built.result
        with self._ahead.alone():
            if self._default_package is not None:
                put_ready(self._default_package, self._workdir, DEFAULT_ROUTE)
            yield

    def _put(self, route: Route, package: Package, *, fresh: bool = False) -> None:
        """Let a package wait for its route; it is linked, so its own folder goes."""
        if fresh:
            shutil.rmtree(self._workdir / READY / route.key, ignore_errors=True)
        put_ready(package, self._workdir, route)
        shutil.rmtree(package.folder, ignore_errors=True)
