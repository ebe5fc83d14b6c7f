"""Blocks of which some replicas are simulated: the slowest, and a sample of the others.

The step also waits for the slowest of those that are left out, drawn from the distribution that
`Sample` holds. A job that leaves none out never compiles this.
"""

import math

import numpy as np

from prism.engine.arrays import (
    COEF,
    DRAW,
    EXPORT,
    KIND,
    LANES,
    NEVER,
    OUT,
    PRED0,
    PRED1,
    RANK,
    RESIDUAL,
    UNSEEN,
    Array,
    Keys,
    Sample,
    Sampled,
    Step,
)
from prism.engine.blocks import draw_clusters, new_block, new_work, room_for_coefs
from prism.engine.cache import inner, jit
from prism.engine.effects import SHARED, fill_bank
from prism.engine.lowering import lower_replicas, room_to_lower
from prism.engine.random import philox_lanes
from prism.engine.step import run_blocks, run_phase, start_block

BINS = 64  # of like replicas among those that are not simulated


@jit
def _find_tails(index, walk, shared, keys, block, work, coef_a, coef_r, exports):
    """Fill work.tail: the time from every export that the last phase reads to the step's end."""
    graph, lane0 = walk.graph, index * LANES
    start_block(walk, shared, keys, lane0, block, work)
    of_all, zero = np.int64(SHARED), np.int64(0)  # literals would compile every callee once more
    fill_bank(shared, walk.tables, keys.stream, lane0, block, of_all, zero, work.vectors[0])
    first = graph.n_state * graph.n_slots
    last, one = graph.phase_global.shape[0] - 1, np.int64(1)
    final = first - graph.n_slots + graph.final_slot
    for i in range(exports.shape[0]):
        for lane in range(LANES):
            work.state[0, lane] = NEVER
            for row in range(first, work.state.shape[0]):
                work.state[row, lane] = NEVER
            work.state[first + exports[i], lane] = np.float32(0.0)
        run_phase(walk, work, coef_a, coef_r, keys, lane0, last, (zero, one), zero, zero)
        for lane in range(LANES):
            work.tail[exports[i], lane] = work.state[final, lane]


@inner
def _group_times(low, sample, x, replica, stage, scratch):
    """Mean seconds of every segment of a group, about: the last of the scratch arrays.

    The slowest member, and what the residuals of members that are nearly as slow add: as if they
    followed Gumbel's distribution, whose maximum is a sum of exponentials.
    """
    speed, slow, seconds = scratch  # [member], [loading], [segment]
    cv, share = sample.group_cv, sample.loading_share
    n, top = low.member.shape[2], 0
    for m in range(n):
        y = 0.0
        for j in range(slow.shape[0]):
            y += share[j] * x[j, low.member[replica, stage, m]]
        speed[m] = y
        if y > speed[top]:
            top = m
    for j in range(slow.shape[0]):
        slow[j] = x[j, low.member[replica, stage, top]]
    more = 0.0
    if n > 1 and cv > 0.0:
        scale = cv * sample.softness * speed[top]
        total = 0.0
        for m in range(n):
            total += math.exp((speed[m] - speed[top]) / scale)
        more = math.log(total) * sample.softness
    for s in range(seconds.shape[0]):
        seconds[s] = 0.0
        for j in range(slow.shape[0]):
            seconds[s] += low.seg_mean[s, j] * slow[j]
        seconds[s] *= 1.0 + more * low.seg_cv[s]


@inner
def _nominal_times(low, sample, x, first, last, scratch, a):
    """Seconds a[coef, lane] of the local ops of some replicas without noise, one to a lane."""
    n_terms, seconds = low.call_cv.shape[1], scratch[2]
    for r in range(first, last):
        row, stage = r % low.fixed_mean.shape[0], -1
        for i in range(sample.coef.shape[0]):
            c = sample.coef[i]
            if low.coef_stage[c] >= 0 and low.coef_stage[c] != stage:
                stage = low.coef_stage[c]
                _group_times(low, sample, x, r, stage, scratch)
            total = 0.0
            for t in range(n_terms):
                total += low.fixed_mean[row, c, t]
            for e in range(low.coef_seg_ptr[c], low.coef_seg_ptr[c + 1]):
                total += low.coef_count[e] * low.quiet[c] * seconds[low.coef_seg[e]]
            a[c, r - first] = total


@inner
def _level_lanes(ops, graph, tail, a, state, level):
    """End of the step of one replica a lane, without noise and by itself: level[lane]."""
    level[:], state[:] = 0.0, 0.0
    for phase in range(graph.phase_global.shape[0]):
        if graph.phase_global[phase] == 1:
            continue
        for op in range(graph.phase_lo[phase], graph.phase_hi[phase]):
            pa, pb, po, c = ops[op, PRED0], ops[op, PRED1], ops[op, OUT], ops[op, COEF]
            if pa >= graph.n_slots:  # of ops of all replicas: they are waited for by all alike
                pa = 0
            if pb >= graph.n_slots:
                pb = 0
            if ops[op, KIND] == EXPORT:
                after = tail[po - graph.n_slots]
                for lane in range(LANES):
                    level[lane] = max(level[lane], state[pa, lane] + after)
                continue
            for lane in range(LANES):
                p, q = state[pa, lane], state[pb, lane]
                start = p if p > q else q
                state[po, lane] = start + (a[c, lane] if ops[op, KIND] == DRAW else np.float32(0.0))


@jit
def _find_levels(walk, low, sample, x, scratch, a, state, level):
    """Find every replica's persistent speed: its own step without noise, level[replica] [s].

    There is room for `_group_times`, for a[coef, lane] of zeros and state[slot and 1, lane].
    """
    n, lanes = level.shape[0], state[walk.graph.n_slots]
    for first in range(0, n, LANES):
        last = min(n, first + LANES)
        _nominal_times(low, sample, x, first, last, scratch, a)
        _level_lanes(walk.ops, walk.graph, sample.tail, a, state, lanes)
        for r in range(first, last):
            level[r] = lanes[r - first]


