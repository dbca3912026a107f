"""A TensorRT engine alive on the GPU: load, run, time, save; and which plans may be loaded.

Owns execution. Knows plans and models, no route and no builder. Nothing here touches the GPU
before the first `run` or `time`, so that TensorRT-RTX can build on a machine that has none.

A plan is executable code: `open_plan` loads one only if this installation saved it, or the user
says that it is trusted.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env import ours
from routepilot.env.backends.base import Tensors
from routepilot.env.backends.tensorrt_compiler import Plan, find_module
from routepilot.env.backends.tensorrt_ear import Ear, captured_output
from routepilot.env.errors import InputError, MachineError
from routepilot.env.gpu_timing import CudaFault, Gpu, GpuTimer

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
    ) -> None:
        self._trt, self._plan, self._model, self._gpu = trt, plan, model, gpu
        self._source = source
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
        ours.remember(ours.PLANS, self.hash)
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


def copy_onnx(source: Path, folder: Path) -> list[str]:
    """Put an ONNX file, with its external weights, into a folder as `model.onnx`.

    Returns:
        Names of the files written.
    """
    import onnx
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    proto = onnx.load(str(source), load_external_data=False)
    tensors = [t for t in proto.graph.initializer if uses_external_data(t)]
    names = {"model.onnx": source}
    names |= {n: source.parent / n for n in {ExternalDataInfo(t).location for t in tensors}}
    for name, file in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    return sorted(names)


def read_plan(path: Path, *, trust: bool = False, expected: str = "") -> bytes:
    """The bytes of a plan file that may be loaded.

    Args:
        path: The file.
        trust: Load a plan that this installation did not make.
        expected: Hash the plan must have; empty for any.

    Raises:
        InputError: The file cannot be read, was changed, or is not ours.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"plan file {str(path)!r} cannot be read: {error}") from None
    digest = hashlib.sha256(data).hexdigest()
    if expected and digest != expected:
        raise InputError(f"plan file {str(path)!r} was changed since it was saved; build it again")
    if not trust and not ours.is_ours(ours.PLANS, digest):
        raise InputError(
            f"plan file {str(path)!r} was not made by this installation, and a plan is code that"
            " runs; load it with --trust only if you know who built it"
        )
    return data


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
