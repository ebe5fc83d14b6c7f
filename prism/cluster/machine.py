"""The machine: link tiers, and how long a message takes in the default order of ranks.

Left out: contention between groups of several kinds, adaptive routing, a topology inside a leaf,
and congestion, which is an effect (see `prism.simulation.variability`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prism.cluster.dispatch import Dispatch, build_dispatch
from prism.cluster.groups import Group, Layout, layout_of
from prism.cluster.linktiers import Hops, Int, Reach, Tier, build_tiers
from prism.cluster.nccl import STEP_OF_HOP, Path, measured_time, smallest_step, sum_per_byte
from prism.cluster.transports import TRANSPORTS
from prism.distributions.kerneltables import KernelTable
from prism.jobs.devices import DEVICES, Device, device_key, find_device
from prism.jobs.jobspec.machines import Link as LinkBlock
from prism.jobs.jobspec.machines import NetworkLink
from prism.jobs.scheduleorders import steady_share

if TYPE_CHECKING:
    from prism.distributions.library import Library
    from prism.jobs.job import Job


OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MEASURED_HOP = "nominal/network_hop_s"
"""Entry of a library whose network was measured."""


@dataclass(frozen=True)
class Link:
    """One tier of links: achievable rate [byte/s], one direction per GPU, and hop latency [s]."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Cluster:
    """Links between GPUs and the job's layout on them; times of messages follow."""

    device: Device
    nvlink: Link
    network: Link
    nvlink_gpus: int  # of one NVLink domain
    layout: Layout
    loops: bool = False  # whether the last stage sends to the first
    token_copies: int = 1  # experts of a token
    most_domains: int = 0  # NVLink domains of a token's experts; 0: each copy travels alone
    tiers: tuple[Tier, ...] = ()  # of the network, the innermost first: racks, pods, sites
    # rates inside an NVLink domain by collective, over ranks and bytes; none: the formula
    measured: Mapping[str, KernelTable] = field(default_factory=dict, compare=False)
    nvlink_factor: float = 1.0  # times on a hardware variant over those measured
    network_factor: float = 1.0
    steady: float = 0.0  # share of a stage's forwards that alternate with backwards, in the mean
    dispatch: Dispatch | None = None  # sends experts their tokens in place of NCCL's all-to-all
    _sums: dict[float, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def group(self, name: str) -> Group:
        """Return a kind of group, see `prism.cluster.groups`."""
        return Group(self.layout, name)

    def tier(self, group: Group) -> str:
        """Slowest links a group uses: ``nvlink`` or ``network``."""
        return "nvlink" if group.domains(self.nvlink_gpus) == 1 else "network"

    def spread(self, group: Group) -> float | None:
        """Spread of a group's messages that its slowest tier states, None where none does [1]."""
        used = (tier.cv for tier in self.tiers[::-1] if group.domains(tier.gpus) > 1)
        return next((cv for cv in used if cv is not None), None)

    def collective_time(self, op_kind: str, n_bytes: float, group: Group) -> float:
        """Duration of a collective [s], from the last arrival of its members.

        That is an ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all`` of this many
        bytes: the whole (gathered, unreduced) buffer on one rank; of an all-to-all what a rank
        sends, the part that it keeps included.

        Where members are spread unevenly, those of a domain are their mean and may be a fraction,
        and domains the most that a group of the kind touches.
        """
        if group.n_ranks <= 1 or n_bytes <= 0:
            return 0.0
        return self.message_time(op_kind, n_bytes, group.n_ranks, self.reach(group, op_kind))

    def message_time(self, op_kind: str, n_bytes: float, n_ranks: int, reach: Reach) -> float:
        """Duration of a collective of a group that lies so [s].

        Inside a domain it takes what was measured, see `prism.cluster.nccl.measured_time`, and
        beyond it what `prism.cluster.nccl.Path` says. Rings: Thakur et al., 2005,
        doi:10.1177/1094342005051521. Two trees: Sanders et al., 2009,
        doi:10.1016/j.parco.2009.09.001.

        Messages of an all-to-all are in flight at once, those to other domains over the rank's own
        network card: with g = n_ranks, k domains and m = g / k members in each, ``max(S (m-1)/g /
        b_nvl, S (g-m)/g / b_net)``. Where a token's copies lie in few domains, it crosses the
        network once for each of them, to the rank of its own place there, which passes it on over
        NVLink: ``max(S (m-1)/m / b_nvl, c S (k-1)/k / b_net)``, c being its domains over its
        copies. Messages in flight together: NCCL's documentation, "Point-to-point communication",
        all-to-all. Forwarding: DeepSeek-V3, arXiv:2412.19437, section 3.2.2.
        """
        exchange, domains = op_kind == "all_to_all", reach.domains
        link = self.network if domains > 1 else self.nvlink
        if exchange and self.dispatch is not None:
            latency = reach.latency_s + (link.latency_s if domains > 1 else 0.0)
            return latency + self.dispatch.seconds(n_bytes, n_ranks, domains, reach.factor)
        if n_ranks == 1:
            return 0.0
        if domains == 1 and op_kind in self.measured:
            table = self.measured[op_kind]
            return self.nvlink_factor * measured_time(table, op_kind, n_bytes, n_ranks)
        inside = n_ranks / domains
        path = Path(
            n_ranks, domains, link.latency_s, self._step_s, self.nvlink.bytes_per_s,
            self.network.bytes_per_s * n_ranks / domains / reach.factor, 1.0 / self.network_factor,
            self._sum_s(inside) if op_kind == "all_reduce" else 0.0, *reach[2:],
        )  # fmt: skip
        if not exchange:
            return path.fastest(op_kind, n_bytes)
        limit = self.most_domains
        copies = min(limit, domains, self.token_copies) if limit else self.token_copies
        return path.exchange(
            n_bytes, n_bytes * (inside - 1.0) / (inside if limit else n_ranks),
            n_bytes * copies / self.token_copies * (domains - 1.0) / domains,
        )  # fmt: skip

    @cached_property
    def _step_s(self) -> float:
        """Latency of a collective's step inside a domain, at its shortest [s]."""
        table = self.measured.get("all_gather")
        if table is None:
            return self.nvlink.latency_s * STEP_OF_HOP
        return self.nvlink_factor * smallest_step(table)

    def _sum_s(self, inside: float) -> float:
        """Time of a byte that a domain adds up for `inside` members; 0 where none is measured."""
        if inside <= 1.0 or "all_reduce" not in self.measured:
            return 0.0
        if inside not in self._sums:
            self._sums[inside] = sum_per_byte(self.measured["all_reduce"], inside)
        return self.nvlink_factor * self._sums[inside]

    def reach(self, group: Group, op_kind: str = "all_gather") -> Reach:
        """How the groups of a kind lie in the default order.

        They share a unit's uplink, so what counts is a group's mean number of members in a unit: a
        ring leaves it once for all of them, so that oversubscription o with q members per unit, g
        of them in each domain, divides the network rate by max(1, o g / q).
        """
        domains, factor = group.domains(self.nvlink_gpus), 1.0
        units = [group.domains(tier.gpus) for tier in self.tiers]
        if op_kind == "all_to_all":
            return self.exits(domains, units)
        inside = group.n_ranks / domains
        for tier, n in zip(self.tiers, units, strict=True):
            if n > 1:
                slow = tier.oversubscription / max(1.0, group.members(tier.gpus) / inside)
                factor = max(factor, float(slow * tier.sent(n, domains)))
        return self.ring_reach(domains, units, factor)

    def ring_reach(self, domains: int, units: Sequence[int], factor: float) -> Reach:
        """How a ring, or a tree, lies that touches this many domains, and units of every tier.

        Of a ring's steps u - 1 leave one of u units before a message has been everywhere, of a
        tree's log2(u); they take the tier's latency.
        """
        ring_s, tree_s, inner = 0.0, 0.0, self.network.latency_s
        for tier, n in zip(self.tiers, units, strict=True):
            ring_s += (tier.latency_s - inner) * (n - 1)
            tree_s += (tier.latency_s - inner) * math.log2(n)
            inner = tier.latency_s
        return Reach(domains, factor, ring_s, tree_s)

    def exits(self, domains: int, units: Sequence[int], factor: float = 1.0) -> Reach:
        """How an all-to-all lies that touches this many domains, and units of every tier.

        The part for other units has 1 / oversubscription of the rate; all messages are in flight at
        once, so that the outermost tier's latency counts, once.
        """
        latency_s = 0.0
        for tier, n in zip(self.tiers, units, strict=True):
            if n > 1:
                leaving = (1.0 - 1.0 / n) / (1.0 - 1.0 / domains)
                factor = max(factor, tier.oversubscription * leaving)
                latency_s = tier.latency_s - self.network.latency_s
        return Reach(domains, factor, latency_s)

    def transfer_time(self, n_bytes: float, link: int | None = None) -> float:
        """Mean duration [s] of an activation's transfer to the next stage.

        `link` is of the stage that sends; one that leaves a site is distinguished from the others.
        Without it, the links that leave none count, or all links if there are no others.

        The mean over stages, replicas and (with several chunks, unless in a V) the way back from
        the last stage to the first: the pipeline's critical path passes all of them. Where
        neighbouring stages lie in different units of a tier, the network is slower by max(1,
        oversubscription x share), share being the part of a unit's GPUs that send out of it.
        """
        if self.layout.pp == 1:
            return 0.0
        tier = None if link is None else self.far_links.get(link)
        times = self.hop_time(n_bytes, self._default_hops)
        alike = [i for i in range(len(times)) if self.far_links.get(i) == tier]
        return float(times[alike or slice(None)].mean())

    @cached_property
    def far_links(self) -> dict[int, Tier]:
        """Links of the pipeline that leave a site, by the stage that sends: the tier they leave."""
        far = self._default_hops.far.max(axis=1)
        return {link: self.tiers[i] for link, i in enumerate(far.tolist()) if i >= 0}

    @cached_property
    def _default_hops(self) -> Hops:
        """Return what transfers meet in the default order of ranks [link, replica]."""
        stages = np.arange(self.layout.pp)
        target = np.roll(stages, -1) if self.loops else stages[1:]
        replicas = np.arange(self.layout.dp) * self.layout.replica_stride
        source = stages[: len(target), None] * self.layout.stage_stride + replicas
        sink = target[:, None] * self.layout.stage_stride + replicas
        each = math.prod(self.layout.sizes)
        return self.hops(each * self.layout.dp * self.layout.pp, source, sink, each)

    def hops(self, n_gpus: int, source: Int, sink: Int, weight: int) -> Hops:
        """Follow transfers that are in flight at a time through the tiers.

        Each from `source` to `sink` stands for `weight` of them; where both are the same nothing is
        sent. A unit's uplink is full duplex, and gradients go the opposite way of activations. So
        where some stages send activations out of a site and others into it, gradients of the
        latter go out too, and both share it as long as forwards and backwards alternate.
        """
        near = source // self.nvlink_gpus == sink // self.nvlink_gpus
        slow, latency_s = np.ones(source.shape), np.full(source.shape, self.network.latency_s)
        far = np.full(source.shape, -1, np.int64)
        for i, tier in enumerate(self.tiers):
            here, there = source // tier.gpus, sink // tier.gpus
            leaves = here != there
            if not leaves.any():
                continue
            sizes = tier.unit_sizes(n_gpus)
            out = weight * np.bincount(here[leaves], minlength=sizes.size) / sizes
            into = weight * np.bincount(there[leaves], minlength=sizes.size) / sizes
            if tier.far:
                out, into = out + self.steady * into, into + self.steady * out
                far[leaves] = i
            share = tier.oversubscription * np.maximum(out[here], into[there])
            slow = np.where(leaves, np.maximum(slow, share), slow)
            latency_s[leaves] = tier.latency_s
        return Hops(near, slow, latency_s, far)

    def hop_time(self, n_bytes: float, hops: Hops) -> NDArray[np.float64]:
        """Duration of transfers [s]."""
        network_s = hops.latency_s + n_bytes / self.network.bytes_per_s * hops.slow
        nvlink_s = self.nvlink.latency_s + n_bytes / self.nvlink.bytes_per_s
        return np.where(hops.near, nvlink_s, network_s)


def network_figures(library: Library, transport: str) -> tuple[float, float]:
    """Latency of a hop [s] and share of the bandwidth [1] that a transport has.

    A library's share is InfiniBand's, and another transport's in proportion; where the library has
    a network of its own measured, both are that network's.
    """
    share, network = library.value("nominal/network_efficiency"), TRANSPORTS[transport]
    if MEASURED_HOP in library.entries:
        return library.value(MEASURED_HOP), share
    return network.hop_s, share * network.efficiency / TRANSPORTS["infiniband"].efficiency


def build_cluster(job: Job, library: Library) -> Cluster:
    """Put a job's layout on its cluster.

    A link's missing figures are the device's, the library's and the transport's. Inside an
    NVLink domain the library's measured tables hold, where they are of a device with as fast an
    NVLink and the job gives no figures of its own.

    Raises
    ------
    PrismError
        If the device is unknown, or a tier is nearer than what is inside it.
    """
    block, layout = job.cluster, job.parallelism
    device = find_device(block.device)

    def link(
        tier: str, bytes_per_s: float, latency_s: float, efficiency: float
    ) -> tuple[Link, float]:
        """One tier's link and its efficiency: the job's figures where it has them."""
        given, time = getattr(block.links, tier) or LinkBlock(), getattr(block.scale, tier).time
        if given.bandwidth_gbytes_per_s is not None:
            bytes_per_s = given.bandwidth_gbytes_per_s * 1e9
        if given.latency_us is not None:
            latency_s = given.latency_us * 1e-6
        if given.efficiency is not None:
            efficiency = given.efficiency
        return Link(bytes_per_s * efficiency / time, latency_s * time), efficiency

    nvlink, share = link(
        "nvlink", device.nvlink_bytes_per_s, device.nvlink_latency_s,
        library.value("nominal/nvlink_efficiency"),
    )  # fmt: skip
    network, efficiency = link(
        "network", device.network_bytes_per_s,
        *network_figures(library, (block.links.network or NetworkLink()).transport),
    )  # fmt: skip
    own = DEVICES.get(device_key(library.device))
    same = own is not None and own.nvlink_bytes_per_s == device.nvlink_bytes_per_s
    measured = library.tables if same and block.links.nvlink is None else {}
    return Cluster(
        device=device,
        nvlink=nvlink,
        network=network,
        nvlink_gpus=block.nvlink_domain_gpus,
        layout=layout_of(job),
        loops=layout.loops,
        token_copies=max(1, job.model.experts_per_token),
        most_domains=layout.expert_node_limit or 0,
        measured={op: measured[f"nvlink/{op}"] for op in OPS if f"nvlink/{op}" in measured},
        nvlink_factor=block.scale.nvlink.time,
        network_factor=block.scale.network.time,
        tiers=tuple(build_tiers(job, network.bytes_per_s, network.latency_s, efficiency)),
        dispatch=build_dispatch(
            job, library, nvlink.bytes_per_s / share, network.bytes_per_s / efficiency
        ),
        steady=steady_share(layout.schedule, layout.pp, layout.microbatches, layout.vpp),
    )
