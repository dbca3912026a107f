"""What `doctor` checks of TensorRT and TensorRT-RTX: each contract, really tried, one line each.

Owns the checks and the words of their results; answers what NVIDIA's documents leave open. Knows
the compiler and the backend, no agent and no session. Works on a tiny model in under two minutes;
without a GPU, TensorRT-RTX's compiler is checked and the rest is told to be unavailable.
"""

from __future__ import annotations

import io
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepilot.env.accuracy import Gate, judge
from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.tensorrt import RTX_CAPABILITY
from routepilot.env.backends.tensorrt_catalog import is_build_route_knob
from routepilot.env.backends.tensorrt_compiler import (
    FLAGS_VARIABLE,
    Plan,
    find_module,
)
from routepilot.env.backends.tensorrt_options import read_options
from routepilot.env.child import Child, Ended, machine_memory_bytes
from routepilot.env.errors import InputError, MachineError, RoutePilotError
from routepilot.env.liveness import live, recalled
from routepilot.env.liveness_pool import opening
from routepilot.env.outcomes import Status
from routepilot.env.questions_tensorrt import QUESTIONS
from routepilot.env.tensorrt_bench import LIVE, UNKNOWN_KNOB, UNKNOWN_VALUE, Bench
from routepilot.env.wording import counted

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: What a check found: status, detail, hint.
Finding = tuple[str, str, str]

_REPORT = "attach `routepilot doctor --json` to a report"


def run_checks(
    name: str, model: Model, workdir: Path, options: Mapping[str, str] | None = None
) -> Iterator[dict[str, str]]:
    """Run every check, in an order in which each rests on the earlier ones.

    Args:
        name: `tensorrt` or `tensorrt_rtx`.
        model: A tiny prepared model.
        workdir: Folder for intermediate files.
        options: Backend options.

    Yields:
        `check`, `status` (`pass`, `fail` or `unavailable`), `detail`, `hint`.

    Raises:
        InputError: An option cannot be used.
    """
    read_options(name, options or {})
    workdir.mkdir(parents=True, exist_ok=True)
    try:
        find_module(name)
    except RoutePilotError as error:
        yield _line("import", ("fail", str(error), "do what the message says"))
        for check in (*CHECKS, *QUESTIONS):
            yield _line(check, ("unavailable", f"{name} cannot be used", "see the check: import"))
        return
    bench = Bench(name, model, workdir, options or {})
    yield _line("import", ("pass", f"{bench.trt.__name__} {bench.trt.__version__}", ""))
    builds = bench.rtx or bench.backend.has_gpu
    for check, run in {**CHECKS, **QUESTIONS}.items():
        if builds or check in NEEDS_NO_BUILDER:
            yield _line(check, _guarded(partial(run, bench)))
        else:
            yield _line(
                check,
                ("unavailable", "the builder needs an NVIDIA GPU", "see the check: GPU and driver"),
            )


def _line(check: str, finding: Finding) -> dict[str, str]:
    status, detail, hint = finding
    return {"check": check, "status": status, "detail": detail, "hint": hint}


def _guarded(run: Callable[[], Finding]) -> Finding:
    try:
        return run()
    except RoutePilotError as error:
        return "fail", str(error), _REPORT
    except Exception as error:  # a compiler may raise anything; the other checks go on
        return "fail", f"{type(error).__name__}: {' '.join(str(error).split())}", _REPORT


def _versions(bench: Bench) -> Finding:
    names = ("onnx", "onnxruntime", "numpy", "cuda-bindings", "nvidia-ml-py")
    found = []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return "pass", ", ".join(found), ""


def _gpu(bench: Bench) -> Finding:
    try:
        gpu = bench.backend.gpu()
    except (MachineError, InputError) as error:
        status = "unavailable" if bench.rtx else "fail"
        return status, str(error), "a GPU and its driver are needed to run and time engines"
    seen = gpu.condition()
    state = ", ".join(f"{k} {v}" for k, v in seen.items()) or "NVML cannot be asked"
    text = f"{gpu.name}, compute capability {gpu.capability}, driver for CUDA {gpu.driver}; {state}"
    return "pass", text, "" if seen else "install nvidia-ml-py to notice clock drift"


def _stray(bench: Bench) -> Finding:
    stray = os.environ.get(FLAGS_VARIABLE)
    if stray is None:
        return "pass", f"{FLAGS_VARIABLE} is not set", ""
    hint = f"unset {FLAGS_VARIABLE}: RoutePilot clears it in its children, other programs do not"
    return "fail", f"{FLAGS_VARIABLE}={stray} changes every build outside RoutePilot", hint


