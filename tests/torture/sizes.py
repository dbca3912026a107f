"""How long the torture tests are: short in `make test`, long in `make torture`, or as asked.

`TORTURE=1` takes the long counts, `TORTURE_NAME=N` sets one count. Figures go to the file that
`TORTURE_REPORT` names, one JSON object a line. Run as a program it prints the counts that would be
taken, or the one whose name is given.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """A count of `make test`, the one of `make torture`, and what is counted."""

    short: int
    long: int
    what: str


SIZES = {
    "trials": Size(240, 10_000, "hostile trials"),
    "lethal_share": Size(60, 60, "hostile trials, one of which is lethal"),
    "all_deeds": Size(0, 1, "whether each deed has a real child"),
    "no_difference": Size(60, 500, "runs without a difference"),
    "real_runs": Size(1, 20, "runs without a difference on a real clock"),
    "kills_of_tune": Size(3, 200, "kills of the parents of tune, and of its children"),
    "kills_of_collect": Size(2, 200, "kills of the parents of collect, and of its children"),
    "kills_of_compare": Size(1, 30, "kills of the parents of compare, and of its children"),
    "kills_of_train": Size(1, 200, "kills of train, which has no child"),
    "kills_of_writers": Size(10, 200, "kills of a writer of the store"),
    "kills_of_compilers": Size(
        1, 100, "kills of the parents of tune and of collect on each compiler, and of the children"
    ),
    "all_compilers": Size(0, 1, "whether each verb runs on each compiler"),
    "kills_of_rtx": Size(2, 40, "kills of live on TensorRT-RTX"),
    "kills_of_inductor": Size(1, 4, "kills of tune on Inductor (with -m compiler)"),
    "lock_times": Size(20, 500, "turns of each of 4 processes at the GPU lock"),
    "lock_kills": Size(3, 30, "kills of who holds the GPU lock"),
    "recorded_minutes": Size(6, 480, "simulated minutes on the recorded backend"),
    "long_builds": Size(240, 2_400, "builds of one worker in one go"),
    "agent_steps": Size(2_000, 130_000, "routes that each of eight quick agents is asked for"),
    "slow_agent_steps": Size(64, 20_000, "routes that a slow agent is asked for at most"),
    "made_catalogs": Size(30, 2_000, "made catalogs with requirements"),
    "environment_steps": Size(400, 500_000, "steps of each of two environments"),
    "mask_steps": Size(3_000, 250_000, "masks for a policy of random weights"),
    "inputs": Size(3_000, 110_000, "mutated inputs"),
    "losses": Size(300, 20_000, "losses against 60 digits"),
    "coverage_runs": Size(500, 20_000, "inputs of each text parser under coverage guidance"),
    "coverage_runs_of_files": Size(100, 3_000, "inputs of each reader of files under guidance"),
}


def size(name: str) -> int:
    """The count of that name."""
    given = os.environ.get(f"TORTURE_{name.upper()}")
    if given:
        return int(given)
    return SIZES[name].long if os.environ.get("TORTURE") else SIZES[name].short


def sequence(default: int = 0) -> int:
    """Which sequence is taken: another one by `TORTURE_SEED=N`."""
    return int(os.environ.get("TORTURE_SEED") or default)


def report(name: str, **figures: Any) -> None:
    """Keep what a test counted."""
    line = json.dumps({"test": name, "on": time.strftime("%Y-%m-%d"), **figures})
    print(line)
    if os.environ.get("TORTURE_REPORT"):
        with open(os.environ["TORTURE_REPORT"], "a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(size(sys.argv[1]))
    else:
        for name, one in SIZES.items():
            print(f"{size(name):>9,} {one.what} (TORTURE_{name.upper()})")
