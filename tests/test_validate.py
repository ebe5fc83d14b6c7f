"""`prism validate`: honest p-values, splits, baselines, step times and errors."""

import json
from itertools import islice

import numpy as np
import pytest
import xarray as xr
from campaign import examples
from pipeline_synth import Effects, Layout, as_production, make_trace
from scipy.signal import lfilter
from scipy.stats import kstest, norm

import prism
from prism import PrismError, fit, load_job, save, simulate, validate
from prism.analyses.validation.hold import separation
from prism.analyses.validation.jobs import clusters_anew, draws_anew
from prism.analyses.validation.steps import split_steps
from prism.common.agreement import ks_statistic
from prism.models.steptimes.spread import Spread, simulate_body

pytestmark = pytest.mark.usefixtures("small_pools")
SMALL = Layout(2, 1, 4, 24)
EFFECTS = Effects(rank_sd=0.01, step_sd=0.02, content_sd=0.03, residual_sd=0.01)


def write(folder, layout=SMALL, effects=EFFECTS, seed=1):
    frame, _ = make_trace(layout, effects, seed)
    path = folder / f"trace{seed}.csv"
    as_production(frame).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write(tmp_path_factory.mktemp("trace"), Layout(2, 1, 4, 30))


@pytest.fixture(scope="module")
def model(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("model") / "model.nc"
    save(fit(trace, 0), path)
    return path


# ------------------------------------------------------------------------------------- traces
def test_p_values_are_those_of_chance_where_the_model_is_the_truth(tmp_path):
    p = [
        prism.summary(
            validate(trace=write(tmp_path, seed=s), train="even", bootstrap=9, replicates=64,
                     seed=s, threads=1)
        )["ks_p_value"]
        for s in range(examples(12))
    ]  # fmt: skip
    assert kstest(p, "uniform").pvalue > 0.01
    assert np.mean(np.array(p) <= 0.1) <= 0.3
    # negative control: the checker sees p-values that are all too small, or all near one half
    assert kstest(np.array(p) ** 5, "uniform").pvalue < 0.01
    assert kstest(0.45 + 0.1 * np.array(p), "uniform").pvalue < 0.01


@pytest.mark.parametrize(("rank_cv", "runs", "told"), [(0.02, 1, 1), (0.02, 2, 0), (0.0, 1, 0)])
def test_one_run_is_said_not_to_test_which_allocation_a_job_gets(tmp_path, rank_cv, runs, told):
    job = load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"dp": 4, "microbatches": 2},
        "variability": {"library": "none", "effects": {
            "rank": {"cv": rank_cv}, "residual": {"cv": 0.01}}},
    })  # fmt: skip
    steps = np.random.default_rng(1).choice(simulate(job, 640, seed=2).step_time, 60)
    lines = ["run,step,step_s", *(f"{i % runs},{i // runs},{x:.6f}" for i, x in enumerate(steps))]
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(lines) + "\n")
    found = prism.summary(
        validate(job, measured=path, replicates=640, seed=1, bootstrap=9)
    )  # fmt: skip
    assert sum("allocation" in note for note in found["notes"]) == told


def test_p_values_are_small_where_ops_depend_and_the_prediction_leaves_it_out(tmp_path):
    effects = Effects(rank_sd=0.01, step_sd=0.06, content_sd=0.01, residual_sd=0.01)
    path, p = write(tmp_path, Layout(2, 1, 6, 40), effects), {}
    for dependence in ("full", "none"):
        figures = prism.summary(
            validate(trace=path, train="even", dependence=dependence, bootstrap=19, replicates=512,
                           seed=1, threads=1)
        )  # fmt: skip
        p[dependence] = figures["ks_p_value"]
    assert figures["cv_ratio"] < 0.6
    assert p["none"] <= 0.1 < p["full"]  # 1/20 is the least that can be


