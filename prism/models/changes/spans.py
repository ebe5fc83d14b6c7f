"""What the segments of series mean: warm-up, phases, slow intervals, ramps, spread.

The level that counts is that of the last phase, which a plan for the future needs; an earlier
segment of the same level is kept too, steps of other levels are named.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from prism.common.arrays import Array, Flags
from prism.models.changes.segments import (
    BOUND,
    OUTLIER,
    filled,
    find_edges,
    levels,
    long_run_variance,
    outliers,
)

FEWEST = 8  # steps of a phase of its own: as many as a fit can start from
WARM_UP = 0.25  # of the steps: a longer beginning is called a phase; both are left out
_KNOTS = 40  # places of a ramp's ends that are tried
_LEVEL, _SPREAD = ("warm_up", "phase", "interval"), ("spread",) * 3


@dataclass(frozen=True)
class Span:
    """Steps of one series that differ from the level that counts."""

    kind: str
    series: int
    begin: int
    end: int
    ratio: float  # of step times, or of their spread


def find_spans(values: Array, first: int) -> tuple[list[Span], Flags]:
    """Find what differs in series of one kind, and which steps that are, [step, series].

    `values` are logarithms; not-a-number where nothing was measured. The first segment has at least
    `first` steps.
    """
    n = values.shape[0]
    if n < FEWEST - 2:  # the shortest series that the bound was simulated for
        return [], np.zeros(values.shape, bool)
    odd, middle = outliers(values, warm=first == 1)
    calm = np.where(odd, middle, values)
    edges, variance = find_edges(calm, first)
    spans: list[Span] = []
    out = np.zeros(values.shape, bool)
    for k, row in enumerate(edges):
        if row:
            spans += _explain(calm[:, k], row, float(variance[k]), k, out[:, k], _LEVEL)
    spans = [_to_the_end(s, values[:, s.series], out[:, s.series]) for s in spans]
    ends = {s.series: s.end for s in spans if not s.begin}
    spans = [
        replace(s, begin=max(s.begin, ends.get(s.series, 0)) * bool(s.begin))
        for s in spans
        if not s.begin or s.end > ends.get(s.series, 0)
    ]
    apart = np.abs(np.where(out, np.nan, values - levels(calm, edges)))
    usual = np.maximum(1.4826 * np.nanmedian(apart, axis=0), 1e-9)
    rest = np.sqrt(np.minimum(apart / usual, OUTLIER))
    edges, variance = find_edges(rest, FEWEST, FEWEST)
    for k, row in enumerate(edges):
        if row:
            found = _explain(rest[:, k], row, float(variance[k]), k, out[:, k], _SPREAD)
            spans += [replace(s, ratio=_spread_ratio(rest[:, k], s, out[:, k])) for s in found]
    return spans, out


def _to_the_end(span: Span, series: Array, out: Flags) -> Span:
    """Go on with a beginning over the steps behind it that stick out too; flags them in `out`."""
    end = span.end
    if span.begin or not out[:end].all():
        return span
    rest = series[end:][~out[end:]]
    middle = float(np.nanmedian(rest)) if np.isfinite(rest).any() else np.nan
    limit = OUTLIER * max(1.4826 * float(np.nanmedian(np.abs(rest - middle))), 1e-9)
    while end < series.size - FEWEST and abs(series[end] - middle) > limit:
        out[end] = True
        end += 1
    return replace(span, end=end)


def _spread_ratio(rest: Array, span: Span, out: Flags) -> float:
    within, kept = rest[span.begin : span.end], rest[~out]
    return float(np.sqrt(np.nanmean(within**4) / max(float(np.nanmean(kept**4)), 1e-300)))


def _explain(
    series: Array, edges: list[int], variance: float, k: int, out: Flags, kinds: tuple[str, ...]
) -> Iterator[Span]:
    """Hold the segments of a series against the last that is long enough; flags them in `out`."""
    n = series.size
    bounds, ramp = _with_ramp(series, [0, *edges, n])
    parts = list(pairwise(bounds))
    size = np.array([np.isfinite(series[a:b]).sum() for a, b in parts])
    mean = _means(series, bounds)
    plain = np.array([part != ramp for part in parts])
    harmonic = size[:, None] * size / np.maximum(size[:, None] + size, 1)
    alike = ((mean[:, None] - mean) ** 2 * harmonic < BOUND * variance) & plain & plain[:, None]
    enough = np.flatnonzero((alike * size).sum(axis=1) >= min(FEWEST, n // 2))
    last = int(enough[-1]) if enough.size else int(np.where(plain, size, 0).argmax())
    same = alike[last]
    kept = np.flatnonzero(same)
    early = [m for m in range(kept[0]) if parts[m][1] <= WARM_UP * n]
    if early:
        part = slice(0, parts[early[-1]][1])
        apart = mean[early] - mean[len(early)]  # the largest: a beginning may be slow, then fast
        ratio = float(np.exp(apart[np.abs(apart).argmax()]))
        yield Span(kinds[0], k, 0, part.stop, ratio)
    for m, (a, b) in enumerate(parts):
        if same[m] or not size[m]:
            continue
        out[a:b] = True
        if m in early or (b == (ramp or (0,))[0] and m < kept[0]):
            continue  # said already, or with the ramp behind
        kind = "ramp" if (a, b) == ramp else kinds[1 if m < kept[0] else 2]
        before = mean[m - 1] if kind == "ramp" and m else mean[m]
        yield Span(kind, k, a, b, float(np.exp(before - mean[last])))


def _means(series: Array, bounds: list[int]) -> Array:
    """Mean of each segment; of one in which nothing is known, the nearest."""
    parts = [series[a:b] for a, b in pairwise(bounds)]
    found = [float(np.nanmean(p)) if np.isfinite(p).any() else np.nan for p in parts]
    return filled(np.array(found)[:, None])[:, 0]


def _with_ramp(series: Array, bounds: list[int]) -> tuple[list[int], tuple[int, int] | None]:
    """Replace levels that rise or fall in a row by a ramp, where that is clearly better."""
    mean = _means(series, bounds)
    turns = np.flatnonzero(np.diff(np.sign(np.diff(mean)))) + 1
    for i, j in pairwise([0, *turns, len(mean) - 1]):
        begin, end = bounds[i], bounds[j + 1]
        part = filled(series[begin:end, None])[:, 0]
        steps = part - levels(part[:, None], [[b - begin for b in bounds[i + 1 : j + 1]]])[:, 0]
        knots = np.linspace(0, part.size, _KNOTS)
        low, high = (knots[m] for m in np.triu_indices(_KNOTS, 1))
        at = np.arange(part.size)
        shape = np.clip((at - low[:, None]) / (high - low)[:, None], 0.0, 1.0)
        shape -= shape.mean(axis=1, keepdims=True)
        y, power = part - part.mean(), np.maximum((shape**2).sum(axis=1), 1e-12)
        best = int(((shape @ y) ** 2 / power).argmax())
        rest = y - (shape[best] @ y) / power[best] * shape[best]
        gain = float((steps**2).sum() - (rest**2).sum())
        long = high[best] - low[best] >= FEWEST
        if long and gain > BOUND * float(long_run_variance(rest[:, None])[0]):
            a, b = begin + round(low[best]), begin + round(high[best])
            b = b if series.size - b >= FEWEST else bounds[j]
            a = min(a, b - 1)
            middle = sorted({a, b} - {begin, end})
            return [*bounds[: i + 1], *middle, *bounds[j + 1 :]], (a, b)
    return bounds, None
