"""`prism validate`: p-values, figures against scipy's, splits, baselines, step times; pictures."""

import json

import numpy as np
import pytest
from campaign import examples
from pipeline_synth import Effects, Layout, as_production, make_trace
from scipy import stats
from scipy.signal import lfilter

import prism
from prism import plots

pytestmark = pytest.mark.usefixtures("small_pools")
SMALL = Layout(2, 1, 4, 24)
EFFECTS = Effects(rank_sd=0.01, step_sd=0.02, content_sd=0.03, residual_sd=0.01)


def write(folder, layout=SMALL, effects=EFFECTS, seed=1, change=None):
    frame, _ = make_trace(layout, effects, seed)
    if change is not None:
        step, factor = change
        frame.loc[frame["step"] >= step, ["start", "duration"]] *= factor
    path = folder / f"trace{seed}.csv"
    as_production(frame).to_csv(path, index=False)
    return path


def step_file(path, values):
    """Write step times [s] of runs [run, step]."""
    lines = ["run,step,step_s"]
    for run, row in enumerate(np.atleast_2d(values)):
        lines += [f"{run},{i},{x:.9f}" for i, x in enumerate(row)]
    path.write_text("\n".join(lines) + "\n")
    return path


def validated(*job, **options):
    return prism.summary(prism.validate(*job, **{"seed": 1, **options}))


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write(tmp_path_factory.mktemp("trace"), Layout(2, 1, 4, 30))


@pytest.fixture(scope="module")
def model(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("model") / "model.nc"
    prism.save(prism.fit(trace, 0), path)
    return path


def one_gpu(dp=1, rank=0.0, **run):
    """Each step is the sum of eight normal ops: normal, of mean 12 s and a known spread."""
    return prism.load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": 4, "dp": dp}, "run": {"steps": 20, **run},
        "variability": {"library": None, "effects": {
            "rank": {"cv": rank}, "residual": {"law": "normal", "cv": 0.05}}},
    })  # fmt: skip


SPREAD = 0.05 * np.sqrt(4 * 5)


# ------------------------------------------------------------------------------- closed forms
@pytest.fixture(scope="module")
def split(trace):
    options = {"trace": trace, "train": "first-half", "replicates": 1000, "seed": 3}
    return prism.validate(bootstrap=5, **options)


def test_figures_are_scipys_of_the_samples(split):
    """The prediction, its baselines and the floor, each against what was held out."""
    found = prism.summary(split)
    json.dumps(found, allow_nan=False)
    x = split.measured.to_numpy()
    samples = {"predicted": split.predicted, "copy": split.training,
               "independent": split.predicted_independent}  # fmt: skip
    for name, sample in samples.items():
        y = sample.to_numpy()
        row = found if name == "predicted" else found["baselines"][name]
        assert row["n_measured"] == x.size == 15
        assert row["ks"] == pytest.approx(stats.ks_2samp(x, y).statistic)
        aligned = stats.ks_2samp(x / np.median(x), y / np.median(y)).statistic
        assert row["ks_aligned"] == pytest.approx(aligned, abs=0.02)
        assert row["wasserstein"] == pytest.approx(stats.wasserstein_distance(x, y))
        assert row["mean_error"] == pytest.approx(y.mean() / x.mean() - 1.0)
        for q in (50, 95, 99):
            error = np.percentile(y, q) / np.percentile(x, q) - 1.0
            assert row[f"p{q}_error"] == pytest.approx(error)
        cv = [z.std(ddof=1) / z.mean() for z in (y, x)]
        assert row["cv_ratio"] == pytest.approx(cv[0] / cv[1])
    copy = found["baselines"]["copy"]
    assert found["ks_floor"] == copy["ks"]
    assert found["p95_floor"] == pytest.approx(abs(copy["p95_error"]))
    assert found["ks_critical_5pct"] == pytest.approx(stats.kstwo.ppf(0.95, 15))
    assert found["ks"] < found["baselines"]["independent"]["ks"]
    assert (found["n_train"], split.predicted.size) == (15, 1000)
    assert (split.cdf_lo <= split.cdf_hi).all()
    for name in ("measured", "training", "predicted", "predicted_independent", "cdf_time"):
        assert split[name].attrs["units"] == "s"


