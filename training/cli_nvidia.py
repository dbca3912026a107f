"""Verbs that ask NVIDIA's compilers: `live`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routepilot.training.cli import InputsOpt, JsonOpt, ModelArg, SeedOpt, ShapeOpt, app


@app.command()
def live(
    model: ModelArg,
    capability: Annotated[
        str, typer.Option(help="Compute capability to compile for; no GPU is needed.")
    ] = "8.9",
    knobs: Annotated[
        str | None, typer.Option(help="Knobs to sweep, separated by commas; all when absent.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Compiling children at once.")] = 2,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of earlier answers; the user's cache when absent.")
    ] = None,
    shape: ShapeOpt = None,
    inputs: InputsOpt = None,
    seed: SeedOpt = 0,
    json: JsonOpt = False,
) -> None:
    """Say which TensorRT knobs change the engine of a model.

    Compiles the model with TensorRT-RTX (extra `rtx`), once for each knob value changed alone, and
    compares the engines' bytes. A value that leaves them equal does nothing to this model in this
    compiler. TensorRT-RTX chooses kernels at run time, so knobs of tactics and attention kernels
    can look inert here and matter to TensorRT on a data-centre GPU.

    Example: routepilot live model.onnx --capability 8.9 --jobs 2
    """
    from routepilot.env.liveness import live as run
    from routepilot.training import console
    from routepilot.training.inputs import prepare_model

    prepared = prepare_model(model, shape, inputs, seed).model
    names = [name.strip() for name in knobs.split(",") if name.strip()] if knobs else None
    with console.Steps(f"live {prepared.name}", 1, quiet=json) as steps:
        found = run(
            prepared,
            compute_capability=capability,
            jobs=jobs,
            knobs=names,
            cache=cache,
            progress=lambda done, total: steps.quietly(done, total),
        )
    data = found.as_json()
    if json:
        console.print_json(data)
        return
    failed = data["failed"]
    console.print_table(
        f"{prepared.name}: {len(data['live'])} of {len(data['changes'])} changes are live,"
        f" {data['distinct_engines']} distinct engines; {data['compiler']}, {data['target']},"
        f" {data['seconds']:.0f} s",
        ("change", "what it does"),
        [
            *((change, "changes the engine") for change in data["live"]),
            *((change, "fails") for change in failed),
        ],
    )
    console.out.print(f"{len(data['identical'])} changes leave the engine as it is", markup=False)
