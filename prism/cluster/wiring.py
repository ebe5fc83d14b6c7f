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
from numpy.typing import NDArray

from prism.cluster.groups import OF_STAGE, Visits, count_units, find_visits
from prism.cluster.linktiers import Hops, Reach, Tier, extra_latency, unit_sizes
from prism.cluster.machine import Cluster
from prism.cluster.nodemap import Placement

Array = NDArray[np.float64]
Int = NDArray[np.int64]


class Wiring:
    """Seconds of a job's messages under one placement."""

    def __init__(self, cluster: Cluster, placement: Placement) -> None:
        self.cluster, self.placement = cluster, placement
        self.members = placement.members()
        self._reach: dict[str, _Rings] = {}
        self._nominal: dict[str, bool] = {}

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
        n_replicas, n_stages, _ = self.members.shape
        if group == "hop":
            return self._hops(n_bytes)[:, stage]
        rings = self._rings_reach(group)
        size = rings.n_ranks
        c = self.cluster
        if group == "ep":
            each = [c.all_to_all_time(n_bytes, size, *reach[:3]) for reach in rings.distinct]
        else:
            each = [c.ring_time(n_bytes, size, *reach, op_kind) for reach in rings.distinct]
        times = np.array(each)[rings.kind]
        if OF_STAGE.get(group):
            return np.asarray(times.reshape(n_replicas, n_stages, -1)[:, stage].max(axis=1))
        if group in OF_STAGE:
            times = times.reshape(n_stages, -1)[stage]
        return np.full(n_replicas, times.max())

    def is_as(self, other: Wiring, group: str) -> bool:
        """Tell whether messages of a group take as long as under another placement."""
        if group == "hop":
            return all(map(np.array_equal, self._hop_reach, other._hop_reach))
        if self._visits(group).slots.shape[1] == 1:
            return True  # inside a node, and nodes move as wholes
        own, others = self._rings_reach(group), other._rings_reach(group)
        return own.distinct == others.distinct and bool(np.array_equal(own.kind, others.kind))

    def is_nominal(self, group: str) -> bool:
        """Tell whether messages of a group take everywhere what the cluster says."""
        if group not in self._nominal:
            self._nominal[group] = self._find_nominal(group)
        return self._nominal[group]

    def _find_nominal(self, group: str) -> bool:
        if group == "hop":
            return all(bool((x == x[:1, :, :1]).all()) for x in self._hop_reach)
        reaches = self._rings_reach(group).distinct
        nominal = self.cluster.reach(self.cluster.group(group))
        return len(reaches) == 1 and bool(np.allclose(reaches[0], nominal, rtol=1e-9, atol=0.0))

    def over_nominal(self, group: str, n_bytes: float, stage: int, op_kind: str) -> Array:
        """How many times longer messages take than the cluster says [replica].

        Of a transfer it says the mean over all hops; one that leaves a site has a nominal time of
        its own.
        """
        c = self.cluster
        if group == "hop":
            nominal = c.transfer_time(n_bytes, stage if stage in c.far_links() else None)
        else:
            nominal = c.collective_time(op_kind, n_bytes, c.group(group))
        found = self.seconds(group, n_bytes, stage, op_kind)
        return found / nominal if nominal > 0.0 else np.ones(len(self.members))

    def _n_alike(self, group: str) -> int:
        """Neighbouring tp ranks whose rings visit the same nodes, so that one is looked at."""
        layout = self.cluster.layout
        joined = group != "hop" and layout.joins_tp(group)
        return 1 if joined else math.gcd(layout.tp, self.placement.gpus_per_node)

    def _visits(self, group: str) -> Visits:
        c, node = self.cluster, self.placement.gpus_per_node
        return find_visits(c.layout, group, self._n_alike(group), node, c.nvlink_gpus)

    def _rings_reach(self, group: str) -> _Rings:
        """How every ring of a kind lies.

        A ring of n ranks in d NVLink domains is taken for n / d rings in parallel, each over a
        network card of its own: the mean number of members in a domain, which may be a fraction.
        """
        if group not in self._reach:
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
            distinct = []
            for ring in first.tolist():
                n_domains = int(domains[ring])
                in_units = tuple(int(count[ring]) for count in units)
                if group == "ep":
                    distinct.append(c.exits(n_domains, in_units))
                    continue
                network_s = c.network.latency_s
                extra = (
                    extra_latency(c.tiers, in_units, network_s, tree) for tree in (False, True)
                )
                distinct.append(Reach(n_domains, float(factor[ring]), *extra))
            self._reach[group] = _Rings(tuple(distinct), kind.ravel(), n_ranks)
        return self._reach[group]

    def _tier_slow(
        self, tier: Tier, rings: Int, domains: Int, units: Int, parallel: Array
    ) -> Array:
        """How many times slower every ring is for leaving units of a tier [ring]."""
        sizes = unit_sizes(tier, self.placement.n_gpus)
        at = rings // tier.gpus
        if tier.hierarchical:  # out of each unit once, and only what the others lack
            at = np.sort(at, axis=1)
            leaves = np.diff(at, axis=1, prepend=-1) > 0
            share = (units - 1) / units * domains / np.maximum(domains - 1, 1)
            weight = parallel * share
        else:
            leaves, weight = at != np.roll(at, -1, axis=1), parallel
        leaves &= (units > 1)[:, None]
        edges = np.where(leaves, weight[:, None], 0.0)
        out = np.bincount(at.ravel(), edges.ravel(), sizes.size)
        slow = tier.oversubscription * out / sizes
        return np.asarray(np.where(leaves, np.maximum(1.0, slow[at]), 1.0).max(axis=1))

    def _hops(self, n_bytes: float) -> Array:
        """Seconds of the transfer from every stage to the next [replica, stage]."""
        times = self.cluster.hop_time(n_bytes, self._hop_reach)
        return np.asarray(times.max(axis=2))

    @cached_property
    def _hop_reach(self) -> Hops:
        """What transfers from every stage to the next meet [replica, stage, member]."""
        n_alike = self._n_alike("hop")
        source = self.members[:, :, ::n_alike].astype(np.int64)
        sink = np.roll(source, -1, axis=1)
        if not self.cluster.loops:
            sink[:, -1] = source[:, -1]  # nothing goes from the last stage to the first
        return self.cluster.hops(self.placement.n_gpus, source, sink, n_alike)


class _Rings(NamedTuple):
    """How the rings of a kind lie."""

    distinct: tuple[Reach, ...]  # in order of their first ring
    kind: Int  # [ring] which of them
    n_ranks: int
