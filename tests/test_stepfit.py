"""Models from step times: known spreads recovered, totals and rests of runs predicted."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from campaign import examples
from steps_made import STEP_S, TRUTH, as_times, made

import prism
from prism import PrismError, estimate, fit, load, save, validate
from prism import __main__ as entry
from prism.common.agreement import ks_statistic
from prism.distributions import modelfile
from prism.models.steptimes import likelihood
from prism.models.steptimes.estimate import estimate_steps
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.model import PARTS, load_step_model
from prism.models.steptimes.predict import draw_runs, draw_steps, independent
from prism.models.steptimes.series import take_apart
from prism.models.steptimes.spread import Spread, mean_variance


@pytest.fixture(scope="module", autouse=True)
def few_repeats():
    """Intervals by as few simulated repetitions as those of very long series."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood, "_CELLS", 0)
        yield


def write(path, seconds):
    times = as_times(seconds)
    table = pd.DataFrame({"run": times.run, "step": times.step, "step_s": times.seconds})
    table.to_csv(path, index=False)
    return path


# ------------------------------------------------------------------------------------- series
def test_stalls_are_taken_out_and_counted():
    seconds = made(stalls=0.002, shape=(1_500, 8))
    calm = made(shape=(1_500, 8))
    model = fit_step_times(as_times(seconds), repeats=0)
    n = int((seconds - calm > 0.5).sum())
    assert model.stall_counts.sum() == pytest.approx(n, abs=2)  # two in a row are one
    assert model.stall_s.sum() == pytest.approx((seconds - calm).sum(), rel=0.03)
    assert model.spread.white == pytest.approx(TRUTH.white, rel=0.05)
    low, high = model.report["stalls"]["rate_per_h_ci"]
    assert low < 3600.0 * 0.002 / STEP_S < high


def test_a_stall_that_the_clock_takes_back_is_none():
    seconds = made(Spread(white=0.001), (300, 1))
    seconds[100, 0] += 2.0
    seconds[101, 0] -= 1.5
    series = take_apart(as_times(seconds))
    assert series.stall_s == pytest.approx([0.5], abs=0.02)
    seconds[101, 0] -= 0.5
    assert take_apart(as_times(seconds)).stall_s.size == 0


def test_work_by_step_is_what_runs_have_in_common():
    work = 1.0 + 0.1 * np.arange(600) / 600
    work[::50] *= 1.5
    series = take_apart(as_times(made(work=work)))
    assert series.has_profile
    np.testing.assert_allclose(series.work / STEP_S, work, rtol=0.01)
    assert not series.stall_s.size
    assert not take_apart(as_times(made())).has_profile
    assert not take_apart(as_times(made(work=work)[:, :2])).has_profile


def test_a_beginning_with_stalls_of_its_own_is_kept_apart():
    seconds = made(Spread(white=0.003, run=0.002), (800, 10))
    rng = np.random.default_rng(5)
    for r in range(10):
        seconds[rng.choice(90, 3, replace=False), r] += 4.0
    model = fit_step_times(as_times(seconds), repeats=0)
    assert 60 <= model.beginning_s.shape[1] <= 90
    assert model.stall_counts.sum() == 0
    np.testing.assert_allclose(model.beginning_s.sum(axis=1), 12.0, atol=0.2)
    # the beginning comes once, however long the run
    totals = [draw_runs(model, n, 4_000, 1).terms["beginning"].mean() for n in (800, 8_000)]
    np.testing.assert_allclose(totals, 12.0, atol=0.2)
    spread_out = made(Spread(white=0.003, run=0.002), (800, 10), stalls=0.004)
    assert fit_step_times(as_times(spread_out), repeats=0).beginning_s.shape[1] == 0


def test_warm_up_of_one_run_is_no_stall_rate():
    seconds = made(Spread(white=0.002), (300, 1))
    seconds[:5, 0] *= [3.0, 1.5, 1.4, 1.2, 1.1]
    model = fit_step_times(as_times(seconds), repeats=0)
    assert model.beginning_s.shape[1] == 5 and model.stall_counts.sum() == 0
    assert draw_runs(model, 300, 50, 1).total.mean() == pytest.approx(seconds.sum(), rel=2e-3)


