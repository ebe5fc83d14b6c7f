"""What a limit on a GPU's power costs: speed, the spread between GPUs, and what they draw.

Dynamic power is the clock times the voltage squared. Above the knee the voltage follows the clock,
and power is a power of the speed; below it the voltage is at its least, and power is proportional
to the speed. Only kernels bound by compute follow the clock: memory and links have their own.
Fitted by `experiments/library/power.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.cluster.devices import find_device
from prism.common.errors import PrismError

if TYPE_CHECKING:
    from prism.jobs.job import Job

LEAST_SHARE = 0.25
"""Least limit over the TDP: parts accept no less (A100 100 of 400 W, H100 200 of 700 W)."""

CHIP_SPREAD = 0.05
"""GPUs' dynamic power at one clock, standard deviation of the logarithm: the clocks of 392 V100 at
their limit differ by 1.7 % (arXiv:2208.11035), times the exponent below."""

MEMORY_SHARE = 0.57
"""What a memory-bound kernel draws, over the TDP: BabelStream on A100, 228 W of 400 W."""

WAIT_SHARE = 0.21
"""What a GPU draws that waits or communicates, over the TDP. An assumption: 85 W of 400 W, which
pipelines of A100 under Perseus (arXiv:2312.06902) are given for being blocked on a transfer."""


@dataclass(frozen=True)
class PowerCurve:
    """Speed of compute by power, both over what they are at the TDP."""

    floor: float  # share of the TDP that does not follow the clock
    exponent: float  # of dynamic power in the speed, above the knee
    knee: float  # speed below which the voltage falls no further

    def speed(self, share: float) -> float:
        """Speed under a limit of `share` of the TDP, or with that much dynamic power."""
        return self._speed((share - self.floor) / (1.0 - self.floor))

    def _speed(self, dynamic: float) -> float:
        at_knee = math.pow(self.knee, self.exponent)
        if dynamic >= at_knee:
            return math.pow(dynamic, 1.0 / self.exponent)
        return self.knee * dynamic / at_knee

    def spread(self, share: float) -> float:
        """Spread of GPUs' speeds under a limit, over the spread at the TDP.

        The less a speed changes power, the more it must change where GPUs draw unlike power: below
        the knee by the exponent more.
        """

        def apart(share: float) -> float:
            dynamic = (share - self.floor) / (1.0 - self.floor)
            fast, slow = (self._speed(dynamic * math.exp(d)) for d in (CHIP_SPREAD, -CHIP_SPREAD))
            return math.log(fast / slow)

        return apart(share) / apart(1.0)


AMPERE = PowerCurve(floor=0.092, exponent=2.78, knee=0.879)
HOPPER = PowerCurve(floor=0.092, exponent=2.64, knee=0.673)
"""Its floor is Ampere's; no knee was seen down to 300 of 700 W, where the speed is the knee's."""

CURVES = {"a100": AMPERE, "h100": HOPPER, "h200": HOPPER}
"""Curves by device; others have Ampere's. It holds for V100 within 5 %; GB300 at 36 % of its power
is 12 % slower than it says, A100 for PCIe at 58 % up to 17 %."""


@dataclass(frozen=True)
class GpuPower:
    """What GPUs draw under a limit [W], and how much slower and less alike compute is [1]."""

    compute_w: float
    memory_w: float
    wait_w: float
    slowdown: float = 1.0
    spread: float = 1.0


def gpu_power(job: Job, throttled: bool = False) -> GpuPower:
    """Power of a job's GPUs, or of those on its throttled nodes.

    A kernel bound by compute draws all that the limit allows.

    Raises
    ------
    PrismError
        The limit is above the device's TDP, or below what its parts accept.
    """
    key = "throttled_power_w" if throttled else "power_limit_w"
    device = find_device(job.cluster.device)
    watts = getattr(job.cluster, key) or device.power_w
    share = watts / device.power_w
    if not LEAST_SHARE <= share <= 1.0:
        raise PrismError(
            f"{job.source or job.name}: cluster.{key}: {watts:g}, expected between "
            f"{LEAST_SHARE * device.power_w:g} and the {device.power_w:g} W that one "
            f"{device.name} may draw"
        )
    memory_w = min(watts, MEMORY_SHARE * device.power_w)
    wait_w = min(watts, WAIT_SHARE * device.power_w)
    curve = CURVES.get(device.name, AMPERE)
    return GpuPower(watts, memory_w, wait_w, 1.0 / curve.speed(share), curve.spread(share))


def throttled_nodes(job: Job) -> list[int]:
    """Nodes that throttle for heat, evenly spread."""
    count, n = round(job.cluster.throttled_share * job.n_nodes), job.n_nodes
    return [(2 * i + 1) * n // (2 * count) for i in range(count)]
