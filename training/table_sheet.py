"""A route table for people: its figures in words, and its models as a Markdown table.

Owns the layout of `routepilot records describe` and of the datasheet in docs/table.md; the figures
are those of `routepilot.env.table_summary`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from routepilot.env.wording import counted, verb

Facts = Mapping[str, Any]


def in_words(facts: Facts) -> list[str]:
    """What a table says in sum, a sentence or two each.

    Args:
        facts: What `describe_table` gives.
    """
    models, coverage = facts["models"], facts["coverage"]
    rates, carried, single = facts["rates"], facts["carried_over"], facts["best_single"]
    winners = [m for m in models if m["best_builds"]]
    again = sum(m["best_builds"] > 1 for m in winners)
    pairs = max(1, carried["pairs"])
    hours = (facts["build_seconds"] + facts["measure_seconds"]) / 3600
    fewest, most = coverage["fewest_routes"], coverage["most_routes"]
    routes = f"{fewest} to {most}" if fewest < most else str(fewest)
    lines = [
        f"{counted(len(models), 'model')} of"
        f" {counted(coverage['families'], 'family', 'families')}, {coverage['trained']} of them"
        f" trained; {counted(coverage['routes'], 'route')}, {routes} a model,"
        f" {coverage['common_routes']} on all; {coverage['single_changes_common']} of the"
        f" {counted(coverage['single_changes'], 'single change')} on all;"
        f" {counted(coverage['builds'], 'build')} in {hours:.1f} machine hours.",
        f"At an error of {100 * facts['limit']:g} % the best is"
        f" {facts['oracle_speedup']:.2f}x on geometric average,"
        f" {facts['trained_speedup']:.2f}x over the trained models; nothing to gain for"
        f" {len(models) - len(winners)}; of the other {counted(len(winners), 'best')} {again}"
        f" {verb(again, 'was', 'were', len(winners))} built and timed a second time.",
        f"Single changes alone, all that fast tries, reach {facts['fast_speedup']:.2f}x,"
        f" {100 * facts['fast_share']:.0f} % of the best log speed-up; one route for all,"
        f" {single['route'] or 'the default'}, {single['speedup']:.2f}x.",
        f"The best route of one model is slower than the default on another in"
        f" {100 * carried['slower'] / pairs:.0f} %, and not accurate enough or fails in"
        f" {100 * carried['refused'] / pairs:.0f} %, of {counted(carried['pairs'], 'pair')}.",
        f"Of the routes {100 * rates['failed']:.1f} % fail and {100 * rates['not_accurate']:.1f} %"
        " are not accurate enough.",
    ]
    return [*lines, *_noise(facts)]


def _noise(facts: Facts) -> list[str]:
    controls = facts["controls"]
    if not controls["count"]:
        return ["No controls."]
    rebuilt = "; ".join(
        f"{row['of']} {_percent(row['between'])} between builds, {_percent(row['within'])} within,"
        f" {counted(row['count'], 'pair')}"
        for row in facts["rebuilt"]
    )
    return [
        f"{counted(controls['count'], 'control')}, the default built again and timed against the"
        f" default: median {_percent(controls['median'])}, 95 % below"
        f" {_percent(controls['below_95'])} (the noise floor), largest"
        f" {_percent(controls['largest'])}; a route must gain {_percent(facts['smallest_win'])} in"
        " the median to count.",
        f"One route built twice, robust standard deviation of the log ratio: {rebuilt}.",
    ]


def compared_in_words(facts: Facts) -> str:
    """What `compare_tables` gives, as a sentence."""
    return (
        f"{counted(facts['models'], 'model')} and {counted(facts['routes'], 'route')} of each in"
        " both tables: what is"
        f" best there keeps {100 * facts['kept']:.0f} % of the log speed-up that the best has here;"
        f" log speed-ups correlate with {facts['correlation']:.2f} (median model;"
        f" {facts['correlation_low']:.2f} to {facts['correlation_high']:.2f})."
    )


def markdown(tight: Facts, loose: Facts) -> str:
    """The models of a table as Markdown, the largest gain first.

    Args:
        tight: What `describe_table` gives at one accuracy limit.
        loose: The same at a looser one.
    """
    first, second = (f"{100 * facts['limit']:g} %" for facts in (tight, loose))
    looser = {m["name"]: m["best_speedup"] for m in loose["models"]}
    ordered = sorted(tight["models"], key=lambda m: -m["best_speedup"])
    heads = ["model", "family", "weights", "default ms", f"accurate at {first}", "fast"]
    heads += [f"best at {first}", "builds", f"best at {second}"]
    return "\n".join([_line(heads), _line(["---"] * len(heads)), *map(_row(looser), ordered)])


def _row(looser: Mapping[str, float]) -> Any:
    def row(model: Facts) -> str:
        route = f" `{model['best_route']}`" if model["best_route"] else ""
        return _line(
            [
                model["name"],
                model["family"],
                "trained" if model["trained"] else "random",
                f"{model['default_latency_ms']:.2g}",
                f"{model['feasible']} of {model['routes']}",
                f"{model['fast_speedup']:.2f}x",
                f"{model['best_speedup']:.2f}x{route}",
                str(model["best_builds"] or ""),
                f"{looser[model['name']]:.2f}x",
            ]
        )

    return row


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):.2g} %"
