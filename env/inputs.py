"""Made input sets: what a model gets when the user gives none.

Owns the ranges and distributions by type and by what an input feeds. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx

InputSet = dict[str, NDArray[np.generic]]

#: Made sets: so many for the search, so many for the final check.
SELECTION_SETS, CONFIRMATION_SETS = 4, 1

#: Upper bound of integers nobody knows more about.
SMALL_INTEGER = 4


class Spec(Protocol):
    """Name, dtype and shape of an input."""

    @property
    def name(self) -> str:
        """Input name."""
        ...

    @property
    def dtype(self) -> str:
        """Numpy dtype name."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Fixed shape."""
        ...


def generate(
    proto: onnx.ModelProto, specs: Sequence[Spec], seed: int, count: int
) -> list[InputSet]:
    """Make input sets by type, shape and seed.

    Floats are drawn from N(0, 1); integers that index a table stay inside it; masks are ones;
    other integers are below 4.

    Args:
        proto: The graph, to see what integer inputs index.
        specs: Inputs.
        seed: Seed; set i depends on seed and i alone.
        count: How many sets.
    """
    limits = {spec.name: index_limit(proto, spec.name) for spec in specs}
    sets = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        sets.append({spec.name: _values(spec, limits[spec.name], rng) for spec in specs})
    return sets


def _values(spec: Spec, limit: int | None, rng: np.random.Generator) -> NDArray[np.generic]:
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "b" or "mask" in spec.name.lower():
        return np.ones(spec.shape, dtype)
    if dtype.kind in "iu":
        return rng.integers(0, limit or SMALL_INTEGER, spec.shape).astype(dtype)
    return rng.standard_normal(spec.shape).astype(dtype)


def index_limit(proto: onnx.ModelProto, name: str) -> int | None:
    """Rows of the table that an integer input indexes, or None when it indexes none.

    Follows the input through operators that keep values (Cast, Reshape, Slice ...).
    """
    rows = {tensor.name: tensor.dims[0] for tensor in proto.graph.initializer if tensor.dims}
    keeps = {"Cast", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Split", "Transpose", "Identity"}
    keeps |= {"Flatten", "Gather"}
    known, found = {name}, []
    for node in proto.graph.node:
        if node.op_type == "Gather" and len(node.input) > 1 and node.input[1] in known:
            if node.input[0] in rows:
                found.append(int(rows[node.input[0]]))
        elif node.op_type in keeps and node.input and node.input[0] in known:
            known.update(node.output)
    return min(found) if found else None