def _catalog(bench: Bench) -> Finding:
    catalog = bench.backend.catalog()
    count = sum(is_build_route_knob(k.name) for k in catalog.knobs)
    rest = len(catalog.knobs) - count
    source = "the shipped list" if bench.rtx else "this machine's all_build_routes"
    text = (
        f"{counted(count, 'build-route knob')} from {source}, {counted(rest, 'other')};"
        f" {catalog.version}"
    )
    return ("pass", text, "") if count else ("fail", text, "use TensorRT >= 11.1 on Linux")


def _read_back(bench: Bench) -> Finding:
    compiler, _ = bench.compiler()
    if bench.rtx or not hasattr(bench.trt.IBuilderConfig, "build_route"):
        hint = "routes go through the option channel=lunowud; TensorRT >= 11.1 has build_route"
        return "unavailable", "this compiler has no build_route", hint
    route = bench.live_route()
    got = compiler.read_back(route)
    text = f"set {route!r}, read {got!r}"
    return ("pass", text, "") if got.split() == route.split() else ("fail", text, _REPORT)


def _refusal(bench: Bench, token: str) -> Finding:
    """What the compiler does with a token it should not take."""
    with redirect_stderr(io.StringIO()):  # the compiler's line is in the finding
        built = bench.build(token)
    if isinstance(built, BuildFailure):
        good = built.status is Status.REFUSED
        return "pass" if good else "fail", built.reason, "" if good else _REPORT
    hint = "RoutePilot checks values itself before it sets them, so nothing is to be done"
    return "pass", f"{token} is taken without a word", hint


def _build_default(bench: Bench) -> Finding:
    start = time.perf_counter()
    built = bench.build()
    if isinstance(built, BuildFailure):
        return "fail", built.reason, _REPORT
    bench.default = built
    return "pass", f"{len(built.data)} bytes in {time.perf_counter() - start:.2f} s", ""


def _build_route(bench: Bench) -> Finding:
    route = bench.live_route()
    if not route:
        return "unavailable", "the catalog has no build route", "use TensorRT >= 11.1 on Linux"
    built = bench.build(route)
    if isinstance(built, BuildFailure):
        return "fail", f"{route}: {built.reason}", _REPORT
    changed = bench.default is not None and built.hash != bench.default.hash
    text = f"{route}: the engine {'changed' if changed else 'is the default one'}"
    if built.warnings:
        text += f"; {'; '.join(built.warnings)}"
    return "pass" if changed else "fail", text, "" if changed else _REPORT


def _determinism(bench: Bench) -> Finding:
    """Two builds that know nothing of each other's timings."""
    compiler, network = bench.compiler_with(bench.settings())
    built = compiler.compile(network)
    if isinstance(built, BuildFailure) or bench.default is None:
        return "fail", getattr(built, "reason", "no default engine"), _REPORT
    same = built.hash == bench.default.hash
    text = "two builds of the default are byte-identical" if same else "two builds differ"
    return "pass", text, "" if same else "informative: route effects below the noise mean nothing"


def _channels(bench: Bench) -> Finding:
    compiler, network = bench.compiler()
    try:
        compiler.compile(network, build_route=LIVE, flags=LIVE)
        return "fail", "both channels at once were not refused", _REPORT
    except InputError:
        pass
    if bench.rtx:
        return "pass", "both channels at once are refused; this compiler has only one", ""
    one, other = bench.live_route(), "-kgen:shm_vec_loads=off"
    alone = compiler.compile(network, build_route=one)
    flags = compiler.compile(network, flags=other)
    both = compiler.compile_both(network, one, other, {})
    hashes = [built.hash if isinstance(built, Plan) else "" for built in (alone, flags, both)]
    if "" in hashes:
        return "unavailable", "not all three engines could be built", _REPORT
    words = {hashes[0]: "build_route wins", hashes[1]: f"{FLAGS_VARIABLE} wins"}
    return "pass", f"both at once: {words.get(hashes[2], 'both act')}; RoutePilot refuses it", ""


def _accuracy(bench: Bench) -> Finding:
    engine = bench.engine()
    try:
        outputs = [engine.run(one) for one in bench.model.selection()]
    finally:
        engine.close()
    verdict = judge(outputs, bench.model.selection_reference(), Gate())
    loss = verdict.losses.get("rel_l2", math.nan)
    text = f"relative L2 error {loss:.2g} against ONNX Runtime in float32"
    return ("pass", text, "") if verdict.status is Status.OK else ("fail", verdict.reason, _REPORT)


