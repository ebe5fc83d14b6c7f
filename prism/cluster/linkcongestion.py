"""What congestion of a job's links depends on: leaf switches, and the uplinks of sites.

A message is hit if anything on its way is. Leaves are entities of their own; all that leaves a unit
of a far tier (a site) shares one more, whichever two units it joins. Left out: congestion of pods'
uplinks apart from their leaves, and what two messages make of each other.

Links of a job with n stages are numbered: s < n goes from stage s to the next (the last stage: to
the first if there are several chunks, else to the one before); with hsdp or ep, n + s joins that
group of stage s. From `n_own_links` on, links touch what they do in all replicas together: n of
them join the replicas of a stage, then come the whole job, and the first and the last stage.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.cluster.nodemap import Placement
from prism.jobs.job import Job

Int = NDArray[np.int32]


def n_own_links(job: Job) -> int:
    """Links that each replica has for itself."""
    joined = job.parallelism.data_parallel == "hsdp" or job.parallelism.ep > 1
    return job.parallelism.pp * (2 if joined else 1)


class Touched(NamedTuple):
    """What each link touches: entities lo[k] <= entity < hi[k] for begin <= k < end."""

    begin: Int  # [replica, link]
    end: Int  # [replica, link]
    lo: Int  # [range]
    hi: Int  # [range]
    n_touched: Int  # [replica, link] entities
    n_entities: int


def congested_links(placement: Placement, n_stages: int) -> Touched:
    """Find the entities that each link touches: leaves, then the uplinks of each far tier.

    A message that stays within an NVLink domain touches none, nor do those of replicas or of the
    whole job that did so in the default order.
    """
    job, members, n_own = placement.job, placement.members(), n_own_links(placement.job)
    domain = job.cluster.nvlink_domain_gpus
    crosses = _crossing(job, members // domain, n_stages)
    default = _crossing(job, placement.ranks() // domain, n_stages)
    crosses[:, n_own:-2] |= default[:, n_own:-2].any()
    crosses[:, -2] |= default[:, -2]
    far = [tier for _, tier in job.cluster.link_tiers() if tier.is_far]
    n_replicas, n_entities = len(members), placement.n_leaves + len(far)
    own = np.zeros((n_replicas, n_own, n_entities), bool)
    joined = np.zeros((crosses.shape[1] - n_own, n_entities), bool)
    leaves = members // placement.gpus_per_node // job.cluster.leaf_nodes
    replicas = np.arange(n_replicas)[:, None]
    for link, stages in enumerate(_stages(job, n_stages)):
        touched = leaves[:, stages].reshape(n_replicas, -1)
        if link < n_own:
            own[replicas, link, touched] = crosses[:, link, None]
        else:
            joined[link - n_own, touched] = crosses[0, link]
    for i, tier in enumerate(far, placement.n_leaves):
        leave = _crossing(job, members // tier.gpus, n_stages)
        own[..., i], joined[:, i] = leave[:, :n_own], leave[0, n_own:]
    n_rows = n_replicas * n_own + len(joined)
    found = np.concatenate([np.flatnonzero(own), own.size + np.flatnonzero(joined)])
    row, entity = np.divmod(found, n_entities)
    opens = (np.diff(found, prepend=-2) > 1) | (entity == 0)
    closes = np.append(opens[1:], True)[: found.size]
    first = np.searchsorted(row[opens], np.arange(n_rows + 1)).astype(np.int32)
    count = np.bincount(row, minlength=n_rows).astype(np.int32)
    at = np.arange(n_replicas * n_own).reshape(n_replicas, n_own)
    shared = np.tile(np.arange(at.size, n_rows), (n_replicas, 1))
    at = np.concatenate([at, shared], axis=1)
    lo, hi = (x.astype(np.int32) for x in (entity[opens], entity[closes] + 1))
    return Touched(first[at], first[at + 1], lo, hi, count[at], n_entities)


def _stages(job: Job, n_stages: int) -> list[Sequence[int]]:
    """Stages whose leaves each link touches."""
    each: list[Sequence[int]] = [[s] for s in range(n_stages)]
    hops: list[Sequence[int]] = list(enumerate(_peers(job, n_stages)))
    joined = each if n_own_links(job) > n_stages else []
    return [*hops, *joined, *each, range(n_stages), [0, n_stages - 1]]


def _peers(job: Job, n_stages: int) -> list[int]:
    """Stages at the other ends of the stages' links."""
    return [*range(1, n_stages), 0 if job.parallelism.loops else max(0, n_stages - 2)]


def _crossing(job: Job, unit: NDArray[np.integer[Any]], n_stages: int) -> NDArray[np.bool_]:
    """Whether each link leaves a unit [replica, link], of members in unit[replica, stage, member].

    Links that join all replicas cross for all where they do for any.
    """
    n_own = n_own_links(job)
    out = np.zeros((len(unit), n_own + n_stages + 2), bool)
    out[:, :n_stages] = (unit != unit[:, _peers(job, n_stages)]).any(axis=2)
    if n_own > n_stages:
        out[:, n_stages:n_own] = np.ptp(unit, axis=2) > 0
    out[:, n_own:-2] = np.ptp(unit, axis=(0, 2)) > 0
    out[:, -2] = np.ptp(unit) > 0
    out[:, -1] = (unit[:, 0] != unit[:, -1]).any()
    return out
