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
from routepilot.env.likeness import Kernel
from routepilot.env.records import ModelCard
from routepilot.env.routes import Catalog
from routepilot.env.surrogate import Surrogate
from routepilot.env.tables import load_table

#: Version of the card's format and of the observation it belongs to.
CARD_VERSION = 1

#: Width of the network's layers.
WIDTH = 64

#: A stop is heeded where no row is expected to gain this much more, in log speed-up. Above it a
#: policy that learned from models with little to gain gives up too early (docs/experiments.md).
STOP_GAIN = 0.1

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

    def action(self, seen: Observation, *, may_stop: bool = True) -> int:
        """The row to build, or `ROWS` to stop.

        It stops when that is likelier than all rows together and none is expected to gain
        `STOP_GAIN`. One row seldom has much of the chance, so a stop that only beat each of them
        would come while most of it is for going on (docs/experiments.md).

        Args:
            seen: The observation.
            may_stop: False to go on while there is a row.
        """
        logits = self.logits(seen)
        rows, stop = logits[:-1], logits[-1]
        best = int(np.argmax(rows))
        if not np.isfinite(rows[best]):
            return ROWS
        if not may_stop or seen.expected_gain >= STOP_GAIN:
            return best
        return ROWS if stop > rows[best] + np.log(np.exp(rows - rows[best]).sum()) else best


@dataclass(frozen=True)
class Card:
    """What a policy is and where it comes from.

    Attributes:
        name: Name of the policy.
        table: File name of the route table it was trained on, the first where there are several.
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
        more_tables: Hashes of the other tables it was trained on, by file name.
        validation: Families that chose among its weights, and on which it was not trained; its
            surrogate knows them at work.
        settings: Settings of the training.
        seconds: Wall-clock seconds of the training.
        steps_per_second: Environment steps a second while PPO ran, updates and scoring included.
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
    more_tables: Mapping[str, str] = field(default_factory=dict)
    validation: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    steps_per_second: float = 0.0
    weights_sha256: str = ""
    row_features: tuple[str, ...] = tuple(name for name, _ in ROW_FEATURES)
    context_features: tuple[str, ...] = tuple(name for name, _ in CONTEXT_FEATURES)
    licence: str = "Apache-2.0"
    version: int = CARD_VERSION

    @property
    def tables(self) -> dict[str, str]:
        """Hashes of every table it was trained on, by file name."""
        return {self.table: self.table_sha256, **self.more_tables}


@dataclass(frozen=True, eq=False)
class LoadedPolicy:
    """A policy ready to decide.

    What it believes of a catalog comes from records, so it is fitted to the table of that catalog.
    On a catalog of no table of its own it goes by what needs no record: the shape of a route, and
    what this run's outcomes show.

    Attributes:
        network: Its network.
        card: Its card.
        replays: Its tables without its held-out families, in the card's order.
    """

    network: Network
    card: Card
    replays: tuple[Replay, ...] = field(repr=False)
    _fitted: dict[int, Surrogate] = field(default_factory=dict, repr=False)

    @property
    def replay(self) -> Replay:
        """Its table; the first where there are several."""
        return self.replays[0]

    @property
    def surrogate(self) -> Surrogate:
        """The surrogate of its table; the first where there are several."""
        return self._fit(self.replay)

    def replay_for(self, catalog: Catalog) -> Replay | None:
        """The table whose records speak of a catalog, or None.

        It is one of the same name, of the same version where there are several; else one that
        knows every knob and value of the catalog.
        """
        named = [r for r in self.replays if r.catalog.name == catalog.name]
        same = [r for r in named if r.catalog.key == catalog.key]
        wider = [r for r in self.replays if _knows(r.catalog, catalog)]
        return next(iter([*same, *named, *wider]), None)

    def surrogate_for(self, catalog: Catalog) -> Surrogate:
        """What it believes of a catalog's routes; without records where it has none of them."""
        replay = self.replay_for(catalog)
        return self._fit(replay) if replay is not None else self.surrogate.blank(catalog)

    def model(self, fingerprint: str) -> ModelCard | None:
        """The card of a recorded model, or None."""
        found = (replay.table.card(fingerprint) for replay in self.replays)
        return next((card for card in found if card is not None), None)

    def _fit(self, replay: Replay) -> Surrogate:
        place = self.replays.index(replay)
        if place not in self._fitted:
            self._fitted[place] = Surrogate(replay, Kernel(**self.card.kernel))
        return self._fitted[place]


def _knows(wider: Catalog, catalog: Catalog) -> bool:
    """True when every knob of a catalog is in another with all its values."""
    return all(
        knob.name in wider and set(knob.all_values) <= set(wider[knob.name].all_values)
        for knob in catalog.knobs
    )


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
    """Load a policy with the tables beside it.

    Args:
        without: Families that its surrogate shall not know either.
        path: The `.safetensors` file; its card and its tables are found beside it, the tables also
            in a folder `tables` there or among the released ones.

    Raises:
        PolicyError: Damaged, cut short, not ours, or made for other features.
    """
    card = read_card(path)
    network = Network(_read_weights(path, card))
    replays = []
    for place in find_card_tables(path, card):
        try:
            table = load_table(place)
        except TableError as error:
            raise PolicyError(f"policy {str(path)!r} cannot use its table: {error}") from None
        gate = Gate(metric=card.gate["metric"], limit=card.gate["limit"])
        replays.append(Replay(table.without_families((*card.held_out, *without)), gate))
    return LoadedPolicy(network, card, tuple(replays))


def find_card_tables(path: Path, card: Card) -> tuple[Path, ...]:
    """Its route tables, each beside it, in a folder `tables` there, or among the released ones.

    Raises:
        PolicyError: One is missing, is another of that name, or is named outside of these places.
    """
    return tuple(_find_table(path, name, sha256) for name, sha256 in card.tables.items())


def _find_table(path: Path, name: str, sha256: str) -> Path:
    if Path(name).name != name:
        raise PolicyError(f"policy {str(path)!r} names a table outside its folder: {name!r}")
    places = (
        path.parent / name,
        path.parent / "tables" / name,
        Path(__file__).resolve().parent.parent / "checkpoints" / "tables" / name,
    )
    place = next((p for p in places if os.path.isfile(p)), None)
    if place is None:
        raise PolicyError(
            f"policy {str(path)!r} needs its route table {name!r} beside it; put it there"
        )
    if file_hash(place) != sha256:
        raise PolicyError(
            f"policy {str(path)!r} was trained on another {name!r} than the one at"
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
        for name in ("models", "held_out", "validation", "row_features", "context_features"):
            data[name] = tuple(data.get(name, ()))
        card = Card(**data)
        Kernel(**card.kernel)
        Calibration(**card.calibration)
        Gate(metric=card.gate["metric"], limit=card.gate["limit"])
        dict(card.more_tables)
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
