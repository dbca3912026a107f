"""Verbs about evidence: `leakage` and `confirm-live`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routepilot.training.cli import app
from routepilot.training.cli_options import (
    AllowOpt,
    BackendOpt,
    DeadlineOpt,
    EffortOpt,
    JsonOpt,
    OptionOpt,
    QuietOpt,
    SeedOpt,
    ThreadsOpt,
)
from routepilot.training.effort import Effort, preset

if TYPE_CHECKING:
    from routepilot.env.outcomes import Outcome
    from routepilot.training.inputs import NamedModel


@app.command()
def leakage(
    table: Annotated[str, typer.Option(help="Route table: a file or a released name.")] = "cpu",
    split: Annotated[
        str | None,
        typer.Option(
            help="validation or test: against the models of earlier splits; one family at a time"
            " against all others if absent."
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Limit on the relative L2 error.")] = 1e-2,
    json: JsonOpt = False,
) -> None:
    """Look for near-duplicate models across a split.

    Compares features and outcomes of every judged model with those of every model that agents may
    know. Exit code 1 when a pair is near by both.

    Example: routepilot leakage --table cpu --split test
    """
    from routepilot.env.accuracy import Gate
    from routepilot.env.tables import load_table
    from routepilot.training import console
    from routepilot.training.defaults import find_table
    from routepilot.training.evaluation_tables import leakage_table, within_table
    from routepilot.training.leakage import find_leakage

    found = find_leakage(load_table(find_table(table)), split, Gate(limit=tolerance))
    if json:
        console.print_json(found.as_json())
    else:
        for shown in (leakage_table(found.as_json()), within_table(found.as_json())):
            console.print_table(shown.title, shown.columns, shown.rows)
    raise typer.Exit(1 if found.duplicates else 0)


@app.command()
def confirm_live(
    models: Annotated[
        str,
        typer.Argument(help="Corpus names, ONNX files or prepared folders, separated by commas."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for records and results.")] = (
        Path("live")
    ),
    agents: Annotated[str, typer.Option(help="Agents, separated by commas.")] = (
        "ppo,two-way-gp,coreset"
    ),
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policy for ppo by name or file, or the folder OUT/policies of `evaluate`."
        ),
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Route table to learn from and to replay; by backend.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="validation or test: hide these families; each model's own if absent."),
    ] = None,
    max_builds: Annotated[int, typer.Option(help="Routes each agent may build of a model.")] = 8,
    free: Annotated[
        bool,
        typer.Option("--free", help="Any legal route may be asked for, not those on record alone."),
    ] = False,
    build_workers: Annotated[
        int | None,
        typer.Option(
            help="For inductor: compile so many routes at once, of all models, and none while"
            " anything is timed."
        ),
    ] = None,
    backend: BackendOpt = "cpu",
    effort: EffortOpt = Effort.STANDARD,
    tolerance: Annotated[float, typer.Option(help="Limit on the relative L2 error.")] = 1e-2,
    threads: ThreadsOpt = 1,
    option: OptionOpt = None,
    allow: AllowOpt = None,
    deadline: DeadlineOpt = 120.0,
    seed: SeedOpt = 0,
    quiet: QuietOpt = False,
    json: JsonOpt = False,
) -> None:
    """Run the comparison of `evaluate` with real builds.

    Agents take turns on one session a model; a route that two ask for is built once and charged to
    both. Puts the live shares beside the replayed ones. The same command again goes on where it
    was.

    Example: routepilot confirm-live silero_vad,ocr_det --split test --policy
    runs/test/policies -o runs/live
    """
    from routepilot.agents import AGENTS
    from routepilot.env.accuracy import Gate
    from routepilot.env.errors import InputError
    from routepilot.env.tables import load_table
    from routepilot.training import console
    from routepilot.training.confirm_live import LivePlan, OpenSession
    from routepilot.training.confirm_live import confirm_live as run
    from routepilot.training.defaults import find_table, released_name
    from routepilot.training.files import ensure_folder
    from routepilot.training.inputs import backend_options
    from routepilot.training.live_figures import live_tables, write_live
    from routepilot.training.session import Session, SessionConfig

    names = tuple(dict.fromkeys(n.strip() for n in agents.split(",") if n.strip()))
    unknown = [name for name in names if name not in AGENTS]
    if unknown or not names:
        raise InputError(f"agents {agents!r} are not all known; choose among {', '.join(AGENTS)}")
    source = load_table(find_table(table or released_name(backend)))
    given = _named(models, seed)
    folder = ensure_folder(out)
    silent = quiet or json
    total = len(given) * len(names) * max_builds
    count = 0
    with ExitStack() as opened:
        steps = opened.enter_context(console.Steps("confirm-live", total, quiet=silent))
        open_session: OpenSession = Session
        if build_workers is not None:
            from routepilot.training.inductor_ahead import Ahead, AheadSession

            ahead = opened.enter_context(Ahead(folder / "builds", build_workers, deadline))
            open_session = partial(AheadSession, ahead=ahead)

        def hear(model: str, agent: str, number: int, outcome: Outcome) -> None:
            nonlocal count
            count += 1
            steps.step(count, f"{model} {agent} {number}: {console.outcome_text(outcome)}")

        result = run(
            given,
            source,
            LivePlan(names, max_builds, split, policy, free, seed),
            SessionConfig(
                backend=backend,
                options=backend_options(option, threads),
                gate=Gate(limit=tolerance),
                plan=preset(effort).plan,
                deadline_seconds=deadline,
                allow=tuple(allow or ()),
            ),
            folder,
            say=(lambda _: None) if silent else console.say,
            on_outcome=hear,
            open_session=open_session,
            at_once=1 if build_workers is None else len(given),
        )
    write_live(result, folder)
    if json:
        console.print_json(result)
        return
    for shown in live_tables(result):
        console.print_table(shown.title, shown.columns, shown.rows)


def _named(models: str, seed: int) -> list[NamedModel]:
    """The models that were named, each once.

    Raises:
        InputError: None was named, or one cannot be used.
    """
    from routepilot.env import zoo
    from routepilot.env.errors import InputError
    from routepilot.env.models import Model, is_bundle
    from routepilot.training.inputs import NamedModel, prepare_model

    entries = {entry.name: entry for entry in (*zoo.ENTRIES, *zoo.VARIANTS)}
    found: dict[str, NamedModel] = {}
    for text in (part.strip() for part in models.split(",")):
        if not text:
            continue
        if is_bundle(Path(text)):
            model = Model.load(Path(text))
            entry = entries.get(model.name)
            named = (
                NamedModel(model)
                if entry is None
                else NamedModel(model, entry.family, entry.trained)
            )
        else:
            named = prepare_model(f"zoo:{text}" if text in entries else text, None, None, seed)
        found[named.model.fingerprint] = named
    if not found:
        raise InputError("no model was named; give corpus names, ONNX files or prepared folders")
    return list(found.values())
