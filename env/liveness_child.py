"""The child's side of knob liveness: compile one model again and again with other flags.

Owns the process that may crash. Knows the RTX compiler, no catalog and no cache; run as
`python -m routepilot.env.liveness_child`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from routepilot.env.backends.tensorrt_compiler import Compiler, Network, Plan, Settings, find_module
from routepilot.env.child import Line
from routepilot.env.errors import RoutePilotError


def _open(request: dict[str, Any]) -> tuple[Compiler, Network]:
    settings = Settings(compute_capability=request["compute_capability"])
    compiler = Compiler(find_module("tensorrt_rtx"), settings)
    shapes = {name: tuple(shape) for name, shape in request["shapes"].items()}
    return compiler, compiler.parse(Path(request["path"]), shapes)


#: Length of the runs of bytes that `order_free_hash` counts. Five engines of one three-output
#: network, built alike, agree in runs of 1, 2 and 4 bytes and not in runs of 8.
RUN = 4


def order_free_hash(data: bytes) -> str:
    """A hash over which runs of four bytes occur how often, whatever their order.

    TensorRT-RTX 1.7.1 lists the outputs of a network in an order that changes from build to build
    within one process, so engines with several outputs are never byte-identical for long.
    """
    array = np.frombuffer(data, np.uint8)
    ends = len(array) - RUN + 1
    runs = np.zeros(ends, np.uint32)
    for place in range(RUN):
        runs |= array[place : ends + place].astype(np.uint32) << np.uint32(8 * place)
    found, counts = np.unique(runs, return_counts=True)
    return hashlib.sha256(found.tobytes() + counts.tobytes()).hexdigest()


def _compile(compiler: Compiler, network: Network, flags: str) -> dict[str, str]:
    made = compiler.compile(network, flags=flags)
    if isinstance(made, Plan):
        several = network.definition.num_outputs > 1
        engine = order_free_hash(made.data) if several else made.hash
        return {"hash": engine, "bytes": str(len(made.data))}
    return {"status": made.status.value, "reason": made.reason}


def main(arguments: list[str]) -> None:
    """Answer `{"flags": ...}` requests until the parent closes the line."""
    line = Line(arguments)
    opened: tuple[Compiler, Network] | None = None
    while (request := line.next()) is not None:
        try:
            if opened is None:
                opened = _open(request)
                line.send({"compiler": opened[0].version})
            else:
                line.send(_compile(*opened, request["flags"]))
        except RoutePilotError as error:
            line.send({"error": type(error).__name__, "message": str(error)})
    os._exit(0)  # the compiler needs no farewell


if __name__ == "__main__":
    main(sys.argv[1:])
