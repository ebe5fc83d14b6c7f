"""What a run has done for good, and what it would lose: seconds by term, between checkpoints.

Work counts once it is on a checkpoint. A blocking checkpoint is there when its step ends; one
written in the background only some time later, until when the one before it counts.
"""

import numpy as np
from numpy.typing import NDArray

from prism.simulation.runs.parts import Array, Checkpoints


class Ledger:
    """Seconds by term and steps of many runs, saved and not; all is lost without checkpoints."""

    def __init__(self, n_terms: int, n_runs: int, checkpoints: Checkpoints | None) -> None:
        self.checkpoints = checkpoints
        self.done = np.zeros(n_runs)  # steps
        # seconds before the last checkpoint but one, between the last two, and since the last
        self.saved, self.older, self.newer = (np.zeros((n_terms, n_runs)) for _ in range(3))
        self.durable, self.newest = np.zeros(n_runs), np.zeros(n_runs)  # steps of the last two

    def keep(self, n: Array, seconds: Array) -> None:
        """Book n steps [run] and their seconds [term, run], shared out evenly over the steps."""
        before, self.done = self.done, self.done + n
        if self.checkpoints is None:
            self.newer += seconds
            return
        interval = self.checkpoints.interval_steps
        number = np.floor(self.done / interval)
        last, crossed = number * interval, number - np.floor(before / interval)
        one, more, share = crossed == 1, crossed > 1, 1.0 / np.maximum(n, 1.0)
        tail = np.where(crossed > 0, (self.done - last) * share, 1.0)
        body = np.where(more, interval * share, 1.0 - tail)
        head = np.maximum(0.0, 1.0 - body - tail)
        self.saved += np.where(crossed > 0, self.older, 0.0)
        self.saved += np.where(more, self.newer + head * seconds, 0.0)
        between = np.where(one, self.newer, 0.0) + body * seconds
        self.older = np.where(crossed > 0, between, self.older)
        self.newer = np.where(crossed > 0, 0.0, self.newer) + tail * seconds
        self.durable = np.where(more, last - interval, np.where(one, self.newest, self.durable))
        self.newest = np.where(crossed > 0, last, self.newest)

    def roll_back(self, stop: NDArray[np.bool_], over: Array) -> Array:
        """Send runs back to their last checkpoint; return the seconds they lose [run].

        They lose those over the last whole step, too.
        """
        c, lost = self.checkpoints, self.newer.sum(axis=0) + over
        fresh = stop.copy()
        if c is not None and not c.blocking:
            fresh &= lost >= c.write_s  # else the last checkpoint is still being written
        stale = stop & ~fresh
        self.saved += np.where(fresh, self.older, 0.0)
        lost = np.where(stop, lost, 0.0) + np.where(stale, self.older.sum(axis=0), 0.0)
        self.older, self.newer = (np.where(stop, 0.0, x) for x in (self.older, self.newer))
        self.done = np.where(fresh, self.newest, np.where(stale, self.durable, self.done))
        self.durable = np.where(stop, self.done, self.durable)
        self.newest = np.where(stop, self.done, self.newest)
        return np.asarray(lost)

    def close(self) -> Array:
        """Return the seconds of every term [term, run] at the end of the runs."""
        return np.asarray(self.saved + self.older + self.newer)
