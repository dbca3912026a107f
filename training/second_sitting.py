"""Time the engines of a table again that decide what is best, on a quiet machine.

    python -m routepilot.training.second_sitting checkpoints/tables/cpu.parquet -o again.parquet

Owns which engines those are and how their new figures replace the old. A table is measured with
many workers at once, and beside a busy neighbour one engine can be half as fast as beside an idle
one; among ten engines of one speed the lucky one then looks best. What is timed again here is timed
by one worker. The same command again goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from routepilot.env import zoo
from routepilot.env.backends import load_backend
from routepilot.env.backends.base import Target
from routepilot.env.errors import InputError, RoutePilotError
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome
from routepilot.env.records import ModelCard, RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.tables import load_table, save_table
from routepilot.env.wording import counted
from routepilot.training.collect import CorpusModel, Progress, Repeats, collect, table_from_store
from routepilot.training.session import SessionConfig
from routepilot.training.slots import Slot

#: Relative L2 errors at each of which a model's fastest engines are timed again.
LIMITS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)

#: What is built once more in the sitting itself: the default, and the fastest at the limits that a
#: collection builds twice at (`rechecks.LIMITS`).
REPEATS = Repeats(controls=2, best=3)

Outcomes = Mapping[Route, tuple[Outcome, ...]]


def engines(outcomes: Outcomes) -> dict[str, list[Route]]:
    """The timed routes of a model by the hash of their engine, the shortest route first."""
    found: dict[str, list[Route]] = {}
    for route, builds in outcomes.items():
        if not route.is_default and builds[0].measurement is not None and builds[0].engine_hash:
            found.setdefault(builds[0].engine_hash, []).append(route)
    return {
        key: sorted(routes, key=lambda r: (len(str(r)), str(r))) for key, routes in found.items()
    }


def worth_again(
    outcomes: Outcomes, fastest: int, marks: Sequence[str], limits: Sequence[float] = LIMITS
) -> list[Route]:
    """One route for each engine that is to be timed again, the fastest first.

    Args:
        outcomes: Of one model.
        fastest: How many engines at each limit.
        marks: Settings whose engines are timed again wherever they are accurate at all.
        limits: Limits on the relative L2 error.
    """
    shared = engines(outcomes)
    speed = {key: _fastest_figure(outcomes, routes) for key, routes in shared.items()}
    loss = {key: outcomes[routes[0]][0].losses["rel_l2"] for key, routes in shared.items()}
    ranked = sorted(shared, key=lambda key: -speed[key])
    wanted = {
        key
        for key in ranked
        if loss[key] < max(limits) and any(mark in str(shared[key][0]) for mark in marks)
    }
    for limit in limits:
        wanted.update([key for key in ranked if loss[key] < limit][:fastest])
    return [shared[key][0] for key in ranked if key in wanted]


def _fastest_figure(outcomes: Outcomes, routes: Sequence[Route]) -> float:
    return max(
        outcome.measurement.log_speedup
        for route in routes
        for outcome in outcomes[route]
        if outcome.measurement is not None
    )


def with_sitting(table: RouteTable, again: RouteTable) -> RouteTable:
    """The table with the figures of a second sitting in the place of its own.

    What was timed again has only the new builds; routes that gave the same engine have its new
    figure; all else stays. Losses and seconds of a route that was not built again stay its own.
    """
    merged = dict(table.outcomes)
    latency = {}
    for card in again.models:
        old, new = table.outcomes[card.fingerprint], again.outcomes[card.fingerprint]
        mine = dict(old)
        for routes in engines(old).values():
            timed = [r for r in routes if r in new and new[r][0].measurement is not None]
            for route in routes if timed else ():
                figure = new[timed[0]]
                mine[route] = new[route] if route in new else _figures_of(figure, old[route][0])
        if DEFAULT_ROUTE in new:
            mine[DEFAULT_ROUTE] = new[DEFAULT_ROUTE]
            latency[card.fingerprint] = card.default_latency_ms
        merged[card.fingerprint] = mine
    return replace(
        table,
        outcomes=merged,
        models=tuple(_retimed(card, latency) for card in table.models),
    )


def _retimed(card: ModelCard, latency: Mapping[str, float]) -> ModelCard:
    return replace(card, default_latency_ms=latency.get(card.fingerprint, card.default_latency_ms))


def _figures_of(figures: Sequence[Outcome], own: Outcome) -> tuple[Outcome, ...]:
    """Outcomes of a route with the figures of another that gave the same engine."""
    return tuple(replace(own, measurement=f.measurement) for f in figures if f.measurement)


def check_machine(table: RouteTable, target: Callable[[], Target]) -> None:
    """Refuse to mix figures of two processors, or of engines that this cannot time.

    Args:
        table: The table.
        target: Tells the target of its backend here; asked only if the table is of a processor.

    Raises:
        InputError: The table is of another kind of engine, device or number of threads.
    """
    there = table.target
    if "threads" not in there.settings:
        raise InputError(
            f"the table is of backend {there.backend}; a second sitting times engines that run on a"
            " processor, of cpu, onnxruntime or openvino"
        )
    here = target()
    if here.device != there.device:
        raise InputError(
            f"the table was measured on {there.device} and this is {here.device}; give a table of"
            " this processor, or collect one with `routepilot collect`"
        )


def main() -> None:
    """See the module."""
    try:
        _run()
    except RoutePilotError as error:
        print(f"second_sitting: {error}", file=sys.stderr)
        sys.exit(2)


def _run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True, help="Table to write.")
    parser.add_argument("--core", type=int, default=1, help="Core to time on.")
    parser.add_argument("--fastest", type=int, default=12, help="Engines a model and limit.")
    parser.add_argument("--marks", default="bf16", help="Settings timed wherever accurate.")
    parser.add_argument("--seconds", type=float, default=3600.0, help="Begin no build after.")
    wanted = parser.parse_args()
    table, store = load_table(wanted.table), wanted.out.with_suffix(".sqlite")
    threads = table.target.settings.get("threads", "1")
    config = SessionConfig(backend=table.target.backend, options={"threads": threads})
    check_machine(table, lambda: load_backend(config.backend, config.options).target())
    end, marks = time.monotonic() + wanted.seconds, wanted.marks.split(",")
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    for card, model in _corpus(table):
        if time.monotonic() > end:
            print("the time is up; the same command goes on", flush=True)
            break
        routes = worth_again(table.outcomes[card.fingerprint], wanted.fastest, marks)
        begun = time.monotonic()
        collect(
            [CorpusModel(model, card.family, card.trained)],
            store,
            config,
            routes,
            wanted.out.parent / "sitting",
            repeats=REPEATS,
            slots=(Slot(cpu=wanted.core),),
            on_progress=_say_errors,
            should_stop=lambda: time.monotonic() > end,
        )
        spent = time.monotonic() - begun
        print(f"{card.name}: {counted(len(routes), 'engine')}, {spent:.0f} s", flush=True)
    target = load_backend(config.backend, config.options).target()
    again = table_from_store(store, target.key, list(table.outcomes), {})
    save_table(with_sitting(table, again), wanted.out)


def _corpus(table: RouteTable) -> Iterator[tuple[ModelCard, Model]]:
    for card in table.models:
        model = zoo.load_model(card.name)
        if model.fingerprint == card.fingerprint:
            yield card, model
        else:
            print(f"{card.name}: another model than the table's; left out", flush=True)


def _say_errors(progress: Progress) -> None:
    if progress.error:
        print(f"{progress.model}: {progress.error}", flush=True)


if __name__ == "__main__":
    main()
