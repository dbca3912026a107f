"""Apply an answer of RoutePilot in other front ends of TensorRT: Polygraphy and Torch-TensorRT.

Stands alone: needs Python, and the front end that calls it, nothing of RoutePilot. `tune` puts a
copy of this file into `deploy/`, where it reads the answer from `manifest.json` beside it.

    polygraphy run deploy/model.onnx --trt --trt-config-postprocess-script deploy/apply_route.py

    from apply_route import postprocess_config, torch_tensorrt_settings
    PostprocessConfig(CreateConfig(), func=postprocess_config)
    torch_tensorrt.dynamo.compile(program, inputs, **torch_tensorrt_settings())

A route is worth what it is worth for one model, shapes, GPU and version. What was measured is the
engine in `deploy/`; one that another front end builds is to be measured again.
"""

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Builder levers -> their attribute of a builder configuration, for those that are numbers.
NUMBERS = {
    "-builder_optimization_level": "builder_optimization_level",
    "-max_num_tactics": "max_num_tactics",
    "-max_aux_streams": "max_aux_streams",
}
#: Builder levers that are flags.
FLAGS = {"-tf32": "TF32", "-sparse_weights": "SPARSE_WEIGHTS"}
#: What they are when a route does not say.
DEFAULTS = {"-tf32": "on", "-sparse_weights": "off"}
TILING = "-tiling_optimization_level"
#: Precision lies in the ONNX file.
PRECISION = "-precision"

#: An answer: `result.json`, `manifest.json` of a deploy folder, the folder, or what they hold.
Answer = str | Path | dict[str, Any] | None


def read_answer(answer: Answer = None) -> dict[str, Any]:
    """The answer as data.

    Args:
        answer: Where it is; `manifest.json` or `result.json` beside this file when None.

    Raises:
        ValueError: It cannot be read, or is not of TensorRT's build routes.
    """
    if isinstance(answer, dict):
        data = answer
    else:
        place = Path(__file__).resolve().parent if answer is None else Path(answer)
        names = ("manifest.json", "result.json")
        files = [place / name for name in names] if place.is_dir() else [place]
        file = next((f for f in files if f.is_file()), files[0])
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(file)!r} holds no answer of RoutePilot ({error})") from None
    if not isinstance(data, dict) or not isinstance(data.get("route"), str):
        raise ValueError("this is no answer of RoutePilot: it has no route")
    settings = data.get("target", {}).get("settings", {})
    if data.get("backend") != "tensorrt" or settings.get("channel", "build_route") != "build_route":
        raise ValueError(
            f"an answer for the backend {data.get('backend')!r} cannot be applied here; it must be"
            " of tensorrt, through build_route"
        )
    return data


def settings_of(answer: Answer = None) -> tuple[str, dict[str, str]]:
    """The value for `IBuilderConfig.build_route`, and all other settings of the answer by name."""
    tokens = read_answer(answer)["route"].split()
    pairs = [token.rpartition("=")[::2] for token in tokens]
    others = {*NUMBERS, *FLAGS, TILING, PRECISION}
    route = " ".join(f"{name}={value}" for name, value in pairs if name not in others)
    return route, {name: value for name, value in pairs if name in others}


def measuring_settings(answer: Answer = None) -> dict[str, int]:
    """Settings of every build of the run, the default's too, that are numbers."""
    settings = read_answer(answer).get("target", {}).get("settings", {})
    names = ("optimization_level", "avg_timing", "workspace_mib")
    return {name: int(settings[name]) for name in names if name in settings}


def apply(config: Any, answer: Answer = None, trt: Any = None) -> None:
    """Set an answer on a builder configuration of TensorRT 11.1 or later.

    What was measured is set, also where it is TensorRT's default and not the front end's: TF32 is
    on there and off in Polygraphy. The precision is not: it lies in the file, so build
    `deploy/model.onnx`.

    Args:
        config: `tensorrt.IBuilderConfig`.
        answer: As `read_answer` takes it.
        trt: The module; `tensorrt` when None.

    Raises:
        ValueError: As `read_answer`.
        RuntimeError: TensorRT did not take the route; its setter would not say so.
    """
    if trt is None:
        trt = importlib.import_module("tensorrt")
    route, settings = settings_of(answer)
    _compare_versions(read_answer(answer), trt)
    if route:
        if not hasattr(config, "build_route"):
            raise RuntimeError(f"TensorRT {trt.__version__} has no build_route; 11.1 has")
        config.build_route = route
        taken = str(config.build_route)
        if taken.split() != route.split():
            raise RuntimeError(f"TensorRT took {taken!r} for {route!r}: another version of it?")
    for name, attribute in NUMBERS.items():
        if settings.get(name, "auto") != "auto":
            setattr(config, attribute, int(settings[name]))
    for name, flag in FLAGS.items():
        change = (
            config.set_flag if settings.get(name, DEFAULTS[name]) == "on" else config.clear_flag
        )
        change(getattr(trt.BuilderFlag, flag))
    measured = measuring_settings(answer)
    if "optimization_level" in measured:
        config.builder_optimization_level = measured["optimization_level"]
    if "avg_timing" in measured:
        config.avg_timing_iterations = measured["avg_timing"]
    if "workspace_mib" in measured:
        pool = trt.MemoryPoolType.WORKSPACE
        config.set_memory_pool_limit(pool, measured["workspace_mib"] << 20)
    if TILING in settings:
        level = getattr(trt.TilingOptimizationLevel, settings[TILING].upper())
        config.tiling_optimization_level = level


