"""Programs looked at before PyTorch reads them: whether a `.pt2` file is data or code.

Owns what of such a file may run when it is read: compiled packages, pickles, expressions that are
evaluated, and targets that name any function of torch. Imports no torch. Whatever is not known to
be data is refused; only somebody who trusts the file may read it then.

What was looked at is written anew into an archive of our own, and that is what PyTorch reads: two
readers of one archive may see two things.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from routepilot.env.errors import ModelError

#: Files of an archive (below its top folder) that hold the graph.
_GRAPHS = re.compile(r"(models/[\w.-]+\.json|serialized_exported_program\.json)")

#: Lists of what is stored as plain tensors, with the words for what is not.
_PAYLOADS = re.compile(r"data/(weights|constants)/[\w.-]+_config\.json")

#: Everything else that an archive of data has: bytes of tensors and small marks. Files of
#: `torch.save` are read by PyTorch's reader of plain tensors alone (`weights_only`).
_PLAIN = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|data/(weights|constants)/[\w.-]+\.pt"
    r"|data/sample_inputs/[\w.-]+\.pt|archive_format|archive_version|byteorder|\.format_version"
    r"|\.storage_alignment|\.data/(version|serialization_id)|version|serialized_state_dict\.json"
    r"|serialized_constants\.json|serialized_example_inputs\.json"
)

#: Functions that a graph may call: those of ATen, of control flow, and of plain numbers.
_TARGETS = re.compile(
    r"torch\.ops\.(aten|prims|quantized_decomposed)\.(?!from_file\b)\w+\.\w+"
    r"|torch\.ops\.higher_order\.(cond|map_impl|scan|while_loop|wrap_with_set_grad_enabled)"
    r"|_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|torch\.sym_(max|min|not|ite|int|float|sum)|math\.(ceil|floor|trunc)"
)

#: Expressions, which are evaluated: whole numbers, sizes (`s0`, `u0`) and arithmetic.
_EXPRESSION = re.compile(
    r"(\b(\d+|[su]\d+|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|True|False)\b|[\s+*/(),-])*"
)

#: Words, from which PyTorch makes source code when it builds the graph: names and nothing else.
_WORD = re.compile(r"[\w.:+-]*")

#: Texts that stay texts: arguments (written with their quotes) and where a node comes from.
_TEXTS = {"as_string", "as_strings", "nn_module_stack", "torch_fn", "source_fn_stack"}

#: Kinds of containers that inputs and outputs may lie in.
_CONTAINERS = {"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}


def screened_copy(path: Path, target: Path) -> None:
    """Write a program's archive anew, if it is data.

    Args:
        path: The file.
        target: Where to write.

    Raises:
        ModelError: It is no such archive, or reading it could run code that is in it.
    """
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(target, "w") as copy:
            seen = set()
            for entry in archive.infolist():
                inside = _inside(entry)
                if entry.filename in seen:
                    raise _Refused(f"has two files named {entry.filename[:80]!r}")
                seen.add(entry.filename)
                copy.writestr(entry.filename, _screened(inside, archive.read(entry)))
    except _Varies:
        raise ModelError(
            f"program {str(path)!r} has shapes that vary; export it again without dynamic_shapes"
        ) from None
    except _Refused as refused:
        raise ModelError(
            f"program {str(path)!r} {refused}, so reading it could run code; export it again"
            " with torch.export.save, or trust it with --trust if you know who made it"
        ) from None
    except (OSError, ValueError, KeyError, RuntimeError, RecursionError, zipfile.BadZipFile) as bad:
        words = " ".join(str(bad).split())[:200]
        raise ModelError(
            f"program {str(path)!r} cannot be read ({words}); write it with torch.export.save"
        ) from None


class _Refused(Exception):
    """What an archive has that is not known to be data."""


class _Varies(Exception):
    """A program whose shapes are not fixed; its sizes are expressions."""


def _inside(entry: zipfile.ZipInfo) -> str:
    """The name of an entry without the archive's top folder."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise _Refused("is compressed")
    name = entry.filename
    if _PLAIN.fullmatch(name) or _GRAPHS.fullmatch(name):  # no top folder: PyTorch before 2.7
        return name
    return name.partition("/")[2]


def _screened(name: str, data: bytes) -> bytes:
    """What of a file may be read; raises `_Refused` for what may not."""
    if name.startswith("data/aotinductor/"):
        raise _Refused("holds compiled code (a package of AOTInductor)")
    if _GRAPHS.fullmatch(name):
        graph = json.loads(data)
        if isinstance(graph, dict) and graph.get("range_constraints"):
            raise _Varies
        _look_at_graph(graph)
        return json.dumps(graph).encode()
    if _PAYLOADS.fullmatch(name):
        for item in json.loads(data)["config"].values():
            plain = re.fullmatch(r"(weight|tensor)_\d+", str(item["path_name"]))
            if item.get("use_pickle") is not False or not plain:
                raise _Refused("holds a pickle")
    elif not _PLAIN.fullmatch(name):
        raise _Refused(f"holds {name[:80]!r}")
    return data


def _look_at_graph(data: Any) -> None:
    """Look at every text and every name in a graph; traces of source code are emptied."""
    if isinstance(data, list):
        for value in data:
            _look_at_graph(value)
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        if not _WORD.fullmatch(key):
            raise _Refused(f"has the name {key[:80]!r}")
        if key == "stack_trace":
            data[key] = ""
        elif isinstance(value, str):
            _look_at_text(key, value)
        elif isinstance(value, list):
            for text in (v for v in value if isinstance(v, str)):
                _look_at_text(key, text)
        _look_at_graph(value)


def _look_at_text(key: str, text: str) -> None:
    if key in ("target", "as_operator"):
        if not _TARGETS.fullmatch(text):
            raise _Refused(f"calls {text[:80]!r}")
    elif key == "expr_str":
        if not _EXPRESSION.fullmatch(text):
            raise _Refused(f"has the expression {text[:80]!r}")
    elif key == "guards_code":
        raise _Refused(f"has the check {text[:80]!r}")
    elif key in ("in_spec", "out_spec"):
        _look_at_spec(json.loads(text) if text else [])
    elif key not in _TEXTS and not _WORD.fullmatch(text):
        raise _Refused(f"has the name {text[:80]!r}")


def _look_at_spec(spec: Any) -> None:
    """Look at how inputs or outputs are packed: plain containers with plain keys."""
    if isinstance(spec, list):
        for value in spec:
            _look_at_spec(value)
    if not isinstance(spec, dict):
        return
    kind = spec.get("type")
    if kind is not None and kind not in _CONTAINERS:
        raise _Refused(f"takes or gives a {str(kind)[:80]!r}")
    context = spec.get("context")
    keys = json.loads(context) if isinstance(context, str) else context
    if keys is not None and not (
        isinstance(keys, list) and all(isinstance(k, str | int) for k in keys)
    ):
        raise _Refused(f"takes or gives a container with {str(context)[:80]!r}")
    _look_at_spec(spec.get("children_spec"))