def test_a_job_that_changes_half_way_is_not_predicted(tmp_path):
    frame, _ = make_trace(Layout(2, 1, 4, 24), EFFECTS, 1)
    later = frame["step"] >= 12
    frame.loc[later, ["start", "duration"]] *= 1.2
    path = tmp_path / "changed.csv"
    as_production(frame).to_csv(path, index=False)
    figures = prism.summary(validate(trace=path, train="first-half", bootstrap=19, seed=1))
    assert figures["ks"] == 1.0 and figures["ks_p_value"] == pytest.approx(1.0 / 20.0)
    assert figures["p95_error"] == pytest.approx(1 / 1.2 - 1.0, abs=0.04)
    assert figures["ks_floor"] == 1.0


def test_what_is_returned(trace):
    options = {"trace": trace, "train": "first-half", "replicates": 1000, "seed": 3}
    dataset = validate(bootstrap=5, **options)
    figures = prism.summary(dataset)
    json.dumps(figures, allow_nan=False)
    assert figures["n_train"] == 15 and figures["n_measured"] == 15
    assert dataset.sizes["replicate"] == 1000
    assert dataset.measured.size == 15 and dataset.training.size == 15
    assert (dataset.cdf_lo <= dataset.cdf_hi).all()
    for name in ("measured", "training", "predicted", "predicted_independent", "cdf_time"):
        assert dataset[name].attrs["units"] == "s"
    assert figures["ks"] < figures["baselines"]["independent"]["ks"]
    assert figures["baselines"]["copy"]["ks"] == pytest.approx(figures["ks_floor"])
    again = validate(
        trace=trace, train="first-half", bootstrap=5, replicates=1000, seed=3, threads=2
    )
    assert again.identical(dataset)
    none = validate(bootstrap=0, **options)
    assert prism.summary(none)["ks_p_value"] is None
    assert np.array_equal(none.predicted, dataset.predicted)
    assert "cdf_lo" not in none


def test_progress_counts_repetitions(trace):
    seen = []
    validate(
        trace=trace, train="even", bootstrap=3, replicates=64, seed=1,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_splits():
    assert split_steps(7, "first-half", "t").tolist() == [0, 1, 2]
    assert split_steps(7, "even", "t").tolist() == [0, 2, 4, 6]
    assert split_steps(7, "5", "t").tolist() == [0, 1, 2, 3, 4]
    for train in ("7", "0", "2", "99"):
        with pytest.raises(PrismError, match=f"t: train {train} takes .* of 7 steps"):
            split_steps(7, train, "t")
    with pytest.raises(PrismError, match="takes 2 of 5 steps; at least 3"):
        split_steps(5, "first-half", "t")
    for train in ("odd", "-3", "0.5", "", "five"):
        with pytest.raises(PrismError, match="expected first-half, even, or a number of steps"):
            split_steps(7, train, "t")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dependence": "some"}, "dependence: 'some'; expected full or none"),
        ({"bootstrap": -1}, "bootstrap: -1"),
        ({"replicates": 0}, "replicates"),
    ],
)
def test_options_out_of_range_are_refused(trace, options, message):
    with pytest.raises(PrismError, match=message):
        validate(trace=trace, train="even", **options)


def test_a_trace_of_few_steps_is_refused(tmp_path):
    path = write(tmp_path, Layout(2, 1, 2, 3))
    with pytest.raises(PrismError, match="takes 2 of 3 steps; at least 3 are needed"):
        validate(trace=path, train="even")


# ---------------------------------------------------------------------------------- step times
def step_file(folder, seconds, name="steps.csv"):
    path = folder / name
    rows = "\n".join(f"{i},{s}" for i, s in enumerate(seconds))
    path.write_text(f"step,step_time_s\n{rows}\n")
    return path


