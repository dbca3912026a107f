"""`doctor`: every contract RoutePilot relies on, checked on this machine, one line each.

Owns the list of checks and their wording. Each check really does the thing it names, on a tiny
model made on the spot.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from routepilot.env.backends.tensorrt_options import read_options
from routepilot.env.errors import InputError, MissingExtraError, RoutePilotError
from routepilot.env.models import Model, prepare
from routepilot.env.outcomes import Status
from routepilot.env.routes import DEFAULT_ROUTE
from routepilot.env.store import RecordStore
from routepilot.env.wording import counted
from routepilot.training.session import Session, SessionConfig


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        check: What was checked.
        status: `pass`, `fail` or `unavailable`.
        detail: What was seen.
        hint: What to do about it; empty when all is well.
    """

    check: str
    status: str
    detail: str
    hint: str = ""

    def as_json(self) -> dict[str, str]:
        """The check as plain data."""
        return asdict(self)


#: Optional packages and the extra that brings each.
OPTIONAL = {
    "openvino": "openvino",
    "onnxruntime-gpu": "cuda",
    "torch": "train",
    "stable-baselines3": "train",
    "optuna": "bayes",
    "silero-vad": "demo",
}


def run_checks(backend: str, options: Mapping[str, str] | None = None) -> Iterator[Check]:
    """Run every check for a backend, in an order in which each rests on the earlier ones.

    Args:
        backend: Backend name.
        options: Backend options.

    Raises:
        InputError: An option cannot be used; nothing is yielded before that is known.
    """
    nvidia = backend in ("tensorrt", "tensorrt_rtx")
    if nvidia:
        read_options(backend, options or {})
    for package, extra in OPTIONAL.items():
        yield _package(package, extra)
    with tempfile.TemporaryDirectory(prefix="routepilot-doctor-") as folder:
        place = Path(folder)
        yield _guarded("record store", lambda: _store(place))
        try:
            model = tiny_model(place)
        except RoutePilotError as error:
            yield Check("tiny model", "fail", str(error), "reinstall onnx and onnxruntime")
            return
        yield Check("tiny model", "pass", f"fingerprint {model.fingerprint[:12]}")
        if nvidia:
            blocked = ""
            for check in _compiler_checks(backend, model, place, options or {}):
                if not blocked and check.check in NEEDED and check.status != "pass":
                    blocked = check.check
                yield check
            if blocked:
                hint = f"see the check: {blocked}"
                for name in TIMED:
                    yield Check(name, "unavailable", "nothing can be timed here", hint)
                return
        yield from _backend_checks(backend, model, place, options or {})


#: Without these of TensorRT's checks nothing can be timed.
NEEDED = ("import", "GPU and driver", "catalog", "build default")


#: The checks of a session, which times.
TIMED = (
    "default route",
    "another route",
    "refused combination",
    "noise floor",
    "child is killed at its deadline",
    "a run goes on where it was",
)


def _compiler_checks(
    backend: str, model: Model, folder: Path, options: Mapping[str, str]
) -> Iterator[Check]:
    from routepilot.env import checks_tensorrt

    for found in checks_tensorrt.run_checks(backend, model, folder / "compiler", options):
        yield Check(**found)


