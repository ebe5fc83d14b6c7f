"""Blocks of replicates: the ops of a step in execution order, 64 replicates at a time."""

import numpy as np

from prism.engine.arrays import (
    BUSY,
    COEF,
    DRAW,
    EXPORT,
    GLOBAL,
    GROUP_STALL,
    JOIN,
    KIND,
    LANES,
    N_TERMS,
    NUMBER,
    OUT,
    PRED0,
    PRED1,
    RESIDUAL,
    STAGE,
    STALL,
    TABLE,
    VEC,
)
from prism.engine.cache import inlined, inner, jit
from prism.engine.effects import (
    LOCAL,
    SHARED,
    TYPICAL,
    draw_block,
    draw_stalls,
    fill_bank,
)
from prism.engine.random import (
    POOL_BITS,
    fill_pool,
    lookup,
    philox_lanes,
    redraw,
)

SHIFT = np.uint32(32 - POOL_BITS)  # the place in the pool that a word stands for


@inlined
def _end_op(state, pa, pb, po, vectors, kept, v0, v1, a0, a1, base, more, ratio, pool, first):
    """End = max of two predecessors + (a0 v0 + a1 v1 + base) * (1 + residual), for all lanes.

    An op never writes a slot that it reads, so lanes do not depend on each other.
    """
    for lane in range(LANES):
        a, b = state[pa, lane], state[pb, lane]
        start = a if a > b else b
        time = a0 * vectors[kept, v0, lane] + a1 * vectors[kept, v1, lane] + base[more, lane]
        state[po, lane] = start + time * (np.float32(1.0) + ratio * pool[first + np.uint64(lane)])


