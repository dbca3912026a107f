"""A Ray cluster of this machine: what is lost on the way is made up for, and nothing twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_backend
import psutil
import pytest
import synthetic
from job_functions import die_once, fail

from routepilot.env.errors import InputError
from routepilot.env.models import prepare
from routepilot.env.outcomes import Status
from routepilot.env.store import RecordStore
from routepilot.env.tables import load_table, save_table
from routepilot.training import cluster_slot
from routepilot.training.cli import main
from routepilot.training.cluster import Cluster, _require_listener
from routepilot.training.collect import CorpusModel, Progress, Repeats, collect
from routepilot.training.compare import compare
from routepilot.training.evaluate import evaluate
from routepilot.training.inputs import NamedModel
from routepilot.training.jobs import run_jobs
from routepilot.training.search import Budget
from routepilot.training.session import SessionConfig
from routepilot.training.slots import Needs, SlotPool, read_needs

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
def run(nodes: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    found = Run(tmp_path, getattr(request, "param", ""))
    yield found
    found.cluster.close()


class Run:
    """A collection of two small models on the cluster."""

    def __init__(self, folder: Path, deeds: str = "") -> None:
        self.folder, self.store = folder, folder / "records.sqlite"
        self.log = folder / "builds.jsonl"
        options = {**CONFIG.options, "log": str(self.log), "deeds": deeds}
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


@pytest.mark.parametrize("run", ["work nan fail"], indirect=True)
def test_agents_compared_at_once_build_each_route_once(run: Run) -> None:
    named = NamedModel(run.corpus[0].model)
    pool = SlotPool(run.slots, lambda: {"cluster": {"slots": 2}})
    agents = ("default", "random", "fast", "recentred")

    def compared(folder: str, pool: SlotPool | None) -> dict[str, dict[str, Any]]:
        out = run.folder / folder
        rows = compare(named, agents, Budget(4), run.config, out, pool=pool, seed=1)
        return {name: row.as_json() for name, row in rows.items()}

    at_once = compared("ray", pool)
    searched = Counter({route: count for route, count in run.builds().items()})
    winners = {row["route"] for row in at_once.values() if row["route"]}
    # Once in the search, at most once more when confirmed.
    assert all(count == 1 or (count == 2 and r in searched) for r, count in searched.items())
    assert winners and list(at_once) == list(agents)
    by_turns = compared("here", None)
    for name in agents:
        for what in ("builds", "route", "outcomes", "ended_by"):
            assert at_once[name][what] == by_turns[name][what], (name, what)
    facts = json.loads((run.folder / "ray" / "comparison.json").read_text())["manifest"]
    assert facts["cluster"] == {"slots": 2}


def test_an_evaluation_on_the_cluster_gives_the_same_figures(nodes: Any, tmp_path: Path) -> None:
    table, agents = synthetic.table(), ("random", "knn")
    here = evaluate(table, agents, seeds=2)
    there = evaluate(table, agents, seeds=2, ray=ray, log=tmp_path / "traces.jsonl")
    assert there["agents"] == here["agents"]
    assert len((tmp_path / "traces.jsonl").read_text().split()) > 0


def test_a_lost_process_gives_its_job_to_another_node_or_process(
    nodes: Any, tmp_path: Path
) -> None:
    found = dict(run_jobs(die_once, str(tmp_path), [(i,) for i in range(3)], ray=ray))
    assert found == {0: 0, 1: 1, 2: 4} and (tmp_path / "died").exists()
    with pytest.raises(ZeroDivisionError):
        list(run_jobs(fail, None, [(1,)], ray=ray))


def test_the_command_line_runs_on_a_cluster(run: Run, capsys: Any, monkeypatch: Any) -> None:
    out = run.folder / "table.parquet"
    words = ["collect", "-o", str(out), "--models", str(run.folder / "m0.onnx"), "--json"]
    words += ["--backend", "hostile_backend:make", "-O", "noise=none", "--effort", "quick"]
    words += ["--expression", "-speed=[1|2|0.5]", "--controls", "1", "--recheck", "0"]
    monkeypatch.setattr("sys.argv", ["routepilot", *words, "--ray", "auto", "--slot", "bench=1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr().err
    table = load_table(out)
    assert {str(r) for r in table.outcomes[table.models[0].fingerprint]} >= {"", "-speed=2"}
    assert table.manifest["cluster"]["slots"] == 2 and table.manifest["cluster"]["lost_slots"] == 0
    monkeypatch.setattr("sys.argv", ["routepilot", *words, "--ray", "auto", "--slot", "bench"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "NAME=AMOUNT" in capsys.readouterr().err


def test_the_evaluate_verb_runs_on_a_cluster(
    nodes: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    save_table(synthetic.table(), tmp_path / "made.parquet")
    words = ["evaluate", "--table", str(tmp_path / "made.parquet"), "--agents", "random"]
    words += ["--seeds", "1", "--json", "-o", str(tmp_path / "out")]
    shares = []
    for extra in ([], ["--ray", "auto"]):
        (tmp_path / "out" / "traces.jsonl").unlink(missing_ok=True)
        monkeypatch.setattr("sys.argv", ["routepilot", *words, *extra])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code == 0, said.err
        shares.append(json.loads(said.out)["agents"]["random"])
    assert shares[0] == shares[1]


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:99999"):
        with pytest.raises(InputError, match="cannot be reached"):
            _require_listener(address)
    assert time.monotonic() - start < 5
    for address in ("local", "auto"):
        _require_listener(address)


def test_folders_of_killed_slots_are_swept(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid in (gone.pid, os.getpid()):
        (tmp_path / f"routepilot-slot-{pid}-x" / "model").mkdir(parents=True)
    cluster_slot._sweep()
    assert [p.name for p in tmp_path.iterdir()] == [f"routepilot-slot-{os.getpid()}-x"]
