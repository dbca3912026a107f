"""A fake of CUDA's runtime on a virtual clock: streams, events, graphs, and no device.

Work that is enqueued begins when the device has done what came before, as on a stream; enqueueing
costs the host time. `install(monkeypatch)` puts it in the place of `cuda.bindings.runtime`, and of
the clock that `gpu_timing` reads.
"""

from __future__ import annotations

import itertools
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

OK = 0


class Runtime(types.ModuleType):
    """The module.

    Attributes:
        host: Seconds on the host's clock.
        device: When the device will have done what it was given, seconds.
        launch_cost: Seconds the host needs to enqueue a launch or a graph.
        launched: Launches by name, in order, graphs' among them.
        capturable: Whether launches can be captured.
        devices: How many devices there are.
        alive: Graphs, events and memory that were made and not given back.
        broken: Functions that fail.
    """

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)  # noqa: N815
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)  # noqa: N815
    cudaStreamNonBlocking, cudaDeviceScheduleSpin = 1, 2  # noqa: N815

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.host = self.device = 0.0
        self.launch_cost = 5e-6
        self.launched: list[str] = []
        self.capturable, self.capturing, self.captured = True, False, ""
        self.devices, self.broken = 1, set[str]()
        self.alive: dict[int, Any] = {}
        self.sticky = 0
        self.flags: list[int] = []
        self._numbers = itertools.count(1000)

    def enqueue(self, name: str, seconds: float) -> None:
        """What an engine does on a stream: some work of the device."""
        if self.capturing:
            self.captured = f"{name} {seconds}"
            return
        self.host += self.launch_cost
        self.device = max(self.device, self.host) + seconds
        self.launched.append(name)

    def _made(self, thing: Any) -> tuple[int, int]:
        number = next(self._numbers)
        self.alive[number] = thing
        return OK, number

    def cudaGetDeviceCount(self) -> tuple[int, int]:  # noqa: N802
        return (OK, self.devices) if self.devices else (100, 0)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:  # noqa: N802
        return OK, f"error {error}".encode()

    def cudaSetDevice(self, index: int) -> tuple[int]:  # noqa: N802
        return (OK,)

    def cudaSetDeviceFlags(self, flags: int) -> tuple[int]:  # noqa: N802
        self.flags.append(flags)
        return (OK,)

    def cudaGetDeviceProperties(self, index: int) -> tuple[int, Any]:  # noqa: N802
        uuid = SimpleNamespace(bytes=bytes(range(16)))
        return OK, SimpleNamespace(
            name=b"Virtual GPU", uuid=uuid, major=9, minor=0, l2CacheSize=1 << 20
        )

    def cudaDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return OK, 13020

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:  # noqa: N802
        return OK, 7

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:  # noqa: N802
        self.host = max(self.host, self.device)
        return (OK,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:  # noqa: N802
        self.capturing, self.captured = True, ""
        return (OK,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, int]:  # noqa: N802
        self.capturing = False
        if not self.capturable:
            self.sticky = 900
            return 900, 0
        return self._made(self.captured)

    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[int, int]:  # noqa: N802
        return self._made(self.alive[graph])

    def cudaGraphDestroy(self, graph: int) -> tuple[int]:  # noqa: N802
        del self.alive[graph]
        return (OK,)

    cudaGraphExecDestroy = cudaEventDestroy = cudaFree = cudaGraphDestroy  # noqa: N815

    def cudaGetLastError(self) -> tuple[int]:  # noqa: N802
        found, self.sticky = self.sticky, 0
        return (found,)

    def cudaGraphLaunch(self, graph: int, stream: int) -> tuple[int]:  # noqa: N802
        if "cudaGraphLaunch" in self.broken:
            return (719,)
        name, seconds = self.alive[graph].rsplit(" ", 1)
        self.enqueue(name, float(seconds))
        return (OK,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:  # noqa: N802
        return self._made(size)

    def cudaEventCreate(self) -> tuple[int, int]:  # noqa: N802
        return self._made(0.0)

    def cudaEventRecord(self, event: int, stream: int) -> tuple[int]:  # noqa: N802
        self.alive[event] = max(self.device, self.host)
        return (OK,)

    def cudaEventSynchronize(self, event: int) -> tuple[int]:  # noqa: N802
        self.host = max(self.host, self.alive[event])
        return (OK,)

    def cudaEventElapsedTime(self, before: int, after: int) -> tuple[int, float]:  # noqa: N802
        return OK, 1000 * (self.alive[after] - self.alive[before])


def install(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Put the fake in place of CUDA's runtime and of the clock; returns it."""
    from routepilot.env import gpu_timing

    runtime = Runtime()
    package, bindings = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
    bindings.runtime = runtime  # type: ignore[attr-defined]
    package.bindings = bindings  # type: ignore[attr-defined]
    for name, module in (
        ("cuda", package),
        ("cuda.bindings", bindings),
        ("cuda.bindings.runtime", runtime),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    clock = SimpleNamespace(perf_counter=lambda: runtime.host)
    monkeypatch.setattr(gpu_timing, "time", clock)
    return runtime
