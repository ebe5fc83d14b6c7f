"""How a placed job's groups lie on NVLink domains and pods, and what their messages then take.

Rings visit their members in rank order. What leaves a pod shares the pod's way out: with c directed
ring edges leaving a pod of g GPUs, over all groups of that kind, each gets 1 / (o c / g) of a GPU's
rate, o being the oversubscription; where that is more than the whole, all of it. A ring is as slow
as its worst pod. Left out: traffic of other kinds at the same time, and rings in a better order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.cluster import Cluster
from prism.placement import Placement

Array = NDArray[np.float64]
Int = NDArray[np.int64]


class Wiring:
    """Seconds of a job's messages under one placement.

    Parameters
    ----------
    cluster : Cluster
    placement : Placement
    default : Wiring, optional
        Of the same job in the default order, which saves work.
    """

    def __init__(
        self, cluster: Cluster, placement: Placement, default: Wiring | None = None
    ) -> None:
        self.cluster, self.placement, self.default = cluster, placement, default
        self.members = placement.members().astype(np.int64)
        n_pods = -(-placement.n_gpus // cluster.pod_gpus)
        self.pod_gpus = np.full(n_pods, cluster.pod_gpus, np.int64)
        self.pod_gpus[-1] = placement.n_gpus - (n_pods - 1) * cluster.pod_gpus
        self._reach: dict[str, _Reach] = {}
        self._hop: tuple[NDArray[np.bool_], Array] | None = None

    @property
    def is_flat(self) -> bool:
        """Tell whether all placements of whole nodes take the same time."""
        c, p = self.cluster, self.placement
        one_rate = c.oversubscription == 1.0 or c.pod_gpus >= p.n_gpus
        return one_rate and c.nvlink_gpus <= p.gpus_per_node

    def seconds(self, group: str, n_bytes: float, stage: int = 0) -> Array:
        """Duration of one phase of a collective, or of a transfer.

        Parameters
        ----------
        group : str
            One of `Cluster.group`, or ``hop`` from a stage to the next one.
        n_bytes : float
            As in `Cluster.collective_time` and `Cluster.transfer_time` [byte].
        stage : int

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
        distinct = {pair: time(n_bytes, size, pair[0], pair[1]) for pair in reach.distinct}
        times = np.array([distinct[pair] for pair in reach.pairs])
        if group in ("tp", "cp", "shard", "ep"):
            return np.asarray(times.reshape(n_replicas, n_stages, -1)[:, stage].max(axis=1))
        if group in ("dp_cp", "replicas", "expert_dp"):
            times = times.reshape(n_stages, -1)[stage]
        return np.full(n_replicas, times.max())

    def is_as(self, other: Wiring, group: str) -> bool:
        """Tell whether messages of a group take as long as under another placement."""
        if group == "hop":
            return all(map(np.array_equal, self._hop_reach(), other._hop_reach()))
        return self._rings_reach(group).pairs == other._rings_reach(group).pairs

    def pod_factors(self, group: str) -> Array:
        """How many times slower each ring of a kind is for the pods it leaves [ring]."""
        return np.array([factor for _, factor in self._rings_reach(group).pairs])

    def _rings(self, group: str) -> tuple[Int, int]:
        """GPUs of the rings of a kind, in rank order [ring, member], and how many each stands for.

        Rings of neighbouring tp ranks that never leave each other's node are one.
        """
        c, g = self.cluster, self.members
        alike = math.gcd(c.tp_size, self.placement.gpus_per_node)
        n_alike = 1 if group in ("tp", "world") else alike
        shape = (*g.shape[:2], c.shard_size, c.cp_size, c.tp_size // n_alike, n_alike)
        g = g.reshape(shape)[..., 0]  # replica, stage, shard, cp, tp
        if group == "tp":
            rings = g.reshape(-1, c.tp_size)
        elif group == "cp":
            rings = np.swapaxes(g, 3, 4).reshape(-1, c.cp_size)
        elif group == "dp_cp":
            rings = g.transpose(1, 4, 0, 2, 3).reshape(-1, c.dp_size * c.cp_size)
        elif group == "shard":
            rings = g.transpose(0, 1, 4, 2, 3).reshape(-1, c.shard_size * c.cp_size)
        elif group == "ep":
            rings = g.transpose(0, 1, 3, 4, 2).reshape(-1, c.ep_size)
        elif group == "expert_dp":
            rings = g.transpose(1, 2, 4, 0, 3).reshape(-1, len(g) * c.cp_size)
        elif group == "replicas":
            rings = g.transpose(1, 2, 3, 4, 0).reshape(-1, len(g))
        elif group == "embedding":
            ends = g.reshape(*g.shape[:2], -1)[:, [0, -1]]
            rings = np.swapaxes(ends, 1, 2).reshape(-1, 2)
        else:
            rings = g.ravel()[np.argsort(self.placement.ranks().ravel())][None]
        return rings, n_alike

    def _rings_reach(self, group: str) -> _Reach:
        """How every ring of a kind lies.

        A ring of n ranks in d NVLink domains is taken for n / d rings in parallel, each over a
        network card of its own: the mean number of members in a domain, which may be a fraction.
        """
        if group not in self._reach:
            rings, n_alike = self._rings(group)
            domains = self._domains(group, rings)
            parallel = n_alike * rings.shape[1] / domains
            pods = rings // self.cluster.pod_gpus
            if group == "ep":
                self._reach[group] = self._all_to_all_reach(domains, pods)
                return self._reach[group]
            leaves = pods != np.roll(pods, -1, axis=1)
            edges = np.where(leaves, parallel[:, None], 0.0)
            out = np.bincount(pods.ravel(), edges.ravel(), self.pod_gpus.size)
            share = self.cluster.oversubscription * out / self.pod_gpus
            factor = np.where(leaves, np.maximum(1.0, share[pods]), 1.0).max(axis=1)
            pairs = list(zip(domains.tolist(), factor.tolist(), strict=True))
            self._reach[group] = _Reach(pairs, frozenset(pairs), rings.shape[1])
        return self._reach[group]

    def _all_to_all_reach(self, domains: Int, pods: Int) -> _Reach:
        """How ep groups lie: every member sends to all others, so that no ring decides."""
        touched = 1 + np.count_nonzero(np.diff(np.sort(pods, axis=1), axis=1), axis=1)
        both = zip(domains.tolist(), touched.tolist(), strict=True)
        pairs = [(k, self.cluster.exit_factor(k, n)) for k, n in both]
        return _Reach(pairs, frozenset(pairs), pods.shape[1])

    def _domains(self, group: str, rings: Int) -> Int:
        """NVLink domains that every ring touches [ring]."""
        if self.default is not None and self.cluster.nvlink_gpus <= self.placement.gpus_per_node:
            pairs = self.default._rings_reach(group).pairs  # a node's GPUs stay together
            return np.array([domains for domains, _ in pairs])
        ordered = np.sort(rings // self.cluster.nvlink_gpus, axis=1)
        return np.asarray(1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1))

    def _hops(self, n_bytes: float) -> Array:
        """Seconds of the transfer from every stage to the next [replica, stage]."""
        near, slow = self._hop_reach()
        return np.asarray(self.cluster.hop_time(n_bytes, near, slow).max(axis=2))

    def _hop_reach(self) -> tuple[NDArray[np.bool_], Array]:
        """Whether every transfer stays on NVLink, and its pod factor [replica, stage, member]."""
        if self._hop is None:
            c = self.cluster
            alike = math.gcd(c.tp_size, self.placement.gpus_per_node)
            source = self.members[:, :, ::alike]
            sink = np.roll(source, -1, axis=1)
            here, there = source // c.pod_gpus, sink // c.pod_gpus
            leaves = here != there
            if not c.loops:
                leaves[:, -1] = False  # nothing goes from the last stage to the first
            n = self.pod_gpus.size
            out = alike * np.bincount(here[leaves], minlength=n) / self.pod_gpus
            into = alike * np.bincount(there[leaves], minlength=n) / self.pod_gpus
            share = c.oversubscription * np.maximum(out[here], into[there])
            slow = np.where(leaves, np.maximum(1.0, share), 1.0)
            self._hop = source // c.nvlink_gpus == sink // c.nvlink_gpus, slow
        return self._hop


class _Reach(NamedTuple):
    """How the rings of a kind lie: (NVLink domains, pod factor) of each."""

    pairs: list[tuple[int, float]]
    distinct: frozenset[tuple[int, float]]
    n_ranks: int
