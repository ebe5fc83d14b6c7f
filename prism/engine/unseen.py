"""Blocks of which some replicas are simulated: the slowest, and a sample of the others.

The step also waits for the slowest of those that are left out, drawn from the distribution that
`Sample` holds. A job that leaves none out never compiles this.
"""

import math

import numpy as np

from prism.engine.arrays import (
    BINS,
    DRAW,
    EXPORT,
    LANES,
    NEVER,
    RANK,
    RESIDUAL,
    UNSEEN,
    Sampled,
    Walk,
)
from prism.engine.cache import inner, jit
from prism.engine.effects import SHARED, draw_block, draw_cluster, end_block, fill_bank
from prism.engine.lowering import lower_replicas
from prism.engine.random import philox_lanes
from prism.engine.step import copy_rows, fill_out, new_work, run_phase, run_phases


@inner
def _find_tails(walk, block, work, exports):
    """Fill work.tail: the time from every export that the last phase reads to the step's end."""
    graph, zero, one = walk.graph, np.int64(0), np.int64(1)
    first = graph.n_state * graph.n_slots
    last = graph.phase_global.shape[0] - 1
    final = first - graph.n_slots + graph.final_slot
    for i in range(exports.shape[0]):
        work.state[0], work.state[first:] = NEVER, NEVER
        work.state[first + exports[i]] = 0.0
        run_phase(walk, block, work, last, (zero, one), zero)
        work.tail[exports[i]] = work.state[final]
    work.state[:], work.path[:], work.busy[:] = 0.0, 0.0, 0.0


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
def _nominal_times(low, sample, x, first, last, a):
    """Seconds a[coef, lane] of the local ops of some replicas without noise, one to a lane."""
    n_terms = low.call_cv.shape[1]
    n_segments, n_loadings = low.seg_mean.shape
    speed, slow = np.empty(low.member.shape[2]), np.empty(n_loadings)
    seconds = np.empty(max(1, n_segments))
    for r in range(first, last):
        row, stage = r % low.fixed_mean.shape[0], -1
        for i in range(sample.coef.shape[0]):
            c = sample.coef[i]
            if low.coef_stage[c] >= 0 and low.coef_stage[c] != stage:
                stage = low.coef_stage[c]
                _group_times(low, sample, x, r, stage, (speed, slow, seconds))
            total = 0.0
            for t in range(n_terms):
                total += low.fixed_mean[row, c, t]
            for e in range(low.coef_seg_ptr[c], low.coef_seg_ptr[c + 1]):
                total += low.coef_count[e] * low.quiet[c] * seconds[low.coef_seg[e]]
            a[c, r - first] = total


@inner
def _level_lanes(ops, graph, tail, a, state, level):
    """End of the step of one replica a lane, without noise and by itself: level[lane]."""
    kind, pred0, pred1, out, coef = ops.kind, ops.pred0, ops.pred1, ops.out, ops.coef
    level[:], state[:] = 0.0, 0.0
    for phase in range(graph.phase_global.shape[0]):
        if graph.phase_global[phase] == 1:
            continue
        for op in range(graph.phase_lo[phase], graph.phase_hi[phase]):
            pa, pb, po, c = pred0[op], pred1[op], out[op], coef[op]
            if pa >= graph.n_slots:  # of ops of all replicas: they are waited for by all alike
                pa = 0
            if pb >= graph.n_slots:
                pb = 0
            if kind[op] == EXPORT:
                after = tail[po - graph.n_slots]
                for lane in range(LANES):
                    level[lane] = max(level[lane], state[pa, lane] + after)
                continue
            for lane in range(LANES):
                p, q = state[pa, lane], state[pb, lane]
                start = p if p > q else q
                state[po, lane] = start + (a[c, lane] if kind[op] == DRAW else np.float32(0.0))


@inner
def _find_levels(step, sample, x, level):
    """Find every replica's persistent speed: its own step without noise, level[replica] [s]."""
    n = level.shape[0]
    a = np.zeros((step.low.call_cv.shape[0], LANES), np.float32)
    state = np.zeros((step.graph.n_slots, LANES), np.float32)
    lanes = np.empty(LANES, np.float32)
    for first in range(0, n, LANES):
        last = min(n, first + LANES)
        _nominal_times(step.low, sample, x, first, last, a)
        _level_lanes(step.ops, step.graph, sample.tail, a, state, lanes)
        for r in range(first, last):
            level[r] = lanes[r - first]


@inner
def _choose_replicas(sample, level, index, key, chosen, weight):
    """Choose replicas to be simulated: replica 0, the slowest, and one of every stratum of others.

    Fills chosen[row] in rising order, the typical replica (n_replicas) last, and weight[row], the
    number of replicas that each of them stands for.
    """
    n, n_top, n_bulk = level.shape[0], sample.n_top, sample.n_bulk
    order = np.argsort(-level, kind="mergesort")
    order = order[order != 0]
    rest = n - 1 - n_top
    words, count = np.empty((4, LANES), np.uint32), np.zeros(n)
    count[0] = 1.0
    for i in range(n_top):
        count[order[i]] = 1.0
    for i in range(n_bulk):
        if i % LANES == 0:
            philox_lanes(index, 1, i, UNSEEN, key, words)
        lo, hi = i * rest // n_bulk, (i + 1) * rest // n_bulk
        pick = lo + np.int64((hi - lo) * (words[0, i % LANES] / 4294967296.0))
        count[order[n_top + pick]] = hi - lo
    at = 0
    for r in range(n):
        if count[r] > 0.0:
            chosen[at], weight[at] = r, count[r]
            at += 1
    chosen[at], weight[at] = n, 0.0


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


