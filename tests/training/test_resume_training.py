"""Training that is killed goes on, and ends with the bytes of a run that was not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic

from routepilot.env.errors import InputError
from routepilot.training.train import train
from routepilot.training.train_config import TrainConfig

pytest.importorskip("stable_baselines3")

SHORT = TrainConfig(
    steps=640,
    environments=3,
    rollout=32,
    batch=48,
    epochs=2,
    teacher_episodes=40,
    teacher_epochs=4,
    evaluate_every=200,
    limits=(1e-2, 3e-2),
)


class Killed(Exception):
    """Ends a run as a kill would: nothing of it is caught."""


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """The next run dies at its `moment`-th checkpoint, before or after that is written."""
    from routepilot.training.checkpointing import Keeper

    save, seen = Keeper.save, 0

    def dying(self: Any, checkpoint: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == moment and moment % 2:
            raise Killed
        save(self, checkpoint)
        if seen == moment:
            raise Killed

    monkeypatch.setattr(Keeper, "save", dying)


def result(out: Path) -> tuple[bytes, dict[str, Any]]:
    """Weights, and the card without what depends on the clock."""
    card = json.loads((out / "policy.json").read_text())
    assert card.pop("seconds") > 0 and card.pop("steps_per_second") > 0
    return (out / "policy.safetensors").read_bytes(), card


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, Any]]:
    out = tmp_path_factory.mktemp("whole")
    train(synthetic.table(), SHORT, held_out=("family3",), out=out)
    assert not (out / "resume").exists()
    return result(out)


@pytest.mark.parametrize("moments", [(1,), (2,), (3, 2), (5,), (6,), (6, 1, 2), (8,), (9, 3)])
def test_a_killed_run_ends_with_the_same_bytes(
    moments: tuple[int, ...],
    whole: tuple[bytes, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for moment in moments:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, moment)
            train(synthetic.table(), SHORT, held_out=("family3",), out=tmp_path)
    assert (tmp_path / "resume").is_dir() and not (tmp_path / "policy.safetensors").exists()
    heard: list[str] = []
    train(synthetic.table(), SHORT, held_out=("family3",), out=tmp_path, say=heard.append)
    assert any("goes on" in line for line in heard) or moments == (1,)
    assert result(tmp_path) == whole
    assert not (tmp_path / "resume").exists()


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def pickled(path: Path) -> None:
    path.write_bytes(b"\x80\x04malicious pickle")


@pytest.mark.parametrize("change", [spoil, pickled])
def test_a_damaged_checkpoint_is_left_aside(
    change: Callable[[Path], None],
    whole: tuple[bytes, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 6)
        train(synthetic.table(), SHORT, held_out=("family3",), out=tmp_path)
    change(tmp_path / "resume" / "policy.safetensors")
    heard: list[str] = []
    train(synthetic.table(), SHORT, held_out=("family3",), out=tmp_path, say=heard.append)
    assert any("damaged" in line for line in heard)
    assert result(tmp_path) == whole


def test_other_settings_do_not_take_up_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 6)
        train(synthetic.table(), SHORT, out=tmp_path)
    heard: list[str] = []
    train(synthetic.table(), replace(SHORT, seed=1), out=tmp_path, say=heard.append)
    assert any("another run" in line for line in heard)
    assert not any("goes on" in line for line in heard)


def test_an_interrupted_run_keeps_the_best_and_goes_on(
    whole: tuple[bytes, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.training.scalars import Episodes

    def interrupt(self: Any, infos: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Episodes, "hear", interrupt)
        train(synthetic.table(), SHORT, held_out=("family3",), out=tmp_path)
    assert (tmp_path / "policy.safetensors").is_file() and (tmp_path / "resume").is_dir()
    train(synthetic.table(), SHORT, held_out=("family3",), out=tmp_path)
    assert result(tmp_path) == whole


def test_validation_families_stop_the_training_and_train_nothing(tmp_path: Path) -> None:
    config = replace(SHORT, steps=20_000, evaluate_every=96, patience=2, learning_rate=0.0)
    trained = train(synthetic.table(10), config, validation=("family3",), out=tmp_path)
    assert trained.steps < 1000  # nothing is learned at a rate of 0, so nothing gets better
    card = json.loads((tmp_path / "policy.json").read_text())
    assert card["validation"] == ["family3"] and "validation families" in card["scores"]["on"]
    assert not {"model6", "model7"} & set(card["models"])
    with pytest.raises(InputError, match="families"):
        train(synthetic.table(), SHORT, validation=("family0", "family1"), out=tmp_path)
