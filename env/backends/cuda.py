"""ONNX Runtime's CUDA provider behind the protocol of `base.py`, timed under CUDA graphs.

Owns the backend: its options, its target, the precision recipes and how the words of a failed
build are read. The catalog is in `cuda_catalog.py`, a running session in `cuda_engine.py`, the
clock in `gpu_timing.py`. The default route is what the provider does when nothing is set.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepilot.env.backends.base import BuildFailure, Engine, Target, Tensors
from routepilot.env.backends.cpu import read_failure
from routepilot.env.backends.cuda_catalog import (
    BF16_OPERATORS,
    WIDE_OPERATORS,
    make_catalog,
    settings_of,
)
from routepilot.env.backends.cuda_engine import CUDA, GRAPH_MODES, CudaEngine, Device, Place
from routepilot.env.backends.recipes import KeptSteps, Transformed, file_key, transform
from routepilot.env.backends.tensorrt_precision import halve
from routepilot.env.errors import InputError, MachineError, MissingExtraError
from routepilot.env.outcomes import Status
from routepilot.env.routes import Catalog, Route

if TYPE_CHECKING:
    import onnx

    from routepilot.env.models import Model

#: Options of the backend: name -> allowed words; empty for a whole number.
OPTIONS: dict[str, tuple[str, ...]] = {"graphs": GRAPH_MODES, "device": (), "threads": ()}

#: The library's words for device memory that ran out.
_NO_MEMORY = re.compile(r"CUDA failure 2\b|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.I)


class CudaBackend:
    """ONNX Runtime's CUDA provider seen through routes.

    Args:
        options: All optional. `graphs`: how launches are timed: `capture` (one CUDA graph, captured
            by us), `session` (the library's own graph, with its wait for the GPU in the figure) or
            `off`. `device`: CUDA device number. `threads` is taken and ignored, since timing is on
            the GPU.
        device: Where sessions run.

    Raises:
        InputError: An option that does not exist or cannot be used.
    """

    name = "cuda"

    def __init__(self, options: Mapping[str, str] | None = None, device: Device = CUDA) -> None:
        self._options = check_options(options or {})
        self._device = device
        self._catalog = make_catalog(self.name)

    def catalog(self) -> Catalog:
        """The knobs; see `base.Backend`."""
        return self._catalog

    @cached_property
    def _gpu(self) -> Any:
        import onnxruntime

        if self._device.provider not in onnxruntime.get_available_providers():
            raise MissingExtraError(
                f"backend cuda needs ONNX Runtime with {self._device.provider}, and the installed"
                f" onnxruntime {onnxruntime.__version__} has none; run pip uninstall onnxruntime,"
                " then pip install --force-reinstall --no-deps onnxruntime-gpu"
            )
        if hasattr(onnxruntime, "preload_dlls") and self._device is CUDA:
            with redirect_stdout(sys.stderr):  # it prints what it cannot load
                onnxruntime.preload_dlls()
        return self._device.make_gpu(int(self._options["device"]))

    @cached_property
    def _place(self) -> Place:
        index, stream = int(self._options["device"]), self._gpu.stream()
        return Place(self._device, index, self._gpu, stream, self._options["graphs"])

    def target(self) -> Target:
        """GPU, versions and settings; see `base.Backend`."""
        import onnxruntime

        versions = {"onnxruntime": str(onnxruntime.__version__), "cuda driver": self._gpu.driver}
        settings = {"graphs": self._options["graphs"]}
        return Target(self.name, self._gpu.name, versions, self._catalog.key, settings)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the GPU alone for as long as a measurement takes; builds elsewhere wait."""
        with self._gpu.lock():
            yield

    def build(self, model: Model, route: Route, workdir: Path) -> Engine | BuildFailure:
        """Make the precision variant, then a session; see `base.Backend`."""
        objection = self._catalog.objection(route)
        if objection is not None:
            return BuildFailure(Status.REFUSED, objection)
        values = self._catalog.full_settings(route)
        place = self._place
        scratch = workdir / ".building"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir(parents=True)
        except OSError as error:
            raise MachineError(
                f"the work folder {str(workdir)!r} cannot be used: {error}"
            ) from error
        try:
            fuse = values["-transformer"] == "on"
            start = transform(model, "none", "s8", fuse, workdir, scratch)
            source = _variant(model, start, values["-precision"], fuse, workdir, scratch)
            return CudaEngine(source, settings_of(values), model, place, scratch)
        except MachineError:
            raise
        except Exception as error:  # tools and the library raise whatever they like
            failure = read_failure(error, (scratch, workdir, model.folder))
            if _NO_MEMORY.search(failure.reason):
                return BuildFailure(Status.OUT_OF_MEMORY, failure.reason)
            return failure
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _variant(
    model: Model, start: Transformed, precision: str, fused: bool, workdir: Path, scratch: Path
) -> Transformed:
    """The file in a precision, made or found made."""
    if precision == "model":
        return start
    kept = KeptSteps(workdir, scratch, file_key(model))
    stem = "fused-" if fused else ""
    make = partial(_halve, inputs=model.selection(), precision=precision)
    return kept.step(f"{stem}cuda-{precision}", start, start, make)


def _halve(source: Path, out: Path, inputs: Sequence[Tensors], precision: str) -> None:
    import onnx
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    kept: list[str] | None = None
    if precision == "fp16_mixed":
        kept = [*DEFAULT_OP_BLOCK_LIST, *WIDE_OPERATORS]
    elif precision == "bf16":
        proto = onnx.load(str(source), load_external_data=False)
        kept = [*DEFAULT_OP_BLOCK_LIST, *_without_bfloat16(proto)]
    halve(source, out, inputs, precision == "bf16", kept)


def _without_bfloat16(proto: onnx.ModelProto) -> list[str]:
    """Operators of a graph that have no bfloat16 form at its opset, or no kernel for it."""
    import onnx

    opsets = {item.domain: item.version for item in proto.opset_import}
    found = set()
    for node in proto.graph.node:
        if node.op_type not in BF16_OPERATORS or node.domain not in ("", "ai.onnx"):
            found.add(node.op_type)
            continue
        schema = onnx.defs.get_schema(node.op_type, opsets.get("", 1))
        floats = [c for c in schema.type_constraints if "tensor(float)" in c.allowed_type_strs]
        if any("tensor(bfloat16)" not in c.allowed_type_strs for c in floats):
            found.add(node.op_type)
    return sorted(found)


def check_options(options: Mapping[str, str]) -> dict[str, str]:
    """Every option of the backend with its value.

    Raises:
        InputError: An option that does not exist or cannot be used.
    """
    full = {"graphs": GRAPH_MODES[0], "device": "0", "threads": "1"}
    for key, value in options.items():
        if key not in OPTIONS:
            raise InputError(
                f"backend option {key!r} does not exist; cuda takes: {', '.join(OPTIONS)}"
            )
        if OPTIONS[key] and value not in OPTIONS[key]:
            raise InputError(
                f"backend option {key}={value!r} is not allowed; allowed: {', '.join(OPTIONS[key])}"
            )
        if not OPTIONS[key] and not (value.isascii() and value.isdigit()):
            raise InputError(f"backend option {key}={value!r} is not allowed; give a whole number")
        full[key] = value
    return full
