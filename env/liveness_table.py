"""Liveness tables: what single changes do to many models' engines, as one Parquet file.

Owns the file format, field by field, what a reader refuses, how partial tables are put together
and what a table says in sum. Compiles nothing; `training/liveness_sweep.py` fills it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from routepilot.env.child import one_line
from routepilot.env.drafts import whole_file
from routepilot.env.errors import TableError
from routepilot.env.liveness_pool import Found
from routepilot.env.operator_rules import ruled_out
from routepilot.env.tables import read_parquet

#: Version of the format; a file of another version is refused.
SCHEMA_VERSION = 1

#: Key of our description in the Parquet file's metadata.
METADATA_KEY = b"routepilot-liveness"

#: The columns: name, Arrow type, meaning.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("fingerprint", "string", "model, by its fingerprint; its card is in the metadata"),
    ("target", "string", "compute capability compiled for, e.g. 8.9"),
    ("knob", "string", "the one knob that is changed; empty for the default engine"),
    ("value", "string", "its value"),
    ("outcome", "string", "default, changed, identical or failed"),
    ("status", "string", "how the compile ended, see outcomes.Status; refused: no such flag"),
    ("reason", "string", "why there is no engine, in the compiler's words"),
    ("engine_hash", "string", "hash of the engine; up to the order of outputs for several"),
    ("engine_bytes", "int64", "size of the engine; null: there is none"),
    ("seconds", "float64", "wall clock of the compile, beside others on the machine"),
)

#: Model and target.
Key = tuple[str, str]


@dataclass(frozen=True)
class LivenessCard:
    """A model of a liveness table.

    Attributes:
        name: Name for people.
        fingerprint: The model's fingerprint.
        family: Its family; empty where it is of no corpus.
        split: Its split in the corpus, or empty.
        trained: Whether its weights are trained.
        operators: Operators of its graph.
        exact: Engines were compared byte by byte (one output), not up to the outputs' order.
    """

    name: str
    fingerprint: str
    family: str
    split: str
    trained: bool
    operators: tuple[str, ...]
    exact: bool


@dataclass(frozen=True)
class LivenessTable:
    """What single changes do to the engines of many models.

    Attributes:
        compiler: Compiler and version.
        changes: Every change of the sweep, as `-name=value`, whether tried on a model or not.
        models: The models.
        found: Model and target -> change -> answer, as in `liveness_pool`; the empty change is the
            default engine.
        refusals: Model and target -> why the compiler does not compile the model at all.
        manifest: Machine, versions, command, date.
    """

    compiler: str
    changes: tuple[str, ...]
    models: tuple[LivenessCard, ...]
    found: Mapping[Key, Mapping[str, Found]]
    refusals: Mapping[Key, str] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)


def outcome_of(change: str, answer: Mapping[str, str], default: str) -> str:
    """`default`, `changed`, `identical` or `failed`.

    Args:
        change: The change; empty for the default engine.
        answer: What was found.
        default: Hash of the default engine.
    """
    if not change:
        return "default"
    if "hash" not in answer:
        return "failed"
    return "identical" if answer["hash"] == default else "changed"


def save_liveness(table: LivenessTable, path: Path) -> None:
    """Write a table as a Parquet file, whole or not at all.

    Raises:
        TableError: The file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        _row(key, change, answer, answers[""]["hash"])
        for key, answers in table.found.items()
        for change, answer in answers.items()
    ]
    description = {
        "schema": SCHEMA_VERSION,
        "compiler": table.compiler,
        "changes": list(table.changes),
        "models": [asdict(card) for card in table.models],
        "refusals": [[*key, why] for key, why in table.refusals.items()],
        "manifest": dict(table.manifest),
    }
    schema = pa.schema(
        [pa.field(name, getattr(pa, kind)()) for name, kind, _ in FIELDS],
        metadata={METADATA_KEY: json.dumps(description).encode()},
    )
    try:
        with whole_file(path) as draft:
            pq.write_table(pa.Table.from_pylist(rows, schema=schema), draft, compression="zstd")
    except OSError as error:
        raise TableError(f"liveness table {str(path)!r} cannot be written: {error}") from None


def _row(key: Key, change: str, answer: Found, default: str) -> dict[str, Any]:
    knob, _, value = change.partition("=")
    return {
        "fingerprint": key[0],
        "target": key[1],
        "knob": knob,
        "value": value,
        "outcome": outcome_of(change, answer, default),
        "status": answer.get("status", "ok"),
        "reason": one_line(answer.get("reason", "")),
        "engine_hash": answer.get("hash", ""),
        "engine_bytes": int(answer["bytes"]) if "bytes" in answer else None,
        "seconds": float(answer.get("seconds", "nan")),
    }


