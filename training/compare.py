"""`compare`: several agents on one model at equal budgets, in one session.

Owns the fairness of the comparison: every agent is charged every build it asked for, a route that
two agents ask for is built once and shown to both, a route that two agents answer with is
confirmed once, and a table that knows the model is stripped of its family first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from routepilot.agents import NEEDS_TABLE, make_agent
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import PolicyError
from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.env.routes import Route
from routepilot.env.store import RecordStore
from routepilot.env.tables import load_table
from routepilot.env.trtexec import trial_line
from routepilot.training.candidates import make_problem
from routepilot.training.defaults import find_policy, find_table, released_name, released_policies
from routepilot.training.files import Output, write_json
from routepilot.training.inputs import NamedModel
from routepilot.training.manifest import manifest
from routepilot.training.search import Budget, Confirmed, Search, confirm_best, run_search
from routepilot.training.session import Say, Session, SessionConfig, silent

if TYPE_CHECKING:
    from routepilot.agents.policy import LoadedPolicy

#: Agents compared when none are named.
DEFAULT_AGENTS = ("default", "ppo", "fast", "random")


@dataclass(frozen=True)
class AgentResult:
    """One row of a comparison.

    Attributes:
        name: Agent.
        search: What it did.
        confirmed: Its confirmed answer.
        trtexec: Command line that builds the answer, in the folder of the comparison; empty for
            other compilers.
    """

    name: str
    search: Search
    confirmed: Confirmed
    trtexec: str = ""

    def as_json(self) -> dict[str, object]:
        """The row as plain data."""
        speedup, low, high = self.confirmed.speedup
        losses = self.confirmed.outcome.losses if self.confirmed.outcome else {}
        return {
            "builds": self.search.builds,
            "seconds": self.search.seconds,
            "speedup": speedup,
            "speedup_low": low,
            "speedup_high": high,
            "route": str(self.confirmed.route),
            "rel_l2": losses.get("rel_l2", 0.0),
            "outcomes": self.search.statuses,
            "ended_by": self.search.ended_by,
            "note": self.confirmed.note,
            **({"trtexec": self.trtexec} if self.trtexec else {}),
        }


def without_model(table: RouteTable, named: NamedModel) -> tuple[RouteTable, str]:
    """The table without the family of this model, and that family (empty if not in the table)."""
    card = table.card(named.model.fingerprint)
    family = card.family if card is not None else named.family
    if family not in table.families:
        return table, ""
    return table.without_families([family]), family


def run_agents(
    session: Session,
    agents: Sequence[str],
    budget: Budget,
    *,
    table: RouteTable | None = None,
    policy: LoadedPolicy | None = None,
    seed: int = 0,
    expression: str | Path | None = None,
    say: Say = silent,
    on_outcome: Callable[[str, int, Outcome], None] | None = None,
) -> Mapping[str, AgentResult]:
    """Run agents one after the other on the session's model.

    Args:
        session: Live session; all agents share its outcomes.
        agents: Agent names.
        budget: The same for each.
        table: Route table for agents that learn from one; the family of the session's model must
            not be in it (`without_model`).
        policy: Policy for `ppo`.
        seed: Seed for every agent.
        expression: As in `tune`.
        say: Hears one line an agent.
        on_outcome: Hears agent, build number and outcome.

    Returns:
        Agent name -> its row, in the order given.
    """
    searches: dict[str, Search] = {}
    gate = session.config.gate
    replay = Replay(table, gate) if table is not None else None
    for name in dict.fromkeys(agents):
        problem = make_problem(
            session, name, budget.max_builds, seed, expression=expression, say=say
        )
        agent = make_agent(name, problem, replay=replay, policy=policy)
        say(f"agent {name}")
        searches[name] = run_search(
            session,
            agent,
            budget,
            use_incumbent=False,
            on_outcome=_bind(on_outcome, name),
        )
    say("confirming each winner with fresh builds and other inputs")
    answers: dict[tuple[Route, ...], Confirmed] = {}
    rows = {}
    for name, search in searches.items():
        promising = search.promising()
        key = tuple(outcome.route for outcome in promising)[:1]
        if key not in answers:
            answers[key] = confirm_best(session, promising)
        line = trial_line(session.catalog.name, session.config.options, answers[key].route)
        rows[name] = AgentResult(name, search, answers[key], line)
    return rows


def compare(
    named: NamedModel,
    agents: Sequence[str],
    budget: Budget,
    config: SessionConfig,
    out: Path,
    *,
    table: str | None = None,
    policy: str | None = None,
    seed: int = 0,
    expression: str | Path | None = None,
    say: Say = silent,
    on_outcome: Callable[[str, int, Outcome], None] | None = None,
) -> Mapping[str, AgentResult]:
    """Compare agents on a model and write `comparison.json` into `out`.

    Args:
        named: The model and its family.
        agents: Agent names.
        budget: The same for each.
        config: Session settings.
        out: Folder for the records and the result; repeating the command continues there.
        table: Route table by name or path; the backend's released one when None.
        policy: Policy by name or path; the backend's released one when None.
        seed: Seed for every agent.
        expression: As in `tune`.
        say: Hears remarks.
        on_outcome: Hears agent, build number and outcome.
    """
    known, loaded = _sources(named, agents, config.backend, table, policy, say)
    folder = out
    with (
        Output(out) as output,
        RecordStore(folder / "records.sqlite") as store,
        Session(named.model, config, store, folder / "work") as session,
    ):
        output.keep()
        rows = run_agents(
            session,
            agents,
            budget,
            table=known,
            policy=loaded,
            seed=seed,
            expression=expression,
            say=say,
            on_outcome=on_outcome,
        )
    facts = manifest(seed=seed, gate={"metric": config.gate.metric, "limit": config.gate.limit})
    write_json(
        folder / "comparison.json",
        {
            "model": named.model.name,
            "fingerprint": named.model.fingerprint,
            "max_builds": budget.max_builds,
            "agents": {name: row.as_json() for name, row in rows.items()},
            "manifest": facts,
        },
    )
    return rows


def _sources(
    named: NamedModel,
    agents: Sequence[str],
    backend: str,
    table: str | None,
    policy: str | None,
    say: Say,
) -> tuple[RouteTable | None, LoadedPolicy | None]:
    """The table and the policy the agents need, stripped of the model's family."""
    from routepilot.agents.policy import load_policy

    known = loaded = None
    family = ""
    released = released_name(backend)
    if any(name in NEEDS_TABLE for name in agents):
        known, family = without_model(load_table(find_table(table or released)), named)
    if "ppo" in agents:
        if policy is None and released not in released_policies():
            raise PolicyError(f"no policy is released for {backend}; give one with --policy")
        loaded = load_policy(find_policy(policy or released))
        card = loaded.replay.table.card(named.model.fingerprint)
        family = card.family if card is not None else family
        if card is not None:
            loaded = load_policy(find_policy(policy or released), without=(family,))
            say(f"the policy was trained on {named.model.name}: only its surrogate can forget that")
    if family:
        say(f"the family {family} is left out of what agents know, since it is the model's own")
    return known, loaded


def _bind(
    on_outcome: Callable[[str, int, Outcome], None] | None, name: str
) -> Callable[[int, Outcome], None] | None:
    if on_outcome is None:
        return None
    return lambda number, outcome: on_outcome(name, number, outcome)
