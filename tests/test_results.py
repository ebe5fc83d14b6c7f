"""Results: units, files, provenance, summaries, and the two kinds of spread."""

import json

import numpy as np
import pytest
import xarray as xr

import prism
from prism import show
from prism.data import data_path
from prism.errors import PrismError
from prism.estimate import estimate, reproduce
from prism.job import job_from_dict, load_job
from prism.resultfiles import KINDS, load, save
from prism.results import VARIABLES, job_of, make_dataset, spread, summary
from prism.sweep import sweep

RUN = {"steps": 500, "deadline": "17h", "start": "2026-01-05", "price": 2.5}


@pytest.fixture(scope="module")
def result():
    return estimate("pipeline-8x32", replicates=640, run_replicates=50, seed=4, threads=2, **RUN)


@pytest.fixture(scope="module")
def transformer_job():
    """A job with a model, a library, every effect and a layer split of its own accord."""
    return job_from_dict({
        "model": {"n_layers": 4, "hidden_size": 512, "ffn_size": 2048, "n_heads": 8,
                  "vocab_size": 8000, "seq_len": 1024},
        "parallelism": {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4, "data_parallel": "fsdp"},
        "cluster": {"nodes": 2, "gpus_per_node": 4, "node_slowdowns": {1: 1.1}},
        "variability": {"library": "h100-stressed", "effects": {
            "rank": {"cv": 0.02, "lemon_fraction": 0.1, "lemon_slowdown": [1.06, 1.2]}}},
        "run": {"steps": 100},
    }, "small")  # fmt: skip


def identical(a, b):
    """Check that two results hold the same bits; timings and the job's file may differ."""
    xr.testing.assert_identical(a.drop_attrs(deep=False), b.drop_attrs(deep=False))
    for name in set(a.attrs) - {"engine", "wall_seconds", "job"}:
        assert a.attrs[name] == b.attrs[name], name
    assert job_of(a) == job_of(b)


def test_every_variable_has_units_and_a_name(result, transformer_job):
    for dataset in (result, estimate(transformer_job, replicates=64, seed=1, threads=1)):
        for name, variable in dataset.data_vars.items():
            dims, units, long_name = VARIABLES[name]
            assert variable.dims == dims
            assert variable.attrs["units"] == units != "", name
            assert variable.attrs["long_name"] == long_name != "", name
            assert np.all(np.isfinite(variable))
    assert "mfu" in dataset and "mfu" not in result


def test_an_unlisted_variable_is_refused():
    with pytest.raises(KeyError):
        make_dataset({"step_tiem": 1.0}, {}, {})


def test_save_and_load(result, tmp_path):
    path = tmp_path / "result.nc"
    save(result, path)
    assert [p.name for p in tmp_path.iterdir()] == ["result.nc"]
    identical(result, load(path))
    assert summary(load(path)) == summary(result)


def test_loading_what_is_no_result(tmp_path):
    with pytest.raises(PrismError, match="no such result"):
        load(tmp_path / "nothing.nc")
    (tmp_path / "text.nc").write_text("step_time\n1.0\n")
    with pytest.raises(PrismError, match="cannot be read"):
        load(tmp_path / "text.nc")
    xr.Dataset({"x": 1.0}).to_netcdf(tmp_path / "other.nc", engine="h5netcdf")
    with pytest.raises(PrismError, match="not a prism result"):
        load(tmp_path / "other.nc")
    foreign = xr.Dataset({"x": 1.0}, attrs={"kind": "weather"})
    foreign.to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    with pytest.raises(PrismError, match="not a prism result"):
        load(tmp_path / "foreign.nc")
    with pytest.raises(PrismError, match="load_library"):
        load(data_path("distributions") / "h100-healthy.nc")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PrismError, match=r"empty/result\.nc: no such result"):
        load(tmp_path / "empty")


def test_whatever_a_command_writes_is_loaded(tmp_path):
    assert set(KINDS) == set(show._MODELS) | set(show._RESULTS) - {"ranking"}
    for kind in KINDS:
        made = xr.Dataset({"x": 1.0}, attrs={"kind": kind})
        save(made, tmp_path / "result.nc")
        xr.testing.assert_identical(made, load(tmp_path / "result.nc"))
        xr.testing.assert_identical(made, load(tmp_path))


def test_a_result_reproduces_itself(result, tmp_path):
    save(result, tmp_path / "result.nc")
    identical(result, reproduce(load(tmp_path / "result.nc"), threads=1))


