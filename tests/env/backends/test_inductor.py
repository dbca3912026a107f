"""Inductor: what needs no compile, and the real C++ path of a tiny program."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from routepilot.env import programs  # noqa: E402
from routepilot.env.backends import inductor_catalog as knobs  # noqa: E402
from routepilot.env.backends import load_backend  # noqa: E402
from routepilot.env.backends.base import BuildFailure  # noqa: E402
from routepilot.env.backends.conformance import (  # noqa: E402
    CHECKS,
    Case,
    legal_changes_end_well,
)
from routepilot.env.backends.inductor import InductorBackend  # noqa: E402
from routepilot.env.backends.inductor_build import _failure, package_hash  # noqa: E402
from routepilot.env.backends.inductor_package import (  # noqa: E402
    PACKAGE,
    RESULT,
    Build,
    Package,
    put_ready,
    read_result,
    take_ready,
)
from routepilot.env.backends.inductor_program import adapted  # noqa: E402
from routepilot.env.errors import InputError, MachineError, ModelError  # noqa: E402
from routepilot.env.models import Model  # noqa: E402
from routepilot.env.outcomes import Status  # noqa: E402
from routepilot.env.routes import DEFAULT_ROUTE, Route  # noqa: E402


class Net(torch.nn.Module):  # type: ignore[misc]
    """A convolution, a mask written as the least float32, and a table of places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.head = torch.nn.Linear(8, 4)
        self.places = torch.arange(8)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.conv(x)).mean((2, 3))
        y = y.masked_fill(self.places > 100, torch.finfo(torch.float32).min)
        return torch.softmax(self.head(y), -1)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("program") / "net.pt2"
    exported = torch.export.export(Net().eval(), (torch.randn(1, 3, 10, 10),))
    torch.export.save(exported, str(path))
    return path