def test_the_same_seed_gives_the_same_and_fewer_repetitions_no_p_value(trace, split):
    options, seen = {"trace": trace, "train": "first-half", "replicates": 1000, "seed": 3}, []
    some = prism.validate(bootstrap=3, progress=lambda *done: seen.append(done), **options)
    assert prism.validate(bootstrap=3, threads=2, **options).to_xarray().identical(some.to_xarray())
    assert seen == [(1, 3), (2, 3), (3, 3)]
    none = prism.validate(bootstrap=0, **options)
    assert prism.summary(none)["ks_p_value"] is None and "cdf_lo" not in none
    assert np.array_equal(none.predicted, split.predicted)


@pytest.mark.parametrize(("n", "shift"), [(30, 0.0), (30, 0.6), (200, 0.12)])
def test_p_values_of_independent_steps_are_those_of_kolmogorov(tmp_path, n, shift):
    """Normal steps, quantiles of the predicted law moved by some standard deviations."""
    z = stats.norm.ppf((np.arange(n) + 0.5) / n) + shift
    z = np.random.default_rng(2).permutation(z)
    path = step_file(tmp_path / "steps.csv", 12.0 + SPREAD * z)
    found = validated(one_gpu(), measured=path, bootstrap=300, replicates=6400)
    assert found["ks"] == pytest.approx(stats.kstest(z, "norm").statistic, abs=0.02)
    p = stats.kstwo.sf(found["ks"], n)
    error = np.sqrt(max(p * (1 - p), 0.003) / 300)
    assert found["ks_p_value"] == pytest.approx(p, abs=4 * error + 0.02)
    assert found["n_effective"] == pytest.approx(n, rel=0.2)
    assert found["p50_error"] == pytest.approx(12 / (12 + SPREAD * shift) - 1, abs=0.002)
    assert found["cv_ratio"] == pytest.approx(1.0, abs=0.08)
    assert found["baselines"]["copy"] is None and found["ks_floor"] is None
    assert found["n_train"] == 0


def test_steps_that_remember_each_other_are_no_more_evidence_than_independent_ones(tmp_path):
    """An AR(1) series counts as (1 - rho)/(1 + rho) of its length; its p-value with that many."""
    rng, rho, n, effective, p_values = np.random.default_rng(4), 0.9, 400, [], []
    for k in range(4):
        z = lfilter([1.0], [1.0, -rho], np.sqrt(1 - rho**2) * rng.standard_normal(n + 100))[100:]
        path = step_file(tmp_path / f"{k}.csv", 12.0 + SPREAD * z)
        found = validated(one_gpu(), measured=path, bootstrap=100, replicates=6400)
        effective.append(found["n_effective"])
        expected = stats.kstwo.sf(found["ks"], max(1, round(found["n_effective"])))
        p_values.append((found["ks_p_value"], expected, stats.kstwo.sf(found["ks"], n)))
        assert len(found["notes"]) > 1  # that it is so
    assert np.mean(effective) == pytest.approx(n * (1 - rho) / (1 + rho), rel=0.5)
    mine, expected, naive = np.transpose(p_values)
    np.testing.assert_allclose(mine, expected, atol=0.17)
    assert mine.mean() > 0.2 > 0.05 > naive.mean()


