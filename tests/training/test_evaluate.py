"""The protocol: builds are counted, shares are shares, intervals hold the figure."""

from __future__ import annotations

import math
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import synthetic
from job_functions import die_once, fail

from routepilot.agents import make_factory
from routepilot.agents.policy import LoadedPolicy
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError
from routepilot.training import evaluate as evaluating
from routepilot.training import trace_log
from routepilot.training.cli_learning import later_families
from routepilot.training.evaluate import (
    BUDGETS,
    Fold,
    Trace,
    evaluate,
    folds,
    summarise,
    trace,
    train_without_each_family,
)
from routepilot.training.jobs import run_jobs
from routepilot.training.train import TrainConfig, train


def test_fast_pays_for_every_single_change() -> None:
    replay = Replay(synthetic.table())
    model = replay.models[0]
    found = trace(make_factory("fast"), replay, model, seed=0)
    assert found.builds == len(replay.catalog.neighbours(replay.catalog.route({})))
    assert (np.diff(found.gains) >= 0).all()


def test_builds_to_95() -> None:
    gains = np.array([0.0, 0.5, 0.96] + [0.96] * 13)
    assert Trace(gains, 16, 1.0).builds_to_95 == 3
    assert Trace(gains, 16, 2.0).builds_to_95 == math.inf
    assert Trace(gains, 16, 0.0).builds_to_95 == 0


def test_summary_of_a_perfect_agent() -> None:
    perfect = {f"m{i}": [Trace(np.full(16, 0.3), 1, 0.3)] * 2 for i in range(5)}
    row = summarise(perfect)
    assert set(row["gain_share"].values()) == {1.0}
    assert row["gain_share_low"]["1"] == row["gain_share_high"]["1"] == 1.0
    assert (row["builds_to_95"], row["stop_builds"], row["regressions"]) == (1.0, 1.0, 0)


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    agents = ("oracle", "random", "best-on-average", "knn", "coreset", "two-way-gp")
    return evaluate(synthetic.table(), agents, seeds=2, name="made")


def test_result_has_the_promised_shape(result: dict) -> None:
    assert {"table", "split", "models", "agents"} <= set(result)
    for row in result["agents"].values():
        assert set(row["gain_share"]) == {str(b) for b in BUDGETS}
        shares = list(row["gain_share"].values())
        assert shares == sorted(shares) and 0 <= shares[0] and shares[-1] <= 1.0 + 1e-9
        for budget, share in row["gain_share"].items():
            assert row["gain_share_low"][budget] <= share + 1e-9
            assert share <= row["gain_share_high"][budget] + 1e-9
        assert row["regressions"] == 0


def test_the_oracle_has_everything_after_one_build_and_stops(result: dict) -> None:
    oracle = result["agents"]["oracle"]
    assert set(oracle["gain_share"].values()) == {1.0}
    best = [m["oracle_speedup"] for m in result["models"]]
    assert oracle["stop_builds"] == sum(s > 1 for s in best) / len(best)
    assert oracle["builds_to_95"] == oracle["stop_builds"]