@jit
def unseen_bins(sample, level, chosen, mean, std, count):
    """Gather the replicas that are not simulated into bins of like mean and spread.

    mean[bin] and std[bin] are over the typical replica's time [1]; returns how many there are.
    """
    seen = np.zeros(level.shape[0], np.bool_)
    seen[chosen[:-1]] = True
    lo, hi = np.inf, -np.inf
    for r in range(level.shape[0]):
        if not seen[r]:
            lo, hi = min(lo, level[r]), max(hi, level[r])
    n, total = count.shape[0], 0
    mean[:], std[:], count[:] = 0.0, 1.0, 0.0
    for r in range(level.shape[0]):
        if not seen[r]:
            i = min(n - 1, int(n * (level[r] - lo) / (hi - lo))) if hi > lo else 0
            count[i] += 1.0
            mean[i] += level[r]
            total += 1
    for i in range(n):
        if count[i] > 0.0:
            at = mean[i] / count[i]
            mean[i] = np.interp(at, sample.knot, sample.mean)
            std[i] = np.interp(at, sample.knot, sample.std)
    return total


@jit
def unseen_slowest(sample, mean, std, count, u):
    """Quantile u of the slowest replica that is not simulated, over the typical one's time [1]."""
    lo, hi, target = np.inf, -np.inf, math.log(u)
    end = sample.first + sample.width * (sample.log_cdf.shape[0] - 1)
    for i in range(count.shape[0]):
        if count[i] > 0.0:
            lo = min(lo, mean[i] + sample.first * std[i])
            hi = max(hi, mean[i] + end * std[i])
    for _ in range(32):
        middle, total = 0.5 * (lo + hi), 0.0
        for i in range(count.shape[0]):
            if count[i] > 0.0:
                total += count[i] * _log_below(sample, mean[i], std[i], middle)
        if total < target:
            lo = middle
        else:
            hi = middle
    return 0.5 * (lo + hi)


@inner
def _add_unseen(sample, block, told, out_time, out_path):
    """Let the step wait for the slowest of the replicas that were not simulated, too."""
    mean, std, count = np.empty(BINS), np.empty(BINS), np.empty(BINS)
    if unseen_bins(sample, told.level, told.chosen, mean, std, count) == 0:
        return
    typical, after, words = told.own[-1], told.after, block.words
    philox_lanes(0, 0, block.lane0, UNSEEN, block.keys[RESIDUAL], words)
    for lane in range(LANES):
        u = (words[0, lane] + 0.5) / 4294967296.0
        ratio = unseen_slowest(sample, mean, std, count, u)
        end = np.float32(after[lane] + (typical[lane] - after[lane]) * ratio)
        if end > out_time[lane]:
            for k in range(out_path.shape[0]):
                out_path[k, lane] *= end / out_time[lane]
            out_time[lane] = end


@jit
def run_sampled_block(index, keys, step, sample, out, told):
    """Simulate some replicas of one block, and let the step wait for the others, too.

    Fills `out` as `run_range` does, and what is `told` of the replicas (`Sampled`).
    """
    graph, low, walk = step.graph, step.low, Walk(step.ops, step.graph, step.share)
    x = draw_cluster(index, keys.stream, step.ranks, step.tables)
    block = draw_block(index, keys.stream, step.links, step.tables)
    _find_levels(step, sample, x, told.level)
    n_rows = told.chosen.shape[0]
    shape = (low.call_cv.shape[0], low.call_cv.shape[1], step.bank.mb.shape[0])
    work = new_work(walk, keys, shape, told.chosen, graph.n_global_slots, block)
    _choose_replicas(sample, told.level, index, block.keys[RANK], told.chosen, work.weight)
    lower_replicas(low, x, told.chosen[: n_rows - 1], work.coef_a, work.coef_r)
    copy_rows(sample.typical, work.coef_a[n_rows - 1])
    work.coef_r[n_rows - 1] = np.float32(0.0)
    fill_bank(step.bank, step.links, block, np.int64(SHARED), np.int64(0), work.vectors[0])
    _find_tails(walk, block, work, sample.export)
    run_phases(walk, step.bank, step.links, step.stalls, block, work)
    fill_out(graph, work, out[0], out[2], out[3])
    copy_rows(work.own, told.own)
    for lane in range(LANES):
        told.after[lane] = work.after[lane]
    _add_unseen(sample, block, told, out[0], out[2])
    end_block(step.stalls, step.jitter, step.step_table, block, out[0], out[1])


@jit
def run_sampled(first, keys, step, sample, out):
    """`run_range` where only some replicas are simulated."""
    n_rows = 2 + sample.n_top + sample.n_bulk
    told = Sampled(
        np.empty(step.graph.n_replicas, np.float32),
        np.empty(n_rows, np.int64),
        np.empty((n_rows, LANES), np.float32),
        np.empty(LANES, np.float32),
    )
    for i in range(out[0].shape[0]):
        each = (out[0][i], out[1][i], out[2][i], out[3][i])
        run_sampled_block(first + i, keys, step, sample, each, told)
