"""Programs with one cause of their variation at its median, or with a kernel class made faster.

A kernel class stands for its kernels' own noise, as in its share of the variance; what it shares
with others is an effect's. Congestion has two levels and none between: it is held at its mean, 1,
so that it neither delays nor saves. The graph and the keys stay.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.distributions.tables import N_CELLS, sample_table
from prism.simulation.causes import Input, has_fixed_ranks
from prism.simulation.prepare import Prepared, treat_classes
from prism.simulation.program import Program
from prism.simulation.variability import Treatment

Int = NDArray[np.int32]


class _Tables:
    """Tables of a program, and copies of them held at their median."""

    def __init__(self, program: Program) -> None:
        self.tables = program.tables
        self.index: dict[int, int] = {-1: -1}
        self.extra: list[NDArray[np.float32]] = []

    def __call__(self, indices: Int) -> Int:
        """Return indices of the changed tables; -1 stays."""
        out = np.array([self._one(int(i)) for i in np.ravel(indices)], np.int32)
        return np.ascontiguousarray(out.reshape(np.shape(indices)), np.int32)

    def _one(self, i: int) -> int:
        if i not in self.index:
            self.index[i] = len(self.tables) + len(self.extra)
            at_median = np.zeros((N_CELLS, 2), np.float32)
            at_median[:, 0] = sample_table(self.tables[i], np.array([1 << 31], np.uint32))[0]
            self.extra.append(at_median)
        return self.index[i]

    def stack(self) -> NDArray[np.float32]:
        """All tables, the changed ones behind."""
        if not self.extra:
            return self.tables
        return np.ascontiguousarray(np.concatenate([self.tables, self.extra]), np.float32)


def freeze(step: Prepared, entry: Input, seed: int) -> Program:
    """Return a step's program with one cause at its median."""
    if entry.kind == "effects":
        return freeze_effect(step.program, entry.name)
    if step.workload is not None:
        return treat_classes(step, {entry.name: Treatment(frozen=True)}, seed)
    program, change = step.program, _Tables(step.program)  # ops of a trace hold one class each
    own = program.shares[:, program.classes.index(entry.name)] > 0.0
    table = program.ops.table.copy()
    hit = (program.ops.kind == engine.DRAW) & own[program.ops.coef]
    table[hit] = change(table[hit])
    return replace(program, ops=program.ops._replace(table=table), tables=change.stack())


def freeze_effect(program: Program, name: str) -> Program:
    """Hold a shared effect at its median.

    Stalls, whose median is none, are left out while the work between them stays as fast as it is. A
    call effect lowered into the residual of an op is taken out of it; its median and its tail are
    not distinguished from the residual's.
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
