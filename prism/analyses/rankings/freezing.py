"""Programs with one cause of their variation at its median.

A kernel class stands for its kernels' own noise, as in its share of the variance; what it shares
with others is an effect's. The graph and the keys stay.
"""

from dataclasses import replace

from prism import engine
from prism.simulation.effects import HeldTables, Treatment, hold_effect
from prism.simulation.prepare import Prepared, treat_classes
from prism.simulation.program import Program
from prism.simulation.variance_inputs import Input


def freeze(step: Prepared, entry: Input, seed: int) -> Program:
    """Return a step's program with one cause at its median."""
    if entry.kind == "effects":
        return hold_effect(step.program, entry.name)
    if step.workload is not None:
        return treat_classes(step, {entry.name: Treatment(frozen=True)}, seed)
    program, held = step.program, HeldTables(step.program)  # ops of a trace hold one class each
    own = program.shares[:, program.classes.index(entry.name)] > 0.0
    table = program.ops.table.copy()
    hit = (program.ops.kind == engine.DRAW) & own[program.ops.coef]
    table[hit] = held(table[hit])
    return replace(program, ops=program.ops._replace(table=table), tables=held.stack())
