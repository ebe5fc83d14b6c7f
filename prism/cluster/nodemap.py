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
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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


def rank_strides(job: Job) -> tuple[int, int]:
    """Ranks from a stage to the next and from a replica to the next, by the job's rank order.

    ``megatron`` is tp-cp-dp-pp: the replicas of a stage are neighbours. ``tp-cp-pp-dp`` keeps the
    stages of a replica together, as Llama 3 does (arXiv:2407.21783, section 3.3.2).
    """
    layout = job.parallelism
    group = layout.tp * layout.cp
    if job.cluster.placement == "tp-cp-pp-dp":
        return group, group * layout.pp
    return group * layout.dp, group


def shard_size(job: Job) -> int:
    """Data-parallel ranks that are simulated as one, since they meet inside a step.

    With hsdp a shard group, which holds one copy of the parameters; by default the neighbours of an
    NVLink domain. With experts an ep group, whose ranks meet inside every layer.
    """
    layout = job.parallelism
    if layout.data_parallel != "hsdp":
        return int(layout.ep)
    if layout.shard_size is not None:
        return int(layout.shard_size)
    within = job.cluster.nvlink_domain_gpus // rank_strides(job)[1]
    return math.gcd(layout.dp, within) if within > 0 else 1


def count_replicas(job: Job) -> int:
    """Replicas that are simulated apart: data-parallel ranks, or their shard or ep groups."""
    return int(job.parallelism.dp) // shard_size(job)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, and where the other groups of the kind lie in the default order.

    Attributes
    ----------
    inner, stride, outer, outer_stride : int
        Runs of ranks first, first + stride, ... follow each other outer_stride apart.
    beside : tuple of (int, int)
        (count, stride) of each way from a group to the next one of the kind: a group's first rank
        is any sum of 0 ... count - 1 times each stride.
    """

    inner: int
    stride: int
    outer: int = 1
    outer_stride: int = 1
    beside: tuple[tuple[int, int], ...] = ()

    @property
    def n_ranks(self) -> int:
        """Members of the group."""
        return self.inner * self.outer

    def members(self, n_gpus: int) -> float:
        """Members of one group among `n_gpus` neighbouring GPUs, in the mean; may be a fraction.

        Where runs lie farther apart than that, GPUs that have any have their part of one run.
        """
        if self.outer == 1:
            return n_gpus / self.stride
        return max(n_gpus * self.inner / self.outer_stride, min(self.inner, n_gpus / self.stride))

    def domains(self, n_gpus: int) -> int:
        """Most domains of `n_gpus` neighbouring GPUs that any group of the kind touches."""
        return _most_domains(self, n_gpus)


@lru_cache(maxsize=256)
def _most_domains(group: Group, n_gpus: int) -> int:
    """See `Group.domains`; arrays [where in a domain a run begins] do for groups of any size."""
    ways = (group.inner, group.stride), (group.outer, group.outer_stride), *group.beside
    if sum((count - 1) * stride for count, stride in ways) < n_gpus:
        return 1  # all groups lie in the first domain
    start = np.arange(n_gpus)
    end = start + (group.inner - 1) * group.stride
    touched = np.minimum(group.inner, end // n_gpus + 1)
    shared = end >= group.outer_stride  # with the run before, which ends where this one begins
    total = _window_sums(touched - shared, group.outer_stride, group.outer) + shared
    begins = start == 0
    for count, stride in group.beside:
        begins = _window_sums(begins, -stride, count) > 0
    return int(total[begins].max())


def _window_sums(values: NDArray[np.generic], step: int, count: int) -> NDArray[np.int64]:
    """Sum values[(i + j step) mod n] over j < count, by doubling the width of windows [i]."""
    sums, total, done = values.astype(np.int64), np.zeros(values.size, np.int64), 0
    for bit in range(count.bit_length()):
        if count >> bit & 1:
            total += np.roll(sums, -done * step)
            done += 1 << bit
        sums = sums + np.roll(sums, -step << bit)
    return total


@dataclass(frozen=True)
class Placement:
    """Which GPU does what: slot = rank // gpus_per_node, node = hosts[slot].

    The rank of (stage, dp_rank, tp_cp_rank) is
    ``stage * stage_stride + dp_rank * replica_stride + tp_cp_rank``, see `rank_strides`.

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
        layout, shards = self.job.parallelism, shard_size(self.job)
        stage_stride, replica_stride = rank_strides(self.job)
        dp_rank = np.arange(layout.dp).reshape(-1, 1, shards, 1)
        stage = np.arange(layout.pp)[:, None, None]
        member = np.arange(layout.tp * layout.cp)
        ranks = dp_rank * replica_stride + stage * stage_stride + member
        return np.asarray(ranks.reshape(*ranks.shape[:2], -1), np.int64)

    def members(self) -> NDArray[np.int32]:
        """GPUs of every group, int32 [replica, stage, member]; see `ranks`."""
        slot, local = np.divmod(self.ranks(), self.gpus_per_node)
        gpu = self.slots[slot] * self.gpus_per_node + local
        return np.ascontiguousarray(gpu, np.int32)

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

    def link_leaves(self, n_stages: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Leaf switches that each link touches.

        Returns
        -------
        lo, hi : ndarray of int32 [replica, link, range]
            Ranges lo <= leaf < hi, as many as the nodes of two groups need: two where ranks have
            the default order. Link s < n_stages goes from stage s to the next (the last
            stage: to the first if there are several chunks, else to the one before); with hsdp or
            ep n_stages + s joins that group of stage s. From n = `n_own_links` on, links touch the
            ranges of all replicas together: n + s joins the replicas of stage s,
            n + n_stages the whole job (from its first leaf to its last), n + n_stages + 1 the
            first and the last stage. Ranges are empty where the message stays within an NVLink
            domain, and for those of replicas or the whole job did so in the default order.
        """
        layout, domain = self.job.parallelism, self.job.cluster.nvlink_domain_gpus
        members = self.members()
        near = members // domain
        leaves = members // self.gpus_per_node // self.job.cluster.leaf_nodes
        own_lo, own_hi = _runs(leaves)
        by_default = self.ranks() // domain
        stages_cross = bool(np.ptp(by_default, axis=(0, 2)).any())
        n_runs = own_lo.shape[2]
        n_replicas, n_own = len(members), n_own_links(self.job)
        lo = np.zeros((n_replicas, n_own + n_stages + 2, 2 * n_runs), np.int32)
        hi = np.zeros_like(lo)
        for s in range(n_stages):
            peer = s + 1 if s + 1 < n_stages else (0 if layout.loops else n_stages - 2)
            if n_stages > 1:
                far = (near[:, s] != near[:, peer]).any(axis=1)[:, None]
                ends = [s, peer]
                lo[:, s] = np.where(far, own_lo[:, ends].reshape(n_replicas, -1), 0)
                hi[:, s] = np.where(far, own_hi[:, ends].reshape(n_replicas, -1), 0)
            if n_own > n_stages:
                far = (np.ptp(near[:, s], axis=1) > 0)[:, None]
                lo[:, n_stages + s, :n_runs] = np.where(far, own_lo[:, s], 0)
                hi[:, n_stages + s, :n_runs] = np.where(far, own_hi[:, s], 0)
            if stages_cross or np.ptp(near[:, s]) > 0:
                lo[:, n_own + s, :n_runs] = own_lo[:, s]
                hi[:, n_own + s, :n_runs] = own_hi[:, s]
        if np.any(near[:, 0] != near[:, -1]):
            lo[:, -1] = own_lo[:, [0, -1]].reshape(n_replicas, -1)
            hi[:, -1] = own_hi[:, [0, -1]].reshape(n_replicas, -1)
        if np.ptp(by_default) > 0 or np.ptp(near) > 0:
            lo[:, -2, 0], hi[:, -2, 0] = leaves.min(), leaves.max() + 1
        return lo, hi

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


def n_own_links(job: Job) -> int:
    """Links that each replica has for itself, see `Placement.link_leaves`."""
    joined = job.parallelism.data_parallel == "hsdp" or job.parallelism.ep > 1
    return int(job.parallelism.pp) * (2 if joined else 1)


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


def _runs(leaves: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Find the runs lo <= leaf < hi of neighbouring leaves that each group touches.

    Parameters
    ----------
    leaves : int32 [replica, stage, member]

    Returns
    -------
    lo, hi : int32 [replica, stage, run]
        Empty (0, 0) beyond a group's last run.
    """
    leaves = np.sort(leaves, axis=2)
    begins = np.diff(leaves, axis=2, prepend=leaves[:, :, :1] - 2) > 1
    run = np.cumsum(begins, axis=2) - 1
    shape = (*leaves.shape[:2], int(run.max()) + 1)
    lo, hi = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    r, s = np.ix_(*map(range, leaves.shape[:2]))
    for m in range(leaves.shape[2]):
        at = (r, s, run[:, :, m])
        lo[at] = np.where(begins[:, :, m], leaves[:, :, m], lo[at])
        hi[at] = leaves[:, :, m] + 1
    return lo, hi
