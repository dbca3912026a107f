"""Table files and their replay: exact round trips, refusals, gates and repeats."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import synthetic

from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import LOST, Replay
from routepilot.env.errors import TableError
from routepilot.env.outcomes import Status
from routepilot.env.routes import DEFAULT_ROUTE
from routepilot.env.tables import (
    FIELDS,
    METADATA_KEY,
    load_table,
    merge_tables,
    save_table,
)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    table = synthetic.table()
    save_table(table, tmp_path / "t.parquet")
    assert load_table(tmp_path / "t.parquet") == table
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]
    assert pq.read_schema(tmp_path / "t.parquet").names == [name for name, _, _ in FIELDS]


def _rewritten(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "t.parquet"
    save_table(synthetic.table(2), path)
    data = pq.read_table(path)
    described = json.loads(data.schema.metadata[METADATA_KEY]) | changes
    described = {k: v for k, v in described.items() if v is not None}
    pq.write_table(
        data.replace_schema_metadata({METADATA_KEY: json.dumps(described).encode()}), path
    )
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"schema": 7}, "schema 7"), ({"catalog": None}, "lacks"), ({"features": ["x"]}, "collect")],
)
def test_tables_of_another_make_are_refused(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(TableError, match=words):
        load_table(_rewritten(tmp_path, **changes))


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    save_table(synthetic.table(2), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TableError, match="damaged"):
        load_table(path)
    pq.write_table(pq.read_table(_rewritten(tmp_path)).replace_schema_metadata({}), path)
    with pytest.raises(TableError, match="no route table"):
        load_table(path)
    with pytest.raises(TableError, match="does not exist"):
        load_table(tmp_path / "absent.parquet")


def test_partial_tables_merge() -> None:
    table = synthetic.table(4)
    halves = [table.only(c.fingerprint for c in table.models[i::2]) for i in range(2)]
    merged = merge_tables([*halves, halves[0]])
    assert {f: dict(r) for f, r in merged.outcomes.items()} == table.outcomes
    other = replace(table, target=replace(table.target, device="another"))
    with pytest.raises(TableError, match="device is 'no device' here and 'another' there"):
        merge_tables([table, other])


def test_replay_follows_the_gate() -> None:
    table = synthetic.table()
    tight, loose = Replay(table, Gate(limit=1e-3)), Replay(table, Gate(limit=0.5))
    for a, b in zip(tight, loose, strict=True):
        assert (a.feasible <= b.feasible).all()
        assert a.oracle <= b.oracle
        failed = [i for i, o in enumerate(b.outcomes) if o.status is not Status.OK]
        assert (b.loss[failed] == LOST).all() and np.isnan(b.log_speedup[failed]).all()
        assert DEFAULT_ROUTE not in a.index


def test_a_gain_must_clear_the_default() -> None:
    model = Replay(synthetic.table()).models[0]
    small = (model.log_speedup > 0) & (model.log_speedup < 2 * model.noise)
    assert (model.gain[small] == 0).all()
    assert model.oracle == pytest.approx(model.gain.max())


def test_repeats_settle_a_lucky_figure() -> None:
    table = synthetic.table(2)
    fingerprint = table.models[0].fingerprint
    route = synthetic.routes()[1]
    first = table.outcomes[fingerprint][route][0]
    assert first.measurement is not None
    honest = replace(first, measurement=synthetic.measurement(0.05))
    lucky = replace(first, measurement=synthetic.measurement(2.0))
    routes = {**table.outcomes[fingerprint], route: (lucky, honest)}
    changed = replace(table, outcomes={**table.outcomes, fingerprint: routes})
    model = Replay(changed, Gate(limit=1.0)).model(fingerprint)
    assert model.log_speedup[model.index[route]] == pytest.approx(0.05)


def test_redrawn_outcomes_scatter_as_recorded() -> None:
    model = Replay(synthetic.table()).models[0]
    place = int(np.argmax(model.gain))
    rng = np.random.default_rng(0)
    drawn = [model.outcome(model.routes[place], rng).log_speedup for _ in range(400)]
    assert np.mean(drawn) == pytest.approx(model.log_speedup[place], abs=0.003)
    assert np.std(drawn) == pytest.approx(model.noise[place], rel=0.2)
    assert math.isclose(model.outcome(model.routes[place]).log_speedup, model.log_speedup[place])
