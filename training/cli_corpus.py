"""Verbs about models and measurements: `zoo`, `collect`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routepilot.env.errors import InputError
from routepilot.training.cli import (
    AllowOpt,
    BackendOpt,
    EffortOpt,
    ExpressionFileOpt,
    ExpressionOpt,
    JsonOpt,
    OptionOpt,
    SecondsOpt,
    SeedOpt,
    ThreadsOpt,
    app,
)
from routepilot.training.effort import Effort, preset

if TYPE_CHECKING:
    from routepilot.training.collect import CorpusModel

zoo_app = typer.Typer(help="The corpus: list, export and check its models.", no_args_is_help=True)
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
        f"{models} models and {len(rows) - models} other shapes of them",
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
) -> None:
    """Write the corpus as prepared model folders: model.onnx, input sets, references.

    Example: routepilot zoo export -o zoo --names ddddocr,resnet
    """
    from routepilot.env import zoo
    from routepilot.training import console
    from routepilot.training.files import ensure_folder

    chosen = _names(names)
    ensure_folder(out)
    with console.Steps("export", len(chosen)) as steps:
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
            help="zoo, variants, or zoo names, ONNX files or prepared folders, by commas."
        ),
    ] = "zoo",
    backend: BackendOpt = "cpu",
    threads: ThreadsOpt = 1,
    option: OptionOpt = None,
    effort: EffortOpt = Effort.STANDARD,
    routes: Annotated[
        int | None, typer.Option(help="Routes a model, common to all. By --effort when absent.")
    ] = None,
    expression: ExpressionOpt = None,
    expression_file: ExpressionFileOpt = None,
    max_seconds: SecondsOpt = None,
    allow: AllowOpt = None,
    controls: Annotated[int, typer.Option(help="Rebuilds of the default a model.")] = 3,
    neighbours: Annotated[
        int, typer.Option(help="So many more routes a model, one knob away from its five best.")
    ] = 0,
    recheck: Annotated[
        int, typer.Option(help="So many of a model's fastest routes are built and timed again.")
    ] = 8,
    workers: Annotated[
        int, typer.Option(help="Models measured at once, each pinned to a core of its own.")
    ] = 1,
    cores: Annotated[
        str | None, typer.Option(help="Cores to pin them to, by commas; the first when absent.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds one build may take.")] = 120.0,
    seed: SeedOpt = 0,
    json: JsonOpt = False,
) -> None:
    """Measure many routes on many models into a table.

    Runs unattended; every outcome is on disk at once, beside the table, and the same command
    again continues. After --max-seconds the table holds what there is. Keep the machine quiet
    meanwhile.

    Example: routepilot collect -o cpu.parquet --models zoo --routes 128 --neighbours 32 --workers 2
    """
    from routepilot.env.backends import load_backend
    from routepilot.env.tables import save_table
    from routepilot.training import collect as collecting
    from routepilot.training import console
    from routepilot.training.candidates import lay_out, read_expression
    from routepilot.training.files import ensure_folder
    from routepilot.training.inputs import backend_options, route_expression
    from routepilot.training.session import SessionConfig

    pinned = _cores(cores, workers, threads)
    if threads * workers > (os.cpu_count() or 1):
        raise InputError(
            f"{workers} workers of {threads} threads need {threads * workers} cores and there are"
            f" {os.cpu_count()}; lower --workers"
        )
    ensure_folder(out.parent)
    store = out.with_suffix(".sqlite")
    config = SessionConfig(
        backend=backend,
        options=backend_options(option, threads),
        plan=preset(effort).plan,
        deadline_seconds=deadline,
        allow=tuple(allow or ()),
    )
    compiler = load_backend(backend, config.options)
    corpus = corpus_of(models, seed)
    wanted = route_expression(expression, expression_file)
    count = preset(effort).routes if routes is None else routes
    plan = (
        collecting.plan_routes(compiler.catalog(), count, seed)
        if wanted is None
        else lay_out(read_expression(wanted, compiler.catalog()), compiler.catalog(), "collect")
    )
    end = math.inf if max_seconds is None else time.monotonic() + max_seconds
    total = len(corpus) * (len(plan) + neighbours + controls + 1)
    stop = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        with console.Steps("collect", total, quiet=json) as steps:
            lock, done = threading.Lock(), {"steps": 0}

            def hear(progress: collecting.Progress) -> None:
                with lock:
                    done["steps"] += 1
                    where = f"{progress.model} {progress.done}/{progress.planned}"
                    if progress.error:
                        steps.step(done["steps"], f"{where} given up: {progress.error}")
                    elif progress.outcome is not None:
                        text = console.outcome_text(progress.outcome)
                        steps.step(done["steps"], f"{where} {text}", note=progress.model)

            collecting.collect(
                corpus,
                store,
                config,
                plan,
                out.parent / f"{out.stem}-work",
                neighbourhood=collecting.Neighbourhood(count=neighbours),
                repeats=collecting.Repeats(controls, recheck),
                cores=pinned,
                on_progress=hear,
                should_stop=lambda: stop.is_set() or time.monotonic() >= end,
            )
    finally:
        signal.signal(signal.SIGINT, previous)
    if stop.is_set():
        raise KeyboardInterrupt
    table = collecting.table_from_store(
        store,
        compiler.target().key,
        [entry.model.fingerprint for entry in corpus],
        {
            "seed": seed,
            "routes": len(plan),
            "neighbours": neighbours,
            "controls": controls,
            "recheck": recheck,
        },
    )
    save_table(table, out)
    if json:
        console.print_json({"table": str(out), "models": len(table.models), "routes": len(plan)})
    else:
        console.out.print(f"written: {out} ({len(table.models)} models)", markup=False)


def _cores(text: str | None, workers: int, threads: int) -> list[int | None]:
    """The core of each worker; None leaves engines of several threads to the system."""
    if text is None:
        return [number if threads == 1 else None for number in range(workers)]
    here = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    given = [item.strip() for item in text.split(",")]
    numbers = [int(item) for item in given if item.isascii() and item.isdigit()]
    if len(numbers) != len(given) or not set(numbers) <= set(here):
        raise InputError(f"--cores {text!r} names no cores of this machine; it has {here}")
    if len(set(numbers)) != workers or threads > 1:
        raise InputError(
            f"--cores {text!r} is for {workers} workers of {threads} threads; name one core for"
            " each worker of one thread"
        )
    return list(numbers)


def _names(text: str | None) -> list[str]:
    from routepilot.env import zoo

    if text is None:
        return [entry.name for entry in (*zoo.ENTRIES, *zoo.VARIANTS)]
    return [zoo.entry(name.strip()).name for name in text.split(",") if name.strip()]


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
        given = [text.strip() for text in models.split(",") if text.strip()]
        texts = [f"zoo:{text}" if text in names else text for text in given]
    prepared = [prepare_model(text, None, None, seed) for text in texts]
    return [CorpusModel(named.model, named.family, named.trained) for named in prepared]
