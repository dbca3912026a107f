"""The ONNX file in other precisions, as TensorRT wants them.

Owns casts to float16 and bfloat16 with their ranges checked, and explicit int8 or float8 Q/DQ
calibrated on the selection inputs: ONNX Runtime's quantizer, or NVIDIA's Model Optimizer where the
extra `modelopt` brings it. In TensorRT 11 every network is typed by its file, so precision is
chosen here. Knows no builder and no accuracy gate. The steps are kept as those of `recipes.py` are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.base import Tensors
from routepilot.env.backends.recipes import (
    KeptSteps,
    Transformed,
    file_key,
    fold_constants,
    is_split,
    tensor_ranges,
)
from routepilot.env.backends.tensorrt_options import Quantizer
from routepilot.env.child import one_line
from routepilot.env.errors import MissingExtraError

if TYPE_CHECKING:
    import onnx

    from routepilot.env.models import Model

#: A node that sees greater magnitudes on the selection inputs stays in float32. Half of float16's
#: greatest number (65504), since other inputs can reach further than those seen.
GREATEST = 32752.0

#: The same for bfloat16: beyond its greatest number float32 has a little room left, in which masks
#: are often written; rounded, they would be infinite, and a softmax over a row of them no number.
GREATEST_BRAIN = 3.3895e38

#: Operators that get explicit int8; the rest stays in float.
INT8_OPERATORS = ("Conv", "MatMul", "Gemm")

#: What TensorRT asks of Q/DQ: zero points of 0, float biases, a pair of its own for each reader,
#: pairs on weights, and none behind the operator (the fused kernel gives float).
INT8_OPTIONS = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "QuantizeBias": False,
    "AddQDQPairToWeight": True,
    "DedicatedQDQPair": True,
    "OpTypesToExcludeOutputQuantization": list(INT8_OPERATORS),
}


def require_modelopt() -> None:
    """Prove that Model Optimizer's ONNX part is there.

    Raises:
        MissingExtraError: It is not, or does not load.
    """
    try:
        import modelopt.onnx.quantization  # noqa: F401
    except (ImportError, OSError) as error:
        raise MissingExtraError(
            "quantizer=modelopt needs NVIDIA's Model Optimizer, which cannot be loaded"
            f" ({one_line(str(error))}); install it with: pip install 'routepilot[modelopt]', or"
            " leave the option out"
        ) from None


def variant(
    model: Model,
    precision: str,
    workdir: Path,
    scratch: Path,
    quantizer: Quantizer = Quantizer.ONNXRUNTIME,
) -> Transformed:
    """The model's file in a precision, made or found made.

    Args:
        model: Prepared model; its selection input sets calibrate.
        precision: A value of `tensorrt_catalog.PRECISION_KNOB`, or `fp8`.
        workdir: Folder that keeps the files.
        scratch: Folder for what is thrown away, on the same file system.
        quantizer: What writes Q/DQ; `fp8` needs Model Optimizer.

    Raises:
        Exception: Whatever the tools raise; the caller turns it into a build failure.
    """
    start = Transformed(model.path, 0.0)
    if precision == "model":
        return start
    kept = KeptSteps(workdir, scratch, file_key(model))
    inputs = model.selection()
    if quantizer is Quantizer.MODELOPT and precision in ("int8", "fp8"):
        optimize = partial(_optimize, inputs=inputs, mode=precision)
        return kept.step(f"modelopt-{precision}", start, start, optimize)
    if precision == "int8":
        # Scales must not land on tensors that a folded normalisation removes.
        start = kept.step("folded", start, start, fold_constants)
        return kept.step("trt-int8", start, start, partial(_quantize, inputs=inputs))
    half = partial(halve, inputs=inputs, brain=precision == "bf16")
    return kept.step(f"trt-{precision}", start, start, half)


def _quantize(source: Path, out: Path, inputs: Sequence[Tensors]) -> None:
    import onnx
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    operators = list(INT8_OPERATORS)
    ranges = tensor_ranges(source, out.with_name("calibration.onnx"), operators, inputs)
    proto, kind = onnx.load(str(source)), QuantType.QInt8
    which: tuple[Any, ...] = (ranges, [], [], operators, INT8_OPTIONS)
    quantizer = QDQQuantizer(proto, True, False, kind, kind, *which)
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(str(out), is_split(source))


def _optimize(source: Path, out: Path, inputs: Sequence[Tensors], mode: str) -> None:
    """Q/DQ by Model Optimizer, calibrated on the CPU; what stays in float keeps its type."""
    import onnx
    from modelopt.onnx.quantization import quantize

    together = {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]}
    quantize(
        onnx_path=str(source),
        quantize_mode=mode,
        calibration_data=together,
        calibration_method="max",
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        use_external_data_format=is_split(source),
        output_path=str(out),
        log_level="ERROR",
    )
    written = onnx.load(str(out), load_external_data=False).graph.node if out.is_file() else ()
    if all(node.op_type != "DequantizeLinear" for node in written):
        raise ValueError(f"Model Optimizer found nothing to quantize to {mode}")


def halve(
    source: Path,
    out: Path,
    inputs: Sequence[Tensors],
    brain: bool,
    kept: Sequence[str] | None = None,
) -> None:
    """Write the graph with float32 cast to 16 bits; inputs and outputs stay as they are.

    Args:
        source: ONNX file.
        out: File to write.
        inputs: Input sets that show which nodes would overflow 16 bits.
        brain: bfloat16 instead of float16.
        kept: Operators that stay in float32; the tool's own list when None.
    """
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    proto = onnx.load(str(source))
    taken: set[str] = set()
    for index, node in enumerate(proto.graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.name or node.op_type}_{index}"
        taken.add(node.name)
    greatest = GREATEST_BRAIN if brain else GREATEST
    wide = _out_of_range(source, proto, out.with_name("ranges.onnx"), inputs, greatest)
    weights = {tensor.name: tensor for tensor in onnx.load(str(source)).graph.initializer}
    done = convert_float_to_float16(
        proto,
        keep_io_types=True,
        node_block_list=wide,
        op_block_list=None if kept is None else list(kept),
        disable_shape_infer=is_split(source),
    )
    if brain:
        _to_bfloat16(done.graph, weights)
    OnnxModel(done).topological_sort()  # the tool puts its casts last
    onnx.save(
        done,
        str(out),
        save_as_external_data=is_split(source),
        location=f"{out.name}.data",
    )


def _out_of_range(
    source: Path,
    proto: onnx.ModelProto,
    scratch: Path,
    inputs: Sequence[Tensors],
    greatest: float,
) -> list[str]:
    """Names of the nodes that see magnitudes beyond the greatest."""
    from onnx import TensorProto, numpy_helper

    operators = sorted({node.op_type for node in proto.graph.node})
    found = tensor_ranges(source, scratch, operators, inputs)
    wide = set()
    for name in found.keys():  # noqa: SIM118  (its own class, not a dictionary)
        if _is_beyond(_greatest(*found[name].range_value), greatest):
            wide.add(name)
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            if _is_beyond(_greatest(numpy_helper.to_array(tensor)), greatest):
                wide.add(tensor.name)
    return [n.name for n in proto.graph.node if wide & {*n.input, *n.output}]


def _is_beyond(magnitude: float, greatest: float) -> bool:
    """Whether a tensor is too wide; an infinity is one in bfloat16 too."""
    return magnitude > greatest and not (math.isinf(magnitude) and greatest == GREATEST_BRAIN)


def _greatest(*arrays: Any) -> float:
    return max((float(np.max(np.abs(a), initial=0.0)) for a in map(np.asarray, arrays)), default=0)


def _to_bfloat16(graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto]) -> None:
    """Turn every float16 of a converted graph into bfloat16, weights from their float32."""
    from onnx import AttributeProto, TensorProto

    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            _retype(tensor, weights.get(tensor.name, tensor))
    for node in graph.node:
        for attribute in node.attribute:
            for tensor in _tensors(attribute):
                _retype(tensor, tensor)
            subgraphs = list(attribute.graphs)
            if (
                attribute.type == AttributeProto.GRAPH
            ):  # looking into an absent one makes it present
                subgraphs.append(attribute.g)
            for subgraph in subgraphs:
                _to_bfloat16(subgraph, weights)
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16
    for info in (*graph.input, *graph.output):
        kind = info.type.tensor_type
        if kind.elem_type == TensorProto.FLOAT16:
            kind.elem_type = TensorProto.BFLOAT16
    del graph.value_info[:]


def _tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    from onnx import TensorProto

    for tensor in (attribute.t, *attribute.tensors):
        if tensor.data_type == TensorProto.FLOAT16:  # an absent one has no type
            yield tensor


def _retype(tensor: onnx.TensorProto, source: onnx.TensorProto) -> None:
    from onnx import TensorProto, numpy_helper

    values = np.asarray(numpy_helper.to_array(source), dtype=np.float32)
    data = bfloat16_bits(values).tobytes()
    name, dims = tensor.name, list(tensor.dims)
    tensor.Clear()
    tensor.name, tensor.data_type, tensor.raw_data = name, TensorProto.BFLOAT16, data
    tensor.dims.extend(dims)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16 numbers, ties to even; finite values only."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.asarray(rounded >> np.uint32(16), dtype=np.uint16)
