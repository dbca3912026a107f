"""Verbs that ask NVIDIA's compilers: `live`, `engine`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from routepilot.env.errors import InputError
from routepilot.env.wording import counted
from routepilot.training.cli import app
from routepilot.training.cli_options import (
    BackendOpt,
    InputsOpt,
    JsonOpt,
    QuietOpt,
    SecondsOpt,
    SeedOpt,
    ShapeOpt,
    listed,
)

#: What a sweep by TensorRT-RTX does not say.
NOT_PROVED = (
    "This is TensorRT-RTX, which chooses kernels at run time: -cask*, -tactic:* and much of"
    " -mha_fusion:v2:* can look inert here and matter to TensorRT on a data-centre GPU."
)


@app.command()
def live(
    model: Annotated[
        str | None,
        typer.Argument(help="ONNX file, or zoo:NAME for a corpus model; none with --table."),
    ] = None,
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
    table: Annotated[
        Path | None, typer.Option(help="Sweep many models into this liveness table.")
    ] = None,
    models: Annotated[
        str,
        typer.Option(
            help="With --table: zoo, variants, a folder of prepared models, or names or files"
            " separated by commas."
        ),
    ] = "zoo",
    targets: Annotated[
        str, typer.Option(help="With --table: compute capabilities, separated by commas.")
    ] = "8.9,12.0",
    max_seconds: SecondsOpt = None,
    resume: Annotated[
        list[Path] | None,
        typer.Option(metavar="TABLE", help="With --table: earlier tables to take in; repeatable."),
    ] = None,
    shape: ShapeOpt = None,
    inputs: InputsOpt = None,
    seed: SeedOpt = 0,
    quiet: QuietOpt = False,
    json: JsonOpt = False,
) -> None:
    """Say which TensorRT knobs change the engine of a model, or of many.

    Compiles the model with TensorRT-RTX (extra `rtx`), once for each knob value changed alone, and
    compares the engines' bytes. A value that leaves them equal does nothing to this model in this
    compiler. TensorRT-RTX chooses kernels at run time, so knobs of tactics and attention kernels
    can look inert here and matter to TensorRT on a data-centre GPU.

    With --table, many models and targets are swept into a file; the same command again continues.

    Example: routepilot live model.onnx --capability 8.9 --jobs 2

    Example: routepilot live --table liveness.parquet --models zoo --targets 8.9,12.0 --jobs 16
    """
    names = [name.strip() for name in knobs.split(",") if name.strip()] if knobs else None
    if (model is None) == (table is None):
        raise InputError("give one model, or --table FILE for many; see routepilot live --help")
    if table is not None:
        _live_table(table, models, targets, jobs, max_seconds, names, resume or [], seed, json)
        return
    from routepilot.env.liveness import live as run
    from routepilot.env.liveness_prior import LivenessPrior
    from routepilot.training import console
    from routepilot.training.defaults import released_liveness
    from routepilot.training.inputs import prepare_model

    prepared = prepare_model(model or "", shape, inputs, seed).model
    with console.Steps(f"live {prepared.name}", 1, quiet=quiet or json) as steps:
        found = run(
            prepared,
            compute_capability=capability,
            jobs=jobs,
            knobs=listed(knobs) or None,
            cache=cache,
            progress=lambda done, total: steps.quietly(done, total),
        )
    table_of_corpus = released_liveness()
    prior = None if table_of_corpus is None else LivenessPrior(table_of_corpus)
    data = found.as_json()
    if prior is not None:
        data["corpus_models"] = len(prior.models)
        data["corpus_live"] = {c: prior.live_on.get(c.partition("=")[0], 0) for c in found.live}
    if json:
        console.print_json(data)
        return
    console.print_live(prepared.name, data)
    console.out.print(NOT_PROVED, markup=False, soft_wrap=True)


def _live_table(
    table: Path,
    models: str,
    targets: str,
    jobs: int,
    max_seconds: float | None,
    knobs: list[str] | None,
    resume: list[Path],
    seed: int,
    json: bool,
) -> None:
    """`live --table`: many models and targets into one file."""
    from routepilot.env.models import is_bundle
    from routepilot.training import console
    from routepilot.training.files import ensure_folder
    from routepilot.training.liveness_sweep import LivenessOptions, models_in, sweep_liveness

    ensure_folder(table.parent)
    if Path(models).is_dir() and not is_bundle(Path(models)):
        corpus = models_in(Path(models))
    else:
        from routepilot.training.cli_corpus import corpus_of

        corpus = [entry.model for entry in corpus_of(models, seed)]
    options = LivenessOptions(
        out=table,
        targets=tuple(target.strip() for target in targets.split(",") if target.strip()),
        jobs=jobs,
        seconds=math.inf if max_seconds is None else max_seconds,
        knobs=None if knobs is None else tuple(knobs),
        resume=tuple(resume),
    )
    with console.Steps("live", 1, quiet=json) as steps:
        swept = sweep_liveness(corpus, options, lambda done, total: steps.quietly(done, total))
    for name, why in swept.given_up.items():
        console.say(f"{name}: given up: {why}")
    if json:
        console.print_json(
            {"table": str(table), "left": swept.left, "given_up": dict(swept.given_up)}
        )
        return
    rest = f", {counted(swept.left, 'change')} left: run it again" if swept.left else ""
    console.out.print(f"written: {table} ({counted(len(corpus), 'model')}{rest})", markup=False)
    console.out.print(NOT_PROVED, markup=False)


@app.command()
def engine(
    plan: Annotated[Path, typer.Argument(help="Engine file, e.g. tuned/deploy/engine.plan.")],
    backend: BackendOpt = "tensorrt",
    inputs: Annotated[
        Path | None, typer.Option(help=".npz input set; inputs.npz beside the engine when absent.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Load an engine that this installation did not build.")
    ] = False,
    device: Annotated[int, typer.Option(help="CUDA device number.")] = 0,
    seconds: Annotated[float, typer.Option(help="Seconds of timing.")] = 1.0,
    json: JsonOpt = False,
) -> None:
    """Load a saved TensorRT engine, run it and time it.

    An engine is code that runs. One that this installation did not build is loaded only with
    --trust, and one of another version or GPU is refused by TensorRT.

    Example: routepilot engine tuned/deploy/engine.plan
    """
    import statistics

    from routepilot.env.backends.tensorrt_engine import open_plan
    from routepilot.env.errors import InputError
    from routepilot.env.models import read_input_sets
    from routepilot.training import console

    if backend not in ("tensorrt", "tensorrt_rtx"):
        raise InputError(f"backend {backend!r} has no plan files; give tensorrt or tensorrt_rtx")
    execution = open_plan(plan, backend, trust=trust, device=device)
    try:
        (given,) = read_input_sets([inputs or plan.with_name("inputs.npz")])
        outputs = execution.run(given)
        times, notes = execution.time(given, seconds)
    finally:
        execution.close()
    shapes = {name: list(array.shape) for name, array in outputs.items()}
    latency = statistics.median(times)
    if json:
        console.print_json(
            {"outputs": shapes, "latency_ms": latency, "runs": len(times), "notes": notes}
        )
        return
    console.print_table(
        f"{plan.name}: median {latency:.4f} ms over {counted(len(times), 'run')}",
        ("output", "shape"),
        [(name, "x".join(map(str, shape))) for name, shape in shapes.items()],
    )
    for note in notes:
        console.say(note)
