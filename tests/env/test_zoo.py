"""The corpus: entries, splits, data, and models of each origin that are really made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routepilot.env import zoo, zoo_data, zoo_entries
from routepilot.env.errors import InputError, ModelError
from routepilot.env.models import Model, prepare

HAS_ZOO = all(find_spec(name) for name in ("torch", "onnxscript", "sklearn"))


def test_the_corpus_is_as_large_as_it_claims() -> None:
    names = [entry.name for entry in (*zoo.ENTRIES, *zoo.VARIANTS)]
    assert len(set(names)) == len(names)
    assert len(zoo.ENTRIES) >= 48
    assert len({entry.family for entry in zoo.ENTRIES}) >= 16
    origins = Counter(entry.origin for entry in zoo.ENTRIES)
    assert origins["package"] >= 12
    assert origins["package"] + origins["trained here"] >= 24


def test_every_family_is_in_one_split_and_every_split_has_trained_models() -> None:
    file = Path(zoo_entries.__file__).with_name("zoo_splits.json")
    listed = [f for found in json.loads(file.read_text("utf-8")).values() for f in found]
    assert len(set(listed)) == len(listed)
    assert set(listed) == {entry.family for entry in zoo.ENTRIES}
    for split in zoo_entries.SPLITS:
        inside = [entry for entry in zoo.ENTRIES if entry.split == split]
        assert sum(entry.trained for entry in inside) >= 4, split
        assert {row["name"] for row in zoo.listing(split, variants=False)} == {
            entry.name for entry in inside
        }
    with pytest.raises(InputError, match="validation"):
        zoo.listing("holdout")


def test_a_variant_stays_with_its_model() -> None:
    for variant in zoo.VARIANTS:
        base = zoo.entry(variant.variant_of)
        assert not base.variant_of
        assert (variant.family, variant.split, variant.origin) == (
            base.family,
            base.split,
            base.origin,
        )
        assert variant.name.startswith(f"{base.name}@")
        assert variant.shapes != base.shapes


def test_listing_says_where_weights_come_from() -> None:
    for row in zoo.listing():
        assert {"name", "family", "split", "trained", "licence", "parameters", "shapes"} <= set(row)
        assert row["licence"]
        assert isinstance(row["parameters"], int) and row["parameters"] > 0, row["name"]
        assert row["trained"] == (row["origin"] != "random")
        assert (row["quality"] is not None) == (row["origin"] == "trained here"), row["name"]


def test_unknown_model_names_near_ones() -> None:
    with pytest.raises(InputError, match="resnet"):
        zoo.entry("resnett")


def test_text_parts_share_no_file() -> None:
    rng = np.random.default_rng(0)
    some = zoo_data.text(rng, 4, 200, "test")
    assert some.min() > 0 and some.max() < zoo_data.CHARACTERS
    train = zoo_data._text("train").tobytes()
    assert not any(row.astype(np.uint8).tobytes() in train for row in some)


def test_answers_of_made_data_are_right() -> None:
    rng = np.random.default_rng(0)
    source, shifted, target = zoo_data.unsorted(rng, 3, 20)
    assert (np.sort(source) == target).all() and (shifted[:, 1:] == target[:, :-1]).all()
    pictures, masks, boxes, kinds = zoo_data.scenes(rng, 4, 96)
    assert pictures.shape == (4, 3, 96, 96)
    for mask, corners, kind in zip(masks, boxes, kinds, strict=True):
        for (x0, y0, x1, y1), one in zip(corners * 96, kind, strict=True):
            inside = mask[int(y0) : int(y1) + 1, int(x0) : int(x1) + 1]
            assert (inside == one + 1).mean() > 0.3
            assert set(np.unique(inside)) <= {0, one + 1}
    adjacency, features, answers = zoo_data.graphs(rng, 2, 32)
    two = (adjacency @ adjacency @ features[:, :, :1])[..., 0] > 0
    assert (two == (answers > 0.5)).all()


def test_inputs_that_depend_on_each_other_are_drawn_together() -> None:
    drawn = zoo.entry("sorter").draw(np.random.default_rng(1))
    assert (np.sort(drawn["source"])[:, :-1] == drawn["target"][:, 1:]).all()


@pytest.mark.parametrize(
    "name",
    ["silero_vad", "tcn", "gpt", "squeezenet", "shufflenet", "scenes_ssd", "char_gpt@step"],
)
def test_a_model_is_made_as_checked_in(name: str, tmp_path: Path) -> None:
    missing = zoo.available(zoo.entry(name))
    if missing is not None:
        pytest.skip(f"{name} is not available: {missing}")
    model = zoo.load_model(name, cache=tmp_path)
    (checked,) = zoo.check([name])
    assert checked.ok, checked.detail
    assert checked.licence and checked.parameters > 0 and checked.megabytes > 0
    assert {spec.name: spec.shape for spec in model.inputs} == zoo.entry(name).shapes
    assert len(model.selection()) == 4 and len(model.confirmation()) == 2


def test_a_random_model_is_the_same_where_sums_are_added_in_another_order() -> None:
    """The library's oldest code path stands for another processor.

    It gives `shufflenet` other batch statistics in float32 than the usual path, so an export that
    measures them has another fingerprint.
    """
    missing = zoo.available(zoo.entry("shufflenet"))
    if missing is not None:
        pytest.skip(f"shufflenet is not available: {missing}")
    done = subprocess.run(
        [sys.executable, "-m", "routepilot", "zoo", "check", "--names", "shufflenet", "--json"],
        env={**os.environ, "MKL_CBWR": "COMPATIBLE"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    (row,) = json.loads(done.stdout)
    assert done.returncode == 0 and row["ok"], row["detail"]


def test_every_random_model_that_normalises_batches_has_its_statistics() -> None:
    pytest.importorskip("torch")
    from routepilot.env import zoo_export

    random = [e.name for e in zoo.ENTRIES if not e.trained]
    for name in random:
        zoo_export.make(zoo.entry(name).path)
    with pytest.raises(ModelError, match="no batch statistics that fit vgg"):
        zoo_export.load_statistics(zoo_export.make("resnet"), "vgg")


def test_measured_statistics_are_what_flows_through(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from routepilot.env import zoo_export

    measured = zoo.measure_statistics(["unet", "char_gru", "resnet@b8", "vit"])
    assert list(measured) == ["unet"]
    released = zoo_export.make("unet").state_dict()
    for key, tensor in measured["unet"].items():
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor, released[key], rtol=1e-4, atol=1e-6), key
    zoo_export.save_statistics(measured, tmp_path / "s.safetensors")
    assert (tmp_path / "s.safetensors").stat().st_size > 1000


@pytest.mark.parametrize("name", ["cpu", "cpu-2-threads", "h200"])
def test_released_tables_are_of_the_models_that_are_checked_in(name: str) -> None:
    from routepilot.env.tables import load_table
    from routepilot.training.defaults import find_table

    path = files("routepilot.env").joinpath("zoo_fingerprints.json")
    facts = json.loads(path.read_text(encoding="utf-8"))
    cards = load_table(find_table(name)).models
    assert cards
    for card in cards:
        assert card.fingerprint == facts[card.name]["fingerprint"], card.name


def test_the_liveness_table_is_of_the_models_that_are_checked_in() -> None:
    from routepilot.training.defaults import released_liveness

    table = released_liveness()
    assert table is not None
    path = files("routepilot.env").joinpath("zoo_fingerprints.json")
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert {m.fingerprint for m in table.models} == {
        facts[e.name]["fingerprint"] for e in zoo.ENTRIES
    }


def _constant_model(folder: Path, value: float) -> Model:
    """A graph whose output ignores what it is given but for a factor of 0."""
    from onnx import TensorProto, helper, save

    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "zero"], ["y"]), helper.make_node("Add", ["y", "c"], ["z"])],
        "constant",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [4])],
        [
            helper.make_tensor("zero", TensorProto.FLOAT, [4], [0.0] * 4),
            helper.make_tensor("c", TensorProto.FLOAT, [4], [value, value, value, 2 * value]),
        ],
    )
    opset = [helper.make_opsetid("", 17)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=9), str(folder / "c.onnx"))
    return prepare(folder / "c.onnx", cache=folder / "cache")


@pytest.mark.parametrize(("value", "words"), [(1.0, "depends"), (1e9, "scale"), (1e-9, "scale")])
def test_a_collapse_is_told(value: float, words: str, tmp_path: Path) -> None:
    assert words in zoo.insane(_constant_model(tmp_path, value))


@pytest.mark.skipif(not HAS_ZOO, reason="the extra zoo is not installed")
def test_a_step_with_a_cache_continues_the_prefill(tmp_path: Path) -> None:
    import torch

    from routepilot.env import zoo_export

    rng = np.random.default_rng(3)
    whole = torch.from_numpy(zoo_data.text(rng, 1, 20))
    prefill: Any = zoo_export.DEFINITIONS["char_gpt"]()
    step: Any = zoo_export.DEFINITIONS["char_gpt@step"]()
    for model in (prefill, step):
        zoo_export.load_weights(model, zoo_export.weights_file("char_gpt@step"))
    with torch.no_grad():
        expected = prefill(whole)[:, -1]
        found, column = step(whole[:, -1:], prefill.cache(whole[:, :-1]))
        wanted = prefill.cache(whole)[..., -1:, :]
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(column, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not HAS_ZOO, reason="the extra zoo is not installed")
def test_weights_of_another_definition_are_refused() -> None:
    from routepilot.env import zoo_export

    with pytest.raises(ModelError, match="do not fit"):
        zoo_export.load_weights(
            zoo_export.DEFINITIONS["char_gru"](), zoo_export.weights_file("char_gpt")
        )
