"""Rows to arrays: what is told apart, what is left out, and in which order."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from pipeline_synth import Effects, Layout, as_trace, make_trace

from prism import PrismError
from prism.models.pipelinetrace.times import bridge, ordered, read_times, tabulate

EFFECTS = Effects(residual_sd=0.03, gap_s=0.004)


def test_every_row_has_its_place():
    frame, _ = make_trace(Layout(2, 3, 4, 5), EFFECTS)
    frame["start"] += 1000.0 * frame["step"]
    times = tabulate(as_trace(frame), [])
    assert times.start.shape == (len(times.row), 2, 5) and np.isfinite(times.start).all()
    assert len(times.row) * 10 == len(frame) and set(times.row.values()) == set(
        range(len(times.row))
    )
    assert np.allclose(times.start.min(axis=(0, 1)), 0.0)  # seconds from each step's first op
    for (stage, name, ordinal), info in times.info.items():
        at = frame.query("stage == @stage and name == @name and dp_rank == 1 and step == 3")
        row = at.sort_values("start").iloc[ordinal]
        assert (info.op_kind, info.chunk, info.microbatch) == (
            row["op_kind"], row["chunk"], row["microbatch"],
        )  # fmt: skip
        start = times.of(times.start, (stage, name, ordinal))[1, 3]
        assert start == pytest.approx(row["start"] - 3000.0, abs=1e-9)


def test_a_lost_row_leaves_a_hole_and_does_not_shift_the_others():
    frame, _ = make_trace(Layout(2, 3, 4, 5), EFFECTS)
    whole = tabulate(as_trace(frame), [])
    lost = frame.query("name == 'forward-compute' and microbatch == 1 and dp_rank == 0 "
                       "and stage == 1 and step == 2").index  # fmt: skip
    times = tabulate(as_trace(frame.drop(lost)), [])
    (hole,) = np.argwhere(np.isnan(times.start))
    assert list(hole) == [times.row[1, "forward-compute", 1], 0, 2]
    assert times.row == whole.row
    filled = np.where(np.isnan(times.start), whole.start, times.start)
    assert np.array_equal(filled, whole.start)


def test_a_stage_without_an_op_of_most_steps_is_told():
    frame, _ = make_trace(Layout(2, 3, 4, 5), EFFECTS)
    frame.loc[frame.index[40], "stage"] = 7
    with pytest.raises(PrismError, match=r"made\.csv: stage no\. 3 .*no op"):
        read_times(as_trace(frame))


def test_without_microbatches_ops_are_told_by_their_order():
    frame, _ = make_trace(Layout(2, 3, 4, 5), EFFECTS)
    named = tabulate(as_trace(frame), [])
    bare = tabulate(as_trace(frame.assign(microbatch=-1)), [])
    assert bare.row.keys() == named.row.keys()
    for key in named.row:
        assert np.array_equal(bare.of(bare.start, key), named.of(named.start, key))


def test_groups_that_change_are_none():
    frame, _ = make_trace(Layout(2, 3, 4, 5), replace(EFFECTS, groups=True))
    times = tabulate(as_trace(frame), [])
    key = (1, "grads-reduce-scatter", 0)
    assert (times.group[times.row[key]] >= 0).all()
    assert (times.group[times.row[1, "forward-compute", 0]] == -1).all()
    frame.loc[(frame["step"] == 2) & (frame["name"] == key[1]), "group"] = "else"
    times = tabulate(as_trace(frame), [])
    assert (times.group[times.row[key]] == -1).all()


def test_rare_ops_are_left_out_but_were_part_of_the_measured_step():
    frame, truth = make_trace(Layout(2, 2, 4, 6), EFFECTS)
    rare = frame.query("name == 'optimizer' and step == 4").assign(name="evaluate", op_kind="other")
    rare["start"] += 1.0
    times, measured, notes = read_times(as_trace(pd.concat([frame, rare], ignore_index=True)))
    assert all(k[1] != "evaluate" for k in times.row)
    (note,) = notes
    assert "2 ops" in note and "evaluate no. 0 of stage 0" in note
    longer = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(measured, truth.step_times + longer, rtol=1e-12)


def test_steps_without_their_end_are_left_out():
    frame, _ = make_trace(Layout(2, 2, 4, 6), EFFECTS)
    cut = (frame["step"] == 5) & (frame["name"].isin(["optimizer", "optimizer-clip-main-grad"]))
    times, measured, notes = read_times(as_trace(frame[~cut]))
    assert list(times.steps) == [0, 1, 2, 3, 4] and measured.size == 5
    assert any("1 step " in n and "step 5" in n for n in notes)


def test_empty_and_startless_tables_are_refused():
    frame, _ = make_trace(Layout(1, 1, 1, 1))
    with pytest.raises(PrismError, match=r"made\.csv: no ops"):
        tabulate(as_trace(frame[:0]), [])
    frame["start"] = np.nan
    with pytest.raises(PrismError, match="7 of 7 ops .*start_s"):
        tabulate(as_trace(frame), [])


def test_a_few_ops_without_a_start_are_left_out():
    frame, _ = make_trace(Layout(2, 2, 4, 6), EFFECTS)
    frame.loc[[7, 70], "start"] = np.nan
    times, _, notes = read_times(as_trace(frame))
    assert "2 of 528 ops" in notes[0] and "2 ops missing" in notes[1]
    assert np.isnan(times.start).sum() == 2


def test_order_is_that_of_starting_even_where_medians_are_over_other_steps():
    frame, _ = make_trace(Layout(2, 4, 8, 12), replace(EFFECTS, step_sd=0.2, missing=0.1), 4)
    chains = ordered(tabulate(as_trace(frame), []))
    whole, _ = make_trace(Layout(2, 4, 8, 12), replace(EFFECTS, step_sd=0.2), 4)
    truth = ordered(tabulate(as_trace(whole), []))
    for chain, true in zip(chains, truth, strict=True):
        a, b = ([k for k in c if not k[1].endswith(("send", "recv"))] for c in (chain, true))
        assert a == b


def test_bridge_fills_only_what_can_be_known():
    frame, _ = make_trace(Layout(2, 2, 4, 12), EFFECTS)
    whole = tabulate(as_trace(frame), [])
    where = frame["name"].isin(["forward-compute", "backward-compute"]) & (frame["stage"] == 1)
    one = (
        where & (frame["microbatch"] == 2) & (frame["step"] == 1) & (frame["op_kind"] == "forward")
    )
    two = where & (frame["microbatch"] == 1) & (frame["step"] == 2)  # forward, then backward
    around = (frame["step"] == 3) & (frame["dp_rank"] == 1) & (frame["stage"] == 1)
    around &= ~frame["name"].isin(["optimizer", "params-all-gather"])
    times = tabulate(as_trace(frame[~(one | two | around)]), [])
    bridged = bridge(times, ordered(times))
    there = np.isfinite(times.start)
    assert np.array_equal(bridged.start[there], times.start[there])
    assert np.array_equal(bridged.end[there], times.end[there])

    def length(times, name, microbatch, step):
        row = times.row[1, name, microbatch]
        return (times.end - times.start)[row, :, step]

    forward, backward = "forward-compute", "backward-compute"
    assert length(bridged, forward, 2, 1) == pytest.approx(length(whole, forward, 2, 1), abs=0.02)
    both, true = (length(x, forward, 1, 2) + length(x, backward, 1, 2) for x in (bridged, whole))
    assert both == pytest.approx(true, abs=0.03)
    assert length(bridged, forward, 1, 2) == pytest.approx(both / 3, rel=0.1)
    chain = [bridged.row[k] for k in ordered(whole)[1][1:-1]]
    assert np.isnan(bridged.start[chain, 1, 3]).all()  # transfers among them
