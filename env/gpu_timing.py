"""Timing on an NVIDIA GPU: CUDA events around CUDA-graph launches, for any engine.

Owns the device of this process, its memory and its lock, and how a launch is timed. Knows no
compiler: whoever can enqueue work on a stream can be timed. Needs the package cuda-bindings.

`python -m routepilot.env.gpu_timing` checks it on the GPU at hand against PyTorch's own events,
and against itself (A/A).
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.errors import MachineError, MissingExtraError, RoutePilotError
from routepilot.env.wording import counted, verb

#: Enqueues one inference on a stream (an integer handle); False or an exception means failure.
Launch = Callable[[int], object]

#: Timed launches in flight at most: enough to keep the GPU busy, few enough to stop in time.
IN_FLIGHT = 64

#: Untimed launches that a block of timing starts with. They keep the GPU busy while the host
#: enqueues the timed ones, and give caches back to this engine after another one ran.
LEAD_IN = 3

#: A host that needs more than this share of the GPU's time to enqueue bounds the figure
#: (trtexec's own limit for its warning).
ENQUEUE_BOUND = 0.8

#: Clock drift or spread beyond this is worth a word (trtexec's limit for the variation).
DRIFT = 0.025

#: NVML's bits for clocks held down by power, heat or a board's own limits.
_THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


class CudaFault(RuntimeError):
    """A CUDA call failed. Such faults stick: the process that saw one is to be replaced."""


def count_devices() -> int:
    """How many GPUs CUDA sees; 0 where cuda-bindings or a driver is missing. Opens none."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return 0
    code, count = runtime.cudaGetDeviceCount()
    return 0 if int(code) else int(count)


class Gpu:
    """One GPU, made current in this process.

    Args:
        index: Device number as CUDA counts them.

    Raises:
        MissingExtraError: cuda-bindings is not installed.
        MachineError: There is no such GPU, or its driver is too old.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise MissingExtraError(
                f"timing on a GPU needs the package cuda-bindings ({error}); install it with:"
                " pip install cuda-bindings"
            ) from None
        self._rt = runtime
        self._locked = 0
        code, count = runtime.cudaGetDeviceCount()
        if int(code) or index >= count:
            said = "" if not int(code) else f" ({self._words(code)})"
            raise MachineError(
                f"there is no CUDA device {index}{said}; `nvidia-smi` lists the GPUs and the driver"
            )
        self.index = index
        # Spinning keeps the host from falling asleep between launches. Too late to ask for it when
        # the device is in use already, which is no fault.
        runtime.cudaSetDevice(index)
        runtime.cudaSetDeviceFlags(runtime.cudaDeviceScheduleSpin)
        properties = self.call("cudaGetDeviceProperties", index)
        name = properties.name
        self.name = name.decode() if isinstance(name, bytes) else str(name)
        self.uuid = bytes(properties.uuid.bytes)[:16].hex()
        self.capability = f"{properties.major}.{properties.minor}"
        self.l2_bytes = int(properties.l2CacheSize)
        driver = int(self.call("cudaDriverGetVersion"))
        self.driver = f"{driver // 1000}.{driver % 1000 // 10}"

    def _words(self, error: Any) -> str:
        _, text = self._rt.cudaGetErrorString(error)
        return text.decode() if isinstance(text, bytes) else str(text)

    def call(self, function: str, *arguments: Any) -> Any:
        """A function of the CUDA runtime, its result without the error code.

        Raises:
            CudaFault: It failed.
        """
        error, *results = getattr(self._rt, function)(*arguments)
        if int(error):
            raise CudaFault(f"{function}: {self._words(error)}")
        return results[0] if len(results) == 1 else tuple(results)

    def stream(self) -> int:
        """A new stream that does not wait for the default one."""
        flag = self._rt.cudaStreamNonBlocking
        return int(self.call("cudaStreamCreateWithFlags", flag))

    def allocate(self, size: int) -> int:
        """Address of new device memory; never null, even for nothing."""
        return int(self.call("cudaMalloc", max(1, size)))

    def free(self, address: int) -> None:
        """Give device memory back."""
        self.call("cudaFree", address)

    def upload(self, address: int, array: NDArray[np.generic], stream: int) -> None:
        """Copy an array to the device; it must be contiguous and stay alive until `wait`."""
        kind = self._rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, stream)

    def download(self, array: NDArray[np.generic], address: int, stream: int) -> None:
        """Copy from the device into an array; done after `wait`."""
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, stream)

    def wait(self, stream: int) -> None:
        """Wait until a stream has done what it was given."""
        self.call("cudaStreamSynchronize", stream)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Have the device alone among RoutePilot's processes, so that no build disturbs a timing.

        Whoever holds it may ask again: only the outermost lock waits and lets go.

        Raises:
            MachineError: The lock file cannot be made.
        """
        if self._locked:
            yield
            return
        path = Path(tempfile.gettempdir()) / f"routepilot-gpu-{self.uuid}.lock"
        try:
            file = _open_lock(path)
        except OSError as error:
            raise MachineError(f"the GPU lock {path} cannot be opened: {error}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed, at death too
            self._locked += 1
            try:
                yield
            finally:
                self._locked -= 1
        finally:
            os.close(file)

    def condition(self) -> dict[str, Any]:
        """Clock (MHz), throttling and other processes; empty where NVML cannot be asked."""
        try:
            import pynvml

            pynvml.nvmlInit()
            # NVML counts devices in another order than CUDA may.
            handle = next(
                h
                for h in map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
                if _plain_uuid(pynvml.nvmlDeviceGetUUID(h)) == self.uuid
            )
            return {
                "clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "throttled": bool(
                    pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & _THROTTLED
                ),
                "processes": len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
            }
        except Exception:  # not installed, not permitted, not supported: only advice is lost
            return {}


