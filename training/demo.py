"""`demo`: the whole story in a few minutes on a CPU.

Trains a policy from the shipped route table with one family held out, then lets it pick routes
for a real model of that family with live builds, next to the default, the sweep and random search.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from routepilot.env import zoo
from routepilot.env.errors import MissingExtraError
from routepilot.env.tables import load_table
from routepilot.env.wording import counted
from routepilot.training import console
from routepilot.training.compare import AgentResult, compare
from routepilot.training.defaults import find_table
from routepilot.training.files import ensure_folder
from routepilot.training.inputs import prepare_model
from routepilot.training.report import write_report
from routepilot.training.search import Budget
from routepilot.training.session import SessionConfig
from routepilot.training.train import train
from routepilot.training.train_config import TrainConfig
from routepilot.training.tune import tune
from routepilot.training.view import CompareView, SearchView

#: A trained voice detector from a PyPI package; its family is held out of everything.
MODEL = "silero_vad"

#: Seconds of training, more where the machine is slow: enough to reach the plateau on the shipped
#: table (docs/experiments.md).
TRAIN_SECONDS = 60.0

#: Agents shown beside the policy.
AGENTS = ("default", "ppo", "fast", "random")


def run_demo(
    out: Path, *, max_builds: int = 6, seed: int = 0, quiet: bool = False, as_json: bool = False
) -> None:
    """Train, compare, and print one table and two sentences.

    Args:
        out: Folder for the policy and the records.
        max_builds: Builds each agent may spend.
        seed: Seed of training and agents.
        quiet: Print the result alone.
        as_json: Print JSON instead of the table, and nothing else.

    Raises:
        InputError: A negative number of builds.
        MissingExtraError: The demo's model is not installed.
    """
    start, budget = time.monotonic(), Budget(max_builds)
    entry = zoo.entry(MODEL)
    missing = zoo.available(entry)
    if missing is not None:
        raise MissingExtraError(f"the demo's model {MODEL} is not here: {missing}")
    silent = quiet or as_json
    say = console.sayer(silent)
    folder = ensure_folder(out)
    table = load_table(find_table("cpu"))
    say(
        f"training on {counted(len(table.without_families([entry.family]).models), 'model')}; the"
        " family"
        f" {entry.family!r} of {MODEL} is held out"
    )
    trained = train(
        table,
        TrainConfig(seed=seed, teacher_episodes=1500, max_seconds=TRAIN_SECONDS),
        held_out=(entry.family,),
        out=folder / "policy",
        source=find_table("cpu"),
        patient=True,  # on a slow machine too
        say=say,
    )
    named = prepare_model(f"zoo:{MODEL}", None, None, seed)
    with SearchView(f"tune {MODEL}", max_builds, quiet=silent) as search:
        tune(
            named.model,
            policy=str(trained.path),
            max_builds=max_builds,
            out=folder,
            seed=seed,
            say=search.say,
            on_outcome=search.outcome,
            on_ask=search.asking,
        )
    write_report(folder)
    with CompareView(f"compare on {MODEL}", AGENTS, max_builds, quiet=silent) as comparison:
        rows = compare(
            named,
            AGENTS,
            budget,
            SessionConfig(),
            folder,
            policy=str(trained.path),
            seed=seed,
            say=comparison.say,
            on_outcome=comparison.outcome,
            on_ask=comparison.asking,
        )
    if as_json:
        console.print_json({"agents": {name: row.as_json() for name, row in rows.items()}})
        return
    console.print_comparison(
        f"{MODEL}: {counted(max_builds, 'build')} each, real model never seen", rows
    )
    console.out.print(verdict(rows, time.monotonic() - start), markup=False)
    console.out.print(f"written to {folder}: report.html, result.json, deploy/", markup=False)


def verdict(rows: Mapping[str, AgentResult], seconds: float) -> str:
    """What happened, in two sentences that hold whoever won."""
    ppo = rows["ppo"]
    value, low, high = ppo.confirmed.speedup
    if ppo.confirmed.route.is_default:
        first = (
            f"After {counted(ppo.search.builds, 'build')} the policy stayed with the default route."
        )
    else:
        first = (
            f"The policy built {counted(ppo.search.builds, 'route')} of a model it never saw and"
            " its answer"
            f" is {console.speedup_text(value, low, high)} the default's speed, confirmed with"
            " fresh builds and other inputs."
        )
    rivals = [
        f"{name} {row.confirmed.speedup[0]:.2f}x in {counted(row.search.builds, 'build')}"
        for name, row in rows.items()
        if name not in ("ppo", "default")
    ]
    return f"{first} With the same budget: {', '.join(rivals)}; all of it took {seconds:.0f} s."
