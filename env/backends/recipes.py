"""Precision recipes: what is done to the ONNX file before an engine compiles it.

Owns quantisation and offline fusion with ONNX Runtime's own tools. Knows no engine and no accuracy
gate: whether a recipe is good enough is for others to judge.

A recipe is part of the build that asks for it: its seconds count for every route that uses it, and
are kept beside the file so that they count the same when the file is found made. Tools run on one
thread, so that a recipe is the same file everywhere and disturbs no neighbour's timing.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepilot.env.backends.base import Tensors

if TYPE_CHECKING:
    import onnx

    from routepilot.env.models import Model

#: Values of `-quantize` besides `none`, each with its words. Activations are unsigned: signed ones
#: ran at 0.2 to 1.2 of the float speed on x86.
RECIPES: dict[str, str] = {
    "dynamic": "int8 weights and activations scaled at run time, in matrix products and LSTMs",
    "dynamic_channel": "the same with a scale per output channel",
    "static": "calibrated int8 in every operator, weights per channel",
    "static_tensor": "calibrated int8 in every operator, weights per tensor",
    "static_conv": "calibrated int8 in convolutions alone",
    "static_matmul": "calibrated int8 in matrix products alone",
    "static_conv_matmul": "calibrated int8 in convolutions and matrix products",
    "qoperator": "static_tensor written as fused quantised operators",
    "weights8": "8-bit weights in matrix products",
}

#: Values of `-weights`, each with its words. Without VNNI a processor adds pairs of products in 16
#: bits, where unsigned activations times signed weights overflow: on BERT the relative error was
#: 8.5 % with signed weights and 0.7 % with either of the others (EPYC with AVX2, one thread).
WEIGHTS: dict[str, str] = {
    "s8": "signed",
    "u8": "unsigned",
    "s7": "signed with one bit spared",
}

#: Recipes that store int8 weights, beside which `-weights` means something.
INTEGER_RECIPES = tuple(name for name in RECIPES if name != "weights8")

#: Recipes that leave QuantizeLinear and DequantizeLinear nodes in the graph.
QDQ_RECIPES = tuple(name for name in RECIPES if name.startswith("static"))

_CONV, _MATMUL = ("Conv",), ("MatMul", "Gemm")

#: Operators that a calibrated recipe touches; absent for all that the tool knows.
_OPERATORS = {
    "static_conv": _CONV,
    "static_matmul": _MATMUL,
    "static_conv_matmul": _CONV + _MATMUL,
}

#: Operators of the dynamic recipes. Never Conv: its integer kernel ran at 0.07 to 0.35 of the
#: float speed. Attention appears after transformer fusion.
_DYNAMIC = (*_MATMUL, "LSTM", "Attention")


@dataclass(frozen=True)
class Transformed:
    """A file to compile, and what making it cost.

    Attributes:
        path: ONNX file; the prepared model itself where no transform changed anything.
        seconds: Seconds it took when it was made.
    """

    path: Path
    seconds: float


def transform(
    model: Model, quantize: str, weights: str, fuse: bool, workdir: Path, scratch: Path
) -> Transformed:
    """Apply transformer fusion and a precision recipe, or find them applied.

    Args:
        model: Prepared model; its selection input sets calibrate.
        quantize: `none` or a name of `RECIPES`.
        weights: A name of `WEIGHTS`.
        fuse: Apply ONNX Runtime's transformer fusions first.
        workdir: Folder that keeps the files.
        scratch: Folder for what is thrown away, on the same file system.

    Raises:
        Exception: Whatever the tools raise; the caller turns it into a build failure.
    """
    kept = KeptSteps(workdir, scratch, file_key(model))
    start = Transformed(model.path, 0.0)
    stem = ""
    if fuse:
        stem = "fused-"
        start = kept.step("fused", start, start, _fuse)
    if quantize == "none":
        return start
    # Quantisers want constants folded and normalisations merged first, or scales land on tensors
    # that the engine never sees. If they then find nothing to do, the file before that is given.
    folded = kept.step(f"{stem}folded", start, start, fold_constants)

    def make(source: Path, out: Path) -> None:
        _quantize(source, out, quantize, weights, model.selection())

    return kept.step(f"{stem}{quantize}-{weights}", folded, start, make)


def file_key(model: Model) -> str:
    """What besides its name decides a recipe's file: the model, its input sets, the tools."""
    import onnxruntime

    text = f"{model.fingerprint} {model.folder.name} {onnxruntime.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class KeptSteps:
    """Steps kept as files `NAME-KEY.onnx`, each with a note of its seconds."""

    workdir: Path
    scratch: Path
    key: str

    def step(
        self,
        name: str,
        source: Transformed,
        unchanged: Transformed,
        make: Callable[[Path, Path], None],
    ) -> Transformed:
        """One step, made or found; `unchanged` stands in when it changes nothing."""
        place = self.workdir / f"{name}-{self.key}.onnx"
        note = place.with_suffix(".json")
        if not note.is_file():
            self._make(place, note, source.path, make)
        found = json.loads(note.read_text(encoding="utf-8"))
        path = place if found["changed"] else unchanged.path
        return Transformed(path, source.seconds + float(found["seconds"]))

    def _make(
        self, place: Path, note: Path, source: Path, make: Callable[[Path, Path], None]
    ) -> None:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=self.scratch) as made:
            out = Path(made) / place.name
            with _undisturbed(self.scratch):
                make(source, out)
                changed = _contents(source) != _contents(out)
            seconds = time.perf_counter() - start
            draft = out.with_suffix(".json")
            draft.write_text(json.dumps({"seconds": seconds, "changed": changed}))
            if changed:  # the weights beside a large file go first, the note last
                for item in sorted(out.parent.glob(f"{out.name}*"), reverse=True):
                    os.replace(item, self.workdir / item.name)
            os.replace(draft, note)


