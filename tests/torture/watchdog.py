"""Time limits for one piece of work: busy too long, asleep too long, or never back.

Seconds that the process waited for a processor count as neither work nor sleep, so a machine that
is busy with other things does no harm.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

#: The kernel's count for this thread: nanoseconds that it ran, and that it waited to run.
_SCHEDULED = Path("/proc/thread-self/schedstat")


class NotBack(BaseException):
    """What was watched did not come back; no `except Exception` of its own can swallow this."""


def _scheduled_seconds() -> float:
    """Seconds that this thread ran or waited for a processor."""
    try:
        ran, waited = _SCHEDULED.read_text(encoding="ascii").split()[:2]
    except OSError:
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


class Watchdog:
    """Holds each `watched()` block to its limits; use it in the main thread.

    Args:
        work: Processor seconds of the process that a block may take.
        sleep: Seconds that a block may do nothing.
        back: Seconds on the clock after which a block is interrupted.

    Attributes:
        busiest, sleepiest: The most of each that a block has taken, seconds.
    """

    def __init__(self, work: float, sleep: float, back: float) -> None:
        self.work, self.sleep, self.back = work, sleep, back
        self.busiest = self.sleepiest = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a block.

        Raises:
            NotBack: It was still running after `back` seconds.
            AssertionError: It came back, or raised an error of its own, over a limit.
        """
        is_back = True

        def bite(number: int, frame: FrameType | None) -> None:
            raise NotBack(f"not back after {self.back:g} s")

        old = signal.signal(signal.SIGALRM, bite)
        clock, work, scheduled = time.monotonic(), time.process_time(), _scheduled_seconds()
        signal.setitimer(signal.ITIMER_REAL, self.back)
        try:
            yield
        except NotBack:
            is_back = False
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
            worked = time.process_time() - work
            # What other threads did meanwhile is work, not sleep.
            others = max(0.0, worked - (_scheduled_seconds() - scheduled))
            slept = time.monotonic() - clock - (_scheduled_seconds() - scheduled) - others
            self.busiest = max(self.busiest, worked)
            self.sleepiest = max(self.sleepiest, slept)
            if is_back:  # with an error of its own too
                assert worked < self.work, f"{worked:.1f} s of work, {self.work:g} s are allowed"
                assert slept < self.sleep, f"{slept:.1f} s asleep, {self.sleep:g} s are allowed"
