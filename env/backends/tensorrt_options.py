"""Options of the backends `tensorrt` and `tensorrt_rtx`: read from words, checked, typed.

Owns names, allowed values and what excludes what. Knows no compiler and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from routepilot.env.errors import InputError

#: Builder optimization levels that TensorRT has.
LEVELS = range(6)


class Channel(str, Enum):
    """How compiler flags reach the compiler."""

    BUILD_ROUTE = "build_route"  # TensorRT >= 11.1 on Linux
    LUNOWUD = "lunowud"  # the environment variable __LUNOWUD of the child; experimental


class TimingCache(str, Enum):
    """Which timing cache a build sees. TensorRT-RTX times nothing at build and has none."""

    SHARED = "shared"  # one for all trials of a model and target; finalists get a fresh one
    ALWAYS_SHARED = "always-shared"  # finalists too
    FRESH = "fresh"  # a new one for every build
    REPLAY = "replay"  # a kept one, and no build that would have to time a kernel anew


class Plans(str, Enum):
    """Which engines of a run stay on disk."""

    ALL = "all"  # those of every trial, by content hash
    WINNER = "winner"  # the answer's alone, in the deploy folder


class Quantizer(str, Enum):
    """What writes explicit Q/DQ into the ONNX file."""

    ONNXRUNTIME = "onnxruntime"  # int8
    MODELOPT = "modelopt"  # NVIDIA's Model Optimizer: int8 and fp8


@dataclass(frozen=True)
class TensorRtOptions:
    """What can be asked of TensorRT besides a route.

    Attributes:
        channel: How flags reach the compiler.
        unsafe: Take in knobs that can break the mathematics.
        timing_cache: Which timing cache a build sees.
        cache_file: File of the shared or replayed timing cache; empty for one in the work folder.
        capability: Compute capability for TensorRT-RTX, e.g. `8.9`; empty for the GPU at hand, or
            8.9 where there is none.
        device: CUDA device number.
        workspace_mib: Limit of the workspace, MiB; 0 leaves TensorRT's.
        tactic_shared_kib: Limit of the shared memory a tactic may use, KiB; 0 leaves TensorRT's.
        avg_timing: Timings averaged for a tactic; 0 leaves TensorRT's.
        optimization_level: Builder optimization level of every build, which is then no knob; -1
            leaves it a knob.
        deadline: Seconds after which a build is cancelled from inside; 0 for never.
        plans: Which engines stay on disk.
        quantizer: What writes explicit Q/DQ.
    """

    channel: Channel = Channel.BUILD_ROUTE
    unsafe: bool = False
    timing_cache: TimingCache = TimingCache.SHARED
    cache_file: str = ""
    capability: str = ""
    device: int = 0
    workspace_mib: int = 0
    tactic_shared_kib: int = 0
    avg_timing: int = 0
    optimization_level: int = -1
    deadline: int = 0
    plans: Plans = Plans.ALL
    quantizer: Quantizer = Quantizer.ONNXRUNTIME

    def building(self) -> dict[str, int]:
        """Those that every build shares and that may change an engine, by name."""
        names = ("workspace_mib", "tactic_shared_kib", "avg_timing", "optimization_level")
        return {name: getattr(self, name) for name in names}

    def measuring(self) -> dict[str, str]:
        """Those that change a figure, by name; part of the target."""
        words = {"channel": self.channel.value, "timing_cache": self.timing_cache.value}
        if self.capability:
            words["capability"] = self.capability
        usual = TensorRtOptions().building()
        words |= {n: str(v) for n, v in self.building().items() if v != usual[n]}
        if self.quantizer is not Quantizer.ONNXRUNTIME:
            words["quantizer"] = self.quantizer.value
        return words


#: Name -> meaning, for help texts.
NAMES: dict[str, str] = {
    "channel": "build_route or lunowud (experimental)",
    "unsafe": "on takes in knobs that can break the mathematics",
    "timing_cache": "shared, always-shared, fresh or replay",
    "cache_file": "file of the timing cache",
    "capability": "compute capability for TensorRT-RTX, e.g. 8.9",
    "device": "CUDA device number",
    "workspace_mib": "limit of the workspace in MiB",
    "tactic_shared_kib": "limit of a tactic's shared memory in KiB",
    "avg_timing": "timings averaged for a tactic",
    "optimization_level": "builder optimization level of every build, 0 to 5",
    "deadline": "seconds after which a build is cancelled",
    "plans": "all or winner: which engines stay on disk",
    "quantizer": "onnxruntime (int8) or modelopt (int8, fp8)",
}


#: Options that mean nothing to a backend, which refuses them with the reason.
_NOT_OF = {"tensorrt": ("capability",), "tensorrt_rtx": ("channel", "timing_cache", "cache_file")}


def read_options(backend: str, given: Mapping[str, str]) -> TensorRtOptions:
    """Typed options of a backend from words.

    Args:
        backend: `tensorrt` or `tensorrt_rtx`.
        given: Name -> word, e.g. `{"workspace_mib": "4096"}`. `threads` is taken and ignored, since
            timing is on the GPU.

    Raises:
        InputError: An option that does not exist or cannot be used.
    """
    rtx = backend == "tensorrt_rtx"
    values: dict[str, object] = {"channel": Channel.LUNOWUD} if rtx else {}
    for name, word in given.items():
        if name == "threads":
            continue
        if name not in NAMES:
            taken = [n for n in NAMES if n not in _NOT_OF.get(backend, ())]
            raise InputError(
                f"backend option {name!r} does not exist; {backend} takes: {', '.join(taken)}"
            )
        values[name] = _read(name, word)
    options = TensorRtOptions(**values)  # type: ignore[arg-type]
    if rtx and options.channel is not Channel.LUNOWUD:
        raise InputError(
            "TensorRT-RTX has no build_route; its routes go through channel=lunowud, which is"
            " what it takes when the option is left out"
        )
    if rtx and ("timing_cache" in values or "cache_file" in values):
        raise InputError(
            "TensorRT-RTX times nothing at build and has no timing cache; leave it out"
        )
    if not rtx and options.capability:
        raise InputError("TensorRT builds for the GPU at hand; leave the option capability out")
    if options.timing_cache is TimingCache.FRESH and options.cache_file:
        raise InputError("timing_cache=fresh uses no file; leave cache_file out")
    if options.cache_file and options.timing_cache is TimingCache.REPLAY:
        if not Path(options.cache_file).is_file():
            raise InputError(
                f"timing cache {options.cache_file!r} does not exist, so nothing can be replayed;"
                " give the timing.cache that was saved beside an engine"
            )
    return options


#: Options whose values are words.
_WORDS: dict[str, type[Enum]] = {
    "channel": Channel,
    "timing_cache": TimingCache,
    "plans": Plans,
    "quantizer": Quantizer,
}


def _read(name: str, word: str) -> object:
    kinds = {field.name: field.type for field in fields(TensorRtOptions)}
    if name in _WORDS:
        return _word(name, word, _WORDS[name])
    if name == "unsafe":
        if word not in ("on", "off"):
            raise InputError(f"backend option {name}={word!r} is not allowed; allowed: on, off")
        return word == "on"
    if kinds[name] == "int":
        if not (word.isascii() and word.isdigit()):
            raise InputError(
                f"backend option {name}={word!r} is not allowed; give a number, 0 or more"
            )
        if name == "optimization_level" and int(word) not in LEVELS:
            raise InputError(f"backend option {name}={word} is not allowed; allowed: 0 to 5")
        return int(word)
    return word


def _word(name: str, word: str, kind: type[Enum]) -> Enum:
    try:
        return kind(word)
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise InputError(
            f"backend option {name}={word!r} is not allowed; allowed: {allowed}"
        ) from None
