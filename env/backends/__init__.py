"""One file per compiler, all behind the protocol of `base.py`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from routepilot.env.errors import InputError

if TYPE_CHECKING:
    from routepilot.env.backends.base import Backend

#: Backends by name, each with its sentence.
BACKENDS = {
    "cpu": "ONNX Runtime and OpenVINO on the CPU, one catalog",
    "onnxruntime": "ONNX Runtime on the CPU alone",
    "openvino": "OpenVINO on the CPU alone",
    "cuda": "ONNX Runtime's CUDA provider, timed under CUDA graphs; needs an NVIDIA GPU",
    "inductor": "torch.compile's compiler, ahead of time, on a CPU or an NVIDIA GPU",
    "tensorrt": "TensorRT's build routes, builder levers and precisions; needs an NVIDIA GPU",
    "tensorrt_rtx": "TensorRT-RTX, whose compiler needs no GPU; experimental",
}


def check_backend(name: str) -> None:
    """See that a backend of a name can be asked for.

    Raises:
        InputError: There is none.
    """
    if name not in BACKENDS and ":" not in name:
        raise InputError(f"backend {name!r} does not exist; there is: {', '.join(BACKENDS)}")


def load_backend(name: str, options: Mapping[str, str] | None = None) -> Backend:
    """The backend of a name.

    Args:
        name: A name of `BACKENDS`, or `module:factory` of a backend that is not ours; the factory
            is called with the options.
        options: Backend options.

    Raises:
        InputError: There is no such backend or option.
        MissingExtraError: A package is missing.
    """
    if ":" in name:
        module, _, factory = name.partition(":")
        try:
            made: Backend = getattr(importlib.import_module(module), factory)(dict(options or {}))
        except (ImportError, AttributeError) as error:
            raise InputError(f"backend {name!r} cannot be loaded: {error}") from None
        return made
    check_backend(name)
    if name == "inductor":
        from routepilot.env.backends.inductor import InductorBackend

        return InductorBackend(options)
    if name.startswith("tensorrt"):
        from routepilot.env.backends.tensorrt import TensorRtBackend

        return TensorRtBackend(name, options)
    if name == "cuda":
        from routepilot.env.backends.cuda import CudaBackend

        return CudaBackend(options)
    from routepilot.env.backends.cpu import CpuBackend

    return CpuBackend(name, options or {})
