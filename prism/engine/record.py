"""One replicate of a block, op by op, as a timeline needs it."""

import numpy as np

from prism.engine.arrays import GROUP_STALL, LANES, Graph, Walk
from prism.engine.cache import inner, jit
from prism.engine.effects import (
    LOCAL,
    SHARED,
    draw_block,
    draw_cluster,
    draw_stalls,
    end_block,
    fill_bank,
)
from prism.engine.lowering import lower_replicas
from prism.engine.step import new_work, run_phase


@inner
def _record_row(walk, block, work, place, n_events, ends):
    """Run the ops of place = (phase, row, lane), and keep ends[op] before slots are used again."""
    phase, row, lane = place
    g, out = walk.graph, walk.ops.out
    kinds, lo, hi = np.zeros(1, np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64)
    graph = Graph(
        kinds, lo, hi, g.n_replicas, g.n_state, g.n_slots, g.n_global_slots, g.n_stages,
        g.final_slot,
    )  # fmt: skip
    one = Walk(walk.ops, graph, walk.share)  # of a single phase, which is the op at hand
    kinds[0] = g.phase_global[phase]
    shift = g.n_state * g.n_slots - g.n_slots
    local = (row % g.n_state) * g.n_slots
    for op in range(g.phase_lo[phase], g.phase_hi[phase]):
        lo[0], hi[0] = op, op + 1
        run_phase(one, block, work, np.int64(0), (row, row + 1), n_events)
        po = out[op]
        ends[op] = work.state[po + (local if po < g.n_slots else shift), lane]


@jit
def record_block(index, lane, keys, step, ends, out_time):
    """Simulate a block as `run_range` does, and record ends[replica, op] [s] of one lane.

    Ends of global ops stand in the first row; those of exports are the latest so far. What stops
    the whole job is in out_time[lane] [s] alone.
    """
    graph, n = step.graph, step.graph.n_replicas
    low, walk = step.low, Walk(step.ops, graph, step.share)
    x = draw_cluster(index, keys.stream, step.ranks, step.tables)
    block = draw_block(index, keys.stream, step.links, step.tables)
    shape = (low.call_cv.shape[0], low.call_cv.shape[1], step.bank.mb.shape[0])
    work = new_work(walk, keys, shape, np.arange(n), 0, block)
    lower_replicas(low, x, work.chosen, work.coef_a, work.coef_r)
    vectors, filled = work.vectors, False
    happened = (work.ev_op, work.ev_lane, work.ev_delay)
    stalls = step.stalls.entity == GROUP_STALL
    zero, first, lane = np.int64(0), np.int64(1), np.int64(lane)
    shared, own = np.int64(SHARED), np.int64(LOCAL)
    fill_bank(step.bank, step.links, block, shared, zero, vectors[0])
    for phase in range(graph.phase_global.shape[0]):
        is_global = graph.phase_global[phase] == 1
        for row in range(first if is_global else n):
            events = zero
            if not is_global and not filled:
                fill_bank(step.bank, step.links, block, own, row, vectors[row % graph.n_state])
            if not is_global and stalls:
                events = draw_stalls(step.stalls, block, row, happened)
            _record_row(walk, block, work, (phase, row, lane), events, ends[row])
        filled = filled or not is_global
    final = (graph.n_state - 1) * graph.n_slots + graph.final_slot
    for i in range(LANES):
        out_time[i] = work.state[final, i]
    end_block(step.stalls, step.jitter, step.step_table, block, out_time, np.empty_like(out_time))