def postprocess_config(builder: Any, network: Any, config: Any) -> None:
    """Polygraphy's hook, found by its command line under this name: the answer beside this file."""
    apply(config)


def polygraphy_hook(answer: Answer) -> Callable[[Any, Any, Any], None]:
    """The same for another answer: `PostprocessConfig(CreateConfig(), func=polygraphy_hook(a))`."""
    read_answer(answer)  # refuse now, not in the middle of a build

    def hook(builder: Any, network: Any, config: Any) -> None:
        apply(config, answer)

    return hook


def torch_tensorrt_settings(answer: Answer = None, *, partly: bool = False) -> dict[str, Any]:
    """Settings for `torch_tensorrt.dynamo.compile`, where it has a setting `build_route`.

    Torch-TensorRT cuts a program into parts and builds each with the route. `compile` drops
    settings that it does not know without a word, so those of the version at hand are asked first;
    where none is installed, all are taken to exist.

    Args:
        answer: As `read_answer` takes it.
        partly: Leave out what it has no setting for, instead of refusing.

    Raises:
        ValueError: As `read_answer`, or the answer needs a setting that does not exist there.
    """
    route, settings = settings_of(answer)
    found: dict[str, Any] = {"build_route": route}
    for name, setting in (
        ("-builder_optimization_level", "optimization_level"),
        ("-max_aux_streams", "max_aux_streams"),
    ):
        if settings.get(name, "auto") != "auto":
            found[setting] = int(settings[name])
    found["disable_tf32"] = settings.get("-tf32", DEFAULTS["-tf32"]) == "off"
    found["sparse_weights"] = settings.get("-sparse_weights", "off") == "on"
    measured = measuring_settings(answer)
    if "optimization_level" in measured:
        found["optimization_level"] = measured["optimization_level"]
    if "avg_timing" in measured:
        found["num_avg_timing_iters"] = measured["avg_timing"]
    if "workspace_mib" in measured:
        found["workspace_size"] = measured["workspace_mib"] << 20
    if TILING in settings:
        found["tiling_optimization_level"] = settings[TILING]
    missing = [
        f"{name}={settings[name]}"
        for name, default in (("-max_num_tactics", "auto"), (PRECISION, "model"))
        if settings.get(name, default) != default
    ]
    known = _known_to_torch_tensorrt()
    unknown = [name for name in found if known is not None and name not in known]
    dropped = {name: found.pop(name) for name in unknown}
    missing += [f"{name}={value}" for name, value in dropped.items() if value != ""]
    if missing and not partly:
        raise ValueError(
            f"{_torch_tensorrt_here()} has no setting for {' '.join(missing)}; leave it out with"
            " partly=True and measure again"
        )
    return found


def _known_to_torch_tensorrt() -> set[str] | None:
    """Names of the settings of the Torch-TensorRT at hand; None where none can be loaded."""
    try:
        dynamo = importlib.import_module("torch_tensorrt.dynamo")
        return set(dynamo.CompilationSettings.__dataclass_fields__)
    except (ImportError, OSError, AttributeError):
        return None


def _torch_tensorrt_here() -> str:
    module = sys.modules.get("torch_tensorrt")
    return f"Torch-TensorRT {getattr(module, '__version__', '')}".strip()


def _compare_versions(data: dict[str, Any], trt: Any) -> None:
    wanted = data.get("target", {}).get("versions", {}).get("tensorrt")
    if wanted is not None and wanted != trt.__version__:
        warnings.warn(
            f"the answer was measured with TensorRT {wanted} and this is {trt.__version__}: tune"
            " again before relying on it",
            stacklevel=3,
        )
