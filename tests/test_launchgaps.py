"""Launch gaps are one thing: what a made-up job's are, the reader, timeline and estimate find."""

import kineto_synth as synth
import numpy as np
import pytest

import prism
from prism import timeline
from prism.common.launchgaps import launch_gaps
from prism.present.traceshow import describe_trace
from prism.simulation.tracemodel.devicetime import device_time
from prism.simulation.tracemodel.graph import REPLICA, WORKER, TraceNode
from prism.traces.readers import read_trace

HOST_BOUND = synth.training_step(n_layers=3, kernels=4, mean_us=20.0, host_us=80.0)
N_STEPS = 4


@pytest.fixture(scope="module", params=[1, 2])
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gaps")
    drawn = synth.draw(HOST_BOUND, N_STEPS, request.param, seed=3, cv=0.02, host_cv=0.02)
    times = synth.simulate(HOST_BOUND, *drawn)
    synth.write(folder, HOST_BOUND, times)
    return folder, times


def known(times, rank, collectives=True):
    """Launch gaps of a rank over the whole trace, [gap, (begin, end)] s: second by second."""
    start, end = times.start[:, rank].ravel(), times.end[:, rank].ravel()
    if not collectives:
        start = np.where(
            np.tile([c.do == "collective" for c in HOST_BOUND], N_STEPS), np.nan, start
        )
    blocks = np.tile([call.do == "copy_back" for call in HOST_BOUND], N_STEPS)
    issued = np.where(blocks, times.call[:, rank].ravel(), times.call_end[:, rank].ravel())
    found, until = [], np.inf
    for i in np.argsort(start):
        if np.isfinite(start[i]):
            if start[i] > until and issued[i] > until:
                found.append((until, start[i]))
            until = max(end[i], until if np.isfinite(until) else 0.0)
    return 1e-6 * np.array(found)


def within(gaps, begin, end):
    """Time of gaps that lies between two moments [s]."""
    return float(np.maximum(0.0, np.minimum(gaps[:, 1], end) - np.maximum(gaps[:, 0], begin)).sum())


def test_a_trace_lists_them(made):
    folder, times = made
    gaps = [known(times, rank) for rank in range(times.start.shape[1])]
    rows = describe_trace(read_trace(str(folder))).figures["ops"]
    row = next(row for row in rows if row["op_kind"] == "launch_gap")
    assert row["n"] == sum(map(len, gaps)) > 20 * N_STEPS
    total = sum(np.diff(of_rank).sum() for of_rank in gaps)
    assert row["n"] * row["mean"] == pytest.approx(total, rel=1e-4)


def test_a_timeline_shows_them(made):
    folder, times = made
    step = prism.summary(timeline(folder, step=11))["steps"][0]
    begin, end = 1e-6 * np.nanmin(times.start[1]), 1e-6 * np.nanmax(times.end[1])
    for rank, row in enumerate(step["rows"]):
        expected = within(known(times, rank), begin, end)
        assert row["waits"]["host"]["seconds"] == pytest.approx(expected, rel=0.02)
        assert expected > 0.2 * step["step_time"]


def test_an_estimate_finds_them(made, tmp_path):
    folder, times = made
    prism.save(prism.fit(folder, seed=1), tmp_path / "model.nc")
    found = prism.summary(prism.estimate(tmp_path / "model.nc", replicates=256, seed=1))
    share = {part["name"]: part["mean_share"] for part in found["time_loss"]}
    begin = 1e-6 * times.step_start.min(axis=1)
    end = 1e-6 * np.nanmax(times.end, axis=(1, 2))
    bounds = list(zip(begin, end, strict=True))
    expected = [
        np.mean([within(known(times, rank, collectives=False), *step) for step in bounds])
        for rank in range(times.start.shape[1])
    ]
    seconds = share["launch_gaps"] * found["step_time"]["mean"]
    assert min(expected) * 0.97 < seconds < max(expected) * 1.03
    assert sum(share.values()) == pytest.approx(1.0)
    kernels = np.array([call.do != "collective" for call in HOST_BOUND])
    busy = 1e-6 * np.nansum((times.end - times.start)[:, :, kernels], axis=2).mean()
    own = share["compute"] + share["optimizer"]
    assert own * found["step_time"]["mean"] == pytest.approx(busy, rel=0.03)
    adam = np.array(["Adam" in call.name for call in HOST_BOUND])
    seconds = 1e-6 * np.nansum((times.end - times.start)[:, :, adam], axis=2).mean()
    assert share["optimizer"] * found["step_time"]["mean"] == pytest.approx(seconds, rel=0.03)
    assert share["bubble"] == 0.0


def test_what_was_issued_before_is_latency():
    gaps = launch_gaps(
        np.array([0.0, 5.0, 9.0, 9.5]), np.array([3.0, 6.0, 12.0, 10.0]),
        np.array([-1.0, 4.0, 5.5, np.nan]),
    )  # fmt: skip
    assert (gaps.begin.tolist(), gaps.end.tolist(), gaps.ended_by.tolist()) == ([3.0], [5.0], [1])
    assert gaps.idle == 5.0


def pipeline_op(kind, stages, preds, name=""):
    scope = WORKER if len(stages) == 1 else REPLICA
    return TraceNode(kind, kind, kind, name, scope, stages, -1, 0, -1, preds)


def test_a_pipelines_gaps_are_its_hosts_and_waiting_for_another_stage_is_none():
    nodes = (
        pipeline_op("op", (0,), ()),  # 0 to 4
        pipeline_op("gap", (1,), ()),  # 0 to 1, then waits for the message
        pipeline_op("op", (0, 1), (0, 1)),  # 4 to 5
        pipeline_op("gap", (1,), (2,)),  # 5 to 7
        pipeline_op("op", (1,), (3,)),  # 7 to 10
    )
    start, end = np.array([0.0, 0.0, 4.0, 5.0, 7.0]), np.array([4.0, 1.0, 5.0, 7.0, 10.0])
    found = [device_time(nodes, start, end, stage) for stage in (0, 1, 2)]
    assert [x.busy for x in found] == [5.0, 4.0, 0.0]
    assert [x.idle for x in found] == [0.0, 3.0, 0.0]
