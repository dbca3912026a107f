"""What a large collection costs its driver: `python -m routepilot.training.scale_study`.

Owns the constants that docs/scale.md plans with: bytes an outcome takes in the store and in a
table, writes a second with many writers, the driver's load for each outcome that comes from a
cluster, seconds to write and read a large table, seconds to fit a surrogate to more models, and the
build seconds of the shipped tables. Builds nothing: outcomes are those of a shipped table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from routepilot.env.backends.recorded import Replay
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome
from routepilot.env.records import ModelCard, Record, RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.store import RecordStore
from routepilot.env.surrogate import Surrogate
from routepilot.env.tables import load_table, save_table
from routepilot.training.cluster import Cluster, connected
from routepilot.training.cluster_slot import ClusterSlot
from routepilot.training.collect import CorpusModel, Repeats, collect
from routepilot.training.defaults import find_table
from routepilot.training.files import write_json
from routepilot.training.manifest import manifest
from routepilot.training.session import SessionConfig
from routepilot.training.slots import Needs

#: Writers at once whose writes are timed.
WRITERS = (1, 8, 32, 100)


def outcomes_of(table: RouteTable) -> int:
    """Outcomes in a table, repeats too."""
    return sum(len(o) for routes in table.outcomes.values() for o in routes.values())


def copies(table: RouteTable, times: int) -> RouteTable:
    """The table with each model `times` over, under other fingerprints and families."""
    cards: list[ModelCard] = []
    outcomes: dict[str, Mapping[Route, tuple[Outcome, ...]]] = {}
    for copy in range(times):
        for card in table.models:
            fingerprint = f"{copy:04x}{card.fingerprint[4:]}"
            family = f"{card.family}-{copy}" if copy else card.family
            name = f"{card.name}-{copy}" if copy else card.name
            cards.append(replace(card, fingerprint=fingerprint, name=name, family=family))
            outcomes[fingerprint] = table.outcomes[card.fingerprint]
    return replace(table, models=tuple(cards), outcomes=outcomes)


def sizes(table: RouteTable, folder: Path) -> dict[str, float]:
    """Bytes an outcome takes in a store and in a table file, cards and all."""
    count = outcomes_of(table)
    with RecordStore(folder / "size.sqlite") as store:
        store.put_table(table)
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    save_table(table, folder / "size.parquet")
    return {
        "outcomes": count,
        "store_bytes": (folder / "size.sqlite").stat().st_size / count,
        "parquet_bytes": (folder / "size.parquet").stat().st_size / count,
    }


def large_table(table: RouteTable, times: int, folder: Path) -> dict[str, float]:
    """Seconds and memory to bring a large collection from the store into a file and back."""
    large = copies(table, times)
    store_file, file = folder / "large.sqlite", folder / "large.parquet"
    with RecordStore(store_file) as store:
        store.put_table(large)
    del large
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    with RecordStore(store_file) as store:
        read = store.table()
    middle = time.perf_counter()
    memory = psutil.Process().memory_info().rss - before
    save_table(read, file)
    written = time.perf_counter()
    again = load_table(file)
    end = time.perf_counter()
    return {
        "models": len(again.models),
        "outcomes": outcomes_of(again),
        "store_mib": store_file.stat().st_size / 2**20,
        "parquet_mib": file.stat().st_size / 2**20,
        "memory_mib": memory / 2**20,
        "from_store_seconds": middle - start,
        "to_file_seconds": written - middle,
        "from_file_seconds": end - written,
    }


def writes(table: RouteTable, writers: int, seconds: float, folder: Path) -> dict[str, float]:
    """Records a second that so many threads add to one store, and the slowest add."""
    path = folder / f"writers{writers}.sqlite"
    key = table.target.key
    with RecordStore(path) as store:
        store.add_target(table.target, table.catalog)
    some = [o for routes in table.outcomes.values() for outs in routes.values() for o in outs]
    waits: list[list[float]] = [[] for _ in range(writers)]
    end = time.perf_counter() + seconds

    def write(writer: int) -> None:
        with RecordStore(path) as store:
            for i in range(10**9):
                begin = time.perf_counter()
                if begin > end:
                    return
                store.add(Record(f"model{writer}", key, some[i % len(some)], repeat=i))
                waits[writer].append(time.perf_counter() - begin)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(writers)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begin
    every = sorted(wait for one in waits for wait in one)
    return {
        "writers": writers,
        "records_per_second": len(every) / took,
        "median_ms": 1000 * statistics.median(every),
        "slowest_ms": 1000 * every[-1],
    }


class EchoSlot(ClusterSlot):
    """A slot that builds nothing: it answers with the outcomes of a shipped table."""

    def open(self, files: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Take a model's files, and look at no more than their names."""
        table = load_table(find_table("cpu"))
        routes = next(iter(table.outcomes.values()))
        self._canned = {route: outcomes[0] for route, outcomes in routes.items()}
        return {"value": None}

    def call(self, method: str, deadline: float, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The default's outcome."""
        return {"value": self._canned[DEFAULT_ROUTE]}

    def trial(self, deadline: float, route: Route, *rest: Any) -> dict[str, Any]:
        """The route's recorded outcome."""
        return {"value": self._canned[route]}


@contextmanager
def _echoing(slots: int) -> Iterator[Cluster]:
    with connected("local", slots) as ray:
        cluster = Cluster(ray, SessionConfig(options={"threads": "1"}), Needs(1.0))
        cluster.slot_class = EchoSlot
        try:
            yield cluster
        finally:
            cluster.close()


def driver(table: RouteTable, models: int, slots: int, folder: Path) -> dict[str, float]:
    """CPU seconds that a collection from a cluster costs its driver for each outcome.

    The whole of `collect` runs: sessions, requests, the store. The slots answer at once, so the
    outcomes a second are the most that this machine can drive, its cores shared with the slots.
    """
    from routepilot.training.doctor import tiny_model

    tiny = tiny_model(folder / "tiny")
    corpus = [
        CorpusModel(_renamed(tiny, f"{i:064x}"), f"family{i}", trained=True) for i in range(models)
    ]
    routes = [route for route in next(iter(table.outcomes.values())) if not route.is_default]
    store = folder / "driver.sqlite"
    with _echoing(slots) as cluster:
        config, places = cluster.config, cluster.slots(slots)
        for slot in places:
            slot.fit(config)
            assert slot.place is not None
            slot.place.describe()
        system = [p for p in psutil.process_iter() if _name(p) in ("raylet", "gcs_server")]
        before, used = time.process_time(), _cpu(system)
        start = time.perf_counter()
        nothing = Repeats(controls=0)
        collect(corpus, store, config, routes, folder / "work", repeats=nothing, slots=places)
        seconds = time.perf_counter() - start
        cpu, of_ray = time.process_time() - before, _cpu(system) - used
    with RecordStore(store) as records:
        count = records.count()
    return {
        "slots": slots,
        "outcomes": count,
        "driver_cpu_ms": 1000 * cpu / count,
        "ray_cpu_ms": 1000 * of_ray / count,
        "outcomes_per_second": count / seconds,
    }


def _renamed(model: Model, fingerprint: str) -> Model:
    return replace(model, fingerprint=fingerprint, name=f"model{int(fingerprint, 16)}")


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _cpu(processes: list[psutil.Process]) -> float:
    times = [p.cpu_times() for p in processes if p.is_running()]
    return sum(t.user + t.system for t in times)


def transfer(mebibytes: int) -> dict[str, float]:
    """Seconds to put a model's bytes where the slots of a node find them, and to take them."""
    import numpy as np

    with connected("local", 2) as ray:
        data = {"weights": np.zeros(mebibytes << 20, np.uint8)}
        size = ray.remote(_size)
        ray.get(size.remote({"weights": np.zeros(1, np.uint8)}))
        start = time.perf_counter()
        there = ray.put(data)
        ray.get(size.remote(there))
        return {"mebibytes": mebibytes, "seconds": time.perf_counter() - start}


def _size(files: Mapping[str, Any]) -> int:
    return sum(data.nbytes for data in files.values())


def surrogate_seconds(table: RouteTable, times: int) -> dict[str, float]:
    """Seconds to fit the surrogate to a table of more models."""
    replay = Replay(copies(table, times))
    start = time.perf_counter()
    Surrogate(replay)
    return {"models": len(replay.models), "seconds": time.perf_counter() - start}


def builds(name: str) -> dict[str, float]:
    """Seconds that the builds of a shipped table took, an outcome and a model."""
    table = load_table(find_table(name))
    every = [o for routes in table.outcomes.values() for outs in routes.values() for o in outs]
    build = sum(o.build_seconds for o in every)
    measure = sum(o.measure_seconds for o in every)
    return {
        "models": len(table.models),
        "outcomes": len(every),
        "build_seconds": build / len(every),
        "measure_seconds": measure / len(every),
        "hours": (build + measure) / 3600,
        "model_hours": (build + measure) / 3600 / len(table.models),
    }


def main() -> None:
    """Measure everything and write the constants as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--out", type=Path, default=Path("scale.json"))
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of writing each")
    parser.add_argument("--times", type=int, default=40, help="how often the table is copied")
    parser.add_argument("--models", type=int, default=20, help="models that the driver collects")
    parser.add_argument("--folder", type=Path, help="folder for the stores, on the disk to measure")
    given = parser.parse_args()
    table = load_table(find_table("cpu"))
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        found: dict[str, Any] = {
            "sizes": sizes(table, folder),
            "writes": [writes(table, count, given.seconds, folder) for count in WRITERS],
            "driver": [driver(table, given.models, 2, _made(folder / "driver"))],
            "transfer": transfer(256),
            "large_table": large_table(table, given.times, folder),
            "surrogate": [surrogate_seconds(table, times) for times in (1, 2, 4)],
            "builds": {name: builds(name) for name in ("cpu", "h200")},
            "manifest": manifest(),
        }
    write_json(given.out, found)
    print(json.dumps({k: v for k, v in found.items() if k != "manifest"}, indent=1))


def _made(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tiny").mkdir()
    return folder


if __name__ == "__main__":
    main()
