"""The tables of an evaluation as text: the same rows for the terminal, Markdown and HTML.

Owns which figures stand in which table and how a number is written. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from routepilot.env.wording import counted, verb

#: Budget whose interquartile mean stands in the first table; the others have a table of their own.
MIDDLE_AT = "2"


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        title: What it shows, in a sentence.
        columns: Headings.
        rows: Cells, as many a row as there are columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def headline_tables(result: Mapping[str, Any]) -> list[TextTable]:
    """The tables for a terminal: shares, the subject against each rival, how agents stop."""
    return [
        share_table(result),
        *([share_table(result, trained=True)] if _has_trained(result) else []),
        *against_tables(result),
        stop_table(result),
    ]


def all_tables(result: Mapping[str, Any]) -> list[TextTable]:
    """Every table of the evaluation, the headlines first."""
    return [
        *headline_tables(result),
        *(against_tables(result, trained=True) if _has_trained(result) else []),
        middle_table(result),
        *trainings_tables(result),
        *model_tables(result),
        leakage_table(result["leakage"]),
    ]


def share_table(result: Mapping[str, Any], *, trained: bool = False) -> TextTable:
    """Share of the best recorded gain by builds, for all models or the trained ones alone."""
    part = result["trained"] if trained else result
    count = result["trained"]["models"] if trained else len(result["models"])
    budgets = _budgets(part)
    rows = [
        (
            name,
            *(_interval(row, "gain_share", b) for b in budgets),
            _interval(row, "iqm", MIDDLE_AT),
            f"{row['builds_to_95']:.1f}",
            f"{row['stop_builds']:.1f}",
        )
        for name, row in part["agents"].items()
    ]
    which = counted(count, "trained model" if trained else "model")
    return TextTable(
        f"share of the best recorded gain after so many builds; {which}, {result['split']}, error"
        f" limit {result['tolerance']:g}",
        ("agent", *budgets, f"IQM at {MIDDLE_AT}", "builds to 95 %", "stops after"),
        tuple(rows),
    )


def middle_table(result: Mapping[str, Any]) -> TextTable:
    """Interquartile means of the runs' shares, by builds."""
    budgets = _budgets(result)
    return TextTable(
        "interquartile mean of the runs' shares of the best recorded gain, models with something"
        " to gain",
        ("agent", *budgets),
        tuple(
            (name, *(_interval(row, "iqm", b) for b in budgets))
            for name, row in result["agents"].items()
        ),
    )


def against_tables(result: Mapping[str, Any], *, trained: bool = False) -> list[TextTable]:
    """The subject against each rival: difference of shares, and probability of improvement.

    Args:
        result: The evaluation.
        trained: On the trained models alone.

    Returns:
        Two tables; none without a rival.
    """
    part = result["trained"] if trained else result
    versus = part["against"]
    if not versus["rivals"]:
        return []
    budgets = _budgets(part)
    count = part["models"] if trained else len(part["models"])
    which = counted(count, "trained model" if trained else "model")
    rivals = versus["rivals"].items()
    differences = [
        (
            name,
            *(_points(rival["difference"][b]) for b in budgets),
            _two_places(rival["fewer_builds"]),
        )
        for name, rival in rivals
    ]
    best = [versus["best_rival"][b] for b in budgets]
    differences += [
        ("to the best rival", *(_points(one["difference"]) for one in best), ""),
        ("which is", *(one["name"] for one in best), ""),
    ]
    chances = [
        (name, *(_two_places(rival["improvement"][b]) for b in budgets)) for name, rival in rivals
    ]
    title = f"{versus['agent']} against each rival after so many builds; {which}"
    return [
        TextTable(
            f"{title}: difference of the shares in points",
            ("rival", *budgets, "builds to 95 %, ratio"),
            tuple(differences),
        ),
        TextTable(f"{title}: probability of improvement", ("rival", *budgets), tuple(chances)),
    ]


def stop_table(result: Mapping[str, Any]) -> TextTable:
    """How well each agent knows when to stop."""
    nothing = sum(m["oracle_speedup"] <= 1 for m in result["models"])
    models, rows = len(result["models"]), []
    for name, row in result["agents"].items():
        stop = row["stop"]
        rows.append(
            (
                name,
                f"{stop['builds']:.1f} ({stop['builds_low']:.1f} to {stop['builds_high']:.1f})",
                f"{_percent(stop['regret'])} ({100 * stop['regret_low']:.0f} to"
                f" {100 * stop['regret_high']:.0f})",
                _percent(stop["within_one"]),
                _percent(stop["in_time"]),
            )
        )
    return TextTable(
        f"stop quality; {nothing} of {counted(models, 'model')}"
        f" {verb(nothing, 'has', 'have', models)} nothing to gain",
        (
            "agent",
            "builds at the stop",
            "gain left at the stop",
            "had it and stopped within a build",
            "nothing to gain: stopped after 2 or fewer",
        ),
        tuple(rows),
    )


