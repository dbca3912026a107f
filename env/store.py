"""The record store: every outcome on disk the moment it is known, in one SQLite file.

Owns the database: schema, transactions, migration. Knows no backend and no agent. Write-ahead
logging lets several processes share a file; a kill loses at most the build in flight.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from routepilot.env.backends.base import Target
from routepilot.env.errors import TableError
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.records import ModelCard, Record, RouteTable
from routepilot.env.routes import Catalog, Knob, Requirement, Route

#: Version of the schema below, kept in `PRAGMA user_version`.
SCHEMA_VERSION = 1

#: From version i to i + 1: statements that bring an older file up to date.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE targets (key TEXT PRIMARY KEY, target TEXT NOT NULL, catalog TEXT NOT NULL);
    CREATE TABLE models (fingerprint TEXT PRIMARY KEY, card TEXT NOT NULL);
    CREATE TABLE records (
        fingerprint TEXT NOT NULL, target_key TEXT NOT NULL, route TEXT NOT NULL,
        repeat INTEGER NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL,
        log_speedup REAL, low REAL, high REAL, latency_ms REAL, default_latency_ms REAL,
        rounds INTEGER, spread REAL, losses TEXT NOT NULL,
        build_seconds REAL NOT NULL, measure_seconds REAL NOT NULL,
        engine_hash TEXT NOT NULL, created REAL NOT NULL,
        PRIMARY KEY (fingerprint, target_key, route, repeat)
    );
    """,
)

#: Seconds to wait for another process that is writing.
BUSY_SECONDS = 30.0

_MEASURED = tuple(Measurement.__dataclass_fields__)


def pack_catalog(catalog: Catalog) -> dict[str, Any]:
    """A catalog as plain data."""
    return {
        "name": catalog.name,
        "version": catalog.version,
        "knobs": [asdict(knob) for knob in catalog.knobs],
        "requirements": [asdict(rule) for rule in catalog.requirements],
    }


def unpack_catalog(data: Mapping[str, Any]) -> Catalog:
    """The catalog that `pack_catalog` was given."""
    knobs = tuple(
        Knob(**{**k, "values": tuple(k["values"]), "marks": tuple(k["marks"])})
        for k in data["knobs"]
    )
    rules = tuple(
        Requirement(**{**r, "parent_values": tuple(r["parent_values"])})
        for r in data["requirements"]
    )
    return Catalog(data["name"], data["version"], knobs, rules)


def pack_losses(losses: Mapping[str, float]) -> str:
    """Losses as JSON; NaN and infinities survive as strings."""
    return json.dumps({name: repr(float(value)) for name, value in losses.items()})


def unpack_losses(text: str) -> dict[str, float]:
    """The losses that `pack_losses` was given."""
    return {name: float(value) for name, value in json.loads(text).items()}


