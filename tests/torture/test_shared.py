"""Shared and failing places: full disks, read-only folders, other versions, clocks that jump."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import hostile_backend
import pytest
import synthetic
from sizes import report, size

from routepilot.env import store as stores
from routepilot.env.errors import MachineError, RoutePilotError, TableError
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import Record
from routepilot.env.routes import Route
from routepilot.env.store import RecordStore


def limited(code: str, *words: str, bytes_allowed: int) -> subprocess.CompletedProcess[str]:
    """Run Python where no file may grow beyond some bytes: a disk that is full there."""
    start = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({n}, {n}))\n"
    return subprocess.run(
        [sys.executable, "-c", start.format(n=bytes_allowed) + code, *words],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_full_disk_keeps_what_there_was(tmp_path: Path) -> None:
    from routepilot.training.files import write_text

    write_text(tmp_path / "result.json", "old")
    code = (
        "import sys; from pathlib import Path\n"
        "from routepilot.training.files import write_text\n"
        "try:\n    write_text(Path(sys.argv[1]) / 'result.json', 'x' * 100_000)\n"
        "except OSError as error:\n    print('full', error.errno)\n"
    )
    done = limited(code, str(tmp_path), bytes_allowed=10_000)
    assert "full" in done.stdout, done.stderr
    assert (tmp_path / "result.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_store_on_a_full_disk_says_so_and_stays_sound(tmp_path: Path) -> None:
    tests = str(Path(synthetic.__file__).parent)
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path\n"
        "import synthetic\n"
        "from routepilot.env.store import RecordStore\n"
        "from routepilot.env.records import Record\n"
        "from routepilot.env.outcomes import Outcome, Status\n"
        "from routepilot.env.routes import Route\n"
        "from routepilot.env.errors import RoutePilotError\n"
        "try:\n"
        "    with RecordStore(Path(sys.argv[1])) as store:\n"
        "        store.add_target(synthetic.TARGET, synthetic.CATALOG)\n"
        "        for n in range(100_000):\n"
        "            store.add(Record('f', synthetic.TARGET.key,"
        " Outcome(Route((('-n', str(n)),)), Status.OK, 'y' * 200)))\n"
        "            print(n)\n"
        "except RoutePilotError as error:\n"
        "    print(type(error).__name__, error, file=sys.stderr)\n"
    )
    done = limited(code, str(tmp_path / "s.sqlite"), tests, bytes_allowed=400_000)
    assert done.returncode == 0 and done.stderr.startswith(("MachineError", "TableError"))
    assert "Traceback" not in done.stderr
    with RecordStore(tmp_path / "s.sqlite") as store:
        assert store.count() == len(done.stdout.split())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    from routepilot.training.files import ensure_folder

    tmp_path.chmod(0o555)
    try:
        with pytest.raises(RoutePilotError, match="cannot be written"):
            ensure_folder(tmp_path / "out")
        with pytest.raises(TableError, match="cannot be opened"):
            RecordStore(tmp_path / "s.sqlite")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("place", ["/proc/routepilot", "/dev/null/out", "/sys/out", "A" * 300])
def test_a_place_that_takes_no_files_is_named(place: str) -> None:
    from routepilot.training.files import Output, ensure_folder

    for make in (ensure_folder, Output):
        with pytest.raises(RoutePilotError, match="cannot be written"):
            make(Path(place))


def test_a_build_that_fills_the_disk_is_at_fault_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk of 280 MiB: the deed `fill` takes it all, the run goes on without its files."""
    from routepilot.env.accuracy import Gate
    from routepilot.env.measure import TimingPlan
    from routepilot.env.models import prepare
    from routepilot.env.worker import Worker

    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=280m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small disk")
    try:
        monkeypatch.setenv("PYTHONPATH", str(Path(hostile_backend.__file__).parent), os.pathsep)
        model = prepare(hostile_backend.hostile_model(tmp_path / "m.onnx"), cache=tmp_path / "c")
        with Worker(
            "hostile_backend:make", {}, model, disk / "work", gate=Gate(), plan=TimingPlan()
        ) as worker:
            outcome = worker.trial(hostile_backend.CATALOG.parse("-do=fill"))
            assert outcome.status is Status.BUILD_FAILED
            assert "filled the disk" in outcome.reason
            assert not (disk / "work" / "spill.bin").exists()
            assert worker.trial(hostile_backend.CATALOG.parse("-speed=2")).is_feasible
            # What somebody else filled is the machine's fault.
            with pytest.raises(OSError), (disk / "others").open("wb", buffering=0) as file:  # noqa: PT011
                while True:
                    file.write(b"x" * (1 << 20))
            with pytest.raises(MachineError, match="disk is full"):
                worker.trial(hostile_backend.CATALOG.parse("-do=fill -twin=b"))
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records carry the wall clock for people; order and deadlines do not depend on it."""
    from routepilot.training import session

    times = iter([4e9, -5.0, 0.0, 1e12] * 100)
    monkeypatch.setattr(session.time, "time", lambda: next(times))
    with RecordStore(tmp_path / "s.sqlite") as store:
        store.add_target(synthetic.TARGET, synthetic.CATALOG)
        for n in range(8):
            outcome = Outcome(Route((("-n", str(n)),)), Status.OK)
            store.add(Record("f", synthetic.TARGET.key, outcome, created=session.time.time()))
        found = store.outcomes("f", synthetic.TARGET.key)
    assert [r.values["-n"] for r in found] == [str(n) for n in range(8)]
    root = Path(__file__).resolve().parents[2]
    for name in ("env/child.py", "env/worker.py", "env/measure.py", "training/search.py"):
        assert "time.time()" not in (root / name).read_text(), "deadlines need a monotonic clock"


def test_an_older_store_is_migrated_and_a_newer_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions of the package on one store: ours, and one that has a column more."""
    path = tmp_path / "s.sqlite"
    with RecordStore(path) as store:
        store.put_table(synthetic.table(2))
        before = store.table()
    newer = (*stores.MIGRATIONS, ("ALTER TABLE records ADD COLUMN watts REAL",))
    with monkeypatch.context() as patch:
        patch.setattr(stores, "MIGRATIONS", newer)
        patch.setattr(stores, "SCHEMA_VERSION", len(newer))
        with RecordStore(path) as store:
            assert store.table().outcomes == before.outcomes
            store.add(Record("g", synthetic.TARGET.key, Outcome(Route(), Status.OK)))
    with pytest.raises(TableError, match="newer RoutePilot"):
        RecordStore(path)
    with closing(sqlite3.connect(path)) as base, base:
        assert base.execute("SELECT count(*) FROM records WHERE fingerprint = 'g'").fetchone()[0]


