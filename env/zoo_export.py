"""Corpus definitions as ONNX files, and the weights of those that are trained here.

Owns the export, the random but sane weights of what nobody trained, and the weights' files: float16
safetensors beside the released policies, and one file of the batch statistics of random models, so
that an export gives the same fingerprint everywhere. Needs torch and onnxscript (extra `zoo`);
imported when used.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
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

#: File of the batch statistics of all random models, beside the weights.
STATISTICS = "statistics"

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


def make(name: str, weights: Path | None = None) -> nn.Module:
    """A definition ready to run.

    Args:
        name: Key of `DEFINITIONS`.
        weights: File of trained weights; None for random ones, the same everywhere.

    Raises:
        ModelError: A file does not fit the definition.
    """
    model = _drawn(name) if weights is None else DEFINITIONS[name]()
    if weights is not None:
        load_weights(model, weights)
    elif _statistics(model):
        load_statistics(model, name.partition("@")[0])
    return model.eval()


def _drawn(name: str) -> nn.Module:
    """A definition with its random weights, batch statistics not among them."""
    torch.manual_seed(0)
    model = DEFINITIONS[name]()
    _scale(model)
    return model


def measure_statistics(name: str, warm: Sequence[Tensor]) -> dict[str, Tensor]:
    """Batch statistics of a random model from what flows through it; empty where it has none.

    Computed in double. That is not enough for two processors to agree in every bit of float32,
    since libraries add in another order on each: what is released was measured once.

    Args:
        name: Key of `DEFINITIONS`.
        warm: Inputs, each with a batch.

    Returns:
        Name in the model to float32 tensor of one number a channel.
    """
    model = _drawn(name).double().train()
    with torch.no_grad():
        for _ in range(WARM_PASSES):
            model(*(x.double() if x.is_floating_point() else x for x in warm))
    return {key: tensor.clone() for key, tensor in _statistics(model.float()).items()}


def load_statistics(model: nn.Module, name: str) -> None:
    """Give a random model the batch statistics that are released with it.

    Args:
        model: The model.
        name: What it is called in `STATISTICS`.

    Raises:
        ModelError: The file has none that fit.
    """
    from safetensors.torch import load_file

    place = weights_file(STATISTICS)
    wanted = _statistics(model)
    found = {
        key.partition("/")[2]: tensor
        for key, tensor in load_file(str(place)).items()
        if key.startswith(f"{name}/")
    }
    if {k: t.shape for k, t in found.items()} != {k: t.shape for k, t in wanted.items()}:
        raise ModelError(
            f"{str(place)!r} has no batch statistics that fit {name}; measure them again"
        )
    model.load_state_dict(found, strict=False)


def save_statistics(statistics: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    """Write the batch statistics of several models, by name, as one float32 file."""
    from safetensors.torch import save_file

    kept = {
        f"{name}/{key}": tensor.contiguous()
        for name, found in statistics.items()
        for key, tensor in found.items()
    }
    save_file(kept, str(path))


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    return {
        key: tensor
        for key, tensor in model.state_dict().items()
        if key.endswith((".running_mean", ".running_var"))
    }


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


def _scale(model: nn.Module) -> None:
    """Weights that keep signals alive through the depth: He for convolutions, small for tables."""
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
