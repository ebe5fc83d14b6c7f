"""Sums of what drifts: an AR(1) series in seconds, and a daily wave.

A run of n steps needs the sum of n values of the drift and the value after them, so that the next
n steps go on from there. Both are Gaussian, and their joint distribution is exact; so is the sum of
a cosine.
"""

import math

import numpy as np

from prism.simulation.runs.parts import DAY_S, Array

_NONE = 1e4  # a rate that stands for no memory at all: exp(-rate) is 0
_SLOW = 1e-4  # steps over memory below which the closed forms cancel, and series are exact


def drift_variance(n_steps: int, step_s: float, tau_s: float) -> float:
    """Variance of the sum of n values of an AR(1) series of unit variance [1].

    Notes
    -----
    With r = exp(-step/tau): n (1 + r)/(1 - r) - 2 r (1 - r^n)/(1 - r)^2, from summing r^|i-j|.
    """
    if tau_s <= 0.0:
        return float(n_steps)
    rate = step_s / tau_s
    if n_steps * rate < 1e-6:
        return float(n_steps) ** 2
    r, gap = math.exp(-rate), -math.expm1(-rate)
    return n_steps * (1.0 + r) / gap - 2.0 * r * -math.expm1(-rate * n_steps) / gap**2


def ar1(times: Array, n_series: int, rng: np.random.Generator) -> Array:
    """Draw AR(1) series of unit variance at ascending times in units of the memory [time, series].

    Stationary from the first value on.
    """
    gaps = np.diff(times)
    out = rng.standard_normal((times.size, n_series))
    out[1:] *= np.sqrt(-np.expm1(-2.0 * gaps))[:, None]
    if gaps.size and np.ptp(gaps) <= 1e-9 * gaps.max():
        from scipy.signal import lfilter  # most of a second to load, for few jobs

        return np.asarray(lfilter([1.0], [1.0, -math.exp(-gaps[0])], out, axis=0))
    for i, r in enumerate(np.exp(-gaps)):
        out[i + 1] += r * out[i]
    return out


def decay_sum(n: Array, rate: Array) -> Array:
    """Sum of r^i for i = 0 ... n - 1, r = exp(-rate) [run]: what a start value adds to n steps."""
    rate = np.minimum(rate, _NONE)
    gap = -np.expm1(-rate)
    found = np.divide(-np.expm1(-rate * n), gap, out=np.array(n, float), where=gap > 0.0)
    return np.where(n > 0.0, found, 0.0)


def drift_sum(start: Array, n: Array, rate: Array, z: Array) -> tuple[Array, Array]:
    """Draw the sum of n values of an AR(1) series of unit variance, and the value that follows.

    The first is `start`; `rate` is a step over the correlation time, z standard normal [2, run].

    Notes
    -----
    Given d_0, d_i = r d_(i-1) + sqrt(1 - r^2) e_i. The e_j enters d_n with r^(n-j) and the sum of
    d_0 ... d_(n-1) with (1 - r^(n-j)) / (1 - r), so that with m = n - 1 and A_q = sum of r^(q k)
    over k = 1 ... m: Var(sum) = (1 + r)/(1 - r) (m - 2 A_1 + A_2), Cov(sum, d_n) = (1 + r)
    (A_1 - A_2), Var(d_n) = 1 - r^(2n).
    """
    rate, m = np.minimum(rate, _NONE), np.maximum(n - 1.0, 0.0)
    r, gap = np.exp(-rate), -np.expm1(-rate)
    with np.errstate(invalid="ignore", divide="ignore"):
        one = r * -np.expm1(-rate * m) / gap
        two = r**2 * -np.expm1(-2.0 * rate * m) / -np.expm1(-2.0 * rate)
        var = (1.0 + r) / gap * (m - 2.0 * one + two)
        cov = (1.0 + r) * (one - two)
    slow = rate * n < _SLOW
    if slow.any():
        # sums of k and k^2, and of k^3, the square of the first: two orders of the rate
        sums = m * (m + 1.0) / 2.0, m * (m + 1.0) * (2.0 * m + 1.0) / 6.0
        var = np.where(slow, 2.0 * rate * (sums[1] - rate * sums[0] ** 2), var)
        cov = np.where(slow, 2.0 * rate * (sums[0] - rate * (1.5 * sums[1] + 0.5 * sums[0])), cov)
    left = np.where(n > 0.0, np.exp(-rate * np.maximum(n, 1.0)), 1.0)
    std = np.sqrt(np.where(n > 0.0, -np.expm1(-2.0 * rate * np.maximum(n, 1.0)), 0.0))
    along = np.divide(cov, std, out=np.zeros_like(var), where=std > 0.0)
    across = np.sqrt(np.maximum(0.0, var - along**2))
    total = start * decay_sum(n, rate) + along * z[0] + across * z[1]
    return total, left * start + std * z[0]


def wave_sum(at_s: Array, n: Array, step_s: Array, peak_s: float) -> Array:
    """Sum of cos(2 pi (t - peak) / day) over n steps from a time of day on [1]."""
    half = np.pi * step_s / DAY_S
    first = 2.0 * np.pi * (at_s - peak_s) / DAY_S
    below = np.sin(half)
    ratio = np.divide(np.sin(n * half), below, out=np.array(n, float), where=np.abs(below) > 1e-12)
    return np.asarray(ratio * np.cos(first + (n - 1.0) * half))
