"""Generic tidy tables: units, defaults, the round trip, and refusals."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces_made import pipeline_frame, write_csv

import prism
from prism import PrismError
from prism.traces import OP_KINDS, make_trace, read_trace, to_tidy
from prism.traces.tidy import MOST_MICROBATCHES


def read(tmp_path, text):
    path = tmp_path / "ops.csv"
    path.write_text(text)
    return read_trace(path)


def test_the_least_table(tmp_path):
    trace = read(tmp_path, "op_kind,duration_ms\nforward,3\nbackward,5.5\n")
    assert trace.format == "tidy"
    assert list(trace.ops["duration"]) == [0.003, 0.0055]
    assert list(trace.ops["name"]) == ["forward", "backward"]
    assert np.isnan(trace.ops["start"]).all()
    assert trace.notes[0].startswith("durations only")


@pytest.mark.parametrize(
    ("unit", "seconds"), [("s", 7.0), ("ms", 7e-3), ("us", 7e-6), ("ns", 7e-9)]
)
def test_units_stand_in_the_name(tmp_path, unit, seconds):
    trace = read(tmp_path, f"name,start_{unit},duration_{unit}\nforward,14,7\n")
    assert trace.ops["duration"][0] == seconds
    assert trace.ops["start"][0] == pytest.approx(2 * seconds, rel=1e-15)
    assert trace.ops["op_kind"][0] == "forward"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("op_kind,duration", "duration .*duration_s, duration_ms"),
        ("op_kind,start_s", "op_kind, start_s; .*duration_s"),
        ("op_kind,dur_us", "expected .*duration_s.* dur_us"),
        ("duration_s,rank", "op_kind and name; .*duration_s, rank"),
        ("a,b", "op_kind and name; .*a, b"),
        ("op_kind,duration_s,duration_ms", "duration_s and duration_ms"),
        ("op_kind,duration_s,op_kind", "ops.csv:1: .*'op_kind'"),
    ],
)
def test_columns_that_are_not_there(tmp_path, header, message):
    with pytest.raises(PrismError, match=message):
        read(tmp_path, f"{header}\n" + ",".join("1" for _ in header.split(",")) + "\n")


def test_ranks_are_replicas_where_no_column_says_so(tmp_path):
    rows = "".join(f"forward,1,{rank},{stage}\n" for rank, stage in ((4, 0), (7, 1), (9, 0)))
    trace = read(tmp_path, "op_kind,duration_s,rank,stage\n" + rows)
    assert dict(zip(trace.ops["rank"], trace.ops["dp_rank"], strict=True)) == {4: 0, 7: 0, 9: 1}
    assert len(trace.notes) == 2 and "dp replicas" in trace.notes[0]
    trace = read(tmp_path, "op_kind,duration_s,rank\nforward,1,5\nforward,1,3\n")
    assert sorted(trace.ops["dp_rank"]) == [0, 1]
    trace = read(tmp_path, "op_kind,duration_s,rank\nforward,1,5\nforward,1,5\n")
    assert list(trace.ops["dp_rank"]) == [0, 0] and len(trace.notes) == 1
    trace = read(tmp_path, "op_kind,duration_s,rank,dp_rank\nforward,1,5,2\nforward,1,3,2\n")
    assert list(trace.ops["dp_rank"]) == [2, 2]


def test_unknown_kinds_are_other_with_a_hint(tmp_path):
    trace = read(tmp_path, "op_kind,duration_s\nfoward,1\nforward,2\nzzz,1\n")
    assert list(trace.ops["op_kind"]) == ["other", "forward", "other"]
    assert list(trace.ops["name"]) == ["foward", "forward", "zzz"]
    assert "'foward' (did you mean forward?)" in trace.notes[0]


def test_ignored_columns_are_named(tmp_path):
    trace = read(tmp_path, "op_kind,duration_s,start_s,mood\nforward,1,0,good\n")
    (note,) = trace.notes
    assert "mood" in note and "start_s" not in note


def test_pipeline_content_as_a_tidy_table(tmp_path):
    ops = read_trace(write_csv(tmp_path / "pipeline.csv", pipeline_frame()))
    again = read_trace(write_csv(tmp_path / "tidy.csv", to_tidy(ops)))
    assert (ops.format, again.format) == ("pipeline", "tidy")
    pd.testing.assert_frame_equal(ops.ops, again.ops)
    assert again.notes == ()


def test_equal_rows_are_copies_only_where_there_are_starts(tmp_path):
    text = "op_kind,duration_ms,start_ms\nforward,1,0\nforward,1,0\nforward,1,1\n"
    trace = read(tmp_path, text)
    assert len(trace.ops) == 2 and "1 of 3 rows" in trace.notes[0]
    assert len(read(tmp_path, "op_kind,duration_ms\n" + "forward,1\n" * 3).ops) == 3


def test_a_cut_last_line_costs_one_row(tmp_path):
    trace = read(tmp_path, "op_kind,rank,duration_s\nforward,0,1\nforward,1,1\nforwa")
    assert len(trace.ops) == 2
    assert any("1 of 3 rows" in note and "duration" in note for note in trace.notes)


def test_decimal_commas_are_refused_with_a_word(tmp_path):
    with pytest.raises(PrismError, match="ops.csv:2: duration_s .*'0,5'.*point"):
        read(tmp_path, "op_kind;duration_s\nforward;0,5\n")


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=6)
INDEX = st.integers(-1, 2**40)
PLACE = st.integers(0, 2**40)
TIME = st.floats(0.0, 1e8, allow_subnormal=False)
ROW = st.fixed_dictionaries(
    {
        "op_kind": st.sampled_from(OP_KINDS),
        "kernel_class": TEXT,
        "name": TEXT,
        "rank": PLACE,
        "dp_rank": PLACE,
        "stage": PLACE,
        "chunk": INDEX,
        "microbatch": st.integers(-1, MOST_MICROBATCHES),
        "step": INDEX,
        "duration": TIME,
        "group": TEXT,
        "stream": INDEX,
        "bytes": st.one_of(st.just(float("nan")), TIME),
    }
)


@given(st.lists(ROW, min_size=1, max_size=8))
def test_round_trip(tmp_path_factory, rows):
    columns = pd.DataFrame(rows).to_dict("list")
    # apart by construction: no op is a copy, or longer than its step
    trace = make_trace(columns | {"start": 1e9 * np.arange(len(rows))}, "made", "tidy")
    path = write_csv(tmp_path_factory.mktemp("tidy") / "ops.csv", to_tidy(trace))
    pd.testing.assert_frame_equal(read_trace(path).ops, trace.ops, check_exact=True)


def test_a_microbatch_that_no_table_of_this_size_has_is_refused(tmp_path):
    """Models lay microbatches out by number: 2e9 of them took 15 GB for four rows."""
    rows = ("0,0,0,1", "0,2000000000,1,1", "1,0,2,1", "1,2000000000,3,1.1")
    file = tmp_path / "a.csv"
    head = "step,microbatch,start_s,duration_s,op_kind"
    file.write_text("\n".join([head, *(f"{row},forward" for row in rows), ""]))
    with pytest.raises(PrismError, match="microbatch"):
        prism.fit(file)
