"""Command lines, run in this process: what `test_fuzz.py` injures beside the readers.

Owns a line of each verb that ends soon, and `LINES`: whole lines, and every option of every verb.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from mutation import mutate
from readers import Reader
from watchdog import NotBack

from routepilot.env.errors import RoutePilotError
from routepilot.training.cli import whole_app

VERBS = (
    "tune none.onnx -o o -b cpu --policy p --agent random --max-builds 3 --max-seconds 1.5 --seed 1"
    " --shape x=1x3 --inputs i.npz --tolerance 0.01 --metric l0 --limit y=0.1 --threads 1 --json",
    "compare none.onnx --agents default,fast --table t --max-builds 2 --deadline 3 -o o",
    "features none.onnx --shape x=1x3 --json",
    "knobs --backend onnxruntime --threads 1 --json",
    "report nowhere",
    "records describe none.parquet --tolerance 0.01",
    "collect -o o/t.parquet --models none.onnx --routes 3 --controls 1 --workers 1 --seed 0",
    "train --table none --hold-out a,b -o o --name p",
    "evaluate --table none --agents random --seeds 1 -o o",
    "zoo export -o o --names none",
    "live none.onnx --json",
)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """The current folder for a while; `contextlib.chdir` is not in Python 3.10."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_line(app: Callable[..., object], words: list[str], where: Path) -> None:
    """Run a command line in this process, in that folder; a refusal is an error of ours."""
    heard = io.StringIO()
    with working_in(where):
        try:
            with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
                app(words, standalone_mode=True)
        except SystemExit as stop:
            if stop.code not in (0, None):
                raise RoutePilotError("refused") from None


def options(place: Path) -> tuple[bytes, Reader]:
    """Command lines, run in this process in an empty folder."""
    app, rng = typer.main.get_command(whole_app()), random.Random(1)  # made once: it takes a while

    def read(where: Path, data: bytes) -> None:
        verb = rng.choice(VERBS).split()
        if data != b"sound":
            for _ in range(rng.choice((1, 1, 2))):
                at = rng.randrange(1, len(verb))
                word = mutate(rng, verb[at].encode(errors="surrogateescape")).decode(
                    errors="surrogateescape"
                )
                verb[at] = word.replace("\0", "")
        run_line(app, verb, where)

    return b"sound", read


#: A line of each verb that ends at an input that is not there, and takes any option more.
ENDS = (
    "tune none.onnx -o o", "compare none.onnx -o o", "knobs -b onnxruntime", "features none.onnx",
    "agents", "doctor -b none", "report nowhere", "demo -o /dev/null/o --max-builds -1",
    "collect --models none.onnx -o o/t.parquet", "leakage --table none.parquet",
    "confirm-live none.onnx -o o", "explain nowhere", "importance none.parquet",
    "train --table none.parquet -o o", "evaluate --table none.parquet -o o", "live none.onnx",
    "engine none.plan", "zoo list", "zoo export -o o --names none", "zoo check --names none",
    "policy list", "policy show none", "policy push none ./o/none", "policy pull ./none -o o",
    "records describe none.parquet", "records export none.sqlite -o o", "records import none.json",
    "records merge none.sqlite -o o.sqlite",
)  # fmt: skip


def verbs() -> dict[str, list[str]]:
    """Every verb of the command line -> its options, flags with a `=`."""
    found: dict[str, list[str]] = {}

    def walk(command: Any, name: str) -> None:
        for inner, child in getattr(command, "commands", {}).items():
            walk(child, f"{name} {inner}".strip())
        if not hasattr(command, "commands"):
            options = [p for p in command.params if p.param_type_name == "option"]
            found[name] = [p.opts[-1] + "=" * bool(p.is_flag) for p in options]

    walk(typer.main.get_command(whole_app()), "")
    return found


def every_option(place: Path) -> tuple[bytes, Reader]:
    """Each option of each verb in turn, with whatever comes, run as `options` does."""
    app, known = typer.main.get_command(whole_app()), verbs()
    lines = {
        name: next(end for end in ENDS if end == name or end.startswith(f"{name} "))
        for name in known
    }
    turns = itertools.cycle([(n, option) for n, some in known.items() for option in some])

    def read(where: Path, data: bytes) -> None:
        name, option = next(turns)
        value = data.decode(errors="surrogateescape").replace("\0", "")
        words = [option[:-1]] if option.endswith("=") else [option, value]
        line = [*lines[name].split(), *words]
        try:
            run_line(app, line, where)
        except NotBack:
            raise NotBack(f"{line} does not end") from None

    return b"1,2:x=3", read


LINES = {f.__name__: f for f in (options, every_option)}
