"""The operator rule: held against what was compiled, and against the compiler at hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, save

from routepilot.env.backends.tensorrt_compiler import Compiler, Plan, Settings, find_module
from routepilot.env.liveness import known_knobs
from routepilot.env.models import Model
from routepilot.env.operator_rules import operator_rules, operator_types, ruled_out

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="the extra rtx is not installed"
)

#: Sweeps of all 236 changes with TensorRT-RTX 1.7.1.116 for compute capability 8.9.
RUNS = json.loads(Path(__file__).with_name("liveness_runs.json").read_text())["runs"]

KNOBS = [knob.name for knob in known_knobs()]


def test_rules_name_knobs_that_exist() -> None:
    for prefix, groups in operator_rules():
        assert any(name.startswith(prefix) for name in KNOBS), prefix
        assert groups and all(groups), prefix


@pytest.mark.parametrize("name", sorted(RUNS))
def test_rules_agree_with_what_was_compiled(name: str) -> None:
    """No knob that operators rule out changed an engine or broke the compiler."""
    run = RUNS[name]
    out = ruled_out(run["operators"], KNOBS)
    acting = [*run["live"], *run["failed"]]
    assert [change for change in acting if change.partition("=")[0] in out] == []
    assert len(out) > 15  # the rule is worth something


def test_rule_gives_its_reason(tiny: Model) -> None:
    knob = "-mha_fusion:v2:flash"
    assert "Softmax" in ruled_out(operator_types(tiny.path), [knob])[knob]
    assert ruled_out(["MatMul", "Softmax"], [knob]) == {}
    assert ruled_out(["Relu"], ["-kgen:tiling"]) == {}


def graph_of(
    nodes: Sequence[NodeProto], shape: Sequence[int] = (4, 64, 128), **weights: object
) -> ModelProto:
    """A model from `x` to `y`; the weights are its constants."""
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    ends.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    constants = [numpy_helper.from_array(np.asarray(v), name) for name, v in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def branch(name: str, *operators: str) -> object:
    """A graph without inputs, as `If` takes them: the operators one after another on `x`."""
    names = ["x", *(f"{name}{number}" for number in range(len(operators)))]
    nodes = [
        helper.make_node(operator, [before], [after])
        for operator, before, after in zip(operators, names, names[1:], strict=False)
    ]
    output = helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, None)
    return helper.make_graph(nodes, name, [], [output])


def test_operators_of_subgraphs_count(tmp_path: Path) -> None:
    """Those of `If`, of a `Loop` in it, and of the body of a `Scan` in that."""
    body = {"name": "b", "inputs": [], "outputs": []}
    scan = helper.make_node("Scan", [], [], body=branch("scan", "Softmax"), num_scan_inputs=0)
    inner = helper.make_graph([scan], **body)
    loop = helper.make_graph([helper.make_node("Loop", ["", ""], [], body=inner)], **body)
    fork = helper.make_node("If", ["c"], ["y"], then_branch=loop, else_branch=branch("e", "Erf"))
    save(graph_of([fork], c=np.array(True)), tmp_path / "if.onnx")
    assert operator_types(tmp_path / "if.onnx") == {"If", "Loop", "Scan", "Softmax", "Erf"}


def test_operators_of_functions_count(tmp_path: Path) -> None:
    """A function of the model itself, and the subgraph of one, hide no operator."""
    fork = helper.make_node("If", ["c"], ["b"], then_branch=branch("t", "Softmax"))
    inside = [helper.make_node("MatMul", ["a", "a"], ["c"]), fork]
    opsets = [helper.make_opsetid("", 20)]
    model = graph_of([helper.make_node("Mine", ["x"], ["y"], domain="own")])
    model.functions.append(helper.make_function("own", "Mine", ["a"], ["b"], inside, opsets))
    save(model, tmp_path / "f.onnx")
    found = operator_types(tmp_path / "f.onnx")
    assert found == {"Mine", "MatMul", "If", "Softmax"}
    assert ruled_out(found, ["-mha_fusion:v2"]) == {}


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def chain(*steps: tuple[str, list[str], dict[str, object]]) -> list[NodeProto]:
    """Nodes one after another from `x` to `y`; `.` among the inputs is what came before."""
    names = ["x", *(f"t{number}" for number in range(len(steps) - 1)), "y"]
    return [
        helper.make_node(op, [before if i == "." else i for i in inputs], [after], **attributes)
        for (op, inputs, attributes), before, after in zip(steps, names, names[1:], strict=False)
    ]


def instance_norm_by(mean: str) -> list[NodeProto]:
    """Instance normalisation written out, with the mean taken by an operator of that name."""
    step = helper.make_node
    return [
        step(mean, ["x"], ["m"]),
        step("Sub", ["x", "m"], ["d"]),
        step("Mul", ["d", "d"], ["q"]),
        step(mean, ["q"], ["v"]),
        step("Add", ["v", "e"], ["ve"]),
        step("Sqrt", ["ve"], ["s"]),
        step("Div", ["d", "s"], ["y"]),
    ]


def _scatter() -> ModelProto:
    """Writes a row into a cache: it came with opset 24."""
    nodes = [
        helper.make_node("ReduceMax", ["x", "axes"], ["u"]),
        helper.make_node("TensorScatter", ["x", "u", "i"], ["y"], axis=2),
    ]
    model = graph_of(nodes, (4, 2, 64, 32), axes=np.array([2]), i=np.zeros(4, np.int64))
    model.opset_import[0].version = 24
    return model


#: Small graphs whose operators are near a rule's: written otherwise, or implied.
NEAR: dict[str, Callable[[], ModelProto]] = {
    "hardmax": lambda: graph_of(chain(("Hardmax", ["."], {}))),
    "tensor scatter": _scatter,
    "gelu by sigmoid": lambda: graph_of(
        [
            helper.make_node("Mul", ["x", "c"], ["a"]),
            helper.make_node("Sigmoid", ["a"], ["g"]),
            helper.make_node("Mul", ["x", "g"], ["y"]),
        ],
        c=np.float32(1.702),
    ),
    "norm by pooling": lambda: graph_of(
        instance_norm_by("GlobalAveragePool"), (2, 32, 16, 16), e=np.float32(1e-5)
    ),
    "norm by a length": lambda: graph_of(chain(("LpNormalization", ["."], {"axis": -1}))),
    "mean and variance": lambda: graph_of(
        chain(("MeanVarianceNormalization", ["."], {"axes": [2, 3]})), (2, 32, 16, 16)
    ),
    "product by einsum": lambda: graph_of(
        chain(
            ("Einsum", [".", "w"], {"equation": "bij,jk->bik"}),
            ("Relu", ["."], {}),
            ("Einsum", [".", "w"], {"equation": "bij,jk->bik"}),
        ),
        w=weights(128, 128),
    ),
    "recurrent": lambda: graph_of(
        [helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=32)],
        (16, 4, 64),
        w=weights(1, 96, 64),
        r=weights(1, 96, 32),
    ),
    "transposed convolution": lambda: graph_of(
        chain(("ConvTranspose", [".", "w"], {"strides": [2, 2]})),
        (1, 16, 16, 16),
        w=weights(16, 16, 2, 2),
    ),
    "pooling by reduction": lambda: graph_of(
        chain(("ReduceMean", [".", "axes"], {})), (1, 16, 16, 16), axes=np.array([2, 3])
    ),
}


@needs_rtx
@pytest.mark.parametrize("name", sorted(NEAR))
def test_no_knob_that_is_ruled_out_acts_in_the_compiler_at_hand(name: str, tmp_path: Path) -> None:
    """All of them changed at once give the default's engine; so did ONNX's own node tests, once."""
    save(NEAR[name](), tmp_path / "near.onnx")
    out = ruled_out(operator_types(tmp_path / "near.onnx"), KNOBS)
    changed = [knob for knob in known_knobs() if knob.name in out]
    compiler = Compiler(find_module("tensorrt_rtx"), Settings(compute_capability="8.9"))
    network = compiler.parse(tmp_path / "near.onnx", {})
    default = compiler.compile(network)
    assert isinstance(default, Plan) and len(changed) > 20
    for number in range(max(len(knob.alternatives) for knob in changed)):
        flags = " ".join(
            f"{knob.name}={knob.alternatives[number]}"
            for knob in changed
            if number < len(knob.alternatives)
            # Flags that TensorRT-RTX 1.7.1 does not have.
            and knob.name not in ("-mha_fusion:gemv_pw_chain_fp32", "-cask6:w2c_mode")
        )
        plan = compiler.compile(network, flags=flags)
        assert isinstance(plan, Plan), plan
        assert plan.hash == default.hash, flags
