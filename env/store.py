"""The record store: every outcome on disk the moment it is known, in one SQLite file.

Owns the database schema, its migrations and what is refused. Knows no compiler and no agent.

Several processes may write one store (write-ahead log, busy timeout). Each `add` is one
transaction, so a kill loses at most the build in flight; threads that add at once share one
(`group_commit.py`). A store is used by the thread that opened it; other threads open their own.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from routepilot.env import forms
from routepilot.env.backends.base import Target
from routepilot.env.errors import MachineError, RouteError, TableError
from routepilot.env.group_commit import meeting
from routepilot.env.outcomes import Outcome
from routepilot.env.records import ModelCard, Record, RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route

#: Marks an SQLite file as ours ("RPLT").
APPLICATION_ID = 0x52504C54

#: How long a writer waits for another process.
BUSY_SECONDS = 30.0

#: Statements that lift version i to i + 1; the newest version is the number of entries. Entries
#: are never edited once released, only added.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE targets (key TEXT PRIMARY KEY, target TEXT NOT NULL, catalog TEXT NOT NULL)",
        "CREATE TABLE models (fingerprint TEXT PRIMARY KEY, card TEXT NOT NULL)",
        """CREATE TABLE records (
            fingerprint TEXT NOT NULL,
            target_key TEXT NOT NULL REFERENCES targets (key),
            repeat INTEGER NOT NULL,
            created REAL NOT NULL,
            route TEXT NOT NULL,
            status TEXT NOT NULL,
            reason TEXT NOT NULL,
            log_speedup REAL,
            low REAL,
            high REAL,
            latency_ms REAL,
            default_latency_ms REAL,
            rounds INTEGER,
            spread REAL,
            losses TEXT NOT NULL,
            build_seconds REAL NOT NULL,
            measure_seconds REAL NOT NULL,
            engine_hash TEXT NOT NULL,
            UNIQUE (fingerprint, target_key, route, repeat)
        )""",
    ),
)

SCHEMA_VERSION = len(MIGRATIONS)

_COLUMNS = ("fingerprint", "target_key", "repeat", "created", *forms.OUTCOME_COLUMNS)
_INSERT = (
    f"INTO records ({', '.join(_COLUMNS)}) VALUES ({', '.join(':' + name for name in _COLUMNS)})"
)


class RecordStore:
    """Models, targets and records in one SQLite file.

    Args:
        path: The file; made when it is not there, in a folder that is.

    Raises:
        TableError: Not ours, damaged, of a newer schema, or in a place that cannot be written.
        MachineError: The disk is full or faulty. Every method may raise these two.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with self._faults():
            self._db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                self._prepare()
                found = os.stat(self.path)
            except BaseException:
                self._db.close()
                raise
        self._group = meeting(found.st_dev, found.st_ino, sqlite3.IntegrityError)

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
        """Close the file; nothing is pending."""
        self._db.close()

    def add_target(self, target: Target, catalog: Catalog) -> None:
        """Make a target known, with the catalog its routes are of."""
        self._write([self._target_statement(target, catalog, "REPLACE")])

    def add_model(self, card: ModelCard) -> None:
        """Keep a model's card; a newer card replaces the older."""
        self._write([self._model_statement(card, "REPLACE")])

    def add(self, record: Record) -> None:
        """Keep a record; one of the same model, target, route and repeat is replaced.

        Raises:
            TableError: The record's target was never added.
        """
        with self._faults():
            row = _row(record)
            try:
                self._group.write(row, self._commit)
            except sqlite3.IntegrityError:
                raise TableError(
                    f"a record of target {record.target_key!r} does not belong into record store"
                    f" {str(self.path)!r}, which knows {', '.join(self._keys()) or 'no target'};"
                    " add the target first"
                ) from None

    def _commit(self, rows: Sequence[object]) -> None:
        """Add rows, this store's and others', in one transaction."""
        if len(rows) == 1:
            self._db.execute(f"INSERT OR REPLACE {_INSERT}", rows[0])  # type: ignore[arg-type]
        else:
            self._transact([(f"INSERT OR REPLACE {_INSERT}", row) for row in rows])

    def put_table(self, table: RouteTable) -> None:
        """Add a route table; what is in the store stays, and a second import changes nothing."""
        key = table.target.key
        statements = [self._target_statement(table.target, table.catalog, "IGNORE")]
        statements += [self._model_statement(card, "IGNORE") for card in table.models]
        for fingerprint, routes in table.outcomes.items():
            for outcomes in routes.values():
                for repeat, outcome in enumerate(outcomes):
                    row = _row(Record(fingerprint, key, outcome, repeat))
                    statements.append((f"INSERT OR IGNORE {_INSERT}", row))
        self._write(statements)

    def outcomes(self, fingerprint: str, target_key: str) -> dict[Route, tuple[Outcome, ...]]:
        """What is on record for one model on one target: route -> outcomes, by repeat."""
        with self._faults():
            return self._read(target_key, fingerprint).get(fingerprint, {})

    def models(self) -> tuple[ModelCard, ...]:
        """The card of every model, in the order they came."""
        with self._faults():
            rows = self._db.execute("SELECT card FROM models ORDER BY rowid")
            return tuple(forms.card_from_json(json.loads(card)) for (card,) in rows)

    def model(self, fingerprint: str) -> ModelCard | None:
        """The card of one model; None when it has none."""
        with self._faults():
            row = self._db.execute(
                "SELECT card FROM models WHERE fingerprint = ?", (fingerprint,)
            ).fetchone()
            return None if row is None else forms.card_from_json(json.loads(row[0]))

    def targets(self) -> tuple[Target, ...]:
        """Every target, in the order they came."""
        with self._faults():
            rows = self._db.execute("SELECT target FROM targets ORDER BY rowid")
            return tuple(forms.target_from_json(json.loads(target)) for (target,) in rows)

    def count(self, fingerprint: str | None = None, target_key: str | None = None) -> int:
        """Number of records, of one model or on one target when named."""
        with self._faults():
            (found,) = self._db.execute(
                "SELECT count(*) FROM records WHERE fingerprint = ifnull(?, fingerprint)"
                " AND target_key = ifnull(?, target_key)",
                (fingerprint, target_key),
            ).fetchone()
        return int(found)

    def other_targets(self, target: Target) -> list[Target]:
        """Targets of the same backend under which there are records, `target` left out."""
        return [
            other
            for other in self.targets()
            if other.backend == target.backend
            and other.key != target.key
            and self.count(target_key=other.key)
        ]

    def require_target(self, target: Target) -> None:
        """Refuse a store that holds this backend's records of another target.

        Raises:
            TableError: It does; the message names the first difference.
        """
        for other in self.other_targets(target):
            raise TableError(
                f"record store {str(self.path)!r} holds records of another target:"
                f" {target.difference(other)}; use another store for this target"
            )

    def table(
        self, target_key: str | None = None, manifest: Mapping[str, object] | None = None
    ) -> RouteTable:
        """The route table of one target: every model with a card and a record.

        A card's default latency is taken from the target's own default route, because one model
        may have been measured on several targets.

        Args:
            target_key: `Target.key`; may be left out when only one target has records.
            manifest: What the table says of its making.

        Raises:
            TableError: No such target, or several and none was named; the message lists them.
        """
        target = self._choose(target_key)
        with self._faults():
            (catalog,) = self._db.execute(
                "SELECT catalog FROM targets WHERE key = ?", (target.key,)
            ).fetchone()
            outcomes = self._read(target.key)
            cards = [
                _with_latency(card, outcomes[card.fingerprint])
                for card in self.models()
                if card.fingerprint in outcomes
            ]
            return RouteTable(
                forms.catalog_from_json(json.loads(catalog)),
                target,
                tuple(cards),
                {card.fingerprint: outcomes[card.fingerprint] for card in cards},
                dict(manifest or {}),
            )

    def _choose(self, target_key: str | None) -> Target:
        targets = self.targets()
        if target_key is None:
            fits = [t for t in targets if self.count(target_key=t.key)] or list(targets)
        else:
            fits = [t for t in targets if t.key == target_key]
        if len(fits) == 1:
            return fits[0]
        listed = "; ".join(f"{t.key} ({t.backend} on {t.device})" for t in targets)
        asked = "no target was named" if target_key is None else f"{target_key!r} is not among them"
        raise TableError(
            f"record store {str(self.path)!r} holds {len(targets)} targets and {asked}; choose one"
            f" of: {listed or 'none yet, collect first'}"
        )

    def _read(
        self, target_key: str, fingerprint: str | None = None
    ) -> dict[str, dict[Route, tuple[Outcome, ...]]]:
        cursor = self._db.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM records WHERE target_key = ?"
            " AND fingerprint = ifnull(?, fingerprint) ORDER BY repeat, rowid",
            (target_key, fingerprint),
        )
        routes: dict[str, Route] = {}
        found: dict[str, dict[Route, tuple[Outcome, ...]]] = {}
        for values in cursor:
            row = dict(zip(_COLUMNS, values, strict=True))
            text = row["route"]
            route = routes[text] if text in routes else routes.setdefault(text, Route.read(text))
            row["losses"] = forms.losses_from_json(row["losses"])
            if row["rounds"] is not None:
                # SQLite keeps a NaN as NULL.
                for name in forms.MEASUREMENT_COLUMNS:
                    row[name] = float("nan") if row[name] is None else row[name]
            mine = found.setdefault(row["fingerprint"], {})
            mine[route] = (*mine.get(route, ()), forms.unflatten(row, route))
        return found

    def _keys(self) -> list[str]:
        return [key for (key,) in self._db.execute("SELECT key FROM targets ORDER BY rowid")]

    @staticmethod
    def _target_statement(target: Target, catalog: Catalog, clash: str) -> tuple[str, Any]:
        known = json.dumps(forms.target_json(target))
        knobs = json.dumps(forms.catalog_json(catalog))
        # An update in place: replacing the row would take it from under its records.
        action = "UPDATE SET catalog = excluded.catalog" if clash == "REPLACE" else "NOTHING"
        statement = f"INSERT INTO targets VALUES (?, ?, ?) ON CONFLICT (key) DO {action}"
        return statement, (target.key, known, knobs)

    @staticmethod
    def _model_statement(card: ModelCard, clash: str) -> tuple[str, Any]:
        action = "UPDATE SET card = excluded.card" if clash == "REPLACE" else "NOTHING"
        statement = f"INSERT INTO models VALUES (?, ?) ON CONFLICT (fingerprint) DO {action}"
        return statement, (card.fingerprint, json.dumps(forms.card_json(card)))

    def _write(self, statements: Iterable[tuple[str, Any]]) -> None:
        """Run the statements as one transaction."""
        with self._faults():
            self._transact(statements)

    def _transact(self, statements: Iterable[tuple[str, Any]]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in statements:
                self._db.execute(statement, values)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA foreign_keys = ON")
        if self._version() == SCHEMA_VERSION and self._pragma("journal_mode") == "wal":
            return
        self._take_up_log()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            # Another process may have been first: look again now that the file is ours.
            for migration in MIGRATIONS[self._version() :]:
                for statement in migration:
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _take_up_log(self) -> None:
        """Switch to a write-ahead log; SQLite does not wait where two do so at once."""
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.005)

    def _version(self) -> int:
        """The file's schema version; 0 for a new file."""
        owner, version = self._pragma("application_id"), self._pragma("user_version")
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master")}
        # The first stores carry our tables but not our mark.
        ours = owner == APPLICATION_ID or {"records", "models", "targets"} <= tables
        if not ours and (owner or version or tables):
            raise TableError(
                f"{str(self.path)!r} is a database of another program, not a record store; name"
                " another file"
            )
        if version > SCHEMA_VERSION:
            raise TableError(
                f"record store {str(self.path)!r} has schema {version}, this RoutePilot reads up to"
                f" {SCHEMA_VERSION}; use a newer RoutePilot or another file"
            )
        return int(version)

    def _pragma(self, name: str) -> Any:
        return self._db.execute(f"PRAGMA {name}").fetchone()[0]

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn what SQLite says into one line."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a mistake in our code, not in the file
        except sqlite3.Error as error:
            raise _fault(self.path, str(error)) from None
        except (ValueError, KeyError, TypeError, RouteError) as error:
            raise _fault(self.path, f"malformed: {error}") from None


