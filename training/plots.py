"""`report --format png|svg`: the figure of a run, for a slide or a pull request.

Owns the figure: best speed-up so far against builds, and speed against accuracy. Needs the extra
`plots` (matplotlib).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from routepilot.env.errors import MissingExtraError
from routepilot.training.charts import LOSS_WORDS, front_of, stairs, timed_points
from routepilot.training.runs import read_result

#: Inches, and dots an inch of a PNG.
SIZE, DPI = (9.0, 3.4), 160


def write_figure(run: Path, kind: str) -> Path:
    """Write `report.png` or `report.svg` into a run folder and return its path.

    Args:
        run: The run's folder.
        kind: `png` or `svg`.

    Raises:
        InputError: The folder holds no readable result.
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "a figure needs matplotlib; pip install 'routepilot[plots]'"
        ) from None
    result = read_result(run)
    figure = Figure(figsize=SIZE, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _best_so_far(left, result["trials"])
    _frontier(right, result)
    figure.suptitle(_title(result))
    path = run / f"report.{kind}"
    figure.savefig(path, format=kind, dpi=DPI)
    return path


def _title(result: dict[str, Any]) -> str:
    # A dollar sign would start mathematics.
    name = str(result["model"]).replace("$", r"\$")
    if result["is_default"]:
        return f"{name}: the default route stays"
    return (
        f"{name}: {result['speedup']:.2f}x"
        f" ({result['speedup_low']:.2f} to {result['speedup_high']:.2f}) over the default route"
    )


def _best_so_far(axes: Any, trials: list[dict[str, Any]]) -> None:
    best, low, high = [1.0], [1.0], [1.0]
    for trial in trials:
        better = trial["status"] == "ok" and (trial["speedup"] or 0.0) > best[-1]
        best.append(trial["speedup"] if better else best[-1])
        low.append((trial["speedup_low"] or best[-1]) if better else low[-1])
        high.append((trial["speedup_high"] or best[-1]) if better else high[-1])
    builds = range(len(best))
    axes.step(builds, best, where="post")
    axes.fill_between(builds, low, high, step="post", alpha=0.2)
    for number, trial in enumerate(trials, 1):
        if trial["status"] == "ok" and trial["speedup"]:
            axes.plot(number, trial["speedup"], "o", color="C0", markersize=4)
        else:
            axes.plot(number, 1.0, "x", color="C3")
    axes.set(xlabel="builds", ylabel="speed-up over the default route", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.yaxis.set_minor_formatter("{x:g}x")
    axes.axhline(1.0, color="0.6", linewidth=0.8)


def _frontier(axes: Any, result: dict[str, Any]) -> None:
    gate = result["manifest"].get("gate") or {}
    metric, limit = gate.get("metric", "rel_l2"), gate.get("limit")
    points = timed_points(result["trials"], metric)
    corners = stairs(front_of(points), limit or 0.0)
    axes.plot([x for x, _ in corners], [y for _, y in corners], color="C2", linewidth=1.5)
    for loss, speedup, trial in points:
        kind = ("o", "C0") if trial["status"] == "ok" else ("x", "C3")
        axes.plot(loss, speedup, kind[0], color=kind[1], markersize=4)
    if limit:
        axes.axvline(limit, color="C3", linestyle="--", linewidth=0.8)
    axes.set(xlabel=f"error ({LOSS_WORDS.get(metric, metric)})", xscale="log")
