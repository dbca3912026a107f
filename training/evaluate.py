"""`evaluate`: the protocol. Every agent on every recorded model, its family unseen, equal builds.

Families are left out one at a time, or as the corpus' splits say (`folds`).

Owns the replayed comparison and its statistics: share of the oracle's gain against builds, builds
to 95 % of it, intervals bootstrapped over models and seeds. Measures nothing live.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.agents import NEEDS_TABLE, make_factory
from routepilot.agents.base import AgentFactory, Problem, search
from routepilot.agents.oracle import oracle
from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import ModelReplay, Replay
from routepilot.env.errors import InputError, MachineError
from routepilot.env.forecast import calibration_error, held_out_reliability
from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.env.routes import Route
from routepilot.env.surrogate import leave_family_out
from routepilot.env.tables import save_table
from routepilot.env.zoo_entries import splits
from routepilot.training.files import ensure_folder
from routepilot.training.manifest import manifest
from routepilot.training.session import Say, silent

Floats = NDArray[np.float64]

#: Builds at which agents are compared.
BUDGETS = (1, 2, 4, 8, 16)

#: Agents evaluated when none are named: those that need no training.
DEFAULT_AGENTS = (
    "oracle",
    "fast",
    "mixed",
    "recentred",
    "random",
    "tpe",
    "gp",
    "forest-scratch",
    "best-on-average",
    "knn",
    "coreset",
    "grace",
    "forest",
    "transfer-gp",
    "two-way-gp",
    "thompson",
    "greedy",
)

#: Where the policies of the agents that need one are kept, by agent.
POLICY_FOLDERS = {"bc": "policies-bc", "ppo": "policies"}

#: Bootstrap draws behind an interval.
DRAWS = 2000


@dataclass(frozen=True)
class Fold:
    """Families that are judged together, and all those that agents must not know meanwhile."""

    judged: tuple[str, ...]
    hidden: tuple[str, ...]


def folds(families: Sequence[str], split: str | None = None) -> list[Fold]:
    """Who is judged while who is hidden.

    Args:
        families: Families of the table.
        split: None leaves one family out at a time. `validation` judges the corpus' validation
            families by agents that know the training families alone; `test` judges the test
            families by agents that know the others.

    Raises:
        InputError: Another split, or the table has no family of it or none to learn from.
    """
    if split is None:
        return [Fold((family,), (family,)) for family in families]
    if split not in ("validation", "test"):
        raise InputError(f"split {split!r} is not judged; choose validation or test")
    judged = tuple(f for f in families if splits().get(f) == split)
    later = ("validation", "test") if split == "validation" else ("test",)
    hidden = tuple(f for f in families if splits().get(f) in later)
    if not judged or len(hidden) == len(families):
        raise InputError(
            f"the table has {len(judged)} families of the split {split!r} and"
            f" {len(families) - len(hidden)} to learn from; collect models of both"
        )
    return [Fold(judged, hidden)]


@dataclass(frozen=True)
class Trace:
    """One agent on one model with one seed.

    Attributes:
        gains: Best gain after each build, shape (max(BUDGETS),); a stop repeats the last.
        builds: Builds used before it stopped.
        oracle: Best recorded gain of the model.
    """

    gains: Floats
    builds: int
    oracle: float

    @property
    def builds_to_95(self) -> float:
        """Builds to 95 % of the oracle's gain; infinity when it never got there."""
        reached = np.flatnonzero(self.gains >= 0.95 * self.oracle)
        if self.oracle <= 0:
            return 0.0
        return float(reached[0] + 1) if len(reached) else math.inf


