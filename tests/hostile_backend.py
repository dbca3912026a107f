"""A backend made for tests: its routes do everything a compiler must not do to a tuner.

Loaded inside worker children as `hostile_backend:make`. Its engines compute `y = 2 x` and
`z = relu(x)` of a `hostile_model` with numpy; their timing is synthetic unless `-clock=busy`.

Options: `latency_ms` of the default; `default`, the deed of the default route; `noise`: `plain`
(1 % a block of one engine), `none`, or `machine` (see `MachineNoise`); `flat`: no knob makes any
difference; `log`, the file that counts builds; `seed` of the noise; `slow`, seconds that a build
takes; `broken` and `dies`, backends that do not start. The environment variable
`ROUTEPILOT_HOSTILE` gives options to runs of the command line as a JSON object; its `deeds` are the
deeds that the catalog offers.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
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
    " close_raise denormal overfit lucky flash droop late mutate alias none_output list_output"
    " time_nan time_negative time_empty time_hang daemon fill pipe pipe_json pipe_flood"
).split()

#: Deeds whose engines compute what they should -> how fast they are in the end, times `-speed`.
SOUND = {
    "work": 1.0,
    "garbage": 1.0,
    "close_raise": 1.0,
    "late": 1.0,
    "lucky": 1.0,
    "flash": 1 / 1.2,
}

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


def offering(deeds: Iterable[str]) -> Catalog:
    """The catalog with these deeds only, all on the synthetic clock."""
    clock = Knob("-clock", ("synthetic",), "synthetic")
    rest = (clock if knob.name == "-clock" else knob for knob in CATALOG.knobs[1:])
    return Catalog(
        "hostile", "1", (Knob("-do", tuple(dict.fromkeys(("work", *deeds))), "work"), *rest)
    )


#: Set by the deed `poison`: from then on every engine of the process computes nonsense.
POISONED: list[bool] = []


def hostile_model(path: Path, relus: int = 1) -> Path:
    """Write the ONNX model whose outputs the backend computes.

    More than one `relus` compute the same, and make another model of it.
    """
    from onnx import TensorProto, checker, helper, save

    names = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xyz"}
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "x"], ["y"]),
            *(
                helper.make_node("Relu", [f"z{i}" if i else "x"], [f"z{i + 1}"])
                for i in range(relus - 1)
            ),
            helper.make_node("Relu", [f"z{relus - 1}" if relus > 1 else "x"], ["z"]),
        ],
        "hostile",
        [names["x"]],
        [names["y"], names["z"]],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    save(model, path)
    return path


def _spoil_y(change: Callable[[Any], Any]) -> Callable[..., dict[str, Any]]:
    return lambda engine, x, outputs: {**outputs, "y": change(outputs["y"])}


def _put(value: float) -> Callable[[Any], Any]:
    def change(y: Any) -> Any:
        y[0, 0] = value
        return y

    return change


def _overfit(engine: HostileEngine, x: Any, outputs: dict[str, Any]) -> dict[str, Any]:
    wrong = x.tobytes() not in engine.known
    return {**outputs, "y": outputs["y"] * np.float32(1.05 if wrong else 1)}


def _mutate(engine: HostileEngine, x: Any, outputs: dict[str, Any]) -> dict[str, Any]:
    x *= 0
    return outputs


def _alias(engine: HostileEngine, x: Any, outputs: dict[str, Any]) -> dict[str, Any]:
    engine.buffer[:] = outputs["y"]
    return {**outputs, "y": engine.buffer}


#: What a deed makes of the outputs.
SPOILS: dict[str, Callable[..., Any]] = {
    "nan": _spoil_y(_put(np.nan)),
    "inf": _spoil_y(_put(np.inf)),
    "shape": _spoil_y(lambda y: y[:2]),
    "dtype": _spoil_y(lambda y: y.astype(np.float16)),
    "inaccurate": _spoil_y(lambda y: y * np.float32(1.05)),
    "denormal": _spoil_y(lambda y: y * np.float32(1e-41)),
    "list_output": _spoil_y(lambda y: y.tolist()),
    "missing": lambda engine, x, outputs: {"z": outputs["z"]},
    "none_output": lambda engine, x, outputs: None,
    "overfit": _overfit,
    "mutate": _mutate,
    "alias": _alias,
}

#: What an engine may claim that its inferences took, milliseconds.
LIES: dict[str, list[float]] = {
    "time_nan": [math.nan, 1.0, math.nan],
    "time_negative": [-1.0],
    "time_empty": [],
}


class MachineNoise:
    """Time on a shared machine, as the A/A study of docs/measurement.md met it.

    One block differs from the next by 1.2 %, one in twenty is held up by 10 to 100 %, the machine
    wanders by a random walk and jumps between two speed states; an engine is 0.4 % faster or slower
    than its twin for as long as it lives.
    """

    def __init__(self, seed: str) -> None:
        self._rng = np.random.default_rng(int(seed))
        self._drift = 0.0
        self._slow = False

    def luck(self) -> float:
        return float(self._rng.normal(0, 0.004))

    def block(self) -> float:
        self._drift = 0.98 * self._drift + self._rng.normal(0, 0.003)
        if self._rng.random() < 0.02:
            self._slow = not self._slow
        held = math.log(self._rng.uniform(1.1, 2.0)) if self._rng.random() < 0.05 else 0.0
        noise = self._rng.normal(0, 0.012)
        return float(noise + self._drift + held + (0.1 if self._slow else 0.0))


@lru_cache(maxsize=4)
def MACHINE(seed: str) -> MachineNoise:  # noqa: N802
    return MachineNoise(seed)


class HostileEngine:
    def __init__(
        self, settings: Mapping[str, str], options: Mapping[str, str], selection: frozenset[bytes]
    ) -> None:
        self.settings = settings
        self.hash = " ".join(v for k, v in settings.items() if k != "-twin")
        self.build_seconds = 0.01
        speed = 1.0 if "flat" in options else float(settings["-speed"])
        self.milliseconds = float(options.get("latency_ms", "5")) / speed
        self._kind = options.get("noise", "plain")
        seed = int.from_bytes(self.hash.encode(), "little") % 2**32
        self._noise = np.random.default_rng(seed)
        self._machine = MACHINE(options.get("seed", "0")) if self._kind == "machine" else None
        #: What this engine gained or lost by its place in memory, for as long as it lives.
        self._luck = self._machine.luck() if self._machine else 0.0
        self.known = selection
        self.buffer = np.zeros((4, 8), np.float32)
        self._blocks = 0

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        deed = self.settings["-do"]
        if deed == "run_segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if deed == "run_hang":
            time.sleep(1000)
        if deed == "run_raise":
            raise ValueError("no kernel\nfor this node")
        x = inputs["x"]
        outputs: dict[str, Any] = {"y": x + x, "z": np.maximum(x, 0)}
        if POISONED:
            outputs["y"] = outputs["y"] + 1
        spoil = SPOILS.get(deed)
        return spoil(self, x, outputs) if spoil else outputs

    def time(self, inputs: Mapping[str, Any], seconds: float) -> list[float]:
        deed = self.settings["-do"]
        if deed == "time_raise":
            raise RuntimeError("the clock stopped")
        if deed == "time_hang":
            time.sleep(1000)
        if deed in LIES:
            return LIES[deed]
        if self.settings["-clock"] == "busy":
            return self._busy(seconds)
        self._blocks += 1
        milliseconds = self.milliseconds * self._pretence(deed, inputs)
        count = max(1, round(seconds * 1000 / milliseconds))
        if self._kind == "none":
            return [milliseconds] * count
        if self._machine is not None:
            return [milliseconds * math.exp(self._luck + self._machine.block())] * count
        noise = self._noise.normal(0, 0.01, count)
        return [float(t) for t in milliseconds * np.exp(noise)]

    def _pretence(self, deed: str, inputs: Mapping[str, Any]) -> float:
        """What a deed makes of the true time in this block."""
        if deed == "lucky":  # fast while the search looks, and never again
            return 0.5 if inputs["x"].tobytes() in self.known else 1.0
        if deed == "flash":  # fast until it is warm
            return 0.5 if self._blocks <= 3 else 1.2
        if deed == "droop":  # fast at first, then slower and slower
            return 0.6 * math.exp(0.08 * self._blocks)
        if deed == "late":  # slow the first time it is timed, as what compiles on first use is
            return 50.0 if self._blocks == 1 else 1.0
        return 1.0

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
        self.options = {**json.loads(os.environ.get("ROUTEPILOT_HOSTILE", "{}")), **options}
        if "broken" in options:
            raise MachineError("no such device")
        if "dies" in options:
            sys.exit("loader: cannot open shared object file")

    def catalog(self) -> Catalog:
        deeds = self.options.get("deeds", "").split()
        return offering(deeds) if deeds else CATALOG

    def target(self) -> Target:
        settings = {"run": self.options["run"]} if "run" in self.options else {}
        return Target("hostile", "none", {}, self.catalog().key, settings)

    def build(self, model: Any, route: Route, workdir: Path) -> HostileEngine | BuildFailure:
        place = Path(self.options.get("log", workdir / "builds.jsonl"))
        with place.open("a") as log:  # for tests that count builds
            log.write(json.dumps([os.getpid(), str(route)]) + "\n")
        settings = CATALOG.full_settings(route)
        time.sleep(float(self.options.get("slow", "0")))
        if route.is_default and "default" in self.options:
            settings["-do"] = self.options["default"]
        misdeed = MISDEEDS.get(settings["-do"])
        failure = misdeed(workdir) if misdeed else None
        known = frozenset(one["x"].tobytes() for one in model.selection())
        return failure or HostileEngine(settings, self.options, known)


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


def _daemonize(workdir: Path) -> None:
    """Leave a helper behind that is in no group and nobody's child, then hang."""
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    code += "        open('daemon.pid', 'w').write(str(os.getpid()))\n        time.sleep(1000)"
    subprocess.run([sys.executable, "-c", code], cwd=workdir)
    time.sleep(1000)


def _fill(workdir: Path) -> None:
    with (workdir / "spill.bin").open("wb", buffering=0) as spill:
        for _ in range(4096):
            spill.write(b"x" * (1 << 20))


def _write_pipes(data: bytes, times: int, workdir: Path) -> None:
    """Write into every pipe of the process, the parent's among them."""
    for number in range(3, 32):
        try:
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                for _ in range(times):
                    os.write(number, data)
        except OSError:
            continue


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
    "daemon": _daemonize,
    "fill": _fill,
    "pipe": partial(_write_pipes, b"\xff\xfe\x00 garbage\n", 1),
    "pipe_json": partial(_write_pipes, b"[1, 2]\n", 1),
    "pipe_flood": partial(_write_pipes, b"x" * (1 << 20), 200),
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
