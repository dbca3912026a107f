"""Several training seeds: trained once each, kept, reused, and counted in the intervals."""

from __future__ import annotations

import itertools
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic

from routepilot.env.errors import InputError, MachineError
from routepilot.env.records import RouteTable
from routepilot.env.tables import load_table
from routepilot.training import evaluate as module
from routepilot.training.evaluate import evaluate, train_without_each_family
from routepilot.training.train import train
from routepilot.training.train_config import TrainConfig

pytest.importorskip("stable_baselines3")

#: Hardly a training: what counts here is who trains when.
TINY = TrainConfig(
    steps=0, environments=1, batch=256, teacher_episodes=6, teacher_epochs=1, limits=(1e-2,)
)


@pytest.fixture(scope="module")
def table() -> RouteTable:
    """The made table, its last family one of the corpus' test split."""
    made = synthetic.table()
    names = dict(zip(made.families, ("resnet", "vit", "unet", "gpt"), strict=True))
    cards = tuple(replace(card, family=names[card.family]) for card in made.models)
    return replace(made, models=cards)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Trainings asked for, each done here and tiny instead of in a process of its own."""
    asked: list[tuple[str, ...]] = []
    really_run = subprocess.run

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        if "train" not in command:
            return really_run(command, **settings)
        options = dict(itertools.pairwise(command))
        asked.append((options["--hold-out"], options["--seed"]))
        train(
            load_table(Path(options["--table"])),
            replace(TINY, seed=int(options["--seed"])),
            held_out=tuple(options["--hold-out"].split(",")),
            out=Path(options["-o"]),
        )
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module.subprocess, "run", run)
    return asked


def test_each_seed_is_trained_once_and_kept(
    table: RouteTable, tmp_path: Path, trained: list[tuple[str, ...]]
) -> None:
    policies = train_without_each_family(table, tmp_path, split="test", trainings=2)
    assert trained == [("gpt", "0"), ("gpt", "1")]
    assert [len(paths) for paths in policies.values()] == [2]
    more = train_without_each_family(table, tmp_path, split="test", trainings=3)
    assert trained[2:] == [("gpt", "2")]  # the first two are there already
    assert more["gpt"][:2] == policies["gpt"]

    result = evaluate(
        table, ("random", "ppo"), policies={"ppo": more}, split="test", seeds=1, name="made"
    )
    row = result["agents"]["ppo"]["trainings"]
    assert row["count"] == 3 and len(row["gain_share"]["1"]) == 3
    mean = sum(row["gain_share"]["4"]) / 3
    assert mean == pytest.approx(result["agents"]["ppo"]["gain_share"]["4"])
    assert result["agents"]["random"]["trainings"]["count"] == 1
    assert result["against"]["agent"] == "ppo"


def test_a_policy_trained_otherwise_is_not_taken_for_ours(
    table: RouteTable, tmp_path: Path, trained: list[tuple[str, ...]]
) -> None:
    (home,) = train_without_each_family(table, tmp_path, split="test")["gpt"]
    card = json.loads(home.with_suffix(".json").read_text())
    home.with_suffix(".json").write_text(json.dumps({**card, "held_out": ["vit"]}))
    with pytest.raises(InputError, match="without vit, not with seed 0 without gpt"):
        train_without_each_family(table, tmp_path, split="test")


def test_a_failed_training_says_which(
    table: RouteTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "no room")

    monkeypatch.setattr(module.subprocess, "run", run)
    with pytest.raises(MachineError, match="training without gpt failed: no room"):
        train_without_each_family(table, tmp_path, split="test")
