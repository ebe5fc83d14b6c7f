"""Distributions of sums of independent durations, and of the largest of several.

A step that waits for many ranks is decided by the tails of its ops: three moments of a sum of
kernels do not tell them (a rare slow kernel among many, or several somewhat slow ones).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prism.distributions.distribution import Distribution, constant

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

CELLS = 4096  # of the grid that sums are laid on
EVERY = 8  # of its cells are kept, and those near `KNOTS`
ROOM = 9.0  # standard deviations of the sum on either side, beyond the reach of each draw
TIP = 1e-11  # probability beyond the outermost knots; below 1e-13 a transform rounds
_TAIL = np.geomspace(TIP, 1e-3, 97)  # twelve a decade
KNOTS = np.unique(np.concatenate([np.linspace(0.0, 1.0, 513)[1:-1], _TAIL, 1.0 - _TAIL]))


class Draws(NamedTuple):
    """A number of independent durations of one distribution."""

    distribution: Distribution
    seconds: float  # of a duration that the distribution gives as 1
    times: float = 1.0

    @property
    def mean(self) -> float:
        """Mean of them all [s]."""
        return self.times * self.seconds * self.distribution.mean

    @property
    def variance(self) -> float:
        """Variance of their sum [s^2]."""
        return self.times * (self.seconds * self.distribution.std) ** 2


@lru_cache(maxsize=512)  # programs of one job differ in few of them
def sum_of(draws: tuple[Draws, ...]) -> Distribution:
    """Distribution of a sum of independent durations over its mean; of one, as it is.

    The draws' characteristic functions are multiplied on a grid; the result is stretched to the
    sum's standard deviation, of which the grid loses a little.
    """
    varying = [each for each in draws if each.variance > 0.0]
    if not varying:
        return constant()
    if len(draws) == 1 and draws[0].times == 1.0:
        return draws[0].distribution
    mean, std = sum(d.mean for d in draws), math.sqrt(sum(d.variance for d in varying))
    tips = np.array([TIP, 1.0 - TIP])
    reach = np.abs([d.seconds * (d.distribution.ppf(tips) - d.distribution.mean) for d in varying])
    below, above = ROOM * std + reach.max(axis=0)
    step = (below + above) / CELLS
    first = math.ceil(below / step)  # cells below the one around the mean
    edges = (np.arange(CELLS + 1) - first - 0.5) * step
    whole = np.ones(CELLS // 2 + 1, np.complex128)
    for distribution, seconds, times in varying:
        upto = distribution.cdf(distribution.mean + edges / seconds)
        upto[0], upto[-1] = 0.0, 1.0
        whole *= np.fft.rfft(np.roll(np.diff(upto), -first)) ** times
    mass = np.maximum(np.roll(np.fft.irfft(whole, CELLS), first), 0.0)
    mass /= mass.sum()
    x = (np.arange(CELLS) - first) * step
    centre = float(mass @ x)
    stretch = std / math.sqrt(float(mass @ (x - centre) ** 2))
    return _from_cdf((edges[1:] - centre) * stretch / mean + 1.0, np.cumsum(mass), EVERY)


@lru_cache(maxsize=512)
def largest_of(distribution: Distribution, n: int) -> Distribution:
    """Distribution of the largest of n independent draws, in the same unit: no mean of 1."""
    if n == 1 or distribution.std == 0.0:
        return distribution
    x = np.unique(distribution.ppf(np.concatenate([KNOTS, KNOTS ** (1.0 / n)])))
    return _from_cdf(x, distribution.cdf(x) ** n)


def _from_cdf(x: Array, upto: Array, every: int = 1) -> Distribution:
    """Distribution of a cdf at rising x, straight between those that are kept.

    Those are one in `every`, so that a jump stays within as many, and the ones around `KNOTS`.
    """
    near = np.searchsorted(upto, KNOTS)
    kept = np.unique(np.concatenate([np.arange(0, x.size, every), near - 1, near]))
    kept = kept[(kept >= 0) & (kept < x.size)]
    x, q = x[kept], upto[kept]
    first = max(0, int(np.searchsorted(q, TIP, "right")) - 1)
    last = min(x.size - 1, int(np.searchsorted(q, 1.0 - TIP)))
    x, q = x[first : last + 1], q[first : last + 1].copy()
    q[0], q[-1] = 0.0, 1.0
    rising = np.concatenate([[True], np.diff(q) > 0.0])
    return Distribution(
        "empirical", knots_q=tuple(q[rising].tolist()), knots_x=tuple(x[rising].tolist())
    )
