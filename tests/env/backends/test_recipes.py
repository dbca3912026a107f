from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from routepilot.env.backends import load_backend
from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.recipes import (
    INTEGER_RECIPES,
    QDQ_RECIPES,
    RECIPES,
    WEIGHTS,
    Transformed,
    transform,
)
from routepilot.env.models import Model


def make(
    model: Model, recipe: str, workdir: Path, weights: str = "s8", fuse: bool = False
) -> Transformed:
    scratch = workdir / "scratch"
    scratch.mkdir(exist_ok=True)
    made = transform(model, recipe, weights, fuse, workdir, scratch)
    assert not list(scratch.iterdir())
    return made


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(str(path)).graph.node)


def fed_by_dequantize(path: Path, operator: str) -> int:
    graph = onnx.load(str(path)).graph
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    return sum(
        made_by.get(node.input[0]) == "DequantizeLinear"
        for node in graph.node
        if node.op_type == operator
    )


def relative_error(model: Model, route: str, workdir: Path) -> float:
    backend = load_backend("onnxruntime")
    engine = backend.build(model, backend.catalog().parse(route), workdir)
    assert not isinstance(engine, BuildFailure), engine.reason
    given, wanted = engine.run(model.selection()[0])["y"], model.selection_reference()[0]["y"]
    engine.close()
    return float(np.linalg.norm(given - wanted) / np.linalg.norm(wanted))


def test_names_and_kinds_agree() -> None:
    assert set(QDQ_RECIPES) < set(INTEGER_RECIPES) < set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_close_to_float_but_not_float(
    convolutions: Model, tmp_path: Path, recipe: str
) -> None:
    # One spared bit: no processor overflows.
    weights = "-weights=s7" if recipe in INTEGER_RECIPES else ""
    error = relative_error(convolutions, f"-quantize={recipe} {weights}", tmp_path)
    assert 1e-5 < error < 0.1


@pytest.mark.parametrize(
    ("recipe", "conv", "matmul"),
    [("static", 3, 1), ("static_conv", 3, 0), ("static_matmul", 0, 1)],
)
def test_calibrated_recipes_touch_their_operators_alone(
    convolutions: Model, tmp_path: Path, recipe: str, conv: int, matmul: int
) -> None:
    path = make(convolutions, recipe, tmp_path).path
    products = fed_by_dequantize(path, "MatMul") + fed_by_dequantize(path, "Gemm")
    assert (fed_by_dequantize(path, "Conv"), products) == (conv, matmul)


def test_operators_of_the_other_recipes(
    convolutions: Model, recurrent: Model, tmp_path: Path
) -> None:
    assert operators(make(convolutions, "qoperator", tmp_path).path)["QLinearConv"] == 3
    assert operators(make(convolutions, "weights8", tmp_path).path)["MatMulNBits"] == 1
    dynamic = operators(make(recurrent, "dynamic", tmp_path).path)
    assert dynamic["DynamicQuantizeLSTM"] == dynamic["MatMulInteger"] == 1
    assert operators(make(convolutions, "dynamic", tmp_path).path)["ConvInteger"] == 0


@pytest.mark.parametrize("recipe", ["dynamic", "static"])
def test_weights_are_stored_as_asked(convolutions: Model, tmp_path: Path, recipe: str) -> None:
    stored = {}
    for kind in WEIGHTS:
        graph = onnx.load(str(make(convolutions, recipe, tmp_path, kind).path)).graph
        arrays = [numpy_helper.to_array(t) for t in graph.initializer]
        stored[kind] = max((a for a in arrays if a.dtype.itemsize == 1), key=np.size)
    assert stored["u8"].dtype == np.uint8
    assert stored["s8"].dtype == stored["s7"].dtype == np.int8
    assert np.abs(stored["s7"].astype(int)).max() <= 64 < np.abs(stored["s8"].astype(int)).max()


