"""Programs as a route wants them: on its device, in its type, in its layout.

Owns the rewriting of an exported program before Inductor sees it, and the global switches of
PyTorch that act beside it. What goes in and comes out keeps its type and layout, so that routes
compute the same function. Imported where torch is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from routepilot.env.backends.inductor_catalog import BLAS, CHANNELS_LAST, CUDNN_BENCHMARK, PRECISION

#: Types that replace float32 throughout a program.
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class _Interface(nn.Module):
    """A program behind float32 and contiguous inputs and outputs."""

    def __init__(self, body: nn.Module, dtype: torch.dtype | None, channels_last: bool) -> None:
        super().__init__()
        self.body, self._dtype, self._channels_last = body, dtype, channels_last

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = self.body(*(self._inward(tensor) for tensor in inputs))
        outputs = (given,) if isinstance(given, Tensor) else tuple(given)
        return tuple(self._outward(tensor) for tensor in outputs)

    def _inward(self, tensor: Tensor) -> Tensor:
        if self._dtype is not None and tensor.dtype is torch.float32:
            tensor = tensor.to(self._dtype)
        if self._channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _outward(self, tensor: Tensor) -> Tensor:
        if self._dtype is not None and tensor.dtype is self._dtype:
            tensor = tensor.to(torch.float32)
        return tensor.contiguous()


def adapted(
    program: ExportedProgram, settings: Mapping[str, str], device: str
) -> tuple[ExportedProgram, tuple[Tensor, ...]]:
    """The program for a route, exported again, and example inputs on the device.

    Args:
        program: As read, float32 on the CPU.
        settings: The route's settings, defaults included.
        device: `cpu` or `cuda`.
    """
    dtype = TYPES.get(settings[PRECISION])
    channels_last = settings[CHANNELS_LAST] == "on"
    # Guards of the first export look at what is about to change.
    plain = "check_guards" in inspect.signature(program.module).parameters
    body: Any = program.module(check_guards=False) if plain else program.module()
    _rewrite(body, dtype, device)
    _move(body, dtype, device, channels_last)
    wrapped = _Interface(body, dtype, channels_last)
    assert program.example_inputs is not None
    inputs = tuple(tensor.to(device) for tensor in program.example_inputs[0])
    with torch.no_grad():
        return torch.export.export(wrapped, inputs), inputs


def _rewrite(body: torch.fx.GraphModule, dtype: torch.dtype | None, device: str) -> None:
    """Put the type and the device in the place of those that the graph names."""
    limit = torch.finfo(dtype).max if dtype is not None else 0.0
    place = torch.zeros(0, device=device).device  # with the number of the device in use

    def changed(value: Any) -> Any:
        if isinstance(value, torch.device):
            return place
        if dtype is None:
            return value
        if value is torch.float32:
            return dtype
        if type(value) is float and abs(value) > limit and abs(value) < float("inf"):
            return limit if value > 0 else -limit  # masks written as the least float32
        return value

    for node in list(body.graph.nodes):
        if node.op == "call_function" and "_assert_tensor_metadata" in str(node.target):
            body.graph.erase_node(node)  # says what held before the change
        elif node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, changed)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, changed)
    body.recompile()


def _move(body: nn.Module, dtype: torch.dtype | None, device: str, channels_last: bool) -> None:
    def placed(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().to(device)
        if dtype is not None and tensor.dtype is torch.float32:
            tensor = tensor.to(dtype)
        if channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    for module in body.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(placed(parameter), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = placed(buffer)
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):  # constants of the graph
                setattr(module, name, placed(value))


@contextmanager
def switches(settings: Mapping[str, str], device: str) -> Iterator[None]:
    """PyTorch's global switches as a route wants them, and afterwards as they were."""
    if device == "cpu":
        yield
        return
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    before = (
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        cudnn.benchmark,
        cuda.preferred_blas_library(),
    )
    tf32 = settings[PRECISION] != "highest"
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        cudnn.allow_tf32 = tf32
        cudnn.benchmark = settings[CUDNN_BENCHMARK] == "on"
        if settings[BLAS] != "default":
            cuda.preferred_blas_library(settings[BLAS])
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.benchmark = before[1], before[2]
        cuda.preferred_blas_library(before[3])
