"""Complaints about builders and about trtexec's own tuner, one test each; see the other file.

Numbers are issues of github.com/NVIDIA/TensorRT unless another repository is named. Those of
trtexec's tuner are read from its source (release 11.1).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hostile_backend
import numpy as np
import pytest
import synthetic
from near_child import NearChild
from test_public_failures import PLAN, route, session

from routepilot.agents.base import Problem
from routepilot.agents.sweeps import MixedAgent
from routepilot.env import worker
from routepilot.env.backends.base import Target
from routepilot.env.errors import ModelError, RouteError, TableError
from routepilot.env.models import Model, prepare
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import Record
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Knob, Route
from routepilot.env.store import RecordStore
from routepilot.training.search import confirm_best
from routepilot.training.session import Session, SessionConfig
from routepilot.training.tune import tune

assert session  # the fixture of the other file


@pytest.mark.parametrize(
    ("deed", "status"),
    [
        ("raise", Status.BUILD_FAILED),  # 4830: the kernel compiler fails
        ("fail", Status.BUILD_FAILED),  # 4715: no valid tactic
        ("nomem", Status.OUT_OF_MEMORY),  # 4736: insufficient memory for a fused node
        ("refuse", Status.REFUSED),  # rf-detr#1453: an option that is no more
    ],
)
def test_4830_4715_4736_a_build_that_fails_costs_one_build(
    deed: str, status: Status, session: Session
) -> None:
    outcome = session.outcome(route(f"-do={deed} -speed=2"))
    assert outcome.status is status and outcome.reason and outcome.gain == 0.0
    assert session.outcome(route("-speed=2")).is_feasible


def test_2478_a_device_that_a_build_has_spoilt_does_not_judge_the_next(session: Session) -> None:
    """A kernel that ran into the watchdog leaves a context in which all fails, or all is wrong."""
    assert session.outcome(route("-do=poison")).status is Status.BUILD_FAILED
    after = session.outcome(route("-speed=2"))
    assert after.is_feasible, after


def test_3075_4423_1441_a_budget_of_seconds_ends_a_search_whose_builds_are_long(
    hostile_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "Child", NearChild)
    monkeypatch.setattr(hostile_backend, "CATALOG", hostile_backend.offering(["fail", "nan"]))
    result = tune(
        hostile_model, backend="hostile_backend:make", agent="random", max_builds=10_000,
        max_seconds=2.0, out=tmp_path, config=SessionConfig(plan=PLAN, options={"slow": "0.4"}),
    )  # fmt: skip
    # One build may go on when the time is up; how many there were says nothing on a busy machine.
    assert 1 <= result.search.builds < 100 and result.search.ended_by == "seconds"
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize(("here", "there"), [("10.3.0", "8.6.2"), ("11.2.0", "11.1.0")])
def test_3896_4483_figures_of_another_version_do_not_answer(
    here: str, there: str, tmp_path: Path
) -> None:
    """A newer compiler may be slower: what the older one gave is no baseline for it."""
    catalog = Catalog("c", "1", ())
    mine, theirs = (Target("b", "A10", {"tensorrt": v}, catalog.key) for v in (here, there))
    with RecordStore(tmp_path / "s.sqlite") as store:
        store.add_target(theirs, catalog)
        store.add(Record("f", theirs.key, Outcome(DEFAULT_ROUTE, Status.OK)))
        with pytest.raises(TableError, match=there):
            store.require_target(mine)
        assert store.outcomes("f", mine.key) == {}


def test_rf_detr_1214_a_setting_that_means_nothing_any_more_is_not_taken_in_silence() -> None:
    """`fp16=True` builds FP32 since TensorRT 11 and says nothing."""
    with pytest.raises(RouteError, match="-fp16"):
        hostile_backend.CATALOG.parse("-fp16=True")
    with pytest.raises(RouteError, match="-speed"):
        hostile_backend.CATALOG.parse("-speed=warp")


def _chain(path: Path, order: tuple[int, ...], batch: int | str = 2) -> Path:
    """Two branches that meet, their nodes in some topological order."""
    from onnx import TensorProto, helper, save

    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Neg", ["x"], ["b"]),
        helper.make_node("Tanh", ["b"], ["c"]),
        helper.make_node("Add", ["a", "c"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [batch, 8]) for n in "xy")
    graph = helper.make_graph([nodes[i] for i in order], "g", [x], [y])
    opset = [helper.make_opsetid("", 17)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


def test_2182_the_order_of_nodes_changes_no_reference(tmp_path: Path) -> None:
    """57.0 % or 61.7 % accuracy by the order of nodes: what is right does not hang on it here."""
    made = [
        prepare(_chain(tmp_path / f"{i}.onnx", order), cache=tmp_path / "c", name="m")
        for i, order in enumerate([(0, 1, 2, 3), (1, 2, 0, 3), (1, 0, 2, 3)])
    ]
    for other in made[1:]:
        for mine, theirs in zip(
            made[0].selection_reference(), other.selection_reference(), strict=True
        ):
            np.testing.assert_array_equal(mine["y"], theirs["y"])


def test_katago_1228_figures_of_one_batch_do_not_answer_for_another(tmp_path: Path) -> None:
    """Fine at a small batch, no engine at a large one: each shape is a model of its own."""
    source = _chain(tmp_path / "m.onnx", (0, 1, 2, 3), "batch")
    small, large = (
        prepare(source, shapes={"x": (batch, 8)}, cache=tmp_path / "c") for batch in (1, 64)
    )
    assert small.fingerprint != large.fingerprint


def test_3316_shapes_that_vary_are_fixed_before_anything_is_built(tmp_path: Path) -> None:
    source = _chain(tmp_path / "m.onnx", (0, 1, 2, 3), "batch")
    try:
        model = prepare(source, cache=tmp_path / "c")
    except ModelError as error:
        assert "--shape" in str(error) or "shape" in str(error)
        return
    assert all(isinstance(d, int) and d > 0 for spec in model.inputs for d in spec.shape)


def test_rerun_87_what_is_judged_is_what_is_saved(session: Session, tmp_path: Path) -> None:
    """Extra outputs for debugging change the engine: none are added, no other engine is saved."""
    outcome = session.confirm(route("-speed=2"), tmp_path / "deploy")
    assert outcome.is_feasible and outcome.measurement is not None
    assert (tmp_path / "deploy" / "engine.txt").read_text() == outcome.engine_hash
    assert [spec.name for spec in session.model.outputs] == ["y", "z"]


# trtexec's own tuner.


def _mixed(told: dict[str, Outcome]) -> tuple[MixedAgent, list[Route]]:
    """`mixed` over three knobs, told these outcomes of single changes; what it asks then."""
    knobs = tuple(Knob(f"-{name}", ("0", "1", "2"), "0") for name in "abc")
    catalog = Catalog("c", "1", knobs)
    agent = MixedAgent(Problem(catalog, None, None, 60, 0))
    agent.tell(DEFAULT_ROUTE, Outcome(DEFAULT_ROUTE, Status.OK, "", synthetic.measurement(0.0)))
    asked: list[Route] = []
    while (found := agent.ask()) is not None:
        asked.append(found)
        slower = Outcome(found, Status.OK, "", synthetic.measurement(-0.5))
        agent.tell(found, replace(told.get(str(found), slower), route=found))
    return agent, asked


def _timed(log_speedup: float, status: Status = Status.OK, noise: float = 0.01) -> Outcome:
    return Outcome(DEFAULT_ROUTE, status, "", synthetic.measurement(log_speedup, noise))


def test_trtexec_a_knob_whose_engine_was_wrong_is_not_multiplied() -> None:
    """trtexec's collector of positive knobs looks at crash and time alone."""
    fast = _timed(0.4)
    _, asked = _mixed({"-a=1": fast, "-b=1": fast, "-c=1": _timed(0.9, Status.ACCURACY_FAILED)})
    second = [found for found in asked if len(found.values) > 1]
    assert second and all("-c" not in found.values for found in second)


