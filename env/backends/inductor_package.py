"""Packages: what an Inductor build leaves behind, made by a child and taken up by an engine.

Owns the folders of builds and the parent's side of `inductor_build.py`. A package that was built
ahead (many at once, before anything is timed) waits in the work folder under its route; whoever
builds that route takes it, once. A package is code that runs: one that waits is taken only if this
installation put it there. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from routepilot.env import ours
from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.inductor_build import CACHE, PACKAGE, REQUEST, RESULT
from routepilot.env.backends.inductor_catalog import BLAS, CUDNN_BENCHMARK, PRECISION
from routepilot.env.child import memory_kills, one_line, sigkilled
from routepilot.env.drafts import draft_folder, place_for_draft
from routepilot.env.interpreter import module_command
from routepilot.env.outcomes import Status
from routepilot.env.routes import Route

#: Folder of the packages that wait, inside a work folder.
READY = "packages"

#: Knobs that act when the package runs, beside its code.
RUNTIME_KNOBS = (PRECISION, CUDNN_BENCHMARK, BLAS)


@dataclass(frozen=True)
class Request:
    """What a build child is asked for.

    Attributes:
        program: Program file.
        fingerprint: The model's.
        device: `cpu` or `cuda`.
        index: CUDA device number.
        threads: Threads of the code on a CPU.
        route: Settings of the route.
        settings: Every knob's value, defaults included.
        wrapper: Optimisation level of the code that calls the kernels, `O0` to `O3`.
        search: `bounded` or `full` search where matrix products are autotuned.
        benchmark_lock: File under whose lock every kernel is timed at build; empty: the whole
            build holds the GPU.
        runtime: Names of the knobs that act at run time.
    """

    program: str
    fingerprint: str
    device: str
    index: int
    threads: int
    route: Mapping[str, str]
    settings: Mapping[str, str]
    wrapper: str
    search: str
    benchmark_lock: str = ""
    runtime: tuple[str, ...] = RUNTIME_KNOBS


@dataclass(frozen=True)
class Package:
    """A package and what its build said.

    Attributes:
        folder: Folder it lies in; whoever holds the package removes it.
        hash: Hash of the code.
        seconds: Seconds of the build, the child's start included.
    """

    folder: Path
    hash: str
    seconds: float

    @property
    def path(self) -> Path:
        """The archive."""
        return self.folder / PACKAGE


@dataclass
class Build:
    """A build under way.

    Attributes:
        folder: Its folder.
        process: The child.
        started: When, seconds since the epoch.
        pauses: When it was stopped by others and for how long; that is not its cost.
        memory_kills: What the kernel had counted of its kills when it started.
    """

    folder: Path
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.time)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    memory_kills: int | None = field(default_factory=memory_kills)

    def seconds(self) -> float:
        """How long it took, or has taken so far; without pauses."""
        try:
            end = (self.folder / RESULT).stat().st_mtime
        except OSError:
            end = time.time()
        return end - self.started - sum(length for start, length in self.pauses if start < end)

    def result(self) -> Package | BuildFailure:
        """How it ended; waits for it."""
        code = self.process.wait()
        return read_result(self.folder, code, self.seconds(), self.memory_kills)


def start_build(request: Request, place: Path, *, own_group: bool = False) -> Build:
    """Start a build child.

    Args:
        request: What to build.
        place: Folder in which the build gets a folder of its own.
        own_group: Give the child a session, whose process group can be stopped and killed as one.
    """
    place.mkdir(parents=True, exist_ok=True)
    folder = place_for_draft(place)
    folder.mkdir(mode=0o700)
    (folder / REQUEST).write_text(json.dumps(asdict(request)), encoding="utf-8")
    threads = str(request.threads)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_")},
        "TORCHINDUCTOR_CACHE_DIR": str(folder / CACHE),
        "TRITON_CACHE_DIR": str(folder / CACHE / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # builds are what runs in parallel
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
    if request.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*module_command("routepilot.env.backends.inductor_build"), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=own_group,
        )
    return Build(folder, process)


def read_result(
    folder: Path, code: int, seconds: float, memory_kills: int | None
) -> Package | BuildFailure:
    """What a build child left; a failed build's folder is removed.

    Args:
        folder: Of the build.
        code: With which the child ended, negative for a signal.
        seconds: How long it took.
        memory_kills: What the kernel had counted of its kills when it started.
    """
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = {"status": "build_failed", "reason": f"the compiler ended {_how(code)}"}
        if code == -signal.SIGKILL:
            ended = sigkilled(memory_kills)
            result = {"status": ended.status.value, "reason": f"the compiler was {ended.reason}"}
        words = _last_words(folder / "log")
        result["reason"] += f"; its last words: {words}" if words else ""
    if result["status"] != "ok":
        shutil.rmtree(folder, ignore_errors=True)
        return BuildFailure(Status(result["status"]), one_line(result["reason"]))
    shutil.rmtree(folder / CACHE, ignore_errors=True)
    result["seconds"] = seconds
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    return Package(folder, result["hash"], seconds)


def _how(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with code {code} and no result"


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace")[-4000:].splitlines()
    except OSError:
        return ""
    return one_line(next((line for line in reversed(lines) if line.strip()), ""))


def put_ready(package: Package, workdir: Path, route: Route) -> None:
    """Let a package wait for whoever builds its route in this work folder; links, no copy."""
    target = workdir / READY / route.key
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    ours.remember(ours.PACKAGES, ours.digest_of(package.path))
    with draft_folder(target.parent) as draft:
        for name in (PACKAGE, RESULT):
            os.link(package.folder / name, draft / name)
        os.replace(draft, target)


def take_ready(workdir: Path, route: Route, *, keep: bool) -> Package | None:
    """A package of ours that waits for this route; it waits no longer, unless kept.

    What somebody else put there is removed, as if nothing waited.

    Args:
        workdir: Work folder.
        route: The route.
        keep: Leave it where it is, for the next one.
    """
    source = workdir / READY / route.key
    folder = source
    if not keep:
        folder = place_for_draft(workdir)
        try:
            os.replace(source, folder)
        except OSError:
            return None
    try:
        digest = ours.digest_of(folder / PACKAGE)
        if not ours.is_ours(ours.PACKAGES, digest):
            shutil.rmtree(folder, ignore_errors=True)
            return None
        if not keep:
            ours.forget(ours.PACKAGES, digest)
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Package(folder, str(result["hash"]), float(result["seconds"]))
