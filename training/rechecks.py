"""Which route of a table must be built once more before its figure is believed.

Owns the rule alone; `collect.py` and `gpu_sweep.py` build. The fastest of many noisy figures is the
luckiest, and where its second figure is worse another route becomes the best, on one figure again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routepilot.env.accuracy import Gate, regate
from routepilot.env.backends.recorded import settled
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route

#: Accuracy limits at which a table's best routes are built twice.
LIMITS = (1e-2, 3e-2)


def unconfirmed_best(
    builds: Mapping[Route, tuple[Outcome, ...]], limits: Sequence[float] = LIMITS
) -> Route | None:
    """The best route at the first limit where that rests on one build; None where none does.

    Args:
        builds: Outcomes of one model by route, one a build.
        limits: Limits on the relative L2 error, in turn.
    """
    for limit in limits:
        gains = {
            route: regate(settled(outcomes), Gate(limit=limit)).gain
            for route, outcomes in builds.items()
            if not route.is_default
        }
        best = max(gains, key=lambda route: gains[route], default=None)
        if best is not None and gains[best] > 0 and len(builds[best]) == 1:
            return best
    return None
