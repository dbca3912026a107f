"""Prepared models: what is accepted, what is refused, what the fingerprint follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from routepilot.env.errors import ModelError
from routepilot.env.models import Model, fingerprint_of, parse_shape, prepare, read_input_sets


def dense(
    weight: np.ndarray | None = None,
    *,
    batch: int | str = 2,
    width: int | str = 4,
    opset: int = 17,
    listed: bool = False,
    name: str = "w",
) -> onnx.ModelProto:
    """x @ w, then a ReLU."""
    weight = np.arange(12, dtype=np.float32).reshape(4, 3) - 5 if weight is None else weight
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, width])]
    if listed:
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, weight.shape))
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", name], ["p"]),
            helper.make_node("Relu", ["p"], ["y"]),
        ],
        "dense",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 3])],
        [numpy_helper.from_array(weight, name)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def write(proto: onnx.ModelProto, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, str(path))
    return path


def test_references_are_what_the_model_computes(tmp_path: Path) -> None:
    model = prepare(write(dense(), tmp_path / "m.onnx"), cache=tmp_path / "cache")
    weight = np.arange(12, dtype=np.float32).reshape(4, 3) - 5
    assert (len(model.selection()), len(model.confirmation())) == (4, 1)
    for inputs, outputs in (
        (model.selection(), model.selection_reference()),
        (model.confirmation(), model.confirmation_reference()),
    ):
        for one, reference in zip(inputs, outputs, strict=True):
            np.testing.assert_allclose(reference["y"], np.maximum(one["x"] @ weight, 0), rtol=1e-5)
    assert model.outputs[0].shape == (2, 3)


def test_preparing_again_finds_it_made(tmp_path: Path) -> None:
    path = write(dense(), tmp_path / "m.onnx")
    first = prepare(path, cache=tmp_path / "cache")
    stamp = (first.folder / "model.json").stat().st_mtime_ns
    again = prepare(path, cache=tmp_path / "cache")
    assert again == first == Model.load(first.folder)
    assert (first.folder / "model.json").stat().st_mtime_ns == stamp
    other = prepare(path, cache=tmp_path / "cache", seed=1)
    assert other.fingerprint == first.fingerprint and other.folder != first.folder


def test_fingerprint_follows_the_computation_alone(tmp_path: Path) -> None:
    first = prepare(write(dense(), tmp_path / "a" / "m.onnx"), cache=tmp_path / "c1")
    renamed = dense(name="another_name")
    renamed.producer_name, renamed.graph.node[0].doc_string = "someone", "text"
    moved = prepare(write(renamed, tmp_path / "b" / "n.onnx"), cache=tmp_path / "c2")
    assert moved.fingerprint == first.fingerprint
    weight = np.zeros((4, 3), np.float32)
    changed = prepare(write(dense(weight), tmp_path / "z.onnx"), cache=tmp_path / "c3")
    assert changed.fingerprint != first.fingerprint
    assert fingerprint_of(dense(opset=16)) != fingerprint_of(dense(opset=17))


def test_weights_listed_as_inputs_and_old_opsets_are_normalised(tmp_path: Path) -> None:
    path = write(dense(opset=11, listed=True), tmp_path / "m.onnx")
    model = prepare(path, cache=tmp_path / "cache")
    assert [spec.name for spec in model.inputs] == ["x"]
    assert onnx.load(str(model.path)).opset_import[0].version >= 13


def test_external_data_is_read(tmp_path: Path) -> None:
    weight = np.ones((4, 3), np.float32)
    onnx.save(
        dense(weight),
        str(tmp_path / "m.onnx"),
        save_as_external_data=True,
        location="m.bin",
        size_threshold=0,
    )
    model = prepare(tmp_path / "m.onnx", cache=tmp_path / "cache")
    inside = prepare(write(dense(weight), tmp_path / "n.onnx"), cache=tmp_path / "cache")
    assert model.fingerprint == inside.fingerprint
    (tmp_path / "m.bin").unlink()
    with pytest.raises(ModelError):
        prepare(tmp_path / "m.onnx", cache=tmp_path / "fresh")


def test_open_dimensions(tmp_path: Path) -> None:
    path = write(dense(batch="n"), tmp_path / "m.onnx")
    assert prepare(path, cache=tmp_path / "cache").inputs[0].shape == (1, 4)
    wide = prepare(path, shapes={"x": (5, 4)}, cache=tmp_path / "cache")
    assert wide.inputs[0].shape == (5, 4)
    given = [{"x": np.ones((7, 4), np.float32)}] * 2
    assert prepare(path, inputs=given, cache=tmp_path / "cache").inputs[0].shape == (7, 4)
    unknown = write(dense(batch="n", width="d"), tmp_path / "u.onnx")
    with pytest.raises(ModelError, match="--shape x=NxN"):
        prepare(unknown, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"z": (2, 4)}, "inputs are x"),
        ({"x": (2, 4, 1)}, "3 dimensions"),
        ({"x": (2, 5)}, "5 in the given shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    shapes: dict[str, tuple[int, ...]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        prepare(write(dense(), tmp_path / "m.onnx"), shapes=shapes, cache=tmp_path / "cache")


def test_unsupported_operator_is_refused(tmp_path: Path) -> None:
    proto = dense()
    proto.graph.node[1].op_type = "Imaginary"
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="Imaginary"):
        prepare(path, cache=tmp_path / "cache")


def test_a_reference_with_nan_is_refused(tmp_path: Path) -> None:
    weight = np.full((4, 3), np.nan, np.float32)
    with pytest.raises(ModelError, match="NaN"):
        prepare(write(dense(weight), tmp_path / "m.onnx"), cache=tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".")]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.ones((2, 4))}, "float64"),
        ({"x": np.ones((3, 4), np.float32)}, "3 in the given shape"),
        ({}, "lacks 'x'"),
        ({"x": np.ones((2, 4), np.float32), "q": np.ones(1)}, "holds 'q'"),
    ],
)
def test_input_sets_that_do_not_fit_are_refused(
    arrays: dict[str, np.ndarray], words: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "one.npz", **arrays)
    sets = read_input_sets([tmp_path / "one.npz"])
    with pytest.raises(ModelError, match=words):
        prepare(write(dense(), tmp_path / "m.onnx"), inputs=sets, cache=tmp_path / "cache")


def test_input_sets_with_pickles_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ModelError, match=r"bad\.npz"):
        read_input_sets([tmp_path / "bad.npz"])


def test_token_ids_stay_inside_their_table(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(11, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        "lookup",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, [1, 200]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 200, 4])],
        [numpy_helper.from_array(table, "table")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = prepare(write(proto, tmp_path / "m.onnx"), cache=tmp_path / "cache")
    ids = np.concatenate([one["ids"].ravel() for one in model.selection()])
    assert ids.min() == 0 and ids.max() == 10


@pytest.mark.parametrize("text", ["x", "x=", "=1x2", "x=1xa", "x=1x-2", "x=0x3"])
def test_bad_shapes_are_named(text: str) -> None:
    with pytest.raises(ModelError) as refusal:
        parse_shape(text)
    assert text in str(refusal.value)


def test_shape_is_read() -> None:
    assert parse_shape("a=b=1x3x224") == ("a=b", (1, 3, 224))
