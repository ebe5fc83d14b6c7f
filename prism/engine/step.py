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
from prism.engine.random import lookup, philox_lanes


@inner
def _mix_noise(noise, weight):
    """Mix three draws noise[key, lane] by weight[key]; returns the row where the mixture is."""
    w0, w1, w2 = weight[0], weight[1], weight[2]
    for k in range(3):
        if weight[k] == np.float32(1.0):
            return k
    for lane in range(LANES):
        noise[3, lane] = w0 * noise[0, lane] + w1 * noise[1, lane] + w2 * noise[2, lane]
    return 3


@inlined
def _end_op(state, pa, pb, po, vectors, kept, v0, v1, a0, a1, base, ratio, noise, k):
    """End = max of two predecessors + (a0 v0 + a1 v1 + base) * (1 + residual), for all lanes.

    Apart from the look-up, which is scalar, so that this is one vector operation after another.
    An op never writes a slot that it reads, so lanes do not depend on each other.
    """
    for lane in range(LANES):
        a, b = state[pa, lane], state[pb, lane]
        start = a if a > b else b
        time = a0 * vectors[kept, v0, lane] + a1 * vectors[kept, v1, lane] + base[lane]
        state[po, lane] = start + time * (np.float32(1.0) + ratio * noise[k, lane])


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
def _add_terms(base, vectors, kept, coef_a, vec, n_terms):
    """Seconds of an op's third and further terms; few ops have them."""
    for t in range(2, n_terms):
        for lane in range(LANES):
            base[lane] += coef_a[t] * vectors[kept, vec[t], lane]


@inner
def _track(state, path, busy, pa, pb, po, spent, share, c, stage, weight):
    """Add an op to the critical path, and a local one to its stage's busy time."""
    for lane in range(LANES):
        spent[lane] = state[po, lane] - max(state[pa, lane], state[pb, lane])
        if stage >= 0:
            busy[stage, lane] += weight * spent[lane]
    _follow_path(state, path, pa, pb, po, spent, share, c)


@inner
def _run_join(state, path, pa, pb, po, spent, share):
    for lane in range(LANES):
        a, b = state[pa, lane], state[pb, lane]
        state[po, lane] = a if a > b else b
    if share.shape[1] > 0:
        spent[:] = np.float32(0.0)
        _follow_path(state, path, pa, pb, po, spent, share, 0)


