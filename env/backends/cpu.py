"""The embedded default: one catalog over ONNX Runtime and OpenVINO on the CPU.

Owns the catalog, which combinations mean something, and the target. The engines themselves are in
`onnxruntime.py` and `openvino.py`, the precision recipes in `recipes.py`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version as installed
from pathlib import Path
from typing import TYPE_CHECKING

from routepilot.env.backends import onnxruntime as ort
from routepilot.env.backends import openvino as ov
from routepilot.env.backends.base import BuildFailure, Engine, Target
from routepilot.env.backends.recipes import QDQ_RECIPES, RECIPES, transform
from routepilot.env.errors import InputError, MissingExtraError
from routepilot.env.outcomes import Status
from routepilot.env.routes import Catalog, Knob, Requirement, Route

if TYPE_CHECKING:
    from routepilot.env.models import Model

#: Version of the catalog itself: raised when a knob or the meaning of a value changes.
CATALOG_VERSION = "1"

#: Processor features that decide which precisions are fast.
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")


class CpuBackend:
    """ONNX Runtime and OpenVINO behind one catalog, or one of them alone.

    Args:
        name: `cpu`, `onnxruntime` or `openvino`.
        options: `threads`: how many threads an engine may use, 1 when absent.

    Raises:
        InputError: An option that does not exist or cannot be used.
        MissingExtraError: `openvino` is asked for and not installed.
    """

    def __init__(self, name: str, options: Mapping[str, str]) -> None:
        self.name = name
        self._threads = _threads(options)
        both = ("ort", "openvino") if ov.is_installed() else ("ort",)
        self._engines = {"cpu": both, "onnxruntime": ("ort",), "openvino": ("openvino",)}[name]
        if "openvino" in self._engines and not ov.is_installed():
            raise MissingExtraError(
                "backend openvino needs the package openvino; pip install 'routepilot[openvino]'"
            )
        self._catalog = self._make_catalog()

    def catalog(self) -> Catalog:
        """The knobs; see `base.Backend`."""
        return self._catalog

    def target(self) -> Target:
        """Processor, versions and threads; see `base.Backend`."""
        versions = {"onnx": installed("onnx"), "numpy": installed("numpy"), **ort.version()}
        if "openvino" in self._engines:
            versions |= ov.version()
        settings = {"threads": str(self._threads)}
        return Target(self.name, processor(), versions, self._catalog.key, settings)

    def build(self, model: Model, route: Route, workdir: Path) -> Engine | BuildFailure:
        """Transform, then compile; see `base.Backend`."""
        objection = self._catalog.objection(route)
        if objection is not None:
            return BuildFailure(Status.REFUSED, objection)
        values = self._catalog.full_settings(route)
        engine = values.get("-engine", self._engines[0])
        make = ort.engine if engine == "ort" else ov.engine
        fuse = values.get("-transformer") == "on"
        try:
            source = transform(model, values["-quantize"], fuse, workdir)
            return make(source.path, values, self._threads, source.seconds)
        except MemoryError:
            return BuildFailure(Status.OUT_OF_MEMORY, "out of memory while building")
        except Exception as error:  # tools and engines raise whatever they like
            words = ort.describe_error(error)
            full = "bad_alloc" in words or "bad allocation" in words
            return BuildFailure(Status.OUT_OF_MEMORY if full else Status.BUILD_FAILED, words)

    def _make_catalog(self) -> Catalog:
        knobs: list[Knob] = []
        if len(self._engines) > 1:
            text = "Which engine runs the model."
            knobs.append(Knob("-engine", self._engines, self._engines[0], text, ("engine",)))
        what = "; ".join(f"{name}: {text}" for name, text in RECIPES.items())
        knobs.append(
            Knob(
                "-quantize",
                ("none", *RECIPES),
                "none",
                f"Integer precision, made at build time. {what}.",
                ("precision",),
            )
        )
        ort_knobs = ort.knobs() if "ort" in self._engines else ()
        ov_knobs = ov.knobs() if "openvino" in self._engines else ()
        knobs += [*ov_knobs, *ort_knobs]
        if self._threads > 1:
            knobs += _thread_knobs(self._threads)
        rules = _engine_rules(ort_knobs, ov_knobs) if len(self._engines) > 1 else []
        if ort_knobs:
            why = "only those recipes leave such pairs"
            rules.append(Requirement("-qdq:cleanup", None, "-quantize", QDQ_RECIPES, why))
        return Catalog(self.name, CATALOG_VERSION, tuple(knobs), tuple(rules))


def _threads(options: Mapping[str, str]) -> int:
    unknown = sorted(set(options) - {"threads"})
    if unknown:
        raise InputError(f"backend option {unknown[0]!r} does not exist; there is: threads")
    text = options.get("threads", "1")
    cores = os.cpu_count() or 1
    if not text.isdigit() or not 1 <= int(text) <= cores:
        raise InputError(f"threads {text!r} is not allowed; give 1 to {cores}")
    return int(text)


def _thread_knobs(threads: int) -> list[Knob]:
    """Knobs that exist when more than one thread is granted; a route may only use fewer."""
    counts = sorted({threads} | {2**i for i in range(threads.bit_length()) if 2**i <= threads})
    return [
        Knob(
            "-threads",
            tuple(map(str, counts)),
            str(threads),
            "Threads used, of those granted.",
            ("threads",),
        ),
        Knob("-spin", ("on", "off"), "on", "Idle threads spin instead of sleeping.", ("threads",)),
    ]


def _engine_rules(ort_knobs: tuple[Knob, ...], ov_knobs: tuple[Knob, ...]) -> list[Requirement]:
    rules = [
        Requirement(k.name, None, "-engine", ("ort",), "it is a knob of ONNX Runtime")
        for k in ort_knobs
    ]
    rules += [
        Requirement(k.name, None, "-engine", ("openvino",), "it is a knob of OpenVINO")
        for k in ov_knobs
    ]
    return rules


def processor() -> str:
    """Model name of the processor and those of its features that decide on precisions."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    except OSError:
        pass
    held = " ".join(flag for flag in FLAGS if flag in flags)
    return f"{name} ({held})" if held else name