def test_step_times_of_the_model_itself_and_others(model, tmp_path):
    drawn = np.asarray(simulate(load_job(model), 640, 9).step_time)[:40]
    own = prism.summary(
        validate(model, measured=step_file(tmp_path, drawn), bootstrap=60, replicates=1024, seed=1)
    )
    json.dumps(own, allow_nan=False)
    assert own["ks_p_value"] > 0.02 and abs(own["p95_error"]) < 0.05
    assert own["n_train"] > 2 and own["baselines"]["copy"] is None and own["ks_floor"] is None
    slower = step_file(tmp_path, drawn * 1.2, "slower.csv")
    other = prism.summary(validate(model, measured=slower, bootstrap=60, replicates=1024, seed=1))
    assert other["ks_p_value"] < 0.05
    assert other["p95_error"] == pytest.approx((1 + own["p95_error"]) / 1.2 - 1.0, abs=1e-6)


def test_totals_of_runs(model, tmp_path):
    mean = float(simulate(load_job(model), 640, 1).step_time.mean())
    rows = [f"{run},{i},{mean * (1 + 0.001 * run)}" for run in range(4) for i in range(20)]
    path = tmp_path / "runs.csv"
    path.write_text("run,step,step_time_s\n" + "\n".join(rows) + "\n")
    options = {"quantity": "time_to_train", "bootstrap": 5, "replicates": 512, "seed": 1}
    found = validate(model, measured=path, **options)
    figures = prism.summary(found)
    assert found.attrs["quantity"] == "time_to_train"
    assert figures["n_measured"] == 4 and len(figures["notes"]) == 1
    assert abs(figures["mean_error"]) < 0.02
    # every value the mean of ten steps: ten times the run
    header, *values = rows_of_ten = ["run,step,step_time_s,n_avg", *(f"{row},10" for row in rows)]
    path.write_text("\n".join(rows_of_ten) + "\n")
    longer = prism.summary(validate(model, measured=path, **options))
    assert abs(longer["mean_error"]) < 0.02
    # runs that differ in length are said to
    path.write_text("\n".join([header, *values[:-5]]) + "\n")
    uneven = prism.summary(validate(model, measured=path, **options))
    assert any("runs have 150 to 200 steps" in note for note in uneven["notes"])


def measured_by_chance(folder, model, n=300, drift=0.0, first=()):
    """Steps of a cluster of the model, put in an order in which they drift; first ones slower."""
    rng = np.random.default_rng(4)
    drawn = np.sort(rng.choice(np.asarray(simulate(load_job(model), 640, 1).step_time), n))
    shocks = rng.standard_normal(n)
    shocks[1:] *= np.sqrt(1.0 - drift**2)
    order = np.argsort(np.argsort(lfilter([1.0], [1.0, -drift], shocks)))
    seconds = drawn[order]
    seconds[: len(first)] *= first
    path = folder / "measured.csv"
    path.write_text("step,step_s\n" + "".join(f"{i},{s:.9f}\n" for i, s in enumerate(seconds)))
    return path


@pytest.mark.parametrize("first", [[27.0], [6.0, 3.0, 2.5, 2.0, 2.0]])
def test_a_warm_up_is_left_out_of_what_is_measured_as_fit_leaves_it_out(tmp_path, model, first):
    """One step of 27 times the others made the CV 50 times that of the prediction."""
    path = measured_by_chance(tmp_path, model, first=first)
    options = {"measured": path, "bootstrap": 0, "replicates": 512, "seed": 1}
    found = prism.summary(validate(model, **options))
    (row,) = found["changes"]
    assert (row["kind"], row["skip"], found["n_measured"]) == (
        "warm_up",
        len(first),
        300 - row["skip"],
    )
    assert found["cv_ratio"] == pytest.approx(1.0, abs=0.2) and len(found["warnings"]) >= 1
    skipped = prism.summary(validate(model, skip=len(first), **options))
    assert skipped["changes"] == [] and skipped["n_measured"] == found["n_measured"]
    steps = prism.summary(fit(path, 0))
    assert [r["skip"] for r in steps["changes"]] == [len(first)]


