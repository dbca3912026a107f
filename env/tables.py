"""Route table files: a `RouteTable` as one Parquet file that others can use.

Owns the file format, field by field, and what a reader refuses. Knows no compiler and no agent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from routepilot.env import forms
from routepilot.env.accuracy import Gate, regate
from routepilot.env.backends.recorded import settled
from routepilot.env.drafts import whole_file
from routepilot.env.errors import TableError
from routepilot.env.features import FEATURE_NAMES
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import ModelCard, RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Route

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


def describe_table(table: RouteTable, gate: Gate) -> dict[str, Any]:
    """What a table holds at an accuracy limit, as plain data.

    Args:
        table: The table.
        gate: Gate that decides what is feasible.
    """
    models = []
    judged: list[dict[Route, Outcome]] = []
    statuses: dict[str, int] = {}
    reasons: dict[str, int] = {}
    controls: list[float] = []
    gains: list[float] = []
    build = measure = 0.0
    for card in table.models:
        best, best_route, feasible, count = 0.0, DEFAULT_ROUTE, 0, 0
        judged.append({})
        for route, outcomes in table.outcomes.get(card.fingerprint, {}).items():
            outcome = regate(settled(outcomes), gate)
            statuses[outcome.status.value] = statuses.get(outcome.status.value, 0) + 1
            if outcome.status is not Status.OK:
                reason = outcome.reason[:80]
                reasons[reason] = reasons.get(reason, 0) + 1
            build += sum(o.build_seconds for o in outcomes)
            measure += sum(o.measure_seconds for o in outcomes)
            if route.is_default:
                controls += [abs(o.log_speedup) for o in outcomes[1:] if o.is_feasible]
                continue
            judged[-1][route] = outcome
            count += 1
            feasible += outcome.is_feasible
            if outcome.gain > best:
                best, best_route = outcome.gain, route
        gains.append(best)
        models.append(
            {
                "name": card.name,
                "family": card.family,
                "trained": card.trained,
                "default_latency_ms": card.default_latency_ms,
                "routes": count,
                "feasible": feasible,
                "best_speedup": float(np.exp(best)),
                "best_route": str(best_route),
            }
        )
    return {
        "target": asdict(table.target),
        "models": models,
        "statuses": statuses,
        "reasons": dict(sorted(reasons.items(), key=lambda item: -item[1])[:12]),
        "controls": {
            "count": len(controls),
            "median": float(np.median(controls)) if controls else 0.0,
            "largest": max(controls, default=0.0),
        },
        "build_seconds": build,
        "measure_seconds": measure,
        "oracle_speedup": float(np.exp(np.mean(gains))) if gains else 1.0,
        "trained_speedup": _geometric(
            g for g, card in zip(gains, table.models, strict=True) if card.trained
        ),
        "best_single": _best_single(judged),
        "carried_over": _carried_over(judged),
        "manifest": dict(table.manifest),
    }


def _geometric(gains: Iterable[float]) -> float:
    """Geometric mean of speed-ups from their logs; 1 for none."""
    return float(np.exp(np.mean(list(gains) or [0.0])))


def _best_single(judged: Sequence[Mapping[Route, Outcome]]) -> dict[str, Any]:
    """The one route to give every model, among those that nine in ten know.

    A model keeps its default where the route does not know it or gains nothing.
    """
    gains: dict[Route, list[float]] = {}
    for outcomes in judged:
        for route, outcome in outcomes.items():
            gains.setdefault(route, []).append(outcome.gain)
    common = {r: sum(g) for r, g in gains.items() if len(g) >= 0.9 * len(judged)}
    best = max(common, key=lambda route: common[route], default=DEFAULT_ROUTE)
    return {
        "route": str(best),
        "speedup": float(np.exp(common.get(best, 0.0) / max(len(judged), 1))),
    }


def _carried_over(judged: Sequence[Mapping[Route, Outcome]]) -> dict[str, int]:
    """What the best route of one model does on each other one that it was built for."""
    found = {"pairs": 0, "slower": 0, "refused": 0}
    for place, outcomes in enumerate(judged):
        best = max(outcomes, key=lambda route: outcomes[route].gain, default=DEFAULT_ROUTE)
        if best not in outcomes or outcomes[best].gain <= 0:
            continue
        for other, theirs in enumerate(judged):
            if other != place and best in theirs:
                found["pairs"] += 1
                found["refused"] += not theirs[best].is_feasible
                found["slower"] += theirs[best].is_feasible and theirs[best].log_speedup < 0
    return found


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
    if tuple(description["features"]) != FEATURE_NAMES:
        raise ValueError("its model features are those of another version")
    return RouteTable(
        forms.catalog_from_json(description["catalog"]),
        forms.target_from_json(description["target"]),
        tuple(forms.card_from_json(card) for card in description["models"]),
        outcomes,
        description["manifest"],
    )
