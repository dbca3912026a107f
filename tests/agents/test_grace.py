"""Clusters, their coresets, and the refinement around the best."""

from __future__ import annotations

import numpy as np
import synthetic

from routepilot.agents.base import Problem
from routepilot.agents.choosing import choose_setting
from routepilot.agents.grace import Clusters, GraceAgent, Setting
from routepilot.env.backends.recorded import Replay
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE

REPLAY = Replay(synthetic.table())
CLUSTERS = Clusters(REPLAY, Setting(2, 4))


def test_models_that_want_the_same_fall_into_one_cluster() -> None:
    even = CLUSTERS.nearest(REPLAY.model("model0").card.features)[0]
    odd = CLUSTERS.nearest(REPLAY.model("model1").card.features)[0]
    assert even != odd
    for place, model in enumerate(REPLAY):
        assert CLUSTERS.nearest(model.card.features)[0] == (odd if place % 2 else even)
    first = CLUSTERS.coreset(even)[0], CLUSTERS.coreset(odd)[0]
    assert first[0].values["-engine"] == "b" and first[1].values["-precision"] == "int"


def test_values_are_the_clusters_mean_gains() -> None:
    weights = CLUSTERS.weights(0)
    assert weights.sum() == 1.0 or abs(weights.sum() - 1) < 1e-12
    routes = CLUSTERS.table.routes
    np.testing.assert_allclose(CLUSTERS.values(0, routes), weights @ CLUSTERS.table.gains)


def outcome(route, gain):  # type: ignore[no-untyped-def]
    return Outcome(route, Status.OK, "", synthetic.measurement(gain))


def test_after_the_coreset_it_refines_around_the_best() -> None:
    model = REPLAY.model("model0")
    problem = Problem(REPLAY.catalog, model.card.features, model.routes, 16, 0)
    agent = GraceAgent(problem, CLUSTERS)
    agent.tell(DEFAULT_ROUTE, model.default)
    coreset = CLUSTERS.coreset(CLUSTERS.nearest(model.card.features)[0])
    asked = []
    for build in range(8):
        route = agent.ask()
        assert route is not None
        asked.append(route)
        agent.tell(route, outcome(route, 0.3 if build == 1 else -0.1))
    assert asked[:4] == coreset
    best = REPLAY.catalog.full_settings(asked[1])
    for route in asked[4:]:
        settings = REPLAY.catalog.full_settings(route)
        assert sum(settings[name] != best[name] for name in best) == 1


def test_while_nothing_wins_other_clusters_come_next() -> None:
    model = REPLAY.model("model0")
    problem = Problem(REPLAY.catalog, model.card.features, model.routes, 16, 0)
    agent = GraceAgent(problem, CLUSTERS)
    agent.tell(DEFAULT_ROUTE, model.default)
    asked = []
    for _ in range(6):
        route = agent.ask()
        assert route is not None
        asked.append(route)
        agent.tell(route, outcome(route, -0.1))
    own, other = CLUSTERS.nearest(model.card.features)
    expected = [r for r in CLUSTERS.coreset(other)[:1] if r not in CLUSTERS.coreset(own)]
    assert asked[4 : 4 + len(expected)] == expected


def test_the_setting_kept_is_the_one_that_reaches_most_on_families_unseen() -> None:
    seen: list[tuple[int, tuple[str, ...]]] = []

    def make(known: Replay, size: int):  # type: ignore[no-untyped-def]
        seen.append((size, known.table.families))
        clusters = Clusters(known, Setting(2, size))

        def factory(problem: Problem) -> GraceAgent:
            if size == 1:  # a setting that spoils the agent
                clusters.coreset = lambda cluster: list(clusters.table.routes[:4])  # type: ignore[method-assign]
            return GraceAgent(problem, clusters)

        return factory

    assert choose_setting(make, (1, 8), REPLAY) == 8
    assert all(len(families) == 3 for _, families in seen)
    assert choose_setting(make, (1, 8), REPLAY.only_families(("family0",))) == 1
