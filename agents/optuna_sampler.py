"""Our agents for Optuna users: a sampler that asks an agent, and the pruner that goes with it.

Owns the translation from Optuna's trials to routes. Needs the extra `bayes`. Which agent stands
behind a sampler is said by who makes it (`training/optuna_study.py` takes the released policy):

    study = optuna.create_study(direction="maximize", sampler=RouteSampler(agent, catalog))

The objective suggests every knob by its name and returns the log speed-up over the default route;
it raises `optuna.TrialPruned`, or the trial fails, where there is no accurate engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from routepilot.env.errors import MissingExtraError
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route

try:
    import optuna
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler, RandomSampler
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    raise MissingExtraError(
        f"the Optuna sampler needs {error.name}; pip install 'routepilot[bayes]'"
    ) from None

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study

    from routepilot.agents.base import Agent

#: Half of the 95 % interval taken for a value told without one, log ratio.
HALF_WIDTH = 0.025

#: User attribute by which an objective may tell the loss, for agents that learn from it.
LOSS = "rel_l2"


def suggest_route(trial: Any, catalog: Catalog) -> Route:
    """The route of a trial: every knob suggested by its name, for use in an objective."""
    return catalog.route(
        {knob.name: trial.suggest_categorical(knob.name, knob.all_values) for knob in catalog.knobs}
    )


class RouteSampler(BaseSampler):
    """Suggests the routes that an agent asks for.

    Where the agent stops, the study is stopped; a trial already begun gets the default route.

    Args:
        agent: Ask/tell agent, e.g. `make_agent("ppo", problem, policy=load_policy(path))`.
        catalog: Catalog of the agent's problem.
        metric: Metric of the loss in `trial.user_attrs["rel_l2"]`.
    """

    def __init__(self, agent: Agent, catalog: Catalog, metric: str = LOSS) -> None:
        self._agent, self._catalog, self._metric = agent, catalog, metric
        self._told_default = False
        self._asked: dict[int, Route] = {}
        self._other = RandomSampler(seed=0)

    @property
    def catalog(self) -> Catalog:
        """Catalog of the routes it suggests."""
        return self._catalog

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Every knob is suggested at once."""
        del study, trial
        return {
            knob.name: optuna.distributions.CategoricalDistribution(knob.all_values)
            for knob in self._catalog.knobs
        }

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The agent's next route as parameters."""
        del search_space
        if not self._told_default:
            measured = Measurement(0.0, -HALF_WIDTH, HALF_WIDTH, 1.0, 1.0, 1, 0.0)
            self._agent.tell(DEFAULT_ROUTE, Outcome(DEFAULT_ROUTE, Status.OK, "", measured))
            self._told_default = True
        route = self._agent.ask()
        if route is None:
            study.stop()
            return self._catalog.full_settings(DEFAULT_ROUTE)
        self._asked[trial.number] = route
        return self._catalog.full_settings(route)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """A parameter that is no knob: drawn at random."""
        return self._other.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self,
        study: Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Tell the agent what came of its route."""
        route = self._asked.pop(trial.number, None)
        if route is None:
            return
        if state != TrialState.COMPLETE or not values or not math.isfinite(values[0]):
            words = f"the trial ended as {state.name.lower()}"
            self._agent.tell(route, Outcome(route, Status.BUILD_FAILED, words))
            return
        sign = -1.0 if study.direction == optuna.study.StudyDirection.MINIMIZE else 1.0
        value = sign * values[0]
        measured = Measurement(
            value, value - HALF_WIDTH, value + HALF_WIDTH, math.exp(-value), 1.0, 1, 0.0
        )
        loss = float(trial.user_attrs.get(self._metric, 0.0))
        self._agent.tell(route, Outcome(route, Status.OK, "", measured, {self._metric: loss}))


class SlowerPruner(BasePruner):
    """Prunes a trial whose reported log speed-ups are all clearly below the best so far.

    The rule by which our own timing stops early. Report one log ratio a round of blocks.

    Args:
        worse: Log ratio that counts as clearly below.
        rounds: Rounds that must agree.
    """

    def __init__(self, worse: float = 0.05, rounds: int = 4) -> None:
        self._worse, self._rounds = worse, rounds

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """True when it cannot win."""
        told = list(trial.intermediate_values.values())
        if len(told) < self._rounds:
            return False
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        best = max((t.value for t in done if t.value is not None), default=0.0)
        return max(told) < max(best, 0.0) - self._worse
