"""What is believed of a route before it is built: a two-way Gaussian process.

Owns the process: a route table conditions it, and it gives the belief (`beliefs.py`) about the
routes of a model. Knows no agent and no environment. Two signals share one structure: log speed-up
of whatever was timed, and log10 of the loss, so that the chance of passing the gate is known at any
limit.

The covariance of two (model, route) pairs is a product: how alike the models are, times how alike
the routes are (`likeness.py`). Models are alike by a constant they all share, by their features,
and by being the same (the multi-task kernel of Bonilla et al., NIPS 2007); routes by the knobs in
which they differ. The loss of a route is moreover near to linear in what rounding alone did to the
model (`probes.py`), with slopes that routes share as they are alike. Nothing in it needs a route, a
knob or a catalog to be in the table: knobs of another compiler join those of the table (`joint`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from routepilot.env.accuracy import Gate
from routepilot.env.backends.base import Target
from routepilot.env.backends.recorded import ModelReplay, Replay
from routepilot.env.beliefs import (
    CLIP,
    SPEED_NOISE,
    Belief,
    Floats,
    Signal,
    log_loss,
    loss_noise,
)
from routepilot.env.features import PROBES
from routepilot.env.likeness import Kernel, encode, joint, relevance, route_likeness, telling
from routepilot.env.precedents import PrecedentTable
from routepilot.env.records import RouteTable
from routepilot.env.roundings import Roundings
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Route

#: Most outcomes that a surrogate is conditioned on: its cost grows with their cube. A larger table
#: is told by those of its routes that say most about the others.
MOST_OUTCOMES = 3000


@dataclass(frozen=True)
class Scales:
    """Mean and standard deviation of both signals, which a process without records cannot know.

    Attributes:
        speed: Of the log speed-up.
        loss: Of the log10 loss.
    """

    speed: tuple[float, float] = (0.0, 1.0)
    loss: tuple[float, float] = (0.0, 1.0)


class Surrogate:
    """The process, conditioned on a table.

    Args:
        replay: Training models.
        kernel: Hyperparameters.
        scales: Scales of the signals where the replay has no models.
    """

    def __init__(
        self, replay: Replay, kernel: Kernel | None = None, scales: Scales | None = None
    ) -> None:
        self.kernel = kernel or Kernel()
        self.catalog = replay.catalog
        self.gate = replay.gate
        self.models = replay.models
        features = np.array([m.card.features for m in self.models], dtype=float)
        self._centre = features.mean(axis=0) if len(features) else np.zeros(0)
        spread = features.std(axis=0) if len(features) else np.zeros(0)
        self._spread = np.where(spread > 1e-6, spread, np.inf)
        self._features = self._standard(features)
        self._relevance = relevance(self._features, self.models)
        self._priors: dict[str, Belief] = {}
        self._precedents = PrecedentTable(self.models)
        place = self._precedents.places
        self._places = [np.array([place[r] for r in m.routes], int) for m in self.models]
        self._codes = encode(self.catalog, list(place))
        self._routes_alike = route_likeness(self.catalog, self._codes, self._codes, self.kernel)
        known = np.bincount(np.concatenate([*self._places, []]).astype(int), minlength=len(place))
        count = len(place)
        if known.sum() > MOST_OUTCOMES:
            count = max(1, MOST_OUTCOMES // len(self.models))
        self._told = telling(self._routes_alike, known, count)
        codes = [self._codes[places] for places in self._places]
        told = [self._told[places] for places in self._places]
        self._roundings = Roundings(self.catalog, self.models, codes, told)
        expected = [
            self._roundings.expected(code, m.card.features)
            for m, code in zip(self.models, codes, strict=True)
        ]
        self._speed = self._condition(
            [np.clip(m.log_speedup, -CLIP, CLIP) for m in self.models],
            [np.hypot(m.noise, SPEED_NOISE) for m in self.models],
            (scales or Scales()).speed,
        )
        self._loss = self._condition(
            [
                np.array([log_loss(x) for x in m.loss]) - e
                for m, e in zip(self.models, expected, strict=True)
            ],
            [np.array([loss_noise(x) for x in m.loss]) for m in self.models],
            (scales or Scales()).loss,
            probed=True,
        )

    @property
    def scales(self) -> Scales:
        """Scales of the signals, as the records have them."""
        return Scales(self._speed.scale, self._roundings.scale if self.models else self._loss.scale)

    def blank(self, catalog: Catalog) -> Surrogate:
        """A surrogate for another catalog: these scales and this kernel, and no records."""
        return blank(catalog, self.gate, self.kernel, self.scales)

    def belief(
        self,
        features: Sequence[float] | None,
        routes: Sequence[Route],
        catalog: Catalog | None = None,
    ) -> Belief:
        """The belief about candidate routes of a new model.

        Over another catalog the table's routes leave alone what they do not know. What is believed
        of a knob that the table lacks is then the mean of all outcomes at first, and what this
        model's own builds say of it later.

        Args:
            features: Its features; None knows only what all models share.
            routes: Candidate routes, of the table or not.
            catalog: Catalog they are of; the table's when None.
        """
        scale = joint(self.catalog, catalog or self.catalog)
        codes = encode(scale, routes, catalog)
        known = self._codes if scale is self.catalog else self._codes_on(scale)
        alike = self._feature_likeness(features)
        likeness = self.kernel.shared + self.kernel.alike * alike
        own = self.kernel.shared + self.kernel.alike + self.kernel.own
        prior = route_likeness(scale, codes, codes, self.kernel)
        cross = route_likeness(scale, known, codes, self.kernel)
        speed = self._speed.posterior(likeness, cross, own * prior)
        if self.models:
            moved, itself = self._moved_alike(features)
            likeness = self.kernel.beside * likeness + moved
            own = self.kernel.beside * own + itself
        loss = self._loss.posterior(likeness, cross, own * prior)
        if self.models:
            known_values = self._roundings.knows(codes, encode(scale, [DEFAULT_ROUTE], catalog)[0])
            usual, spread = self._roundings.scale
            loss.mean += np.where(known_values, self._roundings.expected(codes, features), usual)
            wider = np.where(known_values, 1.0, max(spread / self._loss.scale[1], 1.0))
            loss.cov *= np.outer(wider, wider)
        seconds = self._seconds
        mean_seconds = float(np.mean(list(seconds.values()))) if seconds else 1.0
        return Belief(
            speed,
            loss,
            codes,
            np.array([seconds.get(r, mean_seconds) for r in routes]),
            self._precedents.of(routes, alike),
        )

    def prior(self, model: ModelReplay) -> Belief:
        """The belief about a recorded model's routes, computed once; copy it before observing."""
        found = self._priors.get(model.card.fingerprint)
        if found is None:
            found = self.belief(model.card.features, model.routes)
            self._priors[model.card.fingerprint] = found
        return found

    def _codes_on(self, scale: Catalog) -> NDArray[np.int64]:
        """The table's routes as value numbers of a catalog that adds to its own."""
        return encode(scale, list(self._precedents.places), self.catalog)

    @cached_property
    def _seconds(self) -> dict[Route, float]:
        """Mean build and measure seconds of each route."""
        found: dict[Route, list[float]] = {}
        for model in self.models:
            for place, route in enumerate(model.routes):
                found.setdefault(route, []).append(float(model.build_seconds[place]))
        return {route: float(np.mean(values)) for route, values in found.items()}

    def nearest(self, features: Sequence[float], count: int = 3) -> list[tuple[str, float]]:
        """Training models that speak most for a new one: name and likeness."""
        likeness = self._feature_likeness(features)
        order = np.argsort(-likeness)[:count]
        return [(self.models[i].card.name, float(likeness[i])) for i in order]

    def _standard(self, features: Floats) -> Floats:
        return np.clip((features - self._centre) / self._spread, -3, 3)

    def _feature_kernel(self, one: Floats) -> Floats:
        distance = (self._features - one) ** 2 @ self._relevance
        return np.asarray(np.exp(-distance / (2 * self.kernel.width**2)))

    def _feature_likeness(self, features: Sequence[float] | None) -> Floats:
        """Likeness of a new model with each training model, in 0..1; 0 when nothing is known."""
        if features is None or not self.models:
            return np.zeros(len(self.models))
        return self._feature_kernel(self._standard(np.array([features], dtype=float))[0])

    def _moved_alike(self, features: Sequence[float] | None) -> tuple[Floats, float]:
        """Covariance by probes of a new model with each training model, and with itself."""
        if features is None:  # as far from the mean as training models are
            return np.zeros(len(self.models)), self.kernel.probes
        one = self._standard(np.array([features], dtype=float))[0, PROBES]
        scale = self.kernel.probes / max(len(one), 1)
        return scale * self._features[:, PROBES] @ one, scale * float(one @ one)

    def _condition(
        self,
        values: list[Floats],
        noises: list[Floats],
        empty: tuple[float, float],
        *,
        probed: bool = False,
    ) -> _Conditioned:
        kernel = self.kernel
        told = [self._told[places] for places in self._places]
        kept = [np.flatnonzero(~np.isnan(v) & t) for v, t in zip(values, told, strict=True)]
        known = [v[k] for v, k in zip(values, kept, strict=True)]
        if not known:
            return _Conditioned(
                np.zeros(0, int), np.zeros(0, int), np.zeros(0), np.zeros(0), *empty
            )
        flat = np.concatenate(known)
        centre = float(flat.mean()) if len(flat) else 0.0
        scale = float(flat.std()) if len(flat) > 1 and flat.std() > 1e-6 else 1.0
        places = [p[k] for p, k in zip(self._places, kept, strict=True)]
        sizes = [len(k) for k in kept]
        place = np.concatenate(places)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        between = kernel.shared + kernel.alike * np.array(
            [self._feature_kernel(f) for f in self._features]
        ).reshape(len(sizes), len(sizes))
        between += kernel.own * np.eye(len(sizes))
        if probed:
            moved = self._features[:, PROBES]
            between *= kernel.beside
            between += kernel.probes / max(moved.shape[1], 1) * (moved @ moved.T)
        cov = between[np.ix_(owner, owner)]
        cov *= self._routes_alike[np.ix_(place, place)]
        noise = np.concatenate([n[k] for n, k in zip(noises, kept, strict=True)]) / scale
        cov[np.diag_indices_from(cov)] += noise**2 + 1e-6
        return _Conditioned(owner, place, (flat - centre) / scale, cov, centre, scale)


