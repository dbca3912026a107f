"""Near-duplicates across a split are found, and what is merely alike is not called one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import synthetic

from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.training.leakage import NEAR_OUTCOMES, find_leakage


def varied() -> RouteTable:
    """The made table with models of their own kind each, so that no two are alike by chance."""
    made = synthetic.table()
    rng = np.random.default_rng(4)
    cards = tuple(
        replace(card, features=tuple(rng.normal(0, 1, len(card.features)))) for card in made.models
    )
    outcomes = {
        card.fingerprint: {
            route: tuple(moved(one, float(rng.normal(0, 0.3))) for one in found)
            for route, found in made.outcomes[card.fingerprint].items()
        }
        for card in cards
    }
    return replace(made, models=cards, outcomes=outcomes)


def moved(outcome: Outcome, by: float) -> Outcome:
    measured = outcome.measurement
    if measured is None or outcome.route.is_default:
        return outcome
    return replace(outcome, measurement=synthetic.measurement(measured.log_speedup + by))


def with_copy(table: RouteTable, noise: float) -> RouteTable:
    """The table with model0 once more, in another family and under another name."""
    first = table.models[0]
    copy = replace(
        first,
        name="copy",
        family="elsewhere",
        fingerprint="f" * 64,
        features=tuple(x + 0.01 for x in first.features),
    )
    rng = np.random.default_rng(1)
    outcomes = {
        route: tuple(moved(one, float(rng.normal(0, noise))) for one in found)
        for route, found in table.outcomes[first.fingerprint].items()
    }
    return replace(
        table,
        models=(*table.models, copy),
        outcomes={**table.outcomes, copy.fingerprint: outcomes},
    )


def test_a_copy_in_another_family_is_a_duplicate() -> None:
    found = find_leakage(with_copy(varied(), noise=0.01))
    assert [{p.judged, p.known} for p in found.duplicates] == [{"model0", "copy"}]
    assert found.pairs[0].flags == ("features", "outcomes")
    assert found.pairs[0].outcomes is not None and found.pairs[0].outcomes < 0.1


def test_noise_as_large_as_the_effects_is_no_duplicate_by_outcomes() -> None:
    found = find_leakage(with_copy(varied(), noise=0.6))
    assert found.pairs[0].flags == ("features",)
    assert found.duplicates == ()


def test_unrelated_models_are_not_flagged() -> None:
    found = find_leakage(varied())
    assert not [p for p in found.pairs if p.flags]
    outcomes = [p.outcomes for p in found.pairs if p.outcomes is not None]
    assert min(outcomes) > NEAR_OUTCOMES and np.median(outcomes) == pytest.approx(0.9, abs=0.3)


def test_the_same_model_twice_is_the_plainest_leak() -> None:
    made = varied()
    twin = replace(made.models[0], name="twin", family="elsewhere")
    found = find_leakage(replace(made, models=(*made.models, twin)))
    assert {found.duplicates[0].judged, found.duplicates[0].known} == {"model0", "twin"}
    assert "same" in found.duplicates[0].flags


def test_one_family_at_a_time_compares_each_cross_family_pair_once() -> None:
    found = find_leakage(varied())
    assert found.compared == 8 * 7 // 2 - 4  # four families of two
    assert {frozenset((p.judged, p.known)) for p in found.within} == {
        frozenset((f"model{2 * k}", f"model{2 * k + 1}")) for k in range(4)
    }


def test_a_split_compares_judged_with_known() -> None:
    made = varied()
    names = dict(zip(made.families, ("resnet", "vit", "convnext", "gpt"), strict=True))
    cards = tuple(replace(card, family=names[card.family]) for card in made.models)
    found = find_leakage(replace(made, models=cards), "test")
    assert found.compared == 2 * 6
    assert {p.judged_family for p in found.pairs} == {"gpt"}
    json.dumps(found.as_json(), allow_nan=False)
