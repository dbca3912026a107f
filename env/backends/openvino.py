"""OpenVINO on the CPU: its knobs, and engines made of one compiled model each.

Owns compile properties. Knows no other compiler. The plugin accepts what it cannot do (bfloat16 on
a processor without it), so an engine is known by the graph it really runs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.base import Tensors
from routepilot.env.backends.onnxruntime import copy_model
from routepilot.env.routes import Knob

#: What of a node in the run-time graph says how it is computed.
_EFFECT = ("layerType", "primitiveType", "runtimePrecision", "outputLayouts", "outputPrecisions")


def is_installed() -> bool:
    """True when the package is there, without importing it."""
    return find_spec("openvino") is not None


def knobs() -> tuple[Knob, ...]:
    """Knobs of this engine, thread knobs aside."""
    return (
        Knob(
            "-arithmetic",
            ("f32", "bf16"),
            "f32",
            "Precision in which float layers are computed.",
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


def properties(values: Mapping[str, str], threads: int) -> dict[str, str]:
    """Compile properties of a route."""
    chosen = {
        "INFERENCE_PRECISION_HINT": values.get("-arithmetic", "f32"),
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(int(values.get("-threads", threads))),
        # Pinning binds to cores of the plugin's choice and fights the worker's own affinity.
        "ENABLE_CPU_PINNING": "NO",
    }
    if values.get("-snippets") == "off":
        chosen["SNIPPETS_MODE"] = "DISABLE"
    return chosen


class OpenVinoEngine:
    """One compiled model with its request."""

    def __init__(self, path: Path, chosen: Mapping[str, str], transform_seconds: float) -> None:
        import openvino

        start = time.perf_counter()
        self._path, self._chosen = path, dict(chosen)
        core = openvino.Core()
        self._compiled: Any = core.compile_model(str(path), "CPU", self._chosen)
        self._request: Any = self._compiled.create_infer_request()
        self.build_seconds = transform_seconds + time.perf_counter() - start
        self.hash = self._effect()

    def _effect(self) -> str:
        digest = hashlib.sha256(self._path.read_bytes())
        for node in self._compiled.get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            shown = [str(info[key].astype(str)) for key in _EFFECT if key in info]
            digest.update(f"{node.get_type_name()}|{'|'.join(shown)};".encode())
        digest.update(self._chosen["INFERENCE_NUM_THREADS"].encode())
        return digest.hexdigest()

    def run(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Outputs by name; see `base.Engine`."""
        # Shared inputs were seen to be overwritten by a later call: always copy.
        found = self._request.infer(dict(inputs), share_inputs=False, share_outputs=False)
        return {key.get_any_name(): np.array(value) for key, value in found.items()}

    def time(self, inputs: Tensors, seconds: float) -> list[float]:
        """Milliseconds of each inference; see `base.Engine`."""
        request, clock, spent = self._request, time.perf_counter, []
        request.infer(dict(inputs), share_inputs=False)  # binds the inputs once
        end = clock() + seconds
        while True:
            start = clock()
            request.infer()
            now = clock()
            spent.append(1000 * (now - start))
            if now >= end:
                return spent

    def quiesce(self) -> None:
        """Nothing: its threads sleep between requests."""

    def save(self, folder: Path) -> list[str]:
        """Write the model, the properties and `load.py`; see `base.Engine`."""
        copy_model(self._path, folder)
        (folder / "openvino.json").write_text(json.dumps(self._chosen, indent=2) + "\n")
        (folder / "load.py").write_text(LOAD)
        return sorted(item.name for item in folder.iterdir())

    def close(self) -> None:
        """Free the compiled model."""
        self._request = self._compiled = None


#: What a user runs or copies from.
LOAD = '''"""Load and run the tuned model: `python load.py`."""

import json
import pathlib

import numpy as np
import openvino

folder = pathlib.Path(__file__).resolve().parent
properties = json.loads((folder / "openvino.json").read_text())
compiled = openvino.Core().compile_model(str(folder / "model.onnx"), "CPU", properties)

if __name__ == "__main__":
    inputs = {
        port.get_any_name(): np.zeros(list(port.shape), port.get_element_type().to_dtype())
        for port in compiled.inputs
    }
    for port, value in compiled(inputs).items():
        print(port.get_any_name(), value.shape, value.dtype)
'''


def engine(
    path: Path, values: Mapping[str, str], threads: int, transform_seconds: float
) -> OpenVinoEngine:
    """Compile for a route; raises whatever the library raises."""
    return OpenVinoEngine(path, properties(values, threads), transform_seconds)


def version() -> dict[str, str]:
    """Version of the library."""
    from importlib.metadata import version as installed

    return {"openvino": installed("openvino")}
