"""Many clusters at little cost: quiet step times of placements, cluster by cluster.

A p95 over random clusters rests on rare slow GPUs, which the few clusters that whole steps are
simulated on hardly meet. Here nothing is random but the ranks, a lane is a cluster, and between
placements only the replicas that changed are lowered anew. See `prism.simulation.draws`.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.simulation.draws import cluster_times, draw_ranks, lower, quiet_step, run_lanes
from prism.simulation.program import Program

Array = NDArray[np.float64]
Lanes = NDArray[np.float32]
MOST_SLOPE = 1.25  # of a cluster's mean step over its quiet time


class QuietClusters:
    """Quiet step times of programs on the same n clusters, a multiple of 64.

    They differ from a first one in where nodes are.
    """

    def __init__(self, program: Program, n: int, seed: int, threads: int) -> None:
        self.program, self.seed, self.threads = program, seed, threads
        self.batches = [range(i, i + engine.LANES) for i in range(0, n, engine.LANES)]
        self.n = n

    @cached_property
    def varies(self) -> bool:
        """Whether anything is drawn once per cluster."""
        return bool((self.program.ranks.tables >= 0).any())

    @cached_property
    def _base(self) -> list[tuple[list[Lanes], Lanes]]:
        """Ranks of every cluster, and durations [replica, coef, lane], by batch."""
        with ThreadPoolExecutor(max_workers=self.threads) as pool:
            return list(pool.map(self._draw, self.batches))

    def _draw(self, clusters: range) -> tuple[list[Lanes], Lanes]:
        program = self.program
        shape = (program.graph.n_replicas, program.low.call_cv.shape[0], engine.LANES)
        drawn, durations = [], np.empty(shape, np.float32)
        for lane, cluster in enumerate(clusters):
            drawn.append(draw_ranks(program, cluster, self.seed))
            durations[:, :, lane] = op_seconds(program, drawn[-1])
        return drawn, durations

    def times(self, program: Program) -> Array:
        """Return the quiet step time of a program on every cluster [cluster], in seconds."""
        if not self.varies:
            return np.zeros(self.n)
        if not self._shares_ranks(program):
            quiet = cluster_times(program, range(self.n), self.seed, self.threads)
            return quiet.astype(np.float64)
        low, base = program.low, self.program.low
        changed = (low.member != base.member).any(axis=(1, 2))
        if low.fixed_mean.shape != base.fixed_mean.shape:
            changed[:] = True
        else:
            rows = (low.fixed_mean != base.fixed_mean).any(axis=(1, 2))
            changed |= rows[np.arange(changed.size) % rows.size]
        replicas = np.flatnonzero(changed)
        step = quiet_step(program)

        def run(batch: tuple[list[Lanes], Lanes]) -> Lanes:
            drawn, durations = batch[0], batch[1].copy()
            if replicas.size:
                for lane, x in enumerate(drawn):
                    durations[replicas, :, lane] = op_seconds(program, x, replicas)
            return run_lanes(step, durations)

        with ThreadPoolExecutor(max_workers=self.threads) as pool:
            return np.concatenate(list(pool.map(run, self._base))).astype(np.float64)

    def _shares_ranks(self, program: Program) -> bool:
        """Whether a program's GPUs are as fast as the base's, and its ops the same."""
        own, base = program.low, self.program.low
        return (
            np.array_equal(program.ranks.factor, self.program.ranks.factor)
            and own.call_cv.shape == base.call_cv.shape
            and own.member.shape == base.member.shape
            and np.array_equal(own.seg_mean, base.seg_mean)
            and np.array_equal(own.coef_count, base.coef_count)
        )


def op_seconds(program: Program, x: Lanes, replicas: NDArray[np.int64] | None = None) -> Lanes:
    """Seconds of every op type under x[loading, gpu], of some replicas or all [replica, coef]."""
    return np.asarray(lower(program.low, x, replicas)[0].sum(axis=2), np.float32)


def spread(times: Array, quiet: Array, slope: float) -> Array:
    """Give simulated times[cluster, lane] the places of many more clusters, by their quiet times.

    The first ones of `quiet` are the simulated clusters. As in
    `prism.common.attribution.spread_clusters`, under a slope that programs share. It is held within
    what is possible: a cluster's mean follows its quiet time one to one at most, but for what
    shared noise multiplies, and rare stalls in few clusters would make it anything.
    """
    n, slope = times.shape[0], float(np.clip(slope, 0.0, MOST_SLOPE))
    if slope == 0.0 or quiet.size < 2 * n:
        return times
    others = quiet[: quiet.size - quiet.size % n].reshape(-1, n)
    moved = times[:, None, :] + slope * (others - others[0]).T[:, :, None]
    return np.ascontiguousarray(moved.reshape(n, -1))
