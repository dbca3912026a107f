"""Sharing: several sessions of one model, at work at once, pay for each build once.

Owns who builds a route, and who probes the model, where two would at the same time. Each session
times against a default engine of its own slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import cached_property
from typing import Any, TypeVar

from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.training.session import Session

Made = TypeVar("Made")


class Sharing:
    """What sessions of one model have in common: its features, and outcomes by route."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[Hashable, Future[Any]] = {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What a key stands for: made now, or by whoever was first.

        Raises:
            BaseException: What `make` raised here. When it failed elsewhere it is tried here.
        """
        while True:
            with self._lock:
                found = self._made.get(key)
                if found is None:
                    mine: Future[Made] = Future()
                    self._made[key] = mine
            if found is None:
                break
            if found.exception() is None:
                return found.result()  # type: ignore[no-any-return]
        try:
            mine.set_result(make())
        except BaseException as error:
            with self._lock:
                del self._made[key]
            mine.set_exception(error)
            raise
        return mine.result()


class SharingSession(Session):
    """A session that shares its outcomes with others of the same model.

    Args:
        sharing: What they share.
        *args: As `Session` takes them.
        **kwargs: As `Session` takes them.
    """

    def __init__(self, sharing: Sharing, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sharing = sharing

    @cached_property
    def features(self) -> tuple[float, ...]:
        """As `Session.features`, found by whoever asks first: all agents are told the same."""
        return self._sharing.once("features", lambda: super(SharingSession, self).features)

    def default(self) -> Outcome:
        """As `Session.default`, built and timed by whoever asks first."""
        outcome = self._sharing.once(DEFAULT_ROUTE, super().default)
        return self._known.setdefault(DEFAULT_ROUTE, outcome)

    def outcome(self, route: Route, incumbent_log_speedup: float | None = None) -> Outcome:
        """As `Session.outcome`, built by whoever asks first."""
        build = super().outcome
        outcome = self._sharing.once(route, lambda: build(route, incumbent_log_speedup))
        return self._known.setdefault(route, outcome)
