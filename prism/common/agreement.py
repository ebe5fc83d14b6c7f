"""How well a predicted distribution agrees with measured values, in figures.

Distances between samples, errors of mean and percentiles, what a measured sample of this size can
tell at all (effective n, error of its p95), and the floor: how far two parts of the measurement lie
apart. Values are positive times, in seconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.signal import correlate
from scipy.special import betainc, ndtri
from scipy.stats import kstwo, wasserstein_distance

Array = NDArray[np.float64]
Index = NDArray[np.int64]

N_BOOTSTRAP = 1_000
"""Resamples behind the error of a measured percentile: known to 1/sqrt(2000) = 2 % of itself."""
_BOOTSTRAP_CELLS = 20_000_000  # values drawn at most; fewer resamples of a longer sample
_SEED = 20_250_101  # of those resamples: the same data gives the same error
_MEMORIES = np.geomspace(0.5, 512.0, 41)  # lags over which a correlation may decay by 1/e
_LEVEL = 0.1  # correlation is taken for real where chance alone shows as much less often
_MOST_LAGS = 1_024
_ROUNDS = 8  # of correcting a correlation for its own mean; it settles in two or three


def compare(
    measured: ArrayLike,
    predicted: ArrayLike,
    steps: ArrayLike | None = None,
    runs: Sequence[Hashable] | NDArray[Any] | None = None,
) -> dict[str, Any]:
    """Compare a predicted distribution with measured values.

    Parameters
    ----------
    measured : array_like
        [n] measured times [s].
    predicted : array_like
        [N] predicted times [s].
    steps : array_like of int, optional
        [n] step numbers of the measured values, with gaps or without; in the order given where
        None. Only the effective n and the error of p95 depend on them.
    runs : sequence, optional
        [n] run of each measured value; values of different runs count as independent.

    Returns
    -------
    dict
        ``n_measured``; ``n_effective`` (see `effective_n`); ``ks``, two-sample;
        ``ks_critical_5pct``, exact for one sample of n independent values against a known
        distribution; ``ks_aligned``, both divided by their median first; ``wasserstein`` [s];
        ``mean_error``, ``p50_error``, ``p95_error``, ``p99_error`` (predicted / measured - 1);
        ``p95_error_same_n``, with the p95 that n values of the prediction would show on average;
        ``p95_measured_se``, relative; ``cv_ratio`` (predicted / measured). None where there is no
        answer: a ratio to the CV of a constant sample, the error of a single value.

    Raises
    ------
    ValueError
        If a sample is empty or not finite, or the lengths differ.
    """
    x, y = _sample(measured, "measured"), _sample(predicted, "predicted")
    n_effective = effective_n(x, steps, runs)
    return {
        "n_measured": int(x.size),
        "n_effective": n_effective,
        "ks": ks_statistic(x, y),
        "ks_critical_5pct": ks_critical(x.size),
        "ks_aligned": _ks_aligned(x, y),
        "wasserstein": float(wasserstein_distance(x, y)),
        "mean_error": _relative(float(y.mean()), float(x.mean())),
        **{
            f"p{percentile}_error": _relative(
                float(np.quantile(y, percentile / 100.0)), float(np.quantile(x, percentile / 100.0))
            )
            for percentile in (50, 95, 99)
        },
        "p95_error_same_n": _relative(
            expected_quantile(y, 0.95, x.size), float(np.quantile(x, 0.95))
        ),
        "p95_measured_se": _p95_error(_in_order(x, steps, runs), n_effective),
        "cv_ratio": _cv_ratio(y, x),
    }


def floor(training: ArrayLike, measured: ArrayLike) -> dict[str, Any]:
    """Tell how far two parts of one measurement lie apart.

    Parameters
    ----------
    training, measured : array_like
        [m] and [n] times [s].

    Returns
    -------
    dict
        ``ks_floor``, two-sample; ``p95_floor`` and ``mean_floor``, the size of the relative
        difference to the measured part; ``cv_ratio_floor`` (training / measured).

    Notes
    -----
    No model fitted on one part can be expected to do better on the other.
    """
    x, y = _sample(measured, "measured"), _sample(training, "training")
    p95 = _relative(float(np.quantile(y, 0.95)), float(np.quantile(x, 0.95)))
    mean = _relative(float(y.mean()), float(x.mean()))
    return {
        "ks_floor": ks_statistic(x, y),
        "p95_floor": None if p95 is None else abs(p95),
        "mean_floor": None if mean is None else abs(mean),
        "cv_ratio_floor": _cv_ratio(y, x),
    }


def expected_quantile(values: ArrayLike, p: float, n: int) -> float:
    """Mean quantile of samples of n values, in numpy's linear definition.

    Parameters
    ----------
    values : array_like
        [N] the distribution that samples are drawn from.
    p : float
        Probability, from 0 to 1.
    n : int
        Size of the samples.

    Notes
    -----
    The k-th smallest of n values is the law's quantile at a Beta(k, n + 1 - k) draw. With few
    values the sample p95 lies well below the law's: for 11 normal ones at 1.32 standard
    deviations, not 1.64, so that even the true distribution seems too slow by their difference.

    References
    ----------
    David and Nagaraja, Order Statistics (2003), section 2.1.
    """
    x = np.sort(_sample(values, "values"))
    at = p * (n - 1)
    low = min(int(at), max(n - 2, 0))
    grid = np.linspace(0.0, 1.0, x.size + 1)

    def order_statistic(k: int) -> float:
        return float(np.diff(betainc(k, n + 1 - k, grid)) @ x)

    if n == 1:
        return float(x.mean())
    share = at - low
    return (1.0 - share) * order_statistic(low + 1) + share * order_statistic(low + 2)


def bootstrap_p_value(ks: float, null: ArrayLike) -> float:
    """Chance of a statistic at least this large where the model is true.

    Parameters
    ----------
    ks : float
        The statistic found.
    null : array_like
        [B] the statistic in B simulated repetitions of the comparison.

    Returns
    -------
    float
        ``(1 + #{null >= ks}) / (1 + B)``: never 0, and valid for any B.

    References
    ----------
    Davison and Hinkley, Bootstrap Methods and their Application (1997), equation 4.11.

    Examples
    --------
    >>> bootstrap_p_value(0.3, [0.1, 0.2, 0.3])
    0.5
    """
    values = np.asarray(null, dtype=np.float64).ravel()
    return float((1 + np.count_nonzero(values >= ks)) / (1 + values.size))


def ks_statistic(first: ArrayLike, second: ArrayLike) -> float:
    """Largest distance between the distribution functions of two samples (Kolmogorov-Smirnov).

    Examples
    --------
    >>> ks_statistic([1.0, 2.0], [2.0, 3.0])
    0.5
    """
    # scipy's ks_2samp finds a p-value too, which it warns of where values are few
    x, y = np.sort(_sample(first, "first")), np.sort(_sample(second, "second"))
    both = np.concatenate([x, y])
    below_x = np.searchsorted(x, both, side="right") / x.size
    below_y = np.searchsorted(y, both, side="right") / y.size
    return float(np.abs(below_x - below_y).max())


def ks_critical(n: int, level: float = 0.05) -> float:
    """Distance that n independent values exceed with this probability if they follow it."""
    return float(kstwo.ppf(1.0 - level, n))


def effective_n(
    values: ArrayLike,
    steps: ArrayLike | None = None,
    runs: Sequence[Hashable] | NDArray[Any] | None = None,
) -> float:
    """Count how many independent values tell as much about the mean as these.

    Parameters
    ----------
    values : array_like
        [n] measured values.
    steps : array_like of int, optional
        [n] their step numbers; they may have gaps. 0..n-1 where None.
    runs : sequence, optional
        [n] their runs; only pairs of one run can be correlated.

    Returns
    -------
    float
        Between 1 and n.

    Notes
    -----
    ``n / (1 + sum over pairs i != j of rho(|t_i - t_j|) / n)``, which is n / (1 + 2 sum rho) for
    consecutive steps. rho comes from the products of pairs at each distance in step number (in
    units of the typical gap), corrected for the estimated mean, through a smooth curve
    ``share * exp(-distance / memory)``: white noise plus something slow. It is taken for 0 where
    white noise would show as much in one of ten to twenty cases; among few values a weak
    correlation cannot be seen, and n_effective is then an upper bound.
    """
    x = _sample(values, "values")
    n = x.size
    deviation = x - x.mean()
    variance = float(np.mean(deviation**2))
    if n < 4 or variance <= (1e-12 * max(1e-300, float(np.abs(x).max()))) ** 2:
        return float(n)
    products, pairs = _pair_products(deviation, _steps(steps, n), _runs(runs, n))
    known = pairs > 0
    lag = np.flatnonzero(known).astype(np.float64)
    if not lag.size:
        return float(n)
    pairs = pairs[known]
    raw = products[known] / pairs / variance
    return n / _inflation(raw, pairs, lag, n)


def _inflation(raw: Array, pairs: Array, lag: Array, n: int) -> float:
    """How many times more the mean varies than with independent values.

    ``raw`` [lag] are mean products over the variance, ``pairs`` [lag] how many each holds.
    """
    inflation = 1.0
    for _ in range(_ROUNDS):
        # deviations are from the sample's own mean, which takes its variance out of all of them
        lost = min(0.5, inflation / n)
        rho = raw * (1.0 - lost) + lost
        curve = _smooth(rho, pairs, lag)
        before, inflation = inflation, float(1.0 + 2.0 * (pairs @ curve) / n)
        if abs(inflation - before) < 1e-3 * before:
            break
    return float(np.clip(inflation, 1.0, n))


def _smooth(rho: Array, pairs: Array, lag: Array) -> Array:
    """Fit share * exp(-lag / memory) to correlations [lag]; zero where chance would do."""
    shape = np.exp(-lag / _MEMORIES[:, None])
    # a correlation of white noise has the variance 1 / pairs
    score, size = shape @ (pairs * rho), shape**2 @ pairs
    gain = np.maximum(score, 0.0) ** 2 / size
    best = int(gain.argmax())
    # one-sided, and as good as an independent test for each factor of four in the lags
    n_tests = max(1.0, 0.5 * float(np.log2(lag.size)))
    if gain[best] < ndtri(1.0 - _LEVEL / n_tests) ** 2:
        return np.zeros(lag.size)
    share = min(1.0, float(score[best] / size[best]))
    return np.asarray(share * shape[best])


def _pair_products(deviation: Array, steps: Index, runs: Index) -> tuple[Array, Array]:
    """Sum the products of pairs of one run [lag], and count them, lags in typical gaps.

    Lag 0 holds what lies nearer than half a gap. Beyond half of the longest run no lag is looked
    at: there the estimated mean has taken what could be seen.
    """
    order = np.lexsort((steps, runs))
    deviation, gaps, ends = deviation[order], np.diff(steps[order]), np.diff(runs[order]) != 0
    inside = gaps[~ends & (gaps > 0)]
    gap = float(np.median(inside)) if inside.size else 1.0
    longest = int(np.bincount(runs).max())
    n_lags = max(2, min(longest // 2, _MOST_LAGS) + 1)
    # one grid for all: runs, and values too far apart to pair up, as far apart as the lags reach
    reached = np.rint(np.cumsum(np.where(ends, 0, gaps)) / gap).astype(np.int64)
    moves = np.minimum(np.diff(np.r_[0, reached]), n_lags)
    moves[ends] = n_lags
    cell = np.r_[0, np.cumsum(moves)]
    total: Array = np.bincount(cell, deviation).astype(np.float64)
    count: Array = np.bincount(cell).astype(np.float64)
    products = _autocorrelate(total, n_lags)
    pairs = np.asarray(np.rint(_autocorrelate(count, n_lags)))
    # within a cell: each pair once, and no value with itself
    products[0] = 0.5 * (products[0] - deviation @ deviation)
    pairs[0] = 0.5 * (pairs[0] - deviation.size)
    return products, pairs


def _autocorrelate(values: Array, n_lags: int) -> Array:
    """Sum the products of values a lag apart [lag]."""
    found = correlate(values, values, method="fft")[values.size - 1 :][:n_lags]
    return np.pad(found, (0, n_lags - found.size))


def _in_order(values: Array, steps: ArrayLike | None, runs: Any) -> Array:
    """Sort by run, then step."""
    n = values.size
    return values[np.lexsort((_steps(steps, n), _runs(runs, n)))]


def _p95_error(values: Array, n_effective: float) -> float | None:
    """Relative standard error of the 95th percentile, by a bootstrap of circular blocks [n].

    Blocks are as long as the correlation makes the sample shorter: 1 where there is none.
    """
    n = values.size
    p95 = float(np.quantile(values, 0.95))
    if p95 == 0.0 or n < 2:
        return None
    length = min(max(1, round(n / n_effective)), max(1, n // 3))
    n_blocks = -(-n // length)
    n_resamples = int(min(N_BOOTSTRAP, max(50, _BOOTSTRAP_CELLS // n)))
    generator = np.random.default_rng(_SEED)
    found = np.empty(n_resamples)
    at_once = max(1, 1_000_000 // n)
    for lo in range(0, n_resamples, at_once):
        rows = min(at_once, n_resamples - lo)
        starts = generator.integers(0, n, (rows, n_blocks, 1))
        index = (starts + np.arange(length)).reshape(rows, -1)[:, :n] % n
        found[lo : lo + rows] = np.quantile(values[index], 0.95, axis=1)
    return float(found.std(ddof=1) / abs(p95))


def _ks_aligned(x: Array, y: Array) -> float | None:
    """KS distance after both were divided by their median."""
    middle_x, middle_y = float(np.median(x)), float(np.median(y))
    if middle_x == 0.0 or middle_y == 0.0:
        return None
    # in single precision equal shapes stay equal, whatever the rounding of the scale
    return ks_statistic(np.float32(x / middle_x), np.float32(y / middle_y))


def _cv_ratio(y: Array, x: Array) -> float | None:
    """Coefficient of variation of y over that of x."""
    cv_y, cv_x = _cv(y), _cv(x)
    return None if cv_x is None or cv_y is None or cv_x == 0.0 else cv_y / cv_x


def _cv(values: Array) -> float | None:
    """Coefficient of variation; None for fewer than two values or mean zero, 0 if constant."""
    mean = float(values.mean())
    if values.size < 2 or mean == 0.0:
        return None
    # the rounding of a mean is no spread
    return 0.0 if np.ptp(values) == 0.0 else float(values.std(ddof=1) / abs(mean))


def _relative(found: float, wanted: float) -> float | None:
    """Return found / wanted - 1, None where nothing can be relative to it."""
    return found / wanted - 1.0 if wanted != 0.0 else None


def _sample(values: ArrayLike, name: str) -> Array:
    """Return the values as a vector, refusing what has no distribution."""
    sample = np.asarray(values, dtype=np.float64).ravel()
    if not sample.size or not np.isfinite(sample).all():
        raise ValueError(f"{name}: expected at least one value, all of them finite")
    return sample


def _steps(steps: ArrayLike | None, n: int) -> Index:
    """Return step numbers [n]."""
    if steps is None:
        return np.arange(n)
    numbers = np.asarray(steps).ravel().astype(np.int64)
    if numbers.size != n:
        raise ValueError(f"steps: {numbers.size} numbers for {n} values")
    return numbers


def _runs(runs: Sequence[Hashable] | NDArray[Any] | None, n: int) -> Index:
    """Return a number per run [n]."""
    if runs is None:
        return np.zeros(n, dtype=np.int64)
    labels = np.asarray(runs).ravel()
    if labels.size != n:
        raise ValueError(f"runs: {labels.size} labels for {n} values")
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)
