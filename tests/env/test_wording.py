"""One of a thing is not many: how messages count, and that they all count alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from routepilot.env.wording import counted, verb

ROOT = Path(__file__).resolve().parents[2]

#: A number, as an f-string or a template has it, before a plural that is written out. Sums,
#: settings with a unit (`{x:.1f} s`) and what is never one are told apart below.
NOUNS = (
    "agents builds changes controls engines episodes families files jobs knobs models outcomes"
    " pairs parts processes routes rows seconds seeds shapes slots steps tables trials values"
    " workers"
)
NUMBER = r"\{ ?(?P<number>[^{}]*(?:\[[^\]]*\])?[^{}]*?) ?\}\}?"
WRITTEN_OUT = re.compile(
    NUMBER + r" (?:(?:common|corpus|distinct|other|search|single) )*"
    f"(?P<noun>{'|'.join(NOUNS.split())})\\b"
)

#: A number with its noun before the verb of many: `{counted(n, 'model')} are`.
OF_MANY = re.compile(
    r"(?P<number>counted\([^{}]*\)) ?\}\}? (?:are|were|have|do|need|come|fail|leave|use|act)\b"
)

#: One f-string that goes on in the next line.
GOES_ON = re.compile(r'"\s*\n\s*f?"')

#: Numbers of other kinds: bounds that a message refuses or allows, and means.
NEVER_ONE = {
    "plan.builds": "refused: below 1",
    "self.max_builds": "refused: negative",
    "MOST_ROUTES": "a bound",
    "shares": "a list that ends with 16 builds",
    "workers": "refused: below 1",
    "LEAST_FAMILIES": "a bound",
    "MAX_LOSSES": "a bound",
    "stray": "what a variable holds",
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


@pytest.mark.parametrize(
    ("number", "of", "told"),
    [
        (0, None, "are"),
        (1, None, "is"),
        (2, None, "are"),
        (1, 3, "is"),
        (2, 3, "are"),
        (0, 3, "are"),
        (0, 1, "is"),
        (1, 1, "is"),
    ],
)
def test_a_number_with_its_verb(number: int, of: int | None, told: str) -> None:
    assert verb(number, "is", "are", of) == told


def _in_messages(pattern: re.Pattern[str]) -> list[str]:
    """Where a pattern stands in what we say, unless the number is never one."""
    found = []
    for room in ("env", "agents", "training", "scripts"):
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix not in (".py", ".j2"):
                continue
            text = GOES_ON.sub("", path.read_text(encoding="utf-8"))
            for match in pattern.finditer(text):
                if match["number"] not in NEVER_ONE:
                    found.append(f"{path.name}: {match[0]}")
    return found


def test_no_message_writes_a_plural_after_a_number() -> None:
    assert not _in_messages(WRITTEN_OUT)
    assert WRITTEN_OUT.search('f"{len(found)} models ready"'), "the check can fail"
    assert WRITTEN_OUT.search('f"{len(found)} corpus models ready"')
    assert WRITTEN_OUT.search("<p>{{ result.builds }} routes built"), "in a template too"


def test_no_message_writes_the_verb_of_many_after_a_number() -> None:
    assert not _in_messages(OF_MANY)
    text = """f"{live} of {counted(len(changes), 'change')}"\n    f" are live\""""
    assert OF_MANY.search(GOES_ON.sub("", text)), "the check can fail"


def test_a_model_card_and_a_comparison_say_1_build() -> None:
    from routepilot.agents.policy import load_policy
    from routepilot.training.model_card import front_matter

    card = load_policy(ROOT / "checkpoints" / "cpu.safetensors").card
    names = str(front_matter(card))
    assert "after 1 build'" in names and "after 2 builds'" in names and "1 builds" not in names
