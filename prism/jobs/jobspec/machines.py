"""The block `cluster` of a job file: machines, the links between them, which are slow."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from prism.jobs.devices import DEVICES
from prism.jobs.jobspec.hardware import HardwareScale
from prism.jobs.jobspec.tiers import TierBlock, TierName
from prism.jobs.jobspec.values import (
    AboveOne,
    AtLeastOne,
    Block,
    Count,
    Efficiency,
    GpuFactors,
    GpuTemperatures,
    Hosts,
    NonNegative,
    Positive,
    Share,
    Slowdown,
    integral,
    key,
)

if TYPE_CHECKING:
    DeviceName = str
else:
    DeviceName = Literal[tuple(DEVICES)]
SEGMENT_GPUS = 64  # of a rack, 16 nodes of 4 GPUs: segments of Slurm's block topology


class Link(Block):
    """One tier of links; a figure left out is the device's."""

    bandwidth_gbytes_per_s: Positive | None = key(
        "Bandwidth per GPU, one direction [the device's; GB/s]."
    )
    latency_us: NonNegative | None = key("Latency of one hop [the device's; us].")
    efficiency: Efficiency | None = key(
        "Share of the bandwidth a large message reaches [the device's]."
    )


class NetworkLink(Link):
    """The links between NVLink domains."""

    transport: Literal["infiniband", "roce", "efa", "tcpx", "slingshot"] = key(
        "Kind of network: sets the latency of a hop and the share of the bandwidth.", "infiniband"
    )
    latency_us: NonNegative | None = key("Latency of one hop [the transport's; us].")
    efficiency: Efficiency | None = key(
        "Share of the bandwidth a large message reaches [the transport's]."
    )


class Links(Block):
    """The tiers of links."""

    nvlink: Link | None = key("Inside an NVLink domain.")
    network: NetworkLink | None = key("Between NVLink domains.")


class ClusterBlock(Block):
    """The machines: how many, of what kind, how joined, and which are slow."""

    nodes: Count | None = key("Nodes; may be left out only where model.durations are given.")
    gpus_per_node: Count = key("GPUs in a node.", 8)
    device: DeviceName = key("The GPU.", "h100")
    memory_gib: Positive | None = key(
        "Memory of a card, as its driver shows it [79.1 of 80 GB, and so for the device's; GiB]."
    )
    nvlink_domain_gpus: Count = key(
        "GPUs joined by NVLink [gpus_per_node; on gb200 and gb300 72 where that divides the job's "
        "GPUs, else 64: 16 nodes of each rack].",
        8,
    )
    pod_gpus: Count | None = key("GPUs under full bisection bandwidth [all of them].")
    oversubscription: AtLeastOne = key(
        "Network bandwidth inside a pod over that between pods.", 1.0
    )
    tiers: dict[TierName, TierBlock] = key(
        "Racks, pods, zones, sites: {name: tier}, each of whole units of the next inner one; pods "
        "by pod_gpus and oversubscription are one of them.",
        {},
    )
    leaf_nodes: Count = key("Nodes under one leaf switch.", 16)
    links: Links = key("Links by tier, where they differ from the device's.", Links())
    scale: HardwareScale = key(
        "Hardware variants: factors on the nominal durations (time) and on the spread (cv) of "
        "compute, memory, nvlink and network. What no part owns alone (step, microbatch, call, "
        "stalls, known slow nodes) stays; so do memory sizes, and the peak that mfu takes.",
        HardwareScale(),
    )
    power_limit_w: Positive | None = key(
        "Power limit of each GPU, up to its thermal design power: a step's compute is as fast as "
        "its mix of kernels leaves room for; below that power GPUs are less alike [the thermal "
        "design power; W]."
    )
    clock_mhz: Positive | None = key(
        "Clock to which each GPU is locked; where its power limit leaves less, that decides [not "
        "locked: as fast as the limit leaves; MHz]."
    )
    throttled_share: Share = key(
        "Share of nodes that throttle for heat, evenly spread; needs throttled_power_w.", 0.0
    )
    throttled_power_w: Positive | None = key("Power that heat leaves each of their GPUs [W].")
    node_slowdowns: dict[Annotated[int, Field(ge=0)], Slowdown] = key(
        "Known slow nodes: {node index: factor on compute durations}, or factors by kind: {node "
        "index: {network: 1.5}}.",
        {},
    )
    gpu_slowdowns: GpuFactors = key(
        "How slow the GPUs of every node are by their position, as heat makes those in the "
        "exhaust of others: factors on compute durations, one for each GPU in order of local "
        "rank [all 1]."
    )
    gpu_temperatures: GpuTemperatures = key(
        "Temperatures of the GPUs of every node under load, in order of local rank: at the power "
        "limit each kelvin slows compute by 0.1 %, memory-bound kernels not; beside gpu_slowdowns "
        "both count [all 55; C]."
    )
    hosts: Hosts = key(
        "The node that takes each slot of gpus_per_node ranks, in rank order: a list of node "
        "indices, or a placement file of `prism place`; nodes without a slot are spares [the rank "
        "order itself]."
    )
    placement: Literal["megatron", "tp-cp-pp-dp"] = key(
        "Rank order: Megatron's tp-cp-ep-dp-pp (the replicas of a stage together), or tp-cp-pp-dp "
        "(the stages of a replica together).",
        "megatron",
    )
    max_slowdown: AboveOne | None = key(
        "A lemon slower than this is taken out of the cluster [the library's; 1.25 without one]."
    )

    @classmethod
    def _fill(cls, given: dict[str, Any]) -> dict[str, Any]:
        device, gpus = given.get("device"), given.get("gpus_per_node", 8)
        domain = gpus
        if isinstance(device, str) and device in DEVICES:
            domain = DEVICES[device].rack_gpus or gpus
        nodes, each = integral(given.get("nodes")), integral(gpus)
        if type(nodes) is type(each) is int and each > 0 and domain != gpus:
            # as schedulers place jobs of powers of two, so that no group lies across two racks
            whole = nodes * each < domain or nodes * each % domain == 0 or SEGMENT_GPUS % each
            domain = domain if whole else SEGMENT_GPUS
        # A bad gpus_per_node is reported under its own name, not here once more.
        valid = type(integral(domain)) is int and domain >= 1
        given.setdefault("nvlink_domain_gpus", domain if valid else 8)
        return given

    def link_tiers(self) -> list[tuple[str, TierBlock]]:
        """Return the tiers of the network by name, the innermost first."""
        tiers = dict(self.tiers)
        if self.pod_gpus is not None:
            tiers["pod"] = TierBlock(gpus=self.pod_gpus, oversubscription=self.oversubscription)
        return sorted(tiers.items(), key=lambda item: item[1].gpus)

    @property
    def sync_tier(self) -> TierBlock | None:
        """The tier whose units do not share gradients in every step."""
        return next((tier for tier in self.tiers.values() if tier.syncs_apart), None)