def test_a_result_of_a_model_reproduces_itself(transformer_job):
    first = estimate(transformer_job, replicates=100, run_replicates=10, threads=2)
    again = reproduce(first, threads=1)
    identical(first, again)
    assert job_of(first) == transformer_job
    other = reproduce(first.assign_attrs(call=json.dumps(
        json.loads(first.attrs["call"]) | {"seed": 1})), threads=1)  # fmt: skip
    assert not np.any(other.step_time.values == first.step_time.values)


@pytest.mark.parametrize(
    "values",
    [
        {
            "model": {"durations": {"forward_s": [1.0, 2.0], "backward_s": 2.0}},
            "parallelism": {"pp": 2, "microbatches": 2},
            "variability": {"library": None},
        },
        {
            "model": {"name": "llama3-8b"},
            "parallelism": {"pp": 2, "microbatches": 2, "layer_split": [17, 15]},
            "cluster": {"nodes": 1, "gpus_per_node": 2},
        },
    ],
)
def test_lists_in_a_job_survive(values):
    """Durations per stage and a layer split are written and read again without a complaint."""
    first = estimate(job_from_dict(values), replicates=1, run_replicates=1, seed=0)
    identical(first, reproduce(first))


@pytest.mark.parametrize("start", ["2026-01-05", "2026-01-05T12:00:00"])
def test_the_job_s_own_run_block_is_kept(start):
    job = load_job("pipeline-8x32", [f"run.start={start}", "run.price_per_gpu_hour=2"])
    first = estimate(job, replicates=64, run_replicates=4, seed=0)
    identical(first, reproduce(first))
    assert summary(first)["finish_date"]["date"].startswith("2026-01-0")


def test_provenance(result):
    attrs = result.attrs
    assert attrs["schema"] >= 1 and attrs["prism_version"] == prism.__version__
    assert {"numpy", "numba", "xarray"} <= set(json.loads(attrs["versions"]))
    assert attrs["seed"] == "4" and json.loads(attrs["call"])["seed"] == 4
    assert json.loads(attrs["job"])["parallelism"]["pp"] == 8
    fresh = [estimate("pipeline-8x32", replicates=1, run_replicates=1).attrs["seed"] for _ in "ab"]
    assert fresh[0] != fresh[1]


SPREAD = {
    "mean", "std", "cv", "p5", "p50", "p90", "p95", "p99", "mean_se", "p95_ci",
    "within_cluster_std", "between_cluster_std",
}  # fmt: skip


def test_summary_has_the_keys_of_the_interface(result, transformer_job):
    answer = json.loads(json.dumps(summary(result)))
    always = {
        "job", "seed", "replicates", "run_replicates", "world_size", "ideal_step_time",
        "step_time", "time_to_train", "slowdown", "exposed_communication", "engine",
        "wall_seconds", "warnings", "steps",
    }  # fmt: skip
    always |= {"delay_by_term", "variance_by_term", "replicas"}
    assert always | {"finish_by", "finish_date", "cost"} == set(answer)
    assert set(answer["step_time"]) == set(answer["time_to_train"]) == SPREAD
    assert set(answer["slowdown"]) == {"1.05", "1.1", "1.2"}
    assert set(answer["finish_by"]) == {"deadline", "probability"}
    assert set(answer["finish_date"]) == {"probability", "date"}
    assert set(answer["engine"]) == {"op_samples", "seconds", "ns_per_op_sample", "threads"}
    assert (answer["job"], answer["seed"], answer["world_size"]) == ("pipeline-8x32", 4, 8)
    model = summary(estimate(transformer_job, replicates=64, seed=1))
    assert always | {"mfu", "model_flops_per_gpu", "memory"} == set(model)


def test_summary_says_what_the_arrays_say(result):
    answer = summary(result)
    runs = result.time_to_train.values
    assert answer["ideal_step_time"] == 117.0
    assert answer["slowdown"]["1.05"] == float((result.step_time > 1.05 * 117).mean())
    assert answer["finish_by"]["deadline"] == 17 * 3600.0
    assert answer["finish_by"]["probability"] == float((runs <= 17 * 3600).mean())
    date = np.datetime64("2026-01-05") + np.timedelta64(round(1e6 * np.quantile(runs, 0.9)), "us")
    assert abs(np.datetime64(answer["finish_date"]["date"]) - date) <= np.timedelta64(1, "s")
    assert answer["cost"]["mean"] == pytest.approx(runs.mean() / 3600 * 8 * 2.5)
    assert answer["step_time"]["p95"] == np.quantile(result.step_time, 0.95)
    assert answer["engine"]["op_samples"] == 8 * 64 * 640
    share = result.critical_path_time / result.critical_path_time.sum()
    assert share.sel(kernel_class="compute") == 1.0 and answer["exposed_communication"] == 0.0


