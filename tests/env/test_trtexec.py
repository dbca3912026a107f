"""trtexec's caches and command lines, oddities included; its enumerations as it writes them."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepilot.env.backends.tensorrt_catalog import (
    make_catalog,
    shipped_routes_json,
    unsafe_knobs,
)
from routepilot.env.errors import InputError, MachineError, RouteError, TableError
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.routes import Catalog, combine, parse_expression, sweep_expression
from routepilot.env.trtexec import (
    cache_catalog,
    cache_outcomes,
    cache_records,
    cache_target,
    command_line,
    read_tuning_cache,
    trial_line,
    write_tuning_cache,
)
from routepilot.training.candidates import read_expression
from routepilot.training.files import Format
from routepilot.training.tuning_caches import format_of_file

EXPRESSION = "-conv_lowering=[on|off] -kgen:tiling=[0|1|2]"
CATALOG = make_catalog("tensorrt", "11.1.0.106", shipped_routes_json())

HEADER: dict[str, Any] = {
    "tuner_version": "2.19.45",
    "accuracy_algorithm": "L0",
    "accuracy_parameter": {"atol": 1e-5, "rtol": 1e-5, "epsilon": 0.1},
    "searching_algorithm": "fast",
    "command_line": "trtexec --onnx=m.onnx",
    "default_build_route": "-conv_lowering=on -kgen:tiling=2 -match_ragged_mha=off",
    "tuning_expr": EXPRESSION,
    "files": {"onnx": "/models/m.onnx"},
    "argv": ["trtexec"],
}


def row(
    index: int, route: str, time: float | None, message: str = "", **more: object
) -> dict[str, object]:
    crash = time is None
    return {
        "iter": index,
        "build_route": route,
        "crash": crash,
        "error_message": message,
        "accuracy_loss": None,
        "gpu_time": time,
        **more,
    }


def write(path: Path, *rows: dict[str, object], tail: str = "", **header: object) -> Path:
    lines = [json.dumps({**HEADER, **header}), *map(json.dumps, rows)]
    path.write_text("\n".join(lines) + "\n" + tail)
    return path


FAST = (
    row(0, "-conv_lowering=on -kgen:tiling=2", 1.0),
    row(1, "-conv_lowering=on -kgen:tiling=0", 0.8),
    row(2, "-conv_lowering=on -kgen:tiling=1", 0.5, "child exited with status 1"),
    row(3, "-conv_lowering=off -kgen:tiling=2", None, "child terminated by signal SIGSEGV"),
)


# --- reading ---


def test_rows_become_outcomes(tmp_path: Path) -> None:
    cache = read_tuning_cache(write(tmp_path / "best_config.json", *FAST))
    assert (cache.tuner_version, cache.search, cache.onnx) == ("2.19.45", "fast", "/models/m.onnx")
    assert (cache.algorithm, cache.threshold, cache.notes) == ("l0", 0.1, ())
    catalog = cache_catalog(cache)
    outcomes = cache_outcomes(cache, catalog)
    assert [str(o.route) for o in outcomes] == [
        "",
        "-kgen:tiling=0",
        "-kgen:tiling=1",
        "-conv_lowering=off",
    ]
    assert [o.status for o in outcomes] == [
        Status.OK,
        Status.OK,
        Status.ACCURACY_FAILED,
        Status.CRASHED,
    ]
    assert outcomes[0].log_speedup == 0.0
    assert outcomes[1].log_speedup == pytest.approx(math.log(1 / 0.8))
    measured = outcomes[1].measurement
    assert measured is not None
    assert measured.low < measured.log_speedup < measured.high
    # The fastest row failed the accuracy check, so it must not win.
    assert max(outcomes, key=lambda o: o.log_speedup) is outcomes[1]
    assert "SIGSEGV" in outcomes[3].reason


def test_missing_result_file_is_a_failed_build(tmp_path: Path) -> None:
    message = "missing tuning result file /tmp/trtexec_tuning_1_iter1.json"
    bad = row(1, "-conv_lowering=on -kgen:tiling=0", None, message)
    cache = read_tuning_cache(write(tmp_path / "c", FAST[0], bad))
    assert cache_outcomes(cache, cache_catalog(cache))[1].status is Status.BUILD_FAILED


def test_null_losses_are_not_numbers(tmp_path: Path) -> None:
    good = row(0, FAST[0]["build_route"], 1.0, accuracy_loss={"y": 0.25, "z": 0.5})  # type: ignore[arg-type]
    lost = row(1, FAST[1]["build_route"], 0.1, accuracy_loss={"y": None, "z": 0.0})  # type: ignore[arg-type]
    cache = read_tuning_cache(write(tmp_path / "c", good, lost, accuracy_algorithm="Cosine"))
    first, second = cache_outcomes(cache, cache_catalog(cache))
    assert first.losses == {"cos": 0.5}
    assert second.status is Status.INVALID_OUTPUT
    assert not second.is_feasible


@pytest.mark.parametrize("took", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_no_success(tmp_path: Path, took: float) -> None:
    odd = row(1, "-conv_lowering=on -kgen:tiling=0", took)
    path = write(tmp_path / "c", FAST[0], odd)
    _, second = cache_outcomes(cache := read_tuning_cache(path), cache_catalog(cache))
    assert (second.status, second.measurement) == (Status.CRASHED, None)
    assert second.reason == f"its time of {took:g} ms is no time"
    cache = read_tuning_cache(write(tmp_path / "d", {**FAST[0], "gpu_time": took}, FAST[1]))
    first, second = cache_outcomes(cache, cache_catalog(cache))
    assert not first.is_feasible and second.measurement is None


def test_a_row_without_time_or_message_says_so(tmp_path: Path) -> None:
    timeless = {**row(1, "-kgen:tiling=0", 1.0), "gpu_time": None}
    silent = {**row(2, "-kgen:tiling=1", 1.0), "crash": True}
    cache = read_tuning_cache(write(tmp_path / "c", FAST[0], timeless, silent))
    reasons = [outcome.reason for outcome in cache_outcomes(cache, cache_catalog(cache))]
    assert reasons == ["", "its time of nothing is no time", "it crashed without a message"]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_caches_of_every_system_read_alike(tmp_path: Path, mark: str, end: str) -> None:
    path = write(tmp_path / "c", *FAST)
    plain = read_tuning_cache(path)
    path.write_bytes((mark + path.read_text().replace("\n", end)).encode())
    assert read_tuning_cache(path) == plain
    assert format_of_file(path, Format.AUTO) is Format.TRTEXEC


def test_what_unicode_takes_for_the_end_of_a_line_is_none(tmp_path: Path) -> None:
    """trtexec's JSON leaves such characters of a compiler's message as they are."""
    message = "bad\u2028thing\x85"
    bad = json.dumps(row(1, "-kgen:tiling=0", None, message), ensure_ascii=False)
    cache = read_tuning_cache(write(tmp_path / "c", FAST[0], tail=bad + "\n"))
    assert cache.rows[1].message == message and cache.notes == ()


def test_second_phase_starts_again_and_repeats(tmp_path: Path) -> None:
    again = (row(0, "-kgen:tiling=2", 1.1), row(1, "-kgen:tiling=0", 0.7))
    cache = read_tuning_cache(write(tmp_path / "c", *FAST, *again, searching_algorithm="mixed"))
    assert [(r.phase, r.index) for r in cache.rows] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 0),
        (2, 1),
    ]
    catalog = cache_catalog(cache)
    target = cache_target(cache, catalog, "NVIDIA H100")
    records = cache_records(cache, catalog, target, "f" * 64)
    assert [r.repeat for r in records] == [0, 0, 0, 0, 1, 1]
    assert {r.target_key for r in records} == {target.key}


def test_truncated_last_line_is_left_out(tmp_path: Path) -> None:
    cache = read_tuning_cache(write(tmp_path / "c", *FAST[:2], tail='{"iter": 2, "build_ro'))
    assert len(cache.rows) == 2
    assert "cut off" in cache.notes[0]


def test_header_alone_is_an_empty_cache(tmp_path: Path) -> None:
    cache = read_tuning_cache(write(tmp_path / "c"))
    assert cache_outcomes(cache, cache_catalog(cache)) == []


def test_no_time_of_the_default_means_no_speedup(tmp_path: Path) -> None:
    cache = read_tuning_cache(write(tmp_path / "c", FAST[1]))
    (outcome,) = cache_outcomes(cache, cache_catalog(cache))
    assert (outcome.status, outcome.measurement) == (Status.OK, None)
    assert not outcome.is_feasible


def test_cache_of_another_tuner_reads(tmp_path: Path) -> None:
    default = "-conv_lowering=on -new_knob=auto"
    rows = (row(0, "-new_knob=auto", 2.0), row(1, "-new_knob=wild", 1.0))
    path = write(tmp_path / "c", *rows, tuner_version="3.0", default_build_route=default)
    cache = read_tuning_cache(path)
    catalog = cache_catalog(cache)
    assert catalog["-new_knob"].all_values == ("auto", "wild")
    assert cache_outcomes(cache, catalog)[1].log_speedup == pytest.approx(math.log(2))
    bare = read_tuning_cache(write(path, tuner_version="3.0", default_build_route=""))
    with pytest.raises(TableError, match="no default_build_route"):
        cache_catalog(bare)


def test_row_with_a_knob_of_nowhere(tmp_path: Path) -> None:
    cache = read_tuning_cache(write(tmp_path / "c", row(0, "-alien=1", 1.0)))
    with pytest.raises(TableError, match=r"row 0 of phase 1: .*-alien"):
        cache_outcomes(cache, cache_catalog(cache))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not a tuning cache"),
        ("PK\x03\x04", "not a tuning cache"),
        ('{"a": 1}\n', "not a tuning cache"),
        ("[]\n", "not a tuning cache"),
        (json.dumps({**HEADER, "accuracy_parameter": "-a=1"}), "not a tuning cache"),
        (json.dumps({**HEADER, "accuracy_parameter": {"epsilon": "much"}}), "not a tuning cache"),
        (json.dumps({**HEADER, "files": "m.onnx"}), "not a tuning cache"),
        (
            json.dumps(HEADER) + '\n{"iter": 1e999, "build_route": "", "crash": false}\n{}\n',
            "line 2",
        ),
        (json.dumps(HEADER) + "\n{broken\n" + json.dumps(FAST[0]) + "\n", "line 2"),
        (json.dumps(HEADER) + "\n7\n" + json.dumps(FAST[0]) + "\n", "line 2"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "c"
    path.write_text(text)
    with pytest.raises(TableError, match=word):
        read_tuning_cache(path)
    with pytest.raises(TableError, match="cannot be read"):
        read_tuning_cache(tmp_path)


# --- writing ---

STATUSES = (Status.OK, Status.ACCURACY_FAILED, Status.CRASHED)
NAMES = ("-conv_lowering", "-kgen:tiling", "-cask_fusion:num_tactics")


@st.composite
def outcomes(draw: st.DrawFn) -> list[Outcome]:
    found = [_outcome(CATALOG, {}, Status.OK, 2.0)]
    for _ in range(draw(st.integers(0, 6))):
        chosen = draw(st.sets(st.sampled_from(NAMES), min_size=1))
        values = {n: draw(st.sampled_from(CATALOG[n].values)) for n in chosen}
        status = draw(st.sampled_from(STATUSES))
        found.append(_outcome(CATALOG, values, status, draw(st.floats(0.1, 9))))
    return found


def _outcome(catalog: Catalog, values: dict[str, str], status: Status, time: float) -> Outcome:
    route = catalog.route(values)
    if status is not Status.OK:
        return Outcome(route, status, "words")
    ratio = math.log(2.0 / time)
    measured = Measurement(ratio, ratio, ratio, time, 2.0, 8, 0.0)
    return Outcome(route, status, measurement=measured, losses={"l0": 0.0})


@given(made=outcomes())
def test_written_caches_read_back(
    tmp_path_factory: pytest.TempPathFactory, made: list[Outcome]
) -> None:
    path = tmp_path_factory.mktemp("caches") / "c.json"
    assert write_tuning_cache(path, CATALOG, made, onnx="m.onnx") == 0
    cache = read_tuning_cache(path)
    assert cache.onnx == "m.onnx"
    back = cache_outcomes(cache, cache_catalog(cache))
    assert [str(o.route) for o in back] == [str(o.route) for o in made]
    assert [o.status for o in back] == [o.status for o in made]
    for ours, theirs in zip(made, back, strict=True):
        assert theirs.log_speedup == pytest.approx(ours.log_speedup)


def test_written_cache_has_trtexecs_form(tmp_path: Path) -> None:
    made = [
        _outcome(CATALOG, {}, Status.OK, 2.0),
        _outcome(CATALOG, {"-kgen:tiling": "0"}, Status.OK, 1.0),
    ]
    lever = _outcome(CATALOG, {"-tf32": "off"}, Status.OK, 1.0)
    path = tmp_path / "c.json"
    assert write_tuning_cache(path, CATALOG, [*made, lever], threshold=0.5) == 1
    header, *rows = map(json.loads, path.read_text().splitlines())
    assert list(header)[:7] == list(HEADER)[:7]
    assert header["tuner_version"] == "2.19.45"
    assert header["tuning_expr"] == "-kgen:tiling=[0|1|2]"
    assert list(rows[0]) == list(FAST[0])
    assert [r["build_route"] for r in rows] == ["-kgen:tiling=2", "-kgen:tiling=0"]
    assert [r["gpu_time"] for r in rows] == [2.0, 1.0]
    assert parse_expression(header["tuning_expr"], CATALOG).count_full() == 3


def test_writing_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="allowed: l0, l1, l2, lInf, cos"):
        write_tuning_cache(tmp_path / "c", CATALOG, [], algorithm="rel_l2")
    with pytest.raises(MachineError, match="cannot be written"):
        write_tuning_cache(tmp_path / "none" / "c", CATALOG, [])


# --- the command line ---


def test_command_line_is_exact() -> None:
    route = CATALOG.parse("-kgen:tiling=0 -conv_lowering=off")
    assert command_line(route, "m.onnx", "m.plan") == (
        "trtexec --onnx=m.onnx '--setBuildRoute=-conv_lowering=off -kgen:tiling=0'"
        " --saveEngine=m.plan"
    )
    assert command_line(CATALOG.parse(""), "my model.onnx") == "trtexec '--onnx=my model.onnx'"
    levers = CATALOG.parse(
        "-builder_optimization_level=5 -tiling_optimization_level=full -max_num_tactics=32"
        " -max_aux_streams=0 -tf32=off -sparse_weights=on"
    )
    assert shlex.split(command_line(levers, "m.onnx"))[2:] == [
        "--builderOptimizationLevel=5",
        "--tilingOptimizationLevel=3",
        "--maxTactics=32",
        "--maxAuxStreams=0",
        "--noTF32",
        "--sparsity=enable",
    ]


def test_line_of_a_trial_names_the_files_of_the_run() -> None:
    route = CATALOG.parse("-precision=fp16 -kgen:tiling=0")
    start = "trtexec --onnx=work/onnx/fp16/model.onnx"
    route_words = "--setBuildRoute=-kgen:tiling=0"
    shared = f"{start} --timingCacheFile=work/timing.cache --avgTiming=1 {route_words}"
    assert trial_line("tensorrt", {}, route) == shared
    own = {"timing_cache": "fresh", "workspace_mib": "64", "avg_timing": "4", "device": "1"}
    own |= {"tactic_shared_kib": "48"}
    words = "--memPoolSize=workspace:64M,tacticSharedMem:48K --avgTiming=4 --device=1"
    assert trial_line("tensorrt", own, route) == f"{start} {words} {route_words}"
    older = trial_line("tensorrt", {"channel": "lunowud", "plans": "winner"}, route)
    assert older.startswith("env __LUNOWUD=-kgen:tiling=0 trtexec --onnx=model.onnx")
    assert trial_line("onnxruntime", {}, route) == ""


# --- the same routes in the same order ---


def test_enumerations_are_trtexecs() -> None:
    """The published example: 4 routes under fast, 6 under full, in this order."""
    expression = parse_expression(EXPRESSION, CATALOG)

    def written(settings: dict[str, str]) -> str:
        return "/".join(settings[name] for name in ("-conv_lowering", "-kgen:tiling"))

    assert list(map(written, expression.fast(CATALOG))) == ["on/2", "on/0", "on/1", "off/2"]
    assert list(map(written, expression.full())) == [
        "on/0",
        "on/1",
        "on/2",
        "off/0",
        "off/1",
        "off/2",
    ]


@pytest.mark.parametrize(
    ("text", "fast", "full"),
    [
        # A pair that excludes itself: the fourth of the product means nothing.
        (
            "-force_conv_nhwc=[on|off] -force_conv_nchw=[on|off]",
            ["", "-force_conv_nchw=on", "-force_conv_nhwc=on"],
            ["-force_conv_nhwc=on", "-force_conv_nchw=on", ""],
        ),
        # A part of what is off means nothing.
        (
            "-mha_fusion:v2=[on|off] -mha_fusion:v2:flash=[on|off]",
            ["", "-mha_fusion:v2:flash=off", "-mha_fusion:v2=off"],
            ["", "-mha_fusion:v2:flash=off", "-mha_fusion:v2=off"],
        ),
        # A name that is the beginning of another's, without being its parent's.
        (
            "-copy_ppg=[on|off] -copy_ppg_fwd=[on|off]",
            ["", "-copy_ppg_fwd=off", "-copy_ppg=off"],
            ["", "-copy_ppg_fwd=off", "-copy_ppg=off", "-copy_ppg=off -copy_ppg_fwd=off"],
        ),
        # An unbounded knob: its default is not listed, and the baseline has it all the same.
        (
            "-peep:max=[1|2] -cask_fusion:num_tactics=7",
            [
                "-cask_fusion:num_tactics=7",
                "-peep:max=1 -cask_fusion:num_tactics=7",
                "-peep:max=2 -cask_fusion:num_tactics=7",
            ],
            ["-peep:max=1 -cask_fusion:num_tactics=7", "-peep:max=2 -cask_fusion:num_tactics=7"],
        ),
    ],
)
def test_what_means_nothing_is_left_out_in_order(
    text: str, fast: list[str], full: list[str]
) -> None:
    expression = parse_expression(text, CATALOG)
    assert list(map(str, combine(CATALOG, expression.fast(CATALOG)))) == fast
    assert list(map(str, combine(CATALOG, expression.full()))) == full


def test_an_expression_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(RouteError, match="no route of the expression.*only one layout"):
        read_expression("-force_conv_nhwc=on -force_conv_nchw=on", CATALOG)
    assert read_expression("-force_conv_nhwc=on -force_conv_nchw=[on]", CATALOG)  # `fast` has one


def test_a_knob_that_is_left_out_says_why() -> None:
    unsafe = unsafe_knobs(shipped_routes_json())
    with pytest.raises(RouteError, match="asserts a causal mask; -O unsafe=on takes it in"):
        read_expression("-mha_fusion:v2:causal_mask=[on|off]", CATALOG, unsafe)
    with pytest.raises(RouteError, match="did you mean"):
        read_expression("-mha_fusion:v2:causal=[on|off]", CATALOG, unsafe)


def test_fast_over_every_bounded_knob_counts_206() -> None:
    catalog = make_catalog("tensorrt", "11.1", shipped_routes_json(), levers=(), unsafe=True)
    bounded = " ".join(
        f"{k.name}=[{'|'.join(k.values)}]"
        for k in catalog.knobs
        if k.bounded and k.name != "-precision"
    )
    assert sum(1 for _ in parse_expression(bounded, catalog).fast(catalog)) == 206
    assert sweep_expression(catalog).variables
