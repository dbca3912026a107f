"""Inductor builds ahead of their timing: many at once, and none while something is timed.

Owns the running build children, their deadline and their pauses. Before a timing every build is
stopped as a process group, so neither its compiler nor its kernels disturb the figure; a build that
is timing kernels itself finishes the one at hand first. Knows no model and no store.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.inductor_package import Build, Package, Request, start_build
from routepilot.env.outcomes import Status

Job = TypeVar("Job")

#: Seconds after stopping the builds in which kernels that were launched come to an end.
SETTLE = 0.1


@dataclass(frozen=True)
class Built(Generic[Job]):
    """How a build ended.

    Attributes:
        job: What it was for.
        result: The package, or why there is none.
        seconds: How long it took, pauses not counted.
    """

    job: Job
    result: Package | BuildFailure
    seconds: float


class Builders(Generic[Job]):
    """Build children, at most so many at once.

    Args:
        place: Folder for the builds.
        lock: File under whose lock builds time kernels.
        most: How many at once.
        deadline_seconds: Limit of one build, pauses not counted.
    """

    def __init__(self, place: Path, lock: Path, most: int, deadline_seconds: float) -> None:
        self._place, self._lock, self._most = place, lock, most
        self._deadline = deadline_seconds
        self._running: list[tuple[Job, Build]] = []

    @property
    def has_room(self) -> bool:
        """True when another build may start."""
        return len(self._running) < self._most

    @property
    def running(self) -> int:
        """How many are under way."""
        return len(self._running)

    def start(self, job: Job, request: Request) -> None:
        """Start a build."""
        self._running.append((job, start_build(request, self._place, own_group=True)))

    def finished(self) -> Iterator[Built[Job]]:
        """Builds that ended since the last call, by themselves or by their deadline."""
        for job, build in list(self._running):
            late = build.seconds() > self._deadline
            if build.process.poll() is None and not late:
                continue
            self._running.remove((job, build))
            seconds = build.seconds()
            if build.process.returncode is None:
                _kill(build)
                shutil.rmtree(build.folder, ignore_errors=True)
                reason = f"the build took more than {self._deadline:.0f} s"
                yield Built(job, BuildFailure(Status.TIMED_OUT, reason), seconds)
            else:
                _kill(build)  # what the compiler left behind in its group
                yield Built(job, build.result(), seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Every build stopped, and none of them in the middle of timing a kernel."""
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            start = time.time()
            stopped = [build for _, build in self._running if build.process.poll() is None]
            for build in stopped:
                _signal(build, signal.SIGSTOP)
        try:
            time.sleep(SETTLE)
            yield
        finally:
            for build in stopped:
                build.pauses.append((start, time.time() - start))
                _signal(build, signal.SIGCONT)

    def close(self) -> None:
        """Kill what runs."""
        for _, build in self._running:
            _kill(build)
            shutil.rmtree(build.folder, ignore_errors=True)
        self._running = []


def _signal(build: Build, number: int) -> None:
    try:
        os.killpg(build.process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _kill(build: Build) -> None:
    _signal(build, signal.SIGKILL)
    build.process.wait()
