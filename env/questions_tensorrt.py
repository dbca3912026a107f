"""What NVIDIA's documents leave open about build routes, asked of the compiler at hand.

Owns the questions and the words of their answers; `doctor` prints them. An answer is never a
failure: whatever is true of this version is what there is to know. Two more are answered by
checks: the timing cache (keyed by route? equal bytes?) and both channels (which one wins?).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from routepilot.env.backends.tensorrt_catalog import read_build_routes, shipped_routes_json
from routepilot.env.tensorrt_bench import UNKNOWN_KNOB, UNKNOWN_VALUE, Bench
from routepilot.env.wording import counted

#: Status, detail, hint.
Answer = tuple[str, str, str]

#: Ways past the check of knob names, from the docstring of `IBuilderConfig.build_route`: that of
#: TensorRT 11.1 names a flag, that of 11.4 an option set through a variable. How either is written
#: is not published.
BYPASSES = {
    "TRT_BYPASS_BUILD_ROUTE_WHITELIST": "1",
    "TRT_INTERNAL_OPTIONS": "bypass_build_route_whitelist=1",
}

#: A flag that NVIDIA's own builders use and that is not among the listed knobs of 11.1.
UNLISTED = "-peep:fc_h_fusion=off"

#: Names shown of a list.
SHOWN = 5


def _has_routes(bench: Bench) -> bool:
    return bool(bench.compiler()[0].all_build_routes().strip())


def _needs_routes(ask: Callable[[Bench], str]) -> Callable[[Bench], Answer]:
    def guarded(bench: Bench) -> Answer:
        if not _has_routes(bench):
            hint = "TensorRT >= 11.1 on Linux lists them"
            return "unavailable", "this compiler lists no build routes", hint
        return "pass", ask(bench), ""

    return guarded


def _after_refusal(bench: Bench) -> str:
    compiler, good = bench.compiler()[0], bench.live_route()
    got = compiler.read_back(good, UNKNOWN_KNOB)
    words = {good: "the route set before", "": "nothing", UNKNOWN_KNOB: "the refused text"}
    return f"after a refused route build_route reads {words.get(got, repr(got))}"


def _values(bench: Bench) -> str:
    got = bench.compiler()[0].read_back(UNKNOWN_VALUE)
    checked = "takes values unchecked" if got.split() == UNKNOWN_VALUE.split() else "checks values"
    return f"build_route {checked}: set {UNKNOWN_VALUE!r}, read {got!r}"


def _bypass(bench: Bench) -> str:
    compiler = bench.compiler()[0]
    if compiler.read_back(UNLISTED).split() == UNLISTED.split():
        return f"the unlisted {UNLISTED} is taken without any"
    told = []
    for variable, word in BYPASSES.items():
        with _set(variable, word):
            taken = compiler.read_back(UNLISTED).split() == UNLISTED.split()
        told.append(f"{variable}={word} {'opens' if taken else 'does not open'} it")
    return f"set after loading, tried with {UNLISTED}: {'; '.join(told)}"


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _against_shipped(bench: Bench) -> str:
    mine, here = read_build_routes(bench.compiler()[0].all_build_routes())
    theirs, there = read_build_routes(shipped_routes_json())
    old, new = ({k.name: k for k in knobs} for knobs in (there, here))
    changed = [n for n in new if n in old and _facts(new[n]) != _facts(old[n])]
    parts = [
        f"{len(names)} {word} ({', '.join(names[:SHOWN])}{' ...' if len(names) > SHOWN else ''})"
        for word, names in (
            ("new", [n for n in new if n not in old]),
            ("gone", [n for n in old if n not in new]),
            ("with other values or defaults", changed),
        )
        if names
    ]
    told = "; ".join(parts) or "the same knobs"
    return (
        f"tuner {mine} lists {counted(len(new), 'knob')}, the shipped {theirs} {len(old)}: {told}"
    )


def _facts(knob: Any) -> tuple[object, ...]:
    return knob.values, knob.default, knob.bounded


#: Question -> who answers it.
QUESTIONS: dict[str, Callable[[Any], Answer]] = {
    "open: what a refusal leaves": _needs_routes(_after_refusal),
    "open: are values checked": _needs_routes(_values),
    "open: way past the knob list": _needs_routes(_bypass),
    "open: knobs of this version": _needs_routes(_against_shipped),
}
