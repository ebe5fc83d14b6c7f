"""Timelines of traces: events stand where they were recorded."""

import json
import os
from pathlib import Path

import kineto_synth as synth
import numpy as np
import pytest
from pipeline_synth import Effects, Layout, as_production, make_trace
from test_timeline import check_timeline

import prism
from prism import PrismError, fit, save, timeline
from prism.analyses.timelines.table import texts
from prism.traces import read_trace

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
measured = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA}; set PRISM_DATA")


def made_table(folder, p2p="blocking", **effects):
    """Write a made-up production trace of a job."""
    shape = Layout(2, 4, 6, 5, p2p=p2p)
    frame, _ = make_trace(shape, Effects(rank_sd=0.02, residual_sd=0.02, gap_s=0.002, **effects))
    path = folder / "ops.csv"
    as_production(frame).to_csv(path, index=False)
    return path


def recorded(trace, made, tolerance):
    """Compare the compute events of the first step shown with the trace's rows; count them."""
    step = json.loads(made.attrs["steps"])[0]["step"]
    ops = trace.ops[trace.ops["step"] == step]
    begin = float(ops["start"].min())
    keys = ["dp_rank", "stage", "op_kind", "microbatch", "chunk"]
    ops = ops[ops["op_kind"].isin(["forward", "backward"])].copy()
    ops["op_kind"] = ops["op_kind"].astype(str)
    rows = ops.set_index(keys)[["start", "duration"]].to_dict("index")
    names = ["event_row", "replica", "stage", "microbatch", "chunk", "start", "duration"]
    row, replica, stage, microbatch, chunk, start, duration = (made[x].values for x in names)
    kind = texts(made, "kind")
    shown = (made["row_step"].values[row] == 0) & np.isin(kind, ["forward", "backward"])
    for i in np.flatnonzero(shown & (texts(made, "stream") == "compute")):
        place = int(replica[row[i]]), int(stage[row[i]])
        there = rows.pop((*place, str(kind[i]), int(microbatch[i]), int(chunk[i])))
        assert abs(start[i] - (there["start"] - begin)) <= tolerance
        assert abs(duration[i] - there["duration"]) <= 1e-6
    assert not rows
    return int(shown.sum())


@pytest.mark.parametrize("p2p", ["blocking", "async"])
def test_replayed_events_stand_where_they_were_recorded(tmp_path, p2p):
    path = made_table(tmp_path, p2p, lemons={(1, 2): 1.5})
    made = timeline(path)
    summary = check_timeline(made)
    replayed, ideal = summary["steps"]
    assert replayed["kind"] == "replayed" and ideal["kind"] == "ideal"
    assert replayed["step_time"] == pytest.approx(replayed["measured_step_time"], rel=1e-3)
    assert ideal["step_time"] < replayed["step_time"]
    assert recorded(read_trace(str(path)), made, 1e-3 * replayed["step_time"]) == 2 * 2 * 4 * 6
    by = replayed["decided_by"]
    assert (by["replica"], by["stage"]) == (1, 2)
    slowdown = made["duration"].values / made["nominal"].values
    lemon = (made["replica"].values == 1) & (made["stage"].values == 2)
    lemon = lemon[made["event_row"].values] & (texts(made, "kind") == "forward")
    lemon &= made["row_step"].values[made["event_row"].values] == 0
    assert np.median(slowdown[lemon]) == pytest.approx(1.5, rel=0.05)


def test_a_step_of_a_trace_and_a_model_of_it(tmp_path):
    path = made_table(tmp_path)
    number = int(read_trace(str(path)).ops["step"].max())
    assert prism.summary(timeline(path, step=number))["steps"][0]["step"] == number
    with pytest.raises(PrismError, match="no step 99; step takes one of"):
        timeline(path, step=99)
    with pytest.raises(PrismError, match=": replicates does not apply"):
        timeline(path, replicates=64)
    with pytest.raises(PrismError, match="without numbers of ranks"):
        timeline(path, ranks=[0])
    save(fit(path, seed=1), tmp_path / "model.nc")
    summary = check_timeline(timeline(tmp_path / "model.nc", replicates=128, seed=1))
    assert [s["percentile"] for s in summary["steps"]] == [50, 99]
    assert len(summary["steps"][0]["rows"]) == 8
    assert "transfer" in summary["steps"][0]["critical_path"]