def test_reference_pipeline():
    """8 stages, 32 microbatches, 5 %: mean 120.585 s, std 0.52 s, p99 121.82 s, ideal 117 s."""
    answer = summary(estimate("pipeline-8x32", replicates=200_000, run_replicates=1, seed=12))
    steps = answer["step_time"]
    assert answer["ideal_step_time"] == 117.0
    assert steps["mean"] == pytest.approx(120.585, abs=0.02)
    assert steps["std"] == pytest.approx(0.52, abs=0.01)
    assert steps["p99"] == pytest.approx(121.82, abs=0.05)
    # nothing persists, so clusters do not differ and the error is that of independent steps
    assert steps["between_cluster_std"] < 0.03
    assert steps["mean_se"] == pytest.approx(steps["std"] / 200_000**0.5, rel=0.1)


# -- spread ----------------------------------------------------------------------------------

BETWEEN, WITHIN = 0.3, 0.5


def nested(n_clusters, size, seed):
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(n_clusters), size)
    values = 10 + BETWEEN * rng.standard_normal(n_clusters)[cluster]
    return values + WITHIN * rng.standard_normal(cluster.size), cluster


def test_spread_recovers_both_parts():
    values, cluster = nested(2000, 64, 1)
    order = np.random.default_rng(2).permutation(values.size)
    for v, c in ((values, cluster), (values[order], cluster[order]), (values, cluster + 7)):
        answer = spread(v, c)
        means_error = np.hypot(BETWEEN, WITHIN / 8) ** 2 / BETWEEN / np.sqrt(2 * 2000)
        assert abs(answer["between_cluster_std"] - BETWEEN) < 5 * means_error
        assert abs(answer["within_cluster_std"] - WITHIN) < 5 * WITHIN / np.sqrt(2 * v.size)
        assert answer["std"] == pytest.approx(np.hypot(BETWEEN, WITHIN), rel=0.05)
    wrong = spread(values * 1.08, cluster)  # negative control
    assert abs(wrong["between_cluster_std"] - BETWEEN) > 4 * means_error
    assert abs(wrong["within_cluster_std"] - WITHIN) > 5 * WITHIN / np.sqrt(2 * values.size)


def test_spread_with_an_incomplete_cluster():
    values, cluster = nested(300, 64, 3)
    answer = spread(values[:-40], cluster[:-40])
    whole = spread(values, cluster)
    for name in ("between_cluster_std", "within_cluster_std", "mean_se"):
        assert answer[name] == pytest.approx(whole[name], rel=0.02)


def test_errors_by_cluster_cover_and_independent_ones_do_not():
    hit, missed, covered = [], [], []
    true_p95 = 10 + 1.6448536 * np.hypot(BETWEEN, WITHIN)
    for seed in range(300):
        values, cluster = nested(40, 64, seed)
        counts = np.unique(cluster, return_counts=True)[1]
        means = np.bincount(cluster, values) / counts
        answer = spread(values, cluster) if seed < 60 else None
        error = means.std(ddof=1) / 40**0.5
        if answer is not None:
            assert answer["mean_se"] == pytest.approx(error, rel=1e-9)
            covered.append(answer["p95_ci"][0] <= true_p95 <= answer["p95_ci"][1])
        hit.append(abs(values.mean() - 10) < 1.96 * error)
        missed.append(abs(values.mean() - 10) < 1.96 * values.std() / values.size**0.5)
    assert abs(np.mean(hit) - 0.945) < 5 * (0.945 * 0.055 / 300) ** 0.5  # Student's t, 39 dof
    assert np.mean(missed) < 0.6
    assert np.mean(covered) > 0.95 - 5 * (0.05 * 0.95 / 60) ** 0.5


def test_spread_of_one_cluster_and_one_value():
    answer = spread(np.array([1.0, 2.0, 3.0]), np.zeros(3, np.int64))
    assert answer["between_cluster_std"] == 0.0 and answer["within_cluster_std"] == 1.0
    assert answer["mean_se"] == pytest.approx(1 / 3**0.5)
    one = spread(np.array([2.0]), np.zeros(1, np.int64))
    assert (one["mean"], one["std"], one["mean_se"], one["p99"]) == (2.0, 0.0, 0.0, 2.0)


def test_the_summary_of_another_kind_is_refused():
    swept = sweep("pipeline-8x32", {"parallelism.microbatches": [8, 16]}, replicates=64, seed=1)
    with pytest.raises(PrismError, match="a sweep is no estimate"):
        summary(swept)
