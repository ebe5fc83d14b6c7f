"""Empirical distribution functions and their Monte Carlo error.

Replicates that share a cluster are not independent, so the error is taken between clusters.
Left out: the error of the data behind the distributions, which no number of replicates tells.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Cdf(NamedTuple):
    """An empirical distribution function on a grid."""

    x: NDArray[np.float64]
    """[point] values, ascending, in the unit of the sample."""
    p: NDArray[np.float64]
    """[point] share of the sample at or below x."""
    se: NDArray[np.float64]
    """[point] standard error of p."""


def empirical_cdf(
    sample: ArrayLike, cluster_idx: ArrayLike | None = None, n_points: int = 400
) -> Cdf:
    """Empirical distribution function with a pointwise standard error.

    Parameters
    ----------
    sample : array_like
        [replicate] values; not-a-number is refused.
    cluster_idx : array_like, optional
        [replicate] cluster of each value; None where all are independent.
    n_points : int
        Points of the grid; all of the sample where it is smaller.

    Returns
    -------
    Cdf
        Between the smallest and the largest value, at equally spaced ranks.

    Notes
    -----
    With K clusters of n_k values, c_k of which are at or below x, p = sum c_k / sum n_k and its
    variance is that of a ratio estimator, ``K/(K-1) sum (c_k - p n_k)^2 / (sum n_k)^2``. With
    one value per cluster this is p (1 - p) / (n - 1).

    References
    ----------
    Cochran, Sampling Techniques, 3rd ed. (1977), section 3.12.
    """
    values = np.asarray(sample, dtype=np.float64).ravel()
    n = values.size
    if n == 0 or not np.isfinite(values).all():
        raise ValueError("empirical_cdf needs at least one value, all of them finite")
    order = np.argsort(values, kind="stable")
    values = values[order]
    rank = np.unique(np.linspace(0, n - 1, min(n, n_points)).round().astype(np.int64))
    x = values[rank]
    count = np.searchsorted(values, x, side="right")
    p = count / n
    if cluster_idx is None:
        return Cdf(x, p, np.sqrt(p * (1.0 - p) / max(n - 1, 1)))
    _, cluster = np.unique(np.asarray(cluster_idx).ravel(), return_inverse=True)
    return Cdf(x, p, _cluster_se(count, p, cluster[order]))


def _cluster_se(
    count: NDArray[np.int64], p: NDArray[np.float64], cluster: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Take the standard error of p [point] from the clusters of the sorted values [replicate]."""
    n_per_cluster = np.bincount(cluster)
    n_clusters = n_per_cluster.size
    if n_clusters < 2:
        return np.full(p.size, np.nan)
    below = np.zeros(n_clusters)
    se = np.empty(p.size)
    done = 0
    for point, upto in enumerate(count):
        below += np.bincount(cluster[done:upto], minlength=n_clusters)
        done = upto
        spread = np.sum((below - p[point] * n_per_cluster) ** 2)
        se[point] = np.sqrt(n_clusters / (n_clusters - 1) * spread) / cluster.size
    return se
