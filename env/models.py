"""Models: an ONNX file made ready for tuning, as a folder that child processes can open.

Owns checking, normalising, references and the fingerprint. Knows no backend and no route. Nothing
here runs a model in this process: references come from a child (`python -m routepilot.env.models`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.errors import ModelError
from routepilot.env.inputs import CONFIRMATION_SETS, SELECTION_SETS, InputSet, generate

if TYPE_CHECKING:
    import onnx

#: Opset that recipes and engines of today handle; older graphs are lifted to it.
OPSET = 17

#: Above this a graph is saved with its weights beside it (protobuf ends at 2 GB).
EXTERNAL_BYTES = 1 << 30


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype name and fixed shape of an input or output."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A prepared model: a folder with the normalised graph, input sets and references.

    Attributes:
        name: Name for people.
        fingerprint: Hash over graph, weights and input shapes; not over names or places of files.
        folder: The folder.
        inputs: What the graph takes.
        outputs: What it gives; unknown dimensions are those of the reference.
    """

    name: str
    fingerprint: str
    folder: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def path(self) -> Path:
        """The normalised ONNX file."""
        return self.folder / "model.onnx"

    def selection(self) -> list[InputSet]:
        """Input sets that a search decides on."""
        return self._sets("selection")

    def confirmation(self) -> list[InputSet]:
        """Input sets kept for the final check."""
        return self._sets("confirmation")

    def selection_reference(self) -> list[InputSet]:
        """Float32 outputs for `selection`, in the same order."""
        return self._sets("reference_selection")

    def confirmation_reference(self) -> list[InputSet]:
        """Float32 outputs for `confirmation`, in the same order."""
        return self._sets("reference_confirmation")

    def _sets(self, kind: str) -> list[InputSet]:
        found = sorted(self.folder.glob(f"{kind}_*.npz"), key=lambda p: int(p.stem.split("_")[-1]))
        return [_read_npz(path) for path in found]

    @classmethod
    def load(cls, folder: Path) -> Model:
        """Open a folder that `prepare` made.

        Raises:
            ModelError: It is not such a folder.
        """
        try:
            data = json.loads((folder / "model.json").read_text(encoding="utf-8"))
            specs = {
                side: tuple(
                    TensorSpec(s["name"], s["dtype"], tuple(s["shape"])) for s in data[side]
                )
                for side in ("inputs", "outputs")
            }
            return cls(data["name"], data["fingerprint"], folder, **specs)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{str(folder)!r} is not a prepared model ({error}); prepare the ONNX file again"
            ) from None


