"""Who communicates with whom: one table of ranks for every kind of group.

A dimension of a stage (``tp``, ``cp``) shares ops; ``dp_cp``, over replicas and tokens, shares a
stage's parameters, with hsdp ``shard`` does, and ``replicas`` joins those of all shard groups that
hold the same part. ``embedding`` is the first and the last stage of a pipeline. For experts the
ranks of a stage are grouped anew, as Megatron-Core's parallel_state does: ``expert_tp`` neighbours
share each expert, ``ep`` joins those that hold the experts between them, ``expert_dp`` those that
hold the same ones. Where units of a tier exchange parameters by `sync_every`, groups of several
replicas end at a unit, and ``sync`` joins units.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.jobs.dimensions import STAGE, TOKENS

if TYPE_CHECKING:
    from prism.jobs.job import Job

Int = NDArray[np.int64]
# Axes of `member_ranks`, the same for experts, and along which of them a group's members are.
AXES = ("replica", "stage", "shard", *STAGE[::-1])
EXPERT_AXES = ("replica", "stage", "ep group", "ep", "expert_tp")
MEMBERS = {
    **{name: (name,) for name in STAGE}, "dp_cp": ("replica", "shard", *TOKENS),
    "shard": ("shard", *TOKENS), "replicas": ("replica",), "sync": ("replica",),
    "embedding": ("stage",), "world": AXES, "hop": (),  # of a transfer, its sender
    "ep": ("ep",), "expert_dp": ("replica", "ep group"),
}  # fmt: skip


class Layout(NamedTuple):
    """Sizes of a job's groups, and ranks from a stage and from a data-parallel rank to the next."""

    sizes: tuple[int, ...]  # of the dimensions of a stage, tp first
    dp: int
    pp: int
    stage_stride: int
    replica_stride: int
    shard: int = 1  # data-parallel ranks that are simulated as one, see `shard_size`
    ep: int = 1
    expert_tp: int = 1  # 1, or tp
    units: int = 1  # whose replicas share gradients apart, see `sync_units`

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.sizes[0]

    def joins_tp(self, kind: str) -> bool:
        """Tell whether groups of a kind may have several ranks of a tp group."""
        return self.expert_tp < self.tp if kind in ("ep", "expert_dp") else "tp" in MEMBERS[kind]

    def apart(self, kind: str) -> tuple[int, int]:
        """Replicas and stages whose groups have an op of their own."""
        replicas = 1 if "replica" in MEMBERS[kind] else self.dp // self.shard
        return replicas, 1 if kind == "sync" or "stage" in MEMBERS[kind] else self.pp

    def groups(self, kind: str, every: int = 1) -> Int:
        """Ranks of every group of a kind [group, member]; of tp ranks, one in `every`."""
        ranks, axes = member_ranks(self)[..., ::every], AXES
        if kind == "world":
            return np.sort(ranks.reshape(self.units, -1))
        if kind == "embedding" and self.pp > 1:
            ranks = ranks[:, [0, -1]]
        if kind in ("ep", "expert_dp"):
            each = ranks.shape[-1] if self.expert_tp == self.tp else 1
            ranks, axes = ranks.reshape(*ranks.shape[:2], -1, self.ep, each), EXPERT_AXES
        apart = [i for i, axis in enumerate(axes) if axis not in MEMBERS[kind]]
        members = [i for i in range(ranks.ndim) if i not in apart]
        count = math.prod(ranks.shape[i] for i in members)
        found = ranks.transpose(*apart, *members).reshape(-1, count)
        if self.units == 1 or "replica" not in MEMBERS[kind]:
            return found
        each = found.reshape(len(found), self.units, -1)  # replicas come first among members
        each = each.swapaxes(1, 2) if kind == "sync" else each
        return each.reshape(-1, each.shape[2])


