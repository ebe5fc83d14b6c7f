"""One common factor behind the columns of a table: loadings, scores, memory over steps.

A covariance matrix over columns is split into one shared draw (a loading per column) and a part
of each column's own, by least squares on the correlations off the diagonal. Left out: a second
factor, and errors that are correlated between columns; `explained` says when they matter.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MOST_SHARED = 0.9999
"""Largest communality: a column wholly explained would get all the weight (Heywood case)."""
WEAK_Z = 4.0
"""Mean correlation, in standard errors from none, below which loadings are not identifiable."""
LIKELY = 1.0
"""Twice the log likelihood that one standard error costs."""
UNEQUAL = 0.5
"""Relative error of a communality where equal ones had to be assumed: loadings measured on three
production jobs differ by up to 1.5 between columns of an op_kind."""
NOT_WHITE = 3.84
"""5 % point of chi-square with 1 degree of freedom. The length means nothing without the share,
so no chi-square is exact; white scores pass in 1 to 6 % of simulated tables (six layouts)."""


class Split(NamedTuple):
    """One factor and what is left, in the unit of the covariance matrix's square root."""

    loadings: Array
    """[column] signed standard deviation of the shared part."""
    own: Array
    """[column] variance of the column's own part."""
    shared_error: Array
    """[column, column] sampling covariance of the squared loadings."""
    own_error: Array
    """[column, column] sampling covariance of the own variances."""
    weak: bool
    """Whether equal correlations were assumed, the data being too weak for loadings."""


def split_factor(covariance: Array, df: float) -> Split:
    """Split a covariance matrix into one shared factor and own variances.

    Parameters
    ----------
    covariance : ndarray
        [column, column] estimated covariance.

    Notes
    -----
    Minimises the squared error of the off-diagonal correlations (minres), by iterated
    communalities: ``l_a = sum_k r_ak l_k / sum_k l_k^2`` over k != a. Two columns: both get the
    same communality. One column: nothing can be shared.

    References
    ----------
    Harman and Jones, Psychometrika 31 (1966) 351 (minres).
    """
    n = covariance.shape[0]
    sd = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    scale = np.outer(sd, sd)
    if n < 2 or not np.count_nonzero(sd) > 1:
        variance = np.diag(sd**4) * 2.0 / max(df, 1.0)
        return Split(np.zeros(n), sd**2, np.zeros((n, n)), variance, n > 1)
    correlation = np.divide(covariance, scale, out=np.zeros((n, n)), where=scale > 0.0)
    np.fill_diagonal(correlation, 1.0)
    off = correlation - np.eye(n)
    mean_r = float(off.sum()) / (n * (n - 1))
    weak = mean_r * np.sqrt(0.5 * n * (n - 1) * max(df, 1.0)) < WEAK_Z
    if weak or n == 2:
        shared = np.full(n, np.sqrt(min(max(mean_r, 0.0), MOST_SHARED)))
        slope = (off != 0.0) / (n * (n - 1.0)) - np.diag(off.sum(axis=1)) / (n * (n - 1.0))
        gradient = np.broadcast_to(slope, (n, n, n)) * 1.0
    else:
        shared = _minres(off)
        gradient = _gradient(off, shared)
    diagonal = np.zeros((n, n, n))
    diagonal[np.arange(n), np.arange(n), np.arange(n)] = 1.0
    gradient = gradient + diagonal * (shared**2)[:, None, None]
    error = _wishart_error(gradient, correlation, df) * scale**2
    own_error = _wishart_error(diagonal - gradient, correlation, df) * scale**2
    if weak:
        unequal = np.outer(sd * shared, sd * shared) ** 2 * UNEQUAL**2
        error, own_error = error + unequal, own_error + unequal
    own = sd**2 * (1.0 - shared**2)
    return Split(shared * sd, own, error, own_error, bool(weak))


def _minres(off: Array) -> Array:
    """Iterate loadings [column] of a correlation matrix with zero diagonal."""
    values, vectors = np.linalg.eigh(off + np.eye(off.shape[0]))
    shared = vectors[:, -1] * np.sqrt(max(values[-1], 0.0))
    shared = shared * (1.0 if shared.sum() >= 0.0 else -1.0)
    limit = np.sqrt(MOST_SHARED)
    for _ in range(500):
        norm = shared @ shared - shared**2
        update = np.clip((off @ shared) / np.maximum(norm, 1e-12), -limit, limit)
        change = float(np.max(np.abs(update - shared)))
        shared = 0.5 * (shared + update)
        if change < 1e-8:
            break
    return np.asarray(shared)


