"""Intervals of variance components from mean squares, without resampling.

A mean square over correlated columns is taken as a chi-square with effective degrees of freedom
(Satterthwaite); a difference of two gets the modified large-sample interval. Levels are normal
here except where an excess kurtosis is given. Left out: the error of the effective degrees of
freedom themselves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chdtri, fdtri

Array = NDArray[np.float64]


def pooled_df(products: Array, df: float) -> float:
    """Degrees of freedom of the mean of the diagonal of a matrix of mean products.

    Parameters
    ----------
    products : ndarray
        [column, column] mean products, Wishart over `df`.

    Notes
    -----
    The trace of a Wishart matrix of covariance S has ``df (tr S)^2 / tr S^2`` effective degrees
    of freedom; tr S^2 is replaced by its unbiased estimator
    ``n^2 / ((n - 1)(n + 2)) (tr W^2 - (tr W)^2 / n)``.

    References
    ----------
    Satterthwaite, Biometrics Bulletin 2 (1946) 110; Srivastava, J. Japan Statist. Soc. 35 (2005)
    251 (the unbiased estimator).

    Examples
    --------
    >>> pooled_df(np.ones((4, 4)), 10.0)
    10.0
    """
    trace = float(np.trace(products))
    if df <= 1.0 or trace <= 0.0:
        return df
    square = df**2 / ((df - 1.0) * (df + 2.0)) * (float(np.sum(products**2)) - trace**2 / df)
    trace_square = trace**2 - 2.0 * square / df  # (tr S)^2, also unbiased
    if square <= 0.0:
        return float(df * products.shape[0])
    return float(df * min(max(trace_square / square, 1.0), products.shape[0]))


def workers_df(moving: Array, df: Array) -> float:
    """Degrees of freedom of the mean of mean squares that share some of what moves them.

    Parameters
    ----------
    moving : ndarray
        [column, column] mean squares on the diagonal, covariances beside it.
    df : ndarray
        [column] degrees of freedom.

    Examples
    --------
    >>> workers_df(np.diag([2.0, 2.0]), np.array([3.0, 3.0]))
    6.0
    """
    value, n = np.diag(moving), float(df.mean())
    total = float(value.sum())
    if total <= 0.0:
        return n
    off_square = float(np.sum(moving**2) - np.sum(value**2))
    # a total small by chance must not make the covariances look large: two standard errors more
    likely = total * (1.0 + 2.0 * np.sqrt(2.0 / (n * value.size)))
    alike = n * likely**2 / (off_square + likely**2 / value.size)
    if n < 3.0:  # one or two differences cannot tell whether columns are alike
        return float(max(n, alike))
    square = (float(np.sum(value**2)) + off_square) * n / (n + 2.0)  # unbiased, as in pooled_df
    return float(np.clip(n * (total**2 - 2.0 * square / n) / square, n, max(n, alike)))


def heavier_df(df: ArrayLike, kurtosis: ArrayLike, n: ArrayLike) -> Array:
    """Lower degrees of freedom for an excess kurtosis: Var s^2 = S^2 (2 / df + kurtosis / n).

    A negative kurtosis is not used: in small samples it is mostly chance.
    """
    spread = 2.0 / np.asarray(df) + np.maximum(kurtosis, 0.0) / np.asarray(n)
    return np.asarray(2.0 / spread)


def chi_square_interval(value: ArrayLike, df: ArrayLike, level: float) -> tuple[Array, Array]:
    """Interval of a variance estimated as a chi-square over its degrees of freedom.

    Examples
    --------
    >>> low, high = chi_square_interval(1.0, 10.0, 0.9)
    >>> round(float(low), 3), round(float(high), 3)
    (0.546, 2.538)
    """
    value, df = np.asarray(value, dtype=np.float64), np.asarray(df, dtype=np.float64)
    tail = 0.5 * (1.0 - level)
    return value * df / chdtri(df, tail), value * df / chdtri(df, 1.0 - tail)


def difference_interval(
    upper: ArrayLike, upper_df: ArrayLike, lower: ArrayLike, lower_df: ArrayLike, level: float
) -> tuple[Array, Array]:
    """Interval of the difference of two independent mean squares, cut at zero.

    References
    ----------
    Ting, Burdick, Graybill, Jeyaratnam, Lu, J. Statist. Comput. Simul. 35 (1990) 135; Burdick
    and Graybill, Confidence Intervals on Variance Components (1992).

    Examples
    --------
    >>> low, high = difference_interval(5.0, 10.0, 1.0, 1000.0, 0.9)
    >>> round(float(low), 2), round(float(high), 2)
    (1.73, 11.69)
    """
    q1, q2 = np.asarray(upper, dtype=np.float64), np.asarray(lower, dtype=np.float64)
    n1, n2 = np.asarray(upper_df, dtype=np.float64), np.asarray(lower_df, dtype=np.float64)
    tail = 0.5 * (1.0 - level)
    g1, g2 = 1.0 - n1 / chdtri(n1, tail), 1.0 - n2 / chdtri(n2, tail)
    h1, h2 = n1 / chdtri(n1, 1.0 - tail) - 1.0, n2 / chdtri(n2, 1.0 - tail) - 1.0
    f_high, f_low = fdtri(n1, n2, 1.0 - tail), fdtri(n1, n2, tail)
    g12 = ((f_high - 1.0) ** 2 - (g1 * f_high) ** 2 - h2**2) / f_high
    h12 = ((1.0 - f_low) ** 2 - (h1 * f_low) ** 2 - g2**2) / f_low
    below = (g1 * q1) ** 2 + (h2 * q2) ** 2 + g12 * q1 * q2
    above = (h1 * q1) ** 2 + (g2 * q2) ** 2 + h12 * q1 * q2
    low = q1 - q2 - np.sqrt(np.maximum(below, 0.0))
    high = q1 - q2 + np.sqrt(np.maximum(above, 0.0))
    return np.maximum(low, 0.0), np.maximum(high, 0.0)
