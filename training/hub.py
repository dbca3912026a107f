"""Policies as folders that others can use: pushed, pulled and checked, here or on a model hub.

Owns the folder: which files are in it, their checksums, what a reader refuses. Nothing in it is
unpickled or executed; what its manifest does not name stays where it is. The hub is reached through
the package `huggingface_hub` (extra `hub`); folders need nothing.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from routepilot import __version__
from routepilot.agents.policy import Card, file_hash, find_card_tables, load_policy, read_card
from routepilot.env.drafts import draft_folder
from routepilot.env.errors import InputError, MachineError, MissingExtraError, PolicyError
from routepilot.env.tables import load_table
from routepilot.training.defaults import (
    find_policy,
    policies_folder,
    pulled_policies,
    released_policies,
)
from routepilot.training.files import ensure_folder, write_json, write_text
from routepilot.training.model_card import readme

#: Version of the folder's format.
FORMAT = 1

#: The folder's own file: format, versions and checksums.
MANIFEST = "manifest.json"

#: How a place on the hub is written.
HUB = "hf://"

_NAME = re.compile(r"[^\W_][\w.+-]*")


def push(name: str, target: str, *, private: bool = False) -> str:
    """Write a policy as a folder, here or on the hub.

    Args:
        name: Policy by name or path.
        target: A folder, which must be new, empty or such a folder; or `hf://user/repo`.
        private: On the hub: make a new repository private.

    Returns:
        Where it is.

    Raises:
        PolicyError: The policy cannot be used.
        InputError: The target cannot be written.
    """
    path = find_policy(name)
    loaded = load_policy(path)  # whole, sound and of this version, or refused
    if not target.startswith(HUB):
        place = Path(target)
        _require_free(place)
        ensure_folder(place.parent)
        with draft_folder(place.parent) as draft:
            _fill(draft, path, loaded.card)
            _put(draft, place)
        return str(place)
    repository, revision = hub_place(target)
    hub = _import_hub()
    with tempfile.TemporaryDirectory() as folder:
        _fill(Path(folder), path, loaded.card)
        with _hub_faults(target):
            api = hub.HfApi()
            api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                revision=revision,
                commit_message=f"RoutePilot policy {loaded.card.name}",
            )
    return target


def pull(source: str, *, name: str | None = None, out: Path | None = None) -> Path:
    """Fetch a policy's folder, check it, and put it where `--policy NAME` finds it.

    Args:
        source: A folder that `push` wrote, or `hf://user/repo`, `hf://user/repo@revision`.
        name: Name to keep it under; its card's when None.
        out: Folder to put it in instead; new, empty, or such a folder.

    Returns:
        The folder; give it or the name to `--policy`.

    Raises:
        PolicyError: It is not such a folder, of another version, or damaged; nothing is kept.
        InputError: The name is taken by a released policy, or is none.
    """
    if not source.startswith(HUB):
        return _take(Path(source), source, name, out)
    repository, revision = hub_place(source)
    hub = _import_hub()
    with tempfile.TemporaryDirectory() as folder:
        with _hub_faults(source):
            hub.snapshot_download(
                repository,
                revision=revision,
                local_dir=folder,
                allow_patterns=["README.md", "*.json", "*.safetensors", "*.parquet"],
            )
        return _take(Path(folder), source, name, out)


def describe(name: str) -> dict[str, Any]:
    """Card, figures and provenance of a policy, as plain data.

    Raises:
        PolicyError: There is none, or it cannot be used.
    """
    path = find_policy(name)
    loaded = load_policy(path)
    target = loaded.replay.table.target
    return {
        **asdict(loaded.card),
        "file": path.name,
        "bytes": path.stat().st_size,
        "origin": _origin(path),
        "measured_on": {"backend": target.backend, "device": target.device},
        "measured_with": dict(target.versions),
    }


def listing() -> list[dict[str, Any]]:
    """Every policy that has a name here: released ones, then pulled ones."""
    rows = []
    for origin, names in (("released", released_policies()), ("pulled", pulled_policies())):
        for name in names:
            row: dict[str, Any] = {"name": name, "origin": origin}
            try:
                card = read_card(find_policy(name))
            except PolicyError as error:
                rows.append({**row, "note": str(error)})
                continue
            shares = card.scores.get("gain_share", {})
            row |= {
                "table": ", ".join(card.tables),
                "models": len(card.models),
                "gain_share": shares,
            }
            rows.append({**row, "held_out": list(card.held_out), "note": ""})
    return rows


def hub_place(text: str) -> tuple[str, str | None]:
    """Repository and revision of `hf://user/repo@revision`.

    Raises:
        InputError: It is not of that form.
    """
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", text)
    if found is None:
        raise InputError(f"{text!r} is no place on the hub; give hf://user/repo")
    return found[1], found[2]


def _fill(folder: Path, weights: Path, card: Card) -> None:
    """Write everything into an empty folder."""
    tables = find_card_tables(weights, card)
    shutil.copyfile(weights, folder / "policy.safetensors")
    shutil.copyfile(weights.with_suffix(".json"), folder / "policy.json")
    for table in tables:
        shutil.copyfile(table, folder / table.name)
    target = load_table(tables[0]).target
    write_text(folder / "README.md", readme(card, target.device, target.backend))
    files = {path.name: file_hash(path) for path in sorted(folder.iterdir()) if path.is_file()}
    write_json(
        folder / MANIFEST,
        {"format": FORMAT, "routepilot": __version__, "name": card.name, "files": files},
    )


def _take(folder: Path, source: str, name: str | None, out: Path | None) -> Path:
    """Check a folder and copy what its manifest names; a policy that cannot be used is not kept."""
    files = _check(folder, source)
    name = name or str(_read_manifest(folder, source).get("name", ""))
    if out is None:
        if not _NAME.fullmatch(name):
            raise InputError(f"policy name {name!r} is not allowed; give one with --name")
        if name in released_policies():
            raise InputError(
                f"a released policy is named {name!r} already; give another with --name, or -o"
            )
        out = policies_folder() / name
    _require_free(out)
    ensure_folder(out.parent)
    with draft_folder(out.parent) as draft:
        for file in (MANIFEST, *files):
            shutil.copyfile(folder / file, draft / file)
        _check(draft, source)  # what was copied, not what lay there a moment ago
        for table in load_policy(draft / "policy.safetensors").card.tables:
            if table not in files:  # a released one of that name would do, until it changes
                raise PolicyError(f"{source!r} lacks its route table {table!r}; fetch it again")
        _put(draft, out)
    return out


def _check(folder: Path, source: str) -> Mapping[str, str]:
    """The files of a folder with their checksums, all of which hold.

    Raises:
        PolicyError: One does not, is missing, or is not of the kinds that belong there.
    """
    files: Mapping[str, str] = _read_manifest(folder, source)["files"]
    wanted = {"README.md", "policy.json", "policy.safetensors"}
    strange = [
        file
        for file in files
        if file != Path(file).name or (file not in wanted and not file.endswith(".parquet"))
    ]
    if strange or not wanted <= set(files):
        what = f"holds {strange[0]!r}" if strange else f"lacks {sorted(wanted - set(files))[0]!r}"
        raise PolicyError(f"{source!r} {what}, so it is no policy folder; fetch it again")
    for file, digest in files.items():
        path = folder / file
        if path.is_symlink() or not path.is_file() or file_hash(path) != digest:
            raise PolicyError(
                f"{file!r} of {source!r} is not the one its manifest describes (damaged, cut short"
                " or exchanged); fetch it again"
            )
    return files


def _read_manifest(folder: Path, source: str) -> dict[str, Any]:
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, files = data["format"], dict(data["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        words = " ".join(str(error).split())[:120]
        raise PolicyError(
            f"{source!r} is no policy folder ({words}); give one that `routepilot policy push`"
            " wrote"
        ) from None
    if version != FORMAT:
        raise PolicyError(
            f"{source!r} has format {version} and this routepilot {__version__} reads {FORMAT}; it"
            f" was written by routepilot {data.get('routepilot', 'unknown')}"
        )
    return {**data, "files": files}


def _require_free(place: Path) -> None:
    """Refuse to replace anything but a policy folder."""
    if place.is_dir() and any(place.iterdir()) and not (place / MANIFEST).is_file():
        raise InputError(f"{str(place)!r} holds something else; name a new folder")
    if place.exists() and not place.is_dir():
        raise InputError(f"{str(place)!r} is a file; name a folder")


def _put(draft: Path, place: Path) -> None:
    """Put a folder in place of what is there."""
    old = place.with_name(f".{place.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    draft.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _origin(path: Path) -> str:
    if path.is_relative_to(policies_folder()):
        return "pulled"
    return "released" if path.stem in released_policies() else "file"


def _import_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtraError(
            f"the hub needs the package huggingface_hub ({error}); pip install 'routepilot[hub]',"
            " or use a folder"
        ) from None
    return huggingface_hub


@contextmanager
def _hub_faults(place: str) -> Iterator[None]:
    """Whatever the hub's client raises, in one line."""
    try:
        yield
    except Exception as error:  # of its transport, of its server, of its own checks
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise MachineError(f"the hub did not serve {place!r}: {words}") from None
