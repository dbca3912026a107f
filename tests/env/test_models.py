"""Prepared models: what is accepted, what is refused, what the fingerprint follows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from routepilot.env import normalise
from routepilot.env.errors import InputError, ModelError
from routepilot.env.models import (
    Model,
    fingerprint_of,
    is_bundle,
    parse_shape,
    prepare,
    read_input_sets,
)


def dense(
    weight: np.ndarray | None = None,
    *,
    batch: int | str = 2,
    width: int | str = 4,
    opset: int = 17,
    listed: bool = False,
    name: str = "w",
    out: int = 3,
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
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, out])],
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


def test_what_can_be_done_meanwhile_is_done_once_and_its_error_leaves_nothing(
    tmp_path: Path,
) -> None:
    path, cache = write(dense(), tmp_path / "m.onnx"), tmp_path / "cache"
    calls: list[int] = []

    def refuse() -> None:
        raise InputError("no such policy")

    with pytest.raises(InputError, match="no such policy"):
        prepare(path, cache=cache, meanwhile=refuse)
    assert not any(cache.iterdir())
    for _ in range(2):  # the second finds the references made, and has no time to spare
        prepare(path, cache=cache, meanwhile=lambda: calls.append(1))
    assert calls == [1]


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


def test_lifted_models_keep_a_file_format_that_older_runtimes_read(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "old",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
    )
    for opset, ir_version in ((9, 4), (17, onnx.IR_VERSION)):
        opsets = [helper.make_opsetid("", opset)]
        proto = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
        model = prepare(write(proto, tmp_path / f"{opset}.onnx"), cache=tmp_path / "cache")
        assert onnx.load(str(model.path)).ir_version <= 10


@pytest.mark.parametrize("text", ["x", "x=", "=1x2", "x=1xa", "x=1x-2", "x=0x3"])
def test_bad_shapes_are_named(text: str) -> None:
    with pytest.raises(ModelError) as refusal:
        parse_shape(text)
    assert text in str(refusal.value)


def test_shape_is_read() -> None:
    assert parse_shape("a=b=1x3x224") == ("a=b", (1, 3, 224))


def graph_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int]]],
    outputs: dict[str, tuple[int, list[int | str]]],
    weights: dict[str, np.ndarray] | None = None,
    **more: object,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in outputs.items()],
        [numpy_helper.from_array(w, n) for n, w in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, **more)


FLOATS = {"x": (TensorProto.FLOAT, [4])}
OUT = {"y": (TensorProto.FLOAT, [4])}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"not a model at all", "not an ONNX file"),
        (dense().SerializeToString()[:-20], "cut short"),
        (onnx.ModelProto(ir_version=8).SerializeToString(), "not valid ONNX"),
    ],
    ids=["missing", "empty", "text", "truncated", "no graph"],
)
def test_files_that_are_no_model_are_refused(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as refusal:
        prepare(path, cache=tmp_path / "cache")
    assert "\n" not in str(refusal.value)


def test_paths_that_the_system_refuses_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be opened"):
        prepare(tmp_path / ("a" * 5000), cache=tmp_path / "cache")


@pytest.mark.parametrize("kind", [TensorProto.STRING, TensorProto.BFLOAT16])
def test_inputs_that_nobody_can_feed_are_refused(kind: int, tmp_path: Path) -> None:
    proto = graph_of(
        [helper.make_node("Identity", ["x"], ["y"])], {"x": (kind, [2])}, {"y": (kind, [2])}
    )
    with pytest.raises(ModelError, match="input 'x' holds"):
        prepare(write(proto, tmp_path / "m.onnx"), cache=tmp_path / "cache")


def test_made_inputs_follow_the_seed(tmp_path: Path) -> None:
    path = write(dense(), tmp_path / "m.onnx")
    sets = [
        prepare(path, seed=seed, cache=tmp_path / place).selection()[0]["x"]
        for seed, place in ((3, "a"), (3, "b"), (4, "c"))
    ]
    np.testing.assert_array_equal(sets[0], sets[1])
    assert not np.array_equal(sets[0], sets[2])


@pytest.mark.parametrize("axis", [0, 1])
def test_indices_follow_the_axis_of_a_table_in_a_constant(axis: int, tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.eye(9, dtype=np.float32)[: (3 if axis == 0 else 9)])
    proto = graph_of(
        [
            helper.make_node("Constant", [], ["table"], value=table),
            helper.make_node("Gather", ["table", "ids"], ["y"], axis=axis),
        ],
        {"ids": (TensorProto.INT64, [200])},
        {"y": (TensorProto.FLOAT, ["a", "b"])},
    )
    model = prepare(write(proto, tmp_path / "m.onnx"), cache=tmp_path / "cache")
    assert max(one["ids"].max() for one in model.selection()) == (2 if axis == 0 else 8)


def with_function(factor: float) -> onnx.ModelProto:
    """A model whose only number sits in a function of its own."""
    body = [
        helper.make_node("Constant", [], ["c"], value_float=factor),
        helper.make_node("Mul", ["a", "c"], ["b"]),
    ]
    scale = helper.make_function("mine", "Scale", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    node = helper.make_node("Scale", ["x"], ["y"], domain="mine")
    return graph_of([node], FLOATS, OUT, functions=[scale])


def test_functions_are_inlined_and_count_in_the_fingerprint(tmp_path: Path) -> None:
    two, three = (
        prepare(write(with_function(f), tmp_path / f"{f}.onnx"), cache=tmp_path / "cache")
        for f in (2.0, 3.0)
    )
    assert two.fingerprint != three.fingerprint
    assert not onnx.load(str(three.path)).functions
    np.testing.assert_allclose(three.selection_reference()[0]["y"], three.selection()[0]["x"] * 3)
    assert fingerprint_of(with_function(2.0)) != fingerprint_of(with_function(3.0))


def test_every_kind_of_weight_counts_in_the_fingerprint() -> None:
    def branch(value: float) -> onnx.ModelProto:  # a weight that only a branch reads
        sides = {
            f"{side}_branch": helper.make_graph(
                [helper.make_node("Add", ["x", "w"], [side])],
                side,
                [],
                [helper.make_tensor_value_info(side, TensorProto.FLOAT, [4])],
            )
            for side in ("then", "else")
        }
        inputs = {"c": (TensorProto.BOOL, []), **FLOATS}
        weights = {"w": np.full(4, value, np.float32)}
        return graph_of([helper.make_node("If", ["c"], ["y"], **sides)], inputs, OUT, weights)

    def passed_on(value: float) -> onnx.ModelProto:  # a weight that is an output
        outputs = {**OUT, "w": (TensorProto.FLOAT, [4])}
        weights = {"w": np.full(4, value, np.float32)}
        return graph_of([helper.make_node("Relu", ["x"], ["y"])], FLOATS, outputs, weights)

    def sparse(value: float) -> onnx.ModelProto:
        proto = graph_of([helper.make_node("Add", ["x", "w"], ["y"])], FLOATS, OUT)
        values = helper.make_tensor("w", TensorProto.FLOAT, [1], [value])
        places = helper.make_tensor("", TensorProto.INT64, [1], [2])
        proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4]))
        return proto

    def words(value: float) -> onnx.ModelProto:
        proto = graph_of([helper.make_node("Identity", ["w"], ["y"])], {}, OUT)
        text = helper.make_tensor("w", TensorProto.STRING, [1], [f"word {value}"])
        proto.graph.initializer.append(text)
        return proto

    for make in (branch, passed_on, sparse, words):
        assert fingerprint_of(make(1.0)) == fingerprint_of(make(1.0)), make.__name__
        assert fingerprint_of(make(1.0)) != fingerprint_of(make(2.0)), make.__name__


def test_large_models_keep_their_weights_beside_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.env.features import model_features

    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    path = write(dense(weight, width=64, out=64), tmp_path / "m.onnx")
    small = prepare(path, cache=tmp_path / "small")
    monkeypatch.setattr(normalise, "EXTERNAL_BYTES", 1000)
    large = prepare(path, cache=tmp_path / "large")
    assert (large.folder / "model.onnx.data").stat().st_size >= weight.nbytes
    assert large.fingerprint == small.fingerprint
    assert model_features(large) == model_features(small)
    for one, other in zip(large.selection_reference(), small.selection_reference(), strict=True):
        np.testing.assert_array_equal(one["y"], other["y"])


def test_half_precision_is_told(tmp_path: Path) -> None:
    told = {}
    for dtype in (np.float16, np.float32):
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        proto = graph_of(
            [helper.make_node("Add", ["x", "w"], ["y"])],
            {"x": (kind, [4])},
            {"y": (kind, [4])},
            {"w": np.ones(4, dtype)},
        )
        name = np.dtype(dtype).name
        model = prepare(write(proto, tmp_path / f"{name}.onnx"), cache=tmp_path / "cache")
        told[name] = json.loads((model.folder / "model.json").read_text())["reference_precision"]
    assert told == {"float16": "float16", "float32": "float32"}


def test_what_the_reference_engine_lacks_is_refused_in_one_line(tmp_path: Path) -> None:
    proto = graph_of([helper.make_node("Imaginary", ["x"], ["y"], domain="mine")], FLOATS, OUT)
    with pytest.raises(ModelError, match="Imaginary") as refusal:
        prepare(write(proto, tmp_path / "m.onnx"), cache=tmp_path / "cache")
    assert "\n" not in str(refusal.value) and "Traceback" not in str(refusal.value)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_cut_input_files_are_refused(share: float, tmp_path: Path) -> None:
    np.savez(tmp_path / "whole.npz", x=np.ones((2, 4), np.float32))
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=r"cut\.npz"):
        read_input_sets([tmp_path / "cut.npz"])


def test_a_single_array_is_no_input_set(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.ones(3))
    with pytest.raises(ModelError, match="without a name"):
        read_input_sets([tmp_path / "one.npy"])


def test_a_folder_of_another_kind_is_no_bundle(tmp_path: Path) -> None:
    assert not is_bundle(tmp_path)
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ModelError, match="prepare the ONNX file again"):
        Model.load(tmp_path)
