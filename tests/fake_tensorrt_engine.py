"""Engines of the fake TensorRT: they run in ONNX Runtime, on the memory of `fake_gpu.FakeGpu`."""

from __future__ import annotations

import ctypes
import json
import time
from typing import Any

import numpy as np


class Engine:
    """Its layers are the nodes of the file, with the route for a tactic; all take equal time."""

    def __init__(self, path: str, delay_ms: float, verbosity: str, route: list[str]) -> None:
        import onnx
        import onnxruntime

        self.delay_ms, self._verbosity = delay_ms, verbosity
        self.layers = [
            {
                "Name": f"{node.op_type}_{place}",
                "LayerType": "CaskConvolution" if node.op_type == "Conv" else "kgen",
                "TacticName": f"sm90_{' '.join(route) or 'default'}",
            }
            for place, node in enumerate(onnx.load(path, load_external_data=False).graph.node)
        ]

        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._inputs = {i.name: i for i in self._session.get_inputs()}
        self._outputs = {o.name: o for o in self._session.get_outputs()}

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    def get_tensor_name(self, index: int) -> str:
        return [*self._inputs, *self._outputs][index]

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name in self._inputs else "out"

    def get_tensor_dtype(self, name: str) -> np.dtype[Any]:
        kind = {**self._inputs, **self._outputs}[name].type
        return np.dtype({"tensor(float)": "float32", "tensor(int64)": "int64"}[kind])

    def create_execution_context(self) -> Context:
        return Context(self)

    def create_engine_inspector(self) -> Engine:
        return self

    def get_engine_information(self, form: str) -> str:
        told: list[Any] = self.layers
        if self._verbosity != "DETAILED":
            told = [layer["Name"] for layer in self.layers]
        return json.dumps({"Layers": told, "Bindings": list(self._inputs)})


class Context:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._places: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.profiler: Any = None

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._engine._outputs[name].shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._places[name] = address
        return True

    def _view(self, name: str, shape: tuple[int, ...]) -> Any:
        kind = self._engine.get_tensor_dtype(name)
        size = int(np.prod(shape)) * kind.itemsize
        raw = (ctypes.c_char * size).from_address(self._places[name])
        return np.frombuffer(raw, kind).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        time.sleep(self._engine.delay_ms / 1000)
        inputs = {n: self._view(n, self._shapes[n]) for n in self._engine._inputs}
        names = list(self._engine._outputs)
        for name, array in zip(names, self._engine._session.run(names, inputs), strict=True):
            self._view(name, array.shape)[...] = array
        if self.profiler is not None:
            names = [layer["Name"] for layer in self._engine.layers]
            for name in [*names, "Reformatting CopyNode"]:
                self.profiler.report_layer_time(name, self._engine.delay_ms / len(names))
        return True