def test_trtexec_noise_alone_multiplies_nothing() -> None:
    """trtexec takes one mean, strictly less: here an interval must clear the default."""
    luck = _timed(0.01, noise=0.05)
    _, asked = _mixed({"-a=1": luck, "-b=1": luck, "-c=1": luck})
    assert all(len(found.values) == 1 for found in asked)


def test_trtexec_two_good_values_of_one_knob_are_one_knob() -> None:
    """trtexec counts entries, so one knob with two good values starts a second phase."""
    _, asked = _mixed({"-a=1": _timed(0.4), "-a=2": _timed(0.5)})
    assert all(len(found.values) == 1 for found in asked)


def test_trtexec_a_resumed_mixed_sweep_knows_its_first_phase(
    hostile_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trtexec --continue forgets which knobs were positive, and cannot resume the second phase."""
    monkeypatch.setattr(worker, "Child", NearChild)
    monkeypatch.setattr(hostile_backend, "CATALOG", hostile_backend.offering(["fail"]))
    settings = SessionConfig(plan=PLAN, options={"noise": "none"})

    def run(out: str, builds: int) -> list[tuple[str, str]]:
        result = tune(
            hostile_model, backend="hostile_backend:make", agent="mixed", max_builds=builds,
            out=tmp_path / out, config=settings,
        )  # fmt: skip
        return [(str(o.route), o.status.value) for o in result.search.outcomes]

    whole = run("whole", 30)
    part = run("part", 4)
    assert part == whole[:4] and len(whole) > 4
    assert run("part", 30) == whole


def test_trtexec_a_winner_is_not_forgotten_on_resume(session: Session, tmp_path: Path) -> None:
    """trtexec's best so far starts from nothing after --continue."""
    best = session.outcome(route("-speed=2"))
    again = session._on_record(session.target.key)
    assert again[route("-speed=2")].gain == best.gain > 0
    assert not confirm_best(session, [again[route("-speed=2")]]).route.is_default
