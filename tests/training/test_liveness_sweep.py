"""The liveness sweep: cut and resumed, its hostile compilers, and the real one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import hostile_liveness_child
import pytest
from typer.testing import CliRunner

from routepilot.env import liveness_pool
from routepilot.env.child import Child
from routepilot.env.errors import InputError, RouteError
from routepilot.env.liveness_table import describe_liveness, load_liveness, save_liveness
from routepilot.env.models import Model
from routepilot.training import cli_nvidia, liveness_sweep
from routepilot.training.cli_records import app
from routepilot.training.liveness_sweep import (
    LivenessOptions,
    card_of,
    models_in,
    order_of,
    sweep_liveness,
)

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="the extra rtx is not installed"
)


@pytest.fixture
def folder(tiny: Model, tmp_path: Path) -> Path:
    """A folder with one prepared model, of which only two files are needed."""
    place = tmp_path / "models" / "tiny"
    place.mkdir(parents=True)
    for name in ("model.json", "model.onnx"):
        shutil.copy(tiny.folder / name, place)
    return place.parent


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(module: str, *arguments: object) -> Child:
        return Child("hostile_liveness_child", *arguments)  # type: ignore[arg-type]

    monkeypatch.setenv("PYTHONPATH", str(Path(hostile_liveness_child.__file__).parent))
    monkeypatch.setattr(liveness_pool, "Child", child)
    monkeypatch.setattr(liveness_pool, "DEADLINE_SECONDS", 1.0)
    monkeypatch.setattr(liveness_pool, "GRACE", 0.3)
    monkeypatch.setattr(liveness_sweep, "compiler_version", lambda: "hostile")


NAMES = ("-kgen:tiling", "-concat_elim", "-split_elim", "-copy_ppg")


@pytest.mark.usefixtures("hostile")
def test_every_outcome_is_a_row(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    swept = sweep_liveness(models_in(folder), LivenessOptions(out, ("8.9",), 1, knobs=NAMES))
    assert swept.left == 0
    table = load_liveness(out)
    assert table == swept.table
    (answers,) = table.found.values()
    assert answers["-kgen:tiling=0"]["status"] == "crashed"
    assert answers["-kgen:tiling=1"]["status"] == "timed_out"
    assert answers["-concat_elim=off"]["reason"] == "CHECK failed"
    (facts,) = describe_liveness(table)["models"]
    assert (facts["changed"], facts["identical"], facts["failed"]) == (1, 1, 3)
    heard: list[tuple[int, int]] = []
    options = LivenessOptions(out, ("8.9",), 1, knobs=NAMES)
    sweep_liveness(models_in(folder), options, lambda *step: heard.append(step))
    assert heard == [(1, 1)]  # the hang again: a slow machine is not the model's fault


@pytest.mark.usefixtures("hostile")
def test_what_is_held_is_not_compiled_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, models = tmp_path / "t.parquet", models_in(folder)
    options = LivenessOptions(out, ("8.9",), 1, knobs=("-split_elim", "-copy_ppg"))
    first = sweep_liveness(models, options)
    heard: list[tuple[int, int]] = []
    again = sweep_liveness(models, options, lambda *step: heard.append(step))
    assert heard == []
    assert again.table.found == first.table.found
    more = replace(options, out=tmp_path / "u.parquet", resume=(out,), knobs=NAMES[1:])
    whole = sweep_liveness(models, more, lambda *step: heard.append(step))
    assert heard == [(1, 1)]
    assert {k: len(v) for k, v in whole.table.found.items()} == {(models[0].fingerprint, "8.9"): 4}


@pytest.mark.usefixtures("hostile")
def test_time_limit_leaves_a_table(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hang is cut off by the limit, so nothing is said of it, and what came before is kept."""
    monkeypatch.setattr(liveness_pool, "DEADLINE_SECONDS", 50.0)
    monkeypatch.setattr(liveness_pool, "KEEP_EVERY", 1)
    out = tmp_path / "t.parquet"
    options = LivenessOptions(out, ("8.9",), 1, seconds=0.0, knobs=NAMES)
    assert sweep_liveness(models_in(folder), options).left == 5
    assert load_liveness(out).found == {}
    swept = sweep_liveness(models_in(folder), replace(options, seconds=4.0))
    (answers,) = load_liveness(out).found.values()
    assert "" in answers
    assert "-kgen:tiling=1" not in answers
    assert swept.left >= 1
    assert swept.given_up == {}


@pytest.mark.usefixtures("hostile")
def test_leaking_compiler_costs_its_model_alone(folder: Path, tmp_path: Path, tiny: Model) -> None:
    shutil.copytree(folder / "tiny", folder / "twin")
    card = json.loads((folder / "twin" / "model.json").read_text())
    card |= {"name": "twin", "fingerprint": "f" * 64}
    (folder / "twin" / "model.json").write_text(json.dumps(card))
    options = LivenessOptions(tmp_path / "t.parquet", ("8.9",), 2, knobs=("-slice_fusion",))
    swept = sweep_liveness(models_in(folder), options)
    assert set(swept.given_up) == {"tiny for 8.9", "twin for 8.9"}
    assert "changed within one process" in swept.given_up["tiny for 8.9"]
    assert swept.table.found == {}
    assert swept.table.refusals == {}  # the machine may be at fault: tried again next time


