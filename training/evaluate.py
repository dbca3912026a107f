"""`evaluate`: the protocol. Every agent on every recorded model, its family unseen, equal builds.

Families are left out one at a time, or as the corpus' splits say (`folds`).

Owns the replayed comparison and its statistics: share of the oracle's gain against builds, builds
to 95 % of it, intervals bootstrapped over models and seeds. Measures nothing live.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.agents import NEEDS_TABLE, make_factory
from routepilot.agents.base import AgentFactory, Problem, search
from routepilot.agents.policy import file_hash, load_policy
from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import ModelReplay, Replay
from routepilot.env.drafts import draft_folder
from routepilot.env.errors import InputError, MachineError
from routepilot.env.forecast import calibration_error, held_out_reliability
from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.env.routes import Route
from routepilot.env.surrogate import leave_family_out
from routepilot.env.tables import save_table
from routepilot.env.zoo_entries import splits
from routepilot.training.cluster_slot import Files, read_files, write_files
from routepilot.training.files import ensure_folder
from routepilot.training.jobs import run_jobs
from routepilot.training.manifest import manifest
from routepilot.training.session import Say, silent
from routepilot.training.trace_log import TraceLog, Traces, job_key, table_key

Floats = NDArray[np.float64]

#: Builds at which agents are compared.
BUDGETS = (1, 2, 4, 8, 16)

#: Agents evaluated when none are named; `ppo` is added when policies are given.
DEFAULT_AGENTS = (
    "fast",
    "mixed",
    "random",
    "tpe",
    "gp",
    "best-on-average",
    "knn",
    "coreset",
    "two-way-gp",
)

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


@dataclass(frozen=True)
class Replayed:
    """What all jobs of an evaluation share.

    Attributes:
        table: Route table.
        gate: Accuracy gate.
        seeds: Search seeds.
    """

    table: RouteTable
    gate: Gate
    seeds: tuple[int, ...]

    @cached_property
    def replay(self) -> Replay:
        """The table, judged by the gate."""
        return Replay(self.table, self.gate)

    def __getstate__(self) -> dict[str, Any]:
        """Without the replay, which whoever gets this makes again."""
        return {name: self.__dict__[name] for name in ("table", "gate", "seeds")}


def traces(
    given: Replayed,
    agents: Sequence[str],
    policies: Mapping[str, Path] | None = None,
    say: Say = silent,
    split: str | None = None,
    *,
    workers: int = 1,
    ray: Any = None,
    log: TraceLog | None = None,
) -> dict[str, dict[str, list[Trace]]]:
    """All traces: agent -> model -> one a seed.

    Args:
        given: The table, the gate, the seeds.
        agents: Agent names.
        policies: For `ppo`: family -> policy that never saw it.
        say: Hears one line a fold.
        split: As `folds` takes it.
        workers: As `run_jobs` takes it.
        ray: As `run_jobs` takes it.
        log: Where traces are kept; those that it has are not made again.
    """
    log = log or TraceLog(None)
    of_table = table_key(given.table)
    jobs = list[tuple[Fold, str, Path | str | None, Files | None]]()
    keys, found = list[str](), dict[tuple[str, tuple[str, ...]], Traces]()
    for fold in folds(given.table.families, split):
        for name in agents:
            policy = (policies or {}).get(fold.judged[0]) if name == "ppo" else None
            weights = "" if policy is None else file_hash(policy)
            key = job_key(of_table, given.gate, given.seeds, fold, name, weights)
            known = log.get(key)
            if known is not None:
                found[name, fold.judged] = known
                continue
            if policy is not None and ray is not None:
                jobs.append((fold, name, policy.name, read_files(policy.parent)))
            else:
                jobs.append((fold, name, policy, None))
            keys.append(key)
    if found:
        say(f"{len(found)} of {len(found) + len(jobs)} parts were made before")
    for place, made in run_jobs(trace_fold, given, jobs, workers=workers, ray=ray):
        fold, name, *_ = jobs[place]
        log.add(keys[place], made)
        found[name, fold.judged] = made
        say(f"family {', '.join(fold.judged)}: {name}")
    return {
        name: {
            model: [Trace(np.array(t["gains"]), t["builds"], t["oracle"]) for t in rows]
            for fold in folds(given.table.families, split)
            for model, rows in found[name, fold.judged].items()
        }
        for name in agents
    }


def trace_fold(
    given: Replayed, fold: Fold, name: str, policy: Path | str | None, files: Files | None
) -> dict[str, list[dict[str, Any]]]:
    """One job: an agent on every model that a fold judges.

    Args:
        given: What all jobs share.
        fold: Who is judged, who is hidden.
        name: Agent name.
        policy: For `ppo`: its weights file, here or among `files`.
        files: For a job elsewhere: the policy's folder.

    Returns:
        Model -> traces as plain data, one a seed.
    """
    replay = given.replay
    with tempfile.TemporaryDirectory() as folder:
        if files is not None:
            write_files(Path(folder), files)
            policy = Path(folder) / str(policy)
        factory = _factory(name, replay.without_families(fold.hidden), policy)
        found: dict[str, list[dict[str, Any]]] = {}
        for model in replay.only_families(fold.judged):
            # A seed of its own for each model, or one lucky draw would serve them all.
            place = replay.models.index(replay.model(model.card.fingerprint))
            rows = [trace(factory, replay, model, 1000 * place + seed) for seed in given.seeds]
            found[model.card.name] = [
                {"gains": t.gains.tolist(), "builds": t.builds, "oracle": t.oracle} for t in rows
            ]
    return found


def _factory(name: str, known: Replay, policy: Path | str | None) -> AgentFactory:
    if name == "ppo" and policy is not None:
        return make_factory(name, policy=load_policy(Path(policy)))
    return make_factory(name, replay=known if name in NEEDS_TABLE else None)


def train_without_each_family(
    table: RouteTable,
    folder: Path,
    *,
    workers: int = 1,
    seed: int = 0,
    say: Say = silent,
    split: str | None = None,
    ray: Any = None,
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
        ray: Ray, connected: its cluster trains, a core a policy.

    Returns:
        Family -> policy that judges it.
    """
    plan = folds(table.families, split)
    place = ensure_folder(folder) / "table.parquet"
    save_table(table, place)

    def home(fold: Fold) -> Path:
        return folder / (f"for-{split}" if split else fold.judged[0])

    waiting = [fold for fold in plan if not (home(fold) / "policy.safetensors").is_file()]
    if ray is not None:
        jobs = [(fold.hidden, seed) for fold in waiting]
        for index, files in run_jobs(_train_elsewhere, place.read_bytes(), jobs, ray=ray):
            with draft_folder(folder) as draft:
                write_files(draft, files)
                shutil.rmtree(home(waiting[index]), ignore_errors=True)
                draft.rename(home(waiting[index]))
            say(f"trained without {','.join(waiting[index].hidden)}")
        waiting = []

    def run(fold: Fold) -> None:
        _train(place, fold.hidden, seed, home(fold))
        say(f"trained without {','.join(fold.hidden)}")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, waiting))
    return {f: home(fold) / "policy.safetensors" for fold in plan for f in fold.judged}


