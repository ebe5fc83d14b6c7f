"""Spreads by time scale: the likelihood against dense algebra, known spreads recovered."""

import numpy as np
import pytest
from campaign import examples
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from steps_made import STEP_S, TRUTH, as_times, made

from prism.models.steptimes.estimate import data_error
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.likelihood import (
    Observed,
    _profile,
    fit_spread,
    intervals,
    no_drift_p_value,
    own_noise,
    repeat_fits,
    solve,
    state_given,
)
from prism.models.steptimes.spread import Spread, mean_variance, simulate_body
from prism.simulation.runs.drift import drift_variance

PLACES = np.array([0.0, 1.0, 2.0, 4.0, 5.0, 9.0, 10.0, 11.0, 12.0, 14.0])


def dense(spread, elapsed_s):
    """Covariance of drift and white noise of one run."""
    gaps = np.abs(np.subtract.outer(elapsed_s, elapsed_s))
    return spread.white**2 * np.eye(elapsed_s.size) + spread.drift**2 * np.exp(-gaps / spread.tau_s)


def holes(seed, n_runs):
    """Runs with steps missing."""
    rng = np.random.default_rng(seed)
    body = simulate_body(Spread(1.0, 0.8, 3.0, 0.7), PLACES, n_runs, rng)
    body[rng.random(body.shape) < 0.2] = np.nan
    return body


@pytest.mark.parametrize("n_runs", [1, 4])
@pytest.mark.parametrize("missing", [False, True])
def test_the_likelihood_is_that_of_the_dense_covariance(n_runs, missing):
    """Restricted, scale and run effect at their best: the same costs, up to a constant."""
    body = holes(3, n_runs)
    body = body if missing else np.nan_to_num(body)
    known = np.isfinite(body)
    seen = Observed.of(body, PLACES)

    def cost(ratio, tau_s):
        def at(run):
            logdet = ones = along = squares = 0.0
            for y, k in zip(body.T, known.T, strict=True):
                s = dense(Spread(1.0, np.sqrt(ratio), tau_s), PLACES)[np.ix_(k, k)] + run
                u = np.ones(k.sum())
                logdet += np.linalg.slogdet(s)[1]
                ones += u @ np.linalg.solve(s, u)
                along += u @ np.linalg.solve(s, y[k])
                squares += y[k] @ np.linalg.solve(s, y[k])
            n = known.sum() - 1
            return n * np.log((squares - along**2 / ones) / n) + logdet + np.log(ones)

        if n_runs == 1:
            return at(0.0)
        return min(at(0.0), minimize(lambda x: at(np.exp(x[0])), [0.0], method="Nelder-Mead").fun)

    for ratio, tau_s in ((0.5, 2.0), (3.0, 8.0), (1e-3, 1.0)):
        expected = cost(ratio, tau_s) - cost(1.0, 4.0)
        found = _profile(seen, ratio, tau_s)[0] - _profile(seen, 1.0, 4.0)[0]
        assert found == pytest.approx(expected, abs=0.02)  # the run effect is on a grid of 19 %
    none = _profile(seen, 0.0, 1.0)[0]
    assert none == pytest.approx(_profile(seen, 1e-7, 4.0)[0], abs=1e-4)
    assert solve(seen, 0.7, 3.0).logdet == pytest.approx(
        sum(
            np.linalg.slogdet(dense(Spread(1.0, np.sqrt(0.7), 3.0), PLACES)[np.ix_(k, k)])[1]
            for k in known.T
        )
    )


def test_level_and_last_drift_are_those_of_the_joint_normal():
    body, spread, level_sd = holes(5, 1)[:, 0], Spread(0.5, 0.8, 3.0), 0.6
    k = np.isfinite(body)
    to_last = spread.drift**2 * np.exp(-(PLACES[-1] - PLACES) / spread.tau_s)
    cross = np.column_stack([np.full(k.sum(), level_sd**2), to_last[k]])
    whole = dense(spread, PLACES)[np.ix_(k, k)] + level_sd**2
    found = state_given(body, PLACES, spread, level_sd)
    gain = np.linalg.solve(whole, cross).T
    np.testing.assert_allclose(found.mean, gain @ body[k], rtol=1e-9)
    left = np.diag([level_sd**2, spread.drift**2]) - gain @ cross
    np.testing.assert_allclose(found.root @ found.root.T, left, rtol=1e-9)
    nothing = state_given(np.full(10, np.nan), PLACES, spread, level_sd)
    np.testing.assert_allclose(
        nothing.root @ nothing.root.T, np.diag([0.36, 0.64]), rtol=1e-9, atol=1e-12
    )


