"""What sweeps of other models let expect of one: the chance of each change to act on its engine.

Owns the chances, how a belief follows them, and how well they foretell a family that was left out.
They order and weigh, and never mask: only the user's own compiler, or the model's operators, prove
that a change does nothing (`inert.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.backends.tensorrt_catalog import is_build_route_knob
from routepilot.env.liveness_table import LivenessCard, LivenessTable, outcomes_of
from routepilot.env.operator_rules import ruled_out

if TYPE_CHECKING:
    from routepilot.env.beliefs import Belief
    from routepilot.env.liveness import Liveness
    from routepilot.env.routes import Catalog, Route

Floats = NDArray[np.float64]

#: Knobs that TensorRT-RTX leaves to run time, by prefix: that they are inert there says nothing of
#: TensorRT, which chooses kernels while it builds.
LEFT_TO_RUN_TIME = ("-cask", "-tactic:", "-mha_fusion:v2:")

#: Chance of a change that nothing is known of, about the share of all changes that act, and how
#: many models it is worth.
UNKNOWN_CHANCE, UNKNOWN_WEIGHT = 0.1, 0.5

#: Chance to act of what no sweep can judge: levers, the precision of the file.
EVEN_CHANCE = 0.5

#: Chance of what a sweep of this very model found to change nothing, where that is no proof.
SWEPT_IDENTICAL = 0.02

#: Least share that a route keeps of what is believed of its speed.
LEAST_SHARE = 0.02

#: Changes of a model that the figure of `foretold` looks at.
FIRST = 30


@dataclass(frozen=True)
class LivenessPrior:
    """A liveness table as evidence about models that are not in it.

    Attributes:
        table: The table.
    """

    table: LivenessTable

    @cached_property
    def models(self) -> tuple[LivenessCard, ...]:
        """The models that were swept, in the order of the table."""
        swept = {fingerprint for fingerprint, _ in self.table.found}
        return tuple(card for card in self.table.models if card.fingerprint in swept)

    @cached_property
    def _acts(self) -> Floats:
        """1 where a change acted for some target, 0 where for none, NaN where nothing is known."""
        acts = np.full((len(self.models), len(self.table.changes)), np.nan)
        place = {change: i for i, change in enumerate(self.table.changes)}
        row = {card.fingerprint: i for i, card in enumerate(self.models)}
        for (fingerprint, _), answers in self.table.found.items():
            for change, word in outcomes_of(answers).items():
                if word != "failed" and change in place:
                    at = row[fingerprint], place[change]
                    acts[at] = np.fmax(acts[at], float(word == "changed"))
        return acts

    @cached_property
    def live_on(self) -> dict[str, int]:
        """Knob -> on how many models a value of it changed the engine."""
        found: dict[str, set[int]] = {}
        for change, column in zip(self.table.changes, self._acts.T, strict=True):
            models = found.setdefault(change.partition("=")[0], set())
            models.update(np.flatnonzero(column == 1).tolist())
        return {name: len(models) for name, models in found.items()}

    @property
    def never_live(self) -> tuple[str, ...]:
        """Knobs that changed no engine of any model, in the order of the table."""
        return tuple(name for name, count in self.live_on.items() if not count)

    def last(self, *, own: bool) -> tuple[str, ...]:
        """Those of `never_live` that are expected to do nothing.

        Args:
            own: By TensorRT-RTX; TensorRT may be moved by what that leaves to run time.
        """
        return tuple(n for n in self.never_live if own or not n.startswith(LEFT_TO_RUN_TIME))

    def chances(self, operators: Iterable[str], without_family: str = "") -> dict[str, float]:
        """The chance of each change to act on the engine of a model with these operators.

        It is the share of the models on which the change acted, weighed by the likeness of the
        operators (squared Jaccard index); models whose operators rule the knob out do not count.

        Args:
            operators: Operators of the graph.
            without_family: Family whose models say nothing.
        """
        mine = frozenset(operators)
        weights = [
            _likeness(mine, card.operators) ** 2
            * (not card.family or card.family != without_family)
            for card in self.models
        ]
        weight = np.array(weights, float)[:, None] * self._counts
        heard = weight.sum(axis=0)
        acted = (weight * np.where(self._counts, self._acts, 0.0)).sum(axis=0)
        chance = (acted + UNKNOWN_WEIGHT * UNKNOWN_CHANCE) / (heard + UNKNOWN_WEIGHT)
        out = ruled_out(mine, self.live_on)
        return {
            change: 0.0 if change.partition("=")[0] in out else float(value)
            for change, value in zip(self.table.changes, chance, strict=True)
        }

    @cached_property
    def _counts(self) -> NDArray[np.bool_]:
        """Whether a model says something of a change, shape (models, changes)."""
        names = [change.partition("=")[0] for change in self.table.changes]
        out = [ruled_out(card.operators, names) for card in self.models]
        silent = np.array([[name in gone for name in names] for gone in out], bool)
        found: NDArray[np.bool_] = ~np.isnan(self._acts) & ~silent.reshape(self._acts.shape)
        return found

    def foretold(self) -> dict[str, Any]:
        """How well the chances foretell models of a family that was left out, as plain data.

        Returns:
            `models` that count: of a family, and with at most one change in ten not known; `live`,
            their live changes on average; `first` (`FIRST`); `by_chance` and `by_catalog`: mean
            share of a model's live changes among the first so many, by chance, and in the order in
            which a sweep without a table comes to them (right to left).
        """
        shares, counts = [], []
        for card, acts in zip(self.models, self._acts, strict=True):
            live = acts == 1
            if not card.family or not live.any() or np.isnan(acts).mean() > 0.1:
                continue
            chance = np.array(list(self.chances(card.operators, card.family).values()))
            best = np.argsort(-chance, kind="stable")[:FIRST]
            counts.append(int(live.sum()))
            shares.append((live[best].sum() / counts[-1], live[::-1][:FIRST].sum() / counts[-1]))
        by_chance, by_catalog = np.mean(shares, axis=0) if shares else (0.0, 0.0)
        return {
            "models": len(counts),
            "live": float(np.mean(counts)) if counts else 0.0,
            "first": FIRST,
            "by_chance": float(by_chance),
            "by_catalog": float(by_catalog),
        }


def _likeness(one: frozenset[str], other: Iterable[str]) -> float:
    """Jaccard index of two sets of operators."""
    theirs = frozenset(other)
    return len(one & theirs) / max(len(one | theirs), 1)


def expected_liveness(
    catalog: Catalog,
    operators: Iterable[str],
    prior: LivenessPrior | None,
    swept: Liveness | None,
    *,
    own: bool,
) -> dict[str, float]:
    """The chance of the catalog's changes to act on a model's engine, where something is known.

    Args:
        catalog: The knobs that may be changed.
        operators: Operators of the model.
        prior: Sweeps of other models; None where there are none.
        swept: Sweep of this very model; None where there is none.
        own: Both are of the compiler at hand, and not of a sibling that leaves kernels to run time.

    Returns:
        Change (`-name=value`) -> chance; empty where nothing is known. Knobs that no sweep can
        judge (levers, precision, other compilers' knobs) are not in it.
    """
    if prior is None and swept is None:
        return {}
    told = prior.chances(operators) if prior is not None else {}
    found = {}
    for knob in catalog.knobs:
        if not is_build_route_knob(knob.name):
            continue
        hidden = not own and knob.name.startswith(LEFT_TO_RUN_TIME)
        for value in knob.alternatives:
            change = f"{knob.name}={value}"
            chance = told.get(change, UNKNOWN_CHANCE)
            word = swept.of(knob.name, value) if swept is not None else "unknown"
            if word == "identical":
                chance = min(chance, SWEPT_IDENTICAL)
            if hidden:
                chance = max(chance, UNKNOWN_CHANCE)
            found[change] = 1.0 if word == "live" else chance
    return found


def weighed(belief: Belief, routes: Sequence[Route], acts: Mapping[str, float]) -> Belief:
    """A belief that knows which routes may change nothing at all.

    Such a route is as fast as the default with the chance that none of its changes acts; the mean
    of its log speed-up shrinks by that, and its standard deviation by the root of it. The chance
    to act itself is what the rows of a policy say of it.

    Args:
        belief: What is believed of the routes' speed were they to act.
        routes: The routes.
        acts: Change -> chance to act; what is not in it acts for sure.
    """
    from routepilot.env.beliefs import Belief, Signal

    if not acts:
        return belief
    idle = [
        float(np.prod([1.0 - acts.get(f"{n}={v}", 1.0) for n, v in route.settings]))
        for route in routes
    ]
    share = np.maximum(1.0 - np.array(idle, float), LEAST_SHARE)
    root = np.sqrt(share)
    speed = Signal(belief.speed.mean * share, belief.speed.cov * np.outer(root, root))
    return Belief(
        speed, belief.loss, belief.codes, belief.seconds, belief.precedents, 1.0 - np.array(idle)
    )
