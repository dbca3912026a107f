"""Probes: a known error, the file that keeps them, and children that end badly."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from routepilot.env import probes
from routepilot.env.features import PROBES, model_features
from routepilot.env.models import Model
from routepilot.env.probes import LARGEST, NAMES, SMALLEST, UNKNOWN, measure, probes_of

#: Sound values, none of which a real probe gives.
KEPT = {name: -1.4 - number / 8 for number, name in enumerate(NAMES)}

#: A weight with one bit more than bf16 has; fp16 has it.
FINE = 1 + 2**-9


def folder_of(
    place: Path, weight: np.ndarray, sets: list[np.ndarray], wanted: list[np.ndarray] | None = None
) -> Path:
    """A prepared model's folder as far as probes read it: y = x @ weight."""
    place.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, len(weight)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, weight.shape[1]])],
        [numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), place / "model.onnx")
    references = wanted or [one @ weight for one in sets]
    for number, (x, y) in enumerate(zip(sets, references, strict=True)):
        np.savez(place / f"selection_{number}.npz", x=x)
        np.savez(place / f"reference_selection_{number}.npz", y=y)
    return place


def one_hot(place: int, value: float = 1.0) -> np.ndarray:
    found = np.zeros((1, 2), np.float32)
    found[0, place] = value
    return found


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A folder whose first set meets the weight FINE, whose second the weight 1/2."""
    weight = np.array([[FINE], [0.5]], np.float32)
    return folder_of(tmp_path / "dense", weight, [one_hot(0), one_hot(1)])


def made(folder: Path) -> dict[str, float]:
    """What this process measures."""
    found: dict[str, float] = {}
    measure(folder, found.__setitem__)
    return found


def child_that(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have the probes' child run another program."""
    command = [sys.executable, "-c", f"import os, sys, time\n{program}"]
    monkeypatch.setattr(probes, "module_command", lambda module: command)


def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str) -> list[str]:
        raise AssertionError("a child was started")

    monkeypatch.setattr(probes, "module_command", refuse)


# Errors ------------------------------------------------------------------------------------------


def test_errors_by_hand(dense: Path) -> None:
    found = made(dense)
    assert found["bf16"] == pytest.approx(math.log10((FINE - 1) / FINE), abs=1e-6)
    # The step is FINE / 127: FINE keeps its value, 1/2 becomes 63 steps. Inputs of 0 and 1 are
    # exact in integers.
    step = FINE / 127
    by_hand = math.log10((0.5 - 63 * step) / 0.5)
    assert found["int8_weights"] == pytest.approx(by_hand, abs=1e-4)
    assert found["int8_matmul"] == pytest.approx(by_hand, abs=1e-4)
    assert found["fp16"] == found["int8_conv"] == SMALLEST  # nothing is lost
    assert tuple(found) == NAMES  # heard in their order


def test_only_the_first_sets_count(tmp_path: Path) -> None:
    weight, small = np.array([[FINE], [0.5]], np.float32), [one_hot(1)] * probes.SETS
    few = made(folder_of(tmp_path / "few", weight, small))
    more = made(folder_of(tmp_path / "more", weight, [*small, one_hot(0)]))
    assert few == more and few["bf16"] == SMALLEST


@pytest.mark.parametrize(
    "wanted", [np.zeros((1, 1), np.float32), np.ones((2, 1), np.float32)], ids=["zero", "shape"]
)
def test_the_worst_that_is_told_apart(dense: Path, wanted: np.ndarray) -> None:
    np.savez(dense / "reference_selection_1.npz", y=wanted)
    assert set(made(dense).values()) == {LARGEST}


def test_outputs_that_are_not_finite_are_the_worst(tmp_path: Path) -> None:
    weight = np.array([[60000.0], [0.0]], np.float32)
    found = made(folder_of(tmp_path / "large", weight, [one_hot(0, 2.0)]))
    assert found["fp16"] == LARGEST  # 120000 is infinite there
    assert found["bf16"] < -2


