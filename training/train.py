"""`train`: from route tables to a policy, the job from end to end.

Owns what a training is given and what it leaves: tables become courses and exams (`courses.py`,
`scoring.py`), the run (`training_run.py`) imitates a teacher that knows the recorded outcomes and
goes on with PPO, and the weights that did best become a policy with its card. Each episode's
surrogate never saw the family of the episode's model, so training meets what use will meet. A run
that was killed goes on where it was (`checkpointing.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from routepilot.agents.policy import Card, file_hash, save_policy
from routepilot.env.accuracy import Gate
from routepilot.env.errors import InputError, MissingExtraError
from routepilot.env.records import RouteTable
from routepilot.env.route_env import Randomness
from routepilot.env.tables import save_table
from routepilot.env.wording import counted
from routepilot.training.courses import AlternatingEnv, calibrate, courses, exams, open_school
from routepilot.training.defaults import checkpoints_folder
from routepilot.training.files import ensure_folder
from routepilot.training.manifest import package_versions
from routepilot.training.scoring import BUDGETS, Best
from routepilot.training.session import Say, silent
from routepilot.training.time_limit import Clock, TimeLimit
from routepilot.training.train_config import TrainConfig
from routepilot.training.training_run import TrainingRun


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
    patient: bool = False,
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
        patient: Fit the surrogates however long that takes, rather than refuse a time limit that
            does not reach for them.
        say: Hears progress.

    Raises:
        InputError: Fewer than three families of a table are left to train on, or the time will not
            reach for the surrogates.
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

    start = time.monotonic()  # what is imported once is not training
    tables = (table,) if isinstance(table, RouteTable) else tuple(table)
    sources = (source,) * len(tables) if source is None or isinstance(source, Path) else source
    config, gate = config or TrainConfig(), gate or Gate()
    if not tables or len(sources) != len(tables):
        raise InputError(
            f"{counted(len(tables), 'route table')} of {counted(len(sources), 'file')}; give one"
            " each"
        )
    on_fit = None if patient else TimeLimit(Clock(start, {}), config.max_seconds).check_fits
    schools = [open_school(t, held_out, validation, gate, config.kernel, on_fit) for t in tables]
    folder = ensure_folder(out)
    keeper = Keeper(folder, name, _key(tables, config, held_out, validation, gate), say)
    saved = keeper.load(config.max_seconds)
    clock = Clock(start, saved.notes["clock"] if saved else {})
    limit = TimeLimit(clock, config.max_seconds)
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
    run = TrainingRun(
        config,
        model,
        envs,
        Best(exams(schools, limits, max(BUDGETS)), len(schools), validation),
        "validation" if validation else "training",
        keeper,
        clock,
        limit,
        say,
    )
    limit.start_phases()
    if saved is None and limit.lateness():
        say(limit.lateness())
    if saved is not None and saved.phase == "ppo":
        run.best.restore(saved.notes["best"], restore_ppo(saved, model, envs))
        run.next = int(saved.notes["next"])
        run.values = list(saved.notes.get("values", ()))
        run.imitated = tuple(saved.notes["imitated"])
        say(f"goes on after {counted(model.num_timesteps, 'step')}")
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
        settings=asdict(
            replace(config, teacher_episodes=run.imitated[0], teacher_epochs=run.imitated[1])
        ),
        seconds=round(spent["seconds"], 1),
        steps_per_second=round(speed, 1),
    )
    path = save_policy(folder, run.best.weights, card)
    say(
        f"{counted(steps, 'step')} in {spent['seconds']:.0f} s, {speed:.0f} a second in PPO{ended}:"
        f" {run.best.text()}"
    )
    if run.interrupted:
        raise KeyboardInterrupt
    keeper.clear()
    return Trained(path, run.best.as_json(), steps, spent["seconds"], speed)


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