def test_totals_that_leave_out_first_steps():
    seconds = made(shape=(400, 15))
    seconds[:6] += np.random.default_rng(6).exponential(2.0, (6, 15))
    totals = {f"r{i}": seconds[6:, i].sum() + 1.25 for i in range(15)}
    model = fit_step_times(as_times(seconds), totals, repeats=0)
    assert (model.offset_skips, model.offset_s) == (6, pytest.approx(1.25, abs=0.05))
    with pytest.raises(PrismError, match="r0, .*other"):
        fit_step_times(as_times(seconds), {"other": 5.0}, repeats=0)


def test_a_fit_says_what_it_cannot_tell():
    report = fit_step_times(as_times(made(shape=(40, 1))), repeats=20).report
    said = " ".join(report["not_identifiable"])
    for word in ("run effect", "work by step", "stalls after the beginning"):
        assert word in said
    coarse = fit_step_times(as_times(made(shape=(200, 2)), mean_over=10), repeats=0)
    assert "mean of 10" in " ".join(coarse.report["not_identifiable"])
    assert report["effects"]["run"]["ci"] == [None, None] != report["effects"]["white"]["ci"]
    assert coarse.spread.white == pytest.approx(TRUTH.white * np.sqrt(10), rel=0.2)
    with pytest.raises(PrismError, match="at least 8"):
        fit_step_times(as_times(made(shape=(5, 1))))


# ---------------------------------------------------------------------------------- prediction
def test_totals_have_the_spread_of_walked_runs():
    work = 1.0 + 0.3 * np.sin(np.arange(500) / 20.0)
    model = fit_step_times(as_times(made(work=work, shape=(500, 10), stalls=0.0004)), repeats=0)
    walked = draw_steps(model, np.arange(500), 6_000, 3).sum(axis=1)
    drawn = draw_runs(model, 500, 6_000, 4).total
    assert drawn.mean() == pytest.approx(walked.mean(), abs=5 * walked.std() / np.sqrt(3_000))
    assert drawn.std() == pytest.approx(walked.std(), rel=5 / np.sqrt(6_000))
    assert ks_statistic(drawn, walked) < 1.95 * np.sqrt(2 / 6_000)
    # negative control: without memory the spread is far too small
    assert draw_runs(independent(model), 500, 6_000, 4).total.std() < 0.8 * walked.std()


def test_terms_add_up_and_draws_do_not_depend_on_their_number():
    model = fit_step_times(as_times(made(stalls=0.002)), repeats=0)
    drawn = draw_runs(model, 5_000, 50, 3)
    np.testing.assert_allclose(sum(drawn.terms.values()), drawn.total, rtol=1e-12)
    again = draw_runs(model, 5_000, 20, 3)
    for name in ("run_effect", "drift", "step_noise"):
        np.testing.assert_array_equal(again.terms[name], drawn.terms[name][:20])


def test_millions_of_steps_go_by_the_closed_form():
    model = fit_step_times(as_times(made()), repeats=0)
    drawn, n = draw_runs(model, 3_000_000, 4_000, 3).total, 3_000_000
    variance = mean_variance(model.spread, n, model.step_s) + model.spread.run**2
    assert drawn.std() / drawn.mean() == pytest.approx(np.sqrt(variance), rel=0.06)


def test_predicted_steps_look_like_the_measured_ones():
    seconds = made(stalls=0.002, shape=(1_000, 10), grain=0.01)
    model = fit_step_times(as_times(seconds), repeats=0)
    assert model.grain_s == pytest.approx(0.01)
    other = made(stalls=0.002, shape=(1_000, 200), seed=9, grain=0.01)
    drawn = draw_steps(model, np.arange(1_000), 200, 5)
    assert ks_statistic(drawn.ravel(), other.ravel()) < 0.15  # 10 runs tell the level to 0.1 %
    assert drawn.std() == pytest.approx(other.std(), rel=0.15)


# ------------------------------------------------------------------------- files and commands
@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    train = write(folder / "train.csv", made(stalls=0.001))
    test = write(folder / "test.csv", made(seed=2, stalls=0.001))
    model = folder / "m.nc"
    save(fit(train, 0), model)
    return train, test, model


