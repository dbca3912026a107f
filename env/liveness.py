"""Knob liveness: which compiler knobs change the engine of a model, found without a GPU.

Owns the single changes, what a sweep of them found and its cache; `liveness_pool.py` owns the
children that compile, with TensorRT-RTX. Knows no agent, no timing and no route search.

What it proves: a change that leaves the engine byte-identical does nothing to this model in this
compiler. What it does not: TensorRT-RTX chooses kernels at run time, so knobs of tactics (`-cask*`,
`-tactic:*`) and of attention kernels (`-mha_fusion:v2:*`) can look inert there and matter to
TensorRT on a data-centre GPU. Engines of a model with several outputs are compared up to the
order in which the compiler lists the outputs, which it changes at will.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as remember
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepilot.env.backends.tensorrt_catalog import read_build_routes, shipped_routes_json
from routepilot.env.child import one_line
from routepilot.env.drafts import whole_file
from routepilot.env.errors import InputError, MachineError, MissingExtraError, RouteError
from routepilot.env.liveness_pool import Pool, Unit, is_sound, lasting, opening
from routepilot.env.outcomes import Status
from routepilot.env.routes import Knob

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: The wheel that carries the compiler.
DISTRIBUTION = "tensorrt-rtx-cu13-libs"

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
            near = difflib.get_close_matches(name, sorted(names), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise RouteError(
                f"knob {name!r} is not one of the {len(names)} that can be swept; {hint}`routepilot"
                " knobs --backend tensorrt_rtx -O unsafe=on` lists them"
            )
    chosen = [knob for knob in known_knobs() if wanted is None or knob.name in wanted]
    return [f"{knob.name}={value}" for knob in chosen for value in knob.alternatives]


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
        unit = Unit(opening(model, compute_capability), place, deque(missing), results)
        done = iter(range(len(changes) - len(missing) + 1, len(changes) + 1))
        told = progress or (lambda _done, _total: None)
        Pool(
            [unit],
            max(1, min(jobs, len(missing))),
            heard=lambda _unit: told(next(done), len(changes)),
            kept=lambda _unit: _write_cache(place, results),
        ).run()
        if unit.error is not None:
            raise unit.error
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
    return results if is_sound(results.values()) and "hash" in results.get("", {}) else {}


def _write_cache(path: Path, results: Mapping[str, Mapping[str, str]]) -> None:
    with whole_file(path) as draft:
        draft.write_text(json.dumps(lasting(results)), encoding="utf-8")
