"""Verbs about learning: `train` and `evaluate`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routepilot.training.cli import EffortOpt, JsonOpt, SeedOpt, app
from routepilot.training.effort import Effort, preset


def later_families(families: tuple[str, ...], learn_from: str) -> tuple[str, ...]:
    """Families of the corpus' splits that `--learn-from` does not name.

    Raises:
        InputError: An unknown split.
    """
    from routepilot.env.errors import InputError
    from routepilot.env.zoo_entries import SPLITS, splits

    wanted = [name.strip() for name in learn_from.split(",") if name.strip()]
    unknown = sorted(set(wanted) - set(SPLITS))
    if unknown:
        raise InputError(f"split {unknown[0]!r} is not known; choose from {', '.join(SPLITS)}")
    if not wanted:
        return ()
    return tuple(f for f in families if splits().get(f, wanted[0]) not in wanted)


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the policy.")] = Path(
        "policy"
    ),
    table: Annotated[str, typer.Option(help="Route table: a file or a released name.")] = "cpu",
    hold_out: Annotated[
        str, typer.Option(help="Families left out of training, separated by commas.")
    ] = "",
    effort: EffortOpt = Effort.STANDARD,
    learn_from: Annotated[
        str,
        typer.Option(help="Splits to learn from, e.g. train,validation; all families if absent."),
    ] = "",
    max_seconds: Annotated[
        float | None, typer.Option(help="Stop training after this many seconds.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the policy.")] = "policy",
    seed: SeedOpt = 0,
    json: JsonOpt = False,
) -> None:
    """Train a policy on a route table.

    Needs the extra `train`. Interrupting saves the policy as it is.

    Example: routepilot train --table cpu --hold-out vad-lstm -o policy
    """
    from routepilot.env.errors import InputError
    from routepilot.env.tables import load_table
    from routepilot.training import console
    from routepilot.training.defaults import find_table
    from routepilot.training.train import TrainConfig
    from routepilot.training.train import train as run

    source = load_table(find_table(table))
    families = tuple(name.strip() for name in hold_out.split(",") if name.strip())
    unknown = sorted(set(families) - set(source.families))
    if unknown:
        raise InputError(
            f"family {unknown[0]!r} is not in the table; it has {', '.join(source.families)}"
        )
    families += later_families(source.families, learn_from)
    result = run(
        source,
        TrainConfig(seed=seed, steps=preset(effort).steps, max_seconds=max_seconds),
        held_out=tuple(dict.fromkeys(families)),
        out=out,
        name=name,
        source=find_table(table),
        say=(lambda _: None) if json else console.say,
    )
    if json:
        console.print_json(result.as_json())
        return
    console.out.print(f"written: {result.path}", markup=False)


@app.command()
def evaluate(
    table: Annotated[str, typer.Option(help="Route table: a file or a released name.")] = "cpu",
    agents: Annotated[
        str, typer.Option(help="Agents, separated by commas; all that need no training if absent.")
    ] = "",
    tolerance: Annotated[float, typer.Option(help="Limit on the relative L2 error.")] = 1e-2,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for figures, tables and policies.")
    ] = Path("evaluation"),
    split: Annotated[
        str | None,
        typer.Option(
            help="validation or test: judge these families by agents that know the earlier splits;"
            " one family at a time if absent."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Search seeds a model.")] = 3,
    training_seeds: Annotated[
        int, typer.Option(min=1, help="Policies trained for what is held out, for ppo.")
    ] = 1,
    policy: Annotated[
        str | None,
        typer.Option(
            help="A policy from elsewhere as ppo, applied unchanged, e.g. one of another table;"
            " agents that learn from a table learn from the policy's."
        ),
    ] = None,
    subject: Annotated[
        str | None, typer.Option(help="Agent set against each other one; ppo if it is evaluated.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Trainings, and later replays, at once.")] = 1,
    seed: SeedOpt = 0,
    json: JsonOpt = False,
) -> None:
    """Compare agents by replay, one family held out, or the families of a split.

    `ppo` trains --training-seeds policies for what is held out, which takes a minute or two each;
    policies found in OUT are not trained again. Writes evaluation.json, .md and .html and the
    figures into OUT; docs/evaluation.md explains them.

    Example: routepilot evaluate --table cpu --agents random,best-on-average,two-way-gp,ppo
    """
    from routepilot.env.tables import load_table
    from routepilot.training import console
    from routepilot.training.defaults import find_policy, find_table
    from routepilot.training.evaluate import (
        DEFAULT_AGENTS,
        find_subject,
        train_without_each_family,
    )
    from routepilot.training.evaluate import evaluate as run
    from routepilot.training.evaluation_page import write_evaluation
    from routepilot.training.files import ensure_folder

    names = [name.strip() for name in agents.split(",") if name.strip()] or list(DEFAULT_AGENTS)
    source = load_table(find_table(table))
    say = (lambda _: None) if json else console.say
    folder = ensure_folder(out)
    given = None if policy is None else find_policy(policy)
    names = list(dict.fromkeys([*names, *(["ppo"] if given is not None else [])]))
    subject = find_subject(names, subject)
    policies = None
    if "ppo" in names and given is None:
        policies = train_without_each_family(
            source,
            folder / "policies",
            workers=workers,
            seed=seed,
            trainings=training_seeds,
            say=say,
            split=split,
        )
    result = run(
        source,
        names,
        policies=policies,
        name=table,
        tolerance=tolerance,
        seeds=seeds,
        seed=seed,
        say=say,
        split=split,
        policy=given,
        subject=subject,
        workers=workers,
    )
    write_evaluation(result, folder, say)
    if json:
        console.print_json(result)
        return
    console.print_evaluation(result)
