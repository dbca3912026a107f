"""The figures of an evaluation: curves against builds and seconds, and performance profiles.

Owns the drawings, as SVG and PNG. Needs the extra `plots` (matplotlib).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routepilot.env.errors import MissingExtraError
from routepilot.env.wording import counted

#: Inches of one panel, and dots an inch of a PNG.
SIZE, DPI = (6.4, 3.8), 150

#: Forms in which each figure is written.
FORMS = ("svg", "png")

#: Colours and dashes tell more agents apart than colours alone; the subject is black.
COLOURS, DASHES = 10, ("-", "--", ":")


def write_figures(result: Mapping[str, Any], folder: Path) -> dict[str, list[Path]]:
    """Draw every figure of an evaluation.

    Args:
        result: Content of `evaluation.json`.
        folder: An existing folder.

    Returns:
        Title -> its files, one a form of `FORMS`.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "figures of an evaluation need matplotlib; pip install 'routepilot[plots]'"
        ) from None
    # Equal figures are equal files: no date, no random names of their parts.
    settings: Any = {"svg.hashsalt": "routepilot", "svg.fonttype": "none"}
    drawn: dict[str, list[Path]] = {}
    for name, title, draw in _figures(result):
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=SIZE, layout="constrained")
            axes = figure.subplots()
            draw(axes)
            axes.set_title(title, fontsize="medium")
            axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
            axes.grid(alpha=0.3)
            drawn[title] = [folder / f"{name}.{form}" for form in FORMS]
            for path, form in zip(drawn[title], FORMS, strict=True):
                metadata = {"Date": None} if form == "svg" else {}
                figure.savefig(path, format=form, dpi=DPI, metadata=metadata)
    return drawn


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Name, title and drawing of each figure."""
    curves, profiles, shaded = result["curves"], result["profiles"], _shaded(result)
    found: list[tuple[str, str, Any]] = [
        (
            "builds",
            "share of the best recorded gain against builds",
            lambda axes: _curve(axes, curves["builds"], "builds", shaded),
        ),
        (
            "seconds",
            "share of the best recorded gain against seconds of building and measuring",
            lambda axes: _curve(axes, curves["seconds"], "seconds a model", shaded, "log"),
        ),
    ]
    for budget, agents in profiles["budgets"].items():
        found.append(
            (
                f"profile-{budget}",
                f"performance profile after {counted(int(budget), 'build')}",
                lambda axes, agents=agents: _profile(axes, profiles["levels"], agents, shaded),
            )
        )
    return found


def _shaded(result: Mapping[str, Any]) -> list[str]:
    """Whose interval is drawn: the subject, which comes first, and its best rivals.

    More would be a blur.
    """
    versus = result["against"]
    rivals = (one["name"] for one in versus["best_rival"].values())
    return list(dict.fromkeys([versus["agent"], *rivals]))


def _curve(
    axes: Any, curve: Mapping[str, Any], label: str, shaded: list[str], scale: str = "linear"
) -> None:
    for place, (name, line) in enumerate(curve["agents"].items()):
        _line(axes, (place, name), curve["at"], line, shaded, "post")
    axes.set(
        xlabel=label, ylabel="share of the best recorded gain", ylim=(-0.02, 1.04), xscale=scale
    )


def _profile(axes: Any, levels: list[float], agents: Mapping[str, Any], shaded: list[str]) -> None:
    for place, (name, line) in enumerate(agents.items()):
        _line(axes, (place, name), levels, line, shaded, "pre")
    axes.set(
        xlabel="share of the model's best recorded gain",
        ylabel="share of runs with at least that",
        ylim=(-0.02, 1.04),
    )


def _line(
    axes: Any,
    agent: tuple[int, str],
    at: list[float],
    line: Mapping[str, Any],
    shaded: list[str],
    step: str,
) -> None:
    place, name = agent
    colour, dash = f"C{place % COLOURS}", DASHES[place // COLOURS % len(DASHES)]
    width, order = (2.2 if name in shaded else 1.2), 2
    if name == shaded[0]:  # in black and above all others
        colour, dash, order = "black", "-", 3
    drawn: dict[str, Any] = {"color": colour, "ls": dash, "lw": width, "zorder": order}
    axes.step(at, line["value"], label=name, where=step, **drawn)
    if name in shaded:
        axes.fill_between(
            at, line["low"], line["high"], color=colour, alpha=0.15, linewidth=0, step=step
        )
