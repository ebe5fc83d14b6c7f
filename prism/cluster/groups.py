"""Who communicates with whom: one table of ranks for every kind of group.

``tp`` and ``cp`` share an op; ``dp_cp`` shares a stage's parameters, with hsdp ``shard`` does, and
``replicas`` joins those of all shard groups that hold the same part. ``embedding`` is the first and
the last stage of a pipeline. For experts the ranks of a stage are grouped anew, as Megatron-Core's
parallel_state does: ``expert_tp`` neighbours share each expert, ``ep`` joins those that hold the
experts between them, ``expert_dp`` those that hold the same ones. Where units of a tier exchange
parameters by `sync_every`, groups of several replicas end at a unit, and ``sync`` joins units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from prism.jobs.job import Job

Int = NDArray[np.int64]
# Axes of `Layout.ranks` (replica, stage, shard, cp, tp) that tell groups apart; the others are
# members, in rank order.
GROUPS_BY = {
    "tp": (0, 1, 2, 3), "cp": (0, 1, 2, 4), "dp_cp": (1, 4), "shard": (0, 1, 4),
    "replicas": (1, 2, 3, 4), "sync": (1, 2, 3, 4), "embedding": (0, 2, 3, 4), "world": (),
}  # fmt: skip
# The same of `Layout.expert_ranks` (replica, stage, ep group, ep rank, rank of an expert).
EXPERT_GROUPS_BY = {"ep": (0, 1, 2, 4), "expert_dp": (1, 3, 4)}
# Kinds whose groups lie within a stage: of one replica, and over them.
OF_STAGE = {kind: 0 in by for kind, by in {**GROUPS_BY, **EXPERT_GROUPS_BY}.items() if 1 in by}


class Layout(NamedTuple):
    """Sizes of a job's groups, and ranks from a stage and from a data-parallel rank to the next."""

    tp: int
    cp: int
    dp: int
    pp: int
    stage_stride: int
    replica_stride: int
    shard: int = 1  # data-parallel ranks that are simulated as one, see `shard_size`
    ep: int = 1
    expert_tp: int = 1  # 1, or tp
    units: int = 1  # whose replicas share gradients apart, see `sync_units`

    @property
    def stage_gpus(self) -> int:
        """GPUs of one stage of a replica."""
        return self.tp * self.cp

    def ranks(self, shard: int) -> Int:
        """Rank of every member [replica, stage, shard, cp, tp], of this many to a shard group."""
        return _ranks(self, shard)

    def expert_ranks(self, ranks: Int) -> Int:
        """Group `ranks` for experts: [replica, stage, ep group, ep rank, rank of an expert]."""
        each = ranks.shape[4] if self.expert_tp == self.tp else 1
        return ranks.reshape(*ranks.shape[:2], -1, self.ep, each)

    def joins_tp(self, kind: str) -> bool:
        """Tell whether groups of a kind may have several ranks of a tp group."""
        if kind in EXPERT_GROUPS_BY:
            return self.expert_tp < self.tp
        return 4 not in GROUPS_BY[kind]

    def groups(self, kind: str, every: int = 1) -> Int:
        """Ranks of every group of a kind [group, member]; of tp ranks, one in `every`."""
        ranks = self.ranks(self.shard)[..., ::every]
        if kind == "world":
            return np.sort(ranks.reshape(self.units, -1))
        if kind == "embedding" and self.pp > 1:
            ranks = ranks[:, [0, -1]]
        apart = GROUPS_BY.get(kind, ())
        if kind in EXPERT_GROUPS_BY:
            ranks, apart = self.expert_ranks(ranks), EXPERT_GROUPS_BY[kind]
        members = [axis for axis in range(ranks.ndim) if axis not in apart]
        count = math.prod(ranks.shape[axis] for axis in members)
        found = ranks.transpose(*apart, *members).reshape(-1, count)
        if 0 in apart or self.units == 1:
            return found
        each = found.reshape(len(found), self.units, -1)  # replicas come first among members
        each = each.swapaxes(1, 2) if kind == "sync" else each
        return each.reshape(-1, each.shape[2])


