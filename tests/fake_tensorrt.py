"""A fake of TensorRT's Python module. No compiler, no CUDA: a fake.

Behaves as far as it is published: `build_route` drops what its setter answers, `all_build_routes`
is JSON text filled by `create_builder_config`, a failed build gives None and says why through the
logger alone, a build in effect logs that it uses its route. A value can be made to fail, or to do
nothing. "Engines" are in `fake_tensorrt_engine.py`, whole backends in `fake_tensorrt_backends.py`.

`install(monkeypatch, ...)` puts it in the place of the module `tensorrt` and of `Gpu`.
"""

from __future__ import annotations

import atexit
import enum
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu, FakeTimer
from fake_tensorrt_engine import Engine

ROUTES = {
    "tuner_version": "2.19.45",
    "tuner_options": [
        {"option": o, "allowed_values": f"{o}={a}", "default_value": d, "help": h}
        for o, a, d, h in (
            ("-conv_lowering", "[on|off]", "on", "conv-lowering phase"),
            ("-conv_lowering:part", "[on|off]", "off", "part of it"),
            ("-kgen:tiling", "[0|1|2]", "2", "tiling"),
            ("-force_conv_nhwc", "[on|off]", "off", ""),
            ("-force_conv_nchw", "[on|off]", "off", ""),
            ("-cask_fusion:num_tactics", "int", "20", "tactics"),
            ("-peep:max", "[1|2|...]", "0", "peephole cap"),
            ("-cask:fp16_acc", "[on|off]", "on", "accumulate in FP16"),
            ("-mha_fusion:v2:causal_mask", "[on|off]", "off", "assert a causal mask"),
        )
    ],
}


class Log:
    class Severity(enum.Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3


class ILogger:
    def log(self, severity: Any, msg: str) -> None: ...


class IErrorRecorder: ...


class IProgressMonitor: ...


class IProfiler:
    def report_layer_time(self, layer_name: str, ms: float) -> None: ...


#: How a timing cache of this "device" begins; the keys it holds follow, one a line.
CACHE = b"cache of this device"


class ITimingCache:
    def __init__(self, data: bytes) -> None:
        self.given, self.data = data, data or CACHE
        self.keys = set(self.data.decode().splitlines()[1:])

    def serialize(self) -> bytes:
        return b"\n".join([CACHE, *(key.encode() for key in sorted(self.keys))])


class IBuilderConfig:
    def __init__(self, module: FakeTensorRT) -> None:
        self._module, self._route, self._cache = module, "", ITimingCache(b"")
        self.flags = {"TF32"}
        self.given = b""
        self.pools: dict[Any, int] = {}
        self.profiles: list[Any] = []
        self.progress_monitor: Any = None
        self.profiling_verbosity = "LAYER_NAMES_ONLY"

    @property
    def build_route(self) -> str:
        return self._route

    @build_route.setter
    def build_route(self, text: str) -> None:
        options = {o["option"]: o for o in self._module.routes["tuner_options"]}
        for token in text.split():
            if token.partition("=")[0] not in options or token in self._module.dropped:
                return  # false in C++, nothing in Python
        self._route = text

    @property
    def all_build_routes(self) -> str:
        return json.dumps(self._module.routes) if self._module.routes["tuner_options"] else ""

    def set_flag(self, flag: str) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: str) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.pools[pool] = size

    def create_timing_cache(self, data: bytes) -> ITimingCache | None:
        return ITimingCache(data)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._cache, self.given = cache, cache.given
        return cache.data.startswith(CACHE) or ignore_mismatch

    def get_timing_cache(self) -> ITimingCache:
        return self._cache

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile)
        return 0


