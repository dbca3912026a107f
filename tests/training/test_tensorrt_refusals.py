"""What verbs over TensorRT refuse, and what the doctor finds: on a fake, or without a GPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import fake_tensorrt
import pytest
from tensorrt_commands import FAKE, needs_rtx, no_gpu, one_line, routepilot, tuned

from routepilot.env.child import memory_kills

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-O", "colour=red"), ("'colour' does not exist", "workspace_mib")),
        (("-O", "workspace_mib"), ("name=value",)),
        (("-O", "workspace_mib=big"), ("give a number",)),
        (("-O", "channel=lunowud", "-O", "channel=build_route"), ("a second time",)),
        (("--expression", "-no_such_knob=[a|b]"), ("-no_such_knob", "not in the")),
        (("--expression", "-cask_fusion:num_tactics=[a]"), ("not allowed",)),
        (("--expression", "-kgen:tiling=[0|1"), ("no ']'",)),
        (("--expression", "-a=b", "--expression-file", "f"), ("exclude each other",)),
        (("--expression-file", "nowhere.txt"), ("nowhere.txt",)),
    ],
)
def test_bad_options_are_refused_in_one_line(
    options: tuple[str, ...], words: tuple[str, ...], tiny_file: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    one_line(routepilot("tune", str(tiny_file), *FAKE, "-o", out, *options), 2, *words)
    assert not Path(out).exists()


def test_a_model_that_the_parser_refuses_is_told_by_node(tmp_path: Path) -> None:
    model = fake_tensorrt.if_model(tmp_path / "if.onnx")
    done = routepilot("tune", str(model), *FAKE, "-o", str(tmp_path / "out"))
    one_line(done, 2, "default route", "node 'fork' (If)", "not supported")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("make_without_gpu", ("cannot build without an NVIDIA GPU", "routepilot live")),
        ("make_windows", ("no Global Performance Tuner", "use Linux", "channel=lunowud")),
        ("make_old", ("tensorrt 8.6.1 is too old", "supported is 10.8", "upgrade")),
    ],
)
@pytest.mark.parametrize("verb", ["tune", "compare"])
def test_machines_that_cannot_are_told_in_one_line(
    verb: str, kind: str, words: tuple[str, ...], tiny_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "out"
    agents = ("--agents", "fast") if verb == "compare" else ()
    done = routepilot(
        verb, str(tiny_file), "--backend", f"fake_tensorrt_backends:{kind}", "-o", str(out), *agents
    )
    # A machine without a device is at fault itself (1); the others are a request too many (2).
    one_line(done, 1 if kind == "make_without_gpu" else 2, *words)
    assert not out.parent.exists()


def test_a_hung_and_a_killed_compiler_are_outcomes(tiny_file: Path, tmp_path: Path) -> None:
    done = routepilot(
        *("tune", str(tiny_file), "--backend", "fake_tensorrt_backends:make_deadly"),
        *("-o", str(tmp_path / "out"), "--deadline", "4", "--json", "--agent", "fast"),
        *("--expression", "-conv_lowering=[on|off] -kgen:tiling=[0|1|2]", "--max-builds", "3"),
    )
    result = tuned(done)
    trials = {trial["route"]: trial for trial in result["trials"]}
    assert trials["-kgen:tiling=0"]["status"] == "timed_out"
    assert "no answer within 4 s" in trials["-kgen:tiling=0"]["reason"]
    ending = trials["-kgen:tiling=1"]
    if memory_kills() is None:  # a kernel that does not say whom it killed
        assert ending["status"] == "out_of_memory"
    else:  # the fake kills itself: no want of memory
        assert ending["status"] == "killed"
        assert "not by the kernel for want of memory" in ending["reason"]
    assert trials["-conv_lowering=off"]["status"] == "ok"  # the run goes on
    assert result["is_default"]


@needs_rtx
@no_gpu
@pytest.mark.parametrize("verb", [("tune",), ("compare", "--agents", "fast")])
def test_without_a_gpu_nothing_is_timed_and_the_way_on_is_named(
    verb: tuple[str, ...], tiny_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = routepilot(*verb, str(tiny_file), "--backend", "tensorrt_rtx", "-o", str(out))
    one_line(done, 2, "cannot time without an NVIDIA GPU", "routepilot live", "routepilot doctor")
    assert not out.exists()  # a refusal leaves nothing behind


@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="TensorRT is installed")
def test_without_tensorrt_the_extra_is_named(tiny_file: Path, tmp_path: Path) -> None:
    done = routepilot("tune", str(tiny_file), "--backend", "tensorrt", "-o", str(tmp_path / "o"))
    one_line(done, 2, "routepilot[tensorrt]")
    assert not (tmp_path / "o").exists()
    done = routepilot("doctor", "--backend", "tensorrt", "--json")
    assert done.returncode == 1
    found = {check["check"]: check["status"] for check in json.loads(done.stdout)}
    assert found["import"] == "fail"
    assert found["timing A/A"] == found["a run goes on where it was"] == "unavailable"
    # For people: the same checks, a line each, with what to do.
    lines = routepilot("doctor", "--backend", "tensorrt").stdout.splitlines()
    assert [line.split(None, 1)[0] for line in lines] == list(found.values())
    for line, check in zip(lines, found, strict=True):
        assert f"{check}: " in line
    assert "routepilot[tensorrt]" in next(line for line in lines if line.startswith("fail"))
    assert "see the check: import" in lines[-1]  # the one to mend, not the first optional package
    assert all("[to do: " in line for line in lines if line.startswith("unavailable"))


@pytest.mark.parametrize(
    ("backend", "option", "words"),
    [
        ("tensorrt", "colour=red", ("'colour' does not exist", "workspace_mib")),
        ("tensorrt", "workspace_mib=big", ("give a number",)),
        ("tensorrt_rtx", "channel=build_route", ("has no build_route",)),
        pytest.param("tensorrt_rtx", "capability=9.9", ("'9.9'", "allowed: "), marks=needs_rtx),
        ("cpu", "colour=red", ("'colour' does not exist", "threads")),
    ],
)
def test_doctor_refuses_an_option_in_one_line(
    backend: str, option: str, words: tuple[str, ...]
) -> None:
    one_line(routepilot("doctor", "--backend", backend, "-O", option), 2, *words)


@needs_rtx
def test_doctor_prints_nothing_but_its_checks() -> None:
    done = routepilot("doctor", "--backend", "tensorrt_rtx")
    assert done.stderr == ""
    kinds = {line.split(None, 1)[0] for line in done.stdout.splitlines()}
    assert kinds <= {"pass", "fail", "unavailable"}
    assert "unknown option" in done.stdout


@needs_rtx
@no_gpu
def test_doctor_without_a_gpu(tmp_path: Path) -> None:
    done = routepilot("doctor", "--backend", "tensorrt_rtx", "--json")
    assert done.returncode == 0, done.stdout
    found = {check["check"]: check for check in json.loads(done.stdout)}
    assert found["kill and resume a compile"]["status"] == "pass"
    assert found["timing A/A"]["status"] == "unavailable"
    assert found["timing A/A"]["hint"]
    assert found["noise floor"]["hint"] == "see the check: GPU and driver"


def test_a_strangers_engine_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "engine.plan"
    plan.write_bytes(b"code of nobody knows whom")
    one_line(routepilot("engine", str(plan)), 2, "--trust")
    one_line(routepilot("engine", str(tmp_path / "none.plan")), 2, "cannot be read")
    one_line(routepilot("engine", str(plan), "--backend", "cpu"), 2, "has no plan files")
