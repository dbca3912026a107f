"""A child of `liveness` whose compiler crashes, hangs, leaks and is killed on request."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from routepilot.env.child import Line


def main(arguments: list[str]) -> None:
    line = Line(arguments)
    line.next()
    line.send({"compiler": "hostile"})
    leaked = ""
    while (request := line.next()) is not None:
        flags = request["flags"]
        if flags == "-kgen:tiling=0":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif flags == "-kgen:tiling=1":
            time.sleep(60)
        elif flags in os.environ.get("HOSTILE_KILLS", "").split():
            os.kill(os.getpid(), signal.SIGKILL)
        elif flags == "-slice_elim=off" and not Path(os.environ["HOSTILE_ONCE"]).exists():
            Path(os.environ["HOSTILE_ONCE"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif flags == "-slice_fusion=off":
            leaked = "leaked"
        if flags == "-concat_elim=off":
            line.send({"status": "build_failed", "reason": "CHECK failed"})
        else:
            engine = leaked or ("live" if flags == "-split_elim=off" else "default")
            line.send({"hash": engine, "bytes": "7"})


if __name__ == "__main__":
    main(sys.argv[1:])
