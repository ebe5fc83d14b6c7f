"""Attribution of a variance to independent inputs, and of a time to the classes on its path.

Two views. Pick-freeze: runs that share some inputs and not others give each input's first-order
share (alone) and total-order share (with all its interactions). Covariance: the parts of a sum
share its variance and its tail so that the shares sum to one. Clusters are the independent units:
every statistic is a mean over them, and intervals resample them. Left out: how inputs are redrawn
(`prism.simulation.variance_inputs`), and anything a model knows.

References
----------
.. [1] Jansen (1999), doi:10.1016/S0010-4655(98)00154-4, equation for the total order.
.. [2] Owen (2013), "Better estimation of small Sobol' sensitivity indices", ACM TOMACS 23(2),
   doi:10.1145/2457459.2457460: products of differences for the first order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from prism.common.arrays import Array, Index

RESAMPLES = 1000
LEVEL = 0.95
TAIL = 0.95  # quantile beyond which the tail lies
FEW = 0.05  # of the steps


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


def partial_variances(runs: PickFreeze) -> tuple[Array, Array]:
    """First-order and total-order variance of an input by cluster [s^2].

    Their means estimate; a cluster's own may be negative (first), but never first > total. With d =
    a - ab and e = ba - b, two differences by the input alone: total E[d^2 + e^2]/4 (Jansen's
    formula on both pairs) and first E[d e]/2. Then total - first = E[(d - e)^2]/4 >= 0 in every
    sample, and both are precise where the input matters little: their errors are proportional to
    the share. `scipy.stats.sobol_indices` has the first order's error of order 1.
    """
    d, e = runs.a - runs.ab, runs.ba - runs.b
    return 0.5 * (d * e).mean(axis=1), 0.25 * (d * d + e * e).mean(axis=1)


def recurrence(runs: PickFreeze) -> tuple[float, float]:
    """Tell whether what an input does lasts over the steps of a cluster, or comes in few steps.

    First the covariance of its effects on two steps of one cluster, over their mean square: 1 where
    it is the same in each of them, 0 where it is drawn anew. Then the share of their sum of squares
    in the `FEW` of all steps that it moves most; of a normal effect 0.28.
    """
    effects = np.concatenate([runs.a - runs.ab, runs.ba - runs.b])
    squares, n = effects**2, effects.shape[1]
    whole = float(squares.sum())
    if whole <= 0.0 or n < 2:
        return float("nan"), float("nan")
    twice = float((effects.sum(axis=1) ** 2).sum()) - whole
    few = np.sort(squares, axis=None)[-max(1, round(FEW * squares.size)) :]
    return twice / (n - 1) / whole, float(few.sum()) / whole


def draw_counts(rng: np.random.Generator, draws: int, n: int) -> Index:
    """How often each of n units is drawn by n draws with replacement, int64 [draw, unit]."""
    drawn = rng.integers(n, size=(draws, n)) + n * np.arange(draws)[:, None]
    return np.bincount(drawn.ravel(), minlength=drawn.size).reshape(draws, n)


def _resample(n: int, seed: int) -> Array:
    """Weights of bootstrap resamples of n clusters [resample, cluster], summing to n."""
    rng = np.random.default_rng([seed, n])
    return rng.multinomial(n, np.full(n, 1.0 / n), RESAMPLES).astype(np.float64)


def _interval(value: float, samples: Array, n: int) -> Estimate:
    """Percentile interval, widened for few clusters as Student's t is."""
    if n < 2:
        return Estimate(value, -np.inf, np.inf)
    wide = stdtrit(n - 1, 0.5 + LEVEL / 2.0) / ndtri(0.5 + LEVEL / 2.0)
    wide *= np.sqrt(n / (n - 1.0))
    low, high = np.quantile(samples, [0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0])
    return Estimate(value, value + wide * (low - value), value + wide * (high - value))


class ClusterControl(NamedTuple):
    """Quiet step times of many clusters [s], of the runs that `run_variance` is given.

    The first ones are those of the runs' own clusters. Where they do not vary, nothing is drawn
    once per cluster, and clusters have equal means.
    """

    times: tuple[Array, ...]  # by run, float64 [cluster]

    @property
    def variance(self) -> float:
        """Variance between clusters of the quiet times [s^2]."""
        return float(np.mean([t.var(ddof=1) for t in self.times]))

    @property
    def error(self) -> float:
        """Relative standard error of `variance`."""
        z = np.concatenate([t - t.mean() for t in self.times])
        square = float((z**2).mean())
        if square <= 0.0:
            return 0.0
        return float(np.sqrt(max(0.0, (z**4).mean() / square**2 - 1.0) / z.size))


def run_variance(runs: Sequence[Array], control: ClusterControl | None = None) -> Variance:
    """Variance of runs of one model [cluster, lane], with what a control tells of the clusters."""
    n = runs[0].shape[0]
    within, between, _ = _variances(runs, control, np.ones((1, n)), 0.0)
    return Variance(float(within[0]), float(between[0]))


def control_slope(runs: Sequence[Array], control: ClusterControl) -> float:
    """Slope of the clusters' means over their quiet times."""
    return float(_variances(runs, control, np.ones((1, runs[0].shape[0])), 0.0)[2][0])


