"""What all kernels of one call share: a pass of a job, its routing to experts, a rank's step.

A program draws one of the three in its vectors. That of a pass is lowered into the residual of an
op where ops are whole passes; it is then distinguished by its share of that residual.
"""

from dataclasses import replace

import numpy as np

from prism import engine
from prism.distributions.distribution import Distribution, constant
from prism.simulation.effects.effect import HeldTables, Pick, VectorEffect
from prism.simulation.program import Program

EXPERT_CV = 0.05
"""CV of the busiest expert-parallel rank's load between microbatches, where a library is used and
neither it nor the job says. An assumption: half of what that rank has over its share by
`prism.workload.experts.DEFAULT_IMBALANCE`; measurements of single microbatches are not public."""


def resolve_expert(pick: Pick) -> Distribution:
    """Load of an ep group's busiest rank over its mean; even within one rank."""
    if pick.job.parallelism.ep == 1:
        return constant()
    return pick.distribution("expert", 0.0 if pick.library is None else EXPERT_CV)


class CallEffect(VectorEffect):
    """What the kernels of a pass share."""

    name: str = "call"
    streams = (engine.CALL,)
    column = "call_table"

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


class RankStepEffect(CallEffect):
    """What a rank's ops of a step share, in a fitted trace."""

    name = "rank_step"


class ExpertEffect(VectorEffect):
    """What routing to experts makes of a microbatch."""

    name = "expert"
    streams = (engine.CALL,)
    column = "call_table"
