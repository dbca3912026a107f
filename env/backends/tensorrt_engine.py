"""A TensorRT engine alive on the GPU: load, run, time, save.

Owns execution. Knows plans and models, no route and no builder. Nothing here touches the GPU
before the first `run` or `time`, so that TensorRT-RTX can build on a machine that has none.

A plan is executable code: `open_plan` loads one only if this installation made it, or the user
says that it is trusted (`env/plans.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.base import BuildFailure, Tensors
from routepilot.env.backends.layers import PROFILE_WARMUP, Layers
from routepilot.env.backends.tensorrt_compiler import Plan, find_module
from routepilot.env.backends.tensorrt_ear import Ear, captured_output
from routepilot.env.backends.tensorrt_layers import make_profiler, mean_times, read_layers
from routepilot.env.errors import MachineError
from routepilot.env.gpu_timing import CudaFault, Gpu, GpuTimer
from routepilot.env.plans import copy_onnx, read_plan, remember_plan

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: Most sets of input buffers that timed launches rotate over.
MOST_BUFFERS = 8

_LOAD = '''"""Load the engine beside this file and run it once."""

import sys
from pathlib import Path

import numpy as np

from routepilot.env.backends.tensorrt_engine import open_plan

here = Path(__file__).parent
# On another machine add --trust: a plan is code that runs, so know who built it.
trust = "--trust" in sys.argv
engine = open_plan(here / "engine.plan", {backend!r}, trust=trust, expected="{digest}")
with np.load(here / "inputs.npz") as inputs:
    for name, array in engine.run(dict(inputs)).items():
        print(name, array.shape, array.dtype)
'''


class Execution:
    """A deserialized engine with its context and buffers.

    Args:
        trt: The compiler's module.
        data: Serialized engine.
        gpu: The device.

    Raises:
        MachineError: TensorRT refuses the bytes; the message says why.
    """

    def __init__(self, trt: Any, data: bytes, gpu: Gpu) -> None:
        self._trt, self._gpu = trt, gpu
        self._ear = Ear(trt)
        self._runtime = trt.Runtime(self._ear.logger)
        with captured_output():
            self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise MachineError(
                f"{trt.__name__} {trt.__version__} does not load this engine on {gpu.name}:"
                f" {self._ear.errors() or 'no reason given'}; build it on this GPU with this"
                " version"
            )
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise CudaFault(f"no execution context: {self._ear.errors()}")
        self._stream = gpu.stream()
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        is_input = {n: self._engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT for n in names}
        self.inputs = [n for n in names if is_input[n]]
        self.outputs = [n for n in names if not is_input[n]]
        self._types = {n: np.dtype(trt.nptype(self._engine.get_tensor_dtype(n))) for n in names}
        self._buffers: dict[tuple[str, int], int] = {}
        self._results: dict[str, NDArray[np.generic]] = {}
        self._timer: GpuTimer | None = None

    def run(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """One inference; outputs are copies."""
        self._bind(inputs, 0)
        self._enqueue(self._stream)
        for name, array in self._results.items():
            self._gpu.download(array, self._buffers[name, 0], self._stream)
        self._gpu.wait(self._stream)
        return {name: array.copy() for name, array in self._results.items()}

    def time(self, inputs: Tensors, seconds: float) -> tuple[list[float], list[str]]:
        """Milliseconds of each timed inference, and what the reader should know."""
        with self._gpu.lock():
            if self._timer is None:
                self.run(inputs)
                launches = [self._launch(inputs, i) for i in range(self._rotations(inputs))]
                self._timer = GpuTimer(self._gpu, launches, self._stream)
            before = self._gpu.condition()
            times = self._timer.time(seconds)
            self._timer.watch(before, self._gpu.condition())
        return times, self._timer.notes

    def profile(self, inputs: Tensors, inferences: int) -> tuple[dict[str, float], float]:
        """Mean milliseconds of each layer over some inferences, and of an inference as a whole.

        Profiled launches run one by one, without a CUDA graph.
        """
        profiler = make_profiler(self._trt)
        with self._gpu.lock():
            self.run(inputs)
            self._context.profiler = profiler
            for number in range(inferences + PROFILE_WARMUP):
                if number == PROFILE_WARMUP:
                    start = time.perf_counter()
                self._enqueue(self._stream)
                self._gpu.wait(self._stream)
            seconds = time.perf_counter() - start
        return mean_times(profiler.rounds[-inferences:]), 1000 * seconds / inferences

    def information(self) -> str:
        """What the engine's inspector says of its layers, as JSON."""
        inspector = self._engine.create_engine_inspector()
        kind = self._trt.LayerInformationFormat.JSON
        return str(inspector.get_engine_information(kind))

    def _rotations(self, inputs: Tensors) -> int:
        """Enough sets of input buffers to outgrow the L2 cache, within reason."""
        size = max(1, sum(array.nbytes for array in inputs.values()))
        return min(MOST_BUFFERS, 1 + 2 * self._gpu.l2_bytes // size)

    def _launch(self, inputs: Tensors, index: int) -> Any:
        self._bind(inputs, index)
        self._gpu.wait(self._stream)

        def launch(stream: int) -> None:
            for name in self.inputs:
                self._context.set_tensor_address(name, self._buffers[name, index])
            self._enqueue(stream)

        return launch

    def _bind(self, inputs: Tensors, index: int) -> None:
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise CudaFault(f"the input set has no tensor {missing[0]}")
        held = {}
        for name in self.inputs:
            array = np.ascontiguousarray(inputs[name], dtype=self._types[name])
            held[name] = array
            self._context.set_input_shape(name, array.shape)
            self._address(name, index, array.nbytes)
            self._gpu.upload(self._buffers[name, index], array, self._stream)
        for name in self.outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            if any(d < 0 for d in shape):
                raise CudaFault(f"output {name} has a shape that depends on data: {shape}")
            result = self._results.get(name)
            if result is None or result.shape != shape:
                self._results[name] = np.empty(shape, self._types[name])
            self._address(name, 0, self._results[name].nbytes)
        self._gpu.wait(self._stream)  # `held` may go now

    def _address(self, name: str, index: int, size: int) -> None:
        if (name, index) not in self._buffers:
            self._buffers[name, index] = self._gpu.allocate(size)
        self._context.set_tensor_address(name, self._buffers[name, index])

    def _enqueue(self, stream: int) -> None:
        self._ear.clear()
        if not self._context.execute_async_v3(stream):
            raise CudaFault(f"the engine cannot be enqueued: {self._ear.errors()}")

    def close(self) -> None:
        """Free everything; idempotent."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        for address in self._buffers.values():
            self._gpu.free(address)
        self._buffers = {}
        self._context = self._engine = self._runtime = None


class TensorRtEngine:
    """A built engine; see `base.Engine`.

    Args:
        trt: The compiler's module.
        plan: What the compile gave.
        model: The model it was made of; lends an input set to `save`.
        gpu: The device; None where there is none.
        build_seconds: Seconds of the build, transforms included.
        source: ONNX file that was built.
        detailed: Builds the engine once more so that it tells its layers; None where it cannot.

    Attributes:
        notes: What the reader of its figures should know.
    """

    def __init__(
        self,
        trt: Any,
        plan: Plan,
        model: Model,
        gpu: Gpu | None,
        build_seconds: float,
        source: Path,
        detailed: Callable[[], Plan | BuildFailure] | None = None,
    ) -> None:
        self._trt, self._plan, self._model, self._gpu = trt, plan, model, gpu
        self._source, self._detailed = source, detailed
        self.hash, self.build_seconds = plan.hash, build_seconds
        self.notes = list(plan.warnings)
        self._execution: Execution | None = None

    def _alive(self) -> Execution:
        if self._execution is None:
            if self._gpu is None:
                raise MachineError(
                    "the engine is built, and running it needs an NVIDIA GPU, which this machine"
                    " does not have; `routepilot live` tells what needs none"
                )
            self._execution = Execution(self._trt, self._plan.data, self._gpu)
        return self._execution

    def run(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Outputs by name, copies; see `base.Engine`.

        Raises:
            MachineError: There is no GPU, or it cannot run this engine.
        """
        return self._alive().run(inputs)

    def time(self, inputs: Tensors, seconds: float) -> list[float]:
        """GPU milliseconds of each inference; see `base.Engine`."""
        times, notes = self._alive().time(inputs, seconds)
        self.notes = list(dict.fromkeys([*self.notes, *notes]))
        return times

    def quiesce(self) -> None:
        """Nothing to do: an idle engine leaves the GPU alone."""

    def layers(self, inputs: Tensors, inferences: int) -> Layers:
        """Layers, their tactics and times, of the same engine built to tell; see `Layered`.

        Raises:
            MachineError: There is no GPU, or the second build fails.
        """
        alone = statistics.median(self.time(inputs, 0.2))
        plan = self._detailed() if self._detailed is not None else self._plan
        if isinstance(plan, BuildFailure):
            raise MachineError(f"the engine cannot be built to be looked into: {plan.reason}")
        assert self._gpu is not None  # `time` has run
        execution = Execution(self._trt, plan.data, self._gpu)
        try:
            times, whole = execution.profile(inputs, inferences)
            return read_layers(
                execution.information(),
                times,
                end_to_end_ms=alone,
                profiled_ms=whole,
                inferences=inferences,
            )
        finally:
            execution.close()

    def save(self, folder: Path) -> list[str]:
        """Write the plan, what it was built from, an input set and a script that runs them.

        The plan is remembered as ours. With `model.onnx` and `timing.cache` it can be built again,
        by trtexec too.
        """
        backend = "tensorrt" if self._trt.__name__ == "tensorrt" else "tensorrt_rtx"
        (folder / "engine.plan").write_bytes(self._plan.data)
        np.savez(folder / "inputs.npz", **dict(self._model.selection()[0]))  # type: ignore[arg-type]
        text = _LOAD.format(backend=backend, digest=self.hash)
        (folder / "load.py").write_text(text, encoding="utf-8")
        remember_plan(self.hash)
        written = ["engine.plan", "inputs.npz", "load.py", *copy_onnx(self._source, folder)]
        if self._plan.timing_cache:
            (folder / "timing.cache").write_bytes(self._plan.timing_cache)
            written.append("timing.cache")
        return written

    def close(self) -> None:
        """Free everything; idempotent."""
        if self._execution is not None:
            self._execution.close()
            self._execution = None


def open_plan(
    path: Path,
    backend: str = "tensorrt",
    *,
    trust: bool = False,
    expected: str = "",
    device: int = 0,
) -> Execution:
    """Load a saved plan on the GPU.

    Args:
        path: Plan file.
        backend: `tensorrt` or `tensorrt_rtx`.
        trust: As in `read_plan`.
        expected: As in `read_plan`.
        device: CUDA device number.

    Raises:
        InputError: As `read_plan`.
        MachineError: No GPU, or TensorRT refuses the plan (another version or device).
        MissingExtraError: The compiler's module is not installed.
    """
    data = read_plan(path, trust=trust, expected=expected)
    return Execution(find_module(backend), data, Gpu(device))
