"""The precision variants of an ONNX file."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_tensorrt
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, checker, helper, load, numpy_helper, save

from routepilot.env.backends import load_backend
from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.tensorrt_compiler import Compiler, Plan, Settings, find_module
from routepilot.env.backends.tensorrt_options import Quantizer
from routepilot.env.backends.tensorrt_precision import bfloat16_bits, require_modelopt, variant
from routepilot.env.errors import InputError, MissingExtraError
from routepilot.env.models import Model, prepare
from routepilot.env.outcomes import Status


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


def test_bfloat16_leaves_masks_at_the_edge_of_float32_alone(tmp_path: Path) -> None:
    """Rounded to bfloat16, the lowest float32 would be minus infinity."""
    lowest = np.finfo(np.float32).min
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Where", ["m", "h", "low"], ["s"]),
            helper.make_node("Softmax", ["s"], ["y"]),
        ],
        "masked",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 8])],
        [
            numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"),
            numpy_helper.from_array(np.array([[True] * 8, [False] * 8]), "m"),
            numpy_helper.from_array(np.array([lowest], np.float32), "low"),
        ],
    )
    opsets = [helper.make_opsetid("", 17)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "masked.onnx")
    model = prepare(tmp_path / "masked.onnx", cache=tmp_path)
    (tmp_path / "scratch").mkdir()
    proto = load(str(variant(model, "bf16", tmp_path, tmp_path / "scratch").path))
    checker.check_model(proto)
    kinds = {t.name: t.data_type for t in proto.graph.initializer}
    assert kinds["low"] == TensorProto.FLOAT
    assert kinds["w"] == TensorProto.BFLOAT16
    assert np.isinf(
        (bfloat16_bits(np.array([lowest], np.float32)).astype(np.uint32) << 16).view("f")
    )


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


# --- Model Optimizer ---


def _found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


HAS_MODELOPT = _found("modelopt.onnx.quantization")


@pytest.fixture
def modelopt(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in that copies the file and keeps what it was asked."""
    asked: list[dict[str, Any]] = []

    def quantize(**words: Any) -> None:
        asked.append(words)
        proto = load(words["onnx_path"])
        if words["quantize_mode"] == "int8":  # of fp8 it finds nothing, as itself does in `tiny`
            proto.graph.node[0].op_type = "DequantizeLinear"
        save(proto, words["output_path"])

    for name in ("modelopt", "modelopt.onnx", "modelopt.onnx.quantization"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["modelopt.onnx.quantization"].quantize = quantize  # type: ignore[attr-defined]
    return asked


def test_modelopt_is_asked_for_calibrated_nodes_in_place_of_ours(
    modelopt: list[dict[str, Any]], tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tensorrt.install(monkeypatch)
    backend = load_backend("tensorrt", {"quantizer": "modelopt"})
    assert backend.catalog()["-precision"].values == ("model", "fp16", "bf16", "int8", "fp8")
    assert backend.target().settings["quantizer"] == "modelopt"
    built = backend.build(tiny, backend.catalog().parse("-precision=int8"), tmp_path)
    assert not isinstance(built, BuildFailure)
    built.close()
    (words,) = modelopt
    assert words["quantize_mode"] == "int8"
    assert words["high_precision_dtype"] == "fp32"  # what stays in float keeps its type
    assert words["calibration_eps"] == ["cpu"]
    sets = tiny.selection()
    assert words["calibration_data"]["x"].shape == (len(sets) * 1, 3, 32, 32)
    np.testing.assert_array_equal(words["calibration_data"]["x"][1:2], sets[1]["x"])
    failed = backend.build(tiny, backend.catalog().parse("-precision=fp8"), tmp_path)
    assert isinstance(failed, BuildFailure)
    assert failed.status is Status.BUILD_FAILED
    assert "found nothing to quantize" in failed.reason


def test_without_modelopt_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "modelopt", None)
    with pytest.raises(MissingExtraError, match=r"routepilot\[modelopt\]"):
        load_backend("tensorrt", {"quantizer": "modelopt"})
    with pytest.raises(InputError, match="allowed: onnxruntime, modelopt"):
        load_backend("tensorrt", {"quantizer": "other"})
    assert "fp8" not in load_backend("tensorrt").catalog()["-precision"].values


@pytest.mark.skipif(not HAS_MODELOPT, reason="the extra modelopt is not installed")
@pytest.mark.parametrize(("mode", "bound"), [("int8", 0.05), ("fp8", 0.1)])
def test_modelopt_itself_writes_explicit_nodes(
    mode: str, bound: float, transformer: Model, tmp_path: Path
) -> None:
    require_modelopt()
    (tmp_path / "scratch").mkdir()
    path = variant(transformer, mode, tmp_path, tmp_path / "scratch", Quantizer.MODELOPT).path
    proto = load(str(path))
    assert "DequantizeLinear" in [node.op_type for node in proto.graph.node]
    float8 = TensorProto.FLOAT8E4M3FN in {t.data_type for t in proto.graph.initializer}
    assert float8 == (mode == "fp8")
    kinds = [i.type.tensor_type.elem_type for i in load(str(transformer.path)).graph.input]
    assert [i.type.tensor_type.elem_type for i in proto.graph.input] == kinds
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    (given,) = session.run(None, dict(transformer.selection()[0]))
    (wanted,) = transformer.selection_reference()[0].values()
    assert np.linalg.norm(given - wanted) < bound * np.linalg.norm(wanted)
    if _found("tensorrt_rtx_bindings"):
        compiler = Compiler(find_module("tensorrt_rtx"), Settings(compute_capability="8.9"))
        shapes = {spec.name: spec.shape for spec in transformer.inputs}
        assert isinstance(compiler.compile(compiler.parse(path, shapes)), Plan)