@jit
def run_phase(walk, block, work, phase, rows, n_events):
    """Run the ops of one phase for rows[0] <= row < rows[1]: ends (and paths) of all their lanes.

    work.chosen[row] is the replica; one that is no replica of the job, but what the others are
    measured by, delays nobody. A call per replica would cost as much as some ops: a tuple is passed
    array by array.
    """
    ops, graph, share, tables = walk.ops, walk.graph, walk.share, block.tables
    # Names for all arrays: reaching into tuples inside the loop costs reference counts.
    kind, pred0, pred1, out, coef = ops.kind, ops.pred0, ops.pred1, ops.out, ops.coef
    vec, n_terms, table, draw, stages = work.vec, work.n_terms, work.table, ops.draw, ops.stage
    state, path, mix, residual = work.state, work.path, work.mix, work.residual
    words, drawn, needed = work.words, work.drawn, work.needed
    base, spent, noise, vectors = work.base, work.spent, work.noise, work.vectors
    coef_a, coef_r, busy = work.coef_a, work.coef_r, work.busy
    computes, chosen, lane0 = ops.busy, work.chosen, block.lane0
    ev_op, ev_lane, ev_delay = work.ev_op, work.ev_lane, work.ev_delay
    stream = GLOBAL if graph.phase_global[phase] == 1 else RESIDUAL
    shift = graph.n_state * graph.n_slots - graph.n_slots
    n_variants, n_rooms = work.n_variants, vectors.shape[0] // work.n_variants
    n_keys, n_classes = residual.shape[0], share.shape[1]
    n_ops, n_rows, n_coefs = kind.shape[0], chosen.shape[0], needed.shape[0]
    tail, own, skipped = work.tail, work.own, np.empty(LANES, np.float32)
    noise[:] = np.float32(0.0)  # of ops without a residual, which draw none
    for row in range(rows[0], rows[1]):
        who = chosen[row]
        real = who < graph.n_replicas
        room = row % n_rooms
        local = row % graph.n_state * graph.n_slots
        event = 0
        drawn[:] = -1
        for op in range(graph.phase_lo[phase], graph.phase_hi[phase]):
            p0, p1, to = pred0[op], pred1[op], out[op]
            p0 += local if p0 < graph.n_slots else shift
            p1 += local if p1 < graph.n_slots else shift
            to += local if to < graph.n_slots else shift
            d, stage, c, looked = draw[op], stages[op], coef[op], -1
            for v in range(n_variants):
                pa, pb, po = p0 * n_variants + v, p1 * n_variants + v, to * n_variants + v
                if kind[op] == EXPORT:
                    if tail.shape[0] > 0:
                        after = skipped if real else work.after
                        _record_end(state, tail, pa, out[op] - graph.n_slots, own[row], after)
                    if real:
                        _accumulate_max(state, path, pa, po, n_classes)
                    continue
                if kind[op] == JOIN:
                    _run_join(state, path, pa, pb, po, spent, share)
                    continue
                at, of = v * n_ops + op, (v * n_rows + row) * n_coefs + c
                n, v0, a0 = n_terms[at], vec[at, 0], coef_a[of, 0]
                v1, a1, ratio = v0, np.float32(0.0), coef_r[of]
                if n > 1:
                    v1, a1 = vec[at, 1], coef_a[of, 1]
                if n <= 2 and a0 == 0.0 and a1 == 0.0:  # of no time: nothing is drawn
                    _run_join(state, path, pa, pb, po, spent, share)
                    continue
                k = 0
                if ratio != 0.0:
                    t = table[at]
                    if t != looked:
                        looked = t
                        for k in range(n_keys):
                            if not needed[c, k]:
                                continue
                            slot = k * graph.n_stages + stage
                            if d >> 2 != drawn[slot]:  # four draws of a stage in turn
                                drawn[slot] = d >> 2
                                c0 = (stage << 20) | (d >> 2)
                                philox_lanes(c0, who, lane0, stream, residual[k], words[slot])
                            for lane in range(LANES):
                                noise[k, lane] = lookup(tables, t, words[slot, d & 3, lane])
                    if n_keys > 1:
                        k = _mix_noise(noise, mix[v * n_coefs + c])
                    else:
                        k = 0
                if n > 2:
                    _add_terms(base, vectors, v * n_rooms + room, coef_a[of], vec[at], n)
                _end_op(
                    state,
                    pa,
                    pb,
                    po,
                    vectors,
                    v * n_rooms + room,
                    v0,
                    v1,
                    a0,
                    a1,
                    base,
                    ratio,
                    noise,
                    k,
                )
                if n > 2:
                    base[:] = np.float32(0.0)
                while event < n_events and ev_op[event] < op:
                    event += 1
                while event < n_events and ev_op[event] == op:
                    state[po, ev_lane[event]] += ev_delay[event]
                    event += 1
                if n_classes > 0:
                    weight = work.weight[row]
                    _track(state, path, busy, pa, pb, po, spent, share, c, computes[op], weight)


@inner
def new_work(walk, keys, shape, chosen, n_tails):
    """Buffers of one block; slots and shared effects of every replica where phases alternate.

    shape is the number of coefs, of terms and of shared-effect vectors. n_tails are the global
    slots whose way to the step's end is asked for, all or none of them.
    """
    graph, n_simulated = walk.graph, chosen.shape[0]
    n_rows = graph.n_state * graph.n_slots + graph.n_global_slots
    n_keys, ops = keys.residual.shape[0], walk.ops
    mix = keys.mix if keys.mix.shape[0] > 0 else np.ones((shape[0], n_keys), np.float32)
    room = graph.n_stages * LANES
    return Work(
        chosen,
        1,
        ops.vec,
        ops.n_terms,
        ops.table,
        keys.residual,
        mix,
        mix != np.float32(0.0),
        np.zeros((n_rows, LANES), np.float32),
        np.zeros((n_rows, walk.share.shape[1], LANES), np.float32),
        np.zeros((graph.n_stages, LANES), np.float32),
        np.empty((n_keys * graph.n_stages, 4, LANES), np.uint32),
        np.empty(n_keys * graph.n_stages, np.int64),
        np.zeros(LANES, np.float32),
        np.empty(LANES, np.float32),
        np.empty((n_keys + 1, LANES), np.float32),
        np.ones((graph.n_state, shape[2], LANES), np.float32),
        np.empty((n_simulated * shape[0], shape[1]), np.float32),
        np.empty(n_simulated * shape[0], np.float32),
        np.zeros(room, np.int64),
        np.zeros(room, np.int64),
        np.zeros(room, np.float32),
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
        work = new_work(walk, keys, shape, chosen, 0)
        lower_replicas(low, x, chosen, work.coef_a, work.coef_r)
        run_phases(walk, bank, links, stalls, block, work)
        fill_out(graph, work, time[i], path[i], busy[i])
        end_block(stalls, jitter, step_table, block, time[i], effect[i])
