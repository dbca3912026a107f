"""The search loop of a live session: an agent asks, the session answers, the budget ends it.

Owns budgets, the accounting of builds and seconds, and the confirmation of a winner. Knows no
particular agent and prints nothing.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from routepilot.agents.base import Agent, Expecting, Reasoned
from routepilot.env.errors import InputError
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.wording import counted
from routepilot.training.session import Session

#: Winners tried at confirmation before the answer is the default route. Each costs two builds.
MAX_CONFIRMATIONS = 3


#: Hears a build's number, its route and what the agent believes of it.
OnAsk = Callable[[int, Route, tuple[float, float, float] | None], None]


@dataclass(frozen=True)
class Budget:
    """What a search may spend.

    Attributes:
        max_builds: Routes built, failures included. The default engine, which every session
            needs, and the confirmation builds come on top and are reported beside it.
        max_seconds: Seconds of building and measuring, or None.
        min_gain: Stop once the agent expects less of the next build than this log speed-up; None
            never does. Only an agent that is `Expecting` can be stopped so.

    Raises:
        InputError: A count or a time is negative.
    """

    max_builds: int
    max_seconds: float | None = None
    min_gain: float | None = None

    def __post_init__(self) -> None:
        if self.max_builds < 0:
            raise InputError(f"--max-builds {self.max_builds} is negative; give 0 or more")
        if self.max_seconds is not None and not self.max_seconds >= 0:
            raise InputError(
                f"--max-seconds {self.max_seconds:g} is no time to spend; give 0 or more seconds"
            )


@dataclass(frozen=True)
class Search:
    """What one agent did.

    Attributes:
        agent: Its name.
        outcomes: In the order asked, the default's not among them.
        seconds: Build and measure seconds of the outcomes, plus the agent's own thinking.
        ended_by: `agent`, `builds`, `seconds` or `noise` (expected gain below `min_gain`).
    """

    agent: str
    outcomes: tuple[Outcome, ...]
    seconds: float
    ended_by: str

    @property
    def builds(self) -> int:
        """Routes built, failures included."""
        return len(self.outcomes)

    @property
    def statuses(self) -> dict[str, int]:
        """How many outcomes ended how."""
        return dict(Counter(outcome.status.value for outcome in self.outcomes))

    def ending(self, budget: Budget) -> str:
        """What ended it, for people; seconds as they were given."""
        if self.ended_by == "seconds" and budget.max_seconds is not None:
            return f"the budget of {budget.max_seconds:g} s is spent"
        if self.ended_by == "noise":
            return "the agent expects less of the next build than timing can tell apart"
        if self.ended_by == "agent":
            return f"the agent {self.agent} asks for no more builds"
        return f"the budget of {counted(budget.max_builds, 'build')} is spent"

    def promising(self) -> list[Outcome]:
        """Feasible outcomes that measured faster than the default, fastest first."""
        faster = [o for o in self.outcomes if o.is_feasible and o.log_speedup > 0]
        return sorted(faster, key=lambda o: -o.log_speedup)


@dataclass(frozen=True)
class Confirmed:
    """The answer after re-measurement.

    Attributes:
        route: The winner, or the default route.
        log_speedup: Re-measured log speed-up; 0 for the default route.
        low: Lower end of its 95 % interval.
        high: Upper end.
        outcome: The confirming outcome; None when the default route was never challenged.
        builds: Engine builds that confirmation cost.
        note: Why the answer is the default route; empty otherwise.
    """

    route: Route
    log_speedup: float
    low: float
    high: float
    outcome: Outcome | None
    builds: int
    note: str

    @property
    def speedup(self) -> tuple[float, float, float]:
        """Speed-up over the default route with its 95 % interval: value, low, high."""
        return math.exp(self.log_speedup), math.exp(self.low), math.exp(self.high)


def run_search(
    session: Session,
    agent: Agent,
    budget: Budget,
    *,
    on_outcome: Callable[[int, Outcome], None] | None = None,
    on_ask: OnAsk | None = None,
    use_incumbent: bool = True,
) -> Search:
    """Let an agent spend a budget.

    Args:
        session: Live session; routes on record are answered at once and charged all the same.
        agent: Ask/tell agent.
        budget: What it may spend.
        on_outcome: Called with the build's number and its outcome.
        on_ask: Called before each build with its number, the route, and what the agent believes of
            it (see `Reasoned`; None where it does not say).
        use_incumbent: Let the timing of a route stop early once it is clearly slower than the
            best so far. Off when several agents share outcomes, so that all see the same figures.
    """
    default = session.default()
    agent.tell(DEFAULT_ROUTE, default)
    outcomes: list[Outcome] = []
    best, spent, thinking, ended_by = 0.0, 0.0, 0.0, "builds"
    while len(outcomes) < budget.max_builds:
        if budget.max_seconds is not None and spent + thinking >= budget.max_seconds:
            ended_by = "seconds"
            break
        start = time.monotonic()
        if budget.min_gain is not None and isinstance(agent, Expecting):
            if agent.expected_gain() < budget.min_gain:
                ended_by = "noise"
                break
        route = agent.ask()
        thinking += time.monotonic() - start
        if route is None:
            ended_by = "agent"
            break
        if on_ask is not None:
            on_ask(len(outcomes) + 1, route, agent.why() if isinstance(agent, Reasoned) else None)
        outcome = session.outcome(route, best if use_incumbent else None)
        spent += outcome.build_seconds + outcome.measure_seconds
        outcomes.append(outcome)
        agent.tell(route, outcome)
        best = max(best, outcome.gain)
        if on_outcome is not None:
            on_outcome(len(outcomes), outcome)
    return Search(agent.name, tuple(outcomes), spent + thinking, ended_by)


def confirm_best(
    session: Session, promising: Sequence[Outcome], save_to: Path | None = None
) -> Confirmed:
    """Re-measure the fastest outcomes until one holds; otherwise answer with the default route.

    Args:
        session: Live session.
        promising: Feasible outcomes, fastest first.
        save_to: Folder for the files of the engine that is the answer.
    """
    builds, notes = 0, []
    for outcome in promising[:MAX_CONFIRMATIONS]:
        confirmed = session.confirm(outcome.route, save_to)
        builds += 2
        measured = confirmed.measurement
        if confirmed.is_feasible and measured is not None and measured.low > 0:
            return Confirmed(
                outcome.route,
                measured.log_speedup,
                measured.low,
                measured.high,
                confirmed,
                builds,
                "",
            )
        notes.append(_rejection(outcome, confirmed))
    if save_to is not None:
        session.confirm(DEFAULT_ROUTE, save_to)
        builds += 2
    note = "; ".join(notes) or "no route measured faster than the default"
    return Confirmed(DEFAULT_ROUTE, 0.0, 0.0, 0.0, None, builds, note)


def _rejection(outcome: Outcome, confirmed: Outcome) -> str:
    measured = confirmed.measurement
    if measured is None or not confirmed.is_feasible:
        return f"{outcome.route} did not hold: {confirmed.status.value} ({confirmed.reason})"
    return (
        f"{outcome.route} measured {math.exp(outcome.log_speedup):.3f}x in the search and"
        f" {measured.speedup:.3f}x ({math.exp(measured.low):.3f} to {math.exp(measured.high):.3f})"
        " when confirmed, which does not clear 1"
    )
