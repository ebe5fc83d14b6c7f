"""Deterministic step times of many placements at once: every effect at its mean, slow nodes slow.

A lane is a placement. Replicas that hold the same nodes end together, so each is run once; what a
replica's ops take is lowered once for all placements in which it comes up.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.simulation.draws import lower, quiet_step, run_lanes
from prism.simulation.program import Program

Array = NDArray[np.float64]
Lanes = NDArray[np.float32]


class Screen:
    """Step times of programs that differ in where nodes are and how slow they are."""

    def __init__(self, program: Program, threads: int = 1) -> None:
        self._step = quiet_step(program)
        self._threads = threads
        self._rows: dict[tuple[bytes, ...], int] = {}
        self._durations: list[NDArray[np.float32]] = []  # by row: [coef]

    def times(self, programs: Iterable[Program]) -> Array:
        """Return the step time of every program, float64 [program], in seconds."""
        batches = _batched((self._replicas(p) for p in programs), engine.LANES)
        with ThreadPoolExecutor(max_workers=self._threads) as pool:
            # a batch is laid out here while those before it run
            parts = [
                (pool.submit(run_lanes, self._step, self._lay(batch)), len(batch))
                for batch in batches
            ]
            times = [part.result()[:n] for part, n in parts]
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


def op_seconds(program: Program, x: Lanes, replicas: NDArray[np.int64] | None = None) -> Lanes:
    """Seconds of every op type under x[loading, gpu], of some replicas or all [replica, coef]."""
    return np.asarray(lower(program.low, x, replicas)[0].sum(axis=2), np.float32)


def _batched(items: Iterable[list[int]], n: int) -> Iterator[list[list[int]]]:
    iterator = iter(items)
    while batch := list(islice(iterator, n)):
        yield batch
