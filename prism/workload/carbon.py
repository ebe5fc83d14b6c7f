"""Energy and carbon of a run: GPUs, their share of hosts and switches, the facility, the making.

Operational: energy of the machines times PUE times the grid's intensity. A host draws its power as
long as the run lasts, whatever its GPUs do; switches as many as a fat tree of 64 ports has. The
making is shared out over the hours that a machine works.

References
----------
.. [1] Switches: NVIDIA QM9700, 64 ports of 400 Gbit/s, 1,720 W at most with optics; a fat tree of
   two tiers has 3 ports for each of up to 2,048 GPUs, of three tiers 5.
.. [2] Hosts' making and use: 2,500 kg for a server of 8 GPUs, six years at 85 % (BLOOM,
   arXiv:2211.02001).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prism.jobs.devices import find_device
from prism.jobs.regions import REGIONS

if TYPE_CHECKING:
    from prism.jobs.job import Job

SWITCH_W, SWITCH_PORTS = 1720.0, 64
TWO_TIERS, PORTS_OF_TWO, PORTS_OF_THREE = 2048, 3, 5
HOST_KG, HOST_GPUS = 2500.0, 8
WORKED_S = 6 * 365.25 * 86_400.0 * 0.85  # of a machine's life
JOULES_PER_KWH = 3.6e6


class Footprint(NamedTuple):
    """What a second of a job takes beside its GPUs' energy, and what energy emits."""

    beside_w: float  # hosts and switches of all GPUs
    embodied_kg_per_s: float  # of all GPUs and their hosts
    pue: float
    g_per_kwh: float | None  # None: not stated

    def operational_kg(self, joules: float) -> float:
        """CO2e of what the machines drew [kg]."""
        assert self.g_per_kwh is not None
        return joules * self.pue / JOULES_PER_KWH * self.g_per_kwh / 1000.0

    def kg_per_s(self, gpu_w: float) -> float:
        """CO2e of a second in which all GPUs draw a power [W], the making included; 0: unknown."""
        if self.g_per_kwh is None:
            return 0.0
        return self.operational_kg(gpu_w + self.beside_w) + self.embodied_kg_per_s


def footprint(job: Job) -> Footprint:
    """Return what a job's machines take beside its GPUs, and what a joule emits."""
    device, n = find_device(job.cluster.device), job.world_size
    ports = 0
    if n > job.cluster.nvlink_domain_gpus:
        ports = PORTS_OF_TWO if n <= TWO_TIERS else PORTS_OF_THREE
    intensity = job.run.grid_intensity
    if intensity is None and job.run.region is not None:
        intensity = REGIONS[job.run.region][0]
    each_kg = device.embodied_kg + HOST_KG / HOST_GPUS
    return Footprint(
        n * (device.host_w + ports * SWITCH_W / SWITCH_PORTS), n * each_kg / WORKED_S,
        job.run.pue, intensity,
    )  # fmt: skip
