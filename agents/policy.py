"""Policies on disk and at work: a small network that scores candidate rows, without torch.

Owns the network's arithmetic in numpy, its files (safetensors and a JSON card) and what a loader
refuses. `ppo.py` trains the same network in torch; a test holds the two to each other. Every row
is scored with the same weights and rows are pooled, so a policy is indifferent to the number, the
order and the names of knobs and candidates.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import Replay
from routepilot.env.drafts import whole_file
from routepilot.env.episode import CONTEXT_FEATURES, ROW_FEATURES, ROWS, Observation
from routepilot.env.errors import PolicyError, TableError
from routepilot.env.forecast import Calibration
from routepilot.env.surrogate import Kernel, Surrogate
from routepilot.env.tables import load_table

#: Version of the card's format and of the observation it belongs to.
CARD_VERSION = 1

#: Width of the network's layers.
WIDTH = 64

Arrays = Mapping[str, NDArray[np.float32]]


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights; matrices are (out, in)."""
    row, context = len(ROW_FEATURES) + len(CONTEXT_FEATURES), len(CONTEXT_FEATURES)
    pooled = 2 * WIDTH + context
    return {
        "row.0.weight": (WIDTH, row),
        "row.0.bias": (WIDTH,),
        "row.2.weight": (WIDTH, WIDTH),
        "row.2.bias": (WIDTH,),
        "score.weight": (1, WIDTH),
        "score.bias": (1,),
        "pool.0.weight": (WIDTH, pooled),
        "pool.0.bias": (WIDTH,),
        "stop.weight": (1, WIDTH),
        "stop.bias": (1,),
        "value.weight": (1, WIDTH),
        "value.bias": (1,),
    }


@dataclass(frozen=True)
class Network:
    """The network in numpy.

    Attributes:
        weights: Arrays by the names of `shapes`.
    """

    weights: Arrays

    def logits(self, seen: Observation) -> NDArray[np.float64]:
        """Scores of every action, shape (ROWS + 1,); minus infinity where masked."""
        w = self.weights
        used = seen.mask[:-1].astype(bool)
        context = np.broadcast_to(seen.context, (len(seen.rows), len(seen.context)))
        hidden = np.tanh(
            np.concatenate([seen.rows, context], 1) @ w["row.0.weight"].T + w["row.0.bias"]
        )
        hidden = np.tanh(hidden @ w["row.2.weight"].T + w["row.2.bias"])
        scores = (hidden @ w["score.weight"].T + w["score.bias"])[:, 0]
        if used.any():
            mean, peak = hidden[used].mean(0), hidden[used].max(0)
        else:
            mean = peak = np.zeros(WIDTH, np.float32)
        pooled = np.concatenate([mean, peak, seen.context])
        pooled = np.tanh(pooled @ w["pool.0.weight"].T + w["pool.0.bias"])
        stop = pooled @ w["stop.weight"].T + w["stop.bias"]
        found = np.full(ROWS + 1, -np.inf)
        found[:-1][used] = scores[used]
        found[-1] = float(stop[0])
        return found


@dataclass(frozen=True)
class Card:
    """What a policy is and where it comes from.

    Attributes:
        name: Name of the policy.
        table: File name of the route table it was trained on.
        table_sha256: Hash of that file.
        models: Models it was trained on.
        held_out: Families it never saw.
        gate: Metric and limit it was trained at.
        kernel: Hyperparameters of its surrogate.
        seed: Training seed.
        steps: Environment steps of training.
        scores: Share of the oracle's gain by budget, and on what models.
        versions: Packages it was trained with.
        calibration: Curve that brings the chances of a forecast to the frequencies.
        weights_sha256: Hash of the weights file.
        row_features: Names of the row features, in order.
        context_features: Names of the context features, in order.
        licence: Licence.
        version: Version of this format.
    """

    name: str
    table: str
    table_sha256: str
    models: tuple[str, ...]
    held_out: tuple[str, ...]
    gate: Mapping[str, Any]
    kernel: Mapping[str, float]
    seed: int
    steps: int
    scores: Mapping[str, Any]
    versions: Mapping[str, str]
    calibration: Mapping[str, float] = field(default_factory=lambda: asdict(Calibration()))
    weights_sha256: str = ""
    row_features: tuple[str, ...] = tuple(name for name, _ in ROW_FEATURES)
    context_features: tuple[str, ...] = tuple(name for name, _ in CONTEXT_FEATURES)
    licence: str = "Apache-2.0"
    version: int = CARD_VERSION


