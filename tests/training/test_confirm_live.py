"""Live confirmation: turns are fair, builds are paid once, and without noise live is replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import calm_backend
import hostile_backend
import pytest

from routepilot.env.backends import load_backend
from routepilot.env.errors import InputError, ModelError
from routepilot.env.models import prepare
from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, combine
from routepilot.env.tables import save_table
from routepilot.training.collect import CorpusModel, Repeats, collect, table_from_store
from routepilot.training.confirm_live import LivePlan, confirm_live, policy_for
from routepilot.training.folds import Fold
from routepilot.training.inputs import NamedModel
from routepilot.training.live_figures import live_tables, write_live
from routepilot.training.session import SessionConfig

CALM = SessionConfig(backend="calm_backend:make")
AGENTS = ("random", "fast", "best-on-average")
ROUTES = (
    *({"-speed": speed} for speed in ("0.5", "0.98", "1.5", "2")),
    *({"-do": deed} for deed in ("inaccurate", "nan", "fail")),
    {"-twin": "b"},
    {"-speed": "0.5", "-do": "inaccurate"},
    {"-speed": "0.5", "-twin": "b"},
)


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Children import the made backends too."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(Path(calm_backend.__file__).parent)
        patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[NamedModel]:
    folder = tmp_path_factory.mktemp("models")
    found = []
    for relus, family in enumerate(("resnet", "vit", "unet", "gpt"), 1):
        file = hostile_backend.hostile_model(folder / f"m{relus}.onnx", relus)
        found.append(NamedModel(prepare(file, cache=folder / "cache"), family))
    return found


@pytest.fixture(scope="module")
def table(corpus: list[NamedModel], tmp_path_factory: pytest.TempPathFactory) -> RouteTable:
    """What the calm backend does, collected as any table is."""
    folder = tmp_path_factory.mktemp("table")
    store = folder / "records.sqlite"
    plan = combine(calm_backend.CATALOG, list(ROUTES))
    collect(
        [CorpusModel(n.model, n.family, n.trained) for n in corpus],
        store,
        CALM,
        plan,
        folder / "work",
        repeats=Repeats(controls=0),
    )
    key = load_backend("calm_backend:make", {}).target().key
    made = table_from_store(store, key, [n.model.fingerprint for n in corpus], {})
    families = {n.model.fingerprint: n.family for n in corpus}
    cards = tuple(replace(c, family=families[c.fingerprint]) for c in made.models)
    return replace(made, models=cards)


def test_live_is_replay_where_nothing_is_noisy(
    corpus: list[NamedModel], table: RouteTable, tmp_path: Path
) -> None:
    heard: list[tuple[str, str, int]] = []

    def hear(model: str, agent: str, number: int, outcome: Outcome) -> None:
        heard.append((model, agent, number))

    plan = LivePlan(AGENTS, builds=4)
    result = confirm_live(corpus[:2], table, plan, CALM, tmp_path, on_outcome=hear)
    assert [m["model"] for m in result["models"]] == ["m1", "m2"]
    for model in result["models"]:
        assert model["oracle"] == pytest.approx(model["oracle_replayed"], abs=1e-6)
        assert model["recorded_best"]["gain"] == pytest.approx(model["oracle"], abs=1e-6)
        for name, row in model["agents"].items():
            assert row["builds"] == row["replayed"]["builds"] == 4, name
            assert row["gains"] == pytest.approx(row["replayed"]["gains"], abs=1e-6), name
    sums = result["sums"]["best-on-average"]
    assert sums["live"]["1"]["value"] == pytest.approx(1.0)  # all models like the same route
    assert sums["replayed_models"] == 2 and sums["slower"] == 0
    assert sums["confirmed"] == pytest.approx(2.0, rel=0.02)
    assert sums["confirmed_share"] == pytest.approx(1.0, abs=0.02) and sums["refused"] == 0

    # Turns: in every round each agent once, another one first.
    rounds = [[agent for m, agent, n in heard if m == "m1" and n == k] for k in (1, 2, 3, 4)]
    assert all(sorted(one) == sorted(AGENTS) for one in rounds)
    assert [one[0] for one in rounds] == [*AGENTS, AGENTS[0]]


def test_a_build_is_paid_once_and_charged_to_each(
    corpus: list[NamedModel], table: RouteTable, tmp_path: Path
) -> None:
    import sqlite3
    from contextlib import closing

    plan = LivePlan(("fast", "best-on-average", "knn"), builds=4)
    result = confirm_live(corpus[:1], table, plan, CALM, tmp_path)
    rows = result["models"][0]["agents"]
    assert all(row["builds"] == 4 and row["seconds"] > 0 for row in rows.values())
    (store,) = tmp_path.glob("m1-*/records.sqlite")
    with closing(sqlite3.connect(store)) as base:
        routes = [r for (r,) in base.execute("SELECT route FROM records")]
    assert len(routes) == len(set(routes)) < 12  # twelve were charged, and each was built once
    # knn and best-on-average rank alike models alike: the very same builds, the very same seconds.
    assert rows["knn"]["seconds"] == rows["best-on-average"]["seconds"]


def test_it_goes_on_where_it_was(
    corpus: list[NamedModel], table: RouteTable, tmp_path: Path
) -> None:
    """Stopped within a model: its builds stay. A model that is done is not touched again."""
    plan = LivePlan(AGENTS, builds=4)
    heard: list[str] = []

    def stop(model: str, agent: str, number: int, outcome: Outcome) -> None:
        if model == "m2" and number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        confirm_live(corpus[:2], table, plan, CALM, tmp_path, on_outcome=stop)
    (first,) = tmp_path.glob("m1-*/live.json")
    done = first.stat().st_mtime_ns
    result = confirm_live(
        corpus[:2],
        table,
        plan,
        CALM,
        tmp_path,
        on_outcome=lambda model, *_: heard.append(model),
    )
    assert set(heard) == {"m2"} and first.stat().st_mtime_ns == done
    whole = confirm_live(corpus[:2], table, plan, CALM, tmp_path / "whole")
    for ours, theirs in zip(result["models"], whole["models"], strict=True):
        for name in AGENTS:
            assert ours["agents"][name]["gains"] == pytest.approx(theirs["agents"][name]["gains"])
    other = replace(plan, builds=2)  # other settings are another run, on the same records
    again = confirm_live(corpus[:1], table, other, CALM, tmp_path)
    assert again["models"][0]["agents"]["random"]["builds"] == 2


def test_free_agents_may_leave_the_record(
    corpus: list[NamedModel], table: RouteTable, tmp_path: Path
) -> None:
    known = set(table.outcomes[corpus[0].model.fingerprint])
    asked: dict[bool, set[str]] = {}
    for free in (False, True):
        heard: list[Outcome] = []
        confirm_live(
            corpus[:1],
            table,
            LivePlan(("random",), builds=8, free=free),
            CALM,
            tmp_path / str(free),
            on_outcome=lambda m, a, n, outcome, heard=heard: heard.append(outcome),
        )
        asked[free] = {str(o.route) for o in heard}
    recorded = {str(route) for route in known}
    assert asked[False] <= recorded and not asked[True] <= recorded


def test_a_model_the_table_lacks_is_compared_live_alone(
    corpus: list[NamedModel], table: RouteTable, tmp_path: Path
) -> None:
    without = table.only([n.model.fingerprint for n in corpus[1:]])
    plan = LivePlan(("random", "best-on-average"), builds=2)
    result = confirm_live(corpus[:2], without, plan, CALM, tmp_path)
    rows = result["models"][0]["agents"]
    assert all(row["replayed"] is None for row in rows.values())
    assert result["models"][0]["oracle_replayed"] is None
    assert result["sums"]["random"]["replayed_models"] == 1
    paths = write_live(result, tmp_path)
    assert json.loads(paths[0].read_text()) == result
    sums, models = live_tables(result)
    assert any("replayed, 1 model" in row for row in sums.rows)
    assert len(models.rows) == 4 and all(len(r) == len(models.columns) for r in models.rows)


def test_hostile_builds_are_outcomes_and_a_dead_default_gives_up_its_model(
    corpus: list[NamedModel], table: RouteTable, tmp_path: Path
) -> None:
    hostile = replace(CALM, backend="hostile_backend:make", deadline_seconds=5.0)
    plan = LivePlan(("random",), builds=6)
    lone = table.only([])
    lone = replace(lone, catalog=hostile_backend.CATALOG)
    result = confirm_live(corpus[:1], lone, plan, hostile, tmp_path / "a")
    row = result["models"][0]["agents"]["random"]
    assert row["builds"] == 6
    assert row["confirmed"]["speedup"] >= 1.0
    dead = replace(hostile, options={"default": "nan"})
    with pytest.raises(ModelError, match="no model could be tuned"):
        confirm_live(corpus[:1], lone, plan, dead, tmp_path / "b")


def test_a_winner_that_does_not_hold_is_counted(
    corpus: list[NamedModel], table: RouteTable, tmp_path: Path
) -> None:
    """`overfit` is right on the inputs of the search alone, and twice as fast."""
    catalog = hostile_backend.CATALOG
    lucky = replace(CALM, backend="hostile_backend:make", options={"noise": "none"})
    recorded = table.outcomes[corpus[0].model.fingerprint]
    route = catalog.route({"-do": "overfit", "-speed": "2"})
    best = next(o for (o, *_) in recorded.values() if o.gain > 0.5)
    outcomes = {DEFAULT_ROUTE: recorded[DEFAULT_ROUTE], route: (replace(best, route=route),)}
    known = replace(table, catalog=catalog, outcomes={corpus[0].model.fingerprint: outcomes}).only(
        [corpus[0].model.fingerprint]
    )
    result = confirm_live(corpus[:1], known, LivePlan(("random",), builds=1), lucky, tmp_path)
    row, sums = result["models"][0]["agents"]["random"], result["sums"]["random"]
    assert row["gains"]["1"] > 0.5 and row["confirmed"]["route"] == ""
    assert (sums["refused"], sums["confirmed"], sums["slower"]) == (1, 1.0, 0)
    assert "no winner held" in live_tables(result)[1].rows[0][-1]


def test_whose_family_is_not_of_the_split_is_refused(
    corpus: list[NamedModel], table: RouteTable, tmp_path: Path
) -> None:
    plan = LivePlan(("random",), builds=2, split="test")
    with pytest.raises(InputError, match="family resnet, which is not in the split"):
        confirm_live(corpus[:1], table, plan, CALM, tmp_path)
    assert confirm_live(corpus[3:], table, plan, CALM, tmp_path)["split"] == "test"
    with pytest.raises(InputError, match="1 to 16"):
        confirm_live(corpus, table, replace(plan, builds=17), CALM, tmp_path)


def test_the_policy_of_a_fold_is_found(tmp_path: Path) -> None:
    for name in ("resnet", "for-test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.safetensors").write_bytes(b"")
    fold = Fold(("resnet",), ("resnet",))
    assert policy_for(str(tmp_path), fold, None).parent.name == "resnet"
    assert policy_for(str(tmp_path), fold, "test").parent.name == "for-test"
    with pytest.raises(InputError, match="needs a policy"):
        policy_for(None, fold, None)
    with pytest.raises(InputError, match="no policy"):
        policy_for(str(tmp_path), Fold(("vit",), ("vit",)), None)


def test_the_verb(corpus: list[NamedModel], table: RouteTable, tmp_path: Path) -> None:
    place = tmp_path / "table.parquet"
    save_table(table, place)
    command = [sys.executable, "-m", "routepilot", "confirm-live"]
    command += [",".join(str(n.model.folder) for n in corpus[:2]), "-o", str(tmp_path / "out")]
    command += ["--agents", "random,best-on-average", "--table", str(place), "--max-builds", "2"]
    command += ["--backend", "calm_backend:make"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "replayed" in done.stdout and "m2" in done.stdout
    result = json.loads((tmp_path / "out" / "live.json").read_text())
    assert result["sums"]["best-on-average"]["live"]["1"]["value"] == pytest.approx(1.0)
    command[command.index("random,best-on-average")] = "nobody"
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
