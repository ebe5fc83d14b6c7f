"""Mean, percentiles and spread of a sample, and what each value adds to their errors.

A figure's influence values have mean zero, and the figure's error is that of their mean: the same
methods for dependent values serve all figures. Percentiles take the density of the sample around
them, over an interval at least as wide as their own error. Left out: errors of means
(`prism.comparisons.longrun`, `prism.comparisons.errors`).
"""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

Array = NDArray[np.float64]

FIGURES = ("mean", "p50", "p95", "p99", "std", "cv")
PERCENTILES = np.array([0.5, 0.95, 0.99])
_WIDE = 1.96  # standard errors of a share to either side


def figures_of(values: Array) -> Array:
    """Mean, p50, p95, p99 and standard deviation [s] and the coefficient of variation [1]."""
    mean, std = float(values.mean()), float(values.std())
    return np.array([mean, *np.quantile(values, [0.5, 0.95, 0.99]), std, std / mean])


def shares_below(values: Array, levels: Array) -> Array:
    """Whether each value is at most each quantile, less the share that is [n, level]."""
    below = (values[:, None] <= np.quantile(values, levels)).astype(np.float64)
    return np.asarray(below - below.mean(axis=0))


def influences(values: Array, error: Array) -> Array:
    """Relative influence of each value on each figure.

    Parameters
    ----------
    values : float64 [n]
        Positive, seconds.
    error : float64 [level]
        Standard errors of the shares below the percentiles.

    Returns
    -------
    float64 [n, figure]
        Of the logarithm of the figure; not-a-number where the sample does not reach far enough
        beyond a percentile to tell its error.

    Notes
    -----
    Of the mean (x - m)/m; of the standard deviation ((x - m)^2/s^2 - 1)/2; of the coefficient of
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

    Parameters
    ----------
    values : float64 [n]
    levels, error : float64 [level]
        Probabilities, and standard errors of the shares below.

    Notes
    -----
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
    n = values.size
    z = norm.ppf(levels)
    narrow = n ** (-1.0 / 3.0) * _WIDE ** (2.0 / 3.0)
    narrow = narrow * (1.5 * norm.pdf(z) ** 2 / (2.0 * z**2 + 1.0)) ** (1.0 / 3.0)
    room = np.minimum(levels, 1.0 - levels)
    known = _WIDE * error <= room
    half = np.maximum(np.minimum(np.maximum(narrow, _WIDE * error), room - 0.5 / n), 0.5 / n)
    low, high = np.clip(levels - half, 0.0, 1.0), np.clip(levels + half, 0.0, 1.0)
    slope = (np.quantile(values, high) - np.quantile(values, low)) / (high - low)
    return np.asarray(np.where(known, -shares_below(values, levels) * slope, np.nan))
