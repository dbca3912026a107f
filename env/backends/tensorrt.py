"""TensorRT and TensorRT-RTX behind the one protocol of `base.py`.

Owns the backend: its options, its target, how a route splits into a precision variant, builder
levers and compiler flags, and which plans may be loaded. The catalog is in `tensorrt_catalog.py`,
a single compile in `tensorrt_compiler.py`, a running engine in `tensorrt_engine.py`.

TensorRT-RTX has no list of build routes: its routes go through the environment variable
`__LUNOWUD`, and its compiler needs no GPU when a compute capability is given.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from routepilot.env.backends.base import BuildFailure, Engine, Target
from routepilot.env.backends.cpu import read_failure
from routepilot.env.backends.recipes import Transformed
from routepilot.env.backends.tensorrt_catalog import (
    RTX_LEVERS,
    is_build_route_knob,
    make_catalog,
    shipped_routes_json,
)
from routepilot.env.backends.tensorrt_compiler import (
    LEVERS,
    Compiler,
    Network,
    Settings,
    find_module,
    version_numbers,
)
from routepilot.env.backends.tensorrt_engine import TensorRtEngine
from routepilot.env.backends.tensorrt_precision import variant
from routepilot.env.child import one_line
from routepilot.env.errors import InputError, MachineError, ModelError
from routepilot.env.gpu_timing import Gpu
from routepilot.env.outcomes import Status
from routepilot.env.routes import Catalog, Route

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: Options of the backends: name -> allowed words; empty for a number or a text.
OPTIONS: dict[str, tuple[str, ...]] = {
    "channel": ("build_route", "lunowud"),
    "unsafe": ("off", "on"),
    "timing_cache": ("shared", "fresh", "replay"),
    "capability": (),
    "device": (),
    "workspace_mib": (),
    "avg_timing": (),
    "deadline": (),
    "threads": (),
}

#: Compute capability that TensorRT-RTX compiles for where there is no GPU and none is asked for.
RTX_CAPABILITY = "8.9"

#: Variant of the timing cache's file that all trials of one model share.
CACHE_NAME = "timing.cache"


class TensorRtBackend:
    """TensorRT's builder seen through routes.

    Args:
        name: `tensorrt` or `tensorrt_rtx`.
        options: All optional. `channel`: `build_route` (TensorRT's own, >= 11.1) or `lunowud` (the
            environment variable, experimental; the only one of TensorRT-RTX). `unsafe=on` takes in
            knobs that can break the mathematics. `timing_cache`: `shared` by all builds of a work
            folder, `fresh` for each build (for finalists), or `replay` (fail rather than time
            anew). `capability`: compute capability for TensorRT-RTX, e.g. `8.9`. `device`: CUDA
            device number. `workspace_mib`: limit of the workspace. `avg_timing`: timings averaged
            for a tactic. `deadline`: seconds after which a build is cancelled. `threads` is taken
            and ignored, since timing is on the GPU.

    Raises:
        InputError: An option that does not exist or cannot be used.
        MissingExtraError: The compiler's module is not installed.
    """

    def __init__(self, name: str, options: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._options = check_options(name, options or {})
        self._trt = find_module(name)
        self._networks: dict[Path, Network] = {}
        self._compilers: dict[Path | None, Compiler] = {}

    @cached_property
    def _gpu(self) -> Gpu | None:
        """The device, or None where TensorRT-RTX compiles without one."""
        try:
            return Gpu(int(self._options["device"]))
        except (MachineError, InputError):
            if self.name == "tensorrt_rtx":
                return None
            raise

    @property
    def has_gpu(self) -> bool:
        """True where engines can be run and timed."""
        return self._gpu is not None

    @cached_property
    def capability(self) -> str:
        """Compute capability to compile for; empty for the GPU at hand."""
        if self.name == "tensorrt":
            return ""
        return self._options["capability"] or ("" if self._gpu is not None else RTX_CAPABILITY)

    def _compiler(self, cache: Path | None) -> Compiler:
        if cache not in self._compilers:
            if self.name == "tensorrt":
                _ = self._gpu  # a missing GPU is told better here than by the builder
            settings = Settings(
                compute_capability=self.capability,
                workspace_bytes=int(self._options["workspace_mib"] or 0) << 20,
                avg_timing_iterations=int(self._options["avg_timing"] or 0),
                deadline_seconds=float(self._options["deadline"] or 0),
                timing_cache=cache,
                require_cache=self._options["timing_cache"] == "replay",
            )
            self._compilers[cache] = Compiler(self._trt, settings)
        return self._compilers[cache]

    @cached_property
    def _catalog(self) -> Catalog:
        version = str(self._trt.__version__)
        unsafe = self._options["unsafe"] == "on"
        if self.name == "tensorrt_rtx":
            return make_catalog(
                self.name, version, shipped_routes_json(), levers=RTX_LEVERS, unsafe=unsafe
            )
        routes = self._compiler(None).all_build_routes()
        if not routes.strip() and self._options["channel"] == "lunowud":
            # No list on this machine (before 11.1, or Windows): the shipped one stands in, and the
            # compiler refuses what it does not know.
            routes = shipped_routes_json()
        if not routes.strip() and version_numbers(version) >= (11, 1):
            raise InputError(
                f"TensorRT {version} lists no build routes here (Windows builds have no Global"
                " Performance Tuner); use Linux, or channel=lunowud (experimental)"
            )
        return make_catalog(self.name, version, routes, unsafe=unsafe)

    def catalog(self) -> Catalog:
        """The knobs; see `base.Backend`."""
        return self._catalog

    def target(self) -> Target:
        """GPU, versions and settings; see `base.Backend`."""
        versions = {self._trt.__name__.removesuffix("_bindings"): str(self._trt.__version__)}
        device = f"compute capability {self.capability}, no GPU"
        if self._gpu is not None:
            device = self._gpu.name
            versions["cuda driver"] = self._gpu.driver
        kept = ("channel", "capability", "workspace_mib", "avg_timing", "timing_cache")
        settings = {k: self._options[k] for k in kept if self._options[k]}
        return Target(self.name, device, versions, self.catalog().key, settings)

    def build(self, model: Model, route: Route, workdir: Path) -> Engine | BuildFailure:
        """Make the precision variant, parse, set the route, build; see `base.Backend`."""
        catalog = self.catalog()
        objection = catalog.objection(route)
        if objection is not None:
            return BuildFailure(Status.REFUSED, objection)
        source = self._source(model, catalog.full_settings(route)["-precision"], workdir)
        if isinstance(source, BuildFailure):
            return source
        start = time.perf_counter()
        compiler = self._compiler(self._cache_file(workdir))
        try:
            network = self._network(compiler, source.path, model)
        except ModelError as error:
            return BuildFailure(Status.BUILD_FAILED, one_line(str(error)))
        flags = " ".join(f"{n}={v}" for n, v in route.settings if is_build_route_knob(n))
        channel = "flags" if self._options["channel"] == "lunowud" else "build_route"
        levers = {n: v for n, v in route.settings if n in LEVERS}
        if self._gpu is None:
            plan = compiler.compile(network, levers=levers, **{channel: flags})
        else:
            with self._gpu.lock():  # tactics are timed, and timings must not be disturbed
                plan = compiler.compile(network, levers=levers, **{channel: flags})
        if isinstance(plan, BuildFailure):
            return BuildFailure(plan.status, one_line(plan.reason))
        seconds = source.seconds + time.perf_counter() - start
        return TensorRtEngine(self._trt, plan, model, self._gpu, seconds)

    def _source(self, model: Model, precision: str, workdir: Path) -> Transformed | BuildFailure:
        scratch = workdir / ".precision"
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            return variant(model, precision, workdir, scratch)
        except MachineError:
            raise
        except Exception as error:  # the tools raise whatever they like
            return read_failure(error, (scratch, workdir, model.folder))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _network(self, compiler: Compiler, path: Path, model: Model) -> Network:
        found = self._networks.get(path)
        if found is None or found.compiler is not compiler:
            shapes = {spec.name: spec.shape for spec in model.inputs}
            found = self._networks[path] = compiler.parse(path, shapes)
        return found

    def _cache_file(self, workdir: Path) -> Path | None:
        """TensorRT-RTX ignores timing caches: it times nothing at build."""
        if self.name == "tensorrt_rtx" or self._options["timing_cache"] == "fresh":
            return None
        return workdir / CACHE_NAME


def check_options(name: str, options: Mapping[str, str]) -> dict[str, str]:
    """Every option of a backend with its value.

    Raises:
        InputError: An option that does not exist or cannot be used.
    """
    channel = "build_route" if name == "tensorrt" else "lunowud"
    full = {key: (words[0] if words else "") for key, words in OPTIONS.items()}
    full |= {"channel": channel, "device": "0"}
    for key, value in options.items():
        if key not in OPTIONS:
            raise InputError(
                f"backend option {key!r} does not exist; {name} takes: {', '.join(OPTIONS)}"
            )
        words = OPTIONS[key]
        if words and value not in words:
            raise InputError(
                f"backend option {key}={value!r} is not allowed; allowed: {', '.join(words)}"
            )
        if not words and key != "capability" and not _is_number(value):
            raise InputError(f"backend option {key}={value!r} is not allowed; give a number")
        full[key] = value
    if name == "tensorrt_rtx" and full["channel"] != "lunowud":
        raise InputError(
            "TensorRT-RTX has no build_route; its routes go through channel=lunowud, which is"
            " what it takes when the option is left out"
        )
    if name == "tensorrt" and full["capability"]:
        raise InputError("TensorRT builds for the GPU at hand; leave the option capability out")
    return full


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
