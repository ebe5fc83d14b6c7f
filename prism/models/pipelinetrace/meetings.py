"""Who waits for whom in a pipeline trace: by named groups, by class, and barriers without a name.

A profiler records a collective from the moment a rank arrives, so its duration holds the wait for
the others. Workers meet where they leave when the last of them has come: so groups and classes are
checked, and barriers found that the trace does not name.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.means import finite_mean, median
from prism.models.pipelinetrace.times import CLOCK_S, Index
from prism.simulation.tracemodel.graph import REPLICA, STAGE, WORKER, WORLD, Array, Scope

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
    """Tell whether workers leave together, far closer than they came, when the last has come."""
    came, went = (float(median(scope.latest(t) - scope.earliest(t))) for t in (arrived, left))
    return went <= max(CLOCK_S, LESS * came) and nobody_leaves_before(arrived, left, scope)


def last_arrival(arrived: Array, scope: Scope) -> Array:
    """When the last of a meeting came, [stage, replica, step]; NaN where that of one is missing."""
    missing = scope.latest(np.where(np.isnan(arrived), 1.0, 0.0)) > 0.0
    return np.where(missing, np.nan, scope.latest(arrived))


def named_scope(group: Index, expected: Scope | None) -> Scope | None:
    """Which division of workers the numbers of groups [stage, replica] amount to; -1: none."""
    inside = group >= 0
    stage, replica = np.nonzero(inside)
    labels = {WORKER: stage * group.shape[1] + replica, STAGE: stage, REPLICA: replica,
              WORLD: np.zeros_like(stage)}  # fmt: skip
    for scope in sorted(labels, key=lambda s: (s != expected, -len(s.axes()))):
        pairs = set(zip(labels[scope].tolist(), group[inside].tolist(), strict=True))
        if len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) > 0:
            return scope
    return None


class Barrier(NamedTuple):
    """Workers that resume together although the trace names no meeting."""

    scope: Scope  # STAGE or REPLICA
    place: int  # which stage or replica

    def members(self, times: Array) -> NDArray[np.bool_]:
        """Who takes part, [stage, replica, step] of the shape of `times`."""
        return np.asarray(np.indices(times.shape)[int(self.scope == REPLICA)] == self.place)

    def release(self, level: Array) -> Array:
        """Return when workers leave, [stage, replica, step]; others keep their times."""
        inside = self.members(level)
        return np.where(inside, last_arrival(np.where(inside, level, -np.inf), self.scope), level)


def hidden_barriers(ready: Array, starts: Array, step_s: float) -> Iterator[tuple[Barrier, Array]]:
    """Find barriers between what workers did last and what they start together.

    Parameters
    ----------
    ready, starts : float64 [stage, replica, step]
        End of each worker's previous op, and start of its next one [s]; NaN where missing.

    Yields
    ------
    barrier, released : (Barrier, float64 [stage, replica, step])
        And when everyone has left it and those before.
    """
    n_stages, n_replicas = ready.shape[:2] if ready.shape[2] >= FEW else (0, 0)
    level = np.where(np.isfinite(starts), ready, np.nan)
    candidates = [Barrier(STAGE, s) for s in range(n_stages)]
    for barrier in candidates + [Barrier(REPLICA, r) for r in range(n_replicas)]:
        released = barrier.release(level)
        arrived, left = (np.where(barrier.members(t), t, np.nan) for t in (level, starts))
        wait = float(np.nan_to_num(finite_mean(released - arrived)))
        if wait > HIDDEN_STEP * step_s and coincide(arrived, left, barrier.scope):
            level = released
            yield barrier, released
