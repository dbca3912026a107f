"""Policies: numpy and torch agree, rows may be shuffled, bad files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import synthetic

from routepilot.agents.base import Problem, search
from routepilot.agents.believer import by_policy
from routepilot.agents.policy import Card, Network, file_hash, load_policy, save_policy, shapes
from routepilot.env.backends.recorded import Replay
from routepilot.env.episode import (
    CONTEXT_FEATURES,
    IMPROVEMENT_SCALE,
    ROW_FEATURES,
    ROWS,
    Observation,
)
from routepilot.env.errors import PolicyError
from routepilot.env.likeness import Kernel
from routepilot.env.routes import Route
from routepilot.env.tables import save_table


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes().items()}


def observation(used: int, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    rows = np.zeros((ROWS, len(ROW_FEATURES)), np.float32)
    rows[:used] = rng.normal(size=(used, len(ROW_FEATURES)))
    mask = np.array([1] * used + [0] * (ROWS - used) + [1], np.int8)
    context = rng.normal(size=len(CONTEXT_FEATURES)).astype(np.float32)
    return Observation(rows, context, mask, np.arange(ROWS))


def little(seen: Observation, expected: float = 0.0) -> Observation:
    """The observation, where no row is expected to gain more than so much."""
    place = [name for name, _ in CONTEXT_FEATURES].index("improvement")
    seen.context[place] = IMPROVEMENT_SCALE * expected
    assert seen.expected_gain == pytest.approx(expected)
    return seen


@pytest.mark.parametrize("used", [0, 1, 7, ROWS])
def test_numpy_and_torch_give_the_same_scores(used: int) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("stable_baselines3")
    from routepilot.agents.ppo import RowNetwork, weights_of

    net = RowNetwork()
    seen = observation(used)
    logits, _ = net(
        torch.tensor(seen.rows)[None],
        torch.tensor(seen.context)[None],
        torch.tensor(seen.mask)[None].float(),
    )
    ours = Network(weights_of(net)).logits(seen)
    legal = seen.mask.astype(bool)
    np.testing.assert_allclose(ours[legal], logits[0].detach().numpy()[legal], atol=1e-5)
    assert np.isneginf(ours[~legal]).all()


def test_order_of_rows_does_not_matter() -> None:
    network = Network(weights())
    seen = observation(9)
    order = np.random.default_rng(2).permutation(9)
    rows = seen.rows.copy()
    rows[:9] = seen.rows[order]
    shuffled = network.logits(Observation(rows, seen.context, seen.mask, seen.places))
    straight = network.logits(seen)
    np.testing.assert_allclose(shuffled[:9], straight[:9][order], rtol=1e-5, atol=1e-6)
    assert shuffled[-1] == pytest.approx(straight[-1], abs=1e-5)


@pytest.mark.parametrize(("stop", "stops"), [(1.0, False), (2.0, False), (2.5, True)])
def test_it_stops_when_that_is_likelier_than_all_rows_together(stop: float, stops: bool) -> None:
    """Nine equal rows: a stop must beat log 9 = 2.2 over one of them."""
    made = {name: np.zeros(shape, np.float32) for name, shape in shapes().items()}
    made["stop.bias"][:] = stop
    seen = little(observation(9))
    assert (Network(made).action(seen) == ROWS) is stops
    assert Network(made).action(seen, may_stop=False) < 9


@pytest.mark.parametrize(("expected", "stops"), [(0.09, True), (0.11, False)])
def test_it_goes_on_while_much_may_be_gained(expected: float, stops: bool) -> None:
    made = weights()
    made["stop.bias"][:] = 50.0
    assert (Network(made).action(little(observation(9), expected)) == ROWS) is stops


def test_it_stops_where_no_row_is_left() -> None:
    made = weights()
    made["stop.bias"][:] = -50.0
    assert Network(made).action(observation(0)) == ROWS


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_table(synthetic.table(), tmp_path / "made.parquet")
    card = Card(
        name="made",
        table="made.parquet",
        table_sha256=file_hash(tmp_path / "made.parquet"),
        models=("model0",),
        held_out=("family3",),
        gate={"metric": "rel_l2", "limit": 1e-2},
        kernel=Kernel().__dict__,
        seed=0,
        steps=0,
        scores={},
        versions={},
    )
    return save_policy(tmp_path, weights(), card)


def test_saved_and_loaded_policies_decide_alike(saved: Path) -> None:
    loaded = load_policy(saved)
    assert {m.card.family for m in loaded.replay} == {"family0", "family1", "family2"}
    for name, array in weights().items():
        np.testing.assert_array_equal(loaded.network.weights[name], array)
    replay = Replay(synthetic.table())
    model = replay.model("model7")
    problem = Problem(replay.catalog, model.card.features, model.routes, 5, 0)

    def built() -> list[Route]:
        agent = by_policy(loaded)(problem)
        evaluate = lambda r: model.default if r.is_default else model.outcome(r)  # noqa: E731
        return [o.route for o in search(agent, evaluate, 5)]

    assert built() == built()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def foreign(path: Path) -> None:
    path.write_bytes(b"\x80\x04malicious pickle")


def no_card(path: Path) -> None:
    path.with_suffix(".json").unlink()


def other_features(path: Path) -> None:
    card = json.loads(path.with_suffix(".json").read_text())
    card["row_features"].append("novelty")
    path.with_suffix(".json").write_text(json.dumps(card))


def newer(path: Path) -> None:
    card = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**card, "version": 99}))


def no_table(path: Path) -> None:
    (path.parent / "made.parquet").unlink()


def other_table(path: Path) -> None:
    save_table(synthetic.table(6), path.parent / "made.parquet")


@pytest.mark.parametrize(
    "spoil", [cut, foreign, no_card, other_features, newer, no_table, other_table]
)
def test_spoiled_policies_are_refused_in_one_line(
    spoil: Callable[[Path], None], saved: Path
) -> None:
    spoil(saved)
    with pytest.raises(PolicyError) as refusal:
        load_policy(saved)
    assert "\n" not in str(refusal.value)
    assert "made" in str(refusal.value)
