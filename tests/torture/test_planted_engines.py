"""Planted engines: code that looks like an engine, a program or a module runs nowhere.

Each plant makes a file when it runs, and each test shows first that it does run when it is let.
"""

from __future__ import annotations

import ast
import ctypes
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import fake_tensorrt
import hostile_backend
import pytest
from test_trust import ROOMS, ROOT, Bomb

from routepilot.env import ours
from routepilot.env.errors import InputError, ModelError, RoutePilotError
from routepilot.env.routes import DEFAULT_ROUTE

#: Functions that load code, and the files that may call them: behind a check, or on a build of
#: their own.
LOADERS = {
    "deserialize_cuda_engine": {"env/backends/tensorrt_engine.py"},
    "aoti_load_package": {"env/backends/inductor_engine.py"},
    "CDLL": {
        "env/child.py",
        "env/backends/inductor_build.py",
        "env/backends/tensorrt_ear.py",
    },  # of what the process has already
    "LoadLibrary": set(),
    "dlopen": set(),
    "load_library": set(),
    "import_model": set(),
    "add_extension": set(),
    "register_custom_ops_library": set(),
    "load_inline": set(),
    "run_path": set(),
    "spec_from_file_location": set(),
    "load_state_dict_from_url": set(),
}


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of its own, so that nothing of this user's is ours."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def test_code_is_loaded_in_known_places_only() -> None:
    found: dict[str, set[str]] = {name: set() for name in LOADERS}
    for path in (p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", getattr(node, "id", ""))
            if name in found:
                found[name].add(str(path.relative_to(ROOT)))
    assert found == LOADERS


# TensorRT.


@pytest.mark.parametrize("how", ["stranger", "changed", "linked"])
def test_a_planted_plan_is_not_deserialized(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.env.backends import tensorrt_engine as engines

    fake_tensorrt.install(monkeypatch)
    loaded: list[bytes] = []
    monkeypatch.setattr(engines, "Execution", lambda trt, data, gpu: loaded.append(data))
    mine, planted = tmp_path / "mine.plan", tmp_path / "engine.plan"
    mine.write_bytes(b"ours")
    ours.remember(ours.PLANS, ours.digest_of(mine))
    engines.open_plan(mine)
    assert loaded == [b"ours"], "what is ours must load for this test to mean something"
    if how == "linked":
        (tmp_path / "elsewhere").write_bytes(b"code")
        planted.symlink_to(tmp_path / "elsewhere")
    else:
        planted.write_bytes(b"code" if how == "stranger" else b"ourt")
    with pytest.raises(InputError, match="--trust"):
        engines.open_plan(planted)
    with pytest.raises(InputError, match="was changed"):
        engines.open_plan(planted, trust=True, expected=ours.digest_of(mine))
    assert loaded == [b"ours"]
    engines.open_plan(planted, trust=True)
    assert len(loaded) == 2


# ONNX Runtime and OpenVINO: an engine in the place of a model.


def _ort_model(place: Path) -> bytes:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(place / "m.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    source = hostile_backend.hostile_model(place / "source.onnx")
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    return (place / "m.ort").read_bytes()


def _openvino_blob(place: Path) -> bytes:
    openvino = pytest.importorskip("openvino")
    source = hostile_backend.hostile_model(place / "source.onnx")
    blob = io.BytesIO()
    blob.write(openvino.Core().compile_model(str(source), "CPU").export_model().getvalue())
    return blob.getvalue()


def _openvino_ir(place: Path) -> bytes:
    openvino = pytest.importorskip("openvino")
    source = hostile_backend.hostile_model(place / "source.onnx")
    openvino.save_model(openvino.Core().read_model(str(source)), str(place / "m.xml"))
    return (place / "m.xml").read_bytes()


def _library(place: Path) -> bytes:
    return _compiled(place, place / "never").read_bytes()


def _node_of_a_library(place: Path, domain: str, kind: str, **settings: object) -> bytes:
    from onnx import helper, load

    proto = load(str(hostile_backend.hostile_model(place / "source.onnx")))
    node = helper.make_node(kind, ["x"], ["z"], domain=domain, **settings)
    proto.graph.node[1].CopyFrom(node)
    proto.opset_import.append(helper.make_opsetid(domain, 1))
    return proto.SerializeToString()


def _context_of_an_engine(place: Path) -> bytes:
    """The node by which ONNX Runtime takes a compiled engine from a file."""
    return _node_of_a_library(
        place, "com.microsoft", "EPContext", embed_mode=0, ep_cache_context="engine.plan",
        source="TensorrtExecutionProvider", main_context=1,
    )  # fmt: skip


def _custom_operator(place: Path) -> bytes:
    return _node_of_a_library(place, "evil.ops", "Run", library=str(place / "evil.so"))


def _python_operator(place: Path) -> bytes:
    return _node_of_a_library(
        place, "com.microsoft", "PythonOp", func_name="os.system", input_convention="d"
    )


def _compiled(place: Path, ran: Path) -> Path:
    """A shared object that makes the file `ran` when it is loaded."""
    compiler = next((c for c in ("cc", "gcc", "g++", "clang") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C compiler")
    source = place / "evil.c"
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void run(void)"
        f' {{ FILE *f = fopen("{ran}", "w"); if (f) fclose(f); }}\n'
    )
    library = place / "evil.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.parametrize(
    "plant",
    [_ort_model, _openvino_blob, _openvino_ir, _library, _context_of_an_engine, _custom_operator,
     _python_operator],
)  # fmt: skip
def test_an_engine_in_the_place_of_a_model_is_refused(plant: Any, tmp_path: Path) -> None:
    from routepilot.env.models import prepare

    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(plant(folder))
    with pytest.raises(RoutePilotError) as caught:
        prepare(folder / "model.onnx", cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not (folder / "never").exists()


# Inductor.


def _package(folder: Path, library: Path) -> Path:
    """An archive laid out as AOTInductor does, whose code is a planted library."""
    path = folder / "package.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        inside = "package/data/aotinductor/model"
        for name, data in {
            "package/archive_format": b"pt2",
            "package/archive_version": b"0",
            "package/.data/version": b"3\n",
            "package/byteorder": b"little",
            f"{inside}/wrapper_metadata.json": b'{"AOTI_DEVICE_KEY": "cpu"}',
            f"{inside}/wrapper.so": library.read_bytes(),
        }.items():
            archive.writestr(name, data)
    return path


def test_a_planted_library_runs_when_it_is_loaded(tmp_path: Path) -> None:
    library = _compiled(tmp_path, tmp_path / "ran")
    ctypes.CDLL(str(library))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [False, True])
def test_a_planted_package_is_built_anew(keep: bool, tmp_path: Path, data_home: Path) -> None:
    """A run's folder from somebody else: what waits in it for a route is not ours."""
    from routepilot.env.backends.inductor_package import READY, Package, put_ready, take_ready

    planted = tmp_path / "work" / READY / DEFAULT_ROUTE.key
    planted.mkdir(parents=True)
    (planted / "package.pt2").write_bytes(b"code")
    (planted / "result.json").write_text(json.dumps({"hash": "0", "seconds": 1.0}))
    assert take_ready(tmp_path / "work", DEFAULT_ROUTE, keep=keep) is None
    assert not planted.exists() and os.listdir(tmp_path / "work") == [READY]
    made = tmp_path / "made"
    made.mkdir()
    (made / "package.pt2").write_bytes(b"ours")
    (made / "result.json").write_text(json.dumps({"hash": "0", "seconds": 1.0}))
    put_ready(Package(made, "0", 1.0), tmp_path / "work", DEFAULT_ROUTE)
    found = take_ready(tmp_path / "work", DEFAULT_ROUTE, keep=keep)
    assert found is not None and found.path.read_bytes() == b"ours"


@pytest.fixture(scope="module")
def sound_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "export"):
        pytest.skip("this torch exports nothing")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.head, self.places = torch.nn.Linear(4, 2), torch.arange(2)

        def forward(self, x: Any) -> Any:
            return self.head(x).masked_fill(self.places > 5, 0.0)

    path = tmp_path_factory.mktemp("program") / "net.pt2"
    torch.export.save(torch.export.export(Net().eval(), (torch.randn(1, 4),)), str(path))
    return path


def _changed(source: Path, target: Path, change: Any) -> Path:
    """The program with one file of its archive changed: `change(name, data) -> data or None`."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as copy:
        for entry in archive.infolist():
            data = change(entry.filename, archive.read(entry))
            if data is not None:
                copy.writestr(entry.filename, data)
    return target


def _graph(change: Any) -> Any:
    def apply(name: str, data: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return data
        graph = json.loads(data)
        change(graph, graph["graph_module"]["graph"]["nodes"])
        return json.dumps(graph).encode()

    return apply


def _payload(kind: str, **settings: object) -> Any:
    def apply(name: str, data: bytes) -> bytes:
        if not name.endswith(f"{kind}_config.json"):
            return data
        config = json.loads(data)
        next(iter(config["config"].values())).update(settings)
        return json.dumps(config).encode()

    return apply


def _call(target: str) -> Any:
    return _graph(lambda graph, nodes: nodes[0].update(target=target))


def _bombed(place: Path, ending: str) -> Any:
    data = pickle.dumps(Bomb(place))
    return lambda name, old: data if name.endswith(ending) else old


SLY = "x=__import__('os').system('touch ran')"

#: What is changed in a sound program -> a word of the refusal.
PLANTS: dict[str, tuple[Any, str]] = {
    "load_library": (_call("torch.ops.load_library"), "calls"),
    "hub": (_call("torch.hub.load"), "calls"),
    "operator": (_call("_operator.methodcaller"), "calls"),
    "from_file": (_call("torch.ops.aten.from_file.default"), "calls"),
    "extension": (_call("#evil:run"), "calls"),
    "expression": (
        _graph(lambda g, n: n[0]["inputs"].append({"expr_str": "exit(1)", "hint": None})),
        "expression",
    ),
    "guards": (_graph(lambda g, n: g.update(guards_code=["exit(1)"])), "check"),
    "name": (
        _graph(lambda g, n: g["graph_module"]["graph"]["inputs"][0]["as_tensor"].update(name=SLY)),
        "name",
    ),
    "argument": (_graph(lambda g, n: n[0]["inputs"][0].update(name=SLY)), "name"),
    "forward": (
        _graph(
            lambda g, n: g["graph_module"]["module_call_graph"][0]["signature"].update(
                forward_arg_names=[SLY]
            )
        ),
        "name",
    ),
    "spec": (
        _graph(
            lambda g, n: g["graph_module"]["module_call_graph"][0]["signature"].update(
                in_spec=json.dumps([1, {"type": "evil.Type", "context": "null"}])
            )
        ),
        "takes or gives",
    ),
    "pickled weight": (_payload("weights", use_pickle=True), "pickle"),
    "opaque constant": (_payload("constants", path_name="opaque_obj_0"), "pickle"),
    "script object": (_payload("constants", path_name="custom_obj_0"), "pickle"),
}


@pytest.mark.parametrize("name", list(PLANTS))
def test_a_program_that_is_code_is_not_read(
    name: str, sound_program: Path, tmp_path: Path, data_home: Path
) -> None:
    from routepilot.env.program_screen import screened_copy

    change, words = PLANTS[name]
    planted = _changed(sound_program, tmp_path / "net.pt2", change)
    with pytest.raises(ModelError, match=words) as caught:
        screened_copy(planted, tmp_path / "copy.pt2")
    assert "--trust" in str(caught.value) and "\n" not in str(caught.value)


def test_a_package_is_no_program(sound_program: Path, tmp_path: Path, data_home: Path) -> None:
    """PyTorch loads the code of an archive that holds a program and a package, and that runs."""
    from routepilot.env.programs import read_program

    ran = tmp_path / "ran"
    package = _package(tmp_path, _compiled(tmp_path, ran))
    both = tmp_path / "both.pt2"
    with zipfile.ZipFile(package) as code, zipfile.ZipFile(both, "w") as copy:
        with zipfile.ZipFile(sound_program) as program:
            for entry in program.infolist():
                copy.writestr(entry.filename, program.read(entry))
        for entry in code.infolist():
            if "aotinductor" in entry.filename:
                inside = entry.filename.partition("/")[2]
                copy.writestr(f"{sound_program.stem}/{inside}", code.read(entry))
    for path in (package, both):
        with pytest.raises(ModelError, match="compiled code"):
            read_program(path)
    assert not ran.exists()
    code = (
        f"import torch\ntry:\n    torch.export.load({str(both)!r})\nexcept Exception:\n    pass\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert ran.exists(), "PyTorch alone must load it for this test to mean something"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # of the planted pickle
def test_a_pickle_in_a_program_does_not_run(
    sound_program: Path, tmp_path: Path, data_home: Path
) -> None:
    import torch

    from routepilot.env.programs import prepare_program, read_program

    ran = tmp_path / "ran"
    planted = _changed(
        sound_program, tmp_path / "net.pt2", _bombed(ran, "data/sample_inputs/model.pt")
    )
    with pytest.raises(ModelError, match="cannot be read"):
        read_program(planted)
    with pytest.raises(ModelError):
        prepare_program(planted, cache=tmp_path / "cache")
    assert not ran.exists()
    with pytest.raises(Exception, match=".*"):
        torch.export.load(str(planted))
    assert ran.exists(), "PyTorch alone must run it for this test to mean something"


def test_a_sound_program_is_read_as_data_and_a_trusted_one_as_it_is(
    sound_program: Path, tmp_path: Path, data_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from routepilot.env import programs

    x = torch.randn(1, 4)
    wanted = torch.export.load(str(sound_program)).module()(x)
    assert torch.equal(programs.read_program(sound_program).module()(x), wanted)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    odd = _changed(
        sound_program,
        tmp_path / "odd.pt2",
        _graph(lambda g, n: n[0]["inputs"].append({"name": "not a word", "arg": {}, "kind": 1})),
    )
    with pytest.raises(ModelError, match="--trust"):
        programs.read_program(odd)
    read: list[str] = []
    monkeypatch.setattr(torch.export, "load", lambda path: read.append(path) or 1 / 0)
    ours.remember(ours.PROGRAMS, ours.digest_of(odd))
    with pytest.raises(ModelError, match="division"):
        programs.read_program(odd)
    assert read == [str(odd)]


def test_an_archive_that_says_two_things_is_refused(tmp_path: Path) -> None:
    from routepilot.env.program_screen import screened_copy

    twice = tmp_path / "twice.pt2"
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(twice, "w") as archive:
        archive.writestr("net/archive_format", b"pt2")
        archive.writestr("net/archive_format", b"pt3")
    packed = tmp_path / "packed.pt2"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/data/weights/weight_0", b"\0" * 1_000_000)
    for path, words in ((twice, "two files"), (packed, "compressed")):
        with pytest.raises(ModelError, match=words):
            screened_copy(path, tmp_path / "copy.pt2")


# Modules.


def test_modules_in_the_current_folder_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's folder with a `json.py` in it, and the user stands there."""
    script = Path(sys.executable).with_name("routepilot")
    if not script.exists():
        pytest.skip("the command routepilot is not installed beside Python")
    place, ran = tmp_path / "download", tmp_path / "ran"
    place.mkdir()
    hostile_backend.hostile_model(place / "m.onnx")
    for name in "json psutil numpy onnx onnxruntime runpy select resource openvino".split():
        (place / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise SystemExit(9)\n")
    subprocess.run([sys.executable, "-c", "import json"], cwd=place, check=False)
    assert ran.exists(), "the plant itself must work"
    ran.unlink()
    tests = str(Path(hostile_backend.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": tests, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [str(script), "tune", "m.onnx", "-o", str(tmp_path / "out"), "--json"]
    command += ["-b", "hostile_backend:make", "--agent", "fast", "--max-builds", "0"]
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=240
    )
    assert not ran.exists(), "a planted module ran"
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "m"