def test_a_real_model_in_a_child_of_its_own(tiny: Model, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny.folder.iterdir():
        if file.name != probes.FILE:
            (folder / file.name).write_bytes(file.read_bytes())
    found = probes_of(folder)
    assert found == made(folder) and tuple(found) == NAMES
    assert all(SMALLEST < value < -1 for value in found.values())
    assert found["fp16"] < found["bf16"]  # three more bits
    assert json.loads((folder / probes.FILE).read_text()) == found
    copy = Model(tiny.name, tiny.fingerprint, folder, tiny.inputs, tiny.outputs)
    assert model_features(copy)[PROBES] == tuple(found.values())


# The file ----------------------------------------------------------------------------------------


def test_what_was_made_is_kept(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = probes_of(dense)
    no_child(monkeypatch)
    assert probes_of(dense) == first and first["bf16"] < -2
    (dense / probes.FILE).write_text(json.dumps(KEPT))
    assert probes_of(dense) == KEPT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        json.dumps(KEPT)[:-9],
        "[]",
        "{}",
        "null",
        json.dumps(list(KEPT.values())),
        json.dumps({name: KEPT[name] for name in NAMES[:-1]}),
        json.dumps({**KEPT, "int4": -1.0}),
        json.dumps({**KEPT, "bf16": math.nan}),
        json.dumps({**KEPT, "bf16": -math.inf}),
        json.dumps({**KEPT, "bf16": LARGEST + 0.1}),
        json.dumps({**KEPT, "bf16": SMALLEST - 0.1}),
        json.dumps({**KEPT, "bf16": "-2"}),
        json.dumps({**KEPT, "bf16": None}),
    ],
)
def test_a_file_that_is_not_sound_is_made_anew(
    text: str, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{name} {value}" for name, value in KEPT.items()]
    child_that(monkeypatch, f"print({chr(10).join(lines)!r})")
    (dense / probes.FILE).write_text(text)
    assert probes_of(dense) == KEPT
    assert json.loads((dense / probes.FILE).read_text()) == KEPT


def test_a_file_that_is_no_text_is_made_anew(dense: Path) -> None:
    (dense / probes.FILE).write_bytes(b"\xff\xfe\x00" * 40)
    assert probes_of(dense) == made(dense)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=6,
)


