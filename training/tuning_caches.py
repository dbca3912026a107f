"""trtexec's tuning caches into record stores and back: which file is what, which model it is of.

Owns the step between `env/trtexec.py`, which knows the file, and `env/store.py`, which keeps
records. Measures nothing.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path

from routepilot.env.errors import InputError, TableError
from routepilot.env.features import model_features
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome
from routepilot.env.records import ModelCard, RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.store import RecordStore
from routepilot.env.trtexec import (
    cache_catalog,
    cache_outcomes,
    cache_target,
    read_tuning_cache,
    write_tuning_cache,
)
from routepilot.training.files import Format

#: How a Parquet file begins.
PARQUET_MAGIC = b"PAR1"


def format_of_file(path: Path, wanted: Format) -> Format:
    """What a file to import holds: as asked, else by its first bytes.

    A name that is no file is a table, since tables have released names.
    """
    if wanted is not Format.AUTO or not path.is_file():
        return Format.TABLE if wanted is Format.AUTO else wanted
    with path.open("rb") as file:
        head = file.read(64)
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()
    text = head[:1] == b"{" and not head.startswith(PARQUET_MAGIC)
    return Format.TRTEXEC if text else Format.TABLE


def format_of_name(path: Path, wanted: Format) -> Format:
    """What to write: as asked, else by the name; trtexec calls its cache `.json`."""
    if wanted is not Format.AUTO:
        return wanted
    return Format.TRTEXEC if path.suffix in (".json", ".jsonl") else Format.TABLE


@dataclass(frozen=True)
class Imported:
    """What an import brought.

    Attributes:
        rows: Rows of the cache.
        feasible: Rows that are good and timed against the default route.
        notes: What was odd about the file.
    """

    rows: int
    feasible: int
    notes: tuple[str, ...]


def onnx_of_cache(path: Path) -> str:
    """The model file that a cache names, if it is there.

    Raises:
        InputError: The cache names none, or it is not there.
        TableError: The file is no cache.
    """
    onnx = read_tuning_cache(path).onnx
    if not onnx or not Path(onnx).is_file():
        said = f"names {onnx!r}, which is not there" if onnx else "names no model"
        raise InputError(f"the tuning cache {said}; give the model it was made with by --model")
    return onnx


def import_cache(path: Path, store: RecordStore, model: Model, device: str) -> Imported:
    """Put a tuning cache of trtexec into a record store; a second import changes nothing.

    Args:
        path: The cache.
        store: Where to; what is there stays.
        model: The model it was made with.
        device: GPU it was made on, which a cache does not say.

    Raises:
        TableError: The file is damaged or names knobs that it does not list.
    """
    cache = read_tuning_cache(path)
    catalog = cache_catalog(cache)
    found = cache_outcomes(cache, catalog)
    by_route: dict[Route, list[Outcome]] = {}
    for outcome in found:
        by_route.setdefault(outcome.route, []).append(outcome)
    measured = next(
        (o.measurement for o in found if o.route == DEFAULT_ROUTE and o.measurement), None
    )
    card = ModelCard(
        model.fingerprint,
        model.name,
        "unknown",
        True,
        model_features(model),
        measured.latency_ms if measured else 0.0,
    )
    outcomes = {route: tuple(same) for route, same in by_route.items()}
    target = cache_target(cache, catalog, device)
    store.put_table(RouteTable(catalog, target, (card,), {model.fingerprint: outcomes}))
    return Imported(len(found), sum(o.is_feasible for o in found), cache.notes)


def export_cache(
    table: RouteTable, path: Path, *, model: str | None, onnx: str, algorithm: str, threshold: float
) -> tuple[int, int]:
    """Write the records of one model as a tuning cache.

    Args:
        table: The records of one target.
        path: File to write.
        model: Name or fingerprint; may be left out where there is one model.
        onnx: Model file for the header.
        algorithm: Accuracy algorithm whose losses are written.
        threshold: Accuracy threshold for the header.

    Returns:
        Rows written, and outcomes left out because a build route cannot say them.

    Raises:
        TableError: No such model, several and none was named, or the target has no build routes.
        InputError: There is no such algorithm.
    """
    if table.target.backend not in ("tensorrt", "tensorrt_rtx"):
        raise TableError(
            f"a tuning cache of trtexec holds TensorRT's build routes, and these records are of"
            f" the backend {table.target.backend}; export them with --format table"
        )
    names = ", ".join(card.name for card in table.models)
    card = table.card(model) if model else table.models[0] if len(table.models) == 1 else None
    if card is None:
        given = f"there is no model {model!r}" if model else "a tuning cache is of one model"
        raise TableError(f"{given}; give one with --model: {names or 'the records hold none'}")
    outcomes = [o for same in table.outcomes[card.fingerprint].values() for o in same[:1]]
    # trtexec takes the row of the default as the baseline, and it runs first.
    outcomes.sort(key=lambda outcome: not outcome.route.is_default)
    left_out = write_tuning_cache(
        path, table.catalog, outcomes, onnx=onnx, algorithm=algorithm, threshold=threshold
    )
    return len(outcomes) - left_out, left_out
