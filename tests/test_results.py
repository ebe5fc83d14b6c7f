"""Results: units, files, provenance, summaries, and the two kinds of spread."""

import inspect
import io
import json
import math
import re
from importlib import import_module

import numpy as np
import pytest
import xarray as xr
from rich.console import Console

import prism
from prism.analyses.estimate import estimate, reproduce
from prism.analyses.place import place
from prism.analyses.rank import rank
from prism.analyses.sweep import sweep
from prism.analyses.validate import validate
from prism.cli.commands.estimate import estimate as command
from prism.cluster import nccl
from prism.common.errors import PrismError, as_typed
from prism.common.resultfiles import KINDS, kind_of, load, save, summary
from prism.common.shipped import data_path
from prism.jobs.job import job_from_dict, load_job
from prism.present.answers.estimate import terms_table
from prism.present.reports.estimates import summary_table
from prism.present.reports.inputs import inputs_of
from prism.present.terminal import render
from prism.simulation.execution.content import identity
from prism.simulation.results import VARIABLES, job_of, made_with, make_dataset
from prism.simulation.steps import simulate
from prism.simulation.summary import apart, spread
from prism.simulation.variability import is_communication
from prism.workload import memory
from prism.workload.memory import estimate_memory

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
    for dataset in (result, estimate(transformer_job, replicates=128, seed=1, threads=1)):
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


def test_what_is_shown_was_saved(transformer_job, tmp_path, run, monkeypatch):
    """Not estimated anew by a version whose constants, device or library are others."""
    made = estimate(transformer_job, replicates=128, run_replicates=8, seed=1)
    before = summary(made)
    assert before["memory"]["gib"] == estimate_memory(transformer_job).gib
    save(made, tmp_path / "result.nc")

    def said(folder):
        shown = json.loads(run("show", folder / "result.nc", "--json")[1])
        assert run("report", folder, "-o", folder / "page.html", "-q")[0] == 0
        page = (folder / "page.html").read_text()
        compared = json.loads(run("compare", folder, folder, "--seed", 1, "--json")[1])
        return shown, page, compared

    first = said(tmp_path)
    for name, value in {"ADAM_BYTES": 9e3, "ERROR": 0.01, "ERROR_STD": 0.01,
                        "DRIVER_SHARE": 0.5}.items():  # fmt: skip
        monkeypatch.setattr(memory, name, value)
    assert estimate_memory(transformer_job).gib > before["memory"]["gib"] + 10
    monkeypatch.setattr("prism.jobs.job.Job.tokens_per_step", 1)
    monkeypatch.setattr("prism.jobs.job.Job.world_size", 1)
    assert summary(load(tmp_path)) == before
    assert said(tmp_path) == first
    # of a version that saved no memory none is shown
    older = made.copy()
    del older.attrs["job_figures"]
    assert "memory" not in summary(older)


def test_entries_of_a_library_that_changed_are_not_listed(tmp_path):
    made = estimate("llama3-70b-fsdp-512", replicates=64, run_replicates=4, seed=1)
    assert inputs_of(made).library
    found = inputs_of(made.assign_attrs(library_sha256="0" * 64))
    assert found.library == () and "h100-healthy" in found.notes[-1]


def test_loading_what_is_no_result(tmp_path):
    (tmp_path / "text.nc").write_text("step_time\n1.0\n")
    plain = xr.Dataset({"x": 1.0})
    plain.to_netcdf(tmp_path / "other.nc", engine="h5netcdf")
    plain.assign_attrs(kind="weather").to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("nothing.nc", "nothing.nc: no such"), ("text.nc", "text.nc: .*read"),
        ("other.nc", "other.nc: .* not "), ("foreign.nc", "foreign.nc: .* not "),
        ("empty", "empty/result.nc: no such"),
    ):  # fmt: skip
        with pytest.raises(PrismError, match=words):
            load(tmp_path / name)
    with pytest.raises(PrismError, match="load_library"):
        load(data_path("distributions") / "h100-healthy.nc")


def test_whatever_a_command_writes_is_loaded(tmp_path):
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
    "within_cluster_std", "between_cluster_std", "mean_ci90", "between_cluster_at_most",
    "cluster_draws",
}  # fmt: skip


