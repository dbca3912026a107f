"""`report`: one self-contained HTML page of a run, from its `result.json` alone.

Owns the page. Measures nothing and reads nothing but the run folder; every name on the page is
escaped, since model and file names come from outside.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from routepilot.env.errors import InputError
from routepilot.training.files import write_text

#: Drawing area of the best-so-far chart, in SVG units.
WIDTH, HEIGHT, MARGIN = 640, 240, 44

#: Speed-ups worth a grid line.
TICKS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8)


def write_report(run: Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    Raises:
        InputError: The folder holds no readable `result.json`.
    """
    from jinja2 import TemplateError

    source = run / "result.json"
    try:
        result = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{str(source)!r} cannot be read ({error});"
            " give a folder that `routepilot tune -o` wrote"
        ) from None
    page = run / "report.html"
    try:
        text = render(result)
    except (TemplateError, KeyError, TypeError, ValueError, AttributeError) as error:
        words = " ".join(str(error).split())[:200]
        raise InputError(
            f"{str(source)!r} is not a result of this version ({words});"
            " repeat `routepilot tune` there"
        ) from None
    write_text(page, text)
    return page


def render(result: dict[str, Any]) -> str:
    """The page for a result (the content of `result.json`)."""
    from jinja2 import Environment

    template = files("routepilot.training").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["ratio"] = lambda value: f"{value:.3f}x"
    environment.filters["short"] = lambda value: f"{value:.3g}"
    return environment.from_string(template).render(
        result=result, chart=chart(result["trials"]), manifest=_flat(result["manifest"])
    )


def chart(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometry of the best-so-far chart: points, steps and axis ticks in SVG units.

    Args:
        trials: `result["trials"]`.
    """
    speedups = [t["speedup"] if t["status"] == "ok" and t["speedup"] else None for t in trials]
    highest = max([1.0, *(s for s in speedups if s)])
    lowest = min([1.0, *(s for s in speedups if s)])
    low, high = math.log(lowest) - 0.05, math.log(highest) + 0.05

    def x(build: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * build / max(len(trials), 1)

    def y(speedup: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (math.log(speedup) - low) / (high - low)

    best, path = 1.0, [f"M {x(0):.1f} {y(1.0):.1f}"]
    for number, speedup in enumerate(speedups, start=1):
        path.append(f"H {x(number):.1f}")
        best = max(best, speedup or 1.0)
        path.append(f"V {y(best):.1f}")
    points = [
        {"x": x(i), "y": y(s) if s else y(1.0), "ok": s is not None, "trial": t}
        for i, (s, t) in enumerate(zip(speedups, trials, strict=True), start=1)
    ]
    ticks = [
        t for t in (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8) if low <= math.log(t) <= high
    ]
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "margin": MARGIN,
        "path": " ".join(path),
        "points": points,
        "y_ticks": [{"y": y(t), "text": f"{t:g}x"} for t in ticks],
        "x_ticks": [{"x": x(i), "text": str(i)} for i in range(len(trials) + 1)],
    }


def _flat(data: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in data.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name} ")
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows
