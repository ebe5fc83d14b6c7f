"""Who waits for whom in a pipeline trace: meetings of several workers, found from coinciding ends.

A profiler records a collective from the moment a rank arrives, so its duration holds the wait for
the others. Members of one meeting end together; this module finds the sets of workers that do, and
barriers that the trace does not name but that show in workers resuming together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.simulation.tracemodel.graph import (
    REPLICA,
    STAGE,
    WORKER,
    WORLD,
    Array,
    Scope,
    mean,
    median,
)

# Ends of one meeting differ by clock resolution and launch jitter; starts by what is waited for.
COINCIDE_SHARE = 0.1  # of the spread of starts, within which ends coincide
COINCIDE_STEP = 2e-4  # of the step, ends closer than this coincide whatever the starts do
HIDDEN_STEP = 2e-3  # of the step: gaps varying more than this between workers ask for a reason
CLOCK_S = 5e-5  # two clocks, or two launches of one event, differ by less
FEW = 5  # steps below which workers may resume, or meetings end, together by chance
ALWAYS = 0.9  # of the steps: what holds in this share is how the job works
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
    return float(median(width)) if np.isfinite(width).any() else 0.0


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
    """
    if expected is not None and coincide(starts, ends, expected, step_s):
        if expected in (WORKER, WORLD):
            return expected, True
        together = _together(expected.latest(starts), expected.earliest(ends), step_s)
        always = bool(together.mean() >= ALWAYS)
        if not always or together.size < FEW:
            return expected, not always
    for scope in (WORLD, STAGE, REPLICA):
        if coincide(starts, ends, scope, step_s) and stays(starts, ends, scope):
            return scope, scope == expected
    return WORKER, expected in (None, WORKER)


def stays(starts: Array, ends: Array, scope: Scope) -> bool:
    """Tell whether what is left after the last arrival is not negative: nobody leaves before."""
    left = (ends - scope.latest(starts))[np.isfinite(ends - starts)]
    least = -1e-6 - 0.01 * np.abs(median(ends - starts))
    return bool(left.size and np.mean(left > least) > 0.95)


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


def _together(arrived: Array, left: Array, step_s: float) -> NDArray[np.bool_]:
    """Tell in which steps meetings that arrive apart end at one moment, [step]."""
    apart = np.fmax.reduce(arrived, axis=(0, 1)) - np.fmin.reduce(arrived, axis=(0, 1))
    ends = np.fmax.reduce(left, axis=(0, 1)) - np.fmin.reduce(left, axis=(0, 1))
    return np.asarray((apart > COINCIDE_STEP * step_s) & (ends <= COINCIDE_SHARE * apart))


class Barrier(NamedTuple):
    """Workers that resume together although the trace names no meeting."""

    scope: Scope
    place: int  # which stage or replica; -1: all


def hidden_barriers(ready: Array, starts: Array, step_s: float) -> list[Barrier]:
    """Find barriers between what workers did last and what they start together.

    Parameters
    ----------
    ready, starts : float64 [stage, replica, step]
        End of each worker's previous op, and start of its next one [s]; NaN where missing.
    """
    known = np.isfinite(ready) & np.isfinite(starts)
    if known.sum(axis=-1).min() < FEW:
        return []
    level, starts = np.where(known, ready, np.nan), np.where(known, starts, np.nan)
    if np.max(_jitter(starts - level)) < HIDDEN_STEP * step_s:
        return []
    if min(ready.shape[:2]) > 1:
        everyone = Barrier(WORLD, -1)
        flat = (-1, ready.shape[-1])
        if _explains(
            level.reshape(flat),
            release(level, everyone).reshape(flat),
            starts.reshape(flat),
            step_s,
        ):
            return [everyone]
    found: list[Barrier] = []
    for scope, axis in ((STAGE, 0), (REPLICA, 1)):
        for i in range(ready.shape[axis]):
            barrier = Barrier(scope, i)
            released = release(level, barrier)
            who = np.s_[i] if axis == 0 else np.s_[:, i]
            if _explains(level[who], released[who], starts[who], step_s):
                found.append(barrier)
                level = released
    return _merged(found, ready.shape[1])


def _merged(found: Sequence[Barrier], n_replicas: int) -> list[Barrier]:
    """Make barriers of every single replica one of all."""
    alone = [b for b in found if b.scope == REPLICA]
    if len(alone) < n_replicas:
        return list(found)
    return [*(b for b in found if b.scope != REPLICA), Barrier(REPLICA, -1)]


def release(level: Array, barrier: Barrier) -> Array:
    """Return when workers leave a barrier, [stage, replica, step]; others keep their times."""
    if barrier.place < 0:
        return np.array(barrier.scope.latest(level))
    out = np.array(level)
    if barrier.scope == STAGE:
        out[barrier.place] = np.fmax.reduce(level[barrier.place], axis=0, keepdims=True)
    else:
        out[:, barrier.place] = np.fmax.reduce(level[:, barrier.place], axis=0, keepdims=True)
    return out


def _jitter(gap: Array) -> Array:
    """Robust spread of each worker's gap around the median over steps [s]."""
    centre = median(gap, axis=-1, keepdims=True)
    return np.asarray(median(np.abs(gap - centre), axis=-1) + np.abs(centre[..., 0]))


def _explains(level: Array, released: Array, starts: Array, step_s: float) -> bool:
    """Tell whether starting after the release is far closer than after the own previous op."""
    if level.shape[0] < 2 or float(mean(released - level)) < HIDDEN_STEP * step_s:
        return False
    before, after = _jitter(starts - level), _jitter(np.maximum(starts - released, 0.0))
    early = (starts - released < -COINCIDE_STEP * step_s).mean(axis=-1)
    better = (after < 0.5 * before) & (early < 0.05)
    asked = before > HIDDEN_STEP * step_s
    return bool(asked.sum() > 0 and early.max() < 0.05 and better[asked].mean() >= 0.5)