def _timing(bench: Bench) -> Finding:
    inputs = bench.model.selection()[0]
    pair = bench.engine(), bench.engine()
    try:
        for engine in pair:
            engine.time(inputs, 0.3)
        ratios = []
        for _ in range(8):
            first, second = (statistics.median(e.time(inputs, 0.05)) for e in pair)
            ratios.append(math.log(first / second))
        notes = list(getattr(pair[0], "notes", ()))
    finally:
        for engine in pair:
            engine.close()
    ratio = statistics.median(ratios)
    text = f"two builds of the default differ by {100 * math.expm1(ratio):.2f} %"
    text += f" (range {100 * min(ratios):.2f} to {100 * max(ratios):.2f} %)"
    text = "; ".join([text, *notes])
    hint = "stop other programs on the GPU, or lock its clocks with nvidia-smi -lgc"
    return ("pass", text, "") if abs(ratio) < 0.01 else ("fail", text, hint)


def _timing_cache(bench: Bench) -> Finding:
    if bench.rtx:
        hint = "nothing is to be done: its builds are the same without one"
        return "unavailable", "TensorRT-RTX times nothing at build, so it has no timing cache", hint
    path = bench.workdir / "doctor.cache"

    def seconds(route: str, require: bool) -> tuple[float, Plan | BuildFailure]:
        settings = replace(bench.settings(), timing_cache=path, require_cache=require)
        compiler, network = bench.compiler_with(settings)
        start = time.perf_counter()
        built = compiler.compile(network, build_route=route)
        return time.perf_counter() - start, built

    cold, built = seconds("", require=False)
    warm, again = seconds("", require=True)
    if isinstance(built, BuildFailure) or isinstance(again, BuildFailure):
        failed = built if isinstance(built, BuildFailure) else again
        return "fail", getattr(failed, "reason", ""), _REPORT
    _, other = seconds(bench.live_route(), require=True)
    same = "byte-identical" if built.hash == again.hash else "not byte-identical"
    keyed = "misses" if isinstance(other, BuildFailure) else "is served by"
    text = f"cold {cold:.1f} s, from the cache {warm:.1f} s and {same}"
    return "pass", f"{text}; a route {keyed} the default's cache", ""


def _needs_gpu(run: Callable[[Bench], Finding]) -> Callable[[Bench], Finding]:
    def guarded(bench: Bench) -> Finding:
        if not bench.backend.has_gpu:
            return "unavailable", "needs an NVIDIA GPU", "run this where the GPU is"
        return run(bench)

    return guarded


def _kill_and_resume(bench: Bench) -> Finding:
    """A compiling child killed at its deadline, and a sweep that is not done twice."""
    if not bench.rtx:
        hint = "see 'child is killed at its deadline' and 'a run goes on where it was' below"
        return "unavailable", "checked with a worker that builds and times", hint
    # Where there is a GPU none is named to the backend, and liveness wants one.
    capability = bench.backend.capability or RTX_CAPABILITY
    environment = {k: v for k, v in os.environ.items() if k != FLAGS_VARIABLE}
    limit = machine_memory_bytes() // 2
    log = bench.workdir / "killed.log"
    child = Child("routepilot.env.liveness_child", log, environment, limit)
    child.ask(opening(bench.model, capability), 60.0)
    ended = child.ask({"flags": ""}, 1e-3)
    if not isinstance(ended, Ended):
        child.kill()
        return "fail", "a child outlived its deadline", _REPORT
    kept = bench.workdir / "sweep"
    knob = bench.live_route().partition("=")[0]
    found = live(bench.model, compute_capability=capability, jobs=1, knobs=[knob], cache=kept)
    again = recalled(bench.model, compute_capability=capability, cache=kept)
    good = again is not None and again.changes == found.changes
    text = (
        f"the compiling child: {ended.reason}; {counted(len(found.changes), 'change')} swept and"
        " recalled"
    )
    return "pass" if good else "fail", text, "" if good else _REPORT


#: Checks that make no builder.
NEEDS_NO_BUILDER = ("versions", "GPU and driver", "stray compiler flags")

#: Every check after the import, in order.
CHECKS: dict[str, Callable[[Any], Finding]] = {
    "versions": _versions,
    "GPU and driver": _gpu,
    "stray compiler flags": _stray,
    "catalog": _catalog,
    "set and read back a route": _read_back,
    "build default": _build_default,
    "unknown knob": partial(_refusal, token=UNKNOWN_KNOB),
    "unknown value": partial(_refusal, token=UNKNOWN_VALUE),
    "build a live route": _build_route,
    "determinism": _determinism,
    "both channels": _channels,
    "timing cache": _timing_cache,
    "accuracy against ONNX Runtime": _needs_gpu(_accuracy),
    "timing A/A": _needs_gpu(_timing),
    "kill and resume a compile": _kill_and_resume,
}
