"""What a route table says in sum: coverage, gains, failures, noise, and what carries over.

Owns the figures of `routepilot records describe` and of the datasheet. `tables.py` owns the file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from routepilot.env.accuracy import Gate, regate
from routepilot.env.backends.recorded import settled
from routepilot.env.errors import TableError
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.records import ModelCard, RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route

#: Most reasons that are told.
REASONS = 12

#: Length at which a compiler's words are cut.
REASON_LENGTH = 100

#: What differs between failures of one kind: figures, and the keys in names of files.
_NUMBER = re.compile(r"\b[0-9a-f]{6,}\b|(?<![\w.])\d+(\.\d+)?(e[+-]?\d+)?")

#: Standard deviation of normal values over their median distance from the middle.
_NORMAL = 1.4826

#: Standard error of a median of many normal values over that of their mean.
_MEDIAN = 1.2533

Judged = Mapping[Route, Outcome]


def describe_table(table: RouteTable, gate: Gate) -> dict[str, Any]:
    """What a table holds at an accuracy limit, as plain data.

    Args:
        table: The table.
        gate: Gate that decides what is feasible.
    """
    judged = [_judged(table, card, gate) for card in table.models]
    built = [table.outcomes.get(card.fingerprint, {}) for card in table.models]
    singles = set(table.catalog.neighbours(DEFAULT_ROUTE))
    models = [
        _model(card, found, builds, singles)
        for card, found, builds in zip(table.models, judged, built, strict=True)
    ]
    gains = [_best(found)[1] for found in judged]
    all_judged = [
        (card.name, outcome)
        for card, found, builds in zip(table.models, judged, built, strict=True)
        for outcome in [*found.values(), *_defaults(builds, gate)]
    ]
    everything = [o for builds in built for outcomes in builds.values() for o in outcomes]
    fast = [float(np.log(m["fast_speedup"])) for m in models]
    return {
        "target": asdict(table.target),
        "limit": gate.limit,
        "models": models,
        "coverage": _coverage(table, built, singles),
        "statuses": dict(Counter(o.status.value for _, o in all_judged)),
        "reasons": _reasons(all_judged),
        "rates": _rates(judged),
        "controls": _controls(built),
        "rebuilt": _rebuilt(table.catalog, built),
        "smallest_win": _smallest_win(everything),
        "build_seconds": sum(o.build_seconds for o in everything),
        "measure_seconds": sum(o.measure_seconds for o in everything),
        "oracle_speedup": _geometric(gains),
        "trained_speedup": _geometric(
            g for g, card in zip(gains, table.models, strict=True) if card.trained
        ),
        "fast_speedup": _geometric(fast),
        "fast_share": sum(fast) / sum(gains) if sum(gains) else 1.0,
        "best_single": _best_single(judged),
        "carried_over": _carried_over(judged),
        "manifest": dict(table.manifest),
    }


def noise_floor(table: RouteTable) -> float | None:
    """What 95 % of the table's controls stay below, as a log ratio; None without controls.

    A control is the default built once more and timed against the first build as if it were a
    route.
    """
    found = [
        abs(o.log_speedup)
        for routes in table.outcomes.values()
        for o in routes.get(DEFAULT_ROUTE, ())[1:]
        if o.is_feasible
    ]
    return float(np.quantile(found, 0.95)) if found else None


def compare_tables(table: RouteTable, other: RouteTable, gate: Gate) -> dict[str, Any]:
    """What of one table holds in another of the same models under other settings.

    Args:
        table: The table where answers would be used.
        other: The table where they were found.
        gate: Gate that decides what is feasible.

    Returns:
        `models` that both hold, `routes` that both hold of each (fewest), `kept`: the log speed-up
        in `table` of the routes that are best in `other`, over that of the best in `table`;
        `correlation`, `correlation_low`, `correlation_high`: of log speed-ups, median, least and
        largest over models.

    Raises:
        TableError: No model is in both, or no route that gains.
    """
    theirs = {card.fingerprint for card in other.models}
    kept = best = 0.0
    shared: list[int] = []
    alike: list[float] = []
    for card in table.models:
        if card.fingerprint not in theirs:
            continue
        mine, found = _judged(table, card, gate), _judged(other, card, gate)
        routes = [route for route in mine if route in found]
        choice = max(routes, key=lambda route: found[route].gain, default=DEFAULT_ROUTE)
        kept += mine[choice].gain if choice in mine else 0.0
        best += max((mine[route].gain for route in routes), default=0.0)
        shared.append(len(routes))
        pairs = [(mine[r].measurement, found[r].measurement) for r in routes]
        timed = [(a.log_speedup, b.log_speedup) for a, b in pairs if a and b]
        if len(timed) > 2:
            alike.append(float(np.corrcoef(np.array(timed).T)[0, 1]))
    if not alike or best <= 0:
        raise TableError(
            "the tables share no model with routes that gain in both; give two tables of the same"
            " models"
        )
    return {
        "models": len(shared),
        "routes": min(shared),
        "kept": kept / best,
        "correlation": float(np.median(alike)),
        "correlation_low": min(alike),
        "correlation_high": max(alike),
    }


def _judged(table: RouteTable, card: ModelCard, gate: Gate) -> dict[Route, Outcome]:
    """Outcomes of a model's routes but for the default, settled by repeats, by the gate."""
    return {
        route: regate(settled(outcomes), gate)
        for route, outcomes in table.outcomes.get(card.fingerprint, {}).items()
        if not route.is_default
    }