@contextmanager
def _undisturbed(scratch: Path) -> Iterator[None]:
    """Keep the tools' prints, advice, log settings and temporary files to themselves."""
    root = logging.getLogger()
    # Some of these tools call `logging.basicConfig` when they are imported.
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    folder = tempfile.tempdir
    logging.disable(logging.CRITICAL)
    tempfile.tempdir = str(scratch)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        tempfile.tempdir = folder
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)


def _contents(path: Path) -> tuple[list[str], list[str]]:
    """Operators and the hashes of weights: equal when a step only renamed or reordered."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    weights = [numpy_helper.to_array(tensor).tobytes() for tensor in graph.initializer]
    return (
        sorted(f"{node.domain}:{node.op_type}" for node in graph.node),
        sorted(hashlib.sha256(data).hexdigest() for data in weights),
    )


def is_split(path: Path) -> bool:
    """True when the weights lie beside the file, because protobuf ends at 2 GB."""
    return path.with_name(f"{path.name}.data").is_file()


def _session(path: Path, level: str, out: Path | None = None) -> Any:
    """A silent one-thread session that writes the graph it optimised to `out`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if out is not None:
        options.optimized_model_filepath = str(out)
        if is_split(path):
            entry = "session.optimized_model_external_initializers_"
            options.add_session_config_entry(f"{entry}file_name", f"{out.name}.data")
            options.add_session_config_entry(f"{entry}min_size_in_bytes", "1024")
    # The quantisers know MatMul and Add better than the Gemm between Reshapes made of them.
    return onnxruntime.InferenceSession(
        str(path),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["MatMulAddFusion"],
    )


def fold_constants(source: Path, out: Path) -> None:
    """Write the graph with constants folded and normalisations merged, still in float."""
    _session(source, "ORT_ENABLE_BASIC", out)


