"""Whether two samples have one distribution: KS with whole units permuted.

Runs, clusters or blocks of a run change sides, so that what is alike within a unit stays together;
paired units change places with each other.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import permutation_test

from prism.analyses.comparisons.bootstrap import Index, Pairing, Sample
from prism.common.agreement import ks_statistic

Array = NDArray[np.float64]

PERMUTATIONS = 4_999
_MOST_POINTS = 256  # of the pooled sample at which distribution functions are compared
_ENOUGH = 80  # permutations there must be: they come in pairs, so p-values reach 0.025
_BATCH_CELLS = 4_000_000
_ALIKE = 1.1  # lengths of runs, one over the other


class Distance(NamedTuple):
    """The largest distance of two distribution functions, and its p-value where there is one."""

    distance: float
    p_value: float | None
    units: int  # whole units that were permuted, both sides together
    why_not: str | None = None  # there is no p-value


def distance(
    a: Sample, b: Sample, pairing: Pairing, seed: int, permutations: int = PERMUTATIONS
) -> Distance:
    """Compare two distributions as a whole."""
    ks = ks_statistic(a.values, b.values)
    if a.kind != b.kind:
        return Distance(ks, None, 0, "what is independent in A and in B is not alike")
    a, b = _as_long(a, b)
    n_a, n_b = a.n_units, b.n_units
    ways = 2**n_a if pairing else math.comb(n_a + n_b, min(n_a, n_b))
    if ways < _ENOUGH:
        what = "blocks of a run" if a.kind == "steps" else a.kind
        return Distance(ks, None, n_a + n_b, f"too few {what} ({n_a} and {n_b}) to permute")
    points = np.quantile(np.concatenate([a.values, b.values]),
                         (np.arange(_MOST_POINTS) + 0.5) / _MOST_POINTS)  # fmt: skip
    below = np.vstack([_below(x, points) for x in (a, b)])
    size = np.concatenate([np.bincount(x.unit) for x in (a, b)]).astype(np.float64)

    def statistic(x: Index, y: Index, axis: int) -> Array:
        first, second = _side(x, below, size), _side(y, below, size)
        return np.asarray(np.abs(first - second).max(axis=-1))

    found = permutation_test(
        (np.arange(n_a), n_a + np.arange(n_b)), statistic, vectorized=True, axis=-1,
        permutation_type="samples" if pairing else "independent", alternative="greater",
        n_resamples=permutations, batch=max(1, _BATCH_CELLS // (n_a + n_b + _MOST_POINTS)),
        rng=np.random.default_rng([seed, 11]),
    )  # fmt: skip
    return Distance(ks, float(found.pvalue), n_a + n_b)


def _as_long(a: Sample, b: Sample) -> tuple[Sample, Sample]:
    """Cut runs to the steps that those of the other side have, where one side's are longer.

    Only what is alike may change sides: a short run's share of steps below a point varies more.
    """
    usual = [float(np.median(np.bincount(x.unit))) for x in (a, b)]
    if a.kind != "runs" or max(usual) <= _ALIKE * min(usual):
        return a, b
    n = int(min(usual))
    return a.select(a.place_in_unit() < n), b.select(b.place_in_unit() < n)


def _below(sample: Sample, points: Array) -> Array:
    """Count the values of each unit up to each point [unit, point]."""
    cells, n = points.size + 1, sample.n_units
    cell = np.searchsorted(points, sample.values, side="left")  # the first point not below it
    counts = np.bincount(sample.unit * cells + cell, minlength=n * cells)
    return np.asarray(counts.reshape(n, -1)[:, :-1].cumsum(axis=1), np.float64)


def _side(chosen: Index, below: Array, size: Array) -> Array:
    """Distribution function of the chosen units [..., point]."""
    member = np.zeros((*chosen.shape[:-1], size.size))
    np.put_along_axis(member, chosen.astype(np.int64), 1.0, axis=-1)
    return np.asarray((member @ below) / (member @ size)[..., None])