@pytest.mark.parametrize("drift", [0.0, 0.95])
def test_steps_that_drift_are_no_more_evidence_than_independent_ones(tmp_path, model, drift):
    path = measured_by_chance(tmp_path, model, 60, drift)
    rng = np.random.default_rng(3)
    low = np.sort(np.asarray(simulate(load_job(model), 640, 1).step_time))[:300]
    with path.open("a") as table:  # an excursion to one side, as a drift makes them
        seconds = rng.choice(low, 60) if drift else []
        table.writelines(f"{60 + i},{s:.9f}\n" for i, s in enumerate(seconds))
    options = {"measured": path, "bootstrap": 59, "replicates": 512, "seed": 1}
    found = prism.summary(validate(model, **options))
    assert found["ks_p_value"] > 0.05
    remembered = any("independent steps" in note for note in found["notes"])
    assert remembered == (drift > 0.0) == (found["n_effective"] < 0.5 * found["n_measured"])


def test_a_drift_that_is_long_beside_what_was_fitted_is_said(tmp_path, few_repeats):
    path, rng = tmp_path / "steps.csv", np.random.default_rng(7)
    for memory, said in ((60.0, True), (0.0, False)):
        body = simulate_body(Spread(0.005, 0.01 * (memory > 0), memory), np.arange(400.0), 1, rng)
        rows = "".join(f"{i},{1.0 + x:.6f}\n" for i, x in enumerate(body[:, 0]))
        path.write_text("step,step_s\n" + rows)
        options = {"trace": path, "bootstrap": 2, "replicates": 256, "seed": 1}
        warnings = prism.summary(validate(**options))["warnings"]
        assert any("p-value" in text for text in warnings) == said


@pytest.mark.parametrize("between", [0.0, 0.02])
def test_the_null_of_steps_is_that_of_one_cluster(between):
    rng = np.random.default_rng(5)
    n, n_clusters = 400, 64
    cluster = np.repeat(np.arange(n_clusters), 64)
    mean = 10.0 * (1.0 + between * rng.standard_normal(n_clusters))
    drawn = xr.Dataset({
        "step_time": ("replicate", rng.normal(mean[cluster], 0.1)),
        "cluster_idx": ("replicate", cluster),
    })  # fmt: skip
    null = [separation(*pair) for pair in islice(clusters_anew(drawn, n, 1), 200)]
    own = rng.normal(10.0 * (1.0 + between * rng.standard_normal((200, 1))), 0.1, (200, n))
    truth = [ks_statistic(sample, drawn.step_time) for sample in own]
    assert np.quantile(null, [0.5, 0.95]) == pytest.approx(np.quantile(truth, [0.5, 0.95]), rel=0.2)


def test_bad_choices_for_step_times(model, tmp_path):
    path = step_file(tmp_path, [1.0, 2.0])
    for options, message in (
        ({"quantity": "loss"}, "quantity: 'loss'; expected step_time or time_to_train"),
        ({"dependence": "some"}, "dependence: 'some'; expected full or none"),
        ({"bootstrap": -5}, "bootstrap: -5"),
    ):
        with pytest.raises(PrismError, match=message):
            validate(model, measured=path, **options)


def test_what_a_calibration_leaves_open_of_the_mean_widens_the_null_of_totals():
    """A mean that is off by z standard errors moves the KS of a normal law by a known amount."""
    totals = np.random.default_rng(1).normal(100.0, 1.0, 4_000)
    plain, wide = (
        np.array([separation(*pair) for pair in islice(draws_anew(totals, 400, 3, error), 500)])
        for error in (0.0, 0.01)
    )
    # E max |F(x) - F(x - z)| for z ~ N(0, 1): 2 Phi(|z| / 2) - 1, and chance on top
    expected = np.mean(2.0 * norm.cdf(np.abs(np.random.default_rng(2).normal(size=9999)) / 2) - 1)
    assert plain.mean() == pytest.approx(0.8687 / np.sqrt(400), rel=0.05)  # Kolmogorov's mean
    assert expected < wide.mean() < expected + plain.mean()
