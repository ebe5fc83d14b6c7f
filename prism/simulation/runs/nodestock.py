"""Spare nodes of runs: how long a run waits for them, or how many replicas it goes on without."""

import numpy as np

from prism.simulation.runs.parts import Array, Index, Interruptions
from prism.simulation.runs.rates import waiting_times

TINY = 1e-9  # nodes of a replica may be a fraction


class NodeStock:
    """When spares [run, node], and nodes that are missing [node, run], are there, ascending."""

    def __init__(self, fail: Interruptions, n_runs: int) -> None:
        self.spares = None if fail.spares is None else np.zeros((n_runs, fail.spares))
        self.away = np.zeros((0, n_runs))
        self.shrink, self.n_nodes, self.rate_per_s = fail.shrink, fail.n_nodes, fail.rate_per_s

    def take(
        self, runs: Index, at: Array, nodes: Array, repair_s: Array, rng: np.random.Generator
    ) -> Array:
        """Seconds until a run can go on; what failed together becomes spares together, in turn."""
        if self.spares is None:
            return np.zeros(runs.size)
        repaired = at + rng.standard_exponential(runs.size) * repair_s
        for n in sorted({*map(int, nodes)}):
            own = np.flatnonzero(nodes == n)
            back = np.broadcast_to(repaired[own][:, None], (own.size, n))
            held = np.concatenate([self.spares[runs[own]], back], axis=1)
            held.sort(axis=1)
            self.spares[runs[own]] = held[:, n:]
            self.away = np.vstack([np.full((n, self.away.shape[1]), -np.inf), self.away])
            self.away[:n, runs[own]] = held[:, :n].T
        away = np.sort(np.where(self.away[:, runs] > at, self.away[:, runs], -np.inf), axis=0)
        self.away[:, runs] = away
        self.away = self.away[np.isfinite(self.away).any(axis=1)]
        # a replica is needed, or all
        most = (
            0 if self.shrink is None else int((self.shrink.replicas - 1) * self.shrink.nodes + TINY)
        )
        return np.maximum(away[-1 - most] - at, 0.0) if most < len(away) else np.zeros(runs.size)

    def fails_at(self, runs: Index, at: Array, rng: np.random.Generator) -> Array:
        """Draw when the next node fails, as those that are away cannot."""
        gap = waiting_times(rng, np.full(runs.size, self.rate_per_s))  # where all are there
        if not len(self.away):
            return at + gap
        edges = np.vstack([at, np.maximum(self.away[:, runs], at)])
        there = np.maximum(1.0 - np.arange(len(edges) - 1.0, -1.0, -1.0) / self.n_nodes, 0.0)
        passed = np.zeros(edges.shape)
        passed[1:] = np.cumsum(there[:-1, None] * np.diff(edges, axis=0), axis=0)
        row, run = (passed <= gap).sum(axis=0) - 1, np.arange(runs.size)
        return np.asarray(edges[row, run] + (gap - passed[row, run]) / there[row])

    def fewer(self, runs: Index, at: Array) -> tuple[Array, Array]:
        """How many times as long steps take without the missing replicas; when one more is whole.

        Ranks are laid anew at a restart, so that missing nodes are of as few replicas as can be.
        """
        assert self.shrink is not None
        replicas, nodes = self.shrink
        away = self.away[:, runs]
        lost = np.ceil((away > at).sum(axis=0) / nodes - TINY)
        row = len(away) - 1 - np.floor(np.maximum(lost - 1.0, 0.0) * nodes + TINY).astype(np.int64)
        whole = np.full(runs.size, np.inf)
        some = lost > 0.0
        whole[some] = away[row[some], np.flatnonzero(some)]
        return replicas / np.maximum(replicas - lost, 1.0), whole