@settings(max_examples=50)
@given(JSON | st.fixed_dictionaries(dict.fromkeys(NAMES, st.floats())))
def test_whatever_is_read_is_sound(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    place = tmp_path_factory.getbasetemp() / "read.json"
    place.write_text(json.dumps(value))
    found, tries = probes._read(place)
    assert set(found) == set(NAMES) and tries >= 0
    assert all(SMALLEST <= number <= LARGEST for number in found.values())


def test_what_failed_for_a_while_is_tried_again_at_the_next_run_and_it_alone(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "open(sys.argv[1] + '/asked', 'a').write(' '.join(sys.argv[3:]) + '\\n')\n"
    child_that(monkeypatch, f"{asked}print('bf16 -2.5', flush=True)\nos.abort()")
    probes_of(dense)
    assert probes.are_due(dense)
    lines = "\n".join(f"{name} {KEPT[name]}" for name in NAMES)
    child_that(monkeypatch, f"{asked}print({lines!r})")
    assert probes_of(dense) == {**KEPT, "bf16": -2.5}, "what was known stays"
    assert json.loads((dense / probes.FILE).read_text()) == {**KEPT, "bf16": -2.5}
    assert (dense / "asked").read_text().splitlines() == [" ".join(NAMES), " ".join(NAMES[1:])]
    no_child(monkeypatch)
    assert not probes.are_due(dense) and probes_of(dense)["fp16"] == KEPT["fp16"]


def test_what_always_fails_is_tried_so_often_and_no_more(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child_that(monkeypatch, "open(sys.argv[1] + '/runs', 'a').write('.'); os.abort()")
    for _ in range(probes.MOST_TRIES + 3):
        assert probes_of(dense) == dict.fromkeys(NAMES, UNKNOWN)
    assert (dense / "runs").read_text() == "." * probes.MOST_TRIES
    assert not probes.are_due(dense)


def test_a_file_without_tries_was_tried_once(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (dense / probes.FILE).write_text(json.dumps({**KEPT, "fp16": UNKNOWN}))
    child_that(monkeypatch, "print('fp16', -float(len(sys.argv[3:])))")
    assert probes_of(dense) == {**KEPT, "fp16": -1.0}


def test_a_folder_that_cannot_be_written_costs_them_again(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dense / probes.FILE / "in the way").mkdir(parents=True)  # root may write anywhere else
    child_that(monkeypatch, "open(sys.argv[1] + '/runs', 'a').write('.'); print('bf16 -3')")
    for runs in (1, 2):
        assert probes_of(dense) == {**dict.fromkeys(NAMES, UNKNOWN), "bf16": -3.0}
        assert (dense / "runs").read_text() == "." * runs
    assert not list(dense.glob(".draft-*"))


# Children that end badly -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    ["os.abort()", "os.kill(os.getpid(), 9)", "sys.exit(3)", "raise MemoryError"],
)
def test_a_child_that_crashes_costs_what_it_had_not_made(
    end: str, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child_that(monkeypatch, f"print('bf16 -2.5', flush=True)\n{end}")
    found = probes_of(dense)
    assert found == {**dict.fromkeys(NAMES, UNKNOWN), "bf16": -2.5}
    assert json.loads((dense / probes.FILE).read_text()) == {**found, probes.TRIES: 1}


def test_a_child_that_hangs_is_ended(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "open(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))\n"
        "print('fp16 -4.5', flush=True)\ntime.sleep(60)\nprint('bf16 -3')"
    )
    child_that(monkeypatch, program)
    monkeypatch.setattr(probes, "DEADLINE", 1.5)
    start = time.monotonic()
    assert probes_of(dense) == {**dict.fromkeys(NAMES, UNKNOWN), "fp16": -4.5}
    assert time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((dense / "pid").read_text()), 0)


def test_words_of_others_are_no_probes(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["bf16 is not supported", "bf16", "", "int4 -3", "fp16 nan", "int8_conv 9", "\xff"]
    child_that(monkeypatch, f"print({chr(10).join([*said, 'int8_matmul -3.25'])!r})")
    assert probes_of(dense) == {**dict.fromkeys(NAMES, UNKNOWN), "int8_matmul": -3.25}


@pytest.mark.parametrize("file", ["model.onnx", "reference_selection_0.npz"])
def test_a_damaged_folder_is_unknown(file: str, dense: Path) -> None:
    (dense / file).write_bytes(b"damaged")
    assert probes_of(dense) == dict.fromkeys(NAMES, UNKNOWN)


def test_a_graph_that_does_not_run_is_unknown_alone(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: onnx.ModelProto) -> onnx.ModelProto:
        raise RuntimeError("an operator that cannot be rounded")

    whole = made(dense)
    first, *rest = probes.PROBES
    monkeypatch.setattr(probes, "PROBES", ((*first[:2], broken), *rest))
    assert made(dense) == {name: value for name, value in whole.items() if name != first[0]}


# Limits ------------------------------------------------------------------------------------------


def test_a_model_too_large_is_not_probed(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (dense / "model.onnx").stat().st_size
    (dense / "model.onnx.data").write_bytes(b"0" * 1000)  # weights beside the graph count too
    monkeypatch.setattr(probes, "MOST_BYTES", size + 999)
    assert made(dense) == {}
    monkeypatch.setattr(probes, "MOST_BYTES", size + 1000)
    assert tuple(made(dense)) == NAMES


def test_a_slow_model_gets_the_first_probes_alone(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, heard = made(dense), {}

    def slow(name: str, value: float) -> None:
        heard[name] = value
        if len(heard) == 2:
            monkeypatch.setattr(probes, "PATIENCE", -1.0)

    measure(dense, slow)  # each is said as soon as it is made, so that a killed child leaves it
    assert heard == {name: whole[name] for name in NAMES[:2]}
