"""The README of a policy in the manner of a model hub: YAML for machines, Markdown for people.

Owns the text; every figure in it comes from the policy's own card. JSON is YAML, so the front
matter is written as JSON values and needs no library.
"""

from __future__ import annotations

import json

from routepilot.agents.policy import Card
from routepilot.env.wording import counted


def front_matter(card: Card) -> dict[str, object]:
    """The front matter's fields, by the hub's names."""
    shares = dict(card.scores.get("gain_share", {}))
    metrics = [
        {
            "type": f"gain_share_after_{builds}_builds",
            "name": f"share of the best recorded gain after {counted(int(builds), 'build')}",
            "value": round(float(share), 4),
        }
        for builds, share in shares.items()
    ]
    results = {
        "task": {"type": "reinforcement-learning", "name": "choice of compiler build routes"},
        "dataset": {"type": "route-table", "name": card.table},
        "metrics": metrics,
    }
    return {
        "license": card.licence.lower(),
        "library_name": "routepilot",
        "tags": ["routepilot", "compilers", "autotuning", "reinforcement-learning"],
        "model-index": [{"name": card.name, "results": [results] if metrics else []}],
    }


def readme(card: Card, device: str, backend: str) -> str:
    """The README.

    Args:
        card: The policy's card.
        device: Processor or GPU that its table was measured on.
        backend: Compiler that its table was measured with.
    """
    head = "".join(f"{name}: {json.dumps(value)}\n" for name, value in front_matter(card).items())
    held_out = ", ".join(card.held_out) or "none"
    tables = ", ".join(f"`{name}`" for name in card.tables)
    shares = card.scores.get("gain_share", {})
    rows = "".join(f"| {builds} | {100 * share:.0f} % |\n" for builds, share in shares.items())
    scores = (
        f"\n## Figures\n\nShare of the best recorded gain, on {card.scores.get('on', 'its table')}."
        " These are not figures of untouched models unless that says so.\n\n"
        f"| builds | share |\n| --- | --- |\n{rows}"
        if rows
        else ""
    )
    versions = "".join(f"| {name} | {version} |\n" for name, version in card.versions.items())
    return f"""---
{head}---

# {card.name}

A RoutePilot policy: it chooses which compiler build routes are worth building for a model it never
saw. Trained on measured builds of {counted(len(card.models), "model")} with the backend `{backend}`
({device}).

```
routepilot policy pull THIS_FOLDER --name {card.name}
routepilot tune model.onnx --backend {backend} --policy {card.name}
```
{scores}
## What it was trained on

| what | value |
| --- | --- |
| route table | {tables}, in this folder; the policy needs it at work |
| models | {", ".join(card.models)} |
| families it never saw | {held_out} |
| accuracy limit | {card.gate["metric"]} below {card.gate["limit"]:g} |
| steps, seed | {card.steps:,}, {card.seed} |

| package | version |
| --- | --- |
{versions}
## Limits

Routes are specific to model, shapes, device and compiler version. Every answer is built, checked
and timed before it is given, so a policy that fits badly costs builds, not correctness.

## Files

`policy.safetensors` holds the weights, `policy.json` the card, `manifest.json` the SHA-256 of every
file. Nothing here is unpickled or executed.
"""
