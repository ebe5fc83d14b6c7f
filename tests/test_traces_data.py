"""Measured recordings, where they are at hand: what show, replay and fit say of them."""

import gzip
import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from timing import least_seconds

import prism

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
JOBS, TRACES = DATA / "production_traces", DATA / "kineto_traces"

pytestmark = [
    pytest.mark.skipif(
        not DATA.is_dir(), reason=f"no measured data in {DATA}; set PRISM_DATA to its folder"
    ),
]


@pytest.fixture
def shown(run):
    """What `prism show` says of a file: its JSON, or the message of a refusal."""

    def show(path, *options):
        status, out, err = run("show", path, "--json", *options)
        assert status in (0, 2) and (status == 0) == bool(out), err
        return json.loads(out) if status == 0 else err

    return show


def spans_of(path):
    """Step times of the artifact's table [step: s]."""
    table = pd.read_csv(JOBS / "step_times.csv")
    mine = table[table["trace"] == path.stem.split("_")[1]]
    column = next(name for name in mine.columns if name.endswith("_s"))
    return dict(zip(mine["step"], mine[column], strict=True))


# ----------------------------------------------------------------------------- production traces
@pytest.mark.parametrize(
    ("job", "n_ops", "n_steps", "n_workers", "slowdown", "tolerance"),
    [("AR", 116_512, 44, 16, 1.973, 0.03), ("ST", 6_528, 32, 8, 1.179, 0.03),
     ("SE_first21", 51_072, 21, 64, 1.537, 0.05)],
)  # fmt: skip
def test_production_traces(shown, tmp_path, job, n_ops, n_steps, n_workers, slowdown, tolerance):
    pytest.importorskip("pyarrow")
    path = JOBS / f"ops_{job}.parquet"
    raw = pd.read_parquet(path)
    found = shown(path)
    assert (found["format"], found["notes"], found["n_ops"]) == ("pipeline", [], n_ops)
    assert (found["n_steps"], found["n_ranks"]) == (n_steps, n_workers)
    total = sum(row["n"] * row["mean"] for row in found["ops"])
    assert total == pytest.approx(raw["duration"].astype(float).sum())
    replay = prism.replay(path)
    measured = spans_of(path)
    assert replay["replayed_step_time"].values == pytest.approx(
        [measured[step] for step in replay["step"].values], rel=5e-4
    )
    assert found["step_span_mean"] == pytest.approx(
        np.mean([measured[step] for step in replay["step"].values]), rel=1e-4
    )
    summary = prism.summary(replay)
    assert abs(summary["mean_error"]) < 5e-4 and summary["max_abs_error"] < 5e-4
    assert summary["slowdown"] == pytest.approx(slowdown, rel=tolerance)  # the published ones
    if job == "AR":
        worst = max(summary["by_worker"], key=lambda w: w["slowdown"])
        assert (worst["dp_rank"], worst["stage"]) == (0, 0) and worst["slowdown"] > 1.4
    # one row in a hundred is lost
    raw = raw.sort_values(["step", "rank", "start_ts"], kind="stable")
    keep = np.random.default_rng(0).random(len(raw)) >= 0.01
    raw[keep].to_parquet(tmp_path / "lost")
    lost = prism.replay(tmp_path / "lost")["replayed_step_time"].values
    error = lost / replay["measured_step_time"].values - 1.0
    assert abs(error.mean()) < 0.005 and np.abs(error).max() < 0.06
    if job == "ST":  # a table of the same ops in text
        raw.to_csv(tmp_path / "ops.csv", index=False)
        again = shown(tmp_path / "ops.csv")
        assert again["n_ops"] == n_ops and again["step_span_mean"] == pytest.approx(
            found["step_span_mean"], rel=1e-6
        )


def test_reading_is_fast(run):
    pytest.importorskip("pyarrow")
    path = JOBS / "ops_AR.parquet"
    # 0.2 s; the least of three is short enough where any of them is
    assert any(least_seconds(lambda: run("show", path, "--json"), 1) < 2.0 for _ in range(3))


# ------------------------------------------------------------------------------------ step times
def test_tables_ask_until_one_job_is_left(shown):
    pytest.importorskip("pyarrow")
    times = JOBS / "step_times.csv"
    assert "trace: AR, SE, ST" in shown(times)
    assert shown(times, "--where", "trace=AR")["n"] == 44
    mlperf = DATA / "mlperf" / "step_times.parquet"
    assert "t_s [s], step_s [s], dt_s [s]" in shown(mlperf)
    chosen = ["--column", "step_s"]
    assert "and 20 more; benchmark: gpt3, llama31_405b" in shown(mlperf, *chosen)
    system = "system=carina_ngpu1024_ngc25.04_nemo"
    found = shown(mlperf, *chosen, "--where", system)
    assert (found["n"], found["n_runs"]) == (1_080, 3)
    raw = pd.read_parquet(mlperf)
    mine = raw.loc[raw["system"] == system.partition("=")[2], "step_s"]
    assert found["mean"] == pytest.approx(mine.mean())


