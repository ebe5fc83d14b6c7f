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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.cluster.nodemap import Placement
from prism.jobs.job import Job

Int = NDArray[np.int32]


def n_own_links(job: Job) -> int:
    """Links that each replica has for itself."""
    joined = job.parallelism.data_parallel == "hsdp" or job.parallelism.ep > 1
    return job.parallelism.pp * (2 if joined else 1)


def congested_links(placement: Placement, n_stages: int) -> tuple[Int, Int, int]:
    """Return the entities that each link touches, lo <= entity < hi, and how many there are.

    lo and hi [replica, link, range] are of leaves as `link_leaves` gives them, with one range more
    for every far tier, whose entity comes after the leaves.
    """
    lo, hi = link_leaves(placement, n_stages)
    members, n = placement.members(), placement.n_leaves
    for _, tier in placement.job.cluster.link_tiers():
        if tier.is_far:
            crosses = _crossing(placement.job, members // tier.gpus, n_stages)
            lo = np.concatenate([lo, np.where(crosses, n, 0)[..., None]], axis=2)
            hi = np.concatenate([hi, np.where(crosses, n + 1, 0)[..., None]], axis=2)
            n += 1
    return np.ascontiguousarray(lo, np.int32), np.ascontiguousarray(hi, np.int32), n


def link_leaves(placement: Placement, n_stages: int) -> tuple[Int, Int]:
    """Leaf switches that each link touches, lo <= leaf < hi [replica, link, range].

    There are as many ranges as the nodes of two groups need: two where ranks have the default
    order. The whole job's goes from its first leaf to its last. Ranges are empty where the message
    stays within an NVLink domain, and for those of replicas or the whole job did so in the default
    order.
    """
    job, members, n_own = placement.job, placement.members(), n_own_links(placement.job)
    domain = job.cluster.nvlink_domain_gpus
    crosses = _crossing(job, members // domain, n_stages)
    default = _crossing(job, placement.ranks() // domain, n_stages)
    crosses[:, n_own:-2] |= default[:, n_own:-2].any()
    crosses[:, -2] |= default[:, -2]
    leaves = members // placement.gpus_per_node // job.cluster.leaf_nodes
    own_lo, own_hi = _runs(leaves)
    n_replicas, _, n_runs = own_lo.shape
    lo = np.zeros((*crosses.shape, 2 * n_runs), np.int32)
    hi = np.zeros_like(lo)
    for link, stages in enumerate(_stages(job, n_stages)):
        width = len(stages) * n_runs
        lo[:, link, :width] = own_lo[:, stages].reshape(n_replicas, -1)
        hi[:, link, :width] = own_hi[:, stages].reshape(n_replicas, -1)
    lo[0, -2, 0], hi[0, -2, 0] = leaves.min(), leaves.max() + 1
    return np.where(crosses[..., None], lo, 0), np.where(crosses[..., None], hi, 0)


def _stages(job: Job, n_stages: int) -> list[Sequence[int]]:
    """Stages whose leaves each link touches; the whole job has none of its own."""
    each: list[Sequence[int]] = [[s] for s in range(n_stages)]
    hops: list[Sequence[int]] = list(enumerate(_peers(job, n_stages)))
    joined = each if n_own_links(job) > n_stages else []
    return [*hops, *joined, *each, [], [0, n_stages - 1]]


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


def _runs(leaves: Int) -> tuple[Int, Int]:
    """Find the runs lo <= leaf < hi [replica, stage, run] of leaves [replica, stage, member].

    They are empty (0, 0) beyond a group's last run.
    """
    leaves = np.sort(leaves, axis=2)
    begins = np.diff(leaves, axis=2, prepend=leaves[:, :, :1] - 2) > 1
    ends = np.diff(leaves, axis=2, append=leaves[:, :, -1:] + 2) > 1
    run = np.cumsum(begins, axis=2) - 1
    lo = np.zeros((*leaves.shape[:2], int(run.max()) + 1), np.int32)
    hi = np.zeros_like(lo)
    lo[*np.nonzero(begins)[:2], run[begins]] = leaves[begins]
    hi[*np.nonzero(ends)[:2], run[ends]] = leaves[ends] + 1
    return lo, hi