@dataclass(frozen=True, eq=False)
class LoadedPolicy:
    """A policy ready to decide.

    Attributes:
        network: Its network.
        card: Its card.
        surrogate: The surrogate its rows come from, fitted to its table without its held-out
            families.
        replay: That table.
    """

    network: Network
    card: Card
    surrogate: Surrogate = field(repr=False)
    replay: Replay = field(repr=False)


def save_policy(folder: Path, weights: Arrays, card: Card) -> Path:
    """Write `NAME.safetensors` and `NAME.json`; returns the weights' path."""
    from safetensors.numpy import save

    data = save({name: np.ascontiguousarray(weights[name], np.float32) for name in shapes()})
    described = {**asdict(card), "weights_sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(described, indent=2, allow_nan=False).encode() + b"\n"
    path = folder / f"{card.name}.safetensors"
    _write(path.with_suffix(".json"), text)
    _write(path, data)
    return path


def load_policy(path: Path, without: tuple[str, ...] = ()) -> LoadedPolicy:
    """Load a policy and fit its surrogate to the table beside it.

    Args:
        without: Families that its surrogate shall not know either.
        path: The `.safetensors` file; its card and its table are found beside it, the table also
            in a folder `tables` there or among the released ones.

    Raises:
        PolicyError: Damaged, cut short, not ours, or made for other features.
    """
    card = read_card(path)
    network = Network(_read_weights(path, card))
    place = find_card_table(path, card)
    try:
        table = load_table(place).without_families((*card.held_out, *without))
    except TableError as error:
        raise PolicyError(f"policy {str(path)!r} cannot use its table: {error}") from None
    replay = Replay(table, Gate(metric=card.gate["metric"], limit=card.gate["limit"]))
    return LoadedPolicy(network, card, Surrogate(replay, Kernel(**card.kernel)), replay)


def find_card_table(path: Path, card: Card) -> Path:
    """The route table that a policy needs: beside it, in a folder `tables` there, or released.

    Raises:
        PolicyError: There is none, or another of that name.
    """
    places = (
        path.parent / card.table,
        path.parent / "tables" / card.table,
        Path(__file__).resolve().parent.parent / "checkpoints" / "tables" / card.table,
    )
    place = next((p for p in places if os.path.isfile(p)), None)
    if place is None:
        raise PolicyError(
            f"policy {str(path)!r} needs its route table {card.table!r} beside it; put it there"
        )
    if file_hash(place) != card.table_sha256:
        raise PolicyError(
            f"policy {str(path)!r} was trained on another {card.table!r} than the one at"
            f" {str(place)!r}; fetch both again, or train anew"
        )
    return place


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_card(path: Path) -> Card:
    """The card beside a policy's weights file.

    Raises:
        PolicyError: There is none, or it is damaged, of another version, or for other features.
    """
    card_path = path.with_suffix(".json")
    try:
        data = json.loads(card_path.read_text(encoding="utf-8"))
        if data["version"] != CARD_VERSION:
            raise PolicyError(
                f"policy card {str(card_path)!r} has version {data['version']} and this routepilot"
                f" reads {CARD_VERSION}; train the policy anew"
            )
        for name in ("models", "held_out", "row_features", "context_features"):
            data[name] = tuple(data[name])
        card = Card(**data)
        Kernel(**card.kernel)
        Calibration(**card.calibration)
        Gate(metric=card.gate["metric"], limit=card.gate["limit"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"policy card {str(card_path)!r} cannot be read ({' '.join(str(error).split())[:120]});"
            " a policy is a .safetensors file with its .json card"
        ) from None
    ours = (
        tuple(name for name, _ in ROW_FEATURES),
        tuple(name for name, _ in CONTEXT_FEATURES),
    )
    if (card.row_features, card.context_features) != ours:
        raise PolicyError(
            f"policy {str(path)!r} was made for other features than this version's; train it anew"
        )
    return card


def _read_weights(path: Path, card: Card) -> dict[str, NDArray[np.float32]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != card.weights_sha256:
            raise PolicyError(
                f"policy file {str(path)!r} is not the one its card describes (damaged or cut"
                " short); fetch it again"
            )
        found = load(data)
    except (OSError, SafetensorError, ValueError) as error:
        raise PolicyError(f"policy file {str(path)!r} cannot be read: {error}") from None
    for name, shape in shapes().items():
        if name not in found or found[name].shape != shape or not np.isfinite(found[name]).all():
            raise PolicyError(f"policy file {str(path)!r} lacks a sound {name!r}; train it anew")
    return found


def _write(path: Path, data: bytes) -> None:
    with whole_file(path) as draft:
        draft.write_bytes(data)
