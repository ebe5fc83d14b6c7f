"""Whether two samples have one distribution: KS with whole units permuted.

Runs, clusters or stretches of a run change sides, so that what is alike within a unit stays
together; paired units change places with each other. Left out: figures and their errors.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import permutation_test

from prism.analyses.comparisons.errors import Index, Pairing, Sample
from prism.analyses.comparisons.longrun import FEWEST
from prism.common.agreement import ks_statistic

Array = NDArray[np.float64]

PERMUTATIONS = 4_999
MOST_POINTS = 256  # of the pooled sample at which distribution functions are compared
ENOUGH = 80  # permutations there must be: they come in pairs, so p-values reach 0.025
_BATCH_CELLS = 2_000_000
_ALIKE = 1.1  # lengths of runs, one over the other


class Distance(NamedTuple):
    """The largest distance of two distribution functions, and its p-value where there is one."""

    ks: float
    p_value: float | None
    units: int  # whole units that were permuted, both sides together
    why_not: str = ""  # there is no p-value


def distance(
    a: Sample, b: Sample, pairing: Pairing, cosines: tuple[int, int], seed: int,
    permutations: int = PERMUTATIONS,
) -> Distance:  # fmt: skip
    """Compare two distributions as a whole."""
    ks = ks_statistic(a.values, b.values)
    if a.kind != b.kind and {a.kind, b.kind} != {"runs", "steps"}:
        return Distance(ks, None, 0, "a simulation and a measurement have no units in common")
    borrowed = a.kind != b.kind
    a, b = _as_long(a, b)
    length = 0 if borrowed or a.kind != "steps" else _stretch_length(a, b, cosines)
    unit_a, unit_b = _units(a, length), _units(b, length)
    n_a, n_b = int(unit_a.max()) + 1, int(unit_b.max()) + 1
    paired = pairing is not None and n_a == n_b
    ways = 2.0**n_a if paired else float(math.comb(n_a + n_b, min(n_a, n_b)))
    if ways < ENOUGH:
        what: str = "runs" if borrowed else a.kind
        what = "stretches longer than the memory" if what == "steps" else what
        return Distance(ks, None, n_a + n_b, f"too few {what} ({n_a} and {n_b}) to permute")
    points = np.quantile(np.concatenate([a.values, b.values]),
                         (np.arange(MOST_POINTS) + 0.5) / MOST_POINTS)  # fmt: skip
    below = np.vstack([_below(a.values, unit_a, points), _below(b.values, unit_b, points)])
    size = np.concatenate([np.bincount(unit_a), np.bincount(unit_b)]).astype(np.float64)
    rng = np.random.default_rng([seed, 11])

    def statistic(x: Index, y: Index, axis: int) -> Array:
        first, second = _side(x, below, size), _side(y, below, size)
        return np.asarray(np.abs(first - second).max(axis=-1))

    found = permutation_test(
        (np.arange(n_a), n_a + np.arange(n_b)), statistic, vectorized=True, axis=-1,
        permutation_type="samples" if paired else "independent", alternative="greater",
        n_resamples=permutations, batch=max(1, _BATCH_CELLS // MOST_POINTS), rng=rng,
    )  # fmt: skip
    return Distance(ks, float(found.pvalue), n_a + n_b)


def _as_long(a: Sample, b: Sample) -> tuple[Sample, Sample]:
    """Cut runs to the steps that those of the other side have, where one side's are longer.

    Only what is alike may change sides: a short run's share of steps below a point varies more.
    """
    if a.kind != "runs" or b.kind != "runs":
        return a, b
    usual = [float(np.median(np.bincount(x.unit))) for x in (a, b)]
    if max(usual) <= _ALIKE * min(usual):
        return a, b
    n = int(min(usual))
    return a.select(a.place_in_unit() < n), b.select(b.place_in_unit() < n)


def _stretch_length(a: Sample, b: Sample, cosines: tuple[int, int]) -> int:
    """Choose the steps of a stretch of either single run: long beside the memory of both."""
    counts = [max(FEWEST, n // 2) for n in cosines]
    return max(-(-x.values.size // n) for x, n in zip((a, b), counts, strict=True))


def _units(sample: Sample, length: int) -> Index:
    """Find the unit of each value: its own, or its stretch of a single run."""
    if not length:
        return sample.unit
    n = sample.values.size
    return np.arange(n) * max(1, n // length) // n


def _below(values: Array, unit: Index, points: Array) -> Array:
    """Count the values of each unit up to each point [unit, point]."""
    n_units = int(unit.max()) + 1
    cell = np.searchsorted(points, values, side="left")  # the first point not below the value
    counts = np.bincount(unit * (points.size + 1) + cell, minlength=n_units * (points.size + 1))
    return np.asarray(counts.reshape(n_units, -1)[:, :-1].cumsum(axis=1), np.float64)


def _side(chosen: Index, below: Array, size: Array) -> Array:
    """Distribution function of the chosen units [..., point]."""
    index = np.asarray(chosen, np.int64)
    member = np.zeros((*index.shape[:-1], size.size))
    np.put_along_axis(member, index, 1.0, axis=-1)
    return np.asarray((member @ below) / (member @ size)[..., None])
