"""Blocks of replicates: the ops of a step in execution order, 64 replicates at a time."""

import numpy as np

from prism.engine.arrays import (
    EXPORT,
    GLOBAL,
    GROUP_STALL,
    JOIN,
    LANES,
    NEVER,
    RESIDUAL,
    Walk,
    Work,
)
from prism.engine.cache import inlined, inner, jit
from prism.engine.effects import (
    LOCAL,
    SHARED,
    TYPICAL,
    draw_block,
    draw_cluster,
    draw_stalls,
    end_block,
    fill_bank,
)
from prism.engine.lowering import lower_replicas
from prism.engine.random import POOL_BITS, lookup, make_pool, philox_lanes, redraw

SHIFT = np.uint32(32 - POOL_BITS)  # the place in the pool that a word stands for


@inlined
def _mix(pool, first, mix, c, to, scratch):
    """Mix three rows of draws, pool[first[key] + lane], by mix[c, key] into pool[to + lane]."""
    f0, f1, f2 = first[0], first[1], first[2]
    w0, w1, w2 = mix[c, 0], mix[c, 1], mix[c, 2]
    for lane in range(LANES):
        scratch[lane] = w0 * pool[f0 + lane] + w1 * pool[f1 + lane] + w2 * pool[f2 + lane]
    for lane in range(LANES):  # apart, or neither would be a vector operation
        pool[to + lane] = scratch[lane]


@inlined
def _end_op(state, pa, pb, po, vectors, kept, v0, v1, a0, a1, base, ratio, pool, first):
    """End = max of two predecessors + (a0 v0 + a1 v1 + base) * (1 + residual), for all lanes.

    An op never writes a slot that it reads, so lanes do not depend on each other.
    """
    for lane in range(LANES):
        a, b = state[pa, lane], state[pb, lane]
        start = a if a > b else b
        time = a0 * vectors[kept, v0, lane] + a1 * vectors[kept, v1, lane] + base[lane]
        state[po, lane] = start + time * (np.float32(1.0) + ratio * pool[first + lane])


@inner
def _follow_path(state, path, pa, pb, po, dur, share, coef):
    """Carry the critical path's time by class from the later predecessor."""
    for k in range(share.shape[1]):
        part = share[coef, k]
        for lane in range(LANES):
            a, b = path[pa, k, lane], path[pb, k, lane]  # both, so that the choice is no branch
            path[po, k, lane] = (a if state[pa, lane] > state[pb, lane] else b) + part * dur[lane]


@inner
def _accumulate_max(state, path, pa, po, n_classes):
    for lane in range(LANES):
        if state[pa, lane] > state[po, lane]:
            state[po, lane] = state[pa, lane]
            for k in range(n_classes):
                path[po, k, lane] = path[pa, k, lane]


@inner
def _record_end(state, tail, pa, slot, own, after):
    """Record when the step would end if this replica were the only one, own[lane].

    after[lane] is the part of it that follows the last of its own ops.
    """
    for lane in range(LANES):
        end = state[pa, lane] + tail[slot, lane]
        if end > own[lane]:
            own[lane] = end
            after[lane] = tail[slot, lane]


@inner
def _add_terms(base, vectors, coef_a, vec, n_terms, row, kept, c, op):
    """Seconds of an op's third and further terms; few ops have them."""
    base[:] = np.float32(0.0)
    for t in range(2, n_terms):
        a, v = coef_a[row, c, t], vec[op, t]
        for lane in range(LANES):
            base[lane] += a * vectors[kept, v, lane]


@inner
def _track(state, path, busy, pa, pb, po, base, share, c, stage, weight):
    """Add an op to the critical path, and a local one to its stage's busy time."""
    for lane in range(LANES):
        base[lane] = state[po, lane] - max(state[pa, lane], state[pb, lane])
        if stage >= 0:
            busy[stage, lane] += weight * base[lane]
    _follow_path(state, path, pa, pb, po, base, share, c)


@inner
def _run_join(state, path, pa, pb, po, base, share):
    for lane in range(LANES):
        a, b = state[pa, lane], state[pb, lane]
        state[po, lane] = a if a > b else b
        base[lane] = np.float32(0.0)
    _follow_path(state, path, pa, pb, po, base, share, 0)