class FakeTensorRT(types.ModuleType):
    """The module.

    Attributes:
        routes: What `all_build_routes` lists; emptied it is a Windows build.
        dropped: Tokens the setter does not take, in silence.
        broken: Tokens with which no engine can be built -> what the log says.
        recorded: The same, but only the error recorder is told.
        inert: Tokens that change nothing.
        keyed_by_route: Whether the timing cache tells routes apart, which is not published.
        timed: How many timings were taken, and not found in a cache.
        deadly: Tokens with which a build never ends (`hang`), or the system ends the process as it
            does for want of memory (`kill`).
        seconds: How long a build takes.
        silent: Do not log that a route is in use.
        used: The route that the log says is in use, where it is not the one that was set.
        built: Configurations that were built, in order.
        delays: Token -> milliseconds an inference takes on top; "" for routes with none of them.
    """

    ILogger, IErrorRecorder, IProgressMonitor = ILogger, IErrorRecorder, IProgressMonitor
    IProfiler = IProfiler
    ProfilingVerbosity = types.SimpleNamespace(DETAILED="DETAILED")
    LayerInformationFormat = types.SimpleNamespace(JSON="JSON")
    BuilderFlag = types.SimpleNamespace(
        TF32="TF32",
        SPARSE_WEIGHTS="SPARSE_WEIGHTS",
        EDITABLE_TIMING_CACHE="EDITABLE_TIMING_CACHE",
        ERROR_ON_TIMING_CACHE_MISS="ERROR_ON_TIMING_CACHE_MISS",
    )
    TilingOptimizationLevel = types.SimpleNamespace(NONE=0, FAST=1, MODERATE=2, FULL=3)
    MemoryPoolType = types.SimpleNamespace(
        WORKSPACE="WORKSPACE", TACTIC_SHARED_MEMORY="TACTIC_SHARED_MEMORY"
    )
    NetworkDefinitionCreationFlag = types.SimpleNamespace(STRONGLY_TYPED=0)
    TensorIOMode = types.SimpleNamespace(INPUT="in", OUTPUT="out")

    def __init__(self, version: str = "11.1.0.106") -> None:
        super().__init__("tensorrt")
        self.__version__ = version
        self.routes: dict[str, Any] = json.loads(json.dumps(ROUTES))
        self.dropped: set[str] = set()
        self.broken: dict[str, str] = {}
        self.recorded: dict[str, str] = {}
        self.inert: set[str] = set()
        self.keyed_by_route, self.timed = False, 0
        self.deadly: dict[str, str] = {}
        self.seconds = 0.0
        self.silent, self.used = False, ""
        self.built: list[IBuilderConfig] = []
        self.delays: dict[str, float] = {}
        old = tuple(map(int, version.split(".")[:2])) < (11, 1)
        self.IBuilderConfig = _WithoutRoutes if old else IBuilderConfig

    def Builder(self, logger: ILogger) -> Builder:  # noqa: N802
        return Builder(self, logger)

    def OnnxParser(self, network: Any, logger: ILogger) -> Parser:  # noqa: N802
        return Parser(network, logger)

    def Runtime(self, logger: ILogger) -> Runtime:  # noqa: N802
        return Runtime(self, logger)

    @staticmethod
    def nptype(kind: np.dtype[Any]) -> np.dtype[Any]:
        return kind


class _WithoutRoutes:
    """The class before 11.1, which has neither property."""


class Tensor:
    def __init__(self, info: Any) -> None:
        self.name = info.name
        dims = info.type.tensor_type.shape.dim
        self.shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)


class NetworkDefinition:
    def __init__(self, flags: int) -> None:
        self.flags, self.name, self.path = flags, "", ""
        self.tensors: list[Tensor] = []

    @property
    def num_inputs(self) -> int:
        return len(self.tensors)

    def get_input(self, index: int) -> Tensor:
        return self.tensors[index]


class ParserError:
    def __init__(self, node: str, operator: str, text: str) -> None:
        self._node, self._operator, self._text = node, operator, text

    def node_name(self) -> str:
        return self._node

    def node_operator(self) -> str:
        return self._operator

    def desc(self) -> str:
        return self._text


class Parser:
    """Refuses every operator `If`, and bfloat16 casts, which ONNX Runtime cannot run here."""

    def __init__(self, network: NetworkDefinition, logger: ILogger) -> None:
        self._network, self._errors = network, []

    def parse_from_file(self, path: str) -> bool:
        import onnx

        graph = onnx.load(path, load_external_data=False).graph
        bad = [
            n
            for n in graph.node
            if n.op_type == "If" or any(a.i == onnx.TensorProto.BFLOAT16 for a in n.attribute)
        ]
        self._errors = [ParserError(n.name, n.op_type, "not\nsupported") for n in bad]
        self._network.path = path
        self._network.tensors = [Tensor(i) for i in graph.input]
        return not bad

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[Any, ...]] = {}

    def set_shape(self, name: str, low: Any, best: Any, high: Any) -> None:
        self.shapes[name] = (low, best, high)


