"""The corpus as Markdown tables, for `routepilot zoo list --markdown` and docs/corpus.md.

Owns the layout alone; the rows are those of `routepilot.env.zoo.listing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from routepilot.env.wording import counted

Row = Mapping[str, Any]


def _shape(row: Row) -> str:
    shapes = (f"{name} {'x'.join(map(str, shape))}" for name, shape in row["shapes"].items())
    return ", ".join(shapes)


def markdown(rows: Sequence[Row]) -> str:
    """Counts, the models, what those that are trained here reached, and the other shapes.

    Args:
        rows: Rows of `listing`.
    """
    models = [row for row in rows if not row["variant_of"]]
    origins = Counter(row["origin"] for row in models)
    by_origin = ", ".join(f"{origins[name]} {name}" for name in origins)
    lines = [
        f"{counted(len(models), 'model')} in"
        f" {counted(len({row['family'] for row in models}), 'family', 'families')}"
        f" ({by_origin});"
        f" {counted(len(rows) - len(models), 'other shape')} of them.",
        "",
        "| split | models | trained | families |",
        "| --- | --- | --- | --- |",
    ]
    for split in dict.fromkeys(row["split"] for row in models):
        inside = [row for row in models if row["split"] == split]
        families = ", ".join(dict.fromkeys(row["family"] for row in inside))
        trained = sum(row["trained"] for row in inside)
        lines.append(f"| {split} | {len(inside)} | {trained} | {families} |")
    lines += ["", "| model | family | split | weights | parameters | inputs | licence |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in models:
        source = (
            f"{row['origin']} {row['package']}" if row["origin"] == "package" else row["origin"]
        )
        lines.append(
            f"| {row['name']} | {row['family']} | {row['split']} | {source}"
            f" | {row['parameters']:,} | {_shape(row)} | {row['licence']} |"
        )
    lines += ["", "| trained here | task | measure | reached | trivial answer | seconds |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in models:
        facts = row["quality"]
        if facts:
            lines.append(
                f"| {row['name']} | {facts['task']} | {facts['measure']} | {facts['reached']:.3f}"
                f" | {facts['trivial']:.3f} | {facts['train_seconds']} |"
            )
    lines += ["", "| other shape | inputs |", "| --- | --- |"]
    lines += [f"| {row['name']} | {_shape(row)} |" for row in rows if row["variant_of"]]
    return "\n".join(lines)
