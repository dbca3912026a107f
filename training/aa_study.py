"""The A/A study: what the timing says of two builds of the same default route.

Owns the evidence for the constants of `env/measure.py`: every repeat builds a second default
engine beside the first, so whatever differs is noise. Each pair of builds is timed more than once,
which tells what two builds differ by for as long as they live from what timing alone scatters. Run
on a quiet machine:

    python -m routepilot.training.aa_study --repeats 30 --models FOLDER [FOLDER ...]

with folders of prepared models. Knows no agent and keeps no records.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from routepilot.env.backends import load_backend
from routepilot.env.backends.base import Backend, BuildFailure, Engine
from routepilot.env.errors import InputError, ModelError, RoutePilotError
from routepilot.env.measure import Timeable, TimingPlan, confirm, measure_paired
from routepilot.env.models import Model
from routepilot.env.outcomes import Measurement
from routepilot.env.routes import DEFAULT_ROUTE
from routepilot.env.worker_child import Bound

Method = Callable[[Timeable, Timeable, TimingPlan], Measurement]

#: What the search does with a route, and what the confirmation does with its winner.
METHODS: Mapping[str, Method] = {"paired": measure_paired, "ABBA confirm": confirm}


@dataclass(frozen=True)
class NoiseRow:
    """What repeated A/A measurements of one model by one method gave.

    Attributes:
        model: Model name.
        method: Key of `METHODS`.
        repeats: Pairs of builds, each built afresh.
        false_wins: Share whose interval lies above zero.
        coverage: Share whose interval holds zero.
        bare_coverage: The same without the plan's margin.
        deviation: Standard deviation of the estimates, log ratio.
        worst: Largest absolute estimate.
        between: Standard deviation of what two builds differ by, log ratio; not a number where
            each pair was timed once.
        within: Standard deviation of the timings of one pair, likewise.
        smallest_win: Half width of the median interval, margin included: a smaller effect is not
            called a win.
        needed_margin: Margin with which 95 % of the intervals would hold zero.
        rounds: Mean rounds.
        seconds: Mean wall-clock seconds of one measurement.
        others: Cores that other processes kept busy meanwhile, mean over the measurements.
    """

    model: str
    method: str
    repeats: int
    false_wins: float
    coverage: float
    bare_coverage: float
    deviation: float
    worst: float
    between: float
    within: float
    smallest_win: float
    needed_margin: float
    rounds: float
    seconds: float
    others: float


@dataclass(frozen=True)
class Sample:
    """One A/A measurement.

    Attributes:
        measurement: Made with a margin of zero.
        seconds: Wall-clock seconds it took.
        others: Cores that other processes kept busy meanwhile.
    """

    measurement: Measurement
    seconds: float
    others: float


def observe(measure: Callable[[], Measurement]) -> Sample:
    """Measure once, and see how long that takes and what else the machine does meanwhile."""
    start, busy = time.perf_counter(), _busy_seconds()
    measured = measure()
    seconds = time.perf_counter() - start
    # The system's clock ticks 100 times a second, so a short measurement can come out below zero.
    return Sample(measured, seconds, max(0.0, _busy_seconds() - busy) / seconds)


def _busy_seconds() -> float:
    """Processor seconds used so far by all processes but this one."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    return float(sum(machine[:8]) - idle - own.user - own.system)


def components(estimates: NDArray[np.float64]) -> tuple[float, float]:
    """Standard deviations between pairs of builds and within a pair, by analysis of variance.

    Two builds of one route differ by zero on average, so no mean is taken out.

    Args:
        estimates: Log ratios, shape (pairs, timings of each).

    Returns:
        Between and within; not numbers where each pair was timed once.
    """
    timings = estimates.shape[1]
    if timings < 2:
        return math.nan, math.nan
    within = float(np.mean(np.var(estimates, axis=1, ddof=1)))
    whole = float(np.mean(np.mean(estimates, axis=1) ** 2))
    return math.sqrt(max(0.0, whole - within / timings)), math.sqrt(within)


def summarize(
    model: str, method: str, pairs: Sequence[Sequence[Sample]], margin: float
) -> NoiseRow:
    """Figures of a list of A/A measurements.

    Args:
        model: Model name.
        method: Key of `METHODS`.
        pairs: The measurements of each pair of builds, as many of each.
        margin: Margin to judge them with.
    """
    found = [sample for pair in pairs for sample in pair]
    low = np.array([sample.measurement.low for sample in found])
    high = np.array([sample.measurement.high for sample in found])
    estimates = np.array([sample.measurement.log_speedup for sample in found])
    between, within = components(estimates.reshape(len(pairs), -1))
    distance = np.maximum(0.0, np.maximum(low, -high))  # of zero from the bare interval
    return NoiseRow(
        model=model,
        method=method,
        repeats=len(pairs),
        false_wins=float(np.mean(low > margin)),
        coverage=float(np.mean(distance <= margin)),
        bare_coverage=float(np.mean(distance <= 0)),
        deviation=float(np.std(estimates)),
        worst=float(np.abs(estimates).max()),
        between=between,
        within=within,
        smallest_win=float(np.median(high - low)) / 2 + margin,
        needed_margin=float(np.quantile(distance, 0.95)),
        rounds=float(np.mean([sample.measurement.rounds for sample in found])),
        seconds=float(np.mean([sample.seconds for sample in found])),
        others=float(np.mean([sample.others for sample in found])),
    )


