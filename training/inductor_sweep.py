"""A route table of Inductor for scarce device time: builds on every core, timings alone.

Owns the order of the work, the budget of seconds and what is written meanwhile. Builds run ahead in
children (`inductor_builders.py`); when enough packages wait, all builds are stopped and the
packages are timed one after another, each beside its model's default route in one process. The
model with most left is served first, so a cut at any moment leaves a balanced table, and tables of
slices merge.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from routepilot.env import programs, zoo
from routepilot.env.accuracy import Gate
from routepilot.env.backends.inductor import InductorBackend
from routepilot.env.backends.inductor_package import READY, Package, put_ready
from routepilot.env.errors import InputError, RoutePilotError
from routepilot.env.measure import TimingPlan
from routepilot.env.models import Model, is_bundle
from routepilot.env.outcomes import Outcome
from routepilot.env.records import Record
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.store import RecordStore
from routepilot.env.table_summary import describe_table
from routepilot.env.tables import load_table, save_table
from routepilot.env.wording import counted
from routepilot.training.collect import COLLECT_GATE, table_from_store
from routepilot.training.inductor_builders import Builders, Built
from routepilot.training.inductor_plan import planned, read_plan
from routepilot.training.session import Session, SessionConfig

#: Timing on a GPU, where a block holds a hundred launches of most models.
GPU_PLAN = TimingPlan(
    block_seconds=0.012, warmup_seconds=0.03, max_rounds=10, precision=0.01, max_seconds=6.0
)

#: A batch of packages is timed when this many wait for each build worker, or after `PATIENCE`.
BATCH = 0.6

#: Longest wait of a package that is built, seconds.
PATIENCE = 45.0

#: Failures of a model's child after which the model is given up.
MOST_FAILURES = 3


@dataclass(frozen=True)
class SweepOptions:
    """Everything that shapes a sweep.

    Attributes:
        names: Corpus models, program files (`.pt2`) or folders of prepared models.
        out: Folder for models, store, table and summary.
        seconds: Wall-clock budget, setting up included.
        build_workers: Builds at once.
        routes: Routes a model, the default not counted.
        controls: Rebuilds of the default route a model.
        texts: Routes to take in the place of the built-in plan.
        options: Backend options.
        resume: Tables of earlier slices, whose outcomes are not measured again.
        deadline_seconds: Limit of one build.
        flush_seconds: How often the table is written.
        seed: Seed of the random routes.
    """

    names: tuple[str, ...]
    out: Path
    seconds: float = 500.0
    build_workers: int = 2
    routes: int = 48
    controls: int = 3
    texts: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    resume: tuple[Path, ...] = ()
    deadline_seconds: float = 240.0
    flush_seconds: float = 20.0
    seed: int = 0


@dataclass
class Work:
    """A model and how far it is.

    Attributes:
        model: The model.
        family: Its family.
        trained: Whether its weights are trained.
        steps: Routes to build, with which repeat; the default comes first.
        session: Its outcomes and its child.
        default: Package of the default route, kept for every start of the child.
        failures: How often its child failed.
        error: Why it was given up.
    """

    model: Model
    family: str
    trained: bool
    steps: list[tuple[Route, int]]
    session: Session
    default: Package | None = None
    failures: int = 0
    error: str = ""


@dataclass(frozen=True)
class Job:
    """One build: for which model, of which route, the how-manieth."""

    work: Work
    route: Route
    repeat: int


class Sweep:
    """A sweep over models.

    Args:
        options: Settings.

    Raises:
        InputError: No model can be made ready, or an option is unusable.
    """

    def __init__(self, options: SweepOptions) -> None:
        self.options = options
        self._start = time.monotonic()
        options.out.mkdir(parents=True, exist_ok=True)
        self._store_path = options.out / "sweep.sqlite"
        self._backend = InductorBackend(options.options)
        self._target, catalog = self._backend.target(), self._backend.catalog()
        self._opened = ExitStack()
        self._store = self._opened.enter_context(RecordStore(self._store_path))
        self._store.add_target(self._target, catalog)
        for path in options.resume:
            table = load_table(path)
            difference = self._target.difference(table.target)
            if difference:
                raise InputError(f"{path} is of another target: {difference}; leave it out")
            self._store.put_table(table)
        routes = planned(catalog, options.routes, options.seed, options.texts)
        self._lock = options.out / "benchmark.lock"
        self._builders: Builders[Job] = Builders(
            options.out / "builds", self._lock, options.build_workers, options.deadline_seconds
        )
        self.unready: dict[str, str] = {}
        self.works = [self._work(model, routes) for model in self._models()]
        if not self.works:
            raise InputError(f"no model can be made ready: {self.unready}")
        with ThreadPoolExecutor(max(1, options.build_workers)) as pool:
            # Now rather than at the first timing, while every build would stand still.
            list(pool.map(lambda work: work.session.features, self.works))
        say(f"features of {counted(len(self.works), 'model')} known after {self.elapsed:.0f} s")
        self._seen: list[float] = []
        self._spent = {"paused": 0.0, "timed": 0}
        self._flushed = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def _left(self) -> float:
        return self.options.seconds - self.elapsed

    def _models(self) -> list[Model]:
        """Every model that can be made ready, several at once; the others are named."""
        cache = self.options.out / "models"

        def ready(name: str) -> Model | None:
            try:
                if is_bundle(Path(name)):
                    return Model.load(Path(name))
                if name.endswith(".pt2"):
                    return programs.prepare_program(Path(name), cache=cache)
                return programs.prepare_zoo_program(name, cache)
            except RoutePilotError as error:
                self.unready[name] = str(error)
                say(f"{name}: {error}")
                return None

        with ThreadPoolExecutor(max(1, self.options.build_workers)) as pool:
            found = [model for model in pool.map(ready, self.options.names) if model is not None]
        say(f"{counted(len(found), 'model')} ready after {self.elapsed:.0f} s")
        return found

    def _work(self, model: Model, routes: Sequence[Route]) -> Work:
        known = self._store.outcomes(model.fingerprint, self._target.key)
        steps = [(route, 0) for route in routes if route not in known]
        done = len(known.get(DEFAULT_ROUTE, ()))
        for number in range(max(1, done), self.options.controls + 1):
            # The first beside the first routes, the others spread, so that each has neighbours.
            at = round(len(steps) * (number - 1) / max(1, self.options.controls))
            steps.insert(min(len(steps), max(at, number - 1)), (DEFAULT_ROUTE, number))
        if steps:
            steps.insert(0, (DEFAULT_ROUTE, 0))
        try:
            entry = zoo.entry(model.name)
            family, trained = entry.family, entry.trained
        except InputError:
            family, trained = "unknown", True
        plan = GPU_PLAN if self._backend.device == "cuda" else TimingPlan()
        config = SessionConfig(
            "inductor", self.options.options, COLLECT_GATE, plan, self.options.deadline_seconds
        )
        place = self.options.out / "work" / model.folder.name
        shutil.rmtree(place, ignore_errors=True)  # packages of a run that was cut
        session = self._opened.enter_context(
            Session(model, config, self._store, place, family=family, trained=trained)
        )
        return Work(model, family, trained, steps, session)

    def run(self) -> dict[str, Any]:
        """Sweep until the time is up or nothing is left; returns the summary."""
        waiting: list[Built[Job]] = []
        since = time.monotonic()
        try:
            while self._left > 0:
                for built in self._builders.finished():
                    if not waiting:
                        since = time.monotonic()
                    self._take(built, waiting)
                self._feed()
                most = max(1, round(BATCH * self.options.build_workers))
                late = time.monotonic() - since > PATIENCE or not self._builders.running
                timeable = [built for built in waiting if not self._must_wait(built)]
                if timeable and (len(timeable) >= most or late):
                    waiting = [built for built in waiting if built not in timeable]
                    since = time.monotonic()
                    self._time(timeable)
                elif not waiting and not self._builders.running and not self._has_work():
                    break
                if time.monotonic() - self._flushed >= self.options.flush_seconds:
                    self.flush()
                time.sleep(0.1)
        finally:
            self._builders.close()
            for work in self.works:
                work.session.close()
        return self.flush()

    def close(self) -> None:
        """Free the store."""
        self._opened.close()

    def _must_wait(self, built: Built[Job]) -> bool:
        """True while its model's default route is being built, or the child that times starts."""
        work = built.job.work
        if work.error:
            return False
        return work.default is None or work.session.worker.is_starting

    def _has_work(self) -> bool:
        return any(work.steps for work in self.works)

    def _feed(self) -> None:
        """Start builds: the model with most steps left first, its steps in order."""
        typical = statistics.median(self._seen) if self._seen else 0.0
        while self._builders.has_room and self._left > 1.2 * typical:
            open_works = [work for work in self.works if work.steps]
            if not open_works:
                return
            work = max(open_works, key=lambda one: len(one.steps))
            route, repeat = work.steps.pop(0)
            request = self._backend.request(work.model, route, str(self._lock))
            self._builders.start(Job(work, route, repeat), request)

    def _take(self, built: Built[Job], waiting: list[Built[Job]]) -> None:
        """Put a finished build where it belongs; a failed one is an outcome at once."""
        job, result = built.job, built.result
        self._seen.append(built.seconds)
        if isinstance(result, Package):
            if job.route.is_default and not job.repeat:
                job.work.default = result
                job.work.session.worker.wake()  # its libraries load while builds go on
            waiting.append(built)
            return
        if job.route.is_default:
            self._fail(job.work, f"the default route: {result.status.value}: {result.reason}")
            return
        outcome = Outcome(job.route, result.status, result.reason, build_seconds=built.seconds)
        self._store.add(
            Record(job.work.model.fingerprint, self._target.key, outcome, created=time.time())
        )

    def _fail(self, work: Work, error: str) -> None:
        work.failures += 1
        work.error = error
        say(f"{work.model.name}: {error}")
        if work.default is None or work.failures >= MOST_FAILURES:
            work.steps = []

    def _time(self, waiting: list[Built[Job]]) -> None:
        """Time what waits, default routes first, with every build stopped."""
        waiting = sorted(waiting, key=lambda built: (built.job.repeat, str(built.job.route) != ""))
        start = time.monotonic()
        with self._builders.paused():
            for built in waiting:
                if self._left > 0 and built.job.work.default is not None:
                    self._time_one(built)
                job = built.job
                if isinstance(built.result, Package) and built.result is not job.work.default:
                    shutil.rmtree(built.result.folder, ignore_errors=True)
        self._spent["paused"] += time.monotonic() - start
        self._spent["timed"] += len(waiting)
        self.flush()

    def _time_one(self, built: Built[Job]) -> None:
        job, work = built.job, built.job.work
        workdir = self.options.out / "work" / work.model.folder.name
        assert isinstance(built.result, Package) and work.default is not None
        try:
            put_ready(work.default, workdir, DEFAULT_ROUTE)
            work.session.default()
            if job.repeat:
                _ = work.session.worker.default_outcome()  # a child that is up takes no package
                shutil.rmtree(workdir / READY / DEFAULT_ROUTE.key, ignore_errors=True)
            if job.repeat or not job.route.is_default:
                put_ready(built.result, workdir, job.route)
            if job.repeat:  # controls may end in another order than they were started in
                known = self._store.outcomes(work.model.fingerprint, self._target.key)
                work.session.again(job.route, len(known[job.route]))
            elif not job.route.is_default:
                work.session.outcome(job.route)
        except RoutePilotError as error:
            work.session.close()
            self._fail(work, str(error))

    def flush(self) -> dict[str, Any]:
        """Write the table and the summary; returns the summary."""
        self._flushed = time.monotonic()
        facts = {
            "sweep_seconds": round(self.elapsed, 1),
            "build_workers": self.options.build_workers,
            "seed": self.options.seed,
        }
        names = [work.model.fingerprint for work in self.works]
        table = table_from_store(self._store_path, self._target.key, names, facts)
        save_table(table, self.options.out / "table.parquet")
        spreads = {}
        for work in self.works:
            found = table.outcomes.get(work.model.fingerprint, {}).get(DEFAULT_ROUTE, ())
            spreads[work.model.name] = [
                round(math.exp(o.log_speedup), 4) for o in found[1:] if o.is_feasible
            ]
        summary = {
            **describe_table(table, Gate()),
            "elapsed_seconds": round(self.elapsed, 1),
            "timing_seconds": round(self._spent["paused"], 1),
            "build_seconds_median": round(statistics.median(self._seen), 1) if self._seen else 0.0,
            "builds": len(self._seen),
            "default_rebuilds": spreads,
            "left": {work.model.name: len(work.steps) for work in self.works if work.steps},
            "given_up": {**self.unready, **{w.model.name: w.error for w in self.works if w.error}},
        }
        text = json.dumps(summary, indent=1, default=str)
        (self.options.out / "summary.json").write_text(text + "\n", encoding="utf-8")
        say(
            f"{self.elapsed:.0f} s: {counted(len(self._seen), 'build')} ({self._builders.running}"
            " running),"
            f" {self._spent['timed']} timed, {sum(len(w.steps) for w in self.works)} left"
        )
        return summary


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def print_summary(summary: Mapping[str, Any]) -> None:
    """The summary as a short table, the worst news first."""
    for name, error in summary["given_up"].items():
        say(f"trouble: {name}: {error}")
    for row in summary["reasons"]:
        say(f"{row['builds']:5d} x {row['status']}: {row['reason']}")
    say(f"{'model':16} {'ms':>9} {'routes':>6} {'feasible':>8} {'best':>6}  rebuilds, route")
    for model in summary["models"]:
        rebuilds = summary["default_rebuilds"].get(model["name"], [])
        say(
            f"{model['name']:16} {model['default_latency_ms']:9.4f} {model['routes']:6d}"
            f" {model['feasible']:8d} {model['best_speedup']:6.2f}  {rebuilds}"
            f" {model['best_route']}"
        )
    say(
        f"statuses: {summary['statuses']}; oracle {summary['oracle_speedup']:.3f}x;"
        f" {counted(summary['builds'], 'build')}, median {summary['build_seconds_median']} s;"
        f" {summary['timing_seconds']} of {summary['elapsed_seconds']} s timing"
    )


