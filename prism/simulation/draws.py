"""The engine's own draws and its lowering, for what is worked out beside a simulation.

In `cluster_times` nothing is random but the ranks, and a lane is a cluster, so that rare slow ranks
are met often enough; what these times explain of the clusters' means is a control variate
(`prism.common.attribution.ClusterControl`). Without what noise does to a maximum, they are no
estimate of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.distributions.tables import sample_table, table_row
from prism.simulation.execution.context import RunContext
from prism.simulation.execution.tasks import map_threads

if TYPE_CHECKING:
    from prism.simulation.added import Added
    from prism.simulation.program import Program

Lanes = NDArray[np.float32]
Counts = NDArray[np.int64]
WORD = 4294967296.0  # 32-bit words
NO_KEY = np.zeros((1, 2), np.uint32)  # where nothing is drawn


def seed_key(seed: int) -> NDArray[np.uint32]:
    """Philox's key under a 64-bit seed [2]."""
    return np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)


def draw_ranks(ranks: engine.Ranks, tables: Lanes, cluster: int, key: NDArray[np.uint32]) -> Lanes:
    """Draw how slow each GPU of a cluster draw is [loading, gpu]."""
    return np.asarray(engine.draw_clusters(ranks, tables, cluster, 1, key)[0])


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
    a, r = engine.lower(low, x[None], rows)
    return a[0], r[0]


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


def spread_values(table: Lanes) -> NDArray[np.float64]:
    """Values of a table at evenly spaced probabilities."""
    words = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) + np.uint32(1 << 15)
    return sample_table(table, words)


def stall_lengths(program: Program) -> NDArray[np.float64]:
    """Lengths of stalls at evenly spaced probabilities [s]."""
    return program.stalls.duration * (1.0 + spread_values(program.tables[program.stalls.table]))


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


class Lowered:
    """Seconds of replicas by cluster, of programs that differ in where nodes are and how slow.

    A replica that has the same GPUs, as slow, as one of the first program takes as long.
    """

    def __init__(self) -> None:
        self._first: tuple[Program, int] | None = None  # and its seed
        self._place: dict[tuple[bytes, ...], int] = {}  # of its replicas
        self._seconds: dict[int, Lanes] = {}  # by cluster: [replica, coef]

    def places(self, program: Program, seed: int) -> Counts | None:
        """Find each replica in the first program [replica], -1: nowhere; None for another one."""
        low, factor = program.low, program.ranks.factor
        kept = low.fixed_mean.shape[0]
        keys: list[tuple[bytes, ...]] = [
            (gpus.tobytes(), factor[:, gpus].tobytes(), low.fixed_mean[r % kept].tobytes())
            for r, gpus in enumerate(low.member)
        ]
        if self._first and self._first[1] == seed and _lowers_alike(self._first[0], program):
            return np.array([self._place.get(key, -1) for key in keys])
        self._first, self._seconds = (program, seed), {}
        self._place = {key: r for r, key in enumerate(keys)}
        return None

    def find(self, low: engine.Lowering, x: Lanes, cluster: int, places: Counts | None) -> Lanes:
        """Seconds of all replicas of a cluster [replica, coef]."""
        known = self._seconds.get(cluster)
        if places is None or known is None:
            whole = np.asarray(lower(low, x)[0].sum(axis=2))
            if places is None:
                self._seconds[cluster] = whole
            return whole
        out, new = known[places], np.flatnonzero(places < 0)
        if new.size:
            out[new] = lower(low, x, new)[0].sum(axis=2)
        return out


def _lowers_alike(a: Program, b: Program) -> bool:
    """Tell whether programs draw the same ranks and lower the same segments."""
    apart = {"member", "fixed_mean", "fixed_var"}
    pairs = [(getattr(a.low, n), getattr(b.low, n)) for n in a.low._fields if n not in apart]
    ranks = a.ranks._replace(factor=b.ranks.factor)
    pairs += [*zip(ranks, b.ranks, strict=True), (a.tables, b.tables)]
    return all(x is y or np.array_equal(x, y) for x, y in pairs)


