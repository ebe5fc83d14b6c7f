"""Level changes of time series: segments of constant level, under noise that may have a memory.

Segments minimise the squared deviations plus a penalty for each change. A penalty is accepted where
it is `BOUND` times the long-run variance of what the segments leave: the largest variance of block
means times their length, over lengths of up to a quarter of the series, so that a slow drift makes
its own changes insignificant. Left out: what a change means (`prism.models.changes.spans`).
"""

from itertools import chain, pairwise

import numpy as np

from prism.common.arrays import Array, Flags, Index
from prism.common.means import median

BOUND = 60.0
"""Penalty over long-run variance that stationary series exceed in at most 2.5 % of cases: AR(1)
with a coefficient of 0.9, 8 to 600 steps, 1 to 64 series (`experiments/checks/changes.py`);
levels and spread are two tests."""
SETTLED = 8  # steps of a segment that is no part of a warm-up
MOST_BEGINNING = 1.0 / 3.0  # of the steps: what changes for longer is no warm-up
BEGINNING = 2.0
"""Times the bound where noise is judged without the steps before: keeps false alarms on AR(1) 0.9
of 12 to 30 steps at 3 to 5 % (`experiments/checks/changes.py`)."""
LEAST = 3  # steps of a segment: shorter ones are stalls
OUTLIER = 6.0  # robust standard deviations; a normal series of 10^6 steps has none beyond 5
_NEAR = 5  # steps of the median that a step is held against: two of them may be stalls
_POINTS = 300  # series that are longer are looked at in blocks, then around the changes found
_AT_ONCE = 512  # series times penalties whose costs stay in a processor's cache
_LONGEST = 4  # blocks of a series at least, where their variance counts
_FLOOR = 1e-18  # of a variance of logarithms: what is below is rounding