@jit
def run_phase(walk, block, work, phase, rows, n_events):
    """Run the ops of one phase for rows[0] <= row < rows[1]: ends (and paths) of all their lanes.

    work.chosen[row] is the replica; one that is no replica of the job, but what the others are
    measured by, delays nobody. A call per replica would cost as much as some ops: a tuple is passed
    array by array.
    """
    ops, graph, share = walk.ops, walk.graph, walk.share
    # Names for all arrays: reaching into tuples inside the loop costs reference counts.
    kind, pred0, pred1, out, coef = ops.kind, ops.pred0, ops.pred1, ops.out, ops.coef
    vec, n_terms, table, draw, stages = ops.vec, ops.n_terms, ops.table, ops.draw, ops.stage
    state, path, words, drawn = work.state, work.path, work.words, work.drawn
    base, zeros, pool, vectors = work.base, work.zeros, work.pool, work.vectors
    coef_a, coef_r, busy = work.coef_a, work.coef_r, work.busy
    computes, chosen = ops.busy, work.chosen
    ev_op, ev_lane, ev_delay = work.ev_op, work.ev_lane, work.ev_delay
    stream = GLOBAL if graph.phase_global[phase] == 1 else RESIDUAL
    shift = graph.n_state * graph.n_slots - graph.n_slots
    n_classes = share.shape[1]
    tail, own, spare = work.tail, work.own, np.empty(LANES, np.float32)
    begin, slow, mix, residual = work.begin, work.slow, work.mix, work.residual
    tables = block.tables
    lane0, n_pooled = block.lane0, work.n_pooled
    pooled = 1 + block.lane0 // LANES << 4  # draws are of a block, not of its lanes
    n_keys, n_slots = residual.shape[0], drawn.shape[0] // 2
    looked_up, first = pool.shape[0] - (n_keys + 1) * LANES, np.zeros(n_keys, np.int64)
    for row in range(rows[0], rows[1]):
        who = chosen[row]
        real = who < graph.n_replicas
        kept = row % graph.n_state
        local = kept * graph.n_slots
        event = 0
        drawn[:] = -1
        for op in range(graph.phase_lo[phase], graph.phase_hi[phase]):
            pa, pb, po = pred0[op], pred1[op], out[op]
            pa += local if pa < graph.n_slots else shift
            pb += local if pb < graph.n_slots else shift
            po += local if po < graph.n_slots else shift
            if kind[op] == EXPORT:
                if tail.shape[0] > 0:
                    after = spare if real else work.after
                    _record_end(state, tail, pa, out[op] - graph.n_slots, own[row], after)
                if real:
                    _accumulate_max(state, path, pa, po, n_classes)
                continue
            if kind[op] == JOIN:
                _run_join(state, path, pa, pb, po, base, share)
                continue
            d, stage, c = draw[op], stages[op], coef[op]
            v0, a0 = vec[op, 0], coef_a[row, c, 0]
            v1, a1 = v0, np.float32(0.0)
            if n_terms[op] > 1:
                v1, a1 = vec[op, 1], coef_a[row, c, 1]
            if n_terms[op] <= 2 and a0 == 0.0 and a1 == 0.0:  # of no time: nothing is drawn
                _run_join(state, path, pa, pb, po, base, share)
                continue
            ratio, noise = coef_r[row, c], 0
            if ratio != 0.0:
                t = table[op]
                for k in range(n_keys):
                    if n_keys > 1 and mix[c, k] == np.float32(0.0):
                        continue
                    slot = k * graph.n_stages + stage
                    if begin[c] >= 0:  # from the pool: 256 draws of a stage in turn
                        if drawn[slot] != d >> 8:
                            drawn[slot] = d >> 8
                            c0, c3 = (stage << 20) | (d >> 8), stream | pooled
                            philox_lanes(c0, who, 0, c3, residual[k], words[slot])
                        word = words[slot, d & 3, d >> 2 & 63]
                        place, row0 = np.int64(word >> SHIFT), begin[c] + k * n_pooled
                        first[k], i = row0 + place, np.int64(slow[k, place])
                        while i < place + LANES:
                            pool[row0 + i] = lookup(tables, t, redraw(word, i - place))
                            i = np.int64(slow[k, i + 1])
                        continue
                    slot += n_slots
                    if drawn[slot] != d >> 2:  # four draws of a stage in turn
                        drawn[slot] = d >> 2
                        c0 = (stage << 20) | (d >> 2)
                        philox_lanes(c0, who, lane0, stream, residual[k], words[slot])
                    first[k] = looked_up + k * LANES
                    for lane in range(LANES):
                        pool[first[k] + lane] = lookup(tables, t, words[slot, d & 3, lane])
                noise = first[0]
                if n_keys > 1 and mix[c, 0] != np.float32(1.0):
                    noise = pool.shape[0] - LANES
                    _mix(pool, first, mix, c, noise, spare)
            if n_terms[op] > 2:
                _add_terms(base, vectors, coef_a, vec, n_terms[op], row, kept, c, op)
            extra = base if n_terms[op] > 2 else zeros
            _end_op(state, pa, pb, po, vectors, kept, v0, v1, a0, a1, extra, ratio, pool, noise)
            while event < n_events and ev_op[event] < op:
                event += 1
            while event < n_events and ev_op[event] == op:
                state[po, ev_lane[event]] += ev_delay[event]
                event += 1
            if n_classes > 0:
                weight = work.weight[row]
                _track(state, path, busy, pa, pb, po, base, share, c, computes[op], weight)