def is_bundle(folder: Path) -> bool:
    """True when `folder` is a finished prepared model."""
    return (folder / "model.json").is_file()


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read `name=1x3x224x224`.

    Raises:
        ModelError: It is not of that form.
    """
    name, equals, dims = text.rpartition("=")
    if not equals or not name or not re.fullmatch(r"[0-9]+(x[0-9]+)*", dims):
        raise ModelError(f"shape {text!r} is not of the form name=1x3x224x224")
    shape = tuple(int(d) for d in dims.split("x"))
    if 0 in shape:
        raise ModelError(f"shape {text!r} has a dimension of 0; dimensions are 1 or more")
    return name, shape


def read_input_sets(paths: Sequence[Path]) -> list[InputSet]:
    """Read one input set from each `.npz` file.

    Raises:
        ModelError: A file cannot be read as arrays.
    """
    return [_read_npz(path) for path in paths]


def prepare(
    path: Path,
    *,
    name: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Sequence[Mapping[str, NDArray[np.generic]]] | None = None,
    seed: int = 0,
    cache: Path | None = None,
) -> Model:
    """Check and normalise an ONNX file and make its folder; a second call finds it made.

    Args:
        path: ONNX file; external data beside it is read too.
        name: Name for people; the file's stem when None.
        shapes: Shapes for inputs that the file leaves open.
        inputs: Input sets; the last third is kept for confirmation. None generates them.
        seed: Seed of generated inputs.
        cache: Folder for prepared models; the user's cache folder when None.

    Raises:
        ModelError: The file, a shape or an input set cannot be used.
    """
    given = [{k: np.asarray(v) for k, v in one.items()} for one in inputs or ()]
    proto = _read(path)
    specs = _fix_inputs(proto, path, shapes or {}, given)
    proto = _normalise(proto, path)
    fingerprint = fingerprint_of(proto)
    sets = given or generate(proto, specs, seed, SELECTION_SETS + CONFIRMATION_SETS)
    for one in sets:
        _check_set(one, specs)
    place = _cache_folder(cache) / f"{fingerprint[:16]}-{_hash_sets(sets)[:8]}"
    title = name or path.stem
    if is_bundle(place):
        known = Model.load(place)
        if known.name == title:
            return known
        place = place.with_name(f"{place.name}-{hashlib.sha256(title.encode()).hexdigest()[:6]}")
        if is_bundle(place):
            return Model.load(place)
    return _make_bundle(proto, place, title, fingerprint, specs, sets)


def fingerprint_of(proto: onnx.ModelProto) -> str:
    """Hash over what a model computes: operators, wiring, attributes, weights, input shapes.

    Names of inner tensors do not count (optimisers make them up at random), names of inputs and
    outputs do; nor do documentation, producer or the order of weights.
    """
    digest = hashlib.sha256()
    for opset in sorted(proto.opset_import, key=lambda o: o.domain):
        digest.update(f"{opset.domain}:{opset.version};".encode())
    _feed_graph(digest, proto.graph, {})
    return digest.hexdigest()


def _feed_graph(digest: hashlib._Hash, graph: onnx.GraphProto, outer: Mapping[str, str]) -> None:
    from onnx import numpy_helper

    known = dict(outer)  # tensor name -> what it is, free of made-up names
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for value in graph.input:
        known[value.name] = f"input {value.name}"
        digest.update(value.name.encode() + value.type.SerializeToString(deterministic=True))
    for number, node in enumerate(graph.node):
        digest.update(f"{node.domain}|{node.op_type}|".encode())
        for name in node.input:
            if name in weights and name not in known:
                array = numpy_helper.to_array(weights[name])
                content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
                known[name] = f"{array.dtype} {array.shape} {content}"
            digest.update(f"{known.get(name, '')}|".encode())
        for place, name in enumerate(node.output):
            known[name] = f"{len(outer)}:{number}:{place}"
        for attribute in sorted(node.attribute, key=lambda a: a.name):
            digest.update(f"{attribute.name}=".encode())
            if attribute.HasField("g"):
                _feed_graph(digest, attribute.g, known)
            else:
                clean = type(attribute)()
                clean.CopyFrom(attribute)
                clean.doc_string = ""
                clean.t.name = clean.t.doc_string = ""
                digest.update(clean.SerializeToString(deterministic=True))
    for value in graph.output:
        digest.update(f"{value.name}={known.get(value.name, '')};".encode())


def _cache_folder(cache: Path | None) -> Path:
    from platformdirs import user_cache_dir

    folder = cache or Path(user_cache_dir("routepilot")) / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"the cache folder {str(folder)!r} cannot be made: {error}") from None
    return folder


def _read(path: Path) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise ModelError(f"model file {str(path)!r} does not exist; give the path of an ONNX file")
    if path.stat().st_size == 0:
        raise ModelError(f"model file {str(path)!r} is empty; give an ONNX file")
    try:
        proto = onnx.load(str(path))
        onnx.checker.check_model(str(path))
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


def _real_inputs(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    weights = {tensor.name for tensor in proto.graph.initializer}
    return [value for value in proto.graph.input if value.name not in weights]


def _fix_inputs(
    proto: onnx.ModelProto,
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    given: Sequence[InputSet],
) -> tuple[TensorSpec, ...]:
    """Write fixed dimensions into the graph's inputs and drop weights listed as inputs."""
    from onnx import helper

    inputs = _real_inputs(proto)
    names = [value.name for value in inputs]
    for name in shapes:
        if name not in names:
            raise ModelError(f"--shape names {name!r}; the inputs are {', '.join(names)}")
    specs = []
    for value in inputs:
        tensor = value.type.tensor_type
        if not value.type.HasField("tensor_type"):
            raise ModelError(
                f"input {value.name!r} of {str(path)!r} is not a tensor; only tensors work"
            )
        wanted = shapes.get(value.name)
        if wanted is None and given and value.name in given[0]:
            wanted = given[0][value.name].shape
        shape = _fixed_shape(value.name, list(tensor.shape.dim), wanted)
        for dim, size in zip(tensor.shape.dim, shape, strict=True):
            dim.ClearField("dim_param")
            dim.dim_value = size
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        specs.append(TensorSpec(value.name, np.dtype(dtype).name, shape))
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    return tuple(specs)


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
            raise ModelError(f"input {name!r} has open dimensions; give --shape {name}={form}")
        if fixed is not None and size != fixed:
            raise ModelError(
                f"dimension {place} of input {name!r} is {fixed} in the model and {size} in the"
                " given shape; the model's stands"
            )
        shape.append(int(size))
    return tuple(shape)


