"""Knob liveness: which compiler knobs change the engine of a model, found without a GPU.

Owns the sweep over single changes, its children and its cache, and the rule by which operators
rule knobs out. Compiles with TensorRT-RTX; knows no agent, no timing and no route search.

What it proves: a change that leaves the engine byte-identical does nothing to this model in this
compiler. What it does not: TensorRT-RTX chooses kernels at run time, so knobs of tactics (`-cask*`,
`-tactic:*`) and of attention kernels (`-mha_fusion:v2:*`) can look inert there and matter to
TensorRT on a data-centre GPU. Engines of a model with several outputs are compared up to the
order in which the compiler lists the outputs, which it changes at will.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache as remember
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepilot.env import errors
from routepilot.env.backends.tensorrt_catalog import read_build_routes, shipped_routes_json
from routepilot.env.child import Child, Ended, machine_memory_bytes, one_line
from routepilot.env.drafts import whole_file
from routepilot.env.errors import (
    InputError,
    MachineError,
    MissingExtraError,
    ModelError,
    RouteError,
)
from routepilot.env.outcomes import Status
from routepilot.env.routes import Knob

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: The wheel that carries the compiler.
DISTRIBUTION = "tensorrt-rtx-cu13-libs"

#: A change may take this long, or twenty times the default build if that is longer, seconds.
DEADLINE_SECONDS = 120.0

#: Share of the machine's memory all children together may use.
MEMORY_SHARE = 0.6

#: Answers are checked and written after so many, so that a killed sweep loses few.
KEEP_EVERY = 25

#: Called with how many changes are done and how many there are.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Liveness:
    """What single changes do to one model's engine.

    Attributes:
        changes: Every change tried, as `-name=value`, in catalog order.
        live: Those that change the engine's bytes.
        identical: Those that leave the engine byte-identical.
        failed: Change -> why there is no engine, in the compiler's words. Flags that the compiler
            does not know are among them.
        refused: Those of `failed` that the compiler does not take as flags.
        distinct_engines: Different engines, the default one among them.
        seconds: Time of this call; near zero from the cache.
        compiler: Compiler and version.
        target: Compute capability compiled for, e.g. `8.9`.
    """

    changes: tuple[str, ...]
    live: tuple[str, ...]
    identical: tuple[str, ...]
    failed: Mapping[str, str]
    refused: tuple[str, ...]
    distinct_engines: int
    seconds: float
    compiler: str
    target: str

    def of(self, name: str, value: str) -> str:
        """`live`, `identical`, `failed` or `unknown` for one change."""
        change = f"{name}={value}"
        for word, group in (("live", self.live), ("identical", self.identical)):
            if change in group:
                return word
        return "failed" if change in self.failed else "unknown"

    def as_json(self) -> dict[str, Any]:
        """Plain data for `routepilot live --json`."""
        return {
            "changes": list(self.changes),
            "live": list(self.live),
            "identical": list(self.identical),
            "failed": list(self.failed),
            "refused": list(self.refused),
            "messages": dict(self.failed),
            "distinct_engines": self.distinct_engines,
            "seconds": self.seconds,
            "compiler": self.compiler,
            "target": self.target,
        }


@remember
def known_knobs() -> tuple[Knob, ...]:
    """The knobs that can be swept: those of TensorRT 11.1.0.106, unsafe ones among them.

    Nothing is run with them, so none can do harm here.
    """
    return read_build_routes(shipped_routes_json())[1]


def single_changes(knobs: Iterable[str] | None = None) -> list[str]:
    """Every one-knob change as `-name=value`.

    Args:
        knobs: Knob names; None for all.

    Raises:
        RouteError: There is no such knob.
    """
    wanted = None if knobs is None else list(knobs)
    names = {knob.name for knob in known_knobs()}
    for name in wanted or ():
        if name not in names:
            raise RouteError(
                f"knob {name!r} is not one of the {len(names)} that can be swept; `routepilot"
                " knobs --backend tensorrt_rtx` lists them"
            )
    chosen = [knob for knob in known_knobs() if wanted is None or knob.name in wanted]
    return [f"{knob.name}={value}" for knob in chosen for value in knob.alternatives]


@dataclass(frozen=True)
class _Job:
    """What every child of a sweep is told."""

    opening: Mapping[str, Any]
    log: Path
    memory_limit: int


class _Compiling:
    """One child that compiles; replaced after every failure.

    Raises:
        ModelError: The compiler refuses the model itself.
    """

    def __init__(self, job: _Job, number: int) -> None:
        self._job, self._log = job, job.log.with_suffix(f".{number}.log")
        self._child: Child | None = None
        self._deadline = DEADLINE_SECONDS
        self.default = ""

    def start(self) -> str:
        """Start a child if there is none, and compile the default; returns its hash."""
        if self._child is not None:
            return self.default
        environment = {k: v for k, v in os.environ.items() if k != "__LUNOWUD"}
        limit = self._job.memory_limit
        self._child = Child("routepilot.env.liveness_child", self._log, environment, limit)
        opened = self._ask(self._job.opening)
        if "error" in opened:
            self.close()
            raise getattr(errors, opened["error"], MachineError)(opened["message"])
        begin = time.monotonic()
        built = opened if "reason" in opened else self._ask({"flags": ""})
        if "hash" not in built:
            self.close()
            raise ModelError(
                f"TensorRT-RTX does not compile the model: {built['reason']}; repair the model or"
                " choose another compute capability"
            )
        self._deadline = max(DEADLINE_SECONDS, 20 * (time.monotonic() - begin))
        if self.default and self.default != built["hash"]:
            self.close()
            raise MachineError(
                "two builds of the default gave different engines, so liveness cannot be told;"
                " please report this model"
            )
        self.default = built["hash"]
        return self.default

    def change(self, flags: str) -> dict[str, str]:
        """Compile with one change: `{"hash"}`, or `{"status", "reason"}`."""
        self.start()
        answer = self._ask({"flags": flags})
        if "hash" not in answer and answer.get("status") != Status.REFUSED.value:
            self.close()  # a compiler that threw may be damaged
        return answer

    def check(self) -> None:
        """Compile the default again in the used child, to see that nothing leaked into it."""
        if self._child is not None and self._ask({"flags": ""}).get("hash") != self.default:
            raise MachineError(
                "the compiler's default engine changed within one process, so liveness cannot be"
                " told; please report this model"
            )

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child is not None
        answer = self._child.ask(request, self._deadline)
        if isinstance(answer, Ended):
            self._child = None
            return {"status": answer.status.value, "reason": answer.reason}
        return answer

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child = None


def live(
    model: Model,
    *,
    compute_capability: str = "8.9",
    jobs: int = 2,
    knobs: Iterable[str] | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Liveness:
    """Compile a model with each knob value changed alone and compare the engines' bytes.

    Args:
        model: Prepared model.
        compute_capability: GPU generation to compile for; no GPU is needed.
        jobs: Children at once.
        knobs: Knob names to sweep; None for all.
        cache: Folder of earlier answers, kept by model fingerprint, compiler version and compute
            capability; `liveness` in the user's cache folder when None. An interrupted sweep goes
            on where it was.
        progress: Called after each change.

    Raises:
        MissingExtraError: TensorRT-RTX is not installed.
        InputError: Bad compute capability or number of jobs; unknown knob (`RouteError`).
        ModelError: The compiler refuses the model itself.
        MachineError: A child cannot start, or the compiler is not deterministic here.
    """
    begin = time.monotonic()
    if jobs < 1:
        raise InputError(f"jobs {jobs} is not allowed; give 1 or more")
    changes = single_changes(knobs)
    compiler = f"TensorRT-RTX {compiler_version()}"
    place = _cache_file(model, compiler, compute_capability, cache)
    results = _read_cache(place)
    missing = [c for c in changes if c not in results]
    if missing or "" not in results:
        job = _Job(
            {
                "path": str(model.path.absolute()),
                "compute_capability": compute_capability,
                "shapes": {spec.name: list(spec.shape) for spec in model.inputs},
            },
            place,
            int(MEMORY_SHARE * machine_memory_bytes() / jobs),
        )
        done = len(changes) - len(missing)
        told = progress or (lambda _done, _total: None)
        _sweep(job, missing, jobs, results, lambda n: told(done + n, len(changes)))
    found = _summary(changes, results, compiler, compute_capability)
    return replace(found, seconds=time.monotonic() - begin)


def recalled(
    model: Model, *, compute_capability: str = "8.9", cache: Path | None = None
) -> Liveness | None:
    """What earlier sweeps of this model by the installed compiler found; None without one.

    Compiles nothing. `changes` are those that were tried.

    Args:
        model: Prepared model.
        compute_capability: As in `live`.
        cache: As in `live`.
    """
    try:
        compiler = f"TensorRT-RTX {compiler_version()}"
    except MissingExtraError:
        return None
    results = _read_cache(_cache_file(model, compiler, compute_capability, cache))
    changes = [c for c in single_changes() if c in results]
    return _summary(changes, results, compiler, compute_capability) if changes else None


def _summary(
    changes: Sequence[str], results: Mapping[str, Mapping[str, str]], compiler: str, target: str
) -> Liveness:
    default = results[""]["hash"]
    hashes = {c: results[c].get("hash") for c in changes}
    failed = {c: one_line(results[c]["reason"]) for c in changes if hashes[c] is None}
    return Liveness(
        changes=tuple(changes),
        live=tuple(c for c in changes if hashes[c] not in (None, default)),
        identical=tuple(c for c in changes if hashes[c] == default),
        failed=failed,
        refused=tuple(c for c in failed if results[c]["status"] == Status.REFUSED.value),
        distinct_engines=len({default, *(h for h in hashes.values() if h)}),
        seconds=0.0,
        compiler=compiler,
        target=target,
    )


def compiler_version() -> str:
    """Version of the installed TensorRT-RTX, without loading it.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise MissingExtraError(
            "knob liveness compiles with TensorRT-RTX, which is not installed; install it (no GPU"
            " is needed) with: pip install 'routepilot[rtx]'"
        ) from None


