"""Replay of a route table: outcomes without hardware, as fast as memory.

Owns the arrays that agents train on and evaluations walk. Replay happens at the level of outcomes,
not of engines: what a table keeps of an engine is its figures, and a stand-in that pretends to run
would add nothing to them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from routepilot.env.accuracy import Gate, regate
from routepilot.env.outcomes import Measurement, Outcome
from routepilot.env.records import ModelCard, RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route

Floats = NDArray[np.float64]

#: Loss given to what failed or gave no number: beyond any limit that makes sense.
LOST = 10.0


@dataclass(frozen=True, eq=False)
class ModelReplay:
    """One model of a table, as arrays over its recorded routes (the default not among them).

    Attributes:
        card: The model's card.
        default: Outcome of the default route.
        routes: Recorded routes.
        outcomes: Their outcomes, settled by repeats, judged by the replay's gate.
        log_speedup: Measured log speed-ups; NaN where nothing was timed.
        noise: Standard deviation of each, from its interval.
        loss: Loss in the gate's metric; `LOST` where the build failed or the output was invalid.
        feasible: Whether the gate lets each pass.
        build_seconds: Build and measure seconds of each.
    """

    card: ModelCard
    default: Outcome
    routes: tuple[Route, ...]
    outcomes: tuple[Outcome, ...]
    log_speedup: Floats
    noise: Floats
    loss: Floats
    feasible: NDArray[np.bool_]
    build_seconds: Floats

    @cached_property
    def index(self) -> dict[Route, int]:
        """Place of each route in the arrays."""
        return {route: place for place, route in enumerate(self.routes)}

    @cached_property
    def gain(self) -> Floats:
        """Log speed-up of each route as an answer.

        0 where the route is not feasible, or its interval does not clear the default: such an
        answer would not be confirmed.
        """
        return np.array([outcome.gain for outcome in self.outcomes])

    @cached_property
    def other(self) -> Floats:
        """1 where a route's engine is another than the default's, 0 where it is the same.

        NaN where either hash is not on record, as of a build that failed.
        """
        own = self.default.engine_hash
        hashes = [outcome.engine_hash for outcome in self.outcomes]
        return np.array([float(h != own) if h and own else math.nan for h in hashes])

    @property
    def oracle(self) -> float:
        """Best recorded gain; 0 when the default route is best."""
        return float(self.gain.max(initial=0.0))

    def outcome(self, route: Route, rng: np.random.Generator | None = None) -> Outcome:
        """The recorded outcome; with `rng`, its log speed-up is drawn anew within its noise."""
        place = self.index[route]
        outcome = self.outcomes[place]
        measured = outcome.measurement
        if rng is None or measured is None:
            return outcome
        drawn = measured.log_speedup + rng.normal(0.0, self.noise[place])
        shift = drawn - measured.log_speedup
        return replace(
            outcome,
            measurement=replace(
                measured, log_speedup=drawn, low=measured.low + shift, high=measured.high + shift
            ),
        )


class Replay:
    """A route table judged by one gate; models without a default route on record are left out.

    Args:
        table: The table.
        gate: Accuracy gate, applied to the recorded losses.
    """

    def __init__(self, table: RouteTable, gate: Gate | None = None) -> None:
        self.table = table
        self.gate = gate or Gate()
        measured = [
            c for c in table.models if DEFAULT_ROUTE in table.outcomes.get(c.fingerprint, {})
        ]
        self.models = tuple(self._model(card) for card in measured)

    @property
    def catalog(self) -> Catalog:
        """The table's catalog."""
        return self.table.catalog

    def __iter__(self) -> Iterator[ModelReplay]:
        return iter(self.models)

    def model(self, name: str) -> ModelReplay:
        """The replay of a model by name or fingerprint.

        Raises:
            KeyError: It is not in the table.
        """
        for model in self.models:
            if name in (model.card.name, model.card.fingerprint):
                return model
        raise KeyError(name)

    def without_families(self, families: tuple[str, ...]) -> Replay:
        """The replay with these families left out."""
        return self._only(lambda family: family not in families)

    def only_families(self, families: tuple[str, ...]) -> Replay:
        """The replay of these families alone."""
        return self._only(lambda family: family in families)

    def _only(self, keeps: Callable[[str], bool]) -> Replay:
        # A model is judged by itself and by the gate, so the judgments made stand.
        rest = copy.copy(self)
        rest.models = tuple(m for m in self.models if keeps(m.card.family))
        kept = [c.fingerprint for c in self.table.models if keeps(c.family)]
        rest.table = self.table.only(kept)
        return rest

    def _model(self, card: ModelCard) -> ModelReplay:
        recorded = self.table.outcomes[card.fingerprint]
        default = recorded[DEFAULT_ROUTE][0]
        routes = tuple(route for route in recorded if not route.is_default)
        outcomes = tuple(regate(settled(recorded[route]), self.gate) for route in routes)
        measured = [o.measurement for o in outcomes]
        return ModelReplay(
            card,
            default,
            routes,
            outcomes,
            np.array([m.log_speedup if m else math.nan for m in measured]),
            np.array([noise_of(m) if m else 0.0 for m in measured]),
            np.array([self._loss(o) for o in outcomes]),
            np.array([o.is_feasible for o in outcomes]),
            np.array([o.build_seconds + o.measure_seconds for o in outcomes]),
        )

    def _loss(self, outcome: Outcome) -> float:
        loss = outcome.losses.get(self.gate.metric, LOST)
        return min(loss, LOST) if math.isfinite(loss) else LOST


def settled(outcomes: tuple[Outcome, ...]) -> Outcome:
    """One outcome of several builds of a route.

    Routes are built again because their first figure was among the largest, so that figure is
    partly luck: it is left out, and the others are averaged.
    """
    first, timed = outcomes[0], [o.measurement for o in outcomes[1:] if o.measurement is not None]
    if first.measurement is None or not timed:
        return first
    middle = float(np.mean([m.log_speedup for m in timed]))
    half = float(np.mean([(m.high - m.low) / 2 for m in timed])) / math.sqrt(len(timed))
    measurement = replace(
        first.measurement, log_speedup=middle, low=middle - half, high=middle + half
    )
    return replace(first, measurement=measurement)


def noise_of(measured: Measurement) -> float:
    """Standard deviation of a measured log speed-up: a quarter of its 95 % interval."""
    return (measured.high - measured.low) / 4
