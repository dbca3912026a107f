"""`collect`: measure many routes on many models into one route table.

Owns the plan of routes and the unattended run: one pinned worker a core, every outcome recorded
as it comes, repeats as controls, resumed by repeating the command. Knows no agent.
"""

from __future__ import annotations

import itertools
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from routepilot.env.accuracy import Gate, regate
from routepilot.env.errors import RoutePilotError
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route, combine
from routepilot.env.store import RecordStore
from routepilot.training.manifest import manifest
from routepilot.training.session import Session, SessionConfig

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
            fastest of many noisy figures is the luckiest, and a second one is not.
        limits: Accuracy limits for `best`.
    """

    controls: int = 3
    best: int = 0
    limits: tuple[float, ...] = (1e-2, 3e-2)


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
    """

    model: str
    done: int
    planned: int
    outcome: Outcome | None = None
    error: str = ""


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


def collect(
    models: Sequence[CorpusModel],
    store_path: Path,
    config: SessionConfig,
    routes: Sequence[Route],
    workdir: Path,
    *,
    neighbourhood: Neighbourhood = Neighbourhood(),
    repeats: Repeats = Repeats(),
    cores: Sequence[int | None] = (0,),
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
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
        cores: Core of each worker, which takes one model at a time; None pins it to none. Keep
            all else quiet.
        on_progress: Hears every step, from any thread.
        should_stop: Asked before every build; True ends the run with everything saved.
    """
    waiting: queue.SimpleQueue[CorpusModel] = queue.SimpleQueue()
    for model in models:
        waiting.put(model)
    report = on_progress or (lambda _: None)
    faults: list[BaseException] = []

    def work(core: int | None) -> None:
        try:
            while not should_stop() and not faults:
                try:
                    entry = waiting.get_nowait()
                except queue.Empty:
                    return
                _collect_model(
                    entry,
                    store_path,
                    replace(config, gate=COLLECT_GATE, cpu=core),
                    routes,
                    workdir,
                    neighbourhood,
                    repeats,
                    report,
                    should_stop,
                )
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(core,), daemon=True) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)
    if faults:
        raise faults[0]


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
) -> None:
    planned = len(routes) + around.count + plan.controls + 1
    with (
        RecordStore(store_path) as store,
        Session(
            entry.model,
            config,
            store,
            workdir / entry.model.fingerprint[:16],
            family=entry.family,
            trained=entry.trained,
        ) as session,
    ):
        done = 0
        try:
            session.default()
            done += 1
            built = list(routes)
            for route in itertools.chain(routes, _neighbours(session, built, around)):
                if should_stop():
                    return
                fresh = not session.is_known(route)
                outcome = session.outcome(route)
                done += 1
                report(Progress(entry.model.name, done, planned, outcome if fresh else None))
            for route, repeat in _repeats(session, built, plan):
                if should_stop():
                    return
                outcome, fresh = session.again(route, repeat)
                done += 1
                report(Progress(entry.model.name, done, planned, outcome if fresh else None))
        except RoutePilotError as error:
            report(Progress(entry.model.name, done, planned, error=str(error)))


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
    """The default as often as planned, then the fastest routes at each limit, each once more."""
    yield from ((DEFAULT_ROUTE, repeat) for repeat in range(1, plan.controls + 1))
    chosen: dict[Route, None] = {}
    for limit in plan.limits:
        chosen.update(dict.fromkeys(_fastest(session, routes, limit)[: plan.best]))
    yield from ((route, 1) for route in chosen)


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
        facts: What the caller adds to the manifest.
    """
    with RecordStore(store_path) as store:
        table = store.table(target_key)
    collected = time.strftime("%Y-%m-%d", time.gmtime())
    return replace(table.only(fingerprints), manifest=manifest(collected=collected, **dict(facts)))
