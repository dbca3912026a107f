"""Precision recipes: what is done to the ONNX file before an engine compiles it.

Owns quantisation and offline fusion with ONNX Runtime's own tools. Knows no engine. A transform is
part of the build that asks for it: its seconds count for every route that uses it, and are kept
beside the file so that they count the same when the file is found made.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepilot.env.backends.base import Tensors

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: Values of `-quantize` besides `none`, each with its sentence.
RECIPES: dict[str, str] = {
    "dynamic": "int8 weights and run-time int8 activations for matrix products",
    "dynamic_channel": "the same with a scale per output channel",
    "static": "calibrated int8 for every operator, weights per channel",
    "static_tensor": "calibrated int8 for every operator, weights per tensor",
    "static_conv": "calibrated int8 for convolutions alone",
    "static_matmul": "calibrated int8 for matrix products alone",
    "static_conv_matmul": "calibrated int8 for convolutions and matrix products",
    "qoperator": "calibrated int8 in fused quantised operators",
    "weights8": "8-bit weights of matrix products, float arithmetic",
}

#: Recipes that leave Quantize and Dequantize nodes in the graph.
QDQ_RECIPES = tuple(name for name in RECIPES if name.startswith("static"))

_OPERATORS: dict[str, list[str] | None] = {
    "static": None,
    "static_tensor": None,
    "qoperator": None,
    "static_conv": ["Conv"],
    "static_matmul": ["MatMul", "Gemm"],
    "static_conv_matmul": ["Conv", "MatMul", "Gemm"],
}


@dataclass(frozen=True)
class Transformed:
    """A file to compile, and what making it cost.

    Attributes:
        path: ONNX file.
        seconds: Seconds it took when it was made.
    """

    path: Path
    seconds: float


def transform(model: Model, quantize: str, fuse: bool, workdir: Path) -> Transformed:
    """Apply the transformer fusion and a precision recipe, or find them applied.

    Args:
        model: Prepared model; its selection inputs calibrate.
        quantize: `none` or a name of `RECIPES`.
        fuse: Apply ONNX Runtime's transformer fusions first.
        workdir: Folder that keeps the files.

    Raises:
        Exception: Whatever the tools raise; the caller turns it into a build failure.
    """
    current = Transformed(model.path, 0.0)
    if fuse:
        current = _kept(workdir / "fused.onnx", current, _fuse)
    if quantize != "none":
        name = f"{quantize}-fused.onnx" if fuse else f"{quantize}.onnx"
        inputs = model.selection()
        current = _kept(
            workdir / name, current, lambda source, out: _quantize(source, out, quantize, inputs)
        )
    return current


def _kept(place: Path, source: Transformed, make: Callable[[Path, Path], None]) -> Transformed:
    note = place.with_suffix(".json")
    if not (place.is_file() and note.is_file()):
        start = time.perf_counter()
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=place.parent, prefix=".making-"))
        try:
            with _quiet():
                make(source.path, draft / place.name)
            if _same_computation(source.path, draft / place.name):
                # A recipe that found nothing to do must give the engine it started from.
                shutil.copyfile(source.path, draft / place.name)
            for item in draft.iterdir():
                os.replace(item, place.parent / item.name)
            note.write_text(json.dumps({"seconds": time.perf_counter() - start}))
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return Transformed(place, source.seconds + float(json.loads(note.read_text())["seconds"]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tools' advice while they work."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _same_computation(a: Path, b: Path) -> bool:
    import onnx

    def operators(path: Path) -> list[str]:
        graph = onnx.load(str(path), load_external_data=False).graph
        return sorted(node.op_type for node in graph.node)

    return operators(a) == operators(b)


def _fuse(source: Path, out: Path) -> None:
    from onnxruntime.transformers import optimizer

    fused = optimizer.optimize_model(
        str(source), model_type="bert", opt_level=0, use_gpu=False, only_onnxruntime=False
    )
    fused.save_model_to_file(str(out))


class _Calibration:
    """The selection inputs, one after another, as ONNX Runtime's calibrator asks for them."""

    def __init__(self, inputs: Sequence[Tensors]) -> None:
        self._waiting = iter([dict(one) for one in inputs])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._waiting, None)

    def set_range(self, start_index: int, end_index: int) -> None:
        del start_index, end_index


def _quantize(source: Path, out: Path, recipe: str, inputs: Sequence[Tensors]) -> None:
    from onnxruntime import quantization as q

    if recipe.startswith("dynamic"):
        q.quantize_dynamic(
            str(source),
            str(out),
            op_types_to_quantize=["MatMul", "Gemm", "LSTM"],
            per_channel=recipe == "dynamic_channel",
            weight_type=q.QuantType.QInt8,
        )
        return
    if recipe == "weights8":
        _weights8(source, out)
        return
    folder = Path(tempfile.mkdtemp(dir=out.parent))
    prepared = folder / "prepared.onnx"
    try:
        _shape_inference(source, prepared)
        q.quantize_static(
            str(prepared),
            str(out),
            _reader(inputs),
            quant_format=q.QuantFormat.QOperator if recipe == "qoperator" else q.QuantFormat.QDQ,
            op_types_to_quantize=_OPERATORS[recipe],
            per_channel=recipe != "static_tensor" and recipe != "qoperator",
            activation_type=q.QuantType.QUInt8,
            weight_type=q.QuantType.QInt8,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reader(inputs: Sequence[Tensors]) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    # The tool checks for its own base class.
    reader = type("Reader", (_Calibration, CalibrationDataReader), {})
    return reader(inputs)


def _shape_inference(source: Path, out: Path) -> None:
    """Fold and fuse in float first, as the tool asks, so that scales land on real tensors."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(out)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def _weights8(source: Path, out: Path) -> None:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        MatMulNBitsQuantizer,
    )

    config = DefaultWeightOnlyQuantConfig(
        block_size=32, is_symmetric=True, accuracy_level=4, bits=8
    )
    quantizer = MatMulNBitsQuantizer(onnx.load(str(source)), algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(str(out))
