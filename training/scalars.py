"""What a training run shows of itself, through Stable-Baselines3's logger.

Owns the names of the scalars and what they are made of. TensorBoard is imported only when a folder
for it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from routepilot.env.errors import MissingExtraError
from routepilot.training.files import ensure_folder
from routepilot.training.scoring import Score

#: Scalars by name, beside Stable-Baselines3's own (`train/...`, `time/fps`). `exam` stands for
#: `validation`, or `training` where no family validates.
SCALARS: dict[str, str] = {
    "imitation/cross_entropy": "of the teacher's choice, after each pass",
    "exam/gain_1": "share of the oracle's gain after 1 build, at the policy's own limit",
    "exam/gain_2": "after 2 builds",
    "exam/gain_4": "after 4 builds",
    "exam/builds": "builds before the stop",
    "exam/stops_in_time": "share of models on which it had what there was, and stopped then",
    "exam/infeasible": "share of builds that were not feasible",
    "exam/score": "what weights are chosen by, over all limits",
    "rollout/gain": "log speed-up of a training episode's answer",
    "rollout/builds": "builds of a training episode",
    "rollout/stopped": "share of training episodes that the policy ended itself",
    "rollout/infeasible": "share of a rollout's builds that were not feasible",
}

#: Budgets whose gain is shown.
SHOWN = (1, 2, 4)


def open_logger(folder: Path | None) -> Any:
    """A logger of Stable-Baselines3 that writes for TensorBoard, or nothing.

    Raises:
        MissingExtraError: TensorBoard is wanted and not installed.
        InputError: The folder cannot be written.
    """
    from stable_baselines3.common.logger import Logger, make_output_format

    if folder is None:
        return Logger(None, [])
    if find_spec("tensorboard") is None:
        raise MissingExtraError("--tensorboard needs tensorboard; pip install 'routepilot[board]'")
    return Logger(str(folder), [make_output_format("tensorboard", str(ensure_folder(folder)))])


class Episodes:
    """Figures of the training episodes that ended since they were last shown."""

    def __init__(self) -> None:
        self._ended: list[Mapping[str, Any]] = []

    def hear(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """Take in one step's infos; those of an episode's end say whether it was a stop."""
        self._ended += [info for info in infos if "stopped" in info]

    def record(self, logger: Any) -> None:
        """Show their means, and begin anew."""
        if self._ended:
            builds = sum(info["builds"] for info in self._ended)
            failed = sum(info["failed"] for info in self._ended)
            logger.record("rollout/gain", _mean(self._ended, "log_speedup"))
            logger.record("rollout/builds", _mean(self._ended, "builds"))
            logger.record("rollout/stopped", _mean(self._ended, "stopped"))
            logger.record("rollout/infeasible", failed / max(builds, 1))
        self._ended = []


def record_scores(logger: Any, exam: str, scores: Sequence[Score], value: float) -> None:
    """Show the scores of the present weights.

    Args:
        logger: As `open_logger` gives it.
        exam: `validation` or `training`.
        scores: One a table, at the policy's own limit.
        value: What weights are chosen by.
    """
    mean = Score.mean(scores)
    for budget in SHOWN:
        logger.record(f"{exam}/gain_{budget}", mean.gain_share[str(budget)])
    logger.record(f"{exam}/builds", mean.stop_builds)
    logger.record(f"{exam}/stops_in_time", mean.stops_in_time)
    logger.record(f"{exam}/infeasible", mean.infeasible)
    logger.record(f"{exam}/score", value)


def _mean(ended: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([info[name] for info in ended]))
