"""The protocol: builds are counted, shares are shares, intervals hold the figure."""

from __future__ import annotations

import json
import math
import subprocess
import sys
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
from routepilot.env.tables import save_table
from routepilot.training import cli, trace_log
from routepilot.training import evaluate as evaluating
from routepilot.training.cli_learning import later_families
from routepilot.training.evaluate import evaluate, train_without_each_family
from routepilot.training.figures import NEVER, against, summarise
from routepilot.training.folds import Fold, folds
from routepilot.training.jobs import run_jobs
from routepilot.training.traces import BUDGETS, Trace, trace
from routepilot.training.train import train
from routepilot.training.train_config import TrainConfig


def test_fast_pays_for_every_single_change() -> None:
    replay = Replay(synthetic.table())
    model = replay.models[0]
    found = trace(make_factory("fast"), replay, model, seed=0)
    assert found.builds == len(replay.catalog.neighbours(replay.catalog.route({})))
    assert (np.diff(found.gains) >= 0).all()


def made(gains: list[float], builds: int, oracle: float) -> Trace:
    """A trace whose gain stays at the last one given; a build takes a second."""
    whole = np.array(gains + [gains[-1]] * (16 - len(gains)))
    return Trace(whole, builds, oracle, np.minimum(np.arange(1.0, 17.0), builds))


def test_builds_to_95() -> None:
    gains = [0.0, 0.5, 0.96]
    assert made(gains, 16, 1.0).builds_to_95 == 3
    assert made(gains, 16, 2.0).builds_to_95 == math.inf
    assert made(gains, 16, 0.0).builds_to_95 == 0


def test_seconds_are_counted_build_by_build_and_stay_after_a_stop() -> None:
    replay = Replay(synthetic.table())
    model = replay.models[0]
    found = trace(make_factory("random"), replay, model, seed=0)
    spent = np.diff(found.seconds, prepend=0.0)
    assert set(np.unique(spent.round(3))) <= {0.1, 0.2, 1.0, 1.5}  # as the table was made
    stopped = trace(make_factory("default"), replay, model, seed=0)
    assert stopped.builds == 0 and not stopped.seconds.any()


def test_summary_of_a_perfect_agent() -> None:
    perfect = {f"m{i}": [[made([0.3], 1, 0.3)] * 2] for i in range(5)}
    row = summarise(perfect)
    assert set(row["gain_share"].values()) == set(row["iqm"].values()) == {1.0}
    assert row["gain_share_low"]["1"] == row["gain_share_high"]["1"] == 1.0
    assert (row["builds_to_95"], row["stop_builds"], row["regressions"]) == (1.0, 1.0, 0)
    assert row["stop"]["regret"] == 0 and row["stop"]["within_one"] == 1.0
    assert row["stop"]["in_time"] is None  # no model without a gain


def test_stop_quality_tells_hurry_from_waste() -> None:
    hasty = {"some": [[made([0.1], 1, 0.4)]], "none": [[made([0.0], 2, 0.0)]]}
    stubborn = {"some": [[made([0.1, 0.4], 16, 0.4)]], "none": [[made([0.0], 16, 0.0)]]}
    quick, slow = summarise(hasty)["stop"], summarise(stubborn)["stop"]
    assert quick["regret"] == pytest.approx(0.75)
    assert (quick["in_time"], quick["within_one"]) == (1.0, 0.0)
    assert (slow["regret"], slow["in_time"], slow["within_one"]) == (0.0, 0.0, 0.0)
    assert (quick["builds"], slow["builds"]) == (1.5, 16.0)