def trainings_tables(result: Mapping[str, Any]) -> list[TextTable]:
    """Gain share of each training seed; no table where every agent was trained once at most."""
    tables = []
    for name, row in result["agents"].items():
        trainings = row["trainings"]
        if trainings["count"] < 2:
            continue
        budgets = list(trainings["gain_share"])
        rows = [
            (
                f"training {number + 1}",
                *(_percent(trainings["gain_share"][b][number]) for b in budgets),
            )
            for number in range(trainings["count"])
        ]
        spread = trainings["gain_share_sd"]
        rows.append(("standard deviation", *(f"{100 * spread[b]:.1f}" for b in budgets)))
        tables.append(
            TextTable(f"{name}: gain share of each training seed", ("", *budgets), tuple(rows))
        )
    return tables


def model_tables(result: Mapping[str, Any]) -> list[TextTable]:
    """Each model by itself: gain shares by budget, and builds to 95 % of the best gain."""
    agents = list(result["agents"])
    budgets = _budgets(result)
    shares = [
        TextTable(
            f"share of the best recorded gain of each model after {counted(int(b), 'build')}",
            ("model", "family", "weights", "best", *agents),
            tuple(
                (
                    *_model_cells(m),
                    *(
                        _percent(m["agents"][a]["gain_share"][b]) if _gains(m) else ""
                        for a in agents
                    ),
                )
                for m in result["models"]
            ),
        )
        for b in budgets
    ]
    builds = TextTable(
        "builds to 95 % of the best recorded gain of each model, and builds at the stop",
        ("model", "family", "weights", "best", *agents),
        tuple(
            (
                *_model_cells(m),
                *(
                    f"{m['agents'][a]['builds_to_95']:.1f}, {m['agents'][a]['builds']:.1f}"
                    for a in agents
                ),
            )
            for m in result["models"]
        ),
    )
    return [*shares, builds]


def leakage_table(leakage: Mapping[str, Any]) -> TextTable:
    """The nearest pairs of models across the split."""
    limits = leakage["thresholds"]
    duplicates = len(leakage["duplicates"])
    return TextTable(
        f"nearest models across the split ({leakage['split']}), of"
        f" {counted(leakage['compared'], 'pair')}; near by features under"
        f" {limits['features']:g}, by outcomes under {limits['outcomes']:g};"
        f" near-duplicates (both): {duplicates or 'none'}",
        ("judged", "known", "features", "outcomes", "gate agrees", "routes", "near by"),
        tuple(_pair_cells(p) for p in leakage["pairs"]),
    )


def within_table(leakage: Mapping[str, Any]) -> TextTable:
    """Pairs of one family, for scale."""
    return TextTable(
        "for scale, the nearest models of one family, which are held out together",
        ("model", "model of the same family", "features", "outcomes", "gate agrees", "routes", ""),
        tuple(_pair_cells(p) for p in leakage["within_families"]),
    )


def markdown(table: TextTable) -> str:
    """The table in Markdown, its title above."""
    lines = [
        f"**{_cell(table.title)}**",
        "",
        _line(table.columns),
        _line(["---"] * len(table.columns)),
    ]
    return "\n".join([*lines, *(_line(row) for row in table.rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    """Text for a Markdown table cell: one line, no bars, no markup of its own."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def _pair_cells(pair: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        pair["judged"],
        pair["known"],
        f"{pair['features']:.2f}",
        "" if pair["outcomes"] is None else f"{pair['outcomes']:.2f}",
        _percent(pair["agree"]),
        str(pair["routes"]),
        " and ".join(pair["flags"]),
    )


def _model_cells(model: Mapping[str, Any]) -> tuple[str, str, str, str]:
    weights = "trained" if model["trained"] else "random"
    return model["name"], model["family"], weights, f"{model['oracle_speedup']:.2f}x"


def _has_trained(result: Mapping[str, Any]) -> bool:
    """Whether some models, and not all, are trained."""
    return bool(0 < result["trained"]["models"] < len(result["models"]))


def _gains(model: Mapping[str, Any]) -> bool:
    return bool(model["oracle_speedup"] > 1)


def _budgets(part: Mapping[str, Any]) -> list[str]:
    return list(next(iter(part["agents"].values()))["gain_share"])


def _interval(row: Mapping[str, Any], name: str, budget: str) -> str:
    value, low, high = (row[f"{name}{end}"][budget] for end in ("", "_low", "_high"))
    return f"{100 * value:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def _two_places(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"


def _points(difference: Mapping[str, float]) -> str:
    value, low, high = (100 * difference[end] for end in ("value", "low", "high"))
    return f"{value:+.0f} ({low:+.0f} to {high:+.0f})"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
