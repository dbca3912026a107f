"""Normal form: an ONNX file as a checked graph with fixed shapes, and the fingerprint of it.

Owns what is accepted, what is changed before anything is timed, and what makes two models the same.
Runs no model; knows no backend and no route.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routepilot.env.errors import ModelError
from routepilot.env.inputs import InputSet, TensorSpec

if TYPE_CHECKING:
    import onnx

#: Opset that recipes and engines of today handle; older graphs are lifted to it.
OPSET = 17

#: File format version that the oldest runtimes read which this project allows (onnxruntime 1.22).
IR_VERSION = 10

#: Above this a graph is saved with its weights beside it (protobuf ends at 2 GB).
EXTERNAL_BYTES = 1 << 30

#: Tensors above this are left out while shapes are inferred: none of them is a shape.
_SHAPE_BYTES = 1 << 12


def read_model(path: Path) -> onnx.ModelProto:
    """Read and check an ONNX file with the data beside it.

    Raises:
        ModelError: There is none, it is damaged, or the checker refuses it.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        facts = path.stat()
        size = facts.st_size if stat.S_ISREG(facts.st_mode) else None
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        size = None
    except OSError as error:
        raise ModelError(f"the model file cannot be opened: {error.strerror}") from None
    if size is None:
        raise ModelError(f"model file {str(path)!r} does not exist; give the path of an ONNX file")
    if size == 0:
        raise ModelError(f"model file {str(path)!r} is empty; give an ONNX file")
    try:
        proto = onnx.load(str(path))
        _check_declared(proto, path)
        onnx.checker.check_model(str(path))
    except ModelError:
        raise
    except DecodeError:
        raise ModelError(
            f"model file {str(path)!r} is not an ONNX file or is cut short; export it again"
        ) from None
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise ModelError(f"model file {str(path)!r} is not valid ONNX: {words}") from None
    if not proto.graph.node:
        raise ModelError(f"model file {str(path)!r} holds no operator; give a whole ONNX model")
    return proto


def _check_declared(proto: onnx.ModelProto, path: Path) -> None:
    """Every input and output says what it is, which the checker asks without naming it."""
    for kind, values in (("input", proto.graph.input), ("output", proto.graph.output)):
        for value in values:
            held = value.type.WhichOneof("value")
            if held == "tensor_type" and value.type.tensor_type.HasField("shape"):
                continue
            if held is None or held == "tensor_type":
                lacks = "type" if held is None else "shape"
                raise ModelError(
                    f"model file {str(path)!r} gives no {lacks} for its {kind} {value.name!r},"
                    " which ONNX requires (single dimensions may stay open); export it with them,"
                    " or add them with onnx.shape_inference.infer_shapes"
                )


def fix_inputs(
    proto: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    given: Sequence[InputSet],
) -> tuple[TensorSpec, ...]:
    """Write fixed dimensions into the graph's inputs and drop weights listed as inputs.

    Args:
        proto: Changed in place.
        shapes: Asked shapes by input name.
        given: Input sets; the first fixes what `shapes` leaves open.

    Raises:
        ModelError: A shape does not fit, is missing, or an input is of a type nobody can feed.
    """
    weights = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in weights]
    names = [value.name for value in inputs]
    for name in shapes:
        if name not in names:
            raise ModelError(f"--shape names {name!r}; the inputs are {', '.join(names)}")
    specs = []
    for value in inputs:
        dtype = _input_dtype(value)
        wanted = shapes.get(value.name)
        if wanted is None and given and value.name in given[0]:
            wanted = given[0][value.name].shape
        dims = value.type.tensor_type.shape.dim
        shape = _fixed_shape(value.name, list(dims), wanted)
        for dim, size in zip(dims, shape, strict=True):
            dim.ClearField("dim_param")
            dim.dim_value = size
        specs.append(TensorSpec(value.name, dtype, shape))
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    return tuple(specs)


def _input_dtype(value: onnx.ValueInfoProto) -> str:
    from onnx import helper

    if not value.type.HasField("tensor_type"):
        raise ModelError(f"input {value.name!r} is not a tensor; only tensors work")
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
    if dtype.kind not in "biuf" or dtype.isbuiltin != 1:  # 1: numpy's own, not of ml_dtypes
        raise ModelError(
            f"input {value.name!r} holds {'strings' if dtype.kind in 'OSU' else dtype.name};"
            " booleans, integers of 8 to 64 bits and floats of 16 to 64 work: cast inside the model"
        )
    return str(dtype.name)


