"""What a figure depends on, gathered in one place: versions, machine, command, git state.

Owns the manifest that goes into every result and table. Measures nothing.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from routepilot.env.backends.tensorrt_compiler import FLAGS_VARIABLE
from routepilot.training.machine import clocks

#: Packages whose version can change a figure.
PACKAGES = (
    "routepilot",
    "numpy",
    "onnx",
    "onnxruntime",
    "openvino",
    "torch",
    "stable-baselines3",
    "gymnasium",
    "tensorrt",
    "tensorrt-rtx-cu13-libs",
    "nvidia-modelopt",
    "onnxruntime-gpu",
)


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that matter; absent ones are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> str:
    """Commit of the checkout this package runs from, `+` when it has changes, or empty."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
        )
        if commit.returncode != 0:
            return ""
        changes = subprocess.run(
            ["git", "-C", str(here), "status", "--porcelain"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


def manifest(**extra: object) -> dict[str, object]:
    """The manifest of a run.

    Args:
        **extra: What the caller adds, e.g. `seed`, `noise_floor`.
    """
    load = os.getloadavg()
    stray = os.environ.get(FLAGS_VARIABLE)
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["routepilot", *map(_without_folder, sys.argv[1:])]),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 1,
        "load": [round(x, 2) for x in load],
        "clocks": clocks(),
        "packages": package_versions(),
        "git": git_state(),
        # Kept from the children, which would build every route with them.
        **({} if stray is None else {"stray_flags": stray}),
        **extra,
    }


def _without_folder(argument: str) -> str:
    """An argument without the folders of an absolute path: they are nobody else's business."""
    return Path(argument).name if argument.startswith("/") else argument
