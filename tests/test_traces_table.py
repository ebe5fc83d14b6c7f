"""The tidy table: its columns and order, and what is dropped at the border."""

import numpy as np
import pandas as pd
import pytest

from prism import PrismError
from prism.traces import COLUMNS, make_trace
from prism.traces.table import Fault, impossible_durations, sound_rows


def test_left_out_columns_take_their_defaults():
    ops = make_trace({"duration": [1.0, 2.0]}, "made", "tidy").ops
    assert tuple(ops.columns) == COLUMNS
    first = ops.iloc[0].to_dict()
    assert (first["op_kind"], first["name"], first["rank"], first["step"]) == ("other", "", 0, -1)
    assert np.isnan(first["start"]) and np.isnan(first["bytes"])
    assert all(ops[name].dtype == "category" for name in ("op_kind", "kernel_class", "group"))
    assert ops["rank"].dtype == np.int64 and ops["duration"].dtype == np.float64


def test_rows_come_sorted_by_step_rank_and_start():
    columns = {
        "step": [2, 1, 1, 1],
        "rank": [0, 1, 0, 0],
        "start": [0.0, 0.0, 5.0, 1.0],
        "duration": [1.0, 2.0, 3.0, 4.0],
        "name": ["a", "b", "c", "d"],
        "correlation": np.arange(4),
    }
    trace = make_trace(columns, "made", "kineto", ["a note"])
    assert list(trace.ops["name"]) == ["d", "c", "b", "a"]
    assert list(trace.ops["correlation"]) == [3, 2, 1, 0]
    assert list(trace.ops.index) == [0, 1, 2, 3]
    assert trace.ops.columns[-1] == "correlation"
    assert trace.notes == ("a note",)


def bad(n, *rows):
    mask = np.zeros(n, dtype=bool)
    mask[list(rows)] = True
    return mask


def test_few_faults_are_dropped_and_counted_and_many_are_an_error():
    few = Fault("negative", bad(201, 7, 9))
    keep, notes = sound_rows([few], lambda row: f"file.csv:{row + 2}", "file.csv")
    assert keep.sum() == 199 and not keep[7]
    (note,) = notes
    assert all(part in note for part in ("2 of 201 rows", "negative", "file.csv:9"))
    many = Fault("negative", bad(200, 7, 9))
    with pytest.raises(PrismError, match=r"file\.csv:9: negative.* 2 of 200"):
        sound_rows([many], lambda row: f"file.csv:{row + 2}", "file.csv")


def test_a_row_counts_once_and_no_row_left_is_an_error():
    faults = [Fault("a", bad(3, 0, 1), 1.0), Fault("b", bad(3, 1, 2), 1.0)]
    with pytest.raises(PrismError, match="2 of 3 rows .*: a .*1 of 3 .*: b"):
        sound_rows(faults, str, "file.csv")


def regular(n_ops=100, n_steps=3):
    step = np.repeat(np.arange(n_steps), n_ops)
    start = np.tile(np.arange(n_ops, dtype=float), n_steps)
    return step, start, np.ones(step.size), np.zeros(step.size, dtype=np.int64)


def test_a_duration_longer_than_its_step_is_impossible():
    step, start, duration, kind = regular()
    assert not impossible_durations(step, start, duration, kind).any()
    duration[[50, 120]] = [1e9, 200.0]
    assert list(np.flatnonzero(impossible_durations(step, start, duration, kind))) == [50, 120]


def test_a_stall_that_all_workers_wait_for_is_possible():
    step, start, duration, kind = regular()
    last = start == 99
    kind[last] = 1
    duration[last] = 500.0
    assert not impossible_durations(step, start, duration, kind).any()


def test_a_stall_at_the_end_of_a_step_is_kept_and_a_broken_clock_is_not():
    step, start, duration, kind = regular()
    last = np.flatnonzero(start == 99)[0]
    duration[last] = 500.0
    assert not impossible_durations(step, start, duration, kind).any()
    # on one clock the next step begins after it, or shows that it cannot be true
    common = start + 1000.0 * step
    assert not impossible_durations(step, common, duration, kind).any()
    early = start + 100.0 * step
    assert np.flatnonzero(impossible_durations(step, early, duration, kind)).tolist() == [last]
    duration[last] = 2.0**32 * 1e-6  # a counter of microseconds that came round
    assert impossible_durations(step, start, duration, kind).sum() == 1
    # another worker's ops say nothing of this one's
    duration[last], worker = 500.0, np.arange(step.size)
    assert not impossible_durations(step, early, duration, kind, [worker]).any()


def test_without_starts_nothing_is_impossible():
    step, start, duration, kind = regular()
    duration[5] = 1e9
    assert not impossible_durations(step, np.full_like(start, np.nan), duration, kind).any()


def test_categories_stay_texts():
    ops = make_trace({"duration": [1.0], "name": pd.Categorical(["x"])}, "made", "tidy").ops
    assert [type(name) for name in ops["name"].cat.categories] == [str]
