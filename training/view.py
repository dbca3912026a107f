"""The live view of a search: what is done, what is best, what is being built and why.

Owns the view on a terminal, one for each verb that builds; elsewhere plain lines. Knows outcomes,
no agent and no session.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route
from routepilot.training import console

if TYPE_CHECKING:
    from routepilot.training.collect import Progress as Collected

#: Belief of a route: log speed-up, its standard deviation, chance to be accurate.
Belief = tuple[float, float, float]

#: Before the best of a single search.
BEST = "best so far"

ViewT = TypeVar("ViewT", bound="View")


class View:
    """A bar over the builds of a budget; below it the best so far, failures, what is being built.

    Args:
        title: What is being done.
        total: Builds at most.
        max_seconds: Seconds that may be spent, which bound the time left; None for no limit.
        quiet: Show nothing.
    """

    def __init__(
        self, title: str, total: int, *, max_seconds: float | None = None, quiet: bool = False
    ) -> None:
        self._total, self._max_seconds, self._quiet = total, max_seconds, quiet
        self._live = sys.stderr.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._task = self._bar.add_task(escape(title), total=total, left="")
        self._best: dict[str, Outcome | None] = {}
        self._now: dict[str, str] = {}
        self._failed: Counter[str] = Counter()
        self._start, self._built, self._spent = time.monotonic(), 0, 0.0
        self._display = Live(
            self._group(), console=console.err, refresh_per_second=4, transient=False
        )

    def __enter__(self: ViewT) -> ViewT:
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
            self._now = {}
            self._display.update(self._group(), refresh=True)
            self._display.stop()

    def say(self, text: str) -> None:
        """One remark."""
        if not self._quiet:
            console.say(text)

    def lines(self) -> list[str]:
        """What stands below the bar."""
        kinds = self._failed.most_common()
        failed = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds)
        return [
            *self._best_lines(),
            *([f"failed: {failed}"] if failed else []),
            *self._now.values(),
        ]

    def _best_lines(self) -> list[str]:
        return [f"{who}: {_best_text(best)}" for who, best in self._best.items()]

    def _ask(self, who: str, number: int, text: str, *, say: bool) -> None:
        """Somebody begins build `number` of the budget."""
        self._now[who] = text
        if say and not self._live:
            self.say(f"[{number}/{self._total}] {text}")
        self._refresh()

    def _tell(self, who: str, outcome: Outcome) -> None:
        """That build came to something."""
        self._now.pop(who, None)
        self._built += 1
        self._spent += outcome.build_seconds + outcome.measure_seconds
        if not outcome.is_feasible:
            self._failed[outcome.status.value] += 1
        best = self._best.get(who)
        self._best[who] = outcome if outcome.gain > (best.gain if best else 0.0) else best

    def _advance(self, number: int, line: str = "") -> None:
        """So many builds of the budget are done; `line` is what the last one came to."""
        self._bar.update(self._task, completed=number, left=self._left(number))
        if line:
            self.say(f"  {line}" if self._live else f"[{number}/{self._total}] {line}")
        self._refresh()

    def _left(self, number: int) -> str:
        if not self._built or number >= self._total:
            return ""  # what comes after the builds is said as it comes
        left = self._taken() / self._built * (self._total - number)
        if self._max_seconds is not None:
            left = min(left, max(self._max_seconds - self._charged(), 0.0))
        return f"at most {duration_text(left)} left"

    def _taken(self) -> float:
        """Seconds that the builds so far took; those on record are charged what they once took."""
        return max(self._elapsed(), self._spent)

    def _charged(self) -> float:
        """Seconds that count against the limit."""
        return self._spent

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _refresh(self) -> None:
        if self._live:
            self._display.update(self._group())

    def _group(self) -> Group:
        return Group(self._bar, *(Text(f"  {line}", overflow="ellipsis") for line in self.lines()))


class SearchView(View):
    """What one search is at."""

    def asking(self, number: int, route: Route, belief: Belief | None) -> None:
        """Build `number` begins."""
        self._ask(BEST, number, _building(route, belief), say=belief is not None)

    def outcome(self, number: int, outcome: Outcome) -> None:
        """Build `number` is done."""
        self._tell(BEST, outcome)
        self._advance(number, console.outcome_text(outcome))

    def _best_lines(self) -> list[str]:
        return super()._best_lines() or [f"{BEST}: {_best_text(None)}"]


class CompareView(View):
    """What a comparison is at: agents one after the other, each with the same budget.

    Args:
        title: What is being done.
        agents: Their names, in order.
        builds: Builds of each at most.
        max_seconds: Seconds of each; None for no limit.
        quiet: Show nothing.
    """

    def __init__(
        self,
        title: str,
        agents: Sequence[str],
        builds: int,
        *,
        max_seconds: float | None = None,
        quiet: bool = False,
    ) -> None:
        self._agents, self._each = list(dict.fromkeys(agents)), builds
        limit = None if max_seconds is None else max_seconds * len(self._agents)
        super().__init__(title, builds * len(self._agents), max_seconds=limit, quiet=quiet)

    def asking(self, agent: str, number: int, route: Route, belief: Belief | None) -> None:
        """Build `number` of an agent begins."""
        text = f"{agent}: {_building(route, belief)}"
        self._ask(agent, self._place(agent, number), text, say=belief is not None)

    def outcome(self, agent: str, number: int, outcome: Outcome) -> None:
        """Build `number` of an agent is done."""
        self._tell(agent, outcome)
        self._advance(self._place(agent, number), f"{agent}: {console.outcome_text(outcome)}")

    def _place(self, agent: str, number: int) -> int:
        """Builds of the whole; what an agent before this one left over counts as done."""
        return self._agents.index(agent) * self._each + number


class CollectView(View):
    """What a collection is at: the models in work, one a worker.

    `max_seconds` is of the wall clock here.
    """

    _done = 0
    _lost: tuple[str, ...] = ()

    def step(self, progress: Collected) -> None:
        """One step of `collect`; callers see to it that steps come one at a time."""
        name, where = progress.model, f"{progress.model} {progress.done}/{progress.planned}"
        if progress.building is not None:
            text = f"{where}: {_building(progress.building, progress.why)}"
            self._ask(name, self._done, text, say=False)
            return
        line, steps = "", 1
        if progress.outcome is not None:
            self._tell(name, progress.outcome)
            line = f"{where} {console.outcome_text(progress.outcome)}"
        if progress.error:
            self._lost += (name,)
            line = f"{where} given up: {progress.error}"
        if progress.error or progress.is_last:
            steps = progress.planned - progress.done
            self._now.pop(name, None)
        self._done = min(self._done + steps, self._total)
        self._advance(self._done, line)

    def _taken(self) -> float:
        return self._elapsed()

    def _charged(self) -> float:
        return self._elapsed()

    def _best_lines(self) -> list[str]:
        best = [f"best of {m}: {_best_text(b)}" for m, b in self._best.items() if m in self._now]
        return [*best, *([f"given up: {', '.join(self._lost)}"] if self._lost else [])]


def why_text(log_speedup: float, sd: float, feasible: float) -> str:
    """What is believed of a route, for people."""
    low, high = math.exp(log_speedup - 2 * sd), math.exp(log_speedup + 2 * sd)
    return (
        f"expected {math.exp(log_speedup):.2f}x, {low:.2f} to {high:.2f},"
        f" {100 * feasible:.0f} % likely accurate"
    )


def duration_text(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h 05 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _building(route: Route, why: Belief | str | None) -> str:
    told = why_text(*why) if isinstance(why, tuple) else why
    return f"building {str(route) or 'the default route'}{f' ({told})' if told else ''}"


def _best_text(best: Outcome | None) -> str:
    if best is None or best.measurement is None:
        return "the default route"
    measured = best.measurement
    told = console.ratio_text(measured.log_speedup, measured.low, measured.high)
    return f"{told} with {best.route}"