def outliers(values: Array, warm: bool = False) -> tuple[Flags, Array]:
    """Find steps far from the median of their neighbourhood; give these medians, [step, series].

    With `warm`, the first step stands for those before it, so that a warm-up is no outlier.
    """
    half, n = _NEAR // 2, values.shape[0]
    index = np.arange(-half, n + half)
    index = np.maximum(index, 0) if warm else np.abs(index)
    index = np.maximum(np.where(index < n, index, 2 * n - 2 - index), 0)  # a single step is its own
    near = filled(values)[index]
    middle = _median_of_five(*(near[k : n + k] for k in range(_NEAR)))
    apart = np.abs(values - middle)
    # of a warm-up that falls from step to step each is its own median, as if there were no noise
    usual = median(apart[n // 4 :] if warm else apart, axis=0)
    limit = np.nan_to_num(OUTLIER * 1.4826 * usual)
    return np.nan_to_num(apart) > np.maximum(limit, 1e-9), middle


def _median_of_five(a: Array, b: Array, c: Array, d: Array, e: Array) -> Array:
    """Median of five at each place: that of the last and the inner two of the others."""
    low = np.maximum(np.minimum(a, b), np.minimum(c, d))
    high = np.minimum(np.maximum(a, b), np.maximum(c, d))
    return np.asarray(np.maximum(np.minimum(low, high), np.minimum(np.maximum(low, high), e)))


def filled(values: Array) -> Array:
    """Fill what is missing with the nearest value before, else behind [step, series]."""
    known = np.isfinite(values)
    at = np.where(known, np.arange(values.shape[0])[:, None], -1)
    last = np.maximum.accumulate(at, axis=0)
    first = np.argmax(known, axis=0)
    return np.take_along_axis(values, np.where(last < 0, first, last), axis=0)


def long_run_variance(rest: Array) -> Array:
    """Largest variance of block means times their length [series], from neighbouring blocks."""
    n = rest.shape[0]
    sums = np.vstack([np.zeros(rest.shape[1]), np.cumsum(rest, axis=0)])
    out = np.full(rest.shape[1], _FLOOR)
    length = 1
    while length <= max(1, n // _LONGEST):
        means = (sums[length:] - sums[:-length]) / length
        apart = means[length:] - means[:-length]
        out = np.maximum(out, 0.5 * length * apart.var(axis=0))
        length *= 2
    return out


def find_edges(
    values: Array, first: int = LEAST, least: int = LEAST
) -> tuple[list[list[int]], Array]:
    """Find where the levels of series change.

    `values` [step, series]: logarithms without outliers; not-a-number where nothing was measured.
    Series of one kind: a change is held against their mean noise too. `first`, `least`: steps that
    the first segment has at least, and every other.

    Returns `edges`: for each series the first steps of its segments but the first. `variance`
    [series]: long-run variance of a step around its level.
    """
    n, n_series = values.shape
    block = -(-n // _POINTS)
    whole = filled(values)
    points = np.stack([part.mean(axis=0) for part in np.array_split(whole, -(-n // block))])
    points = points - points.mean(axis=0)
    penalty = 0.5 * float((points**2).sum(axis=0).max())
    noise = np.maximum(long_run_variance(points), _FLOOR)
    found: list[list[int]] = [[] for _ in range(n_series)]
    # without the largest quarter: a first step that is far off must not hide what follows it
    apart = np.sort(np.diff(points, axis=0) ** 2, axis=0)[: max(1, 3 * (len(points) - 1) // 4)]
    own = 0.5 * np.maximum(apart.mean(axis=0), _FLOOR) / 8.0
    penalties = []
    while penalty > BOUND * float(own.min()):
        penalties.append(penalty)
        penalty /= 2.0
    at_once = max(1, _AT_ONCE // n_series)
    blocks = max(least // block, 1), max(first // block, 1)
    segments = chain.from_iterable(
        _segments(points, np.array(penalties[i : i + at_once]), *blocks)
        for i in range(0, len(penalties), at_once)
    )
    for penalty, edges in zip(penalties, segments, strict=True):
        rest = points - levels(points, edges)
        variance = long_run_variance(rest)
        if first < least:  # a warm-up is looked for
            variance = np.minimum(variance, BEGINNING * _settled_variance(rest, edges))
        variance = np.maximum(variance, variance.mean())
        for k in np.flatnonzero(penalty >= BOUND * variance):
            found[k], noise[k] = edges[k], variance[k]
    starts = np.r_[0, np.cumsum([len(part) for part in np.array_split(np.arange(n), len(points))])]
    noise *= block
    placed = [
        _place(series, [int(starts[e]) for e in row], block, 0.5 * BOUND * float(variance))
        for series, row, variance in zip(whole.T, found, noise, strict=True)
    ]
    return placed, noise


def _settled_variance(rest: Array, edges: list[list[int]]) -> Array:
    """Long-run variance from the first long segment on [series].

    A warm-up that falls from step to step has no level: what its segments leave is no noise.
    """
    n = rest.shape[0]
    begins = [next((a for a, b in pairwise([0, *row, n]) if b - a >= SETTLED), n) for row in edges]
    begins = [begin if begin <= MOST_BEGINNING * n else 0 for begin in begins]
    return np.concatenate(
        [long_run_variance(rest[begin:, k : k + 1]) for k, begin in enumerate(begins)]
    )


def _segments(points: Array, penalties: Array, least: int, first: int) -> list[list[list[int]]]:
    """Segment every series optimally under each of some penalties for a change."""
    n, n_series = points.shape
    zero = np.zeros((1, n_series))
    sums, squares = (np.vstack([zero, np.cumsum(points**p, axis=0)]) for p in (1, 2))
    best = np.full((n + 1, penalties.size, n_series), np.inf)
    best[0] = -penalties[:, None]
    before = np.zeros(best.shape, np.int64)
    for j in range(min(first, least), n + 1):
        i = np.arange(max(j - least, 0) + 1)
        i = i[(i >= first) | ((i == 0) & (j >= first))]
        if not i.size:
            continue
        spread = squares[j] - squares[i] - (sums[j] - sums[i]) ** 2 / (j - i)[:, None]
        cost = spread[:, None] + (best[i] + penalties[:, None])
        chosen = cost.argmin(axis=0)
        best[j] = np.take_along_axis(cost, chosen[None], axis=0)[0]
        before[j] = i[chosen]
    return [[_edges(before[:, p, k]) for k in range(n_series)] for p in range(penalties.size)]


def _edges(before: Index) -> list[int]:
    """Edges on the way back from the end, each from what is before it."""
    row, j = [], int(before[-1])
    while j > 0:
        row.append(j)
        j = int(before[j])
    return row[::-1]


def levels(values: Array, edges: list[list[int]]) -> Array:
    """Mean of each step's segment, [step, series]."""
    out = np.empty_like(values)
    for k, row in enumerate(edges):
        for i, j in zip([0, *row], [*row, values.shape[0]], strict=True):
            out[i:j, k] = np.nanmean(values[i:j, k])
    return out


def _place(series: Array, edges: list[int], block: int, least: float) -> list[int]:
    """Move edges that blocks have placed to the step that separates their neighbours best.

    A block between two levels is a segment of its own; there its edges gain less than `least`.
    """
    while block > 1 and edges:
        bounds = [0, *edges, series.size]
        gains = []
        for m in range(1, len(bounds) - 1):
            part = series[bounds[m - 1] : bounds[m + 1]] - series[bounds[m - 1]]
            n, sums = np.arange(1, part.size), np.cumsum(part)
            gain = sums[:-1] ** 2 / n + (sums[-1] - sums[:-1]) ** 2 / (part.size - n)
            near = np.abs(bounds[m - 1] + n - bounds[m]) <= block
            long = (n >= (1 if m == 1 else LEAST)) & (part.size - n >= LEAST)
            near &= long | ~(near & long).any()
            bounds[m] = bounds[m - 1] + 1 + int(np.where(near, gain, -np.inf).argmax())
            gains.append(float(gain[near].max() - sums[-1] ** 2 / part.size))
        edges = bounds[1:-1]
        if min(gains) >= least:
            break
        del edges[int(np.argmin(gains))]
    return edges
