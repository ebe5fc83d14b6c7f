"""Which physical node holds which part of a job, and how slow each node is.

A job's ranks fill node slots in rank order; a placement says which physical node takes each slot.
Nodes move as wholes, so what shares a node goes on sharing it. Nodes without a slot are spares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prism.cluster.groups import layout_of, member_ranks
from prism.cluster.power import gpu_power, throttled_nodes
from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.jobs.jobspec.values import Slowness, hosts_problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prism.jobs.job import Job

KINDS = ("compute", "memory", "network", "everything")
LEAST, MOST = 1e-3, 1e3  # factors of a node outside are errors, or of one that does not work


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

    Examples
    --------
    >>> import prism
    >>> slow = {3: prism.NodeSlowdown(compute=1.2), 7: prism.NodeSlowdown(network=1.5)}
    >>> placed = prism.place("llama3-70b-fsdp-512", nodes=slow, seed=1)  # doctest: +SKIP
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
        ``compute``, ``memory``, ``network`` or ``everything``.

    Returns
    -------
    NodeSlowdown
        With the factor on that kind, 1 on the others.

    Raises
    ------
    PrismError
        The kind is unknown, or a number out of range.

    Examples
    --------
    >>> import prism
    >>> prism.slow_node(1.2, "network")
    NodeSlowdown(compute=1.0, memory=None, network=1.2, other=1.0)
    """
    if not 0.0 < factor < math.inf:
        raise PrismError(
            f"slowdown = {factor:g}, expected a factor on durations, more than 0; "
            "1.2 is a node that takes 20 % longer"
        )
    if kind not in KINDS:
        raise PrismError(f"kind of slowness {kind!r}, expected one of {', '.join(KINDS)}")
    return slow_by_kind({kind: factor})


def slow_by_kind(factors: Mapping[str, float | None]) -> NodeSlowdown:
    """Join factors by kind; ``everything`` is what a kind is that is not given."""
    given = {kind: factor for kind, factor in factors.items() if factor is not None}
    whole = given.pop("everything", None)
    base = NodeSlowdown() if whole is None else NodeSlowdown(whole, whole, whole, whole)
    return base._replace(**given)


def slowdown_keys(slowdowns: Mapping[int, NodeSlowdown]) -> dict[int, dict[str, float]]:
    """Slow nodes as a job's ``cluster.node_slowdowns`` has them."""
    return {
        n: {k: v for k, v in x._asdict().items() if v is not None} for n, x in slowdowns.items()
    }


@dataclass(frozen=True)
class Placement:
    """Which GPU does what: slot = rank // gpus_per_node, node = hosts[slot].

    Raises
    ------
    PrismError
        `hosts` is no placement of this job: a node is unknown, takes two slots, a slot has none,
        or a tp group is torn out of its NVLink domain.
    """

    job: Job
    hosts: Sequence[int] | NDArray[np.int64] | None = None
    """Physical node of every slot [slot]; the job's, or the rank order itself where it has none."""
    nodes: int | None = None
    """Physical nodes; the job's."""

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
        return self.job.cluster.gpus_per_node

    @property
    def n_slots(self) -> int:
        """Nodes that the job's ranks fill."""
        return math.ceil(self.job.world_size / self.gpus_per_node)

    @property
    def n_nodes(self) -> int:
        """Nodes of the cluster, used or not; as many as the job needs where it does not say."""
        return self.nodes or self.job.cluster.nodes or self.n_slots

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

    def ranks(self) -> NDArray[np.int64]:
        """Rank of every member, int64 [replica, stage, member].

        Members are those of a stage; with hsdp or ep those of all data-parallel ranks of its group.
        """
        ranks = member_ranks(layout_of(self.job))
        return np.asarray(ranks.reshape(*ranks.shape[:2], -1), np.int64)

    def gpus(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """GPU of every rank, an array of any shape."""
        n = self.gpus_per_node
        return np.asarray((self.slots[:, None] * n + np.arange(n)).ravel()[ranks], np.int64)

    def members(self) -> NDArray[np.int32]:
        """GPUs of every group, int32 [replica, stage, member]; see `ranks`."""
        return np.ascontiguousarray(self.gpus(self.ranks()), np.int32)

    def slot_groups(self) -> list[list[tuple[int, int]]]:
        """For every slot the (replica, stage) pairs whose ranks it holds, in rank order."""
        groups: list[list[tuple[int, int]]] = [[] for _ in range(self.n_slots)]
        ranks = self.ranks()
        for pair in np.ndindex(*ranks.shape[:2]):
            for slot in np.unique(ranks[pair] // self.gpus_per_node):
                groups[slot].append((pair[0], pair[1]))
        return [sorted(pairs, key=lambda pair: int(ranks[*pair, 0])) for pairs in groups]

    def slowdowns(self) -> dict[int, NodeSlowdown]:
        """Known slow nodes of the job, those that throttle too, by physical node."""
        throttled: dict[int, NodeSlowdown] = {}
        if self.job.cluster.throttled_share > 0.0:
            hot = gpu_power(self.job, throttled=True).slowdown / gpu_power(self.job).slowdown
            throttled = dict.fromkeys(throttled_nodes(self.job), NodeSlowdown(hot, memory=1.0))
        return throttled | {
            node: slow_by_kind(dict(slow)) if isinstance(slow, Slowness) else NodeSlowdown(slow)
            for node, slow in self.job.cluster.node_slowdowns.items()
        }

    def _check_domains(self, where: str) -> None:
        """Refuse a map that tears a tp group out of the NVLink domain it has by default."""
        tp, n = self.job.parallelism.tp, self.gpus_per_node
        domain = self.job.cluster.nvlink_domain_gpus
        if tp <= n or np.array_equal(self.slots, np.arange(self.n_slots)):
            return  # the group shares a node, and nodes move as wholes
        ranks = self.ranks().reshape(-1, tp)
        apart = np.ptp(self.gpus(ranks) // domain, axis=1) > 0
        torn = ranks[apart & (np.ptp(ranks // domain, axis=1) == 0)]
        if torn.size:
            slots = np.unique(torn[0] // n)
            raise PrismError(
                f"{where}: the tp group of ranks {torn[0, 0]} to {torn[0, -1]} (slots "
                f"{slots[0]} to {slots[-1]}) is on nodes {self.slots[slots].tolist()}, which share "
                f"no NVLink domain of {format_count(domain, 'GPU')}; keep these slots on nodes of "
                f"one domain, {domain // n} neighbouring nodes from a multiple of that number"
            )
