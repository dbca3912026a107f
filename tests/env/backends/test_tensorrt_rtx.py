"""The adapter on the real compiler of TensorRT-RTX, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from onnx import load, save

from routepilot.env.backends import conformance as suite
from routepilot.env.backends import load_backend
from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.tensorrt_compiler import (
    Compiler,
    Plan,
    Settings,
    find_module,
)
from routepilot.env.errors import InputError, MachineError, ModelError
from routepilot.env.models import Model
from routepilot.env.outcomes import Status

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="the extra rtx is not installed"
)
no_gpu = pytest.mark.skipif(find_spec("cuda") is not None, reason="may have a GPU")


@pytest.fixture(scope="module")
def rtx() -> Compiler:
    return Compiler(find_module("tensorrt_rtx"), Settings(compute_capability="8.9"))


@needs_rtx
def test_rtx_builds_repeat_and_differ(rtx: Compiler, tiny: Model) -> None:
    network = rtx.parse(tiny.path, {})
    first, again, other = (rtx.compile(network, flags=f) for f in ("", "", "-kgen:tiling=0"))
    assert isinstance(first, Plan)
    assert isinstance(again, Plan)
    assert isinstance(other, Plan)
    assert first.data == again.data != other.data
    fresh = rtx.compile(rtx.parse(tiny.path, {}))
    assert isinstance(fresh, Plan)
    assert fresh.data == first.data


@needs_rtx
@pytest.mark.parametrize(
    ("flags", "status", "word"),
    [
        ("-no_such_knob=1", Status.REFUSED, 'unknown option "-no_such_knob"'),
        ("-kgen:tiling=banana", Status.REFUSED, "must only contain digits"),
        ("-mha_fusion:v2=banana", Status.REFUSED, "invalid boolean value"),
        ("-formats:reduce_dop=off", Status.BUILD_FAILED, "Myelin"),
    ],
)
def test_rtx_refuses_in_its_own_words(
    rtx: Compiler, tiny: Model, flags: str, status: Status, word: str
) -> None:
    built = rtx.compile(rtx.parse(tiny.path, {}), flags=flags)
    assert isinstance(built, BuildFailure)
    assert built.status is status
    assert word in built.reason
    assert isinstance(rtx.compile(rtx.parse(tiny.path, {})), Plan)  # and goes on


@needs_rtx
def test_rtx_ignores_build_route_and_we_say_so(rtx: Compiler, tiny: Model) -> None:
    assert rtx.all_build_routes() == ""
    built = rtx.compile(rtx.parse(tiny.path, {}), build_route="-kgen:tiling=0")
    assert isinstance(built, BuildFailure)
    assert built.status is Status.REFUSED


@needs_rtx
def test_rtx_limits(tiny: Model, tmp_path: Path) -> None:
    trt = find_module("tensorrt_rtx")
    with pytest.raises(InputError, match=r"allowed: .*8\.9"):
        Compiler(trt, Settings(compute_capability="9.0"))
    hasty = Compiler(trt, Settings(compute_capability="8.9", deadline_seconds=1e-6))
    built = hasty.compile(hasty.parse(tiny.path, {}))
    assert isinstance(built, BuildFailure)
    assert built.status is Status.TIMED_OUT
    proto = load(str(tiny.path))
    proto.graph.node[-1].op_type = "Bernoulli"
    del proto.graph.node[-1].input[1]
    save(proto, tmp_path / "bad.onnx")
    with pytest.raises(ModelError, match=r"cannot parse bad\.onnx: node .*\(Bernoulli\): .*; "):
        hasty.parse(tmp_path / "bad.onnx", {})


@needs_rtx
def test_rtx_reads_external_weights_and_dynamic_shapes(
    rtx: Compiler, tiny: Model, tmp_path: Path
) -> None:
    """The same network, its weights in a file beside it and its batch open: the real parser."""
    plain = rtx.compile(rtx.parse(tiny.path, {}))
    assert isinstance(plain, Plan)
    save(
        load(str(tiny.path)),
        tmp_path / "outside.onnx",
        save_as_external_data=True,
        location="outside.data",
        size_threshold=0,
    )
    assert (tmp_path / "outside.data").stat().st_size > 1000
    outside = rtx.compile(rtx.parse(tmp_path / "outside.onnx", {}))
    assert isinstance(outside, Plan)
    assert outside.data == plain.data
    (tmp_path / "outside.data").unlink()
    with pytest.raises(ModelError, match=r"cannot parse outside\.onnx"):
        rtx.parse(tmp_path / "outside.onnx", {})
    proto = load(str(tiny.path))
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    save(proto, tmp_path / "open.onnx")
    shape = tiny.inputs[0].shape
    fixed = rtx.compile(rtx.parse(tmp_path / "open.onnx", {"x": shape}))
    larger = rtx.compile(rtx.parse(tmp_path / "open.onnx", {"x": (4, *shape[1:])}))
    assert isinstance(fixed, Plan), fixed.reason
    assert isinstance(larger, Plan), larger.reason
    assert fixed.data != larger.data  # the profile is part of the engine
    with pytest.raises(ModelError, match="--shape x="):
        rtx.compile(rtx.parse(tmp_path / "open.onnx", {}))


@needs_rtx
def test_rtx_parser_errors_are_told_one_by_one(rtx: Compiler, tiny: Model, tmp_path: Path) -> None:
    proto = load(str(tiny.path))
    for place in (1, -1):
        proto.graph.node[place].op_type, proto.graph.node[place].domain = "Nonsense", "nowhere"
        proto.graph.node[place].name = f"bad{place % len(proto.graph.node)}"
    save(proto, tmp_path / "bad.onnx")
    with pytest.raises(ModelError) as refused:
        rtx.parse(tmp_path / "bad.onnx", {})
    assert str(refused.value).count("(Nonsense)") == 2
    assert "bad1" in str(refused.value)
    assert f"bad{len(proto.graph.node) - 1}" in str(refused.value)


@needs_rtx
def test_rtx_tells_the_error_recorder_alone(tiny: Model) -> None:
    """Limits reach the compiler, and what no log line says becomes the reason."""
    settings = Settings(compute_capability="8.9", workspace_bytes=1, tactic_shared_bytes=1)
    tight = Compiler(find_module("tensorrt_rtx"), settings)
    built = tight.compile(tight.parse(tiny.path, {}))
    assert isinstance(built, BuildFailure)
    assert "tacticMaxShmemSize" in built.reason
    assert not [text for severity, text in tight._ear.lines if "ERROR" in severity]


@needs_rtx
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_rtx_takes_every_precision(
    tiny: Model, transformer: Model, tmp_path: Path, precision: str
) -> None:
    backend = load_backend("tensorrt_rtx")
    route = backend.catalog().parse(f"-precision={precision}")
    for model in (tiny, transformer):
        built = backend.build(model, route, tmp_path)
        default = backend.build(model, backend.catalog().parse(""), tmp_path)
        assert not isinstance(built, BuildFailure), built.reason
        assert not isinstance(default, BuildFailure)
        assert built.hash != default.hash
        assert built.build_seconds > 0


@needs_rtx
@pytest.mark.parametrize(
    "check",
    [
        suite.catalog_is_well_formed,
        suite.catalog_and_target_are_stable,
        suite.illegal_changes_are_refused,
        suite.hash_is_deterministic,
        suite.some_change_changes_the_engine,
    ],
    ids=lambda check: check.__name__,
)
def test_rtx_conforms_as_far_as_it_runs(
    tiny: Model, tmp_path: Path, check: Callable[[suite.Case], None]
) -> None:
    check(suite.Case(partial(load_backend, "tensorrt_rtx"), tiny, tmp_path))


@needs_rtx
@no_gpu
def test_rtx_engine_says_that_it_needs_a_gpu(tiny: Model, tmp_path: Path) -> None:
    backend = load_backend("tensorrt_rtx", {"capability": "12.0"})
    assert "12.0" in backend.target().device
    built = backend.build(tiny, backend.catalog().parse(""), tmp_path)
    assert not isinstance(built, BuildFailure)
    with pytest.raises(MachineError, match="needs an NVIDIA GPU"):
        built.run(tiny.selection()[0])
