"""PyTorch-profiler traces of made-up jobs: what show, replay and fit say of what was put in."""

import copy
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import deviceprogram
import kineto_synth as synth
import numpy as np
import pandas as pd
import programs_made as made
import pytest
from campaign import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from timing import least_seconds

import prism
from prism.traces import read_trace

PROGRAM = synth.training_step(n_layers=2, kernels=2)
TIMES = synth.simulate(PROGRAM, *synth.draw(PROGRAM, 4, 2, seed=5))
DOCUMENTS = [synth.events(PROGRAM, TIMES, rank, world=2) for rank in (0, 1)]
ACTIVE = [i for i, call in enumerate(PROGRAM) if call.do in ("launch", "copy_back", "collective")]
MEMBERS = [i for i, call in enumerate(PROGRAM) if call.do == "collective"]
CLASS_OF = {
    "ampere": ("compute", "gemm"),
    "void at": ("memory", "elementwise"), "void re": ("memory", "elementwise"),
    "void mu": ("optimizer", "optimizer"), "ncclDev": ("all_reduce", "all_reduce"),
    "Memcpy H": ("memory", "memcpy_h2d"), "Memcpy D": ("memory", "memcpy_d2h"),
}  # fmt: skip


def write(folder, *documents):
    """Write each document to a file of its own; the folder."""
    for i, document in enumerate(documents):
        text = document if isinstance(document, str | bytes) else json.dumps(document)
        (folder / f"{i}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def shown(run, path, *options):
    """What `prism show` says of a trace, its kinds of op by kind and class."""
    status, out, err = run("show", path, "--json", *options)
    assert status == 0, err
    found = json.loads(out)
    return found, {(row["op_kind"], row["what"]): row for row in found["ops"]}


def told(notes):
    """Numbers in each note."""
    return [[int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", note)] for note in notes]


def kernels(path):
    """Rows of what `prism.fit` learns of kernels, by name and what their durations are."""
    rows = prism.summary(prism.fit(path, seed=1))["kernels"]
    return {(row["name"], row["measure"]): row for row in rows}


def replayed(path, **options):
    """What `prism.replay` says, its spans by step and rank."""
    found = prism.summary(prism.replay(path, **options))
    spans = {(row["step"], row["rank"]): row["measured"] for row in found["gpu_spans"]}
    return found, spans


def periods(path):
    """What `prism.replay` measures of each step."""
    found = prism.replay(path)
    return dict(zip(found.step.values.tolist(), found.measured_step_time.values, strict=True))


class Recorder:
    """Events of one rank, one by one; times in us."""

    def __init__(self, rank=0, world=1, told_by="Process Group Ranks"):
        self.info, self.told_by = {"rank": rank, "world_size": world}, told_by
        self.events = []

    def add(self, cat, name, ts, dur, tid=1, **args):
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid,
                            "args": args})  # fmt: skip

    def kernel(self, name, ts, dur, launch=None, op=None, stream=7, around=None, **args):
        """Add a kernel, its launch and the host op around that."""
        number, launch = len(self.events) + 1, ts - 5.0 if launch is None else launch
        self.add("kernel", name, ts, dur, 7, correlation=number, stream=stream, **args)
        self.add("cuda_runtime", "cudaLaunchKernel", launch, 2.0, correlation=number)
        if op:
            self.add("cpu_op", op, launch - 1.0, 4.0, **around or {})

    def collective(self, ts, dur, group, elements=1000, dtype="Float"):
        args = {"Collective name": "allreduce", "In msg nelems": elements, "dtype": dtype,
                self.told_by: str(group), "Group size": len(group)}  # fmt: skip
        self.kernel("ncclDevKernel_AllReduce_Sum(x)", ts, dur, stream=21, **args)

    def step(self, number, ts, dur):
        self.add("user_annotation", f"ProfilerStep#{number}", ts, dur)

    @property
    def document(self):
        return {"distributedInfo": self.info, "traceEvents": self.events}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two ranks, the second's clock 54 ms ahead."""
    made = tmp_path_factory.mktemp("ranks")
    synth.write(made, PROGRAM, TIMES, offsets_us=[0.0, 54_321.0])
    return made


def test_values_out_are_values_in_on_one_clock(run, folder):
    found, ops = shown(run, folder)
    assert (found["format"], found["n_ranks"], found["steps"]) == ("kineto", 2, [10, 13])
    seconds = {}
    for i in ACTIVE:
        name = next(key for key in CLASS_OF if PROGRAM[i].name.startswith(key))
        lasted = 1e-6 * (TIMES.end - TIMES.start)[:, :, i].ravel()
        seconds.setdefault(CLASS_OF[name], []).extend(lasted)
    assert set(ops) - {("launch_gap", "host")} == set(seconds)
    for key, values in seconds.items():
        assert ops[key]["n"] == len(values)
        assert ops[key]["mean"] == pytest.approx(np.mean(values), rel=1e-4)
        assert ops[key]["cv"] == pytest.approx(np.std(values) / np.mean(values), rel=1e-3)
    total = sum(row["n"] * row["mean"] for row in ops.values())
    assert ops["compute", "gemm"]["share"] == pytest.approx(
        sum(seconds["compute", "gemm"]) / total, rel=1e-4
    )
    # streams overlap, ranks too: from the first start to the last end of all
    active = TIMES.start[:, :, ACTIVE], TIMES.end[:, :, ACTIVE]
    span = active[1].max(axis=(1, 2)) - active[0].min(axis=(1, 2))
    assert 1.0 <= found["step_span_mean"] / (1e-6 * span.mean()) < 1.06  # gaps before steps


def test_replay_measures_each_rank_in_each_step(folder):
    found, spans = replayed(folder)
    assert len(spans) == 6
    for (step, rank), seconds in spans.items():
        assert seconds == pytest.approx(1e-6 * TIMES.span(step - 10, rank), abs=2e-9)
    assert found["steps"] == 3 and found["max_abs_error"] < 0.01
    assert found["edges_recorded"] == 0 < found["edges_inferred"]
    ends = np.nanmax(TIMES.end, axis=(1, 2))
    assert periods(folder) == pytest.approx(
        dict(zip((11, 12, 13), 1e-6 * np.diff(ends), strict=True)), rel=1e-5
    )


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"skip": 1}, [11, 12, 13]), ({"steps": "11:12"}, [11, 12]), ({"steps": ":11"}, [10, 11])],
)
def test_steps_that_are_chosen(run, folder, options, steps):
    # the first one that was recorded has no period
    assert list(prism.replay(folder, **options)["step"]) == [k for k in steps if k > 10]
    flags = [x for name, value in options.items() for x in (f"--{name}", value)]
    found, ops = shown(run, folder, *flags)
    assert found["steps"] == [steps[0], steps[-1]]
    assert ops["all_reduce", "all_reduce"]["n"] == 2 * len(MEMBERS) * len(steps)


