"""Knob importance finds the knobs that were made to matter."""

from __future__ import annotations

import pytest
import synthetic

from routepilot.env.errors import InputError
from routepilot.training.importance import Importance, importance, shown


def test_the_corpus_moves_by_engine_and_precision() -> None:
    found = importance(synthetic.table())
    names = [knob.knob for knob in found.knobs]
    assert set(names[:2]) == {"-engine", "-precision"}
    assert set(names) == {knob.name for knob in synthetic.CATALOG.knobs}
    assert found.r2 > 0.5 and len(found.models) == 8
    for knob in found.knobs:
        assert knob.low <= knob.importance <= knob.high
    top, last = found.knobs[0], found.knobs[-1]
    assert top.low > 0.1
    assert abs(last.importance) < 0.05


def test_one_model_has_its_own_order() -> None:
    even = importance(synthetic.table(), "model0").knobs
    assert even[0].knob == "-engine"
    odd = importance(synthetic.table(), "model1").knobs
    assert odd[0].knob == "-engine" or odd[0].knob == "-precision"
    precision = {k.knob: k for k in odd}["-precision"]
    assert precision.low > {k.knob: k for k in even}["-precision"].high


def test_equal_seeds_give_equal_figures() -> None:
    table = synthetic.table(4)
    assert importance(table, seed=3) == importance(table, seed=3)


def test_nothing_is_not_less_than_nothing() -> None:
    assert shown([Importance("-k", -0.0001, -0.012, -0.0002)]) == [("-k", "0.0 %", "-1.2 to 0.0")]


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="model0"):
        importance(synthetic.table(2), "nobody")
