"""Scalars: what a run shows of itself has the names and the meaning it promises."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic

from routepilot.env.errors import MissingExtraError
from routepilot.training.scoring import Play
from routepilot.training.train import train
from routepilot.training.train_config import TrainConfig

pytest.importorskip("stable_baselines3")

SHORT = TrainConfig(
    steps=192,
    environments=2,
    rollout=48,
    batch=48,
    epochs=2,
    teacher_episodes=40,
    teacher_epochs=3,
    evaluate_every=96,
    limits=(1e-2,),
)


def test_scalars_are_written_and_tensorboard_is_imported_only_then(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from routepilot.training.scalars import SCALARS

    done = train(
        synthetic.table(10),
        SHORT,
        validation=("family3",),
        out=tmp_path / "policy",
        tensorboard=tmp_path / "board",
    )
    found = EventAccumulator(str(tmp_path / "board")).Reload()
    tags = set(found.Tags()["scalars"])
    assert {name.replace("exam", "validation") for name in SCALARS} <= tags
    assert {"train/policy_gradient_loss", "train/approx_kl"} <= tags
    assert [e.step for e in found.Scalars("imitation/cross_entropy")] == [1, 2, 3]
    gains = [e.value for e in found.Scalars("validation/gain_1")]
    assert max(abs(g - done.scores["gain_share"]["1"]) < 1e-6 for g in gains)
    assert all(0 <= e.value <= 1 for e in found.Scalars("rollout/infeasible"))


def test_tensorboard_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("routepilot.training.scalars.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"routepilot\[board\]"):
        train(synthetic.table(), SHORT, out=tmp_path, tensorboard=tmp_path / "board")
    train(synthetic.table(), replace(SHORT, steps=0), out=tmp_path)  # which needs none


def test_a_stop_is_in_time_within_a_build_of_having_it() -> None:
    gains = (0.0, 0.96, 0.96, 0.96)
    assert Play(gains, 2, 0).stops_in_time(1.0) and Play(gains, 3, 0).stops_in_time(1.0)
    assert not Play(gains, 4, 0).stops_in_time(1.0)
    assert not Play((0.5, 0.5), 1, 0).stops_in_time(1.0)
    assert Play((0.0, 0.0, 0.0), 2, 2).stops_in_time(0.0)
    assert not Play((0.0, 0.0, 0.0), 3, 0).stops_in_time(0.0)
