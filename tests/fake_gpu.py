"""A fake of a GPU and of the timer of its launches: the host's memory and the host's clock.

Owns what stands for `gpu_timing.Gpu` and `GpuTimer`. Knows no compiler; `fake_tensorrt.py` and
`fake_cuda.py` put it under theirs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FakeGpu:
    """Host memory and the host's clock in the place of a GPU."""

    name, driver, capability, uuid, l2_bytes = "Fake GPU", "13.0", "9.0", "00", 1 << 20

    def __init__(self, index: int = 0) -> None:
        self._memory: dict[int, Any] = {}
        self.locked = self.depth = 0

    def stream(self) -> int:
        return 7

    def allocate(self, size: int) -> int:
        memory = ctypes.create_string_buffer(max(1, size))
        address = ctypes.addressof(memory)
        self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        del self._memory[address]

    def upload(self, address: int, array: Any, stream: int) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, array: Any, address: int, stream: int) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def wait(self, stream: int) -> None: ...

    @contextmanager
    def lock(self) -> Iterator[None]:
        self.locked += 1
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def condition(self) -> dict[str, Any]:
        return {}


#: Noted by the fake timer when the lock was held around its own holding: by a whole measurement.
WHOLE = "the GPU was held for the whole measurement"


class FakeTimer:
    """Takes the time of launches on the host; no CUDA events, no graphs."""

    def __init__(self, gpu: Any, launches: Any, stream: int, **_: Any) -> None:
        self._launches, self._stream, self.notes = list(launches), stream, ["a fake timer"]
        self._gpu = gpu

    def time(self, seconds: float) -> list[float]:
        assert self._gpu.depth, "timed while a build might run"
        if self._gpu.depth > 1 and WHOLE not in self.notes:
            self.notes.append(WHOLE)
        found: list[float] = []
        end = time.perf_counter() + seconds
        while not found or time.perf_counter() < end:
            start = time.perf_counter()
            self._launches[len(found) % len(self._launches)](self._stream)
            found.append(1000 * (time.perf_counter() - start))
        return found

    def watch(self, before: Any, after: Any) -> None: ...

    def close(self) -> None: ...
