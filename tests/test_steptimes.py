"""Models of step times: known spreads, stalls and beginnings found; runs and rests predicted."""

import json

import numpy as np
import pandas as pd
import pytest
from campaign import examples
from scipy.stats import ks_2samp, kstest
from steps_made import STEP_S, TRUTH, made, write

import prism


@pytest.fixture(scope="module", autouse=True)
def few_repeats():
    """Intervals by as few simulated repetitions as those of very long series."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prism.models.steptimes.likelihood._CELLS", 0)
        yield


@pytest.fixture
def fitted(tmp_path):
    """Fit step times [step, run]: the model, its figures."""

    def fit(seconds, **options):
        model = prism.fit(write(tmp_path / "steps.csv", seconds), 0, **options)
        return model, prism.summary(model)

    return fit


def runs_of(model, folder, steps, n=2000, seed=1, **options):
    """Runs that a model predicts: totals [s], terms by name."""
    prism.save(model, folder / "model.nc")
    found = prism.estimate(folder / "model.nc", replicates=64, run_replicates=n, steps=steps,
                           seed=seed, **options)  # fmt: skip
    terms = found.run_term_time.to_dataset("term")
    return found.time_to_train.values, {name: terms[name].values for name in terms}


def mean_std(truth, n):
    """Spread of the mean of n steps of a run [1], run effect included."""
    lag = np.arange(1, n)
    r = np.exp(-STEP_S / truth["tau_s"]) if truth.get("drift") else 0.0
    of_drift = truth.get("drift", 0.0) ** 2 * (n + 2 * ((n - lag) * r**lag).sum()) / n**2
    return np.sqrt(of_drift + truth["white"] ** 2 / n + truth.get("run", 0.0) ** 2)


# ---------------------------------------------------------------------------------- what is found
@pytest.mark.parametrize(
    ("truth", "shape"),
    [
        (TRUTH, (300, 12)),
        ({"white": 0.005, "drift": 0.002, "tau_s": 100.0, "run": 0.001}, (400, 12)),
        ({"white": 0.008, "drift": 0.004, "tau_s": 300.0}, (2_000, 1)),
    ],
)
def test_spreads_are_recovered_within_their_intervals(fitted, truth, shape):
    repetitions, held, wide = examples(5), dict.fromkeys(truth, 0), 0
    for seed in range(repetitions):
        _, found = fitted(made(truth, shape, seed))
        bounds = {name: part["ci"] for name, part in found["effects"].items()}
        bounds["tau_s"] = found["drift_memory"]["ci"]
        for name, value in truth.items():
            low, high = bounds[name]
            held[name] += low <= value <= high
            wide += low <= 2.0 * value + 0.01 <= high if name != "tau_s" else 0
    # 90 % intervals: 1 or fewer of 5 has a chance of 0.0005
    assert min(held.values()) > 0.3 * repetitions, held
    assert sum(held.values()) > 0.65 * repetitions * len(held), held
    assert wide <= 0.2 * repetitions  # negative control: they do not hold just anything


@pytest.mark.parametrize(
    ("shape", "times"), [((500, 1), 1.0), ((500, 5), 1.0), ((500, 1), 4.0), ((500, 5), 2.0)]
)
def test_the_spread_of_a_run_s_mean_is_about_right(fitted, tmp_path, shape, times):
    """White noise alone, and a drift that makes the mean's variance so many times as large."""
    truth = {"white": 0.01, "drift": 1e-9, "tau_s": shape[0] / 30.0 * STEP_S}
    one = mean_std({"white": 1e-9, "drift": 1.0, "tau_s": truth["tau_s"]}, shape[0])
    truth["drift"] = np.sqrt(times - 1.0) * 0.01 / np.sqrt(shape[0]) / one
    expected = mean_std(truth, shape[0])
    assert expected == pytest.approx(np.sqrt(times / shape[0]) * 0.01, rel=1e-3)
    ratio = []
    for seed in range(examples(5)):
        model, _ = fitted(made(truth, shape, seed))
        totals, _ = runs_of(model, tmp_path, shape[0], 1000)
        ratio.append(totals.std() / totals.mean() / expected)
    assert 0.6 < np.median(ratio) < 1.6


