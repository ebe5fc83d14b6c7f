"""Pipeline traces: mapping, the border, and what is missing from steps."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces_made import pipeline_frame, write_csv

from prism import PrismError
from prism.traces import Trace, read_trace


@pytest.fixture
def frame():
    return pipeline_frame()


def read(frame, tmp_path):
    return read_trace(write_csv(tmp_path / "ops.csv", frame))


def test_optypes_become_kinds_and_classes(frame, tmp_path):
    trace = read(frame, tmp_path)
    ops = trace.ops
    assert trace.format == "pipeline" and trace.notes == () and len(ops) == len(frame)
    made = ops.drop_duplicates("name").set_index("name")[["op_kind", "kernel_class"]]
    assert {name: tuple(row) for name, row in made.iterrows()} == {
        "forward-compute": ("forward", "compute"),
        "backward-compute": ("backward", "compute"),
        "forward-send": ("transfer", "p2p"),
        "forward-recv": ("transfer", "p2p"),
        "optimizer": ("optimizer", "optimizer"),
    }
    by_step = ops.sort_values(["step", "rank", "start"], kind="stable")
    assert by_step.index.is_monotonic_increasing


def test_microbatch_is_an_ordinal_only_where_the_op_repeats(frame, tmp_path):
    ops = read(frame, tmp_path).ops
    assert set(ops.loc[ops["name"] == "forward-send", "microbatch"]) == {0, 1, 2, 3}
    assert set(ops.loc[ops["name"] == "optimizer", "microbatch"]) == {-1}
    assert set(ops.loc[ops["op_kind"] == "forward", "microbatch"]) == {0, 1, 2, 3}
    assert set(ops.loc[ops["name"] == "forward-send", "chunk"]) == {-1}


def test_values_are_those_of_the_file(frame, tmp_path):
    ops = read(frame, tmp_path).ops
    key = ["step", "rank", "optype", "seq_id"]
    expected = frame.sort_values(["step", "rank", "start_ts"], kind="stable")
    assert np.array_equal(ops["duration"], expected["duration"])
    assert np.array_equal(ops["start"], expected["start_ts"])
    assert list(ops["name"]) == list(expected[key[2]])


def test_csv_and_parquet_agree(frame, tmp_path):
    pytest.importorskip("pyarrow")
    small = frame.astype({"rank": "int8", "optype": "category", "duration": "float32"})
    small.to_parquet(tmp_path / "ops.parquet")
    small["duration"] = small["duration"].astype(float)
    from_csv, from_parquet = read(small, tmp_path), read_trace(tmp_path / "ops.parquet")
    pd.testing.assert_frame_equal(from_csv.ops, from_parquet.ops)


def test_float32_seconds_become_the_same_float64(frame, tmp_path):
    pytest.importorskip("pyarrow")
    frame.astype({"duration": "float32"}).to_parquet(tmp_path / "ops.parquet")
    ops = read_trace(tmp_path / "ops.parquet").ops
    assert ops["duration"].dtype == np.float64
    assert set(ops["duration"]) == set(frame["duration"].astype("float32").astype("float64"))


def test_unknown_optypes_are_kept_as_other(frame, tmp_path):
    frame.loc[frame["optype"] == "optimizer", "optype"] = "moe-dispatch"
    trace = read(frame, tmp_path)
    assert set(trace.ops.loc[trace.ops["name"] == "moe-dispatch", "op_kind"]) == {"other"}
    (note,) = trace.notes
    assert "12 ops" in note and "moe-dispatch" in note


def test_missing_columns_are_listed(frame, tmp_path):
    with pytest.raises(PrismError, match="step, mb_id; .*dp_rank, stage, rank, optype"):
        read(frame.drop(columns=["step", "mb_id", "gmc"]), tmp_path)


def test_a_word_among_the_numbers_names_its_line(frame, tmp_path):
    frame["duration"] = frame["duration"].astype(object)
    frame.loc[4, "duration"] = "fast"
    with pytest.raises(PrismError, match=r"ops\.csv:6: duration .*'fast'"):
        read(frame, tmp_path)


def test_lines_are_right_behind_blank_lines_and_quotes(frame, tmp_path):
    frame["stage"] = frame["stage"].astype(object)
    frame.loc[4, "stage"] = 0.5
    frame["note"] = "two\nlines"
    path = write_csv(tmp_path / "ops.csv", frame)
    path.write_text(path.read_text().replace("\n", "\n\n", 1))
    with pytest.raises(PrismError, match=r"ops\.csv:11: stage .*0\.5"):
        read_trace(path)


@pytest.mark.parametrize("value", [-0.1, np.inf, np.nan, -np.inf, 1e300])
def test_few_bad_durations_are_dropped_and_counted(frame, tmp_path, value):
    frame.loc[7, "duration"] = value
    trace = read(frame, tmp_path)
    assert len(trace.ops) == len(frame) - 1
    assert "1 of 204 rows" in trace.notes[0] and "ops.csv:9" in trace.notes[0]


@pytest.mark.parametrize("value", [-0.1, np.inf, np.nan])
def test_many_bad_durations_are_an_error(frame, tmp_path, value):
    frame.loc[7:11, "duration"] = value
    with pytest.raises(PrismError, match=r"ops\.csv:9: .* 5 of 204 rows"):
        read(frame, tmp_path)


def test_impossible_durations_are_dropped_and_counted(frame, tmp_path):
    frame.loc[[3, 77], "duration"] = [50.0, 1e8]
    trace = read(frame, tmp_path)
    assert trace.ops["duration"].max() < 0.2
    (note,) = trace.notes
    assert "2 of 204 rows" in note and "ops.csv:5" in note


def test_repeated_rows_are_dropped_and_conflicting_ones_refused(frame, tmp_path):
    trace = read(pd.concat([frame, frame.iloc[:30]]), tmp_path)
    assert len(trace.ops) == len(frame)
    assert "30 of 234 rows" in trace.notes[0]
    other = frame.assign(duration=frame["duration"] * 1.01)
    with pytest.raises(PrismError, match=r"ops\.csv:\d+: .*two traces"):
        read(pd.concat([frame, other]), tmp_path)


def test_missing_workers_and_ops_are_noted_and_kept(frame, tmp_path):
    gone = (frame["rank"] == 3) & (frame["step"] == 11)
    one = frame.index[(frame["rank"] == 1) & (frame["step"] == 12)][0]
    trace = read(frame[~gone].drop(index=one), tmp_path)
    assert "1 of 3 steps" in trace.notes[0] and "rank 3 in step 11" in trace.notes[0]
    assert "rank 1 in step 12, 16 ops" in trace.notes[1]
    assert set(trace.ops["step"]) == {10, 11, 12}


def test_a_worker_has_one_place(frame, tmp_path):
    frame.loc[(frame["rank"] == 3) & (frame["step"] == 10), "stage"] = 0
    with pytest.raises(PrismError, match="rank 3 .*dp_rank 1 stage 0, .*dp_rank 1"):
        read(frame, tmp_path)


def test_empty_cells_of_ops_they_do_not_apply_to(frame, tmp_path):
    blank = frame.assign(mb_id=frame["mb_id"].where(frame["mb_id"] >= 0))
    pd.testing.assert_frame_equal(read(blank, tmp_path).ops, read(frame, tmp_path).ops)


CELL = st.one_of(
    st.sampled_from(["", "0", "1", "2", "-1", "0.5", "1e400", "nan", "inf", "x", '"', "9" * 25]),
    st.sampled_from(["forward-compute", "optimizer", "backward-send", "é"]),
)
HEADER = "dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,mb_id"


@given(st.lists(st.lists(CELL, min_size=9, max_size=11), max_size=6))
def test_any_rows_give_a_trace_or_an_error(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("any") / "ops.csv"
    path.write_text("\n".join([HEADER, *(",".join(row) for row in rows)]))
    try:
        trace = read_trace(path)
    except PrismError as error:
        assert str(path) in str(error)
    else:
        assert isinstance(trace, Trace) and (trace.ops["duration"] >= 0).all()
        assert np.isfinite(trace.ops["duration"]).all() and (trace.ops["rank"] >= 0).all()


NUMBER = st.integers(-2, 3)


@given(
    st.lists(
        st.tuples(NUMBER, NUMBER, NUMBER, NUMBER, st.floats(-1, 10), st.floats(-0.1, 10)),
        min_size=1,
        max_size=8,
    )
)
def test_any_numbers_give_a_trace_or_an_error(tmp_path_factory, rows):
    columns = ["stage", "rank", "step", "mb_id", "start_ts", "duration"]
    frame = pd.DataFrame(rows, columns=columns)
    frame = frame.assign(dp_rank=0, seq_id=frame["mb_id"], mc=0, optype="forward-compute")
    path = write_csv(tmp_path_factory.mktemp("any") / "ops.csv", frame)
    try:
        trace = read_trace(path)
    except PrismError as error:
        assert str(path) in str(error)
    else:
        assert set(trace.ops["duration"]) <= set(frame["duration"])
