"""The sweep: its order, its budget, and that nothing measured is lost or measured twice."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import fake_cuda
import hostile_backend
import pytest
from typer.testing import CliRunner

from routepilot.env.errors import InputError
from routepilot.env.measure import TimingPlan
from routepilot.env.models import Model, prepare
from routepilot.env.outcomes import Status
from routepilot.env.routes import DEFAULT_ROUTE
from routepilot.env.tables import load_table, merge_tables, save_table
from routepilot.training.cli_records import records_app
from routepilot.training.gpu_sweep import Step, Sweep, SweepOptions, main, parse, plan_steps

QUICK = TimingPlan(warmup_seconds=0.0, block_seconds=0.001, max_rounds=6)


@pytest.fixture
def models(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one prepared model; children find the fakes."""
    folder = str(Path(fake_cuda.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
    shutil.copytree(tiny.folder, tmp_path / "models" / "tiny")
    return tmp_path / "models"


def options(models: Path, out: Path, **changes: object) -> SweepOptions:
    made = SweepOptions(models, out, "fake_cuda:backend", seconds=60, routes=6, lanes=2, plan=QUICK)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_steps_go_from_the_most_telling_to_the_least() -> None:
    catalog = fake_cuda.backend().catalog()
    steps = plan_steps(catalog, 60, 3)
    assert steps[0] == Step(DEFAULT_ROUTE, 1)
    assert [s.repeat for s in steps if s.route.is_default] == [1, 2, 3]
    assert steps[-1] == Step(DEFAULT_ROUTE, 3)
    routes = [s.route for s in steps if not s.route.is_default]
    assert len(routes) == len(set(routes)) == 60
    assert all(catalog.is_legal(route) for route in routes)
    first = [route.settings[0][0] for route in routes[:4]]
    assert first == ["-precision", "-precision", "-precision", "-prefer_nhwc"]
    singles = [len(route.settings) == 1 for route in routes]
    assert singles == sorted(singles, reverse=True)  # combinations come after
    assert catalog.parse("-precision=fp16 -prefer_nhwc=1") in routes[:40]
    assert len(plan_steps(catalog, 10, 0)) == 10


def test_a_sweep_measures_all_and_a_second_one_nothing(models: Path, tmp_path: Path) -> None:
    first = Sweep(options(models, tmp_path / "first"))
    summary = first.run()
    assert summary["fresh_outcomes"] == 6 + 3 and not summary["left"] and not summary["given_up"]
    path = tmp_path / "first" / "table.parquet"
    table = load_table(path)
    (routes,) = table.outcomes.values()
    assert len(routes) == 7 and len(routes[DEFAULT_ROUTE]) == 4
    assert json.loads((tmp_path / "first" / "summary.json").read_text())["controls"]["count"] == 3
    second = Sweep(options(models, tmp_path / "second", resume=(path,), routes=8))
    assert second.run()["fresh_outcomes"] == 2
    merged = merge_tables([table, load_table(tmp_path / "second" / "table.parquet")])
    assert len(next(iter(merged.outcomes.values()))) == 9
    out = tmp_path / "merged.parquet"
    slices = [str(path), str(tmp_path / "second" / "table.parquet")]
    told = CliRunner().invoke(records_app, ["merge", *slices, "-o", str(out)])
    assert told.exit_code == 0 and "1 model)" in told.output
    assert load_table(out).outcomes == merged.outcomes


def test_what_is_best_on_one_build_is_built_again(models: Path, tmp_path: Path) -> None:
    """Two figures of a table are made too good; each is the best until it was built again."""
    Sweep(options(models, tmp_path / "first")).run()
    table = load_table(tmp_path / "first" / "table.parquet")
    ((fingerprint, routes),) = table.outcomes.items()
    lucky = [r for r, o in routes.items() if not r.is_default and o[0].is_feasible][:2]
    planted = dict(routes)
    for route, gain in zip(lucky, (9.0, 8.0), strict=True):
        measured = routes[route][0].measurement
        assert measured is not None
        great = replace(measured, log_speedup=gain, low=gain - 0.1, high=gain + 0.1)
        planted[route] = (replace(routes[route][0], measurement=great),)
    path = tmp_path / "planted.parquet"
    save_table(replace(table, outcomes={fingerprint: planted}), path)
    for recheck, expected in ((1, [2, 1]), (2, [2, 2])):
        out = tmp_path / f"again{recheck}"
        summary = Sweep(options(models, out, resume=(path,), recheck=recheck)).run()
        assert summary["fresh_outcomes"] == recheck and not summary["given_up"]
        (outcomes,) = load_table(out / "table.parquet").outcomes.values()
        assert [len(outcomes[route]) for route in lucky] == expected
    assert summary["models"][0]["best_speedup"] < 1000


def test_a_sweep_ends_with_its_budget(models: Path, tmp_path: Path) -> None:
    sweep = Sweep(options(models, tmp_path / "out", seconds=0.01))
    summary = sweep.run()
    assert summary["left"] == {"tiny": 9}
    assert load_table(tmp_path / "out" / "table.parquet").target == sweep.target


def test_models_that_appear_later_join(models: Path, tmp_path: Path) -> None:
    sweep = Sweep(options(models, tmp_path / "out"))
    shutil.copytree(models / "tiny", models / "twin")
    sweep.look_for_models()
    sweep.look_for_models()
    assert len(sweep.works) == 2


def test_a_broken_model_is_given_up_and_the_rest_goes_on(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "tiny", models / "broken")
    description = json.loads((models / "broken" / "model.json").read_text())
    description |= {"name": "broken", "fingerprint": "0" * 64}
    (models / "broken" / "model.json").write_text(json.dumps(description))
    (models / "broken" / "model.onnx").write_bytes(b"not a model")
    summary = Sweep(options(models, tmp_path / "out", routes=2, controls=0)).run()
    assert list(summary["given_up"]) == ["broken"]
    assert summary["models"][0]["routes"] == 2


def test_crashes_of_children_are_outcomes(tmp_path: Path, models: Path) -> None:
    file = hostile_backend.hostile_model(tmp_path / "hostile.onnx")
    hostile = prepare(file, cache=tmp_path / "cache")
    folder = tmp_path / "hostile"
    shutil.copytree(hostile.folder, folder / "one")
    made = options(folder, tmp_path / "out", backend="hostile_backend:make", lanes=1, routes=4)
    sweep = Sweep(made)
    catalog = hostile_backend.CATALOG
    deeds = [catalog.parse(f"-do={deed}") for deed in ("segv", "exit", "raise", "fail")]
    sweep.works[0].steps = [Step(route) for route in deeds] + [Step(DEFAULT_ROUTE, 1)]
    summary = sweep.run()
    assert not summary["left"]
    (outcomes,) = load_table(tmp_path / "out" / "table.parquet").outcomes.values()
    statuses = [outcomes[route][0].status for route in deeds]
    failed = Status.BUILD_FAILED
    assert statuses == [Status.CRASHED, Status.CRASHED, failed, failed]
    assert len(outcomes[DEFAULT_ROUTE]) == 2


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), "-o", str(tmp_path / "out")]) == 2
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(InputError, match="above 0"):
        parse([str(tmp_path), "-o", str(tmp_path), "--seconds", "0"])
    with pytest.raises(InputError, match="--recheck -1 is not allowed"):
        parse([str(tmp_path), "-o", str(tmp_path), "--recheck", "-1"])
    arguments = [str(tmp_path), "-o", str(tmp_path / "out"), "--backend", "fake_cuda:backend"]
    assert main(arguments) == 2
    assert "zoo export" in capsys.readouterr().err
