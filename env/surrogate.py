"""What is believed of a route before it is built: a two-way Gaussian process.

Owns the beliefs. Learns from a route table; knows no agent and no environment. Two signals share
one structure: log speed-up of whatever was timed, and log10 of the loss, so that the chance of
passing the gate is known at any limit.

The covariance of two (model, route) pairs is a product: how alike the models are, times how alike
the routes are. Models are alike by a constant they all share, by their features, and by being the
same (the multi-task kernel of Bonilla et al., NIPS 2007); routes by the knobs in which they
differ. The loss of a route is moreover near to linear in what rounding alone did to the model
(`probes.py`), with slopes that routes share as they are alike. Nothing in it needs a route, a knob
or a catalog to be in the table: knobs of another compiler join those of the table (`joint`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from routepilot.env.accuracy import Gate
from routepilot.env.backends.base import Target
from routepilot.env.backends.recorded import LOST, ModelReplay, Replay, noise_of
from routepilot.env.features import PROBES
from routepilot.env.outcomes import Outcome
from routepilot.env.precedents import Precedents, PrecedentTable
from routepilot.env.records import RouteTable
from routepilot.env.routes import Catalog, Knob, Route

Floats = NDArray[np.float64]

#: Log speed-ups beyond this are told apart no further: a disaster is a disaster.
CLIP = 1.2

#: Smallest loss told apart, log10.
SMALLEST_LOSS = -7.0

#: Standard deviation of a log10 loss beyond what inputs and rounding move it.
LOSS_NOISE = 0.1

#: The same where a build gave no outputs: that says little of what rounding does to routes like it.
LOST_NOISE = 2.0

#: Standard deviation of a log speed-up beyond what one session's interval shows.
SPEED_NOISE = 0.02

#: Most outcomes that a surrogate is conditioned on: its cost grows with their cube. A larger table
#: is told by those of its routes that say most about the others.
MOST_OUTCOMES = 3000

#: Knobs whose marks say that they change the engine as a whole.
STRONG = frozenset({"engine", "precision"})


@dataclass(frozen=True)
class Kernel:
    """Hyperparameters, in units of standardised signals.

    The defaults did best of 14 settings (13 random, and a first guess) in share of the oracle's
    gain after 1, 2 and 4 greedy builds at limits 1e-2 and 3e-2, each family unseen by its
    surrogate, on 22 of the 26 models of the first table (docs/experiments.md).

    Attributes:
        shared: Variance of what all models share.
        alike: Variance of what models of like features share.
        own: Variance of what is a model's own.
        width: Length scale of features, in root-mean-square standard deviations.
        strong: Decay of likeness for each differing knob marked as strong.
        weak: Decay for each other differing knob.
        probes: Variance of the loss that is linear in the probes.
        beside: Share of the other variances that the loss keeps beside it.
    """

    shared: float = 0.3
    alike: float = 2.0
    own: float = 0.2
    width: float = 0.5
    strong: float = 1.0
    weak: float = 0.12
    probes: float = 2.0
    beside: float = 0.05


def joint(ours: Catalog, other: Catalog) -> Catalog:
    """A catalog in which routes of both can be told apart; ours when the other adds nothing.

    Knobs of one name are one knob. What a knob adds keeps its marks, so that the likeness of routes
    over another compiler's knobs is as defined as over our own.
    """
    knobs = []
    for knob in ours.knobs:
        values = other[knob.name].all_values if knob.name in other else ()
        new = tuple(value for value in values if value not in knob.all_values)
        knobs.append(replace(knob, values=(*knob.values, *new)) if new else knob)
    extra = tuple(knob for knob in other.knobs if knob.name not in ours)
    if not extra and tuple(knobs) == ours.knobs:
        return ours
    return replace(ours, knobs=(*knobs, *extra))


def encode(
    catalog: Catalog, routes: Sequence[Route], home: Catalog | None = None
) -> NDArray[np.int64]:
    """Routes as value numbers, shape (routes, knobs); values the catalog lacks share one number.

    Args:
        catalog: The knobs, one a column.
        routes: The routes.
        home: Catalog the routes are of, where it is another: a knob at its default there counts as
            unchanged, whatever the value.
    """
    tables = [_numbers(knob, home) for knob in catalog.knobs]
    rows = []
    for route in routes:
        values = route.values
        rows.append(
            [
                table.get(values.get(knob.name, unchanged), -1)
                for knob, (unchanged, table) in zip(catalog.knobs, tables, strict=True)
            ]
        )
    return np.array(rows, dtype=np.int64).reshape(len(routes), len(catalog.knobs))


def _numbers(knob: Knob, home: Catalog | None) -> tuple[str, dict[str, int]]:
    """The default of a knob in a catalog, and a number for each value; the default's is ours."""
    table = {value: number for number, value in enumerate(knob.all_values)}
    if home is None or knob.name not in home or home[knob.name].default == knob.default:
        return knob.default, table
    unchanged = home[knob.name].default
    changed = {**table, knob.default: len(table)}
    return unchanged, {**changed, unchanged: table[knob.default]}


