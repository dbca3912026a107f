"""Slots: where engines are built and timed, one worker at a time in each.

Owns how this machine is divided among the workers of a run: a core each for engines that run on
processors, the GPUs in turn for engines that run there. What a slot of a cluster is, `cluster.py`
knows.

Several workers may share a GPU. One at a time holds the device's lock while it times, or while its
compiler uses the device (`env/gpu_timing.py`); the others transform models, start children and
compile meanwhile.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from routepilot.env.backends import load_backend
from routepilot.env.backends.base import Target
from routepilot.env.errors import InputError, LostSlotError, MachineError
from routepilot.env.routes import Catalog
from routepilot.env.wording import counted, verb
from routepilot.training.session import Place, Say, SessionConfig, silent

_Item = TypeVar("_Item")

#: Backends whose engines run on a GPU -> their option for its number.
DEVICE_OPTIONS = {
    "cuda": "device",
    "inductor": "index",
    "tensorrt": "device",
    "tensorrt_rtx": "device",
}


@dataclass(frozen=True)
class Slot:
    """A place for one worker.

    Attributes:
        cpu: Core its child is pinned to; None leaves it free.
        options: Backend options of this slot alone, e.g. the number of its GPU.
        place: Where it is, when it is not on this machine.
    """

    cpu: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    place: Place | None = None

    def fit(self, config: SessionConfig) -> SessionConfig:
        """Session settings for a worker in this slot."""
        return replace(config, cpu=self.cpu, options={**config.options, **self.options})


@dataclass(frozen=True)
class SlotPool:
    """The slots of a run.

    Attributes:
        slots: The slots.
        facts: What the manifest says of them when all is done.
    """

    slots: tuple[Slot, ...]
    facts: Callable[[], dict[str, object]] = dict

    def compiler(self, config: SessionConfig) -> tuple[Catalog, Target]:
        """Catalog and target of the compiler in the slots."""
        if self.slots[0].place is not None:
            return self.slots[0].place.describe()
        compiler = load_backend(config.backend, config.options)
        return compiler.catalog(), compiler.target()


@contextmanager
def measuring_slots(
    config: SessionConfig,
    workers: int | None,
    *,
    cores: Sequence[int] | None = None,
    ray: str | None = None,
    needs: str | None = None,
    say: Say = silent,
) -> Iterator[SlotPool]:
    """The slots of `--workers`, `--ray` and `--slot`, for as long as the block lasts.

    Args:
        config: Session settings of the run.
        workers: How many; when None one here, and as many as there is room for on a cluster.
        cores: Core of each, on this machine; the first ones when None.
        ray: A Ray cluster, `local`, `auto` or its address; None measures on this machine.
        needs: Resources of a slot of the cluster.
        say: Hears of lost slots.

    Raises:
        InputError: Options that do not go together, or that the machine or the cluster cannot meet.
    """
    if ray is None and needs is not None:
        raise InputError("--slot says what a slot of a cluster takes; give --ray with it")
    if ray is None:
        count = 1 if workers is None else workers
        yield SlotPool(local_slots(config.backend, config.options, count, cores=cores))
        return
    from routepilot.training.cluster import cluster_slots

    with cluster_slots(ray, config, needs, workers, say) as pool:
        yield pool


def device_option(backend: str, options: Mapping[str, str]) -> str | None:
    """The backend's option that numbers GPUs; None when its engines run on processors."""
    if backend == "inductor" and options.get("device") == "cpu":
        return None
    return DEVICE_OPTIONS.get(backend)


def local_slots(
    backend: str,
    options: Mapping[str, str],
    workers: int,
    *,
    gpus: int | None = None,
    cores: Sequence[int] | None = None,
) -> tuple[Slot, ...]:
    """Slots of this machine.

    Args:
        backend: Backend name.
        options: Backend options; `threads` is how many an engine may use. One that names a GPU
            keeps every worker there.
        workers: How many slots.
        gpus: GPUs of this machine; counted when None.
        cores: Cores to pin to, one a worker; the first ones when None.

    Returns:
        `workers` slots: pinned to a core each when engines run on one thread, unpinned when they
        run on several, on GPU 0, 1 ... in turn where they run on GPUs.

    Raises:
        InputError: Fewer than one worker, more than the cores allow, or cores that are not here,
            not one a worker, or of no use to engines of several threads or on GPUs.
    """
    if workers < 1:
        raise InputError(f"{workers} workers are not allowed; give 1 or more")
    here = sorted(os.sched_getaffinity(0))
    device = device_option(backend, options)
    threads = int(options.get("threads", "1")) if device is None else 1
    if workers * threads > len(here):
        raise InputError(
            f"{counted(workers, 'worker')} of {counted(threads, 'thread')}"
            f" {verb(workers, 'needs', 'need')} {counted(workers * threads, 'core')} and there"
            f" {verb(len(here), 'is', 'are')} {len(here)}; lower"
            f" {'--workers' if workers > 1 else '--threads'}"
        )
    if cores is not None:
        if not set(cores) <= set(here):
            raise InputError(f"cores {list(cores)} are not all of this machine; it has {here}")
        if len(set(cores)) != workers or threads > 1 or device is not None:
            raise InputError(
                f"cores {list(cores)} are for {counted(workers, 'worker')} of"
                f" {counted(threads, 'thread')}; name one core"
                " for each worker of one thread on processors"
            )
    if device is None:
        pinned = list(cores or here[:workers]) if threads == 1 else [None] * workers
        return tuple(Slot(cpu=core) for core in pinned)
    if device in options:
        return (Slot(),) * workers
    from routepilot.env.gpu_timing import count_devices

    there = count_devices() if gpus is None else gpus
    return tuple(Slot(options={device: str(i % max(1, there))}) for i in range(workers))


