"""Every agent keeps the contract of ask and tell; sweeps walk as trtexec does."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from routepilot.agents import AGENTS, NEEDS_POLICY, NEEDS_TABLE, make_factory
from routepilot.agents.base import AgentFactory, Problem, search
from routepilot.agents.conformance import check_agent
from routepilot.agents.pool import first_candidates
from routepilot.agents.sweeps import (
    MixedAgent,
    RandomAgent,
    RecentredAgent,
    mixed_second_phase,
    random_route,
)
from routepilot.agents.transfer import greedy_coreset
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Route, parse_expression, sweep_expression

REPLAY = Replay(synthetic.table())
KNOWN = REPLAY.without_families(("family3",))
NAMES = [name for name in AGENTS if name not in {*NEEDS_POLICY, "oracle"}]

CATALOG = synthetic.CATALOG


def factory(name: str) -> AgentFactory:
    if name in ("tpe", "gp"):
        pytest.importorskip("optuna")
    if name in ("forest", "forest-scratch"):
        pytest.importorskip("sklearn")
    if name == "gp":
        pytest.importorskip("torch")
    return make_factory(name, replay=KNOWN if name in NEEDS_TABLE else None)


@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str) -> None:
    # Optuna's samplers take a second a proposal once they model; they start to within 5 builds.
    budget = 5 if name in ("tpe", "gp") else 12
    features = REPLAY.model("model7").card.features
    check_agent(factory(name), synthetic.CATALOG, features, budget=budget)


def replayed(name: str, budget: int = 16, seed: int = 0) -> list[Outcome]:
    model = REPLAY.model("model7")
    problem = Problem(REPLAY.catalog, model.card.features, model.routes, budget, seed)
    return search(
        factory(name)(problem),
        lambda route: model.default if route.is_default else model.outcome(route),
        budget,
    )


@pytest.mark.parametrize("name", ["knn", "coreset", "grace", "two-way-gp"])
def test_who_learned_from_alike_models_starts_well(name: str) -> None:
    best = max(o.log_speedup for o in replayed(name, budget=2))
    assert best > 0.8 * REPLAY.model("model7").oracle


def test_fast_walks_knobs_right_to_left() -> None:
    names = [outcome.route.settings[0][0] for outcome in replayed("fast")]
    expected = ["-pack", "-fuse", "-level", "-level", "-precision", "-precision", "-engine"]
    assert names == expected


def test_mixed_multiplies_only_what_was_accurate_and_clearly_faster() -> None:
    problem = Problem(synthetic.CATALOG, None, None, 30, 0)
    agent = MixedAgent(problem)
    gains = {"-precision=int": 0.5, "-precision=half": 0.3, "-fuse=off": 0.2, "-level=1": 0.1}

    def evaluate(route: Route) -> Outcome:
        text = str(route)
        if text == "-fuse=off":
            return Outcome(route, Status.ACCURACY_FAILED, "off", synthetic.measurement(0.4))
        noise = 0.2 if text == "-level=1" else 0.01
        measured = synthetic.measurement(gains.get(text, 0.0) + 0.0, noise)
        return Outcome(route, Status.OK, measurement=measured)

    outcomes = search(agent, evaluate, 30)
    assert agent.positive_knobs() == ["-precision"]
    assert len(outcomes) == 7  # one positive knob alone opens no second phase


def test_second_phase_counts_as_trtexec() -> None:
    expression = sweep_expression(synthetic.CATALOG)
    routes = list(mixed_second_phase(expression, synthetic.CATALOG, ["-precision", "-level"]))
    assert len(routes) == 9
    assert [r["-level"] for r in routes[:3]] == ["2", "1", "0"]
    assert {r["-engine"] for r in routes} == {"a"}


def test_sweeps_take_an_expression() -> None:
    from routepilot.agents.sweeps import fast

    problem = Problem(synthetic.CATALOG, None, None, 9, 0)
    expression = parse_expression("-level=[0|1|2] -fuse=off", synthetic.CATALOG)
    agent = fast(problem, expression)
    outcomes = search(agent, lambda r: Outcome(r, Status.OK), 9)
    assert [str(o.route) for o in outcomes] == [
        "-fuse=off",
        "-level=0 -fuse=off",
        "-level=1 -fuse=off",
    ]


def test_mixed_compares_with_the_route_that_an_expression_pins() -> None:
    expression = parse_expression("-level=1 -precision=[full|half] -fuse=[on|off]", CATALOG)
    gains = {"-level=1": 0.2, "-precision=half -level=1": 0.4, "-level=1 -fuse=off": 0.3}

    def evaluate(route: Route) -> Outcome:
        measured = synthetic.measurement(gains.get(str(route), 0.1))
        return Outcome(route, Status.OK, measurement=measured)

    agent = MixedAgent(Problem(CATALOG, None, None, 9, 0), expression)
    routes = [str(o.route) for o in search(agent, evaluate, 9)]
    assert agent.positive_knobs() == ["-precision", "-fuse"]
    assert routes == [
        "-level=1",
        "-level=1 -fuse=off",
        "-precision=half -level=1",
        "-precision=half -level=1 -fuse=off",  # the second phase
    ]
    gains["-level=1"] = 0.35  # faster than the default and slower than what is pinned is no gain
    slower = MixedAgent(Problem(CATALOG, None, None, 9, 0), expression)
    search(slower, evaluate, 9)
    assert slower.positive_knobs() == ["-precision"]


def test_recentred_never_leaves_what_an_expression_pins() -> None:
    expression = parse_expression("-level=1 -precision=[full|half] -fuse=[on|off]", CATALOG)
    agent = RecentredAgent(Problem(CATALOG, None, None, 9, 0), expression)
    gains = {"-level=1 -fuse=off": 0.2, "-precision=half -level=1 -fuse=off": 0.3}

    def evaluate(route: Route) -> Outcome:
        measured = synthetic.measurement(gains.get(str(route), -0.1))
        return Outcome(route, Status.OK, measurement=measured)

    routes = [o.route for o in search(agent, evaluate, 9)]
    assert [str(r) for r in routes[:2]] == ["-level=1", "-level=1 -fuse=off"]
    assert all(r.values["-level"] == "1" for r in routes)
    assert "-precision=half -level=1 -fuse=off" in map(str, routes)


@given(st.integers(0, 1000))
@settings(max_examples=50)
def test_random_routes_are_legal(seed: int) -> None:
    import random

    route = random_route(synthetic.CATALOG, random.Random(seed))
    assert synthetic.CATALOG.is_legal(route)


def test_coreset_is_complementary() -> None:
    gains = np.array([[1.0, 0.9, 0.0], [0.0, 0.0, 0.5], [1.0, 0.9, 0.0]])
    assert greedy_coreset(gains, 2) == [0, 2]


def test_recentred_moves_to_what_it_found() -> None:
    routes = [outcome.route for outcome in replayed("recentred", budget=14)]
    assert any(len(route.settings) > 1 for route in routes)
    assert DEFAULT_ROUTE not in routes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("psychic", "random"),
        ("knn", "--table"),
        ("ppo", "--policy"),
        ("bc", "--steps 0"),
        ("oracle", "evaluate"),
    ],
)
def test_impossible_agents_are_refused(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_factory(name)


def test_an_agent_that_is_not_ours_is_named_by_module_and_factory() -> None:
    assert make_factory("routepilot.agents.sweeps:RandomAgent") is RandomAgent
    with pytest.raises(InputError, match="cannot be loaded"):
        make_factory("no_such_module:Agent")
    with pytest.raises(InputError, match="cannot be loaded"):
        make_factory("routepilot.agents.sweeps:NoSuchAgent")


def test_routes_that_few_models_know_do_not_crowd_a_live_catalog() -> None:
    live = Problem(synthetic.CATALOG, None, None, 8, 0, 1e-2)
    begun = first_candidates(live)
    rare, common = [r for r in synthetic.routes()[1:] if r not in begun][:2]
    assert first_candidates(live, [common] * 4 + [rare]) == [common, *begun]
    assert first_candidates(live, [common, rare]) == [common, rare, *begun]
