"""Examples in the docs run: every Python block that is whole, every command's options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / name for name in ("using.md", "environment.md", "scale.md")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(language: str) -> list[str]:
    found = [m.groups() for page in PAGES for m in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    return [text for kind, text in found if kind == language]


@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs(text: str) -> None:
    exec(compile(text, "docs", "exec"), {"__name__": "docs"})


COMMANDS = [
    line
    for page in [
        *PAGES,
        ROOT / "README.md",
        ROOT / "docs" / "training.md",
        ROOT / "docs" / "evaluation.md",
    ]
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    if not kind
    for line in text.splitlines()
    if line.startswith("routepilot ")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_with_their_options(line: str) -> None:
    import typer

    from routepilot.training import (
        cli,
        cli_corpus,
        cli_evidence,
        cli_insight,
        cli_learning,
        cli_nvidia,
        cli_policy,
        cli_records,
    )

    assert all((cli_corpus, cli_evidence, cli_insight, cli_learning, cli_nvidia, cli_policy))
    assert cli_records
    words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(cli.app)
    command = group.commands[words.pop(0)]  # type: ignore[attr-defined]
    while hasattr(command, "commands"):  # a group of verbs, e.g. `policy`
        command = command.commands[words.pop(0)]
    names = {name for parameter in command.params for name in parameter.opts}
    for word in words:
        if word.startswith("-"):
            assert word in names, f"{command.name} has no {word}"


def test_there_is_something_to_test() -> None:
    assert len(blocks("python")) >= 2 and len(COMMANDS) >= 10
