"""`collect`: measure many routes on many models into one route table.

Owns the plan of routes and the unattended run: one worker a slot (`slots.py`), every outcome
recorded as it comes, repeats as controls, resumed by repeating the command. Knows no agent.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from routepilot.env.accuracy import Gate, regate
from routepilot.env.errors import LostSlotError, RoutePilotError
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route, combine
from routepilot.env.store import RecordStore
from routepilot.env.table_summary import noise_floor
from routepilot.training.enough import Stop
from routepilot.training.manifest import manifest
from routepilot.training.rechecks import LIMITS, unconfirmed_best
from routepilot.training.session import Place, Session, SessionConfig
from routepilot.training.slots import Slot, share_out

#: Gate while collecting: anything that resembles the reference is timed, so that a table can be
#: replayed at any tolerance below this.
COLLECT_GATE = Gate(metric="rel_l2", limit=0.5)


#: Largest product of strong knobs that is planned in full. TensorRT has some twenty knobs of
#: precision.
MOST_PRODUCT = 4096


@dataclass(frozen=True)
class CorpusModel:
    """A model to collect, with what the table says of it."""

    model: Model
    family: str
    trained: bool


@dataclass(frozen=True)
class Repeats:
    """What is built and timed more than once.

    Attributes:
        controls: Rebuilds of the default route, each timed against the first.
        best: How many of a model's fastest routes, at each of `limits`, are built once more: the
            fastest of many noisy figures is the luckiest, and a second one is not. After them at
            most so many more, for as long as what is best then was built once.
        limits: Accuracy limits for `best`.
    """

    controls: int = 3
    best: int = 0
    limits: tuple[float, ...] = LIMITS


@dataclass(frozen=True)
class Neighbourhood:
    """What is built around the fastest routes of a model, besides the routes common to all.

    Attributes:
        centres: How many of the fastest routes are looked around.
        count: Routes a model that differ from a centre by one knob.
        limits: Accuracy limits at which routes count as fastest, in turn.
    """

    centres: int = 5
    count: int = 0
    limits: tuple[float, ...] = (1e-2, 3e-2)


@dataclass(frozen=True)
class Progress:
    """One step of a collection.

    Attributes:
        model: Model name.
        done: Outcomes of this model on record.
        planned: Outcomes planned for it.
        outcome: The newest outcome; None when it was on record already.
        error: Why the model was given up; empty otherwise.
        building: The route whose build begins now; None where a build ended.
        why: Why it is built.
        is_last: True once nothing is left to do for the model, fewer builds than planned or not.
    """

    model: str
    done: int
    planned: int
    outcome: Outcome | None = None
    error: str = ""
    building: Route | None = None
    why: str = ""
    is_last: bool = False


def plan_routes(catalog: Catalog, count: int, seed: int = 0) -> list[Route]:
    """Routes common to all models: one-knob changes, crosses of the strong knobs, random fill.

    Args:
        catalog: Catalog of the backend.
        count: How many routes; the structured ones come first even if they are more.
        seed: Seed of the random part.

    Returns:
        Legal routes without the default, each once: every one-knob change, the full product of
        the knobs marked `engine` or `precision` (of those marked `engine` or `variant` where that
        product is beyond reach), its members each with more changes, drawn at random, until
        `count`.
    """
    strong = [k for k in catalog.knobs if {"engine", "precision"} & set(k.marks)]
    if math.prod(len(k.all_values) for k in strong) > MOST_PRODUCT:
        strong = [k for k in strong if {"engine", "variant"} & set(k.marks)]
    product = [
        dict(zip((k.name for k in strong), values, strict=True))
        for values in itertools.product(*(k.all_values for k in strong))
    ]
    routes = dict.fromkeys(catalog.neighbours(DEFAULT_ROUTE))
    routes.update(dict.fromkeys(combine(catalog, product)))
    routes.pop(DEFAULT_ROUTE, None)
    rng = random.Random(seed)
    bases = [route for route in routes]
    weak = [k for k in catalog.knobs if k not in strong and k.alternatives]
    attempts = 0
    while len(routes) < count and weak and attempts < 100 * count:
        attempts += 1
        settings = dict(rng.choice(bases).values)
        for knob in rng.sample(weak, k=min(len(weak), rng.choice((1, 1, 2, 3)))):
            settings[knob.name] = rng.choice(knob.alternatives)
        route = catalog.route(settings)
        if catalog.is_legal(route):
            routes.setdefault(route)
    return list(routes)


def at_most(plan: Sequence[Route], count: int, seed: int = 0) -> list[Route]:
    """At most so many routes of a plan, drawn at random, in its order.

    Args:
        plan: The routes, each once.
        count: How many at most.
        seed: Seed of the draw.
    """
    places = range(len(plan))
    kept = places if count >= len(plan) else sorted(random.Random(seed).sample(places, count))
    return [plan[place] for place in kept]


def collect(
    models: Sequence[CorpusModel],
    store_path: Path,
    config: SessionConfig,
    routes: Sequence[Route],
    workdir: Path,
    *,
    neighbourhood: Neighbourhood = Neighbourhood(),
    repeats: Repeats = Repeats(),
    slots: Sequence[Slot] = (Slot(cpu=0),),
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    until: Stop | None = None,
) -> None:
    """Measure `routes` on `models`; what is on record already is not measured again.

    Args:
        models: The corpus.
        store_path: SQLite store that receives every outcome.
        config: Session settings; the gate is replaced by `COLLECT_GATE`.
        routes: Routes common to all models.
        workdir: Folder for transforms and logs.
        neighbourhood: What is built around a model's fastest routes.
        repeats: What is built and timed more than once.
        slots: Where to measure, one model at a time each. Keep all else quiet. A slot of a cluster
            that is lost for good gives its model to the others.
        on_progress: Hears every step, from any thread.
        should_stop: Asked before every build; True ends the run with everything saved.
        until: Ends a model's `routes` before their end; its repeats follow all the same.
    """
    report = on_progress or (lambda _: None)

    def work(slot: Slot, entry: CorpusModel) -> None:
        _collect_model(
            entry,
            store_path,
            replace(slot.fit(config), gate=COLLECT_GATE),
            routes,
            workdir,
            neighbourhood,
            repeats,
            report,
            should_stop,
            until,
            slot.place,
        )

    share_out(models, slots, work, should_stop)


def _collect_model(
    entry: CorpusModel,
    store_path: Path,
    config: SessionConfig,
    routes: Sequence[Route],
    workdir: Path,
    around: Neighbourhood,
    plan: Repeats,
    report: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    until: Stop | None,
    place: Place | None,
) -> None:
    name, planned = entry.model.name, planned_builds(len(routes), around, plan)
    with (
        RecordStore(store_path) as store,
        Session(
            entry.model,
            config,
            store,
            workdir / entry.model.fingerprint[:16],
            family=entry.family,
            trained=entry.trained,
            place=place,
        ) as session,
    ):
        done = 0
        try:
            if not session.is_known(DEFAULT_ROUTE):
                report(Progress(name, done, planned, building=DEFAULT_ROUTE, why="the default"))
            session.default()
            done += 1
            report(Progress(name, done, planned))
            built = list(routes)
            watch = until.watch(session, entry.family, routes) if until is not None else None
            for route, why in _planned(session, built, around):
                if should_stop():
                    return
                if watch is not None and watch.is_enough():
                    break
                fresh = not session.is_known(route)
                if fresh:
                    report(Progress(name, done, planned, building=route, why=why))
                outcome = session.outcome(route)
                if watch is not None:
                    watch.tell(route, outcome)
                done += 1
                report(Progress(name, done, planned, outcome if fresh else None))
            known = [route for route in built if session.is_known(route)]
            for route, repeat in _repeats(session, known, plan):
                if should_stop():
                    return
                report(Progress(name, done, planned, building=route, why="timed again"))
                outcome, fresh = session.again(route, repeat)
                done += 1
                report(Progress(name, done, planned, outcome if fresh else None))
            report(Progress(name, done, planned, is_last=True))
        except LostSlotError:
            raise
        except RoutePilotError as error:
            report(Progress(name, done, planned, error=str(error)))


def planned_builds(routes: int, around: Neighbourhood, repeats: Repeats) -> int:
    """Builds of a model at most: the default, `routes` common ones, what lies around, repeats."""
    again = min(repeats.best, routes + around.count) * len(repeats.limits)
    return 1 + routes + around.count + repeats.controls + again + repeats.best


def _planned(
    session: Session, built: list[Route], around: Neighbourhood
) -> Iterator[tuple[Route, str]]:
    """The common routes, then those around the fastest, each with why it is built."""
    yield from ((route, "common to all models") for route in list(built))
    for route in _neighbours(session, built, around):
        yield route, "one knob from a fast route"


def _neighbours(session: Session, built: list[Route], around: Neighbourhood) -> Iterator[Route]:
    """Routes one knob away from the fastest of `built`, the centres in turn; `built` grows."""
    if not around.count:
        return
    ranked = [_fastest(session, built, limit) for limit in around.limits]
    centres = dict.fromkeys(
        route for rank in itertools.zip_longest(*ranked) for route in rank if route is not None
    )
    rng = random.Random(session.model.fingerprint)
    rings = []
    for centre in itertools.islice(centres, around.centres):
        ring = list(session.catalog.neighbours(centre))
        rng.shuffle(ring)
        rings.append(ring)
    known = {DEFAULT_ROUTE, *built}
    in_turn = dict.fromkeys(
        route for turn in itertools.zip_longest(*rings) for route in turn if route is not None
    )
    for route in itertools.islice((r for r in in_turn if r not in known), around.count):
        built.append(route)
        yield route


def _repeats(
    session: Session, routes: Sequence[Route], plan: Repeats
) -> Iterator[tuple[Route, int]]:
    """The default as often as planned, then the fastest routes at each limit, each once more.

    Each is recorded before the next is asked for, since what is best depends on it.
    """
    yield from ((DEFAULT_ROUTE, repeat) for repeat in range(1, plan.controls + 1))
    chosen: dict[Route, None] = {}
    for limit in plan.limits:
        chosen.update(dict.fromkeys(_fastest(session, routes, limit)[: plan.best]))
    yield from ((route, 1) for route in chosen)
    for _ in range(plan.best):
        best = unconfirmed_best(session.builds(), plan.limits)
        if best is None:
            return
        yield best, 1


def _fastest(session: Session, routes: Sequence[Route], limit: float) -> list[Route]:
    """The built `routes` that are faster than the default at an accuracy limit, best first."""
    judged = [regate(session.outcome(route), Gate(limit=limit)) for route in routes]
    faster = sorted((o for o in judged if o.log_speedup > 0), key=lambda o: -o.log_speedup)
    return [o.route for o in faster]


def table_from_store(
    store_path: Path, target_key: str, fingerprints: Sequence[str], facts: Mapping[str, object]
) -> RouteTable:
    """The route table of a collection, with its manifest.

    Args:
        store_path: The store.
        target_key: Target whose outcomes go in.
        fingerprints: Models that go in.
        facts: What the caller adds to the manifest, beside the date and the noise floor: the log
            ratio that 95 % of the controls stay below.
    """
    with RecordStore(store_path) as store:
        table = store.table(target_key).only(fingerprints)
    collected = time.strftime("%Y-%m-%d", time.gmtime())
    floor = noise_floor(table)
    return replace(table, manifest=manifest(collected=collected, noise_floor=floor, **dict(facts)))
