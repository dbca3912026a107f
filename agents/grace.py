"""Clusters of alike models, a coreset of routes for each, and refinement around the best.

Owns the rival `grace`, after GRACE (Pan et al., 2025, arXiv:2510.13176), whose steps it keeps: an
embedding in which models that want the same lie close, clusters in it, a small set of routes that
serves each cluster, and a light local search from the best of them. Two steps differ since builds
are dear and a table is what there is. The embedding weighs the model features by how well they
agree with the outcomes, where GRACE trains a network by contrast. The coreset of a cluster is
chosen among the recorded routes, where GRACE evolves new ones by compiling the training programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage

from routepilot.agents.base import AgentFactory, Problem
from routepilot.agents.choosing import choose_setting
from routepilot.agents.pool import ScoringAgent
from routepilot.agents.transfer import GainTable, greedy_coreset
from routepilot.env.backends.recorded import Replay
from routepilot.env.likeness import Kernel, encode, relevance, route_likeness
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route

Floats = NDArray[np.float64]

#: Weight of a model outside the cluster, against 1 inside: it decides where the cluster is silent.
OUTSIDE = 0.1


@dataclass(frozen=True)
class Setting:
    """What is chosen among.

    Attributes:
        clusters: Clusters of training models.
        size: Routes of a cluster's coreset.
    """

    clusters: int
    size: int


SETTINGS = tuple(Setting(clusters, size) for size in (8, 4) for clusters in (4, 2, 6, 8))


class Clusters:
    """Training models in clusters, and what serves each.

    Args:
        replay: Training models.
        setting: How many clusters, and how many routes for each.
    """

    def __init__(self, replay: Replay, setting: Setting) -> None:
        self.table = GainTable(replay)
        self.catalog = replay.catalog
        self.size = setting.size
        self._metric = np.sqrt(relevance(self.table.features, replay.models))
        places = self.table.features * self._metric
        self._members = _clustered(places, setting.clusters)
        self._centres = np.array([places[members].mean(axis=0) for members in self._members])

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """The recorded routes as value numbers."""
        return encode(self.catalog, self.table.routes)

    def nearest(self, features: Sequence[float] | None) -> list[int]:
        """Clusters by their distance from a model; the largest first where nothing is known."""
        if features is None:
            return sorted(range(len(self._members)), key=lambda c: -len(self._members[c]))
        one = self.table.standard(np.array(features, dtype=float)) * self._metric
        distances = ((self._centres - one) ** 2).sum(axis=1)
        return [int(c) for c in np.argsort(distances, kind="stable")]

    def weights(self, cluster: int) -> Floats:
        """How much each training model counts for a cluster; sums to 1."""
        found = np.full(len(self.table.gains), OUTSIDE)
        found[self._members[cluster]] = 1.0
        return np.asarray(found / found.sum())

    def coreset(self, cluster: int) -> list[Route]:
        """Complementary routes for a cluster, the most useful first."""
        weighed = self.table.gains * self.weights(cluster)[:, None]
        return [self.table.routes[i] for i in greedy_coreset(weighed, self.size)]

    def values(self, cluster: int, routes: Sequence[Route]) -> Floats:
        """Mean gain of routes for a cluster; that of like routes where one is not on record."""
        recorded = self.weights(cluster) @ self.table.gains
        places = {route: place for place, route in enumerate(self.table.routes)}
        found = np.zeros(len(routes))
        new = [i for i, route in enumerate(routes) if route not in places]
        known = [i for i, route in enumerate(routes) if route in places]
        found[known] = [recorded[places[routes[i]]] for i in known]
        if new:
            codes = encode(self.catalog, [routes[i] for i in new])
            alike = route_likeness(self.catalog, codes, self.codes, Kernel())
            found[new] = alike @ recorded / np.maximum(alike.sum(axis=1), 1e-12)
        return found


def _clustered(places: Floats, count: int) -> list[NDArray[np.int64]]:
    """Points in at most `count` clusters by Ward's method, as their row numbers."""
    if len(places) <= 1:
        return [np.arange(len(places))]
    labels = fcluster(linkage(places, "ward"), count, "maxclust")
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


class GraceAgent(ScoringAgent):
    """Builds the coreset of the model's cluster, then refines around the best.

    While nothing beats the default, the first routes of the other clusters come next, the nearest
    cluster's first, then whatever did well for the own cluster. From a route that does, the search
    goes on to those that differ from the best in the fewest knobs, the most valuable first.

    Args:
        problem: The problem.
        clusters: What the training models taught.
    """

    def __init__(self, problem: Problem, clusters: Clusters) -> None:
        super().__init__("grace", problem, clusters.table.routes)
        self._clusters = clusters
        self._own, *others = clusters.nearest(problem.features)
        self._coreset = self._places_of(clusters.coreset(self._own))
        firsts = [route for cluster in others for route in clusters.coreset(cluster)[:1]]
        self._others = self._places_of(firsts)
        self.widen(())

    def scores(self) -> Floats:
        """The coreset in its order, then by nearness to the best, then by value."""
        ahead = [place for place in self._coreset if not self.tried[place]]
        if not ahead and self.best_route.is_default:
            ahead = [place for place in self._others if not self.tried[place]]
        if ahead:
            chosen = np.zeros(len(self.routes))
            chosen[ahead[0]] = 1.0
            return chosen
        if self.best_route.is_default:
            return self._values
        centre = self._codes[self.places[self.best_route]]
        # A gain is far below one knob's worth of distance.
        return np.asarray(np.tanh(self._values) - (self._codes != centre).sum(axis=1))

    def learn(self, place: int, outcome: Outcome) -> None:
        """See `ScoringAgent`: the best is all that is kept."""

    def widen(self, routes: Sequence[Route]) -> None:
        """See `ScoringAgent`."""
        del routes
        self._codes = encode(self.problem.catalog, self.routes)
        self._values = self._clusters.values(self._own, self.routes)

    def _places_of(self, routes: Sequence[Route]) -> list[int]:
        return [self.places[route] for route in routes if route in self.places]


def grace(replay: Replay) -> AgentFactory:
    """The rival, its numbers of clusters and routes chosen inside the training models."""

    def make(known: Replay, setting: Setting) -> AgentFactory:
        clusters = Clusters(known, setting)
        return lambda problem: GraceAgent(problem, clusters)

    return make(replay, choose_setting(make, SETTINGS, replay))
