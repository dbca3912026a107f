"""`make bench`: the figures the README quotes about RoutePilot's own cost, measured here and now.

Owns nothing but measuring; every figure is printed with its spread, as a Markdown table.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from routepilot.env.route_env import RouteSelectionEnv
from routepilot.env.tables import load_table
from routepilot.training.defaults import find_table

#: Repeats of each short measurement.
REPEATS = 7


def spread(values: list[float], unit: str) -> str:
    """`0.21 s (0.20 to 0.24)`: median, lowest, highest."""
    return f"{statistics.median(values):.3g} {unit} ({min(values):.3g} to {max(values):.3g})"


def help_seconds() -> str:
    """Start of `routepilot --help`, beside a bare interpreter in pairs."""
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(REPEATS + 1):
        for command, times in (
            ([sys.executable, "-m", "routepilot", "--help"], ours),
            ([sys.executable, "-c", "pass"], bare),
        ):
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_installed())
            times.append(time.perf_counter() - start)
    return f"{spread(ours[1:], 's')}; bare interpreter {spread(bare[1:], 's')}"


def steps_per_second(env: RouteSelectionEnv, steps: int = 5000) -> float:
    """Steps a second of an environment on one core, observation and surrogate included."""
    rng = np.random.default_rng(0)
    for model in env.replay:  # each model's prior is computed once, whatever the steps
        seen, _ = env.reset(seed=0, options={"model": model.card.name})
    start = time.perf_counter()
    for _ in range(steps):
        row = int(rng.integers(max(int(seen["mask"][:-1].sum()), 1)))
        seen, _, done, _, _ = env.step(np.int64(row))
        if done:
            seen, _ = env.reset()
    return steps / (time.perf_counter() - start)


def environment_steps() -> str:
    """Environment steps a second on the recorded backend, one core, everything on."""
    env = RouteSelectionEnv(load_table(find_table("cpu")))
    return spread([steps_per_second(env) for _ in range(REPEATS)], "steps/s")


def tune_cost() -> tuple[str, str]:
    """Cost of `tune` beyond building and timing, and the parent's peak memory.

    The whole command counts, from the start of the interpreter to its end, on an ONNX file that was
    not seen before: reading it, its references, its features, the policy, the report. A first run
    does not count, in which Python compiles what an installer has compiled.
    """
    beyond, shares, peaks = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        file = _without_zoo(Path(folder))
        for seed in range(REPEATS + 1):
            command = [sys.executable, "-m", "routepilot", "tune", str(file), "--max-builds", "6"]
            command += ["-o", f"{folder}/{seed}", "--seed", str(seed), "--json"]
            start = time.perf_counter()
            result, peak = _with_peak_memory(command)
            seconds = time.perf_counter() - start
            worker = result["seconds"] - result["overhead_seconds"]
            beyond.append(seconds - worker)
            shares.append(100 * (seconds - worker) / seconds)
            peaks.append(peak / 2**20)
    share, fixed = spread(shares[1:], "%"), spread(beyond[1:], "s")
    return f"{share} of the run; {fixed}", spread(peaks[1:], "MiB")


def _installed() -> dict[str, str]:
    """The environment of somebody who installed it: Python keeps what it compiles."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def _without_zoo(folder: Path) -> Path:
    """The demo's model as a file of its own, as a user would have it."""
    import onnx

    from routepilot.env import zoo

    file = folder / "model.onnx"
    onnx.save(onnx.load(str(zoo.load_model("silero_vad").path)), str(file))
    return file


def _with_peak_memory(command: list[str]) -> tuple[dict[str, float], float]:
    """Run a command; its JSON and the largest resident memory of the parent process alone."""
    import json

    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_installed()
    )
    peak, watched = 0.0, psutil.Process(process.pid)
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            try:
                peak = max(peak, float(watched.memory_info().rss))
            except psutil.Error:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    done.set()
    watcher.join()
    return json.loads(output), peak


def training_seconds() -> str:
    """Wall-clock seconds to the shipped policy's configuration, once."""
    from routepilot.training.train import train
    from routepilot.training.train_config import TrainConfig

    table = load_table(find_table("cpu"))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        train(table, TrainConfig(), held_out=("vad-lstm",), out=Path(folder))
    return f"{time.perf_counter() - start:.0f} s, once"


def main() -> None:
    """Measure everything and print the table."""
    overhead, memory = tune_cost()
    rows: list[tuple[str, Callable[[], str]]] = [
        ("`routepilot --help`", help_seconds),
        ("environment, recorded backend, one core", environment_steps),
        ("training to the shipped policy", training_seconds),
        ("`tune` beyond building and timing", lambda: overhead),
        ("peak memory of the parent of `tune`", lambda: memory),
    ]
    print("| what | median (lowest to highest) |\n| --- | --- |")
    for name, measure in rows:
        print(f"| {name} | {measure()} |", flush=True)


if __name__ == "__main__":
    main()
