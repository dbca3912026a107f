from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routepilot.env.backends import BACKENDS, load_backend, recipes
from routepilot.env.backends import onnxruntime as ort
from routepilot.env.backends import openvino as ov
from routepilot.env.backends.base import BuildFailure, Engine
from routepilot.env.backends.cpu import CpuBackend, processor, read_failure
from routepilot.env.backends.recipes import RECIPES, Transformed
from routepilot.env.errors import InputError, MachineError, MissingExtraError
from routepilot.env.models import Model
from routepilot.env.outcomes import Status

needs_openvino = pytest.mark.skipif(
    not ov.is_installed(), reason="the extra openvino is not installed"
)
needs_two_cores = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")


def build(
    model: Model, route: str, workdir: Path, options: Mapping[str, str] | None = None
) -> Engine:
    backend = load_backend("cpu", options)
    built = backend.build(model, backend.catalog().parse(route), workdir)
    assert not isinstance(built, BuildFailure), built.reason
    return built


def digest(model: Model, route: str, workdir: Path, options: Mapping[str, str] = {}) -> str:
    engine = build(model, route, workdir, options)
    engine.close()
    return engine.hash


def names(backend: str, **options: str) -> set[str]:
    return {knob.name for knob in load_backend(backend, options).catalog().knobs}


def test_each_backend_lists_the_knobs_of_its_engines() -> None:
    assert set(BACKENDS) >= {"cpu", "onnxruntime", "openvino"}
    alone = names("onnxruntime")
    assert "-graph" in alone and not alone & {"-engine", "-snippets", "-arithmetic"}
    assert names("cpu") >= alone | {"-engine"}


@needs_openvino
def test_openvino_alone_has_no_knob_of_the_other_engine() -> None:
    theirs = {knob.name for knob in ort.KNOBS}
    assert "-snippets" in names("openvino") and not names("openvino") & theirs
    assert names("cpu") >= names("openvino")


@needs_two_cores
def test_thread_knobs_exist_only_when_there_is_something_to_decide() -> None:
    assert not names("cpu", threads="1") & {"-threads", "-spin"}
    catalog = load_backend("cpu", {"threads": "2"}).catalog()
    assert (catalog["-threads"].values, catalog["-threads"].default) == (("1", "2"), "2")
    objection = catalog.objection(catalog.parse("-threads=1 -spin=off"))
    assert objection is not None and "-threads=2" in objection
    assert catalog.is_legal(catalog.parse("-spin=off"))


def test_without_openvino_nothing_of_it_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    catalog = load_backend("cpu").catalog()
    assert catalog["-engine"].values == ("ort",)
    assert not {knob.name for knob in ov.KNOBS} & {knob.name for knob in catalog.knobs}
    assert "openvino" not in load_backend("cpu").target().versions
    with pytest.raises(MissingExtraError, match=r"pip install 'routepilot\[openvino\]'"):
        load_backend("openvino")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": "0"}, "from 1 to"),
        ({"threads": "two"}, "from 1 to"),
        ({"threads": "²"}, "from 1 to"),
        ({"threads": "100000"}, "from 1 to"),
        ({"cores": "2"}, "threads"),
    ],
)
def test_bad_options_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_backend("cpu", options)


@pytest.mark.parametrize("name", ["cpus", "no_module_of_this_name:make", "json:no_such_factory"])
def test_unknown_backends_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=name.partition(":")[2] or "cpu"):
        load_backend(name)


def test_target_separates_thread_counts_and_backends() -> None:
    keys = {
        load_backend("cpu").target().key,
        load_backend("onnxruntime").target().key,
        CpuBackend("cpu", {"threads": str(os.cpu_count())}).target().key,
    }
    assert len(keys) == 2 + ((os.cpu_count() or 1) > 1)
    assert load_backend("cpu").target().device == processor()


@pytest.mark.parametrize("route", ["-fuse:gelu=off", "-fuse:norm=off", "-transformer=on"])
def test_knobs_without_effect_give_the_default_engine(
    convolutions: Model, tmp_path: Path, route: str
) -> None:
    assert digest(convolutions, route, tmp_path) == digest(convolutions, "", tmp_path)


