"""Mean, percentiles and spread of a sample, and what each value adds to their errors.

A figure's influence values have mean zero, and the figure's error is that of their mean: the same
methods for dependent values serve all figures. Percentiles take the density of the sample around
them, over an interval at least as wide as their own error.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

Array = NDArray[np.float64]
Index = NDArray[np.int64]

FIGURES = ("mean", "p50", "p95", "p99", "std", "cv")
PERCENTILES = np.array([0.5, 0.95, 0.99])
_WIDE = 1.96  # standard errors of a share to either side


def figures_of(values: Array) -> Array:
    """Mean, p50, p95, p99 and standard deviation [s] and the coefficient of variation [1]."""
    mean, std = float(values.mean()), float(values.std())
    return np.array([mean, *np.quantile(values, PERCENTILES), std, std / mean])


def shares_below(values: Array, levels: Array) -> Array:
    """Whether each value is at most each quantile, less the share that is [n, level]."""
    below = (values[:, None] <= np.quantile(values, levels)).astype(np.float64)
    return np.asarray(below - below.mean(axis=0))


def influences(values: Array, error: Array) -> Array:
    """Influence of each value on the logarithm of each figure [n, figure].

    `error` [level]: of the shares below the percentiles; NaN where the sample does not reach far
    enough beyond a percentile to tell its error. Of the mean (x - m)/m; of the standard deviation
    ((x - m)^2/s^2 - 1)/2, which `leave_one_out` corrects where units are few; of the coefficient of
    variation their difference; of a percentile see `quantile_influences`.
    """
    mean, std = float(values.mean()), float(values.std())
    z = (values - mean) / std if std > 0.0 else np.zeros(values.size)
    of_mean, of_std = (values - mean) / mean, 0.5 * (z**2 - 1.0) * (std > 0.0)
    of_quantiles = quantile_influences(values, PERCENTILES, error)
    of_quantiles /= np.quantile(values, PERCENTILES)
    return np.column_stack([of_mean, of_quantiles, of_std, of_std - of_mean])


def quantile_influences(values: Array, levels: Array, error: Array) -> Array:
    """Influence of each value on quantiles [n, level; s].

    (p - 1{x <= q}) / f(q), with 1/f the slope of the quantile function from p - h to p + h. h is
    Hall and Sheather's bandwidth, or what 95 % of samples find as the share below q, if that is
    wider (Woodruff's interval): runs that differ as a whole leave gaps in a sample, in which a
    narrow h would find no error at all. Where p + h or p - h lies beyond the sample, the error is
    not known.

    References
    ----------
    Hall and Sheather (1988), doi:10.1111/j.2517-6161.1988.tb01735.x; Woodruff (1952),
    doi:10.1080/01621459.1952.10483443.
    """
    return np.asarray(-shares_below(values, levels) * slopes(values, levels, error))


def slopes(values: Array, levels: Array, error: Array, n: float | None = None) -> Array:
    """Slope of the quantile function over what the shares are known to [level; s].

    NaN where that reaches beyond the sample; n: values that the bandwidth is for.
    """
    n = float(values.size) if n is None else n
    z = norm.ppf(levels)
    narrow = n ** (-1.0 / 3.0) * _WIDE ** (2.0 / 3.0)
    narrow = narrow * (1.5 * norm.pdf(z) ** 2 / (2.0 * z**2 + 1.0)) ** (1.0 / 3.0)
    room = np.minimum(levels, 1.0 - levels)
    known = _WIDE * error <= room
    half = np.maximum(np.minimum(np.maximum(narrow, _WIDE * error), room - 0.5 / n), 0.5 / n)
    low, high = np.clip(levels - half, 0.0, 1.0), np.clip(levels + half, 0.0, 1.0)
    slope = (np.quantile(values, high) - np.quantile(values, low)) / (high - low)
    return np.asarray(np.where(known, slope, np.nan))


def leave_one_out(values: Array, unit: Index, of: Array) -> Array:
    """Make influences [n, figure] on the spread add up, by unit, to what leaving it out changes.

    Where few units make the spread, influences (z^2 - 1)/2 rest on a spread that the same units
    make, and their variance is far too small: with six normal units 14 % of 5 % tests find a
    difference where there is none. The jackknife finds 4.5 %.

    References
    ----------
    Efron and Stein (1981), doi:10.1214/aos/1176345462.
    """
    n, count = values.size, np.bincount(unit)
    n_units = count.size
    if n_units < 3:
        return of  # one unit alone has no spread to leave
    centred = values - values.mean()
    rest = n - count
    shift = -np.bincount(unit, centred) / rest  # of the mean of the others
    square = (centred @ centred - np.bincount(unit, centred**2)) / rest - shift**2
    if not (square > 0.0).all():
        return of
    of_std = 0.5 * np.log(square)
    out = of.copy()
    for name, left in (("std", of_std), ("cv", of_std - np.log(values.mean() + shift))):
        k = FIGURES.index(name)
        changed = (1.0 - count / n) * (left.mean() - left)
        now = np.bincount(unit, of[:, k]) / n
        out[:, k] += ((changed - now) * n / count)[unit]
    return out
