"""Interventions: what a step would be if one cause of its variation were fixed.

A frozen kernel class has every random multiplier at its median, those that it shares included; a
frozen effect has all its draws there. Congestion has two levels and none between: it is held at its
mean, 1, so that it neither delays nor saves. The graph and the keys stay.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.distributions.tables import N_CELLS, sample_table
from prism.simulation.causes import has_fixed_ranks
from prism.simulation.program import Program
from prism.simulation.variability import Treatment

Int = NDArray[np.int32]


class _Tables:
    """Tables of a program, and copies of them held at their median."""

    def __init__(self, program: Program) -> None:
        self.tables = program.tables
        self.index: dict[int, int] = {}
        self.extra: list[NDArray[np.float32]] = []

    def __call__(self, indices: Int) -> Int:
        """Return indices of the changed tables; -1 stays."""
        out = np.array([self._one(int(i)) for i in np.ravel(indices)], np.int32)
        return np.ascontiguousarray(out.reshape(np.shape(indices)), np.int32)

    def _one(self, i: int) -> int:
        if i < 0:
            return -1
        if i not in self.index:
            self.index[i] = len(self.tables) + len(self.extra)
            self.extra.append(median_table(self.tables[i]))
        return self.index[i]

    def stack(self) -> NDArray[np.float32]:
        """All tables, the changed ones behind."""
        if not self.extra:
            return self.tables
        return np.ascontiguousarray(np.concatenate([self.tables, self.extra]), np.float32)


def median_table(table: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a table that is everywhere at the median of another."""
    out = np.zeros((N_CELLS, 2), np.float32)
    out[:, 0] = sample_table(table, np.array([1 << 31], np.uint32))[0]
    return out


def freeze_effect(program: Program, name: str) -> Program:
    """Hold a shared effect at its median.

    Congestion is held at its mean, and stalls (whose median is none) are left out while the work
    between them stays as fast as it is. A call effect lowered into the residual of an op is taken
    out of it; its median and its tail are not distinguished from the residual's.
    """
    change, bank, ranks = _Tables(program), program.bank, program.ranks
    low, links, stalls, step_table = program.low, program.links, program.stalls, program.step_table
    jitter = program.jitter
    if name == "rank":
        ranks = ranks._replace(tables=change(ranks.tables))
        if has_fixed_ranks(program):
            ranks, low = _level_ranks(program)
    elif name == "step":
        bank = bank._replace(step_table=change(bank.step_table))
        step_table = int(change(np.array([step_table], np.int32))[0])
    elif name == "microbatch":
        bank = bank._replace(mb_table=change(bank.mb_table))
    elif name == "expert":
        bank = bank._replace(call_table=change(bank.call_table))
    elif name in ("call", "rank_step"):
        bank = bank._replace(call_table=change(bank.call_table))
        low = low._replace(call_cv=np.zeros_like(low.call_cv))
    elif name == "regime":
        links = engine.NO_LINKS
    elif name == "jitter":
        jitter = jitter._replace(table=int(change(np.array([jitter.table], np.int32))[0]))
    else:
        stalls = stalls._replace(duration=0.0)
    return replace(
        program, bank=bank, ranks=ranks, low=low, links=links, stalls=stalls,
        step_table=step_table, jitter=jitter, tables=change.stack(),
    )  # fmt: skip


def _level_ranks(program: Program) -> tuple[engine.Ranks, engine.Lowering]:
    """Give all GPUs the factor of a typical one, 1; what a measured one adds in seconds goes."""
    ranks, low = program.ranks, program.low
    mean = low.fixed_mean.copy()
    if program.typical is not None:
        mean[:] = program.typical
        own = low.coef_stage < 0  # without a rank effect: as fast as measured
        mean[:, own] = low.fixed_mean[:, own]
    return ranks._replace(factor=np.ones_like(ranks.factor)), low._replace(fixed_mean=mean)


def treat_ops(program: Program, chosen: NDArray[np.bool_], treatment: Treatment) -> Program:
    """Treat whole ops, where each holds one kernel class, as those of a trace do.

    Parameters
    ----------
    chosen : bool [coef]
    """
    change = _Tables(program)
    ops, bank, ranks, low = program.ops, program.bank, program.ranks, program.low
    hit = np.where((ops.kind == engine.DRAW) & chosen[ops.coef])[0]
    table = ops.table.copy()
    if treatment.frozen:
        table[hit] = change(table[hit])
    ops = ops._replace(table=table)
    segments = np.zeros(low.seg_cv.size, bool)
    for c in np.flatnonzero(chosen):
        segments[low.coef_seg[low.coef_seg_ptr[c] : low.coef_seg_ptr[c + 1]]] = True
    if treatment.frozen:
        bank, vec = _freeze_vectors(bank, ops.vec, hit, change)
        ops, n = ops._replace(vec=vec), ranks.tables.size
        seg_mean = np.concatenate([low.seg_mean, np.zeros_like(low.seg_mean)], axis=1)
        seg_mean[segments, n:], seg_mean[segments, :n] = seg_mean[segments, :n], 0.0
        ranks = ranks._replace(
            tables=np.concatenate([ranks.tables, change(ranks.tables)]),
            factor=np.concatenate([ranks.factor, ranks.factor]),
        )
        low = low._replace(seg_mean=seg_mean)
    f = treatment.factor
    low = low._replace(
        seg_mean=low.seg_mean * np.where(segments, f, 1.0)[:, None],
        fixed_mean=low.fixed_mean * np.where(chosen, f, 1.0)[None, :, None],
        fixed_var=low.fixed_var * np.where(chosen, f * f, 1.0),
    )
    return replace(program, ops=ops, bank=bank, ranks=ranks, low=low, tables=change.stack())


def _freeze_vectors(
    bank: engine.Bank, vec: Int, hit: NDArray[np.int64], change: _Tables
) -> tuple[engine.Bank, Int]:
    """Copy the shared-effect vectors of some ops, every effect at its median or mean."""
    used = np.unique(vec[hit])
    copies = np.zeros(bank.mb.size, np.int32)
    copies[used] = bank.mb.size + np.arange(used.size)
    vec = vec.copy()
    vec[hit] = copies[vec[hit]]
    joined = {
        name: np.concatenate([getattr(bank, name), getattr(bank, name)[..., used]], axis=-1)
        for name in ("step_table", "mb_table", "mb", "call_table", "call_draw", "link", "is_global")
    }
    joined["link"][bank.mb.size :] = -1
    for name in ("step_table", "mb_table", "call_table"):
        joined[name][..., bank.mb.size :] = change(getattr(bank, name)[..., used])
    return engine.Bank(n_microbatches=bank.n_microbatches, **joined), vec
