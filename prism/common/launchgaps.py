"""Launch gaps: a device has nothing to run because its host has not issued the next launch yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prism.common.arrays import Array, Index


class LaunchGaps(NamedTuple):
    """Launch gaps of one device, in order, and how long it was idle."""

    # [gap] from the end of all earlier activities to the start of the next one
    begin: Array
    end: Array
    ended_by: Index  # [gap] that activity
    idle: float  # all time between the first start and the last end in which nothing ran


def launch_gaps(start: Array, end: Array, issued: Array) -> LaunchGaps:
    """Find the idle stretches of a device that end with an activity issued after they began.

    Activities on any of its streams; not a number where it is unknown when the host issued one.

    Examples
    --------
    >>> gaps = launch_gaps(np.array([0.0, 5.0, 9.0]), np.array([3.0, 6.0, 10.0]),
    ...                    np.array([-1.0, 4.0, 2.0]))
    >>> gaps.begin.tolist(), gaps.end.tolist(), gaps.idle
    ([3.0], [5.0], 5.0)
    """
    order = np.argsort(start, kind="stable")
    until = np.maximum.accumulate(end[order])[:-1]
    begin, idle = start[order][1:], np.maximum(start[order][1:] - until, 0.0)
    late = np.flatnonzero((idle > 0.0) & (issued[order][1:] > until))
    return LaunchGaps(until[late], begin[late], order[1:][late], float(idle.sum()))
