"""What route tables say in sum, and that the datasheet says what the released ones do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic

from routepilot.env.accuracy import Gate
from routepilot.env.errors import TableError
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.table_summary import compare_tables, describe_table, noise_floor
from routepilot.env.tables import load_table
from routepilot.training.defaults import find_table, released_liveness
from routepilot.training.table_sheet import compared_in_words, in_words, markdown

ROOT = Path(__file__).resolve().parents[2]


def test_description_counts_what_the_gate_lets_through() -> None:
    table = synthetic.table(2)
    tight = describe_table(table, Gate(limit=1e-4))
    loose = describe_table(table, Gate(limit=0.5))
    assert tight["statuses"]["accuracy_failed"] > 0
    assert loose["statuses"].get("accuracy_failed", 0) == 0
    assert tight["oracle_speedup"] < loose["oracle_speedup"]
    assert loose["controls"]["count"] == 2


def test_description_says_what_one_model_is_worth_to_another() -> None:
    """Two models, two routes: each one's best is slower, or not accurate, on the other."""
    table = synthetic.table(2)
    first, second = (Route.read(f"-made={n}") for n in (1, 2))

    def row(one: float, two: float, loss: float) -> dict[Route, tuple[Outcome, ...]]:
        def built(route: Route, gain: float, loss: float) -> Outcome:
            return Outcome(
                route,
                Status.OK,
                losses={"rel_l2": loss},
                measurement=synthetic.measurement(gain),
            )

        return {first: (built(first, one, 1e-4),), second: (built(second, two, loss),)}

    made = {
        table.models[0].fingerprint: row(0.5, 0.1, 0.3),
        table.models[1].fingerprint: row(-0.2, 0.4, 1e-4),
    }
    found = describe_table(replace(table, outcomes=made), Gate(limit=1e-2))
    assert found["carried_over"] == {"pairs": 2, "slower": 1, "refused": 1}
    assert found["best_single"]["route"] == str(first)
    assert found["best_single"]["speedup"] == pytest.approx(math.exp(0.25))
    trained = [m["best_speedup"] for m in found["models"] if m["trained"]]
    assert found["trained_speedup"] == pytest.approx(math.prod(trained) ** (1 / len(trained)))


def timed(route: Route, gain: float, *, scatter: float = 0.01, rounds: int = 10) -> Outcome:
    """An accurate outcome whose rounds scatter so much."""
    measured = replace(synthetic.measurement(gain), spread=scatter, rounds=rounds)
    return Outcome(route, Status.OK, losses={"rel_l2": 0.0}, measurement=measured)


def made(*models: Mapping[str, tuple[float, ...]]) -> RouteTable:
    """A table of gains: by model, route to the gain of each build."""
    table = synthetic.table(len(models))
    outcomes = {}
    for card, rows in zip(table.models, models, strict=True):
        routes = {text: Route.read(text) for text in rows}
        outcomes[card.fingerprint] = {
            route: tuple(timed(route, gain) for gain in rows[text])
            for text, route in routes.items()
        }
    return replace(table, outcomes=outcomes)


def test_failures_are_counted_by_reason_whatever_figures_are_in_it() -> None:
    facts = describe_table(synthetic.table(4), Gate(limit=1e-4))
    rows = {(row["status"], row["reason"]): row for row in facts["reasons"]}
    assert len(rows) == len(facts["reasons"])
    refused = rows["accuracy_failed", "rel_l2 of the worst output is N, the limit is N"]
    assert refused["builds"] == facts["statuses"]["accuracy_failed"] and refused["models"] == 4
    assert rows["build_failed", "level N is not supported"]["models"] == 2
    assert rows["crashed", "ended by SIGSEGV"]["models"] == 1
    failed = facts["statuses"]["build_failed"] + facts["statuses"]["crashed"]
    assert facts["rates"]["failed"] == pytest.approx(failed / facts["coverage"]["routes"])


def test_fast_is_told_apart_from_the_best_and_a_single_figure_from_two() -> None:
    first = {"": (0.0,), "-engine=b": (0.2,), "-engine=b -fuse=off": (0.9, 0.4)}
    second = {"": (0.0,), "-fuse=off": (0.3,), "-engine=b": (-0.1,)}
    facts = describe_table(made(first, second), Gate())
    one, two = facts["models"]
    assert one["best_route"] == "-engine=b -fuse=off" and one["best_builds"] == 2
    assert one["best_speedup"] == pytest.approx(math.exp(0.4))
    assert one["fast_speedup"] == pytest.approx(math.exp(0.2))
    assert two["best_builds"] == 1
    assert facts["fast_share"] == pytest.approx((0.2 + 0.3) / (0.4 + 0.3))
    assert facts["coverage"]["common_routes"] == facts["coverage"]["single_changes_common"] == 1
    lines = " ".join(in_words(facts))
    assert "of the other 2 bests 1 was built and timed a second time" in lines
    assert "No controls." in lines
    assert noise_floor(made(first)) is None


