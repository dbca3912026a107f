"""TensorRT's adapter on a fake of its properties, and on the real compiler of TensorRT-RTX."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import fake_tensorrt
import numpy as np
import onnxruntime
import pytest
from fake_tensorrt import FakeTensorRT
from onnx import TensorProto, checker, helper, load, numpy_helper, save

from routepilot.env.backends import conformance as suite
from routepilot.env.backends import load_backend
from routepilot.env.backends import tensorrt_catalog as knobs
from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.tensorrt import check_options
from routepilot.env.backends.tensorrt_compiler import (
    Compiler,
    Plan,
    Settings,
    find_module,
)
from routepilot.env.backends.tensorrt_engine import TensorRtEngine, open_plan, read_plan
from routepilot.env.backends.tensorrt_precision import bfloat16_bits, variant
from routepilot.env.checks_tensorrt import run_checks
from routepilot.env.errors import InputError, MachineError, MissingExtraError, ModelError
from routepilot.env.liveness import known_knobs
from routepilot.env.models import Model, prepare
from routepilot.env.outcomes import Status

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="the extra rtx is not installed"
)
no_gpu = pytest.mark.skipif(find_spec("cuda") is not None, reason="may have a GPU")


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    monkeypatch.delenv("__LUNOWUD", raising=False)
    return fake_tensorrt.install(monkeypatch)


def build(model: Model, route: str, workdir: Path, **options: str) -> TensorRtEngine | BuildFailure:
    backend = load_backend("tensorrt", options)
    built = backend.build(model, backend.catalog().parse(route), workdir)
    assert isinstance(built, TensorRtEngine | BuildFailure)
    return built


# --- catalog ---


def test_shipped_list_is_the_published_one() -> None:
    version, found = knobs.read_build_routes(knobs.shipped_routes_json())
    bounded = [k for k in found if k.bounded]
    assert (version, len(found), len(bounded)) == ("2.19.45", 209, 195)
    assert sum(set(k.values) == {"on", "off"} for k in found) == 188
    assert 1 + sum(len(k.alternatives) for k in bounded) == 206  # `fast` over every bounded knob


def test_catalog_reads_values_marks_and_masks() -> None:
    routes = json.dumps(fake_tensorrt.ROUTES)
    catalog = knobs.make_catalog("tensorrt", "11.1", routes)
    assert catalog.version == "11.1 tuner 2.19.45"
    assert catalog["-kgen:tiling"].values == ("0", "1", "2")
    peep = catalog["-peep:max"]
    assert (peep.bounded, peep.values, peep.default) == (False, ("1", "2"), "0")
    assert catalog["-cask_fusion:num_tactics"].allows("37")
    assert not catalog["-kgen:tiling"].allows("3")
    assert "precision" in catalog["-cask:fp16_acc"].marks
    assert "-mha_fusion:v2:causal_mask" not in catalog
    unsafe = knobs.make_catalog("tensorrt", "11.1", routes, unsafe=True)
    assert "unsafe" in unsafe["-mha_fusion:v2:causal_mask"].marks
    moot = catalog.parse("-conv_lowering=off -conv_lowering:part=on")
    assert "part of -conv_lowering" in (catalog.objection(moot) or "")
    both = catalog.parse("-force_conv_nhwc=on -force_conv_nchw=on")
    assert "one layout" in (catalog.objection(both) or "")


def test_unsafe_and_precision_knobs_exist() -> None:
    names = {k.name for k in knobs.read_build_routes(knobs.shipped_routes_json())[1]}
    assert set(knobs.UNSAFE) <= names
    assert names >= knobs.PRECISION
    assert set(knobs.TRIES) <= names


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("  ", "no build routes"),
        ("nonsense", "known shape"),
        ("{}", "known shape"),
        ('{"tuner_version": "1", "tuner_options": [3]}', "known shape"),
    ],
)
def test_catalog_refuses_other_texts(text: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        knobs.read_build_routes(text)


# --- the build_route channel, on the fake ---


def test_route_is_set_beside_levers(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    route = "-builder_optimization_level=5 -tiling_optimization_level=full -tf32=off"
    engine = build(tiny, f"{route} -kgen:tiling=0 -conv_lowering=off", tmp_path)
    assert isinstance(engine, TensorRtEngine)
    config = trt.built[-1]
    assert config.build_route == "-conv_lowering=off -kgen:tiling=0"  # catalog order
    assert vars(config)["builder_optimization_level"] == 5
    assert vars(config)["tiling_optimization_level"] == 3
    assert "TF32" not in config.flags
    assert engine.notes == []
    assert isinstance(build(tiny, "", tmp_path), TensorRtEngine)
    assert trt.built[-1].build_route == ""


def test_setter_that_drops_is_noticed(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.dropped.add("-kgen:tiling=0")
    built = build(tiny, "-kgen:tiling=0", tmp_path)
    assert isinstance(built, BuildFailure)
    assert built.status is Status.REFUSED
    assert "reads back ''" in built.reason
    assert trt.built == []


def test_silent_library_is_reported(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.silent = True
    engine = build(tiny, "-kgen:tiling=0", tmp_path)
    assert isinstance(engine, TensorRtEngine)
    assert engine.notes == ["no log line says that the build route is in use"]


def test_failure_keeps_the_compilers_words(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.broken = {
        "-kgen:tiling=0": "Error Code 1: CHECK(x)\nfailed",
        "-kgen:tiling=1": "OutOfMemory",
    }
    built = build(tiny, "-kgen:tiling=0", tmp_path)
    assert built == BuildFailure(Status.BUILD_FAILED, "Error Code 1: CHECK(x) failed")
    built = build(tiny, "-kgen:tiling=1", tmp_path)
    assert isinstance(built, BuildFailure)
    assert built.status is Status.OUT_OF_MEMORY


def test_illegal_combination_is_refused(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    built = build(tiny, "-force_conv_nhwc=on -force_conv_nchw=on", tmp_path)
    assert isinstance(built, BuildFailure)
    assert built.status is Status.REFUSED


def test_deadline_cancels_the_build(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.seconds = 5.0
    settings = Settings(deadline_seconds=0.05)
    compiler = Compiler(find_module("tensorrt"), settings)
    built = compiler.compile(compiler.parse(tiny.path, {}))
    assert isinstance(built, BuildFailure)
    assert built.status is Status.TIMED_OUT


def test_stray_flags_are_kept_out(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    original = fake_tensorrt.Builder.build_serialized_network

    def spy(*arguments: object) -> bytes | None:
        seen.append(os.environ.get("__LUNOWUD"))
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fake_tensorrt.Builder, "build_serialized_network", spy)
    monkeypatch.setenv("__LUNOWUD", "-stray=1")
    build(tiny, "-kgen:tiling=0", tmp_path)
    build(tiny, "-kgen:tiling=0", tmp_path, channel="lunowud")
    assert seen == [None, "-kgen:tiling=0"]
    assert os.environ["__LUNOWUD"] == "-stray=1"


def test_both_channels_are_refused(trt: FakeTensorRT, tiny: Model) -> None:
    compiler = Compiler(find_module("tensorrt"))
    network = compiler.parse(tiny.path, {})
    with pytest.raises(InputError, match="not through both"):
        compiler.compile(network, build_route="-kgen:tiling=0", flags="-kgen:tiling=0")


def test_timing_cache_is_shared_or_fresh(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    build(tiny, "", tmp_path, timing_cache="fresh")
    assert not (tmp_path / "timing.cache").exists()
    build(tiny, "", tmp_path)
    assert (tmp_path / "timing.cache").read_bytes() == b"cache of this device"
    build(tiny, "", tmp_path, timing_cache="replay")
    assert {"EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS"} <= trt.built[-1].flags
    (tmp_path / "timing.cache").write_bytes(b"of another GPU")
    with pytest.raises(InputError, match=r"timing cache .* does not fit"):
        build(tiny, "", tmp_path)


def test_workspace_limit_reaches_the_builder(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path
) -> None:
    build(tiny, "", tmp_path, workspace_mib="64")
    assert trt.built[-1].pools == {"WORKSPACE": 64 << 20}


def _if_model(path: Path) -> Path:
    def branch(name: str) -> object:
        nodes = [helper.make_node("Identity", ["x"], [name])]
        output = helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])
        return helper.make_graph(nodes, name, [], [output])

    graph = helper.make_graph(
        [
            helper.make_node(
                "If", ["c"], ["y"], "fork", then_branch=branch("a"), else_branch=branch("b")
            )
        ],
        "if",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_parser_errors_name_node_and_operator(trt: FakeTensorRT, tmp_path: Path) -> None:
    path = _if_model(tmp_path / "if.onnx")
    with pytest.raises(ModelError, match=r"node 'fork' \(If\): not supported"):
        Compiler(find_module("tensorrt")).parse(path, {})


def test_dynamic_inputs_get_a_profile(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    proto = load(str(tiny.path))
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    save(proto, tmp_path / "dynamic.onnx")
    compiler = Compiler(find_module("tensorrt"))
    shape = tiny.inputs[0].shape
    compiler.compile(compiler.parse(tmp_path / "dynamic.onnx", {"x": shape}))
    assert trt.built[-1].profiles[0].shapes == {"x": (shape, shape, shape)}
    with pytest.raises(ModelError, match="--shape x="):
        compiler.compile(compiler.parse(tmp_path / "dynamic.onnx", {}))


# --- versions and platforms ---


def test_old_versions(monkeypatch: pytest.MonkeyPatch, tiny: Model, tmp_path: Path) -> None:
    fake_tensorrt.install(monkeypatch, "8.6.1")
    with pytest.raises(InputError, match=r"tensorrt 8\.6\.1 is too old"):
        load_backend("tensorrt")
    old = fake_tensorrt.install(monkeypatch, "10.13.0")
    catalog = load_backend("tensorrt").catalog()
    assert [k.name for k in catalog.knobs if knobs.is_build_route_knob(k.name)] == []
    assert isinstance(build(tiny, "-tf32=off", tmp_path), TensorRtEngine)
    network = Compiler(old).parse(tiny.path, {})
    assert network.definition.flags == 1  # strongly typed, as every network of 11
    assert len(load_backend("tensorrt", {"channel": "lunowud"}).catalog().knobs) > 190
    refused = Compiler(old).compile(network, build_route="-kgen:tiling=0")
    assert isinstance(refused, BuildFailure)
    assert "came with TensorRT 11.1" in refused.reason


def test_windows_has_no_tuner(trt: FakeTensorRT) -> None:
    trt.routes = {"tuner_version": "", "tuner_options": []}
    with pytest.raises(InputError, match="channel=lunowud"):
        load_backend("tensorrt").catalog()


def test_missing_module_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(MissingExtraError, match=r"routepilot\[tensorrt\]"):
        load_backend("tensorrt")


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
        check_options(name, options)


# --- engines, on the fake ---

#: `load.py` of a saved engine starts a process of its own, in which there is no fake.
FAKE_CHECKS = [c for c in suite.CHECKS if c is not suite.saved_engines_load]


@pytest.mark.parametrize("check", FAKE_CHECKS, ids=lambda check: check.__name__)
def test_adapter_conforms(
    trt: FakeTensorRT, tiny: Model, tmp_path: Path, check: Callable[[suite.Case], None]
) -> None:
    check(suite.Case(partial(load_backend, "tensorrt"), tiny, tmp_path))


def test_only_own_plans_are_loaded(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    engine = build(tiny, "", tmp_path)
    assert isinstance(engine, TensorRtEngine)
    inputs = tiny.selection()[0]
    wanted = engine.run(inputs)
    stranger = tmp_path / "stranger.plan"
    stranger.write_bytes(engine._plan.data)
    with pytest.raises(InputError, match="--trust"):
        read_plan(stranger)
    np.testing.assert_equal(open_plan(stranger, trust=True).run(inputs), wanted)
    out = tmp_path / "out"
    out.mkdir()
    assert set(engine.save(out)) == {"engine.plan", "inputs.npz", "load.py"}
    np.testing.assert_equal(open_plan(out / "engine.plan").run(inputs), wanted)
    compile((out / "load.py").read_text(), "load.py", "exec")
    with pytest.raises(InputError, match="was changed"):
        read_plan(out / "engine.plan", expected="0" * 64)
    with pytest.raises(InputError, match="cannot be read"):
        read_plan(tmp_path / "none.plan")
    stranger.write_bytes(b"no plan")
    with pytest.raises(MachineError, match="Magic tag"):
        open_plan(stranger, trust=True)


def test_doctor_on_the_fake(trt: FakeTensorRT, tiny: Model, tmp_path: Path) -> None:
    trt.dropped.add("-kgen:tiling=banana")
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path)}
    assert found["set and read back a route"]["status"] == "pass"
    assert found["accuracy against ONNX Runtime"]["status"] == "pass"
    assert "byte-identical" in found["timing cache"]["detail"]
    assert "reads back" in found["unknown knob"]["detail"]
    trt.inert.add("-kgen:tiling=0")
    found = {c["check"]: c for c in run_checks("tensorrt", tiny, tmp_path)}
    assert found["build a live route"]["status"] == "fail"


# --- precision variants ---


def test_fp16_leaves_wide_nodes_alone(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    proto = load(str(variant(tiny, "fp16", tmp_path, tmp_path / "scratch").path))
    kinds = {t.data_type for t in proto.graph.initializer}
    assert kinds == {TensorProto.FLOAT16}
    wide = load(str(tiny.path))
    weight = next(t for t in wide.graph.initializer if t.name == "d")
    values = numpy_helper.to_array(weight) * np.float32(1e7)
    weight.CopyFrom(numpy_helper.from_array(values, "d"))
    save(wide, tmp_path / "wide.onnx")
    model = prepare(tmp_path / "wide.onnx", cache=tmp_path)
    mixed = load(str(variant(model, "fp16", tmp_path, tmp_path / "scratch").path))
    types = {t.name: t.data_type for t in mixed.graph.initializer}
    assert types["d"] == TensorProto.FLOAT
    assert TensorProto.FLOAT16 in types.values()
    assert [i.type.tensor_type.elem_type for i in proto.graph.input] == [TensorProto.FLOAT]


def test_bfloat16_is_a_valid_model(transformer: Model, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    proto = load(str(variant(transformer, "bf16", tmp_path, tmp_path / "scratch").path))
    checker.check_model(proto)
    assert TensorProto.FLOAT16 not in {t.data_type for t in proto.graph.initializer}
    brain = next(t for t in proto.graph.initializer if t.data_type == TensorProto.BFLOAT16)
    source = next(t for t in load(str(transformer.path)).graph.initializer if t.name == brain.name)
    given = numpy_helper.to_array(brain).astype(np.float32)
    np.testing.assert_allclose(given, numpy_helper.to_array(source), rtol=2**-8)


def test_int8_is_explicit_and_close(tiny: Model, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    path = variant(tiny, "int8", tmp_path, tmp_path / "scratch").path
    nodes = [n.op_type for n in load(str(path)).graph.node]
    assert nodes.count("DequantizeLinear") == 4  # data and weight of Conv and MatMul
    options = onnxruntime.SessionOptions()
    # Fused, ONNX Runtime overflows 16-bit sums on some processors; as written it does not.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    (given,) = session.run(None, dict(tiny.selection()[0]))
    wanted = tiny.selection_reference()[0]["y"]
    assert np.linalg.norm(given - wanted) < 0.05 * np.linalg.norm(wanted)


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -3.0e38, 1e-40], np.float32)
    back = (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)
    assert back[:3].tolist() == [1.0, 1.0, 1.0 + 2**-6]
    np.testing.assert_allclose(back[3], values[3], rtol=2**-8)


# --- the real compiler of TensorRT-RTX, without a GPU ---


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


@needs_rtx
def test_doctor_on_rtx(tiny: Model, tmp_path: Path) -> None:
    found = {c["check"]: c for c in run_checks("tensorrt_rtx", tiny, tmp_path)}
    failed = [c for c in found.values() if c["status"] == "fail"]
    assert failed == []
    assert found["build a live route"]["detail"].endswith("the engine changed")
    assert "unknown option" in found["unknown knob"]["detail"]


def test_every_knob_can_be_swept() -> None:
    assert all(knob.alternatives for knob in known_knobs())