def test_summary_has_the_keys_of_the_interface(result, transformer_job):
    answer = json.loads(json.dumps(summary(result)))
    always = {
        "job", "seed", "replicates", "run_replicates", "world_size", "ideal_step_time",
        "step_time", "time_to_train", "slowdown", "exposed_communication",
        "exposed_communication_se", "engine", "wall_seconds", "warnings", "steps",
    }  # fmt: skip
    always |= {
        "delay_by_term",
        "delay_by_term_se",
        "variance_by_term",
        "variance_by_term_se",
        "replicas",
        "critical_path",
        "findings",
        "time_loss",
    }
    always |= {"failure_model"}
    assert always | {"finish_by", "finish_date", "cost"} == set(answer)
    assert set(answer["time_to_train"]) == SPREAD
    assert set(answer["step_time"]) == SPREAD | {"one_allocation", "allocations"}
    assert set(answer["slowdown"]) == {"1.05", "1.1", "1.2"}
    assert set(answer["finish_by"]) == {"deadline", "probability"}
    assert set(answer["finish_date"]) == {"probability", "date"}
    assert set(answer["engine"]) == {"op_samples", "seconds", "ns_per_op_sample", "threads"}
    assert (answer["job"], answer["seed"], answer["world_size"]) == ("pipeline-8x32", 4, 8)
    model = summary(estimate(transformer_job, replicates=64, seed=1))
    rates = {"global_batch", "tokens_per_step", "tokens_per_s", "tokens_per_s_per_gpu"}
    assert always | rates | {
        "mfu",
        "model_flops_per_gpu",
        "memory",
        "model_error",
        "energy",
        *("ettr", "failures", "checkpoint"),  # of the failures that a job has by default
    } == set(model)
    p, tokens = transformer_job.parallelism, model["tokens_per_step"]
    assert model["global_batch"] == p.dp * p.microbatches * p.microbatch_size
    assert tokens == model["global_batch"] * transformer_job.model.seq_len
    assert model["tokens_per_s"] == pytest.approx(tokens / model["step_time"]["mean"])
    assert model["tokens_per_s_per_gpu"] * transformer_job.world_size == model["tokens_per_s"]


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


BANDWIDTHS = (20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


def linked_job(layout, network=None, nvlink=None, **variability):
    """Build a small job with every effect that acts on communication, over given links."""
    given = {"network": network, "nvlink": nvlink}
    return job_from_dict({
        "model": {"n_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 8,
                  "vocab_size": 4096, "seq_len": 1024},
        "parallelism": {"microbatches": 2, "data_parallel": "fsdp"} | layout,
        "cluster": {"nodes": 4, "gpus_per_node": 4, "nvlink_domain_gpus": 4, "leaf_nodes": 1,
                    "node_slowdowns": {1: {"network": 1.5}},
                    "links": {name: link for name, link in given.items() if link}},
        "variability": {"library": None, **variability, "effects": {
            "rank": {"cv": 0.02}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.05},
            "residual": {"law": "gamma", "cv": 0.05}, "regime": {"probability": 0.1, "factor": 2.0},
        }},
    })  # fmt: skip


def free_links(layout, **variability):
    """Simulate the same job over links that take no time; mean of its first 256 steps [s]."""
    free = {"bandwidth_gbytes_per_s": 1e15, "latency_us": 0.0}
    job = linked_job(layout, free, free, **variability)
    with pytest.MonkeyPatch.context() as patch:  # nor do NCCL's own beginnings
        for name in ("RINGS", "TREES"):
            at_once = tuple(p._replace(base_s=0.0, most_bytes_per_s=math.inf)
                            for p in getattr(nccl, name))  # fmt: skip
            patch.setattr(nccl, name, at_once)
        patch.setattr(nccl, "PAT", nccl.PAT._replace(base_s=0.0))
        return float(simulate(job, 256, seed=3).step_time.mean())


def test_exposed_communication_over_bandwidths():
    """The step less that over free links; more bandwidth never exposes more."""
    layout = {"dp": 16}
    rest, found = free_links(layout), []
    for bandwidth in BANDWIDTHS:
        network = {"bandwidth_gbytes_per_s": bandwidth, "latency_us": 5.0}
        drawn = simulate(linked_job(layout, network), 256, seed=3)
        share, error = float(drawn.exposed_communication), float(drawn.exposed_communication_se)
        assert share == pytest.approx(1.0 - rest / float(drawn.step_time.mean()), abs=1e-6)
        assert 0.0 < error < 0.01
        found.append(share)
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.75 and found[-1] < 0.55  # what is left are the steps of rings