def _gradient(off: Array, shared: Array) -> Array:
    """Differentiate the communalities: [column, row, column] of d(l_j^2) / dT.

    T is the covariance in units of the standard deviations found, so the correlations change by
    ``dT_ak - r_ak (dT_aa + dT_kk) / 2``; loadings follow from the condition of the least squares.
    """
    n = shared.size
    jacobian = off - 2.0 * np.outer(shared, shared)
    np.fill_diagonal(jacobian, -(shared @ shared - shared**2))
    force = np.zeros((n, n, n))  # d(condition a) / dT, symmetric
    index = np.arange(n)
    force[index, index, :] += 0.5 * shared
    force[index, :, index] += 0.5 * shared
    force[index, index, index] = 0.0
    force[:, index, index] -= 0.5 * off * shared
    force[index, index, index] -= 0.5 * off @ shared
    moved = np.tensordot(-np.linalg.pinv(jacobian), force, axes=1)
    return np.asarray(2.0 * shared[:, None, None] * moved)


def _wishart_error(gradient: Array, correlation: Array, df: float) -> Array:
    """Take the sampling covariance 2/n tr(G_i R G_j R) of functions with these gradients."""
    product = gradient @ correlation
    n = product.shape[0]
    flat, turned = product.reshape(n, -1), product.transpose(0, 2, 1).reshape(n, -1)
    return np.asarray(flat @ turned.T * (2.0 / max(df, 1.0)))


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


class Memory(NamedTuple):
    """How step scores remember each other: ``share exp(-|distance| / steps)``, the rest white."""

    steps: float
    share: float
    expected: float
    """What the sample variance of the scores estimates, relative to their own variance."""
    df: float
    """Effective degrees of freedom of that sample variance."""


def step_memory(scores: Array, steps: NDArray[np.int64]) -> Memory | None:
    """Correlation length of scores at gapped step numbers, by restricted likelihood.

    Parameters
    ----------
    scores : ndarray
        [step] scores.
    steps : ndarray
        [step] step numbers, different from each other.
    """
    if scores.size < 8 or not np.ptp(scores) > 0.0:
        return None
    lengths, shares, eigenvalues, vectors = _decompose(tuple(int(step) for step in steps))
    turned = np.einsum("lij,i->lj", vectors, scores)  # [length, eigenvalue]
    ones = vectors.sum(axis=1)
    spectrum = shares[:, None, None] * eigenvalues + (1.0 - shares[:, None, None])
    weight = 1.0 / spectrum  # [share, length, eigenvalue]
    told = np.sum(weight * ones**2, axis=2)  # information on the mean
    mean = np.sum(weight * turned * ones, axis=2) / told
    square = np.sum(weight * (turned - mean[..., None] * ones) ** 2, axis=2)
    n = scores.size
    fit = -(n - 1) * np.log(square) - np.sum(np.log(spectrum), axis=2) - np.log(told)
    white = -(n - 1) * np.log(float(np.sum((scores - scores.mean()) ** 2))) - np.log(n)
    best = np.unravel_index(int(np.argmax(fit)), fit.shape)
    if fit[best] - white < NOT_WHITE:
        return None
    share, length = float(shares[best[0]]), float(lengths[best[1]])
    trace, _ = _centred_traces(share, length, steps)
    # a longer memory that is nearly as likely leaves fewer degrees of freedom
    column = int(np.flatnonzero(fit.max(axis=0) >= fit[best] - LIKELY)[-1])
    longer = float(shares[int(np.argmax(fit[:, column]))])
    long_trace, long_square = _centred_traces(longer, float(lengths[column]), steps)
    return Memory(length, share, trace / (n - 1), long_trace**2 / long_square)


def _centred_traces(share: float, length: float, steps: NDArray[np.int64]) -> tuple[float, float]:
    """Trace of the centred correlation matrix of scores, and of its square."""
    distance = np.abs(steps[:, None] - steps[None, :])
    correlation = share * np.exp(-distance / length) + (1.0 - share) * np.eye(steps.size)
    centred = correlation - correlation.mean(axis=0)
    return float(np.trace(centred)), float(np.sum(centred * centred.T))


@lru_cache(maxsize=16)
def _decompose(steps: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
    """Eigenvalues and vectors of the correlations on a grid of lengths; shares of it."""
    number = np.array(steps, dtype=np.float64)
    distance = np.abs(number[:, None] - number[None, :])
    span = float(distance.max())
    gap = float(np.min(np.diff(np.sort(number))))
    lengths = np.geomspace(0.5 * gap, max(span / 3.0, gap), 24)
    values, vectors = np.linalg.eigh(np.exp(-distance / lengths[:, None, None]))
    return lengths, np.linspace(0.1, 1.0, 10), np.maximum(values, 1e-9), vectors
