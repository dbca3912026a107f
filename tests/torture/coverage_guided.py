"""Coverage-guided fuzzing of the parsers with Atheris (extra `torture`): no part of `make test`.

Run `python tests/torture/coverage_guided.py READER -runs=100000 -max_len=4096`; READER is a name of
`test_fuzz.PLAIN` or `IN_FOLDER`. Without options it makes as many inputs as `sizes.py` says, of
2,048 bytes at most. Anything but a `RoutePilotError` ends the run with the input that did it.
"""

from __future__ import annotations

import atexit
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import atheris

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

with atheris.instrument_imports(include=["routepilot"]):
    import test_fuzz
    from readers import Reader
    from sizes import size

    from routepilot.env.errors import RoutePilotError


def _reader(name: str) -> tuple[bytes, Reader]:
    if name in test_fuzz.PLAIN:
        return test_fuzz.PLAIN[name]()
    place = Path(mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, place)
    return test_fuzz.IN_FOLDER[name](place)


def main() -> None:
    name, *options = sys.argv[1:]
    runs = size("coverage_runs" if name in test_fuzz.PLAIN else "coverage_runs_of_files")
    options = options or [f"-runs={runs}", "-max_len=2048"]
    with atheris.instrument_imports(include=["routepilot"]):  # readers import what they read with
        sound, read = _reader(name)
    with TemporaryDirectory() as folder:
        seeds = Path(folder) / "seeds"
        seeds.mkdir()
        (seeds / "sound").write_bytes(sound)

        def once(data: bytes) -> None:
            try:
                read(Path(folder), data)
            except RoutePilotError:
                pass

        atheris.Setup([sys.argv[0], *options, "-timeout=5", "-rss_limit_mb=1500", str(seeds)], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
