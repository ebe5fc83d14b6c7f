"""Results: units, files, provenance, summaries, and the two kinds of spread."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import xarray as xr
from drawn_steps import draw_steps
from files_made import same_result

import prism

RUN = {"steps": 500, "deadline": "17h", "start": "2026-01-05", "price": 2.5}
MODEL = {
    "n_layers": 4, "hidden_size": 512, "ffn_size": 2048, "n_heads": 8, "vocab_size": 8000,
    "seq_len": 1024,
}  # fmt: skip
STEP = {
    "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
    "parallelism": {"pp": 2, "microbatches": 4},
}
RANKS = STEP | {
    "variability": {
        "library": None,
        "effects": {"rank": {"cv": 0.02}, "step": {"cv": 0.05}, "residual": {"cv": 0.01}},
    },
}


@pytest.fixture(scope="module")
def result():
    return prism.estimate(
        "pipeline-8x32", replicates=640, run_replicates=50, seed=4, threads=2, **RUN
    )


@pytest.fixture(scope="module")
def transformer_job():
    """A job with a model, a library, every effect and a layer split of its own accord."""
    return prism.load_job({
        "model": MODEL,
        "parallelism": {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4, "data_parallel": "fsdp"},
        "cluster": {"nodes": 2, "gpus_per_node": 4, "node_slowdowns": {1: 1.1}},
        "variability": {"library": "h100-stressed", "effects": {
            "rank": {"cv": 0.02, "lemon_fraction": 0.1, "lemon_slowdown": [1.06, 1.2]}}},
        "run": {"steps": 100},
    })  # fmt: skip


@pytest.fixture(scope="module")
def of_model(transformer_job):
    return prism.estimate(transformer_job, replicates=128, run_replicates=8, seed=1, threads=1)


def again(result, **changed):
    """Make a result once more of what it says of itself."""
    call = json.loads(result.attrs["call"]) | changed
    make = prism.estimate if result.attrs["kind"] == "estimate" else prism.simulate
    return make(job_in(result), **call)


def job_in(result):
    """Read the job that a result holds."""
    blocks = json.loads(result.attrs["job"])
    return prism.load_job({k: v for k, v in blocks.items() if k not in ("name", "source")})


# -- what a result holds, and its file ---------------------------------------------------------


def test_every_variable_has_units_and_a_name(result, of_model):
    for dataset in (result, of_model):
        for name, variable in dataset.to_xarray().data_vars.items():
            assert len(variable.attrs["long_name"]) > 3, name
            if variable.dtype.kind not in "OU":
                assert variable.attrs["units"], name
                assert np.all(np.isfinite(variable)), name
        assert dataset.step_time.attrs["units"] == dataset.time_to_train.attrs["units"] == "s"
    assert "mfu" in of_model and "mfu" not in result


def test_a_saved_result_is_the_same_and_is_shown_as_it_was_saved(of_model, tmp_path, run):
    """Not estimated anew by a version whose constants are others."""
    before = prism.summary(of_model)
    prism.save(of_model, tmp_path / "result.nc")
    assert [p.name for p in tmp_path.iterdir()] == ["result.nc"]
    same_result(of_model, prism.load(tmp_path / "result.nc"))
    dataset = of_model.to_xarray()
    changed = {"memory_gib": 0.0 * of_model.memory_gib + 77.0, "job_world_size": 12}
    prism.save(dataset.assign(changed), tmp_path / "result.nc")
    for numbers in (
        prism.summary(prism.load(tmp_path)),
        json.loads(run("show", tmp_path / "result.nc", "--json")[1])["summary"],
    ):
        assert (numbers["memory"]["gib"], numbers["world_size"]) == (77.0, 12)
        assert numbers["step_time"] == before["step_time"]
    with pytest.raises(prism.PrismError, match="prism estimate"):
        prism.summary(dataset.drop_vars("job_world_size"))


def test_loading_what_is_no_result(tmp_path):
    (tmp_path / "text.nc").write_text("step_time\n1.0\n")
    plain = xr.Dataset({"x": 1.0})
    plain.to_netcdf(tmp_path / "other.nc", engine="h5netcdf")
    plain.assign_attrs(kind="weather").to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    (tmp_path / "empty").mkdir()
    for name in ("nothing.nc", "text.nc", "other.nc", "foreign.nc", "empty"):
        with pytest.raises(prism.PrismError, match=name):
            prism.load(tmp_path / name)
    for other in (plain, plain.assign_attrs(kind="weather")):
        with pytest.raises(prism.PrismError):
            prism.summary(other)
    prism.save(prism.simulate("pipeline-8x32", 64, seed=1), tmp_path / "result.nc")
    with pytest.raises(prism.PrismError, match=r"result\.nc"):
        prism.load_job(tmp_path / "result.nc")


# -- provenance: a result says how it is made again --------------------------------------------


@pytest.mark.parametrize(
    ("name", "engine"),
    [("pipeline-8x32", "auto"), ("llama3-70b-fsdp-512", "exact"),
     ("llama3-70b-fsdp-512", "exchangeable")],
)  # fmt: skip
def test_steps_are_the_same_without_their_parts(name, engine):
    """Most tests look at nothing but steps, and draw them so."""
    whole = prism.simulate(name, 100, seed=3, engine=engine).to_xarray()
    alone = draw_steps(name, 100, 3, engine=engine).to_xarray()
    assert {"time_loss_mean_share", "idle_fraction"} <= set(whole) - set(alone)
    for variable in alone.data_vars:
        xr.testing.assert_identical(alone[variable].variable, whole[variable].variable)


def test_provenance(result):
    attrs = result.attrs
    assert attrs["schema"] >= 1 and attrs["prism_version"] == prism.__version__
    assert {"numpy", "numba", "xarray"} <= set(json.loads(attrs["versions"]))
    assert re.fullmatch("[0-9a-f]{16}", attrs["source_sha256"])
    assert attrs["seed"] == "4" and json.loads(attrs["call"])["seed"] == 4
    assert json.loads(attrs["job"])["parallelism"]["pp"] == 8
    fresh = [prism.simulate("pipeline-8x32", replicates=1).attrs["seed"] for _ in "ab"]
    assert fresh[0] != fresh[1]


@pytest.mark.parametrize("values", [
    {"base": "pipeline-8x32", "run": {"start": "2026-01-05T12:00:00", "price_per_gpu_hour": 2}},
    {"model": {"durations": {"forward_s": [1.0, 2.0], "backward_s": 2.0}},
     "parallelism": {"pp": 2, "microbatches": 2}, "variability": {"library": None}},
    {"model": {"name": "llama3-8b"}, "cluster": {"nodes": 1, "gpus_per_node": 2},
     "parallelism": {"pp": 2, "microbatches": 2, "layer_split": [17, 15]}},
    RANKS | {"run": {"deadline": "1h"}},
])  # fmt: skip
def test_a_result_is_made_again_from_its_provenance(values, tmp_path):
    first = prism.estimate(values, replicates=100, run_replicates=4, seed=0, threads=2)
    prism.save(first, tmp_path / "result.nc")
    same_result(first, again(prism.load(tmp_path / "result.nc"), threads=1))


def test_another_seed_is_another_result(of_model, transformer_job):
    same_result(of_model, again(of_model, threads=2))
    assert not np.any(again(of_model, seed=2).step_time.values == of_model.step_time.values)


@pytest.mark.parametrize("kind", ["simulation", "estimate", "ranking", "sweep", "timeline"])
def test_every_result_says_its_kind_and_has_a_summary(run, tmp_path, kind):
    job, small = "pipeline-8x32", {"parallelism": {"pp": 2, "microbatches": 2, "dp": 2}}
    varied = {"base": job, **small, "variability": {"effects": {"rank": {"cv": 0.01}}}}
    made = {
        "simulation": lambda: prism.simulate(job, 64, seed=1),
        "estimate": lambda: prism.estimate(job, replicates=64, run_replicates=4, seed=1),
        "ranking": lambda: prism.rank(prism.load_job(varied), seed=1),
        "sweep": lambda: prism.sweep(job, {"run.steps": [1, 2]}, replicates=64, seed=1),
        "timeline": lambda: prism.timeline(job, replicates=64, seed=1),
    }[kind]()
    figures = prism.summary(made)
    assert made.attrs["kind"] == kind and figures["seed"] == 1
    prism.save(made, tmp_path / "result.nc")
    status, out, _ = run("show", tmp_path / "result.nc", "--json")
    assert status == 0 and json.loads(out)["summary"].keys() == figures.keys()
    assert run("show", tmp_path / "result.nc")[0] == 0


# -- summaries ---------------------------------------------------------------------------------

SPREAD = {
    "mean", "std", "cv", "p5", "p50", "p90", "p95", "p99", "mean_se", "p95_ci", "cluster_draws",
    "within_cluster_std", "between_cluster_std", "mean_ci90", "between_cluster_at_most",
}  # fmt: skip
ALWAYS = {
    "job", "seed", "replicates", "run_replicates", "world_size", "ideal_step_time", "step_time",
    "time_to_train", "slowdown", "exposed_communication", "exposed_communication_se", "engine",
    "wall_seconds", "warnings", "steps", "delay_by_term", "delay_by_term_se", "variance_by_term",
    "variance_by_term_se", "replicas", "critical_path", "findings", "time_loss", "failure_model",
}  # fmt: skip
OF_A_MODEL = {
    "global_batch", "tokens_per_step", "tokens_per_s", "tokens_per_s_per_gpu", "mfu",
    "model_flops_per_gpu", "memory", "model_error", "energy", "ettr", "failures", "checkpoint",
    "framework", "library",
}  # fmt: skip


def test_summary_has_the_keys_of_the_interface(result, of_model, transformer_job):
    answer = json.loads(json.dumps(prism.summary(result)))
    assert {"finish_by", "finish_date", "cost"} | ALWAYS == set(answer)
    assert set(answer["time_to_train"]) == SPREAD
    assert set(answer["step_time"]) == SPREAD | {"one_allocation", "allocations"}
    assert set(answer["engine"]) == {"op_samples", "seconds", "ns_per_op_sample", "threads"}
    assert (answer["job"], answer["seed"], answer["world_size"]) == ("pipeline-8x32", 4, 8)
    model = prism.summary(of_model)
    assert ALWAYS | OF_A_MODEL == set(model)
    assert model["library"] == {"name": "h100-stressed", "kind": "stressed", "others": []}
    p, tokens = transformer_job.parallelism, model["tokens_per_step"]
    assert model["global_batch"] == p.dp * p.microbatches * p.microbatch_size
    assert tokens == model["global_batch"] * MODEL["seq_len"]
    assert model["tokens_per_s"] == pytest.approx(tokens / model["step_time"]["mean"])
    assert model["tokens_per_s_per_gpu"] * transformer_job.world_size == model["tokens_per_s"]


def test_summary_says_what_the_arrays_say(result):
    answer = prism.summary(result)
    runs, steps = result.time_to_train.values, result.step_time.values
    assert answer["ideal_step_time"] == 117.0
    thresholds = {"1.05": 1.05, "1.1": 1.1, "1.2": 1.2}
    assert answer["slowdown"] == {k: (steps > x * 117.0).mean() for k, x in thresholds.items()}
    assert answer["finish_by"] == {"deadline": 61200.0, "probability": (runs <= 61200.0).mean()}
    date = np.datetime64("2026-01-05") + np.timedelta64(round(1e6 * np.quantile(runs, 0.9)), "us")
    assert answer["finish_date"]["probability"] == 0.9
    assert abs(np.datetime64(answer["finish_date"]["date"]) - date) <= np.timedelta64(1, "s")
    assert answer["cost"]["mean"] == pytest.approx(runs.mean() / 3600 * 8 * 2.5)
    for name, values in (("step_time", steps), ("time_to_train", runs)):
        for q in (5, 50, 90, 95, 99):
            assert answer[name][f"p{q}"] == np.quantile(values, q / 100)
        assert answer[name]["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert answer["engine"]["op_samples"] == 8 * 64 * 640
    share = result.critical_path_time / result.critical_path_time.sum()
    assert share.sel(kernel_class="compute") == 1.0 and answer["exposed_communication"] == 0.0


def test_slow_steps_are_counted_against_the_ideal():
    """Not against the median: steps that all lose as much are all slow."""
    effects = {"library": None, "effects": {"jitter": {"mean_s": 6.0, "cv": 0.01}}}
    answer = prism.summary(prism.estimate(STEP | {"variability": effects}, replicates=64, seed=1))
    assert answer["ideal_step_time"] == 15.0 and answer["step_time"]["p50"] > 20.0
    assert answer["slowdown"] == {"1.05": 1.0, "1.1": 1.0, "1.2": 1.0}


def test_reference_pipeline():
    """8 stages, 32 microbatches, 5 %: mean 120.585 s, std 0.52 s, p99 121.82 s, ideal 117 s."""
    answer = prism.summary(prism.simulate("pipeline-8x32", replicates=200_000, seed=12))
    steps = answer["step_time"]
    assert answer["ideal_step_time"] == 117.0
    assert steps["mean"] == pytest.approx(120.585, abs=0.02)
    assert steps["std"] == pytest.approx(0.52, abs=0.01)
    assert steps["p99"] == pytest.approx(121.82, abs=0.05)
    # nothing persists, so clusters do not differ and the error is that of independent steps
    assert steps["between_cluster_std"] < 0.03
    assert steps["mean_se"] == pytest.approx(steps["std"] / 200_000**0.5, rel=0.1)


def test_a_run_that_nobody_asked_for_is_left_out():
    job = prism.load_job(RANKS)
    steps = prism.estimate(job, replicates=128, seed=1)
    answer = prism.summary(steps)
    assert not {"time_to_train", "run_replicates", "steps", "delay_by_term"} & set(answer)
    assert set(answer["slowdown"]) == {"1.05", "1.1", "1.2"}
    assert "run_replicate" not in steps.to_xarray().sizes
    same_result(steps, again(steps))
    for asked in ({"steps": 50}, {"deadline": "1h"}, {"run_replicates": 10}, {"price": 1.0}):
        assert "time_to_train" in prism.summary(
            prism.estimate(job, replicates=128, seed=1, **asked)
        )
    for said in ({"steps": 50}, {"deadline": "1h"}, {"start": "2026-01-05"}):
        whole = prism.load_job(RANKS | {"run": said})
        assert "time_to_train" in prism.summary(prism.estimate(whole, replicates=128, seed=1))


def test_the_default_is_enough_for_what_is_printed(run):
    assert prism.summary(prism.estimate("pipeline-8x32", seed=1))["warnings"] == []
    few = prism.summary(prism.estimate("pipeline-8x32", replicates=6400, seed=1))["warnings"]
    assert ["12800" in text for text in few] == [True]
    late = prism.estimate("pipeline-8x32", start="2026-01-05", probability=0.99, seed=1)
    assert ["64000" in text for text in prism.summary(late)["warnings"]] == [True]
    assert json.loads(run("estimate", "pipeline-8x32", "--json")[1])["replicates"] == 12_800


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicates": 100.5}, {"replicates": 0}, {"replicates": "64"}, {"run_replicates": 2.5},
        {"steps": 2.5}, {"probability": "0.9"}, {"probability": 1.0}, {"price": float("nan")},
        {"start": "tomorrow"}, {"deadline": "soon"}, {"threads": 1.5}, {"threads": 0},
        {"seed": -1}, {"seed": "a"}, {"slowdown_thresholds": [0.5]},
    ],
)  # fmt: skip
def test_bad_arguments_are_named_as_their_caller_names_them(run, wrong):
    ((name, value),) = wrong.items()
    call = {"replicates": 64, "run_replicates": 4, "seed": 1} | wrong
    with pytest.raises(prism.PrismError, match=f"^{name}\\b"):
        prism.estimate("pipeline-8x32", **call)
    option = f"--{name.replace('_', '-')}"
    typed = value[0] if isinstance(value, list) else value
    status, out, err = run("estimate", "pipeline-8x32", option, typed)
    assert (status, out) == (2, "") and option in err or not isinstance(value, float | list)


def test_whatever_takes_a_job_takes_a_mapping():
    values = {"base": "pipeline-8x32", "run": {"steps": 3}}
    small = {"replicates": 64, "run_replicates": 4, "seed": 1}
    drawn = prism.estimate(values, **small)
    named = prism.estimate(prism.load_job("pipeline-8x32", {"run.steps": 3}), **small)
    assert np.array_equal(drawn.step_time, named.step_time)
    for call in (prism.estimate, prism.rank, prism.place, prism.sweep, prism.validate):
        with pytest.raises(prism.PrismError, match="^job: "):
            call(3, **({"measured": "x.csv"} if call is prism.validate else {}))


# -- spread ------------------------------------------------------------------------------------

BETWEEN, WITHIN = 0.3, 0.5


@pytest.fixture(scope="module")
def spread():
    """Summarise made-up step times [s] by cluster draw."""
    frame = prism.simulate("pipeline-8x32", 64, seed=1).to_xarray().drop_dims("replicate")

    def summarized(values, cluster):
        made = frame.assign(
            step_time=("replicate", values, {"units": "s"}), cluster_idx=("replicate", cluster),
            step_effect=("replicate", np.ones(values.size)),
        )  # fmt: skip
        return prism.summary(made)["step_time"]

    return summarized


def nested(n_clusters, size, seed):
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(n_clusters), size)
    values = 10 + BETWEEN * rng.standard_normal(n_clusters)[cluster]
    return values + WITHIN * rng.standard_normal(cluster.size), cluster


def test_spread_recovers_both_parts(spread):
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
    whole, cut = spread(*nested(300, 64, 3)), spread(*(x[:-40] for x in nested(300, 64, 3)))
    for name in ("between_cluster_std", "within_cluster_std", "mean_se"):
        assert cut[name] == pytest.approx(whole[name], rel=0.02)


@pytest.mark.parametrize("n_clusters", [4, 16, 200])
def test_stated_intervals_cover(spread, n_clusters):
    """The mean's 90 % and p95's 95 %, of 200 seeds; errors of independent steps would not."""
    truth = 10 + 1.6448536 * np.hypot(BETWEEN, WITHIN)
    found = [spread(*nested(n_clusters, 64, seed)) for seed in range(200)]
    error = 3.0 * np.sqrt(0.9 * 0.1 / 200)
    covered = np.mean([f["mean_ci90"][0] <= 10.0 <= f["mean_ci90"][1] for f in found])
    assert covered == pytest.approx(0.9, abs=error)
    normal = np.mean([abs(f["mean"] - 10.0) <= 1.645 * f["mean_se"] for f in found])
    assert normal < 0.9 - error or n_clusters > 4
    size = 64 * n_clusters
    alone = np.mean([abs(f["mean"] - 10.0) < 1.96 * f["std"] / size**0.5 for f in found])
    assert alone < 0.6
    if n_clusters == 200:  # 94 % with 40 draws
        p95 = np.mean([f["p95_ci"][0] <= truth <= f["p95_ci"][1] for f in found])
        assert p95 == pytest.approx(0.95, abs=0.046)  # three standard errors too


def test_spread_of_one_cluster_and_one_value(spread):
    answer = spread(np.array([1.0, 2.0, 3.0]), np.zeros(3, np.int64))
    assert answer["within_cluster_std"] == 1.0
    one = spread(np.array([2.0]), np.zeros(1, np.int64))
    assert (one["mean"], one["std"], one["p99"]) == (2.0, 0.0, 2.0)
    for found in (answer, one):
        unknown = ("mean_se", "mean_ci90", "p95_ci", "between_cluster_std")
        assert all(found[key] is None for key in unknown) and found["cluster_draws"] == 1


def test_a_spread_between_clusters_that_is_noise_is_said_to_be(spread):
    """16 draws that do not differ: noise in nine of ten cases at least, and bounded from above."""
    rng, cluster = np.random.default_rng(7), np.repeat(np.arange(16), 64)
    found = [spread(10.0 + rng.standard_normal(1024), cluster) for _ in range(100)]
    told = [f for f in found if f["between_cluster_at_most"] is not None]
    assert len(told) >= 90
    assert all(f["between_cluster_at_most"] > f["between_cluster_std"] for f in told)
    assert spread(*nested(16, 64, 1))["between_cluster_at_most"] is None
    values = 5.0 + np.random.default_rng(2).standard_normal(30)
    alone = spread(values, np.arange(30))  # one value each: all of it is between them
    assert alone["between_cluster_std"] == pytest.approx(values.std(ddof=1))


@pytest.mark.parametrize("between", [0.5, 0.0])
def test_one_allocation_and_which_allocation_are_told_apart(spread, between):
    """Steps are normal about their allocation's mean, and so are the means."""
    rng, within, z = np.random.default_rng(1), 0.1, 1.645
    cluster = np.repeat(np.arange(800), 64)
    values = 10.0 + between * rng.standard_normal(800)[cluster]
    found = spread(values + within * rng.standard_normal(cluster.size), cluster)
    one, which = found["one_allocation"], found["allocations"]
    tails = np.array([one["p5"], one["p95"]]) - found["mean"]
    np.testing.assert_allclose(tails, [-z * within, z * within], rtol=0.03)
    tails = np.array([which["p5"], which["p95"]]) - found["mean"]
    np.testing.assert_allclose(tails, [-z * between, z * between], rtol=0.1, atol=0.006)
    assert spread(values[:640], cluster[:640])["allocations"] is None  # ten do not tell


