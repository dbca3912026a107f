"""A parent that is warm: it has the modules loaded and forks one command line after another.

No part of a test by itself; see `killing.py`. Reads one JSON object a line from its input: `words`
of the command line, and the files `output` and `errors`. Answers with the process number of the
fork, and with its exit code when it is over; a fork is a `routepilot` process like any other, but
for the seconds that its imports would have taken. What the first fork imported is loaded before
the second.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from routepilot.training import cli

#: Packages that start threads when they are imported, which a fork would lack.
THREADED = ("pyarrow",)

#: Named in the environment: a file of the modules that a fork found missing.
MISSING = "WARM_MISSING"


def load(names: list[str]) -> None:
    """Import what a fork has missed, as far as it can be had."""
    for name in names:
        if name.partition(".")[0] in THREADED:
            continue
        try:
            importlib.import_module(name)
        except Exception:  # a module of a script, or one that is only made by another
            continue
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would lack all but one"


def be(request: dict[str, object], missing: Path) -> None:
    """Be the command line, in the fork."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(str(request[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    words = request["words"]
    assert isinstance(words, list)
    sys.argv = ["routepilot", *words]
    before = set(sys.modules)
    try:
        cli.main()
    finally:
        new = [name for name in sys.modules if name not in before]
        missing.write_text(json.dumps(new), encoding="utf-8")


def main() -> None:
    missing = Path(os.environ[MISSING])
    load(sys.argv[1:])
    for line in sys.stdin:
        request = json.loads(line)
        if missing.exists():
            load(json.loads(missing.read_text(encoding="utf-8")))
            missing.unlink()
        pid = os.fork()
        if pid == 0:
            be(request, missing)
            raise SystemExit(0)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
