"""Distributions from samples: the one way from measured values to a table of quantiles."""

import math

import numpy as np
from numpy.typing import NDArray

from prism.distributions.distribution import Distribution, constant, empirical

Array = NDArray[np.float64]
KNOTS = 257  # of an empirical distribution
FLOOR = 1e-3  # of the mean: no duration is shorter


def sample_law(values: Array) -> Distribution:
    """Empirical distribution of mean 1 through the quantiles of positive values."""
    values = values[np.isfinite(values)]
    if values.size < 2 or values.std() <= 1e-6 * abs(values.mean()):
        return constant()
    q = np.linspace(0.0, 1.0, min(values.size, KNOTS))
    if values.size > 4 * KNOTS:  # a finer tail where there are values to fill it
        tail = 0.5 ** np.arange(9, 9 + int(math.log2(values.size / KNOTS)))
        q = np.unique(np.concatenate([q, 1.0 - tail]))
    x = np.maximum(np.quantile(values, q), FLOOR * float(values.mean()))
    law = empirical(q.tolist(), x.tolist())
    scaled = law.scaled_to(float(values.std() / values.mean()))
    return scaled if float(scaled.ppf(np.array([0.0]))[0]) > 0.0 else law
