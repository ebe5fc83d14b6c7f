"""What figures and distributions of samples vary by: what is independent in them drawn anew.

Clusters, runs or blocks of one run are drawn with replacement for errors of figures; for KS whole
ones change sides, so that what is alike within one stays together.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.signal import correlate
from scipy.stats import permutation_test

from prism.common.arrays import Array, Flags, Index
from prism.common.attribution import draw_counts

Kind = Literal["clusters", "runs", "steps"]
Pairing = Literal["cluster", "step"] | None

FIGURES = ("mean", "p50", "p95", "p99", "std", "cv")
SHIFT_LEVELS = np.linspace(0.02, 0.98, 33)
LEVELS = np.r_[0.5, 0.95, 0.99, SHIFT_LEVELS]
FAR = 1.96  # standard errors of a share to either side: Woodruff's 95 % interval of a quantile
RESAMPLES = 1_000  # a standard error is known to 1/sqrt(2 RESAMPLES) = 2 % of itself
LEAST_STEPS = 20  # of a single run that is cut into blocks
_BATCH_CELLS = 1_000_000
PERMUTATIONS = 4_999
_MOST_POINTS = 256  # of the pooled sample at which distribution functions are compared
_ENOUGH = 80  # permutations there must be: they come in pairs, so p-values reach 0.025
_PERMUTED_CELLS = 4_000_000
_ALIKE = 1.1  # lengths of runs, one over the other
_MOST_BLOCKS = 1_000  # of a run: more would not make a t quantile smaller by 0.1 %


@dataclass(frozen=True)
class Sample:
    """Values whose figures are compared."""

    values: Array  # [n] s; by unit, and in time order within each
    unit: Index  # [n] what is independent, a number from 0: cluster, run, block of a single run
    step: Index  # [n] number of the step within its run; of simulated values the cluster draw
    kind: Kind  # steps where there is one run only
    missed: float = 0.0  # share of the variance of a long mean that blocks do not hold

    @property
    def n_units(self) -> int:
        """Clusters, runs or blocks."""
        return int(self.unit[-1]) + 1

    def place_in_unit(self) -> Index:
        """Position of each value within its unit [n]."""
        return np.arange(self.unit.size) - np.searchsorted(self.unit, self.unit)

    def select(self, kept: Flags) -> "Sample":
        """Keep some of the values."""
        unit = np.unique(self.unit[kept], return_inverse=True)[1]
        return Sample(self.values[kept], unit, self.step[kept], self.kind)


class Resampled(NamedTuple):
    """Figures of a sample, then its quantiles at `SHIFT_LEVELS`, and their errors."""

    own: Array  # [column] s; the CV 1
    deviations: Array  # [resample, column] their variance is that of the figures
    share_error: Array  # [level] standard error of the share below each quantile of `LEVELS`

    def unreached(self) -> frozenset[str]:
        """Percentiles among `FIGURES` whose 95 % interval leaves the sample."""
        beyond = FAR * self.share_error > np.minimum(LEVELS, 1.0 - LEVELS)
        return frozenset(name for name, out in zip(FIGURES[1:4], beyond, strict=False) if out)


def in_blocks(a: Sample, b: Sample, pairing: Pairing) -> tuple[Sample, Sample]:
    """Cut single runs into blocks of one length, by the longer memory and the shorter run.

    The length is b = (1.5 m^2 n)^(1/3), with m the memory, at most min(3 sqrt(n), n/3) [1]_. Means
    of blocks hold all but m/b of the variance of a long mean [2]_.

    References
    ----------
    .. [1] Politis and White (2004), doi:10.1081/ETC-120028836, corrected by Patton, Politis and
       White (2009), doi:10.1080/07474930802459016: the circular block bootstrap.
    .. [2] Kuensch (1989), doi:10.1214/aos/1176347265, theorem 3.3.
    """
    single = [x for x in (a, b) if x.kind == "steps"]
    if not single:
        return a, b
    series = [np.stack([x.values, x.values <= np.median(x.values)]) for x in single]
    if pairing == "step":
        series = [series[1] - series[0]]
    memories = [_memory(row) for rows in series for row in rows]
    sizes = [x.values.size for x in single]
    n = min(sizes)
    length = (1.5 * max(m * m for m in memories) * n) ** (1.0 / 3.0)
    length = max(min(length, 3.0 * np.sqrt(n)), max(sizes) / _MOST_BLOCKS, 1.0)
    length = int(np.ceil(min(length, n / 3.0)))
    missed = min(0.5, max(0.0, *memories) / length)

    def cut(x: Sample) -> Sample:
        if x.kind != "steps":
            return x
        size = x.values.size
        return replace(x, unit=np.arange(size) * max(3, size // length) // size, missed=missed)

    return cut(a), cut(b)


def _memory(x: Array) -> float:
    """Sum of |k| R(k) over the sum of R(k), of autocovariances at all lags k; in steps.

    Under the flat-top window, as wide as correlations are seen (Politis and White 2004, section 3).
    """
    n = x.size
    centred = x - x.mean()
    in_a_row = max(5, int(np.ceil(np.sqrt(np.log10(n)))))
    most = min(n - 1, int(np.ceil(np.sqrt(n))) + in_a_row)
    covariance = correlate(centred, centred, method="fft")[n - 1 : n + most] / n
    small = np.abs(covariance[1:]) < 2.0 * np.sqrt(np.log10(n) / n) * covariance[0]
    ends = np.flatnonzero(sliding_window_view(small, in_a_row).all(axis=1))
    last = int(ends[0]) if ends.size else most
    width = min(2 * max(1, last), most)
    lag = np.arange(1, width + 1)
    tapered = np.minimum(1.0, 2.0 * (1.0 - lag / width)) * covariance[1 : width + 1]
    at_zero = covariance[0] + 2.0 * tapered.sum()
    return float(2.0 * (lag @ tapered) / at_zero) if at_zero > 0.0 else 0.0


def resample(sample: Sample, rng: np.random.Generator, resamples: int = RESAMPLES) -> Resampled:
    """Find the figures of a sample, and of as many units drawn with replacement, many times.

    Deviations are sqrt(R/(R - 1)) times as large, so that the variance of a mean over R units is
    the unbiased one; a t quantile with R - 1 degrees of freedom belongs to it.
    """
    n = sample.n_units
    order = np.argsort(sample.values, kind="stable")
    x, unit = sample.values[order], sample.unit[order]
    origin = x[x.size // 2]  # keeps squares small
    moments = np.stack([np.bincount(unit, (x - origin) ** power) for power in range(3)], axis=1)

    def figures(times: Index) -> tuple[Array, NDArray[np.int32]]:
        """Find figures where units count several times each [row, unit], and values up to each."""
        count, first, second = (times @ moments).T
        mean = first / count
        std = np.sqrt(np.maximum(0.0, second / count - mean**2))
        mean += origin
        below = np.cumsum(times.astype(np.int32)[:, unit], axis=1, dtype=np.int32)
        quantiles = _quantiles(x, below)
        head = [mean, *quantiles[:, :3].T, std, std / mean]
        return np.column_stack([*head, quantiles[:, 3:]]), below

    own = figures(np.ones((1, n), np.int64))[0][0]
    own_quantiles = np.r_[own[1:4], own[len(FIGURES) :]]
    places = np.searchsorted(x, own_quantiles, side="right") - 1
    found, shares = [], []
    rows = max(1, _BATCH_CELLS // x.size)
    for first in range(0, resamples, rows):
        each, below = figures(draw_counts(rng, min(rows, resamples - first), n))
        found.append(each)
        shares.append(below[:, places] / below[:, -1:])
    scale = float(np.sqrt(n / (n - 1.0) / (1.0 - sample.missed)))
    figures_found = np.concatenate(found)
    middle = figures_found.mean(axis=0)  # of a spread, less than its own where units are few
    grow = np.divide(own, middle, out=np.ones_like(own), where=middle > 0.0)
    deviations = scale * grow * (figures_found - middle)
    return Resampled(own, deviations, scale * np.concatenate(shares).std(axis=0))


def _quantiles(x: Array, below: NDArray[np.int32]) -> Array:
    """Quantiles at `LEVELS` of ordered values, in numpy's linear definition [row, level].

    In each row, below [row, value] values come up to each one.
    """
    last = below[:, -1:] - 1
    place = LEVELS * last
    low = np.floor(place).astype(np.int64)
    row = np.arange(below.shape[0], dtype=np.int32)[:, None]
    apart = row * (last.max() + 2)
    ordered = (below + apart).ravel()
    first, second = (
        x[np.searchsorted(ordered, (np.minimum(at, last) + apart).astype(np.int32), side="right")
          - row * x.size]
        for at in (low, low + 1)
    )  # fmt: skip
    return np.asarray(first + (place - low) * (second - first))


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
    ks = ks_distance(a.values, b.values)
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
        n_resamples=permutations, batch=max(1, _PERMUTED_CELLS // (n_a + n_b + _MOST_POINTS)),
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


def ks_distance(first: Array, second: Array) -> float:
    """Largest distance between the distribution functions of two samples."""
    # scipy's ks_2samp finds a p-value too, which it warns of where values are few
    x, y = np.sort(first), np.sort(second)
    both = np.concatenate([x, y])
    below_x = np.searchsorted(x, both, side="right") / x.size
    below_y = np.searchsorted(y, both, side="right") / y.size
    return float(np.abs(below_x - below_y).max())
