"""Means and medians of arrays with missing values; intervals of counts."""

import warnings

import numpy as np

from prism.common.arrays import Array


def finite_mean(
    values: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Array:
    """Mean of what is finite; NaN, without a warning, where nothing is."""
    seen = np.isfinite(values)
    count = seen.sum(axis=axis, keepdims=keepdims)
    total = np.where(seen, values, 0.0).sum(axis=axis, keepdims=keepdims)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))


def median(
    values: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Array:
    """Median of what is not missing; NaN where all of it is."""
    if values.size and np.isfinite(values).all():  # far faster
        return np.asarray(np.median(values, axis=axis, keepdims=keepdims))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all missing
        return np.asarray(np.nanmedian(values, axis=axis, keepdims=keepdims))


def poisson_interval(n: float) -> tuple[float, float]:
    """90 % interval of a Poisson mean after n events (Garwood)."""
    from scipy.stats import chi2

    low = float(chi2.ppf(0.05, 2 * n)) / 2.0 if n else 0.0
    return low, float(chi2.ppf(0.95, 2 * n + 2)) / 2.0
