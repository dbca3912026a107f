"""`confirm-live`: the replayed comparison once more with real builds, model by model.

Owns the live run: agents take turns on one session, so that a route two agents ask for is built
once and charged to both and none is always first; each winner is confirmed; the same agents replay
the table with the same seed, and both figures are put side by side. Agents that know the model's
family, or that of its split, are blinded as in `evaluate`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from routepilot.agents import NEEDS_TABLE, TRAINED_BY_PPO, make_factory
from routepilot.agents.base import Agent, AgentFactory
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError, ModelError
from routepilot.env.outcomes import Outcome
from routepilot.env.records import ModelCard, RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.store import RecordStore
from routepilot.training.candidates import make_problem
from routepilot.training.defaults import find_policy
from routepilot.training.evaluate import FIRST_SEEDS
from routepilot.training.files import ensure_folder, write_json
from routepilot.training.folds import Fold, folds
from routepilot.training.inputs import NamedModel
from routepilot.training.live_figures import sum_up
from routepilot.training.manifest import manifest
from routepilot.training.search import Confirmed, Search, confirm_best
from routepilot.training.session import Say, Session, SessionConfig, silent
from routepilot.training.traces import BUDGETS, Trace, trace, trace_of

#: Form of a model's result; one of another form is made again, from the same records.
FORM = 1

#: Hears model, agent, build number and outcome.
OnOutcome = Callable[[str, str, int, Outcome], None]

#: Opens a model's session; takes what `Session` takes.
OpenSession = Callable[..., Session]


@dataclass(frozen=True)
class LivePlan:
    """What is compared.

    Attributes:
        agents: Agent names.
        builds: Builds each may spend on a model, at most `max(BUDGETS)`.
        split: Split whose families are hidden, as `folds` takes it.
        policy: For `ppo`: a policy by name or path, or the folder `policies` of an evaluation.
        free: Let agents ask for any legal route. Otherwise, where the table has the model, only
            for the routes on record there, as in replay.
        seed: Search seed, counted as in `evaluate`.
    """

    agents: tuple[str, ...]
    builds: int = 8
    split: str | None = None
    policy: str | None = None
    free: bool = False
    seed: int = 0


def confirm_live(
    models: Sequence[NamedModel],
    table: RouteTable,
    plan: LivePlan,
    config: SessionConfig,
    out: Path,
    *,
    say: Say = silent,
    on_outcome: OnOutcome | None = None,
    open_session: OpenSession = Session,
    at_once: int = 1,
) -> dict[str, Any]:
    """Run the comparison live; repeating it goes on where it was.

    Builds on record are not made again, and a model that is done is not touched.

    Args:
        models: The models, with families.
        table: What agents learn from, and what is replayed.
        plan: What is compared.
        config: Session settings.
        out: Folder for records and results, one folder a model.
        say: Hears one line a model.
        on_outcome: Hears every build.
        open_session: Makes sessions whose builds do not disturb another's timing, where several
            models are served at once.
        at_once: Models at once, each in a thread of its own.

    Returns:
        `models`, each with its rows by agent; `given_up`, model -> why its default cannot be tuned;
        `sums` (see `live_figures.py`), settings and manifest.

    Raises:
        InputError: The builds are too many or none, or a model is not of the split.
        ModelError: No model could be tuned.
    """
    if not 1 <= plan.builds <= max(BUDGETS):
        raise InputError(f"{plan.builds} builds were asked for; give 1 to {max(BUDGETS)}")
    ensure_folder(out)
    homes = [_fold(table, named, plan.split) for named in models]
    given_up: dict[str, str] = {}

    def serve(named: NamedModel, fold: Fold) -> dict[str, Any] | None:
        settings = _settings(named, table, plan, config, fold)
        folder = out / f"{_plain(named.model.name)}-{named.model.fingerprint[:8]}"
        found = _finished(folder / "live.json", settings)
        if found is None:
            say(f"model {named.model.name}{_unknown(table, named)}")
            live = _Live(named, table, plan, config, fold, open_session)
            try:
                rows = live.run(folder, say, on_outcome)
            except ModelError as error:
                say(f"given up: {error}")
                given_up[named.model.name] = str(error)
                return None
            found = {"settings": settings, **rows}
            write_json(folder / "live.json", found)
        return {name: value for name, value in found.items() if name != "settings"}

    if at_once > 1:
        with ThreadPoolExecutor(at_once) as pool:
            served = list(pool.map(serve, models, homes))
    else:
        served = [serve(named, fold) for named, fold in zip(models, homes, strict=True)]
    done = [found for found in served if found is not None]
    if not done:
        raise ModelError(f"no model could be tuned: {'; '.join(given_up.values())}")
    return {
        "agents": list(plan.agents),
        "sums": sum_up(done, plan.seed),
        "builds": plan.builds,
        "budgets": [b for b in BUDGETS if b <= plan.builds],
        "split": plan.split or "leave one family out",
        "candidates": "any legal route" if plan.free else "routes on record",
        "models": done,
        "given_up": given_up,
        "manifest": manifest(seed=plan.seed, gate=asdict(config.gate)),
    }


class _Live:
    """One model: its agents, live and replayed."""

    def __init__(
        self,
        named: NamedModel,
        table: RouteTable,
        plan: LivePlan,
        config: SessionConfig,
        fold: Fold,
        open_session: OpenSession,
    ) -> None:
        self._named, self._plan, self._config = named, plan, config
        self._open = open_session
        self._replay = Replay(table, config.gate)
        self._card = _card(table, named)
        known = self._replay.without_families(fold.hidden)
        self._saw: dict[str, bool] = {}
        self._factories = {name: self._factory(name, known, fold) for name in plan.agents}
        self._seed = FIRST_SEEDS[plan.split] + plan.seed
        if self._card is not None:
            names = [m.card.fingerprint for m in self._replay]
            self._seed += 1000 * names.index(self._card.fingerprint)

    def run(self, folder: Path, say: Say, on_outcome: OnOutcome | None) -> dict[str, Any]:
        """Search, confirm, replay; plain data."""
        named, builds = self._named, self._plan.builds
        with (
            RecordStore(ensure_folder(folder) / "records.sqlite") as store,
            self._open(
                named.model,
                self._config,
                store,
                folder / "work",
                family=named.family,
                trained=named.trained,
            ) as session,
        ):
            asked = self._take_turns(session, say, on_outcome)
            best = self._recorded_best(session)
            gains = [o.gain for outcomes in asked.values() for o in outcomes]
            oracle = max([*gains, 0.0, *([best.gain] if best else [])])
            say("confirming each winner with fresh builds and other inputs")
            confirmed = self._confirm(session, asked)
            default = session.default().measurement
        rows = {}
        for name, outcomes in asked.items():
            live, replayed = trace_of(outcomes, oracle), self._replayed(name)
            rows[name] = {
                **_row(live, builds),
                "seconds": float(live.seconds[-1]),
                "promising": sum(o.is_feasible and o.log_speedup > 0 for o in outcomes),
                "confirmed": _answer(confirmed[name]),
                "replayed": None if replayed is None else _row(replayed, builds),
                "saw_model": self._saw.get(name, False),
            }
        return {
            "model": named.model.name,
            "fingerprint": named.model.fingerprint,
            "family": named.family if self._card is None else self._card.family,
            "trained": named.trained if self._card is None else self._card.trained,
            "default_latency_ms": default.latency_ms if default else None,
            "oracle": oracle,
            "oracle_replayed": self._model_oracle(),
            "recorded_best": None
            if best is None
            else {"route": str(best.route), "status": best.status.value, "gain": best.gain},
            "agents": rows,
        }

    def _take_turns(
        self, session: Session, say: Say, on_outcome: OnOutcome | None
    ) -> dict[str, list[Outcome]]:
        """Agents ask in turn, another one first in each round; all see the same figures."""
        default = session.default()
        agents = {name: self._agent(session, name, say) for name in self._plan.agents}
        for agent in agents.values():
            agent.tell(DEFAULT_ROUTE, default)
        asked: dict[str, list[Outcome]] = {name: [] for name in agents}
        active = list(agents)
        for number in range(self._plan.builds):
            shift = number % len(agents)
            order = [*list(agents)[shift:], *list(agents)[:shift]]
            asks = {name: agents[name].ask() for name in order if name in active}
            routes = {name: route for name, route in asks.items() if route is not None}
            active = [name for name in active if name in routes]
            session.expect(list(routes.values()))
            for name, route in routes.items():
                outcome = session.outcome(route)
                agents[name].tell(route, outcome)
                asked[name].append(outcome)
                if on_outcome is not None:
                    on_outcome(self._named.model.name, name, number + 1, outcome)
        return asked

    def _agent(self, session: Session, name: str, say: Say) -> Agent:
        problem = make_problem(session, name, self._plan.builds, self._seed, say=say)
        recorded = self._recorded(session)
        if recorded:
            problem = replace(problem, candidates=recorded)
        return self._factories[name](problem)

    def _recorded(self, session: Session) -> tuple[Route, ...]:
        """The table's routes of this model that this compiler takes; none if all may be asked."""
        if self._plan.free or self._card is None:
            return ()
        model = self._replay.model(self._card.fingerprint)
        catalog = session.catalog
        return tuple(
            route
            for route in model.routes
            if all(n in catalog and catalog[n].allows(v) for n, v in route.settings)
            and catalog.is_legal(route)
        )

    def _recorded_best(self, session: Session) -> Outcome | None:
        """The table's best route built here, charged to nobody: the oracle should know it."""
        if self._card is None:
            return None
        model = self._replay.model(self._card.fingerprint)
        if model.oracle <= 0:
            return None
        route = model.routes[int(model.gain.argmax())]
        return session.outcome(route) if session.catalog.is_legal(route) else None

    def _confirm(
        self, session: Session, asked: Mapping[str, Sequence[Outcome]]
    ) -> dict[str, Confirmed]:
        """Each agent's answer; one that two agents give is confirmed once."""
        answers: dict[tuple[Route, ...], Confirmed] = {}
        found = {}
        for name, outcomes in asked.items():
            promising = Search(name, tuple(outcomes), 0.0, "builds").promising()
            key = tuple(o.route for o in promising)[:1]
            if key not in answers:
                answers[key] = confirm_best(session, promising)
            found[name] = answers[key]
        return found

    def _replayed(self, name: str) -> Trace | None:
        if self._card is None:
            return None
        model = self._replay.model(self._card.fingerprint)
        factory = self._factories[name]
        return trace(factory, self._replay, model, self._seed, self._plan.builds)

    def _model_oracle(self) -> float | None:
        return None if self._card is None else self._replay.model(self._card.fingerprint).oracle

    def _factory(self, name: str, known: Replay, fold: Fold) -> AgentFactory:
        if name not in TRAINED_BY_PPO:
            return make_factory(name, replay=known if name in NEEDS_TABLE else None)
        from routepilot.agents.policy import load_policy

        path = policy_for(self._plan.policy, fold, self._plan.split)
        loaded = load_policy(path, without=fold.hidden)
        self._saw[name] = self._card is not None and self._card.name in loaded.card.models
        return make_factory(name, policy=loaded)


