"""The microbatch effect: differences in the work itself, one draw for all stages and passes."""

from typing import NamedTuple

from prism import engine
from prism.distributions.distribution import Distribution, constant
from prism.simulation.effects.effect import Pick, VectorEffect
from prism.workload.kernels import is_compute

LOSS_CLASSES = frozenset({"loss", "embedding"})


class MicrobatchSpread(NamedTuple):
    """How the work of microbatches differs, and which kernels follow it."""

    distribution: Distribution = constant()  # of forward
    backward_loading: float = 1.5
    loss_loading: float = 1.0

    def loading(self, op_kind: str, kernel_class: str) -> float:
        """Exponent on a kernel class within forward or backward."""
        if not is_compute(kernel_class) or kernel_class == "optimizer":
            return 0.0
        loading = self.backward_loading if op_kind.startswith("backward") else 1.0
        return loading * (self.loss_loading if kernel_class in LOSS_CLASSES else 1.0)


def resolve(pick: Pick) -> MicrobatchSpread:
    """Return what the job or its library says."""
    return MicrobatchSpread(
        pick.distribution("microbatch"),
        pick.value("microbatch", "backward_loading", 1.5),
        pick.value("microbatch", "loss_loading", 1.0),
    )


class MicrobatchEffect(VectorEffect):
    """Differences in the work."""

    name = "microbatch"
    streams = (engine.MICROBATCH,)
    column = "mb_table"
