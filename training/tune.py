"""`tune`: the main job. One model in, the fastest confirmed route within a budget out.

Owns the order of a tuning run and its result. The words on the screen belong to `cli.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from routepilot.agents import make_agent
from routepilot.agents.base import Agent, Expecting, Problem
from routepilot.agents.believer import BelieverAgent
from routepilot.agents.policy import LoadedPolicy
from routepilot.env.accuracy import Gate
from routepilot.env.errors import InputError, MachineError
from routepilot.env.forecast import Calibration
from routepilot.env.models import Model, prepare
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.store import RecordStore
from routepilot.env.trtexec import build_line, trial_line
from routepilot.env.wording import counted
from routepilot.training import deploy
from routepilot.training.candidates import make_problem
from routepilot.training.defaults import Policies, choose_agent
from routepilot.training.files import Output, write_json
from routepilot.training.manifest import manifest
from routepilot.training.runs import RECORDS, RESULT, Run, read_result, write_run
from routepilot.training.search import Budget, Confirmed, OnAsk, Search, confirm_best, run_search
from routepilot.training.session import Say, Session, SessionConfig, silent

#: Longest build of the default route, seconds, that is repeated for the noise floor.
CHEAP_BUILD_SECONDS = 10.0

#: The answer while nothing is confirmed yet.
UNCONFIRMED = Confirmed(DEFAULT_ROUTE, 0.0, 0.0, 0.0, None, 0, "nothing is confirmed yet")


@dataclass(frozen=True)
class TuneResult:
    """What a tuning run ended with; `as_json` is `result.json`.

    Attributes:
        model: Name of the model.
        fingerprint: Its fingerprint.
        backend: Backend name.
        target: What the figures are valid for, as plain data.
        policy: Policy or agent that chose.
        search: What it did.
        confirmed: The answer after re-measurement.
        default_latency_ms: Median latency of the default route, milliseconds.
        seconds: Wall-clock seconds of the run.
        overhead_seconds: Seconds spent neither building nor measuring.
        trtexec: Command line that builds the answer again in OUT; empty for other compilers.
        trial_line: The same for any route.
        foreseen: What the policy expected before any build: routes with calibrated chances, and the
            corpus models it reasons from; empty without a policy.
        manifest: What the figures depend on.
        state: `searching` until the answer is confirmed, then `done`.
    """

    model: str
    fingerprint: str
    backend: str
    target: Mapping[str, object]
    policy: str
    search: Search
    confirmed: Confirmed
    default_latency_ms: float
    seconds: float
    overhead_seconds: float
    trtexec: str = ""
    trial_line: Callable[[Route], str] = lambda route: ""
    foreseen: Mapping[str, object] = field(default_factory=dict)
    manifest: Mapping[str, object] = field(default_factory=dict)
    state: str = "done"

    @property
    def route(self) -> str:
        """Canonical route; empty for the default."""
        return str(self.confirmed.route)

    @property
    def is_default(self) -> bool:
        """True when nothing beat the default route."""
        return self.confirmed.route.is_default

    @property
    def speedup(self) -> float:
        """Confirmed speed-up over the default route."""
        return self.confirmed.speedup[0]

    def as_json(self) -> dict[str, object]:
        """The result as plain data."""
        speedup, low, high = self.confirmed.speedup
        losses = self.confirmed.outcome.losses if self.confirmed.outcome else {}
        return {
            "state": self.state,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "backend": self.backend,
            "target": dict(self.target),
            "policy": self.policy,
            "agent": self.search.agent,
            "route": self.route,
            "is_default": self.is_default,
            "speedup": speedup,
            "speedup_low": low,
            "speedup_high": high,
            "losses": {k: v if math.isfinite(v) else str(v) for k, v in losses.items()},
            "default_latency_ms": self.default_latency_ms,
            "builds": self.search.builds,
            "builds_total": 1 + self.search.builds + self.confirmed.builds,
            "seconds": self.seconds,
            "overhead_seconds": self.overhead_seconds,
            "outcomes": self.search.statuses,
            "ended_by": self.search.ended_by,
            "note": self.confirmed.note,
            **({"trtexec": self.trtexec} if self.trtexec else {}),
            **({"forecast": dict(self.foreseen)} if self.foreseen else {}),
            "trials": [trial_as_json(o, self.trial_line(o.route)) for o in self.search.outcomes],
            "manifest": dict(self.manifest),
        }


def trial_as_json(outcome: Outcome, trtexec: str = "") -> dict[str, object]:
    """One outcome as plain data for results and reports.

    Args:
        outcome: The outcome.
        trtexec: Command line that builds its route; left out when empty.
    """
    measured = outcome.measurement
    return {
        "route": str(outcome.route),
        "status": outcome.status.value,
        "reason": outcome.reason,
        "speedup": measured.speedup if measured else None,
        "speedup_low": math.exp(measured.low) if measured else None,
        "speedup_high": math.exp(measured.high) if measured else None,
        "latency_ms": measured.latency_ms if measured else None,
        "losses": {k: v if math.isfinite(v) else str(v) for k, v in outcome.losses.items()},
        "build_seconds": outcome.build_seconds,
        "measure_seconds": outcome.measure_seconds,
        "engine_hash": outcome.engine_hash,
        **({"trtexec": trtexec} if trtexec else {}),
    }


def tune(
    model: str | Path | Model,
    *,
    backend: str = "cpu",
    policy: str | None = None,
    agent: str | None = None,
    max_builds: int = 8,
    max_seconds: float | None = None,
    out: str | Path | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Sequence[Mapping[str, NDArray[np.generic]]] | None = None,
    gate: Gate | None = None,
    threads: int = 1,
    seed: int = 0,
    config: SessionConfig | None = None,
    until_noise: bool = False,
    expression: str | Path | None = None,
    policies: Policies | None = None,
    say: Say = silent,
    on_outcome: Callable[[int, Outcome], None] | None = None,
    on_ask: OnAsk | None = None,
) -> TuneResult:
    """Find the fastest route for one model within a budget, confirmed against the default.

    Args:
        model: ONNX file, or a prepared model.
        backend: Backend name.
        policy: Released policy by name, or a policy folder; None for the one that fits.
        agent: Choose by another agent, e.g. `random`; excludes `policy`.
        max_builds: Routes built, failures included; the default engine and the confirmation come
            on top.
        max_seconds: Seconds of building and measuring.
        out: Folder for records, `result.json`, and the winning model; a run repeated there
            continues where it was. None writes nothing but a cache.
        shapes: Shapes for dynamic inputs.
        inputs: Input sets; None generates them from `seed`.
        gate: Accuracy gate; relative L2 error below 1e-2 when None.
        threads: Threads an engine may use.
        seed: Seed of the inputs and of the agent.
        config: Finer settings; its backend, threads and gate are overridden by the arguments.
        until_noise: Stop once the agent expects less of the next build than what timing cannot
            tell apart (`TimingPlan.half_width`). Needs an agent with a belief.
        expression: trtexec's route expression (a path: a file of one); only its routes are built.
        policies: Where policies are loaded; one that is there already costs no time here.
        say: Hears one line at each phase.
        on_outcome: Hears each build's number and outcome.
        on_ask: Hears of each build before it begins, with what the agent believes of it.

    Returns:
        The confirmed answer. The default route when nothing beats it.

    Raises:
        InputError: Anything in the input that cannot be used; nothing is half-written.
    """
    start = time.monotonic()
    policies = policies or Policies()
    prepared = (
        model
        if isinstance(model, Model)
        else prepare(
            Path(model),
            shapes=shapes,
            inputs=inputs,
            seed=seed,
            meanwhile=partial(policies.foreload, backend, policy, agent),
        )
    )
    folder = Path(out) if out is not None else prepared.folder / "run"
    base = config or SessionConfig()
    smallest = base.plan.half_width if until_noise else None
    budget = Budget(max_builds, max_seconds, smallest)
    settings = replace(
        base,
        backend=backend,
        options={**base.options, "threads": str(threads)},
        gate=gate or base.gate,
    )
    with (
        Output(folder) as output,
        RecordStore(folder / RECORDS) as store,
        Session(prepared, settings, store, folder / "work") as session,
    ):
        if out is not None:
            write_run(folder, _run_of(prepared, settings, policy, agent, seed))
        session.wake()
        # Without a build there is only what is foreseen, and only a policy foresees.
        asked = "ppo" if max_builds == 0 and policy is None and agent is None else agent
        choice = choose_agent(session, policy=policy, agent=asked, policies=policies)
        say(choice.why)
        problem = make_problem(
            session, choice.agent, max_builds, seed, expression=expression, say=say
        )
        searcher = make_agent(choice.agent, problem, replay=choice.replay, policy=choice.policy)
        foreseen = _foresee(searcher, choice.policy, problem)
        if until_noise and not isinstance(searcher, Expecting):
            raise InputError(
                f"agent {searcher.name} has no expectation to stop by; drop --until-noise, or"
                " choose by a policy, two-way-gp, greedy or thompson"
            )
        say(f"default route of {prepared.name} on {backend}, {counted(threads, 'thread')}")
        output.keep()  # the child's log tells more of a default that fails
        default = session.default()
        facts = manifest(
            seed=seed,
            gate={"metric": settings.gate.metric, "limit": settings.gate.limit},
            catalog=f"{session.catalog.name} {session.catalog.version}",
            timing=asdict(settings.plan),
            allowed=list(settings.allow),
        )

        def result_of(search: Search, confirmed: Confirmed, state: str) -> TuneResult:
            seconds = time.monotonic() - start
            return TuneResult(
                model=prepared.name,
                fingerprint=prepared.fingerprint,
                backend=backend,
                target={
                    "device": session.target.device,
                    "versions": dict(session.target.versions),
                    "settings": dict(session.target.settings),
                    "key": session.target.key,
                },
                policy=choice.name,
                search=search,
                confirmed=confirmed,
                default_latency_ms=default.measurement.latency_ms if default.measurement else 0.0,
                seconds=seconds,
                overhead_seconds=seconds - session.worker_seconds,
                trtexec=build_line(session.catalog.name, settings.options, confirmed.route),
                trial_line=partial(trial_line, session.catalog.name, settings.options),
                foreseen=foreseen,
                manifest={
                    **facts,
                    **session.stray(),
                    "noise_floor": noise,
                    "fresh_builds": session.fresh_builds,
                },
                state=state,
            )

        noise: float | None = None
        so_far: list[Outcome] = []
        keeps = out is not None and not _is_answered(folder, prepared, session.target.key)

        def keep() -> None:
            if keeps:
                search = Search(searcher.name, tuple(so_far), 0.0, "running")
                write_json(folder / RESULT, result_of(search, UNCONFIRMED, "searching").as_json())

        def hear(number: int, outcome: Outcome) -> None:
            so_far.append(outcome)
            keep()
            if on_outcome is not None:
                on_outcome(number, outcome)

        keep()
        search = run_search(session, searcher, budget, on_outcome=hear, on_ask=on_ask)
        noise = _noise_floor(session)
        promising = search.promising()
        if promising:
            say("confirming the winner with fresh builds and other inputs")
        confirmed = confirm_best(
            session, promising, deploy.draft(folder) if out is not None else None
        )
        result = result_of(search, confirmed, "done")
    if out is not None:
        deploy.finish(folder, result.as_json())
        write_json(folder / RESULT, result.as_json())
    return result


def _foresee(agent: Agent, policy: LoadedPolicy | None, problem: Problem) -> dict[str, object]:
    """What a policy expects before the first build, as plain data."""
    if policy is None or problem.features is None or not isinstance(agent, BelieverAgent):
        return {}
    known = policy.surrogate_for(problem.catalog)
    calibration = Calibration(**policy.card.calibration)
    return {
        "routes": [route.as_json() for route in agent.foresee(calibration)],
        "models": [
            {"name": name, "likeness": likeness}
            for name, likeness in known.nearest(problem.features)
        ],
    }


def _noise_floor(session: Session) -> float | None:
    """The session's noise floor, log ratio; None where one more build of the default is dear.

    It costs a build of the default route, and says what a reader may make of a small speed-up.
    """
    default = session.default()
    if default.build_seconds > CHEAP_BUILD_SECONDS:
        return None
    try:
        return session.noise_floor()
    except MachineError:
        return None


def _run_of(
    model: Model, settings: SessionConfig, policy: str | None, agent: str | None, seed: int
) -> Run:
    return Run(
        str(model.folder.absolute()),
        settings.backend,
        settings.options,
        settings.gate,
        settings.deadline_seconds,
        policy,
        agent,
        seed,
    )


def _is_answered(folder: Path, model: Model, target_key: str) -> bool:
    """True when the folder holds a confirmed answer, which stands until there is another."""
    try:
        found = read_result(folder)
    except InputError:
        return False
    return (
        found.get("state") == "done"
        and found.get("fingerprint") == model.fingerprint
        and found.get("target", {}).get("key") == target_key
    )
