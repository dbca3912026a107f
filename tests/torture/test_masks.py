"""Masks: nothing illegal is ever sent or taken, by any agent or environment, over a million steps.

The steps of an agent are the routes it asks for. Agents that fit a model at every step get fewer,
as many as their speed allows, on a table so small that a step is cheap; `report` says how many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache

import numpy as np
import pytest
import synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sizes import report, sequence, size

from routepilot.agents import AGENTS, make_factory
from routepilot.agents import policy as policies
from routepilot.agents.base import AgentFactory, Problem
from routepilot.agents.policy import LoadedPolicy
from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError
from routepilot.env.likeness import Kernel
from routepilot.env.outcomes import Outcome
from routepilot.env.records import RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Knob, Requirement, Route

#: Agents whose step takes milliseconds, or a good part of one -> their share of `slow_agent_steps`.
#: Those that act on a surrogate walk on `small()`.
SLOW = {
    "two-way-gp": 1.0,
    "greedy": 1.0,
    "thompson": 1.0,
    "ppo": 1.0,
    "transfer-gp": 1.0,
    "tpe": 1.0,
    "grace": 0.5,
    "forest": 0.05,
    "forest-scratch": 0.05,
    "gp": 0.008,
}

#: Who keeps a surrogate of every record at every step.
BELIEVERS = ("two-way-gp", "greedy", "thompson", "ppo", "transfer-gp")


#: Who asks for nothing, who knows all the answers, and who walks as `ppo` does.
UNASKED = ("default", "oracle", "bc", "ppo-no-stop")


@lru_cache(maxsize=1)
def table():  # noqa: ANN201
    return synthetic.table()


@lru_cache(maxsize=1)
def small() -> RouteTable:
    """Few models and few routes, the same catalog: a step of a surrogate is cheap."""
    whole = table()
    routes = {r for r in synthetic.routes() if len(r.values) < 2}
    known = {
        model.fingerprint: {
            r: o for r, o in whole.outcomes[model.fingerprint].items() if r in routes
        }
        for model in whole.models[:3]
    }
    return replace(whole, models=whole.models[:3], outcomes=known)


@lru_cache(maxsize=1)
def random_policy() -> LoadedPolicy:
    """A policy with random weights over the small table: nothing it does is sensible."""
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(0, 1, s).astype(np.float32) for n, s in policies.shapes().items()}
    gate = Gate()
    card = policies.Card(
        "random", "none", "none", (), (), {"metric": gate.metric, "limit": gate.limit},
        asdict(Kernel()), 0, 0, {}, {},
    )  # fmt: skip
    return LoadedPolicy(policies.Network(weights), card, (Replay(small(), gate),))


@lru_cache(maxsize=1)
def pool() -> list[Outcome]:
    """Outcomes of every kind, for the default route; told for any route."""
    rng = np.random.default_rng(0)
    return [
        synthetic.outcome(route, kind, rng) for kind in range(4) for route in synthetic.routes()
    ]


def factory_of(name: str) -> AgentFactory:
    if name == "ppo":
        return make_factory(name, policy=random_policy())
    return make_factory(name, replay=Replay(small() if name in BELIEVERS else table(), Gate()))


def walk(make: AgentFactory, problem: Problem, tell: Callable[[Route], Outcome]) -> int:
    """Let an agent spend its budget; every route it asks for must be allowed. Returns how many."""
    agent = make(problem)
    agent.tell(DEFAULT_ROUTE, tell(DEFAULT_ROUTE))
    asked: set[Route] = set()
    while len(asked) < problem.budget:
        route = agent.ask()
        if route is None:
            break
        assert not route.is_default, "the default route was asked for"
        assert route not in asked, f"{route} was asked for twice"
        assert problem.catalog.is_legal(route), f"{route} is not legal"
        assert problem.catalog.route(route.values) == route, f"{route} is not canonical"
        if problem.candidates is not None:
            assert route in problem.candidates, f"{route} is no candidate"
        asked.add(route)
        agent.tell(route, tell(route))
    return len(asked)


def told(rng: np.random.Generator) -> Callable[[Route], Outcome]:
    """Outcomes at random, with the route put in."""
    outcomes = pool()
    return lambda route: replace(outcomes[int(rng.integers(len(outcomes)))], route=route)


@pytest.mark.parametrize("name", [name for name in AGENTS if name not in UNASKED])
def test_no_agent_sends_what_is_not_allowed(name: str) -> None:
    if name in ("tpe", "gp"):
        pytest.importorskip("optuna").logging.set_verbosity(50)
    if name == "gp":
        pytest.importorskip("torch")
    if name.startswith("forest"):
        pytest.importorskip("sklearn")
    slow = SLOW.get(name)
    steps = size("agent_steps") if slow is None else math.ceil(slow * size("slow_agent_steps"))
    make, rng = factory_of(name), np.random.default_rng(sequence())
    catalog, cards = table().catalog, table().models
    every = synthetic.routes()[1:]
    if name in BELIEVERS:  # whose candidates and neighbours are few, too
        every = every[:24]
    sent = seed = 0
    while sent < steps:
        known = cards[seed % len(cards)].features if seed % 5 else None
        some = None
        if seed % 2 or (name in BELIEVERS and seed % 8):
            count = int(rng.integers(0, len(every) + 1))
            some = tuple(every[i] for i in rng.permutation(len(every))[:count])
        budget = int(rng.integers(1, 48 if name not in SLOW else 12))
        sent += walk(make, Problem(catalog, known, some, budget, seed, 1e-2), told(rng))
        seed += 1
    report("agent", agent=name, routes=sent, problems=seed)


# Catalogs that nobody has seen.


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    """Catalogs of one to seven knobs, some of which need a value of another."""
    count = draw(st.integers(1, 7))
    knobs = []
    for number in range(count):
        values = tuple(f"v{i}" for i in range(draw(st.integers(1, 5))))
        knobs.append(Knob(f"-k{number}", values, draw(st.sampled_from(values))))
    needs = []
    for number in range(1, count):
        if draw(st.booleans()):
            other = knobs[draw(st.integers(0, number - 1))]
            allowed = draw(st.lists(st.sampled_from(other.values), min_size=1, unique=True))
            # A catalog's default route is always legal.
            allowed = tuple(dict.fromkeys([*allowed, other.default]))
            needs.append(Requirement(knobs[number].name, None, other.name, allowed, "made up"))
    return Catalog("made", "1", tuple(knobs), tuple(needs))


@settings(
    max_examples=size("made_catalogs"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(catalog=catalogs(), seed=st.integers(0, 2**32 - 1), share=st.sampled_from([None, 0.0, 0.5]))
def test_no_agent_sends_what_a_made_catalog_forbids(
    catalog: Catalog, seed: int, share: float | None
) -> None:
    rng = np.random.default_rng(seed)
    some = None
    if share is not None:
        near = tuple(catalog.neighbours(DEFAULT_ROUTE))
        some = near[: round(share * len(near))]
    for name in ("fast", "mixed", "full", "recentred", "random"):
        walk(make_factory(name), Problem(catalog, None, some, 24, seed), told(rng))


# The environments.


def _check_step(env, rng: np.random.Generator, seen: dict, built: set[Route]) -> bool:  # noqa: ANN001
    """One allowed action at random, after a forbidden one was refused; returns whether it ended."""
    mask = seen["mask"]
    forbidden = np.flatnonzero(mask == 0)
    if len(forbidden) and rng.random() < 0.05:
        before = env._episode.used
        with pytest.raises(InputError, match="masked"):
            env.step(int(rng.choice(forbidden)))
        assert env._episode.used == before, "a forbidden action cost a build"
    action = int(rng.choice(np.flatnonzero(mask)))
    places, routes = env._seen.places, env._episode.routes
    if action < len(mask) - 1:
        route = routes[int(places[action])]
        assert table().catalog.is_legal(route) and not route.is_default
        assert route not in built, "a route is offered twice"
        built.add(route)
    after, reward, ended, cut, _ = env.step(action)
    assert math.isfinite(reward) and not cut
    assert env.observation_space.contains(after)
    seen.update(after)
    return ended


@pytest.mark.parametrize("kind", ["recorded", "live"])
def test_every_action_that_an_environment_offers_is_allowed(kind: str) -> None:
    from routepilot.env.route_env import LiveRouteSelectionEnv, Randomness, RouteSelectionEnv
    from routepilot.env.surrogate import Surrogate

    steps = size("environment_steps")
    rng = np.random.default_rng(sequence())
    if kind == "recorded":
        env = RouteSelectionEnv(small(), randomness=Randomness((1, 12), noise=True, share=0.3))
    else:
        env = LiveRouteSelectionEnv(
            small().catalog,
            synthetic.routes()[1:25],
            Surrogate(Replay(small(), Gate())),
            small().models[0].features,
            told(rng),
            budget=12,
        )
    done = episodes = 0
    seen, _ = env.reset(seed=0)
    while done < steps:
        built: set[Route] = set()
        ended = False
        while not ended:
            ended = _check_step(env, rng, seen, built)
            done += 1
        with pytest.raises(InputError, match="reset"):
            env.step(0)
        seen, _ = env.reset()
        episodes += 1
    report("environment", kind=kind, steps=done, episodes=episodes)


# The policy.


def test_masked_actions_are_never_taken_by_the_policy() -> None:
    """Random weights and random masks: the greedy action and every sampled one is allowed."""
    from routepilot.agents import policy
    from routepilot.env.episode import CONTEXT_FEATURES, ROW_FEATURES, ROWS, Observation

    rng = np.random.default_rng(0)
    steps = size("mask_steps")
    logits = np.zeros(1)
    for number in range(steps):
        if number % 1000 == 0:
            weights = {
                n: rng.normal(0, 3, s).astype(np.float32) for n, s in policy.shapes().items()
            }
            network = policy.Network(weights)
        mask = np.ones(ROWS + 1, np.int8)
        mask[:-1] = rng.random(ROWS) < rng.random()
        seen = Observation(
            rng.normal(0, 5, (ROWS, len(ROW_FEATURES))).astype(np.float32),
            rng.normal(0, 5, len(CONTEXT_FEATURES)).astype(np.float32),
            mask,
            np.zeros(ROWS, np.int64),
        )
        logits = network.logits(seen)
        assert mask[int(np.argmax(logits))] == 1
        assert np.all(np.isneginf(logits) == (mask == 0))
    report("masks", steps=steps)
    assert math.isfinite(float(logits.max()))
