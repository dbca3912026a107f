"""Numbers on the command line: those that mean nothing are refused before a verb starts.

Owns the options for seconds and seeds that verbs share. Imports nothing heavy.
"""

from __future__ import annotations

import math
from typing import Annotated

import typer

from routepilot.env.errors import InputError

#: Seeds that every library behind us takes.
SEEDS = 1 << 32


def seconds(option: str, value: float | None) -> float | None:
    """A time to spend.

    Raises:
        InputError: It is negative, or no number.
    """
    if value is not None and not value >= 0:
        raise InputError(f"{option} {value:g} is no time to spend; give 0 or more seconds")
    return value


def seed(value: int | None) -> int | None:
    """A seed.

    Raises:
        InputError: It is out of range.
    """
    if value is not None and not 0 <= value < SEEDS:
        raise InputError(f"--seed {value} is not allowed; give 0 to {SEEDS - 1}")
    return value


def deadline(value: float) -> float:
    """A time after which a build is ended.

    Raises:
        InputError: It is not above zero, or not finite.
    """
    if not 0 < value < math.inf:
        raise InputError(f"--deadline {value:g} is not allowed; give more than 0 seconds")
    return value


def _spend(value: float | None) -> float | None:
    return seconds("--max-seconds", value)


SeedOpt = Annotated[int, typer.Option(help="Seed of inputs and agents.", callback=seed)]
SecondsOpt = Annotated[
    float | None,
    typer.Option(help="Seconds of building and measuring to spend.", callback=_spend),
]
TrainSecondsOpt = Annotated[
    float | None,
    typer.Option(
        help="Stop training after this many seconds, tables read; imitation is cut short where"
        " they do not reach.",
        callback=_spend,
    ),
]
DeadlineOpt = Annotated[
    float, typer.Option(help="Seconds one build with its timing may take.", callback=deadline)
]
