"""`report`: one self-contained HTML page of a run, and a Markdown summary for a pull request.

Owns the page and the summary. Measures nothing and reads nothing but the run folder; every name is
escaped, since model and file names come from outside. Geometry is in `charts.py`.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from routepilot.env.errors import InputError
from routepilot.training.charts import best_so_far, frontier
from routepilot.training.effects import knob_effects
from routepilot.training.files import write_text
from routepilot.training.runs import EXPLANATION, read_result

#: Operators listed of each engine.
SHOWN = 12


def write_report(run: Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    Raises:
        InputError: The folder holds no readable `result.json`, or one of another version.
    """
    from jinja2 import TemplateError

    result = read_result(run)
    page = run / "report.html"
    try:
        text = render(result, _optional(run / "comparison.json"), _optional(run / EXPLANATION))
    except (TemplateError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(run, error) from None
    write_text(page, text)
    return page


def write_summary(run: Path) -> Path:
    """Write `report.md` into a run folder and return its path.

    Raises:
        InputError: As `write_report`.
    """
    result = read_result(run)
    page = run / "report.md"
    try:
        text = summary(result, _optional(run / "comparison.json"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(run, error) from None
    write_text(page, text)
    return page


def render(
    result: dict[str, Any],
    comparison: dict[str, Any] | None = None,
    explanation: dict[str, Any] | None = None,
) -> str:
    """The page for a result (the content of `result.json`).

    Args:
        result: Content of `result.json`.
        comparison: Content of `comparison.json` of the same folder.
        explanation: Content of `explanation.json`.
    """
    from jinja2 import Environment

    template = files("routepilot.training").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["ratio"] = lambda value: f"{value:.3f}x"
    environment.filters["short"] = lambda value: f"{value:.3g}"
    trials = result["trials"]
    return environment.from_string(template).render(
        result=result,
        by_builds=best_so_far(trials, seconds=False),
        by_seconds=best_so_far(trials, seconds=True),
        front=frontier(trials, float(_gate(result).get("limit", 1e-2))),
        effects=knob_effects(trials),
        failures=_failures(trials),
        comparison=comparison if _is_same(comparison, result) else None,
        explanation=explanation,
        engines=_engines(explanation),
        manifest=_flat(result["manifest"]),
    )


def summary(result: dict[str, Any], comparison: dict[str, Any] | None = None) -> str:
    """A result in Markdown, short enough for a pull request."""
    target = result["target"]
    lines = [f"### RoutePilot: {_cell(result['model'])}", ""]
    if result["is_default"]:
        lines.append(f"The default route stays: {_cell(result.get('note', ''))}.")
    else:
        lines.append(
            f"**{result['speedup']:.2f}x** ({result['speedup_low']:.2f} to"
            f" {result['speedup_high']:.2f}, 95 %) over the default route, confirmed with fresh"
            " builds and other inputs."
        )
        lines += ["", f"    {result['route']}"]
    lines += [
        "",
        f"{result['backend']} on {_cell(target['device'])}; {result['builds']} routes built,"
        f" {result['seconds']:.0f} s; default latency {result['default_latency_ms']:.3g} ms.",
        "",
        "| # | route | outcome | speed-up | error (rel. L2) | build s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for number, trial in enumerate(result["trials"], 1):
        speedup = f"{trial['speedup']:.2f}x" if trial["speedup"] else ""
        loss = trial["losses"].get("rel_l2", "")
        error = f"{loss:.1e}" if isinstance(loss, float) else loss
        lines.append(
            f"| {number} | `{_cell(trial['route'])}` | {trial['status']} | {speedup} | {error} |"
            f" {trial['build_seconds']:.2f} |"
        )
    if any("trtexec" in trial for trial in result["trials"]):
        lines += ["", "The same by trtexec, in the run's folder:", ""]
        lines += [
            f"{number}. `{_cell(trial['trtexec'])}`"
            for number, trial in enumerate(result["trials"], 1)
        ]
    if comparison is not None and _is_same(comparison, result):
        lines += [
            "",
            "| agent | builds | confirmed speed-up | route |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| {_cell(name)} | {row['builds']} | {row['speedup']:.2f}x"
            f" ({row['speedup_low']:.2f} to {row['speedup_high']:.2f}) |"
            f" `{_cell(row['route'] or 'default')}` |"
            for name, row in comparison["agents"].items()
        ]
        told = [(n, r["trtexec"]) for n, r in comparison["agents"].items() if "trtexec" in r]
        lines += [""] * bool(told) + [f"- {_cell(n)}: `{_cell(line)}`" for n, line in told]
    return "\n".join([*lines, ""])


def _cell(text: object) -> str:
    """Text for a Markdown table cell: one line, no bars, no markup of its own."""
    line = " ".join(str(text).split())
    return line.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def _gate(result: dict[str, Any]) -> dict[str, Any]:
    gate = result["manifest"].get("gate")
    return gate if isinstance(gate, dict) else {}


def _failures(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Failures by kind and words, commonest first, with the first route that met each."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for trial in trials:
        if trial["status"] != "ok":
            key = (trial["status"], trial["reason"])
            entry = found.setdefault(
                key, {"status": key[0], "reason": key[1], "count": 0, "route": trial["route"]}
            )
            entry["count"] += 1
    return sorted(found.values(), key=lambda entry: -entry["count"])


def _engines(explanation: dict[str, Any] | None) -> dict[str, Any] | None:
    """Operators of both engines side by side, the most costly first."""
    engines = (explanation or {}).get("engines")
    if not engines:
        return None
    kinds: dict[str, float] = {}
    for engine in engines.values():
        for kind in [*engine["by_kind"], *engine["nodes"]]:
            kinds[kind] = max(kinds.get(kind, 0.0), engine["by_kind"].get(kind, 0.0))
    shown = sorted(kinds, key=lambda kind: -kinds[kind])[:SHOWN]
    return {
        "names": list(engines),
        "rows": [
            (
                kind,
                [
                    (engine["by_kind"].get(kind, 0.0), engine["nodes"].get(kind, 0))
                    for engine in engines.values()
                ],
            )
            for kind in shown
        ],
        "sums": [engine["sum_ms"] for engine in engines.values()],
        "whole": [engine["end_to_end_ms"] for engine in engines.values()],
    }


def _is_same(comparison: dict[str, Any] | None, result: dict[str, Any]) -> bool:
    return comparison is not None and comparison.get("fingerprint") == result["fingerprint"]


def _optional(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _unreadable(run: Path, error: Exception) -> InputError:
    words = " ".join(str(error).split())[:200]
    return InputError(
        f"the result in {str(run)!r} is not one of this version ({words});"
        " repeat `routepilot tune` there"
    )


def _flat(data: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in data.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name} ")
        elif isinstance(value, float) and math.isfinite(value):
            rows.append((f"{prefix}{name}", f"{value:.4g}"))
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows
