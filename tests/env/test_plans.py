"""Plans on disk: once, whole, ours."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, load, numpy_helper, save

from routepilot.env import ours
from routepilot.env.errors import InputError, MachineError
from routepilot.env.plans import copy_onnx, keep_plan, keep_source, read_plan, source_name

DATA = b"an engine"
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ours, "_folder", lambda kind: tmp_path / "notes" / kind)
    return tmp_path / "notes"


def test_equal_bytes_are_written_once_and_are_ours(tmp_path: Path) -> None:
    place = keep_plan(DATA, DIGEST, tmp_path)
    born = place.stat().st_mtime_ns
    assert keep_plan(DATA, DIGEST, tmp_path) == place
    assert place.stat().st_mtime_ns == born
    assert read_plan(place) == DATA
    assert read_plan(place, expected=DIGEST) == DATA


def test_strangers_and_changed_plans_are_refused(tmp_path: Path, notes: Path) -> None:
    place = keep_plan(DATA, DIGEST, tmp_path)
    place.write_bytes(DATA + b"!")
    with pytest.raises(InputError, match="changed since"):
        read_plan(place, expected=DIGEST)
    with pytest.raises(InputError, match="--trust"):
        read_plan(place)
    assert read_plan(place, trust=True) == DATA + b"!"
    with pytest.raises(InputError, match="cannot be read"):
        read_plan(tmp_path / "none.plan")


def test_a_full_disk_is_told_from_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            keep_plan(DATA, DIGEST, tmp_path)
    assert list((tmp_path / "plans").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be kept"):
        keep_plan(DATA, DIGEST, tmp_path / "file")


def test_sources_come_with_their_weights(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, [1, 64])],
        [value("y", TensorProto.FLOAT, [1, 64])],
        [weight],
    )
    (tmp_path / "from").mkdir()
    source = tmp_path / "from" / "source.onnx"
    save(helper.make_model(graph), source, save_as_external_data=True, location="w.data")
    place = keep_source(source, "fp16", tmp_path / "work")
    assert place == tmp_path / "work" / source_name("fp16")
    assert len(load(str(place)).graph.initializer[0].raw_data) == 4 * 64 * 64
    place.unlink()
    assert copy_onnx(source, place.parent) == ["model.onnx", "w.data"]
