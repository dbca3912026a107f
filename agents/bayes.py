"""Optuna's samplers as agents: TPE and a Gaussian process, each starting from nothing.

Owns the translation between routes and Optuna's trials. Needs the extra `bayes`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from routepilot.agents.base import OrderedAgent, Problem
from routepilot.agents.sweeps import RandomAgent
from routepilot.env.errors import MissingExtraError
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route, differing

#: Value told for a route that is not feasible: clearly worse than the default's 0.
INFEASIBLE = -1.0

#: Proposals of Optuna that may be unaskable before a random route stands in.
TRIES = 8

#: Random trials with which each sampler starts.
STARTUP = {"tpe": 5, "gp": 4}


class OptunaAgent(OrderedAgent):
    """A sampler over the catalog's knobs as categories.

    On a replayed table the askable route with the fewest differing knobs stands in for a proposal
    that is not recorded.

    Args:
        name: `tpe` or `gp`.
        problem: The problem.

    Raises:
        MissingExtraError: Optuna (or torch, for `gp`) is not installed.
    """

    def __init__(self, name: str, problem: Problem) -> None:
        super().__init__(name, problem)
        self._study = _study(name, problem.seed)
        self._trial: Any = None
        self._fallback = RandomAgent(problem)
        self._free = None if problem.candidates is None else dict.fromkeys(problem.candidates)

    def upcoming(self) -> Route | None:
        """The sampler's next proposal that can be asked."""
        for _ in range(TRIES if self._free != {} else 0):
            self._trial = self._study.ask()
            route = self._proposed()
            if self._free is not None:
                route = min(self._free, key=lambda r: len(differing(r, route)), default=route)
            if self.problem.may_ask(route) and route not in self.told:
                return route
            self._report(INFEASIBLE if not self.problem.may_ask(route) else 0.0)
        self._trial = None
        self._fallback.told = self.told
        return self._fallback.upcoming()

    def tell(self, route: Route, outcome: Outcome) -> None:
        """See `Agent`."""
        was_pending = route == self._pending
        super().tell(route, outcome)
        if self._free is not None:
            self._free.pop(route, None)
        if was_pending and self._trial is not None:
            value = outcome.log_speedup
            self._report(value if math.isfinite(value) else INFEASIBLE)

    def _proposed(self) -> Route:
        catalog = self.problem.catalog
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = {
                knob.name: self._trial.suggest_categorical(knob.name, knob.all_values)
                for knob in catalog.knobs
            }
        for rule in catalog.requirements:
            constrained = rule.value is None or settings[rule.knob] == rule.value
            if constrained and settings[rule.parent] not in rule.parent_values:
                settings[rule.knob] = catalog[rule.knob].default
        return catalog.route(settings)

    def _report(self, value: float) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study.tell(self._trial, value)
        self._trial = None


def _study(name: str, seed: int) -> Any:
    try:
        import optuna

        if name == "gp":
            import torch  # noqa: F401  (Optuna's GP needs it and says so only when it samples)
    except ImportError as error:
        raise MissingExtraError(
            f"agent {name} needs {error.name}; pip install 'routepilot[bayes,train]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = (
            optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=STARTUP["tpe"], multivariate=True
            )
            if name == "tpe"
            else optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP["gp"])
        )
        return optuna.create_study(direction="maximize", sampler=sampler)
