"""Liveness tables: the file, partial tables together, and what a table says in sum."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepilot.env.errors import TableError
from routepilot.env.liveness_pool import Found
from routepilot.env.liveness_table import (
    FIELDS,
    METADATA_KEY,
    LivenessCard,
    LivenessTable,
    describe_liveness,
    is_liveness_table,
    load_liveness,
    merge_liveness,
    save_liveness,
)
from routepilot.env.liveness_words import in_words

CHANGES = ("-kgen:tiling=0", "-kgen:tiling=1", "-mha_fusion:v2=off", "-cask6:w2c_mode=1")


def engine(name: str) -> Found:
    return {"hash": name, "bytes": "1000", "seconds": "0.5"}


def failure(status: str, reason: str) -> Found:
    return {"status": status, "reason": reason, "seconds": "0.25"}


REFUSAL = 'the compiler does not take -cask6:w2c_mode=1: unknown option "-cask6:w2c_mode"'


def card(name: str, *operators: str) -> LivenessCard:
    return LivenessCard(name, name * 4, "conv", "train", True, operators, True)


def small(**changes: object) -> LivenessTable:
    one, two = card("one", "Conv", "Relu"), card("two", "MatMul", "Softmax")
    found = {
        (one.fingerprint, "8.9"): {
            "": engine("a"),
            CHANGES[0]: engine("b"),
            CHANGES[1]: engine("a"),
            CHANGES[2]: engine("a"),
            CHANGES[3]: failure("refused", REFUSAL),
        },
        (one.fingerprint, "12.0"): {
            "": engine("x"),
            CHANGES[0]: engine("x"),
            CHANGES[2]: engine("y"),
        },
        (two.fingerprint, "8.9"): {
            "": engine("m"),
            CHANGES[0]: failure("build_failed", "graph.cpp:1234: CHECK failed. In build at /x:1"),
            CHANGES[2]: engine("n"),
        },
    }
    table = LivenessTable(
        "RTX 1", CHANGES, (one, two), found, {(two.fingerprint, "12.0"): "no kernel"}, {"date": "d"}
    )
    return replace(table, **changes)  # type: ignore[arg-type]


def test_file_holds_the_table(tmp_path: Path) -> None:
    save_liveness(small(), tmp_path / "t.parquet")
    assert is_liveness_table(tmp_path / "t.parquet")
    assert load_liveness(tmp_path / "t.parquet") == small()


@given(
    st.dictionaries(
        st.sampled_from(CHANGES),
        st.one_of(
            st.builds(engine, st.sampled_from(["a", "b"])),
            st.builds(
                failure, st.sampled_from(["crashed", "timed_out"]), st.text("abc: ", min_size=1)
            ),
        ),
    )
)
def test_whatever_was_found_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, answers: dict[str, Found]
) -> None:
    path = tmp_path_factory.mktemp("tables") / "t.parquet"
    one = card("one", "Conv")
    whole = {"": engine("a"), **answers}
    table = LivenessTable("RTX 1", CHANGES, (one,), {(one.fingerprint, "8.9"): whole})
    save_liveness(table, path)
    (read,) = load_liveness(path).found.values()
    for change, answer in whole.items():
        if "reason" in answer:
            answer = {**answer, "reason": " ".join(answer["reason"].split())}
        assert read[change] == answer


def test_summary_counts_by_model_reason_target_and_rule() -> None:
    facts = describe_liveness(small())
    first, other, last = facts["models"]
    assert (first["tried"], first["changed"], first["identical"]) == (4, 1, 2)
    assert (first["failed"], first["refused"], first["distinct_engines"]) == (0, 1, 2)
    assert first["live_knobs"] == ["-kgen:tiling"]
    assert (other["target"], other["changed"], other["identical"]) == ("12.0", 1, 1)
    assert (last["failed"], last["refused"], last["changed"]) == (1, 0, 1)
    assert facts["outcomes"] == {"changed": 3, "identical": 3, "failed": 2}
    assert facts["live_knobs"] == {"-mha_fusion:v2": 2, "-kgen:tiling": 1}
    assert facts["never_live"] == ["-cask6:w2c_mode"]
    assert [r["reason"] for r in facts["reasons"]] == [
        'unknown option "-cask6:w2c_mode"',
        "graph.cpp:N: CHECK failed. In ...",
    ]
    (pair,) = facts["targets"]
    assert pair["targets"] == ["12.0", "8.9"]
    assert (pair["models"], pair["same"], pair["differ"]) == (1, 0, 2)
    assert facts["refused_models"] == [{"name": "two", "target": "12.0", "reason": "no kernel"}]
    assert facts["seconds"] == pytest.approx(5.0)


def test_words_are_of_these_figures() -> None:
    lines = in_words(describe_liveness(small()))
    assert lines[0].startswith("2 models, targets 8.9 and 12.0: 8 changes compiled by RTX 1 in")
    assert lines[0].endswith("3 changed the engine, 3 left it byte-identical, 2 gave none.")
    assert (
        "4 single changes 1 act on the median model (1 to 1), of the 3 knobs 1 (1 to 1)" in lines[1]
    )
    assert "1 of the 3 knobs changed no engine" in lines[2]
    assert "-mha_fusion:v2 (2), -kgen:tiling (1)." in lines[2]
    assert lines[3].startswith("Targets 8.9 and 12.0 agree on 0 of 2 outcomes; most apart: ")
    assert lines[-1].startswith("The operator rule ruled out 2, of which 1 changed an engine")
    assert in_words(describe_liveness(small(found={}))) == []


#: The datasheet of this checkout.
DATASHEET = Path(__file__).resolve().parents[2] / "docs" / "table.md"


def test_every_column_is_in_the_datasheet() -> None:
    text = DATASHEET.read_text(encoding="utf-8")
    section = text.partition("## Liveness\n")[2].partition("\n## ")[0]
    assert section
    for name, _, _ in FIELDS:
        assert f"`{name}`" in section
    assert f"`{METADATA_KEY.decode()}`" in section


def test_the_datasheet_holds_what_the_released_table_says() -> None:
    from routepilot.training.defaults import released_liveness

    table = released_liveness()
    if table is None:
        pytest.skip("no liveness table is released in this checkout")
    said = " ".join(DATASHEET.read_text(encoding="utf-8").replace("`", "").split())
    lines = in_words(describe_liveness(table))
    wanted = textwrap.fill(" ".join(lines), 100, break_on_hyphens=False, break_long_words=False)
    assert all(line in said for line in lines), f"the datasheet must say:\n{wanted}"


def test_rule_that_is_broken_is_told() -> None:
    """The graph of `one` has no attention, yet an attention knob changed its engine for 12.0."""
    rule = describe_liveness(small())["operator_rule"]
    broken = [{"name": "one", "target": "12.0", "change": "-mha_fusion:v2=off"}]
    assert rule["changed_though_ruled_out"] == broken
    # -mha_fusion:v2 on `one`, twice; -cask6:w2c_mode needs a convolution or product: not ruled out.
    assert rule["ruled_out"] == 2
    assert (rule["identical"], rule["identical_and_ruled_out"]) == (3, 1)


def test_partial_tables_go_together() -> None:
    whole = small()
    first, *rest = whole.found
    parts = [
        replace(whole, found={first: dict(list(whole.found[first].items())[:3])}, refusals={}),
        replace(whole, found={first: whole.found[first]}, manifest={"date": "later"}),
        replace(whole, found={key: whole.found[key] for key in rest}, manifest={}),
    ]
    merged = merge_liveness(parts)
    assert merged.found == whole.found
    assert merged.refusals == whole.refusals
    assert merged.models == whole.models
    assert merged.manifest == {"date": "d", "merged": [{"date": "later"}, {}]}


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TableError, match="two compilers cannot be merged: RTX 1 and RTX 2"):
        merge_liveness([small(), small(compiler="RTX 2")])
    key = ("oneoneoneone", "8.9")
    other = small(found={key: {"": engine("elsewhere")}})
    with pytest.raises(TableError, match="two default engines of one for 8.9"):
        merge_liveness([small(), other])
    with pytest.raises(TableError, match="no table to merge"):
        merge_liveness([])


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pytest.raises(TableError, match="does not exist"):
        load_liveness(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(TableError, match="damaged or not Parquet"):
        load_liveness(tmp_path / "text.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(TableError, match="no liveness table"):
        load_liveness(tmp_path / "other.parquet")
    assert not is_liveness_table(tmp_path / "other.parquet")
    assert not is_liveness_table(tmp_path / "text.parquet")
    assert not is_liveness_table(tmp_path / "none.parquet")
    one = small()
    save_liveness(replace(one, found={next(iter(one.found)): {"": engine("a")}}), tmp_path / "t")
    data = pq.read_table(tmp_path / "t")
    for meta, word in ((b'{"schema": 9}', "schema 9"), (b'{"schema": 1}', "lacks something")):
        pq.write_table(
            data.replace_schema_metadata({b"routepilot-liveness": meta}), tmp_path / "bad.parquet"
        )
        with pytest.raises(TableError, match=word):
            load_liveness(tmp_path / "bad.parquet")
    with pytest.raises(TableError, match="cannot be written"):
        save_liveness(one, tmp_path / "nowhere" / "t.parquet")
