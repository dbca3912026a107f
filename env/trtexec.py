"""trtexec in and out: its tuning caches as outcomes, outcomes as its caches, its command line.

Owns the file that `trtexec --tuneBuildRoutes` writes (JSON lines, TensorRT 11.1) and its oddities.
Knows no compiler. Route expressions and their order are in `routes.py`.

A row of such a cache is good only when it neither crashed nor has a message: a route that failed
the accuracy check has a time and `crash: false`. Times are arithmetic means over one engine, with
warm-up and without an interval.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routepilot.env.backends.base import Target
from routepilot.env.backends.tensorrt_catalog import (
    PRECISION_KNOB,
    is_build_route_knob,
    marked,
    read_build_routes,
    requirements,
    shipped_routes_json,
)
from routepilot.env.backends.tensorrt_options import (
    Channel,
    Plans,
    TensorRtOptions,
    TimingCache,
    read_options,
)
from routepilot.env.drafts import whole_file
from routepilot.env.errors import InputError, MachineError, RouteError, TableError
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.plans import source_name
from routepilot.env.records import Record
from routepilot.env.routes import Catalog, Knob, Route

#: Half width given to the log speed-up of an imported row, which has none of its own. trtexec warns
#: when one run varies by more than this.
ASSUMED_HALF_WIDTH = 0.025

#: Accuracy algorithms: our name -> the one in a cache's header.
ALGORITHMS = {"l0": "L0", "l1": "L1", "l2": "L2", "lInf": "LInf", "cos": "Cosine"}

#: Builder levers -> trtexec's options; the value goes behind unless the option stands alone.
_LEVER_OPTIONS = {
    "-builder_optimization_level": "--builderOptimizationLevel={}",
    "-tiling_optimization_level": "--tilingOptimizationLevel={}",
    "-max_num_tactics": "--maxTactics={}",
    "-max_aux_streams": "--maxAuxStreams={}",
    "-tf32": "--noTF32",
    "-sparse_weights": "--sparsity=enable",
}
_TILING = {"none": "0", "fast": "1", "moderate": "2", "full": "3"}


@dataclass(frozen=True)
class Row:
    """One iteration of trtexec's tuner.

    Attributes:
        phase: 1, or 2 for the product that `mixed` adds; `iter` starts again at 0 there.
        index: `iter`.
        route: Tokens as written, knobs at their defaults included.
        crashed: The child left no result.
        message: Why the row is not good; empty for a good one.
        losses: Loss by output; None where no accuracy was checked. NaN where the file has null.
        gpu_time_ms: Mean GPU time; None when it crashed.
    """

    phase: int
    index: int
    route: str
    crashed: bool
    message: str
    losses: Mapping[str, float] | None
    gpu_time_ms: float | None


@dataclass(frozen=True)
class TuningCache:
    """A tuning cache as read.

    Attributes:
        tuner_version: Version of the compiler behind the knobs.
        algorithm: Accuracy algorithm, by our name, e.g. `l0`.
        threshold: Accuracy threshold; 0 when none was set.
        search: `fast`, `full` or `mixed`.
        expression: The tuning expression.
        default_route: Every knob at its default, in the vendor's order.
        onnx: Model file; empty when it is not in the header.
        rows: The iterations.
        notes: What was odd about the file.
    """

    tuner_version: str
    algorithm: str
    threshold: float
    search: str
    expression: str
    default_route: str
    onnx: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def read_tuning_cache(path: Path) -> TuningCache:
    """Read a cache of trtexec or of Torch-TensorRT.

    Raises:
        TableError: The file cannot be read, has no header, or a row inside it is damaged. A
            truncated last row is left out with a note.
    """
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise TableError(f"tuning cache {str(path)!r} cannot be read: {error}") from None
    # Not `splitlines`: a compiler's message may hold what Unicode takes for the end of a line.
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        header = json.loads(lines[0])
        tuner, expression = str(header["tuner_version"]), str(header["tuning_expr"])
        threshold = float((header.get("accuracy_parameter") or {}).get("epsilon") or 0.0)
        onnx = str((header.get("files") or {}).get("onnx", ""))
    except (IndexError, ValueError, KeyError, TypeError, AttributeError):
        raise TableError(
            f"{str(path)!r} is not a tuning cache of trtexec: its first line must be a JSON object"
            " with tuner_version and tuning_expr, and with objects where it has files or"
            " accuracy_parameter; give the file named by --tuningCacheFile"
        ) from None
    rows: list[Row] = []
    notes: list[str] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(_row(json.loads(line), rows))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            if number < len(lines):
                raise TableError(
                    f"tuning cache {str(path)!r} is damaged in line {number}"
                    f" ({type(error).__name__}); delete the line or give another file"
                ) from None
            notes.append("the last line is cut off and was left out")
    names = {theirs: ours for ours, theirs in ALGORITHMS.items()}
    algorithm = str(header.get("accuracy_algorithm", "L0"))
    return TuningCache(
        tuner_version=tuner,
        algorithm=names.get(algorithm, algorithm),
        threshold=threshold,
        search=str(header.get("searching_algorithm", "fast")),
        expression=expression,
        default_route=str(header.get("default_build_route", "")),
        onnx=onnx,
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _row(data: Mapping[str, Any], before: Sequence[Row]) -> Row:
    index = int(data["iter"])
    phase = before[-1].phase if before else 1
    if before and index <= before[-1].index:
        phase += 1
    losses, took = data.get("accuracy_loss"), data.get("gpu_time")
    if not isinstance(data["crash"], bool):
        raise TypeError("crash is neither true nor false")
    return Row(
        phase=phase,
        index=index,
        route=str(data["build_route"]),
        crashed=data["crash"],
        message=str(data.get("error_message") or ""),
        losses=None
        if losses is None
        else {str(k): math.nan if v is None else float(v) for k, v in losses.items()},
        gpu_time_ms=None if took is None else float(took),
    )


def cache_catalog(cache: TuningCache) -> Catalog:
    """The knobs of a cache: those of its default route, with the values that are known.

    Values come from the shipped list and from the rows, so that a cache of another tuner version
    reads too.

    Raises:
        TableError: The header has no default route and the tuner is not the shipped list's.
    """
    tuner, shipped = read_build_routes(shipped_routes_json())
    known = {knob.name: knob for knob in shipped}
    defaults = Route.read(cache.default_route).settings
    if not defaults:
        if cache.tuner_version != tuner:
            raise TableError(
                f"the cache of tuner {cache.tuner_version} has no default_build_route, so its"
                f" knobs are unknown (the shipped list is of tuner {tuner}); give another cache"
            )
        defaults = tuple((knob.name, knob.default) for knob in shipped)
    seen: dict[str, dict[str, None]] = {}
    for row in cache.rows:
        for name, value in _read_route(row).settings:
            seen.setdefault(name, {})[value] = None
    knobs = []
    for name, default in defaults:
        knob = known.get(name, Knob(name, (), default))
        extra = [v for v in seen.get(name, {}) if v not in knob.values and v != default]
        values = (*knob.values, *extra)
        knobs.append(marked(Knob(name, values, default, knob.help, (), knob.bounded)))
    version = f"tuner {cache.tuner_version}"
    return Catalog("tensorrt", version, tuple(knobs), tuple(requirements(knobs)))


def cache_target(cache: TuningCache, catalog: Catalog, device: str) -> Target:
    """A target of its own, since trtexec's means do not mix with paired measurements.

    Args:
        cache: The cache.
        catalog: `cache_catalog` of it.
        device: GPU name; a cache does not say it.
    """
    versions = {"tuner": cache.tuner_version}
    return Target("tensorrt", device, versions, catalog.key, {"timing": "trtexec mean"})


def cache_outcomes(cache: TuningCache, catalog: Catalog) -> list[Outcome]:
    """One outcome a row, in order.

    Raises:
        TableError: A row names a knob that the cache does not list.
    """
    default_ms = _default_ms(cache, catalog)
    return [_outcome(row, catalog, cache.algorithm, default_ms) for row in cache.rows]


def cache_records(
    cache: TuningCache, catalog: Catalog, target: Target, fingerprint: str, created: float = 0.0
) -> list[Record]:
    """The rows as records; a route that `mixed` ran again is a repeat.

    Raises:
        TableError: As `cache_outcomes`.
    """
    times: Counter[Route] = Counter()
    found = []
    for outcome in cache_outcomes(cache, catalog):
        repeat = times[outcome.route]
        times[outcome.route] += 1
        found.append(Record(fingerprint, target.key, outcome, repeat, created))
    return found


def _read_route(row: Row) -> Route:
    try:
        return Route.read(row.route)
    except RouteError as error:
        raise TableError(f"row {row.index} of phase {row.phase}: {error}") from None


def _route(row: Row, catalog: Catalog) -> Route:
    try:
        return catalog.route(_read_route(row).values)
    except RouteError as error:
        raise TableError(f"row {row.index} of phase {row.phase}: {error}") from None


def _fault(row: Row) -> str:
    """Why a row is not good; empty for one that is."""
    if row.message or row.crashed:
        return row.message or "it crashed without a message"
    if row.losses is not None and any(math.isnan(v) for v in row.losses.values()):
        return "a loss is not a number"
    took = row.gpu_time_ms
    if took is None or not (math.isfinite(took) and took > 0):
        return f"its time of {'nothing' if took is None else f'{took:g} ms'} is no time"
    return ""


def _default_ms(cache: TuningCache, catalog: Catalog) -> float | None:
    for row in cache.rows:
        if not _fault(row) and _route(row, catalog).is_default:
            return row.gpu_time_ms
    return None


def _outcome(row: Row, catalog: Catalog, algorithm: str, default_ms: float | None) -> Outcome:
    route = _route(row, catalog)
    values = list((row.losses or {}).values())
    losses = (
        {algorithm: math.nan if any(map(math.isnan, values)) else max(values)} if values else {}
    )
    fault = _fault(row)
    if fault:
        return Outcome(route, _status(row), fault, losses=losses)
    if default_ms is None or row.gpu_time_ms is None:
        reason = "the cache has no time of the default route to compare with"
        return Outcome(route, Status.OK, reason, losses=losses)
    ratio = math.log(default_ms) - math.log(row.gpu_time_ms)
    width = 0.0 if route.is_default else ASSUMED_HALF_WIDTH
    measured = Measurement(
        ratio, ratio - width, ratio + width, row.gpu_time_ms, default_ms, rounds=1, spread=width
    )
    return Outcome(route, Status.OK, measurement=measured, losses=losses)


def _status(row: Row) -> Status:
    if not row.crashed:
        lost = any(math.isnan(v) for v in (row.losses or {}).values())
        # Neither a message nor a lost loss: the time is at fault, so nothing is known of it.
        checked = Status.ACCURACY_FAILED if row.message else Status.CRASHED
        return Status.INVALID_OUTPUT if lost else checked
    # A build that fails in good order leaves no result file either, so it is written as a crash.
    missing = "missing tuning result file" in row.message and "signal" not in row.message
    return Status.BUILD_FAILED if missing else Status.CRASHED


def write_tuning_cache(
    path: Path,
    catalog: Catalog,
    outcomes: Iterable[Outcome],
    *,
    onnx: str = "",
    algorithm: str = "l0",
    threshold: float = 0.0,
) -> int:
    """Write outcomes as a cache that trtexec's readers understand.

    Routes with builder levers or a precision variant are left out: a build route cannot say them.

    Args:
        path: File to write, whole or not at all.
        catalog: Catalog of the routes.
        outcomes: Outcomes, in the order in which they were built.
        onnx: Model file for the header.
        algorithm: Accuracy algorithm whose losses are written.
        threshold: Accuracy threshold.

    Returns:
        How many outcomes were left out.

    Raises:
        InputError: There is no such algorithm.
        MachineError: The file cannot be written.
    """
    if algorithm not in ALGORITHMS:
        raise InputError(
            f"accuracy algorithm {algorithm!r} does not exist in trtexec; allowed:"
            f" {', '.join(ALGORITHMS)}"
        )
    everything = list(outcomes)
    kept = [o for o in everything if all(map(is_build_route_knob, o.route.values))]
    used = {name for outcome in kept for name in outcome.route.values}
    named = [knob for knob in catalog.knobs if knob.name in used]
    expression = " ".join(f"{k.name}=[{'|'.join(k.all_values)}]" for k in named if k.bounded)
    ours = [knob for knob in catalog.knobs if is_build_route_knob(knob.name)]
    command = ["trtexec", f"--onnx={onnx}", f"--tuneBuildRoutes={expression}"]
    header = {
        "tuner_version": catalog.version.rpartition("tuner ")[2],
        "accuracy_algorithm": ALGORITHMS[algorithm],
        "accuracy_parameter": {"atol": 1e-5, "rtol": 1e-5, "epsilon": threshold},
        "searching_algorithm": "fast",
        "command_line": shlex.join(command),
        "default_build_route": " ".join(f"{k.name}={k.default}" for k in ours),
        "tuning_expr": expression,
        "files": {"onnx": onnx} if onnx else {},
        "argv": command,
    }
    lines = [header, *(_line(i, o, named, algorithm) for i, o in enumerate(kept))]
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    try:
        with whole_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"tuning cache {str(path)!r} cannot be written: {error}") from None
    return len(everything) - len(kept)


def _line(index: int, outcome: Outcome, named: Sequence[Knob], algorithm: str) -> dict[str, Any]:
    values = outcome.route.values
    loss, measured = outcome.losses.get(algorithm), outcome.measurement
    accuracy_failed = outcome.status is Status.ACCURACY_FAILED
    good = outcome.status is Status.OK
    reason = outcome.reason or outcome.status.value
    if accuracy_failed:
        reason = f"child exited with status 1: {outcome.reason}"
    finite = loss is not None and math.isfinite(loss)
    return {
        "iter": index,
        "build_route": " ".join(f"{k.name}={values.get(k.name, k.default)}" for k in named),
        "crash": not (good or accuracy_failed),
        "error_message": "" if good else reason,
        "accuracy_loss": {"worst": loss} if finite else None,
        "gpu_time": measured.latency_ms if measured else None,
    }


def command_line(
    route: Route, onnx: str, engine: str = "", *, more: Sequence[str] = (), lunowud: bool = False
) -> str:
    """The `trtexec` line that builds a route's engine.

    Args:
        route: Route of the TensorRT catalog.
        onnx: Model file; for a route with a precision variant the file of that variant.
        engine: File to save the engine in; left out when empty.
        more: Further options of trtexec.
        lunowud: Send the flags through the environment variable, as the option channel=lunowud.
    """
    tokens = " ".join(f"{n}={v}" for n, v in route.settings if is_build_route_knob(n))
    words = [f"__LUNOWUD={tokens}"] if tokens and lunowud else []
    words = [*(["env", *words] if words else []), "trtexec", f"--onnx={onnx}", *more]
    if tokens and not lunowud:
        words.append(f"--setBuildRoute={tokens}")
    for name, value in route.settings:
        if name in _LEVER_OPTIONS:
            words.append(_LEVER_OPTIONS[name].format(_TILING.get(value, value)))
    if engine:
        words.append(f"--saveEngine={engine}")
    return shlex.join(words)


def build_line(backend: str, options: Mapping[str, str], route: Route) -> str:
    """The line that builds an answer of `tune` again, run where `tune` wrote its results.

    Args:
        backend: Name of the catalog; empty is returned for any but `tensorrt`.
        options: Its options.
        route: The answer.
    """
    if backend != "tensorrt":
        return ""
    chosen = read_options(backend, options)
    more = ["--timingCacheFile=deploy/timing.cache", *_settings(chosen)]
    lunowud = chosen.channel is Channel.LUNOWUD
    return command_line(route, "deploy/model.onnx", "rebuilt.plan", more=more, lunowud=lunowud)


def trial_line(backend: str, options: Mapping[str, str], route: Route) -> str:
    """The line that builds any route of a run, run where `tune` or `compare` wrote its results.

    The ONNX file is the one of the route's precision that the run keeps (`plans.keep_source`), or
    `model.onnx` where it was told to keep none.

    Args:
        backend: Name of the catalog; empty is returned for any but `tensorrt`.
        options: Its options.
        route: The route.
    """
    if backend != "tensorrt":
        return ""
    chosen = read_options(backend, options)
    precision = route.values.get(PRECISION_KNOB.name, PRECISION_KNOB.default)
    kept = chosen.plans is Plans.ALL
    onnx = f"work/{source_name(precision)}" if kept else "model.onnx"
    private = chosen.timing_cache is TimingCache.FRESH
    cache = [] if private else [f"--timingCacheFile={chosen.cache_file or 'work/timing.cache'}"]
    more = [*cache, *_settings(chosen)]
    return command_line(route, onnx, more=more, lunowud=chosen.channel is Channel.LUNOWUD)


def _settings(chosen: TensorRtOptions) -> list[str]:
    """The words of trtexec for the options that every build of a run shares."""
    words = []
    pools = []
    if chosen.workspace_mib:
        pools.append(f"workspace:{chosen.workspace_mib}M")
    if chosen.tactic_shared_kib:
        pools.append(f"tacticSharedMem:{chosen.tactic_shared_kib}K")
    if pools:
        words.append(f"--memPoolSize={','.join(pools)}")
    # The builder's own default is 1 and trtexec's is 8.
    words.append(f"--avgTiming={chosen.avg_timing or 1}")
    if chosen.optimization_level >= 0:
        words.append(f"--builderOptimizationLevel={chosen.optimization_level}")
    if chosen.device:
        words.append(f"--device={chosen.device}")
    return words
