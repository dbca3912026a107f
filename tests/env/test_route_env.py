"""The environment: Gymnasium's and Stable-Baselines3's contracts, rewards, masks, speed."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import synthetic
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from routepilot.env.backends.recorded import Replay
from routepilot.env.episode import CONTEXT_FEATURES, ROW_FEATURES, ROWS
from routepilot.env.errors import InputError
from routepilot.env.route_env import ENV_ID, LIVE_ENV_ID, Randomness, RouteSelectionEnv
from routepilot.env.surrogate import leave_family_out

TABLE = synthetic.table()
SURROGATES = leave_family_out(Replay(TABLE))


def make(**options: object) -> RouteSelectionEnv:
    return RouteSelectionEnv(TABLE, surrogates=SURROGATES, **options)  # type: ignore[arg-type]


def test_gymnasium_checker_passes() -> None:
    check_env(make(), skip_render_check=True)


@pytest.mark.filterwarnings("ignore:Your observation candidates has an unconventional shape")
def test_stable_baselines3_checker_passes() -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    checker.check_env(make(), warn=True)


def test_made_by_name() -> None:
    env = gymnasium.make(ENV_ID, table=TABLE, surrogates=SURROGATES)
    seen, info = env.reset(seed=3)
    assert seen["candidates"].shape == (ROWS, len(ROW_FEATURES))
    assert seen["context"].shape == (len(CONTEXT_FEATURES),)
    assert info["model"].startswith("model")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.booleans(), share=st.floats(0.2, 1.0))
def test_rewards_sum_to_the_gain_minus_the_price_paid(seed: int, noise: bool, share: float) -> None:
    env = make(randomness=Randomness((1, 9), (0.0, 0.03), noise, share))
    rng = np.random.default_rng(seed)
    seen, info = env.reset(seed=seed)
    total = paid = 0.0
    done, used = False, 0
    while not done:
        assert seen["mask"][-1] == 1
        legal = np.flatnonzero(seen["mask"])
        action = int(rng.choice(legal))
        assert env._episode is not None and env._seen is not None
        price = env._episode.price
        if action < ROWS:
            route = env._episode.routes[int(env._seen.places[action])]
            seconds = env.model.build_seconds[env.model.index[route]]
            paid += price * seconds / env._mean_seconds
            used += 1
        seen, reward, done, truncated, info = env.step(np.int64(action))
        total += reward
        assert not truncated
    assert total == pytest.approx(info["log_speedup"] - paid, abs=1e-9)
    assert info["builds"] == used
    answer = info["route"]
    assert info["log_speedup"] >= 0
    if answer:
        place = next(i for i, r in enumerate(env.model.routes) if str(r) == answer)
        assert env.model.feasible[place]
    else:
        assert info["log_speedup"] == 0


def test_equal_seeds_give_equal_episodes() -> None:
    def play(seed: int) -> list[float]:
        env = make(randomness=Randomness(noise=True, share=0.5))
        seen, _ = env.reset(seed=seed)
        figures = [float(seen["candidates"].sum())]
        done = False
        while not done:
            seen, reward, done, _, _ = env.step(np.int64(0))
            figures += [reward, float(seen["candidates"].sum())]
        return figures

    assert play(5) == play(5)
    assert play(5) != play(6)


def test_a_masked_action_is_refused_and_nothing_happens() -> None:
    env = make()
    seen, _ = env.reset(seed=0)
    assert env._seen is not None
    env._seen.mask[3] = 0
    with pytest.raises(InputError, match="action 3 is masked"):
        env.step(np.int64(3))
    with pytest.raises(InputError, match="masked"):
        env.step(np.int64(ROWS + 1))
    _, reward, done, _, info = env.step(np.int64(ROWS))
    assert (reward, done, info["builds"]) == (0.0, True, 0)


def test_step_before_reset_is_refused() -> None:
    with pytest.raises(InputError, match="reset"):
        make().step(np.int64(0))


def test_no_route_is_laid_out_twice() -> None:
    env = make(randomness=Randomness((12, 12)))
    seen, _ = env.reset(seed=1, options={"model": "model2"})
    built = set()
    done = False
    while not done:
        assert env._seen is not None and env._episode is not None
        places = [p for p in env._seen.places.tolist() if p >= 0]
        assert len(places) == len(set(places))
        assert not built & set(places)
        built.add(places[-1])
        seen, _, done, _, _ = env.step(np.int64(len(places) - 1))
    assert len(built) == 12


def test_teacher_prefers_the_best_row_and_stops_when_nothing_is_left_to_gain() -> None:
    env = make(randomness=Randomness((12, 12), (0.01, 0.01)))
    env.reset(seed=0, options={"model": "model0"})
    assert env._seen is not None and env._episode is not None
    chances = env.teacher(0.01)
    assert chances.sum() == pytest.approx(1)
    gains = [env.model.gain[p] if p >= 0 else -1.0 for p in env._seen.places]
    best = int(np.argmax(chances))
    assert best < ROWS and gains[best] >= max(gains) - 0.03
    env._episode.best = env.model.oracle
    assert int(np.argmax(env.teacher(0.01))) == ROWS


def test_live_environment_is_the_same_over_a_function() -> None:
    replay = Replay(TABLE)
    model = replay.model("model5")
    surrogate = SURROGATES[model.card.family]
    live = gymnasium.make(
        LIVE_ENV_ID,
        catalog=replay.catalog,
        routes=model.routes,
        surrogate=surrogate,
        features=model.card.features,
        evaluate=model.outcome,
        budget=6,
    )
    assert live.spec is not None and live.spec.nondeterministic
    recorded = make(randomness=Randomness((6, 6), (0.005, 0.005)))
    seen, _ = live.reset(seed=4)
    other, _ = recorded.reset(seed=4, options={"model": "model5"})
    done, total = False, 0.0
    while not done:
        # Rows by chance differ; those the belief lays out are the same.
        np.testing.assert_allclose(seen["candidates"][:9], other["candidates"][:9], atol=1e-6)
        seen, reward, done, _, info = live.step(np.int64(0))
        other, _, over, _, known = recorded.step(np.int64(0))
        total += reward
        assert (info["route"], done) == (known["route"], over)
    assert info["log_speedup"] > 0 and total < info["log_speedup"]
