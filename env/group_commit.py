"""Group commit: writers of one process whose records reach the disk in one transaction.

Owns who writes while others wait. A commit waits for the disk, about as long for one record as for
a hundred; without this, writers of one store would wait for it one after the other, and SQLite
would have each sleep and look again until it finds the file free (docs/scale.md has the figures).
Knows no database: the one whose turn it is brings what was handed in through its own connection.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_Row = TypeVar("_Row")

#: Writes rows in one transaction, all or none.
Commit = Callable[[Sequence[_Row]], None]


class _Entry(Generic[_Row]):
    """A row that somebody waits for.

    Attributes:
        row: The row.
        told: Set when it is settled, or when its writer is to lead.
        settled: True when the row was committed or refused.
        error: Why it was refused.
    """

    def __init__(self, row: _Row) -> None:
        self.row = row
        self.told = threading.Event()
        self.settled = False
        self.error: Exception | None = None


class GroupCommit(Generic[_Row]):
    """Where the writers of one file meet.

    One writer leads: it commits all rows that wait, then hands the lead to one whose row came
    meanwhile. So nobody waits longer than the commit under way and the next.

    Args:
        fault_of_a_row: What a commit raises when a row is at fault and not the file: then each row
            is written alone, so that one takes no other with it.
    """

    def __init__(self, fault_of_a_row: type[Exception]) -> None:
        self._fault = fault_of_a_row
        self._lock = threading.Lock()
        self._led = False
        self._waiting: list[_Entry[_Row]] = []

    def write(self, row: _Row, commit: Commit[_Row]) -> None:
        """Have a row on the disk: returns when it is there.

        Args:
            row: The row.
            commit: How this thread writes rows; may be called with those of others.

        Raises:
            Exception: What a commit of this row raised.
        """
        mine = _Entry(row)
        with self._lock:
            self._waiting.append(mine)
            lead, self._led = not self._led, True
        if not lead:
            try:
                mine.told.wait()
            except BaseException:
                self._leave(mine)
                raise
        if not mine.settled:
            self._lead(commit)
        if mine.error is not None:
            raise mine.error

    def _lead(self, commit: Commit[_Row]) -> None:
        """Write all that waits, then hand over."""
        with self._lock:
            batch, self._waiting = self._waiting, []
        try:
            error = _attempt(batch, commit)
            if isinstance(error, self._fault) and len(batch) > 1:
                for entry in batch:
                    _settle([entry], _attempt([entry], commit))
            else:
                _settle(batch, error)
        finally:
            with self._lock:
                # After Ctrl-C something may be left; its own writer, which came first, is gone.
                left = [entry for entry in batch[1:] if not entry.settled]
                self._waiting = left + self._waiting
                self._hand_over()

    def _leave(self, entry: _Entry[_Row]) -> None:
        """Wait no longer for a row, and do not keep the others from theirs."""
        with self._lock:
            if entry in self._waiting:
                self._waiting.remove(entry)
                if entry.told.is_set():  # the lead is this writer's
                    self._hand_over()

    def _hand_over(self) -> None:
        self._led = bool(self._waiting)
        if self._led:
            self._waiting[0].told.set()


def _attempt(batch: Sequence[_Entry[_Row]], commit: Commit[_Row]) -> Exception | None:
    try:
        commit([entry.row for entry in batch])
    except Exception as error:
        return error
    return None


def _settle(batch: Sequence[_Entry[_Row]], error: Exception | None) -> None:
    for entry in batch:
        entry.error, entry.settled = error, True
        entry.told.set()


_meetings: weakref.WeakValueDictionary[tuple[int, int], GroupCommit[object]] = (
    weakref.WeakValueDictionary()
)
_meetings_lock = threading.Lock()


def meeting(device: int, inode: int, fault_of_a_row: type[Exception]) -> GroupCommit[object]:
    """Where the writers of a file meet in this process, by the file's device and inode."""
    with _meetings_lock:
        found = _meetings.get((device, inode))
        if found is None:
            found = _meetings[device, inode] = GroupCommit(fault_of_a_row)
        return found