def _defaults(builds: Mapping[Route, tuple[Outcome, ...]], gate: Gate) -> list[Outcome]:
    outcomes = builds.get(DEFAULT_ROUTE, ())
    return [regate(settled(outcomes), gate)] if outcomes else []


def _best(judged: Judged) -> tuple[Route, float]:
    """The route of the largest gain, and the gain; the default and 0 where none gains."""
    best = max(judged, key=lambda route: judged[route].gain, default=DEFAULT_ROUTE)
    gain = judged[best].gain if best in judged else 0.0
    return (best, gain) if gain > 0 else (DEFAULT_ROUTE, 0.0)


def _model(
    card: ModelCard,
    judged: Judged,
    builds: Mapping[Route, tuple[Outcome, ...]],
    singles: set[Route],
) -> dict[str, Any]:
    route, gain = _best(judged)
    _, fast = _best({r: o for r, o in judged.items() if r in singles})
    return {
        "name": card.name,
        "family": card.family,
        "trained": card.trained,
        "default_latency_ms": card.default_latency_ms,
        "routes": len(judged),
        "feasible": sum(o.is_feasible for o in judged.values()),
        "best_speedup": float(np.exp(gain)),
        "best_route": str(route),
        "best_builds": 0 if route.is_default else len(builds[route]),
        "fast_speedup": float(np.exp(fast)),
    }


def _coverage(
    table: RouteTable,
    built: Sequence[Mapping[Route, tuple[Outcome, ...]]],
    singles: set[Route],
) -> dict[str, Any]:
    """How much of the catalog was built, and on how many models."""
    routes = [{r for r in builds if not r.is_default} for builds in built]
    common = set.intersection(*routes) if routes else set()
    return {
        "families": len({card.family for card in table.models}),
        "trained": sum(card.trained for card in table.models),
        "routes": sum(map(len, routes)),
        "builds": sum(len(outcomes) for builds in built for outcomes in builds.values()),
        "fewest_routes": min(map(len, routes), default=0),
        "most_routes": max(map(len, routes), default=0),
        "common_routes": len(common),
        "single_changes": len(singles),
        "single_changes_common": len(common & singles),
    }


def _rates(judged: Sequence[Judged]) -> dict[str, float]:
    """Shares of all routes that gave no engine to judge, and that the gate refused."""
    statuses = Counter(o.status for found in judged for o in found.values())
    whole = max(1, sum(statuses.values()))
    refused = statuses[Status.ACCURACY_FAILED]
    return {
        "failed": (sum(statuses.values()) - statuses[Status.OK] - refused) / whole,
        "not_accurate": refused / whole,
    }


def _reasons(found: Iterable[tuple[str, Outcome]]) -> list[dict[str, Any]]:
    """Failures by status and reason, numbers in the reason apart, the commonest first."""
    counts: Counter[tuple[str, str]] = Counter()
    models: dict[tuple[str, str], set[str]] = {}
    for name, outcome in found:
        if outcome.status is Status.OK:
            continue
        words = _NUMBER.sub("N", " ".join(outcome.reason.split()))
        key = outcome.status.value, words[:REASON_LENGTH]
        counts[key] += 1
        models.setdefault(key, set()).add(name)
    return [
        {"status": key[0], "reason": key[1], "builds": count, "models": len(models[key])}
        for key, count in counts.most_common(REASONS)
    ]


