"""`compare`: several agents on one model at equal budgets, in one session.

Owns the fairness of the comparison: every agent is charged every build it asked for, a route that
two agents ask for is built once and shown to both, a route that two agents answer with is
confirmed once, and a table that knows the model is stripped of its family first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepilot.agents import NEEDS_POLICY, NEEDS_TABLE, check_name, make_agent, make_factory
from routepilot.agents.base import Agent, Expecting
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError, PolicyError
from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.env.routes import Route
from routepilot.env.store import RecordStore
from routepilot.env.tables import load_table
from routepilot.env.trtexec import trial_line
from routepilot.training.candidates import make_problem
from routepilot.training.defaults import find_table, policy_file, released_name
from routepilot.training.files import Output, ensure_folder, write_json
from routepilot.training.inputs import NamedModel
from routepilot.training.manifest import manifest
from routepilot.training.search import Budget, Confirmed, Search, confirm_best, run_search
from routepilot.training.session import Say, Session, SessionConfig, silent
from routepilot.training.sharing import Sharing, SharingSession
from routepilot.training.slots import Slot, SlotPool, share_out

if TYPE_CHECKING:
    from routepilot.agents.policy import LoadedPolicy

#: What an agent believes of a route: log speed-up, its standard deviation, chance to be accurate.
Belief = tuple[float, float, float]

#: Hears an agent, its build's number, the route, and what the agent believes of it.
OnAgentAsk = Callable[[str, int, Route, Belief | None], None]

#: Agents compared when none are named.
DEFAULT_AGENTS = ("default", "ppo", "fast", "random")

CONFIRMING = "confirming each winner with fresh builds and other inputs"


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
    on_ask: OnAgentAsk | None = None,
) -> Mapping[str, AgentResult]:
    """Run agents one after the other on the session's model.

    Args:
        session: Live session; all agents share its outcomes.
        agents: Agent names.
        budget: The same for each.
        table: Route table for agents that learn from one; the family of the session's model must
            not be in it (`without_model`).
        policy: Policy for `ppo` and `bc`.
        seed: Seed for every agent.
        expression: As in `tune`.
        say: Hears one line an agent.
        on_outcome: Hears agent, build number and outcome.
        on_ask: Hears agent, build number, route and what the agent believes of it.

    Raises:
        InputError: The budget ends at the noise, and no agent has an expectation to stop by.

    Returns:
        Agent name -> its row, in the order given.
    """
    replay = Replay(table, session.config.gate) if table is not None else None
    searches: dict[str, Search] = {}
    made: dict[str, Agent] = {}
    for name in dict.fromkeys(agents):
        problem = make_problem(
            session, name, budget.max_builds, seed, expression=expression, say=say
        )
        made[name] = make_agent(name, problem, replay=replay, policy=policy)
    if budget.min_gain is not None and not any(isinstance(a, Expecting) for a in made.values()):
        raise InputError(
            f"none of the agents {', '.join(made)} has an expectation to stop by; drop"
            " --until-noise, or add one of ppo, two-way-gp, greedy and thompson"
        )
    for name, agent in made.items():
        say(f"agent {name}")
        searches[name] = run_search(
            session,
            agent,
            budget,
            use_incumbent=False,
            on_outcome=partial(on_outcome, name) if on_outcome is not None else None,
            on_ask=partial(on_ask, name) if on_ask is not None else None,
        )
    say(CONFIRMING)
    answers = {key: _answer(session, found) for key, found in _answers(searches).items()}
    return _rows(searches, answers)


def run_agents_at_once(
    named: NamedModel,
    agents: Sequence[str],
    budget: Budget,
    config: SessionConfig,
    store: Path,
    workdir: Path,
    slots: Sequence[Slot],
    *,
    table: RouteTable | None = None,
    policy: LoadedPolicy | None = None,
    seed: int = 0,
    expression: str | Path | None = None,
    say: Say = silent,
    on_outcome: Callable[[str, int, Outcome], None] | None = None,
    on_ask: OnAgentAsk | None = None,
) -> Mapping[str, AgentResult]:
    """Run agents at once, each in a slot; what two ask for is built by the first.

    An agent asks and is told as in `run_agents`, so it builds the same routes; their figures come
    from several slots, each timed against a default engine of its own slot.

    Args:
        named: The model.
        agents: Agent names.
        budget: The same for each.
        config: Session settings.
        store: Record store of all.
        workdir: Folder for transforms and logs, one folder a slot.
        slots: Where to build and time.
        table: As in `run_agents`.
        policy: As in `run_agents`.
        seed: As in `run_agents`.
        expression: As in `run_agents`.
        say: Hears one line an agent, from any thread.
        on_outcome: As in `run_agents`, from any thread, one call at a time.
        on_ask: Likewise.
    """
    replay = Replay(table, config.gate) if table is not None else None
    sharing, lock = Sharing(), threading.Lock()
    searches: dict[str, Search] = {}
    answers: dict[tuple[Route, ...], tuple[Confirmed, str]] = {}

    @contextmanager
    def opened(slot: Slot) -> Iterator[Session]:
        place = workdir / f"slot{slots.index(slot)}"
        settings = slot.fit(config)
        with (
            RecordStore(store) as records,
            SharingSession(
                sharing, named.model, settings, records, place, place=slot.place
            ) as session,
        ):
            yield session

    def hear(name: str, number: int, outcome: Outcome) -> None:
        with lock:
            if on_outcome is not None:
                on_outcome(name, number, outcome)

    def hear_ask(name: str, number: int, route: Route, belief: Belief | None) -> None:
        with lock:
            if on_ask is not None:
                on_ask(name, number, route, belief)

    def search(slot: Slot, name: str) -> None:
        with opened(slot) as session:
            say(f"agent {name}")
            problem = make_problem(
                session, name, budget.max_builds, seed, expression=expression, say=say
            )
            searches[name] = run_search(
                session,
                make_agent(name, problem, replay=replay, policy=policy),
                budget,
                use_incumbent=False,
                on_outcome=partial(hear, name),
                on_ask=partial(hear_ask, name),
            )

    def confirm(slot: Slot, answer: tuple[tuple[Route, ...], list[Outcome]]) -> None:
        with opened(slot) as session:
            answers[answer[0]] = _answer(session, answer[1])

    share_out(dict.fromkeys(agents), slots, search)
    say(CONFIRMING)
    searches = {name: searches[name] for name in dict.fromkeys(agents)}
    share_out(_answers(searches).items(), slots, confirm)
    return _rows(searches, answers)


def _answers(searches: Mapping[str, Search]) -> dict[tuple[Route, ...], list[Outcome]]:
    """What is to be confirmed: fastest route -> promising outcomes of the first who found it."""
    found: dict[tuple[Route, ...], list[Outcome]] = {}
    for search in searches.values():
        found.setdefault(_key(search), search.promising())
    return found


def _answer(session: Session, promising: list[Outcome]) -> tuple[Confirmed, str]:
    """What is confirmed, and trtexec's line for it."""
    confirmed = confirm_best(session, promising)
    return confirmed, trial_line(session.catalog.name, session.config.options, confirmed.route)


