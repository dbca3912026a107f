"""How long the torture tests are: short in `make test`, long in `make torture`, or as asked.

`TORTURE=1` takes the long counts, `TORTURE_NAME=N` sets one count. Figures go to the file that
`TORTURE_REPORT` names, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any


def size(name: str, short: int, long: int) -> int:
    """The count of that name."""
    given = os.environ.get(f"TORTURE_{name.upper()}")
    if given:
        return int(given)
    return long if os.environ.get("TORTURE") else short


def report(name: str, **figures: Any) -> None:
    """Keep what a test counted."""
    line = json.dumps({"test": name, "on": time.strftime("%Y-%m-%d"), **figures})
    print(line)
    if os.environ.get("TORTURE_REPORT"):
        with open(os.environ["TORTURE_REPORT"], "a", encoding="utf-8") as file:
            file.write(line + "\n")
