"""Production jobs: their replay, and slowdowns against the published ones."""

import os
from pathlib import Path

import numpy as np
import pytest

import prism
from prism import replay
from prism.models.pipelinetrace.build import build_trace_graph
from prism.simulation.tracemodel.graph import replay as propagate
from prism.traces import read_step_times, read_trace

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
JOBS = DATA / "production_traces"

pytestmark = pytest.mark.skipif(
    not JOBS.is_dir(), reason=f"no production traces in {JOBS}; set PRISM_DATA to their parent"
)


@pytest.mark.parametrize(
    ("job", "slowdown", "tolerance"),
    [("AR", 1.973, 0.03), ("ST", 1.179, 0.03), ("SE_first21", 1.537, 0.05)],
)
def test_replay_and_slowdown_are_those_published(job, slowdown, tolerance):
    pytest.importorskip("pyarrow")
    dataset = replay(JOBS / f"ops_{job}.parquet")
    summary = prism.summary(dataset)
    assert abs(summary["mean_error"]) < 0.0005 and summary["max_abs_error"] < 0.0005
    assert summary["slowdown"] == pytest.approx(slowdown, rel=tolerance)
    trace = read_step_times(JOBS / "step_times.csv", where={"trace": job.split("_")[0]})
    at = np.isin(trace.step, dataset["step"])
    np.testing.assert_allclose(dataset["replayed_step_time"], trace.seconds[at], rtol=0.0005)
    assert summary["p2p"] == "blocking"


def test_the_worker_that_was_slowed_is_the_one_found():
    pytest.importorskip("pyarrow")
    summary = prism.summary(replay(JOBS / "ops_AR.parquet"))
    worst = max(summary["by_worker"], key=lambda w: w["slowdown"])
    assert (worst["dp_rank"], worst["stage"]) == (0, 0) and worst["slowdown"] > 1.4


@pytest.mark.parametrize(("job", "limit"), [("AR", 0.015), ("ST", 0.015), ("SE_first21", 0.015)])
def test_replay_with_rows_lost(job, limit):
    """One row in a hundred is lost: steps stay within the limit of whole traces."""
    pytest.importorskip("pyarrow")
    whole = read_trace(JOBS / f"ops_{job}.parquet")
    measured = build_trace_graph(whole).measured
    keep = np.random.default_rng(0).random(len(whole.ops)) >= 0.01
    ops = whole.ops[keep].reset_index(drop=True)
    graph = build_trace_graph(type(whole)(ops, whole.source, whole.format))
    error = propagate(graph) / measured[: graph.steps.size] - 1.0
    assert graph.steps.size == measured.size
    assert abs(error.mean()) < 0.005 and np.abs(error).max() < limit
