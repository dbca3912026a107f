"""Geometry of a report's charts, in SVG units; the same points feed the figures of `plots.py`.

Owns scales, ticks and paths. Draws nothing.
"""

from __future__ import annotations

import math
from typing import Any

#: Drawing area, in SVG units: its size, the room above and below the axes, and beside them.
WIDTH, HEIGHT, MARGIN, LEFT, RIGHT = 640, 276, 54, 72, 28

#: Speed-ups worth a grid line.
TICKS = (0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)

#: Most ticks of an axis, and units between two of the other: a phone's text is 24 high.
MOST_TICKS, TICK_ROOM = 6, 25


def best_so_far(trials: list[dict[str, Any]], *, seconds: bool) -> dict[str, Any]:
    """Best speed-up so far, with its interval, against builds or seconds.

    Args:
        trials: `result["trials"]`.
        seconds: Against seconds of building and measuring instead of builds.
    """
    spent = [float(t["build_seconds"] + t.get("measure_seconds", 0.0)) for t in trials]
    where: list[float] = (
        [sum(spent[: i + 1]) for i in range(len(spent))] if seconds else _count(trials)
    )
    speedups = [t["speedup"] if t["status"] == "ok" and t["speedup"] else None for t in trials]
    scale = _Speed([s for s in speedups if s] + _best_ends(trials))
    end: float = max([*where, 1.0 if not seconds else 1e-3])

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / end

    best = (1.0, 1.0, 1.0)
    steps, band = [f"M {x(0):.1f} {scale.y(1.0):.1f}"], [(x(0), best)]
    for place, speedup, trial in zip(where, speedups, trials, strict=True):
        steps.append(f"H {x(place):.1f}")
        band.append((x(place), best))
        if speedup and speedup > best[0]:
            low, high = trial.get("speedup_low"), trial.get("speedup_high")
            best = (speedup, low or speedup, high or speedup)
        steps.append(f"V {scale.y(best[0]):.1f}")
        band.append((x(place), best))
    upper = [f"{px:.1f},{scale.y(b[2]):.1f}" for px, b in band]
    lower = [f"{px:.1f},{scale.y(b[1]):.1f}" for px, b in reversed(band)]
    return {
        **_area(scale),
        "path": " ".join(steps),
        "band": " ".join(upper + lower),
        "points": [
            {"x": x(px), "y": scale.y(s) if s else scale.y(1.0), "ok": s is not None, "trial": t}
            for px, s, t in zip(where, speedups, trials, strict=True)
        ],
        "x_ticks": _x_ticks(x, end, whole=not seconds),
        "x_label": "seconds of building and measuring" if seconds else "builds",
    }


def _best_ends(trials: list[dict[str, Any]]) -> list[float]:
    """Ends of the interval of every best so far, which the band must hold."""
    ends: list[float] = []
    best = 1.0
    for trial in trials:
        if trial["status"] == "ok" and (trial["speedup"] or 0.0) > best:
            best = trial["speedup"]
            ends += [e for e in (trial.get("speedup_low"), trial.get("speedup_high")) if e]
    return ends


#: A loss on the axis: what is smaller, 0 too, is drawn there.
SMALLEST = 1e-8

#: What a loss is called in figures and tables.
LOSS_WORDS = {"rel_l2": "relative L2"}

#: A build in a figure: its loss, its speed-up, its trial.
Point = tuple[float, float, dict[str, Any]]


def timed_points(trials: list[dict[str, Any]], metric: str) -> list[Point]:
    """Every build that was timed and has a finite loss by the metric.

    Args:
        trials: `result["trials"]`.
        metric: The gate's.
    """
    points = []
    for trial in trials:
        loss = trial["losses"].get(metric)
        if trial["speedup"] and isinstance(loss, (int, float)) and math.isfinite(loss):
            points.append((max(float(loss), SMALLEST), float(trial["speedup"]), trial))
    return points


def front_of(points: list[Point]) -> list[tuple[float, float]]:
    """Loss and speed-up of the feasible builds that no other beats in both, by rising loss."""
    front: list[tuple[float, float]] = []
    for loss, speedup, trial in sorted(points, key=lambda p: (p[0], -p[1])):
        if trial["status"] == "ok" and (not front or speedup > front[-1][1]):
            front.append((loss, speedup))
    return front