def _controls(built: Sequence[Mapping[Route, tuple[Outcome, ...]]]) -> dict[str, Any]:
    found = [
        abs(o.log_speedup)
        for builds in built
        for o in builds.get(DEFAULT_ROUTE, ())[1:]
        if o.is_feasible
    ]
    return {
        "count": len(found),
        "median": float(np.median(found)) if found else 0.0,
        "below_95": float(np.quantile(found, 0.95)) if found else 0.0,
        "largest": max(found, default=0.0),
    }


@dataclass(frozen=True)
class _Pair:
    """Two builds of one route: what they differ by, and what timing alone would make of it."""

    difference: float
    error: float


def _rebuilt(
    catalog: Catalog, built: Sequence[Mapping[Route, tuple[Outcome, ...]]]
) -> list[dict[str, Any]]:
    """Spread between builds of a route against that within a build, by engine.

    The default's builds were timed against each other; two builds of another route each against a
    default, so that their difference holds the noise of two measurements. Spreads are robust, of
    one difference; `between` is what is left of `spread` when `within`, the standard error of the
    medians by the rounds' own scatter, is taken out.
    """
    engines = [knob for knob in catalog.knobs if "engine" in knob.marks]
    pairs: dict[str, list[_Pair]] = {}
    for builds in built:
        for route, outcomes in builds.items():
            measured = [o.measurement for o in outcomes if o.measurement is not None]
            values = [route.values.get(k.name, k.default) for k in engines]
            name = "the default" if route.is_default else " ".join(["routes of", *values])
            for again in measured[1:]:
                first = () if route.is_default else (measured[0],)
                error = math.hypot(*(_error(m) for m in (again, *first)))
                start = 0.0 if route.is_default else measured[0].log_speedup
                pairs.setdefault(name.strip(), []).append(_Pair(again.log_speedup - start, error))
    rows = []
    for name, found in sorted(pairs.items()):
        differences = np.array([pair.difference for pair in found])
        spread = float(_NORMAL * np.median(np.abs(differences - np.median(differences))))
        within = float(np.median([pair.error for pair in found]))
        between = float(np.sqrt(max(0.0, spread**2 - within**2)))
        rows.append(
            {
                "of": name.removesuffix(" of"),
                "count": len(found),
                "spread": spread,
                "within": within,
                "between": between,
            }
        )
    return rows


def _error(measured: Measurement) -> float:
    """Standard error of the median of the rounds."""
    return _MEDIAN * measured.spread / math.sqrt(max(1, measured.rounds))


def _smallest_win(everything: Iterable[Outcome]) -> float:
    """Half width of the median interval: what a route must gain to count, as a log ratio."""
    halves = [
        (o.measurement.high - o.measurement.low) / 2
        for o in everything
        if o.measurement is not None and o.measurement.rounds
    ]
    return float(np.median(halves)) if halves else 0.0


def _geometric(gains: Iterable[float]) -> float:
    """Geometric mean of speed-ups from their logs; 1 for none."""
    return float(np.exp(np.mean(list(gains) or [0.0])))


def _best_single(judged: Sequence[Judged]) -> dict[str, Any]:
    """The one route to give every model, among those that nine in ten know.

    A model keeps its default where the route does not know it or gains nothing.
    """
    gains: dict[Route, list[float]] = {}
    for outcomes in judged:
        for route, outcome in outcomes.items():
            gains.setdefault(route, []).append(outcome.gain)
    common = {r: sum(g) for r, g in gains.items() if len(g) >= 0.9 * len(judged)}
    best = max(common, key=lambda route: common[route], default=DEFAULT_ROUTE)
    return {
        "route": str(best),
        "speedup": float(np.exp(common.get(best, 0.0) / max(len(judged), 1))),
    }


def _carried_over(judged: Sequence[Judged]) -> dict[str, int]:
    """What the best route of one model does on each other one that it was built for."""
    found = {"pairs": 0, "slower": 0, "refused": 0}
    for place, outcomes in enumerate(judged):
        best, gain = _best(outcomes)
        if gain <= 0:
            continue
        for other, theirs in enumerate(judged):
            if other != place and best in theirs:
                found["pairs"] += 1
                found["refused"] += not theirs[best].is_feasible
                found["slower"] += theirs[best].is_feasible and theirs[best].log_speedup < 0
    return found