@pytest.mark.parametrize(("n", "runs"), [(40, 1), (400, 1), (10, 10)])
def test_what_would_have_been_seen_is_students(tmp_path, n, runs):
    """(t at 5 % + t at 80 %) standard errors of n independent normal steps; of runs, of theirs."""
    z = np.random.default_rng(8).permutation(stats.norm.ppf((np.arange(n) + 0.5) / n))
    rows, spread = 12.0 + SPREAD * z.reshape(1, -1), SPREAD
    if runs > 1:  # steps of a run alike
        rows = rows.reshape(-1, 1) + 1e-3 * np.random.default_rng(9).standard_normal((runs, 30))
    path = step_file(tmp_path / "steps.csv", rows)
    found = validated(one_gpu(), measured=path, bootstrap=0, replicates=6400)
    seen = found["detectable_80"]
    error = spread * z.std(ddof=1) / 12.0 / np.sqrt(n)
    t = stats.t.isf([0.025, 0.2], n - 1).sum()
    assert seen["mean"] == pytest.approx(np.expm1(t * error), rel=0.15)
    assert (found["n_measured"], found["n_runs"]) == (rows.size, runs)
    low, high = found["mean_error_ci"]
    half = stats.t.isf(0.025, n - 1) * error
    assert 0.5 * (high - low) == pytest.approx(half, rel=0.15)
    if runs == 1:
        assert seen["cv"] == pytest.approx(np.expm1(t / np.sqrt(2 * (n - 1))), rel=0.35)
    assert (seen["p95"] is None) == (n < 100)
    if n == 400:  # p95 of independent values, by its density
        error = np.sqrt(0.05 * 0.95 / n) / stats.norm.pdf(1.645) * SPREAD / (12 + 1.645 * SPREAD)
        assert seen["p95"] == pytest.approx(np.expm1(t * error), rel=0.35)


def test_an_error_of_that_size_is_seen_in_four_of_five_cases(tmp_path):
    """As often as promised, and an error of nothing in one of twenty."""
    rng, hits, n = np.random.default_rng(5), {0: 0, 1: 0}, 25
    of_mean = stats.t.isf([0.025, 0.2], 24).sum() * SPREAD / 12.0 / 5.0
    for _ in range(n):
        z = rng.standard_normal(25)
        for k in hits:
            values = (12.0 + SPREAD * z) / (1.0 + k * of_mean)
            path = step_file(tmp_path / "steps.csv", values)
            low, high = validated(one_gpu(), measured=path, bootstrap=0, replicates=640)[
                "mean_error_ci"]  # fmt: skip
            hits[k] += not low <= 0.0 <= high
    assert hits[0] / n <= 0.16 and hits[1] / n == pytest.approx(0.8, abs=0.2)


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_errors_are_of_the_prediction_over_the_measurement(tmp_path, factor):
    z = stats.norm.ppf((np.arange(100) + 0.5) / 100)
    values = factor * (12.0 + SPREAD * np.random.default_rng(1).permutation(z))
    found = validated(one_gpu(), measured=step_file(tmp_path / "s.csv", values), bootstrap=19)
    for figure in ("mean", "p50", "p95", "p99"):
        assert found[f"{figure}_error"] == pytest.approx(1 / factor - 1, abs=0.01)
    assert found["ks"] == 1.0 and found["ks_aligned"] < 0.1
    assert found["ks_p_value"] == pytest.approx(1 / 20)  # the least that can be
    assert found["wasserstein"] == pytest.approx(12 * abs(1 - factor), rel=0.02)
    assert found["cv_ratio"] == pytest.approx(1.0, abs=0.05)
    # p95 of a hundred values is on average below that of the law
    of_hundred = np.random.default_rng(6).standard_normal((4_000, 100))
    expected = 12.0 + SPREAD * np.quantile(of_hundred, 0.95, axis=1).mean()
    same_n = expected / np.quantile(values, 0.95) - 1.0
    assert found["p95_error_same_n"] == pytest.approx(same_n, abs=0.002)
    density = stats.norm.pdf(1.645) / SPREAD
    error = np.sqrt(0.05 * 0.95 / 100) / density / (12 + 1.645 * SPREAD)
    assert found["p95_measured_se"] == pytest.approx(error, rel=0.5)


