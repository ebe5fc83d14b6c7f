"""Tiers of the network above the NVLink domain: what a message meets that leaves its unit.

A unit of a tier is n neighbouring GPUs (a rack, a pod, a site); units nest. All that leave
one at a time share its uplink, which is o times narrower than the network cards of its GPUs.
Left out: traffic of other kinds at the same time, routing, more than one way between two units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.jobs.jobspec.tiers import SECONDS_PER_KM

if TYPE_CHECKING:
    from prism.jobs.job import Job
    from prism.jobs.jobspec.tiers import TierBlock

Array = NDArray[np.float64]
Int = NDArray[np.int64]


class Tier(NamedTuple):
    """Units of one size, and the uplink of one."""

    name: str
    gpus: int
    oversubscription: float = 1.0  # achieved rate of the GPUs' network cards over the uplink's [1]
    latency_s: float = 0.0  # of a message that leaves its unit
    hierarchical: bool = False  # collectives send only what other units lack, once, see `sent`
    far: bool = False  # the latency is longer than the network's: hops are distinguished by it
    cv: float | None = None  # spread of what leaves a unit [1]; None is as in the network

    def sent(self, units: Any, domains: Any) -> Any:
        """Return what collectives send out of each unit over what a ring would [1].

        A ring of k NVLink domains brings S (k-1)/k bytes over every edge, so also out of each unit.
        What u units must send at least is S (u-1)/u each: every unit's share goes out once, by all
        members at a time, and is spread inside. In chunks that are pipelined the slower of both
        levels counts, and no tier is ever slower than with the ring.

        Hierarchical all-reduce (reduce-scatter inside, all-reduce of the parts across, all-gather
        inside): Jia et al., arXiv:1807.11205. Between data centres, in chunks: NVIDIA, "Turbocharge
        LLM training across long-haul data center networks with NVIDIA NeMo Framework" (2025).
        """
        if not self.hierarchical:
            return 1.0
        return (units - 1) / units * domains / np.maximum(domains - 1, 1)

    def unit_sizes(self, n_gpus: int) -> Int:
        """GPUs of every unit of a cluster; the last may be smaller [unit]."""
        return np.diff(np.arange(0, n_gpus + self.gpus, self.gpus).clip(max=n_gpus))


class Reach(NamedTuple):
    """How a group lies, as far as it decides what its collectives take."""

    domains: int  # NVLink domains that it touches
    factor: float = 1.0  # how many times slower the network is for leaving units of tiers
    latency_s: float = 0.0  # what a ring through all units takes beyond the network's steps
    tree_latency_s: float = 0.0  # the same of a tree's levels


class Hops(NamedTuple):
    """What transfers from GPU to GPU meet: arrays of the GPUs' shape."""

    near: NDArray[np.bool_]  # whether it stays on NVLink, so that nothing of the rest holds
    slow: Array  # how many times slower than the network
    latency_s: Array  # of the outermost tier that it leaves a unit of, else the network's
    far: Int  # the outermost far tier that it leaves a unit of, -1 for none


def build_tiers(job: Job, bytes_per_s: float, latency_s: float, efficiency: float) -> list[Tier]:
    """Return a job's tiers, the innermost first; the figures are the network's."""
    out: list[Tier] = []
    network_s = latency_s
    for name, block in job.cluster.link_tiers():
        own_s = latency_s + (block.distance_km or 0.0) * SECONDS_PER_KM
        if block.latency_us is not None:
            own_s = block.latency_us * 1e-6
        if own_s < latency_s:
            inner = out[-1].name if out and out[-1].latency_s > network_s else "network"
            raise PrismError(
                f"{job.source or job.name}: cluster.tiers.{name}.latency_us: {own_s * 1e6:g}, but "
                f"a hop of the {inner} inside it takes {latency_s * 1e6:g} us; give at least that"
            )
        latency_s = own_s
        over = _oversubscription(block, bytes_per_s, efficiency)
        hierarchical, far = block.is_hierarchical, block.is_far and own_s > network_s
        out.append(Tier(name, block.gpus, over, own_s, hierarchical, far, block.cv))
    return out


def _oversubscription(block: TierBlock, bytes_per_s: float, efficiency: float) -> float:
    """Rate of the GPUs' network cards over that of their unit's uplink."""
    if block.efficiency is not None:
        efficiency = block.efficiency
    if block.bandwidth_gbytes_per_s is not None:
        return bytes_per_s / (block.bandwidth_gbytes_per_s * 1e9 * efficiency)
    if block.total_gbits_per_s is not None:
        return bytes_per_s * block.gpus / (block.total_gbits_per_s * 0.125e9 * efficiency)
    return block.oversubscription or 1.0
