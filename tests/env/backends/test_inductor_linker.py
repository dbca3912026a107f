"""Packages ask for the shared C++ library, whatever the compiler's folder holds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from routepilot.env.backends.inductor_linker import links_shared, sound_compiler

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")


def _from_compiler(name: str) -> Path:
    """A file of the compiler's own folders."""
    told = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return Path(told.stdout.strip())


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """A g++ that finds the static library first, as where the shared one's link is missing."""
    archive = _from_compiler("libstdc++.a")
    if not archive.is_absolute():
        pytest.skip("this g++ has no static C++ library")
    place = tmp_path / "static"
    place.mkdir()
    (place / "libstdc++.a").symlink_to(archive)
    compiler = place / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -L{place}\n')
    compiler.chmod(0o755)
    return compiler


def test_a_sound_compiler_is_left_alone(tmp_path: Path) -> None:
    assert links_shared("g++", tmp_path)
    assert sound_compiler("g++", tmp_path) == "g++"
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_links_the_archive_is_helped(tmp_path: Path, static: Path) -> None:
    assert links_shared(str(static), tmp_path) is False
    helped = sound_compiler(str(static), tmp_path, _from_compiler("libstdc++.so.6"))
    assert helped != str(static) and Path(helped).name == "g++"
    assert links_shared(helped, tmp_path)


def test_what_cannot_be_helped_stays(tmp_path: Path, static: Path) -> None:
    assert sound_compiler("no-such-compiler", tmp_path) == "no-such-compiler"
    assert sound_compiler(str(static), tmp_path, tmp_path / "gone.so") == str(static)