def _choose_replicas(sample: Sample, level: Array, index: int, key: Array) -> tuple[Array, Array]:
    """Choose replicas to be simulated: replica 0, the slowest, and one of every stratum of others.

    Returns
    -------
    chosen : int64 [row]
        In rising order, the typical replica (n_replicas) last.
    weight : float32 [row]
        Number of replicas that each of them stands for.
    """
    n, n_top, n_bulk = level.size, sample.n_top, sample.n_bulk
    order = np.argsort(-level, kind="stable")
    order = order[order != 0]
    rest = n - 1 - n_top
    words, count = np.empty((4, -(-n_bulk // LANES) * LANES), np.uint32), np.zeros(n + 1)
    philox_lanes(index, 1, 0, UNSEEN, key, words)
    strata = np.arange(n_bulk + 1) * rest // max(1, n_bulk)
    size = np.diff(strata)
    pick = strata[:-1] + (size * (words[0, :n_bulk] / 4294967296.0)).astype(np.int64)
    count[0], count[order[:n_top]], count[order[n_top + pick]] = 1.0, 1.0, size
    chosen = np.append(np.flatnonzero(count), n)
    return chosen, count[chosen].astype(np.float32)


@inner
def _log_below(sample, mean, std, at):
    """Log of the probability that a replica's own noise keeps it below `at`."""
    table = sample.log_cdf
    t = ((at - mean) / std - sample.first) / sample.width
    if t <= 0.0:
        return table[0] + t  # far below: falls steeply, so that a search goes on
    i = np.int64(t)
    if i >= table.shape[0] - 1:
        return 0.0
    return table[i] + (t - i) * (table[i + 1] - table[i])


def unseen_bins(sample: Sample, level: Array, chosen: Array) -> tuple[Array, Array, Array]:
    """Gather the replicas that are not simulated into bins of like mean and spread.

    Returns
    -------
    mean, std : float64 [bin]
        Over the typical replica's time [1].
    count : float64 [bin]
        Replicas in it.
    """
    rest = np.delete(level, chosen[:-1]).astype(np.float64)
    if rest.size == 0:
        return rest, rest, rest
    low, width = rest.min(), np.ptp(rest)
    place = (BINS * (rest - low) / (width or 1.0)).astype(np.int64).clip(max=BINS - 1)
    count = np.bincount(place).astype(np.float64)
    at = np.bincount(place, rest)[count > 0.0] / count[count > 0.0]
    mean, std = (np.interp(at, sample.knot, of) for of in (sample.mean, sample.std))
    return mean, std, count[count > 0.0]


@jit
def unseen_slowest(sample, mean, std, count, u):
    """Quantile u of the slowest replica that is not simulated, over the typical one's time [1]."""
    lo, hi, target = np.inf, -np.inf, math.log(u)
    end = sample.first + sample.width * (sample.log_cdf.shape[0] - 1)
    for i in range(count.shape[0]):
        lo = min(lo, mean[i] + sample.first * std[i])
        hi = max(hi, mean[i] + end * std[i])
    for _ in range(32):
        middle, total = 0.5 * (lo + hi), 0.0
        for i in range(count.shape[0]):
            total += count[i] * _log_below(sample, mean[i], std[i], middle)
        if total < target:
            lo = middle
        else:
            hi = middle
    return 0.5 * (lo + hi)


def _add_unseen(
    sample: Sample, key: Array, index: int, told: Sampled, time: Array, path: Array
) -> None:
    """Let the step wait for the slowest of the replicas that were not simulated, too."""
    bins = unseen_bins(sample, told.level, told.chosen)
    if bins[0].size == 0:
        return
    words = np.empty((4, LANES), np.uint32)
    philox_lanes(0, 0, index * LANES, UNSEEN, key, words)
    u = (words[0] + 0.5) / 4294967296.0
    ratio = np.array([unseen_slowest(sample, *bins, value) for value in u])
    after, typical = told.after, told.own[-1]
    end = (after + (typical - after) * ratio).astype(np.float32)
    later = end > time
    path[:, later] *= end[later] / time[later]
    time[later] = end[later]


def run_sampled(
    first: int, keys: Keys, step: Step, sample: Sample, out: tuple[Array, ...]
) -> Sampled:
    """`run_range` where only some replicas are simulated; returns what each block tells of them.

    That is `Sampled`, its arrays with the block as their first axis.
    """
    n, n_rows, graph = len(out[0]), sample.n_rows, step.graph
    told = Sampled(
        np.empty((n, graph.n_replicas), np.float32), np.empty((n, n_rows), np.int64),
        np.empty((n, n_rows, LANES), np.float32), np.empty((n, LANES), np.float32),
    )  # fmt: skip
    work = new_work(step, keys, np.zeros(n_rows, np.int64), graph.n_global_slots)
    coef_a, coef_r = room_for_coefs(step.low, 1, n_rows)
    coef_a[0, -1] = sample.typical
    walk, shared, block, room = step.walk(), step.shared(), new_block(step), room_to_lower(step.low)
    segments, n_members = step.low.seg_mean, step.low.member.shape[2]
    scratch = np.empty(n_members), np.empty(segments.shape[1]), np.empty(max(1, len(segments)))
    a = np.zeros((step.low.call_cv.shape[0], LANES), np.float32)
    state = np.empty((graph.n_slots + 1, LANES), np.float32)
    for i in range(n):
        x = draw_clusters(step.ranks, step.tables, first + i, 1, keys.stream[RANK])
        one = Sampled(*(values[i] for values in told))
        part = tuple(values[i : i + 1] for values in out)
        _find_levels(walk, step.low, sample, x[0], scratch, a, state, one.level)
        found = _choose_replicas(sample, one.level, first + i, keys.stream[RANK])
        work.chosen[:], work.weight[:] = found
        work.own[:], work.after[:] = 0.0, 0.0
        lower_replicas(step.low, x, work.chosen[:-1], room, coef_a[:, :-1], coef_r[:, :-1])
        args = first + i, walk, shared, keys, block, work
        _find_tails(*args, coef_a[0], coef_r[0], sample.export)
        run_blocks(*args, coef_a, coef_r, part)
        one.chosen[:], one.own[:], one.after[:] = work.chosen, work.own, work.after[1]
        _add_unseen(sample, keys.stream[RESIDUAL], first + i, one, part[0][0], part[1][0])
    return told