def test_stalls_are_taken_out_and_counted(fitted):
    calm, seconds = (made(stalls=s, shape=(1_500, 8)) for s in (0.0, 0.002))
    _, found = fitted(seconds)
    n = int((seconds - calm > 0.5).sum())
    assert found["stalls"]["n"] == pytest.approx(n, abs=2)  # two in a row are one
    assert found["stalls"]["mean_s"] * found["stalls"]["n"] == pytest.approx(
        (seconds - calm).sum(), rel=0.03
    )
    assert found["effects"]["white"]["cv"] == pytest.approx(TRUTH["white"], rel=0.05)
    low, high = found["stalls"]["rate_per_h_ci"]
    assert low < 3600.0 * 0.002 / STEP_S < high


def test_a_stall_that_the_clock_takes_back_is_none(fitted):
    seconds = made({"white": 0.001}, (300, 1))
    seconds[100, 0] += 2.0
    seconds[101, 0] -= 1.5
    stalls = fitted(seconds)[1]["stalls"]
    assert (stalls["n"], stalls["mean_s"]) == (1, pytest.approx(0.5, abs=0.02))
    seconds[101, 0] -= 0.5
    assert fitted(seconds)[1]["stalls"]["n"] == 0


def test_work_by_step_is_what_runs_have_in_common(fitted, tmp_path):
    work = 1.0 + 0.1 * np.arange(600) / 600 + 0.05 * np.sin(np.arange(600) / 20.0)
    model, found = fitted(made(work=work))
    assert found["work_by_step"]["found"] and found["stalls"]["n"] == 0
    np.testing.assert_allclose(model.work / STEP_S, work, rtol=0.01)
    totals, _ = runs_of(model, tmp_path, 600)
    assert totals.mean() == pytest.approx(STEP_S * work.sum(), rel=5e-3)
    assert not fitted(made())[1]["work_by_step"]["found"]
    assert not fitted(made(work=work)[:, :2])[1]["work_by_step"]["found"]


def test_a_beginning_with_stalls_of_its_own_comes_once(fitted, tmp_path):
    seconds = made({"white": 0.003, "run": 0.002}, (800, 10))
    rng = np.random.default_rng(5)
    for r in range(10):
        seconds[rng.choice(90, 3, replace=False), r] += 4.0
    model, found = fitted(seconds)
    assert 60 <= found["beginning"]["steps"] <= 90 and found["stalls"]["n"] == 0
    for n in (800, 8_000):
        _, terms = runs_of(model, tmp_path, n)
        assert terms["beginning"].mean() == pytest.approx(12.0, abs=0.2)
    everywhere = made({"white": 0.003, "run": 0.002}, (800, 10), stalls=0.004)
    assert fitted(everywhere)[1]["beginning"]["steps"] == 0


def test_warm_up_of_one_run_is_no_stall_rate(fitted, tmp_path):
    seconds = made({"white": 0.002}, (300, 1))
    seconds[:5, 0] *= [3.0, 1.5, 1.4, 1.2, 1.1]
    model, found = fitted(seconds)
    assert found["stalls"]["n"] == 0 and found["changes"][0]["kind"] == "warm_up"
    totals, _ = runs_of(model, tmp_path, 300, 50)
    kept = found["beginning"]["steps"]  # the beginning of a run, or left out
    expected = seconds.sum() if kept else 300 * seconds[5:].mean()
    assert totals.mean() == pytest.approx(expected, rel=2e-3)


