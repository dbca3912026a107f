"""Group commit: what returned is on the disk, fewer waits for it than rows, faults stay apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import synthetic

from routepilot.env import group_commit
from routepilot.env.errors import TableError
from routepilot.env.group_commit import GroupCommit, _Entry
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import Record
from routepilot.env.routes import DEFAULT_ROUTE
from routepilot.env.store import RecordStore


class Disk:
    """A disk that takes a while, knows who is at it, and chokes on some rows."""

    def __init__(self, bad: frozenset[int] = frozenset()) -> None:
        self.rows: list[int] = []
        self.commits = 0
        self._bad, self._busy = bad, False

    def commit(self, rows: Sequence[int]) -> None:
        assert not self._busy, "two at once"
        self._busy = True
        time.sleep(0.005)
        self._busy = False
        self.commits += 1
        if self._bad & set(rows):
            raise ValueError("bad row")
        self.rows += rows


def in_threads(count: int, work) -> None:  # type: ignore[no-untyped-def]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_rows_that_came_meanwhile_go_together() -> None:
    disk, group = Disk(), GroupCommit[int](ValueError)

    def write(writer: int) -> None:
        for i in range(10):
            group.write(100 * writer + i, disk.commit)
            assert 100 * writer + i in disk.rows

    in_threads(20, write)
    assert sorted(disk.rows) == sorted(100 * w + i for w in range(20) for i in range(10))
    assert disk.commits < 60


def test_a_row_at_fault_takes_no_other_with_it() -> None:
    disk, group = Disk(frozenset({7, 13})), GroupCommit[int](ValueError)
    refused: list[int] = []

    def write(row: int) -> None:
        try:
            group.write(row, disk.commit)
        except ValueError:
            refused.append(row)

    in_threads(20, write)
    assert sorted(refused) == [7, 13]
    assert sorted(disk.rows) == [i for i in range(20) if i not in (7, 13)]


def test_an_interrupted_writer_leaves_the_rest_to_the_next() -> None:
    disk, group = Disk(), GroupCommit[int](ValueError)
    begun = threading.Event()

    def interrupted(rows: Sequence[int]) -> None:
        begun.set()
        time.sleep(0.1)
        raise KeyboardInterrupt

    def first() -> None:
        with pytest.raises(KeyboardInterrupt):
            group.write(0, interrupted)

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    in_threads(4, lambda i: group.write(i + 1, disk.commit))
    thread.join()
    assert sorted(disk.rows) == [1, 2, 3, 4]  # the interrupted one never returned


def test_a_writer_that_gives_up_waiting_keeps_nobody_waiting() -> None:
    disk, group = Disk(), GroupCommit[int](ValueError)
    gone = _Entry(1)

    def raises() -> None:
        group._hand_over()  # the lead comes to it at the moment it gives up
        raise KeyboardInterrupt

    gone.told.wait = raises  # type: ignore[assignment,method-assign]
    group._led = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_commit, "_Entry", lambda row: gone)
        with pytest.raises(KeyboardInterrupt):
            group.write(1, disk.commit)
    in_threads(3, lambda i: group.write(i + 2, disk.commit))
    assert sorted(disk.rows) == [2, 3, 4]


def test_threads_share_a_store_and_a_stranger_is_refused_alone(tmp_path: Path) -> None:
    table = synthetic.table()
    path = tmp_path / "records.sqlite"
    with RecordStore(path) as store:
        store.add_target(table.target, table.catalog)
    refused: list[int] = []

    def write(writer: int) -> None:
        key = table.target.key if writer else "nobody"
        with RecordStore(path) as store:
            for i in range(5):
                outcome = Outcome(DEFAULT_ROUTE, Status.CRASHED)
                try:
                    store.add(Record(f"model{writer}", key, outcome, repeat=i))
                except TableError as error:
                    assert "knows " + table.target.key in str(error)
                    refused.append(i)

    in_threads(12, write)
    assert refused == [0, 1, 2, 3, 4]
    with RecordStore(path) as store:
        assert store.count() == 11 * 5
