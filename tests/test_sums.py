"""Sums of durations and the largest of several, against closed forms and brute force."""

import numpy as np
import pytest

from prism.distributions.distribution import constant, empirical, gamma, lognormal, normal
from prism.distributions.sums import Draws, largest_of, sum_of

Q = np.array([1e-9, 1e-4, 0.03, 0.5, 0.97, 1 - 1e-4, 1 - 1e-9])


def test_sum_of_gammas_is_a_gamma():
    """Ten of shape 9, in parts of other counts: shape 90."""
    law = gamma(1 / 3)
    found = sum_of((Draws(law, 2.0, 7.0), Draws(law, 2.0), Draws(law, 2.0, 2.0)))
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
    law = lognormal(0.3)
    assert sum_of((Draws(law, 2.0),)) is law
    assert sum_of((Draws(constant(), 2.0, 3.0),)) == sum_of(()) == constant()


@pytest.mark.parametrize("n", [2, 8, 512])
def test_largest_of_some(n):
    law = gamma(0.2)
    found, q = largest_of(law, n), np.array([0.01, 0.5, 0.99, 1 - 1e-6])
    np.testing.assert_allclose(law.cdf(found.ppf(q)) ** n, q, atol=2e-3)
    assert largest_of(law, 1) == law
    assert largest_of(constant(), n) == constant()
