"""Across compilers: what learned on one table is applied unchanged to another with other knobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic

from routepilot.env.backends.base import Target
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Knob, combine
from routepilot.training.evaluate import evaluate
from routepilot.training.train import train
from routepilot.training.train_config import TrainConfig

pytest.importorskip("stable_baselines3")

CATALOG = Catalog(
    "other",
    "1",
    (
        Knob("-kernel", ("slow", "fast", "wide", "odd"), "slow", "Kernels.", ("precision",)),
        Knob("-level", ("2", "1", "0"), "2", "Level: a name that both compilers have."),
        Knob("-stream", ("1", "2", "3"), "1", "Streams."),
        Knob("-tile", ("8", "4", "2", "1"), "8", "Tiles."),
    ),
)


def other_table() -> RouteTable:
    """The models of the made table under another compiler: one kernel in four is good."""
    made, rng = synthetic.table(), np.random.default_rng(9)
    settings: list[dict[str, str]] = [{}]
    for knob in CATALOG.knobs:
        settings = [{**one, knob.name: value} for one in settings for value in knob.values]
    outcomes = {}
    for card in made.models:
        found = {}
        for route in combine(CATALOG, settings):
            values = CATALOG.full_settings(route)
            gain = {"slow": 0.0, "fast": 0.5, "wide": -0.3, "odd": -0.5}[values["-kernel"]]
            gain += 0.15 * (values["-tile"] == "2") - 0.1 * (values["-level"] != "2")
            measured = synthetic.measurement(
                0.0 if route.is_default else gain + float(rng.normal(0, 0.02))
            )
            found[route] = (
                Outcome(
                    route,
                    Status.OK,
                    measurement=measured,
                    losses={"rel_l2": 1e-4},
                    build_seconds=1.0,
                    engine_hash=route.key,
                ),
            )
        assert DEFAULT_ROUTE in found
        outcomes[card.fingerprint] = found
    target = Target("other", "no device", {"compiler": "1"}, CATALOG.key, {})
    return replace(made, catalog=CATALOG, target=target, outcomes=outcomes)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TrainConfig(
        steps=0, environments=1, batch=256, teacher_episodes=60, teacher_epochs=4, limits=(1e-2,)
    )
    out = tmp_path_factory.mktemp("policy")
    return train(synthetic.table(), config, held_out=("family3",), out=out, name="ours").path


def test_a_policy_of_one_compiler_works_on_another(policy: Path) -> None:
    agents = ("random", "two-way-gp", "best-on-average", "ppo")
    result = evaluate(other_table(), agents, seeds=2, policy=policy, name="other")
    assert result["policy"]["name"] == "ours"
    assert result["policy"]["trained_on"] == [f"model{k}" for k in range(6)]
    assert result["forecast"] is None
    shares = {name: row["gain_share"] for name, row in result["agents"].items()}
    # What it knows of the other compiler it learns within the run, and that is worth something.
    assert shares["two-way-gp"]["8"] > shares["random"]["8"]
    assert all(row["regressions"] == 0 for row in result["agents"].values())
    assert result["against"]["agent"] == "ppo"
    json.dumps(result, allow_nan=False)


def test_equal_runs_are_equal(policy: Path) -> None:
    first, second = (evaluate(other_table(), ("ppo",), seeds=1, policy=policy) for _ in range(2))
    assert first["agents"] == second["agents"]
