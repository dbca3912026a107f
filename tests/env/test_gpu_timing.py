"""The timing on a GPU, on a virtual device whose times are known: what it says and what it notes.

On a real GPU `python -m routepilot.env.gpu_timing` holds it to PyTorch's events (docs/cuda.md).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_cuda_runtime
import pytest
from fake_cuda_runtime import Runtime

from routepilot.env.errors import MachineError, MissingExtraError
from routepilot.env.gpu_timing import LEAD_IN, CudaFault, Gpu, GpuTimer, count_devices


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return fake_cuda_runtime.install(monkeypatch)


def launches(cuda: Runtime, *names: str, seconds: float = 1e-3) -> list[Any]:
    return [lambda stream, name=name: cuda.enqueue(name, seconds) for name in names]


def test_the_device_is_read_and_the_host_spins(cuda: Runtime) -> None:
    gpu = Gpu()
    assert (gpu.name, gpu.capability, gpu.driver) == ("Virtual GPU", "9.0", "13.2")
    assert cuda.flags == [cuda.cudaDeviceScheduleSpin]
    assert gpu.allocate(0) != 0
    assert list(cuda.alive.values()) == [1]  # never a null address, even for nothing
    assert count_devices() == 1


def test_no_device_and_no_bindings_are_told(cuda: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match=r"no CUDA device 1; `nvidia-smi`"):
        Gpu(1)
    cuda.devices = 0
    with pytest.raises(MachineError, match=r"no CUDA device 0 \(error 100\)"):
        Gpu()
    assert count_devices() == 0
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingExtraError, match="cuda-bindings"):
        Gpu()
    assert count_devices() == 0


def test_graphs_are_timed_in_turn_by_the_devices_own_clock(cuda: Runtime) -> None:
    timer = GpuTimer(Gpu(), launches(cuda, "a", "b", "c"), 7)
    found = timer.time(0.25)
    assert statistics.median(found) == pytest.approx(1.0)
    # Enqueueing shows only where the device waits for it: in the first launch after a wait.
    assert max(found) == pytest.approx(1.0 + 1000 * cuda.launch_cost)
    assert sum(one > 1.001 for one in found) <= len(found) / 64 + 1
    assert 200 <= len(found) <= 250
    assert len(cuda.launched) == len(found) + LEAD_IN
    counts = Counter(cuda.launched)
    assert max(counts.values()) - min(counts.values()) <= 1  # input buffers take turns
    assert cuda.launched[:4] == ["a", "b", "c", "a"]
    assert timer.notes == []
    assert timer.time(0.0)  # one timed launch at least
    timer.close()
    timer.close()
    assert cuda.alive == {}


def test_a_fast_engine_bound_by_the_host_is_noted(cuda: Runtime) -> None:
    cuda.launch_cost = 2e-3
    timer = GpuTimer(Gpu(), launches(cuda, "a", seconds=1e-4), 7)
    timer.time(0.1)
    assert timer.notes == ["bound by the host: enqueueing takes about as long as the GPU does"]
    timer.time(0.1)
    assert len(timer.notes) == 1  # said once


def test_what_cannot_be_captured_is_timed_plainly_and_noted(cuda: Runtime) -> None:
    cuda.capturable = False
    timer = GpuTimer(Gpu(), launches(cuda, "a"), 7)
    assert cuda.sticky == 0  # the failed capture leaves nothing behind
    assert statistics.median(timer.time(0.1)) == pytest.approx(1.0)
    (note,) = timer.notes
    assert "without a CUDA graph" in note
    assert "error 900" in note


def test_an_engine_that_fails_inside_a_capture_is_noted_with_its_words(cuda: Runtime) -> None:
    broken = [True]

    def launch(stream: int) -> bool:
        cuda.enqueue("a", 1e-3)
        return not (broken and cuda.capturing)

    timer = GpuTimer(Gpu(), [launch], 7)
    assert "could not be enqueued" in timer.notes[0]
    assert timer.time(0.01)
    with pytest.raises(CudaFault, match="could not be enqueued"):
        GpuTimer(Gpu(), [lambda stream: False], 7, graphs=False).time(0.01)


def test_a_fault_of_the_device_is_a_fault(cuda: Runtime) -> None:
    timer = GpuTimer(Gpu(), launches(cuda, "a"), 7)
    cuda.broken.add("cudaGraphLaunch")
    with pytest.raises(CudaFault, match="cudaGraphLaunch: error 719"):
        timer.time(0.01)


STEADY = {"clock_mhz": 1980, "throttled": False, "processes": 1}


@pytest.mark.parametrize(
    ("after", "note"),
    [
        ({"clock_mhz": 1485}, "the clock moved by 25 % during the measurement"),
        ({"clock_mhz": 1960}, ""),
        ({"throttled": True}, "the GPU holds its clock down (power or heat)"),
        ({"processes": 3}, "2 other processes use the GPU"),
    ],
)
def test_drift_heat_and_neighbours_are_noted(
    cuda: Runtime, after: dict[str, Any], note: str
) -> None:
    timer = GpuTimer(Gpu(), launches(cuda, "a"), 7)
    timer.watch(STEADY, {**STEADY, **after})
    assert timer.notes == ([note] if note else [])
    timer.watch({}, STEADY)  # NVML could not be asked
    assert len(timer.notes) == bool(note)


def test_the_condition_is_of_the_device_of_this_uuid(
    cuda: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML counts devices in an order of its own, so the second may be ours."""
    ours = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    nvml = ModuleType("pynvml")
    facts = SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: ("GPU-ffffffff", ours)[handle],
        nvmlDeviceGetClockInfo=lambda handle, kind: (100, 1500)[handle],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: (0, 0x20)[handle],
        nvmlDeviceGetComputeRunningProcesses=lambda handle: ([], ["us", "them"])[handle],
    )
    nvml.__dict__.update(vars(facts))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpu = Gpu()
    assert gpu.condition() == {"clock_mhz": 1500, "throttled": True, "processes": 2}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.condition() == {}


@pytest.mark.skipif(find_spec("cuda") is not None, reason="may have a GPU")
def test_the_self_check_without_a_gpu_says_so_in_one_line() -> None:
    command = [sys.executable, "-m", "routepilot.env.gpu_timing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("routepilot: timing on a GPU needs") and not done.stdout
    assert len(done.stderr.splitlines()) == 1