@pytest.mark.usefixtures("small_pools")
@pytest.mark.parametrize(
    ("layout", "variability"),
    [
        ({"tp": 2, "pp": 2, "dp": 4, "data_parallel": "ddp"}, {}),
        ({"tp": 2, "pp": 2, "dp": 4}, {"resolution": "kernel"}),
        ({"tp": 2, "pp": 2, "dp": 4}, {"dependence": "none"}),
        ({"dp": 16, "data_parallel": "hsdp", "shard_size": 4}, {}),
    ],
)
def test_exposed_communication_is_what_free_links_save(layout, variability):
    drawn = simulate(linked_job(layout, **variability), 256, seed=3)
    saved = 1.0 - free_links(layout, **variability) / float(drawn.step_time.mean())
    assert float(drawn.exposed_communication) == pytest.approx(saved, abs=1e-3)
    path = drawn.critical_path_time
    on_path = float(path.values[[is_communication(c) for c in path.kernel_class.values]].sum())
    assert 0.0 < saved  # elsewhere on the path ranks would wait for compute
    more = 1.01 if variability.get("dependence") == "none" else 1.0  # there both differ by chance
    assert saved < more * on_path / float(path.sum())


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
    assert answer["within_cluster_std"] == 1.0
    one = spread(np.array([2.0]), np.zeros(1, np.int64))
    assert (one["mean"], one["std"], one["p99"]) == (2.0, 0.0, 2.0)
    for found in (answer, one):
        unknown = ("mean_se", "mean_ci90", "p95_ci", "between_cluster_std")
        assert all(found[key] is None for key in unknown) and found["cluster_draws"] == 1


@pytest.mark.parametrize("n_clusters", [4, 16, 64])
def test_stated_intervals_of_the_mean_cover(n_clusters):
    """90 % of 200 seeds, with three standard errors; normal quantiles would miss with few draws."""
    found = [spread(*nested(n_clusters, 64, seed)) for seed in range(200)]
    covered = np.mean([f["mean_ci90"][0] <= 10.0 <= f["mean_ci90"][1] for f in found])
    assert 0.85 <= covered <= 0.95
    normal = np.mean([abs(f["mean"] - 10.0) <= 1.645 * f["mean_se"] for f in found])
    assert normal < 0.85 or n_clusters > 4


def test_a_spread_between_clusters_that_is_noise_is_said_to_be():
    """16 draws that do not differ: noise in nine of ten cases at least, and bounded from above."""
    rng, cluster = np.random.default_rng(7), np.repeat(np.arange(16), 64)
    found = [spread(10.0 + rng.standard_normal(1024), cluster) for _ in range(100)]
    at_most = [f["between_cluster_at_most"] for f in found]
    assert sum(bound is not None for bound in at_most) >= 90
    assert all(bound > f["between_cluster_std"] for bound, f in zip(at_most, found, strict=True)
               if bound is not None)  # fmt: skip
    assert spread(*nested(16, 64, 1))["between_cluster_at_most"] is None
    values = np.random.default_rng(2).standard_normal(30)
    alone = spread(values, np.arange(30))  # one value each: all of it is between them
    assert alone["between_cluster_std"] == pytest.approx(values.std(ddof=1))


RANKS = {
    "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
    "parallelism": {"pp": 2, "microbatches": 4},
    "variability": {
        "library": None,
        "effects": {"rank": {"cv": 0.02}, "step": {"cv": 0.05}, "residual": {"cv": 0.01}},
    },
}


def texts_of(result):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(prism.answer(result), details=True))
    return console.export_text()


def test_what_one_cluster_draw_does_not_tell_is_null():
    one = estimate(job_from_dict(RANKS), replicates=64, steps=1000, seed=3)
    answer = json.loads(json.dumps(summary(one)))
    for name in ("step_time", "time_to_train"):
        found = answer[name]
        assert found["cluster_draws"] == 1 and found["within_cluster_std"] > 0.0
        for key in ("mean_se", "mean_ci90", "p95_ci", "between_cluster_std"):
            assert found[key] is None
    answer = prism.answer(one)
    told = [texts_of(one), str(summary_table({"one": answer.figures}))]
    told += [*(found.text for found in answer.findings), answer.pictures[0].errors.monte_carlo]
    assert not any("nan" in text or "None" in text for text in told)
    two = summary(estimate(job_from_dict(RANKS), replicates=128, steps=1000, seed=3))
    assert two["step_time"]["mean_se"] > 0.0 and two["time_to_train"]["mean_se"] > 0.0