def test_a_steps_own_noise_is_what_level_and_drift_leave():
    rng = np.random.default_rng(2)
    elapsed_s, truth = np.arange(3_000.0), Spread(0.01, 0.02, 200.0, 0.03)
    own = 0.01 * (rng.exponential(size=(3_000, 4)) - 1.0)
    slow = simulate_body(Spread(drift=0.02, tau_s=200.0, run=0.03), elapsed_s, 4, rng)
    found = own_noise(own + slow, elapsed_s, truth).reshape(own.shape)
    assert np.corrcoef(found.ravel(), own.ravel())[0, 1] > 0.93
    assert np.corrcoef(found.ravel(), slow.ravel())[0, 1] < 0.1


@pytest.mark.parametrize("rate", [1e-9, 1e-3, 0.3, 5.0])
def test_variance_of_a_drifts_sum(rate):
    n = 40
    gaps = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    assert drift_variance(n, rate, 1.0) == pytest.approx(np.exp(-rate * gaps).sum(), rel=1e-6)


@pytest.mark.parametrize(
    "truth, shape",
    [
        (TRUTH, (300, 12)),
        (Spread(white=0.005, drift=0.002, tau_s=100.0, run=0.001), (400, 12)),
        (Spread(white=0.008, drift=0.004, tau_s=300.0), (2_000, 1)),
    ],
)
def test_spreads_are_recovered_within_their_intervals(truth, shape):
    repetitions, held, wide = examples(7), dict.fromkeys(truth.as_dict(), 0), 0
    elapsed_s = STEP_S * np.arange(shape[0])
    for seed in range(repetitions):
        body = simulate_body(truth, elapsed_s, shape[1], np.random.default_rng(seed))
        found = fit_spread(Observed.of(body, elapsed_s))
        bounds = intervals(found, repeat_fits(found, body, elapsed_s, False, seed, 20))
        for name, value in truth.as_dict().items():
            low, high = bounds[name]
            held[name] += low <= value <= high
            wide += low <= 2.0 * value + 0.01 <= high if name != "tau_s" else 0
    known = {name for name in held if shape[1] > 1 or name != "run"}
    # 90 % intervals: 3 or fewer of 7 has a chance of 0.003
    assert all(held[name] > 0.5 * repetitions for name in known), held
    assert wide <= 0.2 * repetitions  # negative control: they do not hold just anything


def run_std(spread, n_steps):
    return np.sqrt(mean_variance(spread, n_steps, STEP_S) + spread.run**2)


@pytest.mark.parametrize(
    ("shape", "times", "middle", "high"),
    [((500, 1), 1.0, 1.15, 3.0), ((500, 5), 1.0, 1.15, 2.0), ((2_000, 3), 1.0, 1.15, 2.0),
     ((500, 1), 4.0, 1.3, 6.0), ((500, 5), 2.0, 1.2, 2.5)],
)  # fmt: skip
def test_the_spread_of_a_runs_mean_is_about_right(shape, times, middle, high):
    """White noise alone, and with a drift that makes the mean's variance so many times as large."""
    tau_s = shape[0] / 30.0 * STEP_S
    h = drift_variance(shape[0], STEP_S, tau_s) / shape[0] ** 2
    drift = np.sqrt((times - 1.0) * 0.01**2 / shape[0] / h)
    truth = Spread(0.01, drift, tau_s if drift else 0.0)
    assert run_std(truth, shape[0]) ** 2 == pytest.approx(times * 0.01**2 / shape[0])
    elapsed_s, ratio = STEP_S * np.arange(shape[0]), []
    for i in range(examples(20)):
        body = simulate_body(truth, elapsed_s, shape[1], np.random.default_rng([1, i, *shape]))
        found = fit_spread(Observed.of(body, elapsed_s))
        ratio.append(run_std(found, shape[0]) / run_std(truth, shape[0]))
    low, mid, most = np.quantile(ratio, [0.05, 0.5, 0.95])
    assert 1.0 / middle < mid < middle and most < high and low > 0.5
    if times > 1.0:  # negative control: white noise alone is too narrow
        assert 1.0 / np.sqrt(times) < 1.0 / middle


