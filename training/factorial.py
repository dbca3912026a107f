"""Do knobs interact? A two-level factorial over each model's strongest knobs.

Owns the design and its analysis: one change at a time finds the strongest knobs and the value each
is tried at; every combination of those values is then built and timed; what a sum of single effects
explains is held against what was measured. On a quiet machine, one thread:

    python -m routepilot.training.factorial --models FOLDER [FOLDER ...] --knobs 7

with folders of prepared models. Outcomes are kept in a store as they come, so the same command
continues. Knows no agent.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from routepilot.env.accuracy import Gate, regate
from routepilot.env.errors import InputError, RoutePilotError
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route
from routepilot.env.store import RecordStore
from routepilot.env.wording import counted, verb
from routepilot.training.collect import COLLECT_GATE
from routepilot.training.files import ensure_folder, write_json
from routepilot.training.manifest import manifest
from routepilot.training.session import Session, SessionConfig

#: Largest number of knobs: 2^8 builds a model.
MOST_KNOBS = 8

Setting = tuple[str, str]


@dataclass(frozen=True)
class FactorialRow:
    """What the factorial of one model says. Gains are log speed-ups.

    Attributes:
        model: Model name.
        settings: The knobs' second levels, strongest first.
        planned: Combinations, 2 to the power of the knobs.
        legal: Of these, the ones that mean something.
        timed: Of these, the ones that were built, resembled the reference and were timed.
        accurate: Of these, the ones within the limit.
        best: Route of the largest gain within the limit.
        best_gain: Its gain, from a second build, since the first was chosen for being large.
        additive_gain: Sum of the single effects of the best route's settings.
        best_single: Largest single gain within the limit.
        picked_gain: Measured gain of the accurate route whose sum of single effects is largest.
        greedy_gain: Measured gain after taking settings one by one while the measured gain grows.
        main_share: Share of the variance of log speed-up that main effects explain.
        pair_share: The same with all pairs beside them.
        spread: Typical standard error of one figure, log ratio.
    """

    model: str
    settings: tuple[str, ...]
    planned: int
    legal: int
    timed: int
    accurate: int
    best: str
    best_gain: float
    additive_gain: float
    best_single: float
    picked_gain: float
    greedy_gain: float
    main_share: float
    pair_share: float
    spread: float

    @property
    def additive_share(self) -> float:
        """Sum of single effects over the best gain; above 1 when effects get in each other's way.

        NaN when nothing is faster than the default.
        """
        return self.additive_gain / self.best_gain if self.best_gain > 0 else math.nan


def strongest(
    catalog: Catalog, singles: Mapping[Route, Outcome], count: int
) -> tuple[Setting, ...]:
    """The knobs that move the time most, each with the value that is tried, strongest first.

    A knob's value is its fastest one that can be timed; a knob's strength is the largest distance
    of its intervals from zero, so noise has none.

    Args:
        catalog: Catalog of the backend.
        singles: Outcomes of one-knob changes, judged by the limit where speed should count.
        count: Knobs wanted.
    """
    found: list[tuple[float, Setting]] = []
    for knob in catalog.knobs:
        strength, best = 0.0, None
        for value in knob.alternatives:
            outcome = singles.get(catalog.route({knob.name: value}))
            if outcome is None or outcome.measurement is None or not outcome.is_feasible:
                continue
            measured = outcome.measurement
            strength = max(strength, measured.low, -measured.high)
            if best is None or measured.log_speedup > best[0]:
                best = (measured.log_speedup, (knob.name, value))
        if best is not None and strength > 0:
            found.append((strength, best[1]))
    found.sort(key=lambda item: -item[0])
    return tuple(setting for _, setting in found[:count])


def combinations(catalog: Catalog, settings: Sequence[Setting]) -> list[Route]:
    """Every legal combination of the settings, the default first, then by size."""
    subsets = (
        subset
        for size in range(len(settings) + 1)
        for subset in itertools.combinations(settings, size)
    )
    routes = (catalog.route(dict(subset)) for subset in subsets)
    return [route for route in routes if catalog.is_legal(route)]


def explained(outcomes: Mapping[Route, Outcome], settings: Sequence[Setting], order: int) -> float:
    """Share of the variance of log speed-up that effects up to an order explain, in sample.

    Args:
        outcomes: Timed outcomes.
        settings: The second levels.
        order: 1 for main effects, 2 for pairs beside them.
    """
    rows = [[float(setting in route.settings) for setting in settings] for route in outcomes]
    design = np.asarray(rows).reshape(len(outcomes), len(settings))
    columns = [np.ones(len(outcomes)), *design.T]
    if order > 1:
        columns += [design[:, i] * design[:, j] for i, j in _pairs(len(settings))]
    values = np.array([o.log_speedup for o in outcomes.values()])
    spread = float(((values - values.mean()) ** 2).sum())
    if spread <= 0:
        return 1.0
    matrix = np.stack(columns, axis=1)
    fitted = matrix @ np.linalg.lstsq(matrix, values, rcond=None)[0]
    return 1.0 - float(((values - fitted) ** 2).sum()) / spread


def _pairs(count: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(count), 2))


def analyse(
    model: str,
    catalog: Catalog,
    settings: Sequence[Setting],
    outcomes: Mapping[Route, Outcome],
    limit: float,
    again: Callable[[Route], Outcome] | None = None,
) -> FactorialRow:
    """Figures of one model's factorial.

    Args:
        model: Model name.
        catalog: Catalog of the backend.
        settings: The second levels.
        outcomes: Outcomes of `combinations`, judged loosely.
        limit: Limit on the relative L2 error for what may win.
        again: Builds and times a route once more; None takes the first figure.

    Raises:
        InputError: There are no settings.
    """
    if not settings:
        raise InputError(f"no knob moves {model} beyond the noise; choose another model")
    timed = {route: o for route, o in outcomes.items() if o.is_feasible}
    accurate = {route: o for route, o in timed.items() if regate(o, Gate(limit=limit)).is_feasible}
    accurate[DEFAULT_ROUTE] = outcomes[DEFAULT_ROUTE]
    gain = {route: o.log_speedup for route, o in accurate.items()}
    gain[DEFAULT_ROUTE] = 0.0
    single = {
        setting: timed[route].log_speedup
        for setting in settings
        if (route := catalog.route(dict([setting]))) in timed
    }

    def total(route: Route) -> float:
        return sum(single.get(setting, 0.0) for setting in route.settings)

    best = max(gain, key=lambda route: gain[route])
    best_gain = gain[best]
    if again is not None and not best.is_default:
        best_gain = max(regate(again(best), Gate(limit=limit)).log_speedup, 0.0)
    picked = max(gain, key=total)
    errors = [o.measurement.high - o.measurement.low for o in timed.values() if o.measurement]
    return FactorialRow(
        model=model,
        settings=tuple(f"{name}={value}" for name, value in settings),
        planned=2 ** len(settings),
        legal=len(outcomes),
        timed=len(timed),
        accurate=len(accurate),
        best=str(best),
        best_gain=best_gain,
        additive_gain=total(best),
        best_single=max([gain[r] for r in gain if len(r.settings) <= 1]),
        picked_gain=gain[picked],
        greedy_gain=_greedy(catalog, settings, gain),
        main_share=explained(timed, settings, 1),
        pair_share=explained(timed, settings, 2),
        spread=float(np.median(errors)) / 4 if errors else math.nan,
    )


def _greedy(catalog: Catalog, settings: Sequence[Setting], gain: Mapping[Route, float]) -> float:
    """Gain of coordinate ascent from the default over the measured combinations."""
    here = DEFAULT_ROUTE
    while True:
        nearby = []
        for name, value in settings:
            now = here.values.get(name)
            default = catalog[name].default
            nearby.append(catalog.changed(here, name, default if now == value else value))
        better = [route for route in nearby if gain.get(route, -math.inf) > gain[here]]
        if not better:
            return gain[here]
        here = max(better, key=lambda route: gain[route])


def study(
    model: Model,
    store: RecordStore,
    config: SessionConfig,
    workdir: Path,
    *,
    knobs: int = 7,
    limit: float = 1e-2,
    hear: Callable[[str], None] = lambda _: None,
) -> FactorialRow:
    """Measure one model's factorial; what is in the store is not measured again.

    Args:
        model: Prepared model.
        store: Store that receives every outcome.
        config: Session settings; the gate is replaced by a loose one.
        workdir: Folder for transforms and logs.
        knobs: Knobs, at most `MOST_KNOBS`.
        limit: Limit on the relative L2 error for what may win.
        hear: Hears one line a step.

    Raises:
        InputError: A number of knobs that is not allowed, or no knob matters.
        ModelError: The default route does not build.
    """
    if not 2 <= knobs <= MOST_KNOBS:
        raise InputError(
            f"{counted(knobs, 'knob')} {verb(knobs, 'is', 'are')} not allowed; give 2 to"
            f" {MOST_KNOBS}"
        )
    with Session(model, config, store, workdir) as session:
        catalog = session.catalog
        default = session.default()

        def measure(routes: Sequence[Route], what: str) -> dict[Route, Outcome]:
            found = {}
            for number, route in enumerate(routes, 1):
                found[route] = default if route.is_default else session.outcome(route)
                hear(f"{model.name}: {what} {number}/{len(routes)}")
            return found

        singles = measure(catalog.neighbours(DEFAULT_ROUTE), "single changes")
        judged = {route: regate(o, Gate(limit=limit)) for route, o in singles.items()}
        settings = strongest(catalog, judged, knobs)
        outcomes = measure(combinations(catalog, settings), "combinations")
        return analyse(
            model.name, catalog, settings, outcomes, limit, lambda r: session.again(r, 1)[0]
        )


def markdown(rows: Sequence[FactorialRow], limit: float) -> str:
    """The study as Markdown tables."""
    lines = [
        f"Limit {limit:g} on the relative L2 error. Gains are speed-ups over the default.",
        "",
        "| model | timed of legal of planned | accurate | best | additive | share additive"
        " | best single | sum picks | greedy | variance by main effects | with pairs | spread |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        gains = (row.best_single, row.picked_gain, row.greedy_gain)
        single, picked, greedy = (f"{math.exp(g):.2f}x" for g in gains)
        share = "no gain" if math.isnan(row.additive_share) else f"{row.additive_share:.0%}"
        lines.append(
            f"| {row.model} | {row.timed} of {row.legal} of {row.planned} | {row.accurate}"
            f" | {math.exp(row.best_gain):.2f}x | {math.exp(row.additive_gain):.2f}x"
            f" | {share} | {single} | {picked} | {greedy}"
            f" | {row.main_share:.0%} | {row.pair_share:.0%} | {row.spread:.1%} |"
        )
    lines += ["", "| model | second levels, strongest first | best |", "| --- | --- | --- |"]
    lines += [
        f"| {row.model} | `{' '.join(row.settings)}` | `{row.best or 'default'}` |" for row in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="routepilot.training.factorial", description="factorial")
    parser.add_argument("--models", nargs="+", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--knobs", type=int, default=7)
    parser.add_argument("--limit", type=float, default=1e-2)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu", type=int, help="core to stay on")
    parser.add_argument("--out", type=Path, default=Path("factorial"), help="folder")
    given = parser.parse_args(arguments)
    try:
        folder = ensure_folder(given.out)
        models = [Model.load(place) for place in given.models]
        options = {"threads": str(given.threads)}
        config = SessionConfig(
            backend=given.backend, options=options, gate=COLLECT_GATE, cpu=given.cpu
        )
        rows = []
        with RecordStore(folder / "factorial.sqlite") as store, tempfile.TemporaryDirectory() as w:
            for model in models:
                place = Path(w) / model.fingerprint[:16]
                rows.append(
                    study(
                        model,
                        store,
                        config,
                        place,
                        knobs=given.knobs,
                        limit=given.limit,
                        hear=lambda line: print(line, file=sys.stderr),
                    )
                )
        facts = [asdict(row) | {"additive_share": row.additive_share} for row in rows]
        for fact in facts:
            if math.isnan(fact["additive_share"]):
                fact["additive_share"] = None
        write_json(
            folder / "factorial.json",
            {"rows": facts, "manifest": manifest()},
        )
    except RoutePilotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(markdown(rows, given.limit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