def test_clusters_differ_as_much_in_runs_as_in_steps():
    """Runs rest on their clusters' mean steps, less the noise of these."""
    for replicates in (1024, 6400):
        found = summary(estimate(job_from_dict(RANKS), replicates=replicates, steps=10**6, seed=5))
        step, run = found["step_time"], found["time_to_train"]
        scale = run["mean"] / step["mean"]
        assert run["between_cluster_std"] == pytest.approx(
            scale * step["between_cluster_std"], rel=0.02
        )
        parts = (run["within_cluster_std"] ** 2 + run["between_cluster_std"] ** 2) ** 0.5
        assert run["std"] == pytest.approx(parts, rel=0.6 / run["cluster_draws"])
    alike = RANKS | {"variability": {"library": None, "effects": {"residual": {"cv": 0.05}}}}
    found = summary(estimate(job_from_dict(alike), replicates=1024, steps=10**6, seed=1))
    for name in ("step_time", "time_to_train"):
        assert found[name]["between_cluster_at_most"] > found[name]["between_cluster_std"]


def test_a_run_that_nobody_asked_for_is_left_out():
    job = job_from_dict(RANKS)
    steps = estimate(job, replicates=128, seed=1)
    answer = summary(steps)
    assert not {"time_to_train", "run_replicates", "steps", "delay_by_term"} & set(answer)
    assert set(answer["slowdown"]) == {"1.05", "1.1", "1.2"}
    assert "run_replicate" not in steps.sizes and "Run" not in texts_of(steps).split()
    identical(steps, reproduce(steps))
    for asked in ({"steps": 50}, {"deadline": "1h"}, {"run_replicates": 10}, {"price": 1.0}):
        assert "time_to_train" in summary(estimate(job, replicates=128, seed=1, **asked))
    for said in ({"steps": 50}, {"deadline": "1h"}, {"start": "2026-01-05"}):
        whole = job_from_dict(RANKS | {"run": said})
        assert "time_to_train" in summary(estimate(whole, replicates=128, seed=1))


@pytest.mark.parametrize("between", [0.5, 0.0])
def test_one_allocation_and_which_allocation_are_told_apart(between) -> None:
    """Steps are normal about their allocation's mean, and so are the means."""
    rng = np.random.default_rng(1)
    draws, each, within = 800, 64, 0.1
    means = 10.0 + between * rng.standard_normal(draws)
    steps = np.repeat(means, each) + within * rng.standard_normal(draws * each)
    data = xr.Dataset({
        "step_time": ("replicate", steps), "step_effect": ("replicate", np.ones(steps.size)),
        "cluster_idx": ("replicate", np.repeat(np.arange(draws), each)),
    })  # fmt: skip
    one, allocations = apart(data)
    assert one.mean() == pytest.approx(steps.mean()) == pytest.approx(allocations.mean())
    tails = np.quantile(one, [0.05, 0.95]) - one.mean()
    np.testing.assert_allclose(tails, [-1.645 * within, 1.645 * within], rtol=0.03)
    tails = np.quantile(allocations, [0.05, 0.95]) - one.mean()
    np.testing.assert_allclose(tails, [-1.645 * between, 1.645 * between], rtol=0.1, atol=0.006)


def test_few_allocations_do_not_tell_how_they_differ() -> None:
    job = load_job("llama3-70b-fsdp-512", ["model.n_layers=2"])
    assert summary(simulate(job, 640, seed=1))["step_time"]["allocations"] is None
    step = summary(simulate(job, 12_800, seed=1))["step_time"]
    assert step["allocations"]["p5"] < step["p50"] < step["allocations"]["p95"]
    assert step["one_allocation"]["p95"] < step["p95"]