def route_likeness(
    catalog: Catalog, a: NDArray[np.int64], b: NDArray[np.int64], kernel: Kernel
) -> Floats:
    """Likeness of routes in (0, 1], shape (len(a), len(b))."""
    decay = np.array(
        [kernel.strong if STRONG & set(k.marks) else kernel.weak for k in catalog.knobs]
    )
    distance = np.zeros((len(a), len(b)))
    for knob, weight in enumerate(decay):
        distance += weight * (a[:, knob, None] != b[None, :, knob])
    return np.exp(-distance)


def telling(alike: Floats, known: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """Which routes to be told of, when there are too many.

    One after the other, that which leaves the least unknown of all, as in a pivoted Cholesky
    decomposition; routes that few models know count less.

    Args:
        alike: Likeness of the routes, shape (routes, routes).
        known: How many models know each.
        count: How many to choose.
    """
    chosen = np.zeros(len(alike), bool)
    weight = np.sqrt(known / max(int(known.max(initial=1)), 1))
    left, columns = alike.diagonal().copy(), np.zeros((count, len(alike)))
    for step in range(min(count, len(alike))):
        place = int(np.argmax(np.where(chosen, -1.0, weight * left)))
        chosen[place] = True
        column = alike[place] - columns[:step, place] @ columns[:step]
        columns[step] = column / math.sqrt(max(left[place], 1e-9))
        left = np.maximum(left - columns[step] ** 2, 0.0)
    return chosen


def relevance(features: Floats, models: Sequence[ModelReplay]) -> Floats:
    """How much each feature says about which routes work, as weights that sum to 1.

    The weight of a feature is the alignment (Cristianini et al., NIPS 2001) of the likeness it
    gives the training models with the likeness of their outcomes, squared; features that say
    nothing or the opposite get none. Few models cannot weigh many features: a tenth of the weight
    stays spread evenly.

    Args:
        features: Standardised features, shape (models, features).
        models: The models, for their outcomes.
    """
    count = features.shape[1] if features.ndim == 2 else 0
    even = np.full(count, 1.0 / max(count, 1))
    if len(models) < 4:
        return even
    routes = list(dict.fromkeys(r for m in models for r in m.routes))
    place = {route: i for i, route in enumerate(routes)}
    outcomes = np.full((len(models), 2 * len(routes)), np.nan)
    for row, model in enumerate(models):
        columns = np.array([place[r] for r in model.routes])
        outcomes[row, columns] = np.clip(model.log_speedup, -CLIP, CLIP)
        outcomes[row, len(routes) + columns] = [0.15 * log_loss(x) for x in model.loss]
    known = ~np.isnan(outcomes)
    mean = np.where(known, outcomes, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    outcomes = np.where(known, outcomes - mean, 0.0)
    alike = _centred(outcomes @ outcomes.T)
    weights = np.zeros(count)
    for number in range(count):
        column = features[:, number]
        if column.std() > 1e-6:
            likeness = _centred(np.exp(-((column[:, None] - column) ** 2) / 2))
            scale = np.linalg.norm(likeness) * np.linalg.norm(alike)
            weights[number] = max(0.0, float((likeness * alike).sum() / max(scale, 1e-12))) ** 2
    total = weights.sum()
    return 0.9 * weights / total + 0.1 * even if total > 0 else even


def _centred(kernel: Floats) -> Floats:
    """A kernel with its row and column means taken out and its diagonal left unused."""
    off = kernel - np.diag(np.diag(kernel))
    found: Floats = off - off.mean(axis=0) - off.mean(axis=1)[:, None] + off.mean()
    return found


@dataclass
class Signal:
    """One signal's belief over the candidate routes of a model.

    Attributes:
        mean: Expected value of each route.
        cov: Covariance between routes.
    """

    mean: Floats
    cov: Floats

    def observe(self, place: int, value: float, noise: float) -> None:
        """Condition on a measured value, exactly, in place."""
        column = self.cov[place].copy()
        scale = column[place] + noise * noise
        self.mean += column * ((value - self.mean[place]) / scale)
        self.cov -= column[:, None] * (column / scale)

    @property
    def sd(self) -> Floats:
        """Standard deviation of each route."""
        found: Floats = np.sqrt(np.maximum(self.cov.diagonal(), 1e-9))
        return found

    def copy(self) -> Signal:
        """An independent copy."""
        return Signal(self.mean.copy(), self.cov.copy())


@dataclass
class Belief:
    """What is believed of the candidate routes of one model.

    Attributes:
        speed: Log speed-up over the default route.
        loss: Log10 of the loss.
        codes: The routes as value numbers (`encode`), shape (routes, knobs of the table's catalog
            and of theirs, `joint`).
        seconds: Expected seconds of building and measuring.
        precedents: What they did on the training models.
        prior_sd: Standard deviations of the speed before any observation.
    """

    speed: Signal
    loss: Signal
    codes: NDArray[np.int64]
    seconds: Floats
    precedents: Precedents
    prior_sd: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.prior_sd = self.speed.sd

    def copy(self) -> Belief:
        """An independent copy, for an episode."""
        return Belief(
            self.speed.copy(), self.loss.copy(), self.codes, self.seconds, self.precedents
        )

    def only(self, places: NDArray[np.int64]) -> Belief:
        """An independent belief about some of the routes."""
        grid = np.ix_(places, places)
        return Belief(
            Signal(self.speed.mean[places], self.speed.cov[grid]),
            Signal(self.loss.mean[places], self.loss.cov[grid]),
            self.codes[places],
            self.seconds[places],
            self.precedents.only(places),
        )

    def observe(self, place: int, outcome: Outcome, loss: float) -> None:
        """Condition on an outcome.

        Args:
            place: Index of the route.
            outcome: What came of it.
            loss: Its loss in the gate's metric, `LOST` where there is none.
        """
        measured = outcome.measurement
        if measured is not None:
            noise = math.hypot(noise_of(measured), SPEED_NOISE)
            self.speed.observe(place, float(np.clip(measured.log_speedup, -CLIP, CLIP)), noise)
        self.loss.observe(place, log_loss(loss), loss_noise(loss))

    def p_feasible(self, tolerance: float) -> Floats:
        """Chance of each route to pass a limit."""
        return chance_below(math.log10(tolerance), self.loss.mean, self.loss.sd)

    def expected_improvement(self, best: float) -> Floats:
        """Expected gain of each route over `best`, were it feasible."""
        return expected_excess(self.speed.mean - best, self.speed.sd)


def chance_below(limit: float, mean: Floats, sd: Floats) -> Floats:
    """Chance that normal variables are below a limit."""
    found: Floats = ndtr((limit - mean) / sd)
    return found


def expected_excess(mean: Floats, sd: Floats) -> Floats:
    """Expected positive part of normal variables: expected improvement over zero."""
    z = mean / sd
    found: Floats = sd * (z * ndtr(z) + np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))
    return found


def log_loss(loss: float) -> float:
    """Log10 of a loss, within what is told apart."""
    return max(math.log10(max(min(loss, LOST), 1e-12)), SMALLEST_LOSS)


def loss_noise(loss: float) -> float:
    """Standard deviation of what a log10 loss says."""
    return LOST_NOISE if loss >= LOST else LOSS_NOISE


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
        self._speed = self._condition(
            [np.clip(m.log_speedup, -CLIP, CLIP) for m in self.models],
            [np.hypot(m.noise, SPEED_NOISE) for m in self.models],
            (scales or Scales()).speed,
        )
        self._loss = self._condition(
            [np.array([log_loss(x) for x in m.loss]) for m in self.models],
            [np.array([loss_noise(x) for x in m.loss]) for m in self.models],
            (scales or Scales()).loss,
            probed=True,
        )

    @property
    def scales(self) -> Scales:
        """Scales of the signals, as the records have them."""
        return Scales(self._speed.scale, self._loss.scale)

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


def leave_family_out(replay: Replay, kernel: Kernel | None = None) -> dict[str, Surrogate]:
    """Surrogates that never saw one family each, by that family."""
    return {
        family: Surrogate(replay.without_families((family,)), kernel)
        for family in replay.table.families
    }


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