def cluster_times(
    program: Program, clusters: range, context: RunContext, known: Lowered | None = None
) -> Lanes:
    """Step time of each cluster with every effect but the ranks' at its mean [s].

    Cluster i has the ranks of block i of a run under the same seed. What is `known` of programs
    with the same kernels is not worked out again.
    """
    size = max(1, min(engine.LANES, -(-len(clusters) // context.threads)))
    batches = [clusters[i : i + size] for i in range(0, len(clusters), size)]
    draw = partial(draw_ranks, program.ranks, program.tables, key=seed_key(context.seed))
    step, shape = quiet_step(program), (program.graph.n_replicas, *program.low.call_cv.shape[:1])
    known = known or Lowered()
    places = known.places(program, context.seed)

    def run(batch: range) -> Lanes:
        seconds = np.zeros((*shape, engine.LANES), np.float32)
        for lane, cluster in enumerate(batch):
            seconds[:, :, lane] = known.find(program.low, draw(cluster), cluster, places)
        return run_lanes(step, seconds)[: len(batch)]

    return np.concatenate([*map_threads(run, batches, context), np.zeros(0, np.float32)])


def quiet_step(program: Program) -> engine.Step:
    """Arrays of a step whose ops each take their coefficient's vector, whole; see `run_lanes`."""
    ops = program.ops
    quiet = ops._replace(vec=ops.coef[:, None].copy(), n_terms=np.ones_like(ops.n_terms))
    return program.arrays(track=False)._replace(ops=quiet)


def run_lanes(step: engine.Step, durations: Lanes) -> Lanes:
    """Run a step from `quiet_step` whose ops take other durations in every lane [lane], in seconds.

    `durations` [replica, coef, lane]: as many replicas as are given are run, and ops over replicas
    take the first's.
    """
    n = len(durations)
    graph = step.graph._replace(n_replicas=n, n_state=n if step.graph.n_state > 1 else 1)
    step, keys = step._replace(graph=graph), engine.Keys(NO_KEY, NO_KEY, np.zeros(0, np.int64))
    own = durations if graph.n_state > 1 else durations[:1].copy()
    work = engine.new_work(step, keys, np.arange(n))._replace(vectors=own)
    coef_a, coef_r = engine.room_for_coefs(step.low, n)
    coef_a[..., 0] = 1.0
    engine.run_given(step.walk(), keys, work, coef_a, coef_r, durations)
    return np.array(work.state[(graph.n_state - 1) * graph.n_slots + graph.final_slot])


def look_up(table: Lanes, words: NDArray[np.uint32]) -> Lanes:
    """Values of a table in 32 bits, as the engine looks them up."""
    row, fraction = table_row(words)
    return np.asarray(table[row, 0] + table[row, 1] * fraction.astype(np.float32))


def end_blocks(
    step: engine.Step, added: Sequence[Added], first: int, key: NDArray[np.uint32], time: Lanes
) -> Lanes:
    """Add stalls of the job and what is `added` to time[block, lane] [s]; give the step effect.

    The blocks are `first` and those that follow; key[stream] are the keys of a run.
    """
    stalls, words = step.stalls, np.empty((4, *time.shape), np.uint32)

    def draw(stream: int) -> None:
        flat = words.reshape(4, -1)
        engine.philox_lanes(0, 0, first * engine.LANES, stream, key[stream], flat)

    if stalls.entity == engine.JOB_STALL:
        draw(engine.STALL)
        hit = words[0] < np.uint64(stalls.probability[0] * WORD)
        share = 1.0 + look_up(step.tables[stalls.table], words[2]).astype(np.float64)
        time *= np.float32(stalls.quiet)
        time += np.where(hit, stalls.duration * share, 0.0).astype(np.float32)
    for each in added:
        draw(each.stream)
        time += each.draw(words, time.astype(np.float64)).astype(np.float32)
    if step.step_table < 0:
        return np.ones_like(time)
    draw(engine.STEP)
    return np.float32(1.0) + look_up(step.tables[step.step_table], words[0])