@inlined
def _later(state, pa, pb):
    """Tell of which lanes pa ends later than pb: a bit each."""
    low, high = np.uint32(0), np.uint32(0)  # halves: bits of the width of what is compared
    for lane in range(LANES // 2):
        bit, upper = np.uint32(np.uint32(1) << np.uint32(lane)), lane + LANES // 2
        low = np.uint32(low | (bit if state[pa, lane] > state[pb, lane] else np.uint32(0)))
        high = np.uint32(high | (bit if state[pa, upper] > state[pb, upper] else np.uint32(0)))
    return np.uint64(high) << np.uint64(LANES // 2) | np.uint64(low)


@inlined
def _accumulate_max(state, pa, po):
    for lane in range(LANES):
        if state[pa, lane] > state[po, lane]:
            state[po, lane] = state[pa, lane]


@inlined
def _add_to_path(path, share, c, lanes, seconds):
    """Add an op to the time by class of the lanes on whose critical path it is."""
    for lane in range(LANES):
        if lanes >> np.uint64(lane) & np.uint64(1):
            for k in range(share.shape[1]):
                path[k, lane] += share[c, k] * seconds[lane]


@inner
def _record_end(state, tail, pa, slot, own, row, after, of):
    """Record when the step would end if this replica were the only one, own[row, lane].

    after[of, lane] is the part of it that follows the last of its own ops.
    """
    for lane in range(LANES):
        end = state[pa, lane] + tail[slot, lane]
        if end > own[row, lane]:
            own[row, lane] = end
            after[of, lane] = tail[slot, lane]


@inlined
def _add_busy(state, busy, pa, pb, po, stage, weight):
    """Add a local op to its stage's busy time."""
    for lane in range(LANES):
        busy[stage, lane] += weight * (state[po, lane] - max(state[pa, lane], state[pb, lane]))


@inner
def _add_terms(base, vectors, coef_a, ops, row, kept, c, op):
    """Seconds of an op's third and further terms: base[1, lane]."""
    for lane in range(LANES):
        base[1, lane] = np.float32(0.0)
    for t in range(2, ops[op, N_TERMS]):
        a, v = coef_a[row, c, t], ops[op, VEC + t]
        for lane in range(LANES):
            base[1, lane] += a * vectors[kept, v, lane]


@inlined
def _run_join(state, pa, pb, po):
    for lane in range(LANES):
        a, b = state[pa, lane], state[pb, lane]
        state[po, lane] = a if a > b else b


@inner
def run_phase(walk, work, coef_a, coef_r, keys, lane0, phase, rows, n_events, again):
    """Run the ops of one phase for rows[0] <= row < rows[1]: ends of all their lanes.

    Where paths are asked for, work.on keeps which predecessor was later. `again` runs only what
    `find_path` left there, each op by itself, and adds it to the critical paths of its lanes.
    work.chosen[row] is the replica; one that is no replica of the job, but what the others are
    measured by, delays nobody. Seconds coef_a[row, coef, term], scale of residuals coef_r[row,
    coef].
    """
    ops, graph, share, tables = walk.ops, walk.graph, walk.share, walk.tables
    # Names for all arrays: reaching into tuples inside the loop costs reference counts.
    state, path, words, drawn = work.state, work.path, work.words, work.drawn
    base, pool, vectors, busy, on = work.base, work.pool, work.vectors, work.busy, work.on
    begin, slow, key_of, residual = work.begin, work.slow, keys.of, keys.residual
    ev_op, ev_lane, ev_delay = work.ev_op, work.ev_lane, work.ev_delay
    chosen, tail, own, after = work.chosen, work.tail, work.own, work.after
    # Indices are unsigned: one with a sign might count from the end, which is tested each time.
    if not state.shape[1] == vectors.shape[2] == base.shape[1] == path.shape[1] == LANES:
        return  # it never does: so rows have a length that is known when this is compiled
    if words.shape[1] != 4 or words.shape[2] != LANES:
        return
    n_slots, tracked = graph.n_slots, on.shape[0] > 0
    still = np.uint64(state.shape[0] - 1)  # the row of ends that stays zero
    stream = GLOBAL if graph.phase_global[phase] == 1 else RESIDUAL
    shift = graph.n_state * n_slots - n_slots
    pooled = 1 + lane0 // LANES << 4  # draws are of a block, not of its lanes
    n_keys, n_drawn = residual.shape[0], np.uint64(drawn.shape[0] // 2)
    one, lanes = np.uint64(1), np.uint64(LANES)
    looked_up = pool.shape[0] - LANES
    n_pooled = looked_up // n_keys
    for row in range(rows[0], rows[1]):
        who = chosen[row]
        real = who < graph.n_replicas
        kept, at_row = np.uint64(row % graph.n_state), np.uint64(row)
        local = np.int64(kept) * n_slots
        event = 0
        for stale in range(drawn.shape[0]):
            drawn[stale] = -1
        for op in range(graph.phase_lo[phase], graph.phase_hi[phase]):
            at = np.uint64(op)
            kind, pa, pb, po = ops[at, KIND], ops[at, PRED0], ops[at, PRED1], ops[at, OUT]
            pa = np.uint64(pa + (local if pa < n_slots else shift))
            pb = np.uint64(pb + (local if pb < n_slots else shift))
            po = np.uint64(po + (local if po < n_slots else shift))
            if again == 1:
                if kind != DRAW or on[at_row, at] == np.uint64(0):
                    continue
                pa = pb = still
            elif tracked:
                on[at_row, at] = _later(state, pa, po if kind == EXPORT else pb)
            if kind == EXPORT:
                if tail.shape[0] > 0:
                    export = ops[at, OUT] - n_slots
                    _record_end(state, tail, pa, export, own, row, after, 0 if real else 1)
                if real:
                    _accumulate_max(state, pa, po)
                continue
            if kind == JOIN:
                _run_join(state, pa, pb, po)
                continue
            c, noise, more = np.uint64(ops[at, COEF]), np.uint64(0), np.uint64(0)
            ratio = coef_r[at_row, c]
            if ops[at, N_TERMS] > 2:  # few ops have them; the others all take two, the second 0
                more = np.uint64(1)
                _add_terms(base, vectors, coef_a, ops, at_row, kept, c, at)
            if ratio != 0.0:
                t, d, stage = np.uint64(ops[at, TABLE]), ops[at, NUMBER], ops[at, STAGE]
                key = key_of[c] if n_keys > 1 else 0
                k, slot = np.uint64(key), np.uint64(key * graph.n_stages + stage)
                if begin[c] >= 0:  # from the pool: 256 draws of a stage in turn
                    if drawn[slot] != d >> 8:
                        drawn[slot] = d >> 8
                        c0, c3 = (stage << 20) | (d >> 8), stream | pooled
                        philox_lanes(c0, who, 0, c3, residual[k], words[slot])
                    word = words[slot, np.uint64(d & 3), np.uint64(d >> 2 & 63)]
                    row0 = np.uint64(begin[c] + key * n_pooled)
                    place = np.uint64(word >> SHIFT)
                    noise, i = row0 + place, np.uint64(slow[k, place])
                    while i < place + lanes:
                        pool[row0 + i] = lookup(tables, t, redraw(word, i - place))
                        i = np.uint64(slow[k, i + one])
                else:
                    slot += n_drawn
                    if drawn[slot] != d >> 2:  # four draws of a stage in turn
                        drawn[slot] = d >> 2
                        c0 = (stage << 20) | (d >> 2)
                        philox_lanes(c0, who, lane0, stream, residual[k], words[slot])
                    noise = np.uint64(looked_up)
                    for lane in range(LANES):
                        found = lookup(tables, t, words[slot, d & 3, lane])
                        pool[noise + np.uint64(lane)] = found
            v0, v1 = np.uint64(ops[at, VEC]), np.uint64(ops[at, VEC + 1])
            a0, a1 = coef_a[at_row, c, 0], coef_a[at_row, c, 1]
            _end_op(
                state, pa, pb, po, vectors, kept, v0, v1, a0, a1, base, more, ratio, pool, noise
            )
            while event < n_events and ev_op[event] <= op:
                if ev_op[event] == op:
                    state[po, ev_lane[event]] += ev_delay[event]
                event += 1
            if again == 1:
                _add_to_path(path, share, c, on[at_row, at], state[po])
            elif tracked and ops[at, BUSY] >= 0:
                _add_busy(state, busy, pa, pb, po, ops[at, BUSY], work.weight[at_row])


@inner
def find_path(walk, chosen, on, wanted):
    """Leave in on[row, op] the lanes on whose critical path an op is, where it kept later ones.

    From the step's end back: wanted[row of ends] are the lanes whose path leads through it.
    """
    graph, ops, none = walk.graph, walk.ops, np.uint64(0)
    n_slots, shift = graph.n_slots, graph.n_state * graph.n_slots - graph.n_slots
    for slot in range(wanted.shape[0]):
        wanted[slot] = none
    wanted[shift + graph.final_slot] = ~none
    for phase in range(graph.phase_global.shape[0] - 1, -1, -1):
        n_rows = 1 if graph.phase_global[phase] == 1 else chosen.shape[0]
        for row in range(n_rows - 1, -1, -1):
            local = row % graph.n_state * n_slots
            for op in range(graph.phase_hi[phase] - 1, graph.phase_lo[phase] - 1, -1):
                kind, pa, pb, po = ops[op, KIND], ops[op, PRED0], ops[op, PRED1], ops[op, OUT]
                pa += local if pa < n_slots else shift
                pb += local if pb < n_slots else shift
                po += local if po < n_slots else shift
                lanes, later = wanted[po], on[row, op]
                if kind == EXPORT:  # one that is no replica of the job delays nobody
                    lanes = lanes & later if chosen[row] < graph.n_replicas else none
                    wanted[po] &= ~lanes
                    wanted[pa] |= lanes
                    continue
                on[row, op], wanted[po] = lanes, none
                wanted[pa] |= lanes & later
                wanted[pb] |= lanes & ~later


@inner
def start_block(walk, shared, keys, lane0, block, work):
    """Draw what a block shares, and set to zero what it adds to."""
    draw_block(shared.links, keys.stream, lane0, block)
    fill_pool(
        walk.tables, lane0, keys.residual, work.row, work.order, block.words, work.pool, work.slow
    )
    for rows in (work.state, work.path, work.busy):
        for row in range(rows.shape[0]):
            for lane in range(LANES):
                rows[row, lane] = np.float32(0.0)


@inlined
def _run_phases(walk, shared, keys, lane0, block, work, coef_a, coef_r, again):
    """Run all phases, the local ones replica after replica."""
    graph, tables, stalls, stream = walk.graph, walk.tables, shared.stalls, keys.stream
    vectors, n_rows = work.vectors, work.chosen.shape[0]
    events = (work.ev_op, work.ev_lane, work.ev_delay)
    by_group = stalls.entity == GROUP_STALL
    alone = by_group or graph.n_state == 1  # replicas share the room of shared effects
    filled = 0  # the effects of replicas: 1, of ops over all of them: 2
    for phase in range(graph.phase_global.shape[0]):
        is_global = graph.phase_global[phase]
        at_a_time = 1 if alone or is_global == 1 else n_rows
        for first in range(0, 1 if is_global == 1 else n_rows, at_a_time):
            rows, n_events = (first, first + at_a_time), 0
            for row in range(first, 0 if filled & (1 + is_global) else first + at_a_time):
                r = work.chosen[row]
                whose = TYPICAL if r == graph.n_replicas else LOCAL
                whose = SHARED if is_global == 1 else whose
                kept = vectors[row % graph.n_state]
                fill_bank(shared, tables, stream, lane0, block, whose, r, kept)
            if by_group and is_global == 0:
                r = work.chosen[first]
                n_events = draw_stalls(stalls, tables, stream[STALL], lane0, block.words, r, events)
            run_phase(walk, work, coef_a, coef_r, keys, lane0, phase, rows, n_events, again)
        filled |= 1 + is_global


@inner
def copy_rows(rows, out):
    """Fill out[row, column]; an assignment of arrays takes seconds to compile, for its message."""
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            out[i, j] = rows[i, j]


@inlined
def run_step(walk, shared, keys, lane0, block, work, coef_a, coef_r, out):
    """Run a step; fills time[lane] [s], path[class, lane] [s], busy[stage, lane] [s].

    What is on critical paths is known at the end, and run again.
    """
    graph, (time, path, busy) = walk.graph, out
    final = (graph.n_state - 1) * graph.n_slots + graph.final_slot
    for again in range(2 if work.on.shape[0] > 0 else 1):
        if again == 1:
            find_path(walk, work.chosen, work.on, work.wanted)
        _run_phases(walk, shared, keys, lane0, block, work, coef_a, coef_r, again)
        if again == 0:
            for lane in range(LANES):
                time[lane] = work.state[final, lane]
    copy_rows(work.path, path)
    copy_rows(work.busy, busy)


@jit
def run_blocks(first, walk, shared, keys, block, work, coef_a, coef_r, out):
    """Run blocks first, first + 1, ... under coef_a[block, row, coef, term]; fills `out`."""
    for i in range(coef_a.shape[0]):
        lane0 = (first + i) * LANES
        start_block(walk, shared, keys, lane0, block, work)
        own = out[0][i], out[1][i], out[2][i]
        run_step(walk, shared, keys, lane0, block, work, coef_a[i], coef_r[i], own)


@jit
def run_given(walk, keys, work, coef_a, coef_r, durations):
    """Run a step whose ops take what their vector says, durations[replica, vector, lane] [s].

    Ops over replicas take the first's. coef_a is 1, coef_r 0.
    """
    graph, zero = walk.graph, np.int64(0)  # a literal would compile `run_phase` once more
    for phase in range(graph.phase_global.shape[0]):
        for row in range(1 if graph.phase_global[phase] == 1 else durations.shape[0]):
            if graph.n_state == 1:  # replicas share the room of one
                copy_rows(durations[row], work.vectors[0])
            run_phase(walk, work, coef_a, coef_r, keys, zero, phase, (row, row + 1), zero, zero)
