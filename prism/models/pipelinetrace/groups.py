"""Who waits for whom in a pipeline trace: by named groups, by class, by one test of coincidence.

A profiler records a collective from the moment a rank arrives, so its duration holds the wait for
the others. Workers meet where they leave when the last of them has come: so groups and classes are
checked, meetings of unknown class found, and barriers that the trace does not name.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.means import finite_mean, median
from prism.simulation.tracemodel.graph import (
    REPLICA,
    STAGE,
    WORKER,
    WORLD,
    Array,
    Scope,
)

CLOCK_S = 5e-5  # two clocks, or two launches of one event, differ by less
# of the step: shorter unexplained waits are less than what a model's mean is wrong by (0.04 to
# 1.4 % on three production jobs)
HIDDEN_STEP = 2e-3
# With these, 99 % of barriers are found in made-up jobs with gaps of four kinds, and one where
# there is none in at most 5 % (experiments/verification/coincidence.py).
FEW = 5  # steps below which no barrier is looked for: in traces of two, one of 45 had a false one
EXCEPTIONS = 0.05  # share of cases that lost rows and clocks may make exceptions
LESS = 0.5  # of how far apart workers came, within which they leave together
# What a collective of this class joins where the trace does not contradict it.
EXPECTED = {
    "dp_reduce_scatter": STAGE,
    "dp_all_gather": STAGE,
    "dp_all_reduce": STAGE,
    "embedding_all_reduce": REPLICA,
    "world_all_reduce": WORLD,
    "layernorm_all_reduce": WORKER,
}


def nobody_leaves_before(arrived: Array, left: Array, scope: Scope) -> bool:
    """Tell whether nobody leaves a meeting before the last has come.

    Parameters
    ----------
    arrived, left : float64 [stage, replica, step]
        When each worker came and left [s]; NaN: no part in it.
    """
    own = left - arrived
    after = (left - scope.latest(arrived))[np.isfinite(own)]
    slack = CLOCK_S + 0.01 * float(np.abs(median(own)))
    return bool(after.size and np.mean(after < -slack) <= EXCEPTIONS)


def coincide(arrived: Array, left: Array, scope: Scope) -> bool:
    """Tell whether workers leave together, far closer than they came, when the last has come.

    Parameters as in `nobody_leaves_before`.
    """
    came, went = (
        float(median(scope.latest(times) - scope.earliest(times))) for times in (arrived, left)
    )
    together = went <= max(CLOCK_S, LESS * came)
    return together and nobody_leaves_before(arrived, left, scope)


def named_scope(group: NDArray[np.int64], expected: Scope | None) -> Scope | None:
    """Which division of workers the names of groups amount to.

    Parameters
    ----------
    group : int64 [stage, replica]
        Number of the group a worker is in; -1: not in the meeting, or unnamed.
    """
    inside = group >= 0
    if not inside.any():
        return None
    workers = np.arange(group.size).reshape(group.shape)
    at = np.indices(group.shape)
    labels = {WORKER: workers, STAGE: at[0], REPLICA: at[1], WORLD: np.zeros_like(workers)}
    order = sorted(labels, key=lambda scope: (scope != expected, -len(scope.axes())))
    for scope in order:
        pairs = set(zip(labels[scope][inside].tolist(), group[inside].tolist(), strict=True))
        if len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}):
            return scope
    return None


class Barrier(NamedTuple):
    """Workers that resume together although the trace names no meeting."""

    scope: Scope
    place: int  # which stage or replica; -1: all

    def members(self, times: Array) -> NDArray[np.bool_]:
        """Who takes part, [stage, replica, step] of the shape of `times`."""
        axis = 0 if self.scope == STAGE else 1
        return np.asarray((self.place < 0) | (np.indices(times.shape)[axis] == self.place))


def hidden_barriers(ready: Array, starts: Array, step_s: float) -> list[Barrier]:
    """Find barriers between what workers did last and what they start together.

    Parameters
    ----------
    ready, starts : float64 [stage, replica, step]
        End of each worker's previous op, and start of its next one [s]; NaN where missing.
    """
    found: list[Barrier] = []
    n_stages, n_replicas, n_steps = ready.shape
    candidates = [Barrier(WORLD, -1)] if min(n_stages, n_replicas) > 1 else []
    candidates += [Barrier(STAGE, s) for s in range(n_stages)]
    candidates += [Barrier(REPLICA, r) for r in range(n_replicas)]
    level = np.where(np.isfinite(starts), ready, np.nan)
    for barrier in candidates:
        released = release(level, barrier)
        arrived, left = (np.where(barrier.members(t), t, np.nan) for t in (level, starts))
        wait = float(np.nan_to_num(finite_mean(released - arrived)))
        if wait > HIDDEN_STEP * step_s and coincide(arrived, left, barrier.scope):
            found.append(barrier)
            level = released
    return found if n_steps >= FEW else []


def release(level: Array, barrier: Barrier) -> Array:
    """Return when workers leave a barrier, [stage, replica, step]; others keep their times."""
    inside = barrier.members(level)
    latest = barrier.scope.latest(np.where(inside, level, np.nan))
    return np.where(inside, latest, level)
