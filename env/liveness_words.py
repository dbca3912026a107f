"""What a liveness table says in sum, in sentences: for the terminal and for the datasheet.

Owns the words. The figures are `liveness_table.describe_liveness`'s; the datasheet holds these
lines as they are, and a test holds it to the released table.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from routepilot.env.wording import counted, verb

#: Knobs named of those that act on most models.
NAMED = 8


def in_words(facts: Mapping[str, Any]) -> list[str]:
    """Sentences about a table, one a line.

    Args:
        facts: What `describe_liveness` gives.
    """
    if not facts["models"]:
        return []
    lines = [_size(facts), *_by_model(facts), _knobs(facts)]
    return [*lines, *map(_pair, facts["targets"]), *_foretold(facts), _rule(facts)]


def _size(facts: Mapping[str, Any]) -> str:
    names = {model["name"] for model in facts["models"]}
    targets = sorted({model["target"] for model in facts["models"]}, key=float)
    total = facts["outcomes"]
    compiled = sum(total.values())
    return (
        f"{counted(len(names), 'model')}, targets {' and '.join(targets)}:"
        f" {counted(compiled, 'change')} compiled by"
        f" {facts['compiler']} in {facts['seconds'] / 3600:.1f} hours of one child;"
        f" {total.get('changed', 0):,} changed the engine, {total.get('identical', 0):,} left it"
        f" byte-identical, {total.get('failed', 0):,} gave none."
    )


def _by_model(facts: Mapping[str, Any]) -> list[str]:
    whole = [m for m in facts["models"] if m["tried"] == facts["changes"]]
    if not whole:
        return []
    changed = [m["changed"] for m in whole]
    knobs = [len(m["live_knobs"]) for m in whole]
    engines = [m["distinct_engines"] for m in whole]
    failed = max(m["failed"] for m in whole)
    changes, all_knobs = counted(facts["changes"], "single change"), counted(facts["knobs"], "knob")
    return [
        f"Of the {changes} {statistics.median(changed):.0f} act on the"
        f" median model ({min(changed)} to {max(changed)}), of the {all_knobs}"
        f" {statistics.median(knobs):.0f} ({min(knobs)} to {max(knobs)}); they give"
        f" {min(engines)} to {counted(max(engines), 'distinct engine')}, and up to {failed}"
        f" {verb(failed, 'breaks', 'break')} the"
        " compiler."
    ]


def _knobs(facts: Mapping[str, Any]) -> str:
    most = list(facts["live_knobs"].items())[:NAMED]
    named = ", ".join(f"{name} ({count})" for name, count in most)
    return (
        f"{len(facts['never_live'])} of the {counted(facts['knobs'], 'knob')} changed no engine of"
        f" any model; on most models act: {named}."
    )


def _pair(pair: Mapping[str, Any]) -> str:
    compared = pair["same"] + pair["differ"]
    apart = [f"{change} ({count})" for change, count in list(pair["changes"].items())[:6]]
    rest = f"; most apart: {', '.join(apart)}." if apart else "."
    return (
        f"Targets {' and '.join(sorted(pair['targets'], key=float))} agree on {pair['same']:,} of"
        f" {counted(compared, 'outcome')}{rest}"
    )


def _foretold(facts: Mapping[str, Any]) -> Sequence[str]:
    told = facts["foretold"]
    if not told["models"]:
        return []
    return [
        f"Of the changes that act on a model of a family left out ({told['live']:.0f} on average),"
        f" the first {told['first']} by chance hold {100 * told['by_chance']:.0f} %, the first"
        f" {told['first']} of trtexec's order {100 * told['by_catalog']:.0f} %"
        f" ({counted(told['models'], 'model')})."
    ]


def _rule(facts: Mapping[str, Any]) -> str:
    rule = facts["operator_rule"]
    share = 100 * rule["identical_and_ruled_out"] / max(rule["identical"], 1)
    return (
        f"The operator rule ruled out {rule['ruled_out']:,}, of which"
        f" {len(rule['changed_though_ruled_out'])} changed an engine all the same; it foresees"
        f" {share:.0f} % of what is identical."
    )
