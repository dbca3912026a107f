"""What verbs do over TensorRT, on a fake of it: answers, builds that count, an engine by itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fake_gpu
import fake_tensorrt
import pytest
from tensorrt_commands import FAKE, one_line, routepilot, tuned

from routepilot.env.backends import load_backend
from routepilot.env.backends.base import BuildFailure
from routepilot.env.models import Model
from routepilot.training import cli
from routepilot.training.manifest import manifest

pytestmark = pytest.mark.usefixtures("own_cache")


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


def test_stray_flags_are_in_every_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("__LUNOWUD", "-stray=1")
    assert manifest()["stray_flags"] == "-stray=1"
    monkeypatch.delenv("__LUNOWUD")
    assert "stray_flags" not in manifest()
