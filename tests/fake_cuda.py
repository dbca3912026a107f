"""A fake GPU for the backend `cuda`: the CPU provider, host memory and the host's clock.

Sessions, bindings, recipes and hashes are real; the device, its provider and the CUDA graphs are
not. `fake_cuda:backend` is a backend name that worker children can load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fake_gpu import FakeGpu, FakeTimer

from routepilot.env.backends.cuda import CudaBackend
from routepilot.env.backends.cuda_engine import Device


class FakeCudaTimer(FakeTimer):
    """A fake timer that wrote nothing down to tell the reader."""

    def __init__(self, gpu: Any, launches: Any, stream: int, *, graphs: bool = True) -> None:
        super().__init__(gpu, launches, stream)
        self.notes, self.graphs = [], graphs


FAKE = Device("CPUExecutionProvider", "cpu", FakeGpu, FakeCudaTimer)


def backend(options: Mapping[str, str] | None = None) -> CudaBackend:
    """The backend on the fake."""
    return CudaBackend(options, FAKE)