def tiny_model(folder: Path) -> Model:
    """A small convolution network, written and prepared in `folder`."""
    from onnx import TensorProto, helper, numpy_helper, save_model

    rng = np.random.default_rng(0)
    weight = rng.normal(0, 0.2, (16, 3, 3, 3)).astype(np.float32)
    dense = rng.normal(0, 0.2, (16, 10)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["p"]),
            helper.make_node("Flatten", ["p"], ["f"]),
            helper.make_node("MatMul", ["f", "d"], ["y"]),
        ],
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 32, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(dense, "d")],
    )
    path = folder / "tiny.onnx"
    # The oldest file format that holds this opset: an older onnxruntime refuses a newer one.
    opsets = [helper.make_opsetid("", 17)]
    save_model(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return prepare(path, cache=folder / "cache")


def _package(package: str, extra: str) -> Check:
    try:
        return Check(package, "pass", version(package))
    except PackageNotFoundError:
        return Check(
            package, "unavailable", "not installed", f"pip install 'routepilot[{extra}]' if wanted"
        )


def _store(folder: Path) -> Check:
    with RecordStore(folder / "probe.sqlite"):
        return Check("record store", "pass", "SQLite opens in write-ahead mode")


def _backend_checks(
    backend: str, model: Model, folder: Path, options: Mapping[str, str]
) -> Iterator[Check]:
    name = f"backend {backend}"
    try:
        store = RecordStore(folder / "records.sqlite")
        config = SessionConfig(backend=backend, options=options)
        session = Session(model, config, store, folder / "work")
    except MissingExtraError as error:
        yield Check(name, "fail", str(error), "install the extra that the message names")
        return
    except RoutePilotError as error:
        if isinstance(error, InputError) and options:
            raise  # an option that cannot be used is no finding about this machine
        yield Check(name, "fail", str(error), "do what the message says")
        return
    with store, session:
        target = session.target
        versions = ", ".join(f"{k} {v}" for k, v in target.versions.items())
        yield Check(name, "pass", f"{target.device}; {versions}")
        yield Check("catalog", "pass", f"{counted(len(session.catalog.knobs), 'knob')}")
        runs = (
            lambda: _default(session),
            lambda: _another(session),
            lambda: _refusal(session),
            lambda: _noise(session),
            lambda: _deadline(session, folder),
            lambda: _resume(session, folder),
        )
        for check, run in zip(TIMED, runs, strict=True):
            yield _guarded(check, run)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except RoutePilotError as error:
        return Check(name, "fail", str(error), "attach `routepilot doctor --json` to a report")


def _default(session: Session) -> Check:
    outcome = session.default()
    latency = outcome.measurement.latency_ms if outcome.measurement else math.nan
    return Check("default route", "pass", f"{latency:.3f} ms")


def _another(session: Session) -> Check:
    route = session.catalog.neighbours(DEFAULT_ROUTE)[0]
    outcome = session.outcome(route)
    good = outcome.status is not Status.CRASHED
    detail = f"{route}: {outcome.status.value} {outcome.reason}".strip()
    return Check("another route", "pass" if good else "fail", detail)


def _refusal(session: Session) -> Check:
    for rule in session.catalog.requirements:
        knob = session.catalog[rule.knob]
        value = rule.value or knob.alternatives[0]
        route = session.catalog.route({rule.knob: value})
        if not session.catalog.is_legal(route):
            outcome = session.outcome(route)
            good = outcome.status is Status.REFUSED
            return Check("refused combination", "pass" if good else "fail", outcome.reason)
    return Check("refused combination", "unavailable", "the catalog refuses no combination")


def _noise(session: Session) -> Check:
    floor = session.noise_floor()
    quiet = floor < 0.03
    return Check(
        "noise floor",
        "pass" if quiet else "fail",
        f"{100 * math.expm1(floor):.1f} %",
        "" if quiet else "stop other programs, or measure at another time",
    )


def _deadline(session: Session, folder: Path) -> Check:
    with (
        RecordStore(folder / "hasty.sqlite") as store,
        Session(session.model, session.config, store, folder / "hasty") as short,
    ):
        short.default()  # the child is up; now it is given no time at all
        short.worker.deadline_seconds = 1e-4
        outcome = short.worker.trial(short.catalog.neighbours(DEFAULT_ROUTE)[0])
    good = outcome.status is Status.TIMED_OUT
    return Check("child is killed at its deadline", "pass" if good else "fail", outcome.reason)


def _resume(session: Session, folder: Path) -> Check:
    """The store of the run that lost its child is opened again."""
    with (
        RecordStore(folder / "hasty.sqlite") as store,
        Session(session.model, session.config, store, folder / "hasty") as again,
    ):
        again.default()
        built = again.fresh_builds
    detail = f"after the kill, {counted(built, 'build')} done again"
    return Check("a run goes on where it was", "pass" if built == 0 else "fail", detail)
