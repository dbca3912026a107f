"""Complaints that users of tuners and builders have made in public, one test each.

Numbers are issues of github.com/NVIDIA/TensorRT unless another repository is named. What needs a
GPU to be shown is shown on the hostile backend, whose engines do the same thing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import hostile_backend
import numpy as np
import pytest
from near_child import NearChild

from routepilot.env import worker
from routepilot.env.accuracy import Gate, judge
from routepilot.env.backends.base import Target
from routepilot.env.errors import TableError
from routepilot.env.measure import TimingPlan
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import Record
from routepilot.env.routes import Catalog, Route
from routepilot.env.store import RecordStore
from routepilot.training.search import confirm_best
from routepilot.training.session import Session, SessionConfig
from routepilot.training.tune import tune

PLAN = TimingPlan(warmup_seconds=0.0, block_seconds=0.01)


@pytest.fixture
def session(hostile_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "Child", NearChild)
    config = SessionConfig(backend="hostile_backend:make", plan=PLAN)
    with (
        RecordStore(tmp_path / "records.sqlite") as store,
        Session(hostile_model, config, store, tmp_path / "work") as made,
    ):
        made.default()
        yield made


def route(text: str) -> Route:
    return hostile_backend.CATALOG.parse(text)


def test_4730_3081_a_rebuild_that_computes_something_else_does_not_win(session: Session) -> None:
    """Two builds of one route differ: the confirmation judges the fresh build, not the first."""
    outcome = session.outcome(route("-do=overfit -speed=2"))
    assert outcome.is_feasible and outcome.log_speedup == pytest.approx(math.log(2), abs=0.05)
    answer = confirm_best(session, [outcome])
    assert answer.route.is_default and "accuracy_failed" in answer.note


def test_sd_webui_113_a_rebuild_that_is_slower_does_not_win(session: Session) -> None:
    """Stable-Diffusion-WebUI-TensorRT#113: one engine over a minute, its rebuild 4.5 s."""
    answer = confirm_best(session, [session.outcome(route("-do=lucky"))])
    assert answer.route.is_default and "does not clear 1" in answer.note


@pytest.mark.parametrize("deed", ["inaccurate", "denormal", "shape", "dtype", "missing"])
def test_4813_4837_a_wrong_engine_does_not_pass(deed: str, session: Session) -> None:
    """trtexec says PASSED for engines that are silently wrong."""
    outcome = session.outcome(route(f"-do={deed} -speed=2"))
    assert not outcome.is_feasible and outcome.reason


def test_955_a_nan_that_passes_a_gate() -> None:
    """trtexec compares `loss >= threshold`, which a NaN loss passes."""
    reference = {"y": np.ones(4, np.float32)}
    for bad in (np.nan, np.inf, -np.inf):
        output = {"y": np.array([1, 1, 1, bad], np.float32)}
        for metric in ("l0", "l1", "l2", "lInf", "cos", "rel_l2"):
            verdict = judge([output], [reference], Gate(metric=metric, limit=math.inf))
            assert verdict.status is Status.INVALID_OUTPUT


def test_rows_of_a_batch_that_differ_are_seen() -> None:
    """#4813: equal rows of a batch give different outputs; one wrong row of many fails."""
    reference = {"y": np.ones((64, 8), np.float32)}
    output = {"y": np.ones((64, 8), np.float32)}
    output["y"][63] = 1.3
    assert judge([output], [reference], Gate()).status is Status.ACCURACY_FAILED


def test_4405_higher_effort_that_is_slower_does_not_win(session: Session) -> None:
    """2.7 ms at the default level, 5.8 ms at level 5: effort is measured like anything else."""
    outcome = session.outcome(route("-speed=0.5"))
    assert outcome.is_feasible and outcome.gain == 0.0
    assert confirm_best(session, [outcome]).route.is_default


def test_4286_a_crash_at_higher_effort_costs_one_build(session: Session) -> None:
    assert session.outcome(route("-do=raise")).status is Status.BUILD_FAILED
    assert session.outcome(route("-speed=2")).is_feasible


def test_2144_a_cache_of_another_device_is_refused(tmp_path: Path) -> None:
    catalog = Catalog("c", "1", ())
    here, there = (Target("b", gpu, {"compiler": "1"}, catalog.key) for gpu in ("A10", "T4"))
    with RecordStore(tmp_path / "s.sqlite") as store:
        store.add_target(there, catalog)
        store.add(Record("f", there.key, Outcome(Route(), Status.OK)))
        with pytest.raises(TableError, match=r"device is 'A10' here and 'T4' there"):
            store.require_target(here)
        assert store.outcomes("f", here.key) == {}


def test_trials_are_not_lost_on_resume(
    hostile_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trtexec --continue keeps the index and forgets the times; the best so far is kept here."""
    monkeypatch.setattr(worker, "Child", NearChild)
    monkeypatch.setattr(hostile_backend, "CATALOG", hostile_backend.offering([]))
    settings = SessionConfig(plan=PLAN)

    def run(builds: int) -> dict[str, object]:
        return tune(
            hostile_model, backend="hostile_backend:make", agent="fast", max_builds=builds,
            out=tmp_path, config=settings,
        ).as_json()  # fmt: skip

    first, second = run(7), run(7)
    assert json.dumps(first["trials"]) == json.dumps(second["trials"])
    assert second["manifest"]["fresh_builds"] == 0  # type: ignore[index]
    assert first["route"] == second["route"] != ""


def test_a_winner_is_not_picked_from_noise(session: Session) -> None:
    """trtexec takes the least mean of one run; 2 % is inside what two equal engines differ by."""
    from dataclasses import replace

    lucky = session.outcome(route("-twin=b -speed=0.98"))
    assert lucky.measurement is not None
    claimed = replace(lucky, measurement=replace(lucky.measurement, log_speedup=0.02, low=0.001))
    answer = confirm_best(session, [claimed])
    assert answer.route.is_default and answer.log_speedup == 0.0


def test_a_route_that_the_compiler_overrides_gains_nothing(session: Session) -> None:
    """The compiler drops a setting: the engine is the default's, and is not credited."""
    outcome = session.outcome(route("-twin=b"))
    assert outcome.reason == "same engine as the default route" and outcome.gain == 0.0


def test_minimum_of_gpu_time_over_rows_that_did_not_crash_is_not_the_winner(
    tmp_path: Path,
) -> None:
    """In trtexec's cache a row that failed the accuracy check has a time and `crash: false`."""
    from routepilot.env.trtexec import cache_catalog, cache_outcomes, read_tuning_cache

    header = {"tuner_version": "9", "tuning_expr": "-a=[1|2]", "default_build_route": "-a=1"}
    base = {"crash": False, "accuracy_loss": {"y": 0.0}}
    rows = [
        {**base, "iter": 0, "build_route": "-a=1", "error_message": "", "gpu_time": 2.0},
        {**base, "iter": 1, "build_route": "-a=2", "gpu_time": 1.0,
         "error_message": "child exited with status 1"},
    ]  # fmt: skip
    path = tmp_path / "cache.json"
    path.write_text("\n".join(map(json.dumps, [header, *rows])))
    cache = read_tuning_cache(path)
    found = cache_outcomes(cache, cache_catalog(cache))
    assert [o.status for o in found] == [Status.OK, Status.ACCURACY_FAILED]
    assert not found[1].is_feasible