class _Conditioned:
    """One signal's training data, factorised once."""

    def __init__(
        self,
        owner: NDArray[np.int64],
        place: NDArray[np.int64],
        values: Floats,
        cov: Floats,
        centre: float,
        scale: float,
    ) -> None:
        from scipy.linalg import cho_factor, cho_solve

        self._owner, self._place, self._centre, self._scale = owner, place, centre, scale
        self._empty = len(values) == 0
        if not self._empty:
            # In column order LAPACK works in place; symmetric, so the transpose is the same.
            self._factor = cho_factor(cov.T, lower=True, overwrite_a=True, check_finite=False)
            self._weights = cho_solve(self._factor, values, check_finite=False)

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the signal."""
        return self._centre, self._scale

    def posterior(self, likeness: Floats, cross: Floats, prior: Floats) -> Signal:
        """Mean and covariance over candidate routes of a model.

        Args:
            likeness: Covariance of the model with each training model.
            cross: Likeness of the table's routes with the candidates, shape (routes, candidates).
            prior: Covariance of the candidates before any training data.
        """
        from scipy.linalg import solve_triangular

        if self._empty:
            return Signal(np.full(len(prior), self._centre), self._scale**2 * prior)
        known = likeness[self._owner][:, None] * cross[self._place]
        half = solve_triangular(self._factor[0], known, lower=True, check_finite=False)
        mean = known.T @ self._weights
        cov = prior - half.T @ half
        return Signal(self._centre + self._scale * mean, self._scale**2 * cov)


def blank(catalog: Catalog, gate: Gate, kernel: Kernel, scales: Scales) -> Surrogate:
    """A surrogate that has no records of a catalog, and knows the scales of others.

    Its beliefs start the same for every route and learn from the run alone.
    """
    nothing = RouteTable(catalog, Target(catalog.name, "", {}, catalog.key, {}), (), {})
    return Surrogate(Replay(nothing, gate), kernel, scales)


def leave_family_out(
    replay: Replay,
    kernel: Kernel | None = None,
    on_fit: Callable[[int, int], None] | None = None,
) -> dict[str, Surrogate]:
    """Surrogates that never saw one family each, by that family.

    Args:
        replay: The models.
        kernel: Kernel of each.
        on_fit: Hears before each fit how many are done, and of how many; may raise to end it.
    """
    found: dict[str, Surrogate] = {}
    for family in replay.table.families:
        if on_fit is not None:
            on_fit(len(found), len(replay.table.families))
        found[family] = Surrogate(replay.without_families((family,)), kernel)
    return found


def greedy_share(
    models: Sequence[ModelReplay], surrogates: dict[str, Surrogate], builds: int
) -> float:
    """Mean share of the oracle's gain that greedy expected improvement reaches, family unseen."""
    found, best_possible = 0.0, 0.0
    for model in models:
        surrogate = surrogates[model.card.family]
        belief = surrogate.prior(model).copy()
        best, tried = 0.0, np.zeros(len(model.routes), bool)
        for _ in range(min(builds, len(model.routes))):
            score = belief.p_feasible(surrogate.gate.limit) * belief.expected_improvement(best)
            place = int(np.argmax(np.where(tried, -1.0, score)))
            tried[place] = True
            best = max(best, float(model.gain[place]))
            belief.observe(place, model.outcomes[place], float(model.loss[place]))
        found += best
        best_possible += model.oracle
    return found / max(best_possible, 1e-9)
