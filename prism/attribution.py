"""Attribution of a variance to independent inputs, and of a time to the classes on its path.

Two views. Pick-freeze: runs that share some inputs and not others give each input's first-order
share (alone) and total-order share (with all its interactions). Covariance: the parts of a sum
share its variance and its tail so that the shares sum to one. Clusters are the independent units:
every statistic is a mean over them, and intervals resample them. Left out: how inputs are redrawn
(`prism.inputs`), and anything a model knows.

References
----------
.. [1] Jansen (1999), doi:10.1016/S0010-4655(98)00154-4, equation for the total order.
.. [2] Owen (2013), "Better estimation of small Sobol' sensitivity indices", ACM TOMACS 23(2),
   doi:10.1145/2457459.2457460: products of differences for the first order.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
RESAMPLES = 1000
LEVEL = 0.95
TAIL = 0.95  # quantile beyond which the tail lies


class PickFreeze(NamedTuple):
    """Times of four runs [cluster, lane]: two independent ones, and each with one input swapped."""

    a: Array
    ab: Array  # a, but the input as in b
    b: Array
    ba: Array  # b, but the input as in a


class Estimate(NamedTuple):
    """A share and its interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return 0.5 * (self.high - self.low)


class Variance(NamedTuple):
    """Variance of one replicate, within a cluster and of the clusters' means [s^2]."""

    within: float
    between: float

    @property
    def total(self) -> float:
        """Variance of a replicate of a random cluster [s^2]."""
        return self.within + self.between


def cluster_variance(times: Array) -> Variance:
    """Split the variance of times [cluster, lane]; unbiased but for the bound at 0."""
    within = float(times.var(axis=1, ddof=1).mean()) if times.shape[1] > 1 else 0.0
    if times.shape[0] < 2:
        return Variance(within, 0.0)
    noise = within / times.shape[1]
    return Variance(within, max(0.0, float(times.mean(axis=1).var(ddof=1)) - noise))


def partial_variances(runs: PickFreeze) -> tuple[Array, Array]:
    """First-order and total-order variance of an input by cluster [s^2].

    Returns
    -------
    first, total : float64 [cluster]
        Their means estimate; a cluster's own may be negative (first), but never first > total.

    Notes
    -----
    With d = a - ab and e = ba - b, two differences by the input alone: total E[d^2 + e^2]/4
    (Jansen's formula on both pairs) and first E[d e]/2. Then total - first = E[(d - e)^2]/4 >= 0 in
    every sample, and both are precise where the input matters little: their errors are
    proportional to the share. `scipy.stats.sobol_indices` has the first order's error of order 1.
    """
    d, e = runs.a - runs.ab, runs.ba - runs.b
    return 0.5 * (d * e).mean(axis=1), 0.25 * (d * d + e * e).mean(axis=1)


def _resample(n: int, seed: int) -> Array:
    """Weights of bootstrap resamples of n clusters [resample, cluster], summing to n."""
    rng = np.random.default_rng([seed, n])
    return rng.multinomial(n, np.full(n, 1.0 / n), RESAMPLES).astype(np.float64)


def _interval(value: float, samples: Array, n: int) -> Estimate:
    """Percentile interval, widened for few clusters as Student's t is."""
    if n < 2:
        return Estimate(value, -np.inf, np.inf)
    wide = stats.t.ppf(0.5 + LEVEL / 2.0, n - 1) / stats.norm.ppf(0.5 + LEVEL / 2.0)
    wide *= np.sqrt(n / (n - 1.0))
    low, high = np.quantile(samples, [0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0])
    return Estimate(value, value + wide * (low - value), value + wide * (high - value))


def share_interval(part: Array, a: Array, b: Array, seed: int) -> Estimate:
    """Share of a part in the variance, with its interval.

    Parameters
    ----------
    part : float64 [cluster]
        Partial variance by cluster, of the first clusters of the runs [s^2].
    a, b : float64 [cluster, lane]
        The two independent runs, of at least as many clusters [s].
    seed : int
        Of the resamples.
    """
    m, n = part.size, a.shape[0]
    variance = 0.5 * (cluster_variance(a).total + cluster_variance(b).total)
    if variance <= 0.0:
        return Estimate(0.0, 0.0, 0.0)
    weights = _resample(m, seed)
    rest = _resample(n - m, seed + 1) if n > m else np.empty((RESAMPLES, 0))
    joint = np.concatenate([weights, rest], axis=1)
    resampled = 0.5 * (_resampled_variance(a, joint) + _resampled_variance(b, joint))
    samples = (weights @ part / m) / np.maximum(resampled, 1e-300)
    return _interval(float(part.mean()) / variance, samples, m)


