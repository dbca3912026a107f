"""A live session: one model on one backend, every build isolated, recorded and resumable.

Owns the path from a route to its outcome: the store first, a worker child otherwise. Knows no
agent and prints nothing; callers pass `say` to hear what is going on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from routepilot.env import probes
from routepilot.env.accuracy import Gate, check_outputs, regate
from routepilot.env.backends import load_backend
from routepilot.env.backends.base import Backend, NeedsDevice, Target
from routepilot.env.errors import InputError, RouteError, TableError
from routepilot.env.features import FEATURE_NAMES, model_features
from routepilot.env.measure import TimingPlan
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import ModelCard, Record
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route
from routepilot.env.store import RecordStore
from routepilot.env.worker import RouteWorker, Worker

Say = Callable[[str], None]
Answer = TypeVar("Answer")


def silent(_: str) -> None:
    """A `say` for callers that want no words."""


@dataclass(frozen=True)
class SessionConfig:
    """Everything that shapes a live session besides the model.

    Attributes:
        backend: Backend name.
        options: Backend options, e.g. `{"threads": "1"}`.
        gate: Accuracy gate.
        plan: Timing plan.
        deadline_seconds: Wall-clock limit of one build with its measurement.
        memory_limit_bytes: Limit on a child's resident memory; None for the worker's default.
        cpu: Core the child is pinned to; None leaves it free.
        allow: Differences of another target to overlook, e.g. `versions.onnx`: records that
            differ in nothing else answer for this target too.
    """

    backend: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)
    gate: Gate = field(default_factory=Gate)
    plan: TimingPlan = field(default_factory=TimingPlan)
    deadline_seconds: float = 120.0
    memory_limit_bytes: int | None = None
    cpu: int | None = None
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no two targets can differ in: it would be overlooked in silence.

        Raises:
            InputError: A name of `allow` is none of a target's.
        """
        for name in self.allow:
            if not Target.has(name):
                raise InputError(
                    f"--allow {name!r} is nothing that targets differ in: backend, device,"
                    " catalog_key, versions.NAME or settings.NAME; a refusal names what differs"
                )


class Place(Protocol):
    """Where engines are built and timed when that is not this machine (`cluster.py`)."""

    def describe(self) -> tuple[Catalog, Target]:
        """The catalog and the target of the compiler there."""
        ...

    def worker(self, model: Model, config: SessionConfig) -> RouteWorker:
        """A worker for a model there."""
        ...


