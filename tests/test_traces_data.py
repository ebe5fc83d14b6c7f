"""The readers on measured data, where it is at hand."""

import gzip
import os
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from timing import least_seconds
from traces_made import write_csv

from prism import PrismError
from prism.traces import read_step_times, read_totals, read_trace, to_tidy, total_per_run

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no measured data in {DATA}; set PRISM_DATA to its folder"
)

JOBS = [("AR", 116_512, 44, 16), ("SE_first21", 51_072, 21, 64), ("ST", 6_528, 32, 8)]


@pytest.fixture(scope="module")
def as_csv(tmp_path_factory):
    """Path of a job's measured ops as CSV, written once."""
    folder = tmp_path_factory.mktemp("csv")

    @cache
    def path_of(job):
        path = DATA / "production_traces" / f"ops_{job}.parquet"
        return write_csv(folder / f"{job}.csv", pd.read_parquet(path))

    return path_of


@pytest.mark.parametrize(("job", "n_ops", "n_steps", "n_workers"), JOBS)
def test_production_traces(tmp_path, as_csv, job, n_ops, n_steps, n_workers):
    pytest.importorskip("pyarrow")
    path = DATA / "production_traces" / f"ops_{job}.parquet"
    trace = read_trace(path)
    assert (trace.format, trace.notes, len(trace.ops)) == ("pipeline", (), n_ops)
    assert trace.ops["step"].nunique() == n_steps and trace.ops["rank"].nunique() == n_workers
    raw = pd.read_parquet(path)
    assert trace.ops["duration"].sum() == raw["duration"].astype(float).sum()
    from_csv = read_trace(as_csv(job))
    assert np.allclose(from_csv.ops["duration"], trace.ops["duration"], rtol=1e-6, atol=0)
    rest = ["start", "duration"]
    assert from_csv.ops.drop(columns=rest).equals(trace.ops.drop(columns=rest))
    to_tidy(trace).to_parquet(tmp_path / "tidy")
    assert read_trace(tmp_path / "tidy").ops.equals(trace.ops)


def test_reading_is_fast(as_csv):
    pytest.importorskip("pyarrow")
    path = DATA / "production_traces" / "ops_AR.parquet"
    from_csv = as_csv("AR")

    def short(file, most):  # the least of three is short enough where any of them is
        return any(least_seconds(lambda: read_trace(file), 1) < most for _ in range(3))

    assert short(path, 1.5)  # 0.1 to 0.2 s
    assert short(from_csv, 3.0)  # 0.2 to 0.3 s


def test_spans_of_a_pipeline_trace_are_the_published_step_times():
    pytest.importorskip("pyarrow")
    ops = read_trace(DATA / "production_traces" / "ops_ST.parquet").ops
    by_step = ops.assign(end=ops["start"] + ops["duration"]).groupby("step")
    times = read_step_times(DATA / "production_traces" / "step_times.csv", where={"trace": "ST"})
    span = by_step["end"].max() - by_step["start"].min()
    assert list(span.index) == list(times.step)
    assert np.allclose(span, times.seconds, rtol=1e-5)


def test_production_step_times_ask_for_the_job():
    path = DATA / "production_traces" / "step_times.csv"
    with pytest.raises(PrismError, match="trace: AR, SE, ST.*--where"):
        read_step_times(path)
    assert read_step_times(path, where={"trace": "AR"}).seconds.size == 44


def test_mlperf_table_asks_until_one_system_is_left():
    pytest.importorskip("pyarrow")
    path = DATA / "mlperf" / "step_times.parquet"
    with pytest.raises(PrismError, match=r"t_s \[s\], step_s \[s\], dt_s \[s\]; choose one"):
        read_step_times(path)
    with pytest.raises(PrismError, match="system: .* and 20 more; benchmark: gpt3, llama31_405b"):
        read_step_times(path, "step_s")
    times = read_step_times(path, "step_s", {"system": "carina_ngpu1024_ngc25.04_nemo"})
    assert times.seconds.size == 1_080 and list(total_per_run(times)) == ["0", "1", "2"]
    with pytest.raises(PrismError, match="run 0 .*second total; .*--where .*system: "):
        read_totals(f"{DATA / 'mlperf' / 'runs.parquet'}:ttt_s")


def test_repeated_runs_and_their_totals():
    pytest.importorskip("pyarrow")
    times = read_step_times(DATA / "repeated_runs" / "step_deltas.parquet")
    sums = total_per_run(times)
    totals = read_totals(f"{DATA / 'repeated_runs' / 'runs.parquet'}:train_time_s")
    assert set(sums) == set(totals) and len(sums) == 78
    ratio = np.array([sums[run] / totals[run] for run in sums])
    assert (np.abs(ratio - 1.0) < 0.02).all()  # the host's clock against the synchronised one
    # each clock is set to zero once, at its 11th step
    assert "78 of 117,262 rows" in times.notes[0] and "delta_ms" in times.notes[0]


@pytest.mark.parametrize(
    ("name", "n", "mean_over", "first"),
    [
        ("megatron_gpt2_64gpu_interval1.log", 49, 1, 159.7789),
        ("megatron_interval10.log", 9, 10, 5.8379),
        ("mlperf_gpt3_4096gpu_run0.txt", 288, 1, 2.0385329723358154),
    ],
)
def test_logs(tmp_path, name, n, mean_over, first):
    times = read_step_times(DATA / "logs" / name)
    assert (times.seconds.size, times.mean_over) == (n, mean_over)
    assert times.seconds[0] == pytest.approx(first)
    assert list(times.step) == list(range(mean_over, mean_over * n + 1, mean_over))
    packed = tmp_path / "steps.csv"  # the name plays no part
    packed.write_bytes(gzip.compress((DATA / "logs" / name).read_bytes()))
    assert np.array_equal(read_step_times(packed).seconds, times.seconds)