def test_what_one_cluster_draw_does_not_tell_is_null(run, tmp_path):
    prism.save(prism.estimate(RANKS, replicates=64, steps=1000, seed=3), tmp_path / "result.nc")
    answer = json.loads(run("show", tmp_path / "result.nc", "--json")[1])["summary"]
    for name in ("step_time", "time_to_train"):
        found = answer[name]
        assert found["cluster_draws"] == 1 and found["within_cluster_std"] > 0.0
        for key in ("mean_se", "mean_ci90", "p95_ci", "between_cluster_std"):
            assert found[key] is None
    told = [run("show", tmp_path / "result.nc")[1], prism.report(tmp_path)]
    assert not any(re.search(r"\bnan\b|\bNone\b", text) for text in told)
    two = prism.summary(prism.estimate(RANKS, replicates=128, steps=1000, seed=3))
    assert two["step_time"]["mean_se"] > 0.0 and two["time_to_train"]["mean_se"] > 0.0


def test_clusters_differ_as_much_in_runs_as_in_steps():
    """Runs follow their clusters' mean steps, less the noise of these."""
    for replicates in (1024, 6400):
        found = prism.summary(prism.estimate(RANKS, replicates=replicates, steps=10**6, seed=5))
        step, runs = found["step_time"], found["time_to_train"]
        between = runs["mean"] / step["mean"] * step["between_cluster_std"]
        assert runs["between_cluster_std"] == pytest.approx(between, rel=0.02)
        parts = math.hypot(runs["within_cluster_std"], runs["between_cluster_std"])
        assert runs["std"] == pytest.approx(parts, rel=0.6 / runs["cluster_draws"])


