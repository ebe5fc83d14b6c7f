"""Interruptions: when a run fails, and how long it stands still.

Failures are a Poisson process in time. After one: detection, waiting for a spare node where the
cause takes a node out, restart; a failure meanwhile starts all of that again. A failed node is a
spare again when it is repaired.
"""

import numpy as np
from numpy.typing import NDArray

from prism.simulation.runs.parts import Array, Index, Interruptions

_NONE = Interruptions(0.0, 0)  # nothing fails, and a planned replacement takes no time


class Outages:
    """Clocks of failures and stocks of spares of many runs."""

    def __init__(self, fail: Interruptions | None, n_runs: int, rng: np.random.Generator) -> None:
        fail = fail or _NONE
        self.rng, self.rate, self.repair_s = rng, fail.rate_per_s, fail.repair_s
        self.restart_s, kinds = fail.restart_s, fail.kinds
        self.share = np.cumsum([k.share for k in kinds])
        self.share /= self.share[-1]
        times = [(k.detection_s, k.restart_s, k.replaces) for k in kinds]
        self.times = np.array(times, float).reshape(-1, 3).T
        # [run, spare] when each is there
        self.pool = None if fail.spares is None else np.zeros((n_runs, fail.spares))
        self.clock = waiting_times(rng, np.full(n_runs, self.rate))  # of each run's next failure
        self.failures = np.zeros(n_runs, np.int64)

    def restart(
        self, runs: Index, failed: NDArray[np.bool_], at: Array
    ) -> tuple[Array, Array, Index]:
        """Let runs stand still from a time on, failed or to replace a node that was found slow.

        Returns when they go on [s], the seconds of it without a spare, and the run of each node
        that was replaced.
        """
        ready, waited, failed = at.copy(), np.zeros(runs.size), failed.copy()
        renewed, again = [], np.arange(runs.size)
        while again.size:
            who, own = runs[again], failed[again]
            self.failures[who] += own
            detection, restart, replaces = self._kinds(own)
            following = ready[again] + waiting_times(self.rng, np.full(again.size, self.rate))
            self.clock[who] = np.where(own, following, self.clock[who])
            found = ready[again] + detection
            wait = np.where(replaces, self._take_spare(who, found, replaces), 0.0)
            renewed.append(who[replaces])
            end = found + wait + restart
            struck = self.clock[who] < end
            end = np.where(struck, np.maximum(self.clock[who], ready[again]), end)
            waited[again] += np.minimum(np.maximum(end - found, 0.0), wait)
            ready[again] = end
            failed[again] = struck
            again = again[struck]
        return ready, waited, np.concatenate([np.empty(0, np.int64), *renewed])

    def _kinds(self, failed: NDArray[np.bool_]) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Draw causes: detection and restart [s], and whether a node is replaced."""
        n = failed.size
        if self.rate == 0.0:
            return np.zeros(n), np.full(n, self.restart_s), np.ones(n, bool)
        kind = np.searchsorted(self.share, self.rng.random(n), side="right")
        detection, restart, replaces = (x[kind] for x in self.times)
        return (
            np.where(failed, detection, 0.0),
            np.where(failed, restart, self.restart_s),
            ~failed | (replaces > 0.0),
        )

    def _take_spare(self, runs: Index, at: Array, replaces: NDArray[np.bool_]) -> Array:
        """Seconds until a spare is there; the failed node becomes one when it is repaired."""
        if self.pool is None:
            return np.zeros(runs.size)
        repaired = at + self.rng.standard_exponential(runs.size) * self.repair_s
        held = np.column_stack([self.pool[runs], repaired])
        first, rows = held.argmin(axis=1), np.arange(runs.size)
        wait = np.maximum(0.0, held[rows, first] - at)
        held[rows, first] = held[:, -1]
        self.pool[runs[replaces]] = held[replaces, :-1]
        return np.asarray(wait)


def waiting_times(rng: np.random.Generator, rate: Array) -> Array:
    """Draw exponential waiting times [s]; never where the rate [1/s] is 0."""
    z = rng.standard_exponential(rate.size)
    return np.asarray(np.divide(z, rate, out=np.full(rate.size, np.inf), where=rate > 0.0))
