"""Tables of ops, of pipeline jobs and of any: what show and replay say of what was written."""

import gzip
import json
import re

import chakra_synth
import kineto_synth
import nsys_synth
import numpy as np
import pandas as pd
import pytest
from events_made import events
from hypothesis import example, given
from hypothesis import strategies as st
from logs_made import log_of, megatron
from pipeline_synth import Effects, Layout, as_production, make_trace
from traces_made import pipeline_frame, write_csv

import prism

TIDY = "op_kind,start_s,duration_s\nforward,0,1\nbackward,1,2\n"


@pytest.fixture
def shown(run, tmp_path):
    """What `prism show` says of a text, bytes, a frame or a file."""

    def show(what, *options):
        path = tmp_path / "ops.csv"
        if isinstance(what, pd.DataFrame):
            what.to_csv(path, index=False)
        elif isinstance(what, str | bytes):
            path.write_bytes(what if isinstance(what, bytes) else what.encode())
        else:
            path = what
        status, out, err = run("show", path, "--json", *options)
        assert (status == 0) == bool(out), err
        return json.loads(out) if status == 0 else f"{status}: {err}"

    return show


def kinds(found):
    return {(row["op_kind"], row["what"]): (row["n"], row["mean"]) for row in found["ops"]}


def dropped(found):
    """Rows that were dropped of how many, note by note."""
    counts = [re.match(r"([\d,]+) of ([\d,]+) rows", note) for note in found["notes"]]
    return [(int(c[1]), int(c[2].replace(",", ""))) for c in counts if c]


# ------------------------------------------------------------------------------- what a file is
@pytest.mark.parametrize(
    "data",
    [
        TIDY.encode(), b"\xef\xbb\xbf" + TIDY.encode(), TIDY.replace(",", ";").encode(),
        TIDY.replace(",", "\t").encode(), TIDY.replace("\n", "\r\n").encode(),
        TIDY.replace(",", " , ").encode(), TIDY.strip().encode(), ("\n\n" + TIDY).encode(),
        gzip.compress(TIDY.encode(), mtime=0), gzip.compress(b"\xef\xbb\xbf" + TIDY.encode()),
    ],
    ids=["plain", "bom", "semicolon", "tab", "crlf", "spaces", "no end", "blank", "gzip", "gz bom"],
)  # fmt: skip
def test_ways_to_write_a_table(shown, tmp_path, data):
    path = tmp_path / "trace.json"  # the name plays no part
    path.write_bytes(data)
    found = shown(path)
    assert kinds(found) == {("forward", "forward"): (1, 1.0), ("backward", "backward"): (1, 2.0)}
    assert found["source"] == str(path)


def _sqlite(tmp_path):
    program = kineto_synth.training_step(n_layers=1, kernels=1)
    times = kineto_synth.simulate(program, *kineto_synth.draw(program, 1, 1))
    (path,) = nsys_synth.write(tmp_path, program, times)
    return path.read_bytes()[:4_000]


def _chakra(tmp_path):
    return chakra_synth.encode([chakra_synth.node(1, "k", 4, 9, 9, is_cpu_op=False)])[:60]


