"""`train`: from route tables to a policy, in one readable file.

Owns the training run: warm start by imitating a teacher that knows the recorded outcomes, then PPO,
then the weights that did best on the exams (`courses.py`, `scoring.py`). Each episode's surrogate
never saw the family of the episode's model, so training meets what use will meet. A run that was
killed goes on where it was (`checkpointing.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.agents.policy import Card, file_hash, save_policy
from routepilot.env.accuracy import Gate
from routepilot.env.errors import InputError, MissingExtraError
from routepilot.env.records import RouteTable
from routepilot.env.route_env import Randomness, RouteSelectionEnv
from routepilot.env.surrogate import Kernel
from routepilot.env.tables import save_table
from routepilot.training.courses import AlternatingEnv, calibrate, courses, exams, open_school
from routepilot.training.defaults import checkpoints_folder
from routepilot.training.files import ensure_folder
from routepilot.training.manifest import package_versions
from routepilot.training.scoring import BUDGETS, Best
from routepilot.training.session import Say, silent

if TYPE_CHECKING:
    from routepilot.training.checkpointing import Checkpoint, Keeper

#: Evaluations that training is judged by, with `until_noise`.
WINDOW = 4


@dataclass(frozen=True)
class TrainConfig:
    """How a policy is trained; the defaults made the shipped one (docs/experiments.md)."""

    #: Seed of everything.
    seed: int = 0
    #: Environment steps of PPO.
    steps: int = 60_000
    #: Seconds after which training ends with what it has; None for no limit.
    max_seconds: float | None = None
    #: End training once scores rise by less than they scatter (`has_settled`).
    until_noise: bool = False
    #: Environments stepped together.
    environments: int = 8
    #: Steps of each environment between updates.
    rollout: int = 256
    #: Batch size of an update.
    batch: int = 512
    #: Passes over a rollout.
    epochs: int = 6
    #: Learning rate of PPO, after the warm start.
    learning_rate: float = 1e-4
    #: Discount: an episode is short and its end is its answer.
    gamma: float = 1.0
    #: Trace of the advantage estimate.
    trace: float = 0.95
    #: Weight of the entropy bonus.
    entropy: float = 0.003
    #: Episodes the teacher plays.
    teacher_episodes: int = 3000
    #: Passes of imitation.
    teacher_epochs: int = 25
    #: Temperature of the teacher's choice, in log speed-up.
    teacher_temperature: float = 0.03
    #: Steps between two evaluations.
    evaluate_every: int = 8_192
    #: Prices of an average build that episodes draw from, in log speed-up.
    prices: tuple[float, float] = (0.002, 0.01)
    #: Budgets that episodes draw from.
    budgets: tuple[int, int] = (2, 16)
    #: Least share of a model's routes that an episode offers.
    share: float = 0.6
    #: Limits of the relative L2 error that episodes draw from.
    limits: tuple[float, ...] = (3e-3, 1e-2, 3e-2, 1e-1)
    #: Draw each recorded log speed-up anew within its interval.
    noise: bool = True
    #: Least share of a catalog's knobs that an episode may change; below 1, random sub-catalogs.
    knobs: float = 1.0
    #: Share of episodes whose surrogate knows no records, as on a catalog never seen.
    blind: float = 0.0
    #: Evaluations without a better one after which training stops, where families validate.
    patience: int = 4
    #: Kernel of the surrogate.
    kernel: Kernel = Kernel()


@dataclass(frozen=True)
class Trained:
    """What training left.

    Attributes:
        path: The policy's weights file.
        scores: Share of the oracle's gain by budget at the start and the end.
        steps: Environment steps.
        seconds: Wall-clock seconds, those before a kill included.
        steps_per_second: Environment steps a second while PPO ran, updates and scoring included.
    """

    path: Path
    scores: dict[str, Any]
    steps: int
    seconds: float
    steps_per_second: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return {**asdict(self), "path": str(self.path)}


class _Clock:
    """Seconds of a run, over as many processes as it took."""

    def __init__(self, start: float, before: Mapping[str, float]) -> None:
        self._start, self._before = start, before
        self._ppo: float | None = None

    def start_ppo(self) -> None:
        self._ppo = time.monotonic()

    def read(self) -> dict[str, float]:
        now = time.monotonic()
        ppo = now - self._ppo if self._ppo is not None else 0.0
        return {
            "seconds": self._before.get("seconds", 0.0) + now - self._start,
            "ppo": self._before.get("ppo", 0.0) + ppo,
        }


def train(
    table: RouteTable | Sequence[RouteTable],
    config: TrainConfig | None = None,
    *,
    held_out: tuple[str, ...] = (),
    validation: tuple[str, ...] = (),
    out: Path,
    name: str = "policy",
    gate: Gate | None = None,
    source: Path | Sequence[Path | None] | None = None,
    tensorboard: Path | None = None,
    say: Say = silent,
) -> Trained:
    """Train a policy on one table, or on several so that it serves each of their catalogs.

    A run that was killed goes on from its last checkpoint in `out` when it is called again with the
    same arguments, and ends with the same weights as one that was not.

    Args:
        table: Route table, or several.
        config: Settings.
        held_out: Families left out of everything: training, surrogate, validation.
        validation: Families that train nothing: they choose the weights and stop the training. The
            surrogate knows them at work.
        out: Folder for the policy.
        name: Name of the policy.
        gate: Gate that the card names and the scores use.
        source: File each table was read from. A released table is referred to by the card; any
            other is copied beside the policy, which needs it at work.
        tensorboard: Folder for TensorBoard's scalars (`scalars.SCALARS`); None for none.
        say: Hears progress.

    Raises:
        InputError: Fewer than three families of a table are left to train on.
        MissingExtraError: Torch or Stable-Baselines3 is not installed, or TensorBoard is not.
        KeyboardInterrupt: It was interrupted; the best so far and the checkpoint are saved.
    """
    if not re.fullmatch(r"[^\W_][\w.+-]*", name):
        raise InputError(
            f"policy name {name!r} is not allowed; give letters, digits and . _ + - after a letter"
            " or digit, since it names the files"
        )
    try:
        import torch
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import DummyVecEnv

        from routepilot.agents import ppo
    except ImportError as error:
        raise MissingExtraError(
            f"training needs {error.name}; pip install 'routepilot[train]'"
        ) from None
    from routepilot.training.checkpointing import Keeper, restore_ppo
    from routepilot.training.scalars import open_logger

    start = time.monotonic()
    tables = (table,) if isinstance(table, RouteTable) else tuple(table)
    sources = (source,) * len(tables) if source is None or isinstance(source, Path) else source
    config, gate = config or TrainConfig(), gate or Gate()
    if not tables or len(sources) != len(tables):
        raise InputError(f"{len(tables)} route tables of {len(sources)} files; give one each")
    schools = [open_school(t, held_out, validation, gate, config.kernel) for t in tables]
    folder = ensure_folder(out)
    keeper = Keeper(folder, name, _key(tables, config, held_out, validation, gate), say)
    saved = keeper.load()
    clock = _Clock(start, saved.notes["clock"] if saved else {})
    logger = open_logger(tensorboard)
    torch.manual_seed(config.seed)
    torch.set_num_threads(1)
    randomness = Randomness(
        config.budgets, config.prices, config.noise, config.share, config.knobs, config.blind
    )
    limits = tuple(dict.fromkeys((gate.limit, *config.limits)))
    taught = courses(schools, limits, randomness)
    envs = [AlternatingEnv(taught, n, config.environments) for n in range(config.environments)]
    env = DummyVecEnv([partial(_same, one) for one in envs])
    env.seed(config.seed)
    model = PPO(
        ppo.RowPolicy,
        env,
        n_steps=config.rollout,
        batch_size=config.batch,
        n_epochs=config.epochs,
        learning_rate=config.learning_rate,
        gamma=config.gamma,
        gae_lambda=config.trace,
        ent_coef=config.entropy,
        seed=config.seed,
        device="cpu",
    )
    model.set_logger(logger)
    run = _Run(
        config,
        model,
        envs,
        Best(exams(schools, limits, max(BUDGETS)), len(schools), validation),
        "validation" if validation else "training",
        keeper,
        clock,
        say,
    )
    if saved is not None and saved.phase == "ppo":
        run.best.restore(saved.notes["best"], restore_ppo(saved, model, envs))
        run.next = int(saved.notes["next"])
        run.values = list(saved.notes.get("values", ()))
        say(f"goes on after {model.num_timesteps} steps")
    else:
        run.imitate(taught, saved)
        run.consider()
        say(f"after imitation ({clock.read()['seconds']:.0f} s): {run.best.text()}")
    ended = run.improve()
    logger.close()
    spent, steps = clock.read(), int(model.num_timesteps)
    speed = steps / spent["ppo"] if steps else 0.0
    places = [
        _keep_table(file, school.table, folder, name if len(tables) == 1 else f"{name}-{number}")
        for number, (file, school) in enumerate(zip(sources, schools, strict=True), 1)
    ]
    card = Card(
        name=name,
        table=places[0].name,
        table_sha256=file_hash(places[0]),
        models=tuple(dict.fromkeys(m.card.name for s in schools for m in s.trained)),
        held_out=held_out,
        gate={"metric": gate.metric, "limit": gate.limit},
        kernel=asdict(config.kernel),
        seed=config.seed,
        steps=steps,
        scores=run.best.as_json(),
        calibration=asdict(calibrate(schools, gate.limit)),
        versions=package_versions(),
        more_tables={place.name: file_hash(place) for place in places[1:]},
        validation=validation,
        settings=asdict(config),
        seconds=round(spent["seconds"], 1),
        steps_per_second=round(speed, 1),
    )
    path = save_policy(folder, run.best.weights, card)
    say(
        f"{steps} steps in {spent['seconds']:.0f} s, {speed:.0f} a second in PPO{ended}:"
        f" {run.best.text()}"
    )
    if run.interrupted:
        raise KeyboardInterrupt
    keeper.clear()
    return Trained(path, run.best.as_json(), steps, spent["seconds"], speed)


def has_settled(scores: Sequence[float]) -> bool:
    """True when scores no longer rise by more than they scatter.

    A line through the last `WINDOW` scores rises by no more than its own standard error.

    Args:
        scores: Of the evaluations so far, in order.
    """
    if len(scores) < WINDOW:
        return False
    places = np.arange(WINDOW, dtype=float) - (WINDOW - 1) / 2
    last = np.asarray(scores[-WINDOW:], float)
    slope = float(places @ last / (places @ places))
    residual = last - last.mean() - slope * places
    variance = float(residual @ residual) / (WINDOW - 2)
    return slope <= math.sqrt(variance / float(places @ places))


def steps_per_second(env: RouteSelectionEnv, steps: int = 5000) -> float:
    """Steps a second of an environment on one core, observation and surrogate included."""
    rng = np.random.default_rng(0)
    for model in env.replay:  # each model's prior is computed once, whatever the steps
        seen, _ = env.reset(seed=0, options={"model": model.card.name})
    start = time.perf_counter()
    for _ in range(steps):
        row = int(rng.integers(max(int(seen["mask"][:-1].sum()), 1)))
        seen, _, done, _, _ = env.step(np.int64(row))
        if done:
            seen, _ = env.reset()
    return steps / (time.perf_counter() - start)


class _Run:
    """A training run: imitation, then PPO, with its checkpoints.

    Args:
        config: Settings.
        model: Stable-Baselines3's PPO.
        envs: Its environments.
        best: The best weights so far.
        exam: What its scores are called.
        keeper: Of its checkpoints.
        clock: Of its seconds.
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
        clock: _Clock,
        say: Say,
    ) -> None:
        self.config, self.model, self.envs, self.best = config, model, envs, best
        self.exam, self.keeper, self.clock, self.say = exam, keeper, clock, say
        #: Steps at which the next evaluation is due.
        self.next = config.evaluate_every
        #: Values of the evaluations so far.
        self.values: list[float] = []
        self.interrupted = False

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        longest = self.config.max_seconds
        return longest is not None and self.clock.read()["seconds"] > longest

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
        lessons = self.keeper.load_lessons()
        if lessons is None:
            lessons = _lessons(taught, config)
            self.keeper.save_lessons(lessons)
        imitation = ppo.Imitation(net, lessons, seed=config.seed)
        begun, loss = 0, 0.0
        if saved is not None:
            restore_imitation(saved, imitation, net)
            begun, loss = int(saved.notes["passes"]), float(saved.notes["loss"])
            self.say(f"goes on after {begun} passes of imitation")
        for number in range(begun + 1, config.teacher_epochs + 1):
            loss = imitation.run_pass()
            self.model.logger.record("imitation/cross_entropy", loss)
            self.model.logger.dump(step=number)
            notes = {"passes": number, "loss": loss, "clock": self.clock.read()}
            self.keeper.save(imitation_checkpoint(imitation, net, notes))
        count = len(lessons["targets"])
        self.say(f"imitated {count} decisions of the teacher, cross-entropy {loss:.3f}")

    def consider(self) -> float:
        """Score the present weights and keep them if they are the best; returns their value."""
        from routepilot.agents import ppo
        from routepilot.training.scalars import record_scores

        value = self.best.consider(ppo.weights_of(self.model.policy.net))
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
                        f"{self.num_timesteps} steps: score {value:.3f}, best {run.best.text()}"
                    )

            def _on_step(self) -> bool:
                episodes.hear(self.locals["infos"])
                return not (run.is_late or run.is_stale or run.is_settled)

        self.clock.start_ppo()
        done = int(self.model.num_timesteps)
        try:
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
            return f" (no better score in {self.best.stale} evaluations)"
        if self.is_settled:
            return " (scores rise by less than they scatter)"
        return " (the time is up)" if self.is_late else ""


