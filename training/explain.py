"""`explain`: why the winner of a run is fast, by measuring again.

Owns the route minimiser (every knob of the winner is dropped in turn and what is left is built and
timed), the engines side by side from the inside, and the training models the policy reasoned from.
Its builds are counted and leave the run's records alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from routepilot.env.accuracy import Gate, regate
from routepilot.env.backends.layers import Layers
from routepilot.env.backends.recorded import ModelReplay
from routepilot.env.errors import InputError, RoutePilotError
from routepilot.env.outcomes import Measurement, Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route
from routepilot.env.store import RecordStore
from routepilot.env.worker import RouteWorker
from routepilot.training.defaults import choose_agent
from routepilot.training.files import write_json
from routepilot.training.runs import EXPLANATION, Run, read_result, read_run
from routepilot.training.session import Say, Session, silent

#: Training models named.
NEAREST = 5

#: Layers of each engine that are shown one by one.
COSTLIEST = 8

#: Inferences that a profile is the mean of.
INFERENCES = 20

Trial = Callable[[Route], Outcome]


@dataclass(frozen=True)
class Dropped:
    """What came of the winner without one knob.

    Attributes:
        knob: The knob.
        value: Its value in the winner.
        without: The winner without it, and without what means nothing then.
        verdict: `matters`, `same engine`, `no measurable effect`, `hurts` or `needed` (without it
            there is no accurate engine).
        effect: Log speed-up that the knob brings, with its 95 % interval; None where it is
            `needed`.
        low: Lower end.
        high: Upper end.
        reason: What came of the build, where it failed.
    """

    knob: str
    value: str
    without: Route
    verdict: str
    effect: float | None
    low: float | None
    high: float | None
    reason: str = ""

    @property
    def is_idle(self) -> bool:
        """True when the winner loses nothing without it."""
        return self.verdict in ("same engine", "no measurable effect", "hurts")

    def as_json(self) -> dict[str, object]:
        """Plain data; the effect as a speed-up."""
        return {
            "knob": self.knob,
            "value": self.value,
            "without": str(self.without),
            "verdict": self.verdict,
            "speedup": _exp(self.effect),
            "speedup_low": _exp(self.low),
            "speedup_high": _exp(self.high),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Precedent:
    """A training model that the policy reasoned from.

    Attributes:
        name: Its name.
        likeness: Its likeness with the model at hand, in 0..1.
        speedup: What the winner's route did there; None where that is not on record, or failed.
        status: What came of that route there; empty where it is not on record.
        best: Route that did best there at the run's accuracy limit; empty for the default.
        best_speedup: Its speed-up.
    """

    name: str
    likeness: float
    speedup: float | None
    status: str
    best: str
    best_speedup: float

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found.

    Attributes:
        model: Model name.
        route: The winner.
        knobs: Each knob of the winner, dropped alone.
        minimal: The winner without all that it does not lose by.
        minimal_speedup: Its speed-up over the default with its interval: value, low, high.
        builds: Engines built to find this out.
        default: The default engine from the inside; None if it does not show.
        winner: The winner's.
        models: Training models by likeness; empty for agents that know none.
    """

    model: str
    route: Route
    knobs: tuple[Dropped, ...]
    minimal: Route
    minimal_speedup: tuple[float, float, float]
    builds: int
    default: Layers | None
    winner: Layers | None
    models: tuple[Precedent, ...]

    def as_json(self) -> dict[str, object]:
        """Plain data: `explanation.json`."""
        speedup, low, high = self.minimal_speedup
        return {
            "model": self.model,
            "route": str(self.route),
            "knobs": [knob.as_json() for knob in self.knobs],
            "minimal": {
                "route": str(self.minimal),
                "speedup": speedup,
                "speedup_low": low,
                "speedup_high": high,
            },
            "builds": self.builds,
            "engines": {
                name: _engine(layers)
                for name, layers in (("default", self.default), ("winner", self.winner))
                if layers is not None
            },
            "models": [model.as_json() for model in self.models],
        }