def test_transfers_run_from_the_last_arrival(folder):
    rows = kernels(folder)
    (row,) = [row for row in rows.values() if row["op_kind"] == "all_reduce"]
    transfer = TIMES.end[:, 0, MEMBERS] - TIMES.start[:, :, MEMBERS].max(axis=1)
    waiting = (TIMES.end - TIMES.start)[:, :, MEMBERS]
    assert (row["measure"], row["n"]) == ("transfer", transfer.size)
    assert row["mean"] == pytest.approx(1e-6 * transfer.mean(), rel=1e-4)
    assert 1e-6 * waiting.mean() > 1.005 * row["mean"]
    gemms = rows["ampere_sgemm_32x64_nn", "kernel"]
    mine = [i for i in ACTIVE if PROGRAM[i].name == gemms["name"]]
    lasted = (TIMES.end - TIMES.start)[:, :, mine]
    assert gemms["n"] == lasted.size
    assert gemms["mean"] == pytest.approx(1e-6 * lasted.mean(), rel=1e-4)
    assert gemms["kernel_class"] == "gemm"


def test_waits_that_were_recorded_are_edges(tmp_path):
    synth.write(tmp_path, PROGRAM, TIMES, recorded=True)
    found, _ = replayed(tmp_path)
    assert found["edges_recorded"] > 0 and abs(found["mean_error"]) < 0.002


def ends_apart(number, later_us):
    """The second rank's collective of this number ends so much later."""
    second = copy.deepcopy(DOCUMENTS[1])
    events = [e for e in second["traceEvents"] if e["name"].startswith("nccl")]
    events[number]["ts"] += later_us
    return second


@pytest.mark.parametrize("later_us", [600.0, 1e5])
def test_collectives_that_do_not_overlap_are_told_apart(tmp_path, later_us):
    """The last one of the second rank begins when the first rank's has ended."""
    rows = kernels(write(tmp_path, DOCUMENTS[0], ends_apart(-1, later_us)))
    n = {measure: row["n"] for (_, measure), row in rows.items() if row["op_kind"] == "all_reduce"}
    assert n == {"transfer": 4 * len(MEMBERS) - 1, "includes waiting": 2}


def test_members_whose_ends_are_far_apart_are_no_collective(tmp_path):
    """They overlap: the first rank's lasts 4 ms, the second's 2 ms, and ends 2 ms before."""
    made = [Recorder(rank, 2) for rank in (0, 1)]
    for step in range(3):
        at = 20_000.0 * step
        for rank, recorder in enumerate(made):
            recorder.step(step, at - 20.0, 15_000.0)
            recorder.kernel("k", at, 100.0)
            for i in range(3):
                recorder.collective(at + 200.0 + 300.0 * i, 200.0, [0, 1])
            recorder.collective(at + 2_000.0, 4_000.0 - 2_000.0 * rank, [0, 1], elements=7)
    rows = kernels(write(tmp_path, *[r.document for r in made]))
    n = {measure: row["n"] for (_, measure), row in rows.items() if row["op_kind"] == "all_reduce"}
    assert n == {"transfer": 9, "includes waiting": 6}