def _lessons(taught: Sequence[RouteSelectionEnv], config: TrainConfig) -> dict[str, NDArray[Any]]:
    """Episodes with a teacher that knows which row is best, as `ppo.Imitation` takes them."""
    observations: list[dict[str, NDArray[Any]]] = []
    targets, values = [], []
    for number in range(config.teacher_episodes):
        course = taught[number % len(taught)]
        seen, _ = course.reset(seed=config.seed * 1_000_003 + number)
        rewards, done = [], False
        while not done:
            target = course.teacher(config.teacher_temperature)
            observations.append(seen)
            targets.append(target)
            # Half the moves are the surrogate's, so that the teacher also corrects its mistakes.
            if course.np_random.random() < 0.5 and seen["mask"][0]:
                action = 0
            else:
                action = int(course.np_random.choice(len(target), p=target))
            seen, reward, done, _, _ = course.step(np.int64(action))
            rewards.append(reward)
        values += np.cumsum(rewards[::-1])[::-1].tolist()
    return {
        **{key: np.stack([o[key] for o in observations]) for key in observations[0]},
        "targets": np.array(targets, np.float32),
        "values": np.array(values, np.float32),
    }


def _key(
    tables: Sequence[RouteTable],
    config: TrainConfig,
    held_out: Sequence[str],
    validation: Sequence[str],
    gate: Gate,
) -> str:
    """Hash of all that a run's result depends on; how long it may take is not."""
    settings = asdict(replace(config, max_seconds=None))
    parts = [settings, list(held_out), list(validation), gate.metric, gate.limit]
    found = hashlib.sha256(json.dumps([parts, package_versions()], sort_keys=True).encode())
    for table in tables:
        found.update(repr((table.catalog, table.models, table.outcomes)).encode())
    return found.hexdigest()


def _same(env: AlternatingEnv) -> AlternatingEnv:
    return env


def _keep_table(source: Path | None, known: RouteTable, folder: Path, name: str) -> Path:
    """The table file that a policy's card names."""
    if source is not None and source.resolve().parent == checkpoints_folder() / "tables":
        return source
    place = folder / f"{name}.parquet"
    save_table(known, place)
    return place
