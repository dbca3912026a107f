"""A run goes on with what it knew of its model, though a probe that failed would work by now."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import calm_backend
import pytest
import synthetic
from hostile_backend import hostile_model

from routepilot.env import probes
from routepilot.env.features import PROBES, model_features
from routepilot.env.models import Model, prepare
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import ModelCard, RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.store import RecordStore
from routepilot.env.tables import save_table
from routepilot.training import defaults
from routepilot.training.candidates import make_problem
from routepilot.training.session import Session, SessionConfig
from routepilot.training.sharing import Sharing, SharingSession
from routepilot.training.tune import tune


class Stopped(Exception):
    """Stands for the kill."""


def _made_table(model: Model) -> RouteTable:
    """Models like this one; which routes are good for them hangs on whether probes are known."""
    known, cards, outcomes = model_features(model), [], {}
    for number in range(16):
        probed = number % 2
        features = list(known)
        features[PROBES] = [-5.0 if probed else probes.UNKNOWN] * len(probes.NAMES)
        fingerprint = f"{number:064x}"
        cards.append(ModelCard(fingerprint, f"m{number}", f"f{number}", True, tuple(features), 5.0))
        routes = [DEFAULT_ROUTE, *calm_backend.CATALOG.neighbours(DEFAULT_ROUTE)]
        good = ("c", "0.98") if probed else ("b", "0.5")
        outcomes[fingerprint] = {
            route: (_outcome(route, bool({*good} & {*route.values.values()})),) for route in routes
        }
    target = calm_backend.make({}).target()
    return RouteTable(calm_backend.CATALOG, target, tuple(cards), outcomes)


def _outcome(route: Route, is_good: bool) -> Outcome:
    gain = 0.0 if route.is_default else 0.5 if is_good else -0.1
    return Outcome(
        route,
        Status.OK,
        measurement=synthetic.measurement(gain),
        losses={"rel_l2": 1e-6},
        build_seconds=0.1,
        engine_hash=route.key,
    )


@pytest.fixture
def prepared(tmp_path: Path) -> Model:
    return prepare(hostile_model(tmp_path / "hostile.onnx"), cache=tmp_path / "cache")


def test_a_run_that_began_without_its_probes_ends_without_them(
    prepared: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed in the first run and would work in the second: the run goes on all the same."""
    save_table(_made_table(prepared), tmp_path / "made.parquet")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(defaults, "find_table", lambda name: tmp_path / "made.parquet")
    works = {"yes": False}

    def making(folder: Path, names: Collection[str]) -> dict[str, float]:
        return dict.fromkeys(names, -5.0) if works["yes"] else {}

    monkeypatch.setattr(probes, "_made_in_child", making)
    heard: list[str] = []

    def asked(name: str, stop: int | None = None) -> list[str]:
        """The routes of a run in its own folder, or of as much as ran before it was stopped."""
        folder = tmp_path / name / "model"
        if not folder.exists():
            shutil.copytree(
                prepared.folder, folder, ignore=shutil.ignore_patterns("run", probes.FILE)
            )
        model = replace(prepared, folder=folder)
        found: list[str] = []

        def hear(number: int, outcome: Outcome) -> None:
            found.append(str(outcome.route))
            if len(found) == stop:
                raise Stopped

        with suppress(Stopped):
            tune(
                model,
                backend="calm_backend:make",
                agent="knn",
                max_builds=6,
                out=tmp_path / name / "out",
                on_outcome=hear,
                say=heard.append,
            )
        return found

    whole = asked("whole")
    assert asked("stopped", stop=2) == whole[:2]
    works["yes"] = True
    assert asked("informed") != whole, "the probes decide, or this test says nothing"
    heard.clear()
    assert asked("stopped") == whole
    assert not any(line.startswith("probing") for line in heard)
    assert any("stays so for its sake" in line for line in heard)
    assert asked("whole") == whole, "and so does a run that is repeated"


def test_a_model_is_probed_once_in_a_run_of_many_agents_and_said_to_be_once(
    prepared: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(probes, "_made_in_child", lambda folder, names: made.append(folder) or {})
    heard: list[str] = []
    config = SessionConfig(backend="calm_backend:make")
    with (
        RecordStore(tmp_path / "records.sqlite") as store,
        Session(prepared, config, store, tmp_path / "work") as session,
    ):
        for name in ("random", "fast"):
            make_problem(session, name, 4, 0, say=heard.append)
    assert len(made) == 1 and len(heard) == 1 and heard[0].startswith("probing hostile")


def test_agents_at_work_at_once_are_told_the_same_of_their_model(
    prepared: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(({}, dict.fromkeys(probes.NAMES, -5.0)))
    monkeypatch.setattr(probes, "_made_in_child", lambda folder, names: next(answers))
    config, sharing, work = SessionConfig(backend="calm_backend:make"), Sharing(), tmp_path / "work"
    with RecordStore(tmp_path / "records.sqlite") as store:
        first, second = (
            SharingSession(sharing, prepared, config, store, work / name) for name in "ab"
        )
        assert first.features[PROBES] == (probes.UNKNOWN,) * len(probes.NAMES)
        assert second.features == first.features
