"""Nominal duration of one collective between the GPUs of some hosts, as a job's would take.

Bytes are those that nccl-tests prints: of an all-gather what a rank receives, of a reduce-scatter
and an all-to-all what it sends, of the others its buffer. That is how `Cluster.collective_time`
counts them too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from prism.cluster.machine import MEASURED_HOP, Cluster, build_cluster, network_figures
from prism.cluster.transports import TRANSPORTS
from prism.common.errors import PrismError
from prism.common.text import format_share
from prism.distributions.library import Library
from prism.jobs.devices import find_device
from prism.jobs.job import job_from_dict
from prism.jobs.jobspec.machines import ClusterBlock
from prism.workload.kernelcost import CARRIED, KernelCost
from prism.workload.kernels import collective_distribution

OPS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "all_to_all": "all_to_all", "sendrecv": "p2p", "p2p": "p2p",
}  # fmt: skip
"""Collectives by their names here and in nccl-tests; p2p is every rank to the next."""

OP_NAMES = {kind: name for name, kind in reversed(OPS.items())}
"""As answers name them, nccl-tests' own."""

GIGABIT = 1e9 / 8.0  # byte


class Hosts(NamedTuple):
    """GPUs that take part, and how they are joined."""

    ranks: int
    nodes: int
    nvlink_domain_gpus: int  # GPUs of an NVLink domain, those included that take no part
    network_gbit: float  # of a GPU, one direction [Gbit/s]


def lay_hosts(
    library: Library, device: str, ranks: int = 0, nodes: int = 0, nvlink_domain_gpus: int = 0,
    network_gbit: float = 0.0, transport: str = "infiniband",
) -> tuple[Hosts, Cluster]:  # fmt: skip
    """Spread ranks evenly over hosts; 0 is a default, as many full hosts as hold the ranks."""
    each = find_device(device).host_gpus
    if not ranks and not nodes:
        raise PrismError("collective: no ranks; expected ranks or nodes")
    ranks = ranks or nodes * each
    least = math.ceil(ranks / each)
    nodes = nodes or least
    if ranks < 2:
        raise PrismError(f"collective: ranks is {ranks}, expected 2 or more")
    if nodes < least:
        raise PrismError(
            f"collective: {ranks} ranks on {nodes} nodes, but a host has {each} {device} GPUs; "
            f"give nodes of {least} or more"
        )
    if ranks % nodes:
        raise PrismError(
            f"collective: {ranks} ranks do not go evenly into {nodes} nodes; give nodes that "
            "divide the ranks"
        )
    own = ranks // nodes  # ranks of a host
    domain = (
        nvlink_domain_gpus
        or ClusterBlock.model_validate(
            {"nodes": nodes, "gpus_per_node": each, "device": device}
        ).nvlink_domain_gpus
    )
    network: dict[str, Any] = {"transport": transport}
    if network_gbit:
        network["bandwidth_gbytes_per_s"] = network_gbit * GIGABIT / 1e9
    block = {
        "nodes": nodes, "gpus_per_node": own, "device": device,
        "nvlink_domain_gpus": max(1, domain * own // each), "links": {"network": network},
    }  # fmt: skip
    job = job_from_dict(
        {
            "model": {"durations": {"forward_s": 1.0, "backward_s": 1.0}},
            "parallelism": {"dp": ranks},
            "cluster": block,
        },
        "collective",
    )
    cluster = build_cluster(job, library)
    gbit = network_gbit or cluster.device.network_bytes_per_s / GIGABIT
    return Hosts(ranks, nodes, domain, gbit), cluster


def collective_cost(
    library: Library, cluster: Cluster, op: str, n_bytes: float, transport: str
) -> KernelCost:
    """Duration of one of `OPS` between all ranks of a cluster."""
    kind, group = OPS[op], cluster.group("world")
    inside, domains = cluster.tier(group) == "nvlink", group.domains(cluster.nvlink_gpus)
    network = TRANSPORTS[transport]
    table = cluster.measured.get(kind) if inside else None
    if kind == "p2p":
        rank = np.arange(group.n_ranks)
        hops = cluster.hops(group.n_ranks, rank, np.roll(rank, -1), 1)
        seconds, residual = float(cluster.hop_time(n_bytes, hops).max()), "residual/p2p"
    else:
        seconds = cluster.collective_time(kind, n_bytes, group)
        residual = collective_distribution(cluster, n_bytes, group)
    if table is not None:
        covered = table.covers(ranks=float(group.n_ranks), bytes=n_bytes)
        covered, source = covered and not table.source.startswith(CARRIED), table.source
    elif inside:
        entry = "nominal/nvlink_efficiency"
        reached = format_share(library.value(entry), 2)
        covered = False
        source = f"rings and trees, {reached} of NVLink's bandwidth ({library.source(entry)})"
    else:
        covered = network.covers(kind, domains, n_bytes)
        hop_s, share = network_figures(library, transport)
        told = (
            f"{network.label}, hop {1e6 * hop_s:.3g} us, {format_share(share, 2)} of the bandwidth"
        )
        source = f"{told}; rings and trees fitted to public nccl-tests results"
        if MEASURED_HOP in library.entries:
            source = f"{told}: {library.source(MEASURED_HOP)}"
    return KernelCost(seconds, 0.0, n_bytes, source, not covered, residual)
