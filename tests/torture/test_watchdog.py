"""The watchdog bites, or no fuzzing finds a reader that does not end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from watchdog import NotBack, Watchdog

from routepilot.env.errors import RoutePilotError


def swallow() -> None:
    while True:
        try:
            time.sleep(1000)
        except Exception:
            continue


def sleep_and_refuse() -> None:
    time.sleep(0.4)
    raise RoutePilotError("no")


def lean_on_a_thread() -> None:
    worker = threading.Thread(target=lambda: sum(i * i for i in range(3_000_000)))
    worker.start()
    worker.join()


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (lambda: time.sleep(0.4), "s asleep"),
        (sleep_and_refuse, "s asleep"),
        (lambda: threading.Event().wait(0.4), "s asleep"),
        (lambda: sum(i * i for i in range(10_000_000)), "s of work"),
        (swallow, "not back"),
        (lambda: None, ""),
    ],
)
def test_the_watchdog_bites_who_sleeps_works_too_long_or_stays_away(
    deed: Callable[[], object], words: str
) -> None:
    dog = Watchdog(work=0.3, sleep=0.3, back=1.5 if deed is swallow else 60.0)
    caught = ""
    try:
        with dog.watched():
            deed()
    except (AssertionError, NotBack) as error:
        caught = str(error)
    assert words in caught and bool(words) == bool(caught)


def test_the_watchdog_counts_another_thread_as_work() -> None:
    dog = Watchdog(work=0.02, sleep=60.0, back=100.0)
    with pytest.raises(AssertionError, match="s of work"), dog.watched():
        lean_on_a_thread()