@pytest.fixture(scope="session")
def net(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return programs.prepare_program(program, cache=tmp_path_factory.mktemp("models"))


# Programs.


def test_a_program_becomes_a_model_with_eager_references(
    program: Path, net: Model, tmp_path: Path
) -> None:
    module = programs.read_program(program).module()
    for one, wanted in zip(net.confirmation(), net.confirmation_reference(), strict=True):
        given = module(torch.from_numpy(one[net.inputs[0].name])).detach().numpy()
        np.testing.assert_allclose(given, wanted[net.outputs[0].name], rtol=1e-5, atol=1e-7)
    described = json.loads((net.folder / "model.json").read_text())
    assert described["reference"].startswith("PyTorch")
    start = time.monotonic()
    again = programs.prepare_program(program, cache=net.folder.parent)
    assert again.folder == net.folder and time.monotonic() - start < 2, "made twice"
    other = tmp_path / "net.pt2"
    other.write_bytes(program.read_bytes()[:-1])
    with pytest.raises(ModelError):  # another file is another model, whatever its name
        programs.prepare_program(other, cache=net.folder.parent)
    assert not list(net.folder.parent.glob(".program-*"))


def test_bad_programs_are_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        programs.prepare_program(tmp_path / "none.pt2", cache=tmp_path)
    broken = tmp_path / "broken.pt2"
    broken.write_bytes(b"no archive")
    with pytest.raises(ModelError, match="cannot be read") as caught:
        programs.read_program(broken)
    assert "\n" not in str(caught.value)


def test_varying_shapes_are_refused(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(
        torch.nn.Linear(4, 2), (torch.randn(8, 4),), dynamic_shapes=({0: batch},)
    )
    torch.export.save(exported, str(tmp_path / "open.pt2"))
    with pytest.raises(ModelError, match="without dynamic_shapes"):
        programs.read_program(tmp_path / "open.pt2")


def test_packaged_models_have_no_program() -> None:
    with pytest.raises(ModelError, match="comes as an ONNX file"):
        programs.prepare_zoo_program("silero_vad")


def test_a_model_without_a_program_is_refused(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no PyTorch program"):
        InductorBackend({"device": "cpu"}).build(tiny, DEFAULT_ROUTE, tmp_path)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_half_program_keeps_its_interface(program: Path, precision: str) -> None:
    read = programs.read_program(program)
    settings = {knobs.PRECISION: precision, knobs.CHANNELS_LAST: "on"}
    changed, inputs = adapted(read, settings, "cpu")
    (given,) = changed.module()(*inputs)
    wanted = programs.read_program(program).module()(*inputs)
    assert given.dtype is torch.float32 and given.is_contiguous()
    error = (given - wanted).norm() / wanted.norm()
    assert 0 < error < 2e-2, "half precision computes something else, or nothing was cast"
    assert all(p.dtype is not torch.float32 for p in changed.parameters())


# The catalog.


def test_the_catalog_is_what_is_installed() -> None:
    import torch._inductor.config as config

    for device in knobs.DEVICES:
        catalog = knobs.make_catalog(config, "2", device)
        for setting in knobs.SETTINGS:
            there, value = knobs.installed_value(config, setting.path)
            assert (setting.knob in catalog) == (there and device in setting.devices)
            if setting.knob in catalog:
                assert catalog[setting.knob].default == knobs.word(value)
                assert catalog[setting.knob].alternatives, setting.path


def test_absent_settings_are_left_out_and_defaults_follow_the_version() -> None:
    old = SimpleNamespace(freezing=True, cpp=SimpleNamespace(simdlen=None))
    catalog = knobs.make_catalog(old, "1", "cpu")
    assert [k.name for k in catalog.knobs] == [
        "-precision",
        "-channels_last",
        "-freezing",
        "-cpp.simdlen",
    ]
    assert catalog["-freezing"].default == "on" and not catalog.requirements
    route = catalog.parse("-cpp.simdlen=256 -freezing=off -precision=bf16")
    assert knobs.configuration(old, route.values) == {"freezing": False, "cpp.simdlen": 256}


def test_every_value_is_taken_by_the_installed_inductor() -> None:
    import torch._inductor.config as config

    for device in knobs.DEVICES:
        catalog = knobs.make_catalog(config, "2", device)
        for knob in catalog.knobs:
            for value in knob.alternatives:
                with config.patch(knobs.configuration(config, {knob.name: value})):
                    pass


@pytest.mark.parametrize(
    "options, words",
    [
        ({"colour": "red"}, "does not exist"),
        ({"device": "tpu"}, "allowed: cpu, cuda"),
        ({"threads": "0"}, "1 or more"),
        ({"wrapper": "O9"}, "allowed: O0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_backend("inductor", options)


def test_an_unknown_knob_to_keep_is_refused() -> None:
    with pytest.raises(InputError, match="not in the inductor catalog"):
        load_backend("inductor", {"device": "cpu", "knobs": "frezing"}).catalog()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_told() -> None:
    with pytest.raises(MachineError, match="device=cpu"):
        load_backend("inductor", {"device": "cuda"})


# Packages.


def _package(folder: Path, digest: str = "abc") -> Package:
    folder.mkdir(parents=True)
    (folder / PACKAGE).write_bytes(b"package")
    (folder / RESULT).write_text(json.dumps({"hash": digest, "seconds": 3.5}))
    return Package(folder, digest, 3.5)


def test_a_waiting_package_is_taken_once(tmp_path: Path) -> None:
    route = Route((("-freezing", "on"),))
    put_ready(_package(tmp_path / "made"), tmp_path / "work", route)
    assert take_ready(tmp_path / "work", DEFAULT_ROUTE, keep=False) is None
    kept = take_ready(tmp_path / "work", route, keep=True)
    taken = take_ready(tmp_path / "work", route, keep=False)
    assert kept is not None and taken is not None and taken.seconds == 3.5
    assert taken.path.read_bytes() == b"package"
    assert take_ready(tmp_path / "work", route, keep=False) is None


def test_a_build_that_dies_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "log").write_text("first\nterminate called\n")
    died = read_result(folder, -signal.SIGSEGV, 1.0, 3)
    assert isinstance(died, BuildFailure) and died.status is Status.BUILD_FAILED
    assert "signal 11" in died.reason and "terminate called" in died.reason
    assert not folder.exists()
    monkeypatch.setattr("routepilot.env.child.memory_kills", lambda: 4)
    for before, status in ((3, Status.OUT_OF_MEMORY), (4, Status.KILLED)):
        folder.mkdir()
        killed = read_result(folder, -signal.SIGKILL, 1.0, before)
        assert isinstance(killed, BuildFailure) and killed.status is status
        assert "killed" in killed.reason


def test_pauses_are_not_build_time(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    build = Build(tmp_path, process, started=time.time() - 100)
    (tmp_path / RESULT).write_text("{}")
    build.pauses += [(time.time() - 50, 40.0), (time.time() + 5, 30.0)]
    assert build.seconds() == pytest.approx(60, abs=2)
    process.wait()


def test_a_compiler_error_is_told_by_its_own_words() -> None:
    text = "C++ compile error\n\nCommand:\ng++ a.cpp\n\nOutput:\na.cpp:3:1: error: no such thing"
    told = _failure(RuntimeError(text))
    assert "no such thing" in told["reason"] and "\n" not in told["reason"]
    assert _failure(RuntimeError("CUDA out of memory."))["status"] == "out_of_memory"


def _archive(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"{path.stem}/{name.replace('_', '.')}", text)
    return path


UNITS = """
import os
import subprocess
import torch._inductor.config as config
from torch._inductor import cpu_vec_isa
from routepilot.env.backends.inductor_build import _try_no_vector_units

def refuse(*arguments, **more):
    os._exit(3)  # what is raised here, the compiler takes for an answer

_try_no_vector_units()
subprocess.Popen = subprocess.run = subprocess.check_call = refuse
with config.patch({"cpp.vec_isa_ok": True}):
    print(*map(str, cpu_vec_isa.valid_vec_isa_list()))
"""


def test_a_gpu_build_compiles_nothing_to_learn_of_vector_units() -> None:
    done = subprocess.run([sys.executable, "-c", UNITS], capture_output=True, text=True, check=True)
    assert "amx" not in done.stdout


def test_the_hash_is_of_code_and_not_of_places(tmp_path: Path) -> None:
    name = "c" + "a2" * 25 + "b"
    assert len(name) == 52

    def digest(file: str, cache: str, code: str, **acting: str) -> str:
        text = f"{code} // g++ {cache}/x/{name}.cpp -O3"
        return package_hash(_archive(tmp_path / file, m_cpp=text, m_so=file), Path(cache), acting)

    first = digest("a.zip", "/one/cache", "int a;")
    assert digest("b.zip", "/other/place", "int a;") == first
    assert digest("c.zip", "/one/cache", "int b;") != first
    assert digest("d.zip", "/one/cache", "int a;", precision="tf32") != first


# The compiler itself: a few builds of a second of code and many of header files.


@pytest.fixture(scope="module")
def case(net: Model, tmp_path_factory: pytest.TempPathFactory) -> Case:
    options = {"device": "cpu", "wrapper": "O0", "packages": "keep", "knobs": "precision"}
    return Case(partial(load_backend, "inductor", options), net, tmp_path_factory.mktemp("work"))


#: Checks that are passed over by default: they build more than the default route and one change.
MANY = (legal_changes_end_well,)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check not in MANY], ids=lambda check: check.__name__
)
def test_inductor_conforms(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.compiler
def test_every_change_of_one_knob_ends_well(
    net: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = {"device": "cpu", "wrapper": "O0", "packages": "keep"}
    make = partial(load_backend, "inductor", options)
    legal_changes_end_well(Case(make, net, tmp_path_factory.mktemp("all")))


@pytest.mark.gpu
@pytest.mark.compiler
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_inductor_conforms_on_a_gpu(
    net: Model, tmp_path_factory: pytest.TempPathFactory, check: Callable[[Case], None]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no NVIDIA GPU here")
    options = {"device": "cuda", "packages": "keep", "knobs": "precision,freezing"}
    make = partial(load_backend, "inductor", options)
    check(Case(make, net, tmp_path_factory.mktemp("gpu")))


def _refuse() -> None:
    raise AssertionError("a load asked what vector units there are, which compiles libraries")


def test_a_build_of_the_compiler(
    net: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one real build of the quick tests: compiled, loaded, right, timed, gone."""
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", _refuse)
    backend = load_backend("inductor", {"device": "cpu", "wrapper": "O0"})
    engine = backend.build(net, backend.catalog().parse("-freezing=on"), tmp_path)
    assert not isinstance(engine, BuildFailure), engine.reason
    for inputs, wanted in zip(net.selection(), net.selection_reference(), strict=True):
        for name, array in engine.run(inputs).items():
            np.testing.assert_allclose(array, wanted[name], rtol=1e-3, atol=1e-6)
    assert engine.build_seconds > 0 and engine.time(net.selection()[0], 0.0)
    engine.close()
    assert not list(tmp_path.iterdir()), "a closed engine leaves files"
    refused = backend.build(net, Route((("-cpp.weight_prepack", "off"),)), tmp_path)
    assert isinstance(refused, BuildFailure) and refused.status is Status.REFUSED