def test_a_recipe_that_finds_nothing_gives_the_model_itself(
    transformer: Model, convolutions: Model, tmp_path: Path
) -> None:
    assert make(transformer, "none", tmp_path) == Transformed(transformer.path, 0.0)
    made = make(transformer, "static_conv", tmp_path)
    assert made.path == transformer.path and made.seconds > 0
    assert make(convolutions, "none", tmp_path, fuse=True).path == convolutions.path


def test_fusion_comes_before_quantisation(transformer: Model, tmp_path: Path) -> None:
    fused = make(transformer, "none", tmp_path, fuse=True)
    assert operators(fused.path)["SkipLayerNormalization"] == 2
    both = make(transformer, "dynamic", tmp_path, fuse=True)
    found = operators(both.path)
    assert found["SkipLayerNormalization"] == 2 and found["DynamicQuantizeLinear"] > 0
    assert both.seconds > fused.seconds


def test_files_are_found_again_with_their_seconds(convolutions: Model, tmp_path: Path) -> None:
    first = make(convolutions, "static", tmp_path)
    stamp = first.path.stat().st_mtime_ns
    assert make(convolutions, "static", tmp_path) == first
    assert first.path.stat().st_mtime_ns == stamp
    note = json.loads(first.path.with_suffix(".json").read_text())
    assert 0 < note["seconds"] < first.seconds  # folding counts too


def test_models_do_not_share_files(convolutions: Model, recurrent: Model, tmp_path: Path) -> None:
    first = make(convolutions, "dynamic", tmp_path)
    second = make(recurrent, "dynamic", tmp_path)
    assert first.path != second.path
    assert operators(second.path)["DynamicQuantizeLSTM"] == 1


def test_a_step_without_its_note_is_made_again(convolutions: Model, tmp_path: Path) -> None:
    first = make(convolutions, "dynamic", tmp_path)
    first.path.with_suffix(".json").unlink()
    first.path.write_bytes(b"half a file")
    again = make(convolutions, "dynamic", tmp_path)
    assert again.path == first.path and operators(again.path)["MatMulInteger"] == 1


def test_a_tool_that_fails_leaves_no_file(convolutions: Model, tmp_path: Path) -> None:
    shutil.copytree(convolutions.folder, tmp_path / "bundle")
    damaged = replace(convolutions, folder=tmp_path / "bundle")
    damaged.path.write_bytes(b"no model")
    workdir = tmp_path / "work"
    workdir.mkdir()
    with pytest.raises(Exception, match="model|parse|protobuf|Protobuf"):
        make(damaged, "static", workdir)
    assert [item.name for item in workdir.iterdir()] == ["scratch"]


@pytest.mark.parametrize("recipe", ["none", "dynamic", "static", "qoperator", "weights8"])
def test_weights_beside_the_file_stay_beside_it(
    convolutions: Model, tmp_path: Path, recipe: str
) -> None:
    """Models above protobuf's limit keep their weights in a second file."""
    shutil.copytree(convolutions.folder, tmp_path / "bundle")
    large = replace(convolutions, folder=tmp_path / "bundle")
    onnx.save_model(
        onnx.load(str(convolutions.path)),
        str(large.path),
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=64,
    )
    workdir, saved = tmp_path / "work", tmp_path / "saved"
    workdir.mkdir()
    saved.mkdir()
    path = make(large, recipe, workdir).path
    assert path.with_name(f"{path.name}.data").is_file()
    backend = load_backend("onnxruntime")
    engine = backend.build(large, backend.catalog().parse(f"-quantize={recipe}"), workdir)
    assert not isinstance(engine, BuildFailure), engine.reason
    assert path.with_name(f"{path.name}.data").name in engine.save(saved)
    engine.close()
    shutil.rmtree(workdir)
    done = subprocess.run([sys.executable, str(saved / "load.py")], capture_output=True, text=True)
    assert done.returncode == 0 and "(1, 10)" in done.stdout, done.stderr
