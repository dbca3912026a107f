"""What a live comparison comes to: live and replayed shares side by side, in sum and by model.

Owns its sums, tables and files. Runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from routepilot.env.wording import counted
from routepilot.training.evaluation_tables import TextTable, markdown
from routepilot.training.files import write_json, write_text
from routepilot.training.statistics import estimate, share


def sum_up(models: Sequence[Mapping[str, Any]], seed: int = 0) -> dict[str, Any]:
    """Sums over models, by agent.

    Args:
        models: Rows as `confirm_live` makes them.
        seed: Seed of the bootstrap over models.

    Returns:
        Agent -> `live` and `replayed`: by budget the share of the best gain known, live or on
        record, each an estimate over models (`replayed` is empty where no model is on record);
        `replayed_models`; `confirmed` (geometric mean of the confirmed speed-ups) and
        `confirmed_share` (of the best gain known live, what was confirmed; 0 where a winner did not
        hold); `slower` (models that ended slower than their default), `refused` (models on which a
        winner did not hold), `builds` and `seconds` (means).
    """
    found = {}
    for agent in models[0]["agents"]:
        rows = [(m, m["agents"][agent]) for m in models]
        recorded = [(m, row["replayed"]) for m, row in rows if row["replayed"] is not None]
        speedups = [row["confirmed"]["speedup"] for _, row in rows]
        found[agent] = {
            "live": _shares(rows, "oracle", seed),
            "replayed": _shares(recorded, "oracle_replayed", seed) if recorded else {},
            "replayed_models": len(recorded),
            "confirmed": float(np.exp(np.mean(np.log(speedups)))),
            "confirmed_share": float(np.log(speedups).sum())
            / max(sum(m["oracle"] for m in models), 1e-9),
            "slower": sum(speedup < 1 for speedup in speedups),
            "refused": sum(
                bool(row["promising"]) and not row["confirmed"]["route"] for _, row in rows
            ),
            "builds": float(np.mean([row["builds"] for _, row in rows])),
            "seconds": float(np.mean([row["seconds"] for _, row in rows])),
        }
    return found


def _shares(
    rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], oracle: str, seed: int
) -> dict[str, dict[str, float]]:
    possible = np.array([m[oracle] for m, _ in rows], float).reshape(1, -1, 1)
    return {
        budget: estimate(
            share,
            np.array([row["gains"][budget] for _, row in rows]).reshape(1, -1, 1),
            possible,
            seed=seed,
        ).as_json()
        for budget in rows[0][1]["gains"]
    }


def live_tables(result: Mapping[str, Any]) -> list[TextTable]:
    """The sums, then each model."""
    return [_sum_table(result), _model_table(result)]


def _sum_table(result: Mapping[str, Any]) -> TextTable:
    budgets = [str(b) for b in result["budgets"]]
    rows: list[tuple[str, ...]] = []
    for agent, row in result["sums"].items():
        rows.append(
            (
                agent,
                "live",
                *(_estimate(row["live"][b]) for b in budgets),
                f"{row['builds']:.1f}",
                f"{row['seconds']:.1f}",
                f"{row['confirmed']:.2f}x",
                f"{100 * row['confirmed_share']:.0f} %",
                str(row["refused"]),
                str(row["slower"]),
            )
        )
        if row["replayed"]:
            which = "replayed"
            if row["replayed_models"] < len(result["models"]):
                which += f", {counted(row['replayed_models'], 'model')}"
            rows.append(
                (agent, which, *(_estimate(row["replayed"][b]) for b in budgets), *[""] * 6)
            )
    return TextTable(
        "share of the best gain known after so many builds;"
        f" {counted(len(result['models']), 'model')},"
        f" {result['split']}, candidates: {result['candidates']}",
        (
            "agent",
            "",
            *budgets,
            "builds",
            "seconds",
            "confirmed mean",
            "confirmed share",
            "did not hold",
            "slower",
        ),
        tuple(rows),
    )


def _model_table(result: Mapping[str, Any]) -> TextTable:
    budgets = [str(b) for b in result["budgets"]]
    rows = []
    for model in result["models"]:
        for agent, row in model["agents"].items():
            replayed = row["replayed"] or {"gains": {}}
            rows.append(
                (
                    model["model"],
                    _best(model),
                    agent + (" (trained on it)" if row["saw_model"] else ""),
                    *(
                        _pair(
                            _part(row["gains"][b], model["oracle"]),
                            _part(replayed["gains"].get(b), model["oracle_replayed"]),
                        )
                        for b in budgets
                    ),
                    str(row["builds"]),
                    _confirmed(row["confirmed"], row["promising"]),
                )
            )
    return TextTable(
        "share of the model's best gain known, live and replayed",
        ("model", "best live, on record", "agent", *budgets, "builds", "confirmed"),
        tuple(rows),
    )


def write_live(result: Mapping[str, Any], out: Path) -> list[Path]:
    """Write `live.json` and `live.md` into an existing folder."""
    paths = [out / "live.json", out / "live.md"]
    write_json(paths[0], result)
    facts = result["manifest"]
    notes = [
        "# Live confirmation",
        f"Made by: {facts['command']} (commit {facts['git'] or 'unknown'}).",
        *(f"Given up: {name}: {why}" for name, why in result["given_up"].items()),
        *(markdown(table) for table in live_tables(result)),
    ]
    write_text(paths[1], "\n\n".join(notes) + "\n")
    return paths


def _best(model: Mapping[str, Any]) -> str:
    live = f"{math.exp(model['oracle']):.2f}x"
    recorded = model["oracle_replayed"]
    return live if recorded is None else f"{live}, {math.exp(recorded):.2f}x"


def _part(gain: float | None, oracle: float | None) -> str:
    if gain is None or oracle is None:
        return ""
    return f"{100 * gain / oracle:.0f} %" if oracle > 0 else "none"


def _pair(live: str, replayed: str) -> str:
    return f"{live}, {replayed}" if replayed else live


def _estimate(found: Mapping[str, float]) -> str:
    value, low, high = (100 * found[end] for end in ("value", "low", "high"))
    return f"{value:.0f} % ({low:.0f} to {high:.0f})"


def _confirmed(answer: Mapping[str, Any], promising: int) -> str:
    if not answer["route"]:
        return "default" + (", since no winner held" if promising else "")
    return (
        f"{answer['speedup']:.2f}x ({answer['speedup_low']:.2f} to {answer['speedup_high']:.2f})"
        f" {answer['route']}"
    )
