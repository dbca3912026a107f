"""The corpus: registry, splits, and a model of each kind that is really made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from routepilot.env import zoo
from routepilot.env.errors import InputError


def test_names_are_unique_and_families_stay_in_one_split() -> None:
    names = [entry.name for entry in zoo.ENTRIES]
    assert len(set(names)) == len(names) >= 16
    splits: dict[str, set[str]] = {}
    for entry in zoo.ENTRIES:
        splits.setdefault(entry.family, set()).add(entry.split)
    assert all(len(found) == 1 for found in splits.values())
    assert len(splits) >= 8
    assert {s for found in splits.values() for s in found} == {"train", "validation", "test"}
    assert sum(entry.trained for entry in zoo.ENTRIES) >= 8


def test_listing_says_where_weights_come_from() -> None:
    for row in zoo.listing():
        assert {"name", "family", "split", "trained", "licence", "parameters", "shapes"} <= set(row)
        assert row["licence"]
        assert isinstance(row["parameters"], int) and row["parameters"] > 0, row["name"]
        assert row["trained"] == (row["package"] != "defined here")


def test_unknown_model_names_near_ones() -> None:
    with pytest.raises(InputError, match="resnet"):
        zoo.entry("resnett")


@pytest.mark.parametrize("name", ["silero_vad", "tcn", "bert"])
def test_a_model_is_made_as_checked_in(name: str, tmp_path: Path) -> None:
    missing = zoo.available(zoo.entry(name))
    if missing is not None:
        pytest.skip(f"{name} is not available: {missing}")
    model = zoo.load_model(name, cache=tmp_path)
    assert [(name, True)] == [(n, ok) for n, ok, _ in zoo.check([name])]
    shapes = {spec.name: spec.shape for spec in model.inputs}
    assert shapes == zoo.entry(name).shapes
    first, second = model.selection_reference()[:2]
    for output in first:
        assert np.isfinite(first[output]).all()
    assert any(not np.allclose(first[o], second[o], rtol=1e-3) for o in first)
