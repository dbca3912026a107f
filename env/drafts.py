"""Drafts: files and folders written aside, moved into place whole, and swept up after a kill.

Owns how anything appears on disk: under a name of its own first, with the modes that the umask
asks for, then at its place by one rename. A process that is killed leaves its draft; the next one
that writes into the same folder removes it. Knows nothing of what is written.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_NAME = re.compile(r"\.draft-(\d+)-[0-9a-f]{16}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which gets it when the block ends well, or nothing.

    Raises:
        OSError: The folder cannot be written, or the disk is full; `path` is as it was.
    """
    draft = place_for_draft(path.parent)
    handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield draft
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


@contextmanager
def draft_folder(parent: Path) -> Iterator[Path]:
    """An empty folder inside `parent`, removed at the end unless it was renamed.

    Raises:
        OSError: The parent cannot be written.
    """
    draft = place_for_draft(parent)
    draft.mkdir()
    handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield draft
    finally:
        os.close(handle)
        shutil.rmtree(draft, ignore_errors=True)


def sweep(folder: Path) -> int:
    """Remove drafts whose makers are dead; returns how many went.

    A draft is its maker's while the process of that number lives or holds the lock on it: the
    lock also tells for makers in another container, the number while the lock is not yet taken.
    """
    gone = 0
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.name.startswith(".draft-")]
    except OSError:
        return 0
    for name in names:
        found = _NAME.fullmatch(name)
        if found and not psutil.pid_exists(int(found[1])) and _is_free(folder / name):
            shutil.rmtree(folder / name, ignore_errors=True)
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)
            gone += 1
    return gone


def place_for_draft(folder: Path) -> Path:
    """A new name for a draft of this process, after what dead processes left is swept up."""
    sweep(folder)
    return folder / f".draft-{os.getpid()}-{secrets.token_hex(8)}"


def _is_free(draft: Path) -> bool:
    try:
        handle = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
