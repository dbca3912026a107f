"""How a policy is trained: every setting, with its default and what it means.

Owns the settings alone; `recipe.py` reads them from files and options.
"""

from __future__ import annotations

from dataclasses import dataclass

from routepilot.env.likeness import Kernel


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
