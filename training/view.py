"""The live view of a search: what is done, what is best, what is being built and why.

Owns the view on a terminal; elsewhere plain lines. Knows outcomes, no agent and no session.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route
from routepilot.training import console


class SearchView:
    """What a search is at.

    Args:
        title: What is being done.
        total: Builds at most.
        quiet: Show nothing.
    """

    def __init__(self, title: str, total: int, *, quiet: bool = False) -> None:
        self._total, self._quiet = total, quiet
        self._live = sys.stderr.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._task = self._bar.add_task(escape(title), total=total, left="")
        self._best: Outcome | None = None
        self._failed: Counter[str] = Counter()
        self._now, self._start = "", time.monotonic()
        self._display = Live(
            self._group(), console=console.err, refresh_per_second=4, transient=False
        )

    def __enter__(self) -> SearchView:
        if self._live:
            self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._now = ""
            self._display.update(self._group(), refresh=True)
            self._display.stop()

    def say(self, text: str) -> None:
        """One remark."""
        if not self._quiet:
            console.err.print(escape(text))

    def asking(self, number: int, route: Route, why: str) -> None:
        """Build `number` begins."""
        reason = f" ({why})" if why else ""
        self._now = f"building {route}{reason}"
        if self._live:
            self._display.update(self._group())
        elif why:
            self.say(f"[{number}/{self._total}] next: {route}{reason}")

    def outcome(self, number: int, outcome: Outcome) -> None:
        """Build `number` is done."""
        if not outcome.is_feasible:
            self._failed[outcome.status.value] += 1
        elif outcome.gain > (self._best.gain if self._best else 0.0):
            self._best = outcome
        each = (time.monotonic() - self._start) / number
        left = f"at most {each * (self._total - number):.0f} s left"
        self._bar.update(self._task, completed=number, left=left)
        self._now = ""
        self.say(
            f"{'  ' if self._live else f'[{number}/{self._total}] '}{console.outcome_text(outcome)}"
        )
        if self._live:
            self._display.update(self._group())

    def lines(self) -> list[str]:
        """What stands below the bar."""
        best = "best so far: the default route"
        if self._best is not None and self._best.measurement is not None:
            measured = self._best.measurement
            told = console.ratio_text(measured.log_speedup, measured.low, measured.high)
            best = f"best so far: {told} with {self._best.route}"
        failed = ", ".join(f"{count} {kind}" for kind, count in self._failed.most_common())
        return [
            best,
            *([f"failed: {failed}"] if failed else []),
            *([self._now] if self._now else []),
        ]

    def _group(self) -> Group:
        return Group(self._bar, *(Text(f"  {line}", overflow="ellipsis") for line in self.lines()))


def why_text(log_speedup: float, sd: float, feasible: float) -> str:
    """What is believed of a route, for people."""
    low, high = math.exp(log_speedup - 2 * sd), math.exp(log_speedup + 2 * sd)
    return (
        f"expected {math.exp(log_speedup):.2f}x, {low:.2f} to {high:.2f},"
        f" {100 * feasible:.0f} % likely accurate"
    )
