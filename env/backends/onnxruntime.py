"""ONNX Runtime on the CPU: its knobs, and engines made of one inference session each.

Owns session options. Knows no other compiler. Unknown options are accepted silently by the
library, so an engine is known by its effect: the hash of the graph it optimised to, and of the
settings that act at run time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.base import Tensors
from routepilot.env.models import fingerprint_of
from routepilot.env.routes import Knob

if TYPE_CHECKING:
    import onnxruntime

#: Fusion groups that can be switched off, and the optimizers each stands for (names from the
#: verbose log of ONNX Runtime 1.32).
GROUPS: dict[str, tuple[str, ...]] = {
    "-layout:nchwc": ("NchwcTransformer",),
    "-fuse:norm": (
        "LayerNormFusionL1",
        "LayerNormFusionL2",
        "SkipLayerNormFusion",
        "SimplifiedLayerNormFusion",
        "EmbedLayerNormFusion",
        "BiasSkipLayerNormFusion",
    ),
    "-fuse:gelu": (
        "GeluFusionL1",
        "GeluFusionL2",
        "FastGeluFusion",
        "BiasGeluFusion",
        "QuickGeluFusion",
    ),
    "-fuse:activation": ("ConvActivationFusion", "ConvAddActivationFusion", "GemmActivationFusion"),
    "-fuse:matmul": (
        "MatMulAddFusion",
        "MatMulScaleFusion",
        "MatmulTransposeFusion",
        "MatMulActivationFusion",
    ),
    "-fuse:transpose": ("TransposeOptimizer",),
    "-fold:constants": ("ConstantFolding",),
}

_HELP = {
    "-layout:nchwc": "Lay convolutions out in blocks of channels.",
    "-fuse:norm": "Fuse layer normalisations into single kernels.",
    "-fuse:gelu": "Fuse GELU patterns.",
    "-fuse:activation": "Fuse activations into convolutions.",
    "-fuse:matmul": "Fuse additions, scales and transposes into matrix products.",
    "-fuse:transpose": "Push transposes through the graph and cancel them.",
    "-fold:constants": "Compute constant parts of the graph at build time.",
}

_LEVELS = {"all": "ORT_ENABLE_ALL", "extended": "ORT_ENABLE_EXTENDED", "basic": "ORT_ENABLE_BASIC"}
_LEVELS["off"] = "ORT_DISABLE_ALL"


def knobs() -> tuple[Knob, ...]:
    """Knobs of this engine, thread knobs aside."""
    switches = ("on", "off")
    return (
        Knob(
            "-graph",
            ("all", "extended", "basic", "off"),
            "all",
            "How far the graph is optimised.",
            ("graph",),
        ),
        *(Knob(name, switches, "on", _HELP[name], ("fusion",)) for name in GROUPS),
        Knob(
            "-qdq:cleanup",
            ("off", "on"),
            "off",
            "Remove quantise-dequantise pairs that fusion left behind.",
            ("fusion",),
        ),
        Knob(
            "-transformer",
            ("off", "on"),
            "off",
            "Fuse attention and embeddings offline before the build.",
            ("fusion",),
        ),
        Knob("-prepack", switches, "on", "Repack weights once for the kernels.", ("memory",)),
    )


@dataclass(frozen=True)
class SessionSettings:
    """What a session is made with, in a form that can be written down.

    Attributes:
        level: Graph optimisation level, by its name in the library.
        disabled: Optimizers switched off.
        entries: Session configuration entries.
        threads: Threads of one operator.
    """

    level: str
    disabled: tuple[str, ...]
    entries: Mapping[str, str]
    threads: int

    def options(self) -> onnxruntime.SessionOptions:
        """The library's options object."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, self.level)
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        for name, value in self.entries.items():
            options.add_session_config_entry(name, value)
        return options


def settings_of(values: Mapping[str, str], threads: int) -> SessionSettings:
    """Session settings of a route.

    Args:
        values: Every knob's value, defaults included.
        threads: Threads granted.
    """
    entries = {}
    if values.get("-qdq:cleanup") == "on":
        entries["session.enable_quant_qdq_cleanup"] = "1"
    if values.get("-prepack") == "off":
        entries["session.disable_prepacking"] = "1"
    if values.get("-spin") == "off":
        entries["session.intra_op.allow_spinning"] = "0"
    disabled = [n for knob, names in GROUPS.items() if values.get(knob) == "off" for n in names]
    level = _LEVELS[values.get("-graph", "all")]
    return SessionSettings(level, tuple(disabled), entries, int(values.get("-threads", threads)))


