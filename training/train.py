"""`train`: from a route table to a policy, in one readable file.

Owns the training run: warm start by imitating a teacher that knows the recorded outcomes, then PPO,
then the weights that did best on models of families the run never trained on. Each episode's
surrogate never saw the family of the episode's model, so training meets what use will meet.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.agents.policy import Card, Network, file_hash, save_policy
from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import Replay
from routepilot.env.episode import ROWS
from routepilot.env.errors import InputError, MissingExtraError
from routepilot.env.forecast import fit, seen_odds
from routepilot.env.records import RouteTable
from routepilot.env.route_env import Randomness, RouteSelectionEnv
from routepilot.env.surrogate import Kernel, Surrogate, leave_family_out
from routepilot.env.tables import save_table
from routepilot.training.defaults import checkpoints_folder
from routepilot.training.files import ensure_folder
from routepilot.training.manifest import package_versions
from routepilot.training.session import Say, silent

#: Budgets at which a policy is scored.
BUDGETS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class TrainConfig:
    """How a policy is trained; the defaults made the shipped one (docs/experiments.md)."""

    #: Seed of everything.
    seed: int = 0
    #: Environment steps of PPO.
    steps: int = 60_000
    #: Seconds after which training ends with what it has; None for no limit.
    max_seconds: float | None = None
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
    #: Kernel of the surrogate.
    kernel: Kernel = Kernel()


@dataclass(frozen=True)
class Trained:
    """What training left.

    Attributes:
        path: The policy's weights file.
        scores: Share of the oracle's gain by budget at the start and the end.
        steps: Environment steps.
        seconds: Wall-clock seconds.
    """

    path: Path
    scores: dict[str, Any]
    steps: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return {**asdict(self), "path": str(self.path)}


def train(
    table: RouteTable,
    config: TrainConfig | None = None,
    *,
    held_out: tuple[str, ...] = (),
    out: Path,
    name: str = "policy",
    gate: Gate | None = None,
    source: Path | None = None,
    say: Say = silent,
) -> Trained:
    """Train a policy on a table and save it with its card and its table.

    Args:
        table: Route table.
        config: Settings.
        held_out: Families left out of everything: training, surrogate, validation.
        out: Folder for the policy.
        name: Name of the policy.
        gate: Gate that the card names and the scores use.
        source: File the table was read from. A released table is referred to by the card; any
            other is copied beside the policy, which needs it at work.
        say: Hears progress.

    Raises:
        InputError: Fewer than three families are left to train on.
        MissingExtraError: Torch or Stable-Baselines3 is not installed.
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
    config, gate = config or TrainConfig(), gate or Gate()
    start = time.monotonic()
    known = table.without_families(held_out)
    if len(known.families) < 3:
        raise InputError(
            f"{len(known.families)} families are left to train on and 3 are needed; hold out fewer"
        )
    folder = ensure_folder(out)
    torch.manual_seed(config.seed)
    torch.set_num_threads(1)
    # Beliefs about speed and loss do not depend on the limit: one fit serves every course.
    surrogates = leave_family_out(Replay(known, gate), config.kernel)
    limits = dict.fromkeys((gate.limit, *config.limits))
    courses = [_course(known, replace(gate, limit=x), config, surrogates) for x in limits]
    env = DummyVecEnv([_maker(courses[i % len(courses)]) for i in range(config.environments)])
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
    net = model.policy.net
    _warm_start(net, courses, config, say)
    best = _Best(net, courses)
    say(f"after imitation ({time.monotonic() - start:.0f} s): {best.text()}")
    stopped = _improve(model, best, config, start, say)
    seconds = time.monotonic() - start
    place = _keep_table(source, known, folder / f"{name}.parquet")
    card = Card(
        name=name,
        table=place.name,
        table_sha256=file_hash(place),
        models=tuple(card.name for card in known.models),
        held_out=held_out,
        gate={"metric": gate.metric, "limit": gate.limit},
        kernel=asdict(config.kernel),
        seed=config.seed,
        steps=int(model.num_timesteps),
        scores=best.scores(),
        calibration=asdict(fit(*seen_odds(list(courses[0].replay), surrogates, gate.limit))),
        versions=package_versions(),
    )
    path = save_policy(folder, best.weights, card)
    say(f"{model.num_timesteps} steps in {seconds:.0f} s{stopped}: {best.text()}")
    return Trained(path, best.scores(), int(model.num_timesteps), seconds)


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


def play(
    env: RouteSelectionEnv, network: Network, model: str, budget: int
) -> tuple[list[float], int]:
    """Let a policy tune one recorded model.

    Returns:
        Best gain after each build up to the budget (a stop repeats the last), and builds used.
    """
    from routepilot.env.episode import Observation

    seen, _ = env.reset(seed=0, options={"model": model})
    gains: list[float] = []
    while len(gains) < budget:
        observation = Observation(
            seen["candidates"], seen["context"], seen["mask"], np.zeros(ROWS, np.int64)
        )
        action = int(np.argmax(network.logits(observation)))
        seen, _, done, _, info = env.step(np.int64(action))
        if action != ROWS:
            gains.append(float(info["log_speedup"]))
        if done:
            break
    used = len(gains)
    gains += [gains[-1] if gains else 0.0] * (budget - used)
    return gains, used


