"""`evaluate`: the protocol. Every agent on every recorded model, its family unseen, equal builds.

Owns the trainings and the replayed comparison. Who is judged by whom is in `folds.py`, what is
asked of the traces in `figures.py`. Measures nothing live.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from routepilot.agents import AGENTS, NEEDS_TABLE, TRAINED_BY_PPO, make_factory
from routepilot.agents.base import AgentFactory
from routepilot.agents.oracle import oracle
from routepilot.agents.policy import file_hash, find_card_tables, load_policy, read_card
from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import Replay
from routepilot.env.drafts import draft_folder
from routepilot.env.errors import InputError, MachineError
from routepilot.env.forecast import calibration_error, held_out_reliability
from routepilot.env.records import RouteTable
from routepilot.env.surrogate import leave_family_out
from routepilot.env.tables import save_table
from routepilot.env.wording import counted, verb
from routepilot.training.cluster_slot import Files, read_files, write_files
from routepilot.training.figures import against, curves, of_model, profiles, summarise
from routepilot.training.files import ensure_folder
from routepilot.training.folds import Fold, folds
from routepilot.training.jobs import run_jobs
from routepilot.training.leakage import find_leakage
from routepilot.training.manifest import manifest
from routepilot.training.session import Say, silent
from routepilot.training.trace_log import TraceLog, Traces, job_key, table_key
from routepilot.training.traces import Found, Trace, trace

#: Agents evaluated when none are named; `ppo` is added when policies are given.
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

#: Where each agent that is a policy keeps those trained for an evaluation.
POLICY_FOLDERS = {"ppo": "policies", "ppo-no-stop": "policies", "bc": "policies-bc"}

#: Agent -> family -> policies that never saw it.
Policies = Mapping[str, Mapping[str, Sequence[Path]]]

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
        if name not in AGENTS and ":" not in name:
            raise InputError(
                f"agent {name!r} does not exist; there is: {', '.join(AGENTS)}; or module:factory"
            )
    subject = subject or ("ppo" if "ppo" in agents else agents[-1])
    if subject not in agents:
        raise InputError(f"agent {subject!r} is not evaluated; name it among the agents too")
    return subject


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


#: A policy on its way into a job: its weights file here, or its files for a job elsewhere.
Sent = Path | Files


def traces(
    given: Replayed,
    agents: Sequence[str],
    policies: Policies | None = None,
    say: Say = silent,
    split: str | None = None,
    policy: Path | None = None,
    *,
    workers: int = 1,
    ray: Any = None,
    log: TraceLog | None = None,
) -> Found:
    """All traces: agent -> model -> one row a policy, in it one a seed.

    Args:
        given: The table, the gate, the seeds.
        agents: Agent names.
        policies: For `ppo` and `bc`: agent -> family -> policies that never saw it, which differ in
            their training seed.
        say: Hears one line a part.
        split: As `folds` takes it.
        policy: A policy from elsewhere, applied as it is: `ppo` is this one, and agents that learn
            from a table learn from the policy's. Only what it looks up forgets the judged family.
        workers: As `run_jobs` takes it.
        ray: As `run_jobs` takes it.
        log: Where traces are kept; those that it has are not made again.
    """
    log = log or TraceLog(None)
    of_table, plan = table_key(given.table), folds(given.table.families, split)
    keys, jobs = list[str](), list[tuple[Fold, str, tuple[Sent, ...], Sent | None]]()
    found = dict[tuple[str, tuple[str, ...]], Traces]()
    send = (lambda path: path) if ray is None else _files_of
    for fold in plan:
        for name in agents:
            trained = tuple((policies or {}).get(name, {}).get(fold.judged[0], ()))
            if policy is not None and name in TRAINED_BY_PPO:
                trained = (policy,)
            elsewhere = policy if name in NEEDS_TABLE else None
            weights = [file_hash(path) for path in (*trained, elsewhere) if path is not None]
            key = job_key(of_table, given.gate, given.seeds, fold, name, weights)
            known = log.get(key)
            if known is not None:
                found[name, fold.judged] = known
                continue
            sent = None if elsewhere is None else send(elsewhere)
            jobs.append((fold, name, tuple(send(path) for path in trained), sent))
            keys.append(key)
    if found:
        parts = len(found) + len(jobs)
        were = verb(len(found), "was", "were", parts)
        say(f"{len(found)} of {counted(parts, 'part')} {were} made before")
    for place, made in run_jobs(trace_fold, given, jobs, workers=workers, ray=ray):
        fold, name, *_ = jobs[place]
        log.add(keys[place], made)
        found[name, fold.judged] = made
        say(f"{name} replayed {', '.join(fold.judged)}")
    return {
        name: {
            model: [[Trace.from_json(data) for data in row] for row in runs]
            for fold in plan
            for model, runs in found[name, fold.judged].items()
        }
        for name in agents
    }


def trace_fold(
    given: Replayed, fold: Fold, name: str, policies: Sequence[Sent], elsewhere: Sent | None
) -> dict[str, list[list[dict[str, Any]]]]:
    """One job: an agent on every model that a fold judges.

    Args:
        given: What all jobs share.
        fold: Who is judged, who is hidden.
        name: Agent name.
        policies: For an agent that is a policy: those to apply.
        elsewhere: For an agent that learns from a table: the policy whose table it is.

    Returns:
        Model -> runs as plain data.
    """
    replay = given.replay
    known = replay.without_families(fold.hidden)
    with ExitStack() as stack:
        if elsewhere is not None:
            known = _table_of(stack.enter_context(_at_hand(elsewhere)), fold.hidden, given.gate)
        paths = [stack.enter_context(_at_hand(policy)) for policy in policies]
        factories = [_factory(name, known, path, fold.hidden) for path in paths or (None,)]
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for model in replay.only_families(fold.judged):
        # Seeds of its own for each model, or one lucky draw would serve them all.
        place = 1000 * replay.models.index(replay.model(model.card.fingerprint))
        found[model.card.name] = [
            [
                trace(factory or oracle(model), replay, model, place + seed).as_json()
                for seed in given.seeds
            ]
            for factory in factories
        ]
    return found


def _files_of(policy: Path) -> Files:
    """A policy's weights, card and tables, for a job elsewhere."""
    paths = (policy, policy.with_suffix(".json"), *find_card_tables(policy, read_card(policy)))
    return {path.name: np.frombuffer(path.read_bytes(), np.uint8) for path in paths}


