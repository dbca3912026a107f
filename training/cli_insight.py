"""Verbs that look into what was found: `explain`, `importance`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routepilot.env.wording import counted
from routepilot.training.cli import app
from routepilot.training.cli_options import JsonOpt, QuietOpt, SeedOpt

if TYPE_CHECKING:
    from routepilot.env.backends.layers import Layers
    from routepilot.training.explain import Explanation

#: Operators shown of each engine.
SHOWN = 12


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="Folder that `routepilot tune -o` wrote.")],
    quiet: QuietOpt = False,
    json: JsonOpt = False,
) -> None:
    """Say why the winner of a run is fast.

    Builds and times the winner again without each of its knobs, looks into the default engine and
    the winner with the compiler's own profiler, and names the models that the policy reasoned
    from. The builds are counted; the run's records stay as they are.

    Example: routepilot explain tuned
    """
    from routepilot.training import console
    from routepilot.training.explain import explain as work

    found = work(run, say=console.sayer(quiet or json))
    if json:
        console.print_json(found.as_json())
        return
    _print(found)


def _print(found: Explanation) -> None:
    from routepilot.training import console
    from routepilot.training.explain import COSTLIEST

    rows = []
    for knob in found.knobs:
        effect = "no accurate engine without it"
        if knob.effect is not None and knob.low is not None and knob.high is not None:
            effect = console.ratio_text(knob.effect, knob.low, knob.high)
        rows.append((f"{knob.knob}={knob.value}", knob.verdict, effect, knob.reason))
    console.print_table(
        f"{found.model}: {str(found.route) or 'the default route'};"
        f" {counted(found.builds, 'build')}",
        ("knob", "verdict", "speed-up it brings", "without it"),
        rows,
    )
    if not found.route.is_default:
        console.out.print(
            f"as fast with: {str(found.minimal) or 'the default route'}"
            f" ({console.speedup_text(*found.minimal_speedup)})",
            markup=False,
        )
    engines = [(n, e) for n, e in (("default", found.default), ("winner", found.winner)) if e]
    kinds = list(dict.fromkeys(k for _, e in engines for k in [*e.by_kind(), *e.nodes]))
    spent = {k: max(e.by_kind().get(k, 0.0) for _, e in engines) for k in kinds}
    shown = sorted(kinds, key=lambda k: -spent[k])[:SHOWN]
    console.print_table(
        "engines from the inside: milliseconds by operator (nodes)",
        ("operator", *(name for name, _ in engines)),
        [
            *((k, *(_spent_text(e, k) for _, e in engines)) for k in shown),
            ("sum of layers", *(_sum_text(e) for _, e in engines)),
            ("end to end", *(f"{e.end_to_end_ms:.4f}" for _, e in engines)),
            ("end to end, profiled", *(f"{e.profiled_ms:.4f}" for _, e in engines)),
        ],
    )
    for name, engine in engines:
        console.print_table(
            f"costliest layers of the {'default engine' if name == 'default' else name}",
            ("layer", "operator", "kernel", "ms", "of the sum"),
            [
                (
                    layer.name,
                    layer.kind,
                    layer.kernel,
                    f"{layer.milliseconds:.4f}",
                    f"{100 * layer.milliseconds / max(engine.sum_ms, 1e-9):.0f} %",
                )
                for layer in engine.costliest(COSTLIEST)
            ],
        )
    if found.models:
        console.print_table(
            "models that the policy reasoned from",
            ("model", "likeness", "the winner's route there", "best there"),
            [
                (
                    model.name,
                    f"{model.likeness:.3f}",
                    f"{model.speedup:.2f}x" if model.speedup else model.status or "not on record",
                    f"{model.best_speedup:.2f}x with {model.best or 'the default route'}",
                )
                for model in found.models
            ],
        )


def _spent_text(layers: Layers, kind: str) -> str:
    """Milliseconds and nodes of an operator; empty where the engine has none of it."""
    spent, nodes = layers.by_kind().get(kind, 0.0), layers.nodes.get(kind, 0)
    return f"{spent:.4f} ({nodes})" if spent or nodes else ""


def _sum_text(layers: Layers) -> str:
    """The sum of the layers' times, and what share of the profiled whole it is."""
    share = 100 * layers.sum_ms / layers.profiled_ms if layers.profiled_ms else 0.0
    return f"{layers.sum_ms:.4f} ({share:.0f} % of the profiled whole)"


@app.command()
def importance(
    table: Annotated[str, typer.Argument(help="Table file, or the name of a released table.")],
    model: Annotated[
        str | None, typer.Option(help="One model by name; the whole corpus when absent.")
    ] = None,
    seed: SeedOpt = 0,
    json: JsonOpt = False,
) -> None:
    """Say which knobs move the speed, over one model or a corpus.

    Permutation importance of a random forest on routes it was not fitted to, with 95 % intervals:
    over resampled routes for one model, over resampled models for a corpus. Needs the extra
    `bayes`.

    Example: routepilot importance cpu --model ddddocr
    """
    from routepilot.env.tables import load_table
    from routepilot.training import console
    from routepilot.training.defaults import find_table
    from routepilot.training.importance import importance as work
    from routepilot.training.importance import shown

    found = work(load_table(find_table(table)), model, seed)
    if json:
        console.print_json(found.as_json())
        return
    console.print_table(
        f"{model or counted(len(found.models), 'model')}: the knobs explain {100 * found.r2:.0f}"
        " % of"
        " the variance of log speed-ups on routes not fitted",
        ("knob", "goes unexplained without it", "95 %"),
        shown(found.knobs),
    )
