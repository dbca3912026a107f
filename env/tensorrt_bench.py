"""The bench of TensorRT's checks: one compiler, one backend, one tiny model, made when asked for.

Owns what `checks_tensorrt.py` and `questions_tensorrt.py` share. Knows no result and no wording.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from routepilot.env.backends.base import BuildFailure, Engine
from routepilot.env.backends.tensorrt import TensorRtBackend
from routepilot.env.backends.tensorrt_catalog import is_build_route_knob
from routepilot.env.backends.tensorrt_compiler import (
    Compiler,
    Network,
    Plan,
    Settings,
    find_module,
)
from routepilot.env.errors import MachineError
from routepilot.env.routes import DEFAULT_ROUTE

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: A change that was live on every model tried so far.
LIVE = "-kgen:tiling=0"

#: A knob and a value that no compiler has.
UNKNOWN_KNOB, UNKNOWN_VALUE = "-routepilot_no_such_knob=1", "-kgen:tiling=banana"


class Bench:
    """What the checks share; the pieces are made when first asked for.

    Args:
        name: `tensorrt` or `tensorrt_rtx`.
        model: A tiny prepared model.
        workdir: Folder for intermediate files.
        options: Backend options.
    """

    def __init__(self, name: str, model: Model, workdir: Path, options: Mapping[str, str]) -> None:
        self.name, self.model, self.workdir, self.options = name, model, workdir, dict(options)
        self.trt = find_module(name)
        self.backend = TensorRtBackend(name, options)
        self.rtx = name == "tensorrt_rtx"
        self._made: tuple[Compiler, Network] | None = None
        self.default: Plan | None = None

    def settings(self) -> Settings:
        """Settings as the backend would make them, without a timing cache."""
        return Settings(compute_capability=self.backend.capability)

    def compiler(self) -> tuple[Compiler, Network]:
        """A compiler and the parsed tiny model; its builds share a timing cache, to be quick."""
        if self._made is None:
            shared = replace(self.settings(), timing_cache=self.workdir / "bench.cache")
            self._made = self.compiler_with(self.settings() if self.rtx else shared)
        return self._made

    def compiler_with(self, settings: Settings) -> tuple[Compiler, Network]:
        """Another compiler, with the tiny model parsed by it."""
        compiler = Compiler(self.trt, settings)
        shapes = {spec.name: spec.shape for spec in self.model.inputs}
        return compiler, compiler.parse(self.model.path, shapes)

    def build(self, route: str = "") -> Plan | BuildFailure:
        """Build a route through this backend's channel."""
        compiler, network = self.compiler()
        if self.rtx:
            return compiler.compile(network, flags=route)
        return compiler.compile(network, build_route=route)

    def live_route(self) -> str:
        """One build route that should change the engine; empty when there is none."""
        catalog = self.backend.catalog()
        if LIVE.partition("=")[0] in catalog:
            return LIVE
        routes = catalog.neighbours(DEFAULT_ROUTE)
        return next((str(r) for r in routes if all(map(is_build_route_knob, r.values))), "")

    def engine(self) -> Engine:
        """An engine of the default route.

        Raises:
            MachineError: It does not build.
        """
        built = self.backend.build(self.model, DEFAULT_ROUTE, self.workdir)
        if isinstance(built, BuildFailure):
            raise MachineError(built.reason)
        return built
