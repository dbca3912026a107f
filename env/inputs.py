"""Input sets: read from files, held against the model's inputs, or made up.

Owns the ranges and distributions by type and by what an input feeds. Knows no engine.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from routepilot.env.errors import ModelError

if TYPE_CHECKING:
    import onnx

InputSet = dict[str, NDArray[np.generic]]

#: Made sets: so many for the search, so many for the final check.
SELECTION_SETS, CONFIRMATION_SETS = 4, 1

#: Upper bound of integers nobody knows more about.
SMALL_INTEGER = 4


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype name and fixed shape of an input or output."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def read_input_sets(paths: Sequence[Path]) -> list[InputSet]:
    """Read one input set from each `.npz` file; `prepare` holds them against the model.

    Raises:
        ModelError: A file cannot be read as arrays.
    """
    return [read_npz(path) for path in paths]


def read_npz(path: Path) -> InputSet:
    """Read the arrays of one `.npz` file.

    Raises:
        ModelError: It cannot be read as arrays.
    """
    try:
        with path.open("rb") as file:  # numpy leaves a file that it refuses open
            data = np.load(file, allow_pickle=False)
            if isinstance(data, np.ndarray):
                raise ValueError("it holds one array without a name")
            with data:
                arrays = {name: data[name] for name in data.files}
        strange = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
        if strange:
            raise ValueError(f"{strange[0]!r} in it is not an array")
        return arrays
    except (
        *(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error),
        *(RuntimeError, MemoryError, OverflowError),  # of another version, encrypted, too large
    ) as error:
        words = " ".join(str(error).split())[:200]
        raise ModelError(
            f"input set {str(path)!r} cannot be read ({words}); give an .npz file of plain arrays"
        ) from None


def check_set(one: InputSet, specs: Sequence[TensorSpec]) -> None:
    """Hold an input set against the model's inputs.

    Raises:
        ModelError: A name, dtype or shape does not fit.
    """
    names = [spec.name for spec in specs]
    for name in one:
        if name not in names:
            raise ModelError(f"an input set holds {name!r}; the inputs are {', '.join(names)}")
    for spec in specs:
        if spec.name not in one:
            raise ModelError(f"an input set lacks {spec.name!r}; the inputs are {', '.join(names)}")
        array = one[spec.name]
        if array.shape != spec.shape or array.dtype.name != spec.dtype:
            raise ModelError(
                f"input {spec.name!r} is {array.dtype.name} {array.shape} in an input set;"
                f" the model takes {spec.dtype} {spec.shape}"
            )


def hash_sets(sets: Sequence[InputSet]) -> str:
    """Hash over names, dtypes, shapes and values, in the order of the sets."""
    digest = hashlib.sha256()
    for one in sets:
        for name in sorted(one):
            digest.update(f"{name}|{one[name].dtype}|{one[name].shape}|".encode())
            digest.update(np.ascontiguousarray(one[name]).tobytes())
    return digest.hexdigest()


def generate(
    proto: onnx.ModelProto, specs: Sequence[TensorSpec], seed: int, count: int
) -> list[InputSet]:
    """Make input sets by type, shape and seed.

    Floats are drawn from N(0, 1); integers that index a table stay inside it; masks and booleans
    are ones (a mask that hides everything gives NaN); other integers are below 4.

    Args:
        proto: The graph with inferred shapes, to see what integer inputs index.
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


def _values(spec: TensorSpec, limit: int | None, rng: np.random.Generator) -> NDArray[np.generic]:
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "b" or "mask" in spec.name.lower():
        return np.ones(spec.shape, dtype)
    if dtype.kind in "iu":
        top = min(limit or SMALL_INTEGER, int(np.iinfo(dtype).max) + 1)
        return np.asarray(rng.integers(0, top, spec.shape)).astype(dtype)
    return np.asarray(rng.standard_normal(spec.shape)).astype(dtype)


def index_limit(proto: onnx.ModelProto, name: str) -> int | None:
    """Length of the axis that an integer input indexes, or None when it indexes none.

    Follows the input through operators that keep values (Cast, Reshape, Slice ...).
    """
    shapes = {tensor.name: list(tensor.dims) for tensor in proto.graph.initializer}
    for value in (*proto.graph.input, *proto.graph.value_info):
        shapes[value.name] = [d.dim_value for d in value.type.tensor_type.shape.dim]
    keeps = {"Cast", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Split", "Transpose", "Identity"}
    keeps |= {"Flatten", "Gather", "Expand", "Concat"}
    known, found = {name}, []
    for node in proto.graph.node:
        if node.op_type == "Gather" and len(node.input) > 1 and node.input[1] in known:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            table = shapes.get(node.input[0], [])
            if -len(table) <= axis < len(table) and table[axis] > 0:  # 0 means unknown
                found.append(int(table[axis]))
        elif node.op_type in keeps and node.input and node.input[0] in known:
            known.update(node.output)
    return min(found) if found else None