# -- what is shown -----------------------------------------------------------------------------


def test_error_of_the_model_widens_runs_and_not_steps():
    job = prism.load_job(RANKS | {"run": {"steps": 2500}})
    asked = {"replicates": 640, "run_replicates": 4_000, "seed": 1}
    right, none = (
        prism.summary(prism.estimate(job.replace(*sets), **asked))
        for sets in ([], ["variability.model_error=0"])
    )
    unsure = job.replace("variability.model_error=0.06")
    deadline = 1.03 * right["time_to_train"]["p50"]
    wrong = prism.summary(prism.estimate(unsure, **asked, deadline=deadline))
    assert right == none | {k: right[k] for k in ("engine", "wall_seconds")}
    assert "model_error" not in right
    assert wrong["step_time"] == right["step_time"]
    assert wrong["model_error"]["spread"] == 0.06
    found, calm = wrong["time_to_train"], right["time_to_train"]
    assert found["model_error_std"] == pytest.approx(0.06 * calm["mean"], rel=0.05)
    parts = ("within_cluster_std", "between_cluster_std", "model_error_std")
    assert found["std"] ** 2 == pytest.approx(sum(found[k] ** 2 for k in parts))
    for key in parts[:2]:
        assert found[key] == pytest.approx(calm[key], rel=0.02)
    assert found["p95"] / found["p50"] == pytest.approx(np.exp(1.645 * found["cv"]), rel=0.02)
    assert found["cv"] > 0.06
    assert found["p95_ci"][0] < found["p95"] < found["p95_ci"][1]
    assert wrong["variance_by_term"]["model_error"] > 0.7
    assert 0.2 < wrong["finish_by"]["probability"] < 0.8


