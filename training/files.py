"""Files people get: written whole or not at all, in folders checked before any work starts."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import TracebackType

from routepilot.env.drafts import whole_file
from routepilot.env.errors import InputError, RoutePilotError


class Format(str, Enum):
    """Files that records come from and go to."""

    AUTO = "auto"
    TABLE = "table"  # Parquet
    TRTEXEC = "trtexec"  # JSON lines


def ensure_folder(folder: Path) -> Path:
    """Make the folder and prove that it can be written, before hours are spent.

    Raises:
        InputError: It cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe"):
            pass
    except OSError as error:
        raise InputError(
            f"output folder {str(folder)!r} cannot be written ({error.strerror or error});"
            " name another with -o"
        ) from None
    return folder


class Output:
    """An output folder that goes again if nothing came of it: a refused command leaves nothing.

    As a context manager it makes the folder; a RoutePilotError that leaves the block before `keep`
    removes what this made, unless somebody put something of his own beside it.

    Args:
        folder: The folder.

    Raises:
        InputError: It cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # `Path.exists` raises for a name too long and for a folder that nobody may see.
        missing = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
        self._made, self._kept = missing, not missing
        ensure_folder(folder)

    def keep(self) -> None:
        """Something came of it: the folder stays whatever happens."""
        self._kept = True

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._kept or not isinstance(error, RoutePilotError):
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # a parent that is not empty stays
            for parent in self._made[1:]:
                parent.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with whole_file(path) as draft:
        # A name of bytes that are no UTF-8 comes as surrogates, which UTF-8 cannot hold.
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, data: object) -> None:
    """Write a JSON file atomically: strict JSON, sorted as given."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")
