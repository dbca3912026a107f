"""ONNX Runtime on the CPU: its knobs, and engines made of one inference session each.

Owns session options. Knows no other compiler. The library accepts unknown options and optimizer
names silently, so an engine is known by its effect: the graph it optimised to, and the settings
that act at run time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.base import Tensors
from routepilot.env.backends.layers import PROFILE_WARMUP, Layer, Layers
from routepilot.env.backends.recipes import Transformed
from routepilot.env.models import fingerprint_of
from routepilot.env.routes import Knob, Requirement

if TYPE_CHECKING:
    import onnxruntime

    from routepilot.env.models import Model

#: Switches over groups of optimizers: sentence, and the optimizers each turns off. Names as the
#: verbose log of ONNX Runtime 1.32 prints them; older names beside them, unknown ones do nothing.
SWITCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "-layout:nchwc": ("Lay convolutions out in blocks of channels.", ("NchwcTransformer",)),
    "-fuse:norm": (
        "Fuse layer normalisations with what surrounds them.",
        (
            "LayerNormFusion",
            "LayerNormFusionL1",
            "LayerNormFusionL2",
            "SimplifiedLayerNormFusion",
            "SkipLayerNormFusion",
            "BiasSkipLayerNormFusion",
            "EmbedLayerNormFusion",
        ),
    ),
    "-fuse:gelu": (
        "Fuse the operators of a GELU into one.",
        (
            "GeluFusion",
            "GeluFusionL1",
            "GeluFusionL2",
            "BiasGeluFusion",
            "FastGeluFusion",
            "QuickGeluFusion",
        ),
    ),
    "-fuse:activation": (
        "Fuse activations and additions into convolutions.",
        ("ConvActivationFusion", "ConvAddActivationFusion"),
    ),
    "-fuse:matmul": (
        "Fuse additions, scales, transposes and activations into matrix products.",
        (
            "MatMulAddFusion",
            "MatMulActivationFusion",
            "MatMulScaleFusion",
            "MatmulTransposeFusion",
            "GemmActivationFusion",
        ),
    ),
    "-fuse:transpose": (
        "Push transposes through the graph until they cancel.",
        ("TransposeOptimizer",),
    ),
    "-fold:constants": (
        "Compute constant parts of the graph at build time.",
        ("ConstantFolding",),
    ),
}

#: Graph optimisation levels by their short names.
LEVELS = {
    "all": "ORT_ENABLE_ALL",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "off": "ORT_DISABLE_ALL",
}

#: Knobs of this engine, threads aside.
KNOBS: tuple[Knob, ...] = (
    Knob("-graph", tuple(LEVELS), "all", "How far the graph is optimised.", ("graph",)),
    *(
        Knob(name, ("on", "off"), "on", text, ("layout" if "layout" in name else "fusion",))
        for name, (text, _) in SWITCHES.items()
    ),
    Knob(
        "-qdq:cleanup",
        ("off", "on"),
        "off",
        "Remove quantise-dequantise pairs that no integer kernel took up.",
        ("fusion",),
    ),
    Knob(
        "-transformer",
        ("off", "on"),
        "off",
        "Fuse attention, normalisation and GELU offline, before the build.",
        ("fusion", "transform"),
    ),
    Knob("-prepack", ("on", "off"), "on", "Repack weights for the kernels once.", ("memory",)),
)

#: Exists when more than one thread is granted.
SPIN = Knob("-spin", ("on", "off"), "on", "Idle threads spin instead of sleeping.", ("threads",))

#: Where a switch has nothing to switch off.
REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement("-layout:nchwc", "off", "-graph", ("all",), "no other level changes the layout"),
    *(
        Requirement(name, "off", "-graph", ("all", "extended", "basic"), "nothing is optimised")
        for name in SWITCHES
        if name != "-layout:nchwc"
    ),
)

#: Session entries whose effect is seen in the optimised graph.
_SEEN = {"session.enable_quant_qdq_cleanup"}


@dataclass(frozen=True)
class SessionSettings:
    """What a session is made with, in a form that can be written down.

    Attributes:
        level: Graph optimisation level, by its name in the library.
        disabled_optimizers: Optimizers switched off.
        entries: Session configuration entries.
        threads: Threads of one operator.
    """

    level: str
    disabled_optimizers: tuple[str, ...]
    entries: Mapping[str, str]
    threads: int

    @property
    def spins(self) -> bool:
        """True when idle threads of the session keep a core busy."""
        return self.threads > 1 and self.entries.get("session.intra_op.allow_spinning") != "0"

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
    if values["-qdq:cleanup"] == "on":
        entries["session.enable_quant_qdq_cleanup"] = "1"
    if values["-prepack"] == "off":
        entries["session.disable_prepacking"] = "1"
    if values.get(SPIN.name) == "off":
        entries["session.intra_op.allow_spinning"] = "0"
    off = tuple(n for knob, (_, names) in SWITCHES.items() if values[knob] == "off" for n in names)
    used = int(values.get("-threads", threads))
    return SessionSettings(LEVELS[values["-graph"]], off, entries, used)


class OrtEngine:
    """One inference session; see `base.Engine`.

    Args:
        source: File to load, and the seconds its transforms took.
        settings: Session settings.
        model: The model it was made of; lends an input set to `save`.
        scratch: Folder for the optimised graph, which is read and thrown away.

    Raises:
        Exception: Whatever the library raises when it cannot make a session.
    """

    def __init__(
        self, source: Transformed, settings: SessionSettings, model: Model, scratch: Path
    ) -> None:
        self._path, self._settings, self._model = source.path, settings, model
        optimized = scratch / "optimized.onnx"
        start = time.perf_counter()
        self._session: onnxruntime.InferenceSession | None = self._make(optimized)
        self.build_seconds = source.seconds + time.perf_counter() - start
        self.hash = self._effect(optimized)
        self._names = [output.name for output in self._session.get_outputs()]

    def _make(
        self, optimized: Path | None = None, *, profile: Path | None = None
    ) -> onnxruntime.InferenceSession:
        import onnxruntime

        options = self._settings.options()
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile)
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
            if self._path.with_name(f"{self._path.name}.data").is_file():
                entry = "session.optimized_model_external_initializers_"
                options.add_session_config_entry(f"{entry}file_name", f"{optimized.name}.data")
                options.add_session_config_entry(f"{entry}min_size_in_bytes", "1024")
        return onnxruntime.InferenceSession(
            str(self._path),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(self._settings.disabled_optimizers),
        )

    def _effect(self, optimized: Path) -> str:
        import onnx

        # Fusions name the weights they make at random, so the file's bytes say nothing.
        graph = fingerprint_of(onnx.load(str(optimized)))
        acting = {k: v for k, v in self._settings.entries.items() if k not in _SEEN}
        text = json.dumps([graph, acting, self._settings.threads], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def run(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Outputs by name, copies; see `base.Engine`."""
        if self._session is None:
            self._session = self._make()
        outputs = self._session.run(self._names, dict(inputs))
        return {n: np.array(o) for n, o in zip(self._names, outputs, strict=True)}

    def time(self, inputs: Tensors, seconds: float) -> list[float]:
        """Milliseconds of each inference, inputs bound beforehand; see `base.Engine`."""
        if self._session is None:
            self.run(inputs)  # a new session's first inference is slower
            assert self._session is not None
        binding = self._session.io_binding()
        held = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in held.items():
            binding.bind_cpu_input(name, array)
        for name in self._names:
            binding.bind_output(name, "cpu")
        run, clock = self._session.run_with_iobinding, time.perf_counter_ns
        spent: list[float] = []
        end = clock() + round(seconds * 1e9)
        while True:
            start = clock()
            run(binding)
            now = clock()
            spent.append((now - start) / 1e6)
            if now >= end:
                return spent

    def quiesce(self) -> None:
        """Give up a session whose idle threads spin: they slow a neighbour down by 70 %."""
        if self._settings.spins:
            self._session = None

    def layers(self, inputs: Tensors, inferences: int) -> Layers:
        """Nodes of the optimised graph and their kernel times; see `layers.Layered`."""
        import onnx

        alone = statistics.median(self.time(inputs, 0.2))
        with tempfile.TemporaryDirectory(prefix="routepilot-profile-") as text:
            folder = Path(text)
            session = self._make(folder / "optimized.onnx", profile=folder / "profile")
            for _ in range(inferences + PROFILE_WARMUP):
                session.run(self._names, dict(inputs))
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
            graph = onnx.load(str(folder / "optimized.onnx"), load_external_data=False).graph
        return Layers(
            _layers_of(events, inferences),
            dict(Counter(node.op_type for node in graph.node).most_common()),
            alone,
            _mean_last([e["dur"] for e in events if e.get("name") == "model_run"], inferences),
            inferences,
        )

    def save(self, folder: Path) -> list[str]:
        """Write `model.onnx`, `session.json`, an input set and `load.py`; see `base.Engine`."""
        return save_engine(
            folder, self._path, self._model, {"session.json": asdict(self._settings)}, LOAD
        )

    def close(self) -> None:
        """Free the session."""
        self._session = None


