"""The CUDA provider's backend on a fake GPU, and on a real one where there is one."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from routepilot.env.backends import conformance as suite
from routepilot.env.backends import cuda, cuda_engine, load_backend
from routepilot.env.backends.base import BuildFailure
from routepilot.env.backends.cuda import CudaBackend, check_options
from routepilot.env.backends.cuda_catalog import PROVIDER, make_catalog, settings_of
from routepilot.env.backends.cuda_engine import CudaEngine, Device
from routepilot.env.errors import InputError, MachineError, MissingExtraError
from routepilot.env.gpu_timing import Gpu
from routepilot.env.models import Model
from routepilot.env.outcomes import Status
from routepilot.env.routes import DEFAULT_ROUTE, Route

HAS_PROVIDER = "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def has_gpu() -> bool:
    if not HAS_PROVIDER:
        return False
    try:
        Gpu()
    except (MachineError, MissingExtraError):
        return False
    return True


@pytest.fixture(params=["convolutions", "transformer", "recurrent"], scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    found: Model = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def case(model: Model, tmp_path_factory: pytest.TempPathFactory) -> suite.Case:
    return suite.Case(fake_cuda.backend, model, tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_conforms_on_the_fake(case: suite.Case, check: Callable[[suite.Case], None]) -> None:
    check(case)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU, or no onnxruntime with the CUDA provider")
@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_conforms_on_the_gpu(
    model: Model, tmp_path: Path, check: Callable[[suite.Case], None]
) -> None:
    check(suite.Case(partial(load_backend, "cuda"), model, tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU, or no onnxruntime with the CUDA provider")
def test_default_is_timed_in_a_graph(convolutions: Model, tmp_path: Path) -> None:
    engine = load_backend("cuda").build(convolutions, DEFAULT_ROUTE, tmp_path)
    assert isinstance(engine, CudaEngine)
    assert engine.time(convolutions.selection()[0], 0.01)
    assert engine.caveats == []
    engine.close()


def build(model: Model, text: str, workdir: Path, device: Device = fake_cuda.FAKE) -> Any:
    return CudaBackend({}, device).build(model, Route.read(text), workdir)


@pytest.mark.skipif(HAS_PROVIDER, reason="this onnxruntime has the CUDA provider")
def test_without_the_provider_one_line_says_what_to_install() -> None:
    backend = load_backend("cuda")
    assert backend.catalog().knobs  # the knobs can be read anywhere
    with pytest.raises(MissingExtraError, match="pip install .* onnxruntime-gpu") as caught:
        backend.target()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"graph": "off"}, "takes: graphs"),
        ({"graphs": "maybe"}, "allowed: capture, session, off"),
        ({"device": "one"}, "whole number"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_options(options)


class Opened:
    """A session as far as reading back its providers goes."""

    def __init__(self, taken: dict[str, dict[str, str]]) -> None:
        self.get_provider_options = lambda: taken


def test_what_the_provider_took_is_read_back(convolutions: Model, tmp_path: Path) -> None:
    engine = build(convolutions, "", tmp_path)
    given = {"use_tf32": "0"}
    for spelling in ("0", "false", "0x0"):
        engine._check_taken(Opened({"CPUExecutionProvider": {"use_tf32": spelling}}), given)
    with pytest.raises(RuntimeError, match="use_tf32=0 was taken as 1"):
        engine._check_taken(Opened({"CPUExecutionProvider": {"use_tf32": "1"}}), given)
    # The library steps aside when it cannot load the provider; the CPU would be timed instead.
    with pytest.raises(MachineError, match="LD_LIBRARY_PATH"):
        engine._check_taken(Opened({"AnotherExecutionProvider": {}}), given)


def test_options_no_operator_reads_leave_the_engine_alone(
    convolutions: Model, transformer: Model, tmp_path: Path
) -> None:
    def changes(model: Model, text: str) -> bool:
        workdir = tmp_path / model.name
        default, other = build(model, "", workdir), build(model, text, workdir)
        return bool(default.hash != other.hash)

    for text in ("-cudnn_conv_algo_search=HEURISTIC", "-fuse_conv_bias=1"):
        assert changes(convolutions, text) and not changes(transformer, text)
    assert not changes(convolutions, "-sdpa_kernel=1")
    assert changes(transformer, "-enable_skip_layer_norm_strict_mode=1")
    assert changes(transformer, "-use_tf32=0") and changes(convolutions, "-use_tf32=0")


def test_every_provider_option_is_a_knob_with_the_default_first() -> None:
    catalog = make_catalog("cuda")
    settings = settings_of(catalog.full_settings(DEFAULT_ROUTE))
    assert dict(settings.provider_options) == {name: row[0] for name, row in PROVIDER.items()}
    route = catalog.parse("-use_tf32=0 -fuse:norm=off -gelu:approximation=on")
    changed = settings_of(catalog.full_settings(route))
    assert changed.provider_options["use_tf32"] == "0"
    assert "SkipLayerNormFusion" in changed.disabled_optimizers
    assert changed.entries == {"optimization.enable_gelu_approximation": "1"}


def kinds(path: Path) -> set[int]:
    graph = onnx.load(str(path)).graph
    return {tensor.data_type for tensor in graph.initializer}


def test_recipes_write_the_precision_they_name(transformer: Model, tmp_path: Path) -> None:
    for precision, wanted in (("fp16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)):
        build(transformer, f"-precision={precision}", tmp_path)
        (path,) = tmp_path.glob(f"cuda-{precision}-*.onnx")
        assert wanted in kinds(path)


def test_mixed_keeps_normalisations_in_float32(transformer: Model, tmp_path: Path) -> None:
    engine = build(transformer, "-precision=fp16_mixed", tmp_path)
    assert not isinstance(engine, BuildFailure)
    (path,) = tmp_path.glob("cuda-fp16_mixed-*.onnx")
    graph = onnx.load(str(path)).graph
    weights = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "LayerNormalization":
            assert weights[node.input[1]] == TensorProto.FLOAT
        if node.op_type == "MatMul" and node.input[1] in weights:
            assert weights[node.input[1]] == TensorProto.FLOAT16


def test_bfloat16_leaves_alone_what_the_opset_does_not_allow(
    convolutions: Model, transformer: Model
) -> None:
    without = cuda._without_bfloat16(onnx.load(str(convolutions.path)))
    assert "Conv" in without  # bfloat16 convolutions came with opset 22
    assert "MatMul" not in cuda._without_bfloat16(onnx.load(str(transformer.path)))


def test_a_model_that_cannot_be_captured_is_timed_and_marked(
    convolutions: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(convolutions, "", tmp_path)
    real = CudaEngine._open

    def refusing(self: CudaEngine, optimized: Path, graphed: bool) -> Any:
        if graphed:
            raise RuntimeError("This session cannot use the graph capture feature as requested")
        return real(self, optimized, graphed)

    monkeypatch.setattr(CudaEngine, "_open", refusing)
    engine = build(convolutions, "", tmp_path)
    assert len(engine.caveats) == 1
    assert engine.caveats[0].startswith(cuda_engine.NO_GRAPH)
    assert engine.hash != plain.hash  # it runs in another way
    inputs = convolutions.selection()[0]
    assert engine.time(inputs, 0.0)
    np.testing.assert_array_equal(engine.run(inputs)["y"], plain.run(inputs)["y"])


class LazyTimer(fake_cuda.FakeCudaTimer):
    """A fake timer whose graphs hold nothing, as an empty capture would."""

    def time(self, seconds: float) -> list[float]:
        return [0.001] if self.graphs else super().time(seconds)


def test_a_graph_that_computes_nothing_is_not_believed(convolutions: Model, tmp_path: Path) -> None:
    lazy = Device("CPUExecutionProvider", "cpu", fake_cuda.FakeGpu, LazyTimer)
    engine = build(convolutions, "", tmp_path, lazy)
    times = engine.time(convolutions.selection()[0], 0.0)
    assert times != [0.001]
    assert any("computes something else" in caveat for caveat in engine.caveats)


def test_buffers_are_given_back(convolutions: Model, tmp_path: Path) -> None:
    backend = fake_cuda.backend()
    engine = backend.build(convolutions, DEFAULT_ROUTE, tmp_path)
    assert isinstance(engine, CudaEngine)
    engine.time(convolutions.selection()[0], 0.0)
    gpu = backend._gpu
    assert len(gpu._memory) > 2  # launches rotate over several sets of inputs
    engine.close()
    assert gpu._memory == {}


def test_out_of_device_memory_is_told_apart(
    convolutions: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA failure 2: out of memory ; GPU=0")

    monkeypatch.setattr(CudaEngine, "_open", full)
    failure = build(convolutions, "", tmp_path)
    assert isinstance(failure, BuildFailure)
    assert failure.status is Status.OUT_OF_MEMORY


def test_the_device_lock_keeps_others_out_and_may_be_taken_again() -> None:
    gpu = object.__new__(Gpu)  # the lock needs no device
    gpu.uuid, gpu._locked = "test-of-the-lock", 0
    path = Path(tempfile.gettempdir()) / f"routepilot-gpu-{gpu.uuid}.lock"

    def is_free() -> bool:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    with gpu.lock():
        with gpu.lock():
            assert not is_free()
        assert not is_free()
    assert is_free()
    path.unlink()
