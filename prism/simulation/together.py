"""Variants of one step simulated together: what they draw alike is drawn and looked up once.

Three quarters of a simulation are residuals. Interventions, and runs with one input redrawn, are
the same step but for some durations, shared effects or keys: each takes what it would take alone,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.engine import LANES
from prism.simulation.draws import draw_ranks, final_ends, lower, make_work, run_phase
from prism.simulation.execution.tasks import Arrays
from prism.simulation.program import Program

BUFFERS = 1 << 27  # bytes of ends, durations and shared effects of one thread, about
WIRING = ("kind", "pred0", "pred1", "out", "coef", "draw", "stage", "busy")  # of `engine.Ops`


class Variant(NamedTuple):
    """What a step does not share with others, and the keys of its run."""

    bank: engine.Bank
    links: engine.Links
    ranks: engine.Ranks
    low: engine.Lowering
    stalls: engine.Stalls
    jitter: engine.Jitter
    tables: NDArray[np.float32]
    step_table: int
    keys: engine.Keys


class Together(NamedTuple):
    """Variants of a step, laid out one after another."""

    walk: engine.Walk
    variants: list[Variant]
    ops: engine.Ops  # vec, n_terms and table of all
    tables: NDArray[np.float32]  # which these are looked up in
    residual: NDArray[np.uint32]  # [key, 2] of all
    mix: NDArray[np.float32]  # [variant * coef, key]

    @property
    def n_terms(self) -> int:
        """Terms that an op has at most."""
        return int(self.ops.vec.shape[1])

    @property
    def n_vectors(self) -> int:
        """Shared effects that a replica has at most."""
        return max(v.bank.mb.size for v in self.variants)


def group_variants(programs: Sequence[Program]) -> list[list[int]]:
    """Group programs that can be run together, by index, within what a thread may hold.

    They wait for each other alike, simulate all replicas, and no group of ranks stalls by itself.
    """
    groups: list[list[int]] = []
    for i, program in enumerate(programs):
        for group in groups:
            first = programs[group[0]]
            if len(group) < _most(first) and _alike(first, program):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _most(program: Program) -> int:
    """Return how many variants a thread may hold; one where they cannot be run together."""
    stalls, graph = program.stalls, program.graph
    if program.sample is not None:
        return 1
    if stalls.entity == engine.GROUP_STALL and stalls.duration > 0.0:
        return 1
    ends = graph.n_state * (graph.n_slots + program.bank.mb.size) + graph.n_global_slots
    each = 4 * (LANES * ends + graph.n_replicas * program.low.fixed_mean[0].size)
    return max(1, int(BUFFERS // each))


def _alike(a: Program, b: Program) -> bool:
    if _most(b) == 1 or a.shares.shape[0] != b.shares.shape[0]:
        return False
    pairs: list[tuple[Any, Any]] = [(getattr(a.ops, w), getattr(b.ops, w)) for w in WIRING]
    pairs += zip(a.graph, b.graph, strict=True)
    return all(x is y or np.array_equal(x, y) for x, y in pairs)


def lay_out(programs: Sequence[Program], keys: Sequence[engine.Keys]) -> Together:
    """Lay programs that are alike one after another, each under its keys."""
    first, n_coefs = programs[0], programs[0].shares.shape[0]
    index: dict[bytes, int] = {}  # of tables of the same contents
    tables: list[NDArray[np.float32]] = []
    vec, n_terms, table = [], [], []
    width = max(program.ops.vec.shape[1] for program in programs)
    for program in programs:
        own = np.empty(len(program.tables), np.int32)
        for i, each in enumerate(program.tables):
            own[i] = index.setdefault(each.tobytes(), len(tables))
            tables += [each] if own[i] == len(tables) else []
        ops = program.ops
        vec.append(np.pad(ops.vec, ((0, 0), (0, width - ops.vec.shape[1]))))
        n_terms.append(ops.n_terms)
        table.append(own[ops.table])
    which = {tuple(words): words for key in keys for words in key.residual}  # in order of first use
    n_keys = 3 if len(which) > 1 else 1  # as `engine.Keys` may have
    mix = np.zeros((len(programs), n_coefs, n_keys), np.float32)
    for v, key in enumerate(keys):
        for k, words in enumerate(key.residual):
            mix[v, :, list(which).index(tuple(words))] += key.mix[:, k] if len(key.mix) else 1.0
    residual = np.zeros((n_keys, 2), np.uint32)
    residual[: len(which)] = list(which.values())
    ops = first.ops._replace(
        vec=np.concatenate(vec), n_terms=np.concatenate(n_terms), table=np.concatenate(table)
    )
    variants = [
        Variant(p.bank, p.links, p.ranks, p.low, p.stalls, p.jitter, p.tables, p.step_table, key)
        for p, key in zip(programs, keys, strict=True)
    ]
    step = first.arrays(track=False)
    walk = engine.Walk(step.ops, step.graph, step.share)
    return Together(walk, variants, ops, np.stack(tables), residual, mix.reshape(-1, n_keys))


def run_together(together: Together, first: int, n: int) -> Arrays:
    """Run blocks first, first + 1, ...: step time [s] and effect [1], [block, variant, lane]."""
    shape = (n, len(together.variants), LANES)
    time, effect = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for i in range(n):
        _run_block(together, first + i, time[i], effect[i])
    return time, effect


def _run_block(
    together: Together, index: int, time: NDArray[np.float32], effect: NDArray[np.float32]
) -> None:
    walk, variants = together.walk, together.variants
    n_rows, n_state = walk.graph.n_replicas, walk.graph.n_state
    each = 4 * LANES * len(variants) * together.n_vectors
    n_rooms = n_rows if n_state > 1 else min(n_rows, max(1, BUFFERS // each))
    vectors = np.ones((len(variants), n_rooms, together.n_vectors, LANES), np.float32)

    words = np.zeros((4, LANES), np.uint32)
    none = np.zeros((1, LANES), np.bool_)
    lane0 = index * LANES
    keys = variants[0].keys.stream
    block = engine.Block(lane0, keys, words, none, words.copy(), together.tables)
    fill = partial(_fill, variants, index, vectors)
    fill(range(n_rooms))
    a, r = _lower(together, index)
    work = make_work(
        walk, vectors.reshape(-1, *vectors.shape[2:]), a, r, together.residual, together.mix,
        together.ops,
    )  # fmt: skip
    for phase, is_global in enumerate(walk.graph.phase_global):
        run_phase(walk, block, work, phase, range(n_rooms))
        for row in range(n_rooms, 0 if is_global else n_rows, n_rooms):
            rows = range(row, min(row + n_rooms, n_rows))
            fill(rows)
            run_phase(walk, block, work, phase, rows)
    time[:] = final_ends(walk, work)
    for v, variant in enumerate(variants):
        key = variant.keys.stream
        engine.philox_lanes(0, 0, lane0, engine.STEP, key[engine.STEP], words)
        own = block._replace(keys=key, tables=variant.tables)
        engine.end_block(
            variant.stalls, variant.jitter, variant.step_table, own, time[v], effect[v]
        )


def _fill(
    variants: Sequence[Variant], index: int, vectors: NDArray[np.float32], rows: range
) -> None:
    """Fill the shared effects of some replicas, vectors[variant, room, vector, lane]."""
    for v, variant in enumerate(variants):
        bank, links, tables = variant.bank, variant.links, variant.tables
        span = (rows.start, rows.stop)
        engine.fill_rows(index, variant.keys, bank, links, tables, span, vectors[v])


def _lower(together: Together, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Lower the kernels of all variants, those of the same kernels on the same GPUs once."""
    known: dict[tuple[int, int, bytes], tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    found = []
    for variant in together.variants:
        key = variant.keys.stream[engine.RANK]
        same = id(variant.low), id(variant.ranks), key.tobytes()
        if same not in known:
            a, r = lower(variant.low, draw_ranks(variant.ranks, variant.tables, index, key))
            short = together.n_terms - a.shape[2]
            known[same] = np.pad(a, ((0, 0), (0, 0), (0, short))), r
        found.append(known[same])
    a = np.concatenate([a.reshape(-1, together.n_terms) for a, _ in found])
    return a, np.concatenate([r.ravel() for _, r in found])
