"""Blocks of replicates from the arrays of a step: room for them, and what is drawn before."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from prism.engine.arrays import (
    DRAW,
    LANES,
    NEVER,
    RANK,
    Array,
    Block,
    Keys,
    Lowering,
    Ranks,
    Step,
    Work,
)
from prism.engine.effects import draw_ranks
from prism.engine.lowering import lower_replicas, room_to_lower
from prism.engine.random import POOL_ROW
from prism.engine.step import run_blocks

LINE = 16  # float32 of a line of the cache
BATCH = 1 << 22  # coefficients of blocks that are lowered at a time
KEPT = 1 << 26  # bytes of lowered clusters that are kept, with what they are of
POOL_USES = 32  # of a coef in a step from which on its residuals are of the pool; filling a row
# costs what 32 cost


def choose_pooled(step: Step, n_rows: int) -> tuple[Array, Array, int]:
    """Choose the tables of ops that n_rows replicas run often, for the pool of residuals.

    Returns
    -------
    begin, row : int64 [coef], [table]
        Of `Work`.
    n : int
        Values of the pool under one key.
    """
    drawn = step.ops.kind == DRAW
    coef, table = step.ops.coef[drawn], step.ops.table[drawn]
    uses = n_rows * np.bincount(coef, minlength=step.low.call_cv.shape[0])
    often = uses[coef] >= POOL_USES
    tables, at = np.unique(table[often], return_index=True)
    row, begin = np.full(len(step.tables), -1), np.full(uses.size, -1)
    row[tables[np.argsort(at)]] = POOL_ROW * np.arange(tables.size)
    begin[coef[often]] = row[table[often]]
    return begin, row, POOL_ROW * tables.size


def new_work(step: Step, keys: Keys, chosen: Array, n_tails: int = 0) -> Work:
    """Make room for a block in which the replicas `chosen` are simulated.

    n_tails are the slots whose way to the step's end is asked for: all global slots, or none.
    """
    graph, n = step.graph, chosen.size
    n_keys, n_classes = len(keys.residual), step.share.shape[1]
    begin, row, n_pooled = choose_pooled(step, n)
    n_rows = graph.n_state * graph.n_slots + graph.n_global_slots
    n_drawn, n_events = 2 * n_keys * graph.n_stages, graph.n_stages * LANES

    def lanes(*shape: int) -> Array:
        """Make zeros that begin with a line of the cache: a vector of lanes then is in one line."""
        room = np.zeros(math.prod(shape) * LANES + LINE, np.float32)
        skip = -room.ctypes.data // room.itemsize % LINE
        return room[skip : skip + math.prod(shape) * LANES].reshape(*shape, LANES)

    work = Work(
        chosen=chosen, weight=np.ones(n, np.float32), state=lanes(n_rows + 1),
        path=lanes(n_classes), busy=lanes(graph.n_stages),
        on=np.zeros((n, step.ops.kind.size) if n_classes else (0, 0), np.uint64),
        wanted=np.zeros(n_rows, np.uint64),
        words=np.zeros((n_drawn, 4, LANES), np.uint32), drawn=np.zeros(n_drawn, np.int64),
        base=lanes(2), begin=begin, row=row,
        pool=np.zeros(n_keys * n_pooled + LANES, np.float32), order=np.zeros(POOL_ROW, np.uint32),
        slow=np.zeros((n_keys, POOL_ROW + 1), np.int16),
        vectors=lanes(graph.n_state, step.bank.link.size),
        ev_op=np.zeros(n_events, np.int64), ev_lane=np.zeros(n_events, np.int64),
        ev_delay=np.zeros(n_events, np.float32), tail=lanes(n_tails),
        own=lanes(n if n_tails else 0), after=lanes(2),
    )  # fmt: skip
    work.vectors[:] = 1.0
    work.tail[:] = NEVER
    return work


def new_block(step: Step) -> Block:
    """Make room for what a block draws once."""
    hits = np.zeros((1 + step.links.n_leaves, LANES), np.int32)
    return Block(hits, np.zeros((4, LANES), np.uint32))


def draw_clusters(ranks: Ranks, tables: Array, first: int, n: int, key: Array) -> Array:
    """Draw how slow the GPUs of n cluster draws are, x[cluster, loading, gpu]."""
    x = np.ones((n, ranks.tables.size, max(1, ranks.n_gpus)), np.float32)
    draw_ranks(ranks, tables, first, key, *np.empty((2, 4, LANES), np.uint32), x)
    return x


def room_for_coefs(low: Lowering, *shape: int) -> tuple[Array, Array]:
    """Make room for the coefficients of ops, which have two terms at least."""
    n_coefs, n_terms = low.call_cv.shape
    coef_a = np.zeros((*shape, n_coefs, max(2, n_terms)), np.float32)
    return coef_a, np.zeros(coef_a.shape[:-1], np.float32)


def lower(low: Lowering, x: Array, chosen: Array) -> tuple[Array, Array]:
    """Lower kernels of replicas to ops under x[cluster, loading, gpu].

    Returns
    -------
    float32 [cluster, replica, coef, term]
        Seconds.
    float32 [cluster, replica, coef]
        Scale of the residual.
    """
    coef_a, coef_r = room_for_coefs(low, len(x), chosen.size)
    lower_replicas(low, x, chosen, room_to_lower(low), coef_a, coef_r)
    return coef_a, coef_r


@dataclass
class _Clusters:
    """Clusters of one step, lowered; its objects are kept, so that no other has their ids."""

    of: tuple[Lowering, Ranks, Array]
    found: dict[tuple[Any, ...], tuple[Array, Array]]
    size: int  # bytes


class _Lowered:
    """What the latest steps' clusters were lowered to: a ranking runs them under many keys."""

    def __init__(self) -> None:
        self._steps: OrderedDict[tuple[int, ...], _Clusters] = OrderedDict()
        self._lock = Lock()

    def find(self, first: int, n: int, keys: Keys, step: Step) -> tuple[Array, Array]:
        """Draw clusters and lower all replicas, as `lower` does."""
        of = step.low, step.ranks, step.tables
        ids = tuple(map(id, of))
        key = step.graph.n_replicas, first, n, keys.stream[RANK].tobytes()
        with self._lock:
            if ids not in self._steps:
                self._steps[ids] = _Clusters(of, {}, _count_bytes(*of[0], *of[1], of[2]))
            self._steps.move_to_end(ids)
            clusters = self._steps[ids]
            if key in clusters.found:
                return clusters.found[key]
        x = draw_clusters(step.ranks, step.tables, first, n, keys.stream[RANK])
        found = lower(step.low, x, np.arange(step.graph.n_replicas))
        with self._lock:
            if key not in clusters.found:
                clusters.found[key] = found
                clusters.size += _count_bytes(*found)
            while sum(each.size for each in self._steps.values()) > KEPT:
                self._steps.popitem(last=False)
        return found


def _count_bytes(*values: Any) -> int:
    return sum(x.nbytes for x in values if isinstance(x, np.ndarray))


_lowered = _Lowered()


def run_range(first: int, keys: Keys, step: Step, out: tuple[Array, ...]) -> None:
    """Simulate blocks first, first + 1, ...: 64 replicates each, of one cluster draw.

    Fills time[block, lane] [s], path[block, class, lane] [s] and busy[block, stage, lane] [s].
    """
    n, chosen = len(out[0]), np.arange(step.graph.n_replicas)
    args = step.walk(), step.shared(), keys, new_block(step), new_work(step, keys, chosen)
    size = max(1, BATCH // (chosen.size * step.low.call_cv.size + step.ranks.n_gpus))
    for at in range(0, n, size):
        coefs = _lowered.find(first + at, min(size, n - at), keys, step)
        run_blocks(first + at, *args, *coefs, tuple(values[at : at + size] for values in out))
