"""Deterministic step times of many placements at once: every effect at its mean, slow nodes slow.

A lane is a placement. Replicas that hold the same nodes end together, so each is run once; what a
replica's ops take is lowered once for all placements in which it comes up.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.common.arrays import Array, Index
from prism.simulation.draws import lower, quiet_step, run_lanes
from prism.simulation.execution.context import RunContext
from prism.simulation.execution.tasks import map_threads
from prism.simulation.program import Program

Lanes = NDArray[np.float32]


class Screen:
    """Step times of programs that differ in where nodes are and how slow they are."""

    def __init__(self, program: Program, context: RunContext) -> None:
        self._step = quiet_step(program)
        self._context = context
        self._rows: dict[tuple[bytes, ...], int] = {}
        self._durations: list[NDArray[np.float32]] = []  # by row: [coef]

    def times(self, programs: Iterable[Program]) -> Array:
        """Return the step time of every program, float64 [program], in seconds."""
        batches = list(_batched((self._replicas(p) for p in programs), engine.LANES))

        def run(batch: Sequence[list[int]]) -> Lanes:
            return run_lanes(self._step, self._lay(batch))[: len(batch)]

        times = map_threads(run, batches, self._context)
        return np.concatenate([*times, np.zeros(0)]).astype(np.float64)

    def _replicas(self, program: Program) -> list[int]:
        """Rows of a program's distinct replicas, first the first one's: collectives take that."""
        low, factor = program.low, program.ranks.factor
        n, n_fixed = low.member.shape[0], low.fixed_mean.shape[0]
        parts = [x.take(low.member).reshape(n, -1) for x in factor]
        parts += [low.fixed_mean.reshape(n, -1)] if n_fixed > 1 else []
        fixed = low.fixed_mean.tobytes() if n_fixed == 1 else b""
        alike = np.ones(n, bool)  # to the last one, as most are
        for part in parts:
            alike &= (part == part[-1]).all(axis=1)
        alike[alike.argmax()] = False
        keys: dict[tuple[bytes, ...], int] = {}
        for r in np.flatnonzero(~alike).tolist():
            keys.setdefault((fixed, *(part[r].tobytes() for part in parts)), r)
        new = {key: r for key, r in keys.items() if key not in self._rows}
        if new:
            found = op_seconds(program, factor, np.array(list(new.values())))
            self._rows |= zip(new, range(len(self._rows), len(self._rows) + len(new)), strict=True)
            self._durations += list(found)
        return [self._rows[key] for key in keys]

    def _lay(self, batch: Sequence[list[int]]) -> NDArray[np.float32]:
        """Durations of a batch [replica, coef, lane]; a lane's last replica fills up."""
        most = max(len(rows) for rows in batch)
        full = [rows + rows[-1:] * (most - len(rows)) for rows in batch]
        full += full[-1:] * (engine.LANES - len(full))
        used, index = np.unique(np.array(full), return_inverse=True)
        table = np.stack([self._durations[row] for row in used])
        by_lane = table[index.reshape(engine.LANES, most)]
        return np.ascontiguousarray(np.moveaxis(by_lane, 0, -1))


def op_seconds(program: Program, x: Lanes, replicas: Index | None = None) -> Lanes:
    """Seconds of every op type under x[loading, gpu], of some replicas or all [replica, coef]."""
    return np.asarray(lower(program.low, x, replicas)[0].sum(axis=2), np.float32)


def _batched(items: Iterable[list[int]], n: int) -> Iterator[list[list[int]]]:
    iterator = iter(items)
    while batch := list(islice(iterator, n)):
        yield batch
