"""What repeated measurements say of each unit (a GPU or a node), apart from their own noise.

The logarithm of a measurement is the unit's own level plus noise. Noise is what repeats of one unit
differ by; without repeats, all that the bulk of the units differ by. Most units' levels are normal
about a common one, a few are slower by an amount that is exponential. What is returned is the mean
of a unit's level given all this, so that noise is shrunk away, and the probability that it is one
of the few.

Left out: noise that a unit's repeats share (all of them on a hot day), and slowness that most of
the units have.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

Array = NDArray[np.float64]
Int = NDArray[np.int64]

SLOW_SHARE = 0.01  # of 392 V100 without a burn-in: `uncurated` in experiments/library
SLOW_MEAN = 0.07  # by which the slow ones of the same data exceed the median, logarithm
LIKELY = 0.5  # probability from which on a unit counts as slow; false alarms: shrinkage.py there
OUTLIER = 3.0  # standard deviations from the median of its unit from which on a repeat is left out
_NORMAL = 1.4826  # standard deviation over the median of absolute values, of normal numbers
_MOST_REPEATS, _MOST_UNITS = 32, 1024  # that are compared pair by pair
_LEAST_SD = 1e-9  # of measurements that are all alike


class Levels(NamedTuple):
    """Levels of units: arrays are [unit]; logarithms, the common level being 0."""

    level: Array
    p_slow: Array
    noise: float
    """Standard deviation of one measurement."""
    spread: float
    """Standard deviation of the levels of the bulk."""
    repeated: bool
    """Whether the noise is that of repeats."""


def separate(values: Array, unit: Int, gpus: int = 1) -> Levels:
    """Separate what units are from how noisy they were measured.

    `values` are logarithms [measurement], `unit` the number of each one's unit, from 0, and `gpus`
    those of a unit, each of which may be the slow one.
    """
    order = np.argsort(unit, kind="stable")
    groups = np.split(values[order], np.cumsum(np.bincount(unit))[:-1])
    noise, repeated = _sd_of_pairs(groups, _MOST_REPEATS), True
    centre, count = np.array([_centre(group, noise) for group in groups]).T
    found = centre - np.median(centre)
    total = _sd_of_pairs([found], _MOST_UNITS) or 0.0
    if noise is None:
        noise, repeated = total, False
    variance = np.maximum(noise, _LEAST_SD) ** 2 / count
    spread = sqrt(max(0.0, total**2 - float(np.median(variance)))) if repeated else 0.0
    share = 1.0 - (1.0 - SLOW_SHARE) ** gpus
    return Levels(*_posterior(found, variance, spread, share), noise, spread, repeated)


def _sd_of_pairs(groups: list[Array], most: int) -> float | None:
    """Return the standard deviation inside groups, by the median difference of pairs; None of none.

    Of normal numbers, up to 29 % of which may be far off: Shamos, "Geometry and statistics:
    problems at the interface", in Algorithms and Complexity, Academic Press, 1976.
    """
    apart = []
    for group in groups:
        few = group[np.linspace(0, group.size - 1, min(group.size, most)).astype(int)]
        i, j = np.triu_indices(few.size, 1)
        apart.append(few[i] - few[j])
    differences = np.concatenate(apart)
    return _NORMAL * float(np.median(np.abs(differences))) / sqrt(2.0) if differences.size else None


def _centre(group: Array, noise: float | None) -> tuple[float, int]:
    """Mean of a unit's measurements without those far off, and how many they are."""
    middle = float(np.median(group))
    near = group[np.abs(group - middle) <= OUTLIER * (noise or 0.0)]
    return (float(near.mean()), near.size) if near.size else (middle, 1)


def _posterior(found: Array, variance: Array, spread: float, share: float) -> tuple[Array, Array]:
    """Mean of the level, and the probability of being slow [unit].

    A slow unit's excess, exponential, is a normal number cut off at 0 once the measurement is
    known; the rest of what was found is shared between the bulk's spread and the noise.
    """
    sd = np.sqrt(variance + spread**2)
    mean = found - sd**2 / SLOW_MEAN
    log_tail = log_ndtr(mean / sd)
    bulk = -0.5 * (found / sd) ** 2 - np.log(sd * sqrt(2.0 * pi))
    slow = 0.5 * (sd / SLOW_MEAN) ** 2 - found / SLOW_MEAN + log_tail - np.log(SLOW_MEAN)
    odds = slow - bulk + np.log(share / (1.0 - share))
    p_slow = 1.0 / (1.0 + np.exp(np.clip(-odds, -700.0, 700.0)))
    density = np.exp(-0.5 * (mean / sd) ** 2 - log_tail) / sqrt(2.0 * pi)
    excess = p_slow * (mean + sd * density)
    kept = spread**2 / sd**2
    return kept * found + (1.0 - kept) * excess, p_slow