def trace(factory: AgentFactory, replay: Replay, model: ModelReplay, seed: int) -> Trace:
    """Let an agent tune one recorded model."""
    problem = Problem(
        replay.catalog,
        model.card.features,
        model.routes,
        max(BUDGETS),
        seed,
        replay.gate.limit,
    )

    def evaluate_route(route: Route) -> Outcome:
        return model.default if route.is_default else model.outcome(route)

    outcomes = search(factory(problem), evaluate_route, max(BUDGETS))
    gains = np.zeros(max(BUDGETS))
    best = 0.0
    for build in range(max(BUDGETS)):
        if build < len(outcomes):
            best = max(best, outcomes[build].gain)
        gains[build] = best
    return Trace(gains, len(outcomes), model.oracle)


def traces(
    replay: Replay,
    agents: Sequence[str],
    seeds: Sequence[int],
    policies: Mapping[str, Mapping[str, Path]] | None = None,
    say: Say = silent,
    split: str | None = None,
) -> dict[str, dict[str, list[Trace]]]:
    """All traces: agent -> model -> one a seed.

    Args:
        replay: The table, judged by one gate.
        agents: Agent names.
        seeds: Search seeds.
        policies: For `ppo` and `bc`: agent -> family -> policy that never saw it.
        say: Hears one line a fold.
        split: As `folds` takes it.
    """
    found: dict[str, dict[str, list[Trace]]] = {name: {} for name in agents}
    for fold in folds(replay.table.families, split):
        known = replay.without_families(fold.hidden)
        say(f"family {', '.join(fold.judged)}")
        for name in agents:
            policy = (policies or {}).get(name, {}).get(fold.judged[0])
            factory = None if name == "oracle" else _factory(name, known, policy)
            for model in replay.only_families(fold.judged):
                # A seed of its own for each model, or one lucky draw would serve them all.
                place = replay.models.index(replay.model(model.card.fingerprint))
                found[name][model.card.name] = [
                    trace(factory or oracle(model), replay, model, 1000 * place + seed)
                    for seed in seeds
                ]
    return found


def _factory(name: str, known: Replay, policy: Path | None) -> AgentFactory:
    if policy is not None:
        from routepilot.agents.policy import load_policy

        return make_factory(name, policy=load_policy(policy))
    return make_factory(name, replay=known if name in NEEDS_TABLE else None)


def train_without_each_family(
    table: RouteTable,
    folder: Path,
    *,
    workers: int = 1,
    seed: int = 0,
    say: Say = silent,
    split: str | None = None,
    imitate: bool = False,
) -> dict[str, Path]:
    """One policy a fold, blind to what is hidden in it, each trained by a process of its own.

    Policies found in `folder` are taken as they are, so a run that was killed goes on.

    Args:
        table: Route table.
        folder: Folder for the policies, one folder a family.
        workers: Processes at once.
        seed: Training seed.
        say: Hears one line a policy.
        split: As `folds` takes it.
        imitate: Leave out PPO: policies for `bc`.

    Returns:
        Family -> policy that judges it.
    """
    plan = folds(table.families, split)
    place = ensure_folder(folder) / "table.parquet"
    save_table(table, place)

    def home(fold: Fold) -> Path:
        return folder / (f"for-{split}" if split else fold.judged[0])

    def run(fold: Fold) -> None:
        hidden = ",".join(fold.hidden)
        command = [sys.executable, "-m", "routepilot", "train", "--table", str(place), "--json"]
        command += ["--hold-out", hidden, "--seed", str(seed), "-o", str(home(fold))]
        command += ["--steps", "0"] if imitate else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise MachineError(f"training without {hidden} failed: {done.stderr.strip()[-300:]}")
        say(f"trained without {hidden}")

    waiting = [fold for fold in plan if not (home(fold) / "policy.safetensors").is_file()]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, waiting))
    return {f: home(fold) / "policy.safetensors" for fold in plan for f in fold.judged}


