"""Step times of many clusters with nothing random but the ranks, at a fraction of a step's cost.

A lane is a cluster here, so rare slow ranks are met often enough; what these times explain of the
clusters' means is a control variate (`prism.common.attribution.ClusterControl`). Without what noise
does to a maximum, they are no estimate of their own.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.simulation.draws import draw_ranks, lower
from prism.simulation.program import Program

Lanes = NDArray[np.float32]


def cluster_times(program: Program, clusters: range, seed: int, threads: int = 1) -> Lanes:
    """Step time of each cluster with every effect but the ranks' at its mean [s].

    Cluster i has the ranks of block i of a run under the same seed.
    """
    batches = [clusters[i : i + engine.LANES] for i in range(0, len(clusters), engine.LANES)]
    step, shape = quiet_step(program), (program.graph.n_replicas, *program.low.call_cv.shape[:1])

    def run(batch: range) -> Lanes:
        seconds = np.zeros((*shape, engine.LANES), np.float32)
        for lane, cluster in enumerate(batch):
            seconds[:, :, lane] = lower(program.low, draw_ranks(program, cluster, seed))[0].sum(2)
        return run_lanes(step, seconds)[: len(batch)]

    with ThreadPoolExecutor(max_workers=threads) as pool:
        return np.concatenate([*pool.map(run, batches), np.zeros(0, np.float32)])


def quiet_step(program: Program) -> engine.Step:
    """Arrays of a step whose ops each take their coefficient's vector, whole; see `run_lanes`.

    Ops that some replicas skip have a further coefficient per vector, and its `Bank.skipped`.
    """
    ops, bank, n = program.ops, program.bank, program.low.call_cv.shape[0]
    coef = ops.coef.copy()
    if bank.skipped.shape[0]:
        some = np.flatnonzero(bank.skipped.any(axis=0))
        own = (ops.kind == engine.DRAW) & np.isin(ops.vec[:, 0], some)
        coef[own] = n + np.searchsorted(some, ops.vec[own, 0])
        whole = np.zeros((bank.skipped.shape[0], n), np.uint8)
        bank = bank._replace(skipped=np.concatenate([whole, bank.skipped[:, some]], axis=1))
    quiet = ops._replace(coef=coef, vec=ops.coef[:, None].copy(), n_terms=np.ones_like(ops.n_terms))
    return program.arrays(track=False)._replace(ops=quiet, bank=bank)


def run_lanes(step: engine.Step, durations: Lanes) -> Lanes:
    """Run a step from `quiet_step` whose ops take other durations in every lane [lane], in seconds.

    `durations` [replica, coef, lane]: as many replicas as are given are run, and ops over replicas
    take the first's.
    """
    graph, shape, skipped = step.graph, durations.shape[:2], step.bank.skipped
    done = 1.0 - skipped if skipped.shape[0] else np.ones(shape)
    graph = graph._replace(n_replicas=shape[0], n_state=shape[0] if graph.n_state > 1 else 1)
    n_rows = graph.n_state * graph.n_slots + graph.n_global_slots
    lanes = engine.LANES
    work = engine.Work(
        chosen=np.arange(shape[0]),
        state=np.zeros((n_rows, lanes), np.float32),
        path=np.zeros((n_rows, 0, lanes), np.float32),
        busy=np.zeros((graph.n_stages, lanes), np.float32),
        words=np.empty((graph.n_stages, 4, lanes), np.uint32),
        drawn=np.empty(graph.n_stages, np.int64),
        base=np.empty(lanes, np.float32), zeros=np.zeros(lanes, np.float32),
        noise=np.empty(lanes, np.float32), vectors=durations,
        coef_a=done[:, :, None].astype(np.float32), coef_r=np.zeros(done.shape, np.float32),
        ev_op=np.zeros(0, np.int64), ev_lane=np.zeros(0, np.int64),
        ev_delay=np.zeros(0, np.float32), other=np.zeros((2, 2), np.uint32),
        mix=np.zeros((0, 3), np.float32), tail=np.zeros((0, lanes), np.float32),
        own=np.zeros((0, lanes), np.float32), after=np.zeros(0, np.float32),
        weight=np.ones(shape[0], np.float32),
    )  # fmt: skip
    words = np.zeros((1, 2), np.uint32)
    block = engine.Block(0, words, words, np.zeros((1, 1), np.bool_), words, step.tables)
    walk = engine.Walk(step.ops, graph, step.share)
    for phase, is_global in enumerate(graph.phase_global):
        if is_global:
            engine.run_phase(walk, block, work, phase, (0, 1), 0)
        elif graph.n_state > 1:
            engine.run_phase(walk, block, work, phase, (0, graph.n_replicas), 0)
        else:  # replicas share the room of one
            for r in range(graph.n_replicas):
                own = work._replace(vectors=durations[r : r + 1])
                engine.run_phase(walk, block, own, phase, (r, r + 1), 0)
    final = (graph.n_state - 1) * graph.n_slots + graph.final_slot
    return np.array(work.state[final])
