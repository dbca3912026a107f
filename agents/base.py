"""Ask and tell: the contract between whoever decides and whoever builds.

Owns the protocol. An agent is asked for the next route to build and told what came of it; it never
builds, measures or confirms anything itself.

The contract, checked by `conformance.py` on every agent:

- `tell(DEFAULT_ROUTE, outcome)` comes first; the default route is always built by the session and
  never asked for.
- `ask` gives a legal route of the catalog (one of the candidates where there are any) that was not
  asked before, or None to stop, also when nothing is left. Asked twice without a `tell` in
  between, it gives the same route twice.
- Any outcome may come back, failures of every kind included.
- Equal problems, seeds and outcomes give equal routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Expression, Route


@dataclass(frozen=True)
class Problem:
    """What an agent may know before the first build.

    Attributes:
        catalog: The knobs.
        features: Model features, in the order of `features.FEATURE_NAMES`; None if unknown.
        candidates: The only routes that can be asked (replay of a table); None for any legal one.
        budget: Builds the agent may spend.
        seed: Seed of its own randomness.
        tolerance: Limit of the accuracy gate's metric.
        expression: What sweeps walk through; None for every knob.
        skips_inert: A setting that alone gave the default's engine need not be asked beside
            others, unless one of the route's knobs changes precision: there it may act.
        acts: Change (`-name=value`) -> the chance that it changes the engine at all, where
            something is known of it (`liveness_prior.py`).
    """

    catalog: Catalog
    features: tuple[float, ...] | None
    candidates: tuple[Route, ...] | None
    budget: int
    seed: int
    tolerance: float = 1e-2
    expression: Expression | None = None
    skips_inert: bool = False
    acts: Mapping[str, float] = field(default_factory=dict)

    def may_ask(self, route: Route) -> bool:
        """True when the route can be asked at all."""
        if route.is_default:
            return False
        if self.candidates is not None:
            return route in self._allowed
        return self.catalog.is_legal(route)

    @property
    def _allowed(self) -> frozenset[Route]:
        found: frozenset[Route] | None = self.__dict__.get("_cached")
        if found is None:
            found = frozenset(self.candidates or ())
            object.__setattr__(self, "_cached", found)
        return found


@runtime_checkable
class Agent(Protocol):
    """Whoever decides. Attributes: `name`, for people."""

    name: str

    def ask(self) -> Route | None:
        """The next route to build, or None to stop."""
        ...

    def tell(self, route: Route, outcome: Outcome) -> None:
        """What came of a route."""
        ...


@runtime_checkable
class Reasoned(Protocol):
    """An agent that can say why it asked for a route."""

    def why(self) -> tuple[float, float, float] | None:
        """What it believes of the route asked last; None when nothing is asked.

        Returns:
            Mean and standard deviation of its log speed-up, and its chance to be accurate.
        """
        ...


@runtime_checkable
class Expecting(Protocol):
    """An agent that can say what it still expects to gain."""

    def expected_gain(self) -> float:
        """Largest expected log speed-up of one more build over the best so far."""
        ...


AgentFactory = Callable[[Problem], Agent]


def search(agent: Agent, evaluate: Callable[[Route], Outcome], budget: int) -> list[Outcome]:
    """Let an agent spend a budget on a function; the default route is evaluated and told first.

    Args:
        agent: The agent.
        evaluate: Gives the outcome of any route.
        budget: Routes it may ask for.

    Returns:
        Outcomes in the order asked, the default's not among them.
    """
    agent.tell(DEFAULT_ROUTE, evaluate(DEFAULT_ROUTE))
    outcomes: list[Outcome] = []
    while len(outcomes) < budget:
        route = agent.ask()
        if route is None:
            break
        outcomes.append(evaluate(route))
        agent.tell(route, outcomes[-1])
    return outcomes


class OrderedAgent:
    """An agent that walks an order of routes, skipping what cannot be asked.

    Subclasses say which routes come next through `upcoming`.

    Args:
        name: Name for people.
        problem: The problem.
    """

    def __init__(self, name: str, problem: Problem) -> None:
        self.name = name
        self.problem = problem
        self.told: dict[Route, Outcome] = {}
        self._pending: Route | None = None

    def upcoming(self) -> Route | None:
        """The next route in the order, askable or not; None at the end."""
        raise NotImplementedError

    def ask(self) -> Route | None:
        """See `Agent`."""
        while self._pending is None:
            route = self.upcoming()
            if route is None:
                return None
            if self.problem.may_ask(route) and route not in self.told:
                self._pending = route
        return self._pending

    def tell(self, route: Route, outcome: Outcome) -> None:
        """See `Agent`."""
        self.told[route] = outcome
        if route == self._pending:
            self._pending = None

    @property
    def incumbent(self) -> Outcome | None:
        """The fastest feasible outcome told, if it beats the default route."""
        best = max(self.told.values(), key=lambda o: o.gain, default=None)
        return best if best is not None and best.gain > 0 else None
