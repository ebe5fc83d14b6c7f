"""The quantile table's layout: 3072 straight-line cells that one 32-bit number indexes.

Three levels of 1024 cells: width 2**-10 of probability, the top cell again in 1024, its top cell
again in 1024 (width 2**-30): a step waits for the slowest of up to a million draws. The engine
repeats the look-up in compiled code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from prism.common.arrays import Array, Index

N_CELLS = 3072
# first row, used cells, bits of the integer fraction
LEVELS = ((0, 1023, 22), (1024, 1023, 12), (2048, 1024, 2))


@lru_cache(maxsize=1)
def table_edges() -> Array:
    """Probabilities at the 3071 edges of the used cells, from 0 to 1."""
    coarse = np.arange(1023) * 2.0**-10
    fine = 1.0 - 2.0**-10 + np.arange(1023) * 2.0**-20
    finest = 1.0 - 2.0**-20 + np.arange(1025) * 2.0**-30
    return np.concatenate([coarse, fine, finest])


@lru_cache(maxsize=1)
def tail_panels() -> Array:
    """Probabilities that halve towards 0 and towards 1, down to double precision."""
    halves = 0.5 ** np.arange(1.0, 51.0)
    return np.concatenate([halves[::-1], 1.0 - halves[1:]])


@lru_cache
def _gauss(order: int) -> tuple[Array, Array]:
    nodes, weights = np.polynomial.legendre.leggauss(order)  # eigenvalues, each time
    return nodes, weights


def quadrature(panels: Array, order: int) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights [n] on every panel between two neighbours."""
    nodes, weights = _gauss(order)
    half = 0.5 * np.diff(panels)[:, None]
    middle = 0.5 * (panels[1:] + panels[:-1])[:, None]
    return (middle + half * nodes).ravel(), (half * weights).ravel()


@lru_cache(maxsize=1)
def _end_cells() -> tuple[Array, Array]:
    """Nodes [2 n] of the first cell, then of the last, and weights [n] of a mean over a cell."""
    nodes, weights = quadrature(0.5 ** np.arange(20.0, -1.0, -1.0), 4)
    return np.concatenate([nodes * 2.0**-10, 1.0 - nodes * 2.0**-30]), weights / weights.sum()


def table_of_quantiles(
    ppf: Callable[[Array], Array], std: float, low: float = -math.inf
) -> NDArray[np.float32]:
    """Table [3072, 2] of (value, slope) from a quantile function; no value falls below `low`.

    Inner edges take the quantiles themselves; the edges at probability 0 and 1, where a quantile
    may be infinite, are put where the mean of the outermost cell is right. Last, an affine map
    gives the table mean 0 and standard deviation `std` over all 2**32 numbers. Rows 1023 and 2047
    are unused: the next level replaces them.
    """
    edges = table_edges()
    nodes, weights = _end_cells()
    y = ppf(np.concatenate([edges[1:-1], nodes]))
    inner, ends = y[: edges.size - 2], y[edges.size - 2 :].reshape(2, -1)
    first, last = ends @ weights
    values = np.concatenate([[2.0 * first - inner[0]], inner, [2.0 * last - inner[-1]]])
    falling = values[-1] < values[0]  # a negative power: what slows one op speeds another up
    values = (np.minimum if falling else np.maximum).accumulate(values)
    width, left, right = np.diff(edges), values[:-1], values[1:]
    mean = float(width @ (left + right)) / 2.0
    left, right = left - mean, right - mean
    variance = float(width @ (left**2 + left * right + right**2)) / 3.0
    values = values - mean
    stretch = std / math.sqrt(variance)
    least = float(values.min())
    if stretch * least < low:  # two values with a jump inside a cell: rather a smaller spread
        stretch = low / least
    return _cells(values * stretch)


def _cells(values: Array) -> NDArray[np.float32]:
    """Rows (value, slope) from the values at the edges.

    Half a unit of the fraction is folded into the value, so that a cell is read at midpoints.
    """
    table = np.zeros((N_CELLS, 2), dtype=np.float64)
    start = 0
    for first, count, bits in LEVELS:
        edge = values[start : start + count + 1]
        slope = np.diff(edge) / 2.0**bits
        table[first : first + count, 0] = edge[:-1] + 0.5 * slope
        table[first : first + count, 1] = slope
        start += count
    return table.astype(np.float32)


def occasional_table(
    ppf: Callable[[Array], Array], std: float, share: float
) -> NDArray[np.float32]:
    """Table of X - 1, where X is of mean 1 / share and std in that share of draws, else 0.

    The last cells of each level hold it to 2**-30, so that no cell has a jump inside; values do
    not rise over them.
    """
    units = round(share * 2.0**30)
    counts = units >> 20, units >> 10 & 1023, units & 1023  # cells of each level
    mass = np.repeat([2.0**20, 2.0**10, 1.0], counts) / units
    q = np.concatenate([[0.0], np.cumsum(mass)])
    values = ppf(np.clip(q, 1e-6, 1.0 - 1e-6))
    left, right = values[:-1], values[1:]
    mean = float(mass @ (left + right)) / 2.0
    left, right = left - mean, right - mean
    variance = float(mass @ (left**2 + left * right + right**2)) / 3.0
    stretch = std / math.sqrt(variance) if variance > 0.0 else 0.0
    values = 1.0 / share + stretch * (values - mean) - 1.0
    table = np.zeros((N_CELLS, 2))
    table[:, 0] = -1.0
    rows = np.concatenate(
        [
            np.arange(first + used - n, first + used)
            for (first, used, _), n in zip(LEVELS, counts, strict=True)
        ]
    )
    slope = np.diff(values) / 2.0 ** np.repeat([bits for *_, bits in LEVELS], counts)
    table[rows, 0], table[rows, 1] = values[:-1] + 0.5 * slope, slope
    return table.astype(np.float32)


def table_row(u: NDArray[np.uint32]) -> tuple[Index, Index]:
    """Row [n] and integer fraction [n] that each 32-bit number reads."""
    wide = np.asarray(u).astype(np.int64)
    row, fraction = wide >> 22, wide & 0x3FFFFF
    deep = row == 1023  # few are
    row[deep], fraction[deep] = 1024 + ((wide[deep] >> 12) & 0x3FF), wide[deep] & 0xFFF
    deepest = row == 2047
    row[deepest], fraction[deepest] = 2048 + ((wide[deepest] >> 2) & 0x3FF), wide[deepest] & 0x3
    return row, fraction


def sample_table(table: NDArray[np.float32], u: NDArray[np.uint32]) -> Array:
    """Values [n] of 32-bit numbers u [n]: the plain reference of the engine's look-up."""
    row, fraction = table_row(u)
    wide = table.astype(np.float64)
    return np.asarray(wide[row, 0] + wide[row, 1] * fraction)