def test_kernels_stand_where_they_were_recorded(tmp_path):
    program = synth.training_step()
    times = synth.simulate(program, *synth.draw(program, 5, 2))
    synth.write(tmp_path, program, times)
    made = timeline(tmp_path)
    summary = check_timeline(made)
    step = summary["steps"][0]
    assert [row["label"] for row in step["rows"]] == ["rank 0", "rank 1"]
    assert step["step_time"] == pytest.approx(step["measured_step_time"], rel=0.02)
    assert any("rank" in row["waits"] or "communication" in row["waits"] for row in step["rows"])
    few = timeline(tmp_path, ranks=[1])
    assert {str(x) for x in few["row_label"].values} == {"rank 1"}


@pytest.mark.parametrize("profiler", ["nsys", "chakra"])
def test_other_profilers_traces_have_timelines_by_rank(profiler):
    path = Path(__file__).parents[1] / "experiments" / "samples" / profiler
    made = timeline(path)
    step = check_timeline(made)["steps"][0]
    assert [row["label"] for row in step["rows"]] == ["rank 0", "rank 1"]
    assert step["step_time"] == pytest.approx(step["measured_step_time"], rel=1e-3)
    gemm = texts(made, "kind") == "gemm"
    shown = gemm & (made["row_step"].values[made["event_row"].values] == 0)
    ops = read_trace(str(path)).ops
    rows = ops[(ops["step"] == step["step"]) & (ops["kernel_class"] == "gemm")]
    assert shown.sum() == len(rows) > 0
    named = timeline(path, step_range="ProfilerStep.*|step.*")
    assert named.attrs["steps"] == made.attrs["steps"]
    with pytest.raises(PrismError, match=": step_range nothing"):
        timeline(path, step_range="nothing")


@measured
@pytest.mark.parametrize(("job", "n", "tolerance"), [("AR", 1024, 2e-3), ("ST", 64, 1e-4)])
def test_production_traces(job, n, tolerance):
    """Starts within milliseconds of a step of seconds, durations exactly."""
    pytest.importorskip("pyarrow")
    path = DATA / "production_traces" / f"ops_{job}.parquet"
    made = timeline(path, replicas=range(4) if job == "AR" else None)
    assert recorded(read_trace(str(path)), made, tolerance) == n


@measured
def test_a_profiled_training_step():
    """Matrix products of a rank: as many as recorded, each as long as recorded, in its place."""
    path = DATA / "kineto_traces" / "training_step_a100.json.gz"
    made = timeline(path)
    check_timeline(made)
    about = json.loads(made.attrs["steps"])[0]
    trace = read_trace(str(path)).ops
    rows = trace[(trace["step"] == about["step"]) & (trace["kernel_class"] == "gemm")]
    shown = (made["row_step"].values[made["event_row"].values] == 0) & (
        texts(made, "kind") == "gemm"
    )
    order = np.argsort(made["start"].values[shown])
    rows = rows.sort_values("start")
    np.testing.assert_allclose(
        np.sort(made["duration"].values[shown]), np.sort(rows["duration"]), atol=1e-9
    )
    # the replay begins with the first activity; what the trace does not explain moves later ones
    first = trace[(trace["step"] == about["step"]) & (trace["op_kind"] != "launch_gap")]
    there = rows["start"].to_numpy() - float(first["start"].min())
    off = made["start"].values[shown][order] - there
    assert np.quantile(np.abs(off), 0.5) < 0.02 * about["step_time"]
    assert np.quantile(np.abs(off), 0.95) < 0.05 * about["step_time"]
