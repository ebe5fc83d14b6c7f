"""Steps of a recording without marks: the period in which the same kernels come again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

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
    order = np.argsort(kernel, kind="stable")
    same = kernel[order[1:]] == kernel[order[:-1]]
    distance = (order[1:] - order[:-1])[same]
    counts = np.bincount(kernel)
    # kernels that come seldom come once a step: their distances are the candidates
    seldom = counts[kernel[order[1:]][same]]
    tried: dict[int, float] = {}
    for count in np.unique(seldom)[:64]:
        for lag in np.unique(distance[seldom == count])[-8:].tolist():
            if lag not in tried and 2 * lag <= kernel.size:
                tried[lag] = float((kernel[lag:] == kernel[:-lag]).mean())
    best = max(tried.values(), default=0.0)
    if best < _ALIKE:
        return 0
    return min(lag for lag, alike in tried.items() if alike >= best - 0.01)


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
