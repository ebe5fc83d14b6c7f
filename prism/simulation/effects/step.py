"""The step effect: what slows the whole job together, and drifts from step to step."""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.simulation.effects.effect import FactorEffect, HeldTables, Int, Pick
from prism.simulation.effects.factor import Factor
from prism.simulation.program import Program
from prism.workload.build import build_workload, nominal_step
from prism.workload.kernels import Kernel
from prism.workload.opgraph import StepGraph
from prism.workload.work import Collective


class StepEffect(FactorEffect):
    """What all GPUs of a step share, as a ranking sees it."""

    term = "drift"

    def tables(self, program: Program) -> Int:
        """Those of the vectors, and the one that a run takes out."""
        return np.append(super().tables(program), program.step_table).astype(np.int32)

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Hold it in every vector, and what a run takes out."""
        step_table = held.one(program.step_table)
        return replace(super().hold(program, held), step_table=step_table)


@dataclass(frozen=True)
class StepFactor(Factor):
    """How steps differ, and how long a difference lasts."""

    name = "step"
    stream = engine.STEP
    by_replica = False
    effect = StepEffect
    correlation_time_s: float = 0.0

    @classmethod
    def resolve(cls, pick: Pick) -> Self:
        """Return what the job or its library says; a calibrated one has a part that is a time."""
        job, block, distribution = pick.job, pick.effects.step, pick.distribution("step")
        fixed_s = pick.value("step", "fixed_s")
        if (block is None or block.cv is None) and fixed_s != 0.0:
            workload = pick.workload or build_workload(job, pick.library)
            step_s = nominal_step(workload, job.parallelism)
            relative = pick.value("step", "relative")
            distribution = distribution.scaled_to(math.hypot(relative, fixed_s / step_s))
        return cls(distribution, pick.value("step", "correlation_time_s"))

    def loading(self, op_kind: str, part: Kernel | Collective) -> float:
        """All of everything."""
        return 1.0

    def draws(self, graph: StepGraph) -> NDArray[np.int32]:
        """One a step."""
        return np.zeros_like(graph.microbatch)