class RecordStore:
    """Outcomes by model and target in one SQLite file.

    Args:
        path: The file; made if absent.

    Raises:
        TableError: The file is not ours, damaged, newer than this version, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._base = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")
            self._migrate()
        except sqlite3.Error as error:
            raise TableError(
                f"record store {str(path)!r} cannot be opened ({error}); name another file, or"
                " move this one away"
            ) from None

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def add_model(self, card: ModelCard) -> None:
        """Keep a model's card; a newer card of the same model replaces it."""
        self._write(
            "INSERT OR REPLACE INTO models VALUES (?, ?)",
            (card.fingerprint, json.dumps(asdict(card))),
        )

    def add_target(self, target: Target, catalog: Catalog) -> None:
        """Keep a target with its catalog."""
        packed = (target.key, json.dumps(asdict(target)), json.dumps(pack_catalog(catalog)))
        self._write("INSERT OR IGNORE INTO targets VALUES (?, ?, ?)", packed)

    def add(self, record: Record) -> None:
        """Keep an outcome, in a transaction of its own."""
        outcome = record.outcome
        measured = outcome.measurement
        figures = [getattr(measured, name) if measured else None for name in _MEASURED]
        self._write(
            f"INSERT OR REPLACE INTO records VALUES ({', '.join('?' * 18)})",
            (
                record.fingerprint,
                record.target_key,
                str(outcome.route),
                record.repeat,
                outcome.status.value,
                outcome.reason,
                *figures,
                pack_losses(outcome.losses),
                outcome.build_seconds,
                outcome.measure_seconds,
                outcome.engine_hash,
                record.created,
            ),
        )

    def outcomes(self, fingerprint: str, target_key: str) -> dict[Route, tuple[Outcome, ...]]:
        """Outcomes of a model on a target: route -> first build, then repeats."""
        rows = self._base.execute(
            "SELECT route, status, reason, log_speedup, low, high, latency_ms, default_latency_ms,"
            " rounds, spread, losses, build_seconds, measure_seconds, engine_hash FROM records"
            " WHERE fingerprint = ? AND target_key = ? ORDER BY created, route, repeat",
            (fingerprint, target_key),
        )
        found: dict[Route, tuple[Outcome, ...]] = {}
        for row in rows:
            outcome = _outcome(row)
            found[outcome.route] = (*found.get(outcome.route, ()), outcome)
        return found

    def models(self) -> list[ModelCard]:
        """Cards of all models."""
        rows = self._base.execute("SELECT card FROM models ORDER BY fingerprint")
        return [_card(json.loads(text)) for (text,) in rows]

    def targets(self) -> dict[str, tuple[Target, Catalog]]:
        """Targets and their catalogs by key."""
        rows = self._base.execute("SELECT key, target, catalog FROM targets ORDER BY key")
        return {
            key: (Target(**json.loads(target)), unpack_catalog(json.loads(catalog)))
            for key, target, catalog in rows
        }

    def count(self) -> int:
        """How many records there are."""
        (number,) = self._base.execute("SELECT COUNT(*) FROM records").fetchone()
        return int(number)

    def table(
        self, target_key: str | None = None, manifest: Mapping[str, object] | None = None
    ) -> RouteTable:
        """Everything about one target as a route table.

        Args:
            target_key: Which target; may be None when there is one alone.
            manifest: Manifest of the table.

        Raises:
            TableError: No such target, or none named and several there.
        """
        targets = self.targets()
        if target_key is None:
            if len(targets) != 1:
                held = "; ".join(
                    f"{key} ({t.backend} on {t.device})" for key, (t, _) in targets.items()
                )
                raise TableError(
                    f"record store {str(self._path)!r} holds {len(targets)} targets"
                    f" ({held or 'none'}); name one"
                )
            (target_key,) = targets
        if target_key not in targets:
            raise TableError(f"record store {str(self._path)!r} holds no target {target_key!r}")
        target, catalog = targets[target_key]
        outcomes = {c.fingerprint: self.outcomes(c.fingerprint, target_key) for c in self.models()}
        outcomes = {fingerprint: found for fingerprint, found in outcomes.items() if found}
        models = tuple(c for c in self.models() if c.fingerprint in outcomes)
        return RouteTable(catalog, target, models, outcomes, dict(manifest or {}))

    def put_table(self, table: RouteTable) -> None:
        """Take over a table's records; what is there already stays as it is."""
        self.add_target(table.target, table.catalog)
        for card in table.models:
            self.add_model(card)
        for fingerprint, routes in table.outcomes.items():
            there = self.outcomes(fingerprint, table.target.key)
            for route, outcomes in routes.items():
                for repeat, outcome in enumerate(outcomes):
                    if repeat >= len(there.get(route, ())):
                        self.add(Record(fingerprint, table.target.key, outcome, repeat))

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        try:
            self._base.execute(statement, values)
        except sqlite3.Error as error:
            raise TableError(
                f"record store {str(self._path)!r} cannot be written ({error}); free space or"
                " repair the permissions, then repeat the command"
            ) from None

    def _migrate(self) -> None:
        self._base.execute("BEGIN IMMEDIATE")  # two processes must not both bring it up to date
        try:
            (version,) = self._base.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise TableError(
                    f"record store {str(self._path)!r} has schema {version} and this version reads"
                    f" up to {SCHEMA_VERSION}; upgrade routepilot"
                )
            for statements in MIGRATIONS[version:]:
                for statement in filter(str.strip, statements.split(";")):
                    self._base.execute(statement)
            self._base.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._base.execute("COMMIT")
        except BaseException:
            self._base.execute("ROLLBACK")
            self._base.close()
            raise


def _outcome(row: tuple[Any, ...]) -> Outcome:
    route, status, reason, *rest = row
    figures, (losses, build_seconds, measure_seconds, engine_hash) = rest[:7], rest[7:]
    return Outcome(
        Route.read(route),
        Status(status),
        reason,
        Measurement(*figures) if figures[0] is not None else None,
        unpack_losses(losses),
        build_seconds,
        measure_seconds,
        engine_hash,
    )


def _card(data: Mapping[str, Any]) -> ModelCard:
    return ModelCard(**{**data, "features": tuple(data["features"])})
