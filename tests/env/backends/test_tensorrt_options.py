"""Options of the TensorRT backends: read, checked, put to use."""

from __future__ import annotations

import pytest

from routepilot.env.backends.tensorrt_options import read_options
from routepilot.env.errors import InputError


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("tensorrt", {"colour": "red"}, "does not exist"),
        ("tensorrt", {"channel": "both"}, "allowed: build_route, lunowud"),
        ("tensorrt", {"deadline": "soon"}, "give a number"),
        ("tensorrt", {"capability": "8.9"}, "GPU at hand"),
        ("tensorrt_rtx", {"channel": "build_route"}, "has no build_route"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, str], word: str) -> None:
    with pytest.raises(InputError, match=word):
        read_options(name, options)