def _fixed_shape(name: str, dims: list[Any], wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    if wanted is not None and len(wanted) != len(dims):
        raise ModelError(
            f"shape {'x'.join(map(str, wanted))} has {len(wanted)} dimensions and input {name!r}"
            f" has {len(dims)}; give --shape {name}=" + "x".join("N" for _ in dims)
        )
    shape = []
    for place, dim in enumerate(dims):
        fixed = dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None
        size = wanted[place] if wanted is not None else fixed
        if size is None and place == 0:
            size = 1  # the batch, by the convention of every exporter
        if size is None:
            form = "x".join(str(d.dim_value) if d.dim_value > 0 else "N" for d in dims)
            raise ModelError(
                f"input {name!r} has open dimensions; give --shape {name}={form}"
                " with a number for each N"
            )
        if fixed is not None and size != fixed:
            raise ModelError(
                f"dimension {place} of input {name!r} is {fixed} in the model and {size} in the"
                " given shape; the model's stands"
            )
        shape.append(int(size))
    return tuple(shape)


def normalise(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Lift old opsets, so that no route gets the credit for it, and drop what is not the model.

    Args:
        proto: Checked graph with fixed inputs; may be changed.
        path: Where it came from, for messages.

    Raises:
        ModelError: Its shapes do not fit together.
    """
    import onnx
    from onnx import inliner

    if proto.functions:
        try:
            proto = inliner.inline_local_functions(proto)
        except Exception:
            pass  # engines inline for themselves what is left
    version = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), OPSET)
    if version < 13:
        try:
            proto = onnx.version_converter.convert_version(proto, OPSET)
        except Exception:
            pass  # some graphs cannot be lifted; they stay as they are
    # Converter and inliner stamp their own newest format, which an older runtime would refuse.
    needed = onnx.helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    proto.ir_version = min(proto.ir_version, max(IR_VERSION, needed))
    proto.producer_name = proto.producer_version = proto.doc_string = ""
    del proto.metadata_props[:]
    for node in proto.graph.node:
        node.doc_string = ""
    del proto.graph.value_info[:]
    for output in proto.graph.output:
        # Exporters write stale dimensions here; inference finds the true ones.
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    try:
        return infer_shapes(proto)
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise ModelError(f"shapes of {str(path)!r} do not fit together: {words}") from None


def is_large(proto: onnx.ModelProto) -> bool:
    """Whether the weights have to be saved beside the graph."""
    return sum(len(tensor.raw_data) for tensor in proto.graph.initializer) > EXTERNAL_BYTES


def infer_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """ONNX's shape inference with data propagation, for models of any size.

    ONNX hands the graph over as one message, which ends at 2 GB, so the weights of a large one are
    taken out meanwhile; `proto` is emptied of them then.
    """
    from onnx import shape_inference

    if not is_large(proto):
        return shape_inference.infer_shapes(proto, data_prop=True)
    held = {}
    for place, tensor in enumerate(proto.graph.initializer):
        if len(tensor.raw_data) > _SHAPE_BYTES:
            held[place] = tensor.raw_data
            tensor.ClearField("raw_data")
    inferred = shape_inference.infer_shapes(proto, data_prop=True)
    for place in list(held):
        inferred.graph.initializer[place].raw_data = held.pop(place)
    return inferred


def reference_precision(proto: onnx.ModelProto) -> str:
    """The float type that most weights have, else the first float input; float32 without either."""
    from onnx import TensorProto

    names: dict[int, str] = {
        TensorProto.FLOAT: "float32",
        TensorProto.FLOAT16: "float16",
        TensorProto.BFLOAT16: "bfloat16",
        TensorProto.DOUBLE: "float64",
    }
    sizes = dict.fromkeys(names.values(), 0)
    for tensor in proto.graph.initializer:
        if tensor.data_type in names:
            sizes[names[tensor.data_type]] += int(np.prod(tensor.dims, dtype=np.int64))
    if any(sizes.values()):
        return max(sizes, key=lambda name: sizes[name])
    types = [value.type.tensor_type.elem_type for value in proto.graph.input]
    return next((names[one] for one in types if one in names), "float32")


def fingerprint_of(proto: onnx.ModelProto) -> str:
    """Hash over what a model computes: operators, wiring, attributes, weights, input shapes.

    Names of inner tensors do not count (optimisers make them up at random), names of inputs and
    outputs do; nor do documentation, producer or the order of weights.
    """
    digest = hashlib.sha256()
    for opset in sorted(proto.opset_import, key=lambda o: o.domain):
        digest.update(f"{opset.domain}:{opset.version};".encode())
    for function in sorted(proto.functions, key=lambda f: (f.domain, f.name)):
        digest.update(function.SerializeToString(deterministic=True))
    _feed_graph(digest, proto.graph, {}, {})
    return digest.hexdigest()


def _feed_graph(
    digest: hashlib._Hash,
    graph: onnx.GraphProto,
    outer: Mapping[str, str],
    outer_weights: Mapping[str, onnx.TensorProto | onnx.SparseTensorProto],
) -> None:
    known = dict(outer)  # tensor name -> what it is, free of made-up names
    weights = {**outer_weights, **{tensor.name: tensor for tensor in graph.initializer}}
    weights |= {tensor.values.name: tensor for tensor in graph.sparse_initializer}

    def identity(name: str) -> str:
        if name in weights and name not in known:
            known[name] = _content(weights[name])
        return known.get(name, "")

    for value in graph.input:
        known[value.name] = f"input {value.name}"
        digest.update(value.name.encode() + value.type.SerializeToString(deterministic=True))
    for number, node in enumerate(graph.node):
        digest.update(f"{node.domain}|{node.op_type}|".encode())
        for name in node.input:
            digest.update(f"{identity(name)}|".encode())
        for place, name in enumerate(node.output):
            known[name] = f"{len(outer)}:{number}:{place}"
        for attribute in sorted(node.attribute, key=lambda a: a.name):
            digest.update(f"{attribute.name}=".encode())
            if attribute.HasField("g"):
                _feed_graph(digest, attribute.g, known, weights)
            else:
                clean = type(attribute)()
                clean.CopyFrom(attribute)
                clean.doc_string = ""
                clean.t.name = clean.t.doc_string = ""
                digest.update(clean.SerializeToString(deterministic=True))
    for value in graph.output:
        digest.update(f"{value.name}={identity(value.name)};".encode())


def _content(tensor: onnx.TensorProto | onnx.SparseTensorProto) -> str:
    from onnx import SparseTensorProto, numpy_helper

    if isinstance(tensor, SparseTensorProto):
        return f"sparse {list(tensor.dims)} {_content(tensor.values)} {_content(tensor.indices)}"
    array = numpy_helper.to_array(tensor)
    # Arrays of strings hold addresses, so their text is hashed instead.
    data = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return f"{array.dtype} {array.shape} {hashlib.sha256(data).hexdigest()}"
