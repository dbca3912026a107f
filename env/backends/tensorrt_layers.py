"""What is inside a TensorRT engine: its inspector's words beside its profiler's times.

Owns the reading of both. Nothing here touches a GPU; `tensorrt_engine.py` asks the engine.

The inspector names kinds and tactics only of an engine that was built with detailed profiling
verbosity, which changes no kernel and every engine's bytes. So engines are measured as they are,
and built once more to be looked into.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from routepilot.env.backends.layers import Layer, Layers

#: Kind of a layer that only the profiler names, or that the inspector names and no more.
UNKNOWN = "unknown"


def make_profiler(trt: Any) -> Any:
    """A profiler for an execution context; `rounds` holds milliseconds by layer, one an inference.

    TensorRT reports every layer of an inference in turn, so a name that comes again begins the
    next inference.
    """

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.rounds: list[dict[str, float]] = []

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            if not self.rounds or layer_name in self.rounds[-1]:
                self.rounds.append({})
            self.rounds[-1][layer_name] = float(ms)

    return Profiler()


def mean_times(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean milliseconds of each layer over inferences, in the order of the first."""
    names = dict.fromkeys(name for one in rounds for name in one)
    return {name: sum(one.get(name, 0.0) for one in rounds) / len(rounds) for name in names}


def read_layers(
    information: str,
    times: Mapping[str, float],
    *,
    end_to_end_ms: float,
    profiled_ms: float,
    inferences: int,
) -> Layers:
    """Put the inspector's layers and the profiler's times together.

    Args:
        information: What `get_engine_information` gives as JSON.
        times: Mean milliseconds by layer name.
        end_to_end_ms: Median time of one inference of the engine as it is measured.
        profiled_ms: Mean time of one inference under the profiler.
        inferences: Inferences that the times are means of.

    Returns:
        The engine from the inside; one build was made for it.
    """
    told = [_facts(entry) for entry in json.loads(information).get("Layers", [])]
    layers = [Layer(*facts, times.get(facts[0], 0.0)) for facts in told]
    named = {layer.name for layer in layers}
    layers += [Layer(name, UNKNOWN, "", ms) for name, ms in times.items() if name not in named]
    nodes = dict(Counter(layer.kind for layer in layers).most_common())
    return Layers(tuple(layers), nodes, end_to_end_ms, profiled_ms, inferences, builds=1)


def _facts(entry: object) -> tuple[str, str, str]:
    """Name, kind and kernel of an inspector's entry: an object, or a name alone."""
    if not isinstance(entry, Mapping):
        return str(entry), UNKNOWN, ""
    kernel = entry.get("TacticName") or entry.get("ParameterType") or ""
    return str(entry.get("Name", "")), str(entry.get("LayerType", UNKNOWN)), str(kernel)
