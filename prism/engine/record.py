"""One replicate of a block, op by op, as a timeline needs it."""

import numpy as np

from prism.engine.arrays import (
    GROUP_STALL,
    LANES,
    OUT,
    RANK,
    STALL,
    Array,
    Graph,
    Keys,
    Step,
    Walk,
)
from prism.engine.blocks import draw_clusters, lower, new_block, new_work
from prism.engine.cache import inner, jit
from prism.engine.effects import LOCAL, SHARED, draw_stalls, fill_bank
from prism.engine.step import run_phase, start_block


@inner
def _record_row(walk, work, coefs, keys, lane0, place, n_events, only, ends):
    """Run the ops of place = (phase, row, lane), and keep ends[op] before slots are used again.

    There is room for the phases of a graph that has but one.
    """
    phase, row, lane = place
    zero = np.int64(0)  # literals would compile every callee once more
    g, ops = walk.graph, walk.ops
    kinds, lo, hi = only
    graph = Graph(
        kinds, lo, hi, g.n_replicas, g.n_state, g.n_slots, g.n_global_slots, g.n_stages,
        g.final_slot,
    )  # fmt: skip
    one = Walk(ops, graph, walk.share, walk.tables)  # of a single phase, which is the op at hand
    kinds[0] = g.phase_global[phase]
    shift = g.n_state * g.n_slots - g.n_slots
    local = (row % g.n_state) * g.n_slots
    for op in range(g.phase_lo[phase], g.phase_hi[phase]):
        lo[0], hi[0] = op, op + 1
        run_phase(one, work, coefs[0], coefs[1], keys, lane0, zero, (row, row + 1), n_events, zero)
        po = ops[op, OUT]
        ends[op] = work.state[po + (local if po < g.n_slots else shift), lane]


@jit
def _record(index, lane, walk, shared, keys, block, work, coefs, only, ends):
    graph, stalls, stream, lane0 = walk.graph, shared.stalls, keys.stream, index * LANES
    vectors, filled = work.vectors, False
    happened = (work.ev_op, work.ev_lane, work.ev_delay)
    start_block(walk, shared, keys, lane0, block, work)
    zero, of_all, of_one = np.int64(0), np.int64(SHARED), np.int64(LOCAL)
    fill_bank(shared, walk.tables, stream, lane0, block, of_all, zero, vectors[0])
    for phase in range(graph.phase_global.shape[0]):
        is_global = graph.phase_global[phase] == 1
        for row in range(1 if is_global else graph.n_replicas):
            events, kept = zero, vectors[row % graph.n_state]
            if not is_global and not filled:
                fill_bank(shared, walk.tables, stream, lane0, block, of_one, row, kept)
            if not is_global and stalls.entity == GROUP_STALL:
                key, words = stream[STALL], block.words
                events = draw_stalls(stalls, walk.tables, key, lane0, words, row, happened)
            place = (phase, row, lane)
            _record_row(walk, work, coefs, keys, lane0, place, events, only, ends[row])
        filled = filled or not is_global


def record_block(index: int, lane: int, keys: Keys, step: Step, ends: Array) -> Array:
    """Simulate a block as `run_range` does, and record ends[replica, op] [s] of one lane.

    Ends of global ops stand in the first row; those of exports are the latest so far. Returns the
    ends of the step [lane] [s].
    """
    graph, chosen = step.graph, np.arange(step.graph.n_replicas)
    x = draw_clusters(step.ranks, step.tables, index, 1, keys.stream[RANK])
    coef_a, coef_r = lower(step.low, x, chosen)
    work = new_work(step, keys, chosen)
    args = step.walk(), step.shared(), keys, new_block(step), work
    only = np.zeros(1, np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64)
    _record(index, lane, *args, (coef_a[0], coef_r[0]), only, ends)
    return np.asarray(work.state[(graph.n_state - 1) * graph.n_slots + graph.final_slot])
