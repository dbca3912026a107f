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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from routepilot.env.backends.base import BuildFailure, Engine, Target
from routepilot.env.backends.cpu import read_failure
from routepilot.env.backends.recipes import Transformed
from routepilot.env.backends.tensorrt_catalog import (
    PRECISION_KNOB,
    RTX_LEVERS,
    is_build_route_knob,
    make_catalog,
    shipped_routes_json,
    unsafe_knobs,
)
from routepilot.env.backends.tensorrt_compiler import (
    LEVERS,
    Compiler,
    Network,
    Plan,
    Settings,
    find_capability,
    find_module,
    version_numbers,
)
from routepilot.env.backends.tensorrt_engine import TensorRtEngine
from routepilot.env.backends.tensorrt_options import (
    Channel,
    Plans,
    Quantizer,
    TensorRtOptions,
    TimingCache,
    read_options,
)
from routepilot.env.backends.tensorrt_precision import require_modelopt, variant
from routepilot.env.child import one_line
from routepilot.env.errors import InputError, MachineError, ModelError, RoutePilotError
from routepilot.env.gpu_timing import Gpu
from routepilot.env.outcomes import Status
from routepilot.env.plans import keep_plan, keep_source
from routepilot.env.routes import Catalog, Route

if TYPE_CHECKING:
    from routepilot.env.inert import Narrowed
    from routepilot.env.models import Model

#: Compute capability that TensorRT-RTX compiles for where there is no GPU and none is asked for.
RTX_CAPABILITY = "8.9"

#: The lever that the option `optimization_level` takes out of the catalog.
LEVEL = "-builder_optimization_level"

#: Beside every outcome of a route that went through the older door.
EXPERIMENTAL = "its flags went through __LUNOWUD, which is experimental"

#: Beside the default route of a replay, where the winner's timings say nothing of it.
TIMED_ANEW = "the timing cache lacks the default route, which was timed anew"

#: File of the timing cache that all trials of one model share.
CACHE_NAME = "timing.cache"