def _key(search: Search) -> tuple[Route, ...]:
    return tuple(outcome.route for outcome in search.promising())[:1]


def _rows(
    searches: Mapping[str, Search], answers: Mapping[tuple[Route, ...], tuple[Confirmed, str]]
) -> Mapping[str, AgentResult]:
    return {name: AgentResult(name, s, *answers[_key(s)]) for name, s in searches.items()}


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
    on_ask: OnAgentAsk | None = None,
    pool: SlotPool | None = None,
) -> Mapping[str, AgentResult]:
    """Compare agents on a model and write `comparison.json` into `out`.

    Args:
        named: The model and its family.
        agents: Agent names.
        budget: The same for each.
        config: Session settings.
        out: Folder for the records and the result; repeating the command continues there.
        table: Route table by name or path; the backend's released one when None.
        policy: Policy by name or path; when None the backend's released one, or that for any.
        seed: Seed for every agent.
        expression: As in `tune`.
        say: Hears remarks.
        on_outcome: Hears agent, build number and outcome.
        on_ask: Hears agent, build number, route and what the agent believes of it.
        pool: Slots for agents at once; one after the other, on no particular core, when None.
    """
    for name in agents:
        check_name(name)
    known, loaded = _sources(named, agents, config.backend, table, policy, say)
    folder = out
    records, work = folder / "records.sqlite", folder / "work"
    run: Callable[..., Mapping[str, AgentResult]]
    if pool is not None:
        ensure_folder(folder)
        run = partial(run_agents_at_once, named, agents, budget, config, records, work, pool.slots)
    else:
        run = partial(_one_after_the_other, named, agents, budget, config, records, work)
    rows = run(
        table=known,
        policy=loaded,
        seed=seed,
        expression=expression,
        say=say,
        on_outcome=on_outcome,
        on_ask=on_ask,
    )
    facts = manifest(
        seed=seed,
        gate={"metric": config.gate.metric, "limit": config.gate.limit},
        **(pool.facts() if pool is not None else {}),
    )
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


def _one_after_the_other(
    named: NamedModel,
    agents: Sequence[str],
    budget: Budget,
    config: SessionConfig,
    records: Path,
    work: Path,
    **kwargs: Any,
) -> Mapping[str, AgentResult]:
    with (
        Output(records.parent) as output,
        RecordStore(records) as store,
        Session(named.model, config, store, work) as session,
    ):
        try:
            return run_agents(session, agents, budget, **kwargs)
        finally:
            if session.worker_seconds:  # something was built, or the child's log says why not
                output.keep()


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
    if any(name in NEEDS_TABLE for name in agents):
        place = find_table(table or released_name(backend))
        known, family = without_model(load_table(place), named)
    if NEEDS_POLICY & set(agents):
        path = policy_file(backend, policy, "ppo")
        if path is None:
            raise PolicyError(f"no policy is released for {backend}; give one with --policy")
        loaded = load_policy(path)
        card = loaded.model(named.model.fingerprint)
        family = card.family if card is not None else family
        if card is not None:
            loaded = load_policy(path, without=(family,))
            say(f"the policy was trained on {named.model.name}: only its surrogate can forget that")
    if "bc" in agents:
        make_factory("bc", policy=loaded)  # a policy of another kind is refused before any build
    if family:
        say(f"the family {family} is left out of what agents know, since it is the model's own")
    return known, loaded