@needs_rtx
def test_real_compiler_for_two_targets(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    knobs = ("-kgen:tiling", "-mha_fusion:v2", "-formats:reduce_dop")
    swept = sweep_liveness(models_in(folder), LivenessOptions(out, jobs=2, knobs=knobs))
    assert swept.left == 0
    assert not swept.given_up
    facts = describe_liveness(load_liveness(out))
    assert [m["target"] for m in facts["models"]] == ["8.9", "12.0"]
    for model in facts["models"]:
        assert model["changed"] == 1
        assert model["live_knobs"] == ["-kgen:tiling"]
        assert model["identical"] == 2
        assert model["failed"] == 1
        assert model["engine_bytes"] > 10_000
    assert facts["operator_rule"]["changed_though_ruled_out"] == []
    assert facts["operator_rule"]["identical_and_ruled_out"] == 2
    assert "Myelin" in facts["reasons"][0]["reason"]


@needs_rtx
def test_model_that_is_refused_is_written_down(folder: Path, tmp_path: Path) -> None:
    import onnx

    path = folder / "tiny" / "model.onnx"
    proto = onnx.load(str(path))
    proto.graph.node[-1].op_type = "Bernoulli"
    del proto.graph.node[-1].input[1]
    onnx.save(proto, str(path))
    options = LivenessOptions(tmp_path / "t.parquet", ("8.9",), 1, knobs=("-slice_fusion",))
    swept = sweep_liveness(models_in(folder), options)
    assert "Bernoulli" in swept.given_up["tiny for 8.9"]
    assert swept.left == 0
    assert list(load_liveness(options.out).refusals) == [(models_in(folder)[0].fingerprint, "8.9")]
    assert sweep_liveness(models_in(folder), options).given_up == {}  # not tried again


@needs_rtx
def test_bad_input_is_refused(folder: Path, tmp_path: Path) -> None:
    options = LivenessOptions(tmp_path / "t.parquet", ("8.9",), 1, knobs=("-slice_fusion",))
    models = models_in(folder)
    with pytest.raises(InputError, match=r"'9\.0' is not one .* allowed: .*8\.9"):
        sweep_liveness(models, replace(options, targets=("9.0", "8.9")))
    with pytest.raises(InputError, match="jobs 0"):
        sweep_liveness(models, replace(options, jobs=0))
    with pytest.raises(InputError, match="no target"):
        sweep_liveness(models, replace(options, targets=()))
    with pytest.raises(RouteError, match="-none"):
        sweep_liveness(models, replace(options, knobs=("-none",)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no prepared model"):
        models_in(tmp_path / "empty")


def test_ruled_out_changes_come_last(tiny: Model) -> None:
    order = order_of(["-mha_fusion:v2=off", "-kgen:tiling=0"], card_of(tiny).operators)
    assert order == ["-kgen:tiling=0", "-mha_fusion:v2=off"]


def test_corpus_models_carry_family_and_split(tiny: Model) -> None:
    known = card_of(replace(tiny, name="char_gpt"))
    assert (known.family, known.split, known.trained) == ("gpt", "test", True)
    assert card_of(tiny).family == ""


@needs_rtx
def test_verbs(folder: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    parts = []
    for knob in ("-kgen:tiling", "-mha_fusion:v2"):
        parts.append(str(tmp_path / f"{len(parts)}.parquet"))
        words = ["live", "--table", parts[-1], "--models", str(folder), "--targets", "8.9"]
        done = runner.invoke(cli_nvidia.app, [*words, "--knobs", knob, "--jobs", "1", "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["left"] == 0
    merged = str(tmp_path / "all.parquet")
    assert runner.invoke(app, ["records", "merge", *parts, "-o", merged]).exit_code == 0
    said = runner.invoke(app, ["records", "describe", merged])
    assert "2 identical" in said.stdout
    assert "unknown option" not in said.stdout
    facts = json.loads(runner.invoke(app, ["records", "describe", merged, "--json"]).stdout)
    assert (facts["changes"], facts["knobs"]) == (3, 2)


@pytest.mark.parametrize("words", [[], ["model.onnx", "--table", "t.parquet"]])
def test_live_takes_a_model_or_a_table(words: list[str]) -> None:
    done = CliRunner().invoke(cli_nvidia.app, ["live", *words])
    assert isinstance(done.exception, InputError)
    assert "one model, or --table" in str(done.exception)


def test_table_of_another_compiler_is_not_continued(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.env.errors import TableError
    from routepilot.env.liveness_table import LivenessTable

    out = tmp_path / "t.parquet"
    save_liveness(LivenessTable("TensorRT-RTX 1.0", (), (), {}), out)
    monkeypatch.setattr(liveness_sweep, "compiler_version", lambda: "2.0")
    with pytest.raises(TableError, match="two compilers"):
        sweep_liveness(models_in(folder), LivenessOptions(out, ("8.9",), 1))
