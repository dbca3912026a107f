"""Measuring on a Ray cluster: slots on its nodes, and what happens when one is lost.

Owns the driver's end: the connection, the resources of a slot, the slots' lives, and the proxy that
a session asks as it asks a worker of its own. The session stays here with the one store: a slot
builds and times, and forgets. Needs the extra `ray`.

A lost process or node is a fault of the infrastructure: the slot is made anew, on whatever node has
room, and asked the one thing that was not answered. What a candidate does to its own process is an
outcome and is never tried again for that (`env/worker.py`).
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routepilot import __version__
from routepilot.env.backends.base import Target
from routepilot.env.backends.layers import Layers
from routepilot.env.errors import InputError, LostSlotError, MachineError, MissingExtraError
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Catalog, Route
from routepilot.env.worker import raise_reported
from routepilot.training.cluster_slot import ClusterSlot, read_files, write_files
from routepilot.training.session import Say, SessionConfig, silent
from routepilot.training.slots import Needs, Slot, SlotPool, device_option, read_needs

#: Slots lost in a row over one request before the model is left for another run.
MAX_LOSSES = 3

#: Seconds that a cluster's address may take to answer.
CONNECT_SECONDS = 10.0

#: Seconds to wait for a node with room for a slot.
PLACE_SECONDS = 600.0


def import_ray() -> Any:
    """Ray.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            f"--ray needs the package ray ({error}); pip install 'routepilot[ray]'"
        ) from None
    return ray


@contextmanager
def connected(address: str, workers: int | None = None) -> Iterator[Any]:
    """Ray, connected to a cluster for as long as the block lasts.

    Args:
        address: `local` starts a cluster of this machine's cores; `auto` finds the one that runs
            here; else a cluster's address. A connection that is there already is used and kept.
        workers: With `local`: cores to offer, all when None.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: There is no such cluster.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    _require_listener(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told of a local cluster
    try:
        if address == "local":
            ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        words = " ".join(str(error).split())[:200]
        raise InputError(
            f"Ray cluster {address!r} cannot be reached ({words}); give local, auto or HOST:PORT"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Refuse an address where nothing listens, which Ray tries to reach for a quarter of an hour.

    Raises:
        InputError: Nothing does.
    """
    found = re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)", address)
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"Ray cluster {address!r} cannot be reached ({error}); give local, auto or HOST:PORT"
        ) from None


@dataclass
class Cluster:
    """The slots of one run on a cluster.

    Attributes:
        ray: Ray, connected.
        config: Session settings of the run.
        needs: Resources of a slot.
        say: Hears of lost slots.
        place_seconds: How long a slot may wait for a node.
        slot_class: What a slot is on its node.
    """

    ray: Any
    config: SessionConfig
    needs: Needs
    say: Say = silent
    place_seconds: float = PLACE_SECONDS
    slot_class: type[ClusterSlot] = ClusterSlot

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._places: list[ClusterPlace] = []
        self._facts: tuple[Catalog, Target] | None = None
        #: Slots lost so far.
        self.losses = 0

    def room(self) -> int:
        """How many slots the nodes that are there now hold."""
        nodes = self.ray.nodes()
        return sum(self.needs.fitting(n["Resources"]) for n in nodes if n["Alive"])

    def slots(self, workers: int | None) -> tuple[Slot, ...]:
        """Slots for the workers of a run, as many as there is room for when None.

        Raises:
            InputError: No node has room for one, or fewer than one is asked for.
        """
        if workers is not None and workers < 1:
            raise InputError(f"{workers} workers are not allowed; give 1 or more")
        count = workers or self.room()
        if not count:
            wanted = ", ".join(f"{name}={amount:g}" for name, amount in self.needs.by_name.items())
            raise InputError(
                f"no node of the Ray cluster has room for a slot of {wanted}; ask for less with"
                " --slot, or give --workers to wait for nodes that are to come"
            )
        self._places = [ClusterPlace(self) for _ in range(count)]
        return tuple(Slot(place=place) for place in self._places)

    def close(self) -> None:
        """Give every slot back."""
        for place in self._places:
            place.close()

    def start(self) -> Any:
        """A new slot on some node, checked to be like the others; a handle of its process.

        Raises:
            LostSlotError: No node had room in time, or the slot went at once.
            InputError: It has another version of RoutePilot, or another target.
        """
        pin = device_option(self.config.backend, self.config.options) is None
        pin = pin and self.config.options.get("threads", "1") == "1"
        actor = (
            self.ray.remote(self.slot_class)
            .options(
                num_cpus=self.needs.cpus,
                num_gpus=self.needs.gpus,
                resources=dict(self.needs.custom),
                max_restarts=0,
                scheduling_strategy="SPREAD",
            )
            .remote(self.config.backend, dict(self.config.options), pin, self._share())
        )
        try:
            facts = self.ray.get(actor.describe.remote(), timeout=self.place_seconds)
        except self.ray.exceptions.RayTaskError as error:
            raise MachineError(f"a slot cannot start: {_last_line(error)}") from None
        except self.ray.exceptions.RayError as error:
            self.ray.kill(actor)
            raise LostSlotError(
                f"no node took a slot within {self.place_seconds:.0f} s ({_last_line(error)})"
            ) from None
        try:
            self._check(facts)
        except BaseException:
            self.ray.kill(actor)
            raise
        return actor

    def facts(self) -> tuple[Catalog, Target]:
        """Catalog and target of the run, which the first slot decides."""
        assert self._facts is not None, "no slot was started"
        return self._facts

    def _check(self, facts: Mapping[str, Any]) -> None:
        if facts["version"] != __version__:
            raise InputError(
                f"a node has RoutePilot {facts['version']} and this is {__version__}; install one"
                " version on all nodes"
            )
        if "error" in facts:
            raise_reported(facts)
        with self._lock:
            if self._facts is None:
                self._facts = facts["catalog"], facts["target"]
            difference = self._facts[1].difference(facts["target"])
        if difference:
            raise InputError(
                f"the cluster has slots of two targets: {difference}; keep to one with a custom"
                " resource of its nodes, e.g. --slot h200=1"
            )

    def _share(self) -> float:
        """Part of a node that a slot takes, by the scarcest resource of the smallest node."""
        counts = [self.needs.fitting(n["Resources"]) for n in self.ray.nodes() if n["Alive"]]
        return 1 / max([1, *counts])


