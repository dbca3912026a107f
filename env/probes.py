"""Probes: how far rounding moves a model's outputs, tried before any build.

Owns the probes, the child that makes them and their file in a model's folder. A probe runs the
model on its input sets on ONNX Runtime, on graphs that are rounded as a compiler's precision would
round them (`rounding.py`), and holds the outputs against the reference. That takes about as long as
building and running the default engine, once for each model, and says of a route's accuracy what no
shape or weight can (docs/experiments.md). Knows no route and no backend.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from routepilot.env.accuracy import losses
from routepilot.env.child import die_with_parent
from routepilot.env.drafts import whole_file
from routepilot.env.inputs import read_npz
from routepilot.env.interpreter import module_command
from routepilot.env.rounding import CONVOLUTIONS, PRODUCTS, in_16_bits, in_int8, in_tf32

if TYPE_CHECKING:
    import onnx

Rounding = Callable[["onnx.ModelProto"], "onnx.ModelProto"]

#: What is tried: name, what is rounded, and how.
PROBES: tuple[tuple[str, str, Rounding], ...] = (
    ("bf16", "every weight and activation in bf16", lambda m: in_16_bits(m, brain=True)),
    ("fp16", "every weight and activation in fp16", lambda m: in_16_bits(m, brain=False)),
    ("tf32", "every weight and activation to the ten bits of TF32", in_tf32),
    (
        "int8_conv",
        "weights and inputs of convolutions in int8",
        lambda m: in_int8(m, CONVOLUTIONS, activations=True),
    ),
    (
        "int8_matmul",
        "weights and inputs of matrix products and recurrences in int8",
        lambda m: in_int8(m, PRODUCTS, activations=True),
    ),
    (
        "int8_weights",
        "weights alone in int8",
        lambda m: in_int8(m, CONVOLUTIONS | PRODUCTS, activations=False),
    ),
)

NAMES: tuple[str, ...] = tuple(name for name, _, _ in PROBES)

#: File in a model's folder, and where in it stands how often unknown probes were tried. Its number
#: grows when what a probe does changes, so that older ones are made anew.
FILE, TRIES = "probes-2.json", "tries"

#: Most input sets that a probe runs: all that `tune` and the corpus have. One near a decision of
#: the model can lose a thousand times as much as the others.
SETS = 8

#: Log10 errors beyond these are told apart no further.
SMALLEST, LARGEST = -6.0, 0.5

#: Log10 error that stands for a probe that was not made: the model is too large or slow, or its
#: rounded graph does not run.
UNKNOWN = -2.0

#: Largest model file that is probed, bytes: three copies of it are in memory.
MOST_BYTES = 1 << 30

#: Runs in which a probe that could not be made is tried: what stood in the way once (memory, a busy
#: machine) may be gone, and what stands in the way of a model always should not cost every run.
#: A run that goes on keeps what it began with, and asks for none.
MOST_TRIES = 2

#: Seconds after which no further probe of a model is begun, and after which the child is ended.
PATIENCE, DEADLINE = 30.0, 120.0


def probes_of(folder: Path) -> Mapping[str, float]:
    """The probes of a prepared model, made at the first call and kept in its folder.

    What could not be made is kept as `UNKNOWN` and tried again at the next call, `MOST_TRIES` times
    in all; without the file from the beginning.

    Args:
        folder: The model's folder.

    Returns:
        Log10 of the relative L2 error of the worst output, by probe, from `SMALLEST` to `LARGEST`;
        `UNKNOWN` where it was not made.
    """
    found, tries = _read(folder / FILE)
    missing = _missing(found, tries)
    if missing:
        found = found | _made_in_child(folder, missing)
        kept: dict[str, float] = dict(found)
        if _missing(found, 0):
            kept[TRIES] = tries + 1
        try:
            with whole_file(folder / FILE) as draft:
                draft.write_text(json.dumps(kept), encoding="utf-8")
        except OSError:
            pass  # a folder that cannot be written costs the probes once more, next time
    return found


def are_due(folder: Path) -> bool:
    """Whether `probes_of` would run the model, which may take up to `DEADLINE` seconds."""
    return bool(_missing(*_read(folder / FILE)))


def _missing(found: Mapping[str, float], tries: int) -> tuple[str, ...]:
    """The probes that are to be made yet."""
    return tuple(n for n in NAMES if found[n] == UNKNOWN) if tries < MOST_TRIES else ()


def _read(path: Path) -> tuple[dict[str, float], int]:
    """The probes of a file and how often the unknown ones were tried.

    Nothing is known and was tried where the file is absent, damaged or of other probes.
    """
    nothing = dict.fromkeys(NAMES, UNKNOWN), 0
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return nothing
    if not isinstance(found, dict):
        return nothing
    tries = found.pop(TRIES, 1)
    if set(found) != set(NAMES) or not all(_is_sound(value) for value in found.values()):
        return nothing
    return (found, tries) if isinstance(tries, int) and tries >= 0 else nothing


def _is_sound(value: object) -> bool:
    return isinstance(value, int | float) and SMALLEST <= value <= LARGEST


def _made_in_child(folder: Path, names: Collection[str]) -> dict[str, float]:
    """A process of its own runs the model: an operator that ends it costs the probes alone."""
    try:
        done = subprocess.run(
            [*module_command("routepilot.env.probes"), str(folder), str(os.getpid()), *names],
            capture_output=True,
            timeout=DEADLINE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        lines = done.stdout.decode(errors="replace").splitlines()
    except subprocess.TimeoutExpired as late:
        lines = (late.stdout or b"").decode(errors="replace").splitlines()
    found = {}
    for line in lines:
        name, _, text = line.partition(" ")
        try:
            value = float(text)
        except ValueError:  # an operator's own words
            continue
        if name in names and _is_sound(value):
            found[name] = value
    return found


def measure(
    folder: Path, hear: Callable[[str, float], None], names: Collection[str] = NAMES
) -> None:
    """Make the probes of a prepared model in this process.

    Args:
        folder: The model's folder.
        hear: Hears each probe that could be made, as log10 of its error.
        names: Which to make.
    """
    import onnx
    import onnxruntime

    path = folder / "model.onnx"
    if sum(file.stat().st_size for file in folder.glob("model.onnx*")) > MOST_BYTES:
        return
    onnxruntime.set_default_logger_severity(4)
    model, start = onnx.load(str(path)), time.monotonic()
    sets = sorted(folder.glob("selection_*.npz"))[:SETS]
    inputs = [read_npz(one) for one in sets]
    wanted = [read_npz(folder / f"reference_{one.name}") for one in sets]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    for name, _, rounded in PROBES:
        if name not in names:
            continue
        if time.monotonic() - start > PATIENCE:
            return
        try:
            session = onnxruntime.InferenceSession(
                rounded(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            outputs = [output.name for output in session.get_outputs()]
            found = [dict(zip(outputs, session.run(outputs, one), strict=True)) for one in inputs]
        except Exception:  # ONNX Runtime and onnx raise whatever they like; nothing is known then
            continue
        hear(name, _worst(found, wanted))


def _worst(
    found: Sequence[Mapping[str, np.ndarray]], wanted: Sequence[Mapping[str, np.ndarray]]
) -> float:
    """Log10 of the largest relative L2 error over outputs and sets, within what is told apart."""
    worst = 10.0**SMALLEST
    for given, reference in zip(found, wanted, strict=True):
        for name, right in reference.items():
            if given[name].shape != right.shape:
                return LARGEST
            with np.errstate(invalid="ignore"):  # infinite outputs have no cosine
                error = losses(given[name], right, 0.0, 0.0)["rel_l2"]
            worst = max(worst, error if math.isfinite(error) else 10.0**LARGEST)
    return min(math.log10(worst), LARGEST)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    measure(Path(sys.argv[1]), lambda name, value: print(name, value, flush=True), sys.argv[3:])