def _fuse(source: Path, out: Path) -> None:
    from onnxruntime.transformers import optimizer

    # BERT's fusions are the superset; with 0 heads the tool finds the number in the graph.
    fused = optimizer.optimize_model(
        str(source), model_type="bert", num_heads=0, hidden_size=0, opt_level=0, use_gpu=False
    )
    fused.save_model_to_file(str(out), use_external_data_format=is_split(source))


def _quantize(
    source: Path, out: Path, recipe: str, weights: str, inputs: Sequence[Tensors]
) -> None:
    import onnx

    proto = onnx.load(str(source))
    if recipe.startswith("dynamic"):
        _quantize_dynamic(proto, out, recipe == "dynamic_channel", weights, is_split(source))
    elif recipe == "weights8":
        _quantize_weights(proto, out, is_split(source))
    else:
        _quantize_static(source, proto, out, recipe, weights, inputs)


def _quantize_dynamic(
    proto: onnx.ModelProto, out: Path, per_channel: bool, weights: str, split: bool
) -> None:
    from onnxruntime import quantization as q

    q.quantize_dynamic(
        proto,
        str(out),
        op_types_to_quantize=list(_DYNAMIC),
        per_channel=per_channel,
        reduce_range=weights == "s7",
        weight_type=q.QuantType.QUInt8 if weights == "u8" else q.QuantType.QInt8,
        use_external_data_format=split,
    )


def _quantize_weights(proto: onnx.ModelProto, out: Path, split: bool) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        MatMulNBitsQuantizer,
    )

    # Blocks of 32 with integer arithmetic inside (level 4), as measured.
    config = DefaultWeightOnlyQuantConfig(
        block_size=32, is_symmetric=True, accuracy_level=4, bits=8
    )
    quantizer = MatMulNBitsQuantizer(proto, algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(str(out), split)


def _quantize_static(
    source: Path,
    proto: onnx.ModelProto,
    out: Path,
    recipe: str,
    weights: str,
    inputs: Sequence[Tensors],
) -> None:
    """What `quantize_static` does, which offers no way to calibrate on one thread."""
    from onnxruntime import quantization as q
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.quant_utils import QuantizationMode
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    known = sorted({*QLinearOpsRegistry, *QDQRegistry})
    operators = list(_OPERATORS.get(recipe, known))
    ranges = tensor_ranges(source, out.with_name("calibration.onnx"), operators, inputs)
    per_channel = recipe not in ("static_tensor", "qoperator")
    stored = q.QuantType.QUInt8 if weights == "u8" else q.QuantType.QInt8
    spared = weights == "s7"
    types = (stored, q.QuantType.QUInt8)
    which: tuple[Any, ...] = (ranges, [], [], operators, {})
    if recipe == "qoperator":
        mode = QuantizationMode.QLinearOps
        quantizer = ONNXQuantizer(proto, per_channel, spared, mode, True, *types, *which)
    else:
        quantizer = QDQQuantizer(proto, per_channel, spared, *types, *which)
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(str(out), is_split(source))


def tensor_ranges(
    source: Path, augmented: Path, operators: list[str], inputs: Sequence[Tensors]
) -> Any:
    """Least and greatest value of every tensor over the input sets."""
    from onnxruntime.quantization.calibrate import CalibrationDataReader, MinMaxCalibrater

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """The input sets, one after another."""

        def __init__(self) -> None:
            self.waiting = iter([dict(one) for one in inputs])

        def get_next(self) -> dict[str, Any] | None:
            return next(self.waiting, None)

    class Calibrater(MinMaxCalibrater):  # type: ignore[misc]
        """The tool's own, on one thread and silent."""

        def create_inference_session(self) -> None:
            self.infer_session = _session(augmented, "ORT_DISABLE_ALL")

    calibrater = Calibrater(
        source, operators, str(augmented), use_external_data_format=is_split(source)
    )
    calibrater.augment_graph()
    calibrater.create_inference_session()
    calibrater.collect_data(Reader())
    return calibrater.compute_data()
