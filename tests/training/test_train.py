"""Training: a policy learns what the table teaches, twice the same, and saves what it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic

from routepilot.agents.policy import load_policy
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError
from routepilot.training.traces import trace
from routepilot.training.train import train
from routepilot.training.train_config import TrainConfig

pytest.importorskip("stable_baselines3")

SHORT = TrainConfig(
    steps=1024,
    environments=2,
    rollout=256,
    teacher_episodes=160,
    teacher_epochs=10,
    limits=(1e-2,),
    evaluate_every=512,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policy")
    return train(synthetic.table(), SHORT, held_out=("family3",), out=out).path


def test_policy_finds_gains_of_a_family_it_never_saw(policy: Path) -> None:
    from routepilot.agents.believer import by_policy

    loaded = load_policy(policy)
    assert loaded.card.held_out == ("family3",)
    replay = Replay(synthetic.table())
    for model in replay.only_families(("family3",)):
        found = trace(by_policy(loaded), replay, model, seed=0)
        assert found.gains[1] > 0.8 * model.oracle, model.card.name


def test_equal_seeds_train_equal_policies(policy: Path, tmp_path: Path) -> None:
    again = train(synthetic.table(), SHORT, held_out=("family3",), out=tmp_path).path
    first, second = load_policy(policy).network, load_policy(again).network
    for name, array in first.weights.items():
        np.testing.assert_array_equal(array, second.weights[name])


def test_too_few_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="families"):
        train(synthetic.table(), SHORT, held_out=("family1", "family2"), out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_training_until_the_noise_ends_before_its_steps(tmp_path: Path) -> None:
    heard: list[str] = []
    long = replace(
        SHORT, steps=20_000, teacher_episodes=40, rollout=64, batch=128, evaluate_every=128
    )
    done = train(
        synthetic.table(),
        replace(long, until_noise=True),
        out=tmp_path,
        say=heard.append,
    )
    assert done.steps < 20_000
    scores = [line for line in heard if "steps: score" in line]
    assert len(scores) >= 3 and any("scatter" in line for line in heard)