def stairs(front: list[tuple[float, float]], limit: float) -> list[tuple[float, float]]:
    """Corners of the line of the most speed that each loss allows, up to the limit."""
    ends = [loss for loss, _ in front[1:]] + [max(limit, front[-1][0])] if front else []
    return [corner for (a, s), b in zip(front, ends, strict=True) for corner in ((a, s), (b, s))]


def frontier(trials: list[dict[str, Any]], limit: float, metric: str = "rel_l2") -> dict[str, Any]:
    """Speed-up against loss, with the gate's limit and the front of what passes it.

    Args:
        trials: `result["trials"]`.
        limit: Limit of the gate.
        metric: Its metric.
    """
    points = timed_points(trials, metric)
    limit_drawn = max(limit, SMALLEST)
    scale = _Speed([p[1] for p in points])
    low = math.log10(min([p[0] for p in points] + [limit_drawn])) - 0.3
    high = math.log10(max([p[0] for p in points] + [limit_drawn])) + 0.3

    def x(loss: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(loss) - low) / (high - low)

    corners = stairs(front_of(points), limit_drawn)
    return {
        **_area(scale),
        "points": [
            {"x": x(p[0]), "y": scale.y(p[1]), "ok": p[2]["status"] == "ok", "trial": p[2]}
            for p in points
        ],
        "front": " ".join(f"{x(loss):.1f},{scale.y(speedup):.1f}" for loss, speedup in corners),
        "limit_x": x(limit_drawn),
        "limit": limit,
        "x_ticks": [{"x": x(loss), "text": text} for loss, text in _loss_ticks(low, high)],
        "x_label": f"error ({LOSS_WORDS.get(metric, metric)})",
    }


class _Speed:
    """The logarithmic axis of speed-ups, the default route's 1 always on it."""

    def __init__(self, speedups: list[float]) -> None:
        self._low = math.log(min([1.0, *speedups])) - 0.08
        self._high = math.log(max([1.0, *speedups])) + 0.08

    def y(self, speedup: float) -> float:
        share = (math.log(speedup) - self._low) / (self._high - self._low)
        inside = min(max(share, -0.05), 1.05)
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * inside

    def ticks(self) -> list[dict[str, Any]]:
        kept: list[float] = []
        # The default's 1 first, then outward from it, whatever has room.
        for tick in sorted(TICKS, key=lambda t: abs(math.log(t))):
            place = self.y(tick)
            has_room = all(abs(place - self.y(other)) >= TICK_ROOM for other in kept)
            if self._low <= math.log(tick) <= self._high and has_room:
                kept.append(tick)
        return [{"y": self.y(t), "text": f"{t:g}x", "is_default": t == 1} for t in sorted(kept)]


def _area(scale: _Speed) -> dict[str, Any]:
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "margin": MARGIN,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "y_ticks": scale.ticks(),
    }


def _powers(low: int, high: int) -> range:
    """Powers of ten for an axis, no more than fit."""
    return range(low, high + 1, max(1, math.ceil((high - low + 1) / MOST_TICKS)))


def _loss_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of ten; where fewer than two are in sight, twice and five times them too."""
    powers = _powers(math.ceil(low), math.floor(high))
    if len(powers) > 1:
        return [(10.0**power, f"1e{power}") for power in powers]
    return [
        (times * 10.0**power, f"{times}e{power}")
        for power in range(math.floor(low), math.floor(high) + 1)
        for times in (1, 2, 5)
        if low <= math.log10(times) + power <= high
    ]


def _count(trials: list[dict[str, Any]]) -> list[float]:
    return [float(i) for i in range(1, len(trials) + 1)]


def _x_ticks(x: Any, end: float, *, whole: bool) -> list[dict[str, Any]]:
    raw = end / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw)
    step = max(1.0, step) if whole else step
    count = int(end / step + 1e-9)
    return [{"x": x(i * step), "text": f"{i * step:g}"} for i in range(count + 1)]
