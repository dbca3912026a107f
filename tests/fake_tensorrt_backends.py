"""Backends on the fake TensorRT, for processes of their own: `fake_tensorrt_backends:make`.

Each function makes the backend of one machine: one that works, and those that cannot.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt import install


def make(options: Mapping[str, str]) -> Any:
    """The backend on the fake, whose fastest route is `-kgen:tiling=0`.

    Every engine sleeps 4 ms an inference; one of `-kgen:tiling=0` sleeps 2 ms.
    """
    from routepilot.env.backends.tensorrt import TensorRtBackend

    module = install(pytest.MonkeyPatch())
    module.delays = {"": 4.0, "-kgen:tiling=0": 2.0}
    module.inert = {"-cask_fusion:num_tactics=5"}
    return TensorRtBackend("tensorrt", options)


def make_with_liveness(options: Mapping[str, str]) -> Any:
    """The backend on the fake, where a liveness table is released: the file FAKE_LIVENESS names."""
    from routepilot.env.liveness_table import load_liveness
    from routepilot.training import candidates, knob_list

    table = load_liveness(Path(os.environ["FAKE_LIVENESS"]))
    for module in (candidates, knob_list):
        pytest.MonkeyPatch().setattr(module, "released_liveness", lambda: table)
    return make(options)


def make_deadly(options: Mapping[str, str]) -> Any:
    """The backend on the fake, whose compiler hangs or is killed with some routes."""
    backend = make(options)
    backend._trt.deadly = {"-kgen:tiling=0": "hang", "-kgen:tiling=1": "kill"}
    return backend


def make_without_gpu(options: Mapping[str, str]) -> Any:
    """The backend on the fake, on a machine without a GPU."""
    from routepilot.env.backends import tensorrt
    from routepilot.env.errors import MachineError

    def none(_: int) -> None:
        raise MachineError("there is no CUDA device 0")

    install(pytest.MonkeyPatch())
    pytest.MonkeyPatch().setattr(tensorrt, "Gpu", none)
    return tensorrt.TensorRtBackend("tensorrt", options)


def make_windows(options: Mapping[str, str]) -> Any:
    """The backend on the fake, as it is on Windows: without the tuner's list."""
    backend = make(options)
    backend._trt.routes = {"tuner_version": "", "tuner_options": []}
    return backend


def make_old(options: Mapping[str, str]) -> Any:
    """The backend on a fake that is too old."""
    from routepilot.env.backends.tensorrt import TensorRtBackend

    install(pytest.MonkeyPatch(), "8.6.1")
    return TensorRtBackend("tensorrt", options)
