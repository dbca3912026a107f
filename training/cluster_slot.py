"""A slot's end of a cluster: the process on a node that owns one worker at a time.

Owns what lies on the node (the model's files, the work folder, the core) and goes with it. Knows
nothing of Ray, of the store and of other slots; `cluster.py` is the other end.

What a candidate does, it does to the worker's child: the answer is an outcome. This process ends
only with its node, by a kill, or when it is no longer wanted.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
from numpy.typing import NDArray

from routepilot import __version__
from routepilot.env.backends import load_backend
from routepilot.env.backends.base import NeedsDevice
from routepilot.env.child import end_orphans, machine_memory_bytes
from routepilot.env.errors import RoutePilotError
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route
from routepilot.env.worker import MEMORY_SHARE, Worker

#: Beginning of the name of a slot's folder; the number of its process follows.
FOLDER = "routepilot-slot-"

#: A model's or an engine's files: path below its folder -> bytes, uint8.
Files = Mapping[str, NDArray[np.uint8]]


def read_files(folder: Path) -> dict[str, NDArray[np.uint8]]:
    """Every file below a folder; links are followed."""
    return {
        str(path.relative_to(folder)): np.frombuffer(path.read_bytes(), np.uint8)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_files(folder: Path, files: Files) -> None:
    """Write files below a folder."""
    for name, data in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        data.tofile(place)


def _sweep() -> None:
    """Remove the folders of slots that were killed, which could not do it themselves."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        pid = folder.name.removeprefix(FOLDER).partition("-")[0]
        with suppress(OSError):
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                if folder.stat().st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)


class CoreLease:
    """A core that no other slot of this node is pinned to, held for as long as this process lives.

    Attributes:
        core: The core; None when every core is taken, and then nothing is pinned.
    """

    def __init__(self) -> None:
        self.core: int | None = None
        self._file: IO[str] | None = None
        for core in sorted(os.sched_getaffinity(0)):
            path = Path(tempfile.gettempdir()) / f"routepilot-core-{core}.lock"
            with suppress(OSError):  # held by another slot, or by another user
                file = path.open("a")
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    file.close()
                    continue
                self.core, self._file = core, file
                return

    def close(self) -> None:
        """Let it go."""
        if self._file is not None:
            self._file.close()
        self.core = self._file = None


class ClusterSlot:
    """One measuring slot on a node.

    Args:
        backend: Backend name.
        options: Backend options.
        pin: Pin the child to a core of its own.
        share: Part of the node that is this slot's, 0 to 1: so much of the memory that a machine's
            one child might have.
    """

    def __init__(self, backend: str, options: Mapping[str, str], pin: bool, share: float) -> None:
        end_orphans()  # what a killed slot of this node left running
        self._backend, self._options = backend, dict(options)
        self._lease = CoreLease() if pin else None
        self._memory = int(MEMORY_SHARE * machine_memory_bytes() * share)
        _sweep()
        self._root = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        self._worker: Worker | None = None
        self._known: dict[str, Outcome] = {}

    def describe(self) -> dict[str, Any]:
        """Version, catalog and target here; or the error, as `answer` gives it."""

        def found() -> dict[str, Any]:
            backend = load_backend(self._backend, self._options)
            if isinstance(backend, NeedsDevice):
                backend.require_device()
            return {"catalog": backend.catalog(), "target": backend.target()}

        return {"version": __version__, "process": os.getpid(), **self._answer(found)}

    def open(self, files: Files, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Take a model; what was open is closed.

        Args:
            files: The prepared model's folder.
            settings: Arguments of `Worker` besides backend, model, folder and core.
        """

        def opened() -> dict[str, Any]:
            self._end_worker()
            folder = self._root / "model"
            shutil.rmtree(folder, ignore_errors=True)
            write_files(folder, files)
            limit = settings["memory_limit_bytes"] or self._memory
            self._known.clear()
            self._worker = Worker(
                self._backend,
                self._options,
                Model.load(folder),
                self._root / "work",
                **{**settings, "memory_limit_bytes": limit},
                cpu=self._lease.core if self._lease else None,
            )
            return {"value": self._worker.stray_flags}

        return self._answer(opened)

    def call(self, method: str, deadline: float, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call a method of the worker: its value, or the error it raised."""

        def called() -> dict[str, Any]:
            assert self._worker is not None
            self._worker.deadline_seconds = deadline
            return {"value": getattr(self._worker, method)(*args, **kwargs)}

        return self._answer(called)

    def trial(
        self,
        deadline: float,
        route: Route,
        incumbent: float | None,
        known: Mapping[str, Outcome],
    ) -> dict[str, Any]:
        """As `Worker.trial`; what was known at an earlier call of this model still is."""
        self._known.update(known)
        return self.call(
            "trial", deadline, route, incumbent_log_speedup=incumbent, known=self._known
        )

    def confirm(self, deadline: float, route: Any, save: bool) -> dict[str, Any]:
        """As `Worker.confirm`; the engine's files come with the outcome when they are wanted."""
        saved = self._root / "saved"
        shutil.rmtree(saved, ignore_errors=True)
        answer = self.call("confirm", deadline, route, saved if save else None)
        return {**answer, "files": read_files(saved) if saved.is_dir() else {}}

    def close(self) -> None:
        """End the child and leave nothing on the node."""
        self._end_worker()
        if self._lease is not None:
            self._lease.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        shutil.rmtree(self._root / "work", ignore_errors=True)

    @staticmethod
    def _answer(call: Any) -> dict[str, Any]:
        """What a call gives, or its error in a form that any version can read."""
        try:
            return dict(call())
        except RoutePilotError as error:
            return {"error": type(error).__name__, "message": str(error)}
