"""An Inductor package alive in this process: load, run, time, save.

Owns execution, on a CPU and on a GPU, where it is timed as a CUDA graph. Knows packages and models,
no route and no catalog. A package is code that runs: only those that this process's own builds made
are loaded here.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.base import Tensors
from routepilot.env.backends.inductor_package import Package
from routepilot.env.drafts import place_for_draft
from routepilot.env.errors import MachineError

if TYPE_CHECKING:
    from routepilot.env.gpu_timing import Gpu, GpuTimer
    from routepilot.env.models import Model

#: Most sets of input buffers that timed launches rotate over.
MOST_BUFFERS = 4

#: Runs before a capture: kernels load at the first, and cuDNN chooses algorithms.
WARM_RUNS = 3

_LOAD = '''"""Load the package beside this file and run it once. Needs torch and numpy."""

import json
from pathlib import Path

import numpy as np
import torch

here = Path(__file__).resolve().parent
settings = json.loads((here / "settings.json").read_text())
device = settings["device"]
torch.set_num_threads(settings["threads"])
if device == "cuda":
    tf32 = settings["-precision"] != "highest"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = settings.get("-cudnn.benchmark") == "on"
    torch.backends.cuda.preferred_blas_library(settings.get("-blas", "default"))

# A package is code that runs: know who built it.
model = torch._inductor.aoti_load_package(str(here / "package.pt2"))
with np.load(here / "input.npz") as held:
    inputs = [torch.from_numpy(held[name]).to(device) for name in settings["inputs"]]
with torch.no_grad():
    outputs = model(*inputs)
for name, output in zip(settings["outputs"], outputs):
    print(name, tuple(output.shape), output.dtype)
'''


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Have native code of this process make its temporary files in a folder."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder.absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@contextmanager
def _built_here() -> Iterator[None]:
    """Load packages without asking whether this machine is the one that built them.

    PyTorch asks to warn, and for the answer compiles a library for each vector unit and loads it
    in a new Python with torch: 40 s of a first load on a machine with an H200, 5 of 6 s on two CPU
    cores.
    """
    from torch._inductor import codecache
    from torch.export import pt2_archive

    places: list[Any] = [codecache, getattr(pt2_archive, "_package", None)]
    name = "get_device_information"
    asked = [(place, getattr(place, name)) for place in places if hasattr(place, name)]
    for place, _ in asked:
        setattr(place, name, lambda device: {})
    try:
        yield
    finally:
        for place, question in asked:
            setattr(place, name, question)


class InductorEngine:
    """A loaded package; see `base.Engine`.

    Args:
        package: What the build gave; its folder is removed at the end unless `keep`.
        model: The model.
        settings: Every knob's value, defaults included.
        threads: Threads of the code on a CPU.
        gpu: The device; None for the CPU.
        keep: Leave the package's folder alone.

    Attributes:
        caveats: What the reader of its figures should know.
    """

    def __init__(
        self,
        package: Package,
        model: Model,
        settings: Mapping[str, str],
        threads: int,
        gpu: Gpu | None,
        *,
        keep: bool,
    ) -> None:
        import torch

        self.hash, self.build_seconds = package.hash, package.seconds
        self.caveats: tuple[str, ...] = ()
        self._package, self._model, self._settings = package, model, dict(settings)
        self._threads, self._gpu, self._keep = threads, gpu, keep
        self._inputs = [spec.name for spec in model.inputs]
        self._outputs = [spec.name for spec in model.outputs]
        self._device = "cpu" if gpu is None else "cuda"
        self._torch = torch
        torch.set_num_threads(threads)
        load = torch._inductor.aoti_load_package
        quick: dict[str, Any] = {}
        if "run_single_threaded" in inspect.signature(load).parameters:
            quick["run_single_threaded"] = True  # no locks, whose events a capture refuses
        # PyTorch unpacks the code into temporary files, which an engine that is killed leaves.
        self._unpacked = place_for_draft(package.folder.parent)
        self._unpacked.mkdir(mode=0o700)
        with _temporary_files_in(self._unpacked), _built_here():
            self._loaded: Any = load(str(package.path), **quick)
        self._timer: GpuTimer | None = None
        self._graphs: list[Any] = []
        self._stream: Any = None
        if gpu is not None:
            stream: Any = torch.cuda.ExternalStream
            self._stream = stream(gpu.stream())

    def _switches(self) -> Any:
        from routepilot.env.backends.inductor_program import switches

        return switches(self._settings, self._device)

    def _place(self, inputs: Tensors) -> list[Any]:
        arrays = [np.ascontiguousarray(inputs[name]) for name in self._inputs]
        if self._gpu is None:
            return [self._torch.from_numpy(array) for array in arrays]
        # Copies by this thread's stream, in order with the runs.
        return [self._torch.from_numpy(array).to("cuda") for array in arrays]

    def _call(self, tensors: list[Any]) -> list[Any]:
        if self._loaded is None:
            raise MachineError("the engine was closed; build it again")
        given = self._loaded(*tensors)
        return [given] if isinstance(given, self._torch.Tensor) else list(given)

    def run(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Outputs by name, copies; see `base.Engine`."""
        torch = self._torch
        with torch.no_grad(), self._switches():
            if self._gpu is None:
                outputs = self._call(self._place(inputs))
            else:
                with torch.cuda.stream(self._stream):
                    outputs = [output.cpu() for output in self._call(self._place(inputs))]
        arrays = (np.array(output.numpy()) for output in outputs)
        return dict(zip(self._outputs, arrays, strict=True))

    def time(self, inputs: Tensors, seconds: float) -> list[float]:
        """Milliseconds of each inference; see `base.Engine`."""
        if self._gpu is not None:
            return self._time_on_gpu(inputs, seconds)
        tensors = self._place(inputs)
        loader, clock = self._loaded.loader, time.perf_counter_ns
        call = getattr(loader, "boxed_run", loader.run)
        spent: list[float] = []
        with self._torch.no_grad():
            end = clock() + round(seconds * 1e9)
            while True:
                start = clock()
                call(list(tensors))
                now = clock()
                spent.append((now - start) / 1e6)
                if now >= end:
                    return spent

    def _time_on_gpu(self, inputs: Tensors, seconds: float) -> list[float]:
        assert self._gpu is not None
        torch = self._torch
        with self._gpu.lock(), torch.no_grad(), torch.cuda.stream(self._stream):
            if self._timer is None:
                self._timer = self._make_timer(inputs)
            before = self._gpu.condition()
            times = self._timer.time(seconds)
            self._timer.watch(before, self._gpu.condition())
        self.caveats = tuple(dict.fromkeys([*self.caveats, *self._timer.notes]))
        return times

    def _make_timer(self, inputs: Tensors) -> GpuTimer:
        """Capture one graph for each set of input buffers, so that the L2 cache holds none."""
        from routepilot.env.gpu_timing import GpuTimer

        assert self._gpu is not None
        torch = self._torch
        size = max(1, sum(array.nbytes for array in inputs.values()))
        sets = [
            self._place(inputs)
            for _ in range(min(MOST_BUFFERS, 1 + 2 * self._gpu.l2_bytes // size))
        ]
        launches = []
        with self._switches():
            for tensors in sets:
                for _ in range(WARM_RUNS):
                    self._call(tensors)
            torch.cuda.synchronize()
            pool = torch.cuda.graph_pool_handle()
            try:
                for tensors in sets:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                        held = self._call(tensors)
                    self._graphs.append((graph, tensors, held))
                    launches.append(lambda _, graph=graph: graph.replay())
            except RuntimeError as error:
                words = " ".join(str(error).split())[:120]
                self.caveats = (f"timed without a CUDA graph, since none can be captured: {words}",)
                self._graphs = []
                launches = [lambda _, tensors=tensors: self._plain(tensors) for tensors in sets]
        torch.cuda.synchronize()
        return GpuTimer(self._gpu, launches, int(self._stream.cuda_stream), graphs=False)

    def _plain(self, tensors: list[Any]) -> None:
        with self._switches():
            self._call(tensors)

    def quiesce(self) -> None:
        """Nothing to do: threads of OpenMP sleep soon, and a GPU is left alone."""

    def save(self, folder: Path) -> list[str]:
        """Write the package, its settings, an input set and `load.py`; see `base.Engine`."""
        settings = {
            "device": self._device,
            "threads": self._threads,
            "inputs": self._inputs,
            "outputs": self._outputs,
            **self._settings,
        }
        shutil.copyfile(self._package.path, folder / "package.pt2")
        (folder / "settings.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
        np.savez(folder / "input.npz", **self._model.selection()[0])  # type: ignore[arg-type]
        (folder / "load.py").write_text(_LOAD, encoding="utf-8")
        return ["input.npz", "load.py", "package.pt2", "settings.json"]

    def close(self) -> None:
        """Free everything; idempotent."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        self._graphs, self._loaded = [], None
        shutil.rmtree(self._unpacked, ignore_errors=True)
        if not self._keep:
            shutil.rmtree(self._package.folder, ignore_errors=True)
