"""Verbs about learning: `train` and `evaluate`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routepilot.training.cli import EffortOpt, JsonOpt, QuietOpt, SeedOpt, app, listed
from routepilot.training.effort import Effort, preset


def later_families(families: tuple[str, ...], learn_from: str) -> tuple[str, ...]:
    """Families of the corpus' splits that `--learn-from` does not name.

    Raises:
        InputError: An unknown split.
    """
    from routepilot.env.errors import InputError
    from routepilot.env.zoo_entries import SPLITS, splits

    wanted = listed(learn_from)
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
    until_noise: Annotated[
        bool,
        typer.Option("--until-noise", help="Stop once scores rise by less than they scatter."),
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the policy.")] = "policy",
    seed: SeedOpt = 0,
    quiet: QuietOpt = False,
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
    families = tuple(listed(hold_out))
    unknown = sorted(set(families) - set(source.families))
    if unknown:
        raise InputError(
            f"family {unknown[0]!r} is not in the table; it has {', '.join(source.families)}"
        )
    families += later_families(source.families, learn_from)
    result = run(
        source,
        TrainConfig(
            seed=seed,
            steps=preset(effort).steps,
            max_seconds=max_seconds,
            until_noise=until_noise,
        ),
        held_out=tuple(dict.fromkeys(families)),
        out=out,
        name=name,
        source=find_table(table),
        say=console.sayer(quiet or json),
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
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for evaluation.json.")] = Path(
        "evaluation"
    ),
    split: Annotated[
        str | None,
        typer.Option(
            help="validation or test: judge these families by agents that know the earlier splits;"
            " one family at a time if absent."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Search seeds a model.")] = 3,
    workers: Annotated[int, typer.Option(help="Trainings at once, for ppo.")] = 1,
    seed: SeedOpt = 0,
    quiet: QuietOpt = False,
    json: JsonOpt = False,
) -> None:
    """Compare agents by replay, one family held out, or the families of a split.

    `ppo` trains one policy for what is held out, which takes a minute or two each; policies found
    in OUT are not trained again.

    Example: routepilot evaluate --table cpu --agents random,best-on-average,two-way-gp,ppo
    """
    from routepilot.env.tables import load_table
    from routepilot.training import console
    from routepilot.training.defaults import find_table
    from routepilot.training.evaluate import DEFAULT_AGENTS, train_without_each_family
    from routepilot.training.evaluate import evaluate as run
    from routepilot.training.files import ensure_folder, write_json

    names = listed(agents) or list(DEFAULT_AGENTS)
    source = load_table(find_table(table))
    say = console.sayer(quiet or json)
    folder = ensure_folder(out)
    policies = None
    if "ppo" in names:
        policies = train_without_each_family(
            source, folder / "policies", workers=workers, seed=seed, say=say, split=split
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
    )
    write_json(folder / "evaluation.json", result)
    if json:
        console.print_json(result)
        return
    console.print_evaluation(result)
