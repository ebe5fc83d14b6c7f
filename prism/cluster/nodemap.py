"""Which physical node holds which part of a job, and how slow each node is.

A job's ranks fill node slots in rank order; a placement says which physical node takes each slot.
Nodes move as wholes, so what shares a node goes on sharing it. Nodes without a slot are spares.
Slow nodes have factors by kind of work.
Left out: what a placement costs (`prism.cluster.machine`, `prism.simulation.placednodes`) and which
one is good.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prism.cluster.groups import layout_of
from prism.common.errors import PrismError
from prism.jobs.jobspec.values import hosts_problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prism.jobs.job import Job

KINDS = ("compute", "memory", "network", "everything")


class NodeSlowdown(NamedTuple):
    """How slow a node is: factors on durations [1], 1 being as fast as the others.

    Attributes
    ----------
    compute : float
        On compute-bound kernels. Memory-bound ones of forward and backward follow by the library's
        memory loading of the rank effect, unless `memory` is given; the optimizer, which no rank
        effect touches, follows `memory` alone.
    memory : float or None
        On memory-bound kernels, the optimizer's too.
    network : float
        On collectives and transfers over the node's network links: a message is as slow as the
        slowest node that takes part.
    other : float
        On everything else of the node: host gaps and collectives over NVLink.
    """

    compute: float = 1.0
    memory: float | None = None
    network: float = 1.0
    other: float = 1.0


def slow_node(factor: float, kind: str = "compute") -> NodeSlowdown:
    """Return the slowdown of a node that is slow in one kind of work.

    Parameters
    ----------
    factor : float
        On durations [1], > 0.
    kind : str
        One of `KINDS`.

    Raises
    ------
    PrismError
        The kind is unknown, or a number out of range.
    """
    if not 0.0 < factor < math.inf:
        raise PrismError(
            f"slowdown = {factor:g}, expected a factor on durations, more than 0; "
            "1.2 is a node that takes 20 % longer"
        )
    if kind == "everything":
        return NodeSlowdown(factor, factor, factor, factor)
    if kind not in KINDS:
        raise PrismError(f"kind of slowness {kind!r}, expected one of {', '.join(KINDS)}")
    return NodeSlowdown()._replace(**{kind: factor})


@dataclass(frozen=True)
class Placement:
    """Which GPU does what: slot = rank // gpus_per_node, node = hosts[slot].

    The rank of (stage, dp_rank, tp_cp_rank) is
    ``stage * stage_stride + dp_rank * replica_stride + tp_cp_rank``, see `prism.cluster.groups`.

    Attributes
    ----------
    job : Job
    hosts : sequence of int, optional
        [slot] the physical node that takes each slot; the job's ``cluster.hosts``, or the rank
        order itself (node = slot) where it has none.
    nodes : int, optional
        Physical nodes; the job's.

    Raises
    ------
    PrismError
        `hosts` is no placement of this job: a node is unknown, takes two slots, a slot has none,
        or a tp group is torn out of its NVLink domain.
    """

    job: Job
    hosts: Sequence[int] | NDArray[np.int64] | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        given = self.job.cluster.hosts if self.hosts is None else self.hosts
        hosts = np.arange(self.n_slots) if given is None else np.asarray(given)
        where = f"{self.job.source or self.job.name}: cluster.hosts"
        problem = hosts_problem(hosts, self.n_slots, self.n_nodes)
        if problem is not None:
            raise PrismError(f"{where}: {problem}")
        object.__setattr__(self, "hosts", hosts.astype(np.int64))
        self._check_domains(where)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node."""
        return int(self.job.cluster.gpus_per_node)

    @property
    def n_slots(self) -> int:
        """Nodes that the job's ranks fill."""
        return math.ceil(self.job.world_size / self.gpus_per_node)

    @property
    def n_nodes(self) -> int:
        """Nodes of the cluster, used or not; as many as the job needs where it does not say."""
        return int(self.nodes or self.job.cluster.nodes or self.n_slots)

    @property
    def n_gpus(self) -> int:
        """GPUs of the cluster, used or not."""
        return self.n_nodes * self.gpus_per_node

    @property
    def n_leaves(self) -> int:
        """Leaf switches of the cluster."""
        return math.ceil(self.n_nodes / self.job.cluster.leaf_nodes)

    @property
    def slots(self) -> NDArray[np.int64]:
        """The physical node of every slot, int64 [slot]."""
        return np.asarray(self.hosts, np.int64)

    @property
    def is_default(self) -> bool:
        """Tell whether every slot is on the node of its own number."""
        return bool(np.array_equal(self.slots, np.arange(self.n_slots)))

    @property
    def spares(self) -> list[int]:
        """Nodes without a slot, in rising order."""
        return [int(n) for n in np.setdiff1d(np.arange(self.n_nodes), self.slots)]

    def ranks(self) -> NDArray[np.int64]:
        """Rank of every member, int64 [replica, stage, member].

        Members are tp x cp ranks; with hsdp or ep those of all data-parallel ranks of its group.
        """
        layout = layout_of(self.job)
        ranks = layout.ranks(layout.shard)
        return np.asarray(ranks.reshape(*ranks.shape[:2], -1), np.int64)

    def gpus(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """GPU of every rank, an array of any shape."""
        slot, local = np.divmod(ranks, self.gpus_per_node)
        return np.asarray(self.slots[slot] * self.gpus_per_node + local, np.int64)

    def members(self) -> NDArray[np.int32]:
        """GPUs of every group, int32 [replica, stage, member]; see `ranks`."""
        return np.ascontiguousarray(self.gpus(self.ranks()), np.int32)

    def slot_groups(self) -> list[list[tuple[int, int]]]:
        """For every slot the (replica, stage) pairs whose ranks it holds, in rank order."""
        groups: list[dict[tuple[int, int], None]] = [{} for _ in range(self.n_slots)]
        slot = self.ranks() // self.gpus_per_node
        n_replicas, n_stages, _ = slot.shape
        for replica in range(n_replicas):
            for stage in range(n_stages):
                for k in np.unique(slot[replica, stage]):
                    groups[k][replica, stage] = None
        first = self.ranks()[:, :, 0]
        return [sorted(g, key=lambda pair: int(first[pair])) for g in groups]

    def slowdowns(self) -> dict[int, NodeSlowdown]:
        """Known slow nodes of the job, by physical node."""
        given = self.job.cluster.node_slowdowns
        return {int(node): as_slowdown(value) for node, value in given.items()}

    def _check_domains(self, where: str) -> None:
        """Refuse a map that tears a tp group out of the NVLink domain it has by default."""
        tp, domain = self.job.parallelism.tp, self.job.cluster.nvlink_domain_gpus
        if tp <= self.gpus_per_node or self.is_default:
            return  # the group shares a node, and nodes move as wholes
        ranks = self.ranks().reshape(-1, tp)
        gpus = self.members().reshape(-1, tp)
        torn = (np.ptp(gpus // domain, axis=1) > 0) & (np.ptp(ranks // domain, axis=1) == 0)
        if not torn.any():
            return
        k = int(np.argmax(torn))
        slots = np.unique(ranks[k] // self.gpus_per_node)
        raise PrismError(
            f"{where}: the tp group of ranks {ranks[k, 0]} to {ranks[k, -1]} (slots "
            f"{slots[0]} to {slots[-1]}) is on nodes {self.slots[slots].tolist()}, which share no "
            f"NVLink domain of {domain} GPUs; keep these slots on nodes of one domain, "
            f"{domain // self.gpus_per_node} neighbouring nodes from a multiple of that number"
        )


def as_slowdown(value: object) -> NodeSlowdown:
    """Return what a job's ``cluster.node_slowdowns`` says of a node: a number, or by kind."""
    if isinstance(value, NodeSlowdown):
        return value
    if isinstance(value, int | float):
        return NodeSlowdown(float(value))
    named = {name: getattr(value, name) for name in NodeSlowdown._fields}
    whole = getattr(value, "everything", None)
    for name in ("compute", "memory", "network", "other"):
        named[name] = whole if named[name] is None else named[name]
    return NodeSlowdown(**{name: x for name, x in named.items() if x is not None})
