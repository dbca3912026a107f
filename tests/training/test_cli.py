"""The command line: exit codes, one-line refusals, JSON that holds what the design promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

from routepilot.training import cli, console


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["routepilot", *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def refused(code: int, out: str, err: str, *words: str) -> None:
    assert code == 2, err
    assert "Traceback" not in err
    assert out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    for word in words:
        assert word in lines[0], err


@pytest.mark.parametrize(("given", "steps"), [((), 60_000), (("--steps", "0"), 0)])
def test_train_takes_its_steps(
    given: tuple[str, ...],
    steps: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from routepilot.training import train
    from routepilot.training.train_config import TrainConfig

    seen: list[TrainConfig] = []

    def trained(table: object, config: TrainConfig, **_: object) -> train.Trained:
        seen.append(config)
        return train.Trained(Path("policy"), {}, config.steps, 0.0)

    monkeypatch.setattr(train, "train", trained)
    code, _, error = run(capsys, monkeypatch, "train", "--json", *given)
    assert code == 0, error
    assert [config.steps for config in seen] == [steps]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("missing.onnx",)),
        (b"", ("empty",)),
        (b"not a model at all", ("ONNX",)),
    ],
)
def test_unusable_model_files_are_refused_in_one_line(
    content: bytes | None,
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "missing.onnx"
    if content is not None:
        path.write_bytes(content)
    out = tmp_path / "out"
    refused(*run(capsys, monkeypatch, "tune", str(path), "-o", str(out)), *words)
    assert not out.exists()


def test_truncated_model_is_refused(
    tiny_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(tiny_file.read_bytes()[:-200])
    refused(*run(capsys, monkeypatch, "tune", str(cut), "-o", str(tmp_path / "out")), "cut.onnx")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tolerance", "-0.1"), ("-0.1",)),
        (("--tolerance", "nan"), ("nan",)),
        (("--metric", "l7"), ("l7", "rel_l2")),
        (("--limit", "y"), ("output=0.05",)),
        (("--shape", "x=1x3"), ("x",)),
        (("--shape", "x=1x3xbig"), ("1x3xbig",)),
        (("--max-builds", "-1"), ("-1",)),
        (("--agent", "psychic"), ("psychic", "random")),
        (("--agent", "random", "--policy", "cpu"), ("give one",)),
        (("--policy", "nowhere"), ("nowhere",)),
        (("--backend", "gcc"), ("gcc", "cpu")),
        (("--threads", "0"), ("0",)),
        (("--option", "threads=4"), ("--threads",)),
        (("--seed", "-1"), ("--seed -1",)),
        (("--max-seconds", "nan"), ("--max-seconds nan",)),
        (("--max-seconds", "-1"), ("--max-seconds -1",)),
        (("--deadline", "nan"), ("--deadline nan",)),
        (("--deadline", "0"), ("--deadline 0",)),
        (("--limit", "nobody=0.1"), ("nobody", "outputs are")),
    ],
)
def test_unusable_options_are_refused_in_one_line(
    options: tuple[str, ...],
    words: tuple[str, ...],
    tiny_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    refused(
        *run(capsys, monkeypatch, "tune", str(tiny_file), "-o", str(out), "--json", *options),
        *words,
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("compare MODEL --agents , -o OUT", "names nobody"),
        ("compare MODEL --max-builds -2 -o OUT", "--max-builds -2"),
        ("compare MODEL --expression nowhere=1 --agents random -o OUT", "nowhere"),
        ("collect --models nowhere -o OUT/t.parquet", "nowhere"),
        ("collect --models MODEL --workers 0 -o OUT/t.parquet", "0 workers"),
        ("collect --models MODEL -o OUT/t.onnx", ".parquet"),
        ("train --seed -1 -o OUT", "--seed -1"),
        ("train --max-seconds -1 -o OUT", "--max-seconds -1"),
        ("evaluate --split nowhere -o OUT", "nowhere"),
        ("evaluate --tolerance -1 -o OUT", "-1"),
        ("confirm-live nowhere -o OUT", "nowhere"),
        ("doctor --backend gcc", "gcc"),
        ("report OUT", "No such file"),
        ("explain OUT", "No such file"),
    ],
)
def test_every_verb_refuses_in_one_line_and_leaves_nothing(
    words: str,
    told: str,
    tiny_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    given = [w.replace("MODEL", str(tiny_file)).replace("OUT", str(out)) for w in words.split()]
    refused(*run(capsys, monkeypatch, *given), told)
    assert not out.exists()


def test_until_noise_without_a_belief_is_refused_before_any_build(
    tiny_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    options = ("--agent", "random", "--until-noise", "--quiet", "-o", str(out))
    refused(*run(capsys, monkeypatch, "tune", str(tiny_file), *options), "no expectation")
    assert not out.exists()


@pytest.mark.parametrize("lacks", ["shape", "type"])
@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_model_that_does_not_say_what_goes_in_or_out_is_refused_by_name(
    kind: str,
    lacks: str,
    tiny_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proto = onnx.load(str(tiny_file))
    value = getattr(proto.graph, kind)[0]
    (value.type.tensor_type if lacks == "shape" else value).ClearField(lacks)
    onnx.save(proto, str(tmp_path / "bare.onnx"))
    command = ("tune", str(tmp_path / "bare.onnx"), "-o", str(tmp_path / "out"))
    refused(*run(capsys, monkeypatch, *command), f"no {lacks} for its {kind} {value.name!r}")


def test_a_line_of_a_pipe_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console.say("word " * 100)
    assert capsys.readouterr().err.count("\n") == 1


def test_an_output_folder_that_is_a_file_is_refused(
    tiny_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    refused(*run(capsys, monkeypatch, "tune", str(tiny_file), "-o", str(taken)), "taken")
    assert taken.read_text() == "mine"


def test_unknown_table_names_the_released_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(*run(capsys, monkeypatch, "records", "describe", "nowhere"), "nowhere", "cpu")


def test_a_table_that_is_not_parquet_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 not really")
    refused(*run(capsys, monkeypatch, "records", "describe", str(bad)), "bad.parquet")


def test_knobs_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "knobs", "--json")
    assert code == 0
    rows = json.loads(out)
    engine = next(row for row in rows if row["name"] == "-engine")
    assert engine["default"] == "ort"
    assert {"name", "values", "default", "help", "marks"} <= set(engine)
    assert all(row["help"] for row in rows)


def test_features_json(
    tiny_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "features", str(tiny_file), "--json")
    assert code == 0
    assert len(json.loads(out)["features"]) > 20


def test_tune_writes_a_confirmed_result_and_resumes(
    tiny_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    arguments = ("tune", str(tiny_file), "-o", str(out), "--agent", "random", "--json")
    code, text, err = run(capsys, monkeypatch, *arguments, "--max-builds", "3")
    assert code == 0, err
    result = json.loads(text)
    promised = (
        "model fingerprint backend target policy route is_default speedup speedup_low"
        " speedup_high losses builds seconds outcomes manifest"
    )
    assert set(promised.split()) <= set(result)
    assert result["builds"] == 3 == sum(result["outcomes"].values())
    assert result["is_default"] == (result["route"] == "")
    assert result["is_default"] or result["speedup_low"] > 1
    written = json.loads((out / "result.json").read_text())
    assert written["route"] == result["route"]
    assert "tiny" in (out / "report.html").read_text()
    loaded = subprocess.run(
        [sys.executable, "load.py"], cwd=out / "deploy", capture_output=True, text=True, timeout=120
    )
    assert loaded.returncode == 0, loaded.stderr

    code, text, err = run(capsys, monkeypatch, *arguments, "--max-builds", "3")
    assert code == 0, err
    again = json.loads(text)
    assert [t["route"] for t in again["trials"]] == [t["route"] for t in result["trials"]]
    assert again["manifest"]["fresh_builds"] == 0


def test_compare_charges_every_agent_for_what_it_asked(
    tiny_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, text, err = run(
        capsys,
        monkeypatch,
        *("compare", str(tiny_file), "-o", str(tmp_path / "out"), "--json"),
        *("--agents", "default,fast,random", "--max-builds", "2"),
    )
    assert code == 0, err
    rows = json.loads(text)["agents"]
    assert {name: row["builds"] for name, row in rows.items()} == {
        "default": 0,
        "fast": 2,
        "random": 2,
    }
    assert rows["default"]["speedup"] == 1
    for row in rows.values():
        assert {"seconds", "speedup", "speedup_low", "speedup_high", "route"} <= set(row)


def test_doctor_passes_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text, err = run(capsys, monkeypatch, "doctor", "--json")
    checks = json.loads(text)
    assert code in (0, 1), err
    by_name = {check["check"]: check for check in checks}
    for name in ("tiny model", "catalog", "default route", "refused combination"):
        assert by_name[name]["status"] == "pass", by_name[name]
    assert by_name["child is killed at its deadline"]["status"] == "pass"


def test_the_list_of_modules_with_verbs_is_whole() -> None:
    folder = Path(cli.__file__).parent
    adding = re.compile(r"^@\w*app\.command\(", re.M)
    found = [p.stem for p in folder.glob("*.py") if adding.search(p.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(["cli", *cli.VERB_MODULES])


@pytest.mark.parametrize(("given", "told"), [(None, "1"), ("3", "3")])
def test_every_verb_multiplies_on_one_thread_unless_told_otherwise(
    given: str | None, told: str
) -> None:
    """Known before numpy is, which reads it once."""
    script = (
        "import os, sys; sys.argv = ['routepilot', 'agents', '--json']\n"
        "from routepilot.training import cli\n"
        "assert 'numpy' not in sys.modules\n"
        "try:\n    cli.main()\n"
        "except SystemExit:\n    pass\n"
        "print(os.environ['OPENBLAS_NUM_THREADS'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    environment |= {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == told


def test_help_needs_no_heavy_import_and_is_quick() -> None:
    script = (
        "import sys; sys.argv = ['routepilot', '--help']\n"
        "from routepilot.training.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'onnxruntime', 'openvino', 'onnx', 'pyarrow', 'gymnasium', 'scipy'}\n"
        "heavy |= {'ray', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    assert "tune" in done.stdout
    assert seconds < 3, seconds  # generous: CI machines are shared; `make bench` measures it