def _open_lock(path: Path) -> int:
    """A handle to lock by, of a file that may be another user's: reading is enough."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.fchmod(file, 0o644)  # whatever the umask says
        return file


def _plain_uuid(text: str | bytes) -> str:
    plain = text.decode() if isinstance(text, bytes) else text
    return plain.removeprefix("GPU-").replace("-", "")


class GpuTimer:
    """Times launches of one engine on one stream.

    Each launch becomes a CUDA graph where it can be captured; launches take turns, so that an
    engine whose launches read different input buffers does not find them in the L2 cache.

    Args:
        gpu: The device.
        launches: One for each set of buffers; they must have run once before (lazy loading inside
            a capture fails).
        stream: The stream that all of them enqueue on.
        graphs: Capture them; False times plain launches.

    Attributes:
        notes: What the reader of a figure should know: no graph, bound by the host, clock drift,
            other processes.
    """

    def __init__(
        self, gpu: Gpu, launches: Sequence[Launch], stream: int, *, graphs: bool = True
    ) -> None:
        self._gpu, self._stream = gpu, stream
        self.notes: list[str] = []
        self._graphs: list[Any] = []
        self._turns: list[Callable[[], object]] = []
        for launch in launches:
            graph = self._capture(launch) if graphs else None
            if graph is None:
                self._turns.append(lambda launch=launch: _launched(launch, stream))  # type: ignore[misc]
            else:
                self._graphs.append(graph)
                self._turns.append(
                    lambda graph=graph: gpu.call("cudaGraphLaunch", graph, stream)  # type: ignore[misc]
                )
        self._events = [
            (gpu.call("cudaEventCreate"), gpu.call("cudaEventCreate")) for _ in range(IN_FLIGHT)
        ]
        self._turn = 0
        self._last_ms = 1.0

    def _capture(self, launch: Launch) -> Any:
        """The launch as an executable graph, or None with a note."""
        mode = self._gpu._rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._gpu.call("cudaStreamBeginCapture", self._stream, mode)
        failure = ""
        try:
            _launched(launch, self._stream)
        except Exception as error:
            failure = str(error)
        try:
            graph = self._gpu.call("cudaStreamEndCapture", self._stream)
            if failure:
                raise CudaFault(failure)
            executable = self._gpu.call("cudaGraphInstantiate", graph, 0)
            self._gpu.call("cudaGraphDestroy", graph)
        except CudaFault as error:
            self._gpu._rt.cudaGetLastError()  # clears what a failed capture leaves behind
            self._note(f"timed without a CUDA graph, since none can be captured: {error}")
            return None
        return executable

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _next(self) -> None:
        self._turns[self._turn]()
        self._turn = (self._turn + 1) % len(self._turns)

    def time(self, seconds: float) -> list[float]:
        """Launch back to back for about `seconds`, one timed launch at least.

        Returns:
            GPU time of each timed launch, milliseconds.
        """
        gpu, stream = self._gpu, self._stream
        for _ in range(LEAD_IN):
            self._next()
        found: list[float] = []
        enqueue = 0.0
        start = time.perf_counter()
        while not found or time.perf_counter() - start < seconds:
            left = 1000 * (seconds - (time.perf_counter() - start))
            count = max(1, min(IN_FLIGHT, int(left / self._last_ms)))
            begin = time.perf_counter()
            for before, after in self._events[:count]:
                gpu.call("cudaEventRecord", before, stream)
                self._next()
                gpu.call("cudaEventRecord", after, stream)
            enqueue += time.perf_counter() - begin
            gpu.call("cudaEventSynchronize", self._events[count - 1][1])
            found += [
                float(gpu.call("cudaEventElapsedTime", before, after))
                for before, after in self._events[:count]
            ]
            self._last_ms = max(1e-3, statistics.median(found[-count:]))
        if 1000 * enqueue / len(found) > ENQUEUE_BOUND * self._last_ms:
            self._note("bound by the host: enqueueing takes about as long as the GPU does")
        return found

    def watch(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Note what changed on the device between two `Gpu.condition`."""
        if not before or not after:
            return
        drift = abs(after["clock_mhz"] / max(1, before["clock_mhz"]) - 1)
        if drift > DRIFT:
            self._note(f"the clock moved by {100 * drift:.0f} % during the measurement")
        if after["throttled"]:
            self._note("the GPU holds its clock down (power or heat)")
        if after["processes"] > 1:
            others = after["processes"] - 1
            which = counted(others, "other process", "other processes")
            self._note(f"{which} {verb(others, 'uses', 'use')} the GPU")

    def close(self) -> None:
        """Free graphs and events; idempotent."""
        for graph in self._graphs:
            self._gpu.call("cudaGraphExecDestroy", graph)
        for pair in self._events:
            for event in pair:
                self._gpu.call("cudaEventDestroy", event)
        self._graphs, self._events, self._turns = [], [], []