def _sweep(
    job: _Job,
    changes: Sequence[str],
    jobs: int,
    results: dict[str, dict[str, str]],
    progress: Callable[[int], None],
) -> None:
    """Fill `results` with the default (key "") and the changes; what is done is kept anyhow."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for change in changes:
        waiting.put(change)
    stop, lock, done = threading.Event(), threading.Lock(), [0]

    def keep(compiling: _Compiling, found: dict[str, dict[str, str]]) -> None:
        compiling.check()
        with lock:
            results.update(found)
            _write_cache(job.log, results)
        found.clear()

    def serve(number: int) -> None:
        # A child dies with the thread that started it, so each thread has its own.
        compiling = _Compiling(job, number)
        compiling.default = results.get("", {}).get("hash", "")
        found: dict[str, dict[str, str]] = {}
        try:
            found[""] = {"hash": compiling.start()}
            while not stop.is_set():
                try:
                    change = waiting.get_nowait()
                except queue.Empty:
                    break
                found[change] = compiling.change(change)
                with lock:
                    done[0] += 1
                    progress(done[0])
                if len(found) >= KEEP_EVERY:
                    keep(compiling, found)
            keep(compiling, found)
        except BaseException:
            stop.set()
            raise
        finally:
            compiling.close()

    count = max(1, min(jobs, len(changes)))
    with ThreadPoolExecutor(count) as pool:
        tasks = [pool.submit(serve, number) for number in range(count)]
        try:
            for task in tasks:
                task.result()
        finally:
            stop.set()


def _cache_file(model: Model, compiler: str, capability: str, folder: Path | None) -> Path:
    if folder is None:
        import platformdirs

        folder = Path(platformdirs.user_cache_dir("routepilot")) / "liveness"
    key = hashlib.sha256(f"{model.fingerprint}\n{compiler}\n{capability}".encode()).hexdigest()[:24]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"the cache folder {folder} cannot be made: {error}") from None
    return folder / f"{key}.json"


def _read_cache(path: Path) -> dict[str, dict[str, str]]:
    """Earlier answers; empty when there are none or the file is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        results = {str(k): {str(n): str(w) for n, w in v.items()} for k, v in data.items()}
    except (OSError, ValueError, AttributeError):
        return {}
    sound = all("hash" in r or {"status", "reason"} <= set(r) for r in results.values())
    return results if sound and "hash" in results.get("", {}) else {}


