"""Verbs about models and measurements: `zoo`, `collect`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routepilot.env.errors import InputError
from routepilot.env.wording import counted
from routepilot.training.cli import app
from routepilot.training.cli_options import (
    AllowOpt,
    BackendOpt,
    DeadlineOpt,
    EffortOpt,
    ExpressionFileOpt,
    ExpressionOpt,
    JsonOpt,
    OptionOpt,
    QuietOpt,
    RayOpt,
    SecondsOpt,
    SeedOpt,
    SlotOpt,
    ThreadsOpt,
    UntilNoiseOpt,
    listed,
)
from routepilot.training.effort import Effort, preset

if TYPE_CHECKING:
    from routepilot.training.collect import CorpusModel, Progress
    from routepilot.training.enough import Stop
    from routepilot.training.inputs import NamedModel

zoo_app = typer.Typer(
    help="The corpus: list, export and check its models.\n\nExample: routepilot zoo list",
    no_args_is_help=True,
)
app.add_typer(zoo_app, name="zoo")


@zoo_app.command("list")
def zoo_list(
    split: Annotated[
        str | None, typer.Option(help="train, validation or test; all when absent.")
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print the table of docs/corpus.md.")] = False,
    json: JsonOpt = False,
) -> None:
    """List the corpus: families, splits, licences, and other shapes of its models.

    Example: routepilot zoo list --split test --json
    """
    from routepilot.env import zoo
    from routepilot.training import console

    rows = zoo.listing(split)
    if json:
        console.print_json(rows)
        return
    if markdown:
        from routepilot.training.zoo_table import markdown as table

        console.out.print(table(rows), markup=False, soft_wrap=True)
        return
    models = sum(not row["variant_of"] for row in rows)
    console.print_table(
        f"{counted(models, 'model')} and {counted(len(rows) - models, 'other shape')} of them",
        ("model", "family", "split", "weights", "parameters", "licence"),
        [
            (
                row["name"],
                row["family"],
                row["split"],
                row["origin"],
                f"{row['parameters']:,}",
                row["licence"],
            )
            for row in rows
        ],
    )


@zoo_app.command("export")
def zoo_export(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the models.")] = Path("zoo"),
    names: Annotated[
        str | None, typer.Option(help="Models, separated by commas; all when absent.")
    ] = None,
    quiet: QuietOpt = False,
) -> None:
    """Write the corpus as prepared model folders: model.onnx, input sets, references.

    Example: routepilot zoo export -o zoo --names ddddocr,resnet
    """
    from routepilot.env import zoo
    from routepilot.training import console
    from routepilot.training.files import ensure_folder

    chosen = _names(names)
    ensure_folder(out)
    with console.Steps("export", len(chosen), quiet=quiet) as steps:
        done = 0

        def hear(name: str) -> None:
            nonlocal done
            done += 1
            steps.step(done, name)

        zoo.export(chosen, out, hear)


@zoo_app.command("check")
def zoo_check(
    names: Annotated[
        str | None, typer.Option(help="Models, separated by commas; all when absent.")
    ] = None,
    json: JsonOpt = False,
) -> None:
    """Make models anew and compare their fingerprints with those checked in.

    Also looks whether outputs have a sane scale and depend on the inputs; says size and licence.

    Example: routepilot zoo check --names resnet
    """
    from dataclasses import asdict

    from routepilot.env import zoo
    from routepilot.training import console

    rows = zoo.check(_names(names))
    if json:
        console.print_json([asdict(row) for row in rows])
    else:
        console.print_table(
            "fingerprints",
            ("model", "ok", "detail", "MB", "licence"),
            [
                (
                    row.name,
                    "yes" if row.ok else "NO",
                    row.detail,
                    f"{row.megabytes:.1f}",
                    row.licence,
                )
                for row in rows
            ],
        )
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


@app.command()
def collect(
    out: Annotated[Path, typer.Option("--out", "-o", help="Table file to write.")] = Path(
        "table.parquet"
    ),
    models: Annotated[
        str,
        typer.Option(
            help="zoo, variants, or zoo names, ONNX files and prepared folders, by commas;"
            " FAMILY=FILE for files of one family."
        ),
    ] = "zoo",
    backend: BackendOpt = "cpu",
    threads: ThreadsOpt = 1,
    option: OptionOpt = None,
    effort: EffortOpt = Effort.STANDARD,
    routes: Annotated[
        int | None,
        typer.Option(min=1, help="Routes a model, common to all. By --effort when absent."),
    ] = None,
    expression: ExpressionOpt = None,
    expression_file: ExpressionFileOpt = None,
    max_seconds: SecondsOpt = None,
    until_noise: UntilNoiseOpt = False,
    known: Annotated[
        str | None,
        typer.Option(
            help="Route table that --until-noise starts from; the backend's released one if absent."
        ),
    ] = None,
    allow: AllowOpt = None,
    controls: Annotated[int, typer.Option(min=0, help="Rebuilds of the default a model.")] = 3,
    neighbours: Annotated[
        int,
        typer.Option(min=0, help="So many more routes a model, one knob away from its five best."),
    ] = 0,
    recheck: Annotated[
        int,
        typer.Option(min=0, help="So many of a model's fastest routes are built and timed again."),
    ] = 8,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Models measured at once, each on a core or GPU of its own: 1 here; with --ray as"
            " many as the cluster has room for."
        ),
    ] = None,
    cores: Annotated[
        str | None, typer.Option(help="Cores to pin them to, by commas; the first when absent.")
    ] = None,
    ray: RayOpt = None,
    slot: SlotOpt = None,
    deadline: DeadlineOpt = 120.0,
    seed: SeedOpt = 0,
    quiet: QuietOpt = False,
    json: JsonOpt = False,
) -> None:
    """Measure many routes on many models into a table.

    Runs unattended; every outcome is on disk at once, beside the table, and the same command
    again continues. After --max-seconds the table holds what there is. With --until-noise a model
    is left as soon as nothing worth a build is expected of its routes; a table to learn from is
    better whole. Keep the machine quiet meanwhile.

    Example: routepilot collect -o cpu.parquet --models zoo --routes 128 --neighbours 32 --workers 2
    """
    from routepilot.env.tables import save_table
    from routepilot.training import collect as collecting
    from routepilot.training import console
    from routepilot.training.candidates import lay_out, read_expression
    from routepilot.training.files import Output
    from routepilot.training.inputs import backend_options, route_expression
    from routepilot.training.session import SessionConfig
    from routepilot.training.slots import measuring_slots, read_cores
    from routepilot.training.view import CollectView

    if cores is not None and ray is not None:
        raise InputError("--cores names cores of this machine; leave it out with --ray")
    pinned = None if cores is None else read_cores(cores)
    if out.suffix != ".parquet":
        raise InputError(f"table file {str(out)!r} does not end in .parquet; name it so")
    store = out.with_suffix(".sqlite")
    config = SessionConfig(
        backend=backend,
        options=backend_options(option, threads),
        plan=preset(effort).plan,
        deadline_seconds=deadline,
        allow=tuple(allow or ()),
    )
    with Output(out.parent) as output:
        corpus = corpus_of(models, seed)
        wanted = route_expression(expression, expression_file)
        count = preset(effort).routes if routes is None else routes
        end = math.inf if max_seconds is None else time.monotonic() + max_seconds
        around = collecting.Neighbourhood(count=neighbours)
        repeats = collecting.Repeats(controls, recheck)
        until = _stop(known, backend) if until_noise else None
        silent = quiet or json
        stop = threading.Event()
        previous = signal.signal(signal.SIGINT, lambda *_: stop.set())
        try:
            with measuring_slots(
                config, workers, cores=pinned, ray=ray, needs=slot, say=console.sayer(silent)
            ) as pool:
                catalog, target = pool.compiler(config)
                plan = (
                    collecting.at_most(collecting.plan_routes(catalog, count, seed), count, seed)
                    if wanted is None
                    else lay_out(read_expression(wanted, catalog), catalog, "collect")
                )
                total = len(corpus) * collecting.planned_builds(len(plan), around, repeats)
                with CollectView("collect", total, max_seconds=max_seconds, quiet=silent) as view:
                    output.keep()
                    collecting.collect(
                        corpus,
                        store,
                        config,
                        plan,
                        out.parent / f"{out.stem}-work",
                        neighbourhood=around,
                        repeats=repeats,
                        slots=pool.slots,
                        on_progress=_in_turn(view.step),
                        should_stop=lambda: stop.is_set() or time.monotonic() >= end,
                        until=until,
                    )
                facts = pool.facts()
        finally:
            signal.signal(signal.SIGINT, previous)
    if stop.is_set():
        raise KeyboardInterrupt
    table = collecting.table_from_store(
        store,
        target.key,
        [entry.model.fingerprint for entry in corpus],
        {
            "seed": seed,
            "routes": len(plan),
            "neighbours": neighbours,
            "controls": controls,
            "recheck": recheck,
            "until_noise": until_noise,
            **facts,
        },
    )
    save_table(table, out)
    if json:
        console.print_json({"table": str(out), "models": len(table.models), "routes": len(plan)})
    else:
        told = counted(len(table.models), "model")
        late = "; the time is up, the same command goes on" if time.monotonic() >= end else ""
        console.out.print(f"written: {out} ({told}{late})", markup=False, soft_wrap=True)


def _in_turn(hear: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """Lets steps through one at a time; they come from any thread."""
    lock = threading.Lock()

    def one(progress: Progress) -> None:
        with lock:
            hear(progress)

    return one


def _names(text: str | None) -> list[str]:
    from routepilot.env import zoo

    if text is None:
        return [entry.name for entry in (*zoo.ENTRIES, *zoo.VARIANTS)]
    return [zoo.entry(name).name for name in listed(text)]


def _stop(known: str | None, backend: str) -> Stop:
    """What ends a model of a collection at the noise.

    Raises:
        InputError: No table is given and none is released for the backend.
    """
    from routepilot.env.tables import load_table
    from routepilot.training.defaults import find_table, released_name, released_tables
    from routepilot.training.enough import Stop

    name = known or released_name(backend)
    if known is None and name not in released_tables():
        raise InputError(
            f"--until-noise starts from a route table and none is released for {backend}; give one"
            " with --known, or drop --until-noise"
        )
    return Stop(load_table(find_table(name)))


def corpus_of(models: str, seed: int) -> list[CorpusModel]:
    """The models of `--models`: `zoo`, `variants`, or names and files separated by commas.

    Raises:
        InputError: One is not known, or cannot be made here.
    """
    from routepilot.env import zoo
    from routepilot.training.collect import CorpusModel
    from routepilot.training.inputs import prepare_model

    if models in ("zoo", "variants"):
        wanted = zoo.ENTRIES if models == "zoo" else zoo.VARIANTS
        missing = [(e.name, zoo.available(e)) for e in wanted]
        lacking = [f"{name} ({why})" for name, why in missing if why]
        if lacking:
            raise InputError(f"not available here: {'; '.join(lacking)}; or name --models")
        texts = [f"zoo:{entry.name}" for entry in wanted]
    else:
        names = {entry.name for entry in (*zoo.ENTRIES, *zoo.VARIANTS)}
        texts = [f"zoo:{text}" if text in names else text for text in listed(models)]
    corpus = []
    for text in texts:
        family, path = family_and_model(text)
        named = prepare_model(path, None, None, seed)
        corpus.append(CorpusModel(named.model, family or own_family(named), named.trained))
    return corpus


def family_and_model(text: str) -> tuple[str, str]:
    """`FAMILY=MODEL` taken apart; the family is empty where none is given."""
    family, equals, path = text.partition("=")
    if not equals or os.path.exists(text) or os.sep in family:
        return "", text
    if not family.strip() or not path.strip():
        raise InputError(f"model {text!r} is not of the form MODEL or FAMILY=MODEL")
    return family.strip(), path.strip()


def own_family(named: NamedModel) -> str:
    """The family of a model of the corpus; any other model is a family of its own."""
    from routepilot.training.inputs import UNKNOWN_FAMILY

    return named.model.name if named.family == UNKNOWN_FAMILY else named.family
