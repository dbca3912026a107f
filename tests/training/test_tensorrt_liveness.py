"""Liveness over TensorRT: it orders the walk, and `knobs` and `live` tell of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorrt_commands import FAKE, needs_rtx, routepilot

from routepilot.env.errors import MissingExtraError
from routepilot.env.liveness import live
from routepilot.env.liveness_table import (
    LivenessCard,
    LivenessTable,
    load_liveness,
    save_liveness,
)
from routepilot.training import cli, defaults
from routepilot.training.inputs import prepare_model

pytestmark = pytest.mark.usefixtures("own_cache")


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
    assert "first comes 1 knob that `routepilot live` found live" in " ".join(done.stderr.split())


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


LIVENESS = ("--backend", "fake_tensorrt_backends:make_with_liveness")


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
    assert "1 change fails" in text
    assert "Myelin" in text
    assert "2 changes leave the engine as it is" in text
    assert "-cask*, -tactic:* and much of -mha_fusion:v2:*" in text
    data = json.loads(shown("--json"))
    assert (data["corpus_models"], data["corpus_live"]) == (1, {"-kgen:tiling=0": 0})
