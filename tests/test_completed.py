"""Runs under way: step models and any run model conditioned on the steps so far."""

import re

import numpy as np
import pytest
from scipy.stats import kstest
from steps_made import STEP_S, as_times, made

from prism import PrismError
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.predict import draw_runs
from prism.models.steptimes.progress import progress
from prism.models.steptimes.runs import condition
from prism.models.steptimes.spread import Spread, mean_variance, simulate_body
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import Checkpoints, Drift, RunModel, StallProcess
from prism.simulation.runs.rates import stationary
from prism.traces import StepTimes

MEAN = np.full((40, 1), 2.0)
PLAIN = RunModel(MEAN, 0.01 * MEAN)


def steps(seconds, first=0):
    at = first + np.arange(seconds.size)
    return StepTimes(seconds, at, np.full(seconds.size, "r0"), "made.csv", "step_s", 1)


def finish(model, seconds, n_steps, n_runs, seed):
    """Totals of a run with such completed steps."""
    past = progress(model, as_times(seconds), n_steps, n_runs, seed)
    return draw_runs(model, n_steps, n_runs, seed, past)


def noise(n, seed=1):
    return 1.0 + 0.01 * np.random.default_rng(seed).standard_normal(n)


def test_congestion_in_the_steps_so_far_counts_once():
    """A run that goes as its model says has as much left as before anything was measured."""
    regime = np.array([[0.0, 0.05], [0.02, 0.0]])
    ratio = np.array([1.0, 1.3])
    model = RunModel(MEAN * ratio, 0.01 * MEAN * ratio, regime=regime)
    usual = 2.0 / float(stationary(regime) @ (1.0 / ratio))
    past = condition(model, steps(usual * noise(1000)), 200, 1)
    assert past.level == pytest.approx(1.0, abs=0.005)
    before, after = (simulate_runs(m, 4000, 200, 1).total.mean() for m in (model, past.model))
    assert after == pytest.approx(before, rel=0.006)


@pytest.mark.parametrize("n_own", [5, 60_000])
def test_measured_stalls_outweigh_the_models_one(n_own):
    """Thirty stalls of 20 s, where the model has rare ones of 1 s: thirty to one."""
    seconds = 2.0 * noise(3000)
    seconds[50::100] += 20.0
    model = RunModel(MEAN, 0.01 * MEAN, stalls=StallProcess(1e-5, np.full(n_own, 1.0)))
    found = condition(model, steps(seconds), 4_000, 1).model.stalls
    rate = 31 / (6000 + 1e5)
    assert found.rate_per_s.mean() == pytest.approx(rate, rel=0.02)
    assert found.rate_per_s.std() == pytest.approx(rate / np.sqrt(31), rel=0.1)
    assert found.lengths.mean() == pytest.approx((30 * 20 + 1) / 31, rel=0.01)
    assert found.lengths.size < 1_000_000


def test_stalls_of_the_beginning_are_no_rate():
    seconds = 2.0 * noise(2000)
    seconds[5:200:10] += 10.0
    assert condition(PLAIN, steps(seconds), 10, 1).model.stalls is None
    later = seconds.copy()
    later[[700, 1500]] += 10.0
    rate = condition(PLAIN, steps(later), 4_000, 1).model.stalls.rate_per_s
    assert rate.mean() == pytest.approx(2 / 3600, rel=0.05)


def test_what_the_steps_so_far_leave_out_is_said():
    seconds = 2.0 * noise(300)
    assert not condition(PLAIN, steps(seconds), 10, 1).notes
    (gap,) = condition(PLAIN, steps(seconds, first=500), 10, 1).notes
    assert "300 " in gap and "step 799" in gap
    stopping = RunModel(MEAN, 0.01 * MEAN, checkpoints=Checkpoints(100, 5.0))
    (pauses,) = condition(stopping, steps(seconds), 10, 1).notes
    assert "checkpoints" in pauses


def test_steps_of_another_job_are_told():
    (told,) = condition(PLAIN, steps(60.0 * noise(300)), 10, 1).notes
    assert " 30 times" in told


def test_a_run_under_way_is_predicted_within_its_intervals():
    runs = made(shape=(900, 60), seed=21, stalls=0.001)
    model = fit_step_times(as_times(runs[:, :20]), repeats=30)
    inside, widths = {0.1: [], 0.5: []}, {0.1: [], 0.5: []}
    for r in range(20, 60):
        for share in inside:
            drawn = finish(model, runs[: int(share * 900), r : r + 1], 900, 250, r).total
            low, high = np.quantile(drawn, [0.05, 0.95])
            inside[share].append(low <= runs[:, r].sum() <= high)
            widths[share].append(high - low)
    whole = np.ptp(np.quantile(draw_runs(model, 900, 4_000, 1).total, [0.05, 0.95]))
    for share, values in inside.items():
        assert 0.80 <= np.mean(values) <= 0.98, share
    assert np.mean(widths[0.5]) < 0.75 * np.mean(widths[0.1]) < 0.75 * whole


