"""torch.compile's compiler, Inductor, behind the one protocol of `base.py`.

Owns the backend: its options, its target, and how a route becomes an engine. The knobs are in
`inductor_catalog.py`, a build in `inductor_build.py`, its package in `inductor_package.py`, the
running engine in `inductor_engine.py`. A model must carry a PyTorch program (`env/programs.py`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from routepilot.env.backends.base import BuildFailure, Engine, Target
from routepilot.env.backends.cpu import processor
from routepilot.env.backends.inductor_catalog import make_catalog
from routepilot.env.backends.inductor_engine import InductorEngine
from routepilot.env.backends.inductor_package import (
    Package,
    Request,
    put_ready,
    start_build,
    take_ready,
)
from routepilot.env.child import one_line
from routepilot.env.errors import InputError, MachineError, MissingExtraError, ModelError
from routepilot.env.outcomes import Status
from routepilot.env.routes import Catalog, Route

if TYPE_CHECKING:
    from routepilot.env.gpu_timing import Gpu
    from routepilot.env.models import Model

#: Options: name -> allowed words; empty for a number or a text.
OPTIONS: dict[str, tuple[str, ...]] = {
    "device": ("cpu", "cuda"),
    "index": (),
    "threads": (),
    "wrapper": ("O0", "O1", "O2", "O3"),
    "search": ("bounded", "full"),
    "packages": ("take", "keep"),
    "knobs": (),
}


class InductorBackend:
    """Inductor seen through routes.

    Args:
        options: All optional. `device`: `cpu` or `cuda`; the GPU where there is one. `index`:
            CUDA device number. `threads`: threads of the code on a CPU, 1 unless given. `wrapper`:
            optimisation level of the C++ code that calls the kernels (`O1` on a CPU as in PyTorch,
            `O0` on a GPU, where a CUDA graph replaces it and only its compile time is left).
            `search`: `bounded` or `full` lists of configurations where matrix products are
            autotuned. `packages`: `take` a package that waits in the work folder once, or `keep`
            it there, and what is built, for the next build of the same route. `knobs`: names of
            the knobs to keep in the catalog, separated by commas.

    Raises:
        InputError: An option that does not exist or cannot be used.
        MissingExtraError: torch is not installed.
    """

    name = "inductor"

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        given = dict(options or {})
        for key, value in given.items():
            _check(key, value)
        try:
            import torch
        except ImportError as error:
            raise MissingExtraError(
                f"the backend inductor needs PyTorch ({error}); pip install 'routepilot[inductor]'"
            ) from None
        if "aoti_compile_and_package" not in dir(torch._inductor):
            raise MissingExtraError(
                f"torch {torch.__version__} cannot compile ahead of time; install 2.6 or newer"
            )
        self._torch = torch
        self.device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise MachineError("PyTorch sees no NVIDIA GPU here; give the option device=cpu")
        self._index, self._threads = int(given.get("index", "0")), int(given.get("threads", "1"))
        self._wrapper = given.get("wrapper", "O1" if self.device == "cpu" else "O0")
        self._search, self._keep = given.get("search", "bounded"), given.get("packages") == "keep"
        self._only = tuple(
            f"-{n.strip().lstrip('-')}" for n in given.get("knobs", "").split(",") if n
        )

    @cached_property
    def _gpu(self) -> Gpu | None:
        if self.device == "cpu":
            return None
        from routepilot.env.gpu_timing import Gpu

        found = Gpu(self._index)
        self._torch.cuda.set_device(self._index)
        return found

    @cached_property
    def _catalog(self) -> Catalog:
        import torch._inductor.config as config

        version = str(self._torch.__version__)
        whole = make_catalog(config, version, self.device)
        for name in self._only:
            _ = whole[name]  # raises in the catalog's words
        return make_catalog(config, version, self.device, self._only) if self._only else whole

    def catalog(self) -> Catalog:
        """The knobs of the installed Inductor; see `base.Backend`."""
        return self._catalog

    def target(self) -> Target:
        """Device, versions and settings; see `base.Backend`."""
        torch = self._torch
        versions = {"torch": str(torch.__version__)}
        settings = {"search": self._search, "wrapper": self._wrapper}
        if self.device == "cpu":
            device = processor()
            versions["compiler"] = _cxx_version()
            settings["threads"] = str(self._threads)
        else:
            device = str(torch.cuda.get_device_name(self._index))
            versions["cuda"] = str(torch.version.cuda)
            versions["triton"] = _version("triton")
        return Target(self.name, device, versions, self.catalog().key, settings)

    def warm(self) -> None:
        """Import the compiler's settings and open the GPU; see `base.Warming`."""
        self.catalog()
        if self._gpu is not None:
            self._torch.zeros(1, device="cuda")

    def alone(self) -> AbstractContextManager[None]:
        """The GPU for one measurement as a whole; nothing to hold on a CPU."""
        return nullcontext() if self._gpu is None else self._gpu.lock()

    def request(self, model: Model, route: Route, benchmark_lock: str = "") -> Request:
        """What a build child is asked for a route.

        Raises:
            ModelError: The model has no PyTorch program.
        """
        if model.program is None:
            raise ModelError(
                f"model {model.name} has no PyTorch program, which inductor compiles; give a .pt2"
                " file of torch.export.save, or a corpus model that is defined in PyTorch"
            )
        return Request(
            str(model.program.absolute()),
            model.fingerprint,
            self.device,
            self._index,
            self._threads,
            route.values,
            self._full(route),
            self._wrapper,
            self._search,
            benchmark_lock,
        )

    def _full(self, route: Route) -> dict[str, str]:
        """Every knob's value; knobs left out of the catalog are at their defaults."""
        import torch._inductor.config as config

        whole = make_catalog(config, str(self._torch.__version__), self.device)
        return whole.full_settings(route)

    def build(self, model: Model, route: Route, workdir: Path) -> Engine | BuildFailure:
        """Take the package that waits, or compile in a child; see `base.Backend`."""
        objection = self.catalog().objection(route)
        if objection is not None:
            return BuildFailure(Status.REFUSED, objection)
        request = self.request(model, route)
        package = take_ready(workdir, route, keep=self._keep)
        if package is None:
            built = start_build(request, workdir).result()
            if isinstance(built, BuildFailure):
                return built
            package = self._kept(built, workdir, route) if self._keep else built
        try:
            return InductorEngine(
                package, model, request.settings, self._threads, self._gpu, keep=self._keep
            )
        except RuntimeError as error:  # the package does not load
            shutil.rmtree(package.folder, ignore_errors=True)
            return BuildFailure(
                Status.BUILD_FAILED, one_line(f"the package does not load: {error}")
            )

    def _kept(self, built: Package, workdir: Path, route: Route) -> Package:
        put_ready(built, workdir, route)
        shutil.rmtree(built.folder, ignore_errors=True)
        kept = take_ready(workdir, route, keep=True)
        if kept is None:
            raise MachineError(f"the package of {route} cannot be kept in {workdir}")
        return kept


def _check(key: str, value: str) -> None:
    if key not in OPTIONS:
        raise InputError(
            f"backend option {key!r} does not exist; inductor takes: {', '.join(OPTIONS)}"
        )
    words = OPTIONS[key]
    if words and value not in words:
        raise InputError(
            f"backend option {key}={value!r} is not allowed; allowed: {', '.join(words)}"
        )
    least = {"threads": 1, "index": 0}.get(key)
    if least is not None and not (value.isascii() and value.isdigit() and int(value) >= least):
        raise InputError(
            f"backend option {key}={value!r} is not allowed; give a number of {least} or more"
        )


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _cxx_version() -> str:
    """First line of what the C++ compiler that Inductor calls says of itself."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        said = subprocess.run(
            [get_cpp_compiler(), "--version"], capture_output=True, text=True, timeout=30
        ).stdout
    except Exception as error:  # whatever finds no compiler
        raise MachineError(
            f"Inductor finds no C++ compiler ({one_line(str(error))}); install g++ or set CXX"
        ) from None
    return one_line(said.splitlines()[0]) if said else "unknown"