def _train(table: Path, hidden: Sequence[str], seed: int, out: Path) -> None:
    """Train a policy blind to some families, in a process of its own."""
    families = ",".join(hidden)
    command = [sys.executable, "-m", "routepilot", "train", "--table", str(table), "--json"]
    command += ["--hold-out", families, "--seed", str(seed), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise MachineError(f"training without {families} failed: {done.stderr.strip()[-300:]}")


def _train_elsewhere(table: bytes, hidden: Sequence[str], seed: int) -> Files:
    """The same as a job: from the table's bytes to the policy's files."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "table.parquet"
        source.write_bytes(table)
        _train(source, hidden, seed, Path(folder) / "policy")
        return read_files(Path(folder) / "policy")


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
    policies: Mapping[str, Path] | None = None,
    name: str = "",
    say: Say = silent,
    split: str | None = None,
    workers: int = 1,
    ray: Any = None,
    log: Path | None = None,
) -> dict[str, Any]:
    """The protocol on one table, leave-one-family-out or by the corpus' splits.

    Args:
        table: Route table.
        agents: Agent names.
        tolerance: Limit on the relative L2 error.
        seeds: Search seeds a model.
        seed: First seed, and the bootstrap's.
        policies: For `ppo`: family -> policy that never saw it.
        name: Name of the table for the result.
        say: Hears progress.
        split: As `folds` takes it.
        workers: Processes that replay at once.
        ray: Ray, connected: its cluster replays instead.
        log: File that keeps traces as they are made; the same evaluation goes on from there.
    """
    given = Replayed(table, Gate(limit=tolerance), tuple(range(seed, seed + seeds)))
    replay = given.replay
    kept = TraceLog(log)
    found = traces(given, agents, policies, say, split, workers=workers, ray=ray, log=kept)
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
