"""What a search may ask for: the whole catalog, what can matter of it, or what the user wrote.

Owns the step from a session to an agent's problem. Knows no particular agent.
"""

from __future__ import annotations

from pathlib import Path

from routepilot.agents.base import Problem
from routepilot.env.backends.base import Narrows
from routepilot.env.errors import InputError
from routepilot.env.inert import Narrowed
from routepilot.env.routes import (
    Catalog,
    Expression,
    Route,
    combine,
    parse_expression,
    read_expression_file,
    sweep_expression,
)
from routepilot.training.session import Say, Session, silent

#: Agents that walk an expression themselves, however many routes it has.
SWEEPS = frozenset({"fast", "mixed", "full", "recentred"})

#: Most routes of an expression that are laid out for another agent.
MOST_ROUTES = 4096


def make_problem(
    session: Session,
    agent: str,
    budget: int,
    seed: int,
    *,
    expression: str | Path | None = None,
    say: Say = silent,
) -> Problem:
    """The problem of a session for an agent.

    Without an expression, whatever the backend can prove to be inert for the model is left out.

    Args:
        session: Live session.
        agent: Agent name.
        budget: Builds the agent may spend.
        seed: Seed of its randomness.
        expression: trtexec's route expression, or a file of one; routes of it alone are built.
        say: Hears what was left out.

    Raises:
        RouteError: The expression does not fit the catalog.
        InputError: It has too many routes for the agent.
    """
    limit = session.config.gate.limit
    if expression is not None:
        parsed = read_expression(expression, session.catalog)
        who = f"agent {agent}"
        return Problem(
            session.catalog,
            session.features,
            None if agent in SWEEPS else lay_out(parsed, session.catalog, who),
            budget,
            seed,
            limit,
            parsed,
        )
    if not isinstance(session.backend, Narrows):
        return Problem(session.catalog, session.features, None, budget, seed, limit)
    narrowed = session.backend.narrowed(session.model)
    order = None
    if narrowed.dropped or narrowed.masked:
        say(
            f"left out as inert: {len(narrowed.dropped)} knobs by the model's operators,"
            f" {len(narrowed.masked)} values by the compiler"
        )
    if agent == "recentred" and narrowed.live:
        say(f"{len(narrowed.live)} knobs that `routepilot live` found live come first")
        order = _live_first(narrowed)
    return Problem(
        narrowed.catalog, session.features, None, budget, seed, limit, order, skips_inert=True
    )


def _live_first(narrowed: Narrowed) -> Expression:
    """Every knob, in the order in which a walk from the right comes to live ones first."""
    everything = sweep_expression(narrowed.catalog)
    terms = sorted(everything.terms, key=lambda term: term[0] in narrowed.live)
    return Expression(tuple(terms), everything.varying)


def read_expression(expression: str | Path, catalog: Catalog) -> Expression:
    """An expression, or the file of one, against a catalog.

    Raises:
        RouteError: It does not fit.
    """
    if isinstance(expression, Path):
        return read_expression_file(expression, catalog)
    return parse_expression(expression, catalog)


def lay_out(expression: Expression, catalog: Catalog, who: str) -> tuple[Route, ...]:
    """Every route of an expression but the default, single changes first.

    Args:
        expression: The expression.
        catalog: The catalog it was read against.
        who: For whom, in the message.

    Raises:
        InputError: There are more than `MOST_ROUTES`.
    """
    count = expression.count_full()
    if count > MOST_ROUTES:
        raise InputError(
            f"the route expression has {count} routes, and {who} takes {MOST_ROUTES} at most;"
            f" narrow it, or tune with one of the agents {', '.join(sorted(SWEEPS))}"
        )
    routes = combine(catalog, [*expression.fast(catalog), *expression.full()])
    return tuple(route for route in routes if not route.is_default)
