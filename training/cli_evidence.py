"""Verbs about evidence: `leakage` and `confirm-live`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

from typing import Annotated

import typer

from routepilot.training.cli import JsonOpt, app


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
