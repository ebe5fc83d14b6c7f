"""The likelihood of spreads by time scale, against dense algebra: no public path shows it."""

import numpy as np
import pytest
from scipy.optimize import minimize

from prism.models.steptimes.likelihood import Observed, _profile, own_noise, solve, state_given
from prism.models.steptimes.spread import Spread, simulate_body

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