def test_a_model_survives_its_file(files, tmp_path, monkeypatch):
    train, _, path = files
    model, again = load_step_model(path), fit_step_times(as_times(made(stalls=0.001)))
    np.testing.assert_array_equal(
        draw_runs(model, 700, 20, 1).total, draw_runs(again, 700, 20, 1).total
    )
    broken = tmp_path / "broken.nc"
    broken.write_bytes(path.read_bytes()[:2_000])
    with pytest.raises(PrismError, match="prism fit STEPS"):
        load_step_model(broken)
    whole = load(path)
    save(whole.assign_attrs(schema=2), broken)  # as an earlier version wrote it
    with pytest.raises(PrismError, match=r"schema 2.*prism fit STEPS -o"):
        load_step_model(broken)
    spread = dict(zip(PARTS, whole["spread"].values, strict=True))
    for change in (
        *({"spread": ("part", list((spread | wrong).values()))}
          for wrong in ({"run": np.nan}, {"run": 1e30}, {"drift": 0.1, "tau_s": 0.0})),
        {"stall_counts": 0.0},
        {"residuals": ("stall", np.ones(whole.sizes["stall"]))},
    ):  # fmt: skip
        # as what the file holds: writing each takes longer than all else
        found = whole.assign(change)
        monkeypatch.setattr(modelfile, "read_netcdf", lambda *_, found=found: found)
        with pytest.raises(PrismError, match="cannot be read"):
            load_step_model(path)


def test_held_out_runs_agree_and_independent_steps_do_not(files):
    _, test, path = files
    options = {"measured": test, "seed": 1, "replicates": 2_000}
    figures = prism.summary(validate(path, quantity="time_to_train", bootstrap=9, **options))
    assert figures["ks_p_value"] > 0.1 and 0.5 < figures["cv_ratio"] < 2.0
    assert figures["baselines"]["independent"]["cv_ratio"] < 0.5
    alone = prism.summary(
        validate(path, quantity="time_to_train", bootstrap=10, dependence="none", **options)
    )
    assert alone["ks_p_value"] < 0.1
    steps = prism.summary(validate(model=path, bootstrap=9, **options))
    assert steps["ks_p_value"] > 0.1 and abs(steps["p95_error"]) < 0.01


def test_first_steps_predict_the_later_ones(files):
    train, _, _ = files
    figures = prism.summary(
        validate(trace=train, train="300", seed=1, bootstrap=9, replicates=2_000)
    )
    assert figures["n_train"] == 300 * 12
    assert figures["ks_p_value"] > 0.1 and figures["baselines"]["copy"]["ks"] > 0.0
    with pytest.raises(PrismError, match="first-half or a number"):
        validate(trace=train, train="even", seed=1)


def test_p_values_of_a_split_are_those_of_chance_where_the_model_is_the_truth(tmp_path):
    """Held-out steps are of the fitted runs, whose effects the null must share with them."""
    truth, p, control = Spread(white=0.005, run=0.02), [], []
    for s in range(examples(4)):
        seconds = made(truth, (60, 4), seed=s)
        path = write(tmp_path / "steps.csv", seconds)
        options = {"train": "30", "seed": s, "bootstrap": 9, "replicates": 500}
        p.append(prism.summary(validate(trace=path, **options))["ks_p_value"])
        if s < 2:  # negative control: twice what one run differs from another by
            seconds[30:] *= 1.02
            path = write(tmp_path / "steps.csv", seconds)
            control.append(prism.summary(validate(trace=path, **options))["ks_p_value"])
    assert 0.25 < np.mean(p) < 0.75 and np.ptp(p) > 0.5
    assert np.mean(control) < 0.15


def test_gaps_between_logged_steps_are_time_to_a_drift(tmp_path):
    """Steps logged a hundred apart remember nothing: the null must know, or it is too wide."""
    truth = Spread(white=0.005, drift=0.01, tau_s=20.0)
    model = fit_step_times(as_times(made(truth, (600, 4))), repeats=0)
    places = np.arange(0, 600, 5)
    close = draw_steps(model, places, 400, 1)
    apart = draw_steps(model, places, 400, 1, elapsed=100.0 * np.arange(places.size))
    near, far = (np.corrcoef(s[:, 0], s[:, 1])[0, 1] for s in (close, apart))
    assert near > 0.3 and abs(far) < 0.15


