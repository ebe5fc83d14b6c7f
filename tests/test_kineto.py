"""Profiler JSON: the border, classes from launching ops, matching over ranks, launch gaps."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import kineto_synth as synth
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import least_seconds

import prism
from prism import PrismError
from prism.analyses.replay import replay_trace
from prism.common import sizes
from prism.models.kerneltrace.table import kernel_table
from prism.traces import read_trace
from prism.traces.kernelnames import classify, collective_kind
from prism.traces.kineto.events import decode_events
from prism.traces.kineto.join import EXTRA_COLUMNS
from prism.traces.table import COLUMNS

PROGRAM = synth.training_step(n_layers=2, kernels=3)


TIMES = synth.simulate(PROGRAM, *synth.draw(PROGRAM, 3, 2, seed=5))
DOCUMENT = synth.events(PROGRAM, TIMES, 0)
TEXT = json.dumps(DOCUMENT).encode()
FEW = synth.training_step(n_layers=1, kernels=1)
SHORT = synth.events(FEW, synth.simulate(FEW, *synth.draw(FEW, 2, 1, seed=5)), 0)
SHORT = json.dumps(SHORT).encode()


@pytest.fixture
def times():
    return TIMES


@pytest.fixture
def document():
    return DOCUMENT


@pytest.fixture
def text():
    return TEXT


def write_all(folder, *documents):
    """Write each document to a file of its own; the files."""
    paths = [folder / f"{i}.json" for i in range(len(documents))]
    for path, document in zip(paths, documents, strict=True):
        path.write_text(json.dumps(document))
    return paths


def read_bytes(tmp_path, data, name="trace.json"):
    path = tmp_path / name
    path.write_bytes(data)
    return read_trace([path])


def test_every_activity_is_a_row_with_its_times(tmp_path, text, times):
    trace = read_bytes(tmp_path, text)
    ops = trace.ops
    assert tuple(ops.columns) == COLUMNS + EXTRA_COLUMNS
    rows = ops[ops["op_kind"] != "launch_gap"]
    start = np.sort(times.start[:, 0][np.isfinite(times.start[:, 0])])
    assert np.allclose(np.sort(rows["start"]), (start - start[0]) * 1e-6, atol=1e-9)
    assert rows["duration"].sum() == pytest.approx(
        np.nansum(times.end[:, 0] - times.start[:, 0]) * 1e-6, rel=1e-6
    )
    assert sorted(set(ops["step"])) == [10, 11, 12]
    assert (rows["launch"] < rows["start"]).all()
    json.dumps(trace.meta)


def test_gzip_and_plain_agree_whatever_the_name(tmp_path, text):
    plain = read_bytes(tmp_path, text, "a.gz").ops
    packed = read_bytes(tmp_path, gzip.compress(text), "b.json").ops
    assert plain.equals(packed)


def test_copies_of_the_same_events_take_time_in_proportion(tmp_path, document):
    """All ops of a step in one another, and as many collectives that end at once."""

    def seconds(copies, times):
        many = {**document, "traceEvents": document["traceEvents"] * copies}
        text = json.dumps(many).encode()
        return least_seconds(lambda: read_bytes(tmp_path, text), times)

    most = 20.0 * max(seconds(25, 3), 0.0125)
    # the least of three is short enough where any of them is
    assert any(seconds(200, 1) < most for _ in range(3))


def test_a_file_for_which_there_is_no_memory_is_refused(tmp_path, text, monkeypatch):
    monkeypatch.setattr(sizes, "free_bytes", lambda: 10.0 * len(text))
    with pytest.raises(PrismError, match=r"bytes of events .*recorded"):
        read_bytes(tmp_path, text)
    monkeypatch.setattr(sizes, "free_bytes", lambda: 12.0 * len(text))
    read_bytes(tmp_path, text)


def test_step_is_that_of_the_launch(tmp_path, document):
    # a kernel that runs after its step's end was still launched in it
    late = json.loads(json.dumps(document))
    kernels = [e for e in late["traceEvents"] if e["cat"] == "kernel"]
    kernels[-1]["ts"] += 1e5
    ops = read_bytes(tmp_path, json.dumps(late).encode()).ops
    assert ops.loc[ops["start"].idxmax(), "step"] == 12


def test_class_comes_from_the_launching_op_before_the_name():
    assert classify("some_kernel", "aten::addmm", False, "kernel") == ("compute", "gemm")
    assert classify("some_kernel", "", False, "kernel") == ("memory", "memory")
    assert classify("ampere_sgemm", "", True, "kernel") == ("optimizer", "optimizer")
    assert collective_kind("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)") == "transfer"


@pytest.mark.parametrize(
    ("op", "kind"),
    [("c10d::alltoall_base_", "all_to_all"), ("c10d::_allgather_base_", "all_gather")],
)
def test_collective_in_a_send_receive_kernel_is_its_op(tmp_path, document, op, kind):
    changed = json.loads(json.dumps(document))
    for event in changed["traceEvents"]:
        if event["name"] == "c10d::allreduce_":
            event["name"] = op
            event["args"] = {"Input Dims": [[300, 20], []], "Input type": ["c10::Half", ""]}
        event["args"].pop("Collective name", None)
        event["args"].pop("In msg nelems", None)
        if "nccl" in event["name"]:
            event["name"] = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"
    ops = read_bytes(tmp_path, json.dumps(changed).encode()).ops
    found = ops[ops["name"].astype(str).str.startswith("nccl")]
    assert len(found) == 6 and set(found["op_kind"]) == {kind}
    assert set(found["bytes"]) == {12_000.0} and set(found["group"]) == {"[0]"}


def test_ranks_are_aligned_and_transfers_separated(tmp_path, times):
    paths = synth.write(tmp_path, PROGRAM, times, offsets_us=[0.0, 54_321.0])
    trace = read_trace(paths[::-1])
    assert trace.meta["clock_offset_s"] == pytest.approx([0.0, 54_321e-6], abs=1e-8)
    assert trace.meta["n_collectives_matched"] == 6 and trace.meta["n_members_unmatched"] == 0
    ops = trace.ops[trace.ops["collective"] >= 0]
    members = [i for i, c in enumerate(PROGRAM) if c.do == "collective"]
    expected = times.end[:, 0, members] - times.start[:, :, members].max(axis=1)
    for rank in (0, 1):
        found = ops.loc[ops["rank"] == rank, "transfer"].to_numpy()
        assert np.allclose(found, expected.ravel() * 1e-6, atol=2e-9)
    assert (ops.groupby("collective")["rank"].nunique() == 2).all()
    # the recorded durations stay, waiting included
    assert (ops["duration"] >= ops["transfer"] - 1e-9).all()
    assert ops["duration"].max() > 1.05 * ops["transfer"].max()


def test_collectives_that_do_not_overlap_are_unmatched_and_counted(tmp_path, times):
    first = synth.events(PROGRAM, times, 0, world=2)
    second = synth.events(PROGRAM, times, 1, world=2)
    moved = [e for e in second["traceEvents"] if e["name"].startswith("nccl")][0]
    moved["ts"] += 2.0 * moved["dur"] + 5e3
    trace = read_trace(write_all(tmp_path, first, second))
    assert trace.meta["n_collectives_matched"] == 5 and trace.meta["n_members_unmatched"] == 2
    assert any("2 of 12" in note for note in trace.notes)


def test_launch_gaps_are_idle_time_before_a_late_launch(tmp_path):
    def kernel(ts, dur, launch):
        number = int(ts)
        return [
            {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur, "tid": 7,
             "args": {"correlation": number, "stream": 7}},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launch, "dur": 2,
             "tid": 1, "args": {"correlation": number}},
        ]  # fmt: skip

    # idle 10 to 30, launched late; idle 40 to 50, launched long before: no host gap
    made = kernel(0.0, 10.0, -5.0) + kernel(30.0, 10.0, 25.0) + kernel(50.0, 5.0, 26.0)
    trace = read_bytes(tmp_path, json.dumps({"traceEvents": made}).encode())
    gaps = trace.ops[trace.ops["op_kind"] == "launch_gap"]
    assert gaps["start"].tolist() == pytest.approx([10e-6])
    assert gaps["duration"].tolist() == pytest.approx([20e-6])
    assert trace.meta["ranks"][0]["idle_share"] == pytest.approx(30 / 55)
    notes = " ".join(trace.notes)
    assert "rank 0" in notes and "one step" in notes


def test_impossible_durations_are_dropped_and_counted(tmp_path, document):
    broken = json.loads(json.dumps(document))
    kernels = [e for e in broken["traceEvents"] if e["cat"] == "kernel"]
    kernels[3]["dur"] = 1e9
    kernels[5]["dur"] = -1.0
    n = sum(e["cat"] in ("kernel", "gpu_memcpy") for e in broken["traceEvents"])
    trace = read_bytes(tmp_path, json.dumps(broken).encode())
    assert (trace.ops["op_kind"] != "launch_gap").sum() == n - 2
    assert sum("1 of" in note for note in trace.notes) == 1
    assert sum("1 device activities" in note for note in trace.notes) == 1


def test_refusals_say_what_and_why(tmp_path, document):
    host = {"traceEvents": [e for e in document["traceEvents"] if e["cat"] == "cpu_op"]}
    with pytest.raises(PrismError, match="no device activity.*ProfilerActivity.CUDA"):
        read_bytes(tmp_path, json.dumps(host).encode())
    with pytest.raises(PrismError, match="no trace events"):
        read_bytes(tmp_path, b'{"a": 1}')
    with pytest.raises(PrismError, match=r"absent\.json: "):
        read_trace([tmp_path / "absent.json"])
    with pytest.raises(PrismError, match=r"1\.json: .*rank 0, .*0\.json"):
        read_trace(write_all(tmp_path, document, document))


def test_files_without_a_rank_are_numbered_in_order(tmp_path, times):
    made = [synth.events(PROGRAM, times, rank, world=2) for rank in range(2)]
    for document in made:
        del document["distributedInfo"]
    trace = read_trace(write_all(tmp_path, *made))
    assert set(trace.ops["rank"]) == {0, 1}
    assert any("2 of 2 files" in note and "rank" in note for note in trace.notes)


def test_what_is_broken_is_mended_or_dropped_and_counted(text, document):
    n = len(document["traceEvents"])
    changed = text.replace(b'"c10d::allreduce_"', b'"c10d::"all"reduce_"', 2)
    changed = changed.replace(b'"dur": 5.0', b'"dur": NaN', 3)
    changed = changed.replace(b'"cudaStreamSynchronize"', b'"cuda\x01Sync"', 1)
    raw = decode_events(b"\xef\xbb\xbf" + changed, "x")
    assert len(raw.events) == n - 2  # where a quoted name ends cannot be told
    assert (raw.n_mended, raw.n_dropped) == (3, 2)
    assert raw.rank == 0 and raw.world_size == 1
    assert sum("3 events repaired" in note for note in raw.notes) == 1
    assert "cuda\x01Sync" in [e.name for e in raw.events]
    bad = text.replace(b'"cudaStreamSynchronize"', b'"cuda\xff"', 1)  # no UTF-8
    raw = decode_events(bad, "x")
    assert (len(raw.events), raw.n_mended, raw.n_dropped) == (n, 1, 0)
    bad = text.replace(b'"ph": "X", "cat": "kernel"', b'"ph": "X", "cat" "kernel"', 4)
    raw = decode_events(bad, "x")
    assert (len(raw.events), raw.n_dropped) == (n - 4, 4)


def test_a_bare_list_and_a_damaged_gzip_are_read(text, document):
    raw = decode_events(json.dumps(document["traceEvents"]).encode(), "x")
    assert len(raw.events) == len(document["traceEvents"]) and raw.rank is None
    packed = gzip.compress(text)
    raw = decode_events(packed[: len(packed) // 2], "x")
    assert 10 < len(raw.events) < len(document["traceEvents"])
    assert any("cut short" in note for note in raw.notes)


@pytest.mark.parametrize("packed", [False, True])
def test_the_step_that_a_cut_file_ends_in_is_left_out(tmp_path, packed):
    body = TEXT
    last = body.index(b'"kernel"', int(0.9 * len(body)))
    cut = gzip.compress(body)[:-400] if packed else body[:last]
    trace = read_bytes(tmp_path, cut)
    assert trace.meta["n_cut"] == 1
    whole = read_bytes(tmp_path, body, "whole.json")
    kept = trace.ops[trace.ops["step"] >= 0]
    for number, ops in kept.groupby("step"):
        assert len(ops) == (whole.ops["step"] == number).sum()
    assert 2 <= kept["step"].nunique() < whole.ops["step"].nunique()


@pytest.mark.parametrize("share", [0.05, 0.45])
def test_what_a_cut_file_lacks_is_not_asked_of_the_profiler(tmp_path, share):
    body = gzip.compress(TEXT)
    (tmp_path / "cut.json.gz").write_bytes(body[: int(share * len(body))])
    with pytest.raises(PrismError, match="copy it again"):
        prism.fit(tmp_path / "cut.json.gz")


@given(st.floats(0.0, 1.0))
def test_truncated_anywhere_keeps_all_whole_events(share):
    body = TEXT[: int(share * len(TEXT))]
    try:
        raw = decode_events(body, "x")
    except PrismError:
        assert body.count(b"}}") == 0
        return
    # every event but the one that was cut; arguments are an event's last field
    assert (
        len(raw.events) >= min(len(DOCUMENT["traceEvents"]), body.count(b"}}"))
        and raw.n_dropped <= 1
    )


@given(st.data())
def test_damaged_bytes_give_a_trace_or_an_error_with_a_reason(tmp_path_factory, data):
    damaged = bytearray(SHORT)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        piece = data.draw(st.binary(min_size=0, max_size=4) | st.sampled_from([b'"', b"NaN", b"}"]))
        damaged[at : at + data.draw(st.integers(0, 30))] = piece
    path = tmp_path_factory.mktemp("damaged") / "x.json"
    path.write_bytes(bytes(damaged))
    try:
        trace = read_trace([path])
    except PrismError as error:
        assert str(path) in str(error)
        return
    assert np.isfinite(trace.ops["duration"]).all() and (trace.ops["duration"] >= 0).all()
    try:
        replay_trace(trace)
    except PrismError as error:
        assert str(path) in str(error)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
_EVENT = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.just("X"),
        "cat": st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "cuda_sync"]),
        "name": st.sampled_from(["ncclKernel_x", "ProfilerStep#3", "k", "nccl:all_reduce"])
        | _VALUES,
        "ts": st.floats(0, 1e3) | _VALUES,
        "dur": st.floats(0, 1e3) | _VALUES,
        "tid": st.integers(0, 3) | _VALUES,
        "args": st.fixed_dictionaries(
            {},
            optional={
                "correlation": st.integers(0, 3) | _VALUES,
                "stream": _VALUES,
                "bytes": _VALUES,
                "Input Dims": _VALUES,
                "Input type": _VALUES,
                "In msg nelems": _VALUES,
                "dtype": st.just("Float") | _VALUES,
                "Process Group Ranks": _VALUES,
                "wait_on_cuda_event_record_corr_id": _VALUES,
            },
        )
        | _VALUES,
    },
)


@given(st.lists(_EVENT, max_size=12), _VALUES)
def test_any_values_give_a_trace_or_an_error(tmp_path_factory, made, info):
    path = tmp_path_factory.mktemp("any") / "x.json"
    path.write_text(json.dumps({"traceEvents": made, "distributedInfo": info}))
    try:
        trace = read_trace([path])
    except PrismError as error:
        assert "x.json" in str(error)
        return
    assert np.isfinite(trace.ops["start"]).all()
    once = ~trace.ops["collective"].duplicated() | (trace.ops["collective"] < 0)
    assert sum(row.n for row in kernel_table(trace)) == once.sum()
    try:
        found = prism.summary(replay_trace(trace))
    except PrismError as error:
        assert "x.json" in str(error)
        return
    assert found["steps"] >= 1


@given(st.binary(max_size=200))
def test_any_bytes_give_an_error(data):
    with pytest.raises(PrismError, match="no trace events"):
        decode_events(data, "x")


def test_memory_grows_by_few_times_the_file(tmp_path):
    # the 300 MB of experiments/verification/kineto_large.py, made small
    script = Path(__file__).parents[1] / "experiments" / "verification" / "kineto_large.py"
    command = [sys.executable, str(script), "--megabytes"]
    peak = []
    for size in (1, 31):
        done = subprocess.run([*command, str(size)], check=True, capture_output=True, text=True)
        peak.append(float(re.search(r"peak memory ([0-9.]+) GB", done.stdout)[1]))
    assert 0.03 <= peak[1] - peak[0] < 0.16