@pytest.mark.parametrize("route", ["-layout:nchwc=off", "-quantize=static_conv"])
def test_knobs_of_convolutions_act_on_them_alone(
    convolutions: Model, transformer: Model, tmp_path: Path, route: str
) -> None:
    assert digest(convolutions, route, tmp_path) != digest(convolutions, "", tmp_path)
    assert digest(transformer, route, tmp_path) == digest(transformer, "", tmp_path)


@pytest.mark.parametrize(
    "route", ["-fuse:norm=off", "-fuse:gelu=off", "-transformer=on", "-prepack=off", "-graph=off"]
)
def test_knobs_of_transformers_act(transformer: Model, tmp_path: Path, route: str) -> None:
    assert digest(transformer, route, tmp_path) != digest(transformer, "", tmp_path)


@pytest.mark.parametrize("knob", ort.SWITCHES)
def test_masked_combinations_are_without_effect(
    convolutions: Model, transformer: Model, tmp_path: Path, knob: str
) -> None:
    """The requirements mask nothing that would make another engine."""
    level = "extended" if knob == "-layout:nchwc" else "off"
    catalog = load_backend("onnxruntime").catalog()
    assert not catalog.is_legal(catalog.parse(f"-graph={level} {knob}=off"))
    for model in (convolutions, transformer):
        values = {**catalog.full_settings(catalog.parse(f"-graph={level}"))}
        engines = [
            ort.OrtEngine(
                Transformed(model.path, 0.0), ort.settings_of(chosen, 1), model, tmp_path
            ).hash
            for chosen in (values, {**values, knob: "off"})
        ]
        assert engines[0] == engines[1]


@needs_two_cores
def test_fewer_threads_are_the_engine_of_fewer_threads(transformer: Model, tmp_path: Path) -> None:
    two = {"threads": "2"}
    assert digest(transformer, "-threads=1", tmp_path, two) == digest(transformer, "", tmp_path)
    digests = {digest(transformer, route, tmp_path, two) for route in ("", "-spin=off")}
    assert len(digests | {digest(transformer, "", tmp_path)}) == 3


HASHES = """
import json, sys
from pathlib import Path
from routepilot.env.backends import load_backend
from routepilot.env.models import Model
backend = load_backend("cpu")
model, workdir = Model.load(Path(sys.argv[1])), Path(sys.argv[2])
routes = [backend.catalog().parse(text) for text in sys.argv[3:]]
print(json.dumps([backend.build(model, route, workdir).hash for route in routes]))
"""


def test_hashes_are_equal_across_processes(transformer: Model, tmp_path: Path) -> None:
    routes = ["", "-quantize=static", "-quantize=dynamic", "-quantize=weights8", "-transformer=on"]
    if ov.is_installed():
        routes += ["-engine=openvino", "-engine=openvino -quantize=static"]
    found = []
    for seed in ("1", "2"):  # quantisers walk over sets of strings
        workdir = tmp_path / seed
        workdir.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", HASHES, str(transformer.folder), str(workdir), *routes],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert len(set(found[0])) == len(routes)


@needs_openvino
@pytest.mark.parametrize("options", [{}, {"threads": "2"}])
def test_openvino_computes_what_the_model_means(
    recurrent: Model, convolutions: Model, tmp_path: Path, options: dict[str, str]
) -> None:
    for model in (recurrent, convolutions):
        engine = build(model, "-engine=openvino", tmp_path, options)
        given = engine.run(model.selection()[0])["y"]
        wanted = model.selection_reference()[0]["y"]
        np.testing.assert_allclose(given, wanted, rtol=1e-3, atol=1e-4)
        engine.close()


@needs_two_cores
@pytest.mark.parametrize(
    "route", ["", "-spin=off", pytest.param("-engine=openvino", marks=needs_openvino)]
)
def test_quiet_engines_use_no_processor(convolutions: Model, tmp_path: Path, route: str) -> None:
    engine = build(convolutions, route, tmp_path, {"threads": "2"})
    engine.time(convolutions.selection()[0], 0.1)
    engine.quiesce()
    time.sleep(0.005)  # OpenVINO's threads go to sleep within 1 to 2 ms

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    before = used()
    time.sleep(0.05)
    assert used() - before < 0.01
    engine.close()


