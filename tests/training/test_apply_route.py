"""An answer applied elsewhere: through Polygraphy's own loader, on a fake of TensorRT."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_tensorrt
import pytest

from routepilot.training import apply_route, deploy

ROUTE = (
    "-kgen:tiling=0 -conv_lowering=off -builder_optimization_level=4 -tf32=off -max_aux_streams=0"
)
FLAGS = "-kgen:tiling=0 -conv_lowering=off"


def answer(route: str = ROUTE, **settings: str) -> dict[str, Any]:
    settings = {"channel": "build_route", "timing_cache": "shared", **settings}
    target = {"device": "a GPU", "versions": {"tensorrt": "11.1.0.106"}, "settings": settings}
    return {"backend": "tensorrt", "route": route, "target": target, "trtexec": "trtexec --onnx=m"}


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> fake_tensorrt.FakeTensorRT:
    module = fake_tensorrt.FakeTensorRT()
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module


def config_of(trt: Any) -> Any:
    config = trt.IBuilderConfig(trt)
    config.flags = {"SPARSE_WEIGHTS"}
    return config


def test_everything_that_was_measured_is_set(trt: Any) -> None:
    config = config_of(trt)
    apply_route.apply(config, answer(avg_timing="8", workspace_mib="512"))
    assert config.build_route == FLAGS
    assert (config.builder_optimization_level, config.max_aux_streams) == (4, 0)
    assert config.flags == set()
    assert config.avg_timing_iterations == 8 and config.pools == {"WORKSPACE": 512 << 20}
    # The default route is not nothing: TF32 is on in TensorRT and off in Polygraphy.
    config = config_of(trt)
    apply_route.apply(config, answer("", optimization_level="2"))
    assert config.build_route == "" and config.flags == {"TF32"}
    assert config.builder_optimization_level == 2
    config = config_of(trt)
    apply_route.apply(config, answer("-tiling_optimization_level=fast -sparse_weights=on"))
    assert config.tiling_optimization_level == 1 and config.flags == {"TF32", "SPARSE_WEIGHTS"}


def test_a_route_that_is_dropped_in_silence_is_an_error(trt: Any) -> None:
    trt.dropped = {"-kgen:tiling=0"}
    with pytest.raises(RuntimeError, match="took '' for '-kgen:tiling=0"):
        apply_route.apply(config_of(trt), answer())
    trt.__version__ = "11.4.0"
    with pytest.warns(UserWarning, match="measured with TensorRT 11.1.0.106 and this is 11.4.0"):
        apply_route.apply(config_of(trt), answer(""))
    with pytest.raises(RuntimeError, match="has no build_route"):
        with pytest.warns(UserWarning):
            apply_route.apply(types.SimpleNamespace(), answer())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({**answer(), "backend": "cpu"}, "backend 'cpu'"),
        (answer(channel="lunowud"), "through build_route"),
        ({"speedup": 2.0}, "has no route"),
        ("nowhere", "holds no answer"),
    ],
)
def test_what_is_no_such_answer_is_refused(wrong: Any, words: str) -> None:
    for call in (apply_route.polygraphy_hook, apply_route.torch_tensorrt_settings):
        with pytest.raises(ValueError, match=words):
            call(wrong)


def test_polygraphys_own_loader_calls_the_hook(trt: Any, tmp_path: Path) -> None:
    loaders = pytest.importorskip("polygraphy.backend.trt", reason="Polygraphy is not installed")
    common = pytest.importorskip("polygraphy.backend.common")
    (tmp_path / "result.json").write_text(json.dumps(answer()))
    config, network = config_of(trt), trt.Builder(None).create_network(0)

    def made(builder: Any, network: Any) -> Any:
        return config

    hook = apply_route.polygraphy_hook(tmp_path / "result.json")
    found = loaders.PostprocessConfig(made, func=hook)(trt.Builder(None), network)
    assert found is config and config.build_route == FLAGS
    # As its command line does: a script by path, its function by name.
    run = tmp_path / "run"
    deploy.draft(_made(run))
    (run / ".deploy" / "engine.plan").write_bytes(b"plan")
    place = deploy.finish(run, answer())
    assert place is not None
    fresh = config_of(trt)
    script = common.InvokeFromScript(str(place / "apply_route.py"), name="postprocess_config")
    loaders.PostprocessConfig(lambda builder, network: fresh, func=script)(None, network)
    assert fresh.build_route == FLAGS


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_the_deployed_copy_stands_alone(tmp_path: Path) -> None:
    run = _made(tmp_path / "run")
    deploy.draft(run)
    (run / ".deploy" / "engine.plan").write_bytes(b"plan")
    place = deploy.finish(run, answer())
    assert place is not None
    assert "apply_route.py" in json.loads((place / "manifest.json").read_text())["files"]
    script = "import sys, apply_route\nprint(apply_route.torch_tensorrt_settings())\n"
    script += "assert not any(m.startswith('routepilot') for m in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=place, capture_output=True, text=True, check=True
    )
    assert f"'build_route': '{FLAGS}'" in done.stdout
    # Answers of other compilers get none.
    deploy.draft(run)
    (run / ".deploy" / "model.onnx").write_bytes(b"model")
    place = deploy.finish(run, {"backend": "cpu", "route": "-engine=openvino"})
    assert place is not None and not (place / "apply_route.py").exists()


def test_settings_for_torch_tensorrt() -> None:
    assert apply_route.torch_tensorrt_settings(answer(avg_timing="4", workspace_mib="1")) == {
        "build_route": FLAGS,
        "optimization_level": 4,
        "max_aux_streams": 0,
        "disable_tf32": True,
        "sparse_weights": False,
        "num_avg_timing_iters": 4,
        "workspace_size": 1 << 20,
    }
    more = answer("-tiling_optimization_level=full -max_num_tactics=32 -precision=fp16")
    with pytest.raises(ValueError, match="no setting for -max_num_tactics=32 -precision=fp16"):
        apply_route.torch_tensorrt_settings(more)
    assert apply_route.torch_tensorrt_settings(more, partly=True) == {
        "build_route": "",
        "disable_tf32": False,
        "sparse_weights": False,
        "tiling_optimization_level": "full",
    }


def test_a_torch_tensorrt_without_build_routes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2.14.0 has none, and its `compile` drops what it does not know without a word."""
    package, dynamo = ModuleType("torch_tensorrt"), ModuleType("torch_tensorrt.dynamo")
    package.__version__ = "2.14.0"  # type: ignore[attr-defined]
    levers = "optimization_level max_aux_streams disable_tf32 sparse_weights".split()
    fields = dict.fromkeys([*levers, "num_avg_timing_iters", "workspace_size"])
    dynamo.CompilationSettings = type("S", (), {"__dataclass_fields__": fields})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_tensorrt", package)
    monkeypatch.setitem(sys.modules, "torch_tensorrt.dynamo", dynamo)
    with pytest.raises(
        ValueError, match=r"Torch-TensorRT 2\.14\.0 has no setting for build_route="
    ):
        apply_route.torch_tensorrt_settings(answer())
    left = apply_route.torch_tensorrt_settings(answer(), partly=True)
    assert "build_route" not in left
    assert left["max_aux_streams"] == 0
    levers_alone = answer("-builder_optimization_level=4")
    assert apply_route.torch_tensorrt_settings(levers_alone) == {
        "optimization_level": 4,
        "disable_tf32": False,
        "sparse_weights": False,
    }


def test_every_setting_exists_where_torch_tensorrt_is_installed() -> None:
    settings = pytest.importorskip(
        "torch_tensorrt.dynamo", reason="Torch-TensorRT is not installed"
    )
    known = set(settings.CompilationSettings.__dataclass_fields__)
    if "build_route" not in known:
        pytest.skip("this Torch-TensorRT has no build_route yet")
    everything = answer(ROUTE + " -tiling_optimization_level=full", workspace_mib="1")
    assert set(apply_route.torch_tensorrt_settings(everything)) <= known
