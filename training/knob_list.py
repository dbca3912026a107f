"""What `routepilot knobs` shows: a catalog, what is kept out of it, and what seldom acts.

Owns the rows and the remarks. Prints nothing.
"""

from __future__ import annotations

from typing import Any

from routepilot.env.backends.base import Backend, LeavesOut
from routepilot.env.backends.tensorrt_catalog import is_build_route_knob
from routepilot.env.liveness_prior import LEFT_TO_RUN_TIME, LivenessPrior
from routepilot.env.wording import counted, verb
from routepilot.training.defaults import released_liveness

#: Backends whose knobs a liveness table is about.
SWEPT = ("tensorrt", "tensorrt_rtx")


def knob_rows(backend: Backend) -> list[dict[str, Any]]:
    """The knobs of a backend, as plain data.

    Those that a released liveness table knows have `corpus_live` too: on how many of
    `corpus_models` models a value of the knob changed the engine.
    """
    rows: list[dict[str, Any]] = [
        {
            "name": k.name,
            "values": list(k.values),
            "default": k.default,
            "help": k.help,
            "marks": list(k.marks),
        }
        for k in backend.catalog().knobs
    ]
    prior = _prior(backend)
    if prior is not None:
        for row in rows:
            if is_build_route_knob(row["name"]) and row["name"] in prior.live_on:
                row["corpus_live"] = prior.live_on[row["name"]]
                row["corpus_models"] = len(prior.models)
    return rows


def remarks(backend: Backend) -> list[str]:
    """What the table of the knobs does not say, a line each."""
    lines = []
    left_out = backend.left_out() if isinstance(backend, LeavesOut) else {}
    if left_out:
        lines.append("left out, since they can break the mathematics (-O unsafe=on takes them in):")
        lines += [f"  {name} {why}" for name, why in left_out.items()]
    prior = _prior(backend)
    if prior is not None:
        never = [name for name in prior.never_live if name in backend.catalog()]
        hidden = sum(name.startswith(LEFT_TO_RUN_TIME) for name in never)
        lines.append(
            f"{len(never)} of these knobs changed no engine of"
            f" {counted(len(prior.models), 'corpus model')} in {prior.table.compiler}"
            f" (0 in the last column); {hidden} of them"
            f" {verb(hidden, 'belongs', 'belong', len(never))} to what it leaves to run time, and"
            " may act in TensorRT"
        )
    return lines


def _prior(backend: Backend) -> LivenessPrior | None:
    table = released_liveness() if backend.catalog().name in SWEPT else None
    return None if table is None else LivenessPrior(table)