def summarise(found: Mapping[str, Sequence[Trace]], seed: int = 0) -> dict[str, Any]:
    """Figures of one agent with 95 % intervals, bootstrapped over models, then over seeds.

    Args:
        found: Model -> traces.
        seed: Seed of the bootstrap.
    """
    models = list(found.values())
    rng = np.random.default_rng(seed)
    shares: dict[str, float] = {}
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for budget in BUDGETS:
        gains = np.array([[t.gains[budget - 1] for t in m] for m in models])
        oracle = np.array([m[0].oracle for m in models])
        drawn = _bootstrap(gains, oracle, rng)
        shares[str(budget)] = float(gains.mean(axis=1).sum() / max(oracle.sum(), 1e-9))
        low[str(budget)], high[str(budget)] = (float(q) for q in np.quantile(drawn, (0.025, 0.975)))
    late = max(BUDGETS) + 1
    to_95 = np.array([min(t.builds_to_95, late) for m in models for t in m], dtype=np.float64)
    return {
        "gain_share": shares,
        "gain_share_low": low,
        "gain_share_high": high,
        "builds_to_95": float(to_95.mean()),
        "builds_to_95_low": float(np.quantile(_means(to_95, rng), 0.025)),
        "builds_to_95_high": float(np.quantile(_means(to_95, rng), 0.975)),
        "reached_95": float((to_95 <= max(BUDGETS)).mean()),
        "regressions": sum(bool((t.gains < 0).any()) for m in models for t in m),
        "stop_builds": float(np.mean([t.builds for m in models for t in m])),
    }


def _forecast_quality(replay: Replay) -> dict[str, Any]:
    """How well chances given before any build hold, each family unseen."""
    diagram = held_out_reliability(replay, leave_family_out(replay))
    return {"calibration_error": calibration_error(diagram), "reliability": diagram}


def _bootstrap(gains: Floats, oracle: Floats, rng: np.random.Generator) -> Floats:
    """Shares of redrawn models and seeds."""
    models, seeds = len(gains), len(gains[0])
    drawn = np.zeros(DRAWS)
    for i in range(DRAWS):
        rows = rng.integers(models, size=(models, 1))
        columns = rng.integers(seeds, size=(models, seeds))
        picked = gains[rows, columns].mean(axis=1)
        drawn[i] = picked.sum() / max(float(oracle[rows].sum()), 1e-9)
    return drawn


def _means(values: Floats, rng: np.random.Generator) -> Floats:
    places = rng.integers(len(values), size=(DRAWS, len(values)))
    picked: Floats = np.take(values, places).mean(axis=1)
    return picked


def evaluate(
    table: RouteTable,
    agents: Sequence[str],
    *,
    tolerance: float = 1e-2,
    seeds: int = 3,
    seed: int = 0,
    policies: Mapping[str, Mapping[str, Path]] | None = None,
    name: str = "",
    say: Say = silent,
    split: str | None = None,
) -> dict[str, Any]:
    """The protocol on one table, leave-one-family-out or by the corpus' splits.

    Args:
        table: Route table.
        agents: Agent names.
        tolerance: Limit on the relative L2 error.
        seeds: Search seeds a model.
        seed: First seed, and the bootstrap's.
        policies: For `ppo` and `bc`: agent -> family -> policy that never saw it.
        name: Name of the table for the result.
        say: Hears progress.
        split: As `folds` takes it.
    """
    replay = Replay(table, Gate(limit=tolerance))
    found = traces(replay, agents, range(seed, seed + seeds), policies, say, split)
    judged = {family for fold in folds(table.families, split) for family in fold.judged}
    return {
        "table": name,
        "split": split or "leave one family out",
        "tolerance": tolerance,
        "models": [
            {
                "name": m.card.name,
                "family": m.card.family,
                "trained": m.card.trained,
                "oracle_speedup": math.exp(m.oracle),
                "share_after_2": {
                    agent: float(np.mean([t.gains[1] for t in found[agent][m.card.name]]))
                    / m.oracle
                    if m.oracle > 0
                    else 1.0
                    for agent in agents
                },
            }
            for m in replay
            if m.card.family in judged
        ],
        "forecast": _forecast_quality(replay),
        "agents": {agent: summarise(found[agent], seed) for agent in agents},
        "manifest": manifest(seeds=seeds, seed=seed),
    }
