"""Options of the TensorRT backends: read, checked, put to use."""

from __future__ import annotations

import dataclasses

import pytest

from routepilot.env.backends.tensorrt_options import (
    NAMES,
    Channel,
    TensorRtOptions,
    read_options,
)
from routepilot.env.errors import InputError


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("tensorrt", {"colour": "red"}, "does not exist"),
        ("tensorrt", {"channel": "both"}, "allowed: build_route, lunowud"),
        ("tensorrt", {"deadline": "soon"}, "give a number"),
        ("tensorrt", {"capability": "8.9"}, "GPU at hand"),
        ("tensorrt_rtx", {"channel": "build_route"}, "has no build_route"),
        ("tensorrt_rtx", {"timing_cache": "fresh"}, "no timing cache"),
        ("tensorrt", {"timing_cache": "fresh", "cache_file": "x"}, "uses no file"),
        ("tensorrt", {"timing_cache": "replay", "cache_file": "none"}, "does not exist"),
        ("tensorrt", {"timing_cache": "stale"}, "shared, always-shared, fresh, replay"),
        ("tensorrt", {"unsafe": "yes"}, "allowed: on, off"),
        ("tensorrt", {"optimization_level": "6"}, "0 to 5"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, str], word: str) -> None:
    with pytest.raises(InputError, match=word):
        read_options(name, options)


def test_options_are_typed_and_the_measuring_ones_make_the_target() -> None:
    words = {"threads": "4", "workspace_mib": "64", "optimization_level": "0", "device": "1"}
    options = read_options("tensorrt", words)
    assert (options.workspace_mib, options.optimization_level, options.device) == (64, 0, 1)
    assert options.channel is Channel.BUILD_ROUTE
    assert options.measuring() == {
        "channel": "build_route",
        "timing_cache": "shared",
        "workspace_mib": "64",
        "optimization_level": "0",
    }
    assert read_options("tensorrt_rtx", {}).channel is Channel.LUNOWUD


def test_every_option_is_described() -> None:
    assert set(NAMES) == {field.name for field in dataclasses.fields(TensorRtOptions)}


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt_rtx"])
def test_an_option_that_does_not_exist_is_answered_with_those_that_are_taken(backend: str) -> None:
    with pytest.raises(InputError) as refusal:
        read_options(backend, {"nope": "1"})
    listed = str(refusal.value).partition("takes: ")[2].split(", ")
    refused = {"channel", "timing_cache", "cache_file"} if backend == "tensorrt_rtx" else set()
    refused |= {"capability"} if backend == "tensorrt" else set()
    assert set(listed) == set(NAMES) - refused
