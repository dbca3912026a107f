"""Eight simulated hours on the recorded backend: sessions after sessions replayed from a table.

The clock is the record's own: each build costs the seconds that it took when it was measured. The
table is the shipped one, the agents take turns, the store is a file of its own.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import psutil
from sizes import report, size

from routepilot.agents import make_factory
from routepilot.agents.base import Problem
from routepilot.agents.policy import load_policy
from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import Replay
from routepilot.env.records import Record
from routepilot.env.routes import DEFAULT_ROUTE
from routepilot.env.store import RecordStore
from routepilot.env.tables import load_table
from routepilot.training.defaults import checkpoints_folder, find_table

#: Builds of one session, and whose it is.
BUDGET, AGENTS = 16, ("ppo", "knn", "coreset", "random")

#: What the process may grow by in the second half, bytes.
GROWTH = 12 << 20

#: SQLite's write-ahead log comes and goes: 1,000 pages, and what a transaction adds.
WRITE_AHEAD = 5 << 20


def test_eight_simulated_hours_on_the_recorded_backend(tmp_path: Path) -> None:
    hours = size("recorded_minutes") / 60
    table = load_table(find_table("cpu"))
    replay = Replay(table, Gate())
    policy = load_policy(checkpoints_folder() / "cpu.safetensors")
    makers = [make_factory(name, replay=replay, policy=policy) for name in AGENTS]
    rng, process = np.random.default_rng(0), psutil.Process()
    path = tmp_path / "records.sqlite"
    simulated, sessions, builds = 0.0, 0, 0
    seen: list[tuple[int, int, int, int, int]] = []
    with RecordStore(path) as store:
        store.add_target(table.target, table.catalog)
        while simulated < hours * 3600:
            model = replay.models[sessions % len(replay.models)]
            repeat = sessions // len(replay.models)  # another session on the same model
            problem = Problem(
                replay.catalog, model.card.features, model.routes, BUDGET, sessions, 1e-2
            )
            agent = makers[sessions % len(makers)](problem)
            default = model.default
            agent.tell(DEFAULT_ROUTE, default)
            made = [default]
            for _ in range(BUDGET):
                route = agent.ask()
                if route is None:
                    break
                made.append(model.outcome(route, rng))
                agent.tell(route, made[-1])
            store.add_model(model.card)
            for outcome in made:
                store.add(Record(model.card.fingerprint, table.target.key, outcome, repeat))
                simulated += outcome.build_seconds + outcome.measure_seconds
            builds += len(made)
            sessions += 1
            if sessions % len(makers) == 0:
                gc.collect()
                held = sum(p.stat().st_size for p in tmp_path.glob("records.sqlite*"))
                rss = process.memory_info().rss
                seen.append((builds, rss, process.num_fds(), process.num_threads(), held))
        assert store.count() == builds, "an outcome was lost"
    assert len(seen) >= 4, "too short to say anything"
    # The first tenth fills caches of libraries and the surrogate's.
    warm = max(1, len(seen) // 10)
    half = (warm + len(seen)) // 2
    grown = seen[-1][1] - seen[half][1]
    bytes_a_build = path.stat().st_size / builds
    report(
        "recorded run", simulated_hours=round(simulated / 3600, 2), sessions=sessions,
        builds=builds, grown_kib=grown >> 10, whole_growth_kib=(seen[-1][1] - seen[warm][1]) >> 10,
        files=seen[-1][2] - seen[warm][2], threads=seen[-1][3] - seen[warm][3],
        store_bytes=path.stat().st_size, bytes_a_build=round(bytes_a_build),
    )  # fmt: skip
    assert grown < GROWTH, "memory grows"
    assert seen[-1][2] <= seen[warm][2] and seen[-1][3] <= seen[warm][3], "handles or threads grow"
    # Growth is linear: what one build adds does not change, a few pages more or less.
    first, second = seen[half][4] - seen[warm][4], seen[-1][4] - seen[half][4]
    more = (seen[-1][0] - seen[half][0]) / (seen[half][0] - seen[warm][0])
    assert second < 1.1 * first * more + WRITE_AHEAD
    assert bytes_a_build < 2_000
