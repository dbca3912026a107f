"""What the package promises of its requirements."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements(text: str) -> dict[str, str]:
    """Lowest version by package, of `"name>=version,<version"` in a project file."""
    found = re.findall(r'"([A-Za-z0-9_.-]+)>=([0-9.]+)[^"]*"', text)
    return {name: version for name, version in found if name != "setuptools"}


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