class TensorRtBackend:
    """TensorRT's builder seen through routes.

    Args:
        name: `tensorrt` or `tensorrt_rtx`.
        options: As `tensorrt_options.read_options`; all optional.

    Raises:
        InputError: An option that does not exist or cannot be used.
        MissingExtraError: The compiler's module is not installed.
    """

    def __init__(self, name: str, options: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.options = read_options(name, options or {})
        self._confirming = False
        self._trt = find_module(name)
        find_capability(self._trt, self.options.capability)  # refused here, before any work
        if self.options.quantizer is Quantizer.MODELOPT:
            require_modelopt()
        self._networks: dict[Path, Network] = {}
        self._compilers: dict[Path | None, Compiler] = {}

    @cached_property
    def _device(self) -> Gpu | RoutePilotError:
        """The device, or why there is none."""
        try:
            return Gpu(self.options.device)
        except (MachineError, InputError) as error:
            return error

    @property
    def _gpu(self) -> Gpu | None:
        """The device, or None where TensorRT-RTX compiles without one."""
        if not isinstance(self._device, RoutePilotError):
            return self._device
        if self.name == "tensorrt_rtx":
            return None
        raise self._without_device(self._device)

    def _without_device(self, why: RoutePilotError) -> RoutePilotError:
        verb = "builds here but cannot time" if self.name == "tensorrt_rtx" else "cannot build"
        return type(why)(
            f"{self.name} {verb} without an NVIDIA GPU: {why}. What needs none: `routepilot live"
            " MODEL` (which knobs can matter), `routepilot doctor --backend tensorrt_rtx`, and"
            " tuning with --backend cpu"
        )

    @property
    def has_gpu(self) -> bool:
        """True where engines can be run and timed."""
        return not isinstance(self._device, RoutePilotError)

    def gpu(self) -> Gpu:
        """The device that engines run on.

        Raises:
            RoutePilotError: There is none; the message says why.
        """
        if isinstance(self._device, RoutePilotError):
            raise self._device
        return self._device

    @cached_property
    def capability(self) -> str:
        """Compute capability to compile for; empty for the GPU at hand."""
        if self.name == "tensorrt":
            return ""
        return self.options.capability or ("" if self._gpu is not None else RTX_CAPABILITY)

    def confirming(self) -> None:
        """The builds that follow are finalists'; see `base.Confirming`."""
        self._confirming = True

    def require_device(self) -> None:
        """Engines must be run, not only built; see `base.NeedsDevice`."""
        if isinstance(self._device, RoutePilotError):
            raise self._without_device(self._device)

    def _compiler(self, cache: Path | None) -> Compiler:
        if cache not in self._compilers:
            if self.name == "tensorrt":
                _ = self._gpu  # a missing GPU is told better here than by the builder
            settings = Settings(
                compute_capability=self.capability,
                workspace_bytes=self.options.workspace_mib << 20,
                tactic_shared_bytes=self.options.tactic_shared_kib << 10,
                avg_timing_iterations=self.options.avg_timing,
                deadline_seconds=float(self.options.deadline),
                timing_cache=cache,
                require_cache=self.options.timing_cache is TimingCache.REPLAY,
            )
            self._compilers[cache] = Compiler(self._trt, settings)
        return self._compilers[cache]

    @cached_property
    def _routes(self) -> str:
        """JSON of the build routes: this machine's, or the shipped list where there is no other."""
        if self.name == "tensorrt_rtx":
            return shipped_routes_json()
        version = str(self._trt.__version__)
        routes = self._compiler(None).all_build_routes()
        if not routes.strip() and self.options.channel is Channel.LUNOWUD:
            # No list on this machine (before 11.1, or Windows): the shipped one stands in, and the
            # compiler refuses what it does not know.
            return shipped_routes_json()
        if not routes.strip() and version_numbers(version) >= (11, 1):
            raise InputError(
                f"TensorRT {version} lists no build routes here (Windows builds have no Global"
                " Performance Tuner); use Linux, or channel=lunowud (experimental)"
            )
        return routes

    @cached_property
    def _catalog(self) -> Catalog:
        levers = set(RTX_LEVERS if self.name == "tensorrt_rtx" else LEVERS)
        if self.options.optimization_level >= 0:
            levers.discard(LEVEL)
        return make_catalog(
            self.name,
            str(self._trt.__version__),
            self._routes,
            levers=levers,
            unsafe=self.options.unsafe,
            fp8=self.options.quantizer is Quantizer.MODELOPT,
        )

    def left_out(self) -> dict[str, str]:
        """Knobs that can break the mathematics, and how; see `base.LeavesOut`."""
        return {} if self.options.unsafe else unsafe_knobs(self._routes)

    def catalog(self) -> Catalog:
        """The knobs; see `base.Backend`."""
        return self._catalog

    def narrowed(self, model: Model) -> Narrowed:
        """The catalog without what is proved inert; see `base.Narrows`.

        A sweep of `routepilot live` counts for TensorRT-RTX alone, of this very version and without
        limits of memory pools, as the sweep was made; otherwise it is a hint, since another
        compiler, or other settings, prove nothing about this one.
        """
        from routepilot.env.inert import narrow
        from routepilot.env.liveness import recalled

        if self.name == "tensorrt":
            return narrow(self.catalog(), model, None, hint=recalled(model))
        capability = self.capability or (self._gpu.capability if self._gpu else "")
        swept = recalled(model, compute_capability=capability)
        if swept is not None and swept.compiler != f"TensorRT-RTX {self._trt.__version__}":
            swept = None  # another one is installed beside the one that is loaded
        alike = self.options.building() == TensorRtOptions().building()
        proof, hint = (swept, None) if alike else (None, swept)
        return narrow(self.catalog(), model, proof, hint, own=True)

    def target(self) -> Target:
        """GPU, versions and settings; see `base.Backend`."""
        versions = {self._trt.__name__.removesuffix("_bindings"): str(self._trt.__version__)}
        device = f"compute capability {self.capability}, no GPU"
        if self._gpu is not None:
            device = self._gpu.name
            versions["cuda driver"] = self._gpu.driver
        settings = self.options.measuring()
        return Target(self.name, device, versions, self.catalog().key, settings)

    def alone(self) -> AbstractContextManager[None]:
        """Have the GPU alone for as long as a measurement takes; builds elsewhere wait."""
        return self._gpu.lock() if self._gpu is not None else nullcontext()

    def build(self, model: Model, route: Route, workdir: Path) -> Engine | BuildFailure:
        """Make the precision variant, parse, set the route, build; see `base.Backend`."""
        catalog = self.catalog()
        objection = catalog.objection(route)
        if objection is not None:
            return BuildFailure(Status.REFUSED, objection)
        precision = catalog.full_settings(route)[PRECISION_KNOB.name]
        source = self._source(model, precision, workdir)
        if isinstance(source, BuildFailure):
            return source
        start = time.perf_counter()
        if self.options.plans is Plans.ALL:
            keep_source(source.path, precision, workdir)
        compiler = self._compiler(self._cache_file(workdir))
        try:
            network = self._network(compiler, source.path, model)
        except ModelError as error:
            return BuildFailure(Status.BUILD_FAILED, one_line(str(error)))
        flags = " ".join(f"{n}={v}" for n, v in route.settings if is_build_route_knob(n))
        channel = "flags" if self.options.channel is Channel.LUNOWUD else "build_route"
        levers = {n: v for n, v in route.settings if n in LEVERS}
        if self.options.optimization_level >= 0:
            levers[LEVEL] = str(self.options.optimization_level)

        def compile_plan(*, detailed: bool, lenient: bool = False) -> Plan | BuildFailure:
            # Tactics are timed, and timings must not be disturbed.
            with self.alone():
                return compiler.compile(
                    network, levers=levers, detailed=detailed, lenient=lenient, **{channel: flags}
                )

        plan = compile_plan(detailed=False)
        replayed = self.options.timing_cache is TimingCache.REPLAY
        if isinstance(plan, BuildFailure) and replayed and route.is_default:
            # A winner's timings may say nothing of the default, which it is measured against.
            again = compile_plan(detailed=False, lenient=True)
            if isinstance(again, Plan):
                plan = replace(again, warnings=(*again.warnings, TIMED_ANEW))
        if isinstance(plan, BuildFailure):
            return BuildFailure(plan.status, one_line(plan.reason))
        if flags and channel == "flags":
            plan = replace(plan, warnings=(*plan.warnings, EXPERIMENTAL))
        if self.options.plans is Plans.ALL:
            keep_plan(plan.data, plan.hash, workdir)
        seconds = source.seconds + time.perf_counter() - start
        detailed = partial(compile_plan, detailed=True)
        return TensorRtEngine(self._trt, plan, model, self._gpu, seconds, source.path, detailed)

    def _source(self, model: Model, precision: str, workdir: Path) -> Transformed | BuildFailure:
        scratch = workdir / ".precision"
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            return variant(model, precision, workdir, scratch, self.options.quantizer)
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
        kind = self.options.timing_cache
        fresh = kind is TimingCache.FRESH or (kind is TimingCache.SHARED and self._confirming)
        if self.name == "tensorrt_rtx" or fresh:
            return None
        return Path(self.options.cache_file) if self.options.cache_file else workdir / CACHE_NAME
