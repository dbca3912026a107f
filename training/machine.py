"""The state of the machine while figures are made: clocks, and who else uses the GPU.

Owns what is read from the system for a manifest. Everything here is told as found and may be
absent; nothing fails because a file or a tool is not there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psutil

#: Folder of the first core's frequency files.
CPU_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq")

#: What is asked of each GPU, in the words of nvidia-smi.
GPU_FIELDS = (
    "name driver_version clocks.sm clocks.mem clocks.max.sm temperature.gpu power.draw"
    " persistence_mode compute_mode"
).split()

#: Seconds that nvidia-smi may take.
PATIENCE = 10


def clocks() -> dict[str, object]:
    """Clocks and governors of the processor and of each GPU, and other processes on the GPUs.

    Returns:
        `cpu`: governor and kHz of the first core, or `mhz`, the mean of all, where only that is
        told. `gpus`: one entry a GPU, by the names of `GPU_FIELDS`. `gpu_processes`: names of the
        other programs that compute on a GPU, without their folders; this one and its children are
        left out. Absent keys mean that there is nothing to tell.
    """
    found: dict[str, object] = {}
    cpu = {
        name: text
        for name in ("scaling_governor", "scaling_cur_freq", "scaling_max_freq")
        if (text := _read(CPU_CLOCK / name))
    }
    if cpu or (cpu := _mean_clock()):
        found["cpu"] = cpu
    rows = _smi(f"--query-gpu={','.join(GPU_FIELDS)}")
    if rows:
        found["gpus"] = [dict(zip(GPU_FIELDS, row, strict=False)) for row in rows]
        ours = _ours()
        found["gpu_processes"] = [
            Path(name).name
            for number, name in _pairs(_smi("--query-compute-apps=pid,process_name"))
            if number not in ours and name
        ]
    return found


def _mean_clock() -> dict[str, str]:
    """What /proc/cpuinfo tells where the system has no frequency files, as in most guests."""
    try:
        told = psutil.cpu_freq()
    except (OSError, RuntimeError, NotImplementedError):
        return {}
    return {"mhz": f"{told.current:.0f}"} if told and told.current else {}


def _ours() -> set[str]:
    """Process numbers of this program and its children."""
    try:
        children = psutil.Process().children(recursive=True)
    except psutil.Error:
        children = []
    return {str(os.getpid()), *(str(child.pid) for child in children)}


def _pairs(rows: list[list[str]]) -> list[tuple[str, str]]:
    return [(row[0], ", ".join(row[1:])) for row in rows if len(row) > 1]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _smi(query: str) -> list[list[str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    if done.returncode != 0:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]
