"""The precision variants of an ONNX file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, checker, load, numpy_helper, save

from routepilot.env.backends.tensorrt_precision import bfloat16_bits, variant
from routepilot.env.models import Model, prepare


def test_fp16_leaves_wide_nodes_alone(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    proto = load(str(variant(tiny, "fp16", tmp_path, tmp_path / "scratch").path))
    kinds = {t.data_type for t in proto.graph.initializer}
    assert kinds == {TensorProto.FLOAT16}
    wide = load(str(tiny.path))
    weight = next(t for t in wide.graph.initializer if t.name == "d")
    values = numpy_helper.to_array(weight) * np.float32(1e7)
    weight.CopyFrom(numpy_helper.from_array(values, "d"))
    save(wide, tmp_path / "wide.onnx")
    model = prepare(tmp_path / "wide.onnx", cache=tmp_path)
    mixed = load(str(variant(model, "fp16", tmp_path, tmp_path / "scratch").path))
    types = {t.name: t.data_type for t in mixed.graph.initializer}
    assert types["d"] == TensorProto.FLOAT
    assert TensorProto.FLOAT16 in types.values()
    assert [i.type.tensor_type.elem_type for i in proto.graph.input] == [TensorProto.FLOAT]


def test_bfloat16_is_a_valid_model(transformer: Model, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    proto = load(str(variant(transformer, "bf16", tmp_path, tmp_path / "scratch").path))
    checker.check_model(proto)
    assert TensorProto.FLOAT16 not in {t.data_type for t in proto.graph.initializer}
    brain = next(t for t in proto.graph.initializer if t.data_type == TensorProto.BFLOAT16)
    source = next(t for t in load(str(transformer.path)).graph.initializer if t.name == brain.name)
    given = numpy_helper.to_array(brain).astype(np.float32)
    np.testing.assert_allclose(given, numpy_helper.to_array(source), rtol=2**-8)


def test_int8_is_explicit_and_close(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    path = variant(tiny, "int8", tmp_path, tmp_path / "scratch").path
    nodes = [n.op_type for n in load(str(path)).graph.node]
    assert nodes.count("DequantizeLinear") == 4  # data and weight of Conv and MatMul
    options = onnxruntime.SessionOptions()
    # Fused, ONNX Runtime overflows 16-bit sums on some processors; as written it does not.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    (given,) = session.run(None, dict(tiny.selection()[0]))
    wanted = tiny.selection_reference()[0]["y"]
    assert np.linalg.norm(given - wanted) < 0.05 * np.linalg.norm(wanted)


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -3.0e38, 1e-40], np.float32)
    back = (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)
    assert back[:3].tolist() == [1.0, 1.0, 1.0 + 2**-6]
    np.testing.assert_allclose(back[3], values[3], rtol=2**-8)
