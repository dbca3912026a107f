"""Files people get: written whole or not at all, in folders checked before any work starts."""

from __future__ import annotations

import json
import os
import tempfile
from enum import Enum
from pathlib import Path

from routepilot.env.errors import InputError


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


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, data: object) -> None:
    """Write a JSON file atomically: strict JSON, sorted as given."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")
