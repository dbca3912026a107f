"""Drafts: whole or not at all, with the modes of the umask, swept up after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from routepilot.env.drafts import draft_folder, sweep, whole_file


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "with 'quotes' and\nnewline é.json"
    before = os.umask(0o027)
    try:
        with whole_file(path) as draft:
            draft.write_text("one")
            assert not path.exists()
    finally:
        os.umask(before)
    assert path.read_text() == "one" and path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(OSError, match="full"), whole_file(path) as draft:
        draft.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "one" and os.listdir(tmp_path) == [path.name]


def test_a_link_at_the_place_is_replaced_and_what_it_points_to_is_not(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "out.json"
    precious.write_text("mine")
    path.symlink_to(precious)
    with whole_file(path) as draft:
        draft.write_text("new")
    assert precious.read_text() == "mine" and not path.is_symlink()


def test_drafts_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from routepilot.env.drafts import draft_folder, whole_file\n"
        "with whole_file(Path(sys.argv[1]) / 'x') as a, draft_folder(Path(sys.argv[1])) as b:\n"
        "    (b / 'engine').write_text('large')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(os.listdir(tmp_path)) == 2
    (tmp_path / ".draft-of-somebody").write_text("not ours")
    with draft_folder(tmp_path) as mine:
        assert mine.is_dir()
        assert sweep(tmp_path) == 0
        assert sorted(os.listdir(tmp_path)) == sorted([mine.name, ".draft-of-somebody"])
    assert os.listdir(tmp_path) == [".draft-of-somebody"]
