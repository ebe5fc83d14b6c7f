"""Sums of what drifts: an AR(1) series in seconds, and a daily wave.

A run of n steps needs the sum of n values of the drift and the value after them, so that the next
n steps go on from there. Both are Gaussian, and their joint distribution is exact; so is the sum of
a cosine.
"""

import math
from typing import NamedTuple

import numpy as np

from prism.simulation.runs.parts import DAY_S, Array

_NONE = 1e4  # a rate that stands for no memory at all: exp(-rate) is 0
_CONSTANT = 1e-8  # steps over memory below which the spread of a sum is lost to rounding


class Moments(NamedTuple):
    """Of d_0 + ... + d_(n-1) and of d_n, given d_0, in an AR(1) series of unit variance [run].

    With z, y standard normal the sum is decay d_0 + along z + across y, and d_n is left d_0 +
    std z.
    """

    decay: Array
    along: Array
    across: Array
    left: Array
    std: Array

    @property
    def variance(self) -> Array:
        """Variance of the sum where d_0 is not known."""
        return np.asarray(self.decay**2 + self.along**2 + self.across**2)


def rate_of(seconds: Array, tau_s: float | Array) -> Array:
    """Seconds over the correlation time [1]; `_NONE` without memory."""
    rate = np.full(np.broadcast(seconds, tau_s).shape, _NONE)
    np.divide(seconds, tau_s, out=rate, where=np.greater(tau_s, 0.0))
    return np.asarray(np.minimum(rate, _NONE))


class Decay:
    """How a start value fades: by r = exp(-rate) a step, `rate` one over the correlation time."""

    def __init__(self, rate: Array) -> None:
        self.rate, self.back, self.fades = rate, -rate, rate > 0.0
        self.less = np.expm1(self.back)  # r - 1

    def sum(self, n: Array) -> Array:
        """Sum of r^i for i = 0 ... n - 1 [run]: what a start value adds to n steps."""
        found = np.array(n, float)
        np.divide(np.expm1(self.back * n), self.less, out=found, where=self.fades)
        return found


def drift_moments(n: Array, decay: Decay) -> Moments:
    """Return the moments of n values [run].

    Notes
    -----
    Given d_0, d_i = r d_(i-1) + sqrt(1 - r^2) e_i. The e_j enters d_n with r^(n-j) and the sum of
    d_0 ... d_(n-1) with (1 - r^(n-j)) / (1 - r), so that with m = n - 1 and A_q = sum of r^(q k)
    over k = 1 ... m: Var(sum) = (1 + r)/(1 - r) (m - 2 A_1 + A_2), Cov(sum, d_n) = (1 + r)
    (A_1 - A_2), Var(d_n) = 1 - r^(2n).
    """
    m, r, rate = np.maximum(n - 1.0, 0.0), np.exp(decay.back), decay.rate
    one, two = r * decay.sum(m), r**2 * Decay(2.0 * rate).sum(m)
    std = np.sqrt(-np.expm1(-2.0 * rate * n))
    known = rate * n > _CONSTANT
    var, along = np.zeros((2, *np.shape(n)))
    np.divide((1.0 + r) * (m - 2.0 * one + two), -decay.less, out=var, where=known)
    np.divide((1.0 + r) * (one - two), std, out=along, where=known)
    across = np.sqrt(np.maximum(0.0, var - along**2))
    return Moments(decay.sum(n), along, across, np.exp(decay.back * n), std)


def drift_variance(n_steps: int, step_s: float, tau_s: float) -> float:
    """Variance of the sum of n values of an AR(1) series of unit variance [1]."""
    n, seconds = np.array([float(n_steps)]), np.array([step_s])
    return float(drift_moments(n, Decay(rate_of(seconds, tau_s))).variance[0])


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


def wave_sum(at_s: Array, n: Array, step_s: Array, peak_s: float) -> Array:
    """Sum of cos(2 pi (t - peak) / day) over n steps from a time of day on [1]."""
    half = np.pi * step_s / DAY_S
    first = 2.0 * np.pi * (at_s - peak_s) / DAY_S
    below = np.sin(half)
    ratio = np.divide(np.sin(n * half), below, out=np.array(n, float), where=np.abs(below) > 1e-12)
    return np.asarray(ratio * np.cos(first + (n - 1.0) * half))