def test_totals_that_leave_out_first_steps(tmp_path):
    seconds = made(shape=(400, 15))
    seconds[:6] += np.random.default_rng(6).exponential(2.0, (6, 15))
    totals = pd.DataFrame({"run": [f"r{i}" for i in range(15)],
                           "total_s": seconds[6:].sum(axis=0) + 1.25})  # fmt: skip
    totals.to_csv(tmp_path / "totals.csv", index=False)
    steps = write(tmp_path / "steps.csv", seconds)
    model = prism.fit(steps, 0, totals=f"{tmp_path / 'totals.csv'}:total_s")
    offset = prism.summary(model)["offset"]
    assert (offset["skips"], offset["mean_s"]) == (6, pytest.approx(1.25, abs=0.05))
    whole, _ = runs_of(model, tmp_path, 400)
    assert whole.mean() == pytest.approx(totals.total_s.mean(), rel=5e-3)
    totals.assign(run="other").to_csv(tmp_path / "totals.csv", index=False)
    with pytest.raises(prism.PrismError, match="other"):
        prism.fit(steps, 0, totals=f"{tmp_path / 'totals.csv'}:total_s")


def test_a_fit_says_what_it_cannot_tell(fitted, tmp_path):
    _, one = fitted(made(shape=(40, 1)))
    said = " ".join(one["not_identifiable"])
    for word in ("run effect", "work by step", "stalls after the beginning"):
        assert word in said
    assert one["effects"]["run"]["ci"] == [None, None] != one["effects"]["white"]["ci"]
    with pytest.raises(prism.PrismError, match="at least 8"):
        fitted(made(shape=(5, 1)))