def _resampled_variance(times: Array, weights: Array) -> Array:
    """Variance of a replicate under each resample of the clusters."""
    n = times.shape[0]
    centred = times - times.mean()
    within = weights @ centred.var(axis=1, ddof=1) / n
    means = centred.mean(axis=1)
    between = (weights @ means**2 / n - (weights @ means / n) ** 2) * n / max(1, n - 1)
    return np.asarray(within + np.maximum(0.0, between - within / times.shape[1]))


class Reduction(NamedTuple):
    """Spread and quantiles after an intervention [s], and relative reductions with intervals."""

    std: float
    p50: float
    p95: float
    p99: float
    std_reduction: Estimate
    p95_reduction: Estimate


def reduction(before: Array, after: Array, seed: int) -> Reduction:
    """Compare two runs [cluster, lane] with common random numbers, pair by pair."""
    n, rng = before.shape[0], np.random.default_rng([seed, before.shape[0]])
    pick = rng.integers(0, n, (RESAMPLES // 4, n))
    both = np.stack([before, after])
    flat = both.reshape(2, -1)
    spread, p95 = flat.std(axis=1, ddof=1), np.quantile(flat, TAIL, axis=1)
    drawn = both[:, pick].reshape(2, len(pick), -1)
    spreads, p95s = drawn.std(axis=2, ddof=1), np.quantile(drawn, TAIL, axis=2)

    def relative(x: Array) -> Array:
        return np.asarray(1.0 - x[1] / np.where(x[0] > 0.0, x[0], np.inf))

    p50, p99 = np.quantile(flat[1], [0.5, 0.99])
    return Reduction(
        float(spread[1]), float(p50), float(p95[1]), float(p99),
        _interval(float(relative(spread)), relative(spreads), n),
        _interval(float(relative(p95)), relative(p95s), n),
    )  # fmt: skip


class PathShares(NamedTuple):
    """Shares of the classes of a path [class]; those of variance and tail sum to one."""

    mean: Array  # of the mean
    covariance: Array  # Cov(T_k, T) / Var T
    covariance_low: Array
    covariance_high: Array
    tail: Array  # (E[T_k | T >= q95] - E[T_k]) over the same of T


def path_shares(parts: Array, seed: int = 0) -> PathShares:
    """Decompose T = sum of its parts: mean, variance and tail.

    Parameters
    ----------
    parts : [cluster, class, lane]
        Seconds of each class on the critical path. T is their sum, so that the shares sum to one
        exactly, whatever the rounding of the ends that the parts were followed from.
    seed : int
        Of the resamples.

    Notes
    -----
    A part's covariance with T counts a draw shared by several parts in each of them, by how much it
    moves that part; it may be negative. It says what went along with T, not what an intervention
    would bring.
    """
    total = parts.sum(axis=1)
    deviation = total - total.mean()
    products = ((parts - parts.mean(axis=(0, 2))[:, None]) * deviation[:, None]).mean(axis=2)
    tail = total >= np.quantile(total, TAIL)
    lift = np.array([p[tail].mean() - p.mean() for p in parts.transpose(1, 0, 2)])
    mean = parts.mean(axis=(0, 2))
    share = _normalise(products.mean(axis=0))
    n = parts.shape[0]
    resampled = _resample(n, seed) @ products
    resampled /= np.where(resampled.sum(axis=1) > 0.0, resampled.sum(axis=1), np.inf)[:, None]
    bounds = [_interval(s, r, n) for s, r in zip(share, resampled.T, strict=True)]
    return PathShares(
        _normalise(mean), share, np.array([e.low for e in bounds]),
        np.array([e.high for e in bounds]), _normalise(lift),
    )  # fmt: skip


def _normalise(values: Array) -> Array:
    total = float(values.sum())
    return values / total if total > 0.0 else np.zeros_like(values)
