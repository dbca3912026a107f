"""Trust: nothing that is read runs, nothing is written beside its place, no page runs a script."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import hostile_backend
import numpy as np
import pytest
import synthetic

from routepilot.env.errors import RoutePilotError

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("env", "agents", "training", "checkpoints")

#: Calls and modules that run what they read, or give words to a shell.
FORBIDDEN = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "os.system", "os.popen", "torch.load", "yaml.load", "PPO.load",
    "np.fromfile", "pd.read_pickle", "subprocess.getoutput",
}  # fmt: skip


def test_no_source_reads_what_runs() -> None:
    found = []
    for path in (p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                found += [where for a in node.names if a.name.split(".")[0] in FORBIDDEN]
            elif (
                isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN
            ):
                found.append(where)
            elif isinstance(node, ast.Call):
                words = {k.arg: ast.unparse(k.value) for k in node.keywords}
                found += [where] * (ast.unparse(node.func) in FORBIDDEN_CALLS)
                found += [where] * (words.get("shell") == "True")
                found += [where] * (words.get("allow_pickle") == "True")
    assert not found


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch '{self.place}'",))


def readers() -> dict[str, Any]:
    from routepilot.agents.policy import load_policy
    from routepilot.env.inputs import read_npz
    from routepilot.env.models import Model
    from routepilot.env.normalise import read_model
    from routepilot.env.store import RecordStore
    from routepilot.env.tables import load_table
    from routepilot.env.trtexec import read_tuning_cache
    from routepilot.training.report import write_report

    return {
        "policy.safetensors": load_policy,
        "table.parquet": load_table,
        "records.sqlite": RecordStore,
        "inputs.npz": read_npz,
        "model.onnx": read_model,
        "cache.json": read_tuning_cache,
        "result.json": lambda path: write_report(path.parent),
        "model.json": lambda path: Model.load(path.parent),
    }


@pytest.mark.parametrize("wrapping", ["bare", "zip", "npz", "parquet"])
@pytest.mark.parametrize("name", list(readers()))
def test_a_planted_pickle_does_not_run(name: str, wrapping: str, tmp_path: Path) -> None:
    ran, path = tmp_path / "ran", tmp_path / name
    data = pickle.dumps(Bomb(ran))
    pickle.loads(data)
    assert ran.exists(), "the bomb itself must work"
    ran.unlink()
    if wrapping == "bare":
        path.write_bytes(data)
    elif wrapping == "zip":  # as torch.save and Stable-Baselines3 write
        with zipfile.ZipFile(path, "w") as archive:
            for inside in ("archive/data.pkl", "data", "policy.pth"):
                archive.writestr(inside, data)
    elif wrapping == "npz":
        bomb = np.array([Bomb(ran)], dtype=object)
        with path.open("wb") as file:
            np.savez(file, x=bomb)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from routepilot.env.tables import METADATA_KEY

        schema = pa.schema([pa.field("x", pa.binary())], metadata={METADATA_KEY: data})
        pq.write_table(pa.Table.from_pylist([{"x": data}], schema=schema), path)
    if name == "policy.safetensors":
        path.with_suffix(".json").write_text("{}")
    with pytest.raises(RoutePilotError):
        readers()[name](path)
    assert not ran.exists()


def test_a_policy_name_stays_in_its_folder(tmp_path: Path) -> None:
    from routepilot.training.train import train
    from routepilot.training.train_config import TrainConfig

    for name in ("../outside", "a/b", "..", "", ".hidden", "new\nline"):
        with pytest.raises(RoutePilotError, match="name"):
            train(synthetic.table(), TrainConfig(steps=0), out=tmp_path / "in", name=name)
    assert not list(tmp_path.rglob("*"))


ODD = [
    "with space",
    "quote'\"`$(touch ran)",
    "new\nline",
    "ünïcödé-模型",
    "-dash",
    "semi;touch ran;",
    "%s{x}",
]


@pytest.mark.parametrize("odd", ODD)
def test_odd_paths_work(odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / odd
    folder.mkdir()
    hostile_backend.hostile_model(folder / f"{odd}.onnx")
    out = folder / "sub" / ".." / "out"
    (folder / "sub").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(hostile_backend.__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-m", "routepilot", "tune", str(folder / f"{odd}.onnx"), "-o", str(out)]
        + ["-b", "hostile_backend:make", "--agent", "fast", "--max-builds", "0", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == odd
    assert (folder / "out" / "report.html").exists()
    assert not list(tmp_path.rglob("ran"))


def test_a_linked_output_folder_is_followed_and_a_linked_result_is_replaced(tmp_path: Path) -> None:
    from routepilot.training.files import ensure_folder, write_json

    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real, target_is_directory=True)
    (tmp_path / "precious").write_text("mine")
    (real / "result.json").symlink_to(tmp_path / "precious")
    write_json(ensure_folder(link) / "result.json", {"a": 1})
    assert (tmp_path / "precious").read_text() == "mine"
    assert json.loads((real / "result.json").read_text()) == {"a": 1}


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "link.bin"])
def test_a_model_reads_no_data_outside_its_folder(location: str, tmp_path: Path) -> None:
    from onnx import TensorProto, helper, save

    from routepilot.env.models import prepare

    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"\0" * 128)
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 8])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("length", "128")):
        weight.external_data.add(key=key, value=value)
    names = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 8]) for n in "xy"}
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "g", [names["x"]], [names["y"]], [weight]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save(made, folder / "m.onnx")
    with pytest.raises(RoutePilotError):
        prepare(folder / "m.onnx", cache=tmp_path / "cache")


def hostile_result() -> dict[str, Any]:
    script = "</title></code><script>document.title='owned'</script>"
    script += "<img src=x onerror=\"document.title='owned'\">"
    return {
        "model": script, "fingerprint": script, "backend": script,
        "target": {"device": script, "key": script}, "policy": script, "route": script,
        "is_default": False, "speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6, "builds": 2,
        "builds_total": 5, "seconds": 3.0, "note": script, "default_latency_ms": 1.0,
        "outcomes": {"ok": 1, "crashed": 1}, "losses": {script: 0.0}, "overhead_seconds": 0.1,
        "ended_by": script, "manifest": {script: {script: script}},
        "trials": [
            {"route": script, "status": status, "reason": script, "speedup": speed,
             "speedup_low": speed, "speedup_high": speed, "latency_ms": 1.0, "engine_hash": script,
             "losses": {"rel_l2": script}, "build_seconds": 0.1, "measure_seconds": 0.1}
            for status, speed in (("ok", 1.5), ("crashed", None))
        ],
    }  # fmt: skip


def test_names_on_the_report_are_text() -> None:
    from routepilot.training.report import render

    page = render(hostile_result())
    assert "<script>document" not in page and "<img" not in page
    assert page.count("&lt;script&gt;document") > 8


CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_planted_script_does_not_run_in_chromium(tmp_path: Path) -> None:
    from routepilot.training.report import write_report

    def title(page: Path) -> str:
        done = subprocess.run(
            [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
             f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
            capture_output=True, text=True, timeout=90,
        )  # fmt: skip
        assert "<title>" in done.stdout, done.stderr[-500:]
        return done.stdout.split("<title>")[1].split("</title>")[0]

    control = tmp_path / "control.html"
    control.write_text("<title>x</title><body><script>document.title='owned'</script>")
    assert title(control) == "owned", "Chromium must run scripts for this test to mean something"
    (tmp_path / "result.json").write_text(json.dumps(hostile_result()))
    assert title(write_report(tmp_path)).startswith("RoutePilot: &lt;/title&gt;")
