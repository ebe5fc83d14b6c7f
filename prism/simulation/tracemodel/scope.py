"""Who takes part in one op: a worker, a stage's, a replica's or all; statistics with gaps.

Arrays over workers are [stage, replica, step]; NaN stands for what a trace lacks.
"""

import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Scope(NamedTuple):
    """A way to divide workers into meetings: those of one stage, one replica, all, or each."""

    name: str  # worker, replica, stage, world

    def axes(self) -> tuple[int, ...]:
        """Axes of [stage, replica] that a meeting runs over."""
        return {"worker": (), "replica": (0,), "stage": (1,), "world": (0, 1)}[self.name]

    def latest(self, times: Array) -> Array:
        """Latest of every worker's meeting, [stage, replica, step], NaN ignored."""
        axes = self.axes()
        if not axes:
            return times
        with np.errstate(all="ignore"):
            top = np.fmax.reduce(times, axis=axes[0], keepdims=True)
            for axis in axes[1:]:
                top = np.fmax.reduce(top, axis=axis, keepdims=True)
        return np.broadcast_to(top, times.shape)

    def earliest(self, times: Array) -> Array:
        """Earliest of every worker's meeting, [stage, replica, step], NaN ignored."""
        return -self.latest(-times)


WORKER, REPLICA, STAGE, WORLD = (Scope(n) for n in ("worker", "replica", "stage", "world"))


def median(
    values: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Array:
    """Median of what is not missing; NaN where all of it is."""
    if values.size and np.isfinite(values).all():  # far faster
        return np.asarray(np.median(values, axis=axis, keepdims=keepdims))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all missing
        return np.asarray(np.nanmedian(values, axis=axis, keepdims=keepdims))


def mean(values: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Mean of what is not missing; NaN where all of it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all missing
        return np.asarray(np.nanmean(values, axis=axis))