def test_error_of_the_model_widens_runs_and_not_steps() -> None:
    job = job_from_dict(RANKS | {"run": {"steps": 2500}})
    asked = {"replicates": 640, "run_replicates": 4_000, "seed": 1}
    right, none = (
        summary(estimate(job.replace(*sets), **asked))
        for sets in ([], ["variability.model_error=0"])
    )
    deadline = 1.03 * right["time_to_train"]["p50"]
    unsure = job.replace("variability.model_error=0.06")
    wrong = summary(estimate(unsure, **asked, deadline=deadline))
    assert right == none | {k: right[k] for k in ("engine", "wall_seconds")}
    assert "model_error" not in right
    assert wrong["step_time"] == right["step_time"]
    assert wrong["model_error"] == {
        "spread": 0.06, "class": "", "source": "variability.model_error"
    }  # fmt: skip
    run, calm = wrong["time_to_train"], right["time_to_train"]
    assert run["model_error_std"] == pytest.approx(0.06 * calm["mean"], rel=0.05)
    parts = ("within_cluster_std", "between_cluster_std", "model_error_std")
    assert run["std"] ** 2 == pytest.approx(sum(run[k] ** 2 for k in parts))
    for key in parts[:2]:
        assert run[key] == pytest.approx(calm[key], rel=0.02)
    assert run["p95"] / run["p50"] == pytest.approx(np.exp(1.645 * run["cv"]), rel=0.02)
    assert run["cv"] > 0.06
    assert run["p95_ci"][0] < run["p95"] < run["p95_ci"][1]
    assert wrong["variance_by_term"]["model_error"] > 0.7
    assert 0.2 < wrong["finish_by"]["probability"] < 0.8


def test_the_default_is_enough_for_what_is_printed():
    result = estimate("pipeline-8x32", seed=1)
    assert summary(result)["warnings"] == []
    (line,) = [line for line in texts_of(result).splitlines() if line.startswith("p99")]
    assert len(line.split()) == 3  # of the step alone: 200 draws do not tell that of the run
    options = {option.name: option.default for option in command.params}
    assert options["replicates"] == inspect.signature(estimate).parameters["replicates"].default
    few = summary(estimate("pipeline-8x32", replicates=6400, seed=1))["warnings"]
    assert ["12800" in text for text in few] == [True]
    late = estimate("pipeline-8x32", start="2026-01-05", probability=0.99, seed=1)
    assert ["64000" in text for text in summary(late)["warnings"]] == [True]


def test_terms_that_do_not_matter_have_no_row():
    numbers = {
        "time_to_train": {"mean": 1e6},
        "delay_by_term": {"slow_steps": 1e5, "drift": -0.232, "stalls": 2.0, "step_noise": 50.0},
        "variance_by_term": {"slow_steps": 0.9, "drift": 1e-5, "stalls": 0.1, "step_noise": 0.0},
    }
    assert len(terms_table(numbers).rows) == 2
    assert not terms_table(numbers | {"delay_by_term": {"drift": -0.232}}).rows
    assert not terms_table(numbers | {"delay_by_term": {}}).rows


def test_a_figure_within_its_error_is_zero():
    """As written; JSON and the cell keep the number."""
    terms = {"slow_steps": -0.546, "model_error": 2805.0, "lost_work": 9000.0}
    numbers = {
        "time_to_train": {"mean": 1e5, "cluster_draws": 1000},
        "delay_by_term": terms,
        "delay_by_term_se": {"slow_steps": 300.0, "model_error": 5760.0, "lost_work": 60.0},
        "variance_by_term": {"slow_steps": -0.0018, "model_error": 0.7, "lost_work": 0.3},
        "variance_by_term_se": dict.fromkeys(terms, 0.02),
    }
    for row, seconds in zip(terms_table(numbers).rows, terms.values(), strict=True):
        late, share, varies = row[1:]
        assert late.value == seconds and "±" in late.text and "±" in share.text
        if seconds < 9000.0:
            assert late.text.startswith("0 ±") and share.text.startswith("0 ±")
        else:
            assert not late.text.startswith("0")
        assert ("0 ± 4 %" == varies.text) == (varies.value == -0.0018)
    sure = numbers | {"delay_by_term_se": dict.fromkeys(terms, 1e-9)}
    assert "±" not in terms_table(sure).rows[-1][1].text


def test_numbers_agree_with_their_nouns_and_units_fit():
    job = job_from_dict({
        "model": {"n_layers": 2, "hidden_size": 512, "n_heads": 4, "ffn_size": 2048, "seq_len": 512,
                  "vocab_size": 8000},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "h100"},
        "variability": {"library": "h100-healthy"}, "run": {"steps": 1},
    })  # fmt: skip
    text = texts_of(estimate(job, replicates=64, run_replicates=1, seed=1))
    assert re.search(r"\b1 GPU\b", text) and re.search(r"\b1 step\b", text)
    plurals = r"(GPU|step|run|node|draw|replicate|sequence|token|cluster draw|thread)s\b"
    assert not re.search(rf"(?<![\d.,])1 (\w+ )?{plurals}", text)
    assert re.search(r"\d J\b", text) and not re.search(r"\de-\d", text)


