"""`importance`: how much each knob explains of what was measured, for one model or for a corpus.

Owns the forest over knob values (scikit-learn), its permutation importance on builds it did not
see, and the intervals. A knob that is important moves the speed; it need not help. Needs the extra
`bayes` (scikit-learn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import ModelReplay, Replay
from routepilot.env.beliefs import CLIP
from routepilot.env.errors import InputError, MissingExtraError
from routepilot.env.likeness import encode
from routepilot.env.records import RouteTable
from routepilot.env.routes import Catalog

Floats = NDArray[np.float64]

#: Timed routes of a model below which nothing is said about it.
FEWEST = 12

#: Trees of a forest, permutations of a column, and resampled forests of one model.
TREES, PERMUTATIONS, RESAMPLES = 100, 8, 20

#: Bootstrap draws of models behind a corpus interval.
DRAWS = 2000


@dataclass(frozen=True)
class Importance:
    """One knob's part.

    Attributes:
        knob: Its name.
        importance: Share of the variance of the log speed-up that goes unexplained when the
            knob's values are shuffled (drop in R2 on routes not fitted).
        low: Lower end of the 95 % interval: over resampled routes for one model, over resampled
            models for a corpus.
        high: Upper end.
    """

    knob: str
    importance: float
    low: float
    high: float

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Importances:
    """What `importance` found.

    Attributes:
        models: Models it rests on, by name.
        left_out: Models with fewer than `FEWEST` timed routes.
        r2: Share of the variance that the forests explain on routes not fitted; what an importance
            is a share of. Near 0, the importances say nothing.
        knobs: The knobs, most important first.
    """

    models: tuple[str, ...]
    left_out: tuple[str, ...]
    r2: float
    knobs: tuple[Importance, ...]

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "models": list(self.models),
            "left_out": list(self.left_out),
            "r2": self.r2,
            "knobs": [knob.as_json() for knob in self.knobs],
        }


def importance(table: RouteTable, model: str | None = None, seed: int = 0) -> Importances:
    """Permutation importance of every knob.

    Args:
        table: Route table.
        model: One model by name or fingerprint; None for the whole corpus, in which every model
            counts the same.
        seed: Seed of forests, permutations and resampling.

    Raises:
        InputError: No such model, or too few timed routes.
        MissingExtraError: scikit-learn is not installed.
    """
    _require_forest()
    replay = Replay(table, Gate(limit=float("inf")))
    if model is not None:
        card = table.card(model)
        if card is None:
            raise InputError(
                f"model {model!r} is not in the table; it has"
                f" {', '.join(sorted(c.name for c in table.models))}"
            )
        replay = Replay(table.only([card.fingerprint]), replay.gate)
    usable = [m for m in replay if np.isfinite(m.log_speedup).sum() >= FEWEST]
    left_out = tuple(m.card.name for m in replay if m not in usable)
    if not usable:
        raise InputError(
            f"no model has {FEWEST} timed routes or more, so nothing can be said of its knobs;"
            " collect more routes"
        )
    rng = np.random.default_rng(seed)
    if model is not None:
        samples = [_sample(usable[0], replay.catalog, rng, resample=True) for _ in range(RESAMPLES)]
    else:
        samples = [_sample(one, replay.catalog, rng, resample=False) for one in usable]
    parts = np.array([part for part, _ in samples])
    low, high = _interval(parts, rng, over_models=model is None)
    middle = parts.mean(axis=0)
    found = [
        Importance(knob.name, float(m), float(a), float(b))
        for knob, m, a, b in zip(replay.catalog.knobs, middle, low, high, strict=True)
    ]
    return Importances(
        tuple(m.card.name for m in usable),
        left_out,
        float(np.mean([r2 for _, r2 in samples])),
        tuple(sorted(found, key=lambda knob: -knob.importance)),
    )


def _sample(
    model: ModelReplay, catalog: Catalog, rng: np.random.Generator, *, resample: bool
) -> tuple[Floats, float]:
    """Importances of one model's knobs and R2, by cross-fitting over two halves of its routes."""
    timed = np.flatnonzero(np.isfinite(model.log_speedup))
    if resample:  # distinct routes alone: a route on both sides would be known beforehand
        timed = rng.permutation(timed)[: max(FEWEST, round(0.8 * len(timed)))]
    codes = encode(catalog, [model.routes[i] for i in timed])
    columns, knob_of = _one_hot(catalog, codes)
    values = np.clip(model.log_speedup[timed], -CLIP, CLIP)
    order = rng.permutation(len(timed))
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    found = [
        _drop(columns, values, fitted, held, knob_of, len(catalog.knobs), rng)
        for fitted, held in (halves, halves[::-1])
    ]
    return np.mean([f[0] for f in found], axis=0), float(np.mean([f[1] for f in found]))


def _drop(
    columns: Floats,
    values: Floats,
    fitted: NDArray[np.int64],
    held: NDArray[np.int64],
    knob_of: NDArray[np.int64],
    knobs: int,
    rng: np.random.Generator,
) -> tuple[Floats, float]:
    """Drop in R2 on held routes when all columns of a knob are shuffled together."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.metrics import r2_score

    forest = RandomForestRegressor(TREES, random_state=int(rng.integers(2**31)))
    forest.fit(columns[fitted], values[fitted])
    if values[held].std() < 1e-9:
        return np.zeros(knobs), 0.0
    whole = float(r2_score(values[held], forest.predict(columns[held])))
    drops = np.zeros(knobs)
    for knob in range(knobs):
        mine = np.flatnonzero(knob_of == knob)
        changed = np.tile(columns[held], (PERMUTATIONS, 1, 1))
        for copy in changed:
            copy[:, mine] = copy[rng.permutation(len(held))][:, mine]
        told = forest.predict(changed.reshape(-1, changed.shape[2])).reshape(PERMUTATIONS, -1)
        drops[knob] = whole - float(np.mean([r2_score(values[held], one) for one in told]))
    return drops, whole


def _one_hot(catalog: Catalog, codes: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
    """Value numbers as indicator columns, and the knob of each column."""
    columns, owner = [], []
    for place, knob in enumerate(catalog.knobs):
        for value in range(1, len(knob.all_values)):
            columns.append(codes[:, place] == value)
            owner.append(place)
    return np.array(columns, float).T, np.array(owner, int)


def _interval(
    parts: Floats, rng: np.random.Generator, *, over_models: bool
) -> tuple[Floats, Floats]:
    if not over_models:
        low, high = np.quantile(parts, [0.025, 0.975], axis=0)
        return low, high
    draws = rng.integers(0, len(parts), (DRAWS, len(parts)))
    low, high = np.quantile(parts[draws].mean(axis=1), [0.025, 0.975], axis=0)
    return low, high


def _require_forest() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "importance needs scikit-learn; pip install 'routepilot[bayes]'"
        ) from None


def shown(knobs: Sequence[Importance], count: int = 20) -> list[tuple[str, str, str]]:
    """Rows for people: knob, importance, interval."""
    return [
        (k.knob, f"{_percent(k.importance)} %", f"{_percent(k.low)} to {_percent(k.high)}")
        for k in knobs[:count]
    ]


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f}"  # no -0.0
