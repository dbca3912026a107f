"""The estimate of losses by roundings that add up."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import synthetic

from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import LOST, Replay
from routepilot.env.features import FEATURE_NAMES
from routepilot.env.likeness import encode, joint
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.records import ModelCard, RouteTable
from routepilot.env.roundings import Roundings
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Knob, Route
from routepilot.env.surrogate import Surrogate

CATALOG = Catalog(
    "made",
    "1",
    (
        Knob("-half", ("off", "on"), "off", "Half.", ("precision",)),
        Knob("-codes", ("conv", "off", "matmul"), "off", "Integers.", ("precision",)),
        Knob("-fuse", ("on", "off"), "on", "Rounds nothing."),
    ),
)
ROUTES = [
    CATALOG.parse(text)
    for text in (
        "-half=on",
        "-codes=conv",
        "-codes=matmul",
        "-fuse=off",
        "-half=on -codes=conv",
        "-half=on -codes=matmul",
        "-half=on -fuse=off",
    )
]

#: The probe that foresees the error of a knob value.
PROBE_OF = {
    ("-half", "on"): "probe_bf16",
    ("-codes", "conv"): "probe_int8_conv",
    ("-codes", "matmul"): "probe_int8_matmul",
}


def loss_of(route: Route, features: dict[str, float]) -> float:
    """Errors of a route's roundings, added in their squares."""
    errors = [features[PROBE_OF[setting]] for setting in route.settings if setting in PROBE_OF]
    return math.sqrt(sum(10.0 ** (2 * error) for error in errors))


def features_of(seed: int) -> dict[str, float]:
    """Features of a model that differ in the probes alone."""
    rng = np.random.default_rng(seed)
    return {n: float(rng.uniform(-4, -1)) if "probe_" in n else 0.0 for n in FEATURE_NAMES}


@pytest.fixture(scope="module")
def replay() -> Replay:
    """Models whose routes lose what their roundings lose; one build in ten gives no outputs."""
    cards, outcomes = [], {}
    for seed in range(16):
        features, key = features_of(seed), f"{seed:064x}"
        cards.append(ModelCard(key, f"m{seed}", f"f{seed}", True, tuple(features.values()), 1.0))
        outcomes[key] = {
            route: (
                Outcome(route, Status.CRASHED, "ended by SIGSEGV")
                if (seed + place) % 10 == 9
                else Outcome(
                    route,
                    Status.OK,
                    measurement=synthetic.measurement(0.0),
                    losses={"rel_l2": loss_of(route, features)},
                ),
            )
            for place, route in enumerate([DEFAULT_ROUTE, *ROUTES])
        }
    target = replace(synthetic.TARGET, catalog_key=CATALOG.key)
    return Replay(RouteTable(CATALOG, target, tuple(cards), outcomes), Gate(limit=1e-2))


def fitted(replay: Replay) -> Roundings:
    codes = [encode(replay.catalog, m.routes) for m in replay]
    return Roundings(replay.catalog, replay.models, codes, [np.ones(len(c), bool) for c in codes])


def test_errors_add_up_on_a_model_that_it_never_saw(replay: Replay) -> None:
    features = features_of(99)
    rounding = [route for route in ROUTES if loss_of(route, features)]
    found = fitted(replay).expected(encode(CATALOG, rounding), tuple(features.values()))
    right = [math.log10(loss_of(route, features)) for route in rounding]
    np.testing.assert_allclose(found, right, atol=0.25)


def test_a_knob_that_rounds_nothing_loses_less_than_any_other(replay: Replay) -> None:
    roundings, codes = fitted(replay), encode(CATALOG, ROUTES)
    for seed in range(100, 110):
        found = roundings.expected(codes, tuple(features_of(seed).values()))
        assert ROUTES[int(np.argmin(found))] == CATALOG.parse("-fuse=off")


def test_one_more_rounding_never_loses_less(replay: Replay) -> None:
    roundings = fitted(replay)
    one = encode(CATALOG, [CATALOG.parse("-half=on"), CATALOG.parse("-codes=conv")])
    both = encode(CATALOG, [CATALOG.parse("-half=on -codes=conv")])
    for seed in range(100, 110):
        features = tuple(features_of(seed).values())
        assert roundings.expected(both, features)[0] >= roundings.expected(one, features).max()


def test_builds_without_outputs_do_not_count(replay: Replay) -> None:
    assert any((m.loss == LOST).any() for m in replay)
    kept = fitted(replay).expected(encode(CATALOG, ROUTES), None)
    assert kept.max() < -0.5


def test_values_that_the_table_lacks_are_not_known(replay: Replay) -> None:
    other = Catalog(
        "other",
        "1",
        (Knob("-half", ("off", "tiny"), "off"), Knob("-block", ("1", "0", "2"), "0")),
    )
    scale = joint(CATALOG, other)
    routes = [other.parse(text) for text in ("-half=tiny", "-block=1", "-block=2")]
    codes = encode(scale, [*routes, CATALOG.parse("-half=on"), DEFAULT_ROUTE], other)
    unchanged = encode(scale, [DEFAULT_ROUTE], other)[0]
    knows = fitted(replay).knows(codes, unchanged)
    assert knows.tolist() == [False, False, False, True, True]

    surrogate = Surrogate(replay)
    features = tuple(features_of(99).values())
    belief = surrogate.belief(features, [*routes, CATALOG.parse("-half=on")], other)
    usual, spread = surrogate.scales.loss
    losses = np.concatenate([m.loss[m.loss < LOST] for m in replay])
    assert spread == pytest.approx(np.log10(np.maximum(losses, 1e-7)).std())
    assert np.abs(belief.loss.mean[:3] - usual).max() < 2 * spread
    assert (belief.loss.sd[:3] > 1.2 * belief.loss.sd[3]).all()


def test_without_models_nothing_is_known(replay: Replay) -> None:
    empty = replay.without_families(replay.table.families)
    found = Roundings(CATALOG, empty.models, [], []).expected(encode(CATALOG, ROUTES), None)
    assert (found == found[0]).all()
