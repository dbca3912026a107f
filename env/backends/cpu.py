"""The embedded default: one catalog over ONNX Runtime and OpenVINO on the CPU.

Owns the catalog, which combinations mean something, the target, and how the words of a failed
build are read. The engines are in `onnxruntime.py` and `openvino.py`, the precision recipes in
`recipes.py`. Knows no agent, gate or statistics.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import TYPE_CHECKING

from routepilot.env.backends import onnxruntime as ort
from routepilot.env.backends import openvino as ov
from routepilot.env.backends.base import BuildFailure, Engine, Target
from routepilot.env.backends.recipes import (
    INTEGER_RECIPES,
    QDQ_RECIPES,
    RECIPES,
    WEIGHTS,
    transform,
)
from routepilot.env.errors import InputError, MachineError, MissingExtraError
from routepilot.env.outcomes import Status
from routepilot.env.routes import Catalog, Knob, Requirement, Route

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: Version of the catalog itself: raised when a knob or the meaning of a value changes. The
#: versions of the engines stand in the target.
CATALOG_VERSION = "1"

#: Processor features that decide which precisions are fast, x86 and ARM.
FLAGS = tuple(
    "avx2 avx512f avx512_vnni avx_vnni avx512_bf16 amx_int8 amx_bf16 asimddp i8mm bf16 sve".split()
)

#: Engines of each backend; the first is its default.
ENGINES = {
    "cpu": ("ort", "openvino"),
    "onnxruntime": ("ort",),
    "openvino": ("openvino",),
}

#: Longest reason of a failure, characters.
REASON_LENGTH = 300

#: Where in its own source a library noticed a fault: says nothing to a user, and pushes what does
#: out of the line.
_SOURCE_PLACE = re.compile(
    r"Exception from \S+:\d+:|Check '[^']*' failed at \S+:\d+:|\S*/onnxruntime/\S+:\d+ "
)


class CpuBackend:
    """ONNX Runtime and OpenVINO behind one catalog, or one of them alone.

    The default route is what a user gets who types nothing: ONNX Runtime's defaults at the granted
    number of threads (OpenVINO's in float32 for `openvino`).

    Args:
        name: `cpu`, `onnxruntime` or `openvino`.
        options: `threads`: threads granted to an engine, 1 when absent. It is a measuring setting:
            a route can only use fewer. On one thread timing is immune to where the host runs the
            cores.

    Raises:
        InputError: An option that does not exist or cannot be used.
        MissingExtraError: `openvino` is asked for and not installed.
    """

    def __init__(self, name: str, options: Mapping[str, str]) -> None:
        self.name = name
        self._threads = _threads(options)
        engines = ENGINES[name]
        if not ov.is_installed():
            engines = tuple(engine for engine in engines if engine != "openvino")
        if not engines:
            raise MissingExtraError(
                f"backend {name} needs the package openvino, which is not installed; run"
                " pip install 'routepilot[openvino]'"
            )
        self._engines = engines
        self._catalog = _catalog(name, engines, self._threads)

    def catalog(self) -> Catalog:
        """The knobs; see `base.Backend`."""
        return self._catalog

    def target(self) -> Target:
        """Processor, versions and threads; see `base.Backend`."""
        packages = [("onnxruntime", "onnxruntime-gpu"), ("onnx",), ("numpy",)]
        if "openvino" in self._engines:
            packages.append(("openvino",))
        versions = {names[0]: _version(*names) for names in packages}
        settings = {"threads": str(self._threads)}
        return Target(self.name, processor(), versions, self._catalog.key, settings)

    def build(self, model: Model, route: Route, workdir: Path) -> Engine | BuildFailure:
        """Transform, then compile; see `base.Backend`."""
        objection = self._catalog.objection(route)
        if objection is not None:
            return BuildFailure(Status.REFUSED, objection)
        values = self._catalog.full_settings(route)
        engine = values.get("-engine", self._engines[0])
        fuse = values.get("-transformer") == "on"
        with _scratch(workdir) as scratch:
            try:
                source = transform(
                    model, values["-quantize"], values["-weights"], fuse, workdir, scratch
                )
                if engine == "ort":
                    settings = ort.settings_of(values, self._threads)
                    return ort.OrtEngine(source, settings, model, scratch)
                return ov.OpenVinoEngine(source, ov.properties(values, self._threads), model)
            except MachineError:
                raise
            except Exception as error:  # tools and engines raise whatever they like
                return read_failure(error, (scratch, workdir, model.folder))


def read_failure(error: Exception, folders: tuple[Path, ...] = ()) -> BuildFailure:
    """What an exception of a tool or an engine says about the build.

    Args:
        error: The exception.
        folders: Folders whose names are left out of its words.

    Raises:
        MachineError: The disk is full: no fault of the route.
    """
    words = str(error)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in words:
        raise MachineError(f"the disk is full ({words}); free space and repeat") from error
    if isinstance(error, MemoryError) or re.search(
        r"bad[_ ]alloc|failed to allocate memory", words, re.I
    ):
        return BuildFailure(Status.OUT_OF_MEMORY, _one_line(words) or "out of memory")
    for folder in folders:
        words = words.replace(f"{folder}/", "")
    words = _one_line(_SOURCE_PLACE.sub("", words))
    if not isinstance(error, RuntimeError) or not words:
        # `KeyError: 'x'` says more than `'x'`; what engines raise says what it is.
        kind = type(error).__name__
        words = words if words.startswith("[ONNXRuntimeError]") else f"{kind}: {words}".rstrip(": ")
    return BuildFailure(Status.BUILD_FAILED, _one_line(words))


def has_bf16() -> bool:
    """False on x86 processors without bfloat16 instructions, where the engine falls back to f32."""
    _, flags = _cpuinfo()
    return "avx2" not in flags or bool(flags & {"avx512_bf16", "amx_bf16"})


def processor() -> str:
    """Model name of the processor and those of its features that decide on precisions."""
    name, flags = _cpuinfo()
    held = " ".join(flag for flag in FLAGS if flag in flags)
    return f"{name} ({held})" if held else name


def _cpuinfo() -> tuple[str, set[str]]:
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    return name, flags


def _catalog(name: str, engines: tuple[str, ...], threads: int) -> Catalog:
    both = name == "cpu"
    ov_knobs = ov.KNOBS if "openvino" in engines else ()
    if not has_bf16():
        ov_knobs = tuple(knob for knob in ov_knobs if knob.name != "-arithmetic")
    ort_knobs = ort.KNOBS if "ort" in engines else ()
    recipes = "; ".join(f"{recipe}: {words}" for recipe, words in RECIPES.items())
    quantize = Knob(
        "-quantize",
        ("none", *RECIPES),
        "none",
        f"Precision recipe applied to the model as part of the build ({recipes}).",
        ("precision",),
    )
    engine = Knob("-engine", engines, engines[0], "Library that runs the model.", ("engine",))
    kinds = "; ".join(f"{kind}: {words}" for kind, words in WEIGHTS.items())
    text = f"How int8 weights are stored ({kinds})."
    weights = Knob("-weights", tuple(WEIGHTS), "s8", text, ("precision",))
    knobs = [engine] if both else []
    knobs += [quantize, weights, *ov_knobs, *ort_knobs]
    rules = list(ort.REQUIREMENTS) if ort_knobs else []
    why = "the other recipes store no int8 weights"
    rules.append(Requirement("-weights", None, "-quantize", INTEGER_RECIPES, why))
    if ort_knobs:
        why = "only these recipes leave quantise-dequantise pairs"
        rules.append(Requirement("-qdq:cleanup", "on", "-quantize", QDQ_RECIPES, why))
    if threads > 1:
        thread_knobs, thread_rules = _thread_knobs(threads, spin=bool(ort_knobs))
        knobs += thread_knobs
        rules += thread_rules
    if both:
        for owner, theirs in (("ort", (*ort_knobs, ort.SPIN)), ("openvino", ov_knobs)):
            rules += [
                Requirement(knob.name, None, "-engine", (owner,), "the other engine has no such")
                for knob in theirs
                if knob in knobs
            ]
    return Catalog(name, CATALOG_VERSION, tuple(knobs), tuple(rules))


def _thread_knobs(threads: int, spin: bool) -> tuple[list[Knob], list[Requirement]]:
    """Knobs that mean something when more than one thread is granted."""
    counts = sorted({2**i for i in range(threads.bit_length()) if 2**i <= threads} | {threads})
    values = tuple(str(count) for count in counts)
    text = "Threads used, of those granted by the backend option `threads`."
    knobs, rules = [Knob("-threads", values, str(threads), text, ("threads",))], []
    if spin:
        knobs.append(ort.SPIN)
        rules.append(
            Requirement(ort.SPIN.name, "off", "-threads", values[1:], "one thread waits for none")
        )
    return knobs, rules


def _threads(options: Mapping[str, str]) -> int:
    unknown = sorted(set(options) - {"threads"})
    if unknown:
        raise InputError(
            f"backend option {unknown[0]!r} does not exist; the CPU backends take: threads"
        )
    text, cores = options.get("threads", "1"), os.cpu_count() or 1
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= cores):
        raise InputError(
            f"backend option threads={text!r} is not allowed; give a whole number from 1 to {cores}"
        )
    return int(text)


def _version(*packages: str) -> str:
    """Version of the first of these packages that is installed."""
    for package in packages:
        try:
            return installed(package)
        except PackageNotFoundError:
            continue
    raise MissingExtraError(f"the package {packages[0]} is not installed; install it with pip")


def _one_line(text: str) -> str:
    line = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 3] + "..."


@contextmanager
def _scratch(workdir: Path) -> Iterator[Path]:
    """A folder for this build alone; what a killed build left there goes first."""
    folder = workdir / ".building"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise MachineError(f"the work folder {str(workdir)!r} cannot be used: {error}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