def test_work_by_step_takes_its_degrees_of_freedom():
    """What runs have in common takes a share of their noise with it; the spread is not smaller."""
    work, truth = 1.0 + 0.15 * np.arange(500) / 500, Spread(0.006, 0.003, 60.0, 0.002)
    found = []
    for i in range(30):
        model = fit_step_times(as_times(made(truth, (500, 4), i, work=work)), repeats=0)
        assert model.has_profile
        found.append(list(model.spread.as_dict().values()))
    white, drift, tau_s, _ = np.median(found, axis=0)
    run = np.sqrt(np.mean(np.array(found)[:, 3] ** 2))
    assert white == pytest.approx(0.006, rel=0.02)  # 13 % lower without
    assert (drift, tau_s, run) == (
        pytest.approx(0.003, rel=0.15), pytest.approx(60.0, rel=0.25),
        pytest.approx(0.002, rel=0.25),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(100, 1), (500, 1), (500, 5)])
def test_a_drift_that_is_not_there_is_found_as_rarely_as_is_said(shape):
    n, elapsed_s, p = examples(30), STEP_S * np.arange(shape[0]), {"none": [], "some": []}
    tau_s = shape[0] / 30.0 * STEP_S
    drift = 0.03 / np.sqrt(drift_variance(shape[0], STEP_S, tau_s) / shape[0])
    for name, truth in (("none", Spread(0.01)), ("some", Spread(0.01, drift, tau_s))):
        for i in range(n if name == "none" else n // 3):
            rng = np.random.default_rng([4, i, *shape])
            seen = Observed.of(simulate_body(truth, elapsed_s, shape[1], rng), elapsed_s)
            p[name].append(no_drift_p_value(seen, fit_spread(seen)))
    assert np.mean(np.array(p["none"]) < 0.05) <= 0.10  # 5 %, and 1.3 errors of 30 fits
    assert np.mean(np.array(p["some"]) < 0.05) >= 0.7


def test_models_say_how_much_wider_a_run_may_be():
    one = fit_step_times(as_times(made(Spread(white=0.01), (500, 1))), repeats=40)
    assert data_error(one, 500)["std_at_most"] > 1.2
    assert one.report["effects"]["drift"]["ci"][1] > 0.0
    several = fit_step_times(as_times(made(shape=(600, 12))), repeats=20)
    assert data_error(several, 600)["std_at_most"] < 2.5


def test_a_part_that_is_not_found_is_drawn_as_its_absence_shows_it():
    truth, elapsed_s = Spread(white=0.01), STEP_S * np.arange(500)
    for seed in range(20):
        body = simulate_body(truth, elapsed_s, 5, np.random.default_rng(seed))
        if fit_spread(Observed.of(body, elapsed_s)).run == 0.0:
            break
    model = fit_step_times(as_times(STEP_S * (1.0 + body)), repeats=40)
    assert model.spread.run == 0.0
    runs = np.array([s.run for s in model.spreads()])
    assert 0.1 < (runs > 0.0).mean() < 0.9 and runs.max() < 0.002


def test_the_oracle_of_these_tests_is_scipys():
    s = dense(Spread(0.5, 0.8, 3.0), PLACES)
    y = np.linspace(-1.0, 1.0, 10)
    seen = solve(Observed(y[:, None], np.ones((10, 1)), np.diff(PLACES), False), 2.56, 3.0)
    found = -0.5 * (seen.logdet + float(seen.squares[0]) / 0.25 + 10 * np.log(2 * np.pi * 0.25))
    assert found == pytest.approx(multivariate_normal(np.zeros(10), s).logpdf(y))
