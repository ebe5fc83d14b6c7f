"""Estimators of shares: a known model, SciPy's formula, coverage; no public path gives them runs.

(`prism.rank` simulates its own steps; here the samples are those of closed forms.)
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from prism.common import attribution as at

LANES = 64


def ishigami(x, a=7.0, b=0.1):
    """Three uniform inputs on [-pi, pi]: one alone, one alone, one only together with the first."""
    return np.sin(x[0]) + a * np.sin(x[1]) ** 2 + b * x[2] ** 4 * np.sin(x[0])


def samples(seed, clusters, d=3):
    return np.random.default_rng(seed).uniform(-np.pi, np.pi, (d, clusters, LANES))


def pick_freeze(f, x, y, i):
    def swapped(x, y):
        out = x.copy()
        out[i] = y[i]
        return out

    return at.PickFreeze(f(x), f(swapped(x, y)), f(y), f(swapped(y, x)))


def shares(f, x, y, i):
    first, total = at.partial_variances(pick_freeze(f, x, y, i))
    drawn = at.resample_runs(first.size, (f(x), f(y)), 1)
    return at.share_interval(first, drawn), at.share_interval(total, drawn)


def test_ishigami_function():
    """Against its closed form (Ishigami & Homma 1990)."""
    x, y = (samples(s, 256) for s in (1, 2))
    a, b = 7.0, 0.1
    v1 = 0.5 * (1 + b * np.pi**4 / 5) ** 2
    v2, v13 = a**2 / 8, b**2 * np.pi**8 * (1 / 18 - 1 / 50)
    v = v1 + v2 + v13
    for i, exact in enumerate([(v1 / v, (v1 + v13) / v), (v2 / v, v2 / v), (0.0, v13 / v)]):
        for found, value in zip(shares(ishigami, x, y, i), exact, strict=True):
            assert abs(found.value - value) < 2.5 * found.half_width
            assert found.half_width < 0.07


@given(hnp.arrays(np.float64, (4, 3, 5), elements=st.floats(-10, 10, allow_subnormal=False)))
def test_total_is_at_least_first(values):
    a, ab, b, ba = values
    first, total = at.partial_variances(at.PickFreeze(a, ab, b, ba))
    assert np.all(total >= first - 1e-9)


def test_what_lasts_and_what_comes_in_few_steps():
    """An effect of the cluster, one of every step, and one of a step in a hundred."""
    rng = np.random.default_rng(8)
    shape = (64, LANES)
    noise, other = rng.standard_normal((2, *shape))
    for effect, lasting, in_few in (
        (rng.standard_normal((2, 64, 1)) * np.ones(LANES), 1.0, 0.28),
        (rng.standard_normal((2, *shape)), 0.0, 0.28),
        (np.where(rng.random((2, *shape)) < 0.01, 5.0, 0.0), 0.0, 1.0),
    ):
        x, y = effect
        runs = at.PickFreeze(noise + x, noise + y, other + y, other + x)
        found = at.recurrence(runs)
        assert found == pytest.approx((lasting, in_few), abs=0.06)
    assert np.isnan(at.recurrence(at.PickFreeze(noise, noise, other, other))).all()


def test_intervals_of_shares_cover():
    """95 % intervals hold a share about that often, with the few clusters of a start too."""
    hits = 0
    for seed in range(400):
        x, y = np.random.default_rng(seed).standard_normal((2, 2, 8, LANES))
        _, total = shares(lambda z: z[0] + 0.5 * z[1], x, y, 1)
        hits += total.low <= 0.2 <= total.high
    assert 372 <= hits <= 396  # of 90 % intervals: 360


def test_path_shares_and_intervals_of_tails():
    """Exponential parts of scales 1 and 2: variances 1 to 4; the tail's by many repetitions."""
    rng = np.random.default_rng(12)
    scales = np.array([1.0, 2.0])[:, None]
    whole = at.path_shares(rng.exponential(1.0, (4000, 2, LANES)) * scales)
    np.testing.assert_allclose(whole.mean, [1 / 3, 2 / 3], atol=0.01)
    np.testing.assert_allclose(whole.covariance, [0.2, 0.8], atol=0.01)
    hits = 0
    for i in range(150):
        found = at.path_shares(rng.exponential(1.0, (16, 2, LANES)) * scales, i)
        assert found.tail.sum() == pytest.approx(1.0, abs=1e-14)
        hits += found.tail_ci[0, 0] <= whole.tail[0] <= found.tail_ci[0, 1]
    assert 132 <= hits <= 149
    # a rare, long part has little of the variance and much of the tail
    body = rng.standard_normal((64, LANES))
    rare = np.where(rng.random((64, LANES)) < 0.02, 4.0, 0.0)
    found = at.path_shares(np.stack([body, rare], axis=1))
    assert found.tail[1] > found.covariance[1] + 0.1