@inner
def new_work(walk, keys, shape, chosen, n_tails, block):
    """Buffers of one block; slots and shared effects of every replica where phases alternate.

    shape is the number of coefs, of terms and of shared-effect vectors. n_tails are the global
    slots whose way to the step's end is asked for, all or none of them.
    """
    graph, n_simulated = walk.graph, chosen.shape[0]
    n_rows = graph.n_state * graph.n_slots + graph.n_global_slots
    n_slots, room = 2 * keys.residual.shape[0] * graph.n_stages, graph.n_stages * LANES
    ops, n_coefs = walk.ops, shape[0]
    pool = make_pool(
        block.tables,
        ops.kind,
        ops.coef,
        ops.table,
        n_coefs,
        n_simulated,
        block.lane0,
        keys.residual,
    )
    return Work(
        chosen,
        np.zeros((n_rows, LANES), np.float32),
        np.zeros((n_rows, walk.share.shape[1], LANES), np.float32),
        np.zeros((graph.n_stages, LANES), np.float32),
        np.empty((n_slots, 4, LANES), np.uint32),
        np.empty(n_slots, np.int64),
        np.empty(LANES, np.float32),
        np.zeros(LANES, np.float32),
        pool[0],
        pool[1],
        pool[2],
        pool[3],
        np.ones((graph.n_state, shape[2], LANES), np.float32),
        np.empty((n_simulated, shape[0], shape[1]), np.float32),
        np.empty((n_simulated, shape[0]), np.float32),
        np.zeros(room, np.int64),
        np.zeros(room, np.int64),
        np.zeros(room, np.float32),
        keys.residual,
        keys.mix,
        np.full((n_tails, LANES), NEVER),
        np.zeros((n_simulated if n_tails > 0 else 0, LANES), np.float32),
        np.zeros(LANES, np.float32),
        np.ones(n_simulated, np.float32),
    )


@inner
def run_phases(walk, bank, links, stalls, block, work):
    """Run all phases, the local ones replica after replica."""
    graph, vectors, n_rows, filled = walk.graph, work.vectors, work.chosen.shape[0], False
    events = (work.ev_op, work.ev_lane, work.ev_delay)
    by_group = stalls.entity == GROUP_STALL
    zero, one = np.int64(0), np.int64(1)  # literals would compile every callee once more
    shared, local, typical = np.int64(SHARED), np.int64(LOCAL), np.int64(TYPICAL)
    fill_bank(bank, links, block, shared, zero, vectors[0])
    for phase in range(graph.phase_global.shape[0]):
        if graph.phase_global[phase] == 1:
            run_phase(walk, block, work, phase, (zero, one), zero)
            continue
        for row in range(n_rows):
            r = work.chosen[row]
            if not filled:
                whose = typical if r == graph.n_replicas else local
                fill_bank(bank, links, block, whose, r, vectors[row % graph.n_state])
            n = draw_stalls(stalls, block, r, events) if by_group else zero
            if by_group or graph.n_state == 1:  # replicas share the room of shared effects
                run_phase(walk, block, work, phase, (row, row + 1), n)
        if graph.n_state > 1 and not by_group:
            run_phase(walk, block, work, phase, (zero, n_rows), zero)
        filled = True


@inner
def copy_rows(rows, out):
    """Fill out[row, column]; an assignment of arrays takes seconds to compile, for its message."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = rows[i, j]


@inner
def fill_out(graph, work, time, path, busy):
    """Fill time[lane] [s], path[class, lane] [s], busy[stage, lane] [s]."""
    final = (graph.n_state - 1) * graph.n_slots + graph.final_slot
    for lane in range(LANES):
        time[lane] = work.state[final, lane]
    copy_rows(work.path[final], path)
    copy_rows(work.busy, busy)


@jit
def run_range(first, keys, step, out):
    """Simulate blocks first, first + 1, ...: 64 replicates each, of one cluster draw.

    Fills time[block, lane] [s], step effect[block, lane], path[block, class, lane] [s] and
    busy[block, stage, lane] [s].
    """
    time, effect, path, busy = out
    ops, graph, bank, links, ranks, low, stalls, jitter, tables, step_table, share = step
    walk, n_vectors = Walk(ops, graph, share), bank.mb.shape[0]
    shape = (low.call_cv.shape[0], low.call_cv.shape[1], n_vectors)
    chosen = np.arange(graph.n_replicas)
    for i in range(time.shape[0]):
        x = draw_cluster(first + i, keys.stream, ranks, tables)
        block = draw_block(first + i, keys.stream, links, tables)
        work = new_work(walk, keys, shape, chosen, 0, block)
        lower_replicas(low, x, chosen, work.coef_a, work.coef_r)
        run_phases(walk, bank, links, stalls, block, work)
        fill_out(graph, work, time[i], path[i], busy[i])
        end_block(stalls, jitter, step_table, block, time[i], effect[i])