def test_a_transform_found_made_costs_what_it_cost(
    convolutions: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held by what is noted beside the files, however busy the machine is."""
    quantize = recipes._quantize

    def slow(*given: Any) -> None:
        time.sleep(0.2)
        quantize(*given)

    def charged() -> tuple[Engine, float, dict[Path, float]]:
        start = time.perf_counter()
        engine = build(convolutions, "-quantize=static", tmp_path)
        elapsed = time.perf_counter() - start
        engine.close()
        notes = {p: json.loads(p.read_text())["seconds"] for p in tmp_path.glob("*.json")}
        return engine, elapsed, notes

    monkeypatch.setattr(recipes, "_quantize", slow)
    first, elapsed, notes = charged()
    made = sum(notes.values())
    assert 0.2 < made < first.build_seconds <= elapsed
    second, elapsed, found = charged()
    assert (second.hash, found) == (first.hash, notes)
    assert made < second.build_seconds <= made + elapsed
    for path, seconds in notes.items():
        note = json.loads(path.read_text())
        path.write_text(json.dumps({**note, "seconds": seconds + 1000}))
    third, elapsed, _ = charged()
    dear = made + 1000 * len(notes)
    assert dear < third.build_seconds <= dear + elapsed


def test_builds_are_silent_and_tidy(
    convolutions: Model, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = {item.name: item.stat().st_mtime_ns for item in convolutions.folder.iterdir()}
    outside = set(os.listdir(tempfile.gettempdir()))
    state = (list(logging.root.handlers), logging.root.level, logging.root.manager.disable)
    capfd.readouterr()
    for recipe in RECIPES:
        build(convolutions, f"-quantize={recipe} -transformer=on", tmp_path).close()
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert (list(logging.root.handlers), logging.root.level, logging.root.manager.disable) == state
    assert all(path.suffix in (".onnx", ".json") for path in tmp_path.iterdir())
    assert bundle == {item.name: item.stat().st_mtime_ns for item in convolutions.folder.iterdir()}
    left = {n for n in set(os.listdir(tempfile.gettempdir())) - outside if "quant" in n}
    assert not left


@pytest.mark.parametrize("route", ["", "-quantize=static", "-transformer=on", "-quantize=weights8"])
def test_a_damaged_model_is_a_failed_build(convolutions: Model, tmp_path: Path, route: str) -> None:
    shutil.copytree(convolutions.folder, tmp_path / "bundle")
    damaged = replace(convolutions, folder=tmp_path / "bundle")
    damaged.path.write_bytes(damaged.path.read_bytes()[:-500])
    workdir = tmp_path / "work"
    backend = load_backend("cpu")
    built = backend.build(damaged, backend.catalog().parse(route), workdir)
    assert isinstance(built, BuildFailure) and built.status is Status.BUILD_FAILED
    assert len(built.reason.splitlines()) == 1 and str(tmp_path) not in built.reason
    assert not list(workdir.iterdir())


def test_failures_are_read() -> None:
    memory = [
        MemoryError(),
        RuntimeError("std::bad_alloc"),
        RuntimeError("Failed to allocate memory"),
    ]
    assert {read_failure(error).status for error in memory} == {Status.OUT_OF_MEMORY}
    with pytest.raises(MachineError, match="disk is full"):
        read_failure(OSError(28, "No space left on device"))
    long = read_failure(RuntimeError("one\n  two\t" + "x" * 1000))
    assert long.status is Status.BUILD_FAILED
    assert long.reason.startswith("one two xxx") and len(long.reason) == 300
    assert read_failure(KeyError("conv_0")).reason == "KeyError: 'conv_0'"
    assert read_failure(RuntimeError()).reason == "RuntimeError"
    words = "Exception from src/plugin.cpp:59: Check 'false' failed at src/a/b.cpp:151: no rule"
    assert read_failure(RuntimeError(words)).reason == "no rule"
    home = Path("/tmp/somewhere")
    assert (
        read_failure(RuntimeError(f"load {home}/model.onnx"), (home,)).reason == "load model.onnx"
    )
