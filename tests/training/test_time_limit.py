"""`train --max-seconds`: every phase ends in time, and a policy that is worth something comes out.

Slowness is made: each decision of the teacher, pass or fit waits for longer than it takes, so that
what is seen is the limit and not the machine.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic

from routepilot.agents.policy import load_policy
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError
from routepilot.env.route_env import RouteSelectionEnv
from routepilot.env.surrogate import Surrogate
from routepilot.training.time_limit import Clock, TimeLimit
from routepilot.training.traces import trace
from routepilot.training.train import Trained, train
from routepilot.training.train_config import TrainConfig

pytest.importorskip("stable_baselines3")

#: More of everything than fits into any limit here.
LONG = TrainConfig(
    steps=10**7,
    environments=2,
    rollout=64,
    batch=64,
    epochs=1,
    teacher_episodes=20_000,
    teacher_epochs=2_000,
    limits=(1e-2,),
    evaluate_every=10**7,
)


def slow(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
    """Let each call of a method take so much longer."""
    inner: Callable[..., Any] = getattr(owner, name)

    def waiting(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return inner(*args, **options)

    monkeypatch.setattr(owner, name, waiting)


def timed(config: TrainConfig, out: Path) -> tuple[Trained, dict[str, Any], list[str], float]:
    """A training, its card, what it said, and its seconds."""
    heard: list[str] = []
    start = time.monotonic()
    done = train(synthetic.table(), config, held_out=("family3",), out=out, say=heard.append)
    taken = time.monotonic() - start
    card: dict[str, Any] = json.loads((out / "policy.json").read_text())
    return done, card, heard, taken


def check_policy(path: Path) -> None:
    """It finds gains of the family that was held out."""
    from routepilot.agents.believer import by_policy

    loaded, replay = load_policy(path), Replay(synthetic.table())
    for model in replay.only_families(("family3",)):
        gains = trace(by_policy(loaded), replay, model, seed=0).gains
        assert gains[3] > 0.6 * model.oracle, (model.card.name, gains)


@pytest.fixture(autouse=True)
def imported() -> None:
    """What is imported once is not part of any limit here."""
    import routepilot.agents.ppo  # noqa: F401


def test_all_phases_share_the_time(tmp_path: Path) -> None:
    done, card, heard, taken = timed(replace(LONG, max_seconds=6.0), tmp_path)
    assert 4.0 < taken < 12.0
    assert 0 < card["settings"]["teacher_episodes"] < LONG.teacher_episodes
    assert 0 < card["settings"]["teacher_epochs"] < LONG.teacher_epochs
    assert done.steps > 0, "PPO has its share"
    assert any("--max-seconds 6 cut imitation short" in line for line in heard)
    assert "(the time is up)" in heard[-1]
    check_policy(done.path)


@pytest.mark.parametrize("phase", ["lessons", "passes"])
def test_a_slow_phase_ends_in_time(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.agents.ppo import Imitation

    if phase == "lessons":
        slow(monkeypatch, RouteSelectionEnv, "teacher", 0.004)  # 20,000 episodes: 10 minutes
    else:
        slow(monkeypatch, Imitation, "run_pass", 0.2)  # 2,000 passes: 7 minutes
    done, _, heard, taken = timed(replace(LONG, max_seconds=5.0), tmp_path)
    assert taken < 12.0
    assert any("cut imitation short" in line for line in heard)
    check_policy(done.path)


def test_a_limit_that_is_over_at_once_still_gives_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.training.training_run import LEAST_EPISODES, LEAST_PASSES

    # As where the surrogates are just fitted when the time is up.
    monkeypatch.setattr(TimeLimit, "check_fits", lambda *_: None)
    done, card, heard, _ = timed(replace(LONG, max_seconds=0.01), tmp_path)
    settings = card["settings"]
    assert settings["teacher_episodes"] == LEAST_EPISODES
    assert settings["teacher_epochs"] == LEAST_PASSES
    assert done.steps == 0 and done.path.is_file()
    assert any(f"{LEAST_EPISODES} episodes of 20000" in line for line in heard)


def test_shares_are_of_the_time_after_the_surrogates() -> None:
    def after(seconds: float) -> TimeLimit:
        found = TimeLimit(Clock(time.monotonic(), {"seconds": seconds}), 100.0)
        found.start_phases()
        return found

    assert not after(50.0).is_up(0.4) and after(100.0).is_up(0.4)
    late = TimeLimit(Clock(time.monotonic(), {"seconds": 71.0}), 100.0)
    assert late.is_up(0.4) and not late.is_up(0.8), "of 100 s where nothing came before"
    late.reserve = 30.0
    assert late.is_up(), "a last score needs what is left"
    assert not TimeLimit(Clock(time.monotonic(), {}), None).is_up()


def test_surrogates_that_will_take_all_the_time_are_a_clear_line_after_the_first_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, Surrogate, "__init__", 0.6)
    many = synthetic.table(40)  # 20 families: 12 s
    with pytest.raises(InputError) as refused:
        train(many, replace(LONG, max_seconds=4.0), out=tmp_path)
    told = str(refused.value)
    assert "--max-seconds 4 is too short" in told, told
    found = re.search(r"about (\d+) s here \((\d+) of 20 .* give (\d+) or more", told)
    assert found is not None, told
    needed, fitted, given = map(int, found.groups())
    assert needed > 9 and given >= 2 * needed - 1
    assert fitted <= 6, "it was foreseen, not waited for"
    assert not list(tmp_path.iterdir())


def test_surrogates_that_are_a_little_late_give_a_policy_and_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.training.training_run import LEAST_EPISODES

    passed, fit = {"seconds": 0.0}, Surrogate.__init__

    def fitting(self: Surrogate, *given: Any, **options: Any) -> None:
        fit(self, *given, **options)
        passed["seconds"] += 3.7  # three of them: 11.1 s

    monkeypatch.setattr(Surrogate, "__init__", fitting)
    monkeypatch.setattr(Clock, "read", lambda self: {"ppo": 0.0, **passed})
    heard: list[str] = []
    done = train(
        synthetic.table(),
        replace(LONG, max_seconds=10.0),
        held_out=("family3",),
        out=tmp_path,
        say=heard.append,
    )
    assert any("took 11.1 s, all of --max-seconds 10" in line for line in heard)
    assert any(f"{LEAST_EPISODES} episodes" in line for line in heard)
    check_policy(done.path)


def test_who_is_patient_gets_a_policy_however_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, Surrogate, "__init__", 0.3)
    config, table = replace(LONG, max_seconds=0.1), synthetic.table()
    with pytest.raises(InputError, match="too short"):
        train(table, config, out=tmp_path / "not")
    done = train(table, config, held_out=("family3",), out=tmp_path, patient=True)
    assert done.steps == 0
    check_policy(done.path)


def test_enough_time_changes_nothing(tmp_path: Path) -> None:
    short = replace(LONG, steps=128, teacher_episodes=60, teacher_epochs=6)
    free = timed(short, tmp_path / "free")
    bound = timed(replace(short, max_seconds=600.0), tmp_path / "bound")
    assert free[0].path.read_bytes() == bound[0].path.read_bytes()
    assert not any("short" in line for line in bound[2])


def test_what_one_limit_cut_short_is_not_taken_up_under_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.training.training_run import TrainingRun

    def die(self: TrainingRun) -> str:
        self.keep()
        raise ZeroDivisionError

    config = replace(LONG, max_seconds=3.0)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(TrainingRun, "improve", die)
        timed(config, tmp_path)
    lessons = tmp_path / "resume" / "policy.lessons.safetensors"
    assert lessons.is_file()
    kept = lessons.read_bytes()
    *_, heard, _ = timed(replace(config, max_seconds=4.0), tmp_path)
    assert any("cut short at 3 s: begun anew" in line for line in heard)
    assert not any("goes on" in line for line in heard)
    assert len(kept) > 0 and not lessons.exists()


def test_the_same_limit_goes_on_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.training.checkpointing import Keeper

    def die(self: Keeper) -> None:
        raise ZeroDivisionError

    config = replace(LONG, max_seconds=4.0)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Keeper, "drop_lessons", die)  # after PPO's first checkpoint
        timed(config, tmp_path)
    done, card, heard, _ = timed(config, tmp_path)
    assert any("goes on after 0 steps" in line for line in heard)
    assert 0 < card["settings"]["teacher_episodes"] < LONG.teacher_episodes, "the card tells"
    assert done.path.is_file() and not (tmp_path / "resume").exists()