def made(kind):
    """A small result of a kind of simulated result."""
    job, small = "pipeline-8x32", {"parallelism": {"pp": 2, "microbatches": 2, "dp": 2}}
    varied = {"base": job, **small, "variability": {"effects": {"rank": {"cv": 0.01}}}}
    return {
        "simulation": lambda: prism.simulate(job, 64, seed=1),
        "estimate": lambda: estimate(job, replicates=64, run_replicates=4, seed=1),
        "ranking": lambda: rank(load_job(varied), seed=1),
        "sweep": lambda: sweep(job, {"run.steps": [1, 2]}, replicates=64, seed=1),
        "timeline": lambda: prism.timeline(job, replicates=64, seed=1),
    }[kind]()


@pytest.mark.parametrize("kind", ["simulation", "estimate", "ranking", "sweep", "timeline"])
def test_every_result_says_its_kind_and_has_a_summary(run, tmp_path, kind):
    result = made(kind)
    assert result.attrs["kind"] == kind and kind_of(result) == kind
    figures = summary(result)
    assert prism.summary(result) == figures and figures["seed"] == 1
    save(result, tmp_path / "result.nc")
    status, out, _ = run("show", tmp_path / "result.nc", "--json")
    shown = json.loads(out)
    assert status == 0 and shown["kind"] == {"simulation": "result", "estimate": "result"}.get(
        kind, kind
    )
    assert shown["summary"].keys() == figures.keys()
    assert run("show", tmp_path / "result.nc")[0] == 0
    old = result.drop_attrs(deep=False).assign_attrs(
        {k: v for k, v in result.attrs.items() if k != "kind"}
    )
    assert kind_of(old) == (kind if kind in ("simulation", "estimate", "ranking") else None)


def test_a_result_is_no_job_and_what_is_no_result_has_no_summary(result, tmp_path):
    save(result, tmp_path / "result.nc")
    with pytest.raises(PrismError, match=r"result\.nc: .*YAML job"):
        load_job(tmp_path / "result.nc")
    for other in (xr.Dataset({"x": 1.0}), xr.Dataset(attrs={"kind": "weather"})):
        with pytest.raises(PrismError, match="no result"):
            summary(other)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_functions(kind):
    module, _, name = KINDS[kind].maker.partition(":")
    assert callable(getattr(import_module(f"prism.present.answers.{module}"), name))


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicates": 100.5}, {"replicates": 0}, {"replicates": "64"}, {"run_replicates": 2.5},
        {"steps": 2.5}, {"probability": "0.9"}, {"probability": 1.0}, {"price": float("nan")},
        {"start": "tomorrow"}, {"deadline": "soon"}, {"threads": 1.5}, {"threads": 0},
        {"seed": -1}, {"seed": "a"}, {"slowdown_thresholds": [0.5]},
    ],
)  # fmt: skip
def test_bad_arguments_are_named_as_their_caller_names_them(wrong):
    (name,) = wrong
    call = {"replicates": 64, "run_replicates": 4, "seed": 1} | wrong
    with pytest.raises(PrismError, match=f"^{name}\\b"):
        estimate("pipeline-8x32", **call)
    with as_typed(), pytest.raises(PrismError, match=f"^--{name.replace('_', '-')}\\b"):
        estimate("pipeline-8x32", **call)


def test_whatever_takes_a_job_takes_a_mapping():
    values = {"base": "pipeline-8x32", "run": {"steps": 3}}
    drawn = estimate(values, replicates=64, run_replicates=4, seed=1)
    named = estimate(load_job("pipeline-8x32", {"run.steps": 3}), replicates=64, run_replicates=4,
                     seed=1)  # fmt: skip
    assert np.array_equal(drawn.step_time, named.step_time)
    for call in (estimate, rank, place, sweep, validate):
        with pytest.raises(PrismError, match="^job: "):
            call(3, **({"measured": "x.csv"} if call is validate else {}))


def test_provenance_names_the_sources_in_a_checkout_a_worktree_and_a_wheel(tmp_path, monkeypatch):
    """A hash of what ran, which needs no repository; it changes with any of the sources."""
    package = tmp_path / "prism"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(prism, "__file__", str(package / "__init__.py"))
    identity.cache_clear()
    first = made_with()
    (package / "a.py").write_text("x = 2\n")
    identity.cache_clear()
    second = made_with()
    identity.cache_clear()
    assert "commit" not in first and len(first["source_sha256"]) == 16
    assert first["source_sha256"] != second["source_sha256"]