def policy_for(policy: str | None, fold: Fold, split: str | None) -> Path:
    """The policy that judges a fold.

    Args:
        policy: Name or path of one policy, or the folder `policies` of an evaluation.
        fold: The fold.
        split: Its split.

    Raises:
        InputError: None was named, or the folder has none for the fold.
    """
    if policy is None:
        raise InputError("agent ppo needs a policy; give one with --policy")
    name = f"for-{split}" if split else (fold.judged or ("",))[0]
    inside = Path(policy) / name / "policy.safetensors"
    return inside if name and inside.is_file() else find_policy(policy)


def _fold(table: RouteTable, named: NamedModel, split: str | None) -> Fold:
    """What is hidden while this model is tuned; a model of the same name is of the same family."""
    card = table.card(named.model.fingerprint) or table.card(named.model.name)
    family = named.family if card is None else card.family
    plan = folds(table.families, split)
    for fold in plan:
        if family in fold.judged:
            return fold
    if split is not None:
        raise InputError(
            f"model {named.model.name!r} is of the family {family}, which is not in the split"
            f" {split!r}; that has {', '.join(plan[0].judged)}"
        )
    return Fold((), ())


def _card(table: RouteTable, named: NamedModel) -> ModelCard | None:
    """The table's card of the model, if its default was measured there."""
    card = table.card(named.model.fingerprint)
    measured = card is not None and DEFAULT_ROUTE in table.outcomes.get(card.fingerprint, {})
    return card if measured else None


