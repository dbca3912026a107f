"""What is inside an engine: its nodes, and the time each takes.

Owns the data and the protocol of engines that can tell. The times come from the compiler's own
profiler, which slows an engine down: they say where time goes, never how fast an engine is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from routepilot.env.backends.base import Tensors

#: Inferences under the profiler that are not counted.
PROFILE_WARMUP = 3


@dataclass(frozen=True)
class Layer:
    """One node of an engine.

    Attributes:
        name: Its name in the engine.
        kind: Operator, e.g. `Conv`.
        kernel: How it is computed, in the compiler's words; empty if it does not say.
        milliseconds: Mean time of one inference; 0 for a node that was not run.
    """

    name: str
    kind: str
    kernel: str
    milliseconds: float


@dataclass(frozen=True)
class Layers:
    """An engine from the inside.

    Attributes:
        layers: In the order in which they run.
        nodes: Nodes of the optimised graph by operator, those that take no time included.
        end_to_end_ms: Median time of one inference without the profiler.
        profiled_ms: Mean time of one inference under the profiler.
        inferences: Inferences that the times are means of.
        builds: Engines built besides, only to be looked into.
    """

    layers: tuple[Layer, ...]
    nodes: Mapping[str, int]
    end_to_end_ms: float
    profiled_ms: float
    inferences: int
    builds: int = 0

    @property
    def sum_ms(self) -> float:
        """Sum of the layers' times."""
        return sum(layer.milliseconds for layer in self.layers)

    def costliest(self, count: int) -> tuple[Layer, ...]:
        """The layers that take most time, largest first."""
        return tuple(sorted(self.layers, key=lambda layer: -layer.milliseconds)[:count])

    def by_kind(self) -> dict[str, float]:
        """Milliseconds by operator, largest first."""
        spent: Counter[str] = Counter()
        for layer in self.layers:
            spent[layer.kind] += layer.milliseconds  # type: ignore[assignment]
        return dict(spent.most_common())

    def as_json(self) -> dict[str, Any]:
        """Plain data; `read` reads it."""
        return asdict(self)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Layers:
        """What `as_json` gave."""
        return cls(**{**data, "layers": tuple(Layer(**layer) for layer in data["layers"])})


@runtime_checkable
class Layered(Protocol):
    """An engine that can show its layers."""

    def layers(self, inputs: Tensors, inferences: int) -> Layers:
        """Profile `inferences` inferences, after a few that are not counted."""
        ...
