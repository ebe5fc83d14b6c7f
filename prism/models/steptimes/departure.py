"""Whether the last steps of a run deviate from those before: a sequential test of changes of level.

At every step the likelihood of a change somewhere before it is held against that of none, both
averaged over kinds of noise: white, and white with an AR(1) drift of some size and memory; level
and variance are free. A change is found where this crosses a bound that noise alone crosses in at
most 1 % of runs, at any of its steps (`experiments/checks/watch.py --sequential`): so the
answer depends on the steps, not on how often they are looked at. How large a change is, the steps
after the crossing tell: those before it were selected by it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.signal import lfilter
from scipy.stats import norm, t

from prism.common.arrays import Array, Flags, Index
from prism.models.changes.segments import LEAST, outliers
from prism.models.changes.spans import FEWEST

FALSE_ALARMS = 0.01
"""Share of runs without a change in which one is found at any of their steps, at most."""
CONFIDENCE = 0.9  # of the interval of a change
_BOUND = 5.2, 0.05  # of the score at n steps: the first, and more for each doubling of n
_WHITE = 0.5  # weight of white noise alone; the others share the rest
_DRIFTS = 0.03, 0.2, 1.0, np.inf  # variance of the drift over the white one
MOST = 8192  # values; more are averaged in pairs
_EACH, _FINER = 500, 1.005  # values after each of which a change is looked for, then this apart
_COARSER = 1.15  # ratio of the lengths since a change that are tried
_NEAR = 3.84  # below the largest likelihood: 95 % of a chi-square of one degree of freedom
_FLOOR = 1e-9  # relative; what differs by less is rounding
_MANY = 50  # changes of a run


@dataclass(frozen=True)
class Departure:
    """The last change of level of a run, if any."""

    departed: bool  # whether the last steps are at another level than the first ones
    # bound on the chance that a run without a change shows as much at any of its steps [1]
    p_value: float
    current: Flags  # [value] values that show the present level
    level: Array  # [value] of each value over the first ones [1]
    # first value after the change; where that may be as well (95 %)
    begin: int = 0
    earliest: int = 0
    latest: int = 0
    # level after it over the level before, less 1, and its interval of 90 %
    change: float = 0.0
    low: float = 0.0
    high: float = 0.0


class _Noise(NamedTuple):
    """Noise as an ARMA(1, 1) series; the variance of its first value over that of what is new."""

    ar: float
    ma: float
    first: float
    weight: float

    def filter(self, series: Array) -> Array:
        """Give what is new in each value, of equal variance."""
        new = np.asarray(lfilter([1.0, -self.ar], [1.0, -self.ma], series))
        new[0] /= np.sqrt(self.first)
        return new

    def shape(self, n: int) -> Array:
        """Give what a change of 1 adds to that in the n values from it on."""
        late = (1.0 - self.ar) / (1.0 - self.ma)
        return np.asarray(late + (1.0 - late) * self.ma ** np.arange(n))

    def mean_variance(self, n: int) -> float:
        """Give the variance of the mean of n values over that of what is new in each."""
        r, m = self.ar, self.ma
        side = (r - m) * (1.0 - r * m) / (1.0 - r * r)
        pairs = (1.0 - (1.0 - r**n) / (n * (1.0 - r))) / (1.0 - r)
        return (self.first + 2.0 * side * pairs) / n


def find_departure(values: Array, grain: float = 0.0, each: int = 1) -> Departure | None:
    """Find the last change of level of a run.

    `values` [value]: step over its work, in the order of the steps; not-a-number where the level
    does not show. `grain`: step of the clock that they were read from; noise is at least that.
    `each`: values of the run that each is the mean of: the bound rises with their number.

    Returns None of fewer values than a change can be seen in.
    """
    known = np.flatnonzero(np.isfinite(values))
    known = known[~outliers(np.log(values[known])[:, None])[0][:, 0]] if known.size else known
    if known.size < FEWEST + 2 * LEAST:
        return None
    block = 1
    while known.size > block * MOST:
        block *= 2
    edges = np.arange(0, known.size - block + 1, block)
    first = float(values[known[: FEWEST * block]].mean())
    series = np.add.reduceat(values[known], edges) / np.diff(np.r_[edges, known.size]) / first
    floor = max(_FLOOR, grain / first) / np.sqrt(block)
    p_value, start = 1.0, 0
    found: list[tuple[int, int]] = []
    while len(found) < _MANY:
        crossing, p = _first_crossing(series[start:], block * each, floor)
        p_value = p if not found or crossing is not None else p_value
        if crossing is None:
            break
        found.append((start + crossing[0], start + crossing[1]))
        start += crossing[0]
    if not found:
        all_of_them = np.ones(values.size)
        return Departure(False, p_value, all_of_them > 0.0, all_of_them)
    return _describe(values.size, known[edges], series, found, p_value, floor)


def _first_crossing(
    series: Array, block: int, floor: float
) -> tuple[tuple[int, int] | None, float]:
    """Find the change at the first crossing of the bound, and that value; the least p-value.

    A crossing counts once `LEAST` values follow it.
    """
    ends = _ends(series.size - LEAST)
    if not ends.size:
        return None, 1.0
    lengths = _lengths(int(ends[-1]) - FEWEST)
    gain = _gains(series, ends, lengths, floor)
    best = gain.argmax(axis=1)
    # as a t statistic of the same p-value, and that as a normal one
    square = (ends - 4.0) * np.expm1(np.maximum(gain.max(axis=1), 0.0) / ends)
    score = norm.isf(np.maximum(t.sf(np.sqrt(square), ends - 4.0), 1e-300))
    bound = _BOUND[0] + _BOUND[1] * np.log2(ends * block)
    p = np.minimum(FALSE_ALARMS * np.exp(0.5 * (bound**2 - np.maximum(score, 0.0) ** 2)), 1.0)
    over = np.flatnonzero(score > bound)
    if not over.size:
        return None, float(p.min())
    at = int(over[0])
    return (int(ends[at] - lengths[best[at]]), int(ends[at])), float(p.min())


def _ends(n: int) -> Index:
    """Numbers of values after which a change is looked for."""
    out = [*range(FEWEST + LEAST, min(n, _EACH) + 1)]
    while out and out[-1] >= _EACH and (after := int(np.ceil(out[-1] * _FINER))) <= n:
        out.append(after)
    return np.array(out, np.int64)


def _lengths(n: int) -> Index:
    """Lengths since a change that are tried."""
    out = [LEAST]
    while (after := max(out[-1] + 1, int(out[-1] * _COARSER))) <= n:
        out.append(after)
    return np.array(out, np.int64)


def _kinds_of_noise(memories: Iterable[float]) -> list[_Noise]:
    rows = []
    for r in (float(np.exp(-1.0 / memory)) for memory in memories):
        for ratio in _DRIFTS:
            m = 0.0
            if np.isfinite(ratio):  # from the autocovariances of a drift with white noise
                half = 0.5 * ((1.0 + r * r) + ratio * (1.0 - r * r)) / r
                m = float(half - np.sqrt(half * half - 1.0))
            rows.append((r, m, float(1.0 + (r - m) ** 2 / (1.0 - r * r))))
    share = (1.0 - _WHITE) / len(rows)
    return [_Noise(0.0, 0.0, 1.0, _WHITE), *(_Noise(*row, share) for row in rows)]


_NOISES = _kinds_of_noise(4.0 ** np.arange(6))  # memories up to an eighth of as many values
_FINER_NOISES = _kinds_of_noise(2.0 ** np.arange(-1.0, 10.5, 0.5))


def _gains(series: Array, ends: Index, lengths: Index, floor: float) -> Array:
    """Twice the log likelihood ratio of a change that long before each end [end, length]."""
    centred = series - series.mean()
    none = np.full(ends.size, -np.inf)
    some = np.full((ends.size, lengths.size), -np.inf)
    for noise in _NOISES:
        least, gone = _squares(noise, centred, ends, lengths)
        square = np.maximum(least, ends * floor**2)
        left = np.maximum(least[:, None] - gone, ends[:, None] * floor**2)
        more = np.log(noise.weight) - 0.5 * np.log(noise.first)
        none = np.logaddexp(none, more - 0.5 * ends * np.log(square))
        some = np.logaddexp(some, more - 0.5 * ends[:, None] * np.log(left))
    possible = ends[:, None] - lengths >= FEWEST
    return np.where(possible, 2.0 * (some - none[:, None]), -np.inf)


def _squares(noise: _Noise, series: Array, ends: Index, lengths: Index) -> tuple[Array, Array]:
    """Sum of squares of what is new up to each end, and what a change takes from it.

    What is new in a series follows from filtering it, and a change of level from then on becomes
    ``late + (1 - late) ma^i`` after i values: its products are sums of the filtered series and of
    the same weighted by powers of `ma`, so that each pair of end and length takes a few operations.
    """
    n, m = series.size, noise.ma
    new, one, shape = noise.filter(series), noise.filter(np.ones(n)), noise.shape(n)
    late = (1.0 - noise.ar) / (1.0 - m)

    def sums(x: Array) -> Array:
        return np.concatenate([[0.0], np.cumsum(x)])

    begin = np.maximum(ends[:, None] - lengths, 0)
    gone = m ** lengths.astype(np.float64)

    def along(x: Array) -> Array:
        """Product of a filtered series with the change."""
        plain, back = sums(x), np.append(lfilter([1.0], [1.0, -m], x[::-1])[::-1], 0.0)
        near = back[begin] - gone * back[ends][:, None]
        return np.asarray(late * (plain[ends][:, None] - plain[begin]) + (1.0 - late) * near)

    both, ones = sums(new * one)[ends], sums(one * one)[ends]
    with_level = along(one)
    product = along(new) - (both / ones)[:, None] * with_level
    power = sums(shape * shape)[lengths] - with_level**2 / ones[:, None]
    taken = product**2 / np.maximum(power, 1e-12)
    return sums(new * new)[ends] - both**2 / ones, taken


def _describe(
    n_values: int, at: Index, series: Array, found: list[tuple[int, int]], p_value: float,
    floor: float,
) -> Departure:  # fmt: skip
    """Describe the last change: its place from all values, its size from those after the crossing.

    A run that is back at its first level does not deviate.
    """
    n, start = series.size, found[-2][0] if len(found) > 1 else 0
    begin, crossing = found[-1]
    lengths = np.arange(n - crossing + 1, n - start - FEWEST + 1)
    gain = _gains(series[start:], np.array([n - start]), lengths, floor)[0]
    near = n - lengths[gain >= gain.max() - _NEAR]
    begin = int(n - lengths[gain.argmax()])
    bounds = [0, *(row[0] for row in found[:-1]), begin, n]
    before = series[: max(FEWEST, int(near.min()) if len(found) == 1 else found[0][0])]
    change, lowest, highest = _size(series, bounds, before.size, crossing, floor)
    back = len(found) > 1 and lowest <= 0.0 <= highest
    level, current = np.ones(n_values), np.zeros(n_values, np.bool_)
    edge = [*at, n_values]
    for low, high in zip(bounds[1:], bounds[2:], strict=False):
        level[edge[low] : edge[high]] = series[low:high].mean() / before.mean()
    level[edge[begin] :] = 1.0 if back else 1.0 + change
    current[edge[crossing] :] = True
    current[: edge[before.size]] = back
    return Departure(
        not back, p_value, current, level, int(at[begin]), int(at[near.min()]), int(at[near.max()]),
        change, lowest, highest,
    )  # fmt: skip


def _size(
    series: Array, bounds: list[int], before: int, crossing: int, floor: float
) -> tuple[float, float, float]:
    """Estimate the last level over the first, less 1, and its interval.

    From what is new in the values after the crossing: given all before it, which was selected by
    it, that is as likely as ever. Kinds of noise count by their likelihood around the levels.
    """
    base, begin, rest = series[:before].mean(), bounds[-2], series.copy()
    for low, high in zip(bounds, bounds[1:], strict=False):
        rest[low:high] -= series[low:high].mean()
    since = rest.copy()
    since[begin:] = series[begin:] - base
    dof = series.size - len(bounds) + 1.0
    rows = []
    for noise in _FINER_NOISES:
        new, squares = noise.filter(rest), noise.shape(series.size - begin)[crossing - begin :]
        square = max(float(new @ new), series.size * floor**2)
        weight = np.log(noise.weight / np.sqrt(noise.first)) - 0.5 * dof * np.log(square)
        power = float(squares @ squares)
        size = float(noise.filter(since)[crossing:] @ squares) / power
        variance = square / dof * (1.0 / power + noise.mean_variance(before))
        rows.append((weight, size, np.sqrt(variance)))
    weight, size, std = np.array(rows).T
    weight = np.exp(weight - weight.max())
    weight /= weight.sum()

    def quantile(q: float) -> float:
        ends = float((size - 40.0 * std).min()), float((size + 40.0 * std).max())
        return float(brentq(lambda x: float(weight @ t.cdf((x - size) / std, dof)) - q, *ends))

    tail = 0.5 * (1.0 - CONFIDENCE)
    middle, low_end, high_end = (quantile(q) / base for q in (0.5, tail, 1.0 - tail))
    return float(middle), float(low_end), float(high_end)
