"""Files people get: written whole or not at all, in folders checked before any work starts."""

from __future__ import annotations

import json
import tempfile
from enum import Enum
from pathlib import Path

from routepilot.env.drafts import whole_file
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
    with whole_file(path) as draft:
        # A name of bytes that are no UTF-8 comes as surrogates, which UTF-8 cannot hold.
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, data: object) -> None:
    """Write a JSON file atomically: strict JSON, sorted as given."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")
