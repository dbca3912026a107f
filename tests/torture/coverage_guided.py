"""Coverage-guided fuzzing of the parsers with Atheris (extra `torture`): no part of `make test`.

Run `python tests/torture/coverage_guided.py READER -runs=100000 -max_len=4096`; READER is a name of
`test_fuzz.PLAIN`. Anything but a `RoutePilotError` ends the run with the input that did it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

with atheris.instrument_imports(include=["routepilot"]):
    import test_fuzz

    from routepilot.env.errors import RoutePilotError


def main() -> None:
    name, *options = sys.argv[1:]
    sound, read = test_fuzz.PLAIN[name]()
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