class ClusterPlace:
    """A slot as sessions see it: one after another uses the same process on a node.

    Args:
        cluster: The run's cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._actor: Any = None

    def describe(self) -> tuple[Catalog, Target]:
        """Catalog and target; see `session.Place`."""
        self.actor()
        return self.cluster.facts()

    def worker(self, model: Model, config: SessionConfig) -> ClusterWorker:
        """A worker for a model; see `session.Place`."""
        return ClusterWorker(self, model, config)

    def actor(self) -> Any:
        """The process on a node, started when there is none."""
        if self._actor is None:
            self._actor = self.cluster.start()
        return self._actor

    def lose(self) -> None:
        """Forget a process that does not answer."""
        if self._actor is not None:
            self.cluster.ray.kill(self._actor)
            self.cluster.losses += 1
        self._actor = None

    def close(self) -> None:
        """Give the slot back."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        ray = self.cluster.ray
        try:
            ray.get(actor.close.remote(), timeout=30)
        except ray.exceptions.RayError:
            pass
        ray.kill(actor)


class ClusterWorker:
    """A worker on a node, asked as one of this machine is (`env.worker.RouteWorker`).

    Args:
        place: Its slot.
        model: Prepared model; its files travel with it.
        config: Session settings.
    """

    def __init__(self, place: ClusterPlace, model: Model, config: SessionConfig) -> None:
        self._place, self._model, self._config = place, model, config
        self._ray = place.cluster.ray
        self._files: Any = None
        self._actor: Any = None
        self._sent: set[str] = set()
        self.deadline_seconds = config.deadline_seconds
        #: Nothing is hidden from who waits: a slot starts its child when it is asked.
        self.starting_seconds = 0.0
        self.is_starting = False
        self.stray_flags: str | None = None

    def close(self) -> None:
        """Let go of the model; the slot stays for the next."""
        self._files = self._actor = None

    def wake(self) -> None:
        """Nothing to do: the slot may be far, and is asked soon enough."""

    def default_outcome(self) -> Outcome:
        """As `Worker.default_outcome`."""
        return self._value("default_outcome")  # type: ignore[no-any-return]

    def trial(
        self,
        route: Route,
        *,
        incumbent_log_speedup: float | None = None,
        known: Mapping[str, Outcome] | None = None,
    ) -> Outcome:
        """As `Worker.trial`; of what is known, only what the slot was not told yet travels."""

        def request(actor: Any) -> Any:
            new = {d: outcome for d, outcome in (known or {}).items() if d not in self._sent}
            self._sent.update(new)
            return actor.trial.remote(self.deadline_seconds, route, incumbent_log_speedup, new)

        return self._ask(request)["value"]  # type: ignore[no-any-return]

    def confirm(self, route: Route, save_to: Path | None = None) -> Outcome:
        """As `Worker.confirm`; the engine's files come over the network."""
        answer = self._ask(
            lambda actor: actor.confirm.remote(self.deadline_seconds, route, save_to is not None)
        )
        if save_to is not None:
            write_files(save_to, answer["files"])
        return answer["value"]  # type: ignore[no-any-return]

    def control(self) -> Outcome:
        """As `Worker.control`."""
        return self._value("control")  # type: ignore[no-any-return]

    def layers(self, route: Route, inferences: int = 20) -> Layers | None:
        """As `Worker.layers`."""
        return self._value("layers", route, inferences)  # type: ignore[no-any-return]

    def noise_floor(self) -> float:
        """As `Worker.noise_floor`."""
        return float(self._value("noise_floor"))

    def _value(self, method: str, *args: Any, **kwargs: Any) -> Any:
        deadline = self.deadline_seconds
        return self._ask(lambda actor: actor.call.remote(method, deadline, *args, **kwargs))[
            "value"
        ]

    def _ask(self, request: Callable[[Any], Any]) -> dict[str, Any]:
        """What the slot answers; asked again, elsewhere, when the slot is lost on the way.

        Raises:
            LostSlotError: No other slot could be had.
            MachineError: `MAX_LOSSES` slots went over this one request.
        """
        lost = ""
        for _ in range(MAX_LOSSES):
            try:
                actor = self._ready()
                return self._answer(request(actor))
            except self._ray.exceptions.RayTaskError as error:
                raise MachineError(f"a slot failed: {_last_line(error)}") from None
            except self._ray.exceptions.RayError as error:
                lost = _last_line(error)
                self._actor = None
                self._place.lose()
                self._place.cluster.say(
                    f"a slot was lost with {self._model.name} ({lost}); asking another"
                )
        raise MachineError(
            f"{MAX_LOSSES} slots in a row were lost over one build of {self._model.name} ({lost});"
            " repeat the command to try again"
        )

    def _ready(self) -> Any:
        """The slot's process, with this model open in it."""
        actor = self._place.actor()
        if self._actor is not actor:
            if self._files is None:
                self._files = self._ray.put(read_files(self._model.folder))
            settings = {
                "gate": self._config.gate,
                "plan": self._config.plan,
                "deadline_seconds": self.deadline_seconds,
                "memory_limit_bytes": self._config.memory_limit_bytes,
            }
            self.stray_flags = self._answer(actor.open.remote(self._files, settings))["value"]
            self._actor, self._sent = actor, set()
        return actor

    def _answer(self, reference: Any) -> dict[str, Any]:
        """Wait as long as any answer can take; then the slot counts as lost."""
        # A killed child is replaced, builds the default and is asked again: six deadlines at most.
        longest = 6 * self.deadline_seconds + 6 * self._config.plan.max_seconds + 60
        answer: dict[str, Any] = self._ray.get(reference, timeout=longest)
        if "error" in answer:
            raise_reported(answer)
        return answer


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


@contextmanager
def cluster_slots(
    address: str, config: SessionConfig, needs: str | None, workers: int | None, say: Say = silent
) -> Iterator[SlotPool]:
    """Slots on a Ray cluster for as long as the block lasts.

    Args:
        address: As `connected` takes it.
        config: Session settings of the run.
        needs: Resources of a slot, as `read_needs` takes them.
        workers: How many slots; as many as there is room for when None.
        say: Hears of lost slots.
    """
    wanted = read_needs(needs, config.backend, config.options)
    with connected(address, workers) as ray:
        cluster = Cluster(ray, config, wanted, say)
        slots = cluster.slots(workers)
        try:
            yield SlotPool(slots, lambda: {"cluster": _facts(cluster, len(slots))})
        finally:
            cluster.close()


def _facts(cluster: Cluster, slots: int) -> dict[str, object]:
    """What a manifest says of a cluster."""
    nodes = [node for node in cluster.ray.nodes() if node["Alive"]]
    return {
        "ray": str(cluster.ray.__version__),
        "nodes": len(nodes),
        "slots": slots,
        "slot": cluster.needs.by_name,
        "lost_slots": cluster.losses,
    }
