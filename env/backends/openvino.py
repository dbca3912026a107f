"""OpenVINO on the CPU: its knobs, and engines made of one compiled model each.

Owns compile properties. Knows no other compiler. The plugin accepts what it cannot do (bfloat16 on
a processor without it), so an engine is known by the graph it really runs.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.base import Tensors
from routepilot.env.backends.layers import PROFILE_WARMUP, Layer, Layers
from routepilot.env.backends.onnxruntime import save_engine
from routepilot.env.backends.recipes import Transformed
from routepilot.env.models import fingerprint_of
from routepilot.env.routes import Knob

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: Knobs of this engine, threads aside.
KNOBS: tuple[Knob, ...] = (
    Knob(
        "-arithmetic",
        ("f32", "bf16"),
        "f32",
        "Precision in which float operators are computed.",
        ("precision",),
    ),
    Knob(
        "-snippets",
        ("on", "off"),
        "on",
        "Compile chains of small operators into one kernel.",
        ("fusion",),
    ),
)

#: What of a node in the run-time graph says how it is computed.
_EFFECT = ("layerType", "primitiveType", "runtimePrecision", "outputLayouts", "outputPrecisions")


def is_installed() -> bool:
    """True when the package is there, without importing it."""
    return find_spec("openvino") is not None


def properties(values: Mapping[str, str], threads: int) -> dict[str, str]:
    """Compile properties of a route.

    Args:
        values: Every knob's value, defaults included.
        threads: Threads granted.
    """
    chosen = {
        # Absent where the processor has no bfloat16.
        "INFERENCE_PRECISION_HINT": values.get("-arithmetic", "f32"),
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": values.get("-threads", str(threads)),
        # Pinning binds to cores of the plugin's choice, against the affinity of a worker.
        "ENABLE_CPU_PINNING": "NO",
    }
    if values["-snippets"] == "off":
        chosen["SNIPPETS_MODE"] = "DISABLE"
    return chosen


class OpenVinoEngine:
    """One compiled model with its request; see `base.Engine`.

    Args:
        source: File to load, and the seconds its transforms took.
        chosen: Compile properties.
        model: The model it was made of; names the outputs, lends an input set to `save`.

    Raises:
        Exception: Whatever the library raises when it cannot compile.
    """

    def __init__(self, source: Transformed, chosen: Mapping[str, str], model: Model) -> None:
        import openvino

        self._path, self._chosen, self._model = source.path, dict(chosen), model
        start = time.perf_counter()
        compiled = openvino.Core().compile_model(str(source.path), "CPU", self._chosen)
        self._request: Any = compiled.create_infer_request()
        self.build_seconds = source.seconds + time.perf_counter() - start
        self.hash = self._effect(compiled)

    def _effect(self, compiled: Any) -> str:
        import onnx

        digest = hashlib.sha256(fingerprint_of(onnx.load(str(self._path))).encode())
        for node in compiled.get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            shown = [str(info[key].astype(str)) for key in _EFFECT if key in info]
            digest.update(f"{node.get_type_name()}|{'|'.join(shown)};".encode())
        digest.update(self._chosen["INFERENCE_NUM_THREADS"].encode())
        return digest.hexdigest()

    def run(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Outputs by name, copies; see `base.Engine`."""
        # Sharing inputs let a later inference overwrite the caller's arrays.
        self._request.infer(dict(inputs), share_inputs=False)
        # A tensor may bear several names; the model's own are asked for.
        names = [output.name for output in self._model.outputs]
        return {name: np.array(self._request.get_tensor(name).data) for name in names}

    def time(self, inputs: Tensors, seconds: float) -> list[float]:
        """Milliseconds of each inference, inputs bound beforehand; see `base.Engine`."""
        self._request.infer(dict(inputs), share_inputs=False)
        infer, clock = self._request.infer, time.perf_counter_ns
        spent: list[float] = []
        end = clock() + round(seconds * 1e9)
        while True:
            start = clock()
            infer(share_outputs=True)  # nobody looks at them
            now = clock()
            spent.append((now - start) / 1e6)
            if now >= end:
                return spent

    def quiesce(self) -> None:
        """Nothing: its threads sleep 1 to 2 ms after a request (2 threads, EPYC, 2026.4)."""

    def layers(self, inputs: Tensors, inferences: int) -> Layers:
        """Nodes of the graph that runs, and their times; see `layers.Layered`."""
        import openvino

        alone = statistics.median(self.time(inputs, 0.2))
        compiled = openvino.Core().compile_model(
            str(self._path), "CPU", {**self._chosen, "PERF_COUNT": "YES"}
        )
        request = compiled.create_infer_request()
        for _ in range(PROFILE_WARMUP):
            request.infer(dict(inputs), share_inputs=False)
        warm, started = _spent(request, PROFILE_WARMUP), time.perf_counter()
        for _ in range(inferences):
            request.infer(dict(inputs), share_inputs=False)
        profiled = (time.perf_counter() - started) * 1e3 / inferences
        spent = {
            key: max(total - warm.get(key, 0.0), 0.0)
            for key, total in _spent(request, PROFILE_WARMUP + inferences).items()
        }
        # The graph calls a slice StridedSlice and the profile Slice: one word for one thing.
        words = {info.node_name: info.node_type for info in request.profiling_info}
        kinds = [
            words.get(node.get_friendly_name(), str(node.get_rt_info()["layerType"].astype(str)))
            for node in compiled.get_runtime_model().get_ordered_ops()
        ]
        return Layers(
            tuple(Layer(*key, total / inferences) for key, total in spent.items()),
            dict(Counter(kinds).most_common()),
            alone,
            profiled,
            inferences,
        )

    def save(self, folder: Path) -> list[str]:
        """Write `model.onnx`, `openvino.json`, an input set and `load.py`; see `base.Engine`."""
        return save_engine(folder, self._path, self._model, {"openvino.json": self._chosen}, LOAD)

    def close(self) -> None:
        """Free the compiled model."""
        self._request = None


#: How a user loads the engine.
LOAD = '''"""Load the tuned model and run it once: `python load.py`. Needs openvino and numpy."""

import json
from pathlib import Path

import numpy as np
import openvino

here = Path(__file__).resolve().parent

# What the model was tuned with, and the model itself.
properties = json.loads((here / "openvino.json").read_text())
compiled = openvino.Core().compile_model(str(here / "model.onnx"), "CPU", properties)

# One inference, with an input set that the model was tuned on.
for output, value in compiled(dict(np.load(here / "input.npz"))).items():
    print(output.get_any_name(), value.shape, value.dtype)
'''


def _spent(request: Any, inferences: int) -> dict[tuple[str, str, str], float]:
    """Milliseconds of each node over all inferences of a request so far, cold ones too.

    The compiler tells the mean since it compiled.

    Args:
        request: Infer request of a model that counts.
        inferences: How many it has made.
    """
    import openvino

    return {
        (info.node_name, info.node_type, info.exec_type): (
            info.real_time.total_seconds() * 1e3 * inferences
        )
        for info in request.profiling_info
        if info.status == openvino.ProfilingInfo.Status.EXECUTED
    }
