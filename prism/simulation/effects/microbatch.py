"""The microbatch effect: differences in the work itself, one draw for all stages and passes."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from prism.cluster.groups import shard_size
from prism.cluster.nodemap import Placement
from prism.distributions.distribution import Distribution
from prism.simulation.effects.effect import Pick
from prism.simulation.effects.factor import Factor, Laying
from prism.simulation.effects.rank import RankSpread
from prism.workload.kernels import Kernel, is_compute
from prism.workload.opgraph import StepGraph
from prism.workload.work import Collective

LOSS_CLASSES = frozenset({"loss", "embedding"})
SPEED_DRAWS = 4096  # GPUs drawn to tell how far a shard group's slowest is from the others


@dataclass(frozen=True)
class Microbatch(Factor):
    """How the work of microbatches differs, and which kernels follow it."""

    name = "microbatch"
    stream = 3
    backward_loading: float = 1.5
    loss_loading: float = 1.0

    @classmethod
    def resolve(cls, pick: Pick) -> Self:
        """Return what the job or its library says."""
        return cls(
            pick.distribution("microbatch"),
            pick.value("microbatch", "backward_loading", 1.5),
            pick.value("microbatch", "loss_loading", 1.0),
        )

    def loading(self, op_kind: str, part: Kernel | Collective) -> float:
        """Exponent on compute within forward or backward; experts take tokens of all ranks."""
        kernel_class = part.kernel_class
        routed = isinstance(part, Kernel) and part.routed
        if routed or not is_compute(kernel_class) or kernel_class == "optimizer":
            return 0.0
        loading = self.backward_loading if op_kind.startswith("backward") else 1.0
        return loading * (self.loss_loading if kernel_class in LOSS_CLASSES else 1.0)

    def draws(self, graph: StepGraph) -> NDArray[np.int32]:
        """One a microbatch."""
        return graph.microbatch

    def table(self, loading: float, laying: Laying) -> int:
        """Of the longest of a shard or ep group's microbatches, but for one on a faster GPU.

        Its ranks have one each, and all wait for the slowest.
        """
        relative = _relative_speeds(laying.placement, laying.rank)
        return laying.tables.largest(self.distribution, loading, relative)


def _relative_speeds(placement: Placement, rank: RankSpread) -> NDArray[np.float64]:
    """Slowdown of each data-parallel rank of a shard group over its slowest's [draw, rank]."""
    n = shard_size(placement.job)
    if n == 1 or rank.distribution.std == 0.0:
        return np.ones((1, n))
    nodes = (placement.ranks() // placement.gpus_per_node).astype(np.int64)
    members = nodes.shape[2]  # of every group
    return _draw_speeds(rank.distribution, rank.node_share, n, members, nodes.tobytes())


@lru_cache(maxsize=4)  # programs of one job have the same
def _draw_speeds(
    distribution: Distribution, node_share: float, n: int, members: int, nodes_of_groups: bytes
) -> NDArray[np.float64]:
    nodes = np.frombuffer(nodes_of_groups, np.int64).reshape(-1, members)
    rng = np.random.Generator(np.random.Philox(0))
    draws = max(16, SPEED_DRAWS // members)
    own = rng.standard_normal((draws, members))
    at = nodes[np.arange(draws) * len(nodes) // draws]  # groups may lie in different ways
    at = np.cumsum(np.diff(at, axis=1, prepend=at[:, :1]) > 0, axis=1)  # ranks rise in a group
    node = np.take_along_axis(rng.standard_normal((draws, at.max() + 1)), at, axis=1)
    z = np.sqrt(node_share) * node + np.sqrt(1.0 - node_share) * own
    x = distribution.ppf(ndtr(z)).reshape(draws, n, -1).max(axis=2)
    return np.asarray(x / x.max(axis=1, keepdims=True))
