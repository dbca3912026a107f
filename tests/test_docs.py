"""Examples in the docs run: every Python block that is whole, every command's options.

The pages of `SESSIONS` run as a whole: their blocks and commands in order, in one folder.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / name for name in ("using.md", "environment.md", "scale.md")]
SESSIONS = [
    ROOT / "docs" / name for name in ("own-zoo.md", "writing-a-backend.md", "writing-an-agent.md")
]

#: "Save it as `name.py`", before a block that is a file.
SAVED = re.compile(r"Save it\s+as\s+`(\w+\.py)`")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(language: str) -> list[str]:
    found = [m.groups() for page in PAGES for m in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    return [text for kind, text in found if kind == language]


@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs(text: str) -> None:
    if "import torch" in text:
        pytest.importorskip("torch")
    exec(compile(text, "docs", "exec"), {"__name__": "docs"})


COMMANDS = [
    line
    for page in [
        *PAGES,
        *SESSIONS,
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
        if word.startswith("-") and " " not in word:  # an expression is a value
            assert word in names, f"{command.name} has no {word}"


@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.stem)
def test_a_page_runs_from_top_to_bottom(page: Path, tiny_file: Path) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("stable_baselines3")
    folder = tiny_file.parent  # which holds the pages' tiny.onnx
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    text, done = page.read_text(encoding="utf-8"), 0

    def run(*command: str) -> None:
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"

    for match in BLOCK.finditer(text):
        before = SAVED.findall(text[: match.start()][-200:])
        if match[1] == "python" and before:
            (folder / before[-1]).write_text(match[2], encoding="utf-8")
        elif match[1] == "python":
            run("-c", match[2])
        else:
            for line in match[2].splitlines():
                run("-m", *shlex.split(line, comments=True))
        done += 1
    assert done >= 3


def test_there_is_something_to_test() -> None:
    assert len(blocks("python")) >= 2 and len(COMMANDS) >= 10