class Builder:
    def __init__(self, module: FakeTensorRT, logger: ILogger) -> None:
        self._module, self._logger, self.error_recorder = module, logger, None

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self._module)

    def create_network(self, flags: int) -> NetworkDefinition:
        return NetworkDefinition(flags)

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(
        self, network: NetworkDefinition, config: IBuilderConfig
    ) -> bytes | None:
        self._module.built.append(config)
        tokens = config._route.split()
        if tokens and not self._module.silent:
            used = self._module.used or config._route
            text = f"[TuningBuildRoute] Using build route: {used}"
            self._logger.log(Log.Severity.INFO, text)
        end = time.monotonic() + self._module.seconds
        while time.monotonic() < end:
            time.sleep(0.005)
            monitor = config.progress_monitor
            if monitor is not None and not monitor.step_complete("build", 1):
                return None
        for token in tokens:
            if self._module.deadly.get(token) == "hang":
                time.sleep(600)
            if self._module.deadly.get(token) == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if token in self._module.broken:
                self._logger.log(Log.Severity.ERROR, self._module.broken[token])
                return None
            if token in self._module.recorded:
                assert self.error_recorder is not None
                self.error_recorder.report_error(4, self._module.recorded[token])
                return None
        if not self._timings_known(network, config, tokens):
            return None
        acting = sorted(set(tokens) - self._module.inert)
        levers = {
            n: str(v)
            for n, v in vars(config).items()
            if n.startswith(("builder_", "tiling_", "max_"))
        }
        plan = {"path": network.path, "route": acting, "levers": levers}
        of_timing = {"EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS"}
        plan |= {"flags": sorted(config.flags - of_timing), "verbosity": config.profiling_verbosity}
        return json.dumps(plan).encode()

    def _timings_known(
        self, network: NetworkDefinition, config: IBuilderConfig, tokens: list[str]
    ) -> bool:
        """Every operator is timed once; False for a miss where that is an error."""
        import onnx

        graph = onnx.load(network.path, load_external_data=False).graph
        route = " ".join(sorted(tokens)) if self._module.keyed_by_route else ""
        wanted = {f"{node.op_type} {route}".strip() for node in graph.node}
        missing = sorted(wanted - config._cache.keys)
        if missing and "ERROR_ON_TIMING_CACHE_MISS" in config.flags:
            self._logger.log(Log.Severity.ERROR, f"timing cache miss for {missing[0]}")
            return False
        self._module.timed += len(missing)
        config._cache.keys |= wanted
        return True


class Runtime:
    def __init__(self, module: FakeTensorRT, logger: ILogger) -> None:
        self._module, self._logger = module, logger

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        try:
            plan = json.loads(data)
            delays = self._module.delays
            found = [delays[token] for token in plan["route"] if token in delays]
            delay = min(found, default=delays.get("", 0.0))
            return Engine(plan["path"], delay, plan["verbosity"], plan["route"])
        except (ValueError, KeyError):
            self._logger.log(Log.Severity.ERROR, "Magic tag does not match")
            return None


def install(monkeypatch: pytest.MonkeyPatch, version: str = "11.1.0.106") -> FakeTensorRT:
    """Put the fake in place of `tensorrt` and of the GPU; returns it, to be set up further."""
    from routepilot.env import ours
    from routepilot.env.backends import tensorrt, tensorrt_engine

    module = FakeTensorRT(version)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(tensorrt, "Gpu", FakeGpu)
    monkeypatch.setattr(tensorrt_engine, "Gpu", FakeGpu)
    monkeypatch.setattr(tensorrt_engine, "GpuTimer", FakeTimer)
    plans = Path(tempfile.mkdtemp(prefix="routepilot-plans-"))
    atexit.register(shutil.rmtree, plans, ignore_errors=True)
    monkeypatch.setattr(ours, "_folder", lambda kind: plans / kind)
    return module


def if_model(path: Path) -> Path:
    """A model whose operator `If` the fake parser refuses."""
    from onnx import TensorProto, helper, save

    def branch(name: str) -> object:
        nodes = [helper.make_node("Identity", ["x"], [name])]
        output = helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])
        return helper.make_graph(nodes, name, [], [output])

    graph = helper.make_graph(
        [
            helper.make_node(
                "If", ["c"], ["y"], "fork", then_branch=branch("a"), else_branch=branch("b")
            )
        ],
        "if",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
