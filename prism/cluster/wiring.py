"""How a placed job's groups lie on NVLink domains and tiers, and what their messages then take.

Rings visit their members in rank order. What leaves a unit of a tier (a pod, a site) shares its way
out: with c directed ring edges leaving a unit of g GPUs, over all groups of that kind, each gets
1 / (o c / g) of a GPU's rate, o being the oversubscription; where that is more than the whole, all
of it. Hierarchical collectives send out of each unit once, whatever the order. A ring is as slow as
its worst unit. Left out: traffic of other kinds at the same time, rings in a better order, and that
hops which only another placement makes far would queue for the uplink.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.cluster.groups import count_units
from prism.cluster.linktiers import Hops, Reach, Tier, extra_latency, find_hops, unit_sizes
from prism.cluster.machine import Cluster
from prism.cluster.nodemap import Placement

Array = NDArray[np.float64]
Int = NDArray[np.int64]


class Wiring:
    """Seconds of a job's messages under one placement.

    Parameters
    ----------
    default : Wiring, optional
        Of the same job in the default order, which saves work.
    """

    def __init__(
        self, cluster: Cluster, placement: Placement, default: Wiring | None = None
    ) -> None:
        self.cluster, self.placement, self.default = cluster, placement, default
        self.members = placement.members().astype(np.int64)
        self._reach: dict[str, _Rings] = {}
        self._hop: tuple[NDArray[np.bool_], Hops] | None = None

    @property
    def is_flat(self) -> bool:
        """Tell whether all placements of whole nodes take the same time."""
        c, p = self.cluster, self.placement
        one_rate = all(
            tier.gpus >= p.n_gpus
            or (tier.oversubscription <= 1.0 and tier.latency_s == c.network.latency_s)
            for tier in c.tiers
        )
        return one_rate and c.nvlink_gpus <= p.gpus_per_node

    def seconds(self, group: str, n_bytes: float, stage: int = 0) -> Array:
        """Duration of one phase of a collective, or of a transfer.

        Parameters
        ----------
        group : str
            One of `Cluster.group`, or ``hop`` from a stage to the next one.
        n_bytes : float
            As in `Cluster.collective_time` and `Cluster.transfer_time` [byte].

        Returns
        -------
        float64 [replica]
            Seconds of the slowest ring or transfer that the op stands for.
        """
        n_replicas, n_stages, _ = self.members.shape
        if group == "hop":
            return self._hops(n_bytes)[:, stage]
        reach = self._rings_reach(group)
        size = reach.n_ranks
        time = self.cluster.all_to_all_time if group == "ep" else self.cluster.ring_time
        times = np.array([time(n_bytes, size, *each) for each in reach.distinct])[reach.kind]
        if group in ("tp", "cp", "shard", "ep"):
            return np.asarray(times.reshape(n_replicas, n_stages, -1)[:, stage].max(axis=1))
        if group in ("dp_cp", "replicas", "expert_dp"):
            times = times.reshape(n_stages, -1)[stage]
        return np.full(n_replicas, times.max())

    def is_as(self, other: Wiring, group: str) -> bool:
        """Tell whether messages of a group take as long as under another placement."""
        if group == "hop":
            (near, hops), (far, others) = self._hop_reach(), other._hop_reach()
            return all(map(np.array_equal, (near, *hops), (far, *others)))
        return self._rings_reach(group).rings == other._rings_reach(group).rings

    def is_nominal(self, group: str) -> bool:
        """Tell whether messages of a group take everywhere what the cluster says."""
        if group == "hop":
            near, hops = self._hop_reach()
            return all(bool((x == x[:1, :, :1]).all()) for x in (near, *hops))
        reaches = self._rings_reach(group).distinct
        nominal = self.cluster.reach(self.cluster.group(group))
        return len(reaches) == 1 and bool(np.allclose(reaches[0], nominal, rtol=1e-9, atol=0.0))

    def over_nominal(self, group: str, n_bytes: float, stage: int) -> Array:
        """How many times longer messages take than the cluster says [replica].

        A transfer takes the mean over its replica's hops, as the nominal one over all of them; one
        that leaves a site has a nominal time of its own.
        """
        c, own = self.cluster, np.ones(len(self.members))
        if group != "hop":
            op_kind = "all_to_all" if group == "ep" else "all_gather"
            nominal = c.collective_time(op_kind, n_bytes, c.group(group))
            return self.seconds(group, n_bytes, stage) / nominal if nominal > 0.0 else own
        far = c.far_links()
        near = [s for s in range(c.layout.pp if c.loops else c.layout.pp - 1) if s not in far]
        if stage in far:
            return own
        return np.asarray(self._hops(n_bytes)[:, near].mean(axis=1) / c.transfer_time(n_bytes))

    def tier_factors(self, group: str) -> Array:
        """How many times slower each ring of a kind is for the units it leaves [ring]."""
        return np.array([reach.factor for reach in self._rings_reach(group).rings])

    def _rings(self, group: str) -> tuple[Int, int]:
        """GPUs of the rings of a kind, in rank order [ring, member], and how many each stands for.

        Rings of neighbouring tp ranks that never leave each other's node are one.
        """
        n_alike = 1
        if group not in ("tp", "world"):
            n_alike = math.gcd(self.cluster.layout.tp, self.placement.gpus_per_node)
        return self.placement.gpus(self.cluster.layout.groups(group, n_alike)), n_alike

    def _rings_reach(self, group: str) -> _Rings:
        """How every ring of a kind lies.

        A ring of n ranks in d NVLink domains is taken for n / d rings in parallel, each over a
        network card of its own: the mean number of members in a domain, which may be a fraction.
        """
        if group not in self._reach:
            rings, n_alike = self._rings(group)
            domains = self._domains(group, rings)
            parallel = n_alike * rings.shape[1] / domains
            if group == "ep":
                self._reach[group] = self._exits(rings, domains)
                return self._reach[group]
            factor, units = np.ones(len(rings)), []
            for tier in self.cluster.tiers:
                units.append(count_units(rings // tier.gpus))
                slow = self._tier_slow(tier, rings, domains, units[-1], parallel)
                factor = np.maximum(factor, slow)
            touched = np.stack(units, axis=1) if units else np.ones((len(rings), 0), np.int64)
            network_s, tiers = self.cluster.network.latency_s, self.cluster.tiers
            extra = {u: extra_latency(tiers, u, network_s) for u in set(map(tuple, touched))}
            self._reach[group] = _sort_rings(
                [
                    Reach(d, f, extra[u])
                    for d, f, u in zip(
                        domains.tolist(), factor.tolist(), map(tuple, touched), strict=True
                    )
                ],
                rings.shape[1],
            )
        return self._reach[group]

    def _exits(self, groups: Int, domains: Int) -> _Rings:
        """How ep groups lie: every member sends to all others, so that no ring decides."""
        units = [count_units(groups // tier.gpus).tolist() for tier in self.cluster.tiers]
        touched = zip(*units, strict=True) if units else [()] * len(groups)
        each = [self.cluster.exits(k, u) for k, u in zip(domains.tolist(), touched, strict=True)]
        return _sort_rings(each, groups.shape[1])

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

    def _domains(self, group: str, rings: Int) -> Int:
        """NVLink domains that every ring touches [ring]."""
        if self.default is not None and self.cluster.nvlink_gpus <= self.placement.gpus_per_node:
            default = self.default._rings_reach(group).rings  # a node's GPUs stay together
            return np.array([reach.domains for reach in default])
        return count_units(rings // self.cluster.nvlink_gpus)

    def _hops(self, n_bytes: float) -> Array:
        """Seconds of the transfer from every stage to the next [replica, stage]."""
        near, hops = self._hop_reach()
        times = self.cluster.hop_time(n_bytes, near, hops.slow, hops.latency_s)
        return np.asarray(times.max(axis=2))

    def _hop_reach(self) -> tuple[NDArray[np.bool_], Hops]:
        """Whether transfers stay on NVLink, and what they meet else [replica, stage, member]."""
        if self._hop is None:
            c = self.cluster
            alike = math.gcd(c.layout.tp, self.placement.gpus_per_node)
            source = self.members[:, :, ::alike]
            sink = np.roll(source, -1, axis=1)
            if not c.loops:
                sink[:, -1] = source[:, -1]  # nothing goes from the last stage to the first
            near = source // c.nvlink_gpus == sink // c.nvlink_gpus
            n, network_s = self.placement.n_gpus, c.network.latency_s
            self._hop = near, find_hops(c.tiers, n, source, sink, alike, network_s, c.steady)
        return self._hop


class _Rings(NamedTuple):
    """How the rings of a kind lie."""

    distinct: tuple[Reach, ...]
    kind: Int  # [ring] which of them
    n_ranks: int

    @property
    def rings(self) -> list[Reach]:
        """Each of them."""
        return [self.distinct[k] for k in self.kind]


def _sort_rings(rings: list[Reach], n_ranks: int) -> _Rings:
    """Sort rings by how they lie."""
    index = {each: k for k, each in enumerate(dict.fromkeys(rings))}
    return _Rings(tuple(index), np.array([index[each] for each in rings]), n_ranks)
