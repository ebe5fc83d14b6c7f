"""Steps that are long at regular distance: evaluations, checkpoints, garbage collection.

A step is held against its neighbours, so that levels and slow drifts play no part. Long steps that
are few are found among those that stick out; pauses that noise hides, by how many of the longest
steps lie at the same distance from each other.
"""

from typing import NamedTuple

import numpy as np
from scipy.stats import binom, hypergeom

from prism.common.arrays import Array, Flags, Index
from prism.models.changes.segments import outliers
from prism.models.changes.spans import FEWEST

CHANCE = 0.01
"""That long steps at random places look as regular, over all intervals and both tests; measured on
series without pauses in `experiments/checks/pauses.py`."""
_HIDDEN = 1000  # the longest interval of pauses that noise hides: each costs a look at all steps
_LEAST = 3  # long steps of a pause


class Pause(NamedTuple):
    """Steps that are long at regular distance."""

    interval: int
    extra: float  # typical time more than the neighbours [as the exponential of the values]
    steps: Flags  # [step] which have it

    @property
    def n(self) -> int:
        """How many there are."""
        return int(self.steps.sum())


def find_pauses(values: Array, numbers: Index) -> list[Pause]:
    """Find long steps at regular distance.

    `values` [step, run] are logarithms, not-a-number where nothing was measured; `numbers` [step]
    ascend. A step is long where it is so in more than half of the runs. Among m of n, as many lie
    in one residue class of an interval as chance would put there with probability `CHANCE`.
    """
    found: list[Pause] = []
    if numbers.size < FEWEST:
        return found
    far, middle = outliers(values, warm=True)
    long = np.asarray((far & (values > middle)).sum(axis=1) * 2 > np.isfinite(values).sum(axis=1))
    left = np.isfinite(values).any(axis=1)
    longest = int(np.ptp(numbers)) // 2
    tests = 0.5 * longest**2 * 2  # intervals and their residues, twice
    while longest >= 2:
        excess = _over_neighbours(values)
        left = left & np.isfinite(excess)
        long = long & left
        chance, interval, r = _of_long(numbers, long)  # first: they hide shorter ones
        sticks_out = chance * tests < CHANCE
        if not sticks_out:
            chance, interval, r = _of_all(numbers, excess, left, longest)
            if chance * tests >= CHANCE:
                break
        steps = left & (numbers % interval == r)
        if sticks_out and not _all_of_them(long[steps], excess[steps]):
            steps &= long
        seconds = np.exp(values[steps])
        extra = seconds - np.exp(values[steps] - np.maximum(excess[steps, None], 0.0))
        found.append(Pause(interval, float(np.nanmedian(extra)), steps))
        values = values.copy()  # without it, so that its neighbours are not fast
        values[steps] = np.log(np.maximum(seconds - found[-1].extra, 0.1 * seconds))
        long, left = long & ~steps, left & ~steps
    return found


def _all_of_them(long: Flags, excess: Array) -> bool:
    """Whether those that do not stick out are longer too: few are left, or by a sign test."""
    rest = excess[~long]
    return bool(
        2 * rest.size < long.size or binom.sf((rest > 0.0).sum() - 1, rest.size, 0.5) < CHANCE
    )


def _over_neighbours(values: Array) -> Array:
    """Each step over the mean of its neighbours, the median of the runs [step]."""
    near = np.vstack([values[1:2], values, values[-2:-1]])
    with np.errstate(invalid="ignore"):
        apart = values - 0.5 * (near[:-2] + near[2:])
    known = np.isfinite(apart)
    out = np.full(values.shape[0], np.nan)
    rows = known.any(axis=1)
    out[rows] = np.nanmedian(apart[rows], axis=1)
    return out


def _chance(numbers: Index, hits: Index, interval: int) -> tuple[float, int, int]:
    """Probability that chance puts as many hits into one residue class; the interval, the class."""
    count = np.bincount(hits % interval, minlength=interval)
    r = int(count.argmax())
    if count[r] < _LEAST:
        return 1.0, interval, r
    slots = int((numbers % interval == r).sum())
    return float(hypergeom.sf(count[r] - 1, numbers.size, hits.size, slots)), interval, r


def _of_long(numbers: Index, long: Flags) -> tuple[float, int, int]:
    """Best interval of the steps that stick out."""
    hits = numbers[long]
    apart = np.unique(np.abs(hits[:, None] - hits))
    apart = apart[(apart >= 2) & (apart <= np.ptp(numbers) // 2)]
    return min((_chance(numbers, hits, int(k)) for k in apart), default=(1.0, 1, 0))


def _of_all(numbers: Index, excess: Array, left: Flags, longest: int) -> tuple[float, int, int]:
    """Best interval among as many of the longest steps as it has places."""
    places = numbers[left]
    order = places[np.argsort(-excess[left], kind="stable")]
    best = 1.0, 1, 0
    for interval in range(2, min(longest, _HIDDEN, places.size // _LEAST) + 1):
        best = min(best, _chance(places, order[: places.size // interval], interval))
    return best