def test_one_run_is_said_not_to_test_which_allocation_a_job_gets(tmp_path):
    z = np.random.default_rng(1).standard_normal((2, 60))
    options, job = {"replicates": 640, "bootstrap": 9}, one_gpu(4, 0.02)
    two, one = (validated(job, measured=step_file(tmp_path / "s.csv", 12.0 + SPREAD * rows),
                          **options)["notes"] for rows in (z, z[:1]))  # fmt: skip
    assert len(one) == len(two) + 1


def test_the_null_of_a_run_is_one_cluster(tmp_path):
    """Steps of one slow GPU are no evidence against a job whose GPUs differ as much."""
    z = np.random.default_rng(3).standard_normal(100)
    path = step_file(tmp_path / "steps.csv", 12.0 * 1.02 + SPREAD * z)
    options = {"measured": path, "bootstrap": 60, "replicates": 6400}
    alike, differ = (validated(one_gpu(1, rank), **options)["ks_p_value"] for rank in (0.0, 0.02))
    assert alike < 0.05 < 0.1 < differ


def test_totals_of_runs(tmp_path):
    """Sums of twenty normal steps, or of ten times as many where each value is a mean of ten."""
    rows = 12.0 * np.repeat(1 + 0.001 * np.arange(4)[:, None], 20, axis=1)
    rows = rows + 1e-4 * np.random.default_rng(1).standard_normal(rows.shape)
    path = step_file(tmp_path / "runs.csv", rows)
    options = {"quantity": "time_to_train", "bootstrap": 5, "replicates": 512, "measured": path}
    result = prism.validate(one_gpu(), seed=1, **options)
    found = prism.summary(result)
    assert (result.attrs["quantity"], found["n_measured"]) == ("time_to_train", 4)
    assert result.measured.to_numpy() == pytest.approx(rows.sum(axis=1), rel=1e-6)
    assert float(result.predicted.mean()) == pytest.approx(240.0, rel=0.005)
    assert float(result.predicted.std()) == pytest.approx(SPREAD * np.sqrt(20), rel=0.15)
    assert found["mean_error"] == pytest.approx(1 / 1.0015 - 1, abs=0.003)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]},n_avg", *(f"{line},10" for line in lines[1:])]) + "\n")
    longer = prism.validate(one_gpu(), seed=1, **options)
    assert float(longer.predicted.mean()) == pytest.approx(2400.0, rel=0.005)
    path.write_text("\n".join(lines[:-5]) + "\n")  # runs that differ in length are said to
    assert len(validated(one_gpu(), **options)["notes"]) == len(found["notes"]) + 1
    totals = tmp_path / "totals.csv"
    totals.write_text("run,total_s\n" + "".join(f"{i},{250.0 + i}\n" for i in range(4)))
    given = prism.validate(one_gpu(), seed=1, totals=f"{totals}:total_s", **options)
    assert sorted(given.measured.to_numpy()) == [250.0, 251.0, 252.0, 253.0]


# ----------------------------------------------------------------------------------- traces
def test_splits(tmp_path, trace, split):
    """The first half, every other step from the first, or so many; all others are held out."""
    even = prism.validate(trace=trace, train="even", bootstrap=0, replicates=64, seed=1)
    order = np.empty(30)
    order[::2], order[1::2] = even.training, even.measured
    np.testing.assert_allclose(split.training, order[:15])
    np.testing.assert_allclose(split.measured, order[15:])
    few = prism.validate(trace=trace, train=20, bootstrap=0, replicates=64, seed=1)
    np.testing.assert_allclose(few.training, order[:20])
    np.testing.assert_allclose(few.measured, order[20:])
    for train in ("30", "0", "2", "99", "odd", "-3", "0.5", "five"):
        with pytest.raises(prism.PrismError):
            prism.validate(trace=trace, train=train)
    short = write(tmp_path, Layout(2, 1, 2, 3))
    for options in ({"trace": short, "train": "even"}, {"trace": trace, "dependence": "some"},
                    {"trace": trace, "bootstrap": -1}, {"trace": trace, "replicates": 0},
                    {"trace": trace, "quantity": "time_to_train"}, {}):  # fmt: skip
        with pytest.raises(prism.PrismError):
            prism.validate(**options)


