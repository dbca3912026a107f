"""Options that several verbs share, and what is typed into them.

Owns their names, help texts and metavars; `cli_numbers.py` has the numbers among them. Knows no
verb. Imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routepilot.training.cli_numbers import DeadlineOpt as DeadlineOpt
from routepilot.training.cli_numbers import SecondsOpt as SecondsOpt
from routepilot.training.cli_numbers import SeedOpt as SeedOpt
from routepilot.training.effort import Effort

ModelArg = Annotated[
    str, typer.Argument(help="ONNX file, or zoo:NAME (see `routepilot zoo list`).")
]
BackendOpt = Annotated[str, typer.Option("--backend", "-b", help="Compiler to build with.")]
ThreadsOpt = Annotated[int, typer.Option(help="Threads an engine may use.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the result.")]
ShapeOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=SHAPE",
        help="Shape of a dynamic input, name=1x3x224x224; repeatable.",
    ),
]
InputsOpt = Annotated[
    list[Path] | None,
    typer.Option(
        "--inputs", metavar="FILE", help=".npz input set, one array an input; repeatable."
    ),
]
TrustOpt = Annotated[
    bool, typer.Option("--trust", help="Read a .pt2 program even if it may run code of its own.")
]
ToleranceOpt = Annotated[
    float, typer.Option(help="Largest loss allowed on every output, by --metric.")
]
MetricOpt = Annotated[str, typer.Option(help="rel_l2, or one of trtexec's l0 l1 l2 lInf cos.")]
LimitOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--limit", metavar="NAME=LIMIT", help="Limit of one output, name=0.05; repeatable."
    ),
]
BuildsOpt = Annotated[
    int | None,
    typer.Option(
        help="Routes to build, failures included; default and confirmation on top. By --effort"
        " when absent."
    ),
]
EffortOpt = Annotated[Effort, typer.Option(help="Preset of budgets and timing.")]
AllowOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="NAME",
        help="Overlook this difference to the records in OUT, e.g. versions.onnx; repeatable.",
    ),
]
UntilNoiseOpt = Annotated[
    bool,
    typer.Option(
        "--until-noise", help="Stop once the expected gain is below what timing can tell."
    ),
]
OutOpt = Annotated[Path, typer.Option("--out", "-o", help="Folder for results.")]
OptionOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-O",
        metavar="NAME=VALUE",
        help="Backend option, e.g. workspace_mib=4096; repeatable (docs/tensorrt.md).",
    ),
]
ExpressionOpt = Annotated[
    str | None,
    typer.Option(help="Build only routes of this trtexec expression, e.g. '-k=[a|b] -l=c'."),
]
ExpressionFileOpt = Annotated[
    Path | None, typer.Option(help="The same from a file, as for --tuneBuildRouteFile.")
]
RayOpt = Annotated[
    str | None,
    typer.Option("--ray", help="Run on a Ray cluster: local, auto or its address (docs/scale.md)."),
]
SlotOpt = Annotated[
    str | None,
    typer.Option(
        "--slot", help="With --ray: what a measuring slot takes, e.g. CPU=2,GPU=0.5,h200=1."
    ),
]


def listed(text: str | None) -> list[str]:
    """The names of an option that takes several, separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
