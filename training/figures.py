"""The figures of an evaluation: from traces to plain data, every one with its interval.

Owns what is asked of the traces: shares, interquartile means, who beats whom, curves, profiles, how
well an agent stops, how far trainings differ, each model by itself. `docs/evaluation.md` explains
each figure. Runs no agent and writes no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.agents import NEEDS_POLICY
from routepilot.training.statistics import (
    DRAWS,
    Estimate,
    Statistic,
    bootstrap,
    estimate,
    interquartile_mean,
    mean,
    performance_profile,
    probability_of_improvement,
    share,
)
from routepilot.training.traces import BUDGETS, ENOUGH, Found, Runs

Floats = NDArray[np.float64]

#: Builds counted for a run that never had 95 % of the oracle's gain.
NEVER = max(BUDGETS) + 1

#: A stop after at most so many builds is in time where nothing is to be gained.
IN_TIME = 2

#: Budgets of the performance profiles, and the scores at which they are drawn.
PROFILE_BUDGETS, LEVELS = (1, 2, 4), np.linspace(0.0, 1.0, 41)

#: Points of a curve against seconds, and bootstrap draws behind each point of a curve.
POINTS, CURVE_DRAWS = 32, 500


@dataclass(frozen=True)
class TraceArrays:
    """Traces of one agent as arrays.

    Attributes:
        gains: Best gain after each build, shape (policies, models, seeds, builds).
        seconds: Seconds up to each build, of the same shape.
        builds: Builds before the stop, shape (policies, models, seeds).
        oracle: Best recorded gain of each run's model, shape (1, models, seeds).
    """

    gains: Floats
    seconds: Floats
    builds: Floats
    oracle: Floats

    @classmethod
    def of(cls, found: Mapping[str, Runs]) -> TraceArrays:
        """The arrays of model -> runs."""
        runs = list(found.values())
        gains = np.array([[[t.gains for t in seeds] for seeds in model] for model in runs])
        seconds = np.array([[[t.seconds for t in seeds] for seeds in model] for model in runs])
        builds = np.array([[[float(t.builds) for t in s] for s in model] for model in runs])
        oracle = np.array([[t.oracle for t in model[0]] for model in runs])
        return cls(
            gains.transpose(1, 0, 2, 3),
            seconds.transpose(1, 0, 2, 3),
            builds.transpose(1, 0, 2),
            oracle[None],
        )

    @property
    def has_gain(self) -> NDArray[np.bool_]:
        """Which models have something to gain, shape (models,)."""
        return np.asarray(self.oracle[0, :, 0] > 0)

    def after(self, builds: int) -> Floats:
        """Best gains after so many builds, shape (policies, models, seeds)."""
        found: Floats = self.gains[..., builds - 1]
        return found

    def scores(self, builds: int) -> Floats:
        """Shares of the oracle's gain, run by run, on the models with something to gain."""
        kept = self.has_gain
        found: Floats = self.after(builds)[:, kept] / self.oracle[:, kept]
        return found

    def at(self, seconds: float) -> Floats:
        """Best gains after so many seconds, shape (policies, models, seeds)."""
        finished = (self.seconds <= seconds).sum(axis=-1)
        last = np.take_along_axis(self.gains, np.maximum(finished - 1, 0)[..., None], axis=-1)
        return np.where(finished > 0, last[..., 0], 0.0)

    @property
    def builds_to_95(self) -> Floats:
        """Builds to 95 % of the oracle's gain; `NEVER` where it was not reached."""
        enough = self.gains >= ENOUGH * self.oracle[..., None]
        first = np.where(enough.any(axis=-1), enough.argmax(axis=-1) + 1.0, float(NEVER))
        return np.where(self.oracle > 0, first, 0.0)


def summarise(found: Mapping[str, Runs], seed: int = 0) -> dict[str, Any]:
    """Figures of one agent, with 95 % intervals bootstrapped over models, seeds and trainings.

    Args:
        found: Model -> traces, one row a policy and in it one a search seed.
        seed: Seed of the bootstrap.
    """
    board = TraceArrays.of(found)
    result: dict[str, Any] = {}
    shares = {b: estimate(share, board.after(b), board.oracle, seed=seed) for b in BUDGETS}
    result |= _by_budget("gain_share", shares)
    middle = {b: _guarded(interquartile_mean, board.scores(b), seed=seed) for b in BUDGETS}
    result |= _by_budget("iqm", middle)
    to_95 = estimate(mean, board.builds_to_95, seed=seed)
    return result | {
        "builds_to_95": to_95.value,
        "builds_to_95_low": to_95.low,
        "builds_to_95_high": to_95.high,
        "reached_95": float((board.builds_to_95 < NEVER).mean()),
        "regressions": int((board.gains < 0).any(axis=-1).sum()),
        "stop_builds": float(board.builds.mean()),
        "stop": stop_quality(board, seed),
        "trainings": _trainings(board),
    }


