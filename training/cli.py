"""The command line: `routepilot`. Each verb is thin; the work is in the module of its name.

Owns the application, its first verbs and exit codes: 0 success, 1 failure, 2 usage or bad input,
130 interrupted with everything saved. Options that verbs share are in `cli_options.py`, more verbs
in `VERB_MODULES`. Heavy imports happen inside the verbs.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import nullcontext
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from routepilot.env.errors import InputError, RoutePilotError
from routepilot.env.wording import counted
from routepilot.training.cli_options import (
    AllowOpt,
    BackendOpt,
    BuildsOpt,
    DeadlineOpt,
    EffortOpt,
    ExpressionFileOpt,
    ExpressionOpt,
    InputsOpt,
    JsonOpt,
    LimitOpt,
    MetricOpt,
    ModelArg,
    OptionOpt,
    OutOpt,
    QuietOpt,
    RayOpt,
    SecondsOpt,
    SeedOpt,
    ShapeOpt,
    SlotOpt,
    ThreadsOpt,
    ToleranceOpt,
    TrustOpt,
    UntilNoiseOpt,
    listed,
)
from routepilot.training.effort import Effort, preset

#: Modules whose import adds verbs to `app`.
VERB_MODULES = (
    "cli_corpus",
    "cli_evidence",
    "cli_insight",
    "cli_learning",
    "cli_nvidia",
    "cli_policy",
    "cli_records",
)

#: Exit code after Ctrl-C.
INTERRUPTED = 130

app = typer.Typer(
    name="routepilot",
    help="Learned selection of compiler build routes: fewer builds for the same speed-up.\n\n"
    "Example: routepilot tune model.onnx -o tuned",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class ReportForm(str, Enum):
    """Forms of a report."""

    HTML = "html"
    MARKDOWN = "md"
    SVG = "svg"
    PNG = "png"


@app.command()
def tune(
    model: ModelArg,
    out: OutOpt = Path("routepilot-out"),
    backend: BackendOpt = "cpu",
    policy: Annotated[
        str | None, typer.Option(help="Policy by name (`routepilot policy list`), folder or file.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Choose by another agent, e.g. random.")] = None,
    effort: EffortOpt = Effort.STANDARD,
    max_builds: BuildsOpt = None,
    max_seconds: SecondsOpt = None,
    until_noise: UntilNoiseOpt = False,
    allow: AllowOpt = None,
    shape: ShapeOpt = None,
    inputs: InputsOpt = None,
    trust: TrustOpt = False,
    tolerance: ToleranceOpt = 1e-2,
    metric: MetricOpt = "rel_l2",
    limit: LimitOpt = None,
    threads: ThreadsOpt = 1,
    option: OptionOpt = None,
    expression: ExpressionOpt = None,
    expression_file: ExpressionFileOpt = None,
    deadline: DeadlineOpt = 120.0,
    seed: SeedOpt = 0,
    quiet: QuietOpt = False,
    json: JsonOpt = False,
) -> None:
    """Find the fastest accurate route for a model.

    Spends a handful of builds. Writes result.json, report.html, the record store and deploy/ (the
    winning model, load.py, manifest.json) into OUT; the same command again continues where it was.
    Never answers with an engine slower or less accurate than the default. With
    --max-builds 0 it builds no route, and says which it would build and why.

    Example: routepilot tune model.onnx -o tuned --shape input=1x3x224x224 --max-builds 6
    """
    from routepilot.training import console
    from routepilot.training.defaults import Policies
    from routepilot.training.inputs import (
        backend_options,
        gate_from_options,
        prepare_model,
        route_expression,
    )

    chosen = preset(effort)
    builds = chosen.builds if max_builds is None else max_builds
    gate = gate_from_options(metric, tolerance, limit)
    options = backend_options(option, threads)
    routes = route_expression(expression, expression_file)
    policies = Policies()
    prepared = prepare_model(
        model,
        shape,
        inputs,
        seed,
        trust=trust,
        meanwhile=partial(policies.foreload, backend, policy, agent),
    ).model

    # After the model, so that their import falls into the time that its references take.
    from routepilot.training.report import write_report
    from routepilot.training.search import Budget
    from routepilot.training.session import SessionConfig
    from routepilot.training.tune import tune as run
    from routepilot.training.view import SearchView

    title, silent = f"tune {prepared.name}", quiet or json
    with SearchView(title, builds, max_seconds=max_seconds, quiet=silent) as view:
        result = run(
            prepared,
            backend=backend,
            policy=policy,
            agent=agent,
            max_builds=builds,
            max_seconds=max_seconds,
            until_noise=until_noise,
            out=out,
            gate=gate,
            threads=threads,
            seed=seed,
            config=SessionConfig(
                options=options,
                plan=chosen.plan,
                deadline_seconds=deadline,
                allow=tuple(allow or ()),
            ),
            expression=routes,
            policies=policies,
            say=view.say,
            on_outcome=view.outcome,
            on_ask=view.asking,
        )
    write_report(out)
    if json:
        console.print_json(result.as_json())
        return
    if builds == 0 and result.foreseen:
        console.print_forecast(result.foreseen)
    if result.is_default:
        console.out.print(
            f"{result.model}: the default route stays ({result.confirmed.note});"
            f" {counted(result.search.builds, 'build')}, {result.seconds:.1f} s",
            markup=False,
            soft_wrap=True,
        )
    else:
        console.out.print(
            f"{result.model}: {console.speedup_text(*result.confirmed.speedup)} over the default"
            f" with {result.route}; {counted(result.search.builds, 'build')},"
            f" {result.seconds:.1f} s",
            markup=False,
            soft_wrap=True,
        )
    ending = result.search.ending(Budget(builds, max_seconds))
    console.out.print(f"the search ended: {ending}", markup=False, soft_wrap=True)
    if result.trtexec:
        console.out.print(
            f"the same by trtexec, in {out}: {result.trtexec}", markup=False, soft_wrap=True
        )
    console.out.print(
        f"written to {out}: result.json, report.html, deploy/", markup=False, soft_wrap=True
    )


@app.command()
def compare(
    model: ModelArg,
    agents: Annotated[
        str, typer.Option(help="Agents, separated by commas (`routepilot agents` lists them).")
    ] = "default,ppo,fast,random",
    out: OutOpt = Path("routepilot-out"),
    backend: BackendOpt = "cpu",
    policy: Annotated[str | None, typer.Option(help="Policy for ppo, or bc.")] = None,
    table: Annotated[
        str | None, typer.Option(help="Route table for agents that learn from one.")
    ] = None,
    effort: EffortOpt = Effort.STANDARD,
    max_builds: BuildsOpt = None,
    max_seconds: SecondsOpt = None,
    until_noise: UntilNoiseOpt = False,
    allow: AllowOpt = None,
    shape: ShapeOpt = None,
    inputs: InputsOpt = None,
    trust: TrustOpt = False,
    tolerance: ToleranceOpt = 1e-2,
    metric: MetricOpt = "rel_l2",
    limit: LimitOpt = None,
    threads: ThreadsOpt = 1,
    option: OptionOpt = None,
    expression: ExpressionOpt = None,
    expression_file: ExpressionFileOpt = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Agents at once, each on a core or GPU of its own; by turns if absent."),
    ] = None,
    ray: RayOpt = None,
    slot: SlotOpt = None,
    deadline: DeadlineOpt = 120.0,
    seed: SeedOpt = 0,
    quiet: QuietOpt = False,
    json: JsonOpt = False,
) -> None:
    """Run several agents on a model at equal budgets.

    With --workers or --ray agents run at once; what two ask for is built by the first all the same.
    --max-builds and --max-seconds are of each agent. With --until-noise those that can say what
    they expect (ppo, two-way-gp, greedy, thompson) may stop before; the others spend it all.

    Example: routepilot compare zoo:ddddocr --agents default,ppo,fast,random --max-builds 6
    """
    from routepilot.training import console
    from routepilot.training.compare import compare as run
    from routepilot.training.inputs import (
        backend_options,
        gate_from_options,
        prepare_model,
        route_expression,
    )
    from routepilot.training.search import Budget
    from routepilot.training.session import SessionConfig
    from routepilot.training.slots import measuring_slots
    from routepilot.training.view import CompareView

    chosen = preset(effort)
    builds = chosen.builds if max_builds is None else max_builds
    config = SessionConfig(
        backend=backend,
        options=backend_options(option, threads),
        gate=gate_from_options(metric, tolerance, limit),
        plan=chosen.plan,
        deadline_seconds=deadline,
        allow=tuple(allow or ()),
    )
    routes = route_expression(expression, expression_file)
    budget = Budget(builds, max_seconds, chosen.plan.half_width if until_noise else None)
    wanted = listed(agents)
    if not wanted:
        raise InputError("--agents names nobody; `routepilot agents` lists who there is")
    named = prepare_model(model, shape, inputs, seed, trust=trust)
    title = f"compare on {named.model.name}"
    silent = quiet or json
    by_turns = workers is None and ray is None and slot is None
    with (
        nullcontext()
        if by_turns
        else measuring_slots(
            config, workers, ray=ray, needs=slot, say=console.sayer(silent)
        ) as pool,
        CompareView(title, wanted, builds, max_seconds=max_seconds, quiet=silent) as view,
    ):
        rows = run(
            named,
            wanted,
            budget,
            config,
            out,
            table=table,
            policy=policy,
            seed=seed,
            expression=routes,
            say=view.say,
            on_outcome=view.outcome,
            on_ask=view.asking,
            pool=pool,
        )
    if json:
        console.print_json({"agents": {name: row.as_json() for name, row in rows.items()}})
        return
    console.print_comparison(f"{named.model.name}: {counted(builds, 'build')} each", rows)


@app.command()
def knobs(
    backend: BackendOpt = "cpu",
    threads: ThreadsOpt = 1,
    option: OptionOpt = None,
    json: JsonOpt = False,
) -> None:
    """List the knobs of a backend.

    Example: routepilot knobs --backend cpu --threads 2
    """
    from routepilot.env.backends import load_backend
    from routepilot.training import console
    from routepilot.training.inputs import backend_options
    from routepilot.training.knob_list import knob_rows, remarks

    compiler = load_backend(backend, backend_options(option, threads))
    rows = knob_rows(compiler)
    if json:
        console.print_json(rows)
        return
    console.print_knobs(compiler.catalog(), rows, remarks(compiler))


@app.command()
def features(
    model: ModelArg,
    shape: ShapeOpt = None,
    inputs: InputsOpt = None,
    trust: TrustOpt = False,
    seed: SeedOpt = 0,
    json: JsonOpt = False,
) -> None:
    """Show what is known of a model before a build.

    Example: routepilot features model.onnx --shape input=1x3x224x224
    """
    from routepilot.env.features import describe, model_features
    from routepilot.training import console
    from routepilot.training.inputs import prepare_model

    prepared = prepare_model(model, shape, inputs, seed, trust=trust).model
    values = model_features(prepared)
    rows = [(name, value, help) for (name, help), value in zip(describe(), values, strict=True)]
    if json:
        console.print_json(
            {"model": prepared.name, "fingerprint": prepared.fingerprint}
            | {"features": {name: value for name, value, _ in rows}}
        )
        return
    console.print_table(
        f"{prepared.name} ({prepared.fingerprint[:12]})",
        ("feature", "value", "meaning"),
        [(name, f"{value:.4g}", help) for name, value, help in rows],
    )


@app.command()
def agents(json: JsonOpt = False) -> None:
    """List the agents that can choose routes.

    Example: routepilot agents
    """
    from routepilot.agents import AGENTS
    from routepilot.training import console

    if json:
        console.print_json([{"name": name, "help": help} for name, help in AGENTS.items()])
        return
    console.print_table("agents", ("agent", "how it chooses"), list(AGENTS.items()))


@app.command()
def doctor(backend: BackendOpt = "cpu", option: OptionOpt = None, json: JsonOpt = False) -> None:
    """Check what works on this machine, one line a contract.

    Exit code 1 when a check fails; what is unavailable is no failure.

    Example: routepilot doctor --backend cpu --json
    """
    from routepilot.env.backends import check_backend
    from routepilot.training import console
    from routepilot.training.doctor import run_checks
    from routepilot.training.inputs import backend_options

    check_backend(backend)
    checks = []
    for check in run_checks(backend, backend_options(option)):
        checks.append(check.as_json())
        if not json:  # as they come: a compiler takes its time
            console.print_check(check)
    failed = any(check["status"] == "fail" for check in checks)
    if json:
        console.print_json(checks)
    raise typer.Exit(1 if failed else 0)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder that `routepilot tune -o` wrote.")],
    form: Annotated[
        ReportForm, typer.Option("--format", help="html; md for a pull request; svg, png: figure.")
    ] = ReportForm.HTML,
) -> None:
    """Write the report of a run anew.

    What `compare` and `explain` left in the folder is on the page too. Figures need the extra
    `plots`.

    Example: routepilot report tuned --format md
    """
    from routepilot.training import console
    from routepilot.training.plots import write_figure
    from routepilot.training.report import write_report, write_summary

    if form is ReportForm.HTML:
        path = write_report(run)
    elif form is ReportForm.MARKDOWN:
        path = write_summary(run)
    else:
        path = write_figure(run, form.value)
    console.out.print(str(path), markup=False, soft_wrap=True)


@app.command()
def demo(
    out: OutOpt = Path("routepilot-demo"),
    max_builds: Annotated[int, typer.Option(help="Routes each agent may build.")] = 6,
    seed: SeedOpt = 0,
    quiet: QuietOpt = False,
    json: JsonOpt = False,
) -> None:
    """Train a policy, then tune a model it never saw.

    Takes a few minutes on two cores.

    Example: routepilot demo -o demo
    """
    from routepilot.training.demo import run_demo

    run_demo(out, max_builds=max_builds, seed=seed, quiet=quiet, as_json=json)


def whole_app() -> typer.Typer:
    """The application with every verb."""
    for name in VERB_MODULES:
        importlib.import_module(f"routepilot.training.{name}")
    return app


def main() -> None:
    """Entry point: run a verb, turn our errors into one line and an exit code."""
    # Before numpy is there. Ours are many small products, which a second thread makes no faster
    # and, where cores are shared, far slower; `evaluate` works on as many cores as it is given.
    # A surrogate is fitted while the first child starts, which wants the other core: on two cores
    # one thread took 0.9 s for it and two took 1.4 s.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        whole_app()(standalone_mode=True)
    except RoutePilotError as error:
        sys.stderr.write(f"routepilot: {' '.join(str(error).split())}\n")
        raise SystemExit(error.exit_code) from None
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # Typer's answer to Ctrl-C, which says nothing
            text = "interrupted; everything so far is saved, the same command goes on"
            sys.stderr.write(f"routepilot: {text}\n")
        raise