def read_cores(text: str) -> list[int]:
    """The cores of `--cores 2,3`.

    Raises:
        InputError: The text is not of that form.
    """
    given = [item.strip() for item in text.split(",")]
    if not all(item.isascii() and item.isdigit() for item in given):
        raise InputError(f"--cores {text!r} is not of the form 2,3")
    return [int(item) for item in given]


@dataclass(frozen=True)
class Needs:
    """Resources that a slot takes on its node.

    Attributes:
        cpus: Cores.
        gpus: GPUs; a part of one where slots share it.
        custom: Ray's custom resources by name.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, float]:
        """What is needed, by Ray's names."""
        named = {"CPU": self.cpus, "GPU": self.gpus, **self.custom}
        return {name: amount for name, amount in named.items() if amount > 0}

    def fitting(self, node: Mapping[str, float]) -> int:
        """How many such slots a node with these resources holds."""
        if not self.by_name:
            return 0
        return int(min(node.get(name, 0.0) / amount for name, amount in self.by_name.items()))


def read_needs(text: str | None, backend: str, options: Mapping[str, str]) -> Needs:
    """The resources of `--slot CPU=2,GPU=0.5,h200=1`, what is not named as the backend wants it.

    A slot takes as many cores as an engine has threads, and one GPU where engines run there.

    Raises:
        InputError: The text is not of that form.
    """
    on_gpu = device_option(backend, options) is not None
    found: dict[str, float] = {
        "CPU": 1.0 if on_gpu else float(options.get("threads", "1")),
        "GPU": float(on_gpu),
    }
    for item in (text or "").split(","):
        name, equals, value = item.strip().partition("=")
        try:
            amount = float(value) if equals else math.nan
        except ValueError:
            amount = math.nan
        if item.strip() and not (name and 0 <= amount < math.inf):
            raise InputError(
                f"--slot {item.strip()!r} is not of the form NAME=AMOUNT; give for instance"
                " CPU=2,GPU=0.5"
            )
        if item.strip():
            found[name] = amount
    custom = {name: amount for name, amount in found.items() if name not in ("CPU", "GPU")}
    needs = Needs(found["CPU"], found["GPU"], custom)
    if not needs.by_name:
        raise InputError(f"--slot {text!r} takes nothing; give at least one resource")
    return needs


def share_out(
    items: Iterable[_Item],
    slots: Sequence[Slot],
    work: Callable[[Slot, _Item], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Have each item worked on in one of the slots, one at a time in each, in threads.

    A slot of a cluster that is lost for good gives its item to the others.

    Args:
        items: What is to be done, in this order.
        slots: Where.
        work: Does one item in a slot; called from a thread of the slot.
        should_stop: Asked before every item; True leaves the rest.

    Raises:
        MachineError: All slots are lost and something is left to do.
        BaseException: What `work` raised first.
    """
    waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    sound, lost, faults = list(slots), list[LostSlotError](), list[BaseException]()

    def serve(slot: Slot) -> None:
        while not should_stop() and not faults:
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                work(slot, item)
            except LostSlotError as error:
                waiting.put(item)
                sound.remove(slot)
                lost.append(error)
                return
            except BaseException as error:
                faults.append(error)

    while sound and not waiting.empty() and not should_stop() and not faults:
        _in_threads(serve, tuple(sound))
    if faults:
        raise faults[0]
    if lost and not waiting.empty() and not should_stop():
        raise MachineError(f"every slot is lost: {lost[-1]}; repeat the command to go on")


def _in_threads(serve: Callable[[Slot], None], slots: Sequence[Slot]) -> None:
    """Call a function, which does not raise, for each slot in a thread of its own, and wait."""
    threads = [threading.Thread(target=serve, args=(slot,), daemon=True) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)
