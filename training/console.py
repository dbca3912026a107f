"""What the command line shows: JSON for machines, tables and progress for people.

Owns the terminal. Results go to standard output; progress and remarks go to standard error, so
that `--json` output can be piped. Progress bars appear on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from routepilot.env.liveness_words import in_words
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.wording import counted, verb

if TYPE_CHECKING:
    from routepilot.env.routes import Catalog
    from routepilot.training.compare import AgentResult
    from routepilot.training.doctor import Check

out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)


def print_json(data: object) -> None:
    """Print strict JSON to standard output."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def say(text: str) -> None:
    """One remark on standard error; one line of a pipe, however long."""
    err.print(escape(text), soft_wrap=not err.is_terminal)


def sayer(quiet: bool) -> Callable[[str], None]:
    """`say`, or what says nothing."""
    return (lambda _: None) if quiet else say


def speedup_text(value: float, low: float, high: float) -> str:
    """`1.94x (1.90 to 1.97)`."""
    return f"{value:.2f}x ({low:.2f} to {high:.2f})"


def ratio_text(log_ratio: float, low: float, high: float) -> str:
    """`1.94x (1.90 to 1.97)` of logarithms."""
    return speedup_text(math.exp(log_ratio), math.exp(low), math.exp(high))


def outcome_text(outcome: Outcome) -> str:
    """One line on an outcome: what came of it, or why nothing did."""
    route = str(outcome.route) or "default route"
    measured = outcome.measurement
    if outcome.status is Status.OK and measured is not None:
        interval = speedup_text(measured.speedup, math.exp(measured.low), math.exp(measured.high))
        error = outcome.losses.get("rel_l2")
        loss = f", error {error:.1e}" if error is not None else ""
        note = f"  [{outcome.reason}]" if outcome.reason else ""
        return f"{route}  {interval}{loss}{note}"
    return f"{route}  {outcome.status.value}: {outcome.reason}"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to standard output; numbers are given as text by the caller."""
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(escape(column), overflow="fold", justify="left" if i == 0 else "default")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    out.print(table)


class Steps:
    """Progress over a known number of steps: a bar on a terminal, lines elsewhere.

    Args:
        title: What is being done.
        total: How many steps at most.
        quiet: Show nothing.
    """

    def __init__(self, title: str, total: int, *, quiet: bool = False) -> None:
        self._title, self._total, self._quiet = title, total, quiet
        self._live = sys.stderr.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=err,
            disable=not self._live,
        )
        self._task = self._bar.add_task(escape(title), total=total, note="")

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def step(self, number: int, text: str, note: str = "") -> None:
        """Step `number` is done; `text` is its line, `note` what stays beside the bar."""
        if self._quiet:
            return
        if self._live:
            self._bar.update(self._task, completed=number, note=escape(note))
            self._bar.console.print(f"  {escape(text)}")
        else:
            say(f"[{number}/{self._total}] {text}")

    def quietly(self, number: int, total: int) -> None:
        """Move the bar alone; without a terminal, say so at every tenth of the way."""
        if self._quiet:
            return
        if self._live:
            self._bar.update(self._task, completed=number, total=total)
        elif number == total or number % max(total // 10, 1) == 0:
            say(f"[{number}/{total}]")


def print_comparison(title: str, rows: Mapping[str, AgentResult]) -> None:
    """One table: what each agent built, spent and reached."""
    print_table(
        title,
        ("agent", "builds", "seconds", "confirmed speed-up", "error", "route"),
        [
            (
                name,
                row.search.builds,
                f"{row.search.seconds:.1f}",
                speedup_text(*row.confirmed.speedup) if not row.confirmed.route.is_default else "1",
                f"{row.confirmed.outcome.losses.get('rel_l2', 0.0):.1e}"
                if row.confirmed.outcome
                else "0",
                str(row.confirmed.route) or "default",
            )
            for name, row in rows.items()
        ],
    )
    for name, row in rows.items():
        if row.trtexec:
            out.print(f"{name} by trtexec: {row.trtexec}", markup=False, soft_wrap=True)


def print_forecast(foreseen: Mapping[str, Any]) -> None:
    """What a policy expects of a model before any build, and from which models it reasons."""
    print_table(
        "before any build",
        ("route", "accurate and faster", "speed-up if accurate"),
        [
            (
                row["route"],
                f"{100 * row['chance']:.0f} %",
                speedup_text(row["speedup"], row["low"], row["high"]),
            )
            for row in foreseen["routes"]
        ],
    )
    models = ", ".join(f"{m['name']} ({m['likeness']:.2f})" for m in foreseen["models"])
    out.print(f"it reasons most from: {models} (likeness, 1 is the same)", markup=False)


def print_evaluation(result: Mapping[str, Any]) -> None:
    """The headlines of the protocol: gain shares, the subject against each rival, stops."""
    from routepilot.training.evaluation_tables import headline_tables

    for table in headline_tables(result):
        print_table(table.title, table.columns, table.rows)
    if result["forecast"] is not None:
        error = result["forecast"]["calibration_error"]
        out.print(f"chances given before any build: expected calibration error {error:.3f}")
    if result.get("policy"):
        seen = ", ".join(result["policy"]["trained_on"]) or "none of these models"
        out.print(f"the policy {result['policy']['name']} was trained on: {seen}", markup=False)
    for judged, known in result["leakage"]["duplicates"]:
        out.print(f"near-duplicates across the split: {judged} and {known}", markup=False)


def print_description(facts: Mapping[str, Any]) -> None:
    """What a table holds: models, failures, where it comes from, and the sum in words."""
    from routepilot.training.table_sheet import in_words

    print_table(
        f"{counted(len(facts['models']), 'model')} at an error of {100 * facts['limit']:g} %",
        ("model", "family", "weights", "default ms", "routes", "feasible", "fast", "best", "route"),
        [
            (
                m["name"],
                m["family"],
                "trained" if m["trained"] else "random",
                f"{m['default_latency_ms']:.2f}",
                m["routes"],
                m["feasible"],
                f"{m['fast_speedup']:.2f}x",
                f"{m['best_speedup']:.2f}x",
                m["best_route"] or "default",
            )
            for m in facts["models"]
        ],
    )
    print_table("outcomes", ("status", "routes"), list(facts["statuses"].items()))
    print_table(
        "commonest reasons",
        ("status", "reason", "routes", "models"),
        [(row["status"], row["reason"], row["builds"], row["models"]) for row in facts["reasons"]],
    )
    for line in [*_origin(facts), *in_words(facts)]:
        out.print(line, markup=False, soft_wrap=True)


def _origin(facts: Mapping[str, Any]) -> list[str]:
    """Hardware, versions, settings, command and date of a table."""
    target, made = facts["target"], facts["manifest"]
    versions = ", ".join(f"{name} {number}" for name, number in target["versions"].items())
    settings = ", ".join(f"{name}={value}" for name, value in target["settings"].items())
    lines = [f"{target['device']}; {versions}; {settings}"]
    return [*lines, *(f"{key}: {made[key]}" for key in ("command", "date") if key in made)]


def print_check(check: Check) -> None:
    """One check of the doctor on one line: status, what was seen, what to do."""
    hint = f" [to do: {check.hint}]" if check.hint else ""
    words = " ".join(f"{check.status:<12}{check.check}: {check.detail}{hint}".splitlines())
    out.print(words, markup=False, soft_wrap=True, style="red" if check.status == "fail" else None)


def print_knobs(
    catalog: Catalog, rows: Sequence[Mapping[str, Any]], remarks: Sequence[str]
) -> None:
    """A catalog as a table; where it is known, on how many models of the corpus a knob acts."""
    known = any("corpus_live" in row for row in rows)
    columns = ("knob", "values", "default", "what it does", *(["acts on"] if known else []))
    print_table(
        f"{catalog.name} {catalog.version}: {counted(len(rows), 'knob')}",
        columns,
        [
            (row["name"], "|".join(row["values"]), row["default"], row["help"], _acts_on(row))[
                : len(columns)
            ]
            for row in rows
        ],
    )
    for line in remarks:
        out.print(line, markup=False, soft_wrap=True)


def _acts_on(row: Mapping[str, Any]) -> str:
    live, models = row.get("corpus_live"), row.get("corpus_models")
    return "" if live is None else f"{live} of {models}"


def print_live(name: str, data: Mapping[str, Any]) -> None:
    """What single changes do to one model: those that act, and those that fail with the reason."""
    corpus = data.get("corpus_live", {})
    live = [
        (
            change,
            f"on {corpus[change]} of {counted(data['corpus_models'], 'model')}" if corpus else "",
        )
        for change in data["live"]
    ]
    tried = len(data["changes"])
    act = verb(len(live), "is", "are", tried)
    print_table(
        f"{name}: {len(live)} of {counted(tried, 'change')} {act} live,"
        f" {counted(data['distinct_engines'], 'distinct engine')}; {data['compiler']},"
        f" {data['target']},"
        f" {data['seconds']:.0f} s",
        ("change that acts", *(["its knob acts on"] if corpus else [])),
        [row[: 1 + bool(corpus)] for row in live],
    )
    failed, identical = len(data["failed"]), len(data["identical"])
    if failed:
        print_table(
            f"{counted(failed, 'change')} {verb(failed, 'fails', 'fail')}",
            ("change", "the compiler says"),
            [(change, data["messages"][change]) for change in data["failed"]],
        )
    leaves = verb(identical, "leaves", "leave")
    out.print(f"{counted(identical, 'change')} {leaves} the engine as it is", markup=False)


def print_liveness(facts: Mapping[str, Any]) -> None:
    """What a liveness table holds: live knobs by model, failures, agreements."""
    total = facts["outcomes"]
    print_table(
        f"{facts['compiler']}: {counted(facts['changes'], 'change')} of"
        f" {counted(facts['knobs'], 'knob')};"
        f" {sum(total.values())} compiled: {total.get('changed', 0)} changed,"
        f" {total.get('identical', 0)} identical, {total.get('failed', 0)} failed",
        ("model", "target", "tried", "changed", "identical", "failed", "refused", "live knobs")
        + ("engines",),
        [
            (m["name"], m["target"], m["tried"], m["changed"], m["identical"], m["failed"])
            + (m["refused"], len(m["live_knobs"]), m["distinct_engines"])
            for m in facts["models"]
        ],
    )
    for refused in facts["refused_models"]:
        out.print(
            f"{refused['name']} for {refused['target']}: {refused['reason']}",
            markup=False,
            soft_wrap=True,
        )
    print_table(
        "failures by reason",
        ("reason", "compiles", "models", "commonest changes"),
        [
            (r["reason"], r["count"], r["models"], " ".join(r["changes"]))
            for r in facts["reasons"][:12]
        ],
    )
    print_table(
        "most often live",
        ("knob", "models"),
        list(facts["live_knobs"].items())[:20],
    )
    for line in in_words(facts):
        out.print(line, markup=False, soft_wrap=True)
    acted = facts["operator_rule"]["changed_though_ruled_out"]
    for case in acted[:12]:
        out.print(f"  {case['name']} for {case['target']}: {case['change']}", markup=False)
