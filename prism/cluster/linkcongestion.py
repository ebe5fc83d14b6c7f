"""What congestion of a job's links depends on: leaf switches, and the uplinks of sites.

A message is hit if anything on its way is. Leaves are entities of their own; all that leaves a unit
of a far tier (a site) shares one more, whichever two units it joins. Left out: congestion of pods'
uplinks apart from their leaves, and what two messages make of each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.cluster.groups import Ends
from prism.cluster.nodemap import Placement

Int = NDArray[np.int32]


class Touched(NamedTuple):
    """What each link touches: entities lo[k] <= entity < hi[k] for begin <= k < end."""

    begin: Int  # [replica, link]
    end: Int  # [replica, link]
    lo: Int  # [range]
    hi: Int  # [range]
    n_touched: Int  # [replica, link] entities
    n_entities: int


def congested_links(placement: Placement, links: Sequence[Ends]) -> Touched:
    """Find the entities that each link touches: leaves, then the uplinks of each far tier.

    A message that stays within an NVLink domain touches none, nor do those of replicas or of the
    whole job that did so in the default order.
    """
    cluster, members = placement.job.cluster, placement.members()
    domain, leaf_gpus = cluster.nvlink_domain_gpus, placement.gpus_per_node * cluster.leaf_nodes
    default = placement.ranks() // domain
    joined = {x: len(x.stages) for x in links if x.shared and len(x.stages) < 2}
    crossed = {n for x, n in joined.items() if x.leaves(default)[0]}
    domains, leaves = members // domain, members // leaf_gpus
    sites = [members // tier.gpus for _, tier in cluster.link_tiers() if tier.is_far]
    n_entities, last = placement.n_leaves + len(sites), 0
    columns, edges = [], [np.zeros(0, np.int32)]
    for link in links:
        crosses = link.leaves(domains) | (joined.get(link) in crossed)
        touched = np.zeros((crosses.size, n_entities + 2), bool)  # none at either end
        entity = 1 + link.of(leaves).reshape(crosses.size, -1)
        touched[np.arange(crosses.size)[:, None], entity] = crosses[:, None]
        for i, units in enumerate(sites, 1 + placement.n_leaves):
            touched[:, i] = link.leaves(units)
        row, edge = np.nonzero(touched[:, 1:] != touched[:, :-1])
        count = np.bincount(row[::2], minlength=crosses.size)
        end = last + np.cumsum(count)
        last = end[-1]
        own = end - count, end, touched.sum(axis=1)
        columns.append(np.broadcast_to(own, (3, len(members))))
        edges.append(edge.astype(np.int32))
    each = np.array(columns, np.int32).reshape(len(links), 3, len(members)).transpose(1, 2, 0)
    begin, end, n_touched = np.ascontiguousarray(each)
    lo, hi = np.ascontiguousarray(np.concatenate(edges).reshape(-1, 2).T)
    return Touched(begin, end, lo, hi, n_touched, n_entities)
