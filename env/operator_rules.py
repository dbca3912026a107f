"""Which compiler knobs a model's operators rule out: data, and how it is read.

Owns the reading of `knob_operators.json`, which was derived from the knobs' names and is held
against what was compiled by the tests. Compiles nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache as remember
from importlib import resources
from pathlib import Path
from typing import Any


@remember
def operator_rules() -> tuple[tuple[str, tuple[frozenset[str], ...]], ...]:
    """The rules of `knob_operators.json`: prefix of knob names, groups of operators.

    A knob can act only on a graph that has an operator of every group. The longest prefix counts.
    """
    place = resources.files("routepilot.env") / "knob_operators.json"
    rules = json.loads(place.read_text(encoding="utf-8"))["rules"]
    return tuple(
        (prefix, tuple(frozenset(g) for g in rule["needs"]))
        for rule in rules
        for prefix in rule["knobs"]
    )


def operator_types(path: Path) -> frozenset[str]:
    """Operators of an ONNX file, those of subgraphs and of its own functions among them."""
    import onnx

    def of(body: Any) -> set[str]:
        found = set()
        for node in body.node:
            found.add(node.op_type)
            for attribute in node.attribute:
                for sub in (attribute.g, *attribute.graphs):
                    found |= of(sub)
        return found

    proto = onnx.load(path, load_external_data=False)
    return frozenset().union(*map(of, (proto.graph, *proto.functions)))


def ruled_out(operators: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Knobs that cannot matter to a graph of these operators, each with the reason."""
    present = frozenset(operators)
    found = {}
    for name in names:
        rules = [rule for rule in operator_rules() if name.startswith(rule[0])]
        if not rules:
            continue
        _, groups = max(rules, key=lambda rule: len(rule[0]))
        lacking = next((group for group in groups if not group & present), None)
        if lacking is not None:
            found[name] = f"the graph has none of {', '.join(sorted(lacking))}"
    return found
