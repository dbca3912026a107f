"""Knob liveness: what the real compiler says of small models, and what a hostile one costs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import hostile_liveness_child
import pytest
from onnx import TensorProto, helper, load, save

from routepilot.env import child as child_module
from routepilot.env import liveness, liveness_pool
from routepilot.env.child import Child, Ended
from routepilot.env.errors import (
    InputError,
    MachineError,
    MissingExtraError,
    ModelError,
    RouteError,
)
from routepilot.env.liveness import (
    Liveness,
    known_knobs,
    live,
    single_changes,
)
from routepilot.env.models import Model, prepare

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="the extra rtx is not installed"
)


def test_changes_cover_every_knob() -> None:
    changes = single_changes()
    assert len(changes) == len(set(changes)) == 236
    assert {c.partition("=")[0] for c in changes} == {k.name for k in known_knobs()}
    assert single_changes(["-kgen:tiling"]) == ["-kgen:tiling=0", "-kgen:tiling=1"]
    with pytest.raises(RouteError, match="-no_such_knob"):
        single_changes(["-no_such_knob"])
    with pytest.raises(RouteError, match=r"did you mean -kgen:tiling\?"):
        single_changes(["kgen:tiling"])


@needs_rtx
def test_sweep_tells_live_from_identical_from_failed(tiny: Model, tmp_path: Path) -> None:
    knobs = ["-kgen:tiling", "-mha_fusion:v2", "-formats:reduce_dop", "-cask6:w2c_mode"]
    heard: list[tuple[int, int]] = []
    found = live(
        tiny,
        knobs=knobs,
        jobs=2,
        cache=tmp_path,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert found.live == ("-kgen:tiling=0",)
    assert found.identical == ("-kgen:tiling=1", "-mha_fusion:v2=off")
    assert set(found.failed) == {
        "-formats:reduce_dop=off",
        "-cask6:w2c_mode=1",
        "-cask6:w2c_mode=2",
        "-cask6:w2c_mode=3",
    }
    assert "Myelin" in found.failed["-formats:reduce_dop=off"]
    assert found.refused == tuple(c for c in found.changes if c.startswith("-cask6"))
    assert "unknown option" in found.failed["-cask6:w2c_mode=1"]
    assert found.distinct_engines == 2
    assert sorted(heard) == [(n, 7) for n in range(1, 8)]
    assert found.of("-kgen:tiling", "0") == "live"
    assert found.of("-kgen:tiling", "1") == "identical"
    assert found.of("-formats:reduce_dop", "off") == "failed"
    assert found.of("-slice_fusion", "off") == "unknown"
    data = json.loads(json.dumps(found.as_json()))
    assert len(data["changes"]) == sum(len(data[k]) for k in ("live", "identical", "failed"))


@needs_rtx
def test_answers_are_cached_by_capability(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = live(tiny, knobs=["-kgen:tiling"], jobs=1, cache=tmp_path)
    monkeypatch.setattr(liveness, "Pool", lambda *_, **__: pytest.fail("compiled again"))
    again = live(tiny, knobs=["-kgen:tiling"], cache=tmp_path)
    assert again.live == first.live
    assert again.identical == first.identical
    with pytest.raises(BaseException, match="compiled again"):
        live(tiny, knobs=["-kgen:tiling"], compute_capability="8.6", cache=tmp_path)
    with pytest.raises(BaseException, match="compiled again"):
        live(tiny, knobs=["-slice_fusion"], cache=tmp_path)
    next(tmp_path.glob("*.json")).write_text("{damaged")
    with pytest.raises(BaseException, match="compiled again"):
        live(tiny, knobs=["-kgen:tiling"], cache=tmp_path)


@needs_rtx
def test_several_outputs_do_not_look_live(tmp_path: Path) -> None:
    """The compiler lists several outputs in an order that changes from build to build."""
    names = ("first", "second_output", "third")
    kind = TensorProto.FLOAT
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["x"], [names[0]]),
            helper.make_node("Sigmoid", ["x"], [names[1]]),
            helper.make_node("Tanh", ["x"], [names[2]]),
        ],
        "three",
        [helper.make_tensor_value_info("x", kind, [4, 8])],
        [helper.make_tensor_value_info(name, kind, [4, 8]) for name in names],
    )
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "three.onnx",
    )
    model = prepare(tmp_path / "three.onnx", cache=tmp_path)
    knobs = ["-mha_fusion:v2", "-group_norm:tma_kernel", "-lower_grouped_deconv", "-slice_elim"]
    found = live(model, knobs=knobs, jobs=1, cache=tmp_path)
    assert found.live == ()
    assert len(found.identical) == 4


@needs_rtx
@pytest.mark.parametrize(
    ("options", "word"),
    [({"jobs": 0}, "jobs 0"), ({"compute_capability": "9.0"}, r"allowed: .*8\.9")],
)
def test_bad_input_is_refused(
    tiny: Model, tmp_path: Path, options: dict[str, object], word: str
) -> None:
    with pytest.raises(InputError, match=word):
        live(tiny, cache=tmp_path, knobs=["-slice_fusion"], **options)  # type: ignore[arg-type]


@needs_rtx
def test_refused_model_is_an_error(tiny: Model, tmp_path: Path) -> None:
    proto = load(str(tiny.path))
    proto.graph.node[-1].op_type = "Bernoulli"
    del proto.graph.node[-1].input[1]
    (tmp_path / "model").mkdir()
    save(proto, tmp_path / "model" / "model.onnx")
    bad = Model("bad", "0" * 64, tmp_path / "model", tiny.inputs, tiny.outputs)
    with pytest.raises(ModelError, match="Bernoulli"):
        live(bad, knobs=["-slice_fusion"], cache=tmp_path)


def test_without_the_compiler_the_extra_is_named(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(MissingExtraError, match=r"routepilot\[rtx\]"):
        live(tiny, cache=tmp_path)


# --- a hostile compiler ---


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(module: str, *arguments: object) -> Child:
        return Child("hostile_liveness_child", *arguments)  # type: ignore[arg-type]

    monkeypatch.setenv("PYTHONPATH", str(Path(hostile_liveness_child.__file__).parent))
    monkeypatch.setattr(liveness_pool, "Child", child)
    monkeypatch.setattr(liveness, "compiler_version", lambda: "hostile")
    monkeypatch.setattr(liveness_pool, "DEADLINE_SECONDS", 1.0)


def sweep(model: Model, cache: Path, *names: str) -> Liveness:
    return live(model, knobs=names, jobs=1, cache=cache)


@pytest.mark.usefixtures("hostile")
def test_crash_and_hang_cost_only_their_change(tiny: Model, tmp_path: Path) -> None:
    names = ("-kgen:tiling", "-concat_elim", "-split_elim", "-copy_ppg")
    found = sweep(tiny, tmp_path, *names)
    assert found.live == ("-split_elim=off",)
    assert found.identical == ("-copy_ppg=off",)
    assert "SIGSEGV" in found.failed["-kgen:tiling=0"]
    assert "no answer within" in found.failed["-kgen:tiling=1"]
    assert found.failed["-concat_elim=off"] == "CHECK failed"
    (kept,) = tmp_path.glob("*.json")
    stored = json.loads(kept.read_text())
    assert "-kgen:tiling=0" in stored
    assert "-kgen:tiling=1" not in stored  # a slow machine is not the model's fault


@pytest.mark.usefixtures("hostile")
def test_leaking_compiler_is_not_believed(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="changed within one process"):
        sweep(tiny, tmp_path, "-slice_fusion", "-copy_ppg")
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((3, 3), "not by the kernel for want of memory"),
        ((3, 4), "killed by the system, out of memory"),
    ],
)
def test_a_killed_compile_is_tried_again_and_blamed_on_who_killed_it(
    tiny: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int, int],
    words: str,
) -> None:
    before, after = counts
    once = tmp_path / "once"
    monkeypatch.setenv("HOSTILE_ONCE", str(once))
    monkeypatch.setenv("HOSTILE_KILLS", "-lower_grouped_deconv=off")
    monkeypatch.setattr(child_module, "memory_kills", lambda: after if once.exists() else before)
    found = sweep(tiny, tmp_path, "-slice_elim", "-copy_ppg")
    assert found.failed == {}  # killed once, then compiled
    assert found.identical == ("-slice_elim=off", "-copy_ppg=off")
    once.unlink()
    counted = iter(range(before, 100) if after > before else [before] * 100)
    monkeypatch.setattr(child_module, "memory_kills", lambda: next(counted))
    found = sweep(tiny, tmp_path, "-lower_grouped_deconv", "-split_elim")
    assert words in found.failed["-lower_grouped_deconv=off"]
    assert found.live == ("-split_elim=off",)
    (kept,) = tmp_path.glob("*.json")
    assert "-lower_grouped_deconv=off" not in json.loads(kept.read_text())


@needs_rtx
def test_the_real_compiler_is_killed_by_the_kernel(
    tiny: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_small_group: Callable[[int], type[Child]],
) -> None:
    """TensorRT-RTX in a control group too small for it: nothing here is made up."""
    before = child_module.memory_kills()
    monkeypatch.setattr(liveness_pool, "Child", in_small_group(32 << 20))
    with pytest.raises(MachineError, match="did not come to be here: killed by the system, out"):
        sweep(tiny, tmp_path, "-copy_ppg")
    assert before is not None and (child_module.memory_kills() or 0) >= before + 2
    assert list(tmp_path.glob("*.json")) == []  # nothing is known of the model


@pytest.mark.usefixtures("hostile")
def test_a_default_that_is_killed_is_no_fault_of_the_model(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "memory_kills", lambda: 3)
    asked: list[str] = []
    ask = Child.ask

    def killed_before_the_default(
        self: Child, request: Mapping[str, object], deadline: float
    ) -> dict[str, object] | Ended:
        asked.append(str(request.get("flags")))
        if request.get("flags") == "":
            os.kill(self.process.pid, signal.SIGKILL)
        return ask(self, request, deadline)

    monkeypatch.setattr(Child, "ask", killed_before_the_default)
    with pytest.raises(MachineError, match="not by the kernel for want of memory"):
        sweep(tiny, tmp_path, "-copy_ppg")
    assert asked.count("") == 2  # it was tried again
    # Killed at the check that ends a sweep: what came before it is not believed.
    monkeypatch.setattr(Child, "ask", _killed_at_the_check(ask))
    with pytest.raises(MachineError, match="could not be compiled again"):
        sweep(tiny, tmp_path, "-copy_ppg")


def _killed_at_the_check(ask: Callable[..., object]) -> Callable[..., object]:
    defaults: list[int] = []

    def wrapped(self: Child, request: Mapping[str, object], deadline: float) -> object:
        if request.get("flags") == "":
            defaults.append(self.process.pid)
            if len(defaults) == 2:
                os.kill(self.process.pid, signal.SIGKILL)
        return ask(self, request, deadline)

    return wrapped