def _launched(launch: Launch, stream: int) -> None:
    if launch(stream) is False:
        raise CudaFault("the engine could not be enqueued")


class _Timed:
    """A timer as `measure` wants it."""

    def __init__(self, time: Callable[[float], list[float]]) -> None:
        self.time = time

    def quiesce(self) -> None:
        pass


def self_check(index: int = 0) -> dict[str, Any]:
    """Compare with PyTorch's graphs and events, and two timers of one engine with each other.

    Both comparisons are paired, as those of routes are: PyTorch's time over ours, and ours over
    ours (A/A), each as a log ratio with its 95 % interval.

    Raises:
        MissingExtraError: PyTorch with CUDA is not installed.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("the self-check needs PyTorch with CUDA; install it") from None
    from routepilot.env.measure import TimingPlan, measure_paired

    gpu = Gpu(index)
    if not torch.cuda.is_available():
        raise MissingExtraError(
            f"PyTorch {torch.__version__} sees no GPU; install a build of PyTorch with CUDA"
        )
    torch.cuda.set_device(index)
    plan = TimingPlan(margin=0.0, min_rounds=30, max_rounds=30, warmup_seconds=1.0)
    report: dict[str, Any] = {"device": gpu.name, "driver": gpu.driver, "workloads": {}}
    stream = gpu.stream()
    for name, launch in _torch_workloads(torch, stream):
        launch(stream)
        gpu.wait(stream)
        with gpu.lock():
            first, second = (GpuTimer(gpu, [launch], stream) for _ in range(2))
            theirs = _torch_timer(torch, launch, stream)
            before = gpu.condition()
            pairs = {
                "torch": measure_paired(_Timed(theirs), _Timed(first.time), plan),
                "aa": measure_paired(_Timed(first.time), _Timed(second.time), plan),
            }
            first.watch(before, gpu.condition())
        found: dict[str, Any] = {"ms": pairs["torch"].latency_ms, "notes": list(first.notes)}
        for key, pair in pairs.items():
            found[key] = {"log_ratio": pair.log_speedup, "low": pair.low, "high": pair.high}
        report["workloads"][name] = found
        first.close()
        second.close()
    return report


def _torch_workloads(torch: Any, stream: int) -> Iterator[tuple[str, Launch]]:
    outside = torch.cuda.ExternalStream(stream)
    for size, depth in ((256, 8), (1024, 8), (4096, 4)):
        a = torch.randn(size, size, device="cuda", dtype=torch.float16)
        b, c = torch.randn_like(a), torch.empty_like(a)
        torch.cuda.synchronize()

        def launch(_: int, a: Any = a, b: Any = b, c: Any = c, depth: int = depth) -> None:
            with torch.cuda.stream(outside):
                for _ in range(depth):
                    torch.mm(a, b, out=c)
                    c.clamp_(-1, 1)

        yield f"{depth} products of {size} x {size} in float16", launch


def _torch_timer(torch: Any, launch: Launch, stream: int) -> Callable[[float], list[float]]:
    """Times replays with PyTorch's own graphs and events."""
    outside = torch.cuda.ExternalStream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=outside):
        launch(stream)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(IN_FLIGHT)]

    def times(seconds: float) -> list[float]:
        found: list[float] = []
        end = time.perf_counter() + seconds
        with torch.cuda.stream(outside):
            for _ in range(LEAD_IN):
                graph.replay()
            while not found or time.perf_counter() < end:
                for before, after in pairs:
                    before.record(outside)
                    graph.replay()
                    after.record(outside)
                outside.synchronize()
                found += [before.elapsed_time(after) for before, after in pairs]
        return found

    return times


def main() -> int:
    """Print the self-check as JSON; 0 when it agrees with PyTorch and itself within 1 %."""
    report = self_check()
    good = all(
        -0.01 < workload[pair]["low"] and workload[pair]["high"] < 0.01
        for workload in report["workloads"].values()
        for pair in ("torch", "aa")
    )
    print(json.dumps({**report, "within_one_percent": good}, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RoutePilotError as error:
        print(f"routepilot: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
