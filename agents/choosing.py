"""Settings of a rival, chosen on the models it learns from.

Owns the inner replay: an agent with each setting tunes models of families that it did not see, and
the setting that reached most is kept. Whatever a fold holds out is never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from routepilot.agents.base import AgentFactory, Problem, search
from routepilot.env.backends.recorded import ModelReplay, Replay

#: Parts into which the families are dealt; each is judged by what learned from the others.
PARTS = 10

#: Builds after which the best gain counts, each the same.
BUDGETS = (1, 2, 4, 8)

Setting = TypeVar("Setting")

#: Learns from a replay with a setting.
Maker = Callable[[Replay, Setting], AgentFactory]


def choose_setting(make: Maker[Setting], settings: Sequence[Setting], replay: Replay) -> Setting:
    """The setting that reaches most on families unseen; the first where they are equal.

    Args:
        make: Learns from a replay with a setting.
        settings: What is chosen among, the authors' own first.
        replay: Training models.
    """
    families = list(dict.fromkeys(m.card.family for m in replay))
    if len(settings) == 1 or len(families) < 2:
        return settings[0]
    parts = [tuple(families[i::PARTS]) for i in range(min(PARTS, len(families)))]
    plan = [(replay.without_families(part), part) for part in parts]

    def reached(setting: Setting) -> float:
        total = 0.0
        for known, part in plan:
            factory = make(known, setting)
            unseen = [m for m in replay if m.card.family in part and m.oracle > 0]
            total += sum(mean_gain(factory, replay, model) for model in unseen)
        return total

    return max(settings, key=reached)


def mean_gain(factory: AgentFactory, replay: Replay, model: ModelReplay) -> float:
    """Mean of the best gains of a recorded model after each of `BUDGETS` builds, log speed-up."""
    problem = Problem(
        replay.catalog, model.card.features, model.routes, max(BUDGETS), 0, replay.gate.limit
    )
    outcomes = search(
        factory(problem),
        lambda route: model.default if route.is_default else model.outcome(route),
        max(BUDGETS),
    )
    gains = [max((o.gain for o in outcomes[:budget]), default=0.0) for budget in BUDGETS]
    return sum(gains) / len(gains)
