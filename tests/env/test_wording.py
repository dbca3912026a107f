"""One of a thing is not many: how messages count, and that they all count alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from routepilot.env.wording import counted

ROOT = Path(__file__).resolve().parents[2]

#: A number, as an f-string or a template has it, before a plural that is written out. Sums,
#: settings with a unit (`{x:.1f} s`) and what is never one are told apart below.
WRITTEN_OUT = re.compile(
    r"\{ ?(?P<number>[^{}]*(?:\[[^\]]*\])?[^{}]*?) ?\}\}? (?P<noun>builds|models|routes|seconds)\b"
)

#: Numbers of other kinds: bounds that a message refuses or allows, and means.
NEVER_ONE = {
    "plan.builds": "refused: below 1",
    "self.max_builds": "refused: negative",
    "MOST_ROUTES": "a bound",
    "shares": "a list that ends with 16 builds",
    "len(rows) - models": "of other shapes",
}


@pytest.mark.parametrize(
    ("number", "nouns", "told"),
    [
        (0, ("build",), "0 builds"),
        (1, ("build",), "1 build"),
        (2, ("build",), "2 builds"),
        (-1, ("build",), "-1 builds"),
        (1204, ("model",), "1,204 models"),
        (1, ("family", "families"), "1 family"),
        (3, ("family", "families"), "3 families"),
    ],
)
def test_a_number_with_its_noun(number: int, nouns: tuple[str, ...], told: str) -> None:
    assert counted(number, *nouns) == told


def test_no_message_writes_a_plural_after_a_number() -> None:
    found = []
    for room in ("env", "agents", "training", "scripts"):
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix not in (".py", ".j2"):
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                for match in WRITTEN_OUT.finditer(line):
                    if match["number"] not in NEVER_ONE:
                        found.append(f"{path.name}:{number}: {match[0]}")
    assert not found, found
    assert WRITTEN_OUT.search('f"{len(found)} models ready"'), "the check can fail"
    assert WRITTEN_OUT.search("<p>{{ result.builds }} routes built"), "in a template too"


def test_a_model_card_and_a_comparison_say_1_build() -> None:
    from routepilot.agents.policy import load_policy
    from routepilot.training.model_card import front_matter

    card = load_policy(ROOT / "checkpoints" / "cpu.safetensors").card
    names = str(front_matter(card))
    assert "after 1 build'" in names and "after 2 builds'" in names and "1 builds" not in names
