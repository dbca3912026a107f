"""The conformance suite, on every backend that works here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from routepilot.env.backends import load_backend
from routepilot.env.backends.base import Backend, BuildFailure
from routepilot.env.backends.conformance import (
    CHECKS,
    Case,
    catalog_and_target_are_stable,
    default_route_reproduces_the_reference,
    hash_is_deterministic,
    illegal_changes_are_refused,
    outputs_are_copies,
)
from routepilot.env.models import Model
from routepilot.env.outcomes import Status

HERE = [
    ("onnxruntime", {}),
    ("cpu", {}),
    ("cpu", {"threads": "2"}),
    ("openvino", {}),
]

#: An array that a spoiled engine gives away again and again.
HELD = np.zeros(3)


@pytest.fixture(scope="module", params=HERE, ids=lambda p: f"{p[0]}-{p[1].get('threads', '1')}")
def case(
    request: pytest.FixtureRequest,
    transformer: Model,
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    name, options = request.param
    if name == "openvino" and find_spec("openvino") is None:
        pytest.skip("the extra openvino is not installed")
    workdir = tmp_path_factory.mktemp("conformance")
    return Case(partial(load_backend, name, options), transformer, workdir)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_backend_conforms(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


class Spoiled:
    """A backend that is right but for one thing."""

    def __init__(self, **spoils: object) -> None:
        self._backend = load_backend("onnxruntime")
        self.name = self._backend.name
        self._spoils = spoils

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def build(self, *arguments: object) -> object:
        built = self._backend.build(*arguments)  # type: ignore[arg-type]
        if isinstance(built, BuildFailure):
            status = self._spoils.get("refusal", built.status)
            return BuildFailure(status, built.reason)  # type: ignore[arg-type]
        engine = SpoiledEngine(built)
        for name, value in self._spoils.items():
            setattr(engine, name, value() if name == "hash" else value)  # type: ignore[operator]
        return engine


class SpoiledEngine:
    def __init__(self, engine: object) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


@pytest.mark.parametrize(
    ("check", "spoils"),
    [
        (default_route_reproduces_the_reference, {"run": lambda _: {"y": np.zeros(3)}}),
        (hash_is_deterministic, {"hash": lambda: str(np.random.default_rng().random())}),
        (illegal_changes_are_refused, {"refusal": Status.BUILD_FAILED}),
        (outputs_are_copies, {"run": lambda _: {"y": np.add(HELD, 1, out=HELD)}}),
    ],
    ids=lambda p: p.__name__ if callable(p) else "",
)
def test_suite_notices(
    tiny: Model, tmp_path: Path, check: Callable[[Case], None], spoils: dict[str, object]
) -> None:
    def make() -> Backend:
        return Spoiled(**spoils)  # type: ignore[return-value]

    catalog_and_target_are_stable(Case(make, tiny, tmp_path))  # it is right in this
    with pytest.raises(AssertionError):
        check(Case(make, tiny, tmp_path))
