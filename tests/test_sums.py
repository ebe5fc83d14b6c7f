"""Numerics of tails: sums, the largest of several, and of very many of which few are known.

Closed forms and brute force, at probabilities that no test of steps gets to see.
"""

import numpy as np
import pytest
from scipy.stats import norm

from prism.distributions.distribution import constant, empirical, gamma, lognormal, normal
from prism.distributions.sums import Draws, largest_of, sum_of
from prism.simulation.tailfit import noise_table, widen

Q = np.array([1e-9, 1e-4, 0.03, 0.5, 0.97, 1 - 1e-4, 1 - 1e-9])


def test_sum_of_gammas_is_a_gamma():
    """Ten of shape 9, in parts of other counts: shape 90."""
    distribution = gamma(1 / 3)
    found = sum_of(
        (Draws(distribution, 2.0, 7.0), Draws(distribution, 2.0), Draws(distribution, 2.0, 2.0))
    )
    exact = gamma(1 / 90**0.5)
    np.testing.assert_allclose(found.ppf(Q), exact.ppf(Q), atol=2e-3 * exact.std)
    assert found.mean == pytest.approx(1.0, abs=1e-5)
    assert found.std == pytest.approx(exact.std, rel=1e-3)


def test_sum_of_normals_of_other_lengths_is_a_normal():
    found = sum_of((Draws(normal(0.1), 3.0), Draws(normal(0.02), 5.0, 4.0), Draws(constant(), 7.0)))
    exact = normal((0.3**2 + 4 * 0.1**2) ** 0.5 / 30.0)
    np.testing.assert_allclose(found.ppf(Q), exact.ppf(Q), atol=2e-3 * exact.std)


def test_a_sum_keeps_the_tail_of_a_rare_slow_part():
    """One in a thousand takes ten times as long: three moments do not tell that from a gamma."""
    rare = empirical([0.0, 0.9989, 0.999, 1.0], [0.99, 1.01, 10.0, 10.2])
    found = sum_of((Draws(rare, 1.0), Draws(lognormal(0.05), 1.0, 3.0)))
    rng = np.random.default_rng(1)
    total = rare.ppf(rng.random(1_000_000))
    for _ in range(3):
        total += lognormal(0.05).ppf(rng.random(total.size))
    total /= total.mean()
    for q in (1e-3, 0.1, 0.5, 0.9, 0.998, 0.9995):
        assert found.ppf(q) == pytest.approx(np.quantile(total, q), abs=4e-3)
    assert found.std == pytest.approx(total.std(), rel=0.02)


def test_one_draw_and_none_are_as_they_are():
    distribution = lognormal(0.3)
    assert sum_of((Draws(distribution, 2.0),)) == distribution
    assert sum_of((Draws(constant(), 2.0, 3.0),)) == sum_of(()) == constant()


@pytest.mark.parametrize("n", [2, 8, 512])
def test_largest_of_some(n):
    distribution = gamma(0.2)
    found, q = largest_of(distribution, n), np.array([0.01, 0.5, 0.99, 1 - 1e-6])
    np.testing.assert_allclose(distribution.cdf(found.ppf(q)) ** n, q, atol=2e-3)
    assert largest_of(distribution, 1) == distribution
    assert largest_of(constant(), n) == constant()


def test_noise_table_reads_a_normal_distribution_and_its_tail():
    rng = np.random.default_rng(2)
    first, width, log_cdf = noise_table(np.sort(rng.standard_normal(132_096)))
    grid = first + width * np.arange(log_cdf.size)
    for z, within in ((0.0, 0.02), (2.0, 0.02), (3.5, 0.2), (4.5, 0.4)):
        assert np.interp(norm.logcdf(z), log_cdf, grid) == pytest.approx(z, abs=within)


def test_noise_table_of_steps_has_no_endless_tail():
    rng = np.random.default_rng(2)
    noise = np.sort(rng.integers(0, 4, (132_096, 6)).sum(axis=1) + 0.1 * rng.random(132_096))
    first, width, log_cdf = noise_table(noise)
    grid = first + width * np.arange(log_cdf.size)
    assert np.interp(np.log1p(-1e-6), log_cdf, grid) < 18.1 + noise.std()  # it is at most 18.1


@pytest.mark.parametrize("noise", [np.zeros(132_096), np.repeat([0.0, 1.0], 66_048)])
def test_noise_whose_largest_values_are_alike_ends_with_them(noise):
    first, width, log_cdf = noise_table(noise)
    assert np.isfinite(log_cdf).all() and log_cdf[-1] == 0.0
    assert first + width * log_cdf.size == pytest.approx(noise[-1], abs=1e-3)


@pytest.mark.parametrize("less", [0.0, 0.5])
def test_draws_of_microbatches_mend_the_tail_of_a_small_pilot(less):
    """Noise that is mostly microbatches, the longest of which may delay a step less."""
    rng = np.random.default_rng(3)

    def draw(n):
        told = np.sort(rng.gamma(4.0, 0.25, (n, 8)), axis=1)[:, [3, -1]]
        known = told @ [0.5, 1.0]
        known -= less * np.maximum(0.0, known - 2.9)  # of 1 in 10
        return told, known + 0.1 * rng.standard_normal(n)

    (told, noise), (many, truth) = draw(10_000), draw(1_000_000)
    found, exact = widen(noise, told, many), np.sort(truth)
    assert found.size == 1_000_000
    for share in (0.5, 1e-2, 1e-3, 1e-4):
        assert np.quantile(found, 1.0 - share) == pytest.approx(
            np.quantile(exact, 1.0 - share), abs=0.05 * exact.std()
        )
    free = rng.standard_normal(10_000)  # nothing to do with them: left as it is
    assert np.array_equal(widen(free, told, many), np.sort(free))