def explain(folder: Path, *, say: Say = silent) -> Explanation:
    """Measure why a run's winner is fast, and write `explanation.json` into its folder.

    Args:
        folder: What `tune` wrote.
        say: Hears one line at each step.

    Raises:
        InputError: The folder holds no finished run, or its model is gone.
    """
    run, result = read_run(folder), read_result(folder)
    if result.get("state", "done") != "done":
        raise InputError(
            f"the run in {str(folder)!r} has no confirmed answer yet; repeat its command"
        )
    model = run.load_model()
    route = Route.read(str(result["route"]))
    store = folder / f".{EXPLANATION}.sqlite"
    try:
        with (
            RecordStore(store) as records,
            Session(model, run.config, records, folder / "work-explain") as session,
        ):
            objection = _objection(session.catalog, route)
            if objection:
                raise InputError(
                    f"the winner {route} is not of this catalog ({objection}); tune again"
                )
            bench = _Bench(session.worker, say)
            knobs, minimal, measured = minimise(session.catalog, route, bench.trial)
            say("looking into the default engine and the winner")
            default = session.worker.layers(DEFAULT_ROUTE, INFERENCES)
            winner = session.worker.layers(route, INFERENCES) if not route.is_default else default
            looked = [default] if route.is_default else [default, winner]
            builds = bench.builds + sum(
                1 + (one.builds if one is not None else 0) for one in looked
            )
            models = _models(session, run, route)
    finally:
        for path in folder.glob(f".{EXPLANATION}.sqlite*"):
            path.unlink()
    found = Explanation(
        model.name, route, knobs, minimal, measured, builds, default, winner, models
    )
    write_json(folder / EXPLANATION, found.as_json())
    return found


class _Bench:
    """Builds and times routes, each anew, and counts."""

    def __init__(self, worker: RouteWorker, say: Say) -> None:
        self._worker, self._say, self.builds = worker, say, 0

    def trial(self, route: Route) -> Outcome:
        """The outcome of a route."""
        self.builds += 1
        self._say(f"building {str(route) or 'the default route'}")
        return self._worker.trial(route) if not route.is_default else self._worker.control()


def minimise(
    catalog: Catalog, route: Route, trial: Trial
) -> tuple[tuple[Dropped, ...], Route, tuple[float, float, float]]:
    """Drop each knob of a route alone, then all that it does not lose by together.

    Args:
        catalog: The knobs.
        route: The winner; the default route has nothing to drop.
        trial: Builds and times a route against the default.

    Returns:
        Each knob's part; the smallest route that keeps the speed; its speed-up with its 95 %
        interval. Knobs that make up for one another may only look idle alone: where the small
        route is slower than the winner, the knobs come back one by one, largest effect first.
    """
    if route.is_default:
        return (), route, (1.0, 1.0, 1.0)
    whole = trial(route)
    knobs = tuple(_drop(catalog, route, whole, knob, trial) for knob, _ in route.settings)
    idle = sorted((d for d in knobs if d.is_idle), key=lambda d: d.effect or 0.0)
    while idle:
        small = _without(catalog, route, [d.knob for d in idle])
        outcome = trial(small)
        if _keeps(outcome, whole):
            return knobs, small, _speedup(outcome)
        idle.pop()
    return knobs, route, _speedup(whole)


def _drop(catalog: Catalog, route: Route, whole: Outcome, knob: str, trial: Trial) -> Dropped:
    without = _without(catalog, route, [knob])
    outcome = trial(without)
    value = route.values[knob]
    if outcome.engine_hash and outcome.engine_hash == whole.engine_hash:
        return Dropped(knob, value, without, "same engine", 0.0, 0.0, 0.0)
    if not outcome.is_feasible or outcome.measurement is None or whole.measurement is None:
        reason = f"{outcome.status.value}: {outcome.reason}"
        return Dropped(knob, value, without, "needed", None, None, None, reason)
    effect, low, high = _difference(whole.measurement, outcome.measurement)
    verdict = "matters" if low > 0 else "hurts" if high < 0 else "no measurable effect"
    return Dropped(knob, value, without, verdict, effect, low, high)