def test_a_policy_that_imitates_is_the_agent_bc(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    made = synthetic.table()
    short = TrainConfig(steps=0, teacher_episodes=60, teacher_epochs=4, limits=(1e-2,))
    path = train(made, short, held_out=("family3",), out=tmp_path).path
    policies = {"bc": dict.fromkeys(made.families, path)}
    found = evaluate(made, ("bc",), seeds=1, policies=policies)["agents"]["bc"]
    assert 0 < found["gain_share"]["16"] <= 1 and found["stop_builds"] > 0
    with pytest.raises(InputError, match="--policy"):
        evaluate(made, ("bc",), seeds=1)


def test_bc_refuses_a_policy_that_ppo_improved() -> None:
    card = SimpleNamespace(name="mine", steps=512)
    with pytest.raises(InputError, match="'mine' went on for 512 steps.*--steps 0"):
        make_factory("bc", policy=cast(LoadedPolicy, SimpleNamespace(card=card)))


def test_each_fold_trains_blind_to_what_it_holds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    for imitate in (False, True):
        train_without_each_family(synthetic.table(4), tmp_path, imitate=imitate)
    held = [c[c.index("--hold-out") + 1] for c in commands]
    assert held == ["family0", "family1"] * 2
    assert ["--steps" in c for c in commands] == [False, False, True, True]
    assert commands[-1][-2:] == ["--steps", "0"]


def test_who_knows_the_model_needs_fewer_builds(result: dict) -> None:
    agents = result["agents"]
    assert agents["two-way-gp"]["gain_share"]["2"] > agents["random"]["gain_share"]["2"]
    assert agents["two-way-gp"]["gain_share"]["2"] > agents["best-on-average"]["gain_share"]["1"]


def test_a_split_is_judged_by_who_knows_the_earlier_ones() -> None:
    table = ("resnet", "vit", "convnext", "gpt", "ssd", "mine")
    (fold,) = folds(table, "validation")
    assert fold == Fold(("convnext",), ("convnext", "gpt", "ssd"))
    (fold,) = folds(table, "test")
    assert fold == Fold(("gpt", "ssd"), ("gpt", "ssd"))
    assert [f.hidden for f in folds(table)] == [(family,) for family in table]
    with pytest.raises(InputError, match="choose validation or test"):
        folds(table, "train")
    with pytest.raises(InputError, match="0 families"):
        folds(("resnet",), "test")


def test_evaluation_of_a_split_judges_its_families_alone() -> None:
    made = synthetic.table()
    names = dict(zip(made.families, ("resnet", "vit", "convnext", "gpt"), strict=True))
    cards = tuple(replace(card, family=names[card.family]) for card in made.models)
    found = evaluate(replace(made, models=cards), ("best-on-average",), seeds=1, split="test")
    assert found["split"] == "test"
    assert {row["family"] for row in found["models"]} == {"gpt"}


def test_training_families_are_those_of_the_named_splits() -> None:
    table = ("resnet", "convnext", "gpt", "mine")
    assert later_families(table, "") == ()
    assert later_families(table, "train") == ("convnext", "gpt")
    assert later_families(table, "train,validation") == ("gpt",)
    with pytest.raises(InputError, match="split 'tests'"):
        later_families(table, "tests")


def test_several_processes_and_a_log_change_no_figure(
    result: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, log = synthetic.table(), tmp_path / "traces.jsonl"
    agents = ("random", "knn")

    def run(**kwargs: Any) -> dict[str, Any]:
        return evaluate(table, agents, seeds=2, name="made", log=log, **kwargs)["agents"]

    wanted = {name: result["agents"][name] for name in agents}
    assert run(workers=2) == wanted
    lines = log.read_text().splitlines()
    jobs = len([line for line in lines if line])
    assert jobs == len(agents) * len(table.families)
    # Cut short by a kill: half the parts, and a line that ends in the middle.
    log.write_text("\n".join(lines[: len(lines) // 2]) + "\n" + lines[-1][:40])
    made: list[str] = []
    real = evaluating.trace_fold

    def counted(*args: Any) -> Any:
        made.append(args[2])
        return real(*args)

    monkeypatch.setattr(evaluating, "trace_fold", counted)
    assert run() == wanted
    assert 0 < len(made) < jobs
    made.clear()
    assert run() == wanted and not made
    # Other code, another limit: nothing of the log serves.
    monkeypatch.setattr(trace_log, "code_key", lambda: "another")
    run()
    assert len(made) == jobs


def test_a_lost_process_gives_its_job_to_another(tmp_path: Path) -> None:
    done = dict(run_jobs(die_once, str(tmp_path), [(i,) for i in range(4)], workers=2))
    assert done == {i: i * i for i in range(4)}
    assert (tmp_path / "died").exists()
    with pytest.raises(ZeroDivisionError):
        list(run_jobs(fail, None, [(i,) for i in range(3)], workers=2))
    with pytest.raises(InputError, match="give 1 or more"):
        list(run_jobs(fail, None, [(1,)], workers=0))
