"""Hostile input: whatever is read answers with its own error, in bounded time and memory.

Each reader (`readers.py`, `command_lines.py`) is given mutations (`mutation.py`) of a sound input.
Anything but a `RoutePilotError` fails, as does one input over `SECONDS` of work or of sleep, one
that does not come back, or growth of the process beyond `MEMORY`.
"""

from __future__ import annotations

import random
from pathlib import Path

import psutil
import pytest
import readers
from command_lines import LINES
from mutation import mutate
from readers import PLAIN
from sizes import report, sequence, size
from watchdog import Watchdog

from routepilot.env.errors import RoutePilotError

SECONDS, MEMORY = 5.0, 400 << 20

#: Seconds on the clock after which a reader is not waited for any more, on a busy machine too.
BACK = 120.0

IN_FOLDER = {**LINES, **readers.IN_FOLDER}

#: Share of all inputs that a reader gets; the slow ones get less.
SHARE = {"expressions": 16, "routes": 16, "tuning_caches": 16, "knob_lists": 10, "shapes": 12,
         "limits": 10, "tables": 3, "table_texts": 3, "stores": 2, "policies": 5, "weights": 3,
         "models": 2, "bundles": 4, "input_sets": 4, "results": 4, "options": 4,
         "every_option": 8, "recipes": 4, "settings": 4}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*PLAIN, *IN_FOLDER])
def test_nothing_but_our_errors(name: str, tmp_path: Path) -> None:
    count = max(1, size("inputs") * SHARE[name] // sum(SHARE.values()))
    rng = random.Random(f"{name} {sequence()}")
    sound, read = PLAIN[name]() if name in PLAIN else IN_FOLDER[name](tmp_path)
    place = tmp_path / "fuzz"
    place.mkdir()
    before = psutil.Process().memory_info().rss
    refused, dog = 0, Watchdog(SECONDS, SECONDS, BACK)
    for number in range(count):
        data = sound if number == 0 else mutate(rng, sound)
        try:
            with dog.watched():
                read(place, data)
        except RoutePilotError as error:
            refused += 1
            assert str(error) and len(str(error)) < 5_000
        except BaseException as error:
            (tmp_path / "culprit").write_bytes(data)
            raise AssertionError(f"{name}: {data[:400]!r} gave {error!r}") from error
    grown = psutil.Process().memory_info().rss - before
    assert grown < MEMORY
    seconds = {"busiest": round(dog.busiest, 3), "sleepiest": round(dog.sleepiest, 3)}
    report("fuzz", reader=name, inputs=count, refused=refused, grown_mib=grown >> 20, **seconds)
    assert refused > 0
