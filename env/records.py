"""What was measured, as plain data: records, model cards and route tables.

Owns the data that the store (`store.py`) keeps and that table files (`tables.py`) carry. Knows no
file format and no database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from routepilot.env.backends.base import Target
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Catalog, Route


@dataclass(frozen=True)
class ModelCard:
    """What a table says of a model.

    Attributes:
        fingerprint: `Model.fingerprint`.
        name: Name for people, e.g. `ddddocr`.
        family: Architecture family, the unit by which models are held out.
        trained: False when the weights are random (int8 then looks harmless).
        features: Values of `features.FEATURE_NAMES`, in that order.
        default_latency_ms: Median latency of the default route, milliseconds.
    """

    fingerprint: str
    name: str
    family: str
    trained: bool
    features: tuple[float, ...]
    default_latency_ms: float


@dataclass(frozen=True)
class Record:
    """One build, kept: whose, where, and what came of it.

    Attributes:
        fingerprint: `Model.fingerprint`.
        target_key: `Target.key`.
        outcome: What came of it, judged by the gate in force.
        repeat: 0 for the first build of the route, 1 and up for controls built again.
        created: Seconds since the epoch, UTC.
    """

    fingerprint: str
    target_key: str
    outcome: Outcome
    repeat: int = 0
    created: float = 0.0


@dataclass(frozen=True)
class RouteTable:
    """Measured outcomes of many routes on many models, for one target.

    Attributes:
        catalog: The knobs, so that routes can be read without the compiler.
        target: What the figures are valid for.
        models: One card a model.
        outcomes: fingerprint -> route -> outcomes (the first build, then repeats).
        manifest: Hardware, versions, command, date, noise floor and whatever else a reader needs.
    """

    catalog: Catalog
    target: Target
    models: tuple[ModelCard, ...]
    outcomes: Mapping[str, Mapping[Route, tuple[Outcome, ...]]]
    manifest: Mapping[str, object] = field(default_factory=dict)

    def card(self, name_or_fingerprint: str) -> ModelCard | None:
        """The card of a model by name or fingerprint, or None."""
        for card in self.models:
            if name_or_fingerprint in (card.name, card.fingerprint):
                return card
        return None

    @property
    def families(self) -> tuple[str, ...]:
        """Families in the table, sorted."""
        return tuple(sorted({card.family for card in self.models}))

    def only(self, fingerprints: Iterable[str]) -> RouteTable:
        """The table with these models alone."""
        kept = set(fingerprints)
        return replace(
            self,
            models=tuple(c for c in self.models if c.fingerprint in kept),
            outcomes={f: o for f, o in self.outcomes.items() if f in kept},
        )

    def without_families(self, families: Iterable[str]) -> RouteTable:
        """The table with every model of these families left out."""
        dropped = set(families)
        return self.only(c.fingerprint for c in self.models if c.family not in dropped)