def test_terms_within_their_error_are_shown_as_zero_and_none_that_do_not_matter():
    """As written; JSON and the cell keep the number."""
    made = prism.estimate(RANKS, replicates=640, steps=2000, seed=1)
    numbers = prism.summary(made)
    tables = [t for t in prism.answer(made).tables if {"slow_steps", "Slow steps"} & {
        str(row[0]).strip() for row in t.rows}]  # fmt: skip
    errors = numbers["delay_by_term_se"]
    for table in tables:
        for row in table.rows:
            late = row[1]
            error = errors.get(str(row[0]).lower().replace(" ", "_"))
            if error and abs(late.value) <= error:
                assert late.text.startswith("0")


def test_numbers_agree_with_their_nouns_and_units_fit(run, tmp_path):
    prism.save(prism.estimate({
        "model": MODEL | {"n_layers": 2}, "cluster": {"nodes": 1, "gpus_per_node": 1},
        "variability": {"library": "h100-healthy", "host_scale": 1e-9}, "run": {"steps": 1},
    }, replicates=64, run_replicates=1, seed=1), tmp_path / "result.nc")  # fmt: skip
    text = run("show", tmp_path / "result.nc", "--details")[1]
    assert re.search(r"\b1 GPU\b", text) and re.search(r"\b1 step\b", text)
    plurals = r"(GPU|step|run|node|draw|replicate|sequence|token|cluster draw|thread)s\b"
    assert not re.search(rf"(?<![\d.,])1 (\w+ )?{plurals}", text)
    assert re.search(r"\d J\b", text) and not re.search(r"\de-\d", text)


