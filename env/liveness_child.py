"""The child's side of knob liveness: compile one model again and again with other flags.

Owns the process that may crash. Knows the RTX compiler, no catalog and no cache; run as
`python -m routepilot.env.liveness_child`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from routepilot.env.backends.tensorrt_compiler import Compiler, Network, Plan, Settings, find_module
from routepilot.env.child import Line
from routepilot.env.errors import RoutePilotError


def _open(request: dict[str, Any]) -> tuple[Compiler, Network]:
    settings = Settings(compute_capability=request["compute_capability"])
    compiler = Compiler(find_module("tensorrt_rtx"), settings)
    shapes = {name: tuple(shape) for name, shape in request["shapes"].items()}
    return compiler, compiler.parse(Path(request["path"]), shapes)


def _compile(compiler: Compiler, network: Network, flags: str) -> dict[str, str]:
    made = compiler.compile(network, flags=flags)
    if isinstance(made, Plan):
        return {"hash": made.hash}
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
