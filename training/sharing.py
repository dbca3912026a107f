"""Sharing: several sessions of one model, at work at once, pay for each build once.

Owns who builds a route that two ask for at the same time. Each session times against a default
engine of its own slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from routepilot.env.outcomes import Outcome
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.training.session import Session


class Sharing:
    """Outcomes that sessions of one model have in common."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: dict[Route, Future[Outcome]] = {}

    def once(self, route: Route, make: Callable[[], Outcome]) -> Outcome:
        """The outcome of a route: made now, or by whoever was first.

        Raises:
            BaseException: What `make` raised here. When it failed elsewhere it is tried here.
        """
        while True:
            with self._lock:
                found = self._outcomes.get(route)
                if found is None:
                    mine = self._outcomes[route] = Future()
            if found is None:
                break
            if found.exception() is None:
                return found.result()
        try:
            mine.set_result(make())
        except BaseException as error:
            with self._lock:
                del self._outcomes[route]
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

    def default(self) -> Outcome:
        """As `Session.default`, built and timed by whoever asks first."""
        outcome = self._sharing.once(DEFAULT_ROUTE, super().default)
        return self._known.setdefault(DEFAULT_ROUTE, outcome)

    def outcome(self, route: Route, incumbent_log_speedup: float | None = None) -> Outcome:
        """As `Session.outcome`, built by whoever asks first."""
        build = super().outcome
        outcome = self._sharing.once(route, lambda: build(route, incumbent_log_speedup))
        return self._known.setdefault(route, outcome)