class OrtEngine:
    """One inference session."""

    def __init__(self, path: Path, settings: SessionSettings, transform_seconds: float) -> None:
        start = time.perf_counter()
        self._path, self._settings = path, settings
        with tempfile.TemporaryDirectory(prefix="routepilot-ort-") as folder:
            optimized = Path(folder) / "optimized.onnx"
            self._session: onnxruntime.InferenceSession | None = self._make(optimized)
            self.build_seconds = transform_seconds + time.perf_counter() - start
            self.hash = self._effect(optimized)
        self._names = [output.name for output in self._live().get_outputs()]

    def _make(self, optimized: Path | None = None) -> onnxruntime.InferenceSession:
        import onnxruntime

        options = self._settings.options()
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
        return onnxruntime.InferenceSession(
            str(self._path),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(self._settings.disabled),
        )

    def _effect(self, optimized: Path) -> str:
        import onnx

        # Fusions name the weights they make at random, so the file's bytes say nothing.
        digest = hashlib.sha256(fingerprint_of(onnx.load(str(optimized))).encode())
        acting = {
            name: value
            for name, value in self._settings.entries.items()
            if name != "session.enable_quant_qdq_cleanup"  # seen in the graph
        }
        digest.update(json.dumps([acting, self._settings.threads], sort_keys=True).encode())
        return digest.hexdigest()

    def _live(self) -> onnxruntime.InferenceSession:
        if self._session is None:
            self._session = self._make()
        return self._session

    def run(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Outputs by name; see `base.Engine`."""
        outputs = self._live().run(self._names, dict(inputs))
        return {n: np.array(o) for n, o in zip(self._names, outputs, strict=True)}

    def time(self, inputs: Tensors, seconds: float) -> list[float]:
        """Milliseconds of each inference; see `base.Engine`."""
        session, names, feed = self._live(), self._names, dict(inputs)
        clock, spent = time.perf_counter, []
        end = clock() + seconds
        while True:
            start = clock()
            session.run(names, feed)
            now = clock()
            spent.append(1000 * (now - start))
            if now >= end:
                return spent

    def quiesce(self) -> None:
        """Drop a session whose idle threads would spin; see `base.Engine`."""
        if self._settings.threads > 1 and "session.intra_op.allow_spinning" not in (
            self._settings.entries
        ):
            self._session = None

    def save(self, folder: Path) -> list[str]:
        """Write the model, the session settings and `load.py`; see `base.Engine`."""
        copy_model(self._path, folder)
        chosen = {
            "level": self._settings.level,
            "disabled_optimizers": list(self._settings.disabled),
            "entries": dict(self._settings.entries),
            "threads": self._settings.threads,
        }
        (folder / "session.json").write_text(json.dumps(chosen, indent=2) + "\n")
        (folder / "load.py").write_text(LOAD)
        return sorted(item.name for item in folder.iterdir())

    def close(self) -> None:
        """Free the session."""
        self._session = None


def copy_model(path: Path, folder: Path) -> None:
    """Copy an ONNX file, and the weights beside it if it has any there, as `model.onnx`."""
    import onnx

    data = onnx.load(str(path), load_external_data=False)
    places = {
        entry.value
        for tensor in data.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    for place in places:
        shutil.copyfile(path.parent / place, folder / place)
    shutil.copyfile(path, folder / "model.onnx")


#: What a user runs or copies from.
LOAD = '''"""Load and run the tuned model: `python load.py`."""

import json
import pathlib

import numpy as np
import onnxruntime as ort

folder = pathlib.Path(__file__).resolve().parent
chosen = json.loads((folder / "session.json").read_text())
options = ort.SessionOptions()
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, chosen["level"])
options.intra_op_num_threads = chosen["threads"]
for name, value in chosen["entries"].items():
    options.add_session_config_entry(name, value)
session = ort.InferenceSession(
    str(folder / "model.onnx"),
    options,
    providers=["CPUExecutionProvider"],
    disabled_optimizers=chosen["disabled_optimizers"],
)

if __name__ == "__main__":
    types = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16"}
    inputs = {
        i.name: np.zeros(i.shape, types.get(i.type, i.type[7:-1])) for i in session.get_inputs()
    }
    for output, value in zip(session.get_outputs(), session.run(None, inputs)):
        print(output.name, value.shape, value.dtype)
'''


def engine(
    path: Path, values: Mapping[str, str], threads: int, transform_seconds: float
) -> OrtEngine:
    """Build a session for a route; raises whatever the library raises."""
    return OrtEngine(path, settings_of(values, threads), transform_seconds)


def version() -> dict[str, str]:
    """Version of the library."""
    from importlib.metadata import version as installed

    return {"onnxruntime": installed("onnxruntime")}


def describe_error(error: Any) -> str:
    """The library's words on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