def _write_cache(path: Path, results: Mapping[str, Mapping[str, str]]) -> None:
    # A child that ran out of time or memory says something of the machine, not of the model.
    fleeting = (Status.TIMED_OUT.value, Status.OUT_OF_MEMORY.value)
    kept = {c: r for c, r in results.items() if r.get("status") not in fleeting}
    with whole_file(path) as draft:
        draft.write_text(json.dumps(kept), encoding="utf-8")


@remember
def operator_rules() -> tuple[tuple[str, tuple[frozenset[str], ...]], ...]:
    """The rules of `knob_operators.json`: prefix of knob names, groups of operators.

    A knob can act only on a graph that has an operator of every group. The longest prefix counts.
    """
    place = resources.files("routepilot.env") / "knob_operators.json"
    rules = json.loads(place.read_text(encoding="utf-8"))["rules"]
    return tuple(
        (prefix, tuple(frozenset(g) for g in rule["needs"]))
        for rule in rules
        for prefix in rule["knobs"]
    )


def operator_types(path: Path) -> frozenset[str]:
    """Operators of an ONNX file, those of subgraphs among them."""
    import onnx

    def of(graph: Any) -> set[str]:
        found = set()
        for node in graph.node:
            found.add(node.op_type)
            for attribute in node.attribute:
                for sub in (attribute.g, *attribute.graphs):
                    found |= of(sub)
        return found

    return frozenset(of(onnx.load(path, load_external_data=False).graph))


def ruled_out(operators: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Knobs that cannot matter to a graph of these operators, each with the reason."""
    present = frozenset(operators)
    found = {}
    for name in names:
        rules = [rule for rule in operator_rules() if name.startswith(rule[0])]
        if not rules:
            continue
        _, groups = max(rules, key=lambda rule: len(rule[0]))
        lacking = next((group for group in groups if not group & present), None)
        if lacking is not None:
            found[name] = f"the graph has none of {', '.join(sorted(lacking))}"
    return found