def _normalise(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Lift old opsets, so that no route gets the credit for it, and drop what is not the model."""
    import onnx

    version = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), OPSET)
    if version < 13:
        try:
            proto = onnx.version_converter.convert_version(proto, OPSET)
        except Exception:
            pass  # some graphs cannot be lifted; they stay as they are
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
        return onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise ModelError(f"shapes of {str(path)!r} do not fit together: {words}") from None


def _check_set(one: InputSet, specs: Sequence[TensorSpec]) -> None:
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


def _hash_sets(sets: Sequence[InputSet]) -> str:
    digest = hashlib.sha256()
    for one in sets:
        for name in sorted(one):
            digest.update(f"{name}|{one[name].dtype}|{one[name].shape}|".encode())
            digest.update(np.ascontiguousarray(one[name]).tobytes())
    return digest.hexdigest()


def _make_bundle(
    proto: onnx.ModelProto,
    place: Path,
    title: str,
    fingerprint: str,
    specs: tuple[TensorSpec, ...],
    sets: Sequence[InputSet],
) -> Model:
    import onnx

    draft = Path(tempfile.mkdtemp(dir=place.parent, prefix=".preparing-"))
    try:
        large = proto.ByteSize() > EXTERNAL_BYTES
        onnx.save(
            proto,
            str(draft / "model.onnx"),
            save_as_external_data=large,
            location="model.onnx.data",
        )
        kept = max(len(sets) // 3, 1) if len(sets) > 1 else 0
        cut = len(sets) - kept
        # A single set serves both ends; the second look is then weaker, and nothing can be done.
        for kind, some in (("selection", sets[:cut]), ("confirmation", sets[cut:] or sets)):
            for number, one in enumerate(some):
                np.savez(draft / f"{kind}_{number}.npz", **one)  # type: ignore[arg-type]
        outputs = _run_reference(draft, title)
        description = {
            "name": title,
            "fingerprint": fingerprint,
            "inputs": [asdict(spec) for spec in specs],
            "outputs": outputs,
            "reference": "ONNX Runtime, optimisations off, one thread",
        }
        (draft / "model.json").write_text(json.dumps(description, indent=2), encoding="utf-8")
        try:
            os.replace(draft, place)
        except OSError:
            if not is_bundle(place):  # another process made it meanwhile
                raise
        return Model.load(place)
    except OSError as error:
        raise ModelError(f"the prepared model cannot be written: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _run_reference(folder: Path, title: str) -> list[dict[str, object]]:
    """Compute the references in a child and return the outputs' specs."""
    done = subprocess.run(
        [sys.executable, "-m", "routepilot.env.models", str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        words = " ".join((lines or [f"exit {done.returncode}"])[-1].split())[:300]
        raise ModelError(f"the reference run of {title} failed: {words}; repair the model")
    outputs: list[dict[str, object]] = json.loads(done.stdout)
    return outputs


def _read_npz(path: Path) -> InputSet:
    try:
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except (OSError, ValueError, KeyError, AttributeError, EOFError) as error:
        raise ModelError(
            f"input set {str(path)!r} cannot be read ({error}); give an .npz file of plain arrays"
        ) from None


def _reference_child(folder: Path) -> None:
    """Run the model on every input set with optimisations off and write what it gives."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    described: list[dict[str, object]] = []
    for kind in ("selection", "confirmation"):
        for path in sorted(folder.glob(f"{kind}_*.npz")):
            outputs = dict(zip(names, session.run(names, _read_npz(path)), strict=True))
            for name, array in outputs.items():
                if not isinstance(array, np.ndarray):
                    raise SystemExit(f"output {name} is not a tensor")
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise SystemExit(f"output {name} of the float32 reference holds NaN or Inf")
            np.savez(folder / f"reference_{path.name}", **outputs)
            described = [
                {"name": n, "dtype": a.dtype.name, "shape": list(a.shape)}
                for n, a in outputs.items()
            ]
    print(json.dumps(described))


if __name__ == "__main__":
    _reference_child(Path(sys.argv[1]))
