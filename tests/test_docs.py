"""Examples in the docs run: every Python block that is whole, every command's options.

The pages of `SESSIONS` run as a whole: their blocks and commands in order, in one folder.
"""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / name for name in ("using.md", "environment.md", "scale.md")]
SESSIONS = [
    ROOT / "docs" / name
    for name in ("tutorial.md", "own-zoo.md", "writing-a-backend.md", "writing-an-agent.md")
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
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    if not kind
    for line in text.replace("\\\n", " ").splitlines()
    if line.startswith("routepilot ")
]

#: Examples in help texts that run in seconds on what is shipped, without a file.
CHEAP = {"agents", "features", "knobs", "leakage", "policy", "records describe", "zoo list"}


def verbs() -> dict[str, Any]:
    """Every verb with its command, groups of verbs too; the whole tool is the empty one."""
    import typer

    from routepilot.training.cli import whole_app

    found: dict[str, Any] = {}
    waiting = [("", typer.main.get_command(whole_app()))]
    while waiting:
        name, command = waiting.pop()
        found[name] = command
        for part, inner in getattr(command, "commands", {}).items():
            waiting.append((f"{name} {part}".strip(), inner))
    return found


def examples(command: Any) -> list[str]:
    """The examples of a help text."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return [" ".join(p.split())[9:] for p in paragraphs if p.startswith("Example: ")]


VERBS = verbs()
EXAMPLES = [(name, line) for name, command in VERBS.items() for line in examples(command)]


def check_command(line: str) -> None:
    """The verb exists and has the options of the line."""
    words = shlex.split(line, comments=True)[1:]
    name = next(n for n in (" ".join(words[:2]), words[0]) if n in VERBS)
    command = VERBS[name]
    assert not hasattr(command, "commands"), f"{name} is a group of verbs"
    names = {option for parameter in command.params for option in parameter.opts}
    for word in words:
        if word.startswith("-") and " " not in word:  # an expression is a value
            assert word in names, f"{name} has no {word}"


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_with_their_options(line: str) -> None:
    check_command(line)


@pytest.mark.parametrize("name", VERBS)
def test_every_help_text_has_an_example_of_its_own(name: str) -> None:
    lines = examples(VERBS[name])
    assert lines and all(line.startswith(f"routepilot {name}".strip()) for line in lines)
    for line in lines:
        check_command(line)


def test_help_names_what_an_option_takes() -> None:
    from typer.testing import CliRunner

    from routepilot.training import cli

    for name in VERBS:
        shown = CliRunner().invoke(cli.app, [*name.split(), "--help"])
        assert shown.exit_code == 0 and "Example:" in shown.output, name
        assert "list[" not in shown.output, f"routepilot {name} --help shows a Python type"
    told = CliRunner().invoke(cli.app, ["tune", "--help"]).output
    for takes in ("--option NAME=VALUE", "--shape NAME=SHAPE", "--inputs FILE", "--allow NAME"):
        assert takes in " ".join(told.split()), takes


@pytest.mark.parametrize("line", [line for name, line in EXAMPLES if name in CHEAP])
def test_cheap_examples_run(
    line: str, tiny_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from routepilot.training import cli

    tiny_file.rename(tiny_file.with_name("model.onnx"))
    monkeypatch.chdir(tiny_file.parent)
    words = line.replace("input=1x3x224x224", "x=1x3x32x32").split()
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code in (None, 0), capsys.readouterr().err
    assert capsys.readouterr().out


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
                words = shlex.split(line, comments=True)
                run(*words[1:]) if words[0] == "python" else run("-m", *words)
        done += 1
    assert done >= 3


#: Rooms of the house, and the folders whose modules their paragraphs name.
ROOMS = {
    "env": ("env", "env/backends"),
    "agents": ("agents",),
    "training": ("training",),
    "scripts": ("scripts",),
}


@pytest.mark.parametrize("room", ROOMS)
def test_the_architecture_names_every_module_and_no_other(room: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paragraphs = re.split(
        r"^(?=\*\*`)", page.split("\n## The rooms")[1].split("\n## ")[0], flags=re.M
    )
    text = "".join(p for p in paragraphs if p.startswith(f"**`{room}/"))
    other = [n for n in re.findall(r"`([\w*]+/[\w*/]*\.py)`", text) if not n.startswith(room)]
    assert not other, other
    named = {n.rpartition("/")[2] for n in re.findall(r"`([\w*/]+\.py)`", text)}
    found = [p.name for folder in ROOMS[room] for p in (ROOT / folder).glob("*.py")]
    modules = [name for name in found if not name.startswith("__")]
    missing = [m for m in modules if not any(fnmatch.fnmatch(m, n) for n in named)]
    gone = [n for n in named if not fnmatch.filter(modules, n)]
    assert not missing and not gone and modules, (missing, gone)


#: Names in backquotes: of our files, and of what stands in our modules (`measure.TimingPlan`).
OUR_FILE = re.compile(
    r"`((?:agents|checkpoints|docs|env|examples|scripts|tests|training)/[\w/]+\.\w+)`"
)
OUR_TEST = re.compile(r"`(test_\w+\.py)`")
OUR_NAME = re.compile(r"`((?:\w+\.)+\w+)`")
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

#: Endings of what a run writes, which look like a name of a module.
ENDINGS = tuple(f".{kind}" for kind in "html json jsonl md parquet pt2 py sqlite".split())

MODULES = {
    path.stem: f"routepilot.{folder.replace('/', '.')}.{path.stem}"
    for room, folders in ROOMS.items()
    for folder in folders
    for path in (ROOT / folder).glob("*.py")
    if room != "scripts"
}


def exists(name: str) -> bool:
    """Whether a dotted name is there; true of what names no module of ours."""
    if name.endswith(ENDINGS):
        return True
    first, *rest = name.removeprefix("routepilot.").split(".")
    if first in ROOMS:
        first, *rest = [part for part in rest if part != "backends"]
    elif first not in MODULES:
        return not name.startswith("routepilot.")
    if first not in MODULES:
        return False
    found: Any = importlib.import_module(MODULES[first])
    for part in rest:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    gone = [name for name in OUR_FILE.findall(text) if not (ROOT / name).exists()]
    gone += [n for n in OUR_TEST.findall(text) if not any((ROOT / "tests").rglob(n))]
    gone += [name for name in OUR_NAME.findall(text) if not exists(name)]
    assert not gone


def test_a_name_that_is_gone_is_found() -> None:
    assert exists("likeness.telling") and exists("routepilot.env.measure.TimingPlan")
    assert exists("torch.compile") and exists("training.train")
    assert not exists("measure.telling") and not exists("training.trainer")
    assert not exists("routepilot.env.tables.NOTHING")


def test_there_is_something_to_test() -> None:
    assert len(blocks("python")) >= 2 and len(COMMANDS) >= 40
    assert CHEAP <= set(VERBS) and len(EXAMPLES) >= len(VERBS)
