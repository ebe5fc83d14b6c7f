"""Distributions from samples: the one way from measured values to a table of quantiles."""

import math

import numpy as np

from prism.common.arrays import Array
from prism.distributions.distribution import Distribution, constant, empirical

KNOTS = 257  # of an empirical distribution
FLOOR = 1e-3  # of the mean: no duration is shorter


def sorted_quantiles(values: Array, q: Array) -> Array:
    """Quantiles of sorted values, those of `numpy.quantile`, which sorts around each of them."""
    at = q * (values.size - 1)
    low = at.astype(np.int64)
    part, below, above = at - low, values[low], values[np.minimum(low + 1, values.size - 1)]
    step = above - below
    return np.where(part < 0.5, below + part * step, above - (1.0 - part) * step)


def sample_distribution(values: Array, cv: float | None = None) -> Distribution:
    """Empirical distribution of mean 1 through the quantiles of positive values.

    Its coefficient of variation is the sample's, or `cv` as far as no value becomes negative.
    """
    values = values[np.isfinite(values)]
    if values.size < 2 or values.std() <= 1e-6 * abs(values.mean()):
        return constant()
    cv = float(values.std() / values.mean()) if cv is None else cv
    q = np.linspace(0.0, 1.0, min(values.size, KNOTS))
    if values.size > 4 * KNOTS:  # a finer tail where there are values to fill it
        tail = 0.5 ** np.arange(9, 9 + int(math.log2(values.size / KNOTS)))
        q = np.unique(np.concatenate([q, 1.0 - tail]))
    x = np.maximum(sorted_quantiles(np.sort(values), q), FLOOR * float(values.mean()))
    distribution = empirical(q.tolist(), x.tolist())
    scaled = distribution.scaled_to(cv)
    return scaled if float(scaled.ppf(np.array([0.0]))[0]) > 0.0 else distribution