class Visits(NamedTuple):
    """Which nodes the rings of a kind visit; no placement of whole nodes changes the rest."""

    slots: Int  # [ring, visit] where several ranks in a row share a node, it once
    domains: Int | None  # NVLink domains of every ring [ring]; None: wider than a node
    n_ranks: int


@lru_cache(maxsize=16)  # thousands of placements have the same
def find_visits(layout: Layout, kind: str, every: int, node: int, nvlink: int) -> Visits:
    """Follow rings through nodes of `node` GPUs in domains of `nvlink`; see `Layout.groups`."""
    rings = layout.groups(kind, every)
    slots = rings // node
    enters = (slots != np.roll(slots, 1, axis=1)).any(axis=0)
    enters[0] |= not enters.any()
    domains = count_units(rings // nvlink) if nvlink <= node else None
    return Visits(slots[:, enters], domains, rings.shape[1])


@lru_cache(maxsize=2)
def _ranks(layout: Layout, shard: int) -> Int:
    axes = np.ix_(*map(range, (layout.dp // shard, layout.pp, shard, layout.cp, layout.tp)))
    steps = shard * layout.replica_stride, layout.stage_stride, layout.replica_stride, layout.tp, 1
    found = np.asarray(sum(axis * step for axis, step in zip(axes, steps, strict=True)))
    found.flags.writeable = False
    return found


@dataclass(frozen=True)
class Group:
    """A kind of group under a layout."""

    layout: Layout
    kind: str

    @property
    def n_ranks(self) -> int:
        """Members of one group."""
        return _touched(self.layout, self.kind, 1)[0]

    def domains(self, n_gpus: int) -> int:
        """Most domains of `n_gpus` neighbouring GPUs that any group touches, in rank order."""
        return _touched(self.layout, self.kind, n_gpus)[0]

    def members(self, n_gpus: int) -> float:
        """Members of one group in a domain of `n_gpus` that it touches, in the mean."""
        return self.n_ranks / _touched(self.layout, self.kind, n_gpus)[1]


@lru_cache(maxsize=1024)
def _touched(layout: Layout, kind: str, n_gpus: int) -> tuple[int, float]:
    """Domains of `n_gpus` GPUs that a group of a kind touches: the most, and the mean."""
    counts = count_units(layout.groups(kind) // n_gpus)
    return int(counts.max()), float(counts.mean())


def count_units(units: Int) -> Int:
    """Count the different units that every group touches [group]."""
    ordered = np.sort(units, axis=1)
    return np.asarray(1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1))


def layout_of(job: Job) -> Layout:
    """Return the layout of a job."""
    p = job.parallelism
    strides = _rank_strides(job)
    return Layout(
        p.tp, p.cp, p.dp, p.pp, *strides, shard_size(job), p.ep, p.expert_shards, sync_units(job)
    )  # fmt: skip


def _rank_strides(job: Job) -> tuple[int, int]:
    """Ranks from a stage to the next and from a replica to the next."""
    p = job.parallelism
    group = p.stage_gpus
    if job.cluster.placement == "tp-cp-pp-dp":  # as Llama 3 (arXiv:2407.21783, section 3.3.2)
        return group, group * p.pp
    return group * p.dp, group


def shard_size(job: Job) -> int:
    """Data-parallel ranks that are simulated as one, since they meet inside a step.

    With hsdp a shard group, which holds one copy of the parameters; by default the neighbours of an
    NVLink domain. With experts those whose ranks are in an ep group, which meets in every layer, or
    in several groups that share data-parallel ranks.
    """
    p = job.parallelism
    if p.data_parallel != "hsdp":
        each = p.stage_gpus
        return math.lcm(p.ep * p.expert_shards, each) // each
    if p.shard_size is not None:
        return p.shard_size
    within = job.cluster.nvlink_domain_gpus // _rank_strides(job)[1]
    return math.gcd(p.dp, within) if within > 0 else 1


def sync_units(job: Job) -> int:
    """Units of the tier with `sync_every`, whose replicas share gradients apart; 1: all do."""
    tier = job.cluster.sync_tier
    return 1 if tier is None else max(1, job.world_size // tier.gpus)


def count_replicas(job: Job) -> int:
    """Replicas that are simulated apart: data-parallel ranks, or their shard or ep groups."""
    return job.parallelism.dp // shard_size(job)
