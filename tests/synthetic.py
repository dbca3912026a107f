"""A made route table: few models, known structure, every kind of outcome. For tests alone."""

from __future__ import annotations

import math

import numpy as np

from routepilot.env.backends.base import Target
from routepilot.env.features import FEATURE_NAMES, PROBES
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.records import ModelCard, RouteTable
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Knob, Requirement, Route, combine

CATALOG = Catalog(
    "synthetic",
    "1",
    (
        Knob("-engine", ("a", "b"), "a", "Engine.", ("engine",)),
        Knob("-precision", ("full", "half", "int"), "full", "Precision.", ("precision",)),
        Knob("-level", ("2", "1", "0"), "2", "Level.", ("graph",)),
        Knob("-fuse", ("on", "off"), "on", "Fusion.", ("fusion",)),
        Knob("-pack", ("on", "off"), "on", "Packing, of engine a alone.", ("memory",)),
    ),
    (Requirement("-pack", None, "-engine", ("a",), "engine b does not pack"),),
)

TARGET = Target("synthetic", "no device", {"compiler": "1"}, CATALOG.key, {"threads": "1"})


#: Loss of the half precision, and of integers by kind, even and odd.
HALF_LOSS, INT_LOSSES = 2e-3, (5e-2, 4e-3)


def routes() -> list[Route]:
    """Every legal route, the default first."""
    found: list[dict[str, str]] = [{}]
    for knob in CATALOG.knobs:
        found = [{**settings, knob.name: value} for settings in found for value in knob.values]
    return combine(CATALOG, found)


def measurement(log_speedup: float, noise: float = 0.01) -> Measurement:
    """A measurement whose interval has that standard deviation."""
    low, high = log_speedup - 2 * noise, log_speedup + 2 * noise
    return Measurement(log_speedup, low, high, math.exp(-log_speedup), 1.0, 10, noise)


def outcome(route: Route, kind: int, rng: np.random.Generator) -> Outcome:
    """An outcome: models of even kind gain from engine b, of odd kind from integers."""
    values = CATALOG.full_settings(route)
    if values["-level"] == "0" and values["-engine"] == "b" and kind % 3 == 0:
        return Outcome(route, Status.BUILD_FAILED, "level 0 is not supported", build_seconds=0.1)
    if values["-fuse"] == "off" and values["-level"] == "1" and kind == 1:
        return Outcome(route, Status.CRASHED, "ended by SIGSEGV", build_seconds=0.2)
    gain = 0.4 * (values["-engine"] == "b") * (1 if kind % 2 == 0 else -1)
    gain += 0.5 * (values["-precision"] == "int") * (1 if kind % 2 else 0.2)
    gain += 0.1 * (values["-precision"] == "half") - 0.1 * (values["-level"] != "2")
    gain += rng.normal(0, 0.01)
    loss = {"full": 1e-6, "half": HALF_LOSS, "int": INT_LOSSES[kind % 2]}[values["-precision"]]
    return Outcome(
        route,
        Status.OK,
        measurement=measurement(0.0 if route.is_default else gain),
        losses={"rel_l2": loss * math.exp(rng.normal(0, 0.1))},
        build_seconds=0.5 + 0.5 * (values["-precision"] == "int"),
        measure_seconds=0.5,
        engine_hash=route.key,
    )


def table(models: int = 8) -> RouteTable:
    """A table of `models` models in families of two; features say the kind, with noise."""
    rng = np.random.default_rng(0)
    cards, outcomes = [], {}
    for kind in range(models):
        features = rng.normal(0, 0.2, len(FEATURE_NAMES))
        features[:8] += kind % 2
        halves = [HALF_LOSS, HALF_LOSS / 8, HALF_LOSS / 8]  # bf16, fp16, TF32
        probes = np.log10([*halves, *[INT_LOSSES[kind % 2]] * 3])
        features[PROBES] = probes + features[PROBES]  # probes foresee the loss, nearly
        fingerprint = f"{kind:064x}"
        family = f"family{kind // 2}"
        trained = kind % 3 > 0
        card = ModelCard(fingerprint, f"model{kind}", family, trained, tuple(features), 1.0)
        cards.append(card)
        outcomes[fingerprint] = {r: (outcome(r, kind, rng),) for r in routes()}
        control = outcome(DEFAULT_ROUTE, kind, rng)
        outcomes[fingerprint][DEFAULT_ROUTE] += (control,)
    return RouteTable(CATALOG, TARGET, tuple(cards), outcomes, {"note": "made for tests"})