@pytest.mark.parametrize("told_by", ["Process Group Ranks", "Process Group Name"])
def test_each_group_of_ranks_has_its_own_collectives(tmp_path, told_by):
    """Four ranks: tp groups at the same time, and dp groups across them, of the same messages."""
    made = [Recorder(rank, 4, told_by) for rank in range(4)]
    for step in range(3):
        at = 5_000.0 * step
        for rank, recorder in enumerate(made):
            tp = [rank // 2 * 2, rank // 2 * 2 + 1]
            recorder.step(step, at - 20.0, 4_000.0)
            recorder.kernel("k", at, 100.0)
            # the second tp group arrives 60 us later and ends 60 us later; both last 100 us
            recorder.collective(at + 200.0 + 60.0 * (rank // 2), 100.0, tp)
            recorder.collective(
                at + 900.0 + 10.0 * rank, 200.0 - 10.0 * rank, [rank % 2, rank % 2 + 2]
            )
    rows = kernels(write(tmp_path, *[r.document for r in made]))
    (row,) = [row for row in rows.values() if row["op_kind"] == "all_reduce"]
    # of tp 100 us each; of dp 200 us less the wait of 20 and 30 us for the group's second rank
    assert (row["measure"], row["n"]) == ("transfer", 3 * 4)
    assert row["mean"] == pytest.approx(1e-6 * (100 + 100 + 180 + 170) / 4)


def clocked(folder, n_ranks=8, n=500, steps=5, wrong=(), late_s=0.0, miss=0.0,
            period_s=2e-3, seed=1):  # fmt: skip
    """Record a job of tp pairs and dp groups, each rank by a clock of its own.

    Returns the trace, true starts [s] of the all-reduces by rank, and how many were recorded by
    several ranks, and by one alone. A transfer takes 100 us; ends differ by some 3 us.
    """
    draw = np.random.default_rng(seed)
    offset, drift = draw.uniform(-0.05, 0.05, n_ranks), draw.uniform(-50e-6, 50e-6, n_ranks)
    offset[0] = drift[0] = 0.0
    first = draw.uniform(0.0, late_s, n_ranks)
    last = period_s * n - draw.uniform(0.0, late_s, n_ranks)
    made, starts = (
        [Recorder(rank, n_ranks) for rank in range(n_ranks)],
        [[] for _ in range(n_ranks)],
    )

    def by_clock(rank, seconds):
        return 1e6 * (1.0 + (seconds - offset[rank]) / (1.0 + drift[rank]))

    for rank in range(n_ranks) if steps else ():
        for step in range(steps):
            span = period_s * n / steps
            made[rank].step(step, by_clock(rank, span * step - 1e-3), 1e6 * span)
    count = {"matched": 0, "alone": 0}
    for i in range(n):
        for group in ([0, 1], [2, 3], [4, 5], [6, 7]) if i % 2 else ([0, 2, 4, 6], [1, 3, 5, 7]):
            arrival = period_s * i + 1e-3 * draw.random() + draw.uniform(0.0, 300e-6, len(group))
            end = arrival.max() + 100e-6 + 3e-6 * draw.random(len(group))
            if group in wrong:
                arrival = draw.uniform(0.0, period_s * n, len(group))
                end = arrival + 200e-6
            members = [
                (rank, a, b) for rank, a, b in zip(group, arrival, end, strict=True)
                if first[rank] <= a and b <= last[rank] and draw.random() >= miss
            ]  # fmt: skip
            count["matched"] += len(members) > 1
            count["alone"] += len(members) == 1
            for rank, a, b in members:
                at = by_clock(rank, a)
                made[rank].collective(at, by_clock(rank, b) - at, group, elements=100 + i % 8)
                starts[rank].append(a)
    write(folder, *[recorder.document for recorder in made])
    return read_trace(folder), starts, count, (offset, drift)


@pytest.mark.parametrize(
    "how",
    [{}, {"steps": 0}, {"late_s": 0.2}, {"late_s": 0.2, "steps": 0}, {"miss": 0.3},
     {"miss": 0.3, "late_s": 0.2, "steps": 0}, {"period_s": 0.1}, {"period_s": 0.1, "steps": 0}],
    ids=str,
)  # fmt: skip
def test_clocks_are_aligned_whatever_their_offset_and_drift(tmp_path, how):
    """Ranks 3, 5 and 7 share no group with rank 0; some start late, end early, miss events."""
    trace, starts, count, (_, drift) = clocked(tmp_path, **how)
    assert trace.meta["n_collectives_matched"] == count["matched"]
    assert trace.meta["n_members_unmatched"] == count["alone"]
    ops = trace.ops[trace.ops["op_kind"] == "all_reduce"]
    wrong = [
        1e6 * (np.sort(ops.loc[ops["rank"] == rank, "start"]) - np.array(starts[rank]))
        for rank in range(8)
    ]
    assert np.ptp(np.concatenate(wrong)) < 10.0  # us
    if not how:
        found = trace.meta["clock_drift"]
        assert found == pytest.approx(drift, abs=3e-6)
        assert any(f" {1e6 * max(map(abs, found)):.2g} ppm" in note for note in trace.notes)
        # launches, 5 us before their kernels, and steps are by the same clock
        assert (ops["start"] - ops["launch"]).to_numpy() == pytest.approx(5e-6, abs=1e-9)
        begins = np.array([[row[1] for row in about["steps"]] for about in trace.meta["ranks"]])
        assert np.ptp(begins, axis=0).max() < 10e-6
        assert ops["transfer"].mean() == pytest.approx(101.5e-6, abs=3e-6)


def test_ranks_take_time_in_proportion(tmp_path):
    """Eight times as many, of 100 collectives each; experiments/checks/kineto_ranks.py."""

    def seconds(n_ranks, times):
        folder = tmp_path / str(n_ranks)
        folder.mkdir(exist_ok=True)
        made = [Recorder(rank, n_ranks) for rank in range(n_ranks)]
        for recorder in made:
            for i in range(100):
                recorder.collective(1e3 * i + 7.0 * (i * i % 11), 100.0, range(n_ranks))
        write(folder, *[recorder.document for recorder in made])
        return least_seconds(lambda: read_trace(folder), times)

    most = 16.0 * seconds(8, 3)
    assert any(seconds(64, 1) < most for _ in range(3))


def test_ends_that_nothing_ties_together_are_not_matched(tmp_path):
    """The second tp pair runs unrelated programs, and is tied by its dp groups alone."""
    trace, _, count, _ = clocked(tmp_path, wrong=([2, 3],))
    n = trace.ops.loc[trace.ops["collective"] >= 0, "group"].value_counts()
    assert n["[2, 3]"] <= 0.1 * n["[0, 1]"] and n["[0, 1]"] == 500
    alone = tmp_path / "alone"
    alone.mkdir()
    groups = ([0, 1], [2, 3], [4, 5], [6, 7], [0, 2, 4, 6], [1, 3, 5, 7])
    trace, *_ = clocked(alone, wrong=groups, n=200)
    assert trace.meta["n_collectives_matched"] == 0
    assert trace.meta["clock_aligned_on"] == [0] * 8


@pytest.mark.parametrize(
    ("dtypes", "elements", "same"),
    [(("Float", "Half"), (1000, 1000), False), (("Float", "BFloat16"), (1000, 2000), True),
     (("Float", "Byte"), (1000, 4000), True), (("Float", "Double"), (1000, 500), True),
     (("Half", "Half"), (1000, 500), False)],
)  # fmt: skip
def test_messages_of_one_size_are_those_of_as_many_bytes(tmp_path, dtypes, elements, same):
    """Durations of one kernel vary about the mean of their message's size."""
    made = Recorder()
    for step in range(4):
        made.step(step, 5_000.0 * step - 20.0, 4_000.0)
        made.kernel("k", 5_000.0 * step, 50.0)
        for i in (0, 1):
            made.collective(5_000.0 * step + 1_000.0 * (i + 1), 100.0 * (i + 1), [0],
                            elements[i], dtypes[i])  # fmt: skip
    (row,) = [r for r in kernels(write(tmp_path, made.document)).values() if r["n"] == 8]
    assert row["mean"] == pytest.approx(150e-6)
    assert row["cv"] == pytest.approx(np.std([100, 200] * 4, ddof=1) / 150 * same, abs=1e-9)


def test_messages_are_told_by_the_op_around_the_launch(tmp_path):
    """Of 300 x 20 halves, or as many bytes: one size, and durations that vary."""
    made = Recorder()
    halves = {"Input Dims": [[300, 20], []], "Input type": ["c10::Half", ""]}
    chars = {"Input Dims": [[12, 1000]], "Input type": ["byte"]}
    for step in range(4):
        made.step(step, 5_000.0 * step - 20.0, 4_000.0)
        for i, around in enumerate((halves, chars)):
            at, lasts = 5_000.0 * step + 900.0 * i, 100.0 * (i + 1)
            made.kernel("ncclKernel_SendRecv(x)", at, lasts, op="c10d::allreduce_", around=around)
    (row,) = [r for r in kernels(write(tmp_path, made.document)).values() if r["n"] == 8]
    assert row["op_kind"] == "all_reduce"
    assert row["cv"] == pytest.approx(np.std([100, 200] * 4, ddof=1) / 150)


def test_an_activity_is_of_the_step_that_launched_it(tmp_path):
    late = copy.deepcopy(DOCUMENTS[0])
    last = [e for e in late["traceEvents"] if e["name"].startswith("void multi")][-1]
    last["ts"] += 1e5  # after the end of all steps
    _, spans = replayed(write(tmp_path, late) / "0.json")
    assert spans[13, 0] == pytest.approx(1e-6 * TIMES.span(3, 0) + 0.1, abs=2e-5)
    assert spans[12, 0] == pytest.approx(1e-6 * TIMES.span(2, 0), abs=2e-9)
    made = Recorder()
    for step in range(4):  # the second kernel runs in the next step, launched in this one
        made.step(step + 4, 1_000.0 * step, 1_000.0)
        made.kernel("a", 1_000.0 * step + 100.0, 300.0)
        made.kernel("b", 1_000.0 * step + 1_050.0, 40.0, launch=1_000.0 * step + 500.0)
    _, spans = replayed(write(tmp_path, made.document) / "0.json")
    assert spans == pytest.approx({(step, 0): 990e-6 for step in (5, 6, 7)})
    for launch, step in ((-150.0, None), (3_995.0, 7), (4_001.0, None)):
        made.kernel("c", 5_000.0, 100.0, launch=launch)  # outside of all steps, or in the last
        path = write(tmp_path, made.document) / "0.json"
        _, spans = replayed(path)
        lasts = {number: 990e-6 if number != step else 2_000e-6 for number in (5, 6, 7)}
        assert spans == pytest.approx({(number, 0): value for number, value in lasts.items()})
        lasts = {number: 1_000e-6 if number != step else 2_010e-6 for number in (5, 6, 7)}
        assert periods(path) == pytest.approx(lasts)
        del made.events[-2:]
    made.events = [e if e["cat"] != "user_annotation" else {**e, "dur": 990.0} for e in made.events]
    made.kernel("c", 5_000.0, 100.0, launch=1_995.0)  # between two steps: of the one before
    _, spans = replayed(write(tmp_path, made.document) / "0.json")
    assert spans[5, 0] == pytest.approx(4_000e-6) and spans[7, 0] == pytest.approx(990e-6)


@pytest.mark.parametrize(
    ("kernel", "op", "expected"),
    [
        ("some_kernel", "aten::addmm", ("compute", "gemm")),
        ("some_kernel", None, ("memory", "elementwise")),
        ("ampere_sgemm_128x64_nn", None, ("compute", "gemm")),
        ("ampere_sgemm_128x64_nn", "aten::convolution_backward", ("compute", "convolution")),
        ("ampere_sgemm_128x64_nn", "Optimizer.step#Muon.step", ("optimizer", "optimizer")),
        ("void cutlass::device_kernel<x>", "aten::_flash_attention", ("compute", "attention")),
        ("fmha_fwd", "aten::mm", ("compute", "gemm")),
        ("void multi_tensor_apply_kernel<x>", "aten::mul_", ("optimizer", "optimizer")),
        ("nvjet_tst_128x256", "aten::mul_", ("compute", "gemm")),
        ("embedding_backward", "x", ("compute", "embedding")),
        ("vectorized_elementwise", "aten::cross_entropy_loss", ("compute", "loss")),
        ("ncclDevKernel_ReduceScatter_Sum_bf16", None, ("reduce_scatter", "reduce_scatter")),
        ("ncclDevKernel_AllGather_RING_LL", None, ("all_gather", "all_gather")),
        ("ncclKernel_SendRecv_RING_SIMPLE(x)", None, ("transfer", "p2p")),
        ("ncclKernel_SendRecv_RING_SIMPLE(x)", "c10d::alltoall_base_", ("all_to_all",) * 2),
        ("ncclKernel_SendRecv_RING_SIMPLE(x)", "c10d::_allgather_base_", ("all_gather",) * 2),
        ("ncclKernel_SendRecv_RING_SIMPLE(x)", "nccl:send 0->1", ("transfer", "p2p")),
        ("ncclDevKernel_Broadcast", "c10d::barrier", ("all_reduce", "all_reduce")),
    ],
)
def test_what_a_kernel_is(run, tmp_path, kernel, op, expected):
    made = Recorder()
    made.kernel(kernel, 100.0, 30.0, op=op)
    _, ops = shown(run, write(tmp_path, made.document) / "0.json")
    assert set(ops) == {expected}
    waits = expected[0] not in ("compute", "memory", "optimizer")
    assert ops[expected]["includes_waiting"] is waits


MAKERS = {
    "xpu": (
        ("xpu_runtime", "urEnqueueKernelLaunch"), ("xpu_driver", "zeCommandListAppendMemoryCopy"),
        "oneccl_allreduce_pcie<half>(int)", "Memcpy M2D (Memory -> Device)", "xccl:all_reduce",
        [("xpu_runtime", "urQueueFinish", "stream_sync"),
         ("xpu_driver", "zeEventHostSynchronize", "event_sync"),
         ("xpu_driver", "zeCommandQueueSynchronize", "stream_sync")],
    ),
    "rocm": (
        ("cuda_runtime", "hipExtModuleLaunchKernel"), ("hip_runtime", "hipMemcpyAsync"),
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage)", "Memcpy HtoD (Host -> Device)",
        "nccl:all_reduce",
        [("cuda_runtime", "hipStreamSynchronize", "stream_sync"),
         ("hip_runtime", "hipDeviceSynchronize", "device_sync"),
         ("cuda_runtime", "hipStreamWaitEvent", "stream_wait")],
    ),
}  # fmt: skip
"""What Kineto's plugins for other makers' devices write: categories and names of the calls."""


@pytest.mark.parametrize("maker", list(MAKERS))
def test_devices_of_other_makers(tmp_path, maker):
    launch, copy_call, kernel, copied, op, waits = MAKERS[maker]
    made = Recorder()
    message = {"Collective name": "allreduce", "In msg nelems": 500, "dtype": "BFloat16",
               "Process Group Ranks": "[0]", "Group size": 1}  # fmt: skip
    rows = [("gpu_memcpy", copied, copy_call, ()), ("kernel", "gemm_kernel", launch, ()),
            ("kernel", kernel, launch, (op, "record_param_comms")),
            ("kernel", "allreduce_small", launch, (op, "record_param_comms"))]  # fmt: skip
    for i, (cat, name, (call_cat, call), around) in enumerate(rows):
        at, stream = 100.0 * i, 64 + i % 2
        # Intel's has no stream, but a queue; Kineto's row of a device activity is its stream
        where = {"sycl queue": stream} if maker == "xpu" else {"stream": stream}
        made.add(cat, name, at + 20.0, 50.0, stream, correlation=i + 1, **where)
        made.add(call_cat, call, at, 2.0, correlation=i + 1)
        for k, outer in enumerate(around):
            made.add("cpu_op", outer, at - 2.0 + k, 9.0 - 2.0 * k, **(message if k else {}))
    for i, (cat, name, _) in enumerate(waits):
        made.add(cat, name, 500.0 + 10.0 * i, 5.0, correlation=100 + i)
    trace = read_trace(write(tmp_path, made.document))
    ops = trace.ops[trace.ops["op_kind"] != "launch_gap"]
    assert 1e6 * (ops["start"] - ops["launch"]).to_numpy() == pytest.approx([20.0] * 4)
    assert list(ops["stream"]) == [64, 65, 64, 65]
    assert list(ops["op_kind"]) == ["memory", "compute", "all_reduce", "all_reduce"]
    assert list(ops["kernel_class"])[:2] == ["memcpy_h2d", "gemm"]
    assert list(ops["bytes"])[2:] == [1000.0] * 2 and list(ops["group"])[2:] == ["[0]"] * 2
    assert trace.meta["ranks"][0]["calls"]["kind"] == [kind for _, _, kind in waits]


@pytest.mark.parametrize("maker", ["hip", "xpu"])
def test_a_step_is_the_same_of_any_maker(run, tmp_path, maker):
    """Launches, launch gaps, collectives and their messages are those of the CUDA trace."""
    found = []
    for name in ("cuda", maker):
        made = [synth.events(PROGRAM, TIMES, rank, world=2, maker=name) for rank in (0, 1)]
        (folder := tmp_path / name).mkdir()
        _, ops = shown(run, write(folder, *made))
        trace = read_trace(folder).ops
        result, spans = replayed(folder)
        counts = {key: (row["n"], row["mean"]) for key, row in ops.items()}
        columns = [trace[c].to_numpy() for c in ("op_kind", "bytes", "group", "launch", "stream")]
        found.append((counts, columns, spans, trace["collective"].max()))
        assert result["max_abs_error"] < 0.001
    (cuda, columns, spans, matched), other = found
    assert other[0] == cuda and other[2] == pytest.approx(spans) and other[3] == matched > 0
    for mine, theirs in zip(columns, other[1], strict=True):
        assert pd.Series(mine).equals(pd.Series(theirs))


def test_kernels_of_a_graph_share_its_launch(tmp_path):
    """Two ranks, the second's clock 3 ms off; each step is one graph, which ends in the next."""
    made = [Recorder(rank, 2) for rank in (0, 1)]
    draw = np.random.default_rng(1)
    names = ["gemm_a", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", "gemm_b",
             "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "gemm_c"]  # fmt: skip
    for step in range(4):
        at = np.zeros(2)
        for i, name in enumerate(names):
            lasts = np.array([300.0, 200.0]) + 20.0 * draw.random(2)
            end = at + lasts if i % 2 == 0 else np.full(2, (at + 1.0).max() + 80.0)
            for rank, recorder in enumerate(made):
                begin = 1_200.0 * step + 3_000.0 * rank
                if not i:
                    recorder.step(step, begin, 1_200.0)
                    recorder.add("cuda_runtime", "cudaGraphLaunch", begin + 400.0, 9.0,
                                 correlation=step + 1)  # fmt: skip
                recorder.add("kernel", name, begin + 420.0 + at[rank], end[rank] - at[rank] - 1.0,
                             7 + i % 2, correlation=step + 1, stream=7 + i % 2)  # fmt: skip
            at = end
    trace = read_trace(write(tmp_path, *[recorder.document for recorder in made]))
    ops = trace.ops[trace.ops["op_kind"] != "launch_gap"]
    for (step, rank), of in ops.groupby(["step", "rank"]):
        assert list(of["name"]) == names and of["launch"].nunique() == 1
        assert of["launch"].iloc[0] == pytest.approx(1.2e-3 * step - 20e-6, abs=1e-6), rank
    kinds = ["all_reduce", "reduce_scatter"]
    assert list(ops["op_kind"].astype(str)[ops["collective"] >= 0]) == kinds * 8
    assert trace.meta["n_collectives_matched"] == 8
    found = prism.summary(prism.replay(tmp_path))
    assert found["steps"] == 3 and found["max_abs_error"] < 0.01


def test_launch_gaps_are_idle_time_before_a_late_launch(run, tmp_path):
    made = Recorder()
    made.kernel("a", 0.0, 10.0, launch=-5.0)
    made.kernel("b", 30.0, 10.0, launch=25.0)  # idle from 10 to 30, launched late
    made.kernel("c", 50.0, 5.0, launch=26.0)  # idle from 40, launched long before
    made.kernel("d", 60.0, 5.0, launch=57.0, stream=9)  # idle from 55
    made.kernel("e", 64.0, 9.0, launch=63.0, stream=7)  # another stream is busy
    found, ops = shown(run, write(tmp_path, made.document) / "0.json")
    gap = ops["launch_gap", "host"]
    assert gap["n"] == 2 and gap["mean"] == pytest.approx(0.5 * (20e-6 + 5e-6))
    assert (found["n_steps"], found["n_ops"]) == (1, 7)  # no marks: all of it one step


def test_ranks_by_their_files(run, tmp_path):
    for name, document in zip(("r2.json", "r10.json"), DOCUMENTS, strict=True):
        events = {"traceEvents": document["traceEvents"]}  # of no rank: in order, 10 behind 2
        (tmp_path / name).write_text(json.dumps(events))
    _, spans = replayed(tmp_path)
    expected = {(10 + s, r): 1e-6 * TIMES.span(s, r) for s in range(1, 4) for r in (0, 1)}
    assert spans == pytest.approx(expected, abs=2e-9)
    (tmp_path / "notes.txt").write_text("recorded on Tuesday\n")
    (tmp_path / "empty.json").write_text("")
    found, _ = shown(run, tmp_path)
    assert found["n_ranks"] == 2 and [2, 2] in [numbers[:2] for numbers in told(found["notes"])]
    for name in ("notes.txt: ", "empty.json: "):
        assert any(name in note for note in found["notes"])
    (tmp_path / "r2.json").write_text(json.dumps({**DOCUMENTS[0], "distributedInfo": {"rank": 1}}))
    _, spans = replayed(tmp_path)  # one is named: the other takes the number that is free
    assert spans == pytest.approx({(s, 1 - r): t for (s, r), t in expected.items()}, abs=2e-9)
    # one of four ranks, and two of four
    for ranks in (1, 2):
        for document in (made := copy.deepcopy(DOCUMENTS[:ranks])):
            document["distributedInfo"]["world_size"] = 4
        one = tmp_path / str(ranks)
        one.mkdir()
        found, _ = shown(run, write(one, *made))
        assert found["n_ranks"] == ranks
        assert any(numbers[:2] == [ranks, 4] for numbers in told(found["notes"]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["distributedInfo"].update(world_size=8), ["1.json", "0.json", "8", "2"]),
        (lambda d: d["distributedInfo"].update(rank=0), ["1.json", "0.json", "rank 0"]),
        (lambda d: d.update(traceEvents=[{**e, "ts": e["ts"] + 3.6e9} for e in d["traceEvents"]
                                         if "nccl" not in e["name"]]), ["1.json", "0.json"]),
    ],
    ids=["another job", "the same rank", "another time"],
)  # fmt: skip
def test_ranks_that_are_not_of_one_recording(run, tmp_path, change, named):
    second = copy.deepcopy(DOCUMENTS[1])
    change(second)
    for command in ("fit", "replay"):
        status, _, err = run(command, write(tmp_path, DOCUMENTS[0], second))
        assert status == 2 and all(word in err for word in named)


def test_what_cannot_be_true_is_dropped_and_counted(run, tmp_path):
    whole, _ = shown(run, write(tmp_path, DOCUMENTS[0]) / "0.json")
    far = copy.deepcopy(DOCUMENTS[0])
    rows = [e for e in far["traceEvents"] if e["cat"] == "kernel"]
    rows[2]["ts"], rows[4]["dur"], rows[6]["ts"] = 1e300, 1e17, -5e14
    rows[8]["dur"], rows[10]["dur"] = 1e9, -1.0  # over what follows; negative
    found, ops = shown(run, write(tmp_path, far) / "0.json")
    kept = sum(row["n"] for key, row in ops.items() if key[0] != "launch_gap")
    assert kept == 4 * len(ACTIVE) - 5
    assert found["step_span_mean"] == pytest.approx(whole["step_span_mean"], rel=0.05)
    numbers = told(found["notes"])
    assert [4] in numbers and any(n[:2] == [1, 4 * len(ACTIVE) - 4] for n in numbers)


def test_broken_events_are_mended_or_dropped_and_counted(run, tmp_path):
    text = json.dumps(DOCUMENTS[0])
    whole, _ = shown(run, write(tmp_path, text) / "0.json")
    broken = text.replace('"ph": "X", "cat": "kernel"', '"ph": "X", "cat" "kernel"', 4)
    broken = broken.replace('"name": "void mu', '"name": "void \x01mu', 3).encode()
    broken = broken.replace(b'"name": "void at', b'"name": "void \xff', 2)
    found, ops = shown(run, write(tmp_path, b"\xef\xbb\xbf" + broken) / "0.json")
    n = sum(row["n"] for key, row in ops.items() if key[0] != "launch_gap")
    assert n == 4 * len(ACTIVE) - 4
    assert any(numbers[:2] == [2, 4] for numbers in told(found["notes"])), found["notes"]
    assert ops["optimizer", "optimizer"]["n"] == 12 and whole["steps"] == found["steps"]
    bare, _ = shown(run, write(tmp_path, DOCUMENTS[0]["traceEvents"]) / "0.json")
    assert (bare["n_ops"], bare["n_ranks"]) == (whole["n_ops"], 1)


@pytest.mark.parametrize("packed", [False, True])
def test_the_step_that_a_cut_file_ends_in_is_left_out(run, tmp_path, packed):
    body = json.dumps(DOCUMENTS[0]).encode()
    cut = gzip.compress(body)[:-400] if packed else body[: int(0.9 * len(body))]
    found, ops = shown(run, write(tmp_path, cut) / "0.json")
    assert found["steps"][0] == 10 and found["steps"][1] < 13
    _, spans = replayed(tmp_path / "0.json")
    assert max(spans)[0] == found["steps"][1]
    for (step, rank), seconds in spans.items():
        assert seconds == pytest.approx(1e-6 * TIMES.span(step - 10, rank), abs=2e-9)


def test_gzip_and_plain_agree_whatever_the_name(run, tmp_path):
    text = json.dumps(DOCUMENTS[0]).encode()
    (tmp_path / "a.gz").write_bytes(text)
    (tmp_path / "b.csv").write_bytes(gzip.compress(text))
    first, second = (shown(run, tmp_path / name)[0] for name in ("a.gz", "b.csv"))
    assert first["ops"] == second["ops"]


@pytest.mark.parametrize("rank", ["x", -3, 10**30, None, 2.5, [1]])
def test_a_rank_that_is_no_rank_is_not_told(run, tmp_path, rank):
    document = {**DOCUMENTS[0], "distributedInfo": {"rank": rank, "world_size": rank}}
    found, _ = shown(run, write(tmp_path, document) / "0.json")
    assert found["n_ranks"] == 1 and found["n_steps"] == 4


def test_copies_of_the_same_events_take_time_in_proportion(run, tmp_path):
    """All ops of a step in one another, and as many collectives that end at once."""

    def seconds(copies, times):
        many = {**DOCUMENTS[0], "traceEvents": DOCUMENTS[0]["traceEvents"] * copies}
        path = write(tmp_path, many) / "0.json"
        return least_seconds(lambda: run("show", path, "--json"), times)

    most = 20.0 * max(seconds(15, 3), 0.0125)
    # the least of three is short enough where any of them is
    assert any(seconds(120, 1) < most for _ in range(3))


def test_memory_grows_by_few_times_the_file(tmp_path):
    # the 300 MB of experiments/checks/kineto_large.py, made small
    script = Path(__file__).parents[1] / "experiments" / "checks" / "kineto_large.py"
    command = [sys.executable, str(script), "--megabytes"]
    peak = []
    for size in (1, 31):
        done = subprocess.run([*command, str(size)], check=True, capture_output=True, text=True)
        peak.append(float(re.search(r"peak memory ([0-9.]+) GB", done.stdout)[1]))
    assert 0.03 <= peak[1] - peak[0] < 0.16


_JUNK = st.sampled_from(
    [None, True, -1, 0, 1e308, -1e308, 2**63, 2**64 + 5, 10**400, 1e-320, "", "12", "x", [],
     [1, [2]], {}, {"a": {"b": 1}}, "NaN", 3.7, 5e15]
)  # fmt: skip
_ARGUMENTS = (
    "correlation", "stream", "grid", "block", "bytes", "Collective name", "In msg nelems", "dtype",
    "Group size", "Process Group Ranks", "wait_on_stream", "Input Dims", "Input type",
)  # fmt: skip
_FIELDS = ("ph", "cat", "name", "tid", "ts", "dur", "args")
_CHANGE = st.tuples(
    st.sampled_from(["field", "argument", "all", "copy", "without", "event"]),
    st.integers(0, 10_000), st.sampled_from(_FIELDS), st.sampled_from(_ARGUMENTS), _JUNK,
)  # fmt: skip


def damage(document, change):
    """Spoil one thing of a document."""
    kind, row, name, argument, value = copy.deepcopy(change)
    events = document["traceEvents"]
    row %= max(1, len(events))
    event = events[row] if events and isinstance(events[row], dict) else {}
    if kind == "field":
        event[name] = value
    elif kind == "argument" and isinstance(event.get("args"), dict):
        event["args"][argument] = value
    elif kind == "all":
        document["traceEvents"] = [{**e, name: value} for e in events if isinstance(e, dict)]
    elif kind == "copy" and events:
        events.append(copy.deepcopy(events[row]))
    elif kind == "without":
        gone = event.get("cat")
        keep = [e for e in events if not (isinstance(e, dict) and e.get("cat") == gone)]
        document["traceEvents"] = keep
    elif kind == "event" and events:
        events[row] = value


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@example([], False, 0.05, True)
@example([], False, 0.45, True)
@given(st.lists(_CHANGE, max_size=5), st.booleans(), st.floats(0.0, 1.5), st.booleans())
def test_no_change_of_a_trace_is_a_traceback(tmp_path_factory, changes, both, cut, packed):
    document = copy.deepcopy(DOCUMENTS[0])
    for change in changes:
        damage(document, change)
    text = json.dumps(document).encode()
    text = gzip.compress(text) if packed else text
    folder = tmp_path_factory.mktemp("changed")
    write(folder, text[: int(cut * len(text))], *DOCUMENTS[1 : 1 + both])
    path = folder if both else folder / "0.json"
    for call in (prism.fit, prism.replay):
        try:
            found = prism.summary(call(path))
        except prism.PrismError as error:
            assert str(folder) in str(error) and len(str(error)) < 1_500
        else:
            json.dumps(found, allow_nan=False)
            assert found["steps"] >= 1 if "steps" in found else found["kind"] == "library"


def test_files_hold_the_times_of_the_run(tmp_path):
    run = deviceprogram.simulate(made.two_streams(), 6)
    clocks = {"clock_offset_s": [0.0, 0.5], "clock_drift": [0.0, 1e-4]}
    paths = run.write(tmp_path, record_waits=True, **clocks)
    for rank, path in enumerate(paths):
        rate = 1.0 + 1e-4 * rank
        events = json.loads(path.read_bytes())["traceEvents"]
        found = [e["ts"] for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        start = np.sort([a.start for a in run.activities(rank)])
        assert found == pytest.approx(1e6 * (1.0 + 0.5 * rank + rate * start), abs=2e-3)
        steps = [e["dur"] for e in events if e["name"].startswith("ProfilerStep#")]
        assert steps == pytest.approx(1e6 * rate * np.diff(run.begins[:, rank]), abs=2e-3)
    meta = read_trace(paths).meta
    assert meta["n_members_unmatched"] == 0 and meta["n_collectives_matched"] == 36
    assert meta["clock_offset_s"][1] == pytest.approx(-0.5, abs=1e-4)
    for about in (meta, read_trace(run.write(tmp_path / "without")).meta):
        calls = about["ranks"][0]["calls"]
        waits = [s for s, k in zip(calls["on_stream"], calls["kind"], strict=True) if "wait" in k]
        assert len(waits) == 6 * 7 and set(waits) == ({7, 20} if about is meta else {-1})


def test_what_was_launched_before_the_recording_has_no_launch(tmp_path):
    run = deviceprogram.simulate(made.device_bound(), 5)
    (path,) = run.write(tmp_path, marks="optimizer", first_step_recorded=2)
    late = sum(a.start > run.begins[2, 0] for a in run.activities(0)[: 2 * 187])
    assert late > 187 and int(read_trace(tmp_path).ops["launch"].isna().sum()) == late
    names = [e["name"] for e in json.loads(path.read_bytes())["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 3 and "ProfilerStep#2" not in names


def test_ranks_without_collectives_share_the_clock_that_their_files_count_from(tmp_path):
    documents = []
    for rank in (0, 1):  # the second counts from half a second later
        recorder = Recorder(rank, 2)
        recorder.add("kernel", "gemm", 1_000_000.0 - 500_000.0 * rank, 100.0, 7, stream=7)
        base = {"baseTimeNanoseconds": 10**18 + 500_000_000 * rank}
        documents.append(recorder.document | base)
    ops = read_trace(write(tmp_path, *documents)).ops
    assert list(ops["start"]) == pytest.approx([0.0, 0.0], abs=1e-9)
