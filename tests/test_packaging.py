"""What the package promises of its requirements."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements(text: str) -> dict[str, str]:
    """Lowest version by package, of `"name>=version,<version"` in a project file."""
    found = re.findall(r'"([A-Za-z0-9_.-]+)>=([0-9.]+)[^"]*"', text)
    return {name: version for name, version in found if name != "setuptools"}


def test_every_extra_is_documented():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^([a-z]+) = \[", listed, re.M))
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs" / "using.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert len(extras) > 10 and extras <= {n for row in rows for n in re.findall(r"`(\w+)`", row)}


def test_one_version_everywhere():
    project, citation = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CITATION.cff")
    )
    found = re.search(r'^version = "(\d+\.\d+\.\d+)"$', project, re.M)
    assert found is not None
    assert f"\nversion: {found.group(1)}\n" in citation
    assert f"\n## {found.group(1)}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (ROOT / "training" / "public" / "py.typed").is_file() and (ROOT / "LICENSE").is_file()


def test_the_lowest_versions_are_the_ones_that_make_lowest_installs():
    project = requirements((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pins = dict(
        line.split("==")
        for line in (ROOT / "tests" / "lowest.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
    assert pins and {name: project.get(name) for name in pins} == pins
    base = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    base = base[base.index("\ndependencies") : base.index("[project.optional")]
    assert set(requirements(base)) <= set(pins)