class Session:
    """Outcomes of routes for one model, each paid for once.

    Args:
        model: Prepared model.
        config: Settings.
        store: Record store; outcomes found there under the same target are not built again.
        workdir: Folder for transforms and the children's logs.
        family: Architecture family for the model card.
        trained: Whether the weights are trained, for the model card.
        place: Where engines are built and timed; this machine when None.

    Attributes:
        backend: The compiler; None when it is elsewhere.
    """

    def __init__(
        self,
        model: Model,
        config: SessionConfig,
        store: RecordStore,
        workdir: Path,
        *,
        family: str = "unknown",
        trained: bool = True,
        place: Place | None = None,
    ) -> None:
        check_outputs(config.gate, [spec.name for spec in model.outputs])
        self.model = model
        self.config = config
        self.backend: Backend | None = None
        if place is not None:
            self.catalog, self.target = place.describe()
        else:
            self.backend = load_backend(config.backend, config.options)
            if isinstance(self.backend, NeedsDevice):
                self.backend.require_device()
            self.catalog, self.target = self.backend.catalog(), self.backend.target()
        self._store, self._place = store, place
        self._family, self._trained = family, trained
        self._worker: RouteWorker | None = None
        self._workdir = workdir
        self._known = {**self._overlooked(), **self._on_record(self.target.key)}
        self._begun_with = self._features_on_record()
        store.add_target(self.target, self.catalog)
        self.fresh_builds = 0
        self._waited = 0.0

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child; what was recorded stays."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    @cached_property
    def features(self) -> tuple[float, ...]:
        """What is known of the model before the first build.

        A run that goes on has those it began with: a probe that failed then is not tried again,
        since an agent that learned more in the middle of a search would ask for other routes.
        """
        return self._begun_with or model_features(self.model)

    @property
    def will_probe(self) -> bool:
        """Whether `features` runs the model, which may take up to `probes.DEADLINE` seconds."""
        is_known = self._begun_with is not None or "features" in vars(self)
        return not is_known and probes.are_due(self.model.folder)

    @property
    def forgoes_probes(self) -> bool:
        """Whether probes that could be tried are not, because the run began without them."""
        return self._begun_with is not None and probes.are_due(self.model.folder)

    @property
    def worker(self) -> RouteWorker:
        """The child process, started at first use."""
        if self._worker is None and self._place is not None:
            self._worker = self._place.worker(self.model, self.config)
        elif self._worker is None:
            self._worker = Worker(
                self.config.backend,
                self.config.options,
                self.model,
                self._workdir,
                gate=self.config.gate,
                plan=self.config.plan,
                deadline_seconds=self.config.deadline_seconds,
                memory_limit_bytes=self.config.memory_limit_bytes,
                cpu=self.config.cpu,
            )
        return self._worker

    @property
    def worker_seconds(self) -> float:
        """Seconds that a child was starting, building or timing."""
        return self._waited + (self._worker.starting_seconds if self._worker else 0.0)

    def wake(self) -> None:
        """Let the child start while something else is done, if it will be needed."""
        if DEFAULT_ROUTE not in self._known:
            self.worker.wake()

    def default(self) -> Outcome:
        """The default route's outcome: what every speed-up is measured against.

        Raises:
            ModelError: The default route does not build or is not accurate.
        """
        if DEFAULT_ROUTE not in self._known:
            self._keep(self._timed(self.worker.default_outcome))
        outcome = self._known[DEFAULT_ROUTE]
        latency = outcome.measurement.latency_ms if outcome.measurement else 0.0
        self._store.add_model(
            ModelCard(
                self.model.fingerprint,
                self.model.name,
                self._family,
                self._trained,
                self.features,
                latency,
            )
        )
        return outcome

    def expect(self, routes: Sequence[Route]) -> None:
        """Hear which routes will be asked for next, for a session that can build ahead."""

    def is_known(self, route: Route) -> bool:
        """True when the outcome is on record and costs no new build."""
        return route in self._known

    def outcome(self, route: Route, incumbent_log_speedup: float | None = None) -> Outcome:
        """The outcome of a route: from the store, else built, measured and recorded."""
        if route not in self._known:
            objection = self.catalog.objection(route)
            if objection is not None:
                return Outcome(route, Status.REFUSED, objection)
            known = {o.engine_hash: o for o in self._known.values() if o.engine_hash}
            self._keep(
                self._timed(
                    lambda: self.worker.trial(
                        route, incumbent_log_speedup=incumbent_log_speedup, known=known
                    )
                )
            )
        return self._known[route]

    def builds(self) -> dict[Route, tuple[Outcome, ...]]:
        """Every outcome on record by route, one a build, whether made now or earlier."""
        return self._store.outcomes(self.model.fingerprint, self.target.key)

    def again(self, route: Route, repeat: int) -> tuple[Outcome, bool]:
        """A route built and timed once more, recorded as a repeat; the default as a control.

        Args:
            route: A route with an outcome on record.
            repeat: Which repeat; one on record is not made again.

        Returns:
            The outcome, and whether it was made now.
        """
        recorded = self.builds()[route]
        if len(recorded) > repeat:
            return recorded[repeat], False
        make = self.worker.control if route.is_default else lambda: self.worker.trial(route)
        outcome = self._timed(make)
        self._store.add(
            Record(self.model.fingerprint, self.target.key, outcome, repeat, time.time())
        )
        return outcome, True

    def confirm(self, route: Route, save_to: Path | None = None) -> Outcome:
        """Fresh builds of the route and the default, other inputs, ABBA timing; not recorded."""
        return self._timed(lambda: self.worker.confirm(route, save_to))

    def stray(self) -> dict[str, str]:
        """Compiler flags that the environment held and the children were kept from."""
        flags = self.worker.stray_flags
        return {} if flags is None else {"stray_flags": flags}

    def noise_floor(self) -> float:
        """Log ratio below which two default engines cannot be told apart in this session."""
        return self._timed(self.worker.noise_floor)

    def _timed(self, call: Callable[[], Answer]) -> Answer:
        start = time.monotonic()
        try:
            return call()
        finally:
            self._waited += time.monotonic() - start

    def _keep(self, outcome: Outcome) -> None:
        self._store.add(
            Record(self.model.fingerprint, self.target.key, outcome, created=time.time())
        )
        self._known[outcome.route] = outcome
        self.fresh_builds += 1

    def _features_on_record(self) -> tuple[float, ...] | None:
        """What this model's run began with; None where it begins now, or under other features."""
        card = self._store.model(self.model.fingerprint) if DEFAULT_ROUTE in self._known else None
        return card.features if card and len(card.features) == len(FEATURE_NAMES) else None

    def _on_record(self, target_key: str) -> dict[Route, Outcome]:
        return self._reusable(self._store.outcomes(self.model.fingerprint, target_key))

    def _overlooked(self) -> dict[Route, Outcome]:
        """Outcomes of other targets that `allow` lets in; the rest is refused, never mixed.

        Raises:
            TableError: The store holds records of another target; the message names what differs.
        """
        found: dict[Route, Outcome] = {}
        for other in self._store.other_targets(self.target):
            differences = self.target.differences(other)
            refused = [name for name in differences if name not in self.config.allow]
            if refused:
                words = ", ".join(
                    f"{name} is {differences[name][0]!r} here and {differences[name][1]!r} there"
                    for name in refused
                )
                raise TableError(
                    f"record store {self._store.path.name!r} holds records of another target:"
                    f" {words}; use another folder, or overlook it with"
                    f" {' '.join(f'--allow {name}' for name in differences)}"
                )
            found.update(
                (route, outcome)
                for route, outcome in self._on_record(other.key).items()
                if self._is_ours(route)
            )
        return found

    def _is_ours(self, route: Route) -> bool:
        try:
            return self.catalog.is_legal(self.catalog.route(route.values))
        except RouteError:
            return False

    def _reusable(self, stored: Mapping[Route, tuple[Outcome, ...]]) -> dict[Route, Outcome]:
        """Stored outcomes as this session's gate sees them; untimed ones that now pass go."""
        judged = {
            route: regate(outcomes[0], self.config.gate) for route, outcomes in stored.items()
        }
        return {
            route: outcome
            for route, outcome in judged.items()
            if outcome.status is not Status.OK or outcome.measurement is not None
        }
