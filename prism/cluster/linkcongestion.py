"""What congestion of a job's links depends on: leaf switches, and the ways between far units.

A message is hit if anything on its way is. Leaves are entities of their own; all that leaves a unit
of a far tier (a site) shares one more, whichever two units it joins. Left out: congestion of pods'
uplinks apart from their leaves, and what two messages make of each other.
"""

import numpy as np
from numpy.typing import NDArray

from prism.cluster.nodemap import Placement, n_own_links

Int = NDArray[np.int32]


def congested_links(placement: Placement, n_stages: int) -> tuple[Int, Int, int]:
    """Return the entities that each link touches.

    Parameters
    ----------
    placement : Placement
    n_stages : int

    Returns
    -------
    lo, hi : ndarray of int32 [replica, link, range]
        As in `Placement.link_leaves`, one range more for every far tier; its entity comes after
        the leaves.
    n : int
        Leaves and far tiers.
    """
    lo, hi = placement.link_leaves(n_stages)
    n = placement.n_leaves
    for _, tier in placement.job.cluster.link_tiers():
        if tier.is_far:
            crosses = _crossing(placement, tier.gpus, n_stages, lo.shape[:2])
            lo = np.concatenate([lo, np.where(crosses, n, 0)[..., None]], axis=2)
            hi = np.concatenate([hi, np.where(crosses, n + 1, 0)[..., None]], axis=2)
            n += 1
    return np.ascontiguousarray(lo, np.int32), np.ascontiguousarray(hi, np.int32), n


def _crossing(
    placement: Placement, unit_gpus: int, n_stages: int, shape: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Whether each link leaves a unit of so many GPUs [replica, link].

    Links that join all replicas are hit if any replica's row is, so that one row tells.
    """
    unit, n_own = placement.members() // unit_gpus, n_own_links(placement.job)
    out = np.zeros(shape, bool)
    loops = placement.job.parallelism.loops
    for s in range(n_stages if n_stages > 1 else 0):
        peer = s + 1 if s + 1 < n_stages else (0 if loops else n_stages - 2)
        out[:, s] = (unit[:, s] != unit[:, peer]).any(axis=1)
    if n_own > n_stages:
        out[:, n_stages:n_own] = np.ptp(unit, axis=2) > 0
    out[0, n_own : n_own + n_stages] = np.ptp(unit, axis=(0, 2)) > 0
    out[0, -2] = np.ptp(unit) > 0
    out[:, -1] = (unit[:, 0] != unit[:, -1]).any(axis=1)
    return out
