"""What each knob value did over the builds of a run, with how sure that is.

Owns a small additive model of log speed-up over knob values (ridge regression), its spread from
bootstrapped builds. It describes the builds that were made and proves no cause: `explain` measures.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Builds below which nothing is fitted.
FEWEST = 4

#: Penalty that keeps values seen once from taking all the credit.
PENALTY = 0.5

#: Resampled fits behind an interval.
RESAMPLES = 400


def knob_effects(trials: list[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Effect of each value beside the default's, as a speed-up with a 95 % interval.

    Args:
        trials: `result["trials"]`.
        seed: Seed of the resampling.

    Returns:
        One entry a value that was built: `setting`, `builds`, `speedup`, `low`, `high`, the largest
        first. Empty where fewer than `FEWEST` builds were timed.
    """
    timed = [t for t in trials if t["speedup"]]
    names = list(dict.fromkeys(token for t in timed for token in t["route"].split()))
    if len(timed) < FEWEST or not names:
        return []
    rows = np.array([[name in t["route"].split() for name in names] for t in timed], float)
    logs = np.log([float(t["speedup"]) for t in timed])
    rng = np.random.default_rng(seed)
    fits = []
    for _ in range(RESAMPLES):
        chosen = rng.integers(0, len(timed), len(timed))
        fits.append(_ridge(rows[chosen], logs[chosen]))
    low, high = np.quantile(np.array(fits), [0.025, 0.975], axis=0)
    whole = _ridge(rows, logs)
    found = [
        {
            "setting": name,
            "builds": int(rows[:, place].sum()),
            "speedup": math.exp(whole[place]),
            "low": math.exp(low[place]),
            "high": math.exp(high[place]),
        }
        for place, name in enumerate(names)
    ]
    return sorted(found, key=lambda entry: -abs(math.log(entry["speedup"])))


def _ridge(rows: NDArray[np.float64], logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients without an intercept: the default route is the origin."""
    gram = rows.T @ rows + PENALTY * np.eye(rows.shape[1])
    found: NDArray[np.float64] = np.linalg.solve(gram, rows.T @ logs)
    return found
