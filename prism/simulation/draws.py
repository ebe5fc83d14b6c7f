"""The engine's own draws and its lowering, for what is worked out beside a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.distributions.tables import sample_table

if TYPE_CHECKING:
    from prism.simulation.program import Program

Lanes = NDArray[np.float32]
Counts = NDArray[np.int64]
WORD = 4294967296.0  # 32-bit words


def seed_key(seed: int) -> NDArray[np.uint32]:
    """Philox's key under a 64-bit seed [2]."""
    return np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)


def draw_ranks(program: Program, cluster: int, seed: int) -> Lanes:
    """Draw how slow each GPU of a cluster draw is [loading, gpu]."""
    ranks = program.ranks
    x = np.ones((ranks.tables.size, max(1, ranks.n_gpus)), np.float32)
    engine.draw_ranks(ranks, program.tables, cluster, seed_key(seed), x)
    return x


def lower(
    low: engine.Lowering, x: Lanes, replicas: NDArray[np.int64] | None = None
) -> tuple[Lanes, Lanes]:
    """Lower kernels to ops under x[loading, gpu], of some replicas or all.

    Returns
    -------
    float32 [replica, coef, term]
        Seconds.
    float32 [replica, coef]
        Scale of the residual.
    """
    rows = np.arange(low.member.shape[0]) if replicas is None else replicas
    a = np.empty((rows.size, *low.call_cv.shape), np.float32)
    r = np.empty(a.shape[:2], np.float32)
    engine.lower_replicas(low, x, rows, a, r)
    return a, r


class StallDraw(NamedTuple):
    """What is drawn of the stalls of one group in the replicates of a block."""

    stage: int
    hit: NDArray[np.bool_]  # [lane]
    words: NDArray[np.uint32]  # [4, lane]; of words[2] is the length


def stall_groups(program: Program) -> list[tuple[int, int]]:
    """Stage and replica of everything that stalls apart."""
    if program.stalls.entity != engine.GROUP_STALL:
        return [(0, 0)]
    stages = np.flatnonzero(np.diff(program.stalls.op_ptr)).tolist()
    return [(s, r) for r in range(program.graph.n_replicas) for s in stages]


def draw_stalls(program: Program, block: int, seed: int) -> Iterator[StallDraw]:
    """Draw the stalls of every group in a block, as the engine does."""
    key, words = seed_key(seed), np.empty((4, engine.LANES), np.uint32)
    thresholds = program.stalls.probability * WORD
    for stage, replica in stall_groups(program):
        engine.philox_lanes(stage, replica, block * engine.LANES, engine.STALL, key, words)
        yield StallDraw(stage, words[0] < np.uint64(thresholds[stage]), words)


def stalls_in(program: Program, blocks: range, seed: int) -> tuple[Counts, NDArray[np.float64]]:
    """Count the stalls that the engine draws, and sum up their lengths [s], [block, lane]."""
    count = np.zeros((len(blocks), engine.LANES), np.int64)
    length, table = np.zeros(count.shape), program.tables[program.stalls.table]
    for i, block in enumerate(blocks):
        for stall in draw_stalls(program, block, seed):
            if stall.hit.any():
                count[i] += stall.hit
                seconds = program.stalls.duration * (1.0 + sample_table(table, stall.words[2]))
                length[i] += np.where(stall.hit, seconds, 0.0)
    return count, length


def congested_leaves(program: Program, blocks: range, seed: int) -> Counts:
    """Count the leaves that the engine draws as congested [block, lane]."""
    links, key = program.links, seed_key(seed)
    words = np.empty((4, engine.LANES), np.uint32)
    out = np.zeros((len(blocks), engine.LANES), np.int64)
    threshold = np.uint64(links.probability * WORD)
    for i, block in enumerate(blocks):
        for leaf in range(links.n_leaves):
            engine.philox_lanes(leaf, 0, block * engine.LANES, engine.REGIME, key, words)
            out[i] += words[0].astype(np.uint64) < threshold
    return out
