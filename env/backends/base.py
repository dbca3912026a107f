"""The one protocol every compiler speaks: catalog, target, build, and an engine to run and time.

Owns the contract and nothing else. A backend knows models and routes; it never knows the
environment, an agent, the accuracy gate or the statistics. Backends are loaded inside worker
children: the parent process only asks them for `catalog()` and `target()`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from routepilot.env.outcomes import Status
from routepilot.env.routes import Catalog, Route

if TYPE_CHECKING:
    from routepilot.env.inert import Narrowed
    from routepilot.env.models import Model

#: Named tensors, as engines take and give them.
Tensors = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Target:
    """What a figure is valid for: device, compiler, catalog and measuring settings.

    Attributes:
        backend: Backend name.
        device: Processor or GPU name.
        versions: Versions of the compilers and libraries that shape an engine, by name.
        catalog_key: `Catalog.key`.
        settings: Measuring settings that change a figure, e.g. `threads`.
    """

    backend: str
    device: str
    versions: Mapping[str, str]
    catalog_key: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Stable hash; records of different keys are never mixed."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @staticmethod
    def has(name: str) -> bool:
        """True when targets may differ in `name`, e.g. `device` or `versions.onnx`."""
        head, _, leaf = name.partition(".")
        return bool(leaf) if head in NESTED else name in _FIELDS

    def differences(self, other: Target) -> dict[str, tuple[str, str]]:
        """Every thing in which two targets differ, e.g. `settings.threads`: here and there."""
        mine, theirs = _leaves(asdict(self)), _leaves(asdict(other))
        return {
            name: (mine.get(name, "absent"), theirs.get(name, "absent"))
            for name in {**mine, **theirs}
            if mine.get(name) != theirs.get(name)
        }

    def difference(self, other: Target) -> str:
        """The first thing in which two targets differ, for messages; empty when equal."""
        mine, theirs = asdict(self), asdict(other)
        for name, value in mine.items():
            if value != theirs[name]:
                return f"{name} is {value!r} here and {theirs[name]!r} there"
        return ""


#: Fields of a target whose values have names of their own, and the others.
NESTED = ("versions", "settings")
_FIELDS = tuple(f.name for f in fields(Target) if f.name not in NESTED)


def _leaves(data: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """A nested mapping as dotted names."""
    found: dict[str, str] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value)
    return found


@dataclass(frozen=True)
class BuildFailure:
    """The compiler did not give an engine.

    Attributes:
        status: `BUILD_FAILED`, `REFUSED` or `OUT_OF_MEMORY`.
        reason: The compiler's own words, one line.
    """

    status: Status
    reason: str


@runtime_checkable
class Engine(Protocol):
    """A built model, alive in this process.

    Attributes:
        hash: Hash of the optimized graph and of the settings that act at run time. Equal hashes
            mean the same engine, which need not be measured twice.
        build_seconds: Seconds that building took, transforms found made included.

    An engine may also have `notes`, a list of what the reader of its figures should know.
    """

    hash: str
    build_seconds: float

    def run(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        """Outputs by name for one input set; outputs are copies the caller owns."""
        ...

    def time(self, inputs: Tensors, seconds: float) -> list[float]:
        """Run back to back for about `seconds` (one inference at least).

        Returns:
            Duration of each inference in milliseconds.
        """
        ...

    def quiesce(self) -> None:
        """Leave no thread spinning until the next `run` or `time`.

        An engine whose idle threads would disturb another engine's timing gives up its session
        here and makes it anew at the next call; others do nothing.
        """
        ...

    def save(self, folder: Path) -> list[str]:
        """Write what a user needs to load this engine; returns the file names written."""
        ...

    def close(self) -> None:
        """Free everything; the engine is not used again."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A compiler family seen through routes.

    Attributes:
        name: Name on the command line.
    """

    name: str

    def catalog(self) -> Catalog:
        """The knobs of the installed compiler version."""
        ...

    def target(self) -> Target:
        """What figures measured now are valid for."""
        ...

    def build(self, model: Model, route: Route, workdir: Path) -> Engine | BuildFailure:
        """Build `model` with `route`.

        Args:
            model: Normalised model with its input sets.
            route: Canonical route of `catalog()`.
            workdir: Folder for intermediate files, shared by the builds of one model; a
                transform found there may be reused, its original seconds still count.

        Returns:
            The engine, or the reason why there is none. Raises only for faults of the machine.
        """
        ...


@runtime_checkable
class NeedsDevice(Protocol):
    """A backend that can build where it cannot run."""

    def require_device(self) -> None:
        """Say so before anything is built whose figures are wanted.

        Raises:
            MachineError: There is no device to run engines on; the message says what needs none.
        """
        ...


@runtime_checkable
class Confirming(Protocol):
    """A backend whose builds lean on timings of earlier builds."""

    def confirming(self) -> None:
        """The builds that follow are finalists': no timing taken during the search shapes them."""
        ...


@runtime_checkable
class Warming(Protocol):
    """A backend that can load beforehand what its first build would wait for."""

    def warm(self) -> None:
        """Load libraries and open the device; builds and times nothing."""
        ...


@runtime_checkable
class Narrows(Protocol):
    """A backend that can tell before a build what cannot matter to a model."""

    def narrowed(self, model: Model) -> Narrowed:
        """The catalog without what is proved inert for this model; see `env/inert.py`."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A backend that keeps knobs of its compiler out of its catalog."""

    def left_out(self) -> Mapping[str, str]:
        """Those knobs, each with the reason."""
        ...
