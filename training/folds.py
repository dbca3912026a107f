"""Who is judged while who is hidden: families left out one at a time, or by the corpus' splits.

Owns the folds of an evaluation. Knows no agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routepilot.env.errors import InputError
from routepilot.env.wording import counted
from routepilot.env.zoo_entries import splits


@dataclass(frozen=True)
class Fold:
    """Families that are judged together, and all those that agents must not know meanwhile."""

    judged: tuple[str, ...]
    hidden: tuple[str, ...]


def folds(families: Sequence[str], split: str | None = None) -> list[Fold]:
    """Who is judged while who is hidden.

    Args:
        families: Families of the table.
        split: None leaves one family out at a time. `validation` judges the corpus' validation
            families by agents that know the training families alone; `test` judges the test
            families by agents that know the others.

    Raises:
        InputError: Another split, or the table has no family of it or none to learn from.
    """
    if split is None:
        return [Fold((family,), (family,)) for family in families]
    if split not in ("validation", "test"):
        raise InputError(f"split {split!r} is not judged; choose validation or test")
    judged = tuple(f for f in families if splits().get(f) == split)
    later = ("validation", "test") if split == "validation" else ("test",)
    hidden = tuple(f for f in families if splits().get(f) in later)
    if not judged or len(hidden) == len(families):
        raise InputError(
            f"the table has {counted(len(judged), 'family', 'families')} of the split {split!r} and"
            f" {len(families) - len(hidden)} to learn from; collect models of both"
        )
    return [Fold(judged, hidden)]