def _mean_last(microseconds: list[int], count: int) -> float:
    """Mean of the last `count` durations, milliseconds."""
    return sum(microseconds[-count:]) / count / 1e3


def _layers_of(events: list[dict[str, Any]], inferences: int) -> tuple[Layer, ...]:
    """Layers of a profile: one kernel event a node and inference, warm-up first."""
    spent: dict[tuple[str, str, str], list[int]] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            facts = event.get("args", {})
            key = (
                name.removesuffix("_kernel_time"),
                str(facts.get("op_name", "")),
                str(facts.get("provider", "")),
            )
            spent.setdefault(key, []).append(int(event["dur"]))
    return tuple(Layer(*key, _mean_last(durations, inferences)) for key, durations in spent.items())


def save_engine(
    folder: Path, path: Path, model: Model, settings: Mapping[str, object], load: str
) -> list[str]:
    """Write what loading an engine takes.

    Args:
        folder: Where to.
        path: ONNX file, copied as `model.onnx`; weights that lie beside it keep their file's name,
            by which it refers to them.
        model: Prepared model, whose first input set becomes `input.npz`.
        settings: Contents by name of the JSON file.
        load: Text of `load.py`.

    Returns:
        Names of the files written.
    """
    weights = path.with_name(f"{path.name}.data")
    if weights.is_file():
        shutil.copyfile(weights, folder / weights.name)
    shutil.copyfile(path, folder / "model.onnx")
    np.savez(folder / "input.npz", **model.selection()[0])  # type: ignore[arg-type]
    for name, content in settings.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "load.py").write_text(load, encoding="utf-8")
    return sorted(["model.onnx", "input.npz", "load.py", *settings]) + (
        [weights.name] if weights.is_file() else []
    )


#: How a user loads the engine.
LOAD = '''"""Load the tuned model and run it once: `python load.py`. Needs onnxruntime and numpy."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort

here = Path(__file__).resolve().parent

# What the session was tuned with.
settings = json.loads((here / "session.json").read_text())
options = ort.SessionOptions()
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, settings["level"])
options.intra_op_num_threads = settings["threads"]
options.inter_op_num_threads = 1
for name, value in settings["entries"].items():
    options.add_session_config_entry(name, value)

# The session itself: the optimizers that were switched off must stay so.
session = ort.InferenceSession(
    str(here / "model.onnx"),
    options,
    providers=["CPUExecutionProvider"],
    disabled_optimizers=settings["disabled_optimizers"],
)

# One inference, with an input set that the model was tuned on.
outputs = session.run(None, dict(np.load(here / "input.npz")))
for output, value in zip(session.get_outputs(), outputs):
    print(output.name, value.shape, value.dtype)
'''
