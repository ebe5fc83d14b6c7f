"""What all kernels of one call share: a pass of a job, its routing to experts, a rank's step.

That of a pass is lowered into the residual of an op where ops are whole passes; it is then
distinguished by its share of that residual.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from prism.distributions.distribution import constant
from prism.simulation.effects.effect import FactorEffect, HeldTables, Pick
from prism.simulation.effects.factor import Factor
from prism.simulation.program import Program
from prism.workload.kernels import Kernel, is_compute
from prism.workload.opgraph import StepGraph
from prism.workload.work import Collective

EXPERT_CV = 0.05
"""CV of the busiest expert-parallel rank's load between microbatches, where a library is used and
neither it nor the job says. An assumption: half of what that rank has over its share by
`prism.workload.experts.DEFAULT_IMBALANCE`; measurements of single microbatches are not public."""


class CallEffect(FactorEffect):
    """What the kernels of a pass share, as a ranking sees it."""

    def cv(self, program: Program) -> float:
        """Return that of the lowered effect, where it is in the residual."""
        lowered = float(program.low.call_cv.max(initial=0.0))
        return lowered or super().cv(program)

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Hold it in every vector, and take a lowered one out of the residual.

        A lowered one's median and tail are not distinguished from the residual's.
        """
        low = program.low._replace(call_cv=np.zeros_like(program.low.call_cv))
        return replace(super().hold(program, held), low=low)


@dataclass(frozen=True)
class Call(Factor):
    """What the kernels of a pass share."""

    name = "call"
    stream = 13
    effect = CallEffect

    @classmethod
    def resolve(cls, pick: Pick) -> Self:
        """Return what the job or its library says."""
        return cls(pick.distribution("call"))

    def loading(self, op_kind: str, part: Kernel | Collective) -> float:
        """All of the compute on single ranks, but that of experts."""
        routed = isinstance(part, Kernel) and part.routed
        return float(is_compute(part.kernel_class) and not part.group and not routed)

    def draws(self, graph: StepGraph) -> NDArray[np.int32]:
        """One a pass, where that is several ops."""
        return graph.call


@dataclass(frozen=True)
class Expert(Factor):
    """What routing makes of a microbatch: load of an ep group's busiest rank over its mean."""

    name = "expert"
    stream = 4

    @classmethod
    def resolve(cls, pick: Pick) -> Self:
        """Return what the job or its library says; even within one rank."""
        if pick.job.parallelism.ep == 1:
            return cls(constant())
        return cls(pick.distribution("expert", 0.0 if pick.library is None else EXPERT_CV))

    def loading(self, op_kind: str, part: Kernel | Collective) -> float:
        """All that is routed."""
        return float(isinstance(part, Kernel) and part.routed)

    def draws(self, graph: StepGraph) -> NDArray[np.int32]:
        """One an ep group and microbatch, the same in every layer."""
        return graph.microbatch
