"""The state of the machine while figures are made: clocks, and who else uses the GPU.

Owns what is read from the system for a manifest. Everything here is told as found and may be
absent; nothing fails because a file or a tool is not there.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

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
        `cpu`: governor and kHz, where the system tells. `gpus`: one entry a GPU, by the names of
        `GPU_FIELDS`. `gpu_processes`: names of the programs that compute on a GPU, without their
        folders. Absent keys mean that there is nothing to tell.
    """
    found: dict[str, object] = {}
    cpu = {
        name: text
        for name in ("scaling_governor", "scaling_cur_freq", "scaling_max_freq")
        if (text := _read(CPU_CLOCK / name))
    }
    if cpu:
        found["cpu"] = cpu
    rows = _smi(f"--query-gpu={','.join(GPU_FIELDS)}")
    if rows:
        found["gpus"] = [dict(zip(GPU_FIELDS, row, strict=False)) for row in rows]
        programs = _smi("--query-compute-apps=process_name")
        found["gpu_processes"] = [Path(row[0]).name for row in programs if row and row[0]]
    return found


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
