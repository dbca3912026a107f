"""Route table files: a `RouteTable` as one Parquet file that others can use.

Owns the file format, field by field, and what a reader refuses. Knows no compiler and no agent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from routepilot.env import forms
from routepilot.env.drafts import whole_file
from routepilot.env.errors import TableError
from routepilot.env.features import FEATURE_NAMES
from routepilot.env.outcomes import Outcome
from routepilot.env.records import ModelCard, RouteTable
from routepilot.env.routes import Route

#: Version of the format; a file of another version is refused.
SCHEMA_VERSION = 1

#: Key of our description in the Parquet file's metadata.
METADATA_KEY = b"routepilot"

#: The columns: name, Arrow type, meaning.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("fingerprint", "string", "model, by its fingerprint; its card is in the metadata"),
    ("route", "string", "canonical route; empty for the default"),
    ("repeat", "int32", "0 for the first build of the route, 1 and up for controls"),
    ("status", "string", "how the build ended, see outcomes.Status"),
    ("reason", "string", "why, in the compiler's words where it failed"),
    (
        "log_speedup",
        "float64",
        "log(default time / route time), median over rounds; null: not timed",
    ),
    ("low", "float64", "lower end of its 95 % interval"),
    ("high", "float64", "upper end"),
    ("latency_ms", "float64", "median time of one inference, milliseconds"),
    ("default_latency_ms", "float64", "same for the default route in the same rounds"),
    ("rounds", "int32", "interleaved rounds behind the figures; 0: same engine as another"),
    ("spread", "float64", "robust standard deviation of one round's log ratio"),
    ("losses", "string", "worst loss by metric, JSON of numbers written as strings"),
    ("build_seconds", "float64", "transforms plus compile"),
    ("measure_seconds", "float64", "accuracy check plus timing"),
    ("engine_hash", "string", "hash of the optimized graph and settings; empty: nothing was built"),
)


def save_table(table: RouteTable, path: Path) -> None:
    """Write a table as a Parquet file, whole or not at all.

    Raises:
        TableError: The file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        _row(fingerprint, repeat, outcome)
        for fingerprint, routes in table.outcomes.items()
        for outcomes in routes.values()
        for repeat, outcome in enumerate(outcomes)
    ]
    description = {
        "schema": SCHEMA_VERSION,
        "catalog": forms.catalog_json(table.catalog),
        "target": forms.target_json(table.target),
        "models": [forms.card_json(card) for card in table.models],
        "features": list(FEATURE_NAMES),
        "manifest": dict(table.manifest),
    }
    schema = pa.schema(
        [pa.field(name, getattr(pa, kind)()) for name, kind, _ in FIELDS],
        metadata={METADATA_KEY: json.dumps(description).encode()},
    )
    try:
        with whole_file(path) as draft:
            pq.write_table(pa.Table.from_pylist(rows, schema=schema), draft, compression="zstd")
    except OSError as error:
        raise TableError(f"route table {str(path)!r} cannot be written: {error}") from None


def load_table(path: Path) -> RouteTable:
    """Read a table that `save_table` wrote.

    Raises:
        TableError: No such file, damaged, not ours, or of another schema version.
    """
    data, told = read_parquet(
        path,
        METADATA_KEY,
        kind="route table",
        again="fetch it again",
        made_by="`routepilot collect` or `routepilot records export`",
    )
    try:
        description = json.loads(told)
        version = description["schema"]
        if version != SCHEMA_VERSION:
            raise TableError(
                f"route table {str(path)!r} has schema {version} and this version reads"
                f" {SCHEMA_VERSION}; collect it again, or use the routepilot that wrote it"
            )
        if tuple(description["features"]) != FEATURE_NAMES:
            raise TableError(
                f"route table {str(path)!r} has model features of another version; run the"
                " `routepilot collect` that made it again beside its .sqlite file: it builds"
                " nothing that is on record, and describes the models anew"
            )
        return _table(description, data.to_pylist())
    except (KeyError, TypeError, ValueError) as error:
        words = " ".join(repr(error).split())
        words = words if len(words) <= 200 else f"{words[:100]} ... {words[-97:]}"
        raise TableError(
            f"route table {str(path)!r} lacks something ({words}); fetch it again"
        ) from None


def read_parquet(
    path: Path, key: bytes, *, kind: str, again: str, made_by: str
) -> tuple[Any, bytes]:
    """A Parquet file of ours: its rows, a `pyarrow.Table`, and what its metadata holds under a key.

    Args:
        path: The file.
        key: Metadata key that only files of this kind have.
        kind: What it is called.
        again: How to come by a sound one.
        made_by: Which commands write it.

    Raises:
        TableError: No such file, damaged, or Parquet of another kind.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not os.path.isfile(path):
        raise TableError(f"{kind} {str(path)!r} does not exist; give a .parquet file")
    try:
        # Not `read_table`, which imports the dataset module: 0.1 s of every start.
        with pq.ParquetFile(path) as file:
            data = file.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        raise TableError(
            f"{kind} {str(path)!r} is damaged or not Parquet ({words}); {again}"
        ) from None
    metadata = data.schema.metadata or {}
    if key not in metadata:
        raise TableError(
            f"{str(path)!r} is Parquet but no {kind}; give a file that {made_by} wrote"
        )
    return data, metadata[key]


def merge_tables(tables: Sequence[RouteTable]) -> RouteTable:
    """One table of several partial ones of one target; outcomes held twice are kept once.

    Raises:
        TableError: No table, or two targets; the message names the difference.
    """
    if not tables:
        raise TableError("no table to merge; give one or more")
    first = tables[0]
    cards: dict[str, ModelCard] = {}
    outcomes: dict[str, dict[Route, tuple[Outcome, ...]]] = {}
    for table in tables:
        difference = first.target.difference(table.target)
        if difference:
            raise TableError(f"tables of two targets cannot be merged: {difference}")
        cards.update({card.fingerprint: card for card in table.models})
        for fingerprint, routes in table.outcomes.items():
            mine = outcomes.setdefault(fingerprint, {})
            for route, found in routes.items():
                there = mine.get(route, ())
                mine[route] = (*there, *(o for o in found if o not in there))
    return RouteTable(first.catalog, first.target, tuple(cards.values()), outcomes, first.manifest)


def _row(fingerprint: str, repeat: int, outcome: Outcome) -> dict[str, Any]:
    flat = forms.flatten(outcome)
    losses = forms.losses_json(flat["losses"])
    return {**flat, "fingerprint": fingerprint, "repeat": repeat, "losses": losses}


def _table(description: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> RouteTable:
    outcomes: dict[str, dict[Route, tuple[Outcome, ...]]] = {}
    for row in rows:
        flat = {**row, "losses": forms.losses_from_json(row["losses"])}
        outcome = forms.unflatten(flat, Route.read(row["route"]))
        mine = outcomes.setdefault(row["fingerprint"], {})
        mine[outcome.route] = (*mine.get(outcome.route, ()), outcome)
    return RouteTable(
        forms.catalog_from_json(description["catalog"]),
        forms.target_from_json(description["target"]),
        tuple(forms.card_from_json(card) for card in description["models"]),
        outcomes,
        description["manifest"],
    )
