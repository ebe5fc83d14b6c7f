"""Steps of a recording without marks: the period in which the same kernels come again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.fft import fft, ifft, next_fast_len

Ints = NDArray[np.int64]

_TRIED = 100  # distances that are looked at more closely

_ALIKE = 0.9
"""Share of the activities that are the same one period later; of made-up jobs whose steps differ in
one of twenty kernels .95, of layers taken for steps at most .8."""


def ends_of_steps(kernel: Ints, optimizer: NDArray[np.bool_]) -> Ints:
    """Find the last activity of every step in the order of launch; empty where nothing repeats.

    Parameters
    ----------
    kernel : array of int
        [activity] which kernel it is, from 0.
    optimizer : array of bool
        [activity] whether it belongs to an optimizer: a step ends after the last of these.
    """
    period = _period(kernel)
    rows = np.flatnonzero(optimizer)
    # shorter stretches lie between the parts of one optimizer's work
    ends = rows[np.r_[np.diff(rows) > period // 2, True]] if rows.size else rows
    if not period or ends.size > 1:
        return ends if period else rows[:0]
    return _once_a_period(kernel, period)


def _period(kernel: Ints) -> int:
    """Find the shortest distance at which nearly all activities are the same; 0: none."""
    if kernel.max(initial=0) == 0:
        return 0
    half = kernel.size // 2
    # a direction by chance for each kernel: their autocorrelation is the share that is the same
    directions = np.random.default_rng(0).uniform(0.0, 2.0 * np.pi, kernel.max(initial=0) + 1)
    spectrum = fft(np.exp(1j * directions[kernel]), next_fast_len(2 * kernel.size))
    alike = ifft(np.abs(spectrum) ** 2).real[1 : half + 1] / (kernel.size - np.arange(1, half + 1))
    near = np.flatnonzero(alike > alike.max(initial=0.0) - 0.05)[:_TRIED] + 1
    share = np.array([(kernel[lag:] == kernel[:-lag]).mean() for lag in near.tolist()])
    if share.max(initial=0.0) < _ALIKE:
        return 0
    return int(near[np.argmax(share >= share.max() - 0.01)])


def _once_a_period(kernel: Ints, period: int) -> Ints:
    """Activities before the kernel that comes most evenly once a period."""
    counts = np.bincount(kernel)
    evenly: dict[float, Ints] = {}
    for k in np.flatnonzero(np.abs(counts - kernel.size / period) <= 1.0):
        rows = np.flatnonzero(kernel == k)
        if rows.size > 1:
            evenly.setdefault(float(np.abs(np.diff(rows) - period).max()), rows)
    rows = evenly[min(evenly)] if evenly else np.zeros(0, np.int64)
    return rows[rows > 0] - 1