def _without(catalog: Catalog, route: Route, knobs: list[str]) -> Route:
    """A route without these knobs, and without those that mean nothing then."""
    settings = {name: value for name, value in route.settings if name not in knobs}
    while True:
        found = catalog.route(settings)
        orphans = [
            name
            for name, value in found.settings
            if not catalog.is_legal(_with_parents(catalog, found, name, value))
        ]
        if not orphans:
            return found
        settings.pop(orphans[0])


def _with_parents(catalog: Catalog, route: Route, name: str, value: str) -> Route:
    """One setting beside the knobs it depends on, as they stand in a route."""
    parents = {rule.parent for rule in catalog.requirements if rule.knob == name}
    kept = {p: route.values[p] for p in parents if p in route.values}
    return catalog.route({**kept, name: value})


def _keeps(outcome: Outcome, whole: Outcome) -> bool:
    """True when an outcome is as good as the winner's, as far as can be told."""
    if outcome.engine_hash and outcome.engine_hash == whole.engine_hash:
        return True
    if not outcome.is_feasible or outcome.measurement is None or whole.measurement is None:
        return False
    return _difference(whole.measurement, outcome.measurement)[1] <= 0


def _difference(a: Measurement, b: Measurement) -> tuple[float, float, float]:
    """Log ratio of two measurements against one default, and its 95 % interval.

    The half widths add in squares: the two were timed apart.
    """
    value = a.log_speedup - b.log_speedup
    low = math.hypot(a.log_speedup - a.low, b.high - b.log_speedup)
    high = math.hypot(a.high - a.log_speedup, b.log_speedup - b.low)
    return value, value - low, value + high


def _speedup(outcome: Outcome) -> tuple[float, float, float]:
    measured = outcome.measurement
    if measured is None:
        return 1.0, 1.0, 1.0
    return measured.speedup, math.exp(measured.low), math.exp(measured.high)


def _objection(catalog: Catalog, route: Route) -> str:
    try:
        return catalog.objection(catalog.route(route.values)) or ""
    except RoutePilotError as error:
        return str(error)


def _models(session: Session, run: Run, winner: Route) -> tuple[Precedent, ...]:
    """Training models that the run's agent leaned on, and what the winner's route did there."""
    from routepilot.env.surrogate import Surrogate

    choice = choose_agent(session, policy=run.policy, agent=run.agent)
    if choice.policy is not None:
        surrogate = choice.policy.surrogate_for(session.catalog)
    elif choice.replay is not None:
        surrogate = Surrogate(choice.replay)
    else:
        return ()
    known = {model.card.name: model for model in surrogate.models}
    near = surrogate.nearest(session.features, NEAREST)
    return tuple(_precedent(known[name], likeness, run.gate, winner) for name, likeness in near)


def _precedent(model: ModelReplay, likeness: float, gate: Gate, winner: Route) -> Precedent:
    judged = [regate(outcome, gate) for outcome in model.outcomes]
    best = max(judged, key=lambda outcome: outcome.gain, default=None)
    gain = best.gain if best is not None else 0.0
    there = judged[model.index[winner]] if winner in model.index else None
    measured = there.measurement if there is not None and there.is_feasible else None
    return Precedent(
        model.card.name,
        likeness,
        measured.speedup if measured is not None else 1.0 if winner.is_default else None,
        there.status.value if there is not None else "",
        str(best.route) if best is not None and gain > 0 else "",
        math.exp(gain),
    )


def _engine(layers: Layers) -> Mapping[str, object]:
    return {
        **layers.as_json(),
        "by_kind": layers.by_kind(),
        "sum_ms": layers.sum_ms,
        "costliest": [asdict(layer) for layer in layers.costliest(COSTLIEST)],
    }


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)
