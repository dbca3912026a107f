"""What can come of building a route: the outcome, its status, its measurement.

Owns the plain data that workers produce, stores keep and agents are told. Knows no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from routepilot.env.routes import Route


class Status(str, Enum):
    """How a build ended. Only `OK` can be feasible."""

    OK = "ok"
    BUILD_FAILED = "build_failed"  # the compiler said no
    CRASHED = "crashed"  # the child ended by a signal or without an answer
    TIMED_OUT = "timed_out"  # the deadline passed; the process group was killed
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"  # by SIGKILL, and not for want of memory: nothing is known of the route
    ACCURACY_FAILED = "accuracy_failed"  # finite, right shape, too far from the reference
    INVALID_OUTPUT = "invalid_output"  # NaN, Inf, a missing output, another shape or type
    REFUSED = "refused"  # a knob or combination the catalog or the compiler refuses


@dataclass(frozen=True)
class Measurement:
    """Paired timing of a route against the default route.

    Attributes:
        log_speedup: log(default time / route time); above zero is faster. Median over rounds.
        low: Lower end of the 95 % interval of `log_speedup`.
        high: Upper end.
        latency_ms: Median time of one inference with the route, milliseconds.
        default_latency_ms: Same for the default route in the same session.
        rounds: Interleaved rounds behind the figures.
        spread: Robust standard deviation of one round's log ratio.
    """

    log_speedup: float
    low: float
    high: float
    latency_ms: float
    default_latency_ms: float
    rounds: int
    spread: float

    @property
    def speedup(self) -> float:
        """Default time over route time."""
        return math.exp(self.log_speedup)


@dataclass(frozen=True)
class Outcome:
    """What came of building one route.

    Attributes:
        route: The route.
        status: How it ended.
        reason: Why, in the compiler's words where it failed; empty when all is well. For an `OK`
            outcome whose engine equals another's it says which, else what the engine noted (no log
            line says that the route is in use, timed without a CUDA graph ...).
        measurement: Present when the engine was timed.
        losses: Worst loss over outputs and selection input sets, by metric name
            (`l0 l1 l2 lInf cos rel_l2`).
        build_seconds: Model transforms plus compile, seconds.
        measure_seconds: Accuracy check plus timing, seconds.
        engine_hash: Hash of what was built (optimized graph and settings); empty if nothing was.
    """

    route: Route
    status: Status
    reason: str = ""
    measurement: Measurement | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    build_seconds: float = 0.0
    measure_seconds: float = 0.0
    engine_hash: str = ""

    @property
    def is_feasible(self) -> bool:
        """True when the engine was built, checked and timed, and passed the gate."""
        return self.status is Status.OK and self.measurement is not None

    @property
    def log_speedup(self) -> float:
        """Measured log speed-up; minus infinity when the outcome is not feasible."""
        if not self.is_feasible or self.measurement is None:
            return -math.inf
        return self.measurement.log_speedup

    @property
    def gain(self) -> float:
        """Log speed-up as an answer: 0 unless feasible with an interval that clears the default."""
        measured = self.measurement
        if not self.is_feasible or measured is None or measured.low <= 0:
            return 0.0
        return measured.log_speedup