def test_agents_are_set_against_each_other_run_by_run() -> None:
    names = [f"m{i}" for i in range(6)]
    found = {
        "ppo": {n: [[made([0.4], 1, 0.4)] * 2, [made([0.2, 0.4], 2, 0.4)] * 2] for n in names},
        "near": {n: [[made([0.2, 0.4], 16, 0.4)] * 2] for n in names},
        "far": {n: [[made([0.0], 16, 0.4)] * 2] for n in names},
    }
    result = against(found, "ppo")
    near, far = result["rivals"]["near"], result["rivals"]["far"]
    assert near["improvement"]["1"]["value"] == 0.75  # one training wins, the other ties
    assert near["improvement"]["2"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert near["difference"]["1"]["value"] == pytest.approx(0.25)
    assert far["difference"]["16"]["low"] == 1.0
    assert near["fewer_builds"]["value"] == pytest.approx(1.5 / 2)
    assert far["fewer_builds"]["value"] == pytest.approx(1.5 / NEVER)
    assert result["best_rival"]["1"]["name"] == "near"
    spread = summarise(found["ppo"])["trainings"]
    assert spread["count"] == 2 and spread["gain_share"]["1"] == [1.0, 0.5]
    assert spread["gain_share_sd"]["1"] == pytest.approx(0.5 / math.sqrt(2))
    assert spread["gain_share_sd"]["2"] == 0.0


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
    policies = {"bc": dict.fromkeys(made.families, (path,))}
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


def test_every_figure_of_the_protocol_is_there(result: dict) -> None:
    agents = set(result["agents"])
    assert set(result["against"]["rivals"]) == agents - {"two-way-gp", "oracle"}
    for kind in ("builds", "seconds"):
        curve = result["curves"][kind]
        assert set(curve["agents"]) == agents
        for lines in curve["agents"].values():
            assert len(lines["value"]) == len(curve["at"])
            assert lines["value"] == sorted(lines["value"])
    at_16 = result["curves"]["builds"]["agents"]["knn"]["value"][-1]
    assert at_16 == pytest.approx(result["agents"]["knn"]["gain_share"]["16"], abs=1e-4)
    whole = result["curves"]["seconds"]["agents"]["knn"]["value"][-1]
    assert whole == pytest.approx(at_16, abs=1e-4)  # all the time in the world is all builds
    for rows in result["profiles"]["budgets"].values():
        for lines in rows.values():
            assert lines["value"] == sorted(lines["value"], reverse=True)
            assert lines["value"][0] == 1.0
    assert result["trained"]["models"] == sum(m["trained"] for m in result["models"])
    model = result["models"][0]
    assert set(model["agents"]) == agents
    json.loads(json.dumps(result, allow_nan=False))


def test_shares_of_models_add_up(result: dict) -> None:
    models = result["models"]
    oracle = [math.log(m["oracle_speedup"]) for m in models]
    shares = [m["agents"]["random"]["gain_share"]["2"] for m in models]
    total = sum(o * s for o, s in zip(oracle, shares, strict=True)) / sum(oracle)
    assert total == pytest.approx(result["agents"]["random"]["gain_share"]["2"])


def test_a_table_without_gains_has_figures_too() -> None:
    made_table = synthetic.table(4)
    flat = {
        f: {
            r: tuple(replace(o, measurement=synthetic.measurement(0.0)) for o in outcomes)
            for r, outcomes in routes.items()
        }
        for f, routes in made_table.outcomes.items()
    }
    found = evaluate(replace(made_table, outcomes=flat), ("random", "default"), seeds=1)
    assert found["agents"]["default"]["stop"]["in_time"] == 1.0
    assert found["agents"]["random"]["stop"]["in_time"] == 0.0
    assert found["profiles"]["budgets"] == {}
    json.dumps(found, allow_nan=False)


def test_an_agent_that_is_not_there_cannot_be_the_subject() -> None:
    with pytest.raises(InputError, match="'ppo' is not evaluated"):
        evaluate(synthetic.table(4), ("random",), subject="ppo")


def test_processes_change_no_figure(result: dict) -> None:
    agents = tuple(result["agents"])
    again = evaluate(synthetic.table(), agents, seeds=2, name="made", workers=2)
    assert again["agents"] == result["agents"] and again["models"] == result["models"]


def test_the_verb_writes_and_refuses_before_it_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_table(synthetic.table(4), tmp_path / "made.parquet")
    verb = ("evaluate", "--table", str(tmp_path / "made.parquet"), "-o", str(tmp_path / "out"))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["routepilot", *verb, *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        shown = capsys.readouterr()
        return int(stop.value.code or 0), shown.out, shown.err

    code, out, _ = run("--agents", "random,knn", "--seeds", "1", "--subject", "knn")
    assert code == 0 and "knn against each rival" in out and "stop quality" in out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"evaluation.json", "evaluation.md", "evaluation.html"} <= names
    for words, given in (
        ("'nobody' does not exist", ("--agents", "ppo,nobody")),
        ("'ppo' is not evaluated", ("--agents", "random", "--subject", "ppo")),
        ("no policy 'nothing'", ("--agents", "random", "--policy", "nothing")),
    ):
        code, out, error = run(*given)
        assert (code, out) == (2, "") and words in error
        assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "policies").exists()  # refused before anything was trained


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
    table = synthetic.table()
    names = dict(zip(table.families, ("resnet", "vit", "convnext", "gpt"), strict=True))
    cards = tuple(replace(card, family=names[card.family]) for card in table.models)
    found = evaluate(replace(table, models=cards), ("best-on-average",), seeds=1, split="test")
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