def _row(found: Trace, builds: int) -> dict[str, Any]:
    """Gains of one run, and what it took."""
    to_95 = found.builds_to_95
    return {
        "builds": found.builds,
        "gains": {str(b): float(found.gains[b - 1]) for b in BUDGETS if b <= builds},
        "builds_to_95": to_95 if math.isfinite(to_95) else None,
    }


def _answer(confirmed: Confirmed) -> dict[str, Any]:
    speedup, low, high = confirmed.speedup
    losses = confirmed.outcome.losses if confirmed.outcome else {}
    return {
        "route": str(confirmed.route),
        "speedup": speedup,
        "speedup_low": low,
        "speedup_high": high,
        "rel_l2": losses.get("rel_l2", 0.0),
        "note": confirmed.note,
    }


def _settings(
    named: NamedModel, table: RouteTable, plan: LivePlan, config: SessionConfig, fold: Fold
) -> dict[str, Any]:
    """What a finished model must have been run with to be taken as it is."""
    policy = ""
    if TRAINED_BY_PPO & set(plan.agents):
        path = policy_for(plan.policy, fold, plan.split)
        policy = hashlib.sha256(path.read_bytes()).hexdigest()
    told = json.dumps(
        [asdict(config.gate), asdict(config.plan), dict(config.options), config.deadline_seconds],
        sort_keys=True,
    )
    return {
        "form": FORM,
        "fingerprint": named.model.fingerprint,
        "plan": {**asdict(plan), "agents": list(plan.agents), "policy": policy},
        "backend": config.backend,
        "session": hashlib.sha256(told.encode()).hexdigest(),
        "target": table.target.key,
        "hidden": list(fold.hidden),
        "outcomes": sum(len(o) for routes in table.outcomes.values() for o in routes.values()),
    }


def _finished(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is on record for a model, if it was run just so."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = isinstance(found, dict) and found.get("settings") == settings
    return found if same else None


def _unknown(table: RouteTable, named: NamedModel) -> str:
    """Why a model cannot be replayed; empty when it can."""
    if _card(table, named) is not None:
        return ""
    other = table.card(named.model.name) is not None
    return ": the table has " + ("another one of this name" if other else "no such model")


def _plain(name: str) -> str:
    """A name as part of a folder's name."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)[:60]