@pytest.mark.parametrize(("between", "scatter"), [(0.05, 0.01), (0.0, 0.05)])
def test_spread_between_builds_is_told_from_the_scatter_of_rounds(
    between: float, scatter: float
) -> None:
    rng, rounds = np.random.default_rng(3), 12
    table = synthetic.table(1)
    within = 1.2533 * scatter / math.sqrt(rounds)
    gains = rng.normal(0, math.hypot(between, within), 800)
    builds = tuple(timed(DEFAULT_ROUTE, g, scatter=scatter, rounds=rounds) for g in (0.0, *gains))
    table = replace(table, outcomes={table.models[0].fingerprint: {DEFAULT_ROUTE: builds}})
    (row,) = describe_table(table, Gate())["rebuilt"]
    assert (row["of"], row["count"]) == ("the default", 800)
    assert row["within"] == pytest.approx(within)
    assert row["between"] == pytest.approx(between, rel=0.15, abs=0.4 * within)
    assert noise_floor(table) == pytest.approx(1.96 * math.hypot(between, within), rel=0.15)


def test_tables_of_the_same_models_are_compared() -> None:
    here = made({"-engine=b": (0.5,), "-fuse=off": (0.1,), "-level=1": (0.25,)})
    there = made({"-engine=b": (-0.5,), "-fuse=off": (0.2,), "-level=1": (-0.1,)})
    same = compare_tables(here, here, Gate())
    assert (same["kept"], same["models"], same["routes"]) == (pytest.approx(1.0), 1, 3)
    assert same["correlation"] == pytest.approx(1.0)
    moved = compare_tables(here, there, Gate())
    assert moved["kept"] == pytest.approx(0.2) and moved["correlation"] < -0.9
    assert "keeps 20 % of the log speed-up" in compared_in_words(moved)
    strangers = replace(there, models=(), outcomes={})
    with pytest.raises(TableError, match="share no model"):
        compare_tables(here, strangers, Gate())


def said() -> str:
    """The datasheet's words, free of line breaks and of code marks."""
    text = (ROOT / "docs" / "table.md").read_text(encoding="utf-8")
    return " ".join(text.replace("`", "").split())


def facts_of(name: str, limit: float = 1e-2) -> dict[str, Any]:
    return describe_table(load_table(find_table(name)), Gate(limit=limit))


@pytest.mark.parametrize("name", ["cpu", "cpu-2-threads", "h200"])
def test_the_datasheet_holds_what_a_released_table_says(name: str) -> None:
    for line in in_words(facts_of(name)):
        assert line in said(), f"the datasheet must say: {line}"


def test_the_datasheet_holds_the_looser_limit_and_what_two_threads_keep() -> None:
    loose = in_words(facts_of("cpu", 3e-2))
    assert loose[1] in said() and loose[3] in said()
    tables = [load_table(find_table(name)) for name in ("cpu-2-threads", "cpu")]
    assert compared_in_words(compare_tables(tables[0], tables[1], Gate())) in said()


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_the_datasheet_lists_the_models_of_a_released_table(name: str) -> None:
    text = (ROOT / "docs" / "table.md").read_text(encoding="utf-8")
    assert markdown(facts_of(name), facts_of(name, 3e-2)) in text


def test_the_datasheet_tells_all_machine_hours() -> None:
    from routepilot.env.liveness_table import describe_liveness

    table = released_liveness()
    assert table is not None
    seconds = float(describe_liveness(table)["seconds"])
    for name in ("cpu", "cpu-2-threads", "h200"):
        facts = facts_of(name)
        seconds += facts["build_seconds"] + facts["measure_seconds"]
    assert f"took {seconds / 3600:.1f} machine hours in all" in said()


def test_every_released_file_is_small() -> None:
    files = sorted((ROOT / "checkpoints" / "tables").glob("*.parquet"))
    assert len(files) >= 4
    assert all(path.stat().st_size < 8_000_000 for path in files)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    from routepilot.training import cli

    monkeypatch.setattr("sys.argv", ["routepilot", "records", "describe", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_describe_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "cpu-2-threads", "--against", "cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out)["against"]["models"] == 16
    assert run(monkeypatch, "cpu-2-threads", "--markdown") == 0
    assert len(capsys.readouterr().out.splitlines()) == 18
    assert run(monkeypatch, "h200") == 0
    text = capsys.readouterr().out
    assert "NVIDIA H200; onnxruntime 1.31.1" in text and "command: python -m" in text
    assert run(monkeypatch, "liveness", "--markdown") == 2
    assert capsys.readouterr().err.count("\n") == 1
