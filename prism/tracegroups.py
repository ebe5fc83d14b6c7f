"""Who waits for whom in a pipeline trace: meetings of several workers, found from coinciding ends.

A profiler records a collective from the moment a rank arrives, so its duration holds the wait for
the others. Members of one meeting end together; this module finds the sets of workers that do, and
barriers that the trace does not name but that show in workers resuming together. Left out: how
meetings become a graph (`prism.tracegraph`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# Ends of one meeting differ by clock resolution and launch jitter; starts by what is waited for.
COINCIDE_SHARE = 0.1  # of the spread of starts, within which ends coincide
COINCIDE_STEP = 2e-4  # of the step, ends closer than this coincide whatever the starts do
HIDDEN_STEP = 2e-3  # of the step: gaps varying more than this between workers ask for a reason
CLOCK_S = 5e-5  # two clocks, or two launches of one event, differ by less


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
# What a collective of this class joins where the trace does not contradict it.
EXPECTED = {
    "dp_reduce_scatter": STAGE,
    "dp_all_gather": STAGE,
    "dp_all_reduce": STAGE,
    "embedding_all_reduce": REPLICA,
    "world_all_reduce": WORLD,
    "layernorm_all_reduce": WORKER,
}


def spread(times: Array, scope: Scope) -> float:
    """Median over meetings and steps of (latest - earliest) [s]."""
    width = scope.latest(times) - scope.earliest(times)
    return float(np.nanmedian(width)) if np.isfinite(width).any() else 0.0


def coincide(starts: Array, ends: Array, scope: Scope, step_s: float) -> bool:
    """Tell whether the members of each meeting end together, whenever they arrived."""
    tolerance = max(COINCIDE_STEP * step_s, COINCIDE_SHARE * spread(starts, scope))
    return spread(ends, scope) <= tolerance


def find_scope(
    starts: Array, ends: Array, expected: Scope | None, step_s: float
) -> tuple[Scope, bool]:
    """Find who meets in one collective.

    Parameters
    ----------
    starts, ends : float64 [stage, replica, step]
        Recorded times [s]; NaN where a stage has no such op.
    expected : Scope, optional
        What its class says; taken unless the ends contradict it.
    step_s : float
        Mean length of a step [s].

    Returns
    -------
    scope : Scope
    as_expected : bool
        False where the ends had to decide, which is worth a word to the user.
    """
    if expected is not None and coincide(starts, ends, expected, step_s):
        return expected, True
    for scope in (WORLD, STAGE, REPLICA):
        if coincide(starts, ends, scope, step_s) and _transfers(starts, ends, scope):
            return scope, expected is None and scope is not WORKER
    return WORKER, expected in (None, WORKER)


def _transfers(starts: Array, ends: Array, scope: Scope) -> bool:
    """Tell whether what is left after the last arrival is not negative: nobody leaves before."""
    left = ends - scope.latest(starts)
    return bool(np.nanmean(left > -1e-6 - 0.01 * np.abs(np.nanmedian(ends - starts))) > 0.95)


def joint_arrival(arrived: Array, left: Array, step_s: float) -> Array:
    """Count from the last arrival of all in those steps in which all meetings end together.

    Meetings of single replicas that arrive apart and end at one moment waited for one event: what
    the early ones recorded holds the wait for the late one, and is no transfer.

    Parameters
    ----------
    arrived, left : float64 [stage, replica, step]
        Last arrival and end of every replica's meeting [s]; NaN where a stage has no part.
    step_s : float
        Mean length of a step [s].
    """
    apart = np.nanmax(arrived, axis=(0, 1)) - np.nanmin(arrived, axis=(0, 1))
    spread_s = np.nanmax(left, axis=(0, 1)) - np.nanmin(left, axis=(0, 1))
    together = (apart > COINCIDE_STEP * step_s) & (spread_s <= COINCIDE_SHARE * apart)
    return np.where(together, np.nanmax(arrived, axis=(0, 1)), arrived)


class Barrier(NamedTuple):
    """Workers that resume together although the trace names no meeting."""

    scope: Scope
    index: int  # which stage or replica; -1: all


def hidden_barriers(ready: Array, starts: Array, step_s: float) -> list[Barrier]:
    """Find barriers between what workers did last and what they start together.

    Parameters
    ----------
    ready, starts : float64 [stage, replica, step]
        End of each worker's previous op, and start of its next one [s].
    step_s : float
        Mean length of a step [s].

    Returns
    -------
    list of Barrier
        In the order in which they are passed. A barrier must make the time between release and
        start vary less than half as much as without it, for at least half of its members.
    """
    found: list[Barrier] = []
    level = np.array(ready)
    if not np.isfinite(starts).all() or _jitter(starts - ready).max() < HIDDEN_STEP * step_s:
        return found
    for scope, axis in ((STAGE, 0), (REPLICA, 1)):
        for i in range(ready.shape[axis]):
            barrier = Barrier(scope, i)
            released = release(level, barrier)
            who = np.s_[i] if axis == 0 else np.s_[:, i]
            if _explains(level[who], released[who], starts[who], step_s):
                found.append(barrier)
                level = released
    return found


def release(level: Array, barrier: Barrier) -> Array:
    """Times at which workers leave a barrier, [stage, replica, step]; others keep theirs."""
    out = np.array(level)
    if barrier.scope.name == "stage":
        out[barrier.index] = np.fmax.reduce(level[barrier.index], axis=0, keepdims=True)
    elif barrier.scope.name == "replica":
        out[:, barrier.index] = np.fmax.reduce(level[:, barrier.index], axis=0, keepdims=True)
    else:
        out[:] = np.fmax.reduce(level, axis=(0, 1), keepdims=True)
    return out


def _jitter(gap: Array) -> Array:
    """Robust spread of each worker's gap around the median over steps [s]."""
    centre = np.median(gap, axis=-1, keepdims=True)
    return np.asarray(np.median(np.abs(gap - centre), axis=-1) + np.abs(centre[..., 0]))


def _explains(level: Array, released: Array, starts: Array, step_s: float) -> bool:
    """Tell whether starting after the release is far closer than after the own previous op."""
    if level.shape[0] < 2 or float((released - level).mean()) < HIDDEN_STEP * step_s:
        return False
    before, after = _jitter(starts - level), _jitter(np.maximum(starts - released, 0.0))
    early = (starts - released < -COINCIDE_STEP * step_s).mean(axis=-1)
    better = (after < 0.5 * before) & (early < 0.05)
    asked = before > HIDDEN_STEP * step_s
    return bool(asked.sum() > 0 and early.max() < 0.05 and better[asked].mean() >= 0.5)