def _variances(
    runs: Sequence[Array], control: ClusterControl | None, weights: Array, error: Array | float
) -> tuple[Array, Array, Array]:
    """Variance within and between clusters, and the control's slope, under weights of clusters.

    Of the clusters' means m and quiet times g: Var m - b^2 (Var g - V), with b the slope of m over
    g, and V the variance of g in many more clusters. Its error is that of what g leaves unexplained
    of m, and of V.
    """
    n, lanes = runs[0].shape
    within, mm, mg, gg = (np.zeros(weights.shape[0]) for _ in range(4))
    unbiased = n / max(1, n - 1) / len(runs)
    for i, run in enumerate(runs):
        centred = run - run.mean()
        if lanes > 1:
            within += weights @ centred.var(axis=1, ddof=1) / n / len(runs)
        m = centred.mean(axis=1)
        first = weights @ m / n
        mm += unbiased * (weights @ m**2 / n - first**2)
        if control is not None:
            g = control.times[i][:n] - control.times[i].mean()
            mean = weights @ g / n
            gg += unbiased * (weights @ g**2 / n - mean**2)
            mg += unbiased * (weights @ (m * g) / n - first * mean)
    between = mm - within / lanes
    slope = np.divide(mg, gg, out=np.zeros_like(mg), where=gg > 0.0)
    if control is not None:
        whole = control.variance
        between = between - slope**2 * (gg - whole * np.maximum(0.0, 1.0 + error))
        if whole <= 0.0:
            return within + mm - within / lanes, np.zeros_like(mm), slope
    return within, np.maximum(0.0, between), slope


class Resamples(NamedTuple):
    """Variance of runs, and bootstrap resamples of their clusters."""

    whole: Variance
    weights: Array  # [resample, cluster] of the first m clusters, summing to m
    within: Array  # [resample] variance within a cluster [s^2]
    between: Array  # [resample] and between clusters


def resample_runs(
    m: int,
    runs: Sequence[Array],
    seed: int,
    control: ClusterControl | None = None,
    added: Array | None = None,
) -> Resamples:
    """Resample runs [cluster, lane] s for intervals of shares that their first m clusters tell.

    `added` is variance that the runs' first clusters lack, by cluster [s^2].
    """
    n = runs[0].shape[0]
    weights = _resample(m, seed)
    rest = _resample(n - m, seed + 1) if n > m else np.empty((RESAMPLES, 0))
    joint = np.concatenate([weights, rest], axis=1)
    error: Array | float = 0.0
    if control is not None:
        error = control.error * np.random.default_rng([seed, 2]).standard_normal(RESAMPLES)
    within, between, _ = _variances(runs, control, joint, error)
    whole = run_variance(runs, control)
    if added is not None and added.size:
        own_weights = joint[:, : added.size]
        within = within + own_weights @ added / np.maximum(own_weights.sum(axis=1), 1.0)
        whole = Variance(whole.within + float(added.mean()), whole.between)
    return Resamples(whole, weights, within, between)


def share_interval(part: Array, drawn: Resamples, with_between: bool = False) -> Estimate:
    """Share of a part [cluster] s^2 in the variance of runs, with its interval.

    The variance between clusters belongs to the part too where `with_between`.
    """
    whole, m = drawn.whole, part.size
    if whole.total <= 0.0:
        return Estimate(0.0, 0.0, 0.0)
    own, parts = float(part.mean()), drawn.weights @ part / m
    if with_between:
        own, parts = own + whole.between, parts + drawn.between
    return _interval(own / whole.total, parts / np.maximum(drawn.within + drawn.between, 1e-300), m)


class PathShares(NamedTuple):
    """Shares of the classes of a path [class]; those of variance and tail sum to one."""

    mean: Array  # of the mean
    covariance: Array  # Cov(T_k, T) / Var T
    covariance_ci: Array  # [class, bound]
    tail: Array  # (E[T_k | T >= q95] - E[T_k]) over the same of T
    tail_ci: Array  # [class, bound]


def path_shares(parts: Array, seed: int = 0) -> PathShares:
    """Decompose T, the sum of parts [cluster, class, lane] s of its critical path.

    The shares sum to one exactly, whatever the rounding of the ends that the parts were followed
    from. A part's covariance with T counts a draw shared by several parts in each of them, by how
    much it moves that part; it may be negative. It says what went along with T, not what an
    intervention would bring. Intervals resample clusters; those of the tail keep q95 where it is.
    """
    total = parts.sum(axis=1)
    mean = parts.mean(axis=(0, 2))
    centred = parts - mean[:, None]
    products = (centred * (total - total.mean())[:, None]).mean(axis=2)
    tail = total >= np.quantile(total, TAIL)
    lifts = (centred * tail[:, None]).mean(axis=2)  # over the whole: E[T_k - mean; T >= q95]
    weights = _resample(parts.shape[0], seed)
    bounds = [_share_bounds(x, weights) for x in (products, lifts)]
    return PathShares(
        _normalise(mean), _normalise(products.mean(axis=0)), bounds[0],
        _normalise(lifts.mean(axis=0)), bounds[1],
    )  # fmt: skip


def _share_bounds(parts: Array, weights: Array) -> Array:
    """Intervals of shares of a sum of parts [cluster, class]: [class, bound]."""
    resampled = weights @ parts
    sums = resampled.sum(axis=1)
    resampled /= np.where(sums > 0.0, sums, np.inf)[:, None]
    shares = _normalise(parts.mean(axis=0))
    n = parts.shape[0]
    return np.array([_interval(s, r, n)[1:] for s, r in zip(shares, resampled.T, strict=True)])


def _normalise(values: Array) -> Array:
    total = float(values.sum())
    return values / total if total > 0.0 else np.zeros_like(values)
