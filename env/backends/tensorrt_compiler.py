"""One compile by TensorRT or TensorRT-RTX in this process: parse, configure, build, hear it out.

Owns every call to the modules `tensorrt` and `tensorrt_rtx` that makes an engine's bytes. Knows
routes only as strings; no catalog, no model folder, no timing.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.tensorrt_ear import Ear, captured_output
from routepilot.env.drafts import whole_file
from routepilot.env.errors import InputError, MachineError, MissingExtraError, ModelError
from routepilot.env.outcomes import Status

#: Modules by backend name, in the order they are looked for. The RTX metapackage brings
#: `tensorrt_rtx`; its `-bindings` wheel alone brings only `tensorrt_rtx_bindings`.
MODULES: dict[str, tuple[str, ...]] = {
    "tensorrt": ("tensorrt",),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
EXTRAS = {"tensorrt": "tensorrt", "tensorrt_rtx": "rtx"}

#: Oldest versions whose API this file speaks: tiling levels and editable caches came with 10.8.
OLDEST = {"tensorrt": (10, 8), "tensorrt_rtx": (1, 0)}

#: The older door for compiler flags, read by the compiler at every build.
FLAGS_VARIABLE = "__LUNOWUD"

#: What the compiler prints for a flag it does not take.
REFUSAL = re.compile(r"invalid compilation option, ignored \((.*)\)")

#: What the library logs when it takes a build route (seen in TensorRT 11.1.0.106).
ROUTE_IN_USE = "[TuningBuildRoute] Using build route"

#: Name given to every network: unnamed ones are numbered, which changes the engine's bytes.
NETWORK_NAME = "model"


@dataclass(frozen=True)
class Plan:
    """What a compile gave.

    Attributes:
        data: Serialized engine.
        hash: SHA-256 of `data`.
        warnings: What the user should hear, e.g. that no line says that the route is in use.
        timing_cache: The timings behind it, with which a build can be replayed; empty where the
            compiler has none.
    """

    data: bytes
    hash: str
    warnings: tuple[str, ...] = ()
    timing_cache: bytes = b""


def find_module(backend: str) -> ModuleType:
    """The compiler's Python module.

    Raises:
        MissingExtraError: It is not installed or cannot be loaded.
        InputError: It is older than what is supported.
    """
    reasons = []
    for name in MODULES[backend]:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, AttributeError, FileNotFoundError) as error:
            reasons.append(f"{name}: {' '.join(str(error).split())}")
            continue
        version = str(getattr(module, "__version__", "0"))
        oldest = OLDEST[backend]
        if version_numbers(version) < oldest:
            raise InputError(
                f"{name} {version} is too old; supported is {'.'.join(map(str, oldest))} and newer"
                " (build routes need TensorRT 11.1); upgrade it"
            )
        return module
    raise MissingExtraError(
        f"the backend {backend} needs the module {MODULES[backend][0]}, which cannot be loaded"
        f" ({'; '.join(reasons)}); install it with: pip install 'routepilot[{EXTRAS[backend]}]'"
    )


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version string."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


def find_capability(trt: Any, wanted: str) -> Any:
    """The compiler's own word for a compute capability such as `8.9`; None for none.

    Raises:
        InputError: It is not one of the compiler's.
    """
    known = getattr(trt, "ComputeCapability", None)
    if not wanted:
        return None
    name = "SM" + wanted.replace(".", "")
    members = {} if known is None else known.__members__
    if name not in members:
        numbers = [n[2:-1] + "." + n[-1] for n in members if n.startswith("SM")]
        raise InputError(
            f"compute capability {wanted!r} is not one {trt.__name__} compiles for;"
            f" allowed: {', '.join(numbers) or 'only the GPU at hand (leave it out)'}"
        )
    return members[name]


def _flag(name: str) -> Callable[[Any, Any, str], None]:
    def apply(trt: Any, config: Any, value: str) -> None:
        flag = getattr(trt.BuilderFlag, name)
        (config.set_flag if value == "on" else config.clear_flag)(flag)

    return apply


def _number(name: str) -> Callable[[Any, Any, str], None]:
    def apply(trt: Any, config: Any, value: str) -> None:
        if value != "auto":
            setattr(config, name, int(value))

    return apply


def _tiling(trt: Any, config: Any, value: str) -> None:
    config.tiling_optimization_level = getattr(trt.TilingOptimizationLevel, value.upper())


#: How each lever of `tensorrt_catalog.LEVER_KNOBS` is set on a builder configuration.
LEVERS: dict[str, Callable[[Any, Any, str], None]] = {
    "-builder_optimization_level": _number("builder_optimization_level"),
    "-tiling_optimization_level": _tiling,
    "-max_num_tactics": _number("max_num_tactics"),
    "-max_aux_streams": _number("max_aux_streams"),
    "-tf32": _flag("TF32"),
    "-sparse_weights": _flag("SPARSE_WEIGHTS"),
}


@dataclass(frozen=True)
class Settings:
    """What every build of one target shares.

    Attributes:
        compute_capability: e.g. `8.9`; TensorRT-RTX compiles for it without a GPU. Empty for the
            GPU at hand.
        workspace_bytes: Limit of the workspace pool; 0 leaves TensorRT's.
        tactic_shared_bytes: Limit of the pool of a tactic's shared memory; 0 leaves TensorRT's.
        avg_timing_iterations: Timings averaged for a tactic (TensorRT's own default is 1,
            trtexec's is 8); a measuring setting, not a knob.
        deadline_seconds: A build is cancelled after this long; 0 for no limit.
        timing_cache: File shared by the builds; None for a fresh private one each.
        require_cache: Fail at a tactic that is not in the cache, to replay a winner exactly.
    """

    compute_capability: str = ""
    workspace_bytes: int = 0
    tactic_shared_bytes: int = 0
    avg_timing_iterations: int = 0
    deadline_seconds: float = 0.0
    timing_cache: Path | None = None
    require_cache: bool = False


class Compiler:
    """One builder and its ear, for many builds.

    Args:
        trt: The module from `find_module`.
        settings: What the builds share.

    Raises:
        MachineError: No builder can be made (no GPU or driver, for TensorRT).
        InputError: The compute capability is not one of the compiler's.
    """

    def __init__(self, trt: Any, settings: Settings | None = None) -> None:
        self.trt, self.settings = trt, settings or Settings()
        self._capability = find_capability(trt, self.settings.compute_capability)
        self._ear = Ear(trt)
        try:
            self._builder = trt.Builder(self._ear.logger)
        except Exception as error:
            said = self._ear.errors() or " ".join(str(error).split())
            raise MachineError(
                f"{trt.__name__} {trt.__version__} cannot make a builder ({said}); it needs an"
                " NVIDIA GPU and a driver that fits: see `nvidia-smi`"
            ) from None

    def __del__(self) -> None:
        # The builder logs while it dies and does not keep its listeners alive.
        self._builder = None

    @property
    def version(self) -> str:
        """The compiler's version."""
        return str(self.trt.__version__)

    def all_build_routes(self) -> str:
        """JSON of the Global Performance Tuner's knobs; empty where there is no tuner."""
        if not hasattr(self.trt.IBuilderConfig, "all_build_routes"):
            return ""
        return str(self._builder.create_builder_config().all_build_routes or "")

    def parse(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Network:
        """Parse an ONNX file; its external weights lie beside it.

        Args:
            path: ONNX file.
            shapes: Shapes of the inputs, for those with dynamic dimensions.

        Raises:
            ModelError: The parser refuses; every error with node and operator is in the message.
        """
        self._ear.clear()
        flags = 0
        if self.trt.__name__ == "tensorrt" and version_numbers(self.version)[0] < 11:
            flags = 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = self._builder.create_network(flags)
        network.name = NETWORK_NAME
        parser = self.trt.OnnxParser(network, self._ear.logger)
        if not parser.parse_from_file(str(path)):
            found = [_parser_error(parser.get_error(i)) for i in range(parser.num_errors)]
            reason = "; ".join(found) or self._ear.errors() or "no reason given"
            raise ModelError(
                f"{self.trt.__name__} {self.version} cannot parse {path.name}: {reason}; replace"
                " these operators, or use another backend"
            )
        return Network(self, network, parser, dict(shapes))

    def compile(
        self,
        network: Network,
        *,
        build_route: str = "",
        flags: str = "",
        levers: Mapping[str, str] | None = None,
        detailed: bool = False,
        lenient: bool = False,
    ) -> Plan | BuildFailure:
        """Build a network once.

        Args:
            network: Parsed network; it can be built again and again with equal results.
            build_route: Tokens for `IBuilderConfig.build_route`.
            flags: Tokens for the environment variable `__LUNOWUD`; experimental.
            levers: Values of `LEVERS` that differ from their defaults.
            detailed: Let the engine tell its layers' kinds and tactics (`tensorrt_layers.py`).
            lenient: Time what the cache lacks, though the settings require it.

        Raises:
            InputError: Both channels are used at once.
        """
        if build_route and flags:
            raise InputError(
                "a route goes through build_route or through __LUNOWUD, not through both, since"
                " which one wins is not published; choose channel=build_route or channel=lunowud"
            )
        return self.compile_both(network, build_route, flags, levers or {}, detailed, lenient)

    def compile_both(
        self,
        network: Network,
        build_route: str,
        flags: str,
        levers: Mapping[str, str],
        detailed: bool = False,
        lenient: bool = False,
    ) -> Plan | BuildFailure:
        """`compile` that lets both channels through, for `doctor` to see which one wins."""
        self._ear.clear()
        config = self._builder.create_builder_config()
        if build_route:
            refusal = self._set_build_route(config, build_route)
            if refusal:
                return BuildFailure(Status.REFUSED, refusal)
        monitor = self._configure(config, network, levers)
        self._load_timing_cache(config, require=self.settings.require_cache and not lenient)
        if detailed:
            config.profiling_verbosity = self.trt.ProfilingVerbosity.DETAILED
        with _flags_set(flags), captured_output() as printed:
            # Only here: a network made under a recorder ends the process when it is freed
            # (TensorRT-RTX 1.7.1).
            self._builder.error_recorder = self._ear.recorder
            try:
                serialized = self._builder.build_serialized_network(network.definition, config)
            finally:
                self._builder.error_recorder = None
        refused = dict.fromkeys(m.group(1) for m in map(REFUSAL.search, printed) if m)
        if refused:
            reason = f"the compiler does not take {flags}: {'; '.join(refused)}"
            return BuildFailure(Status.REFUSED, reason)
        if serialized is None:
            return self._failure(printed, monitor)
        timings = self._save_timing_cache(config)
        data = bytes(serialized)
        warnings = self._doubts(build_route)
        return Plan(data, hashlib.sha256(data).hexdigest(), warnings, timings)

    def _doubts(self, route: str) -> tuple[str, ...]:
        """What the log leaves to doubt of a route's being in use."""
        if not route:
            return ()
        said = [
            text.partition(ROUTE_IN_USE)[2] for _, text in self._ear.lines if ROUTE_IN_USE in text
        ]
        if not said:
            return ("no log line says that the build route is in use",)
        used = said[-1].lstrip(": ").split()
        missing = [token for token in route.split() if token not in used]
        if missing:
            return (
                f"the log says that another build route is in use, without {' '.join(missing)}",
            )
        return ()

    def read_back(self, *routes: str) -> str:
        """What `build_route` reads after routes were set, in turn, on a fresh configuration."""
        config = self._builder.create_builder_config()
        for route in routes:
            config.build_route = route
        return str(config.build_route)

    def _set_build_route(self, config: Any, route: str) -> str:
        """Set, read back, compare: the setter neither raises nor returns. Empty when it took."""
        if not hasattr(self.trt.IBuilderConfig, "build_route"):
            return f"TensorRT {self.version} has no build_route; it came with TensorRT 11.1"
        config.build_route = route
        got = str(config.build_route)
        if got.split() == route.split():
            return ""
        said = self._ear.errors()
        return f"build_route reads back {got!r} after {route!r} was set" + (
            f"; the compiler says: {said}" if said else ""
        )

    def _configure(self, config: Any, network: Network, levers: Mapping[str, str]) -> Any:
        trt, settings = self.trt, self.settings
        if self._capability is not None:
            config.num_compute_capabilities = 1
            config.set_compute_capability(self._capability, 0)
        pools = {
            "WORKSPACE": settings.workspace_bytes,
            "TACTIC_SHARED_MEMORY": settings.tactic_shared_bytes,
        }
        for pool, size in pools.items():
            if size:
                config.set_memory_pool_limit(getattr(trt.MemoryPoolType, pool), size)
        if settings.avg_timing_iterations:
            config.avg_timing_iterations = settings.avg_timing_iterations
        for name, value in levers.items():
            LEVERS[name](trt, config, value)
        network.add_profile(self._builder, config)
        monitor = None
        if settings.deadline_seconds:
            monitor = _make_monitor(trt, settings.deadline_seconds)
            config.progress_monitor = monitor
        return monitor

    def _load_timing_cache(self, config: Any, *, require: bool) -> None:
        path = self.settings.timing_cache
        if not self._keeps_timings:
            return
        config.set_flag(self.trt.BuilderFlag.EDITABLE_TIMING_CACHE)
        if require:
            config.set_flag(self.trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS)
        data = path.read_bytes() if path is not None and path.is_file() else b""
        cache = config.create_timing_cache(data)
        if cache is None or not config.set_timing_cache(cache, False):
            raise InputError(
                f"the timing cache {path} does not fit this device or TensorRT {self.version};"
                " delete it or name another one"
            )

    def _save_timing_cache(self, config: Any) -> bytes:
        """Keep the timings for the builds that share them; returns them."""
        path = self.settings.timing_cache
        cache = config.get_timing_cache() if self._keeps_timings else None
        if cache is None:
            return b""
        data = bytes(cache.serialize())
        if path is not None and not self.settings.require_cache:
            with whole_file(path) as draft:
                draft.write_bytes(data)
        return data

    @property
    def _keeps_timings(self) -> bool:
        """TensorRT-RTX times nothing at build."""
        return str(self.trt.__name__) == "tensorrt"

    def _failure(self, printed: list[str], monitor: Any) -> BuildFailure:
        if monitor is not None and monitor.cancelled:
            seconds = self.settings.deadline_seconds
            return BuildFailure(Status.TIMED_OUT, f"the build was cancelled after {seconds:g} s")
        reason = self._ear.errors() or "; ".join(line for line in printed if line.strip())
        memory = "out of memory" in reason.lower() or "OutOfMemory" in reason
        status = Status.OUT_OF_MEMORY if memory else Status.BUILD_FAILED
        return BuildFailure(status, reason or "the compiler gave no engine and no reason")


@dataclass
class Network:
    """A parsed network.

    Attributes:
        compiler: Kept alive: a network that outlives its builder ends the process.
        definition: TensorRT's network.
        parser: Kept alive, since it owns the weights.
        shapes: Shapes for inputs with dynamic dimensions.
    """

    compiler: Compiler
    definition: Any
    parser: Any
    shapes: dict[str, tuple[int, ...]]

    def __del__(self) -> None:
        self.definition = None
        self.parser = None

    def add_profile(self, builder: Any, config: Any) -> None:
        """Fix dynamic inputs with a profile of the model's shapes.

        Raises:
            ModelError: A dynamic input has no shape.
        """
        inputs = [self.definition.get_input(i) for i in range(self.definition.num_inputs)]
        dynamic = [t for t in inputs if any(d < 0 for d in tuple(t.shape))]
        if not dynamic:
            return
        profile = builder.create_optimization_profile()
        for tensor in dynamic:
            shape = self.shapes.get(tensor.name)
            if shape is None:
                raise ModelError(
                    f"input {tensor.name} has dynamic dimensions {tuple(tensor.shape)} and no"
                    f" shape; give one, e.g. --shape {tensor.name}=1x3x224x224"
                )
            profile.set_shape(tensor.name, shape, shape, shape)
        config.add_optimization_profile(profile)


def _parser_error(error: Any) -> str:
    node, operator = error.node_name(), error.node_operator()
    place = f"node {node!r} ({operator}): " if node or operator else ""
    return place + " ".join(error.desc().split())


def _make_monitor(trt: Any, seconds: float) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.end = time.monotonic() + seconds
            self.cancelled = False

        def phase_start(self, *_: Any) -> None:
            pass

        def phase_finish(self, *_: Any) -> None:
            pass

        def step_complete(self, *_: Any) -> bool:
            self.cancelled = self.cancelled or time.monotonic() > self.end
            return not self.cancelled

    return Monitor()


@contextmanager
def _flags_set(flags: str) -> Iterator[None]:
    """`__LUNOWUD` is exactly `flags` inside the block, and unset where there are none."""
    before = os.environ.pop(FLAGS_VARIABLE, None)
    if flags:
        os.environ[FLAGS_VARIABLE] = flags
    try:
        yield
    finally:
        os.environ.pop(FLAGS_VARIABLE, None)
        if before is not None:
            os.environ[FLAGS_VARIABLE] = before
