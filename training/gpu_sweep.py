"""A sweep for scarce device time: many models, routes by priority, partial tables as it goes.

Owns the order of the work, the budget of seconds and what is written meanwhile. One route is built
and timed through a `Session`, as everywhere; this module decides which one is next, so that a cut
at any moment leaves a balanced table. Knows no compiler: the backend is an option.

Models take turns of a few routes each, so every model gets its first routes before any gets its
last. Lanes are threads with models of their own: while one lane prepares a file or judges outputs
on the CPU, another may have the GPU, which the backend's lock gives to one at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from routepilot.env import zoo
from routepilot.env.accuracy import Gate
from routepilot.env.backends import load_backend
from routepilot.env.errors import InputError, RoutePilotError
from routepilot.env.measure import TimingPlan
from routepilot.env.models import Model, is_bundle
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route
from routepilot.env.store import RecordStore
from routepilot.env.table_summary import describe_table
from routepilot.env.tables import load_table, save_table
from routepilot.env.wording import counted
from routepilot.training.collect import COLLECT_GATE, plan_routes, table_from_store
from routepilot.training.rechecks import unconfirmed_best
from routepilot.training.session import Session, SessionConfig

#: Timing of a GPU engine: a block holds a hundred launches of most models, so that few and short
#: blocks settle it. Rounds stop early as everywhere.
PLAN = TimingPlan(
    block_seconds=0.012, warmup_seconds=0.03, max_rounds=10, precision=0.01, max_seconds=6.0
)

#: Routes that a model gets in one turn.
TURN = 6

#: How many times a model may fail to open before it is given up.
PATIENCE = 2

#: Seconds that a lane in the middle of a build is waited for when the time is up.
GRACE = 4.0


@dataclass(frozen=True)
class Step:
    """One thing to measure: a route for the first time, or once more.

    Attributes:
        route: The route.
        repeat: 0 for the first build; 1 and up for a repeat, of the default route a control.
    """

    route: Route
    repeat: int = 0


@dataclass(frozen=True)
class SweepOptions:
    """Everything that shapes a sweep.

    Attributes:
        models: Folder of prepared models; those that appear there later join.
        out: Folder for the store, the table and the summary.
        backend: Backend name.
        backend_options: Its options.
        seconds: Wall-clock budget.
        routes: Routes a model, the default not counted.
        controls: Rebuilds of the default route a model.
        recheck: At most so many second builds a model, of what is best on one build.
        lanes: Models worked on at once.
        flush_seconds: How often the table is written.
        deadline_seconds: Limit of one build with its measurement.
        resume: Tables of earlier slices, whose outcomes are not measured again.
        only: Names of the models to sweep; all when empty.
        seed: Seed of the random routes.
        plan: Timing plan.
    """

    models: Path
    out: Path
    backend: str = "cuda"
    backend_options: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 500.0
    routes: int = 64
    controls: int = 3
    recheck: int = 0
    lanes: int = 3
    flush_seconds: float = 15.0
    deadline_seconds: float = 45.0
    resume: tuple[Path, ...] = ()
    only: tuple[str, ...] = ()
    seed: int = 0
    plan: TimingPlan = PLAN


def plan_steps(catalog: Catalog, routes: int, controls: int, seed: int = 0) -> list[Step]:
    """What to measure on every model, most informative first.

    The first control, then every change of one knob with the strong knobs (precision, layout) in
    front, their product, and combinations drawn at random until `routes`; the other controls are
    spread evenly over the rest, so that a control stands beside figures of its time.

    Args:
        catalog: Catalog of the backend.
        routes: How many routes.
        controls: How many rebuilds of the default.
        seed: Seed of the random part.
    """
    planned = plan_routes(catalog, routes, seed)[:routes]
    strong = {knob.name for knob in catalog.knobs if {"engine", "precision"} & set(knob.marks)}
    planned.sort(key=lambda r: not (len(r.settings) == 1 and r.settings[0][0] in strong))
    steps = [Step(route) for route in planned]
    for number in range(controls, 1, -1):
        steps.insert(
            round(len(planned) * (number - 1) / max(1, controls - 1)), Step(DEFAULT_ROUTE, number)
        )
    return ([Step(DEFAULT_ROUTE, 1)] if controls else []) + steps


@dataclass
class Work:
    """A model and what is left to do on it.

    Attributes:
        model: The model.
        family: Its family, from the corpus.
        trained: Whether its weights are trained.
        steps: What is left, in order.
        rechecks: How many second builds are left at most.
        failures: How many times it could not be opened.
        session: The open session.
        error: Why it was given up.
    """

    model: Model
    family: str
    trained: bool
    steps: list[Step]
    rechecks: int = 0
    failures: int = 0
    session: Session | None = None
    error: str = ""

    @property
    def is_open(self) -> bool:
        """True while there is something left to do."""
        return bool(self.steps or self.rechecks) and self.failures < PATIENCE


class Sweep:
    """The lanes and what they share.

    Args:
        options: Settings.

    Raises:
        InputError: There is no model in the folder, or a table to resume is unusable.
    """

    def __init__(self, options: SweepOptions) -> None:
        self.options = options
        options.out.mkdir(parents=True, exist_ok=True)
        self.store_path = options.out / "sweep.sqlite"
        backend = load_backend(options.backend, options.backend_options)
        self.target, catalog = backend.target(), backend.catalog()
        self.steps = plan_steps(catalog, options.routes, options.controls, options.seed)
        with RecordStore(self.store_path) as store:
            store.add_target(self.target, catalog)
            for path in options.resume:
                table = load_table(path)
                difference = self.target.difference(table.target)
                if difference:
                    say(f"{path.name} is of another target and is not resumed: {difference}")
                store.put_table(table)
        self.works: list[Work] = []
        self._lanes: list[list[Work]] = [[] for _ in range(options.lanes)]
        self._lock = threading.Lock()
        self._end = time.monotonic() + options.seconds
        self.fresh = 0
        self.look_for_models()
        if not self.works:
            raise InputError(
                f"no prepared model in {str(options.models)!r}; `routepilot zoo export -o` makes"
                " such a folder"
            )

    @property
    def seconds_left(self) -> float:
        """Of the budget."""
        return self._end - time.monotonic()

    def look_for_models(self) -> None:
        """Take in models that are new in the folder, small ones first, evenly over the lanes."""
        known = {work.model.folder for work in self.works}
        found = [f for f in self.options.models.iterdir() if f not in known and is_bundle(f)]
        for folder in sorted(found, key=_size):
            model = Model.load(folder)
            if self.options.only and model.name not in self.options.only:
                continue
            family, trained = zoo.described(model.name)
            work = Work(model, family, trained, list(self.steps), self.options.recheck)
            with self._lock:
                self.works.append(work)
                min(self._lanes, key=len).append(work)

    def run(self) -> dict[str, Any]:
        """Sweep until the time is up or nothing is left; returns the summary."""
        threads = [
            threading.Thread(target=self._lane, args=(lane,), daemon=True) for lane in self._lanes
        ]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        flushed = start
        while any(thread.is_alive() for thread in threads) and self.seconds_left > -GRACE:
            time.sleep(0.25)
            if time.monotonic() - flushed >= self.options.flush_seconds:
                self.look_for_models()
                self.flush(time.monotonic() - start)
                flushed = time.monotonic()
        return self.flush(time.monotonic() - start)

    def _lane(self, lane: list[Work]) -> None:
        """One thread: its models take turns. A session stays with the thread that opened it."""
        with ExitStack() as opened, RecordStore(self.store_path) as store:
            while self.seconds_left > 0:
                with self._lock:
                    waiting = [work for work in lane if work.is_open]
                    ended = not any(work.is_open for work in self.works)
                if waiting:  # who has most left, so that late comers catch up
                    self._turn(max(waiting, key=lambda work: len(work.steps)), store, opened)
                elif ended:
                    return
                else:  # other lanes work on, and a new model may come
                    time.sleep(0.25)

    def _turn(self, work: Work, store: RecordStore, opened: ExitStack) -> None:
        try:
            if work.session is None:
                work.session = opened.enter_context(self._session(work, store))
                work.session.default()
            for _ in range(min(TURN, len(work.steps))):
                if self.seconds_left <= 0:
                    return
                self._step(work.session, work.steps[0])
                work.steps.pop(0)
            while not work.steps and work.rechecks and self.seconds_left > 0:
                self._recheck(work, work.session)
        except RoutePilotError as error:
            work.failures += 1
            work.error = str(error)
            say(f"{work.model.name}: {error}")
            if work.session is not None:
                work.session.close()
                work.session = None

    def _step(self, session: Session, step: Step) -> None:
        if step.repeat:
            _, fresh = session.again(step.route, step.repeat)
        else:
            fresh = not session.is_known(step.route)
            session.outcome(step.route)
        with self._lock:
            self.fresh += fresh

    def _recheck(self, work: Work, session: Session) -> None:
        """Build once more what is best on one build; nothing is left where there is no such."""
        best = unconfirmed_best(session.builds())
        work.rechecks = 0 if best is None else work.rechecks - 1
        if best is not None:
            self._step(session, Step(best, 1))

    def _session(self, work: Work, store: RecordStore) -> Session:
        options = self.options
        config = SessionConfig(
            backend=options.backend,
            options=options.backend_options,
            gate=COLLECT_GATE,
            plan=options.plan,
            deadline_seconds=options.deadline_seconds,
        )
        workdir = options.out / "work" / work.model.folder.name
        return Session(work.model, config, store, workdir, family=work.family, trained=work.trained)

    def flush(self, elapsed: float) -> dict[str, Any]:
        """Write the table and the summary; returns the summary."""
        names = [work.model.fingerprint for work in self.works]
        facts = {
            "sweep_seconds": round(elapsed, 1),
            "lanes": self.options.lanes,
            "seed": self.options.seed,
            "routes": self.options.routes,
            "controls": self.options.controls,
            "recheck": self.options.recheck,
        }
        table = table_from_store(self.store_path, self.target.key, names, facts)
        save_table(table, self.options.out / "table.parquet")
        summary = {
            **describe_table(table, Gate()),
            "elapsed_seconds": round(elapsed, 1),
            "fresh_outcomes": self.fresh,
            "left": {work.model.name: len(work.steps) for work in self.works if work.steps},
            "given_up": {w.model.name: w.error for w in self.works if w.failures >= PATIENCE},
        }
        text = json.dumps(summary, indent=1, default=str)
        (self.options.out / "summary.json").write_text(text + "\n", encoding="utf-8")
        say(
            f"{elapsed:.0f} s: {counted(self.fresh, 'outcome')},"
            f" {sum(len(w.steps) for w in self.works)} left,"
            f" {counted(len(self.works), 'model')}"
        )
        return summary


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def _size(folder: Path) -> int:
    return sum(item.stat().st_size for item in folder.glob("model.onnx*"))


def print_summary(summary: Mapping[str, Any]) -> None:
    """The summary as a short table, the worst news first."""
    for name, error in summary["given_up"].items():
        say(f"given up: {name}: {error}")
    for row in summary["reasons"]:
        say(f"{row['builds']:5d} x {row['status']}: {row['reason']}")
    say(f"{'model':24} {'ms':>9} {'routes':>6} {'feasible':>8} {'best':>6}  route")
    for model in summary["models"]:
        say(
            f"{model['name']:24} {model['default_latency_ms']:9.4f} {model['routes']:6d}"
            f" {model['feasible']:8d} {model['best_speedup']:6.2f}  {model['best_route']}"
        )
    controls = summary["controls"]
    say(
        f"controls: {controls['count']}, median {100 * math.expm1(controls['median']):.2f} %,"
        f" largest {100 * math.expm1(controls['largest']):.2f} %"
    )
    say(f"statuses: {summary['statuses']}; oracle {summary['oracle_speedup']:.3f}x")


def parse(arguments: Sequence[str]) -> SweepOptions:
    """Options from a command line."""
    parser = argparse.ArgumentParser(prog="gpu_sweep", description=__doc__.split("\n")[0])
    parser.add_argument("models", type=Path, help="folder of prepared models (zoo export)")
    parser.add_argument("--out", "-o", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seconds", type=float, default=500.0, help="budget, wall clock")
    parser.add_argument("--routes", type=int, default=64, help="routes a model")
    parser.add_argument("--controls", type=int, default=3, help="rebuilds of the default a model")
    parser.add_argument(
        "--recheck",
        type=int,
        default=0,
        help="second builds a model at most, of what is best on one build",
    )
    parser.add_argument("--lanes", type=int, default=3, help="models worked on at once")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--option", action="append", default=[], help="backend option NAME=VALUE")
    parser.add_argument("--resume", type=Path, nargs="*", default=[], help="earlier tables")
    parser.add_argument("--only", default="", help="model names, separated by commas")
    parser.add_argument("--deadline", type=float, default=45.0, help="seconds of one build")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if not given.models.is_dir():
        raise InputError(f"model folder {str(given.models)!r} does not exist; give a folder")
    if given.lanes < 1 or given.seconds <= 0:
        raise InputError("--lanes and --seconds take numbers above 0")
    if given.recheck < 0:
        raise InputError(f"--recheck {given.recheck} is not allowed; give 0 or more")
    return SweepOptions(
        given.models,
        given.out,
        given.backend,
        dict(text.split("=", 1) for text in given.option if "=" in text),
        given.seconds,
        given.routes,
        given.controls,
        given.recheck,
        given.lanes,
        deadline_seconds=given.deadline,
        resume=tuple(given.resume),
        only=tuple(name for name in given.only.split(",") if name),
        seed=given.seed,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep; 0 when something was measured or known, 2 for bad input, 1 otherwise."""
    try:
        sweep = Sweep(parse(sys.argv[1:] if arguments is None else arguments))
        print_summary(sweep.run())
    except RoutePilotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a lane in the middle of a build must not hold the exit up
