"""Independent jobs of pure computation, in processes of their own where more than one is granted.

Owns the pool: its order, its end on an interrupt, a worker that dies. Knows no job.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from routepilot.env.errors import MachineError

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    work: Callable[[Job], Result], jobs: Sequence[Job], workers: int = 1
) -> Iterator[Result]:
    """Results in the order of the jobs, each as soon as it and those before it are done.

    Args:
        work: A function of a module, so that another process finds it.
        jobs: Its arguments.
        workers: Processes; 1 works here.

    Raises:
        MachineError: A process died, most likely for want of memory.
    """
    if workers <= 1 or len(jobs) <= 1:
        yield from map(work, jobs)
        return
    # Not forked: threads of a numerical library do not survive that.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, _leave_interrupts)
    try:
        yield from pool.map(work, jobs)
    except BrokenProcessPool:
        raise MachineError(
            f"one of {workers} worker processes died; there may be too little memory for as many:"
            " repeat with fewer --workers"
        ) from None
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C is for the parent, which ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
