"""Verbs about learning: `train` and `evaluate`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from routepilot.training.cli import app
from routepilot.training.cli_numbers import TrainSecondsOpt
from routepilot.training.cli_numbers import seed as checked_seed
from routepilot.training.cli_options import JsonOpt, QuietOpt, RayOpt, SeedOpt, listed
from routepilot.training.effort import Effort, preset


def later_families(families: tuple[str, ...], learn_from: str) -> tuple[str, ...]:
    """Families of the corpus' splits that `--learn-from` does not name.

    Raises:
        InputError: An unknown split.
    """
    from routepilot.training.recipe import later_families as later

    return later(families, names(learn_from) or [])


def names(text: str | None) -> list[str] | None:
    """Names separated by commas; None where the option is absent."""
    return None if text is None else listed(text)


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the policy.")] = Path(
        "policy"
    ),
    config: Annotated[
        str | None,
        typer.Option(help="Recipe: a .yaml file or a released name; options override it."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE",
            help="Route table: a file or a released name (cpu if absent); repeatable.",
        ),
    ] = None,
    hold_out: Annotated[
        str | None, typer.Option(help="Families left out of training, separated by commas.")
    ] = None,
    effort: Annotated[
        Effort | None, typer.Option(help="Preset of environment steps; standard if absent.")
    ] = None,
    learn_from: Annotated[
        str | None,
        typer.Option(help="Splits to learn from, e.g. train,validation; all families if absent."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Environment steps of PPO; 0 only imitates (agent bc); the effort's if absent.",
        ),
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option(
            help="Families that train nothing, choose the weights and stop the training; split:"
            " the corpus' validation families."
        ),
    ] = None,
    max_seconds: TrainSecondsOpt = None,
    until_noise: Annotated[
        bool,
        typer.Option("--until-noise", help="Stop once scores rise by less than they scatter."),
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name of the policy.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of everything.", callback=checked_seed)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting of a recipe, e.g. learning_rate=2e-4; repeatable.",
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for TensorBoard's scalars (extra board).")
    ] = None,
    quiet: QuietOpt = False,
    json: JsonOpt = False,
) -> None:
    """Train a policy on a route table, or on several.

    Needs the extra `train`. A run that was killed goes on with the same command; one that is
    interrupted also saves the policy as it is.

    Example: routepilot train --config cpu --seed 1 -o policy
    """
    from routepilot.env.tables import load_table
    from routepilot.training import console
    from routepilot.training.defaults import find_table
    from routepilot.training.recipe import (
        find_recipe,
        make_recipe,
        plan_families,
        read_recipe,
        read_setting,
    )
    from routepilot.training.train import train as run

    path = find_recipe(config) if config is not None else None
    given = read_recipe(path) if path is not None else {}
    options = {
        "tables": table,
        "hold_out": names(hold_out),
        "learn_from": names(learn_from),
        "validation": names(validation),
        "steps": steps if effort is None or steps is not None else preset(effort).steps,
        "max_seconds": max_seconds,
        "until_noise": until_noise or None,
        "name": name,
        "seed": seed,
    }
    make_recipe(given, f"recipe {str(path)!r}")  # its own mistakes are told as its own
    given.update({key: value for key, value in options.items() if value is not None})
    given.update(read_setting(text) for text in set_ or ())
    recipe = make_recipe(given, "the command")
    files = [find_table(one) for one in recipe.tables]
    tables = [load_table(file) for file in files]
    held_out, validating = plan_families(recipe, tables)
    result = run(
        tables,
        recipe.settings,
        held_out=held_out,
        validation=validating,
        out=out,
        name=recipe.name,
        gate=recipe.gate,
        source=files,
        tensorboard=tensorboard,
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
        int, typer.Option(min=1, help="Policies trained for what is held out, for ppo and bc.")
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
    workers: Annotated[
        int | None,
        typer.Option(help="Trainings and replays at once: 1 here; all a cluster's cores."),
    ] = None,
    ray: RayOpt = None,
    seed: SeedOpt = 0,
    quiet: QuietOpt = False,
    json: JsonOpt = False,
) -> None:
    """Compare agents by replay, one family held out, or the families of a split.

    `ppo`, `ppo-no-stop` and `bc` (imitation alone) train --training-seeds policies for what is held
    out, which takes a minute or two each; policies found in OUT are not trained again, nor is
    replayed what an interrupted run left there. With --ray a cluster trains and replays, a core
    each. `oracle` knows each model's best route. Writes evaluation.json, .md and .html and the
    figures into OUT; docs/evaluation.md explains them.

    Example: routepilot evaluate --table cpu --agents random,best-on-average,two-way-gp,ppo
    """
    from routepilot.env.accuracy import Gate
    from routepilot.env.errors import InputError
    from routepilot.env.tables import load_table
    from routepilot.training import console
    from routepilot.training.cluster import connected
    from routepilot.training.defaults import find_policy, find_table
    from routepilot.training.evaluate import (
        DEFAULT_AGENTS,
        POLICY_FOLDERS,
        find_subject,
        train_without_each_family,
    )
    from routepilot.training.evaluate import evaluate as run
    from routepilot.training.evaluation_page import write_evaluation
    from routepilot.training.files import ensure_folder
    from routepilot.training.folds import folds

    wanted = names(agents) or list(DEFAULT_AGENTS)
    if workers is not None and workers < 1:
        raise InputError(f"{workers} workers are not allowed; give 1 or more")
    source = load_table(find_table(table))
    say = console.sayer(quiet or json)
    given = None if policy is None else find_policy(policy)
    wanted = list(dict.fromkeys([*wanted, *(["ppo"] if given is not None else [])]))
    subject = find_subject(wanted, subject)
    folds(source.families, split)  # another split is refused before anything is made
    Gate(limit=tolerance)
    folder = ensure_folder(out)
    with nullcontext() if ray is None else connected(ray, workers) as there:
        policies = {
            agent: train_without_each_family(
                source,
                folder / home,
                workers=workers or 1,
                seed=seed,
                trainings=training_seeds,
                say=say,
                split=split,
                imitate=agent == "bc",
                ray=there,
            )
            for agent, home in POLICY_FOLDERS.items()
            if agent in wanted and (agent == "bc" or given is None)
        }
        result = run(
            source,
            wanted,
            policies=policies,
            name=table,
            tolerance=tolerance,
            seeds=seeds,
            seed=seed,
            say=say,
            split=split,
            policy=given,
            subject=subject,
            workers=workers or 1,
            ray=there,
            log=folder / "traces.jsonl",
        )
    write_evaluation(result, folder, say)
    if json:
        console.print_json(result)
        return
    console.print_evaluation(result)
