"""The log of an evaluation: traces on disk as they are made, so that a killed one goes on.

Owns the file and what makes a trace the same: the table, the limit, the agent, who is hidden, the
seeds, the policy, and the code that makes traces. Anything else is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from routepilot.env.records import RouteTable

#: Model -> runs (`traces.Runs`) as plain data, of one agent in one fold.
Traces = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]


class TraceLog:
    """Traces of finished jobs in one file, a line each.

    Args:
        path: The file; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, Traces] = {}
        if path is None or not path.is_file():
            return
        for line in path.read_bytes().splitlines():
            try:
                data = json.loads(line)
                self._found[data["key"]] = data["traces"]
            except (ValueError, KeyError, TypeError):
                continue  # the line that a kill cut short

    def get(self, key: str) -> Traces | None:
        """What was kept under a key."""
        return self._found.get(key)

    def add(self, key: str, traces: Traces) -> None:
        """Keep the traces of a job."""
        self._found[key] = traces
        if self._path is not None:
            line = json.dumps({"key": key, "traces": traces})
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n")  # after a line that was cut short, a new one


def job_key(*parts: object) -> str:
    """Hash of what makes a job the same."""
    text = "\n".join([code_key(), *map(repr, parts)])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def table_key(table: RouteTable) -> str:
    """Hash of what a table holds; its manifest left out."""
    rows = [
        (fingerprint, sorted((str(route), outcomes) for route, outcomes in routes.items()))
        for fingerprint, routes in sorted(table.outcomes.items())
    ]
    return hashlib.sha256(repr((table.target.key, table.models, rows)).encode()).hexdigest()


@cache
def code_key() -> str:
    """Hash of the code that traces come from: the rooms `env` and `agents`, and the replay."""
    here = Path(__file__).resolve().parent
    files = [
        *sorted((here.parent / "env").rglob("*.py")),
        *sorted((here.parent / "agents").rglob("*.py")),
        here / "evaluate.py",
        here / "traces.py",
    ]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()
