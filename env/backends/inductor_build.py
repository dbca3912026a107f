"""One Inductor build in a process of its own: a program and a route in, a package out.

Owns the compile (AOTInductor) and the hash of what came of it. Run as
`python -m routepilot.env.backends.inductor_build FOLDER`, where `request.json` says what to build
and `result.json` will say how it ended; `inductor_package.py` is the other side. A build has cache
folders of its own, so no build finds what another one compiled or timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import signal
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from routepilot.env.backends.inductor_linker import sound_compiler

#: Names in the build's folder.
PACKAGE, REQUEST, RESULT, CACHE = "package.pt2", "request.json", "result.json", "cache"

#: What in an archive says what the machine will do; the shared object holds times and places.
SOURCES = (".cpp", ".cubin", ".ptx", ".hsaco")

#: Names that the compiler makes from the content of files whose place is part of it.
_NAMES = re.compile(rb"c[a-z2-7]{51}")


#: Linux: a signal for this process when its parent ends.
_PR_SET_PDEATHSIG = 1


def package_hash(package: Path, cache: Path, settings: dict[str, Any]) -> str:
    """Hash over generated code and what acts beside it; equal code has equal hashes.

    Args:
        package: Archive that AOTInductor wrote.
        cache: Cache folder of the build, whose place is not part of the code.
        settings: Whatever else acts at run time.
    """
    place = re.compile(rb"[^\s\"]*" + re.escape(str(cache).encode()) + rb"[^\s\"]*")
    parts = []
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if name.endswith(SOURCES):
                data = archive.read(name)
                if name.endswith(".cpp"):
                    data = _NAMES.sub(b"", place.sub(b"", data))
                parts.append(Path(name).suffix + hashlib.sha256(data).hexdigest())
    text = json.dumps([sorted(parts), settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def build(folder: Path) -> dict[str, Any]:
    """Build what the folder's request asks for.

    Returns:
        The result as plain data: status, reason, seconds, hash.
    """
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    import torch

    if sys.platform == "linux":  # before the settings are read, which take the name from here
        os.environ["CXX"] = sound_compiler(os.environ.get("CXX", "g++"), folder)
    import torch._inductor.config as config

    from routepilot.env.backends import inductor_catalog as knobs
    from routepilot.env.backends.inductor_program import adapted, switches
    from routepilot.env.programs import read_program

    device, settings = request["device"], request["settings"]
    torch.set_num_threads(int(request["threads"]))
    if device == "cuda":
        torch.cuda.set_device(int(request["index"]))
    options = knobs.configuration(config, request["route"]) | _always(config, request)
    if device == "cuda":
        _try_no_vector_units()
    start = time.perf_counter()
    _one_benchmark_at_a_time(request["benchmark_lock"])
    with switches(settings, device), torch.no_grad(), _alone(request):
        program, _ = adapted(read_program(Path(request["program"])), settings, device)
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / PACKAGE), inductor_configs=options
        )
    seconds = time.perf_counter() - start
    acting = {name: settings[name] for name in settings if name in request["runtime"]}
    identity = {**acting, "model": request["fingerprint"], "threads": request["threads"]}
    digest = package_hash(folder / PACKAGE, folder / CACHE, identity)
    return {"status": "ok", "reason": "", "seconds": seconds, "hash": digest}


def _always(config: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Settings of every build: how it is made, not what comes of it."""
    from routepilot.env.backends.inductor_catalog import BOUNDED_CONFIGS, installed_value

    wanted: dict[str, Any] = {
        # Whether a vector unit works is known from the processor; trying it takes a compile each.
        "cpp.vec_isa_ok": True,
        # Headers compiled into a cache that is thrown away cost more than they save.
        "cpp_cache_precompile_headers": False,
        "aot_inductor.precompile_headers": False,
        "aot_inductor.compile_wrapper_opt_level": request["wrapper"],
    }
    if request["search"] == "bounded":
        wanted["test_configs.max_mm_configs"] = BOUNDED_CONFIGS
    return {path: value for path, value in wanted.items() if installed_value(config, path)[0]}


def _try_no_vector_units() -> None:
    """Take the processor's plain vector units, where a GPU does the work.

    Whether the compiler and the processor know further ones is tried by building a library and
    loading it in a new Python with torch, for the few lines that launch kernels. In a profile of a
    build of `resnet` for an H200, 20 of 44 s are six waits for subprocesses: these, we think.
    """
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.VecISA.check_build = lambda self, code: False  # type: ignore[method-assign]


@contextlib.contextmanager
def _alone(request: dict[str, Any]) -> Iterator[None]:
    """The GPU for this build, where its benchmarks do not ask for it one by one."""
    if request["device"] == "cpu" or request["benchmark_lock"]:
        yield
        return
    from routepilot.env.gpu_timing import Gpu

    with Gpu(int(request["index"])).lock():
        yield


def _one_benchmark_at_a_time(path: str) -> None:
    """Let no two processes that share the lock file time kernels at once."""
    if not path:
        return
    from torch._inductor.runtime import benchmarking

    owner = type(benchmarking.benchmarker)
    held = {"depth": 0}
    for name in ("benchmark_gpu", "benchmark_gpu_with_cuda_graph"):
        inner = getattr(owner, name, None)
        if inner is None:
            continue

        def locked(*arguments: Any, _inner: Any = inner, **more: Any) -> Any:
            with Path(path).open("a") as file:
                if not held["depth"]:
                    fcntl.flock(file, fcntl.LOCK_EX)
                held["depth"] += 1
                try:
                    return _inner(*arguments, **more)
                finally:
                    held["depth"] -= 1

        setattr(owner, name, locked)


def _failure(error: BaseException) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A C++ compiler's own words stand far below its command line.
    telling = [line for line in lines if " error: " in line][:1]
    words = " ".join(" ".join([*lines[:1], *(telling or lines[1:2])]).split())[:300]
    memory = isinstance(error, MemoryError) or "out of memory" in text.lower()
    return {"status": "out_of_memory" if memory else "build_failed", "reason": words}


def main(folder: Path) -> int:
    """Build, and write how it ended."""
    warnings.simplefilter("ignore")
    if sys.platform == "linux":  # an orphan would go on using the machine
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # While this lock is held, nobody takes the folder for what a dead process left.
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH)
    start = time.perf_counter()
    try:
        result = build(folder)
    except Exception as error:  # the compiler raises whatever it likes
        result = {**_failure(error), "seconds": time.perf_counter() - start, "hash": ""}
    draft = folder / f"{RESULT}.draft"
    draft.write_text(json.dumps(result), encoding="utf-8")
    os.replace(draft, folder / RESULT)
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # pools of the compiler need no farewell, and some hang at it
