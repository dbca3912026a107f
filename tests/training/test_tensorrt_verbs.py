"""The command line over TensorRT: on a fake of it, on TensorRT-RTX without a GPU, and its refusals.

Verbs on the fake run in processes of their own, so that no other test finds it installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fake_gpu
import fake_tensorrt
import pytest

from routepilot.env.backends import load_backend
from routepilot.env.backends.base import BuildFailure
from routepilot.env.child import memory_kills
from routepilot.env.errors import MissingExtraError
from routepilot.env.liveness import live
from routepilot.env.liveness_table import (
    LivenessCard,
    LivenessTable,
    load_liveness,
    save_liveness,
)
from routepilot.env.models import Model
from routepilot.training import cli, defaults
from routepilot.training.inputs import prepare_model
from routepilot.training.manifest import manifest

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="the extra rtx is not installed"
)
no_gpu = pytest.mark.skipif(find_spec("cuda") is not None, reason="may have a GPU")

FAKE = ("--backend", "fake_tensorrt:make")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `routepilot live` found on this machine before would order the walks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


def routepilot(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    tests = str(Path(fake_tensorrt.__file__).parent)
    return subprocess.run(
        [sys.executable, "-m", "routepilot", *arguments],
        env={**os.environ, "PYTHONPATH": tests, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("routepilot: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0], done.stderr


def tuned(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def test_tune_on_the_fake_wins_and_says_how_trtexec_builds_it(
    tiny_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ("tune", str(tiny_file), *FAKE, "-o", str(out), "--max-builds", "3", "--json")
    expression = "-conv_lowering=[on|off] -kgen:tiling=[0|1|2]"
    stray = {"__LUNOWUD": "-stray=1"}
    result = tuned(routepilot(*arguments, "--expression", expression, "--agent", "fast", **stray))
    # The order of the published example, the default aside.
    routes = [trial["route"] for trial in result["trials"]]
    assert routes == ["-kgen:tiling=0", "-kgen:tiling=1", "-conv_lowering=off"]
    assert result["route"] == "-kgen:tiling=0"
    assert result["speedup"] > 1.3
    assert result["manifest"]["stray_flags"] == "-stray=1"
    assert "a fake timer" in result["trials"][0]["reason"]  # an engine's notes are kept
    # No build of another process can run between two blocks of a measurement.
    assert all(fake_gpu.WHOLE in trial["reason"] for trial in result["trials"])
    assert result["trtexec"] == (
        "trtexec --onnx=deploy/model.onnx --timingCacheFile=deploy/timing.cache --avgTiming=1"
        " --setBuildRoute=-kgen:tiling=0 --saveEngine=rebuilt.plan"
    )
    # Every trial has its line, and the file it names is there.
    lines = [trial["trtexec"] for trial in result["trials"]]
    start = "trtexec --onnx=work/onnx/model/model.onnx --timingCacheFile=work/timing.cache"
    assert lines[2] == f"{start} --avgTiming=1 --setBuildRoute=-conv_lowering=off"
    assert (out / "work" / "onnx" / "model" / "model.onnx").is_file()
    page = (out / "report.html").read_text()
    assert all(line in page for line in lines)
    assert "--setBuildRoute=-kgen:tiling=0" in page
    # Every engine is kept under its hash.
    plans = {plan.stem for plan in (out / "work" / "plans").iterdir()}
    assert {trial["engine_hash"] for trial in result["trials"]} <= plans
    assert "a fake timer" in page
    written = {item.name for item in (out / "deploy").iterdir()}
    assert {"engine.plan", "inputs.npz", "load.py", "model.onnx", "timing.cache"} <= written
    assert "apply_route.py" in written
    assert (out / "work" / "timing.cache").is_file()  # shared by the trials
    # A stranger's engine is not loaded; this one, in another home, is a stranger's.
    plan = str(out / "deploy" / "engine.plan")
    one_line(routepilot("engine", plan, XDG_DATA_HOME=str(tmp_path)), 2, "--trust")


def test_explain_on_the_fake_shows_tactics_and_counts_the_builds_to_see_them(
    tiny_file: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    few = ("--expression", "-kgen:tiling=[0|1|2]", "--agent", "fast", "--max-builds", "1")
    assert tuned(routepilot("tune", str(tiny_file), *FAKE, "-o", out, *few, "--json"))["route"]
    found = tuned(routepilot("explain", out, "--json"))
    winner = found["engines"]["winner"]
    assert "-kgen:tiling=0" in winner["costliest"][0]["kernel"]
    assert winner["nodes"]["CaskConvolution"] == 1
    assert found["engines"]["default"]["sum_ms"] == pytest.approx(2 * winner["sum_ms"])
    # The winner and what is left without its knob (again, if a busy machine hides the effect); then
    # both engines, each twice.
    assert found["builds"] - 4 in (2, 3)
    shown = routepilot("explain", out)
    assert shown.returncode == 0, shown.stderr
    assert "costliest layers of the winner" in shown.stdout
    assert "% of the profiled whole" in shown.stdout


def test_compare_asks_the_policy_for_any_catalog(tiny_file: Path, tmp_path: Path) -> None:
    words = ("compare", str(tiny_file), *FAKE, "-o", str(tmp_path / "out"), "--max-builds", "2")
    rows = tuned(routepilot(*words, "--agents", "default,ppo", "--json"))["agents"]
    assert rows["ppo"]["builds"] == 2


def test_compare_says_how_trtexec_builds_each_answer(tiny_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    words = ("compare", str(tiny_file), *FAKE, "-o", str(out), "--max-builds", "3")
    expression = "-conv_lowering=[on|off] -kgen:tiling=[0|1|2]"
    chosen = ("--expression", expression, "--agents", "default,fast")
    rows = tuned(routepilot(*words, *chosen, "--json"))["agents"]
    assert rows["fast"]["trtexec"].endswith("--avgTiming=1 --setBuildRoute=-kgen:tiling=0")
    assert rows["default"]["trtexec"].endswith("--timingCacheFile=work/timing.cache --avgTiming=1")
    shown = routepilot(*words, *chosen).stdout.replace("\n", "")
    assert f"fast by trtexec: {rows['fast']['trtexec']}" in shown


def test_a_winner_is_built_again_from_the_timings_beside_it(
    tiny_file: Path, tmp_path: Path
) -> None:
    """What the guide says of a replay, from `deploy/` of one run into another."""
    first = tmp_path / "first"
    words = ("tune", str(tiny_file), "--agent", "fast", "--max-builds", "1", "--json")
    chosen = ("--expression", "-kgen:tiling=[0]")
    won = tuned(routepilot(*words, *chosen, *FAKE, "-o", str(first)))
    assert won["route"] == "-kgen:tiling=0"
    kept = first / "deploy" / "timing.cache"
    replay = ("-O", "timing_cache=replay", "-O", f"cache_file={kept}")
    again = tuned(routepilot(*words, *chosen, *FAKE, "-o", str(tmp_path / "again"), *replay))
    assert again["trials"][0]["engine_hash"] == won["trials"][0]["engine_hash"]
    # What those timings do not hold cannot be built: here the file in another precision.
    other = ("--expression", "-precision=[int8]")
    lost = tuned(routepilot(*words, *other, *FAKE, "-o", str(tmp_path / "other"), *replay))
    (trial,) = lost["trials"]
    assert trial["status"] == "build_failed"
    assert "timing cache miss" in trial["reason"]


def test_equal_bytes_are_measured_once_over_runs(tiny_file: Path, tmp_path: Path) -> None:
    """`-cask_fusion:num_tactics=5` is inert in the fake: with the winner, the same bytes."""
    out = tmp_path / "out"
    words = ("tune", str(tiny_file), *FAKE, "-o", str(out), "--agent", "full", "--json")
    first = tuned(routepilot(*words, "--expression", "-kgen:tiling=[0]", "--max-builds", "1"))
    again = tuned(
        routepilot(
            *(*words, "--max-builds", "1"),
            *("--expression", "-kgen:tiling=[0] -cask_fusion:num_tactics=[5]"),
        )
    )
    (one,), (other,) = first["trials"], again["trials"]
    assert other["route"] == "-kgen:tiling=0 -cask_fusion:num_tactics=5"
    assert other["engine_hash"] == one["engine_hash"]
    assert other["speedup"] == one["speedup"]  # the very figure, not a second measurement
    assert len(list((out / "work" / "plans").glob(f"{one['engine_hash']}*"))) == 1


def test_plans_of_losers_can_be_left_out(tiny_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("tune", str(tiny_file), *FAKE, "-o", str(out), "--max-builds", "1", "--json")
    result = tuned(routepilot(*words, "-O", "plans=winner", "--agent", "recentred"))
    assert not (out / "work" / "plans").exists()
    assert "--onnx=model.onnx" in result["trials"][0]["trtexec"]


def test_coordinate_descent_skips_what_a_run_proved_inert(tiny_file: Path, tmp_path: Path) -> None:
    done = routepilot(
        *("tune", str(tiny_file), *FAKE, "-o", str(tmp_path / "out"), "--max-builds", "30"),
        *("--json", "--agent", "recentred", "-O", "optimization_level=2"),
    )
    result = tuned(done)
    assert "--builderOptimizationLevel=2" in result["trtexec"]
    routes = [trial["route"] for trial in result["trials"]]
    assert routes[0] == "-precision=fp16"  # then what is likely to act, by the corpus
    carried = [route for route in routes if "-cask_fusion:num_tactics=5" in route.split()]
    assert len(carried) == 1  # tried once, and in no route that came after
    assert not any("-builder_optimization_level" in route for route in routes)


def test_replay_of_timings_that_are_not_there_is_refused(tiny_file: Path, tmp_path: Path) -> None:
    arguments = ("tune", str(tiny_file), *FAKE, "-o", str(tmp_path / "out"))
    nowhere = f"cache_file={tmp_path / 'no.cache'}"
    one_line(
        routepilot(*arguments, "-O", "timing_cache=replay", "-O", nowhere), 2, "does not exist"
    )
    stranger = tmp_path / "stranger.cache"
    stranger.write_bytes(b"of another GPU")
    done = routepilot(*arguments, "-O", f"cache_file={stranger}")
    one_line(done, 2, "does not fit this device")


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
        verb, str(tiny_file), "--backend", f"fake_tensorrt:{kind}", "-o", str(out), *agents
    )
    # A machine without a device is at fault itself (1); the others are a request too many (2).
    one_line(done, 1 if kind == "make_without_gpu" else 2, *words)
    assert not out.parent.exists()


def test_a_hung_and_a_killed_compiler_are_outcomes(tiny_file: Path, tmp_path: Path) -> None:
    done = routepilot(
        *("tune", str(tiny_file), "--backend", "fake_tensorrt:make_deadly"),
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


def test_an_own_engine_is_run_and_timed(
    tiny: Model,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_tensorrt.install(monkeypatch)
    backend = load_backend("tensorrt")
    built = backend.build(tiny, backend.catalog().parse(""), tmp_path)
    assert not isinstance(built, BuildFailure)
    built.save(tmp_path)
    plan = str(tmp_path / "engine.plan")
    monkeypatch.setattr(sys, "argv", ["routepilot", "engine", plan, "--json", "--seconds", "0.05"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    shown = json.loads(capsys.readouterr().out)
    assert shown["outputs"] == {"y": [1, 10]}
    assert shown["latency_ms"] > 0
    assert shown["notes"] == ["a fake timer"]


def trials(done: subprocess.CompletedProcess[str], out: Path) -> list[str]:
    """Routes of a run that was told to speak, in the order built."""
    assert done.returncode == 0, done.stderr
    return [trial["route"] for trial in json.loads((out / "result.json").read_text())["trials"]]


def test_live_knobs_come_first_in_coordinate_descent(tiny_file: Path, tmp_path: Path) -> None:
    """A sweep by TensorRT-RTX of the same model orders the walk of TensorRT's knobs."""
    cache = tmp_path / "cache"
    model = prepare_model(str(tiny_file), None, None, 0).model
    try:
        live(model, knobs=["-kgen:tiling"], jobs=1, cache=cache / "routepilot" / "liveness")
    except MissingExtraError:
        pytest.skip("the extra rtx is not installed")
    done = routepilot(
        *("tune", str(tiny_file), *FAKE, "-o", str(tmp_path / "out"), "--max-builds", "5"),
        *("--agent", "recentred"),
        XDG_CACHE_HOME=str(cache),
    )
    routes = trials(done, tmp_path / "out")
    # The precision of the file comes before every knob.
    assert routes[:3] == ["-precision=fp16", "-precision=bf16", "-precision=int8"]
    assert routes[3].endswith("-kgen:tiling=0")
    assert "first come 1 knob that `routepilot live` found live" in " ".join(done.stderr.split())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A liveness table of one model: `-conv_lowering` acts, tiling and a tactic do not."""
    changes = ("-conv_lowering=off", "-kgen:tiling=0", "-kgen:tiling=1", "-cask:fp16_acc=off")
    made = {
        c: {"hash": c if c == changes[0] else "", "bytes": "1", "seconds": "1"} for c in changes
    }
    answers = {"": {"hash": "d", "bytes": "1", "seconds": "1"}} | {
        change: {**answer, "hash": answer["hash"] or "d"} for change, answer in made.items()
    }
    operators = ("Conv", "Flatten", "GlobalAveragePool", "MatMul", "Relu")
    card = LivenessCard("net", "f" * 64, "net", "train", True, operators, True)
    table = LivenessTable("RTX 1", changes, (card,), {(card.fingerprint, "8.9"): answers})
    save_liveness(table, tmp_path / "liveness.parquet")
    return tmp_path / "liveness.parquet"


LIVENESS = ("--backend", "fake_tensorrt:make_with_liveness")


def test_a_released_liveness_table_orders_the_walk_and_masks_nothing(
    corpus: Path, tiny_file: Path, tmp_path: Path
) -> None:
    done = routepilot(
        *("tune", str(tiny_file), *LIVENESS, "-o", str(tmp_path / "out"), "--max-builds", "40"),
        *("--agent", "recentred", "-O", "optimization_level=3"),
        FAKE_LIVENESS=str(corpus),
    )
    changes = [set(route.split()) for route in trials(done, tmp_path / "out")]

    def first(change: str) -> int:
        return next(i for i, route in enumerate(changes) if change in route)

    order = ("-precision=fp16", "-conv_lowering=off", "-tf32=off", "-cask:fp16_acc=off")
    places = [first(change) for change in (*order, "-kgen:tiling=0")]
    assert places == sorted(places)  # what is likely, levers, what RTX cannot judge, what is not
    said = " ".join(done.stderr.split())
    assert "1 knob that changed no engine of 1 corpus model" in said
    # The other agents are told of it no more than trtexec would be.
    words = ("tune", str(tiny_file), *LIVENESS, "-o", str(tmp_path / "fast"), "--max-builds", "1")
    done = routepilot(*words, "--agent", "fast", FAKE_LIVENESS=str(corpus))
    assert trials(done, tmp_path / "fast") == ["-cask:fp16_acc=off"]
    assert "corpus models" not in done.stderr


def test_knobs_names_what_is_left_out_and_where_knobs_act(corpus: Path) -> None:
    shown = routepilot("knobs", *LIVENESS, FAKE_LIVENESS=str(corpus), COLUMNS="200")
    assert shown.returncode == 0, shown.stderr
    assert "left out, since they can break the mathematics (-O unsafe=on" in shown.stdout
    assert "-mha_fusion:v2:causal_mask asserts a causal mask" in shown.stdout
    assert "2 of these knobs changed no engine of 1 corpus model in RTX 1" in shown.stdout
    assert "1 of them belongs to what it leaves to run time" in shown.stdout
    rows = json.loads(routepilot("knobs", *LIVENESS, "--json", FAKE_LIVENESS=str(corpus)).stdout)
    by_name = {row["name"]: row for row in rows}
    assert by_name["-conv_lowering"]["corpus_live"] == by_name["-kgen:tiling"]["corpus_models"] == 1
    assert by_name["-kgen:tiling"]["corpus_live"] == 0
    assert "corpus_live" not in by_name["-precision"]
    unsafe = routepilot("knobs", *LIVENESS, "-O", "unsafe=on", FAKE_LIVENESS=str(corpus))
    assert "left out" not in unsafe.stdout


@needs_rtx
def test_live_gives_the_compilers_words_and_the_corpus(
    corpus: Path,
    tiny_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(defaults, "released_liveness", lambda: load_liveness(corpus))
    knobs = "-kgen:tiling,-formats:reduce_dop,-slice_fusion"
    words = ["routepilot", "live", str(tiny_file), "--knobs", knobs, "--jobs", "1", "--quiet"]

    def shown(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", [*words, "--cache", str(tmp_path), *more])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        return capsys.readouterr().out

    text = " ".join(shown().split())
    assert "-kgen:tiling=0" in text
    assert "on 0 of 1 model" in text
    assert "1 changes fail" in text
    assert "Myelin" in text
    assert "2 changes leave the engine as it is" in text
    assert "-cask*, -tactic:* and much of -mha_fusion:v2:*" in text
    data = json.loads(shown("--json"))
    assert (data["corpus_models"], data["corpus_live"]) == (1, {"-kgen:tiling=0": 0})


def test_stray_flags_are_in_every_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("__LUNOWUD", "-stray=1")
    assert manifest()["stray_flags"] == "-stray=1"
    monkeypatch.delenv("__LUNOWUD")
    assert "stray_flags" not in manifest()


def test_a_strangers_engine_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "engine.plan"
    plan.write_bytes(b"code of nobody knows whom")
    one_line(routepilot("engine", str(plan)), 2, "--trust")
    one_line(routepilot("engine", str(tmp_path / "none.plan")), 2, "cannot be read")
    one_line(routepilot("engine", str(plan), "--backend", "cpu"), 2, "has no plan files")
