"""The run against brute force: AR(1) sums, runs step by step, shrinkage, prefixes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp, norm

from prism.simulation.runs.build import model_of_steps
from prism.simulation.runs.drift import drift_variance
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import Drift, RunModel

NONE = Drift(0.0, 0.0)


def model(mean, std, drift_cv=0.0, tau_s=0.0):
    """The run of nothing but steps of clusters."""
    return RunModel(np.array(mean)[:, None], np.array(std)[:, None], drift=Drift(drift_cv, tau_s))


def run(*args):
    """Draw runs: totals and clusters."""
    runs = simulate_runs(*args)
    return runs.total, runs.cluster


def covariance_sum(n, step_s, tau_s):
    """Sum of r^|i - j| over all pairs of n values, r = exp(-step / tau)."""
    r = np.exp(-step_s / tau_s)
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    return float((r**lag).sum())


@given(n=st.integers(1, 300), step_s=st.floats(0.05, 50.0), tau_s=st.floats(0.01, 1e5))
def test_drift_variance_is_the_covariance_sum(n, step_s, tau_s):
    expected = covariance_sum(n, step_s, tau_s)
    assert drift_variance(n, step_s, tau_s) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("tau", [1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13])
def test_long_memory_stays_accurate(tau):
    """The closed form subtracts two large numbers; at no tau may that show."""
    n, step = 1000, 10.0
    assert drift_variance(n, step, tau) == pytest.approx(covariance_sum(n, step, tau), rel=2e-5)


def test_drift_variance_limits():
    assert drift_variance(1000, 10.0, 0.0) == 1000.0
    assert drift_variance(1000, 10.0, 1e-3) == pytest.approx(1000.0)
    assert drift_variance(1000, 10.0, np.inf) == 1000.0**2
    assert drift_variance(1, 10.0, 600.0) == pytest.approx(1.0)
    long = 2 * 600.0 / 10.0  # a long run: n values count as n / (2 tau / step)
    assert drift_variance(10**7, 10.0, 600.0) == pytest.approx(1e7 * long, rel=1e-3)


def step_by_step(statistics, n_steps, n_runs, rng):
    """Runs as their definition has them: every step is (mu + sigma z) times an AR(1) effect."""
    cluster = np.arange(n_runs) % statistics.mean.size
    mu, sigma = statistics.mean[cluster, 0], statistics.std[cluster, 0]
    if statistics.drift.tau_s > 0.0:
        r = np.exp(-mu / statistics.drift.tau_s)
    else:
        r = np.zeros(n_runs)
    drift, total = rng.standard_normal(n_runs), np.zeros(n_runs)
    for _ in range(n_steps):
        effect = 1.0 + statistics.drift.cv * drift
        total += effect * (mu + sigma * rng.standard_normal(n_runs))
        drift = r * drift + np.sqrt(1.0 - r**2) * rng.standard_normal(n_runs)
    return total


def differences(a, b):
    """Mean and spread of a against b, in standard errors; spread by fourth moments."""

    def spread_error(x):
        centred = x - x.mean()
        return np.sqrt((centred**4).mean() / (centred**2).mean() - x.var()) / (2 * x.size**0.5)

    mean = (a.mean() - b.mean()) / np.hypot(a.std(), b.std()) * a.size**0.5
    spread = (a.std() - b.std()) / np.hypot(spread_error(a), spread_error(b))
    return abs(mean), abs(spread)


CLUSTERS = [10.0, 10.1, 10.3], [0.2, 0.25, 0.5]


@pytest.mark.parametrize(("drift_cv", "tau"), [(0.0, 0.0), (0.03, 0.0), (0.03, 100.0), (0.01, 5e4)])
def test_runs_equal_runs_step_by_step(drift_cv, tau):
    statistics = model(*CLUSTERS, drift_cv, tau)
    n_runs = 39_999
    runs, cluster = run(statistics, 200, n_runs, 3)
    brute = step_by_step(statistics, 200, n_runs, np.random.default_rng(8))
    for k in range(3):
        assert max(differences(runs[cluster == k], brute[cluster == k])) < 5
    assert ks_2samp(runs, brute).pvalue > 1e-4


def test_comparison_notices_a_wrong_spread():
    """Negative control: 4 % too much spread, and independence in place of a slow drift."""
    statistics = model([10.0], [0.2], 0.03, 100.0)
    runs = run(statistics, 200, 40_000, 3)[0]
    brute = step_by_step(statistics, 200, 40_000, np.random.default_rng(8))
    assert differences(runs.mean() + 1.04 * (runs - runs.mean()), brute)[1] > 5
    independent = model([10.0], [0.2], 0.03, 0.0)
    assert differences(run(independent, 200, 40_000, 3)[0], brute)[1] > 50


def test_a_run_of_one_step_is_a_step():
    """Var(S (mu + sigma z)) = sigma^2 (1 + cv^2) + mu^2 cv^2, at large cv and sigma."""
    statistics = model([10.0], [4.0], 0.4, 100.0)
    runs = run(statistics, 1, 400_000, 2)[0]
    error = 5 * runs.std() / np.sqrt(2 * runs.size)
    assert abs(runs.std() - np.sqrt(16 * 1.16 + 16)) < error
    assert abs(runs.std() - np.sqrt(16 + 16)) > error  # negative control: E[S^2] forgotten


def test_first_runs_do_not_change_with_their_number():
    statistics = model(*CLUSTERS, 0.01, 300.0)
    many, cluster = run(statistics, 1000, 500, 9)
    few, few_cluster = run(statistics, 1000, 37, 9)
    assert np.array_equal(many[:37], few) and np.array_equal(cluster[:37], few_cluster)
    assert not np.any(many == run(statistics, 1000, 500, 10)[0])
    assert list(cluster[:4]) == [0, 1, 2, 0]


# -- statistics of steps ---------------------------------------------------------------------


def nested(between, within, n_clusters, size, seed, effect_cv=0.0):
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(n_clusters), size)
    effect = 1.0 + effect_cv * rng.standard_normal(cluster.size)
    steady = 10.0 + between * rng.standard_normal(n_clusters)[cluster]
    steady += within * rng.standard_normal(cluster.size)
    return steady * effect, effect, cluster


def test_shrunk_means_spread_as_the_clusters_do():
    between, within = 0.05, 0.5  # 64 steps: the means' own noise is 0.0625, more than between
    times, effect, cluster = nested(between, within, 4000, 64, 1)
    statistics = model_of_steps(times, effect, cluster, NONE)
    error = 5 * np.hypot(between, within / 8) ** 2 / between / np.sqrt(2 * 4000)
    assert abs(statistics.mean.std(ddof=1) - between) < error
    raw = times.reshape(-1, 64).mean(axis=1).std(ddof=1)
    assert abs(raw - between) > error  # negative control
    assert statistics.mean.mean() == pytest.approx(times.mean(), rel=1e-12)


def test_equal_clusters_shrink_to_one_mean():
    spreads = []
    for seed in range(20):
        times, effect, cluster = nested(0.0, 0.5, 50, 64, seed)
        spreads.append(model_of_steps(times, effect, cluster, NONE).mean.std())
    assert np.mean(np.array(spreads) == 0.0) > 0.2  # as often as chance puts Vb below Vw / n
    assert np.max(spreads) < 0.0625


def test_step_effect_is_divided_out():
    times, effect, cluster = nested(0.05, 0.1, 1000, 64, 2, effect_cv=0.05)
    statistics = model_of_steps(times, effect, cluster, Drift(0.05, 600.0))
    steady = model_of_steps(times / effect, np.ones_like(effect), cluster, NONE)
    np.testing.assert_allclose(statistics.mean, steady.mean)
    np.testing.assert_allclose(statistics.std, steady.std)
    assert statistics.drift == Drift(0.05, 600.0)
    pooled = np.sqrt((statistics.std**2).mean())
    assert abs(pooled - 0.1) < 5 * 0.1 / np.sqrt(2 * times.size)


def test_spreads_are_shrunk_towards_the_pool():
    times, effect, cluster = nested(0.05, 0.2, 500, 64, 3)
    own = times.reshape(-1, 64).std(axis=1, ddof=1)
    std = model_of_steps(times, effect, cluster, NONE).std[:, 0]
    assert 0.5 * own.std() < std.std() < own.std()
    assert np.corrcoef(own, std)[0, 1] > 0.999


@pytest.mark.parametrize("replicates", [1, 5, 64, 65, 130])
def test_few_and_incomplete_clusters(replicates):
    times, effect, _ = nested(0.05, 0.2, 3, 64, 4)
    cluster = np.arange(replicates) // 64
    statistics = model_of_steps(times[:replicates], effect[:replicates], cluster, NONE)
    assert statistics.mean.size == statistics.std.size == max(1, replicates // 64)
    assert np.all(np.isfinite(statistics.mean)) and np.all(np.isfinite(statistics.std))
    if replicates == 1:
        assert statistics.mean[0] == times[0] and statistics.std[0] == 0.0


def test_run_law_covers_the_mixture_of_clusters():
    """Long runs on clusters that differ: the total is n times the cluster's mean, nearly."""
    times, effect, cluster = nested(0.05, 0.2, 2000, 64, 5)
    statistics = model_of_steps(times, effect, cluster, NONE)
    runs = run(statistics, 100_000, 2000, 6)[0]
    z = (runs / 100_000 - 10.0) / 0.05
    assert abs(z.mean()) < 5 * 1.15 / np.sqrt(z.size) and abs(z.std() - 1) < 0.12
    assert ks_2samp(z, norm.ppf((np.arange(2000) + 0.5) / 2000)).pvalue > 1e-3


def test_short_runs_resample_steps_and_their_stalls():
    """Short runs resample steps, stalls included, where a normal sum would be wrong."""
    rng = np.random.default_rng(8)
    times = np.where(rng.random(64 * 200) < 0.02, 60.0, 10.0) + 0.1 * rng.standard_normal(64 * 200)
    statistics = model_of_steps(times, np.ones_like(times), np.arange(times.size) // 64, NONE)
    runs = run(statistics, 1, 20_000, 9)[0]
    stalled = (runs > 40).mean()
    assert abs(stalled - (times > 40).mean()) < 5 * np.sqrt(0.02 * 0.98 / runs.size)
    # what is left of luck with stalls moves clusters a little; a normal sum would be 7 s wide
    assert abs(np.median(runs) - np.median(times)) < 0.3 and runs[runs < 40].std() < 1.0
    # the sum of many is where the normal law takes over, at the same mean and spread
    totals = [run(statistics, n, 2000, 10)[0] / n for n in (2000, 2001)]
    assert abs(totals[0].mean() - totals[1].mean()) < 5 * totals[1].std() * (2 / 2000) ** 0.5
    assert totals[0].std() == pytest.approx(totals[1].std(), rel=0.12)
