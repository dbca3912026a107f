"""A Ray cluster of this machine: what is lost on the way is made up for, and nothing twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_backend
import psutil
import pytest

from routepilot.env.errors import InputError
from routepilot.env.models import prepare
from routepilot.env.outcomes import Status
from routepilot.env.store import RecordStore
from routepilot.training.cluster import Cluster, Needs, read_needs
from routepilot.training.collect import CorpusModel, Progress, Repeats, collect
from routepilot.training.session import SessionConfig

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'routepilot[ray]'")

CONFIG = SessionConfig(
    backend="hostile_backend:make", options={"noise": "none", "slow": "0.15", "threads": "1"}
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes on this machine; the driver's has no room for slots."""
    from ray.cluster_utils import Cluster as LocalCluster

    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED")}
    here = str(Path(hostile_backend.__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, before["PYTHONPATH"])))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    room = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 0, **room})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    cluster.add_node(num_cpus=2, resources={"bench": 2}, object_store_memory=80 << 20)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def run(nodes: Any, tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path)
    yield found
    found.cluster.close()


class Run:
    """A collection of two small models on the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "records.sqlite"
        self.log = folder / "builds.jsonl"
        options = {**CONFIG.options, "log": str(self.log)}
        self.config = SessionConfig(backend=CONFIG.backend, options=options)
        self.said: list[str] = []
        self.cluster = Cluster(ray, self.config, Needs(1.0), self.said.append, place_seconds=60)
        self.slots = self.cluster.slots(2)
        models = [
            prepare(hostile_backend.hostile_model(folder / f"m{i}.onnx", relus=i + 1), seed=0)
            for i in range(2)
        ]
        self.corpus = [CorpusModel(model, "toys", False) for model in models]
        catalog = hostile_backend.CATALOG
        words = ["-speed=2", "-speed=0.5", "-do=segv", "-speed=1.02", "-do=nan", "-twin=b"]
        self.routes = [catalog.parse(word) for word in words]
        self.heard: list[Progress] = []

    def collect(self, **kwargs: Any) -> None:
        collect(
            self.corpus,
            self.store,
            self.config,
            self.routes,
            self.folder / "work",
            repeats=Repeats(controls=1),
            slots=self.slots,
            on_progress=self.heard.append,
            **kwargs,
        )

    def records(self) -> dict[str, list[tuple[str, Status]]]:
        with RecordStore(self.store) as store:
            (target,) = store.targets()
            return {
                e.model.fingerprint: [
                    (str(o.route), o.status)
                    for outcomes in store.outcomes(e.model.fingerprint, target.key).values()
                    for o in outcomes
                ]
                for e in self.corpus
            }

    def builds(self) -> Counter[str]:
        """How often each route was built, by the backend's own log; the default is not counted."""
        return Counter(route for _, route in self.log_lines() if route)

    def log_lines(self) -> list[tuple[int, str]]:
        """The backend's log: process and route of every build begun."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def complete(self) -> bool:
        # The default and its control, and every route once; of the crash, the outcome.
        wanted = Counter(["", "", *map(str, self.routes)])
        return all(
            Counter(route for route, _ in rows) == wanted
            and dict(rows)["-do=segv"] is Status.CRASHED
            for rows in self.records().values()
        )


def test_a_collection_ends_complete_and_a_crash_is_an_outcome(run: Run) -> None:
    run.collect()
    assert run.complete and not run.said
    assert set(run.builds().values()) == {len(run.corpus)}
    again = len(run.heard)
    run.collect()
    assert all(p.outcome is None for p in run.heard[again:])
    assert set(run.builds().values()) == {len(run.corpus)}


def test_a_slot_killed_in_a_build_is_replaced_and_only_that_build_is_made_again(run: Run) -> None:
    victims: list[int] = []
    slot = ray.get(run.slots[0].place.actor().describe.remote())["process"]

    def strike() -> None:
        """Kill the slot's process while its child builds: it logs a build before it takes time."""
        while not victims:
            for pid, route in run.log_lines()[-2:]:
                with contextlib.suppress(psutil.Error):
                    if route and psutil.Process(pid).ppid() == slot:
                        os.kill(slot, signal.SIGKILL)
                        victims.append(pid)
                        return

    assassin = threading.Thread(target=strike, daemon=True)
    assassin.start()
    run.collect()
    assassin.join(10)
    assert victims and run.cluster.losses == 1 and any("was lost" in line for line in run.said)
    assert run.complete
    # The build in flight is the only one that was begun twice.
    assert sum(run.builds().values()) == len(run.corpus) * len(run.routes) + 1
    assert not any(p.error for p in run.heard)
    assert not psutil.pid_exists(victims[0])


def test_an_interrupted_collection_goes_on(run: Run) -> None:
    run.collect(should_stop=lambda: sum(p.outcome is not None for p in run.heard) >= 3)
    assert not run.complete
    run.collect()
    assert run.complete
    assert set(run.builds().values()) == {len(run.corpus)}


def test_a_lost_node_gives_its_models_to_another(run: Run, nodes: Any) -> None:
    extra = nodes.add_node(num_cpus=1, resources={"late": 1}, object_store_memory=80 << 20)
    cluster = Cluster(ray, run.config, Needs(0.0, 0.0, {"late": 1}), run.said.append, 5.0)
    run.slots = (*cluster.slots(1), *run.slots[:1])
    run.slots[0].place.describe()

    def cut() -> None:
        while not run.builds():
            time.sleep(0.01)
        nodes.remove_node(extra)

    assassin = threading.Thread(target=cut)
    assassin.start()
    run.collect()
    assassin.join()
    assert run.complete and cluster.losses >= 1


def test_options_are_read_or_refused_in_one_line(run: Run) -> None:
    assert read_needs(None, "cpu", {"threads": "2"}) == Needs(2.0, 0.0, {})
    assert read_needs("GPU=0.5,h200=1", "cuda", {}) == Needs(1.0, 0.5, {"h200": 1.0})
    assert read_needs("CPU=3", "inductor", {"device": "cpu"}) == Needs(3.0, 0.0, {})
    for wrong in ("GPU", "GPU=-1", "=1", "CPU=x", "CPU=nan", "CPU=0"):
        with pytest.raises(InputError, match="--slot"):
            read_needs(wrong, "cpu", {})
    with pytest.raises(InputError, match="has room for a slot of CPU=64"):
        Cluster(ray, run.config, Needs(64.0)).slots(None)
    assert Cluster(ray, run.config, Needs(0.0, 0.0, {"bench": 1})).room() == 2


def test_a_slot_of_another_target_is_refused(run: Run) -> None:
    run.slots[0].place.describe()
    facts = ray.get(run.slots[0].place.actor().describe.remote())
    other = type(facts["target"])("hostile", "another GPU", {}, facts["catalog"].key)
    with pytest.raises(InputError, match="two targets: device"):
        run.cluster._check({**facts, "target": other})
    with pytest.raises(InputError, match="install one version"):
        run.cluster._check({**facts, "version": "0"})
