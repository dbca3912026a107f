"""When a model of a collection has been measured enough: what is left is not worth a build.

Owns the stop of `collect --until-noise`. An agent of the surrogate is told every outcome and asked
how much it still expects of the routes that are left; it chooses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routepilot.agents import make_agent
from routepilot.agents.base import Agent, Expecting, Problem
from routepilot.env.accuracy import Gate, regate
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError
from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.training.session import Session

#: The agent whose expectation counts: the surrogate alone, no policy.
AGENT = "two-way-gp"


@dataclass(frozen=True)
class Stop:
    """What says that a model has been measured enough.

    Attributes:
        known: Route table that expectations start from; models of the family at hand are left out.
        gate: Gate at which a gain counts.
    """

    known: RouteTable
    gate: Gate = Gate()

    def watch(self, session: Session, family: str, routes: Sequence[Route]) -> Watch:
        """Begin to watch the session of a model.

        Args:
            session: Live session, its default route measured.
            family: Family of its model.
            routes: All routes planned for it.

        Raises:
            InputError: Nothing is left of the table without that family.
        """
        replay = Replay(self.known.without_families([family]), self.gate)
        if not replay.models:
            raise InputError(
                f"the route table knows the family {family!r} alone, which is the model's own;"
                " drop --until-noise"
            )
        problem = Problem(
            session.catalog, session.features, tuple(routes), len(routes), 0, self.gate.limit
        )
        watch = Watch(
            make_agent(AGENT, problem, replay=replay), self.gate, session.config.plan.half_width
        )
        watch.tell(DEFAULT_ROUTE, session.default())
        return watch


class Watch:
    """What is still expected of one model.

    Args:
        agent: Agent that expects.
        gate: Gate at which a gain counts.
        smallest: Log speed-up below which timing tells nothing apart.
    """

    def __init__(self, agent: Agent, gate: Gate, smallest: float) -> None:
        self._agent, self._gate, self._smallest = agent, gate, smallest

    def tell(self, route: Route, outcome: Outcome) -> None:
        """A route was built."""
        self._agent.tell(route, regate(outcome, self._gate))

    def is_enough(self) -> bool:
        """True when the next build is expected to bring less than timing can tell."""
        assert isinstance(self._agent, Expecting)
        return self._agent.expected_gain() < self._smallest
