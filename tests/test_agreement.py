"""Figures of a prediction against measurements: exact small cases, scipy as the oracle."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from prism.common.agreement import (
    bootstrap_p_value,
    compare,
    effective_n,
    expected_quantile,
    floor,
    ks_critical,
    ks_statistic,
)

KEYS = {
    *("n_measured", "n_effective", "ks", "ks_critical_5pct", "ks_aligned", "wasserstein"),
    *(
        "mean_error",
        "p50_error",
        "p95_error",
        "p95_error_same_n",
        "p99_error",
        "p95_measured_se",
        "cv_ratio",
    ),
}
times = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=40)


def memory(n, share, length, seed, reps=1, steps=None):
    """Series [reps, n] of white noise plus something slow, and the true effective n."""
    t = np.arange(n) if steps is None else np.asarray(steps)
    distance = np.abs(t[:, None] - t[None])
    covariance = share * np.exp(-distance / length) + (1.0 - share) * np.eye(n)
    z = np.random.default_rng(seed).standard_normal((reps, n))
    return 100.0 + z @ np.linalg.cholesky(covariance).T, n**2 / covariance.sum()


@pytest.mark.filterwarnings("ignore:ks_2samp")  # about the p-value, which is not asked for
@given(times, times)
def test_distances_are_scipys(measured, predicted):
    found = compare(measured, predicted)
    expected = stats.ks_2samp(measured, predicted, method="exact").statistic
    assert found["ks"] == pytest.approx(expected, abs=1e-12)
    distance = stats.wasserstein_distance(measured, predicted)
    assert found["wasserstein"] == pytest.approx(distance, abs=1e-12)
    assert set(found) == KEYS
    assert all(value is None or math.isfinite(value) for value in found.values())
    assert 1.0 <= found["n_effective"] <= len(measured)


def test_small_case_by_hand():
    found = compare([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0])
    # up to 3.99 all of 1, 2, 3 measured and a quarter predicted; at 4 all against a half
    assert found["ks"] == 0.5
    assert found["ks_aligned"] == 0.0
    assert found["wasserstein"] == pytest.approx(2.5)
    for key in ("mean_error", "p50_error", "p95_error", "p99_error"):
        assert found[key] == pytest.approx(1.0)
    assert found["cv_ratio"] == pytest.approx(1.0)
    assert (found["n_measured"], found["n_effective"]) == (4, 4.0)


def test_percentile_errors_are_of_numpys_linear_quantiles():
    measured, predicted = [1.0, 2.0], [1.0, 1.0, 4.0]
    found = compare(measured, predicted)
    assert found["p95_error"] == pytest.approx((1.0 + 0.9 * 3.0) / 1.95 - 1.0)
    assert found["mean_error"] == pytest.approx(2.0 / 1.5 - 1.0)


def test_critical_value_is_the_tabulated_one():
    """Miller (1956), table 1: n = 16 and 22 at 5 %, two-sided."""
    assert ks_critical(16) == pytest.approx(0.32733, abs=1e-5)
    assert ks_critical(22) == pytest.approx(0.28087, abs=1e-5)
    assert compare(np.arange(1.0, 17.0), [1.0, 2.0])["ks_critical_5pct"] == ks_critical(16)


def test_critical_value_is_exceeded_in_one_of_twenty_cases():
    generator = np.random.default_rng(5)
    distribution = stats.norm.ppf((np.arange(2_000) + 0.5) / 2_000)
    found = [ks_statistic(generator.standard_normal(16), distribution) for _ in range(1_000)]
    exceeded = int(np.sum(np.array(found) > ks_critical(16)))
    assert stats.binomtest(exceeded, 1_000, 0.05).pvalue > 1e-4
    # the check can fail: a sample half a standard deviation off is told more often
    shifted = [ks_statistic(0.5 + generator.standard_normal(16), distribution) for _ in range(200)]
    assert np.mean(np.array(shifted) > ks_critical(16)) > 0.2


@pytest.mark.parametrize("measured", [[3.0], [3.0, 3.0], [3.0] * 20, [1.0, 2.0]])
@pytest.mark.parametrize("predicted", [[3.0], [3.0, 3.0, 3.0], [2.0, 5.0]])
def test_few_or_equal_values_have_an_answer(measured, predicted):
    found = compare(measured, predicted) | floor(predicted, measured)
    assert all(value is None or math.isfinite(value) for value in found.values())
    if len(set(measured)) == 1:
        assert found["cv_ratio"] is None and found["cv_ratio_floor"] is None
        assert found["n_effective"] == len(measured)
    assert (found["p95_measured_se"] is None) == (len(measured) == 1)


def test_floor_is_a_size():
    found = floor([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert found["ks_floor"] == pytest.approx(2.0 / 3.0)
    assert found["p95_floor"] == pytest.approx(0.5)
    assert found["mean_floor"] == pytest.approx(0.5)
    assert found["cv_ratio_floor"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "ks, null, expected",
    [(0.3, [0.1, 0.2, 0.3], 0.5), (0.5, [0.1] * 199, 1 / 200), (0.0, [0.1] * 9, 1.0), (1, [], 1)],
)
def test_p_value_counts_what_is_at_least_as_large(ks, null, expected):
    assert bootstrap_p_value(ks, null) == pytest.approx(expected)


def test_p_value_is_uniform_where_the_model_is_true():
    generator = np.random.default_rng(8)
    found = [bootstrap_p_value(v[0], v[1:]) for v in generator.random((2_000, 100))]
    assert stats.kstest(np.array(found) - 0.005, "uniform").pvalue > 1e-3


# ------------------------------------------------------------------------------- effective n
@pytest.mark.parametrize("n, least", [(16, 0.93), (200, 0.9)])
def test_white_noise_is_worth_its_n(n, least):
    series, _ = memory(n, 0.0, 1.0, seed=1, reps=200)
    found = [effective_n(row) for row in series]
    assert max(found) <= n
    assert np.mean(found) > least * n


@pytest.mark.parametrize("share, length", [(1.0, 2.0), (0.5, 5.0)])
def test_effective_n_is_the_true_one_on_average(share, length):
    series, true = memory(2_000, share, length, seed=2, reps=50)
    found = [effective_n(row) for row in series]
    assert np.mean(found) == pytest.approx(true, rel=0.1)


def test_correlation_is_seen_over_gaps_in_the_step_numbers():
    """Distances count, not positions: the same values shuffled with their steps say the same."""
    generator = np.random.default_rng(3)
    steps = np.cumsum(generator.integers(5, 16, 44))
    series, true = memory(44, 1.0, 18.0, seed=4, reps=100, steps=steps)
    found = np.array([effective_n(row, steps) for row in series])
    assert true == pytest.approx(np.median(found), rel=0.35)
    order = generator.permutation(44)
    assert effective_n(series[0][order], steps[order]) == pytest.approx(found[0], rel=1e-9)
    # negative control: without their places the values look independent
    lost = np.array([effective_n(row[order]) for row in series])
    assert np.median(lost) > 1.5 * np.median(found)


def test_far_apart_steps_are_independent():
    series, _ = memory(60, 1.0, 5.0, seed=6, reps=100, steps=100 * np.arange(60))
    assert np.mean([effective_n(row, 100 * np.arange(60)) for row in series]) > 54.0


def test_pairs_of_different_runs_do_not_count():
    """Two runs of equal step numbers and equal values: a pair across them proves nothing."""
    series, _ = memory(100, 0.0, 1.0, seed=7)
    both, steps = np.tile(series[0], 2), np.tile(np.arange(100), 2)
    runs = np.repeat(["a", "b"], 100)
    assert effective_n(both, steps, runs) > 180.0
    assert effective_n(both, steps) < 120.0


def test_alternating_values_are_not_worth_more_than_n():
    assert effective_n(np.tile([1.0, 2.0], 50)) == 100.0


# ------------------------------------------------------------------------------ error of p95
def test_error_of_p95_is_that_over_repetitions():
    generator = np.random.default_rng(11)
    samples = generator.normal(100.0, 1.0, (300, 400))
    found = [compare(row, row)["p95_measured_se"] for row in samples[:20]]
    true = np.quantile(samples, 0.95, axis=1).std() / 101.645
    assert np.mean(found) == pytest.approx(true, rel=0.2)


def test_blocks_make_the_error_of_p95_honest():
    series, _ = memory(400, 1.0, 8.0, seed=12, reps=200)
    true = np.quantile(series, 0.95, axis=1).std() / np.quantile(series, 0.95)
    found = np.mean([compare(row, row)["p95_measured_se"] for row in series[:20]])
    shuffled = np.random.default_rng(13).permuted(series[:20], axis=1)
    naive = np.mean([compare(row, row)["p95_measured_se"] for row in shuffled])
    assert found == pytest.approx(true, rel=0.35)
    assert naive < 0.6 * true


def test_the_same_data_gives_the_same_error():
    sample = np.random.default_rng(1).random(30)
    assert compare(sample, sample) == compare(sample, sample)


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [float("inf")]])
def test_what_has_no_distribution_is_refused(bad):
    with pytest.raises(ValueError, match="measured"):
        compare(bad, [1.0])
    with pytest.raises(ValueError, match="predicted"):
        compare([1.0], bad)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="steps: 2 numbers for 3 values"):
        compare([1.0, 2.0, 3.0], [1.0], steps=[0, 1])


@pytest.mark.parametrize("n", [1, 2, 11, 40])
def test_the_expected_quantile_is_the_mean_over_samples(n):
    rng = np.random.default_rng(2)
    distribution = np.exp(0.5 * rng.standard_normal(5_000))
    drawn = np.quantile(rng.choice(distribution, (20_000, n)), 0.95, axis=1)
    found = expected_quantile(distribution, 0.95, n)
    assert found == pytest.approx(drawn.mean(), abs=4.0 * drawn.std() / np.sqrt(drawn.size))
    if n == 11:  # the plain p95 is far above what samples of this size show
        assert np.quantile(distribution, 0.95) > found + 20.0 * drawn.std() / np.sqrt(drawn.size)


def test_the_true_distribution_has_no_error_of_p95_at_the_same_n():
    rng = np.random.default_rng(3)
    distribution = 10.0 + rng.standard_normal(2_000)
    errors = [compare(rng.choice(distribution, 5), distribution) for _ in range(100)]
    same, plain = (np.mean([e[k] for e in errors]) for k in ("p95_error_same_n", "p95_error"))
    assert abs(same) < 0.02 < 0.035 < plain
