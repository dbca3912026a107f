"""The time that a training may take: its clock, and when each phase has to end.

Owns seconds alone; what a phase does when its time is up is `training_run.py`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from routepilot.env.errors import InputError

#: Share of the time after the surrogates by which the teacher has played, and by which it has been
#: imitated. An untroubled training needs far less of both; where time is short imitation is worth
#: more than PPO (docs/experiments.md).
LESSONS_BY, IMITATED_BY = 0.4, 0.8

#: It is foreseen how long the surrogates will take once so many are fitted and so much of the limit
#: is over.
FITS_TO_FORESEE, SHARE_TO_FORESEE = 3, 0.2

#: Times the limit that the surrogates may take; a policy is worth that wait.
LATE_FITS = 1.25

#: Share of that time that is kept for the last score before it is known how long one takes.
SCORING = 0.1


class Clock:
    """Seconds of a run, over as many processes as it took.

    Args:
        start: `time.monotonic()` at the start of this process's part.
        before: What `read` gave at the last checkpoint; empty for a run that begins.
    """

    def __init__(self, start: float, before: Mapping[str, float]) -> None:
        self._start, self._before = start, before
        self._ppo: float | None = None

    def start_ppo(self) -> None:
        """Count PPO's seconds from now on."""
        self._ppo = time.monotonic()

    def read(self) -> dict[str, float]:
        """Seconds of the run, and of PPO alone, as `seconds` and `ppo`."""
        now = time.monotonic()
        ppo = now - self._ppo if self._ppo is not None else 0.0
        return {
            "seconds": self._before.get("seconds", 0.0) + now - self._start,
            "ppo": self._before.get("ppo", 0.0) + ppo,
        }


class TimeLimit:
    """When the phases of a run have to end.

    Args:
        clock: Of the run.
        max_seconds: Seconds that the run may take; None for no limit.
    """

    def __init__(self, clock: Clock, max_seconds: float | None) -> None:
        self._clock, self._end = clock, math.inf if max_seconds is None else max_seconds
        self._ready = self._fits_since = 0.0
        #: Seconds that the last score will take.
        self.reserve = 0.0

    def start_phases(self) -> None:
        """What every training needs is there; the phases share the rest."""
        self._ready = self._clock.read()["seconds"]
        self.reserve = 0.0 if self._end == math.inf else SCORING * max(self._end - self._ready, 0.0)

    def is_up(self, share: float = 1.0) -> bool:
        """Whether a share of the phases' time is over, the reserve kept.

        Args:
            share: Of the time from `start_phases` to the end.
        """
        if self._end == math.inf:
            return False
        room = max(self._end - self.reserve - self._ready, 0.0)
        return self._clock.read()["seconds"] >= self._ready + share * room

    def check_fits(self, done: int, total: int) -> None:
        """Refuse a limit that will not reach for a table's surrogates, which cannot be cut short.

        It is refused as soon as that is foreseen. Surrogates that are a little late are fitted all
        the same, since a policy is what the time was given for.

        Args:
            done: Surrogates of the table that are fitted.
            total: How many it needs.

        Raises:
            InputError: They will need more than `LATE_FITS` times the limit.
        """
        spent = self._clock.read()["seconds"]
        if done == 0:
            self._fits_since = spent
        took = spent - self._fits_since
        needed = self._fits_since + took * total / done if done else spent
        is_foreseen = done >= FITS_TO_FORESEE and spent >= SHARE_TO_FORESEE * self._end
        if (is_foreseen or spent >= self._end) and max(needed, spent) > LATE_FITS * self._end:
            guess = max(needed, spent)
            raise InputError(
                f"--max-seconds {self._end:g} is too short for a policy: surrogates need about"
                f" {guess:.0f} s here ({done} of {total} fitted after {spent:.1f} s) and cannot be"
                f" cut short; give {math.ceil(2 * guess)} or more"
            )

    def lateness(self) -> str:
        """What is to be said where the surrogates took all the time; empty where they did not."""
        if self._ready < self._end:
            return ""
        return (
            f"fitting the surrogates took {self._ready:.1f} s, all of --max-seconds {self._end:g}:"
            " the policy is imitation at its least"
        )
