"""Jobs: work that measures nothing, done in this process, in several, or by a Ray cluster.

Owns who does a job and what happens when that process or node is lost: the job is given to another,
its result counts once. A job that raises is a mistake in our code and ends the run.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from routepilot.env.errors import InputError, MachineError
from routepilot.env.wording import counted

#: How often a job is given to another process when the one that had it is lost.
RETRIES = 3

_Result = TypeVar("_Result")

#: A job's function: what all jobs share, then what is its own. It must be importable by name.
Function = Callable[..., _Result]


def run_jobs(
    function: Function[_Result],
    shared: Any,
    jobs: Sequence[tuple[Any, ...]],
    *,
    workers: int = 1,
    ray: Any = None,
) -> Iterator[tuple[int, _Result]]:
    """Do each job once: `function(shared, *job)`.

    Args:
        function: Importable by its name.
        shared: Sent once, not with every job.
        jobs: Arguments of each.
        workers: Processes at once when there is no `ray`; with 1 the work is done here.
        ray: Ray, connected; its cluster does the work, a core a job.

    Yields:
        Place in `jobs` and result, as they are done.

    Raises:
        InputError: Fewer than one worker.
        MachineError: A job lost its process more often than `RETRIES`.
    """
    if workers < 1:
        raise InputError(f"{workers} workers are not allowed; give 1 or more")
    if ray is not None:
        yield from _on_ray(ray, function, shared, jobs)
    elif workers == 1 or len(jobs) < 2:
        for place, job in enumerate(jobs):
            yield place, function(shared, *job)
    else:
        yield from _in_processes(function, shared, jobs, min(workers, len(jobs)))


_shared: Any = None


def _hold(shared: Any) -> None:
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us


def _call(function: Function[_Result], job: tuple[Any, ...]) -> _Result:
    return function(_shared, *job)


def _in_processes(
    function: Function[_Result], shared: Any, jobs: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[tuple[int, _Result]]:
    waiting = set(range(len(jobs)))
    for _ in range(1 + RETRIES):
        if not waiting:
            return
        with ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _hold, (shared,)
        ) as pool:
            places = {pool.submit(_call, function, jobs[place]): place for place in sorted(waiting)}
            try:
                for future in as_completed(places):
                    result = future.result()
                    waiting.discard(places[future])
                    yield places[future], result
            except BrokenProcessPool:  # somebody killed one: all that is not done, anew
                continue
            except BaseException:
                for child in multiprocessing.active_children():
                    child.terminate()
                pool.shutdown(cancel_futures=True)
                raise
    if waiting:
        raise MachineError(
            f"processes were lost {1 + RETRIES} times with {counted(len(waiting), 'job')} to do;"
            " repeat the"
            " command to go on"
        )


def _on_ray(
    ray: Any, function: Function[_Result], shared: Any, jobs: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, _Result]]:
    task = ray.remote(num_cpus=1, max_retries=RETRIES, retry_exceptions=False)(function)
    there = ray.put(shared)
    places = {task.remote(there, *job): place for place, job in enumerate(jobs)}
    waiting = list(places)
    while waiting:
        done, waiting = ray.wait(waiting)
        for reference in done:
            try:
                result = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                raise error.as_instanceof_cause() from None
            except ray.exceptions.RayError as error:
                words = " ".join(str(error).split())[:200]
                raise MachineError(
                    f"a job was lost {1 + RETRIES} times ({words}); repeat the command to go on"
                ) from None
            yield places[reference], result
