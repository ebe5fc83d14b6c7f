"""Run models conditioned on the steps so far: congestion counts once, stalls by their evidence."""

import numpy as np
import pytest

from prism.runmodel import Checkpoints, Regime, RunModel, Stalls, simulate_runs
from prism.runrates import stationary
from prism.steptimes.runs import condition
from prism.traces import StepTimes

MEAN = np.full((40, 1), 2.0)
PLAIN = RunModel(MEAN, 0.01 * MEAN)


def steps(seconds, first=0):
    at = first + np.arange(seconds.size)
    return StepTimes(seconds, at, np.full(seconds.size, "r0"), "made.csv", "step_s", 1)


def noise(n, seed=1):
    return 1.0 + 0.01 * np.random.default_rng(seed).standard_normal(n)


def test_congestion_in_the_steps_so_far_counts_once():
    """A run that goes as its model says has as much left as before anything was measured."""
    regime = Regime(np.array([[0.0, 0.05], [0.02, 0.0]]))
    ratio = np.array([1.0, 1.3])
    model = RunModel(MEAN * ratio, 0.01 * MEAN * ratio, regime=regime)
    usual = 2.0 / float(stationary(regime.rates) @ (1.0 / ratio))
    past = condition(model, steps(usual * noise(1000)), 200, 1)
    assert past.level == pytest.approx(1.0, abs=0.005)
    before, after = (simulate_runs(m, 4000, 200, 1).total.mean() for m in (model, past.model))
    assert after == pytest.approx(before, rel=0.006)


@pytest.mark.parametrize("n_own", [5, 60_000])
def test_measured_stalls_outweigh_the_models_one(n_own):
    """Thirty stalls of 20 s, where the model has rare ones of 1 s: thirty to one."""
    seconds = 2.0 * noise(3000)
    seconds[50::100] += 20.0
    model = RunModel(MEAN, 0.01 * MEAN, stalls=Stalls(1e-5, np.full(n_own, 1.0)))
    found = condition(model, steps(seconds), 10, 1).model.stalls
    assert found.rate_per_s == pytest.approx(31 / (6000 + 1e5), rel=0.02)
    assert found.lengths.mean() == pytest.approx((30 * 20 + 1) / 31, rel=0.01)
    assert found.lengths.size < 1_000_000


def test_stalls_of_the_beginning_are_no_rate():
    seconds = 2.0 * noise(2000)
    seconds[5:200:10] += 10.0
    assert condition(PLAIN, steps(seconds), 10, 1).model.stalls is None
    later = seconds.copy()
    later[[700, 1500]] += 10.0
    rate = condition(PLAIN, steps(later), 10, 1).model.stalls.rate_per_s
    assert rate == pytest.approx(2 / 3600, rel=0.05)


def test_what_the_steps_so_far_leave_out_is_said():
    seconds = 2.0 * noise(300)
    assert not condition(PLAIN, steps(seconds), 10, 1).notes
    (gap,) = condition(PLAIN, steps(seconds, first=500), 10, 1).notes
    assert "300 step times up to step 799" in gap
    stopping = RunModel(MEAN, 0.01 * MEAN, checkpoints=Checkpoints(100, 5.0))
    (pauses,) = condition(stopping, steps(seconds), 10, 1).notes
    assert "checkpoints" in pauses


def test_steps_of_another_job_are_told():
    (told,) = condition(PLAIN, steps(60.0 * noise(300)), 10, 1).notes
    assert "steps take 30 times what the job says" in told and "are they of this job?" in told
