"""Draws of what is shared: GPUs of a cluster draw, congestion, shared effects; stalls."""

import math

import numpy as np

from prism.engine.arrays import (
    LANES,
    NODE,
    RANK,
    REGIME,
    STALL,
)
from prism.engine.cache import inlined, inner, jit
from prism.engine.random import lookup, multiply_lanes, philox_lanes

# Whose shared effects: of a replica, of all, or of the typical one, which has only the latter.
LOCAL, SHARED, TYPICAL = 0, 1, 2


@jit
def draw_ranks(ranks, tables, first, key, words, node_words, x):
    """Draw x[cluster, loading, gpu], the persistent slowdowns of cluster draws from `first` on.

    There is room for two draws.
    """
    n_loadings = x.shape[1]
    own_weight = math.sqrt(max(0.0, 1.0 - ranks.node_weight**2))
    for i in range(x.shape[0]):
        node_base = -LANES
        for base in range(0, ranks.n_gpus, LANES):
            philox_lanes(first + i, 0, base, RANK, key, words)
            for lane in range(min(LANES, ranks.n_gpus - base)):
                gpu = base + lane
                u = words[0, lane]
                if ranks.node_weight > 0.0:
                    node = gpu // ranks.gpus_per_node
                    if node >= node_base + LANES or node_base < 0:
                        node_base = node - node % LANES
                        philox_lanes(first + i, 0, node_base, NODE, key, node_words)
                    z_node = lookup(tables, ranks.node_table, node_words[0, node - node_base])
                    z_own = lookup(tables, ranks.node_table, u)
                    z = ranks.node_weight * z_node + own_weight * z_own
                    p = 0.5 * math.erfc(-z * math.sqrt(0.5))
                    u = np.uint32(min(4294967295.0, p * 4294967296.0))
                for j in range(n_loadings):
                    value = ranks.factor[j, gpu]
                    if ranks.tables[j] >= 0:
                        value *= np.float32(1.0) + lookup(tables, ranks.tables[j], u)
                    x[i, j, gpu] = value


@inlined
def draw_block(links, keys, lane0, block):
    """Draw what the lanes of a block share."""
    threshold = np.uint64(links.probability * 4294967296.0)
    for leaf in range(links.n_leaves):
        philox_lanes(leaf, 0, lane0, REGIME, keys[REGIME], block.words)
        for lane in range(LANES):
            hit = np.uint64(block.words[0, lane]) < threshold
            block.hits[leaf + 1, lane] = block.hits[leaf, lane] + np.int32(hit)


@inlined
def _link_lanes(links, hits, replica, link, out):
    """Multiply lanes by the congestion of a link: hit if any leaf it touches is."""
    if links.n_touched[replica, link] == 0:
        return
    begin, end = links.begin[replica, link], links.end[replica, link]
    quiet, congested = links.quiet[replica, link], links.congested[replica, link]
    for lane in range(LANES):
        n = np.int32(0)
        for k in range(begin, end):
            n += hits[links.hi[k], lane] - hits[links.lo[k], lane]
        out[lane] *= congested if n > 0 else quiet


@inner
def fill_bank(shared, tables, keys, lane0, block, whose, replica, vectors):
    """Shared effects of one replica, or of the global ops: vectors[vector, lane], of mean 1."""
    bank, links, wanted = shared.bank, shared.links, np.uint8(whose == SHARED)
    for v in range(bank.is_global.shape[0]):
        if bank.is_global[v] == wanted:
            for lane in range(LANES):
                vectors[v, lane] = np.float32(1.0)
    row = replica % bank.table.shape[1]
    for f in range(bank.table.shape[0]):
        by_replica, stream, drawn = bank.by_replica[f] == 1, bank.stream[f], -1
        if by_replica and whose == TYPICAL:
            continue
        for i in range(bank.order.shape[1]):
            v = bank.order[f, i]
            if bank.is_global[v] != wanted or bank.table[f, row, v] < 0:
                continue
            d = bank.draw[f, v]
            if d >> 2 != drawn:
                drawn = d >> 2
                who = replica if by_replica else 0
                philox_lanes(drawn, who, lane0, stream, keys[stream], block.words)
            multiply_lanes(tables, bank.table[f, row, v], block.words[d & 3], vectors[v])
    for v in range(bank.link.shape[0] if whose != TYPICAL and links.n_leaves > 0 else 0):
        if bank.link[v] >= 0 and bank.is_global[v] == wanted:
            _link_lanes(links, block.hits, replica, bank.link[v], vectors[v])


@inner
def draw_stalls(stalls, tables, key, lane0, words, replica, events):
    """List a replica's stalls (op, lane, delay [s]) in the order of ops; returns how many."""
    ev_op, ev_lane, ev_delay = events
    n = 0
    for stage in range(stalls.op_ptr.shape[0] - 1):
        lo, n_ops = stalls.op_ptr[stage], stalls.op_ptr[stage + 1] - stalls.op_ptr[stage]
        if n_ops == 0:
            continue
        philox_lanes(stage, replica, lane0, STALL, key, words)
        threshold = np.uint64(stalls.probability[stage] * 4294967296.0)
        for lane in range(LANES):
            if np.uint64(words[0, lane]) >= threshold or n >= ev_op.shape[0]:
                continue
            share, pick = words[1, lane] / 4294967296.0, lo
            while pick < lo + n_ops - 1 and stalls.op_share[pick] < share:
                pick += 1
            op = stalls.op[pick]
            delay = stalls.duration * (1.0 + lookup(tables, stalls.table, words[2, lane]))
            i = n
            while i > 0 and ev_op[i - 1] > op:
                ev_op[i], ev_lane[i], ev_delay[i] = ev_op[i - 1], ev_lane[i - 1], ev_delay[i - 1]
                i -= 1
            ev_op[i], ev_lane[i], ev_delay[i] = op, lane, delay
            n += 1
    return n


@jit
def microbatches(replicas, lane0, table, n, stream, key, words, out):
    """Mean and longest microbatch of replicas, of mean 1; out[replica, lane, 2] is zero before.

    table[1, row, 2] is the quantile table of a microbatch, of which a replica has n. There is room
    for a draw.
    """
    for r in range(replicas.shape[0]):
        for m in range(n):
            if m & 3 == 0:
                philox_lanes(m >> 2, replicas[r], lane0, stream, key, words)
            for lane in range(LANES):
                length = np.float32(1.0) + lookup(table, 0, words[m & 3, lane])
                out[r, lane, 0] += length
                out[r, lane, 1] = max(out[r, lane, 1], length)
        for lane in range(LANES):
            out[r, lane, 0] /= np.float32(n)