def stop_quality(board: TraceArrays, seed: int = 0) -> dict[str, Any]:
    """How well an agent knows when to stop.

    Returns:
        `builds` at the stop with `builds_low` and `builds_high`; `regret`, the share of the
        oracle's gain that was left on the table at the stop, with its ends; `in_time`, the share
        of runs on models with nothing to gain that stopped after `IN_TIME` builds at most (None
        without such models); `within_one`, the share of runs on the other models that had 95 % of
        the oracle's gain and stopped by themselves at most one build later (None without such
        models).
    """
    builds = estimate(mean, board.builds, seed=seed)
    left = estimate(share, board.oracle - board.after(max(BUDGETS)), board.oracle, seed=seed)
    kept = board.has_gain
    to_95 = board.builds_to_95
    stopped = board.builds < max(BUDGETS)
    soon = (to_95 < NEVER) & stopped & (board.builds <= to_95 + 1)
    return {
        "builds": builds.value,
        "builds_low": builds.low,
        "builds_high": builds.high,
        "regret": left.value,
        "regret_low": left.low,
        "regret_high": left.high,
        "in_time": None if kept.all() else float((board.builds[:, ~kept] <= IN_TIME).mean()),
        "within_one": float(soon[:, kept].mean()) if kept.any() else None,
    }


def against(found: Found, subject: str, seed: int = 0) -> dict[str, Any]:
    """One agent set against each other one, on the same models with the same search seeds.

    Args:
        found: Agent -> model -> traces.
        subject: The agent.
        seed: Seed of the bootstrap.

    Returns:
        `agent`; `rivals`, by name `improvement` (chance that a run of the agent beats the rival's,
        on models with something to gain) and `difference` (of their gain shares), each an estimate
        a budget, and `fewer_builds` (ratio of mean builds to 95 %); `best_rival`, by budget its
        `name` and the `difference` to it. The best rival is the one of the largest gain share at
        that budget, and so favoured by chance; where the agent is a policy, it is none of those.
    """
    ours = TraceArrays.of(found[subject])
    rivals: dict[str, Any] = {}
    shares: dict[str, Floats] = {}
    for name in found:
        if name in (subject, "oracle"):  # nobody can beat the best on record
            continue
        theirs = TraceArrays.of(found[name])
        shares[name] = np.array(
            [share(theirs.after(b)[None], theirs.oracle[None])[0] for b in BUDGETS]
        )
        rivals[name] = {
            "improvement": {
                str(b): _guarded(
                    probability_of_improvement,
                    *(ours.scores(b), theirs.scores(b)),
                    seed=seed,
                    otherwise=0.5,
                ).as_json()
                for b in BUDGETS
            },
            "difference": {str(b): _difference(ours, theirs, b, seed).as_json() for b in BUDGETS},
            "fewer_builds": estimate(
                _ratio, ours.builds_to_95, theirs.builds_to_95, seed=seed
            ).as_json(),
        }
    ours_too = NEEDS_POLICY if subject in NEEDS_POLICY else frozenset()
    shares = {name: found for name, found in shares.items() if name not in ours_too}
    best = {
        str(b): max(shares, key=lambda name: float(shares[name][place]))
        for place, b in enumerate(BUDGETS)
        if shares
    }
    return {
        "agent": subject,
        "rivals": rivals,
        "best_rival": {
            b: {"name": name, "difference": rivals[name]["difference"][b]}
            for b, name in best.items()
        },
    }


def curves(found: Found, seed: int = 0) -> dict[str, Any]:
    """Gain share so far against builds, and against seconds of building and measuring.

    Returns:
        `builds` and `seconds`, each with `at` (where) and `agents` (name -> `value`, `low`, `high`,
        as long as `at`).
    """
    boards = {name: TraceArrays.of(runs) for name, runs in found.items()}
    first = min(float(b.seconds[..., 0].min()) for b in boards.values())
    last = max(float(b.seconds[..., -1].max()) for b in boards.values())
    moments = np.geomspace(max(first, 1e-3), max(last, 2e-3), POINTS)
    by_builds, by_seconds = {}, {}
    for name, board in boards.items():
        steps = [board.after(b) for b in range(1, max(BUDGETS) + 1)]
        by_builds[name] = _curve(steps, board.oracle, seed)
        by_seconds[name] = _curve([board.at(t) for t in moments], board.oracle, seed)
    return {
        "builds": {"at": list(range(1, max(BUDGETS) + 1)), "agents": by_builds},
        "seconds": {"at": [float(f"{t:.4g}") for t in moments], "agents": by_seconds},
    }


