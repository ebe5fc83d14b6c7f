"""Steps of a long run in blocks: their means without stalls, and the stalls apart.

So what a look at a run in progress costs beside reading is bounded, however long the run is. A
block is as long as the test of departures takes it too (`prism.models.steptimes.departure`), and
what a block cannot show, noise within it, has become part of its mean's. Runs of up to `MOST`
values stay as they are.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.arrays import Array, Index
from prism.models.changes.segments import outliers
from prism.models.steptimes.departure import MOST
from prism.traces import StepTimes

_JOIN = 2  # values between those of one stall, as in `prism.models.steptimes.series`


class Blocks(NamedTuple):
    """A run in blocks."""

    size: int  # values of each; those behind the last whole block are in none
    means: Array  # [block]
    stall_at: Index  # value with which each begins [stall]
    stall: Array  # what it takes more than its neighbours [stall]

    @property
    def begins(self) -> slice:
        """First value of each."""
        return slice(None, self.means.size * self.size, self.size)

    def mean(self, values: Array) -> Array:
        """Means of other values of the run [block]."""
        return np.asarray(in_rows(values, self.size).mean(axis=1))


def in_rows(values: NDArray, size: int) -> NDArray:  # type: ignore[type-arg]
    """Lay values out by their blocks [block, value]."""
    n = values.size // size
    return values[: n * size].reshape(n, size)


def in_blocks(values: Array) -> Blocks:
    """Put a run of positive values in blocks: of one value each where there are few."""
    size = 1
    while values.size > size * MOST:
        size *= 2
    if size == 1:
        return Blocks(1, values, np.empty(0, np.int64), np.empty(0))
    far, near = outliers(np.log(values)[:, None])
    usual = np.exp(near[:, 0])
    long = far[:, 0] & (values > usual)
    at, more = np.flatnonzero(long), (values - usual)[long]
    begins = np.flatnonzero(np.r_[True, np.diff(at) > _JOIN][: at.size])
    stall = np.add.reduceat(more, begins) if at.size else more
    means = in_rows(np.where(long, usual, values), size).mean(axis=1)
    return Blocks(size, means, at[begins], stall)


def as_blocks(times: StepTimes, blocks: Blocks) -> StepTimes:
    """Give the blocks of one run as step times, numbered by the steps up to each one's end."""
    n, k = blocks.means.size, times.mean_over * blocks.size
    return replace(
        times, seconds=blocks.means, step=k * np.arange(1, n + 1), run=np.full(n, times.run[0]),
        mean_over=k,
    )  # fmt: skip
