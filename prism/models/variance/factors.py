"""One common factor behind the columns of a table.

A covariance matrix over columns is split into one shared draw (a loading per column) and a part
of each column's own, by least squares on the correlations off the diagonal. Left out: a second
factor, and errors that are correlated between columns; `explained_share` says when they matter.
"""

from __future__ import annotations

import numpy as np

from prism.common.arrays import Array

MOST_SHARED = 0.9999
"""Largest communality: a column wholly explained would get all the weight (Heywood case)."""
UNEQUAL = 0.5
"""Spread of loadings around their mean, expected before seeing any: those measured on three
production jobs differ by up to 1.5 between columns of an op_kind."""


def split_factor(covariance: Array, df: float, signs: Array) -> tuple[Array, Array]:
    """Split covariance matrices into one shared factor and own variances.

    `covariance` [..., column, column]. `df`: its degrees of freedom. `signs` [column] of the
    loadings.

    Returns `loadings` [..., column] signed standard deviation of the shared part. `own` [...,
    column] variance of the column's own part.

    Minimises the squared error of the off-diagonal correlations (minres), by iterated
    communalities: ``l_a = sum_k r_ak l_k / sum_k l_k^2`` over k != a; loadings are drawn to their
    mean as a normal prior of relative spread `UNEQUAL` does, which decides where the data are few
    or the columns two.

    References
    ----------
    Harman and Jones, Psychometrika 31 (1966) 351 (minres).
    """
    variance = np.maximum(np.diagonal(covariance, axis1=-2, axis2=-1), 0.0)
    sd = np.sqrt(variance)
    n = sd.shape[-1]
    scale = sd[..., :, None] * sd[..., None, :]
    off = np.divide(covariance, scale, out=np.zeros_like(covariance), where=scale > 0.0)
    off = off * np.outer(signs, signs) * (1.0 - np.eye(n))
    mean = off.sum(axis=(-1, -2)) / max(n * (n - 1), 1)
    mean = np.sqrt(np.clip(mean, 0.0, MOST_SHARED))[..., None]
    weight, limit = df * (UNEQUAL * mean) ** 2, np.sqrt(MOST_SHARED)
    shared = np.broadcast_to(mean, sd.shape)
    for _ in range(500):
        norm = np.sum(shared**2, axis=-1, keepdims=True) - shared**2
        fitted = np.matmul(off, shared[..., None])[..., 0]
        update = np.clip((weight * fitted + mean) / (weight * norm + 1.0), -limit, limit)
        change = float(np.max(np.abs(update - shared)))
        shared = 0.5 * (shared + update)
        if change < 1e-7:
            break
    return signs * shared * sd, variance * (1.0 - shared**2)


def explained_share(covariance: Array) -> float:
    """Share of the first eigenvector in a covariance scaled to correlations (nan: no variance)."""
    variance = np.diag(covariance)
    keep = variance > 0.0
    if not keep.any():
        return float("nan")
    sd = np.sqrt(variance[keep])
    values = np.linalg.eigvalsh(covariance[np.ix_(keep, keep)] / np.outer(sd, sd))
    return float(values[-1] / np.sum(values[values > 0.0]))


def leading_signs(covariance: Array) -> Array:
    """Signs [column] of the first eigenvector, mostly positive."""
    variance = np.maximum(np.diag(covariance), 0.0)
    sd = np.sqrt(np.where(variance > 0.0, variance, 1.0))
    scaled = covariance / np.outer(sd, sd) * np.outer(variance > 0.0, variance > 0.0)
    vector = np.linalg.eigh(scaled)[1][:, -1]
    vector = vector * (1.0 if vector.sum() >= 0.0 else -1.0)
    return np.where(vector < 0.0, -1.0, 1.0)
