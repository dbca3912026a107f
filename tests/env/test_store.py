"""The store: nothing lost, nothing mixed, nothing read that is not ours."""

from __future__ import annotations

import multiprocessing
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st

from routepilot.env.errors import TableError
from routepilot.env.forms import losses_from_json, losses_json
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.records import Record
from routepilot.env.routes import Route
from routepilot.env.store import APPLICATION_ID, RecordStore

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64)


@given(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False)))
def test_losses_round_trip(losses: dict[str, float]) -> None:
    assert losses_from_json(losses_json(losses)) == losses


@given(st.lists(FLOATS, min_size=7, max_size=7), st.text(max_size=40), st.sampled_from(Status))
def test_outcomes_round_trip(
    tmp_path_factory: pytest.TempPathFactory, figures: list[float], reason: str, status: Status
) -> None:
    route = Route((("-engine", "b"),))
    measured = Measurement(*figures[:5], rounds=7, spread=figures[5])
    kept = Outcome(route, status, reason, measured, {"rel_l2": figures[6]}, 1.5, 2.5, "hash")
    path = tmp_path_factory.mktemp("store") / "s.sqlite"
    key = synthetic.TARGET.key
    with RecordStore(path) as store:
        store.add_target(synthetic.TARGET, synthetic.CATALOG)
        store.add(Record("f", key, kept))
        store.add(Record("f", key, replace(kept, measurement=None), repeat=1))
    with RecordStore(path) as store:
        assert store.outcomes("f", key)[route] == (kept, replace(kept, measurement=None))
        assert store.outcomes("f", "other") == {}


def test_table_in_and_out(tmp_path: Path) -> None:
    table = synthetic.table()
    with RecordStore(tmp_path / "s.sqlite") as store:
        store.put_table(table)
        store.put_table(table)
        again = store.table(manifest=table.manifest)
    assert set(again.models) == set(table.models)
    assert (again.target, again.catalog) == (table.target, table.catalog)
    assert {f: dict(r) for f, r in again.outcomes.items()} == table.outcomes


def test_two_targets_are_not_mixed(tmp_path: Path) -> None:
    table = synthetic.table(2)
    other = replace(table, target=replace(table.target, device="another"))
    with RecordStore(tmp_path / "s.sqlite") as store:
        store.put_table(table)
        store.put_table(other)
        with pytest.raises(TableError, match="2 targets"):
            store.table()
        assert store.table(other.target.key).target.device == "another"


def test_a_record_of_an_unknown_target_is_refused(tmp_path: Path) -> None:
    with (
        RecordStore(tmp_path / "s.sqlite") as store,
        pytest.raises(TableError, match="add the target first"),
    ):
        store.add(Record("f", "t", Outcome(Route(), Status.OK)))


def _write(path: Path, number: int) -> None:
    with RecordStore(path) as store:
        store.add_target(synthetic.TARGET, synthetic.CATALOG)
        for i in range(40):
            route = Route((("-n", f"{number}-{i}"),))
            store.add(Record("f", synthetic.TARGET.key, Outcome(route, Status.OK)))


def test_several_processes_share_a_store(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write, args=(path, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    with RecordStore(path) as store:
        assert store.count() == 120


def test_files_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    noise = tmp_path / "noise.sqlite"
    noise.write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    with pytest.raises(TableError, match=r"noise\.sqlite"):
        RecordStore(noise)
    newer = tmp_path / "newer.sqlite"
    with closing(sqlite3.connect(newer)) as base, base:
        base.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        base.execute("PRAGMA user_version = 99")
    with pytest.raises(TableError, match="99"):
        RecordStore(newer)
    with pytest.raises(TableError, match=r"folder\.sqlite"):
        RecordStore(tmp_path / "no" / "folder.sqlite")


def test_a_new_store_is_opened_while_another_process_sets_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite refuses one of two that switch to a write-ahead log at once, without waiting."""
    path = tmp_path / "s.sqlite"
    waits = []
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # where a process stands that was a moment earlier

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                other.execute("ROLLBACK")

        monkeypatch.setattr("routepilot.env.store.time.sleep", wait)
        RecordStore(path).close()
    assert len(waits) == 2