def test_what_is_left_is_normal_given_completed_steps():
    """Without stalls the law of the rest is exact: the ranks of the truth are uniform."""
    runs = made(shape=(400, 160), seed=31)
    model = fit_step_times(as_times(runs[:, :60]), repeats=0)
    ranks = []
    for r in range(60, 160):
        drawn = finish(model, runs[:200, r : r + 1], 400, 200, r).total
        ranks.append((drawn < runs[:, r].sum()).mean())
    assert kstest(ranks, "uniform").pvalue > 0.01
    assert kstest(0.5 + 0.6 * (np.array(ranks) - 0.5), "uniform").pvalue < 0.01  # control


def test_progress_that_makes_no_sense_is_refused():
    model = fit_step_times(as_times(made()), repeats=0)
    with pytest.raises(PrismError, match="600 .*600; .*steps"):
        finish(model, made()[:, :1], 600, 10, 1)
    with pytest.raises(PrismError, match="--where run=r0"):
        progress(model, as_times(made()), 700, 10, 1)


def test_any_run_model_is_conditioned_by_completed_steps():
    mean = np.full((40, 1), 2.0)
    before = RunModel(mean=mean, std=0.01 * mean, drift=Drift(0.01, 200.0))
    rng = np.random.default_rng(8)
    truth = Spread(white=0.01, drift=0.01, tau_s=200.0)
    seconds = 1.06 * STEP_S * (1.0 + simulate_body(truth, STEP_S * np.arange(800), 1, rng))
    after = condition(before, as_times(seconds), 500, 1)
    assert (after.done, after.elapsed_s) == (800, pytest.approx(seconds.sum()))
    error = np.sqrt(mean_variance(truth, 800, 1.06 * STEP_S))
    assert after.level_std == pytest.approx(error, rel=0.3)
    assert after.level == pytest.approx(1.06, abs=4 * error)
    last = seconds[-30:].mean() / (2.0 * after.level) - 1.0
    assert 0.01 * after.model.drift.initial.mean() == pytest.approx(last, abs=0.008)


@pytest.mark.parametrize("scale", [1.3, 30.0])
def test_steps_that_contradict_a_step_model_are_told_and_believed(scale):
    runs = made(shape=(400, 40), seed=41)
    model = fit_step_times(as_times(runs[:, :10]), repeats=20)
    for r in range(10, 40):
        assert progress(model, as_times(runs[:100, r : r + 1]), 400, 10, 1).notes == ()
    other = scale * runs[:, 10:11]
    (told,) = progress(model, as_times(other[:100]), 400, 10, 1).notes
    assert float(re.search(r"([\d.]+) times", told)[1]) == pytest.approx(scale, rel=0.02)
    drawn = finish(model, other[:100], 400, 2_000, 1).total
    assert drawn.mean() == pytest.approx(other.sum(), rel=0.005)
    # as wide as the same run at the model's own level, times the scale; or less, since a memory in
    # seconds is one of fewer steps
    usual = finish(model, runs[:100, 10:11], 400, 2_000, 1).total
    assert 0.3 < drawn.std() / (scale * usual.std()) < 1.3


def test_steps_that_totals_leave_out_are_in_no_finish():
    seconds = made(shape=(300, 15))
    seconds[:6] += np.random.default_rng(6).exponential(2.0, (6, 15))
    totals = {f"r{i}": seconds[6:, i].sum() + 1.25 for i in range(15)}
    model = fit_step_times(as_times(seconds), totals, repeats=0)
    assert model.offset_skips == 6
    whole = draw_runs(model, 300, 4_000, 1).total
    for done in (1, 3, 6):
        drawn = finish(model, seconds[:done, :1], 300, 4_000, 1)
        assert drawn.terms["completed_steps"][0] == 0.0
        assert drawn.total.mean() == pytest.approx(whole.mean(), abs=0.5 * STEP_S)
        np.testing.assert_allclose(sum(drawn.terms.values()), drawn.total)
    none = finish(model, seconds[:2, :1], 5, 10, 1)
    assert np.abs(none.total - 1.25).max() < 0.5  # a run that ends before its total begins


def test_the_rest_has_the_steps_own_noise():
    spread = Spread(white=0.01)
    seconds = 2.0 * (
        1.0 + simulate_body(spread, 2.0 * np.arange(2_000), 1, np.random.default_rng(3))
    )
    before = RunModel(MEAN, 0.02 * MEAN, residuals=0.04 * np.random.default_rng(4).normal(size=500))
    rest = condition(before, as_times(seconds), 50, 1)
    assert rest.model.std.mean() == pytest.approx(2.0 * spread.white, rel=0.1)
    assert rest.model.residuals.std() == pytest.approx(2.0 * spread.white, rel=0.15)
    assert rest.level_std == pytest.approx(0.01 / np.sqrt(2_000), rel=0.35)


def test_a_slow_drift_is_no_noise_of_steps():
    spread = Spread(white=0.005, drift=0.01, tau_s=400.0)
    seconds = 2.0 * (
        1.0 + simulate_body(spread, 2.0 * np.arange(2_000), 1, np.random.default_rng(3))
    )
    before = RunModel(MEAN, 0.02 * MEAN, drift=Drift(0.01, 400.0))
    rest = condition(before, as_times(seconds), 50, 1).model
    assert rest.std.mean() == pytest.approx(2.0 * 0.005, rel=0.1)
