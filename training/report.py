"""`report`: one self-contained HTML page of a run, and a Markdown summary for a pull request.

Owns the page and the summary. Measures nothing and reads nothing but the run folder; every name is
escaped, since model and file names come from outside. Geometry is in `charts.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from routepilot.env.errors import InputError
from routepilot.env.wording import counted
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
    environment.filters["counted"] = counted
    environment.filters["short"] = lambda value: f"{value:.3g}"
    environment.filters["words"] = lambda value: str(value).replace("_", " ")
    environment.globals["chooser"] = _chooser(result)
    trials = result["trials"]
    return environment.from_string(template).render(
        result=result,
        by_builds=best_so_far(trials, seconds=False),
        by_seconds=best_so_far(trials, seconds=True),
        front=frontier(
            trials, float(_gate(result).get("limit", 1e-2)), _gate(result).get("metric", "rel_l2")
        ),
        effects=knob_effects(trials),
        failures=_failures(trials),
        comparison=comparison if _is_same(comparison, result) else None,
        explanation=explanation,
        engines=_engines(explanation),
        manifest=_flat(
            {
                "fingerprint": result["fingerprint"],
                "target": {k: v for k, v in result["target"].items() if k != "device"},
                **result["manifest"],
            }
        ),
        forecast=result.get("forecast") or None,
        best_words=_best_words(result),
    )


def summary(result: dict[str, Any], comparison: dict[str, Any] | None = None) -> str:
    """A result in Markdown, short enough for a pull request: what else there is folds away."""
    lines = [f"### RoutePilot: {_cell(result['model'])}", "", *_answer_lines(result)]
    if comparison is not None and _is_same(comparison, result):
        lines += [
            "",
            f"Agents compared, at most {counted(comparison['max_builds'], 'build')} each:",
            "",
            "| agent | builds | confirmed speed-up | route |",
            "| --- | --- | --- | --- |",
            *(_agent_line(name, row) for name, row in comparison["agents"].items()),
        ]
        agents = comparison["agents"].items()
        lines += _by_trtexec({name: row.get("trtexec", "") for name, row in agents})
    if result["trials"]:
        failed = sum(trial["status"] != "ok" for trial in result["trials"])
        lines += [
            "",
            f"<details><summary>Every build ({len(result['trials'])}, {failed} of them failed)"
            "</summary>",
            "",
            "| # | route | outcome | speed-up | error (rel. L2) | build s |",
            "| --- | --- | --- | --- | --- | --- |",
            *(_trial_line(number, trial) for number, trial in enumerate(result["trials"], 1)),
            "",
            "</details>",
        ]
        told = [trial.get("trtexec", "") for trial in result["trials"]]
        lines += _by_trtexec({f"build {n}": line for n, line in enumerate(told, 1)})
    return "\n".join([*lines, ""])


def _answer_lines(result: dict[str, Any]) -> list[str]:
    """The answer and what it depends on."""
    if result.get("state", "done") != "done":
        lines = ["Not finished: nothing is confirmed yet."]
    elif result["is_default"]:
        lines = [f"The default route stays: {_cell(result.get('note', ''))}."]
    else:
        lines = [
            f"**{result['speedup']:.2f}x** ({result['speedup_low']:.2f} to"
            f" {result['speedup_high']:.2f}, 95 %) over the default route, confirmed with fresh"
            " builds and other inputs:",
            "",
            f"    {_line(result.get('trtexec') or result['route'])}",
        ]
    gate = _gate(result)
    limit = f"; {gate['metric']} below {gate['limit']:g}" if gate else ""
    return [
        *lines,
        "",
        f"{_cell(result['backend'])} on {_cell(result['target']['device'])}{limit};"
        f" {counted(result['builds'], 'route')} built in {result['seconds']:.0f} s, chosen by"
        f" {_cell(_chooser(result))}; default latency {result['default_latency_ms']:.3g} ms.",
    ]


def _by_trtexec(lines: Mapping[str, str]) -> list[str]:
    """Command lines that build the same, where the compiler has any."""
    told = [f"- {_cell(name)}: `{_cell(line)}`" for name, line in lines.items() if line]
    head = ["", "<details><summary>The same by trtexec, in the run's folder</summary>", ""]
    return [*head, *told, "", "</details>"] if told else []


def _trial_line(number: int, trial: dict[str, Any]) -> str:
    speedup = f"{trial['speedup']:.2f}x" if trial["speedup"] else ""
    loss = trial["losses"].get("rel_l2", "")
    error = f"{loss:.1e}" if isinstance(loss, float) else loss
    return (
        f"| {number} | `{_cell(trial['route'])}` | {_cell(trial['status']).replace('_', ' ')} |"
        f" {speedup} | {error} | {trial['build_seconds']:.2f} |"
    )


def _agent_line(name: str, row: dict[str, Any]) -> str:
    speedup = "1"
    if row["route"]:
        low, high = row["speedup_low"], row["speedup_high"]
        speedup = f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})"
    route = _cell(row["route"] or "default")
    return f"| {_cell(name)} | {row['builds']} | {speedup} | `{route}` |"


def _line(text: object) -> str:
    return " ".join(str(text).split())


def _cell(text: object) -> str:
    """Text for a Markdown table cell: one line, no bars, no markup of its own."""
    return _line(text).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def _chooser(result: dict[str, Any]) -> str:
    """Who chose the routes: an agent, or a policy, which may be named like a backend."""
    kind = "agent" if result.get("agent") == result["policy"] else "policy"
    return f"the {kind} {result['policy']}"


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
        "profiled": [engine["profiled_ms"] for engine in engines.values()],
        "whole": [engine["end_to_end_ms"] for engine in engines.values()],
        "costliest": [(name, engine.get("costliest", [])) for name, engine in engines.items()],
    }


def _best_words(result: dict[str, Any]) -> str:
    """What the curves show, for who cannot see them."""
    timed = [t for t in result["trials"] if t["status"] == "ok" and t["speedup"]]
    best = max(timed, key=lambda t: float(t["speedup"]), default=None)
    if best is None or best["speedup"] <= 1:
        return (
            f"None of {counted(len(result['trials']), 'build')} measured faster than the default"
            " route."
        )
    place = result["trials"].index(best) + 1
    return (
        f"The best of {counted(len(result['trials']), 'build')} measured {best['speedup']:.2f}"
        " times the"
        f" default's speed, at build {place}; the table of builds has the figures."
    )


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
        elif isinstance(value, list):
            rows.append((f"{prefix}{name}", ", ".join(map(str, value)) or "none"))
        elif isinstance(value, float) and math.isfinite(value):
            rows.append((f"{prefix}{name}", f"{value:.4g}"))
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows
