"""An Optuna study driven by our agents asks what the agents ask, and stops when they stop."""

from __future__ import annotations

import optuna
import pytest
import synthetic

from routepilot.agents import make_agent
from routepilot.agents.base import Problem, search
from routepilot.agents.optuna_sampler import RouteSampler, SlowerPruner, suggest_route
from routepilot.env.backends.recorded import Replay
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route

optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.mark.parametrize("name", ["fast", "two-way-gp"])
def test_a_study_walks_as_the_agent_alone_does(name: str) -> None:
    replay = Replay(synthetic.table())
    model = replay.models[2]
    rest = replay.without_families((model.card.family,))
    recorded = dict(zip(model.routes, model.outcomes, strict=True))
    problem = Problem(replay.catalog, model.card.features, None, 10, 0)

    alone = make_agent(name, problem, replay=rest)
    routes = [o.route for o in search(alone, lambda r: recorded.get(r, model.default), 1)]

    asked: list[Route] = []

    def objective(trial: optuna.Trial) -> float:
        route = suggest_route(trial, replay.catalog)
        asked.append(route)
        outcome: Outcome = recorded[route]
        trial.set_user_attr("rel_l2", outcome.losses.get("rel_l2", 10.0))
        if not outcome.is_feasible:
            raise optuna.TrialPruned
        return outcome.log_speedup

    sampler = RouteSampler(make_agent(name, problem, replay=rest), replay.catalog)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=6)
    assert asked[0] == routes[0]
    assert len(set(asked)) == len(asked) == 6
    if name == "two-way-gp":
        assert study.best_value > 0.9 * model.oracle


def test_the_study_stops_when_the_agent_has_no_more() -> None:
    problem = Problem(synthetic.CATALOG, None, None, 3, 0)
    few = Problem(synthetic.CATALOG, None, tuple(synthetic.routes()[1:4]), 3, 0)
    del problem
    sampler = RouteSampler(make_agent("random", few), synthetic.CATALOG)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(lambda t: float(len(str(suggest_route(t, synthetic.CATALOG)))), n_trials=50)
    routes = {str(t.params) for t in study.trials[:3]}
    assert len(routes) == 3 and len(study.trials) == 4


def test_a_trial_that_fails_is_an_outcome() -> None:
    problem = Problem(synthetic.CATALOG, None, None, 5, 0)
    sampler = RouteSampler(make_agent("fast", problem), synthetic.CATALOG)
    study = optuna.create_study(direction="maximize", sampler=sampler)

    def objective(trial: optuna.Trial) -> float:
        suggest_route(trial, synthetic.CATALOG)
        raise RuntimeError("the compiler said no")

    study.optimize(objective, n_trials=4, catch=(RuntimeError,))
    assert len({str(t.params) for t in study.trials}) == 4


def test_the_pruner_gives_up_what_is_clearly_slower() -> None:
    study = optuna.create_study(direction="maximize", pruner=SlowerPruner())

    def objective(trial: optuna.Trial) -> float:
        level = (0.5, 0.49, 0.2)[trial.number]
        for step in range(6):
            trial.report(level, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return level

    study.optimize(objective, n_trials=3)
    states = [t.state.name for t in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert len(study.trials[2].intermediate_values) == 4
