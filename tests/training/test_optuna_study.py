"""One line gives an Optuna study the policy that `tune` asks."""

from __future__ import annotations

import optuna
import pytest

import routepilot
from routepilot.agents import make_agent
from routepilot.agents.base import Problem
from routepilot.agents.optuna_sampler import SlowerPruner, suggest_route
from routepilot.agents.policy import load_policy
from routepilot.env.backends import load_backend
from routepilot.env.errors import InputError
from routepilot.env.features import model_features
from routepilot.env.models import Model
from routepilot.env.routes import Route
from routepilot.training.defaults import find_policy

optuna.logging.set_verbosity(optuna.logging.ERROR)


def test_the_study_asks_what_the_released_policy_asks(tiny: Model) -> None:
    catalog = load_backend("cpu", {}).catalog()
    problem = Problem(catalog, model_features(tiny), None, 3, 0)
    alone = make_agent("ppo", problem, policy=load_policy(find_policy("cpu")))
    asked: list[Route] = []

    sampler = routepilot.policy_sampler(tiny, max_builds=3)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=SlowerPruner())

    def objective(trial: optuna.Trial) -> float:
        asked.append(suggest_route(trial, sampler.catalog))
        raise optuna.TrialPruned  # no engine of it was accurate

    study.optimize(objective, n_trials=1)
    assert asked == [alone.ask()] and not asked[0].is_default


def test_a_study_ends_after_the_builds_it_was_given() -> None:
    sampler = routepilot.policy_sampler(agent="random", max_builds=2, seed=3)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    seen: list[Route] = []

    def objective(trial: optuna.Trial) -> float:
        seen.append(suggest_route(trial, sampler.catalog))
        return 0.1

    study.optimize(objective, n_trials=2)
    assert len(set(seen)) == 2 and not any(route.is_default for route in seen)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": "nowhere"}, "nowhere"),
        ({"policy": "cpu", "agent": "random"}, "give one"),
        ({"backend": "gcc"}, "gcc"),
        ({"model": "nowhere.onnx"}, "nowhere.onnx"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        routepilot.policy_sampler(**given)  # type: ignore[arg-type]