def _fault(path: Path, text: str) -> MachineError | TableError:
    store, text = f"record store {str(path)!r}", " ".join(text.split())
    if "full" in text or "disk I/O" in text:
        return MachineError(
            f"{store} cannot be written ({text}); free space and repeat the command"
        )
    if "locked" in text or "busy" in text:
        return TableError(
            f"{store} is held by another process for over {BUSY_SECONDS:.0f} s ({text}); end that"
            " process or name another store"
        )
    if "unable to open" in text or "readonly" in text:
        return TableError(
            f"{store} cannot be opened for writing ({text}); name a file in a folder that exists"
            " and can be written"
        )
    return TableError(f"{store} is damaged or not one ({text}); move it away or name another file")


def _row(record: Record) -> dict[str, Any]:
    flat = forms.flatten(record.outcome)
    return {
        **flat,
        "losses": forms.losses_json(flat["losses"]),
        "fingerprint": record.fingerprint,
        "target_key": record.target_key,
        "repeat": record.repeat,
        "created": float(record.created),
    }


def _with_latency(card: ModelCard, outcomes: Mapping[Route, tuple[Outcome, ...]]) -> ModelCard:
    timed = next((o.measurement for o in outcomes.get(DEFAULT_ROUTE, ()) if o.measurement), None)
    return card if timed is None else replace(card, default_latency_ms=timed.latency_ms)
