"""Intervals of variance components: pivotal draws of mean products, and their quantiles.

A mean square q of n degrees of freedom is q = sigma^2 chi2_n / n, so q n / chi2_n are draws of
sigma^2; those of several strata, subtracted as the estimates are, give the draws of a component.
Their quantiles keep their coverage at few levels, where those of the percentile bootstrap do not.

References
----------
Weerahandi, J. Am. Stat. Assoc. 88 (1993) 899 (generalised intervals); Bartlett, Proc. R. Soc.
Edinburgh 53 (1933) 260 (triangular roots of Wishart matrices).
"""

from __future__ import annotations

import math

import numpy as np

from prism.common.arrays import Array

N_DRAWS = 1000


def wishart_roots(df: float, size: int, rng: np.random.Generator, n: int = N_DRAWS) -> Array:
    """Draw triangular A [draw, size, min(size, df)] whose A A' is Wishart of unit scale."""
    width = min(size, math.ceil(df))
    root = np.tril(rng.standard_normal((n, size, width)), -1)
    column = np.arange(width)
    root[:, column, column] = np.sqrt(rng.chisquare(df - column, (n, width)))
    return root


def square_root(products: Array) -> Array:
    """Symmetric root of a matrix, negative eigenvalues cut at zero."""
    values, vectors = np.linalg.eigh(products)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T)


def pivotal_products(
    products: Array, df: float, rng: np.random.Generator, n: int = N_DRAWS
) -> Array:
    """Draw the expectation [draw, column, column] of mean products.

    Inverse Wishart; the columns' number is added to its degrees of freedom, so that every
    variance has `df` of them however many columns stand beside it.
    """
    size = len(products)
    inverse = np.linalg.inv(wishart_roots(df + size - 1.0, size, rng, n))
    half = inverse @ square_root(products)
    return np.asarray(df * np.matmul(half.transpose(0, 2, 1), half))


def pivotal_means(
    products: Array, df: float, means: Array, rng: np.random.Generator, n: int = N_DRAWS
) -> Array:
    """Draw the expectation [draw, group] of means over the diagonal of mean products.

    `means` [group, column] weights.
    """
    root = square_root(products)
    drawn = np.square(root @ wishart_roots(df, len(products), rng, n)).sum(axis=2) @ means.T
    expected = means @ np.square(root).sum(axis=1)
    scale = np.divide(df * expected, drawn, out=np.zeros_like(drawn), where=drawn > 0.0)
    return np.asarray(scale * (means @ np.diag(products)))


def heavier(kurtosis: Array, n_seen: float, rng: np.random.Generator, n: int = N_DRAWS) -> Array:
    """Factors [draw, ...] by which data of an excess kurtosis [...] spread a variance further.

    Var s^2 = sigma^4 (2 / df + kurtosis / n); a negative kurtosis is not used: in small samples it
    is mostly chance.
    """
    df = 2.0 * n_seen / np.maximum(kurtosis, 1e-6)
    return np.asarray(df / rng.chisquare(df, (n, *kurtosis.shape)))


def interval(draws: Array) -> Array:
    """Quantiles [2, ...] of draws [draw, ...] of a variance that hold 90 %, cut at zero."""
    return np.quantile(np.maximum(draws, 0.0), [0.05, 0.95], axis=0)
