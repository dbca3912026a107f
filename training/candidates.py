"""What a search may ask for: the whole catalog, what can matter of it, or what the user wrote.

Owns the step from a session to an agent's problem. Knows no particular agent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

from routepilot.agents import NEEDS_POLICY
from routepilot.agents.base import Problem
from routepilot.env import probes
from routepilot.env.backends.base import LeavesOut, Narrows
from routepilot.env.errors import InputError, RouteError
from routepilot.env.inert import Narrowed
from routepilot.env.liveness_prior import EVEN_CHANCE, LivenessPrior, expected_liveness
from routepilot.env.operator_rules import operator_types
from routepilot.env.routes import (
    Catalog,
    Expression,
    Route,
    combine,
    parse_expression,
    read_expression_file,
    sweep_expression,
)
from routepilot.env.wording import counted, verb
from routepilot.training.defaults import released_liveness
from routepilot.training.session import Say, Session, silent

#: Agents that walk an expression themselves, however many routes it has.
SWEEPS = frozenset({"fast", "mixed", "full", "recentred"})

#: Agents that heed how likely a change is to act: a walk in that order, and those with a belief.
FOLLOWS_LIVENESS = NEEDS_POLICY | {"recentred", "two-way-gp", "greedy", "thompson"}

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
        say: Hears what was left out, and whether the model is being probed.

    Raises:
        RouteError: The expression does not fit the catalog.
        InputError: It has too many routes for the agent.
    """
    if session.will_probe:
        say(
            f"probing {session.model.name}: what rounding alone does to its outputs, once for a"
            f" model, {probes.DEADLINE:.0f} s at most"
        )
    elif session.forgoes_probes:
        say(
            f"what rounding does to {session.model.name} was unknown when this run began, and stays"
            " so for its sake; a run in another folder tries again"
        )
    limit = session.config.gate.limit
    if expression is not None:
        backend = session.backend
        left_out = backend.left_out() if isinstance(backend, LeavesOut) else None
        parsed = read_expression(expression, session.catalog, left_out)
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
    acts = _expected(narrowed, session, say) if agent in FOLLOWS_LIVENESS else {}
    if narrowed.dropped or narrowed.masked:
        say(
            f"left out as inert: {counted(len(narrowed.dropped), 'knob')} by the model's operators,"
            f" {counted(len(narrowed.masked), 'value')} by the compiler"
        )
    if agent == "recentred" and acts:
        order = likely_first(narrowed.catalog, acts)
    return Problem(
        narrowed.catalog,
        session.features,
        None,
        budget,
        seed,
        limit,
        order,
        skips_inert=True,
        acts=acts,
    )


def _expected(narrowed: Narrowed, session: Session, say: Say) -> dict[str, float]:
    """The chance of each change to act on the model, by its own sweep and the released table."""
    table = released_liveness()
    prior = LivenessPrior(table) if table is not None else None
    operators = operator_types(session.model.path)
    acts = expected_liveness(narrowed.catalog, operators, prior, narrowed.swept, own=narrowed.own)
    if narrowed.live:
        first = len(narrowed.live)
        say(
            f"first {verb(first, 'comes', 'come')} {counted(first, 'knob')} that"
            " `routepilot live` found live"
        )
    if prior is not None:
        never = prior.last(own=narrowed.own)
        count = sum(name in narrowed.catalog for name in never)
        say(
            f"last {verb(count, 'comes', 'come')} {counted(count, 'knob')} that changed no engine"
            f" of {counted(len(prior.models), 'corpus model')}"
        )
    return acts


def likely_first(catalog: Catalog, acts: Mapping[str, float]) -> Expression:
    """Every knob, in the order in which a walk from the right comes first to what is likely to act.

    The precision of the file comes before all, since it changes an engine as a whole; builder
    levers, which no sweep can judge, stand between what is likely and what is not.

    Args:
        catalog: The knobs.
        acts: Change -> chance to act.
    """
    everything = sweep_expression(catalog)

    def chance(term: tuple[str, tuple[str, ...]]) -> float:
        knob = catalog[term[0]]
        if "variant" in knob.marks:
            return math.inf
        changes = (f"{knob.name}={value}" for value in knob.alternatives)
        return max((acts[change] for change in changes if change in acts), default=EVEN_CHANCE)

    return Expression(tuple(sorted(everything.terms, key=chance)), everything.varying)


def read_expression(
    expression: str | Path, catalog: Catalog, left_out: Mapping[str, str] | None = None
) -> Expression:
    """An expression, or the file of one, against a catalog.

    Args:
        expression: The expression, or its file.
        catalog: The knobs.
        left_out: Knobs that the backend keeps out of its catalog, each with the reason.

    Raises:
        RouteError: It does not fit, or none of its routes means anything.
    """
    try:
        if isinstance(expression, Path):
            found = read_expression_file(expression, catalog)
        else:
            found = parse_expression(expression, catalog)
    except RouteError as error:
        for name, why in (left_out or {}).items():
            if f"token '{name}=" in str(error):
                raise RouteError(
                    f"knob {name} is left out, since it {why}; -O unsafe=on takes it in"
                ) from None
        raise
    objection = None
    settings = itertools.chain(found.fast(catalog), found.full())
    for one in itertools.islice(settings, MOST_ROUTES):
        objection = catalog.objection(catalog.route(one))
        if objection is None:
            return found
    if found.count_full() < MOST_ROUTES and objection is not None:
        raise RouteError(f"no route of the expression means anything: {objection}")
    return found


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
            f"the route expression has {counted(count, 'route')}, and {who} takes {MOST_ROUTES}"
            " at most;"
            f" narrow it, or tune with one of the agents {', '.join(sorted(SWEEPS))}"
        )
    routes = combine(catalog, [*expression.fast(catalog), *expression.full()])
    return tuple(route for route in routes if not route.is_default)
