"""How records are written down: the flat and JSON forms that stores and table files share.

Owns the names of the flat columns and the JSON of catalogs, targets and model cards, so that
SQLite and Parquet cannot come to differ. Knows no file format and no database.

JSON has no NaN and no infinity: such numbers are written as the strings `nan`, `inf` and `-inf`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from routepilot.env.backends.base import Target
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.records import ModelCard
from routepilot.env.routes import Catalog, Knob, Requirement, Route

#: Columns of a measurement; all absent when the engine was not timed.
MEASUREMENT_COLUMNS = (
    "log_speedup",
    "low",
    "high",
    "latency_ms",
    "default_latency_ms",
    "rounds",
    "spread",
)

#: Columns of an outcome, in the order of `flatten`.
OUTCOME_COLUMNS = (
    "route",
    "status",
    "reason",
    *MEASUREMENT_COLUMNS,
    "losses",
    "build_seconds",
    "measure_seconds",
    "engine_hash",
)


def clean(text: str) -> str:
    """The text without lone surrogates, which no file format takes; compilers print anything."""
    return text.encode("utf-8", "replace").decode()


def flatten(outcome: Outcome) -> dict[str, Any]:
    """An outcome as `OUTCOME_COLUMNS`; `losses` stays a mapping, absent values are None."""
    timed = outcome.measurement
    flat: dict[str, Any] = {"route": str(outcome.route), "status": outcome.status.value}
    flat["reason"] = clean(outcome.reason)
    for name in MEASUREMENT_COLUMNS:
        flat[name] = None if timed is None else float(getattr(timed, name))
    if timed is not None:
        flat["rounds"] = int(timed.rounds)
    flat["losses"] = {clean(metric): float(loss) for metric, loss in outcome.losses.items()}
    flat["build_seconds"] = float(outcome.build_seconds)
    flat["measure_seconds"] = float(outcome.measure_seconds)
    flat["engine_hash"] = clean(outcome.engine_hash)
    return flat


def unflatten(flat: Mapping[str, Any], route: Route) -> Outcome:
    """The outcome that was flattened; `route` is what `flat["route"]` reads as.

    Raises:
        ValueError: Unknown status.
    """
    timed = None
    if flat["rounds"] is not None:
        values = {name: flat[name] for name in MEASUREMENT_COLUMNS}
        timed = Measurement(**values)
    return Outcome(
        route,
        Status(flat["status"]),
        flat["reason"],
        timed,
        dict(flat["losses"]),
        flat["build_seconds"],
        flat["measure_seconds"],
        flat["engine_hash"],
    )


def number(value: float) -> float | str:
    """A number as strict JSON can hold it; `float` reads it back."""
    return float(value) if math.isfinite(value) else str(float(value))


def losses_json(losses: Mapping[str, float]) -> str:
    """Losses as a JSON object."""
    return json.dumps({metric: number(loss) for metric, loss in losses.items()})


def losses_from_json(text: str) -> dict[str, float]:
    """What `losses_json` was given."""
    return {str(metric): float(loss) for metric, loss in json.loads(text).items()}


def catalog_json(catalog: Catalog) -> dict[str, Any]:
    """A catalog with every knob and requirement, as JSON data."""
    return {
        "name": catalog.name,
        "version": catalog.version,
        "knobs": [asdict(knob) for knob in catalog.knobs],
        "requirements": [asdict(rule) for rule in catalog.requirements],
    }


def catalog_from_json(data: Mapping[str, Any]) -> Catalog:
    """What `catalog_json` was given."""
    knobs = (
        Knob(**{**knob, "values": tuple(knob["values"]), "marks": tuple(knob["marks"])})
        for knob in data["knobs"]
    )
    rules = (
        Requirement(**{**rule, "parent_values": tuple(rule["parent_values"])})
        for rule in data["requirements"]
    )
    return Catalog(data["name"], data["version"], tuple(knobs), tuple(rules))


def target_json(target: Target) -> dict[str, Any]:
    """A target as JSON data."""
    return asdict(target)


def target_from_json(data: Mapping[str, Any]) -> Target:
    """What `target_json` was given."""
    return Target(**data)


def card_json(card: ModelCard) -> dict[str, Any]:
    """A model card as JSON data."""
    return {
        **asdict(card),
        "trained": bool(card.trained),
        "features": [number(value) for value in card.features],
        "default_latency_ms": number(card.default_latency_ms),
    }


def card_from_json(data: Mapping[str, Any]) -> ModelCard:
    """What `card_json` was given."""
    return ModelCard(
        **{
            **data,
            "features": tuple(float(value) for value in data["features"]),
            "default_latency_ms": float(data["default_latency_ms"]),
        }
    )
