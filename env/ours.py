"""What this installation made itself: files that are code, and so are loaded only if they are ours.

Owns the notes, empty files named by the SHA-256 of what they stand for, in the user's data folder.
Whoever can write there can run code as the user anyway. Knows nothing of what the files hold.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from routepilot.env.drafts import whole_file
from routepilot.env.errors import MachineError

#: Kinds of files, one folder each.
PLANS, PACKAGES, PROGRAMS = "plans", "packages", "programs"


def digest_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: It cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _folder(kind: str) -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("routepilot")) / kind


def remember(kind: str, digest: str) -> None:
    """Note that this installation made a file with this hash.

    Raises:
        MachineError: The note cannot be written.
    """
    folder = _folder(kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / digest):
            pass  # the name says it all
    except OSError as error:
        raise MachineError(f"{folder} cannot be written: {error}") from None


def is_ours(kind: str, digest: str) -> bool:
    """Whether this installation made a file with this hash."""
    return (_folder(kind) / digest).is_file()


def forget(kind: str, digest: str) -> None:
    """Drop the note of a file that is used up."""
    try:
        (_folder(kind) / digest).unlink(missing_ok=True)
    except OSError:
        pass  # a note too many does no harm