class Ends(NamedTuple):
    """Stages whose GPUs a message joins: one or all, or two, where each has one to meet."""

    stages: tuple[int, ...]  # (): all
    shared: bool  # by all replicas; else each has its own
    units: int = 1  # among which the replicas are divided, each with a message of its own

    def of(self, each: NDArray[Any]) -> NDArray[Any]:
        """Of what GPUs have [replica, stage, member] its own's [row, stage, member]."""
        own = each[:, self.stages] if self.stages else each
        return own.swapaxes(0, 1).reshape(1, own.shape[1], -1) if self.shared else own

    def leaves(self, unit: NDArray[Any]) -> NDArray[np.bool_]:
        """Tell whether it leaves a unit, from those of all GPUs [row]."""
        own = self.of(unit)
        if len(self.stages) == 2:
            return np.asarray((own[:, 0] != own[:, 1]).any(axis=1))
        parts = own.reshape(*own.shape[:2], self.units, -1)
        return np.asarray((np.ptp(parts, axis=(1, 3)) > 0).any(axis=1))


def ends_of(group: str, stage: int, link: int, n_stages: int, shared: bool, units: int = 1) -> Ends:
    """Stages that a message of a kind of group joins; a ``hop`` goes from stage `link` on.

    Of replicas it joins all, or those of each of the `units` of `sync_units`.
    """
    units = 1 if group == "sync" or not shared else units
    if group in ("world", "sync"):
        return Ends((), shared, units)
    found = {"hop": (link, (link + 1) % n_stages), "embedding": (0, n_stages - 1)}
    return Ends(found.get(group, (stage,)), shared, units)


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
def member_ranks(layout: Layout) -> Int:
    """Rank of every member, int64 by `AXES`."""
    shape, replica = (layout.dp // layout.shard, layout.pp, layout.shard), layout.replica_stride
    axes = np.ix_(*map(range, (*shape, math.prod(layout.sizes))))
    steps = layout.shard * replica, layout.stage_stride, replica, 1
    whole = np.asarray(sum(axis * step for axis, step in zip(axes, steps, strict=True)))
    found = whole.reshape(*shape, *layout.sizes[::-1])
    found.flags.writeable = False
    return found


class Group(NamedTuple):
    """A kind of group under a layout."""

    layout: Layout
    kind: str

    @property
    def n_ranks(self) -> int:
        """Members of one group."""
        return _touched(self, 1)[0]

    def domains(self, n_gpus: int) -> int:
        """Most domains of `n_gpus` neighbouring GPUs that any group touches, in rank order."""
        return _touched(self, n_gpus)[0]

    def members(self, n_gpus: int) -> float:
        """Members of one group in a domain of `n_gpus` that it touches, in the mean."""
        return self.n_ranks / _touched(self, n_gpus)[1]


@lru_cache(maxsize=1024)
def _touched(group: Group, n_gpus: int) -> tuple[int, float]:
    """Domains of `n_gpus` GPUs that a group of a kind touches: the most, and the mean."""
    counts = count_units(group.layout.groups(group.kind) // n_gpus)
    return int(counts.max()), float(counts.mean())


def count_units(units: Int) -> Int:
    """Count the different units that every group touches [group]."""
    ordered = np.sort(units, axis=1)
    return np.asarray(1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1))


def layout_of(job: Job) -> Layout:
    """Return the layout of a job."""
    p = job.parallelism
    sizes, strides = tuple(getattr(p, name) for name in STAGE), _rank_strides(job)
    return Layout(
        sizes, p.dp, p.pp, *strides, shard_size(job), p.ep, p.expert_shards, sync_units(job)
    )


def _rank_strides(job: Job) -> tuple[int, int]:
    """Ranks from a stage to the next and from a replica to the next."""
    p = job.parallelism
    if job.cluster.placement == "tp-cp-pp-dp":  # as Llama 3 (arXiv:2407.21783, section 3.3.2)
        return p.stage_gpus, p.stage_gpus * p.pp
    return p.stage_gpus * p.dp, p.stage_gpus


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