def profiles(found: Found, seed: int = 0) -> dict[str, Any]:
    """Performance profiles: share of runs with at least each share of the oracle's gain.

    Returns:
        `levels`, and `budgets`: budget -> name -> `value`, `low`, `high`, as long as `levels`. On
        models with something to gain; empty without any.
    """
    boards = {name: TraceArrays.of(runs) for name, runs in found.items()}
    if not any(board.has_gain.any() for board in boards.values()):
        return {"levels": [], "budgets": {}}
    # Rounding must not tell a run that has all of it from the oracle.
    levels = np.maximum(LEVELS - 1e-9, 0.0)
    drawn = {
        str(b): {
            name: _rounded(
                bootstrap(
                    lambda x: performance_profile(x, levels),
                    board.scores(b),
                    draws=CURVE_DRAWS,
                    seed=seed,
                )
            )
            for name, board in boards.items()
        }
        for b in PROFILE_BUDGETS
    }
    return {"levels": [round(float(x), 4) for x in LEVELS], "budgets": drawn}


def of_model(found: Found, model: str) -> dict[str, Any]:
    """Each agent on one model, means over trainings and seeds.

    Returns:
        Agent -> `gain_share` by budget (1 where nothing is to be gained), `builds_to_95` (`NEVER`
        counted where it was not reached) and `builds` before the stop.
    """
    rows = {}
    for name, models in found.items():
        board = TraceArrays.of({model: models[model]})
        oracle = float(board.oracle[0, 0, 0])
        rows[name] = {
            "gain_share": {
                str(b): float(board.after(b).mean()) / oracle if oracle > 0 else 1.0
                for b in BUDGETS
            },
            "builds_to_95": float(board.builds_to_95.mean()),
            "builds": float(board.builds.mean()),
        }
    return rows


def _trainings(board: TraceArrays) -> dict[str, Any]:
    """Gain share of each training by budget, and their standard deviation."""
    each = {
        str(b): [float(share(one[None, None], board.oracle[None])[0]) for one in board.after(b)]
        for b in BUDGETS
    }
    spread = {b: float(np.std(s, ddof=1)) if len(s) > 1 else 0.0 for b, s in each.items()}
    return {"count": len(board.gains), "gain_share": each, "gain_share_sd": spread}


def _by_budget(name: str, found: Mapping[int, Estimate]) -> dict[str, dict[str, float]]:
    return {
        name: {str(b): e.value for b, e in found.items()},
        f"{name}_low": {str(b): e.low for b, e in found.items()},
        f"{name}_high": {str(b): e.high for b, e in found.items()},
    }


def _difference(ours: TraceArrays, theirs: TraceArrays, builds: int, seed: int) -> Estimate:
    """Of two gain shares; models and seeds are drawn together, so the interval is paired."""

    def statistic(a: Floats, b: Floats, oracle: Floats) -> Floats:
        return share(a, oracle) - share(b, oracle)

    return estimate(statistic, ours.after(builds), theirs.after(builds), ours.oracle, seed=seed)


def _ratio(a: Floats, b: Floats) -> Floats:
    found: Floats = mean(a) / np.maximum(mean(b), 1e-9)
    return found


def _guarded(
    statistic: Statistic, *scores: Floats, seed: int, otherwise: float = 0.0, draws: int = DRAWS
) -> Estimate:
    """An estimate, or a constant where no model has anything to gain."""
    if scores[0].shape[1] == 0:
        return Estimate(otherwise, otherwise, otherwise)
    return estimate(statistic, *scores, seed=seed, draws=draws)


def _curve(steps: Sequence[Floats], oracle: Floats, seed: int) -> dict[str, list[float]]:
    points = [bootstrap(share, step, oracle, draws=CURVE_DRAWS, seed=seed) for step in steps]
    value, low, high = (np.array([float(p[i]) for p in points]) for i in range(3))
    return _rounded((value, low, high))


def _rounded(found: tuple[Floats, Floats, Floats]) -> dict[str, list[float]]:
    """Four places are more than any interval is sure of."""
    names = ("value", "low", "high")
    return {
        name: [round(float(x), 4) if math.isfinite(x) else 0.0 for x in column]
        for name, column in zip(names, found, strict=True)
    }
