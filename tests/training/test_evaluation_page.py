"""What an evaluation leaves: the same figures in JSON, tables, page and drawings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic

from routepilot.training.evaluate import evaluate
from routepilot.training.evaluation_page import write_evaluation
from routepilot.training.evaluation_tables import (
    TextTable,
    against_tables,
    all_tables,
    markdown,
    model_tables,
    share_table,
    stop_table,
    trainings_tables,
)

AGENTS = ("random", "best-on-average", "two-way-gp")


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    made = synthetic.table()
    nasty = replace(made.models[0], name="a|b <script>`x`")
    table = replace(made, models=(nasty, *made.models[1:]))
    return evaluate(table, AGENTS, seeds=2, name="made")


def test_tables_say_what_the_json_says(result: dict[str, Any]) -> None:
    table = share_table(result)
    row = dict(zip(table.columns, table.rows[2], strict=True))
    figures = result["agents"]["two-way-gp"]
    assert row["agent"] == "two-way-gp"
    assert row["1"].startswith(f"{100 * figures['gain_share']['1']:.0f} %")
    assert row["IQM at 2"].startswith(f"{100 * figures['iqm']['2']:.0f} %")
    assert row["builds to 95 %"] == f"{figures['builds_to_95']:.1f}"
    trained = share_table(result, trained=True)
    assert f"{sum(m['trained'] for m in result['models'])} trained models" in trained.title


def test_the_subject_meets_every_rival_and_its_best_one(result: dict[str, Any]) -> None:
    differences, chances = against_tables(result)
    assert [row[0] for row in chances.rows] == ["random", "best-on-average"]
    best = result["against"]["best_rival"]["1"]
    assert differences.rows[-1][:2] == ("which is", best["name"])
    named = next(row for row in differences.rows if row[0] == best["name"])
    assert differences.rows[-2][1] == named[1]
    assert differences.rows[0][1].startswith("+")


def test_every_table_is_a_table(result: dict[str, Any]) -> None:
    tables = all_tables(result)
    assert len(tables) > 10
    for table in tables:
        assert all(len(row) == len(table.columns) for row in table.rows), table.title
        lines = markdown(table).splitlines()
        bars = {line.replace("\\|", "").count("|") for line in lines[2:]}
        assert bars == {len(table.columns) + 1}, table.title
    assert len(model_tables(result)[0].rows) == len(result["models"])
    assert len(stop_table(result).rows) == len(AGENTS)
    assert trainings_tables(result) == []  # nothing was trained


def test_trainings_have_a_table_of_their_own(result: dict[str, Any]) -> None:
    several = {
        "count": 2,
        "gain_share": {"1": [0.5, 0.7]},
        "gain_share_sd": {"1": 0.1414},
    }
    row = {**result["agents"]["random"], "trainings": several}
    (table,) = trainings_tables({"agents": {"ppo": row}})
    assert table.rows == (
        ("training 1", "50 %"),
        ("training 2", "70 %"),
        ("standard deviation", "14.1"),
    )


def test_a_cell_cannot_break_the_table() -> None:
    text = markdown(TextTable("t", ("a", "b"), (("x|y\nz", "<b>`"),)))
    assert text.splitlines()[-1] == "| x\\|y z | &lt;b>' |"


def test_folder_holds_it_all_and_the_page_needs_nothing_else(
    result: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    written = write_evaluation(result, tmp_path)
    assert {p.name for p in written} == {p.name for p in tmp_path.iterdir()}
    assert {"builds.svg", "builds.png", "seconds.svg", "profile-1.svg"} <= {p.name for p in written}
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result
    page = (tmp_path / "evaluation.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert page.count("data:image/svg+xml;base64,") == page.count("<figure>") >= 5
    assert 'src="http' not in page and "two-way-gp" in page
    text = (tmp_path / "evaluation.md").read_text()
    assert "![share of the best recorded gain against builds](builds.svg)" in text
    first = (tmp_path / "builds.svg").read_bytes()
    write_evaluation(result, tmp_path)
    assert (tmp_path / "builds.svg").read_bytes() == first  # equal figures, equal files


def test_without_matplotlib_there_are_tables_and_a_word(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    heard: list[str] = []
    write_evaluation(result, tmp_path, heard.append)
    assert {p.name for p in tmp_path.iterdir()} == {
        "evaluation.json",
        "evaluation.md",
        "evaluation.html",
    }
    assert "routepilot[plots]" in heard[0]
