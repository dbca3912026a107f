"""Jobs in processes: the same results in the same order, and no hanging when one dies."""

from __future__ import annotations

import math
import os

import pytest

from routepilot.env.errors import InputError, MachineError
from routepilot.training.jobs import run_jobs


def fail(number: int) -> int:
    if number == 3:
        raise InputError("three is not allowed")
    return number


def test_order_and_results_do_not_depend_on_processes() -> None:
    numbers = [9.0, 1.0, 4.0, 16.0]
    assert list(run_jobs(math.sqrt, numbers, 1)) == [3.0, 1.0, 2.0, 4.0]
    assert list(run_jobs(math.sqrt, numbers, 2)) == [3.0, 1.0, 2.0, 4.0]
    assert set(run_jobs(_where, [0, 0], 1)) == {os.getpid()}
    assert os.getpid() not in set(run_jobs(_where, [0, 0], 2))


def _where(_: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_job_is_the_callers(workers: int) -> None:
    with pytest.raises(InputError, match="three is not allowed"):
        list(run_jobs(fail, [1, 3, 5], workers))


def test_a_process_that_dies_is_said_and_not_waited_for() -> None:
    with pytest.raises(MachineError, match="fewer --workers"):
        list(run_jobs(os._exit, [1, 1], 2))