def is_liveness_table(path: Path) -> bool:
    """Whether a file is a liveness table; False for whatever else, and for no file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return METADATA_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError, ValueError):
        return False


def load_liveness(path: Path) -> LivenessTable:
    """Read a table that `save_liveness` wrote.

    Raises:
        TableError: No such file, damaged, not a liveness table, or of another schema version.
    """
    data, told = read_parquet(
        path,
        METADATA_KEY,
        kind="liveness table",
        again="sweep again",
        made_by="`routepilot live --table`",
    )
    try:
        description = json.loads(told)
        if description["schema"] != SCHEMA_VERSION:
            raise TableError(
                f"liveness table {str(path)!r} has schema {description['schema']} and this version"
                f" reads {SCHEMA_VERSION}; sweep again, or use the routepilot that wrote it"
            )
        return _table(description, data.to_pylist())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TableError(
            f"liveness table {str(path)!r} lacks something ({one_line(repr(error))}); sweep again"
        ) from None


def _table(description: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> LivenessTable:
    found: dict[Key, dict[str, Found]] = {}
    for row in rows:
        change = f"{row['knob']}={row['value']}" if row["knob"] else ""
        answer = {"seconds": str(row["seconds"])}
        if row["engine_hash"]:
            answer |= {"hash": row["engine_hash"], "bytes": str(row["engine_bytes"])}
        else:
            answer |= {"status": row["status"], "reason": row["reason"]}
        found.setdefault((row["fingerprint"], row["target"]), {})[change] = answer
    if any("hash" not in answers.get("", {}) for answers in found.values()):
        raise ValueError("a model's default engine is missing")
    return LivenessTable(
        description["compiler"],
        tuple(description["changes"]),
        tuple(
            LivenessCard(**{**card, "operators": tuple(card["operators"])})
            for card in description["models"]
        ),
        found,
        {(fingerprint, target): why for fingerprint, target, why in description["refusals"]},
        description["manifest"],
    )


def merge_liveness(tables: Sequence[LivenessTable]) -> LivenessTable:
    """One table of several partial ones of one compiler; what two hold is taken from the first.

    The manifest is the first one's; those of the others are under `merged`.

    Raises:
        TableError: No table, two compilers, or two default engines of one model and target.
    """
    if not tables:
        raise TableError("no table to merge; give one or more")
    first = tables[0]
    cards: dict[str, LivenessCard] = {}
    found: dict[Key, dict[str, Found]] = {}
    refusals: dict[Key, str] = {}
    for table in tables:
        if table.compiler != first.compiler:
            raise TableError(
                f"tables of two compilers cannot be merged: {first.compiler} and {table.compiler}"
            )
        cards |= {card.fingerprint: card for card in table.models} | cards
        refusals |= table.refusals
        for key, answers in table.found.items():
            mine = found.setdefault(key, {})
            if mine and mine[""]["hash"] != answers[""]["hash"]:
                raise TableError(
                    f"the tables hold two default engines of {cards[key[0]].name} for {key[1]}: the"
                    " compiler does not build alike on both machines, so their rows do not mix"
                )
            mine.update({change: a for change, a in answers.items() if change not in mine})
    changes = tuple(dict.fromkeys(change for table in tables for change in table.changes))
    manifest = dict(first.manifest)
    if len(tables) > 1:
        manifest["merged"] = [dict(table.manifest) for table in tables[1:]]
    return LivenessTable(first.compiler, changes, tuple(cards.values()), found, refusals, manifest)


def describe_liveness(table: LivenessTable) -> dict[str, Any]:
    """What a table says in sum, as plain data.

    Returns:
        `models` (for each model and target: changes tried and their outcomes, live knobs, distinct
        engines), `outcomes`, `reasons` of failures with how many changes and models, `targets`
        (agreement of outcomes between each two targets), `operator_rule` (what the rule of
        `operator_rules.py` rules out, and what acted though ruled out), `live_knobs` (knob -> in
        how many models a value changes the engine), `never_live`, `foretold` (how well the table
        foretells a family it has not seen, `liveness_prior.py`), `seconds`.
    """
    from routepilot.env.liveness_prior import LivenessPrior

    outcomes = {key: outcomes_of(answers) for key, answers in table.found.items()}
    cards = {card.fingerprint: card for card in table.models}
    total = Counter(word for words in outcomes.values() for word in words.values())
    live: dict[str, set[str]] = {}
    for (fingerprint, _), words in outcomes.items():
        for change, word in words.items():
            if word == "changed":
                live.setdefault(change.partition("=")[0], set()).add(fingerprint)
    names = list(dict.fromkeys(change.partition("=")[0] for change in table.changes))
    most_live = sorted(live, key=lambda name: (-len(live[name]), name))
    return {
        "compiler": table.compiler,
        "changes": len(table.changes),
        "knobs": len(names),
        "models": [_model(cards[key[0]], key, table.found[key], outcomes[key]) for key in outcomes],
        "refused_models": [
            {"name": cards[f].name if f in cards else f, "target": target, "reason": why}
            for (f, target), why in table.refusals.items()
        ],
        "outcomes": dict(total),
        "reasons": _reasons(table),
        "targets": _agreement(outcomes, cards),
        "operator_rule": _against_rule(outcomes, cards, names),
        "live_knobs": {name: len(live[name]) for name in most_live},
        "never_live": [name for name in names if name not in live],
        "foretold": LivenessPrior(table).foretold(),
        "seconds": sum(
            float(a["seconds"]) for found in table.found.values() for a in found.values()
        ),
        "manifest": dict(table.manifest),
    }


def outcomes_of(answers: Mapping[str, Found]) -> dict[str, str]:
    """Change -> `changed`, `identical` or `failed`, from what was found on one model."""
    default = answers[""]["hash"]
    return {change: outcome_of(change, a, default) for change, a in answers.items() if change}


def _model(
    card: LivenessCard, key: Key, answers: Mapping[str, Found], outcomes: Mapping[str, str]
) -> dict[str, Any]:
    count = Counter(outcomes.values())
    changed = [change for change, word in outcomes.items() if word == "changed"]
    refused = sum(a.get("status") == "refused" for a in answers.values())
    return {
        "name": card.name,
        "family": card.family,
        "target": key[1],
        "tried": len(outcomes),
        "changed": count["changed"],
        "identical": count["identical"],
        "failed": count["failed"] - refused,
        "refused": refused,
        "live_knobs": list(dict.fromkeys(change.partition("=")[0] for change in changed)),
        "distinct_engines": len({a["hash"] for a in answers.values() if "hash" in a}),
        "engine_bytes": int(answers[""]["bytes"]),
        "default_seconds": float(answers[""]["seconds"]),
    }


def _reasons(table: LivenessTable) -> list[dict[str, Any]]:
    """Failures by reason, most frequent first, without what differs from case to case."""
    changes: dict[str, Counter[str]] = {}
    models: dict[str, set[str]] = {}
    for (fingerprint, _), answers in table.found.items():
        for change, answer in answers.items():
            if "hash" not in answer:
                words = _kind_of(answer["reason"])
                changes.setdefault(words, Counter())[change] += 1
                models.setdefault(words, set()).add(fingerprint)
    order = sorted(changes, key=lambda words: -changes[words].total())
    return [
        {
            "reason": words,
            "count": changes[words].total(),
            "models": len(models[words]),
            "changes": dict(changes[words].most_common(6)),
        }
        for words in order
    ]


def _kind_of(reason: str) -> str:
    """A compiler's words without what differs from model to model."""
    words = re.sub(r"^IBuilder::\w+: Error Code \d+: ", "", reason)
    words = re.sub(r"\[myelin_graph\.h:\d+: \w+\] ", "", words)
    words = re.sub(r"the compiler does not take -\S+: ", "", words)
    words = re.sub(r"(?<=In )\w+ at \S+:\d+", "...", words)
    return re.sub(r"0x[0-9a-f]+|\d{3,}", "N", words)[:140]


