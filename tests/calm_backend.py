"""A fake backend whose clock is made and without noise: equal routes give equal figures, always.

Loaded inside worker children as `calm_backend:make`, for tests that compare whole runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hostile_backend import HostileEngine

from routepilot.env.backends.base import BuildFailure, Target
from routepilot.env.outcomes import Status
from routepilot.env.routes import Catalog, Knob, Route

CATALOG = Catalog(
    "calm",
    "1",
    (
        Knob("-do", ("work", "inaccurate", "nan", "fail"), "work"),
        Knob("-speed", ("1", "0.5", "0.98", "1.5", "2"), "1"),
        Knob("-clock", ("synthetic",), "synthetic"),
        Knob("-twin", ("a", "b", "c"), "a"),
    ),
)


class CalmEngine(HostileEngine):
    def time(self, inputs: Mapping[str, Any], seconds: float) -> list[float]:
        return [self.milliseconds] * 5


class CalmBackend:
    name = "calm"

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options

    def catalog(self) -> Catalog:
        return CATALOG

    def target(self) -> Target:
        return Target("calm", "none", {}, CATALOG.key)

    def build(self, model: Any, route: Route, workdir: Path) -> CalmEngine | BuildFailure:
        time.sleep(0.05)  # so that a kill has something to interrupt
        settings = CATALOG.full_settings(route)
        if settings["-do"] == "fail":
            return BuildFailure(Status.BUILD_FAILED, "no tactic")
        return CalmEngine(settings, self.options, frozenset())


def make(options: Mapping[str, str]) -> CalmBackend:
    """Factory for `load_backend('calm_backend:make', options)`."""
    return CalmBackend(options)