def study(
    models: Sequence[Model],
    plan: TimingPlan,
    *,
    backend: str = "cpu",
    options: Mapping[str, str] | None = None,
    repeats: int = 30,
    timings: int = 2,
) -> Iterator[NoiseRow]:
    """Measure default against default, method by method.

    Args:
        models: Prepared models.
        plan: Timing plan; a repeat changes its seed.
        backend: Backend name.
        options: Backend options.
        repeats: Pairs of engines built for each model.
        timings: How many times each pair is timed by each method.

    Raises:
        InputError: `repeats` or `timings` is not positive.
        ModelError: The default route of a model does not build.
    """
    if repeats < 1:
        raise InputError(f"{repeats} repeats are not allowed; give 1 or more")
    if timings < 1:
        raise InputError(f"{timings} timings of a pair are not allowed; give 1 or more")
    compiler: Backend = load_backend(backend, options or {})
    for model in models:
        inputs = model.selection()[0]
        found: dict[str, list[list[Sample]]] = {name: [] for name in METHODS}
        with tempfile.TemporaryDirectory() as workdir:

            def build(model: Model = model, workdir: str = workdir) -> Engine:
                engine = compiler.build(model, DEFAULT_ROUTE, Path(workdir))
                if isinstance(engine, BuildFailure):
                    raise ModelError(f"the default route of {model.name}: {engine.reason}")
                return engine

            for repeat in range(repeats):
                first, second = build(), build()
                pair = Bound(first, inputs), Bound(second, inputs)
                for samples in found.values():
                    samples.append([])
                for timing in range(timings):
                    seed = plan.seed + repeat * timings + timing
                    bare = replace(plan, margin=0.0, seed=seed)
                    for name, method in METHODS.items():
                        found[name][-1].append(observe(partial(method, *pair, bare)))
                first.close()
                second.close()
        for name, pairs in found.items():
            yield summarize(model.name, name, pairs, plan.margin)


def markdown(rows: Sequence[NoiseRow], margin: float) -> str:
    """The study as a Markdown table."""
    lines = [
        f"Margin {100 * margin:.2g} % on each side. Coverage of 0; 'bare' is without it. 'between':"
        " what two builds differ by, 'within': timings of one pair. 'others': cores that other"
        " processes kept busy.",
        "",
        "| model | method | repeats | false wins | coverage | bare | sd | between | within"
        " | worst | smallest win | margin needed | rounds | seconds | others |",
        f"|{'---|' * 15}",
    ]
    for row in rows:
        lines.append(
            f"| {row.model} | {row.method} | {row.repeats} | {row.false_wins:.0%}"
            f" | {row.coverage:.0%} | {row.bare_coverage:.0%} | {row.deviation:.2%}"
            f" | {row.between:.2%} | {row.within:.2%}"
            f" | {row.worst:.2%} | {row.smallest_win:.2%} | {row.needed_margin:.2%}"
            f" | {row.rounds:.1f} | {row.seconds:.2f} | {row.others:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="routepilot.training.aa_study", description="A/A study")
    parser.add_argument("--models", nargs="+", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--repeats", type=int, default=30, help="pairs of builds a model")
    parser.add_argument("--timings", type=int, default=2, help="timings of each pair")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu", type=int, help="core to stay on")
    given = parser.parse_args(arguments)
    plan = TimingPlan()
    rows = []
    try:
        if given.cpu is not None:
            if given.cpu not in os.sched_getaffinity(0):
                raise InputError(f"core {given.cpu} is not available; choose another")
            os.sched_setaffinity(0, {given.cpu})
        models = [Model.load(folder) for folder in given.models]
        options = {"threads": str(given.threads)}
        for row in study(
            models,
            plan,
            backend=given.backend,
            options=options,
            repeats=given.repeats,
            timings=given.timings,
        ):
            print(f"{row.model}: {row.method} done", file=sys.stderr)
            rows.append(row)
    except RoutePilotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(markdown(rows, plan.margin))
    return 0


if __name__ == "__main__":
    sys.exit(main())