def _agreement(
    outcomes: Mapping[Key, Mapping[str, str]], cards: Mapping[str, LivenessCard]
) -> list[dict[str, Any]]:
    """Between each two targets: how many changes have one outcome, and which knobs do not."""
    targets = sorted({target for _, target in outcomes})
    found = []
    for i, one in enumerate(targets):
        for other in targets[i + 1 :]:
            same = 0
            models = 0
            differ: Counter[str] = Counter()
            for fingerprint in cards:
                mine = outcomes.get((fingerprint, one), {})
                theirs = outcomes.get((fingerprint, other), {})
                both = [change for change in mine if change in theirs]
                models += bool(both)
                for change in both:
                    if mine[change] == theirs[change]:
                        same += 1
                    else:
                        differ[change] += 1
            found.append(
                {
                    "targets": [one, other],
                    "models": models,
                    "same": same,
                    "differ": differ.total(),
                    "changes": dict(differ.most_common()),
                }
            )
    return found


def _against_rule(
    outcomes: Mapping[Key, Mapping[str, str]],
    cards: Mapping[str, LivenessCard],
    names: Sequence[str],
) -> dict[str, Any]:
    """How the operator rule fares: what it rules out must leave every engine as it is."""
    out = identical = foreseen = 0
    acted = []
    for (fingerprint, target), words in outcomes.items():
        excluded = ruled_out(cards[fingerprint].operators, names)
        for change, word in words.items():
            silent = change.partition("=")[0] in excluded
            identical += word == "identical"
            out += silent
            foreseen += silent and word == "identical"
            if silent and word == "changed":
                acted.append({"name": cards[fingerprint].name, "target": target, "change": change})
    return {
        "ruled_out": out,
        "identical": identical,
        "identical_and_ruled_out": foreseen,
        "changed_though_ruled_out": acted,
    }