def test_an_older_version_that_is_open_meanwhile_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.sqlite"
    with RecordStore(path) as old:
        old.add_target(synthetic.TARGET, synthetic.CATALOG)
        newer = (*stores.MIGRATIONS, ("ALTER TABLE records ADD COLUMN watts REAL",))
        with monkeypatch.context() as patch:
            patch.setattr(stores, "MIGRATIONS", newer)
            patch.setattr(stores, "SCHEMA_VERSION", len(newer))
            with RecordStore(path) as new:
                new.add(Record("n", synthetic.TARGET.key, Outcome(Route(), Status.OK)))
        old.add(Record("o", synthetic.TARGET.key, Outcome(Route(), Status.OK)))
        assert old.count() == 2


def test_a_lock_of_a_dead_process_is_no_lock(tmp_path: Path) -> None:
    """A writer killed inside its transaction leaves no lock on the store."""
    path = tmp_path / "s.sqlite"
    with RecordStore(path) as store:
        store.add_target(synthetic.TARGET, synthetic.CATALOG)
    code = (
        "import os, signal, sqlite3, sys\n"
        "base = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "base.execute('BEGIN IMMEDIATE'); base.execute('DELETE FROM targets')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    start = time.monotonic()
    with RecordStore(path) as store:
        store.add(Record("f", synthetic.TARGET.key, Outcome(Route(), Status.OK)))
        assert store.count() == 1
    assert time.monotonic() - start < 2


def test_a_store_that_is_held_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with RecordStore(path) as store:
        store.add_target(synthetic.TARGET, synthetic.CATALOG)
        holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        holder.execute("BEGIN IMMEDIATE")
        threading.Timer(0.5, lambda: holder.execute("ROLLBACK")).start()
        store.add(Record("f", synthetic.TARGET.key, Outcome(Route(), Status.OK)))
        holder.close()


def test_eight_simulated_hours_leave_memory_and_files_flat(tmp_path: Path) -> None:
    """Sessions after sessions on one store, at 12 s a build 2,400 builds are eight hours."""
    import psutil
    from near_child import NearChild

    from routepilot.env import worker
    from routepilot.env.measure import TimingPlan
    from routepilot.env.models import prepare
    from routepilot.training.session import SessionConfig
    from routepilot.training.tune import tune

    builds = size("long_builds")
    deeds = "nan shape inaccurate fail refuse run_raise overfit".split()
    process, original, whole = psutil.Process(), worker.Child, hostile_backend.CATALOG
    worker.Child = NearChild  # type: ignore[misc,assignment]
    hostile_backend.CATALOG = hostile_backend.offering(deeds)
    seen: list[tuple[int, int, int]] = []
    try:
        for run in range(builds // 60):
            # Another model each time: nothing is answered from the store.
            file = hostile_backend.hostile_model(tmp_path / "m.onnx", relus=run + 1)
            tune(
                prepare(file, cache=tmp_path / "c"), backend="hostile_backend:make", agent="random",
                max_builds=60, seed=run, out=tmp_path / "out",
                config=SessionConfig(plan=TimingPlan(block_seconds=0.01)),
            )  # fmt: skip
            size_now = (tmp_path / "out" / "records.sqlite").stat().st_size
            seen.append((process.memory_info().rss, process.num_fds(), size_now))
    finally:
        worker.Child = original  # type: ignore[misc]
        hostile_backend.CATALOG = whole
    half = len(seen) // 2
    grown = seen[-1][0] - seen[half][0]
    report(
        "long run", builds=builds, grown_kib=grown >> 10, files=seen[-1][1] - seen[half][1],
        store_bytes=seen[-1][2],
    )  # fmt: skip
    assert grown < 20 << 20
    assert seen[-1][1] <= seen[half][1]
    # Growth is linear: the second half adds what the first did, a page more or less.
    first, second = seen[half][2] - seen[0][2], seen[-1][2] - seen[half][2]
    assert first <= 0 or second < 1.5 * first * (len(seen) - 1 - half) / half + 65_536