def test_p_values_are_those_of_chance_where_the_model_is_the_truth(tmp_path):
    p = [
        validated(trace=write(tmp_path, seed=s), train="even", bootstrap=9, replicates=64, seed=s,
                  threads=1)["ks_p_value"]
        for s in range(examples(10))
    ]  # fmt: skip
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert np.mean(np.array(p) <= 0.1) <= 0.3
    # negative control: the checker sees p-values that are all too small
    assert stats.kstest(np.array(p) ** 5, "uniform").pvalue < 0.01


def test_p_values_are_small_where_ops_depend_and_the_prediction_leaves_it_out(tmp_path):
    effects = Effects(rank_sd=0.01, step_sd=0.06, content_sd=0.01, residual_sd=0.01)
    path = write(tmp_path, Layout(2, 1, 6, 40), effects)
    found = {
        dependence: validated(trace=path, train="even", dependence=dependence, bootstrap=19,
                              replicates=512, threads=1)
        for dependence in ("full", "none")
    }  # fmt: skip
    assert found["none"]["cv_ratio"] < 0.6 and found["none"]["dependence"] == "none"
    assert found["none"]["ks_p_value"] <= 0.1 < found["full"]["ks_p_value"]


def test_a_job_that_changes_half_way_is_not_predicted(tmp_path):
    path = write(tmp_path, change=(12, 1.2))
    found = validated(trace=path, train="first-half", bootstrap=19)
    assert found["ks"] == found["ks_floor"] == 1.0
    assert found["ks_p_value"] == pytest.approx(1.0 / 20.0)
    assert found["p95_error"] == pytest.approx(1 / 1.2 - 1.0, abs=0.04)


def test_a_fitted_model_predicts_its_own_steps(model, tmp_path):
    drawn = np.asarray(prism.simulate(prism.load_job(model), 640, seed=9).step_time)[:40]
    path = step_file(tmp_path / "own.csv", drawn)
    own = validated(model, measured=path, bootstrap=60, replicates=1024)
    assert own["ks_p_value"] > 0.02 and abs(own["p95_error"]) < 0.05
    assert own["n_train"] > 2 and own["ks_floor"] is None
    for options in ({"quantity": "loss"}, {"dependence": "some"}, {"bootstrap": -5},
                    {"train": "even"}, {"trace": path}):  # fmt: skip
        with pytest.raises(prism.PrismError):
            prism.validate(model, measured=path, **options)


@pytest.mark.parametrize("first", [[27.0], [6.0, 3.0, 2.5, 2.0, 2.0]])
def test_a_warm_up_is_left_out_of_what_is_measured(tmp_path, first):
    """One step of 27 times the others would make the CV 50 times that of the prediction."""
    values = 12.0 + SPREAD * np.random.default_rng(4).standard_normal(300)
    values[: len(first)] *= first
    path = step_file(tmp_path / "steps.csv", values)
    options = {"measured": path, "bootstrap": 0, "replicates": 512}
    found = validated(one_gpu(), **options)
    (row,) = found["changes"]
    assert (row["kind"], row["skip"]) == ("warm_up", len(first))
    assert found["n_measured"] == 300 - len(first) and len(found["warnings"]) >= 1
    assert found["cv_ratio"] == pytest.approx(1.0, abs=0.2)
    skipped = validated(one_gpu(), skip=len(first), **options)
    assert skipped["changes"] == [] and skipped["n_measured"] == found["n_measured"]
    assert validated(one_gpu(), steps="100:149", **options)["n_measured"] == 50


