"""A backend made for tests: its routes do everything a compiler must not do to a tuner.

Loaded inside worker children as `hostile_backend:make`. Its engines compute `y = 2 x` and
`z = relu(x)` of a `hostile_model` with numpy; their timing is synthetic unless `-clock=busy`.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from routepilot.env.backends.base import BuildFailure, Target
from routepilot.env.errors import MachineError
from routepilot.env.outcomes import Status
from routepilot.env.routes import Catalog, Knob, Route

DEEDS = (
    "work segv abort exit sigkill hang helpers eat garbage silence raise fail refuse machine full"
    " nomem poison run_segv run_hang run_raise time_raise nan inf shape dtype missing inaccurate"
    " close_raise"
).split()

CATALOG = Catalog(
    "hostile",
    "1",
    (
        Knob("-do", tuple(DEEDS), "work"),
        Knob("-speed", ("1", "0.1", "0.5", "0.98", "1.02", "2"), "1"),
        Knob("-clock", ("synthetic", "busy"), "synthetic"),
        Knob("-twin", ("a", "b"), "a"),  # changes nothing in the engine
    ),
)

#: Set by the deed `poison`: from then on every engine of the process computes nonsense.
POISONED: list[bool] = []


def hostile_model(path: Path) -> Path:
    """Write the ONNX model whose outputs the backend computes."""
    from onnx import TensorProto, checker, helper, save

    names = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xyz"}
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Relu", ["x"], ["z"])],
        "hostile",
        [names["x"]],
        [names["y"], names["z"]],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    save(model, path)
    return path


class HostileEngine:
    def __init__(self, settings: Mapping[str, str], options: Mapping[str, str]) -> None:
        self.settings = settings
        self.hash = " ".join(v for k, v in settings.items() if k != "-twin")
        self.build_seconds = 0.01
        self.milliseconds = float(options.get("latency_ms", "5")) / float(settings["-speed"])
        self._noise = np.random.default_rng(int.from_bytes(self.hash.encode(), "little") % 2**32)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        deed = self.settings["-do"]
        if deed == "run_segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if deed == "run_hang":
            time.sleep(1000)
        if deed == "run_raise":
            raise ValueError("no kernel\nfor this node")
        x = inputs["x"]
        y, z = x + x, np.maximum(x, 0)
        if deed == "nan":
            y[0, 0] = np.nan
        elif deed == "inf":
            y[0, 0] = np.inf
        elif deed == "shape":
            y = y[:2]
        elif deed == "dtype":
            y = y.astype(np.float16)
        elif deed == "inaccurate":
            y = y * np.float32(1.05)
        if POISONED:
            y = y + 1
        return {"z": z} if deed == "missing" else {"y": y, "z": z}

    def time(self, inputs: Mapping[str, Any], seconds: float) -> list[float]:
        if self.settings["-do"] == "time_raise":
            raise RuntimeError("the clock stopped")
        if self.settings["-clock"] == "busy":
            return self._busy(seconds)
        count = max(1, round(seconds * 1000 / self.milliseconds))
        noise = self._noise.normal(0, 0.01, count)
        return [float(t) for t in self.milliseconds * np.exp(noise)]

    def _busy(self, seconds: float) -> list[float]:
        spent: list[float] = []
        end = time.perf_counter() + seconds
        while not spent or time.perf_counter() < end:
            start = time.perf_counter()
            while (time.perf_counter() - start) * 1000 < self.milliseconds:
                pass
            spent.append((time.perf_counter() - start) * 1000)
        return spent

    def quiesce(self) -> None:
        pass

    def save(self, folder: Path) -> list[str]:
        (folder / "engine.txt").write_text(self.hash)
        return ["engine.txt"]

    def close(self) -> None:
        if self.settings["-do"] == "close_raise":
            raise RuntimeError("cannot close")


class HostileBackend:
    name = "hostile"

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options
        if "broken" in options:
            raise MachineError("no such device")
        if "dies" in options:
            sys.exit("loader: cannot open shared object file")

    def catalog(self) -> Catalog:
        return CATALOG

    def target(self) -> Target:
        return Target("hostile", "none", {}, CATALOG.key)

    def build(self, model: Any, route: Route, workdir: Path) -> HostileEngine | BuildFailure:
        with (workdir / "builds.jsonl").open("a") as log:  # for tests that count builds
            log.write(json.dumps([os.getpid(), str(route)]) + "\n")
        settings = CATALOG.full_settings(route)
        if route.is_default and "default" in self.options:
            settings["-do"] = self.options["default"]
        misdeed = MISDEEDS.get(settings["-do"])
        failure = misdeed(workdir) if misdeed else None
        return failure or HostileEngine(settings, self.options)


def _die(name: str, workdir: Path) -> None:
    print("assertion failed in fusion.cpp", flush=True)
    os.kill(os.getpid(), getattr(signal, name))


def _exit(workdir: Path) -> None:
    print("licence\tnot found\n\n", file=sys.stderr, flush=True)
    os._exit(3)


def _start_helpers(workdir: Path) -> None:
    helpers = [
        subprocess.Popen(["sleep", "1000"], start_new_session=apart) for apart in (False, True)
    ]
    (workdir / "helpers.json").write_text(json.dumps([h.pid for h in helpers]))
    time.sleep(1000)


def _eat(workdir: Path) -> None:
    eaten = []
    for _ in range(100):
        eaten.append(b"x" * (16 << 20))
        time.sleep(0.02)


def _print_garbage(workdir: Path) -> None:
    os.write(1, b'{"outcome": 1}\n\xff\x00\x1b[31m' + b"garbage " * 200_000)
    print("more", "garbage", flush=True)


def _fall_silent(workdir: Path) -> None:
    os.closerange(3, 100)
    time.sleep(1000)


def _raise(error: Exception) -> None:
    raise error


def _fail(workdir: Path) -> BuildFailure:
    return BuildFailure(Status.BUILD_FAILED, "no tactic\n  for node 7")


def _poison(workdir: Path) -> BuildFailure:
    POISONED.append(True)
    return BuildFailure(Status.BUILD_FAILED, "no tactic")


MISDEEDS: dict[str, Callable[[Path], BuildFailure | None]] = {
    "segv": partial(_die, "SIGSEGV"),
    "abort": partial(_die, "SIGABRT"),
    "sigkill": partial(_die, "SIGKILL"),
    "exit": _exit,
    "hang": lambda _: time.sleep(1000),
    "helpers": _start_helpers,
    "eat": _eat,
    "garbage": _print_garbage,
    "silence": _fall_silent,
    "raise": lambda _: _raise(KeyError("tactic")),
    "nomem": lambda _: _raise(MemoryError()),
    "full": lambda _: _raise(OSError(errno.ENOSPC, "No space left on device")),
    "machine": lambda _: _raise(MachineError("the device fell off the bus; restart it")),
    "fail": _fail,
    "poison": _poison,
    "refuse": lambda _: BuildFailure(Status.REFUSED, "unknown option"),
}


def make(options: Mapping[str, str]) -> HostileBackend:
    """Factory for `load_backend('hostile_backend:make', options)`."""
    return HostileBackend(options)
