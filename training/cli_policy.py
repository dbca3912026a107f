"""Verbs about policies: `policy list`, `show`, `push`, `pull`.

Imported by `cli.main`, which owns the application object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routepilot.env.wording import counted
from routepilot.training.cli import app
from routepilot.training.cli_options import JsonOpt

policy_app = typer.Typer(
    help="Policies: list, show, push and pull them.\n\nExample: routepilot policy show cpu",
    no_args_is_help=True,
)
app.add_typer(policy_app, name="policy")


@policy_app.command("list")
def policy_list(json: JsonOpt = False) -> None:
    """List the policies that have a name here: released and pulled ones.

    Example: routepilot policy list
    """
    from routepilot.training import console
    from routepilot.training.hub import listing

    rows = listing()
    if json:
        console.print_json(rows)
        return
    console.print_table(
        "policies",
        ("policy", "from", "table", "models", "never saw", "share after 4 builds", "note"),
        [
            (
                row["name"],
                row["origin"],
                row.get("table", ""),
                row.get("models", ""),
                ", ".join(row.get("held_out", ())),
                _percent(row.get("gain_share", {}).get("4")),
                row["note"],
            )
            for row in rows
        ],
    )


@policy_app.command("show")
def policy_show(
    name: Annotated[str, typer.Argument(help="Policy by name, or its folder or file.")],
    json: JsonOpt = False,
) -> None:
    """Show a policy's card, figures and where it comes from; checks its files on the way.

    Example: routepilot policy show cpu
    """
    from routepilot.training import console
    from routepilot.training.hub import describe

    found = describe(name)
    if json:
        console.print_json(found)
        return
    where, gate, scores = found["measured_on"], found["gate"], found["scores"]
    shares = ", ".join(f"{b}: {_percent(s)}" for b, s in scores.get("gain_share", {}).items())
    rows = {
        "from": f"{found['origin']}, {found['file']}, {found['bytes']:,} bytes",
        "weights": f"sha256 {found['weights_sha256']}",
        "table": f"{found['table']}, sha256 {found['table_sha256']}",
        "measured on": f"{where['device']}, backend {where['backend']}",
        "measured with": _versions(found["measured_with"]),
        "trained on": f"{counted(len(found['models']), 'model')}: {', '.join(found['models'])}",
        "never saw": ", ".join(found["held_out"]) or "no family was held out",
        "gate": f"{gate['metric']} below {gate['limit']:g}",
        "training": f"{counted(found['steps'], 'step')}, seed {found['seed']}",
        "share of the gain after builds": shares,
        "these figures are on": scores.get("on", ""),
        "trained with": _versions(found["versions"]),
        "licence": found["licence"],
    }
    console.print_table(found["name"], ("what", "value"), [(k, v) for k, v in rows.items() if v])


@policy_app.command("push")
def policy_push(
    name: Annotated[str, typer.Argument(help="Policy by name, or its folder or file.")],
    target: Annotated[str, typer.Argument(help="A folder, or hf://user/repo.")],
    private: Annotated[bool, typer.Option(help="Make a new repository private.")] = False,
    json: JsonOpt = False,
) -> None:
    """Write a policy as a folder that others can pull: card, weights, table, checksums.

    A place on a hub needs the extra `hub` and its token in the environment.

    Example: routepilot policy push cpu ./cpu-policy
    """
    from routepilot.training import console
    from routepilot.training.hub import push

    place = push(name, target, private=private)
    if json:
        console.print_json({"policy": name, "place": place})
    else:
        console.out.print(f"written: {place}", markup=False)


@policy_app.command("pull")
def policy_pull(
    source: Annotated[str, typer.Argument(help="A folder, hf://user/repo or ...@revision.")],
    name: Annotated[
        str | None, typer.Option(help="Name to keep it under; its card's if absent.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to put it in instead.")
    ] = None,
    json: JsonOpt = False,
) -> None:
    """Fetch a policy, check every file, and keep it for --policy.

    Example: routepilot policy pull ./cpu-policy --name ours
    """
    from routepilot.training import console
    from routepilot.training.hub import pull

    place = pull(source, name=name, out=out)
    known = str(out) if out is not None else place.name
    if json:
        console.print_json({"policy": known, "place": str(place)})
    else:
        console.out.print(f"checked and kept; use it with --policy {known}", markup=False)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _versions(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())
