"""One policy for several tables, and for a catalog of none of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic

from routepilot.agents.base import Problem, search
from routepilot.agents.believer import by_policy
from routepilot.agents.policy import load_policy
from routepilot.env.backends.recorded import Replay
from routepilot.env.records import RouteTable
from routepilot.env.route_env import LEAST_ROUTES, Randomness, RouteSelectionEnv
from routepilot.env.routes import Catalog, Knob, Route
from routepilot.env.surrogate import leave_family_out
from routepilot.training.courses import AlternatingEnv
from routepilot.training.train import train
from routepilot.training.train_config import TrainConfig

SHORT = TrainConfig(
    steps=256,
    environments=3,
    rollout=32,
    batch=48,
    epochs=2,
    teacher_episodes=120,
    teacher_epochs=8,
    evaluate_every=128,
    limits=(1e-2, 3e-2),
    knobs=0.5,
    blind=0.3,
)


def renamed(table: RouteTable, name: str) -> RouteTable:
    """The same outcomes under a catalog of another name, its knobs renamed."""

    def other(text: str) -> str:
        return f"{text}:{name}"

    def move(route: Route) -> Route:
        return Route(tuple((other(knob), value) for knob, value in route.settings))

    knobs = tuple(replace(knob, name=other(knob.name)) for knob in table.catalog.knobs)
    rules = tuple(
        replace(r, knob=other(r.knob), parent=other(r.parent)) for r in table.catalog.requirements
    )
    catalog = Catalog(name, "1", knobs, rules)
    outcomes = {
        fingerprint: {
            move(r): tuple(replace(o, route=move(r)) for o in found) for r, found in routes.items()
        }
        for fingerprint, routes in table.outcomes.items()
    }
    target = replace(table.target, backend=name, catalog_key=catalog.key)
    return replace(table, catalog=catalog, target=target, outcomes=outcomes)


FIRST, SECOND = synthetic.table(), renamed(synthetic.table(), "second")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("stable_baselines3")
    out = tmp_path_factory.mktemp("any")
    return train([FIRST, SECOND], SHORT, held_out=("family3",), out=out, name="any").path


def best_of_five(path: Path, table: RouteTable) -> float:
    """Mean share of the oracle's gain over the held-out family's models."""
    agent, shares = by_policy(load_policy(path)), []
    for model in Replay(table).only_families(("family3",)):
        problem = Problem(table.catalog, model.card.features, model.routes, 5, 0)
        found = search(
            agent(problem), lambda r, m=model: m.default if r.is_default else m.outcome(r), 5
        )  # noqa: E501
        shares.append(max((o.gain for o in found), default=0.0) / model.oracle)
    return float(np.mean(shares))


def test_the_card_names_every_table_and_each_serves_its_catalog(policy: Path) -> None:
    card = json.loads(policy.with_suffix(".json").read_text())
    assert card["table"] == "any-1.parquet" and list(card["more_tables"]) == ["any-2.parquet"]
    assert [t["catalog"] for t in card["scores"]["tables"]] == ["synthetic", "second"]
    loaded = load_policy(policy)
    for table in (FIRST, SECOND):
        replay = loaded.replay_for(table.catalog)
        assert replay is not None and replay.catalog == table.catalog
        assert len(loaded.surrogate_for(table.catalog).models) == 6
    for table in (FIRST, SECOND):
        assert best_of_five(policy, table) > 0.8


def test_a_catalog_of_no_table_is_served_without_records(policy: Path) -> None:
    third = renamed(synthetic.table(), "third")
    loaded = load_policy(policy)
    surrogate = loaded.surrogate_for(third.catalog)
    assert loaded.replay_for(third.catalog) is None and not surrogate.models
    assert surrogate.catalog == third.catalog
    assert surrogate.scales == loaded.surrogate.scales and surrogate.scales.speed[1] < 1
    assert surrogate.nearest(third.models[0].features) == []
    assert best_of_five(policy, third) > 0.2  # it searches, and learns from its own builds


def test_part_of_a_known_catalog_is_served_by_its_records(policy: Path) -> None:
    part = Catalog("part", "1", synthetic.CATALOG.knobs[:3])
    found = load_policy(policy).replay_for(part)
    assert found is not None and found.catalog.name == "synthetic"
    more = Catalog("more", "1", (*part.knobs, Knob("-new", ("a", "b"), "a", "New.")))
    assert load_policy(policy).replay_for(more) is None


def test_episodes_alternate_over_tables_and_can_be_taken_up_in_the_middle() -> None:
    noisy = Randomness((2, 8), (0.002, 0.01), True, 0.6, 0.4, 0.5)
    courses = [
        RouteSelectionEnv(table, None, noisy, leave_family_out(Replay(table)))
        for table in (FIRST, SECOND)
    ]
    env, rng = AlternatingEnv(courses, 1, 3), np.random.default_rng(0)
    seen, _ = env.reset(seed=5)
    names = [env._course.replay.catalog.name]
    for _ in range(60):
        again = AlternatingEnv(courses, 0, 3)
        other = again.go_to(json.loads(json.dumps(env.point())))
        for key, value in seen.items():
            np.testing.assert_array_equal(value, other[key])
        action = np.int64(rng.choice(np.flatnonzero(seen["mask"])))
        (seen, reward, done, _, info), second = env.step(action), again.step(action)
        assert (reward, done, info) == (second[1], second[2], second[4])
        if done:
            seen, _ = env.reset()
            names.append(env._course.replay.catalog.name)
    assert len(names) > 4 and names[:4] == ["second", "synthetic", "second", "synthetic"]


def test_random_sub_catalogs_leave_whole_knobs_out() -> None:
    opened = []
    env = RouteSelectionEnv(FIRST, randomness=Randomness((4, 4), knobs=0.4))
    for seed in range(30):
        env.reset(seed=seed)
        assert env._episode is not None
        routes = env._episode.routes
        assert len(routes) >= LEAST_ROUTES
        changed = {name for route in routes for name, _ in route.settings}
        # Whatever changes open knobs alone is offered.
        all_of_them = [r for r in env.model.routes if {n for n, _ in r.settings} <= changed]
        assert list(routes) == all_of_them
        opened.append(len(changed))
    assert min(opened) < len(FIRST.catalog.knobs) and len(set(opened)) > 1


def test_blind_episodes_know_no_records() -> None:
    env = RouteSelectionEnv(FIRST, randomness=Randomness((4, 4), blind=0.5))
    near = []
    for seed in range(20):
        seen, _ = env.reset(seed=seed)
        assert env._episode is not None
        near.append(bool(env._episode.belief.precedents.gain.size))
    assert 3 < sum(near) < 17