@contextmanager
def _at_hand(policy: Sent) -> Iterator[Path]:
    """A policy's weights file, for as long as it takes to load it."""
    if isinstance(policy, Path):
        yield policy
        return
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), policy)
        yield next(Path(folder).glob("*.safetensors"))


def _factory(
    name: str, known: Replay, policy: Path | None, hidden: tuple[str, ...]
) -> AgentFactory | None:
    """What makes an agent; None for the oracle, which is made for each model."""
    if name == "oracle":
        return None
    if policy is not None:
        return make_factory(name, policy=load_policy(policy, without=hidden))
    return make_factory(name, replay=known if name in NEEDS_TABLE else None)


def _table_of(policy: Path, hidden: tuple[str, ...], gate: Gate) -> Replay:
    """What a policy learned from, without some families."""
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
    imitate: bool = False,
    ray: Any = None,
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
        imitate: Leave out PPO: policies for `bc`.
        ray: Ray, connected: its cluster trains, a core a policy.

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

    def done(fold: Fold, number: int) -> None:
        say(f"trained without {','.join(fold.hidden)}, seed {number}")

    def run(job: tuple[Fold, int]) -> None:
        fold, number = job
        _train(place, fold.hidden, number, home(fold, number), imitate)
        done(fold, number)

    numbers = range(seed, seed + trainings)
    waiting = [(fold, number) for number in numbers for fold in plan]
    waiting = [job for job in waiting if not _is_trained(home(*job), *job)]
    if ray is None:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, waiting))
    else:
        jobs = [(fold.hidden, number, imitate) for fold, number in waiting]
        for index, files in run_jobs(_train_elsewhere, place.read_bytes(), jobs, ray=ray):
            with draft_folder(folder) as draft:
                write_files(draft, files)
                shutil.rmtree(home(*waiting[index]), ignore_errors=True)
                draft.rename(home(*waiting[index]))
            done(*waiting[index])
    return {
        family: tuple(home(fold, number) / "policy.safetensors" for number in numbers)
        for fold in plan
        for family in fold.judged
    }


def _train(table: Path, hidden: Sequence[str], seed: int, out: Path, imitate: bool) -> None:
    """Train a policy blind to some families, in a process of its own."""
    families = ",".join(hidden)
    command = [sys.executable, "-m", "routepilot", "train", "--table", str(table), "--json"]
    command += ["--hold-out", families, "--seed", str(seed), "-o", str(out)]
    command += ["--steps", "0"] if imitate else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise MachineError(f"training without {families} failed: {done.stderr.strip()[-300:]}")


def _train_elsewhere(table: bytes, hidden: Sequence[str], seed: int, imitate: bool) -> Files:
    """The same as a job: from the table's bytes to the policy's files."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "table.parquet"
        source.write_bytes(table)
        _train(source, hidden, seed, Path(folder) / "policy", imitate)
        return read_files(Path(folder) / "policy")


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
    policies: Policies | None = None,
    name: str = "",
    say: Say = silent,
    split: str | None = None,
    policy: Path | None = None,
    subject: str | None = None,
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
        seed: First search seed, and the bootstrap's.
        policies: As `traces` takes it.
        name: Name of the table for the result.
        say: Hears progress.
        split: As `folds` takes it.
        policy: As `traces` takes it.
        subject: Agent set against each other one; `ppo` if it is there, else the last.
        workers: As `traces` takes it.
        ray: As `traces` takes it.
        log: File that keeps what is replayed, so that a killed evaluation goes on.

    Returns:
        Plain data; `docs/evaluation.md` says what each figure means.

    Raises:
        InputError: As `find_subject` and `folds`.
    """
    subject = find_subject(agents, subject)
    numbers = tuple(FIRST_SEEDS[split] + seed + number for number in range(seeds))
    given = Replayed(table, Gate(limit=tolerance), numbers)
    replay = given.replay
    found = traces(
        given, agents, policies, say, split, policy, workers=workers, ray=ray, log=TraceLog(log)
    )
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
    card = load_policy(policy).card
    return {
        "name": card.name,
        "table": card.table,
        "seed": card.seed,
        "trained_on": sorted(set(judged) & set(card.models)),
    }