def test_a_drift_that_is_not_there_is_found_as_rarely_as_is_said(fitted):
    n, p = examples(12), {}
    strong = {"white": 0.01, "drift": 0.01, "tau_s": 60.0}
    for name, truth in (("none", {"white": 0.01}), ("some", strong)):
        found = [fitted(made(truth, (500, 1), seed))[1]["drift_memory"]["no_drift_p_value"]
                 for seed in range(n if name == "none" else n // 3)]  # fmt: skip
        p[name] = np.array(found)
    assert np.mean(p["none"] < 0.05) <= 0.25  # 5 %: three or more of 12 has a chance of 2 %
    assert np.mean(p["some"] < 0.05) >= 0.7


# ---------------------------------------------------------------------------------- prediction
@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Step times of twelve runs, of twelve others alike, and the model of the first."""
    folder = tmp_path_factory.mktemp("steps")
    train = write(folder / "train.csv", made(stalls=0.001))
    test = write(folder / "test.csv", made(seed=2, stalls=0.001))
    prism.save(prism.fit(train, 0), folder / "m.nc")
    return train, test, folder / "m.nc"


def test_totals_have_the_spread_of_runs_like_the_measured(fitted, tmp_path):
    n = 500
    truth = dict(TRUTH)
    model, _ = fitted(made(truth, (n, 60), seed=3, stalls=0.0004))
    drawn, terms = runs_of(model, tmp_path, n, 4000)
    fresh = made(truth, (n, 4000), seed=4, stalls=0.0004).sum(axis=0)
    assert drawn.mean() == pytest.approx(fresh.mean(), rel=3e-3)
    assert drawn.std() == pytest.approx(fresh.std(), rel=0.3)
    np.testing.assert_allclose(sum(terms.values()), drawn, rtol=1e-10)
    # negative control: without memory the spread is far too small
    alone = np.sqrt(n) * STEP_S * np.hypot(truth["white"], truth["drift"])
    assert alone < 0.5 * fresh.std()


def test_millions_of_steps_go_by_the_closed_form(files):
    path = files[2]
    spread = {k: float(v) for k, v in zip(("white", "drift", "tau_s", "run"),
                                          prism.load(path).spread.values, strict=True)}  # fmt: skip
    found = prism.estimate(path, replicates=64, run_replicates=4000, steps=3_000_000, seed=3)
    times = found.time_to_train.values
    assert times.std() / times.mean() == pytest.approx(spread["run"], rel=0.15)


def test_draws_do_not_depend_on_their_number(files):
    few, many = (
        prism.estimate(files[2], replicates=64, run_replicates=n, steps=5_000, seed=3)
        for n in (20, 50)
    )
    np.testing.assert_allclose(few.time_to_train, many.time_to_train[:20], rtol=1e-12)


def test_held_out_runs_agree_and_independent_steps_do_not(files):
    _, test, path = files
    options = {"measured": test, "seed": 1, "replicates": 2_000}
    figures = prism.summary(prism.validate(path, quantity="time_to_train", bootstrap=9, **options))
    assert figures["ks_p_value"] > 0.1 and 0.5 < figures["cv_ratio"] < 2.0
    assert figures["baselines"]["independent"]["cv_ratio"] < 0.5
    alone = prism.summary(prism.validate(path, quantity="time_to_train", bootstrap=10,
                                         dependence="none", **options))  # fmt: skip
    # twelve runs tell by their spread, not by the p-value: 0.19 of 99 repetitions
    assert alone["cv_ratio"] < 0.5 and alone["ks"] > figures["ks"]
    steps = prism.summary(prism.validate(model=path, bootstrap=9, **options))
    assert steps["ks_p_value"] > 0.1 and abs(steps["p95_error"]) < 0.01


def test_first_steps_predict_the_later_ones(files):
    figures = prism.summary(
        prism.validate(trace=files[0], train="300", seed=1, bootstrap=9, replicates=2_000)
    )
    assert figures["n_train"] == 300 * 12
    assert figures["ks_p_value"] > 0.1 and figures["baselines"]["copy"]["ks"] > 0.0
    with pytest.raises(prism.PrismError, match="first-half or a number"):
        prism.validate(trace=files[0], train="even", seed=1)


def test_p_values_of_a_split_are_those_of_chance_where_the_model_is_the_truth(tmp_path):
    """Held-out steps are of the fitted runs, whose effects the null must share with them."""
    truth, p, control = {"white": 0.005, "run": 0.02}, [], []
    for s in range(examples(4)):
        seconds = made(truth, (60, 4), seed=s)
        options = {"train": "30", "seed": s, "bootstrap": 9, "replicates": 500}
        path = write(tmp_path / "steps.csv", seconds)
        p.append(prism.summary(prism.validate(trace=path, **options))["ks_p_value"])
        if s < 2:  # negative control: twice what one run differs from another by
            seconds[30:] *= 1.02
            path = write(tmp_path / "steps.csv", seconds)
            control.append(prism.summary(prism.validate(trace=path, **options))["ks_p_value"])
    assert 0.2 < np.mean(p) < 0.8 and np.ptp(p) > 0.3
    assert np.mean(control) < 0.15


# ------------------------------------------------------------------------------ runs in progress
def rest_of(path, folder, seconds, steps, n=500, **options):
    """Totals of runs whose first steps are known [s]: the dataset, its figures."""
    log = write(folder / "sofar.csv", seconds)
    found = prism.estimate(path, replicates=64, run_replicates=n, steps=steps, seed=1,
                           completed=log, **options)  # fmt: skip
    return found, prism.summary(found)


def test_a_run_in_progress_is_predicted_within_its_intervals(fitted, tmp_path):
    runs = made(shape=(400, 44), seed=21, stalls=0.001)
    model, _ = fitted(runs[:, :20])
    prism.save(model, tmp_path / "model.nc")
    inside, widths, ranks = {40: [], 200: []}, {40: [], 200: []}, []
    for r in range(20, 44):
        for done in inside:
            found, _ = rest_of(tmp_path / "model.nc", tmp_path, runs[:done, r], 400, 250)
            totals = found.time_to_train.values
            low, high = np.quantile(totals, [0.05, 0.95])
            inside[done].append(low <= runs[:, r].sum() <= high)
            widths[done].append(high - low)
        ranks.append((totals < runs[:, r].sum()).mean())
    for done, values in inside.items():
        assert np.mean(values) >= 0.7, done  # 90 %: fewer than 17 of 24 has a chance of 0.2 %
    assert np.mean(widths[200]) < 0.8 * np.mean(widths[40])
    assert kstest(ranks, "uniform").pvalue > 0.005
    assert kstest(0.5 + 0.4 * (np.array(ranks) - 0.5), "uniform").pvalue < 0.05  # control


@pytest.mark.parametrize("scale", [1.3, 30.0])
def test_steps_that_contradict_a_model_are_told_and_believed(files, tmp_path, scale):
    run = made(shape=(300, 1), seed=41)[:, 0]
    _, usual = rest_of(files[2], tmp_path, run[:100], 300)
    found, figures = rest_of(files[2], tmp_path, scale * run[:100], 300, 2000)
    times = " ".join(figures["warnings"] + figures.get("notes", []))
    assert "times" in times and not [x for x in usual["warnings"] if " times " in x]
    assert float(found.time_to_train.mean()) == pytest.approx(scale * run.sum(), rel=0.01)


def test_a_deadline_counts_what_is_done(files, tmp_path):
    run = made(seed=7, shape=(450, 1))[:, 0]
    before = prism.summary(
        prism.estimate(files[2], replicates=64, run_replicates=500, seed=1, steps=900)
    )
    found, later = rest_of(files[2], tmp_path, run, 900, deadline=1e5, start="2025-01-01")
    assert later["time_to_train"]["std"] < 0.7 * before["time_to_train"]["std"]
    assert later["finish_by"]["probability"] == 1.0 and "date" in later["finish_date"]
    np.testing.assert_allclose(found.time_to_train - found.time_left, run.sum(), rtol=1e-6)
    assert before["time_to_train"]["mean"] == pytest.approx(900 * 2.004, rel=0.01)
    delays = sum(before["delay_by_term"].values()) + 900 * before["ideal_step_time"]
    assert delays == pytest.approx(before["time_to_train"]["mean"], rel=1e-9)


JOB = {
    "model": {"durations": {"forward_s": 0.5, "backward_s": 1.5}},
    "variability": {"library": None, "effects": {"run": {"cv": 0.05}, "jitter": {
        "mean_s": 0.0, "cv": 0.0}}}, "run": {"steps": 4000},
}  # fmt: skip


def test_stalls_so_far_are_stalls_to_come(tmp_path):
    """Thirty stalls of 20 s in 3,000 steps; those of the beginning are no rate."""
    rng = np.random.default_rng(1)
    calm = STEP_S * (1.0 + 0.01 * rng.standard_normal(3000))
    stalled, early = calm.copy(), calm.copy()
    stalled[50::100] += 20.0
    early[5:200:10] += 10.0
    rest = {}
    for name, seconds in (("calm", calm), ("stalled", stalled), ("early", early)):
        found, _ = rest_of(JOB, tmp_path, seconds, 4000, 1000)
        rest[name] = found.time_left.values
    assert rest["calm"].mean() == pytest.approx(1000 * STEP_S, rel=0.01)
    assert rest["stalled"].mean() - rest["calm"].mean() == pytest.approx(200.0, rel=0.15)
    assert rest["stalled"].std() > 20.0 * 10**0.5 * 0.8
    assert rest["early"].mean() - rest["calm"].mean() < 20.0


def test_the_rest_is_as_sure_as_the_steps_make_it(tmp_path):
    rng = np.random.default_rng(3)
    for n in (50, 2000):
        seconds = 1.1 * STEP_S * (1.0 + 0.01 * rng.standard_normal(n))
        found, figures = rest_of(JOB, tmp_path, seconds, 4000, 1000)
        left = found.time_left.values
        assert left.mean() == pytest.approx((4000 - n) * 1.1 * STEP_S, rel=0.01)
        level = 1.1 * STEP_S * 0.01 / np.sqrt(n) * (4000 - n)
        noise = 1.1 * STEP_S * 0.01 * np.sqrt(4000 - n)
        assert left.std() == pytest.approx(np.hypot(level, noise), rel=0.5)


# ------------------------------------------------------------------------- files and commands
def test_a_model_s_file_that_is_not_whole_is_refused(files, tmp_path):
    whole, broken = prism.load(files[2]).to_xarray(), tmp_path / "broken.nc"
    broken.write_bytes(files[2].read_bytes()[:2_000])
    asked = {"replicates": 64, "run_replicates": 2, "steps": 10, "seed": 1}
    with pytest.raises(prism.PrismError, match="broken.nc"):
        prism.estimate(broken, **asked)
    spread = dict(zip(whole.part.values, whole.spread.values, strict=True))
    wrong = [spread | {"run": np.nan}, spread | {"run": 1e30}, spread | {"drift": 0.1, "tau_s": 0}]
    for change in (
        whole.assign_attrs(schema=2),
        whole.assign(stall_counts=0.0),
        whole.assign(residuals=("stall", np.ones(whole.sizes["stall"]))),
        *(whole.assign(spread=("part", list(x.values()))) for x in wrong),
    ):
        prism.save(change, broken)
        with pytest.raises(prism.PrismError, match="broken.nc"):
            prism.estimate(broken, **asked)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 10**21}, "steps"), ({"run_replicates": 10**9}, "run_replicates"),
        ({"slowdown_thresholds": [0.5]}, "slowdown_thresholds"),
    ],
)  # fmt: skip
def test_senseless_options_are_refused(files, options, match):
    with pytest.raises(prism.PrismError, match=match):
        prism.estimate(files[2], seed=1, **options)


def test_progress_that_makes_no_sense_is_refused(files, tmp_path):
    for seconds in (made(shape=(600, 1)), made(shape=(100, 2))):  # all done; two runs
        with pytest.raises(prism.PrismError):
            rest_of(files[2], tmp_path, seconds, 600)


def test_commands(files, run, tmp_path):
    train, test, path = files
    short = write(tmp_path / "short.csv", made(shape=(100, 4), stalls=0.001))
    status, out, err = run("fit", short, "-o", tmp_path / "n.nc", "--json", "--seed", "0")
    assert status == 0, err
    found = json.loads(out)
    assert found["kind"] == "steps" and found["effects"]["run"]["cv"] > 0
    codes = {finding["code"] for finding in found["findings"]}
    assert {"largest_share_of_step", "largest_share_of_run", "not_identifiable"} <= codes
    assert json.loads(run("show", tmp_path / "n.nc", "--json")[1])["model_kind"] == "steps"
    few = ("--bootstrap", "1", "--json", "--seed", "1")
    assert json.loads(run("validate", path, "--measured", test, *few)[1])["quantity"] == "step_time"
    assert json.loads(run("validate", "--trace", short, *few)[1])["train"] == "first-half"
    for command in (("fit", train, test), ("rank", path)):
        status, out, err = run(*command)
        assert (status, out) == (2, ""), command
    assert f"{path}: " in err


def test_more_than_one_duration_is_an_error_that_lists_them(tmp_path):
    table = pd.DataFrame({"step_s": np.ones(20), "dt_s": np.ones(20)})
    table.to_csv(tmp_path / "two.csv", index=False)
    with pytest.raises(prism.PrismError, match=r"step_s \[s\], dt_s \[s\]"):
        prism.fit(tmp_path / "two.csv")
    model = prism.fit(tmp_path / "two.csv", 0, column="dt_s")
    assert prism.summary(model)["step_time"]["std"] == 0.0


def test_drawn_steps_look_like_the_measured_ones(files):
    """Through `validate`: a fresh sample of the truth is nearer than the floor of few runs."""
    found = prism.validate(files[2], measured=files[1], seed=1, bootstrap=1, replicates=4000)
    measured, predicted = found.measured.values, found.predicted.values
    assert ks_2samp(measured, predicted).statistic < 0.15
    assert predicted.std() == pytest.approx(measured.std(), rel=0.3)
