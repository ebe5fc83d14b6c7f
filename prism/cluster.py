"""The machine: devices, link tiers, and how long a message takes in the default order of ranks.

A transfer takes a latency and its bytes over the slowest link of the group. Where ranks sit is
`prism.placement`'s, and what another order costs `prism.wiring`'s. Left out: contention between
groups, adaptive routing, a topology inside a leaf; congestion is an effect (see
`prism.variability`), not a property of the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.placement import Group, rank_strides, shard_size

if TYPE_CHECKING:
    from prism.job import Job
    from prism.library import Library


@dataclass(frozen=True)
class Device:
    """What one GPU can do at most: dense figures of its maker's data sheet.

    Attributes
    ----------
    bf16_flop_per_s : float
        Dense bfloat16 (V100: float16) rate [flop/s].
    memory_bytes_per_s, memory_bytes : float
        Memory bandwidth [byte/s] and capacity [byte].
    nvlink_bytes_per_s, network_bytes_per_s : float
        One direction, per GPU [byte/s]; data sheets give NVLink in both directions.
    nvlink_latency_s, network_latency_s : float
        Time of one hop of a small message [s].
    power_w : float
        Thermal design power [W].
    """

    name: str
    bf16_flop_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    nvlink_latency_s: float
    network_latency_s: float
    power_w: float


# Rates: NVIDIA data sheets of V100, A100, H100, H200; B200 and GB200 as collected by G. Lockwood
# from NVIDIA's Blackwell architecture brief. Networks: 400 Gbit/s per GPU (DGX H100, Llama 3,
# arXiv:2407.21783), 200 Gbit/s with A100, 4 x 100 Gbit/s for 8 GPUs in DGX-1 V100.
# Latencies: NCCL profiles of DGX H100 and DGX A100 in microsoft/vidur: all-reduces of 2, 4, 8
# H100s fit 2 x 7 us x log2(n) + bytes / rate, of A100s 17 us; the smallest send_recv between two
# nodes takes 16 and 27 us. V100 is given A100's, and H200, B200 and GB200 are given H100's.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("v100", 125e12, 0.90e12, 32e9, 150e9, 6.25e9, 17e-6, 27e-6, 300.0),
        Device("a100", 312e12, 2.04e12, 80e9, 300e9, 25e9, 17e-6, 27e-6, 400.0),
        Device("h100", 989e12, 3.35e12, 80e9, 450e9, 50e9, 7e-6, 16e-6, 700.0),
        Device("h200", 989e12, 4.80e12, 141e9, 450e9, 50e9, 7e-6, 16e-6, 700.0),
        Device("b200", 2250e12, 8.0e12, 180e9, 900e9, 50e9, 7e-6, 16e-6, 1000.0),
        Device("gb200", 2500e12, 8.0e12, 186e9, 900e9, 50e9, 7e-6, 16e-6, 1200.0),
    )
}


@dataclass(frozen=True)
class Link:
    """One tier of links: achievable rate [byte/s], one direction per GPU, and hop latency [s]."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Cluster:
    """Links between GPUs and the job's layout on them; times of messages follow.

    Attributes
    ----------
    nvlink_gpus, pod_gpus : int
        GPUs of one NVLink domain and of one pod. Beyond a pod the network is oversubscribed.
    oversubscription : float
        Ratio of the rate into a pod's switches to the rate out of them, >= 1.
    tp_size, cp_size, dp_size, pp_size, vpp_size : int
        The job's layout.
    stage_stride, replica_stride : int
        Ranks from a stage to the next, and from a replica to the next.
    shard_size : int
        Data-parallel ranks of a shard group (hsdp) or an expert group, which are neighbours.
    ep_size : int
        Data-parallel ranks that hold the experts between them.
    token_copies, most_domains : int
        Experts of a token, and the NVLink domains they lie in at most; 0: anywhere, so that every
        copy travels on its own.
    v_shaped : bool
        Whether the chunks of the stages lie in a V, see `prism.pipelineshape`.
    """

    device: Device
    nvlink: Link
    network: Link
    nvlink_gpus: int
    pod_gpus: int
    oversubscription: float
    tp_size: int
    cp_size: int
    dp_size: int
    pp_size: int
    vpp_size: int
    stage_stride: int
    replica_stride: int
    shard_size: int = 1
    ep_size: int = 1
    token_copies: int = 1
    most_domains: int = 0
    v_shaped: bool = False

    @property
    def loops(self) -> bool:
        """Whether the last stage sends to the first."""
        return self.vpp_size > 1 and not self.v_shaped

    def group(self, name: str) -> Group:
        """Return the group called ``tp``, ``cp``, ``dp_cp``, ``embedding``, ``world``...

        ``dp_cp`` shares a stage's parameters: dp_size x cp_size ranks, ep inside dp.
        With hsdp ``shard`` does, and ``replicas`` joins those of all shard groups that hold the
        same part. ``ep`` joins ranks that hold the experts between them, ``expert_dp`` those that
        hold the same ones. ``embedding`` is the first and the last stage of a pipeline.
        """
        tp, cp = (self.tp_size, 1), (self.cp_size, self.tp_size)
        dp, pp = (self.dp_size, self.replica_stride), (self.pp_size, self.stage_stride)
        shard = self.shard_size, self.replica_stride
        shards = self.dp_size // self.shard_size, self.shard_size * self.replica_stride
        ep = self.ep_size, self.replica_stride
        eps = self.dp_size // self.ep_size, self.ep_size * self.replica_stride
        ends = min(2, self.pp_size), self.stage_stride * max(1, self.pp_size - 1)
        groups = {
            "tp": Group(*tp, beside=(cp, dp, pp)),
            "cp": Group(*cp, beside=(tp, dp, pp)),
            "dp_cp": Group(*cp, *dp, beside=(tp, pp)),
            "shard": Group(*cp, *shard, beside=(tp, shards, pp)),
            "replicas": Group(*shards, beside=(tp, cp, shard, pp)),
            "ep": Group(*ep, beside=(tp, cp, eps, pp)),
            "expert_dp": Group(*cp, *eps, beside=(tp, ep, pp)),
            "embedding": Group(*ends, beside=(tp, cp, dp)),
            "world": Group(self.tp_size * self.cp_size * self.dp_size * self.pp_size, 1),
        }
        return groups[name]

    def tier(self, group: Group) -> str:
        """Slowest tier a group uses, ``nvlink`` or ``network``."""
        return "nvlink" if group.domains(self.nvlink_gpus) == 1 else "network"

    def collective_time(self, op_kind: str, n_bytes: float, group: Group) -> float:
        """Duration of a collective, from the last arrival of its members.

        Parameters
        ----------
        op_kind : str
            ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        n_bytes : float
            Size of the whole (gathered, unreduced) buffer on one rank [byte]; of an all-to-all what
            a rank sends, the part that it keeps included.
        group : Group
            Who takes part.

        Returns
        -------
        float
            Duration [s].

        Notes
        -----
        With g members in each of k NVLink domains, all-gather and reduce-scatter take
        ``log2(k) a_net + log2(g) a_nvl + max(S/g (k-1)/k / b_net, S (g-1)/g / b_nvl)``: one ring
        per member across the domains over that member's own network card, a ring inside each
        domain, both pipelined. Where members are spread unevenly, g is their mean over the domains
        and may be a fraction, and k the most domains that a group of the kind touches. An
        all-reduce is both in turn. A ring leaves a pod once for all of its members there, so
        oversubscription o with q members per pod divides the network rate by max(1, o / q).

        References
        ----------
        Thakur et al., 2005, doi:10.1177/1094342005051521 (ring and logarithmic latency).
        """
        if group.n_ranks <= 1 or n_bytes <= 0:
            return 0.0
        domains = group.domains(self.nvlink_gpus)
        if op_kind == "all_to_all":
            slow = self.exit_factor(domains, group.domains(self.pod_gpus))
            return self.all_to_all_time(n_bytes, group.n_ranks, domains, slow)
        phases = 2.0 if op_kind == "all_reduce" else 1.0
        return phases * self.ring_time(n_bytes, group.n_ranks, domains, self._pod_factor(group))

    def ring_time(self, n_bytes: float, n_ranks: int, domains: int, pod_factor: float) -> float:
        """Duration of an all-gather or a reduce-scatter [s], see `collective_time`.

        Parameters
        ----------
        n_bytes : float
            Size of the whole buffer on one rank [byte].
        n_ranks, domains : int
            Members of the group, and the NVLink domains they lie in.
        pod_factor : float
            How many times slower the network is for leaving a pod [1].
        """
        inside = n_ranks / domains  # in the mean
        latency = self.nvlink.latency_s * math.ceil(math.log2(inside))
        nvlink_s = n_bytes * (inside - 1) / inside / self.nvlink.bytes_per_s
        network_s = 0.0
        if domains > 1:
            latency += self.network.latency_s * math.ceil(math.log2(domains))
            rate = self.network.bytes_per_s / pod_factor
            network_s = n_bytes / inside * (domains - 1) / domains / rate
        return latency + max(nvlink_s, network_s)

    def all_to_all_time(
        self, n_bytes: float, n_ranks: int, domains: int, pod_factor: float
    ) -> float:
        """Duration of an all-to-all [s], from the last arrival of its members.

        Parameters
        ----------
        n_bytes : float
            What a rank sends to all, itself included, in equal parts [byte].
        n_ranks, domains : int
            Members of the group, and the NVLink domains they lie in.
        pod_factor : float
            How many times slower the network is for leaving a pod [1].

        Notes
        -----
        All messages are under way at once, those to other domains over the rank's own network card:
        with g = n_ranks, k domains and m = g / k members in each, ``a_nvl + a_net + max(S (m-1)/g /
        b_nvl, S (g-m)/g / b_net)``. Where a token's copies lie in few domains, it crosses the
        network once for each of them, to the rank of its own place there, which passes it on over
        NVLink: ``max(S (m-1)/m / b_nvl, c S (k-1)/k / b_net)``, c being its domains over its
        copies. Latencies count once where their tier is used.

        References
        ----------
        Messages in flight together: NCCL's documentation, "Point-to-point communication",
        all-to-all. Forwarding: DeepSeek-V3, arXiv:2412.19437, section 3.2.2.
        """
        inside, latency, limit = n_ranks / domains, 0.0, self.most_domains
        nvlink_s = n_bytes * (inside - 1.0) / (inside if limit else n_ranks)
        nvlink_s /= self.nvlink.bytes_per_s
        network_s = 0.0
        if inside > 1.0:
            latency += self.nvlink.latency_s
        if domains > 1:
            latency += self.network.latency_s
            copies = min(limit, domains, self.token_copies) if limit else self.token_copies
            crossing = copies / self.token_copies * (domains - 1.0) / domains
            network_s = n_bytes * crossing / self.network.bytes_per_s * pod_factor
        return latency + max(nvlink_s, network_s)

    def exit_factor(self, domains: int, pods: int) -> float:
        """How many times slower an all-to-all's network part is for leaving pods.

        Of what crosses the network, the part for other pods has 1 / oversubscription of the rate.
        """
        if pods <= 1:
            return 1.0
        leaving = (1.0 - 1.0 / pods) / (1.0 - 1.0 / domains)
        return max(1.0, self.oversubscription * leaving)

    def transfer_time(self, n_bytes: float) -> float:
        """Mean duration [s] of an activation's transfer to the next stage.

        Parameters
        ----------
        n_bytes : float
            Bytes one GPU sends [byte].

        Notes
        -----
        The mean over stages, replicas and (with several chunks, unless in a V) the way back from
        the last stage to the first: the pipeline's critical path passes all of them. Where
        neighbouring stages lie in different pods, the network is slower by max(1, oversubscription
        x share), share being the part of a pod's GPUs that send out of it.
        """
        if self.pp_size == 1:
            return 0.0
        stages = np.arange(self.pp_size)
        target = np.roll(stages, -1) if self.loops else stages[1:]
        replicas = np.arange(self.dp_size) * self.replica_stride
        source = stages[: len(target), None] * self.stage_stride + replicas
        sink = target[:, None] * self.stage_stride + replicas
        near = source // self.nvlink_gpus == sink // self.nvlink_gpus
        out = source // self.pod_gpus != sink // self.pod_gpus
        share = min(1.0, self.stage_stride / self.pod_gpus)
        slow = max(1.0, self.oversubscription * share)
        return float(self.hop_time(n_bytes, near, np.where(out, slow, 1.0)).mean())

    def hop_time(
        self, n_bytes: float, near: NDArray[np.bool_], slow: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Duration of transfers [s]: over NVLink where near, else over the network, slow times."""
        network_s = self.network.latency_s + n_bytes / self.network.bytes_per_s * slow
        nvlink_s = self.nvlink.latency_s + n_bytes / self.nvlink.bytes_per_s
        return np.where(near, nvlink_s, network_s)

    def _pod_factor(self, group: Group) -> float:
        """How many times slower a group's network is for leaving its pod.

        Groups of a kind lie side by side and share a pod's way out, so what counts is how many
        members a group has in a pod in the mean, also where that is no whole number.
        """
        if group.domains(self.pod_gpus) == 1:
            return 1.0
        apart = group.stride if group.outer == 1 else group.outer_stride / group.inner
        return max(1.0, self.oversubscription / max(1.0, self.pod_gpus / apart))


def build_cluster(job: Job, library: Library) -> Cluster:
    """Put a job's layout on its cluster.

    Parameters
    ----------
    job : Job
        Gives sizes, device and links. A link's missing figures are the device's, and its missing
        efficiency the library's.
    library : Library
        Gives ``nominal/nvlink_efficiency`` and ``nominal/network_efficiency``.

    Returns
    -------
    Cluster

    Raises
    ------
    PrismError
        If the device is not in `DEVICES`.
    """
    block, layout = job.cluster, job.parallelism
    device = find_device(block.device)
    world = layout.tp * layout.cp * layout.dp * layout.pp
    stage_stride, replica_stride = rank_strides(job)
    return Cluster(
        device=device,
        nvlink=_link(job, library, "nvlink", device.nvlink_bytes_per_s, device.nvlink_latency_s),
        network=_link(
            job, library, "network", device.network_bytes_per_s, device.network_latency_s
        ),
        nvlink_gpus=block.nvlink_domain_gpus,
        pod_gpus=block.pod_gpus or world,
        oversubscription=block.oversubscription,
        tp_size=layout.tp,
        cp_size=layout.cp,
        dp_size=layout.dp,
        pp_size=layout.pp,
        vpp_size=layout.vpp,
        stage_stride=stage_stride,
        replica_stride=replica_stride,
        shard_size=shard_size(job),
        v_shaped=layout.virtual_stages().shape == "v",
        ep_size=layout.ep,
        token_copies=max(1, job.model.experts_per_token),
        most_domains=layout.expert_node_limit or 0,
    )


def find_device(name: str) -> Device:
    """Return a device by its name, or raise PrismError with the known ones."""
    device = DEVICES.get(name)
    if device is None:
        raise PrismError(f"cluster: unknown device {name!r}; expected one of {', '.join(DEVICES)}")
    return device


def _link(job: Job, library: Library, tier: str, bytes_per_s: float, latency_s: float) -> Link:
    """One tier's link: the job's figures where it has them."""
    links = job.cluster.links
    given = links.nvlink if tier == "nvlink" else links.network
    if given is not None and given.bandwidth_gbytes_per_s is not None:
        bytes_per_s = given.bandwidth_gbytes_per_s * 1e9
    if given is not None and given.latency_us is not None:
        latency_s = given.latency_us * 1e-6
    efficiency = None if given is None else given.efficiency
    if efficiency is None:
        efficiency = library.value(f"nominal/{tier}_efficiency")
    return Link(bytes_per_s * efficiency, latency_s)