def parse(arguments: Sequence[str]) -> SweepOptions:
    """Options from a command line."""
    parser = argparse.ArgumentParser(prog="inductor_sweep", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", help="corpus models, .pt2 files, or prepared models")
    parser.add_argument("--out", "-o", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seconds", type=float, default=500.0, help="budget, wall clock")
    parser.add_argument("--build-workers", type=int, default=2, help="builds at once")
    parser.add_argument("--routes", type=int, default=48, help="routes a model")
    parser.add_argument("--controls", type=int, default=3, help="rebuilds of the default a model")
    parser.add_argument("--plan", type=Path, help="file of routes, one a line")
    parser.add_argument("--option", action="append", default=[], help="backend option NAME=VALUE")
    parser.add_argument("--resume", type=Path, nargs="*", default=[], help="earlier tables")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds of one build")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.build_workers < 1 or given.seconds <= 0 or given.routes < 0 or given.controls < 0:
        raise InputError("--build-workers and --seconds take numbers above 0, the others 0 or more")
    pairs = [text.partition("=") for text in given.option]
    for name, equals, _ in pairs:
        if not equals:
            raise InputError(f"--option {name!r} is not of the form NAME=VALUE")
    return SweepOptions(
        names=tuple(given.names),
        out=given.out.absolute(),
        seconds=given.seconds,
        build_workers=given.build_workers,
        routes=given.routes,
        controls=given.controls,
        texts=read_plan(given.plan) if given.plan else (),
        options={name: value for name, _, value in pairs},
        resume=tuple(given.resume),
        deadline_seconds=given.deadline,
        seed=given.seed,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep; 0 when it went its way, 2 for bad input, 1 for a fault of the machine."""
    try:
        sweep = Sweep(parse(sys.argv[1:] if arguments is None else arguments))
        try:
            print_summary(sweep.run())
        finally:
            sweep.close()
    except RoutePilotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