def test_repeated_runs(shown):
    pytest.importorskip("pyarrow")
    path = DATA / "repeated_runs" / "step_deltas.parquet"
    found = shown(path, "--steps", ":40")
    assert found["n_runs"] == 78
    # each clock is set to zero once, at its 11th step
    assert any(note.startswith("78 of 117,262 ") for note in found["notes"])
    totals = pd.read_parquet(DATA / "repeated_runs" / "runs.parquet").set_index("run_id")
    for run in totals.index[:3]:  # the host's clock against the synchronised one
        found = shown(path, "--where", f"run_id={run}")
        total = totals.loc[run, "train_time_s"]
        assert found["n"] * found["mean"] == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize(
    ("name", "n", "mean_over", "first"),
    [
        ("megatron_gpt2_64gpu_interval1.log", 49, 1, 159.7789),
        ("megatron_interval10.log", 9, 10, 5.8379),
        ("mlperf_gpt3_4096gpu_run0.txt", 288, 1, 2.0385329723358154),
    ],
)
def test_logs(shown, tmp_path, name, n, mean_over, first):
    path = DATA / "logs" / name
    found = shown(path)
    assert (found["n"], found["mean_over"], found["n_runs"]) == (n, mean_over, 1)
    alone = shown(path, "--steps", f"1:{mean_over}")
    assert (alone["n"], alone["mean"]) == (1, pytest.approx(first))
    assert shown(path, "--steps", f"{mean_over * n}:")["n"] == 1
    packed = tmp_path / "steps.csv"  # the name plays no part
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert shown(packed)["mean"] == found["mean"]


# --------------------------------------------------------------------------------------- Kineto
PROFILES = {
    "step": ("training_step_a100",), "pair": ("pair_rank0", "pair_rank1"),
    "nccl": ("nccl_collectives",),
}  # fmt: skip


@cache
def replayed(name):
    return prism.replay([TRACES / f"{file}.json.gz" for file in PROFILES[name]])


@cache
def fitted(name):
    paths = [TRACES / f"{file}.json.gz" for file in PROFILES[name]]
    return prism.summary(prism.fit(paths, seed=1))


def by_kind(found):
    counts = {}
    for row in found["ops"]:
        counts[row["op_kind"]] = counts.get(row["op_kind"], 0) + row["n"]
    return counts


def test_profiles_are_whole(shown):
    found = shown(TRACES / "training_step_a100.json.gz")
    counts = by_kind(found)
    assert found["steps"] == [1009, 1014] and found["format"] == "kineto"
    assert sum(counts.values()) - counts["launch_gap"] == 8_568 + 228 + 654
    assert counts["all_to_all"] + counts["all_reduce"] == 60
    assert any("1 of 8 " in note and " 60 " in note for note in found["notes"])
    found = shown(TRACES / "nccl_collectives.json.gz")
    assert found["steps"] == [4, 6]
    assert sum(by_kind(found).get(kind, 0) for kind in ("all_reduce", "broadcast")) == 21
    refused = shown(TRACES / "no_distributed_info.json.gz")
    assert "no_distributed_info.json.gz: " in refused and "2,467" in refused  # host events alone


def test_files_of_a_pair_in_a_folder(shown, tmp_path, run):
    for file in PROFILES["pair"]:
        (tmp_path / f"{file}.json.gz").symlink_to(TRACES / f"{file}.json.gz")
    (tmp_path / "config.json").write_text('{"a": 1}')
    found = shown(tmp_path)
    assert found["n_ranks"] == 2 and any("config.json" in note for note in found["notes"])
    # all of NCCL's are called SendRecv: what launched them tells what they are
    counts = {kind: n for kind, n in by_kind(found).items() if kind.startswith("all_")}
    assert counts == {"all_to_all": 8, "all_reduce": 8, "all_gather": 4}
    # the traces hold a sample of the events: five collectives are in both
    rows = [row for row in fitted("pair")["kernels"] if row["op_kind"] in counts]
    n = {measure: sum(row["n"] for row in rows if row["measure"] == measure)
         for measure in ("transfer", "includes waiting")}  # fmt: skip
    assert n == {"transfer": 5, "includes waiting": 10}
    status, _, err = run("fit", tmp_path / "pair_rank0.json.gz", tmp_path / "config.json")
    assert status == 2 and "config.json" in err


@pytest.mark.parametrize(
    ("name", "mean", "cv"),
    [("step", 0.025, (0.6, 1.2)), ("nccl", 0.01, (0.5, 1.2)), ("pair", 0.01, (0.5, 1.2))],
)
def test_replays_and_models_of_profiles(name, mean, cv):
    found = prism.summary(replayed(name))
    assert found["max_abs_error"] < 0.03 and abs(found["mean_error"]) < 0.005
    assert len(found["gpu_spans"]) == found["steps"] * len(PROFILES[name])
    assert max(abs(row["error"]) for row in found["gpu_spans"]) < 0.03
    if name == "step":  # waits on collectives are inferred
        assert found["edges_inferred"] >= 12 and found["edges_recorded"] == 0
    fit = fitted(name)
    shares = [row["step_share"] for row in fit["kernels"]]
    assert np.isfinite(shares).all() and shares == sorted(shares, reverse=True)
    check = fit["cross_check"]
    assert abs(check["model"]["mean"] / check["measured"]["mean"] - 1.0) < mean
    if check["measured"]["n"] > 1:  # the pair's one period has no spread
        assert cv[0] < check["model"]["cv"] / check["measured"]["cv"] < cv[1]


def test_a_profile_cut_short_is_read_so_far(shown, tmp_path):
    data = gzip.decompress((TRACES / "pair_rank0.json.gz").read_bytes())
    (tmp_path / "whole.json").write_bytes(data)
    whole = shown(tmp_path / "whole.json")["n_ops"]
    for share in (0.61, 0.97):
        (tmp_path / "cut.json").write_bytes(data[: int(share * len(data))])
        found = shown(tmp_path / "cut.json")
        assert found["n_ranks"] == 1 and found["n_ops"] <= whole
        assert len(found["notes"]) > 1
