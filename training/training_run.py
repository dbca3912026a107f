"""A training run in the making: imitation, then PPO, scored and written down on the way.

Owns the order of things, what ends a run and what a checkpoint of it holds. What it trains on and
where the policy goes is `train.py`'s; torch is imported where it is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.route_env import RouteSelectionEnv
from routepilot.env.wording import counted
from routepilot.training.courses import AlternatingEnv
from routepilot.training.scoring import Best
from routepilot.training.session import Say
from routepilot.training.time_limit import IMITATED_BY, LESSONS_BY, Clock, TimeLimit
from routepilot.training.train_config import TrainConfig

if TYPE_CHECKING:
    from routepilot.training.checkpointing import Checkpoint, Keeper

#: Evaluations that training is judged by, with `until_noise`.
WINDOW = 4

#: Rise of a score that arithmetic alone may make of equal ones.
ROUNDING = 1e-9

#: Episodes of the teacher and passes of imitation that are made however late it is: less is no
#: policy. Together they take a second or so.
LEAST_EPISODES, LEAST_PASSES = 50, 5


def has_settled(scores: Sequence[float]) -> bool:
    """True when scores no longer rise by more than they scatter.

    A line through the last `WINDOW` scores rises by no more than its own standard error.

    Args:
        scores: Of the evaluations so far, in order.
    """
    if len(scores) < WINDOW:
        return False
    places = np.arange(WINDOW, dtype=float) - (WINDOW - 1) / 2
    # From the first one, so that equal scores have no slope of rounding.
    last = np.asarray(scores[-WINDOW:], float) - scores[-WINDOW]
    slope = float(places @ last / (places @ places))
    residual = last - last.mean() - slope * places
    variance = float(residual @ residual) / (WINDOW - 2)
    return slope <= max(math.sqrt(variance / float(places @ places)), ROUNDING)


class TrainingRun:
    """A training run: imitation, then PPO, with its checkpoints.

    Args:
        config: Settings.
        model: Stable-Baselines3's PPO.
        envs: Its environments.
        best: The best weights so far.
        exam: What its scores are called.
        keeper: Of its checkpoints.
        clock: Of its seconds.
        limit: When its phases have to end.
        say: Hears progress.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Any,
        envs: Sequence[AlternatingEnv],
        best: Best,
        exam: str,
        keeper: Keeper,
        clock: Clock,
        limit: TimeLimit,
        say: Say,
    ) -> None:
        self.config, self.model, self.envs, self.best = config, model, envs, best
        self.exam, self.keeper, self.clock = exam, keeper, clock
        self.limit, self.say = limit, say
        #: Steps at which the next evaluation is due.
        self.next = config.evaluate_every
        #: Values of the evaluations so far.
        self.values: list[float] = []
        #: Episodes that the teacher played and passes of imitation, fewer where time was short.
        self.imitated = (config.teacher_episodes, config.teacher_epochs)
        self.interrupted = False

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return self.limit.is_up()

    @property
    def cut_at(self) -> float | None:
        """The limit that cut imitation short; None where nothing did."""
        wanted = (self.config.teacher_episodes, self.config.teacher_epochs)
        return None if self.imitated == wanted else self.config.max_seconds

    @property
    def is_stale(self) -> bool:
        """Whether the validation families got nothing better for too long."""
        return self.exam == "validation" and self.best.stale >= self.config.patience

    @property
    def is_settled(self) -> bool:
        """Whether scores no longer rise, where that ends training."""
        return self.config.until_noise and has_settled(self.values)

    def imitate(self, taught: Sequence[RouteSelectionEnv], saved: Checkpoint | None) -> None:
        """Learn from a teacher that knows which row is best."""
        from routepilot.agents import ppo
        from routepilot.training.checkpointing import imitation_checkpoint, restore_imitation

        config, net = self.config, self.model.policy.net
        lessons = self.keeper.load_lessons(config.max_seconds)
        if lessons is None:
            lessons, episodes = self._lessons(taught)
            cut_at = config.max_seconds if episodes < config.teacher_episodes else None
            self.keeper.save_lessons(lessons, cut_at)
        episodes = int(np.count_nonzero(lessons["starts"]))
        imitation = ppo.Imitation(net, lessons, seed=config.seed)
        passes, loss = 0, 0.0
        if saved is not None:
            restore_imitation(saved, imitation, net)
            passes, loss = int(saved.notes["passes"]), float(saved.notes["loss"])
            self.say(f"goes on after {counted(passes, 'pass', 'passes')} of imitation")
        self.imitated = (episodes, config.teacher_epochs)
        while passes < config.teacher_epochs:
            if passes >= LEAST_PASSES and self.limit.is_up(IMITATED_BY):
                self.imitated = (episodes, passes)
                break
            passes += 1
            loss = imitation.run_pass()
            self.model.logger.record("imitation/cross_entropy", loss)
            self.model.logger.dump(step=passes)
            notes = {
                "passes": passes,
                "loss": loss,
                "clock": self.clock.read(),
                "cut_at": self.cut_at,
            }
            self.keeper.save(imitation_checkpoint(imitation, net, notes))
        count = len(lessons["targets"])
        self.say(f"imitated {counted(count, 'decision')} of the teacher, cross-entropy {loss:.3f}")
        if self.cut_at is not None:
            self.say(
                f"--max-seconds {self.cut_at:g} cut imitation short:"
                f" {counted(episodes, 'episode')} of"
                f" {config.teacher_episodes}, {counted(passes, 'pass', 'passes')} of"
                f" {config.teacher_epochs}"
            )

    def consider(self) -> float:
        """Score the present weights and keep them if they are the best; returns their value."""
        from routepilot.agents import ppo
        from routepilot.training.scalars import record_scores

        start = time.monotonic()
        value = self.best.consider(ppo.weights_of(self.model.policy.net))
        self.limit.reserve = time.monotonic() - start
        record_scores(self.model.logger, self.exam, self.best.last, value)
        self.values.append(value)
        return value

    def keep(self) -> None:
        """Write down where PPO stands, between two rollouts."""
        from routepilot.training.checkpointing import ppo_checkpoint

        notes = {
            "best": self.best.notes(),
            "next": self.next,
            "values": self.values,
            "clock": self.clock.read(),
            "imitated": list(self.imitated),
            "cut_at": self.cut_at,
        }
        self.keeper.save(ppo_checkpoint(self.model, self.envs, self.best.weights, notes))

    def improve(self) -> str:
        """Run PPO, keeping the best weights; returns why it ended early, if it did."""
        from stable_baselines3.common.callbacks import BaseCallback

        from routepilot.training.scalars import Episodes

        run, episodes = self, Episodes()

        class Watch(BaseCallback):
            """Scores the policy now and then, writes it down, and ends training in time."""

            def _on_rollout_start(self) -> None:
                self.logger.dump(step=self.num_timesteps)  # the update's scalars
                run.keep()
                run.keeper.drop_lessons()

            def _on_rollout_end(self) -> None:
                episodes.record(self.logger)
                if self.num_timesteps >= run.next:
                    run.next += run.config.evaluate_every
                    value = run.consider()
                    run.say(
                        f"{counted(self.num_timesteps, 'step')}: score {value:.3f}, best"
                        f" {run.best.text()}"
                    )

            def _on_step(self) -> bool:
                episodes.hear(self.locals["infos"])
                return not (run.is_late or run.is_stale or run.is_settled)

        self.clock.start_ppo()
        done = int(self.model.num_timesteps)
        try:
            if self.config.steps > done and self.is_late:
                return self._why_it_ends()  # nothing was learned since the last score
            if self.config.steps > done:
                self.model.learn(
                    self.config.steps - done, callback=Watch(), reset_num_timesteps=False
                )
            ended = self._why_it_ends()  # the last score may tell another tale
            self.consider()
            self.model.logger.dump(step=self.model.num_timesteps)
        except KeyboardInterrupt:
            self.interrupted = True
            self.consider()
            return " (interrupted; the best so far is saved, and the same command goes on)"
        return ended

    def _why_it_ends(self) -> str:
        """What ended PPO before its steps, in brackets; empty when nothing did."""
        if self.is_stale:
            return f" (no better score in {counted(self.best.stale, 'evaluation')})"
        if self.is_settled:
            return " (scores rise by less than they scatter)"
        return " (the time is up)" if self.is_late else ""

    def _lessons(self, taught: Sequence[RouteSelectionEnv]) -> tuple[dict[str, NDArray[Any]], int]:
        """Episodes with a teacher that knows which row is best, as `ppo.Imitation` takes them.

        Returns:
            The lessons, with `starts` (true at an episode's first decision), and how many
            episodes.
        """
        config = self.config
        observations: list[dict[str, NDArray[Any]]] = []
        targets: list[NDArray[np.float64]] = []
        values: list[float] = []
        starts: list[bool] = []
        for number in range(config.teacher_episodes):
            if number >= LEAST_EPISODES and self.limit.is_up(LESSONS_BY):
                break
            course = taught[number % len(taught)]
            seen, _ = course.reset(seed=config.seed * 1_000_003 + number)
            rewards: list[float] = []
            done = False
            while not done:
                target = course.teacher(config.teacher_temperature)
                observations.append(seen)
                targets.append(target)
                # Half the moves are the surrogate's, so the teacher also corrects its mistakes.
                if course.np_random.random() < 0.5 and seen["mask"][0]:
                    action = 0
                else:
                    action = int(course.np_random.choice(len(target), p=target))
                seen, reward, done, _, _ = course.step(np.int64(action))
                starts.append(not rewards)
                rewards.append(reward)
            values += np.cumsum(rewards[::-1])[::-1].tolist()
        lessons = {
            **{key: np.stack([o[key] for o in observations]) for key in observations[0]},
            "targets": np.array(targets, np.float32),
            "values": np.array(values, np.float32),
            "starts": np.array(starts, bool),
        }
        return lessons, sum(starts)
