"""Tuning caches of trtexec on the command line: in, out, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from routepilot.env.backends.tensorrt_catalog import make_catalog, shipped_routes_json
from routepilot.env.routes import combine, parse_expression
from routepilot.env.store import RecordStore
from routepilot.training import cli, collect

EXPRESSION = "-conv_lowering=[on|off] -kgen:tiling=[0|1|2]"


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


def cache(path: Path, onnx: str, tail: str = "") -> Path:
    header: dict[str, Any] = {
        "tuner_version": "2.19.45",
        "accuracy_algorithm": "L0",
        "accuracy_parameter": {"atol": 1e-5, "rtol": 1e-5, "epsilon": 0.1},
        "searching_algorithm": "fast",
        "command_line": "trtexec",
        "default_build_route": "-conv_lowering=on -kgen:tiling=2",
        "tuning_expr": EXPRESSION,
        "files": {"onnx": onnx} if onnx else {},
        "argv": ["trtexec"],
    }
    # As trtexec writes it: the fastest row failed the accuracy check, and one crashed.
    rows = [
        ("on", "2", 1.0, ""),
        ("on", "0", 0.8, ""),
        ("on", "1", 0.5, "child exited with status 1"),
        ("off", "2", None, "child terminated by signal SIGSEGV"),
    ]
    lines = [header] + [
        {
            "iter": i,
            "build_route": f"-conv_lowering={a} -kgen:tiling={b}",
            "crash": time is None,
            "error_message": message,
            "accuracy_loss": None,
            "gpu_time": time,
        }
        for i, (a, b, time, message) in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def test_a_cache_goes_in_and_out(
    tiny_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = cache(tmp_path / "best_config.json", str(tiny_file), tail='{"iter": 4, "bu')
    store = tmp_path / "mine.sqlite"
    arguments = ("records", "import", str(source), "--store", str(store), "--device", "H100")
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 0, err
    assert "4 rows of tiny, 2 of them good" in out
    assert "cut off" in err
    code, out, _ = run(capsys, monkeypatch, *arguments, "--json")
    assert json.loads(out) == {"rows": 4, "feasible": 2}
    with RecordStore(store) as records:
        assert records.count() == 4  # the second import changed nothing
        (target,) = records.targets()
        assert (target.device, target.settings["timing"]) == ("H100", "trtexec mean")
        table = records.table()
    assert table.models[0].default_latency_ms == 1.0

    back = tmp_path / "back.json"
    code, out, err = run(
        capsys, monkeypatch, "records", "export", str(store), "-o", str(back), "--onnx", "m.onnx"
    )
    assert code == 0, err
    assert "4 rows" in out
    header, *rows = map(json.loads, back.read_text().splitlines())
    assert header["files"] == {"onnx": "m.onnx"}
    assert [(r["crash"], r["gpu_time"]) for r in rows][:2] == [(False, 1.0), (False, 0.8)]
    assert [bool(r["error_message"]) for r in rows] == [False, False, True, True]
    again = tmp_path / "again.sqlite"
    code, out, err = run(
        capsys,
        monkeypatch,
        *("records", "import", str(back), "--store", str(again), "--model", str(tiny_file)),
    )
    assert code == 0, err
    with RecordStore(again) as records:
        assert records.count() == 4

    parquet = tmp_path / "table.parquet"
    code, _, err = run(capsys, monkeypatch, "records", "export", str(store), "-o", str(parquet))
    assert code == 0, err
    assert parquet.read_bytes().startswith(b"PAR1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("none", ("names no model", "--model")),
        ("gone", ("is not there", "--model")),
        ("broken", ("not a tuning cache",)),
    ],
)
def test_caches_that_cannot_be_used_are_refused(
    content: str,
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = cache(tmp_path / "c.json", "" if content == "none" else "/gone/model.onnx")
    if content == "broken":
        source.write_text('{"tuner": 1}\n')
    store = tmp_path / "s.sqlite"
    code, _, err = run(capsys, monkeypatch, "records", "import", str(source), "--store", str(store))
    assert code == 2
    assert len(err.splitlines()) == 1
    assert all(word in err for word in words), err
    assert not store.exists()


def test_records_of_another_backend_are_no_tuning_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "cpu.sqlite"
    code, _, err = run(capsys, monkeypatch, "records", "import", "cpu", "--store", str(store))
    assert code == 0, err
    out = str(tmp_path / "x.json")
    code, _, err = run(capsys, monkeypatch, "records", "export", str(store), "-o", out)
    assert code == 2
    assert "of the backend cpu" in err


def test_planning_routes_of_tensorrt_ends() -> None:
    """Some twenty knobs of precision multiply beyond any memory."""
    catalog = make_catalog("tensorrt", "11.1", shipped_routes_json())
    routes = collect.plan_routes(catalog, 300, seed=0)
    single = catalog.neighbours(catalog.route({}))
    assert len(routes) == 300
    assert set(single) <= set(routes)
    assert all(catalog.is_legal(route) for route in routes)


def test_published_mixed_example_of_torch_tensorrt_reads() -> None:
    """Its expression lists values of unbounded knobs, which trtexec refuses and we take."""
    catalog = make_catalog("tensorrt", "11.1", shipped_routes_json())
    expression = parse_expression(
        "-match_ragged_mha=[on|off] -kgen:codegen:cuda_tile=[0|1|2|3]"
        " -cask_fusion:num_tactics=[10|20] -peep:max=[1|2]",
        catalog,
    )
    assert expression.count_full() == 2 * 4 * 2 * 2
    # One change at a time: 1 + 1 + 3 + 1 + 2, the default of -peep:max (0) not being listed.
    assert len(list(expression.fast(catalog))) == 8
    assert len(combine(catalog, expression.full())) == 32
