"""One inference session of ONNX Runtime on the GPU: make, run, time under a CUDA graph, save.

Owns the session with its bindings and device buffers. Knows no route, no catalog and no accuracy.

Everything runs on a stream of ours (`user_compute_stream`), so that CUDA events around a launch
time that launch. The session is told to be fit for capture (`enable_cuda_graph`) and, run by run,
not to capture anything itself (`gpu_graph_id` -1): the library's own replay waits for the GPU each
time, which for a small model costs as much as the model. A graph that we captured is believed only
after it was seen to compute what plain launches compute.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.base import Tensors
from routepilot.env.backends.cuda_catalog import CudaSettings
from routepilot.env.backends.onnxruntime import save_engine
from routepilot.env.backends.recipes import Transformed, is_split
from routepilot.env.child import one_line
from routepilot.env.errors import MachineError
from routepilot.env.gpu_timing import CudaFault, Gpu, GpuTimer, Launch
from routepilot.env.models import fingerprint_of

if TYPE_CHECKING:
    import onnxruntime

    from routepilot.env.models import Model

#: How launches are timed: our capture, the library's own graph with its wait, or plain launches.
GRAPH_MODES = ("capture", "session", "off")

#: Most sets of input buffers that timed launches rotate over.
MOST_BUFFERS = 8

#: Relative L2 distance up to which a graph computes what plain launches do: kernels that add in no
#: fixed order differ by rounding.
SAME_OUTPUT = 1e-2

#: Caveat of an engine timed by plain launches.
NO_GRAPH = "timed without a CUDA graph"


@dataclass(frozen=True)
class Device:
    """Where sessions run.

    Attributes:
        provider: Execution provider of ONNX Runtime.
        kind: Its word for the memory of the device.
        make_gpu: Makes the device of a number.
        make_timer: Makes a timer, as `GpuTimer`.
    """

    provider: str
    kind: str
    make_gpu: Callable[[int], Any]
    make_timer: Callable[..., Any]


CUDA = Device("CUDAExecutionProvider", "cuda", Gpu, GpuTimer)


@dataclass(frozen=True)
class Place:
    """A device in use by this process.

    Attributes:
        device: Which kind.
        index: Device number.
        gpu: The device.
        stream: The stream that every session enqueues on.
        graphs: A word of `GRAPH_MODES`.
    """

    device: Device
    index: int
    gpu: Any
    stream: int
    graphs: str


class CudaEngine:
    """A session with its buffers; see `base.Engine`.

    Args:
        source: File to load, and the seconds its transforms took.
        settings: Session settings.
        model: The model it was made of.
        place: Device and stream.
        scratch: Folder for the optimised graph, which is read and thrown away.

    Attributes:
        caveats: What the reader of its figures must know; empty when they are plain.

    Raises:
        MachineError: The provider cannot be used on this machine.
        Exception: Whatever the library raises when it cannot make a session.
    """

    def __init__(
        self,
        source: Transformed,
        settings: CudaSettings,
        model: Model,
        place: Place,
        scratch: Path,
    ) -> None:
        self._path, self._settings, self._model, self._place = source.path, settings, model, place
        self.caveats: list[str] = []
        self._inputs: dict[tuple[str, int], int] = {}
        self._outputs: dict[str, int] = {}
        self._bindings: dict[int, Any] = {}
        self._results: dict[str, NDArray[np.generic]] = {}
        self._timer: Any = None
        self._session: onnxruntime.InferenceSession | None = None
        optimized = scratch / "optimized.onnx"
        with place.gpu.lock():
            start = time.perf_counter()
            try:
                self._make(optimized)
            except BaseException:
                self.close()
                raise
            self.build_seconds = source.seconds + time.perf_counter() - start
        self.hash = self._effect(optimized)

    def _make(self, optimized: Path) -> None:
        """Open a session fit for capture and run it once, else one that is not.

        The first run belongs to the build: convolutions choose their algorithms in it.
        """
        graphed = self._place.graphs != "off"
        try:
            self._session = self._open(optimized, graphed)
            self.run(self._model.selection()[0])
            return
        except MachineError:
            raise
        except Exception as error:
            if not graphed:
                raise
            words = one_line(str(error))
        self.close()
        # What had nothing to do with the graph is raised here.
        self._session = self._open(optimized, graphed=False)
        self.run(self._model.selection()[0])
        self._note(f"{NO_GRAPH}: {words}")

    def _open(self, optimized: Path, graphed: bool) -> onnxruntime.InferenceSession:
        import onnxruntime

        self._graphed = graphed
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(
            onnxruntime.GraphOptimizationLevel, self._settings.level
        )
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        for name, value in self._settings.entries.items():
            options.add_session_config_entry(name, value)
        options.optimized_model_filepath = str(optimized)
        if is_split(self._path):
            entry = "session.optimized_model_external_initializers_"
            options.add_session_config_entry(f"{entry}file_name", f"{optimized.name}.data")
            options.add_session_config_entry(f"{entry}min_size_in_bytes", "1024")
        given = {
            **self._settings.provider_options,
            "device_id": str(self._place.index),
            "user_compute_stream": str(self._place.stream),
            "enable_cuda_graph": str(int(graphed)),
        }
        session = onnxruntime.InferenceSession(
            str(self._path),
            options,
            providers=[(self._place.device.provider, given)],
            disabled_optimizers=list(self._settings.disabled_optimizers),
            enable_fallback=0,  # a session that quietly runs on the CPU would be timed as this one
        )
        self._check_taken(session, given)
        return session

    def _check_taken(self, session: onnxruntime.InferenceSession, given: Mapping[str, str]) -> None:
        """Read back what the provider took: a missing library makes it step aside in silence."""
        provider = self._place.device.provider
        taken = session.get_provider_options().get(provider)
        if taken is None:
            raise MachineError(
                f"ONNX Runtime has {provider} but cannot load it here, most often because the CUDA"
                " or cuDNN libraries are not found; install 'onnxruntime-gpu[cuda,cudnn]' or put"
                " their folders on LD_LIBRARY_PATH"
            )
        for name, value in given.items():
            if _plain(taken.get(name, value)) != _plain(value):
                raise RuntimeError(f"option {name}={value} was taken as {taken[name]}")

    def _effect(self, optimized: Path) -> str:
        import onnx

        proto = onnx.load(str(optimized))
        operators = {node.op_type for node in proto.graph.node}
        entries = {n: v for n, v in self._settings.entries.items() if "optimization" not in n}
        acting = self._settings.acting(operators)
        # Fusions name the weights they make at random, so the file's bytes say nothing.
        text = json.dumps([fingerprint_of(proto), entries, acting, self._graphed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _note(self, text: str) -> None:
        if text not in self.caveats:
            self.caveats.append(text)

    def run(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Outputs by name, copies; see `base.Engine`."""
        with self._place.gpu.lock():
            self._upload(inputs, 0)
            self._launch(0, skip=True)
            return self._download()

    def time(self, inputs: Tensors, seconds: float) -> list[float]:
        """GPU milliseconds of each inference, in a CUDA graph where one can be captured."""
        with self._place.gpu.lock():
            if self._timer is None:
                self._timer = self._make_timer(inputs)
            times: list[float] = self._timer.time(seconds)
        for note in self._timer.notes:
            self._note(note)
        return times

    def _make_timer(self, inputs: Tensors) -> Any:
        place = self._place
        sets = range(self._rotations(inputs))
        for index in sets:
            self._upload(inputs, index)
            self._launch(index, skip=True)  # the first launch chooses algorithms and allocates
        wanted = self._download()
        if self._graphed and place.graphs == "session":
            for index in sets:
                self._launch(index, skip=False)  # captures
            own = [self._launcher(index, skip=False) for index in sets]
            return place.device.make_timer(place.gpu, own, place.stream, graphs=False)
        plain = [self._launcher(index, skip=True) for index in sets]
        timer = place.device.make_timer(place.gpu, plain, place.stream, graphs=self._graphed)
        if self._graphed and not self._computes(timer, wanted):
            timer.close()
            self._note(f"{NO_GRAPH}, since what was captured computes something else")
            timer = place.device.make_timer(place.gpu, plain, place.stream, graphs=False)
        return timer

    def _computes(self, timer: Any, wanted: Tensors) -> bool:
        """True when timed launches write the outputs that plain ones wrote."""
        with self._fault_is_no():
            for name, array in self._results.items():
                poison = np.frombuffer(b"\xa5" * array.nbytes, np.uint8)
                self._place.gpu.upload(self._outputs[name], poison, self._place.stream)
                self._place.gpu.wait(self._place.stream)
            timer.time(0.0)
            found = self._download()
            return all(_close(found[name], array) for name, array in wanted.items())
        return False

    @contextmanager
    def _fault_is_no(self) -> Iterator[None]:
        try:
            yield
        except CudaFault as fault:
            self._note(str(fault))

    def _rotations(self, inputs: Tensors) -> int:
        """Enough sets of input buffers to outgrow the L2 cache, within reason."""
        size = max(1, sum(array.nbytes for array in inputs.values()))
        return int(min(MOST_BUFFERS, 1 + 2 * self._place.gpu.l2_bytes // size))

    def _launcher(self, index: int, skip: bool) -> Launch:
        return lambda _: self._launch(index, skip)

    def _launch(self, index: int, skip: bool) -> None:
        """Enqueue one inference; `skip` keeps the library from capturing or replaying."""
        import onnxruntime

        assert self._session is not None
        options = onnxruntime.RunOptions()
        options.log_severity_level = 4
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if self._graphed:
            options.add_run_config_entry("gpu_graph_id", "-1" if skip else str(index + 1))
        self._session.run_with_iobinding(self._bindings[index], options)

    def _upload(self, inputs: Tensors, index: int) -> None:
        place = self._place
        held = []
        for spec in self._model.inputs:
            array = np.ascontiguousarray(inputs[spec.name])
            held.append(array)
            key = (spec.name, index)
            if key not in self._inputs:
                self._inputs[key] = place.gpu.allocate(array.nbytes)
            place.gpu.upload(self._inputs[key], array, place.stream)
        place.gpu.wait(place.stream)  # `held` may go now
        if index not in self._bindings:
            self._bindings[index] = self._bind(index)

    def _bind(self, index: int) -> Any:
        assert self._session is not None
        kind, number = self._place.device.kind, self._place.index
        binding = self._session.io_binding()
        for spec in self._model.inputs:
            place = (kind, number, np.dtype(spec.dtype), spec.shape, self._inputs[spec.name, index])
            binding.bind_input(spec.name, *place)
        for spec in self._model.outputs:
            if spec.name not in self._outputs:
                self._results[spec.name] = result = np.empty(spec.shape, spec.dtype)
                self._outputs[spec.name] = self._place.gpu.allocate(result.nbytes)
            place = (kind, number, np.dtype(spec.dtype), spec.shape, self._outputs[spec.name])
            binding.bind_output(spec.name, *place)
        return binding

    def _download(self) -> dict[str, NDArray[np.generic]]:
        gpu, stream = self._place.gpu, self._place.stream
        for name, array in self._results.items():
            gpu.download(array, self._outputs[name], stream)
        gpu.wait(stream)
        return {name: array.copy() for name, array in self._results.items()}

    def quiesce(self) -> None:
        """Nothing to do: an idle session leaves the GPU alone."""

    def save(self, folder: Path) -> list[str]:
        """Write `model.onnx`, `session.json`, an input set and `load.py`; see `base.Engine`."""
        settings = {**asdict(self._settings), "provider": self._place.device.provider}
        return save_engine(folder, self._path, self._model, {"session.json": settings}, LOAD)

    def close(self) -> None:
        """Free everything; idempotent."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        self._bindings = {}
        self._session = None
        for address in (*self._inputs.values(), *self._outputs.values()):
            self._place.gpu.free(address)
        self._inputs, self._outputs = {}, {}


def _plain(text: str) -> str:
    """An option's value in one spelling: the library may write true for 1 and an address in hex."""
    text = {"true": "1", "false": "0"}.get(text.lower(), text)
    try:
        return str(int(text, 0))
    except ValueError:
        return text


def _close(found: NDArray[np.generic], wanted: NDArray[np.generic]) -> bool:
    if wanted.dtype.kind not in "fc":
        return bool(np.array_equal(found, wanted))
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    distance, size = np.linalg.norm(a - b), np.linalg.norm(b)
    return bool(np.isfinite(distance) and distance <= SAME_OUTPUT * max(float(size), 1e-12))


#: How a user loads the engine.
LOAD = '''"""Load the tuned model and run it once: `python load.py`. Needs onnxruntime-gpu."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort

here = Path(__file__).resolve().parent

# What the session was tuned with. CUDA graphs are part of how it was timed: set enable_cuda_graph
# and bind inputs and outputs on the device to run it that fast.
settings = json.loads((here / "session.json").read_text())
options = ort.SessionOptions()
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, settings["level"])
for name, value in settings["entries"].items():
    options.add_session_config_entry(name, value)

if hasattr(ort, "preload_dlls"):
    ort.preload_dlls()  # CUDA and cuDNN from Python packages, where they are installed so
session = ort.InferenceSession(
    str(here / "model.onnx"),
    options,
    providers=[(settings["provider"], settings["provider_options"])],
    disabled_optimizers=settings["disabled_optimizers"],
)

# One inference, with an input set that the model was tuned on.
outputs = session.run(None, dict(np.load(here / "input.npz")))
for output, value in zip(session.get_outputs(), outputs):
    print(output.name, value.shape, value.dtype)
'''