def test_a_drift_that_is_long_beside_what_was_fitted_is_said(tmp_path, few_repeats):
    rng, told = np.random.default_rng(7), []
    for share in (1.0, 0.0):
        drift = lfilter([1.0], [1.0, -np.exp(-1 / 60)], rng.standard_normal(600))[200:]
        body = 0.01 * share * drift / drift.std() + 0.005 * rng.standard_normal(400)
        path = step_file(tmp_path / f"{share}.csv", 1.0 + body)
        found = validated(trace=path, train="first-half", bootstrap=2, replicates=256)
        assert (found["n_train"], found["n_measured"]) == (200, 200)
        told.append(len(found["warnings"]))
    assert told[0] > told[1]


# ------------------------------------------------------------------------------------ pictures
def label_of(ax):
    return [text.get_text().split(",")[0] for text in ax.get_legend().get_texts()]


def test_every_sample_has_its_curve(split):
    ax = plots.plot_validation(split)
    assert set(label_of(ax)) >= {"measured", "training", "predicted"}
    line = next(line for line in ax.lines if line.get_label().startswith("measured"))
    assert np.array_equal(line.get_xdata()[1:], np.sort(split["measured"]))
    assert line.get_ydata()[-1] == 1.0 and line.get_drawstyle() == "steps-post"
    assert len(ax.collections) == 1  # the band
    bare = split.to_xarray()[["measured", "predicted"]]
    ax = plots.plot_validation(bare)
    assert label_of(ax) == ["predicted", "measured"] and not ax.collections
    # sampling that is far off does not squeeze the rest
    wide = ax.get_xlim()
    far = split.to_xarray().assign(predicted_independent=1.5 * split["predicted"])
    ax = plots.plot_validation(far)
    assert "independent sampling" not in label_of(ax) and np.ptp(ax.get_xlim()) < 2 * np.ptp(wide)
    assert any("independent" in text.get_text() for text in ax.texts)
    # quantiles lie on the line where both agree
    same = bare.assign(predicted=("replicate", np.resize(np.sort(bare["measured"]), 1000)))
    ax = plots.plot_quantiles(same)
    x, y = next(line for line in ax.lines if line.get_label() == "predicted").get_data()
    assert np.array_equal(x, np.sort(bare["measured"])) and y == pytest.approx(x, rel=0.02)
    assert ax.get_xlim() == ax.get_ylim()


@pytest.mark.parametrize("n", [1, 2, 15])
def test_two_panels_of_steps_or_of_runs_however_few(split, tmp_path, n):
    few = split.to_xarray().isel(measured_idx=slice(n)).assign_attrs(quantity="time_to_train")
    few = few.assign(predicted=1e6 * few["predicted"])
    ax = plots.draw_validation(few)
    assert len(ax.figure.axes) == 2 and "days" in ax.get_xlabel()
    plots.save_figure(ax, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1_000


def test_a_replay_shows_workers_and_steps_that_are_off(tmp_path):
    effects = Effects(residual_sd=0.001, lemons={(1, 2): 1.6})
    path = write(tmp_path, Layout(4, 4, 4, 6), effects)
    result = prism.replay(path).to_xarray()
    ax = plots.plot_workers(result)
    image = np.asarray(ax.images[0].get_array())
    assert image.shape == (4, 4) and len(ax.get_yticklabels()) == 4
    slow = np.unravel_index(image.argmax(), image.shape)
    assert set(map(int, slow)) == {1, 2} and image.max() > 1.2
    off = result.assign(replayed_step_time=result["replayed_step_time"].copy(deep=True))
    off["replayed_step_time"][3] *= 1.03
    assert len(plots.plot_replay(off).texts) == 1 + len(plots.plot_replay(result).texts)
    healthy = result.assign(slowdown_by_worker=result["slowdown_by_worker"] * 0.0 + 1.0001)
    assert plots.plot_workers(healthy).images[0].get_clim() == (1.0, 1.02)