def test_estimate_of_a_model_and_of_a_run_under_way(files, tmp_path):
    _, _, path = files
    result = estimate_steps(path, replicates=2_000, run_replicates=500, seed=1, steps=900)
    numbers = prism.summary(result)
    assert numbers["time_to_train"]["mean"] == pytest.approx(900 * 2.004, rel=0.01)
    delays = sum(numbers["delay_by_term"].values()) + 900 * numbers["ideal_step_time"]
    assert delays == pytest.approx(numbers["time_to_train"]["mean"], rel=1e-9)
    assert sum(numbers["variance_by_term"].values()) == pytest.approx(1.0, abs=1e-6)
    completed_steps = write(tmp_path / "sofar.csv", made(seed=7, shape=(450, 1)))
    later = prism.summary(
        estimate_steps(path, replicates=64, run_replicates=500, seed=1, steps=900,
                       completed=completed_steps, deadline=1e5, start="2025-01-01")
    )  # fmt: skip
    assert later["time_to_train"]["std"] < 0.7 * numbers["time_to_train"]["std"]
    assert later["finish_by"]["probability"] == 1.0 and "date" in later["finish_date"]
    far = write(tmp_path / "far.csv", 1.3 * made(seed=7, shape=(450, 1)))
    other = prism.summary(
        estimate_steps(path, replicates=64, run_replicates=9, seed=1, steps=900, completed=far)
    )
    told = [" ".join(numbers["warnings"]) for numbers in (later, other)]
    assert [bool(re.search(r" 1\.(3|29)\d* times", text)) for text in told] == [False, True]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 10**21}, "steps"),
        ({"run_replicates": 10**9}, "run_replicates"),
        ({"slowdown_thresholds": [0.5]}, "slowdown_thresholds"),
    ],
)
def test_senseless_options_are_refused(files, options, match):
    _, _, path = files
    with pytest.raises(PrismError, match=match):
        estimate(path, seed=1, **options)


def test_commands(files, capsys, tmp_path, monkeypatch):
    train, test, path = files

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["prism", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            entry.run()
        return end.value.code, *capsys.readouterr()

    short = write(tmp_path / "short.csv", made(shape=(100, 4), stalls=0.001))
    status, out, err = run("fit", short, "-o", tmp_path / "n.nc", "--json", "--seed", "0")
    assert status in (0, None), err
    assert json.loads(out)["kind"] == "steps" and json.loads(out)["effects"]["run"]["cv"] > 0
    codes = {found["code"] for found in json.loads(out)["findings"]}
    assert {"largest_share_of_step", "largest_share_of_run", "not_identifiable"} <= codes
    status, out, _ = run("show", tmp_path / "n.nc")
    assert status in (0, None) and "p95" in out
    status, out, _ = run("show", tmp_path / "n.nc", "--json")
    assert json.loads(out)["model_kind"] == "steps"
    status, out, _ = run(
        "validate", path, "--measured", test, "--bootstrap", "1", "--json", "--seed", "1"
    )
    assert json.loads(out)["quantity"] == "step_time"
    status, out, _ = run("validate", "--trace", short, "--bootstrap", "0", "--json", "--seed", "1")
    assert json.loads(out)["train"] == "first-half"
    for command in (("fit", train, test), ("rank", path)):
        status, out, err = run(*command)
        assert (status, out) == (2, ""), command
    assert f"{path}: " in err


def test_more_than_one_duration_is_an_error_that_lists_them(tmp_path):
    table = pd.DataFrame({"step_s": np.ones(20), "dt_s": np.ones(20)})
    table.to_csv(tmp_path / "two.csv", index=False)
    with pytest.raises(PrismError, match=r"step_s \[s\], dt_s \[s\]"):
        fit(tmp_path / "two.csv")
    model = fit(tmp_path / "two.csv", 0, column="dt_s")
    assert prism.summary(model)["step_time"]["std"] == 0.0
