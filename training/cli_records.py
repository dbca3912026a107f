"""The verb `records`: tables, record stores and tuning caches of trtexec, into each other.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from routepilot.env.errors import InputError
from routepilot.env.wording import counted
from routepilot.training.cli import app
from routepilot.training.cli_options import JsonOpt, ShapeOpt
from routepilot.training.files import Format

records_app = typer.Typer(
    help="Route tables and trtexec's caches: describe, export, merge, import.\n\n"
    "Example: routepilot records describe cpu",
    no_args_is_help=True,
)
app.add_typer(records_app, name="records")

#: The second accuracy limit of the datasheet's tables.
LOOSE = 3e-2

FormatOpt = Annotated[
    Format, typer.Option("--format", help="table (Parquet) or trtexec (tuning cache).")
]


@records_app.command("describe")
def records_describe(
    table: Annotated[str, typer.Argument(help="Table file, or the name of a released table.")],
    tolerance: Annotated[float, typer.Option(help="Limit on the relative L2 error.")] = 1e-2,
    against: Annotated[
        str | None,
        typer.Option(help="Another table of the same models: what its best routes are worth here."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option(help="Print the models as the table of docs/table.md.")
    ] = False,
    json: JsonOpt = False,
) -> None:
    """Say what a table holds: coverage, best gain by model, failures, noise, what carries over.

    Of a liveness table: live knobs by model, failures by reason, agreement between targets and
    with the operator rule.

    Example: routepilot records describe cpu --tolerance 0.03
    """
    from routepilot.env.accuracy import Gate
    from routepilot.env.liveness_table import (
        describe_liveness,
        is_liveness_table,
        load_liveness,
    )
    from routepilot.env.table_summary import compare_tables, describe_table
    from routepilot.env.tables import load_table
    from routepilot.training import console, table_sheet
    from routepilot.training.defaults import find_table

    path = find_table(table)
    if is_liveness_table(path):
        if against is not None or markdown:
            raise InputError(
                f"{table} is a liveness table, which --against and --markdown are not for; leave"
                " them out"
            )
        found = describe_liveness(load_liveness(path))
        if json:
            console.print_json(found)
        else:
            console.print_liveness(found)
        return
    loaded, gate = load_table(path), Gate(limit=tolerance)
    facts = describe_table(loaded, gate)
    if against is not None:
        facts["against"] = compare_tables(loaded, load_table(find_table(against)), gate)
    if json:
        console.print_json(facts)
        return
    if markdown:
        loose = describe_table(loaded, Gate(limit=max(tolerance, LOOSE)))
        console.out.print(table_sheet.markdown(facts, loose), markup=False, soft_wrap=True)
        return
    console.print_description(facts)
    if against is not None:
        words = table_sheet.compared_in_words(facts["against"])
        console.out.print(words, markup=False, soft_wrap=True)


@records_app.command("export")
def records_export(
    store: Annotated[Path, typer.Argument(help="Record store (.sqlite).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")],
    form: FormatOpt = Format.AUTO,
    target: Annotated[
        str | None, typer.Option(help="Target key, where the store holds several.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of a tuning cache, by name or fingerprint.")
    ] = None,
    onnx: Annotated[str, typer.Option(help="Model file for a tuning cache's header.")] = "",
    algorithm: Annotated[
        str, typer.Option(help="Accuracy algorithm of a tuning cache: l0 l1 l2 lInf cos.")
    ] = "l0",
    threshold: Annotated[float, typer.Option(help="Accuracy threshold for its header.")] = 0.0,
) -> None:
    """Write a record store as a portable table, or as a tuning cache of trtexec.

    A name ending in .json or .jsonl means a tuning cache.

    Example: routepilot records export tuned/records.sqlite -o best_config.json --onnx model.onnx
    """
    from routepilot.env.store import RecordStore
    from routepilot.env.tables import save_table
    from routepilot.training import console, tuning_caches
    from routepilot.training.manifest import manifest

    if not os.path.isfile(store):
        raise InputError(f"record store {str(store)!r} does not exist; give a .sqlite file")
    with RecordStore(store) as source:
        table = source.table(target, manifest=manifest())
    if tuning_caches.format_of_name(out, form) is Format.TABLE:
        save_table(table, out)
        console.out.print(f"written: {out}", markup=False)
        return
    rows, left_out = tuning_caches.export_cache(
        table, out, model=model, onnx=onnx, algorithm=algorithm, threshold=threshold
    )
    rest = f"; {left_out} left out, since a build route cannot say them" if left_out else ""
    console.out.print(f"written: {out} ({counted(rows, 'row')}{rest})", markup=False)


@records_app.command("merge")
def records_merge(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE", hidden=True)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Table file to write.")],
) -> None:
    """Put the partial tables of one target together; an outcome held twice is kept once.

    TABLE... are files in order of age.

    Liveness tables of one compiler go together likewise.

    Example: routepilot records merge slice1.parquet slice2.parquet -o h200.parquet
    """
    from routepilot.env.liveness_table import (
        is_liveness_table,
        load_liveness,
        merge_liveness,
        save_liveness,
    )
    from routepilot.env.tables import load_table, merge_tables, save_table
    from routepilot.training import console
    from routepilot.training.defaults import find_table

    paths = [find_table(table) for table in tables]
    if paths and all(map(is_liveness_table, paths)):
        whole = merge_liveness([load_liveness(path) for path in paths])
        save_liveness(whole, out)
        console.out.print(f"written: {out} ({counted(len(whole.models), 'model')})", markup=False)
        return
    merged = merge_tables([load_table(path) for path in paths])
    save_table(merged, out)
    console.out.print(f"written: {out} ({counted(len(merged.models), 'model')})", markup=False)


@records_app.command("import")
def records_import(
    source: Annotated[
        str, typer.Argument(help="Table file, name of a released table, or tuning cache.")
    ],
    store: Annotated[Path, typer.Option("--store", help="Record store to add to.")],
    form: FormatOpt = Format.AUTO,
    model: Annotated[
        str | None, typer.Option(help="Model of a tuning cache; the one it names when absent.")
    ] = None,
    shape: ShapeOpt = None,
    device: Annotated[
        str, typer.Option(help="GPU of a tuning cache, which does not say it.")
    ] = "unknown GPU",
    json: JsonOpt = False,
) -> None:
    """Put a table's records, or a tuning cache of trtexec, into a record store.

    What is there stays. trtexec's times are means over one engine with warm-up, so they make a
    target of their own.

    Example: routepilot records import best_config.json --store mine.sqlite --device "H100 PCIe"
    """
    from routepilot.env.store import RecordStore
    from routepilot.env.tables import load_table
    from routepilot.training import console, tuning_caches
    from routepilot.training.defaults import find_table
    from routepilot.training.inputs import prepare_model

    if tuning_caches.format_of_file(Path(source), form) is Format.TRTEXEC:
        text = model or tuning_caches.onnx_of_cache(Path(source))
        prepared = prepare_model(text, shape, None, 0).model
        with RecordStore(store) as target:
            found = tuning_caches.import_cache(Path(source), target, prepared, device)
        for note in found.notes:
            console.say(note)
        if json:
            console.print_json({"rows": found.rows, "feasible": found.feasible})
            return
        told = f"{counted(found.rows, 'row')} of {prepared.name}, {found.feasible} of them good"
        console.out.print(f"{told}, imported into {store}", markup=False)
        return
    table = load_table(find_table(source))
    with RecordStore(store) as target:
        target.put_table(table)
    if json:
        console.print_json({"models": len(table.models)})
        return
    console.out.print(f"{counted(len(table.models), 'model')} imported into {store}", markup=False)
