"""How a placed job's groups lie on NVLink domains and tiers, and what their messages then take.

Rings visit their members in rank order. What leaves a unit of a tier (a pod, a site) shares its
uplink: with c directed ring edges leaving a unit of g GPUs, over all groups of that kind, each gets
1 / (o c / g) of a GPU's rate, o being the oversubscription; where that is more than the whole, all
of it. Left out: traffic of other kinds at the same time, rings in a better order, and that hops
which only another placement makes far would queue for the uplink.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np

from prism.cluster.groups import Visits, count_units, find_visits
from prism.cluster.linktiers import Array, Hops, Int, Reach, Tier
from prism.cluster.machine import Cluster
from prism.cluster.nodemap import Placement


class _Rings(NamedTuple):
    """How the rings of a kind lie."""

    distinct: tuple[Reach, ...]  # in order of their first ring
    kind: Int  # [replica or 1, stage or 1, ring] which of them
    n_ranks: int


class Wiring:
    """Seconds of a job's messages under one placement."""

    def __init__(self, cluster: Cluster, placement: Placement) -> None:
        self.cluster, self.placement = cluster, placement
        self._lie: dict[str, _Rings] = {}

    @property
    def is_flat(self) -> bool:
        """Tell whether all placements of whole nodes take the same time."""
        c, p = self.cluster, self.placement
        near = c.network.latency_s
        return c.nvlink_gpus <= p.gpus_per_node and all(
            tier.gpus >= p.n_gpus or (tier.oversubscription <= 1.0 and tier.latency_s == near)
            for tier in c.tiers
        )

    def seconds(
        self, group: str, n_bytes: float, stage: int = 0, op_kind: str = "all_gather"
    ) -> Array:
        """Seconds of the slowest ring or transfer that an op stands for [replica].

        That is a collective of a group of `Cluster.group`, or the ``hop`` from a stage to the next.
        """
        c, layout = self.cluster, self.cluster.layout
        if group == "hop":
            times = c.hop_time(n_bytes, self._hops)
        else:
            rings, op_kind = self._rings(group), "all_to_all" if group == "ep" else op_kind
            each = [c.message_time(op_kind, n_bytes, rings.n_ranks, x) for x in rings.distinct]
            times = np.array(each)[rings.kind]
        slowest = times[:, stage % times.shape[1]].max(axis=1)
        return np.broadcast_to(slowest, layout.dp // layout.shard)

    def is_as(self, other: Wiring, group: str) -> bool:
        """Tell whether messages of a group take as long as under another placement."""
        if group == "hop":
            return all(map(np.array_equal, self._hops, other._hops))
        if self._visits(group).slots.shape[1] == 1:
            return True  # inside a node, and nodes move as wholes
        own, others = self._rings(group), other._rings(group)
        return own.distinct == others.distinct and np.array_equal(own.kind, others.kind)

    def is_nominal(self, group: str) -> bool:
        """Tell whether messages of a group take everywhere what the cluster says."""
        if group == "hop":
            return all(bool((x == x[:1, :, :1]).all()) for x in self._hops)
        reaches = self._rings(group).distinct
        nominal = self.cluster.reach(self.cluster.group(group))
        return len(reaches) == 1 and bool(np.allclose(reaches[0], nominal, rtol=1e-9, atol=0.0))

    def over_nominal(self, group: str, n_bytes: float, stage: int, op_kind: str) -> Array:
        """How many times longer messages take than the cluster says [replica].

        Of a transfer it says the mean over all hops; one that leaves a site has a nominal time of
        its own.
        """
        c = self.cluster
        if group == "hop":
            nominal = c.transfer_time(n_bytes, stage)
        else:
            nominal = c.collective_time(op_kind, n_bytes, c.group(group))
        found = self.seconds(group, n_bytes, stage, op_kind)
        return found / nominal if nominal > 0.0 else np.ones(found.size)

    def _n_alike(self, group: str) -> int:
        """Neighbouring tp ranks whose rings visit the same nodes, so that one is looked at."""
        layout = self.cluster.layout
        return 1 if layout.joins_tp(group) else math.gcd(layout.tp, self.placement.gpus_per_node)

    def _visits(self, group: str) -> Visits:
        c, node = self.cluster, self.placement.gpus_per_node
        return find_visits(c.layout, group, self._n_alike(group), node, c.nvlink_gpus)

    def _rings(self, group: str) -> _Rings:
        """How every ring of a kind lies.

        A ring of n ranks in d NVLink domains is taken for n / d rings in parallel, each over a
        network card of its own: the mean number of members in a domain, which may be a fraction.
        """
        if group not in self._lie:
            c = self.cluster
            slots, domains, n_ranks = self._visits(group)
            rings = self.placement.slots[slots] * self.placement.gpus_per_node  # [ring, visit]
            if domains is None:
                domains = count_units(rings // c.nvlink_gpus)
            units = [count_units(rings // tier.gpus) for tier in c.tiers]
            factor, parallel = np.ones(len(rings)), self._n_alike(group) * n_ranks / domains
            if group != "ep":  # where every member sends to all others, so that no ring decides
                for tier, n in zip(c.tiers, units, strict=True):
                    slow = self._tier_slow(tier, rings, domains, n, parallel)
                    factor = np.maximum(factor, slow)
            kind = np.unique(factor, return_inverse=True)[1]
            for count in (domains, *units):  # one number for each ring: rows would sort slowly
                kind = kind * (count.max() + 1) + count
            _, first, kind = np.unique(kind, return_index=True, return_inverse=True)
            lie = c.exits if group == "ep" else c.ring_reach
            distinct = (
                lie(int(domains[i]), [int(n[i]) for n in units], float(factor[i])) for i in first
            )
            shape = *c.layout.apart(group), -1
            self._lie[group] = _Rings(tuple(distinct), kind.reshape(shape), n_ranks)
        return self._lie[group]

    def _tier_slow(
        self, tier: Tier, rings: Int, domains: Int, units: Int, parallel: Array
    ) -> Array:
        """How many times slower every ring is for leaving units of a tier [ring]."""
        at = rings // tier.gpus
        if tier.hierarchical:  # out of each unit once, and only what the others lack
            at = np.sort(at, axis=1)
            leaves = np.diff(at, axis=1, prepend=-1) > 0
        else:
            leaves = at != np.roll(at, -1, axis=1)
        leaves &= (units > 1)[:, None]
        edges = np.where(leaves, (parallel * tier.sent(units, domains))[:, None], 0.0)
        sizes = tier.unit_sizes(self.placement.n_gpus)
        slow = tier.oversubscription * np.bincount(at.ravel(), edges.ravel(), sizes.size) / sizes
        return np.asarray(np.where(leaves, np.maximum(1.0, slow[at]), 1.0).max(axis=1))

    @cached_property
    def _hops(self) -> Hops:
        """What transfers from every stage to the next meet [replica, stage, member]."""
        layout, n_alike = self.cluster.layout, self._n_alike("hop")
        source = self.placement.gpus(layout.groups("hop", n_alike)).reshape(
            *layout.apart("hop"), -1
        )
        sink = np.roll(source, -1, axis=1)
        if not self.cluster.loops:
            sink[:, -1] = source[:, -1]  # nothing goes from the last stage to the first
        return self.cluster.hops(self.placement.n_gpus, source, sink, n_alike)
