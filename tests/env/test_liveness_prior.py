"""What a liveness table lets expect of models that are not in it: chances, orders, beliefs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from routepilot.agents.base import Problem
from routepilot.agents.believer import greedy
from routepilot.agents.pool import first_candidates
from routepilot.env.accuracy import Gate
from routepilot.env.backends.tensorrt_catalog import make_catalog, shipped_routes_json
from routepilot.env.episode import ROW_FEATURES, Episode
from routepilot.env.likeness import Kernel
from routepilot.env.liveness import Liveness
from routepilot.env.liveness_pool import Found
from routepilot.env.liveness_prior import (
    LEAST_SHARE,
    SWEPT_IDENTICAL,
    UNKNOWN_CHANCE,
    LivenessPrior,
    expected_liveness,
    weighed,
)
from routepilot.env.liveness_table import LivenessCard, LivenessTable, describe_liveness
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Catalog
from routepilot.env.surrogate import Scales, blank

TILING, SLICES, FLASH, SPLIT = (
    "-kgen:tiling=0",
    "-slice_fusion=off",
    "-mha_fusion:v2:flash=off",
    "-tactic:splitk=off",
)
CHANGES = (TILING, SLICES, FLASH, SPLIT)
CONVOLUTIONS, PRODUCTS = ("Conv", "Relu"), ("MatMul", "Softmax")


def found(live: Iterable[str], failed: Iterable[str] = ()) -> dict[str, Found]:
    answers: dict[str, Found] = {"": {"hash": "a", "bytes": "1", "seconds": "1"}}
    for change in CHANGES:
        made: Found = {"hash": "b" if change in live else "a", "bytes": "1", "seconds": "1"}
        lost: Found = {"status": "crashed", "reason": "SIGSEGV", "seconds": "1"}
        answers[change] = lost if change in failed else made
    return answers


def table(*models: tuple[str, tuple[str, ...], dict[str, Found]]) -> LivenessTable:
    """Models of a name, which is their family too, operators, and answers for one target."""
    cards = tuple(
        LivenessCard(name, name * 8, name.rstrip("0123456789"), "train", True, operators, True)
        for name, operators, _ in models
    )
    answers = {(c.fingerprint, "8.9"): a for c, (_, _, a) in zip(cards, models, strict=True)}
    return LivenessTable("RTX 1", CHANGES, cards, answers)


PRIOR = LivenessPrior(
    table(
        ("net0", CONVOLUTIONS, found([TILING])),
        ("net1", CONVOLUTIONS, found([TILING, SLICES])),
        ("bert0", PRODUCTS, found([SLICES, FLASH], failed=[TILING])),
        ("gpt0", PRODUCTS, found([SLICES])),
    )
)


def catalog_of(backend: str = "tensorrt_rtx") -> Catalog:
    return make_catalog(backend, "1", shipped_routes_json())


def test_live_counts_models_and_never_live_names_the_rest() -> None:
    assert PRIOR.live_on == {
        "-kgen:tiling": 2,
        "-slice_fusion": 3,
        "-mha_fusion:v2:flash": 1,
        "-tactic:splitk": 0,
    }
    assert PRIOR.never_live == ("-tactic:splitk",)
    # TensorRT-RTX leaves tactics to run time: TensorRT may be moved by them.
    assert PRIOR.last(own=True) == ("-tactic:splitk",)
    assert PRIOR.last(own=False) == ()


def test_a_model_live_for_one_target_alone_counts_once() -> None:
    two = table(("net0", CONVOLUTIONS, found([])))
    key = ("net0" * 8, "12.0")
    prior = LivenessPrior(
        LivenessTable("RTX 1", CHANGES, two.models, {**two.found, key: found([TILING])})
    )
    assert prior.live_on["-kgen:tiling"] == 1


def test_chances_follow_models_of_like_operators() -> None:
    convolutions, products = PRIOR.chances(CONVOLUTIONS), PRIOR.chances(PRODUCTS)
    assert convolutions[TILING] > 0.8 > products[TILING]
    assert products[SLICES] > 0.8 > convolutions[SLICES]
    assert convolutions[FLASH] == 0.0  # no attention: the operators rule it out
    assert 0 < convolutions[SPLIT] < UNKNOWN_CHANCE
    # A failure says nothing of whether a change acts: one model of two is heard.
    assert products[TILING] == pytest.approx(0.05 / 1.5)
    # A family that is left out says nothing.
    assert PRIOR.chances(PRODUCTS, without_family="bert")[FLASH] < products[FLASH]


def test_nothing_known_gives_no_chances() -> None:
    assert expected_liveness(catalog_of(), CONVOLUTIONS, None, None, own=True) == {}
    empty = LivenessPrior(LivenessTable("RTX 1", CHANGES, (), {}))
    assert set(empty.chances(CONVOLUTIONS).values()) == {UNKNOWN_CHANCE, 0.0}
    assert empty.foretold()["models"] == 0


def test_a_sweep_of_the_model_itself_outweighs_the_corpus() -> None:
    swept = Liveness((TILING, SLICES), (SLICES,), (TILING,), {}, (), 2, 0.0, "RTX 1", "8.9")
    acts = expected_liveness(catalog_of(), CONVOLUTIONS, PRIOR, swept, own=True)
    assert acts[SLICES] == 1.0
    assert acts[TILING] == SWEPT_IDENTICAL
    assert acts["-kgen:tiling=1"] == UNKNOWN_CHANCE  # no sweep knows it
    assert "-precision=fp16" not in acts  # no sweep can judge it
    assert "-tf32=off" not in acts


def test_what_a_sibling_leaves_to_run_time_is_not_written_off() -> None:
    own = expected_liveness(catalog_of(), CONVOLUTIONS, PRIOR, None, own=True)
    other = expected_liveness(catalog_of("tensorrt"), CONVOLUTIONS, PRIOR, None, own=False)
    assert own[SPLIT] < UNKNOWN_CHANCE == other[SPLIT]
    assert own[TILING] == other[TILING]


def test_held_out_families_are_foretold() -> None:
    """A table of two kinds, two families each: by chance, what acts comes first."""
    changes = tuple(f"-kgen:tiling={n}" for n in range(60))
    odd, even = changes[1::2], changes[::2]

    def answers(live: Iterable[str]) -> dict[str, Found]:
        made = {c: {"hash": "b" if c in live else "a"} for c in changes}
        return {
            c: {**a, "bytes": "1", "seconds": "1"} for c, a in {"": {"hash": "a"}, **made}.items()
        }

    names = [("a", CONVOLUTIONS, odd), ("b", CONVOLUTIONS, odd), ("c", PRODUCTS, even)]
    names += [("d", PRODUCTS, even)]
    cards = tuple(LivenessCard(n, n, n, "train", True, ops, True) for n, ops, _ in names)
    whole = LivenessTable("R", changes, cards, {(n, "8.9"): answers(live) for n, _, live in names})
    told = LivenessPrior(whole).foretold()
    assert told == describe_liveness(whole)["foretold"]
    assert (told["models"], told["live"], told["first"]) == (4, 30.0, 30)
    assert told["by_chance"] == 1.0
    assert told["by_catalog"] == 0.5


def test_a_route_that_may_do_nothing_is_believed_to_do_little() -> None:
    catalog = catalog_of()
    routes = [catalog.parse(text) for text in (TILING, SPLIT, f"{TILING} {SPLIT}", "-tf32=off")]
    surrogate = blank(catalog, Gate(), Kernel(), Scales(speed=(0.1, 0.3)))
    belief = surrogate.belief(None, routes)
    acts = {TILING: 1.0, SPLIT: 0.0}
    found = weighed(belief, routes, acts)
    share = np.array([1.0, LEAST_SHARE, 1.0, 1.0])
    np.testing.assert_allclose(found.speed.mean, belief.speed.mean * share)
    np.testing.assert_allclose(found.speed.sd, belief.speed.sd * np.sqrt(share))
    np.testing.assert_allclose(found.prior_sd, found.speed.sd)
    assert found.acts.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert (belief.acts == 0.5).all()  # nothing is on record
    column = [name for name, _ in ROW_FEATURES].index("acts")
    seen = Episode(catalog, routes, found, 4, 1e-2, 0.0, np.random.default_rng(0)).observation()
    assert seen.rows[:4, column].tolist() == found.acts[seen.places[:4]].tolist()
    assert np.linalg.eigvalsh(found.speed.cov).min() > -1e-9
    assert weighed(belief, routes, {}) is belief
    half = weighed(belief, routes, {TILING: 0.5, SPLIT: 0.5})
    assert half.speed.mean[2] == pytest.approx(0.75 * belief.speed.mean[2])


def test_random_candidates_change_little_and_what_acts() -> None:
    catalog = catalog_of()
    changes = [f"{k.name}={v}" for k in catalog.knobs for v in k.alternatives]
    acts = dict.fromkeys(changes, 0.0) | {TILING: 1.0, SLICES: 0.5, "-copy_ppg=off": 0.5}
    problem = Problem(catalog, None, None, 4, 0, acts=acts)
    found = first_candidates(problem)
    assert found == first_candidates(problem)
    drawn = [route for route in found if len(route.settings) > 1]
    assert drawn
    live = {change for change, chance in acts.items() if chance}
    for route in drawn:
        assert len(route.settings) <= 4
        assert set(str(route).split()) <= live
    # Without such knowledge they are random over the whole catalog, as for every backend.
    blind = first_candidates(Problem(catalog, None, None, 4, 0))
    assert max(len(route.settings) for route in blind) > 50


def test_an_agent_with_a_belief_asks_for_what_acts() -> None:
    """Of a catalog without records every change is believed alike, but for its liveness."""
    catalog = catalog_of()
    surrogate = blank(catalog, Gate(), Kernel(), Scales())
    acts = dict.fromkeys((f"{k.name}={v}" for k in catalog.knobs for v in k.alternatives), 0.0)
    problem = Problem(catalog, None, None, 4, 0, acts=acts | {SLICES: 1.0})
    agent = greedy(surrogate)(problem)
    base = Measurement(0.0, 0.0, 0.0, 1.0, 1.0, 1, 0.0)
    agent.tell(DEFAULT_ROUTE, Outcome(DEFAULT_ROUTE, Status.OK, measurement=base))
    asked = agent.ask()
    assert asked is not None
    assert SLICES in str(asked)


def test_the_released_table_agrees_with_the_operator_rule() -> None:
    """Nothing that operators rule out changed an engine of the corpus."""
    from routepilot.training.defaults import released_liveness

    table = released_liveness()
    if table is None:
        pytest.skip("no liveness table is released in this checkout")
    facts = describe_liveness(table)
    assert facts["operator_rule"]["changed_though_ruled_out"] == []
    assert facts["operator_rule"]["ruled_out"] > 1000
    assert facts["foretold"]["by_chance"] > 2 * facts["foretold"]["by_catalog"]
