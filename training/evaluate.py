"""`evaluate`: the protocol. Every agent on every recorded model, its family unseen, equal builds.

Owns the trainings and the replayed comparison. Who is judged by whom is in `folds.py`, what is
asked of the traces in `figures.py`. Measures nothing live.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routepilot.agents import AGENTS, NEEDS_TABLE, make_factory
from routepilot.agents.base import AgentFactory
from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError, MachineError
from routepilot.env.forecast import calibration_error, held_out_reliability
from routepilot.env.records import RouteTable
from routepilot.env.surrogate import leave_family_out
from routepilot.env.tables import save_table
from routepilot.training.figures import against, curves, of_model, profiles, summarise
from routepilot.training.files import ensure_folder
from routepilot.training.folds import Fold, folds
from routepilot.training.jobs import run_jobs
from routepilot.training.leakage import find_leakage
from routepilot.training.manifest import manifest
from routepilot.training.session import Say, silent
from routepilot.training.traces import Found, Runs, trace

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

#: First search seed by split, far from each other and from the seeds of trainings (0 and up), so
#: that no draw of training or validation is met again in a test.
FIRST_SEEDS = {None: 3_000_000_000, "validation": 1_000_000_000, "test": 2_000_000_000}


def find_subject(agents: Sequence[str], subject: str | None = None) -> str:
    """The agent that is set against each other one; to be asked before anything is trained.

    Args:
        agents: Agent names.
        subject: The one asked for; None for `ppo` if it is there, else the last.

    Raises:
        InputError: An unknown agent, or a subject that is not among them.
    """
    for name in agents:
        if name not in AGENTS:
            raise InputError(f"agent {name!r} does not exist; there is: {', '.join(AGENTS)}")
    subject = subject or ("ppo" if "ppo" in agents else agents[-1])
    if subject not in agents:
        raise InputError(f"agent {subject!r} is not evaluated; name it among the agents too")
    return subject


def traces(
    replay: Replay,
    agents: Sequence[str],
    seeds: Sequence[int],
    policies: Mapping[str, Sequence[Path]] | None = None,
    say: Say = silent,
    split: str | None = None,
    policy: Path | None = None,
    workers: int = 1,
) -> Found:
    """All traces: agent -> model -> one row a policy, in it one a seed.

    Args:
        replay: The table, judged by one gate.
        agents: Agent names.
        seeds: Search seeds, counted from `FIRST_SEEDS`.
        policies: For `ppo`: family -> policies that never saw it, which differ in their training
            seed.
        say: Hears one line a fold.
        split: As `folds` takes it.
        policy: A policy from elsewhere, applied as it is: `ppo` is this one, and agents that learn
            from a table learn from the policy's. Only what it looks up forgets the judged family.
        workers: Processes that replay at once; the traces are the same.
    """
    found: dict[str, dict[str, Runs]] = {name: {} for name in agents}
    plan = folds(replay.table.families, split)
    jobs = [
        _Job(
            replay,
            name,
            fold,
            tuple(FIRST_SEEDS[split] + seed for seed in seeds),
            (policy,) if policy else tuple((policies or {}).get(fold.judged[0], ())),
            policy,
        )
        for fold in plan
        for name in agents
    ]
    for job, runs in zip(jobs, run_jobs(_replay, jobs, workers), strict=True):
        if job.agent == agents[-1]:
            say(f"replayed {', '.join(job.fold.judged)}")
        found[job.agent].update(runs)
    return found


@dataclass(frozen=True)
class _Job:
    """One agent on the judged models of one fold; small and whole, for a process of its own."""

    replay: Replay
    agent: str
    fold: Fold
    seeds: tuple[int, ...]
    policies: tuple[Path, ...]
    elsewhere: Path | None


def _replay(job: _Job) -> dict[str, Runs]:
    """Model -> runs of a job."""
    replay, hidden = job.replay, job.fold.hidden
    known = replay.without_families(hidden)
    if job.elsewhere is not None and job.agent in NEEDS_TABLE:
        known = _table_of(job.elsewhere, hidden, replay.gate)
    trained = job.policies if job.agent == "ppo" and job.policies else (None,)
    factories = [_factory(job.agent, known, path, hidden) for path in trained]
    found: dict[str, Runs] = {}
    for model in replay.only_families(job.fold.judged):
        # Seeds of its own for each model, or one lucky draw would serve them all.
        place = 1000 * replay.models.index(replay.model(model.card.fingerprint))
        found[model.card.name] = [
            [trace(factory, replay, model, place + seed) for seed in job.seeds]
            for factory in factories
        ]
    return found


def _factory(
    name: str, known: Replay, policy: Path | None, hidden: tuple[str, ...]
) -> AgentFactory:
    if name == "ppo" and policy is not None:
        from routepilot.agents.policy import load_policy

        return make_factory(name, policy=load_policy(policy, without=hidden))
    return make_factory(name, replay=known if name in NEEDS_TABLE else None)


def _table_of(policy: Path, hidden: tuple[str, ...], gate: Gate) -> Replay:
    """What a policy learned from, without some families."""
    from routepilot.agents.policy import load_policy

    return Replay(load_policy(policy, without=hidden).replay.table, gate)


def train_without_each_family(
    table: RouteTable,
    folder: Path,
    *,
    workers: int = 1,
    seed: int = 0,
    trainings: int = 1,
    say: Say = silent,
    split: str | None = None,
) -> dict[str, tuple[Path, ...]]:
    """Policies for each fold, blind to what is hidden in it, each trained by its own process.

    Policies found in `folder` are taken as they are, so a run that was killed goes on, and a
    further training seed costs that training alone.

    Args:
        table: Route table.
        folder: Folder for the policies, one folder a family and training seed.
        workers: Processes at once.
        seed: First training seed.
        trainings: Policies a fold, of consecutive training seeds.
        say: Hears one line a policy.
        split: As `folds` takes it.

    Returns:
        Family -> policies that judge it, in the order of their seeds.

    Raises:
        InputError: A policy found there was trained otherwise.
        MachineError: A training failed.
    """
    plan = folds(table.families, split)
    place = ensure_folder(folder) / "table.parquet"
    save_table(table, place)

    def home(fold: Fold, number: int) -> Path:
        name = f"for-{split}" if split else fold.judged[0]
        return folder / (f"{name}-seed{number}" if number else name)

    def run(job: tuple[Fold, int]) -> None:
        fold, number = job
        hidden = ",".join(fold.hidden)
        command = [sys.executable, "-m", "routepilot", "train", "--table", str(place), "--json"]
        command += ["--hold-out", hidden, "--seed", str(number), "-o", str(home(fold, number))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise MachineError(f"training without {hidden} failed: {done.stderr.strip()[-300:]}")
        say(f"trained without {hidden}, seed {number}")

    numbers = range(seed, seed + trainings)
    jobs = [(fold, number) for number in numbers for fold in plan]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, [job for job in jobs if not _is_trained(home(*job), *job)]))
    return {
        family: tuple(home(fold, number) / "policy.safetensors" for number in numbers)
        for fold in plan
        for family in fold.judged
    }


def _is_trained(home: Path, fold: Fold, seed: int) -> bool:
    """Whether a fold's policy is there.

    Raises:
        InputError: A policy is there that was trained on other families or with another seed.
    """
    if not (home / "policy.safetensors").is_file():
        return False
    try:
        card = json.loads((home / "policy.json").read_text(encoding="utf-8"))
        found = (set(card["held_out"]), card["seed"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if found != (set(fold.hidden), seed):
        raise InputError(
            f"the policy in {str(home)!r} was trained with seed {found[1]} without"
            f" {', '.join(sorted(found[0])) or 'no family'}, not with seed {seed} without"
            f" {', '.join(fold.hidden)}; name another folder with -o"
        )
    return True


def _forecast_quality(replay: Replay) -> dict[str, Any]:
    """How well chances given before any build hold, each family unseen."""
    diagram = held_out_reliability(replay, leave_family_out(replay))
    return {"calibration_error": calibration_error(diagram), "reliability": diagram}


def evaluate(
    table: RouteTable,
    agents: Sequence[str],
    *,
    tolerance: float = 1e-2,
    seeds: int = 3,
    seed: int = 0,
    policies: Mapping[str, Sequence[Path]] | None = None,
    name: str = "",
    say: Say = silent,
    split: str | None = None,
    policy: Path | None = None,
    subject: str | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    """The protocol on one table, leave-one-family-out or by the corpus' splits.

    Args:
        table: Route table.
        agents: Agent names.
        tolerance: Limit on the relative L2 error.
        seeds: Search seeds a model.
        seed: First search seed, and the bootstrap's.
        policies: For `ppo`: family -> policies that never saw it.
        name: Name of the table for the result.
        say: Hears progress.
        split: As `folds` takes it.
        policy: As `traces` takes it.
        subject: Agent set against each other one; `ppo` if it is there, else the last.
        workers: As `traces` takes it.

    Returns:
        Plain data; `docs/evaluation.md` says what each figure means.

    Raises:
        InputError: As `find_subject` and `folds`.
    """
    subject = find_subject(agents, subject)
    replay = Replay(table, Gate(limit=tolerance))
    numbers = range(seed, seed + seeds)
    found = traces(replay, agents, numbers, policies, say, split, policy, workers)
    judged = {family for fold in folds(table.families, split) for family in fold.judged}
    models = [m for m in replay if m.card.family in judged]
    trained = {m.card.name for m in models if m.card.trained}
    return {
        "table": name,
        "split": split or "leave one family out",
        "tolerance": tolerance,
        "seeds": seeds,
        "models": [
            {
                "name": m.card.name,
                "family": m.card.family,
                "trained": m.card.trained,
                "oracle_speedup": math.exp(m.oracle),
                "agents": of_model(found, m.card.name),
            }
            for m in models
        ],
        **({} if policy is None else {"policy": _applied(policy, [m.card.name for m in models])}),
        "forecast": None if policy is not None else _forecast_quality(replay),
        **_headline(found, subject, seed),
        "trained": {
            "models": len(trained),
            **(_headline(_only(found, trained), subject, seed) if trained else {}),
        },
        "curves": curves(found, seed),
        "profiles": profiles(found, seed),
        "leakage": find_leakage(table, split, replay.gate).as_json(),
        "manifest": manifest(seeds=seeds, seed=seed),
    }


def _headline(found: Found, subject: str, seed: int) -> dict[str, Any]:
    return {
        "agents": {agent: summarise(models, seed) for agent, models in found.items()},
        "against": against(found, subject, seed),
    }


def _only(found: Found, names: set[str]) -> Found:
    return {
        agent: {model: runs for model, runs in models.items() if model in names}
        for agent, models in found.items()
    }


def _applied(policy: Path, judged: Sequence[str]) -> dict[str, Any]:
    """What is to be known of a policy from elsewhere: its name, and what it had seen."""
    from routepilot.agents.policy import load_policy

    card = load_policy(policy).card
    return {
        "name": card.name,
        "table": card.table,
        "seed": card.seed,
        "trained_on": sorted(set(judged) & set(card.models)),
    }
