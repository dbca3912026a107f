"""What an evaluation leaves in its folder: JSON, Markdown, one HTML page, and figures.

Owns the folder. The tables are in `evaluation_tables.py`, the figures in `evaluation_plots.py`; the
page holds both and needs nothing beside it. Names are escaped, since tables come from outside.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from routepilot.env.errors import MissingExtraError
from routepilot.env.wording import counted
from routepilot.training.evaluation_plots import write_figures
from routepilot.training.evaluation_tables import TextTable, all_tables, markdown, within_table
from routepilot.training.files import write_json, write_text
from routepilot.training.session import Say, silent


def write_evaluation(result: Mapping[str, Any], folder: Path, say: Say = silent) -> list[Path]:
    """Write `evaluation.json`, `.md`, `.html` and the figures.

    Args:
        result: What `evaluate` found.
        folder: An existing folder.
        say: Hears that there are no figures without matplotlib.

    Returns:
        What was written.
    """
    paths = [folder / f"evaluation.{form}" for form in ("json", "md", "html")]
    write_json(paths[0], result)
    try:
        drawn = write_figures(result, folder)
    except MissingExtraError as error:
        say(f"no figures: {error}")
        drawn = {}
    tables = [*all_tables(result), within_table(result["leakage"])]
    write_text(paths[1], _markdown(result, tables, drawn))
    write_text(paths[2], _page(result, tables, drawn))
    return [*paths, *(path for forms in drawn.values() for path in forms)]


def _markdown(
    result: Mapping[str, Any], tables: list[TextTable], drawn: Mapping[str, list[Path]]
) -> str:
    pictures = [f"![{title}]({forms[0].name})" for title, forms in drawn.items()]
    parts = [f"# Evaluation on the table {result['table']}", *_notes(result)]
    return "\n\n".join([*parts, *pictures, *(markdown(table) for table in tables)]) + "\n"


def _page(
    result: Mapping[str, Any], tables: list[TextTable], drawn: Mapping[str, list[Path]]
) -> str:
    from jinja2 import Environment

    template = files("routepilot.training").joinpath("evaluation.html.j2")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        result=result,
        notes=_notes(result),
        tables=tables,
        pictures={
            title: base64.b64encode(forms[0].read_bytes()).decode()
            for title, forms in drawn.items()
        },
    )


def _notes(result: Mapping[str, Any]) -> list[str]:
    """What must be known to read the figures, a paragraph each."""
    facts = result["manifest"]
    notes = [
        f"{counted(len(result['models']), 'model')}, {result['split']}; relative L2 error below"
        f" {result['tolerance']:g}; {counted(result['seeds'], 'search seed')} a model."
        " Intervals are 95 %, bootstrapped over models, search seeds and trainings. Intervals that"
        " rest on few models are too narrow.",
        f"Made by: {facts['command']} (commit {facts['git'] or 'unknown'}).",
    ]
    if result.get("policy"):
        policy = result["policy"]
        seen = ", ".join(policy["trained_on"]) or "none of these models"
        notes.append(
            f"ppo is the policy {policy['name']}, which learned from {policy['table']} and is"
            f" applied unchanged. Its network was trained on {seen}; what it looks up forgets the"
            " judged family."
        )
    if result["leakage"]["duplicates"]:
        pairs = "; ".join(" and ".join(pair) for pair in result["leakage"]["duplicates"])
        notes.append(f"Near-duplicates across the split: {pairs}. Figures on them are memory.")
    return notes