def _parquet(tmp_path):
    pytest.importorskip("pyarrow")
    pipeline_frame().to_parquet(tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()[:-9]


KINETO = b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}]}'
DAMAGED = {
    "empty": b"", "blank": b" \n\n ", "binary": b"\x00\x01\x02\x03", "zip": b"PK\x03\x04rest",
    "utf-16": "a,b".encode("utf-16"), "hdf5": b"\x89HDF\r\n\x1a\nrest",
    "no gzip": b"\x1f\x8bnot gzip at all", "gzip cut": gzip.compress(TIDY.encode(), mtime=0)[:-9],
    "gzip empty": gzip.compress(b"", mtime=0),
    "kineto cut": KINETO[:40], "kineto gzip cut": gzip.compress(KINETO, mtime=0)[:30],
    "kineto without events": b'{"traceEvents": []}', "kineto null": b'{"traceEvents": null}',
    "kineto without a duration": KINETO.replace(b', "dur": 2', b""), "json": b'{"step_s": 1}',
    "kineto of the host": KINETO.replace(b"kernel", b"cpu_op"), "brackets": b"[[[[",
    "nsys cut": _sqlite, "chakra cut": _chakra, "parquet cut": _parquet, "parquet": b"PAR1 no more",
    "tensorboard without step times": events([]),
    "tidy without rows": b"op_kind,duration_s\n", "tidy without a unit": b"op_kind,duration\nf,1\n",
    "tidy with two units": b"op_kind,duration_s,duration_ms\nf,1,1\n",
    "two names": b"op_kind,duration_s,op_kind\nf,1,f\n",
    "tidy dur": b"op_kind,dur_us\nf,1\n", "more cells": b"op_kind,duration_s\nf,1,2\nf,1,2\n",
    "a row too long": b"op_kind,duration_s\nf,1\nf,1,2\nf,1\n",
    "open": b'op_kind,duration_s\n"f,1\n',
    "no utf-8": b"op_kind,duration_s\nf\xff,1\n", "decimal comma": b"op_kind;duration_s\nf;0,5\n",
    "nul": b"op_kind,duration_s\nf," + b"1" * 70_000 + b"\0\n", "words": b"a text\nof two lines\n",
    "pipeline without step": b"optype,dp_rank,stage,rank,start_ts,duration,seq_id,mc,mb_id\n"
    b"forward-compute,0,0,0,0,1,0,0,0\n",
    "steps without a unit": b"a,b\n1,2\n", "log of no number": megatron(1, 5.0, 0.0).replace(
        "5000.0", "fast").encode(), "mlperf without step times": b':::MLLOG {"key": "run_start"}\n',
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_by_name(run, tmp_path, name):
    data = DAMAGED[name]
    path = tmp_path / "a.file"
    path.write_bytes(data(tmp_path) if callable(data) else data)
    for command in ("show", "fit", "replay"):
        status, out, err = run(command, path)
        assert (status, out) == (2, ""), err
        assert "a.file" in err and err.count("\n") <= 2 and "Traceback" not in err


def test_places_that_are_no_file_and_several_tables(run, tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        status, _, err = run("fit", path)
        assert status == 2 and str(path) in err
    one, two = (write_csv(tmp_path / name, pipeline_frame()) for name in ("a.csv", "b.csv"))
    for named in ([one, two], [tmp_path]):
        status, _, err = run("replay", *named)
        assert status == 2 and "a.csv" in err and "b.csv" in err
    two.rename(tmp_path / ".hidden")
    assert json.loads(run("show", tmp_path, "--json")[1])["format"] == "pipeline"
    (tmp_path / "run.log").write_text(log_of(megatron, [5.0, 5.1]))
    status, _, err = run("replay", tmp_path / "run.log")
    assert status == 2 and "run.log" in err  # a log of step times is no trace


BYTES = st.one_of(
    st.binary(max_size=200), st.binary(max_size=200).map(gzip.compress),
    st.binary(max_size=60).map(lambda data: b"PAR1" + data + b"PAR1"),
    st.text(st.sampled_from('abs_01.,;\t\n\r "|-'), max_size=80).map(str.encode),
    st.text(st.sampled_from('01.,\n "-'), max_size=60).map(
        lambda t: f"name,duration_s\n{t}".encode()
    ),
    st.text(st.sampled_from('01.,\n "-'), max_size=60).map(
        lambda t: f"step_s,run,step\n{t}".encode()
    ),
    st.lists(st.lists(st.sampled_from(
        ["", "0", "1", "-1", "0.5", "1e400", "nan", "x", '"', "9" * 25, "forward-compute"]
    ), min_size=9, max_size=11), max_size=6).map(lambda rows: "\n".join(
        ["dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,mb_id", *map(",".join, rows)]
    ).encode()),
)  # fmt: skip


@given(BYTES)
@example(b'name,duration_s\n"\n')
@example(b"\r")
@example(b"dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,mb_id\n0,0,0,0,,0,0,,,")
def test_any_bytes_give_an_answer_or_a_reason(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "x"
    path.write_bytes(data)
    for call in (prism.fit, prism.replay):
        try:
            json.dumps(prism.summary(call(path)), allow_nan=False)
        except prism.PrismError as error:
            assert str(path) in str(error)


# --------------------------------------------------------------------------------- tidy tables
@pytest.mark.parametrize(("unit", "second"), [("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)])
def test_units_stand_in_the_names(shown, unit, second):
    found = shown(f"name,step,start_{unit},duration_s\nforward,1,14,{7 * second}\n")
    assert kinds(found) == {("forward", "forward"): (1, pytest.approx(7 * second))}
    text = f"name,step,start_{unit},duration_{unit}\nforward,1,0,7\nbackward,1,14,6\n"
    assert shown(text)["step_span_mean"] == pytest.approx(20 * second)
    found = shown(f"op_kind,duration_{unit}\nforward,3\nforward,5\n")  # starts are not known
    assert kinds(found)["forward", "forward"] == (2, pytest.approx(4 * second))
    assert found["step_span_mean"] is None


def test_streams_that_overlap_are_one_step(shown):
    rows = "1,0,0,4,forward\n1,1,1,2,all_reduce\n1,0,4,1,backward\n2,0,9,2,forward\n"
    found = shown("step,stream,start_s,duration_s,op_kind\n" + rows)
    assert found["step_span_mean"] == pytest.approx(0.5 * (5.0 + 2.0)) and found["n_steps"] == 2
    assert {row["op_kind"]: row["share"] for row in found["ops"]} == pytest.approx(
        {"forward": 6 / 9, "all_reduce": 2 / 9, "backward": 1 / 9}
    )
    assert [row["op_kind"] for row in found["ops"] if row["includes_waiting"]] == ["all_reduce"]


@pytest.mark.parametrize(
    ("columns", "rows", "replicas"),
    [
        ("rank,stage", ["4,0", "7,1", "9,0"], 2), ("rank", ["5", "3"], 2), ("rank", ["5", "5"], 1),
        ("rank,dp_rank", ["5,2", "3,2"], 1), ("rank,stage", ["0,0", "1,1"], 1),
        ("rank,stage", ["0,0", "1,0", "2,1", "3,1"], 2),
    ],
)  # fmt: skip
def test_ranks_of_a_stage_are_replicas_where_no_column_says_so(shown, columns, rows, replicas):
    found = shown(f"op_kind,duration_s,{columns}\n" + "".join(f"forward,1,{r}\n" for r in rows))
    assert found["n_dp_ranks"] == replicas
    assert (len(found["notes"]) == 2) == (replicas > 1 and "dp_rank" not in columns)


def test_kinds_that_are_not_known_and_columns_that_no_op_has(shown):
    found = shown("op_kind,duration_s,start_s,mood\nfoward,1,0,good\nforward,2,1,x\nzzz,1,3,x\n")
    assert set(kinds(found)) == {("forward", "forward"), ("other", "foward"), ("other", "zzz")}
    notes = " ".join(found["notes"])
    assert "forward?" in notes and "mood" in notes and "start_s" not in notes


def test_copies_are_told_by_their_starts(shown):
    text = "op_kind,duration_ms,start_ms\nforward,1,0\nforward,1,0\nforward,1,1\n"
    found = shown(text)
    assert (found["n_ops"], dropped(found)) == (2, [(1, 3)])
    assert shown("op_kind,duration_ms\n" + "forward,1\n" * 3)["n_ops"] == 3
    found = shown("op_kind,rank,duration_s\nforward,0,1\nforward,1,1\nforwa")  # cut short
    assert (found["n_ops"], dropped(found)) == (2, [(1, 3)])


def stalls(shift, changes):
    """Three steps of 100 ops of 1 s, the clock shifted so much in each; some last longer."""
    step, start = np.repeat(np.arange(3), 100), np.tile(np.arange(100.0), 3)
    frame = pd.DataFrame({"step": step, "start_s": start + shift * step, "duration_s": 1.0})
    frame["op_kind"] = "forward"
    for row, seconds in changes.items():
        frame.loc[row, "duration_s"] = seconds
    return frame


@pytest.mark.parametrize(
    ("shift", "changes", "lost"),
    [
        (0.0, {}, 0),
        (0.0, {50: 1e8, 120: 200.0}, 2),  # longer than the step, over the ops that follow
        (0.0, {99: 500.0}, 0),  # a stall at the end of a step
        (1000.0, {99: 500.0}, 0),  # the next step begins after it
        (100.0, {99: 500.0}, 1),  # the next step shows that it cannot be
        (0.0, {99: 2.0**32 * 1e-6}, 1),  # a counter of microseconds that came round
        (0.0, {50: 90.0}, 0),  # within the time of its step
    ],
)  # fmt: skip
def test_durations_that_cannot_be_true(shown, shift, changes, lost):
    found = shown(stalls(shift, changes))
    assert (found["n_ops"], dropped(found)) == (300 - lost, [(lost, 300)] * bool(lost))
    bare = shown(stalls(shift, changes).drop(columns="start_s"))
    assert bare["n_ops"] == 300  # nothing contradicts them


def test_a_stall_of_one_worker_is_not_contradicted_by_another(shown):
    frame = stalls(100.0, {99: 500.0})
    assert shown(frame.assign(rank=np.arange(300)))["n_ops"] == 300


@pytest.mark.parametrize(("n", "ok"), [(2, True), (3, False)])
def test_few_wrong_rows_are_dropped_and_many_are_an_error(shown, n, ok):
    frame = stalls(0.0, {})
    frame.loc[7 : 6 + n, "duration_s"] = -1.0
    found = shown(frame)
    assert dropped(found) == [(n, 300)] if ok else found.startswith("2: ") and "ops.csv:9" in found


def test_a_microbatch_that_no_table_of_this_size_has_is_refused(shown, tmp_path):
    """Models lay microbatches out by number: 2e9 of them took 15 GB for four rows."""
    rows = ("0,0,0,1", "0,2000000000,1,1", "1,0,2,1", "1,2000000000,3,1.1")
    text = "\n".join(
        ["step,microbatch,start_s,duration_s,op_kind", *(f"{r},forward" for r in rows)]
    )
    assert shown(text).startswith("2: ") and "microbatch" in shown(text)


# ----------------------------------------------------------------------------- pipeline traces
@pytest.fixture
def frame():
    return pipeline_frame()


def test_a_pipeline_trace_is_what_the_file_says(shown, frame):
    found = shown(frame)
    sizes = {"n_ops": 204, "n_steps": 3, "steps": [10, 12], "n_ranks": 4, "n_dp_ranks": 2,
             "n_stages": 2, "n_microbatches": 4, "format": "pipeline", "notes": []}  # fmt: skip
    assert {name: found[name] for name in sizes} == sizes
    kind_of = {"forward-compute": "forward", "backward-compute": "backward",
               "forward-send": "transfer", "forward-recv": "transfer",
               "optimizer": "optimizer"}  # fmt: skip
    assert kinds(found) == {
        (kind_of[name], name): (len(group), pytest.approx(group["duration"].mean(), rel=1e-9))
        for name, group in frame.groupby("optype")
    }
    end = frame["start_ts"] + frame["duration"]
    assert found["step_span_mean"] == pytest.approx(end.groupby(frame["step"]).max().mean())
    # the order of rows, empty cells of ops they do not apply to, parquet's types: all the same
    blank = frame.assign(mb_id=frame["mb_id"].where(frame["mb_id"] >= 0))
    again = shown(blank.sort_values("duration"))
    assert kinds(again) == {
        key: (n, pytest.approx(mean)) for key, (n, mean) in kinds(found).items()
    }


def test_csv_parquet_and_tidy_tables_replay_alike(tmp_path):
    pytest.importorskip("pyarrow")
    made, truth = make_trace(Layout(2, 2, 4, 6), Effects(rank_sd=0.02, gap_s=1e-3), 1)
    production = as_production(made)
    production.astype({"rank": "int8", "optype": "category"}).to_parquet(tmp_path / "ops.csv")
    production.to_csv(tmp_path / "ops.parquet", index=False)
    tidy = made.rename(columns={"start": "start_ms", "duration": "duration_us"})
    write_csv(tmp_path / "tidy", tidy.assign(start_ms=1e3 * made["start"],
                                             duration_us=1e6 * made["duration"]))  # fmt: skip
    for name in ("ops.csv", "ops.parquet", "tidy"):
        found = prism.replay(tmp_path / name)
        assert list(found["step"]) == list(truth.steps)
        assert found["measured_step_time"].values == pytest.approx(truth.step_times, rel=1e-5)
        assert found["replayed_step_time"].values == pytest.approx(truth.step_times, rel=1e-3)
    times = prism.summary(prism.fit(tmp_path / "tidy", seed=1))["step_time"]
    assert times["n"] == 6 and times["mean"] == pytest.approx(truth.step_times.mean())
    for q in (50, 95):
        assert times[f"p{q}"] == pytest.approx(np.quantile(truth.step_times, 0.01 * q))
    cv = truth.step_times.std(ddof=1) / truth.step_times.mean()
    assert times["cv"] == pytest.approx(cv, rel=1e-3)


def test_ops_that_are_not_known_are_kept(shown, frame):
    frame.loc[frame["optype"] == "optimizer", "optype"] = "moe-dispatch"
    found = shown(frame)
    assert kinds(found)["other", "moe-dispatch"][0] == 12
    (note,) = found["notes"]
    assert "12 ops" in note and "moe-dispatch" in note


@pytest.mark.parametrize("value", [-0.1, np.inf, np.nan, 1e300, 50.0])
def test_bad_durations_are_dropped_few_and_refused_many(shown, frame, value):
    mean = frame["duration"].drop(index=7).mean()
    frame.loc[7, "duration"] = value
    found = shown(frame)
    assert dropped(found) == [(1, 204)] and "ops.csv:9" in found["notes"][0]
    total = sum(n * m for n, m in kinds(found).values())
    assert total == pytest.approx(203 * mean)
    frame.loc[7:11, "duration"] = value
    many = shown(frame)
    assert dropped(many) == [(5, 204)] if value == 50.0 else "ops.csv:9: " in many


@pytest.mark.parametrize(
    ("column", "row", "value", "place"),
    [("duration", 4, "fast", ":6: duration"), ("stage", 4, 0.5, ":6: stage"),
     ("rank", 0, -1, "rank"), ("optype", 2, None, None)],
)  # fmt: skip
def test_cells_that_cannot_be(shown, frame, column, row, value, place):
    frame[column] = frame[column].astype(object)
    frame.loc[row, column] = value
    found = shown(frame)
    assert place in found if isinstance(found, str) else found["notes"]


def test_lines_are_right_behind_blank_lines_and_quotes(shown, frame):
    frame["stage"] = frame["stage"].astype(object)
    frame.loc[4, "stage"] = 0.5
    text = frame.assign(note="two\nlines").to_csv(index=False).replace("\n", "\n\n", 1)
    assert "ops.csv:11: stage" in shown(text)


def test_rows_that_come_twice(shown, frame):
    whole = kinds(shown(frame))
    found = shown(pd.concat([frame, frame.iloc[:30]]))
    assert kinds(found) == whole and dropped(found) == [(30, 234)]
    other = frame.assign(duration=frame["duration"] * 1.01)
    assert shown(pd.concat([frame, other])).startswith("2: ")  # two traces in one file
    frame.loc[(frame["rank"] == 3) & (frame["step"] == 10), "stage"] = 0
    assert "rank 3" in shown(frame)  # a worker with two places


def test_work_that_is_missing_is_noted_and_kept(shown, frame):
    gone = (frame["rank"] == 3) & (frame["step"] == 11)
    one = frame.index[(frame["rank"] == 1) & (frame["step"] == 12)][0]
    found = shown(frame[~gone].drop(index=one))
    assert (found["n_steps"], found["n_ranks"], found["n_ops"]) == (3, 4, 204 - 17 - 1)
    first, second = found["notes"]
    assert first.startswith("1 of 3 ") and "rank 3 in step 11" in first
    assert second.startswith("1 ") and "rank 1 in step 12, 16 ops" in second