# -- exposed communication ---------------------------------------------------------------------

BANDWIDTHS = (20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


def linked_job(layout, bandwidth=None, **variability):
    """Build a small job with every effect that acts on communication, over given links."""
    network = {"bandwidth_gbytes_per_s": bandwidth, "latency_us": 5.0}
    return prism.load_job({
        "model": MODEL | {"hidden_size": 1024, "ffn_size": 4096, "vocab_size": 4096},
        "parallelism": {"microbatches": 2, "data_parallel": "fsdp"} | layout,
        "cluster": {"nodes": 4, "gpus_per_node": 4, "nvlink_domain_gpus": 4, "leaf_nodes": 1,
                    "node_slowdowns": {1: {"network": 1.5}},
                    "links": {"network": network} if bandwidth else {}},
        "variability": {"library": None, "host_scale": 1e-9, **variability, "effects": {
            "rank": {"cv": 0.02}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.05},
            "residual": {"law": "gamma", "cv": 0.05}, "regime": {"probability": 0.1, "factor": 2.0},
        }},
    })  # fmt: skip


def test_the_error_of_exposed_communication_is_its_spread_over_seeds():
    drawn = [prism.simulate(linked_job({"dp": 16}, BANDWIDTHS[2]), 256, seed=s) for s in range(32)]
    spread = np.std([float(x.exposed_communication) for x in drawn], ddof=1)
    stated = np.mean([float(x.exposed_communication_se) for x in drawn])
    assert 0.6 < stated / spread < 1.4


