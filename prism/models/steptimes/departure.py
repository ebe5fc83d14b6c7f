"""Whether the last steps of a run depart from those before, and how sure that is.

The largest change of level over all places, each in its own standard deviations, is held against
the same of runs that are simulated without any change: with the model's own noise and drift.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism.models.changes.segments import LEAST
from prism.models.changes.spans import FEWEST
from prism.models.steptimes.spread import Spread
from prism.simulation.runs.drift import ar1

Array = NDArray[np.float64]
Index = NDArray[np.int64]

ALARM = 0.001
"""P-value at which steps depart. Measured runs looked at nine times (`experiments/verification/
watch.py`): 1 of 27 MLPerf logs without a model departs, and none of 20 repeated runs with one."""
_DRAWS = 3_999  # simulated runs: p-values to 1/4000
_FINE = 50  # last values that are looked at one by one; further back a change is placed to
_COARSE = 0.02  # this share of the distance from the end
_NEAR = 3.84  # below the largest square: 95 % of a chi-square of one degree of freedom
_FLOOR = 1e-9  # relative; what differs by less is rounding


@dataclass(frozen=True)
class Departure:
    """The most likely change of level of a series.

    Attributes
    ----------
    p_value : float
        That a series without one shows as large a change [1].
    begin : int
        First value after it.
    earliest, latest : int
        Where that may be as well (95 %).
    change, std : float
        Level after it over the level before, less 1, and its standard deviation [1].
    """

    p_value: float
    begin: int
    earliest: int
    latest: int
    change: float
    std: float


def find_departure(
    ratio: Array, elapsed_s: Array, spreads: Sequence[Spread], seed: int
) -> Departure | None:
    """Find the most likely change of level of a run.

    Parameters
    ----------
    ratio : float64 [value]
        Step over its work; not-a-number where the level does not show.
    elapsed_s : float64 [value]
        Time of each [s].
    spreads : sequence of Spread
        Of a value around its level without a change; white noise is at least that of the series.
    seed : int

    Returns
    -------
    Departure or None
        None of fewer values than a change can be seen in.
    """
    known = np.flatnonzero(np.isfinite(ratio))
    n = known.size
    if n < FEWEST + LEAST:
        return None
    level = float(ratio[known].mean())
    first = _blocks(n)
    count = np.diff(np.r_[first, n]).astype(np.float64)
    seen = (np.add.reduceat(ratio[known] / level - 1.0, first) / count)[:, None]
    at_s = np.add.reduceat(elapsed_s[known], first) / count
    drawn = _draw(_own_square(ratio[known] / level), elapsed_s[known], at_s, count, spreads, seed)
    before = np.cumsum(count)[:-1]
    edges = np.flatnonzero((before >= FEWEST) & (n - before >= LEAST))
    shift = _shift(drawn, count)[edges]
    spread = shift.std(axis=1)
    found = _shift(seen, count)[edges, 0]
    score = np.abs(found) / spread
    best = int(score.argmax())
    largest = (np.abs(shift) / spread[:, None]).max(axis=0)
    p_value = (1.0 + float((largest >= score[best]).sum())) / (_DRAWS + 1.0)
    near = edges[score**2 >= score[best] ** 2 - _NEAR]
    starts = known[first[1:]]
    later = 1.0 - before[edges[best]] / n
    size = float(found[best] / (1.0 - later * found[best]))  # over the level before, not the mean
    return Departure(
        p_value, int(starts[edges[best]]), int(starts[near[0]]), int(starts[near[-1]]), size,
        float(spread[best]),
    )  # fmt: skip


def _blocks(n: int) -> Index:
    """First values of blocks: single ones at the end, longer ones further back."""
    edges = [n]
    while edges[-1] > 0:
        far = n - edges[-1]
        edges.append(edges[-1] - max(1, int(_COARSE * max(0, far - _FINE))))
    return np.maximum(np.array(edges[:0:-1], np.int64), 0)


def _own_square(values: Array) -> float:
    """Half the mean square of successive differences (von Neumann)."""
    return 0.5 * float((np.diff(values) ** 2).mean())


def _draw(
    own: float, elapsed_s: Array, at_s: Array, count: Array, spreads: Sequence[Spread], seed: int
) -> Array:
    """Draw block means of runs without a change [block, run]."""
    rng = np.random.Generator(np.random.Philox(key=[seed, 77]))
    gap_s = float(np.diff(elapsed_s).mean())
    n = elapsed_s.size / 1.5  # degrees of freedom of successive differences
    shares = np.array_split(np.arange(_DRAWS), min(len(spreads), 50))
    out = []
    for share, s in zip(shares, spreads, strict=False):
        drift = s.drift**2 * -np.expm1(-gap_s / s.tau_s) if s.drift > 0.0 else 0.0
        seen = own * n / rng.chisquare(n, share.size) - drift  # as well as it is known
        white = np.sqrt(np.maximum(seen, max(s.white, _FLOOR) ** 2))
        body = white / np.sqrt(count)[:, None] * rng.standard_normal((count.size, share.size))
        if s.drift > 0.0:
            body += s.drift * ar1(at_s / s.tau_s, share.size, rng)
        out.append(body)
    return np.concatenate(out, axis=1)


def _shift(blocks: Array, count: Array) -> Array:
    """Mean after each edge between blocks less that before [edge, run]."""
    sums = np.cumsum(count[:, None] * blocks, axis=0)
    before = np.cumsum(count)[:-1, None]
    return np.asarray((sums[-1] - sums[:-1]) / (count.sum() - before) - sums[:-1] / before)
