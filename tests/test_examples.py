"""Files of `examples/` run, where what they need is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_rllib_trains_on_the_environment_and_takes_no_masked_action() -> None:
    pytest.importorskip("ray")
    needs = subprocess.run(
        [sys.executable, "-c", "import ray.rllib"], capture_output=True, timeout=120
    )
    if needs.returncode != 0:
        pytest.skip("ray.rllib cannot be imported; pip install 'ray[rllib]' (no extra of ours)")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "rllib_ppo.py")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]  # a masked action is an error
    found = re.search(r"(\d+) episodes, mean return (-?[\d.]+)", done.stdout)
    assert found is not None and int(found[1]) > 10 and -1 < float(found[2]) < 5, done.stdout
