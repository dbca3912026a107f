"""Planning and collecting: the plan is legal and repeatable, a collection resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from routepilot.env.accuracy import Gate, regate
from routepilot.env.backends import load_backend
from routepilot.env.errors import InputError
from routepilot.env.models import Model
from routepilot.env.records import ModelCard
from routepilot.env.routes import DEFAULT_ROUTE
from routepilot.env.store import RecordStore
from routepilot.training.cli_corpus import family_and_model, own_family
from routepilot.training.collect import (
    CorpusModel,
    Progress,
    Repeats,
    at_most,
    collect,
    plan_routes,
    table_from_store,
)
from routepilot.training.inputs import NamedModel
from routepilot.training.rechecks import unconfirmed_best
from routepilot.training.session import SessionConfig


@pytest.mark.parametrize("count", [1, 60, 90])
def test_plan_holds_every_single_change_and_only_legal_routes(count: int) -> None:
    catalog = load_backend("cpu", {}).catalog()
    plan = plan_routes(catalog, count, seed=3)
    assert len(plan) == len(set(plan)) >= count
    assert DEFAULT_ROUTE not in plan
    assert set(catalog.neighbours(DEFAULT_ROUTE)) <= set(plan)
    assert all(catalog.is_legal(route) and catalog.parse(str(route)) == route for route in plan)
    assert plan == plan_routes(catalog, count, seed=3)


def test_a_smaller_plan_is_a_draw_of_the_whole() -> None:
    plan = plan_routes(load_backend("cpu", {}).catalog(), 1)
    few = at_most(plan, 12, seed=4)
    assert len(few) == 12 and few == [route for route in plan if route in set(few)]
    assert few == at_most(plan, 12, seed=4) != at_most(plan, 12, seed=5)
    assert at_most(plan, len(plan) + 1) == plan


def test_collection_resumes_where_it_stopped(tiny: Model, tmp_path: Path) -> None:
    backend = load_backend("cpu", {})
    plan = plan_routes(backend.catalog(), 1)[:5]
    corpus = [CorpusModel(tiny, "toys", trained=False)]
    store = tmp_path / "records.sqlite"
    heard: list[Progress] = []

    def run(stop_after: int) -> None:
        heard.clear()
        collect(
            corpus,
            store,
            SessionConfig(),
            plan,
            tmp_path / "work",
            repeats=Repeats(controls=2, best=2),
            on_progress=heard.append,
            should_stop=lambda: sum(p.outcome is not None for p in heard) >= stop_after,
        )

    run(2)
    assert sum(p.outcome is not None for p in heard) == 2
    run(99)
    fresh = sum(p.outcome is not None for p in heard)
    run(99)
    assert sum(p.outcome is not None for p in heard[: len(plan)]) == 0

    table = table_from_store(store, backend.target().key, [tiny.fingerprint], {"seed": 0})
    outcomes = table.outcomes[tiny.fingerprint]
    assert set(outcomes) == {DEFAULT_ROUTE, *plan}
    # What was built again: the fastest by their first figures, at most two at each of two limits,
    # and at most two more, until what is best was built twice.
    again = {route for route in plan if len(outcomes[route]) == 2}
    assert fresh == 3 + 2 + len(again)
    expected = set()
    for limit in Repeats().limits:
        judged = [regate(outcomes[route][0], Gate(limit=limit)) for route in plan]
        faster = sorted((o for o in judged if o.log_speedup > 0), key=lambda o: -o.log_speedup)
        expected |= {o.route for o in faster[:2]}
    assert expected <= again and len(again - expected) <= 2
    assert unconfirmed_best(outcomes) is None or len(again - expected) == 2
    assert len(outcomes[DEFAULT_ROUTE]) == 3
    controls = [abs(o.log_speedup) for o in outcomes[DEFAULT_ROUTE][1:]]
    assert table.manifest["noise_floor"] == pytest.approx(np.quantile(controls, 0.95))
    card = table.card(tiny.fingerprint)
    assert card is not None
    assert (card.family, card.trained) == ("toys", False)
    assert card.default_latency_ms > 0
    assert table.manifest["seed"] == 0


def test_features_of_another_version_are_measured_anew_and_nothing_is_built(
    tiny: Model, tmp_path: Path
) -> None:
    backend, heard = load_backend("cpu", {}), list[Progress]()
    plan, store = plan_routes(backend.catalog(), 1)[:2], tmp_path / "records.sqlite"

    def run() -> ModelCard:
        heard.clear()
        collect(
            [CorpusModel(tiny, "toys", trained=False)],
            store,
            SessionConfig(),
            plan,
            tmp_path / "work",
            repeats=Repeats(controls=0),
            on_progress=heard.append,
        )
        key = backend.target().key
        card = table_from_store(store, key, [tiny.fingerprint], {}).card(tiny.fingerprint)
        assert card is not None
        return card

    card = run()
    with RecordStore(store) as kept:
        kept.add_model(replace(card, features=card.features[:-1]))  # one feature fewer
    assert run() == card
    assert all(p.outcome is None for p in heard)


def test_a_model_of_ones_own_is_a_family_of_its_own_unless_told(tmp_path: Path) -> None:
    folder = str(tmp_path / "odd=name.onnx")
    assert family_and_model("a.onnx") == ("", "a.onnx")
    assert family_and_model("nets=a.onnx") == ("nets", "a.onnx")
    assert family_and_model(folder) == ("", folder), "a path may hold the sign"
    with pytest.raises(InputError, match="FAMILY=MODEL"):
        family_and_model("nets=")


def test_families_of_own_models(tiny: Model) -> None:
    assert own_family(NamedModel(tiny)) == tiny.name
    assert own_family(NamedModel(tiny, "resnet")) == "resnet"