def _course(
    table: RouteTable, gate: Gate, config: TrainConfig, surrogates: Mapping[str, Surrogate]
) -> RouteSelectionEnv:
    randomness = Randomness(config.budgets, config.prices, noise=True, share=config.share)
    return RouteSelectionEnv(table, gate, randomness, surrogates)


def _maker(course: RouteSelectionEnv) -> Any:
    """A function that makes an environment like `course`, sharing what was fitted for it."""
    return lambda: RouteSelectionEnv(
        course.replay.table, course.replay.gate, course.randomness, course.surrogates
    )


def _warm_start(
    net: Any, courses: Sequence[RouteSelectionEnv], config: TrainConfig, say: Say
) -> None:
    """Play episodes with a teacher that knows which row is best, and imitate it."""
    from routepilot.agents import ppo

    observations: list[dict[str, NDArray[Any]]] = []
    targets, values = [], []
    for number in range(config.teacher_episodes):
        course = courses[number % len(courses)]
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
    loss = ppo.imitate(
        net,
        observations,
        np.array(targets, np.float32),
        np.array(values, np.float32),
        epochs=config.teacher_epochs,
        seed=config.seed,
    )
    say(f"imitated {len(targets)} decisions of the teacher, cross-entropy {loss:.3f}")


class _Best:
    """The best weights so far, by share of the oracle's gain over budgets and limits."""

    def __init__(self, net: Any, courses: Sequence[RouteSelectionEnv]) -> None:
        self._net = net
        budget = max(BUDGETS)
        self._envs = [
            RouteSelectionEnv(
                course.replay.table,
                course.replay.gate,
                Randomness((budget, budget), (0.005, 0.005), noise=False, share=1.0),
                course.surrogates,
            )
            for course in courses
        ]
        self.shares: dict[int, float] = {}
        self.builds = 0.0
        self.value = -1.0
        self.weights: dict[str, NDArray[np.float32]] = {}
        self.consider()

    def consider(self) -> float:
        """Score the present weights and keep them if they are the best."""
        from routepilot.agents import ppo

        weights = ppo.weights_of(self._net)
        network = Network(weights)
        # One limit alone would decide by the luck of a model or two.
        scores = [self._score(env, network) for env in self._envs]
        shares, mean_builds = scores[0]
        value = float(np.mean([np.mean(list(s.values())) - 0.005 * b for s, b in scores]))
        if value > self.value:
            self.value, self.shares, self.builds = value, shares, mean_builds
            self.weights = {name: array.copy() for name, array in weights.items()}
        return value

    @staticmethod
    def _score(env: RouteSelectionEnv, network: Network) -> tuple[dict[int, float], float]:
        """Share of the oracle's gain by budget, and mean builds before the stop."""
        found = {budget: 0.0 for budget in BUDGETS}
        oracle, builds = 0.0, 0
        for model in env.replay:
            gains, used = play(env, network, model.card.name, max(BUDGETS))
            oracle += model.oracle
            builds += used
            for budget in BUDGETS:
                found[budget] += gains[budget - 1]
        shares = {budget: gain / max(oracle, 1e-9) for budget, gain in found.items()}
        return shares, builds / len(env.replay.models)

    def text(self) -> str:
        """The best shares, for people."""
        shares = ", ".join(f"{100 * s:.0f} % after {b}" for b, s in self.shares.items())
        return f"{shares} builds, families unseen by the surrogate; stops after {self.builds:.1f}"

    def scores(self) -> dict[str, Any]:
        """The best shares as plain data."""
        return {
            "on": "the training models, each family unseen by its surrogate but not by the policy",
            "gain_share": {str(budget): share for budget, share in self.shares.items()},
            "stop_builds": self.builds,
        }


def _improve(model: Any, best: _Best, config: TrainConfig, start: float, say: Say) -> str:
    """Run PPO, keeping the best weights; returns why it ended early, if it did."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Watch(BaseCallback):
        """Scores the policy now and then, and ends training in time."""

        def __init__(self) -> None:
            super().__init__()
            self.next = config.evaluate_every

        def _on_rollout_end(self) -> None:
            if self.num_timesteps >= self.next:
                self.next += config.evaluate_every
                value = best.consider()
                say(f"{self.num_timesteps} steps: score {value:.3f}, best {best.text()}")

        def _on_step(self) -> bool:
            late = config.max_seconds is not None
            return not (late and time.monotonic() - start > (config.max_seconds or 0.0))

    try:
        if config.steps > 0:
            model.learn(config.steps, callback=Watch())
        best.consider()
    except KeyboardInterrupt:
        best.consider()
        return " (interrupted; the best so far is saved)"
    return ""


def _keep_table(source: Path | None, known: RouteTable, place: Path) -> Path:
    """The table file that a policy's card names."""
    if source is not None and source.resolve().parent == checkpoints_folder() / "tables":
        return source
    save_table(known, place)
    return place
