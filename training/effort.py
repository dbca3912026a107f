"""How much a verb spends when the user names an effort and no figures.

Owns the presets. A figure that the user gives stands against the preset's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routepilot.env.measure import TimingPlan


class Effort(str, Enum):
    """Presets by name."""

    QUICK = "quick"
    STANDARD = "standard"
    THOROUGH = "thorough"


@dataclass(frozen=True)
class Preset:
    """What an effort means.

    Attributes:
        builds: Routes that `tune` and `compare` build.
        routes: Routes a model that `collect` builds.
        steps: Environment steps that `train` takes.
        plan: How carefully engines are timed.
    """

    builds: int
    routes: int
    steps: int
    plan: TimingPlan


def preset(effort: Effort) -> Preset:
    """What an effort means.

    The standard is what every figure of the README was made with. The quick one gives up precision
    (intervals of 2.5 % instead of 1.5 % on each side), the thorough one buys it.
    """
    from routepilot.env.measure import TimingPlan  # not for `routepilot --help`

    plan = TimingPlan()
    if effort is Effort.QUICK:
        return Preset(4, 48, 20_000, replace(plan, precision=0.025, max_rounds=8, quadruples=8))
    if effort is Effort.THOROUGH:
        plan = replace(plan, precision=0.008, max_rounds=40, quadruples=24)
        return Preset(24, 192, 120_000, plan)
    return Preset(8, 96, 60_000, plan)