def test_more_bandwidth_never_exposes_more():
    """And what is not exposed is the same step at every bandwidth: that without communication."""
    rest, exposed = [], []
    for bandwidth in BANDWIDTHS:
        drawn = prism.simulate(linked_job({"dp": 16}, bandwidth), 256, seed=3)
        share, error = float(drawn.exposed_communication), float(drawn.exposed_communication_se)
        rest.append((1.0 - share) * float(drawn.step_time.mean()))
        assert 0.0 < error < 0.01
        exposed.append(share)
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[0] > 0.75 and exposed[-1] < 0.55  # what is left are the steps of rings
    np.testing.assert_allclose(rest, rest[0], rtol=1e-5)


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
def test_exposed_communication_is_the_same_rest_for_other_layouts(layout, variability):
    found = []
    for bandwidth in (50.0, 400.0):
        drawn = prism.simulate(linked_job(layout, bandwidth, **variability), 256, seed=3)
        share = float(drawn.exposed_communication)
        assert 0.0 < share < 1.0
        found.append((1.0 - share) * float(drawn.step_time.mean()))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


# -- typed results -------------------------------------------------------------------------------


def test_tables_of_a_result_are_the_figures_of_its_json(result):
    figures = prism.summary(result)
    for name in ("step_time", "time_to_train"):
        row = result.quantities.loc[name]
        assert all(row[key] == figures[name][key] for key in ("mean", "std", "p5", "p95", "p99"))
    assert result.quantities.attrs["fields"]["p95"]["unit"] == "s"
    parts = {part["name"]: part["mean_share"] for part in figures["time_loss"]}
    assert result.parts.mean_share.to_dict() == parts
    assert result.terms.delay.to_dict() == figures["delay_by_term"]
    assert result.terms.variance.dropna().to_dict() == figures["variance_by_term"]


def test_a_result_has_the_arrays_of_its_dataset_and_names_what_it_lacks(result):
    assert result.step_time.identical(result.to_xarray().step_time) and "step_time" in result
    with pytest.raises(AttributeError, match="step_time"):
        result.steptime  # noqa: B018
    with pytest.raises(AttributeError, match="to_xarray"):
        result.isel  # noqa: B018
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.dataset = None


def test_a_result_file_without_its_tables_is_refused_with_the_command(run, tmp_path):
    old = xr.Dataset(attrs={"kind": "replay", "source": "trace.csv", "summary": "{}"})
    prism.save(old, tmp_path / "result.nc")
    with pytest.raises(prism.PrismError, match=r"prism replay"):
        prism.load(tmp_path / "result.nc")
    status, out, err = run("show", tmp_path / "result.nc")
    assert (status, out) == (2, "") and "prism replay" in err
