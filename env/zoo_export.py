"""Corpus definitions as ONNX files, and the weights of those that are trained here.

Owns the export, the random but sane weights of what nobody trained, and the weights' files: float16
safetensors beside the released policies, so that an export gives the same fingerprint everywhere.
Needs torch and onnxscript (extra `zoo`); imported when used.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from routepilot.env import zoo_architectures, zoo_data, zoo_sequence, zoo_vision
from routepilot.env.errors import ModelError

#: Passes in training mode that give batch normalisation its statistics.
WARM_PASSES = 8

#: Names of the definitions that are trained here.
TRAINED = (*zoo_vision.TRAINED, *zoo_sequence.TRAINED)

#: Name -> definition; a form `model@form` has the weights of `model`.
DEFINITIONS: dict[str, Callable[[], nn.Module]] = {
    **zoo_architectures.ARCHITECTURES,
    **zoo_vision.RANDOM,
    **zoo_sequence.RANDOM,
    **zoo_vision.TRAINED,
    **zoo_sequence.TRAINED,
    **zoo_sequence.FORMS,
}


def make(name: str, warm: Sequence[Tensor], weights: Path | None = None) -> nn.Module:
    """A definition ready to run.

    Args:
        name: Key of `DEFINITIONS`.
        warm: Inputs that warm batch statistics where weights are random.
        weights: File of trained weights; None for random ones, the same everywhere.
    """
    torch.manual_seed(0)
    model = DEFINITIONS[name]()
    if weights is not None:
        load_weights(model, weights)
    else:
        _scale(model)
        _warm(model, warm)
    return model.eval()


def outputs(model: nn.Module, inputs: Sequence[Tensor]) -> list[str]:
    """Names for a model's outputs."""
    with torch.no_grad():
        found = model(*inputs)
    return ["output"] if isinstance(found, Tensor) else [f"output_{i}" for i in range(len(found))]


def write_onnx(
    model: nn.Module | torch.export.ExportedProgram,
    inputs: Sequence[Tensor],
    names: Sequence[str],
    outputs: Sequence[str],
    path: Path,
) -> None:
    """Write a module or an exported program as an ONNX file with these names, quietly."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                tuple(inputs),
                str(path),
                input_names=list(names),
                output_names=list(outputs),
                opset_version=18,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        logging.disable(logging.NOTSET)


def save_weights(model: nn.Module, path: Path) -> None:
    """Write a model's weights and statistics as float16."""
    from safetensors.torch import save_file

    kept = {
        n: t.half().contiguous() for n, t in model.state_dict().items() if t.is_floating_point()
    }
    save_file(kept, str(path))


def load_weights(model: nn.Module, path: Path) -> None:
    """Read what `save_weights` wrote; the model's own weights are replaced.

    Raises:
        ModelError: The file lacks a weight, or its shape differs.
    """
    from safetensors.torch import load_file

    found = {name: tensor.float() for name, tensor in load_file(str(path)).items()}
    wanted = {n: t.shape for n, t in model.state_dict().items() if t.is_floating_point()}
    if wanted != {name: tensor.shape for name, tensor in found.items()}:
        raise ModelError(
            f"the weights {str(path)!r} do not fit the definition; train the model again"
        )
    model.load_state_dict(found, strict=False)


def step_inputs(rng: np.random.Generator, past: int) -> dict[str, NDArray[np.generic]]:
    """A token of text, and the cache that the trained decoder holds after what went before it.

    Args:
        rng: Generator.
        past: Tokens before.
    """
    model: Any = DEFINITIONS["char_gpt"]()
    load_weights(model, weights_file("char_gpt"))
    text = torch.from_numpy(zoo_data.text(rng, 1, past + 1))
    with torch.no_grad():
        cache = model.cache(text[:, :-1])
    return {"tokens": text[:, -1:].numpy(), "cache": cache.numpy()}


def weights_file(name: str) -> Path:
    """Where the weights of a model that is trained here are; a form has those of its model."""
    folder = files("routepilot.checkpoints").joinpath("zoo")
    return Path(str(folder.joinpath(f"{name.partition('@')[0]}.safetensors")))


def _warm(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Statistics in double: in single, processors differ in bits that a fingerprint sees."""
    model.double().train()
    with torch.no_grad():
        for _ in range(WARM_PASSES):
            model(*(x.double() if x.is_floating_point() else x for x in inputs))
    model.float()


def _scale(model: nn.Module) -> None:
    """Weights that keep signals alive through the depth: He for convolutions, small for tables."""
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
