"""The step effect: what slows the whole job together, and drifts from step to step."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from prism import engine
from prism.distributions.distribution import Distribution, constant
from prism.simulation.effects.effect import HeldTables, Int, Pick, VectorEffect
from prism.simulation.program import Program
from prism.workload.build import build_workload, nominal_step
from prism.workload.work import Workload


class StepSpread(NamedTuple):
    """How steps differ, and how long a difference lasts."""

    distribution: Distribution = constant()
    correlation_time_s: float = 0.0


def resolve(pick: Pick, workload: Workload | None) -> StepSpread:
    """Return what the job or its library says; a calibrated one has a part that is a time.

    The workload is that of the job, built anew where it is needed and None.
    """
    job, block, distribution = pick.job, pick.effects.step, pick.distribution("step")
    fixed_s = pick.value("step", "fixed_s")
    if (block is None or block.cv is None) and fixed_s != 0.0:
        workload = build_workload(job, pick.library) if workload is None else workload
        step_s = nominal_step(workload, job.parallelism)
        relative = pick.value("step", "relative")
        distribution = distribution.scaled_to(math.hypot(relative, fixed_s / step_s))
    return StepSpread(distribution, pick.value("step", "correlation_time_s"))


class StepEffect(VectorEffect):
    """What all GPUs of a step share."""

    name = "step"
    streams = (engine.STEP,)
    column, term = "step_table", "drift"

    def tables(self, program: Program) -> Int:
        """Those of the vectors, and the one that a run takes out."""
        return np.append(super().tables(program), program.step_table).astype(np.int32)

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Hold it in every vector, and what a run takes out."""
        step_table = held.one(program.step_table)
        return replace(super().hold(program, held), step_table=step_table)
