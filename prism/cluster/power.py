"""What a GPU's power and clock make of a step: speed, the spread between GPUs, what they draw.

Always part of a step: without `cluster.power_limit_w` the limit is the device's TDP, without
`cluster.clock_mhz` the clock is free. One unknown, phi: how fast compute is over its speed in
matrix products back to back at the TDP. Tables of products are short runs, of phi 1 or more, and so
are attention's (`Silicon.table_phi`, `attention_phi`); a step of the same kernels, one after the
other, runs at the phi that its mix leaves, and its nominal durations are stretched by the ratio.
Products draw what `PowerCurve` says at a phi: above the knee the voltage follows the clock, and
dynamic power is a power of the speed; below it the voltage is at its least, and power is
proportional to the speed. Kernels bound by memory and links neither slow down nor draw less, and
the mean of a step's mix is held to the limit: a step that moves bytes or waits computes faster.
Fitted by `experiments/library/power.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from prism.common.errors import PrismError
from prism.jobs.devices import Device, find_device

if TYPE_CHECKING:
    from prism.jobs.job import Job

LEAST_SHARE = 0.25
"""Least limit over the TDP: parts accept no less (A100 100 of 400 W, H100 200 of 700 W)."""

GEMM_EXPONENT = 0.95
"""Of the clock in the speed of matrix products; attention follows it exactly (H100)."""

LEAST_CLOCK, MOST_CLOCK = 0.1, 1.1
"""Clocks to which a GPU may be locked, over its boost clock: H100 takes 210 to 1,980 MHz; boards of
one chip differ by some percent at the top."""

CHIP_SPREAD = 0.05
"""GPUs' dynamic power at one clock, standard deviation of the logarithm: the clocks of 392 V100 at
their limit differ by 1.7 % (arXiv:2208.11035), times the exponent below."""

REFERENCE_C = 55.0
"""Temperature at which GPUs are as fast as their tables: H100's were measured at 49 to 60 C."""

LEAKAGE = 0.0027
"""Share of the TDP that a kelvin costs by leakage: within 360 V100 at their limit products take
0.105 % longer for each (0.097 to 0.113, 8,712 runs of gpu_variability, 1.2 K apart in a
GPU), times the exponent and the part above the floor of `AMPERE`. Between
those GPUs it is 0.16 %, and 0.04 to 0.06 % in one H100 that warmed by 10 K."""


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

    def draw(self, speed: float) -> float:
        """Dynamic power at a speed, over that at 1: the inverse of `speed` without the floor."""
        if speed >= self.knee:
            return math.pow(speed, self.exponent)
        return speed * math.pow(self.knee, self.exponent - 1.0)

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
class Silicon:
    """What work costs above the idle draw at phi = 1, and the clocks that tables belong to.

    Figures per flop leave the bytes out that a product has to move; those have their own.
    """

    idle_w: float  # also of a GPU that waits or communicates
    bf16_pj: float  # per flop of matrix products
    fp8_pj: float
    fp8_block_pj: float
    fp4_pj: float
    attention_pj: float  # per flop, forward; taken for backward too
    byte_pj: float
    gemm_mhz: float  # products back to back at the TDP: phi = 1
    table_phi: float  # of products' tables, which are short runs; no step is faster
    attention_phi: float  # of attention's tables
    attention_mhz: float  # and their clock
    boost_mhz: float

    def flop_pj(self, precision: str) -> float:
        """Picojoules per flop of products in a precision of `parallelism.precision`."""
        block = dict.fromkeys(("fp8_block", "mxfp8"), self.fp8_block_pj)
        return {"bf16": self.bf16_pj, "nvfp4": self.fp4_pj, **block}.get(precision, self.fp8_pj)


SILICON = {
    "a100": Silicon(85.0, 1.20, 0.60, 0.75, 0.48, 1.57, 94.0, 1351.0, 1.0, 1.0, 1410.0, 1410.0),
    "h100": Silicon(126.0, 0.79, 0.39, 0.49, 0.39, 1.03, 117.0, 1365.0, 1.14, 1.10, 1770.0, 1980.0),
    "h200": Silicon(126.0, 0.75, 0.39, 0.49, 0.39, 0.98, 117.0, 1365.0, 1.11, 1.15, 1850.0, 1980.0),
    "b200": Silicon(
        206.0, 0.50, 0.25, 0.31, 0.20, 0.77, 117.0, 1355.0, 1.125, 1.15, 1836.0, 1965.0
    ),
}
"""Measured: card A of h100_device, and kernel_power; H100's idle draw is H200's (cold it is 76 W),
its fp8 by block and H200's fp8 are the other's. B200's bytes are H100's and its clock at the cap
H100's share of the boost clock; its fp8 is H100's share of bf16, since the products measured
have at most 2,560 columns, and fp4 lies between half of that and the 0.25 of those. A100:
products at 262 TFLOP/s draw 400 W, attention costs H100's ratio; bytes by BabelStream on A100
for PCIe (228 W at 1.75 TB/s); idle and clock at the cap from stages under Perseus
(arXiv:2312.06902). Tables of products over the same back to back: H100 1.14 (8 shapes), H200
1.11 and B200 1.125 (400 and 332 shapes within 5 % of the limit, sd .07 and .08). H100's
attention is stated at the clock of its own steps."""


def silicon(device: Device) -> Silicon:
    """Energy and clocks of a device.

    Where nothing is measured: products at 70 % of the peak draw the TDP and idle GPUs 20 % of it
    (A100 85 of 400 W, H200 126 of 700, B200 206 of 1,000); attention and fp8 cost H100's ratios to
    bf16, fp4 B200's, bytes as many joules as on H100.
    """
    found = SILICON.get(device.name)
    if found is not None:
        return found
    if device.like:
        return _blackwell(device)
    like, idle = SILICON["h100"], 0.2 * device.power_w
    flop = 1e12 * (device.power_w - idle) / (0.7 * device.bf16_flop_per_s)
    boost = device.boost_mhz
    cap = device.cap_mhz or like.gemm_mhz / like.boost_mhz * boost
    over = flop / like.bf16_pj
    return Silicon(
        idle, flop, over * like.fp8_pj, over * like.fp8_block_pj, 0.4 * flop,
        over * like.attention_pj, like.byte_pj, cap, like.table_phi, like.attention_phi,
        like.attention_mhz / like.boost_mhz * boost, boost,
    )  # fmt: skip


def _blackwell(device: Device) -> Silicon:
    """Energy and clocks of a chip under another limit, which products back to back draw."""
    like, share = SILICON[device.like], device.power_w / find_device(device.like).power_w
    faster = math.pow(share, 1.0 / _curve(device).exponent)
    over = share / faster
    return replace(
        like, idle_w=share * like.idle_w, bf16_pj=over * like.bf16_pj, fp8_pj=over * like.fp8_pj,
        fp8_block_pj=over * like.fp8_block_pj, fp4_pj=over * like.fp4_pj,
        attention_pj=over * like.attention_pj,
        gemm_mhz=min(faster * like.gemm_mhz, like.boost_mhz),
        table_phi=device.table_speed * like.table_phi / faster,
        attention_phi=like.attention_phi / faster,
    )  # fmt: skip


class Work(Protocol):
    """A kernel: what is needed of one here."""

    @property
    def kernel_class(self) -> str: ...  # noqa: D102
    @property
    def flop(self) -> float: ...  # noqa: D102
    @property
    def bytes(self) -> float: ...  # noqa: D102
    @property
    def duration(self) -> float: ...  # noqa: D102


@dataclass(frozen=True)
class Mix:
    """What a GPU does in a step at phi = 1: seconds, and joules above the idle draw."""

    gemm_s: float = 0.0
    gemm_j: float = 0.0
    attention_s: float = 0.0
    attention_j: float = 0.0
    memory_s: float = 0.0
    memory_j: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True)
class PowerState:
    """How fast a step's compute is under a limit or a locked clock, and what a GPU draws."""

    mix: Mix
    phi: float  # speed of products over that back to back at the TDP
    gemm_slowdown: float  # on nominal durations [1]
    attention_slowdown: float
    watts: float  # mean over the mix


@dataclass(frozen=True)
class GpuPower:
    """The limit [W], and how much slower and less alike GPUs are that only compute [1]."""

    limit_w: float
    slowdown: float = 1.0
    spread: float = 1.0


def gpu_power(job: Job, throttled: bool = False, celsius: float = REFERENCE_C) -> GpuPower:
    """Power of a job's GPUs, or of those on its throttled nodes, if they draw all they may.

    Hot ones leak what then drives no clock.

    Raises
    ------
    PrismError
        The limit is above the device's TDP, or below what its parts accept; the clock is above the
        boost clock, or below what parts can be locked to.
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
    curve = _curve(device)
    drives = share - LEAKAGE * (celsius - REFERENCE_C)
    speed = min(curve.speed(drives), _phi_of_clock(job, device) or math.inf)
    return GpuPower(watts, 1.0 / speed, curve.spread(share))


def position_slowdowns(job: Job) -> tuple[float, ...] | None:
    """Factor on compute of each GPU of a node: what the job states, and what its heat leaves."""
    given, celsius = job.cluster.gpu_slowdowns, job.cluster.gpu_temperatures
    if celsius is None:
        return given
    cool = gpu_power(job).slowdown
    hot = [gpu_power(job, celsius=each).slowdown / cool for each in celsius]
    return tuple(a * b for a, b in zip(given or [1.0] * len(hot), hot, strict=True))


def mix_of(
    job: Job, kernels: Iterable[tuple[Work, float]], wait_s: float = 0.0, at_cap: bool = True,
    memory_time: Callable[[float], float] | None = None,
) -> Mix:  # fmt: skip
    """Sum a step's kernels, each with how often it runs; see `power_state`.

    Parameters
    ----------
    at_cap : bool
        Attention at phi = 1, slower than its tables; else as it is given.
    """
    device = find_device(job.cluster.device)
    of, scale = silicon(device), job.cluster.scale
    at_phi_1 = {"gemm": of.table_phi, "attention": math.pow(of.attention_phi, 1.0 / GEMM_EXPONENT)}
    slow = at_phi_1 if at_cap else {}
    sums = dict.fromkeys(Mix.__dataclass_fields__, 0.0)
    for kernel, n in kernels:
        kind, seconds = kind_of(kernel, memory_time), n * kernel.duration
        seconds *= slow.get(kind, 1.0)
        sums[f"{kind}_s"] += seconds
        if kind != "wait":
            pj = kernel.bytes * of.byte_pj
            if kernel.flop > 0.0:
                attention = kernel.kernel_class == "attention"
                precision = "bf16" if kernel.kernel_class == "loss" else job.parallelism.precision
                pj += kernel.flop * (of.attention_pj if attention else of.flop_pj(precision))
            # a variant's durations follow its factors; it draws what the device draws
            factor = scale.memory.time if kind == "memory" else scale.compute.time
            sums[f"{kind}_j"] += 1e-12 * n * pj * factor
    sums["wait_s"] += wait_s
    return Mix(**sums)


def kind_of(kernel: Work, memory_time: Callable[[float], float] | None = None) -> str:
    """Tell gemm, attention, memory and wait apart: what follows the clock, and how.

    A product that takes as long as its bytes do is memory; what neither computes nor moves waits.
    """
    if kernel.flop <= 0.0:
        return "memory" if kernel.bytes > 0.0 else "wait"
    if memory_time is not None and kernel.duration <= (1.0 + 1e-9) * memory_time(kernel.bytes):
        return "memory"
    return "attention" if kernel.kernel_class == "attention" else "gemm"


def power_state(
    job: Job, kernels: Iterable[tuple[Work, float]], wait_s: float = 0.0,
    memory_time: Callable[[float], float] | None = None,
) -> PowerState:  # fmt: skip
    """Speed of a step's compute under a job's power limit and locked clock.

    Phi is the largest, up to what the clock allows or the tables have, at which the mean draw of
    the mix is within the limit.

    Parameters
    ----------
    job : Job
        Its device, `cluster.power_limit_w` (None: the TDP) and `cluster.clock_mhz`.
    kernels : iterable of (kernel, float)
        The step's kernels at nominal rates, without those on links, and how often each runs.
    wait_s : float
        Time of the step in which a GPU waits or communicates [s].
    memory_time : callable
        Time that a kernel's bytes take [s]: it tells products bound by memory.

    Raises
    ------
    PrismError
        As `gpu_power`.
    """
    limit, device = gpu_power(job).limit_w, find_device(job.cluster.device)
    mix, locked = mix_of(job, kernels, wait_s, True, memory_time), _phi_of_clock(job, device)

    def excess(phi: float) -> float:
        joules, seconds = step_joules(device, mix, phi, limit)
        return joules - limit * seconds

    of = silicon(device)
    high = most = of.table_phi if locked is None else locked
    low = min(high, _curve(device).speed(LEAST_SHARE))
    phi = high
    if excess(high) > 0.0:
        for _ in range(60):
            phi = 0.5 * (low + high)
            low, high = (low, phi) if excess(phi) > 0.0 else (phi, high)
        phi = low
    joules, seconds = step_joules(device, mix, phi, limit)
    attention = math.pow(of.attention_phi / phi, 1.0 / GEMM_EXPONENT)
    if job.cluster.clock_mhz is not None:
        bound = attention if phi < most else 0.0
        attention = max(bound, of.attention_mhz / job.cluster.clock_mhz)
    watts = joules / seconds if seconds > 0.0 else of.idle_w
    return PowerState(mix, phi, of.table_phi / phi, attention, min(watts, limit))


def step_joules(
    device: Device, mix: Mix, phi: float, limit_w: float, step_s: float | None = None
) -> tuple[float, float]:
    """Energy [J] and time [s] of a mix at a speed; with a step's time, idle to its end.

    What does not follow the clock draws the limit at most: BabelStream on A100, which draws 228 W,
    keeps its speed at a limit of 150 W.
    """
    idle, curve = silicon(device).idle_w, _curve(device)
    floor, dynamic = curve.floor * device.power_w, curve.draw(phi)
    gemm_s = mix.gemm_s / phi
    attention_s = mix.attention_s / math.pow(phi, 1.0 / GEMM_EXPONENT)
    joules = 0.0
    for nominal_s, nominal_j, now_s in (
        (mix.gemm_s, mix.gemm_j, gemm_s), (mix.attention_s, mix.attention_j, attention_s),
    ):  # fmt: skip
        if nominal_s > 0.0:
            follows = idle - floor + nominal_j / nominal_s
            joules += now_s * (floor + follows * dynamic)
    joules += min(mix.memory_j + idle * mix.memory_s, limit_w * mix.memory_s)
    seconds = gemm_s + attention_s + mix.memory_s
    wait_s = mix.wait_s if step_s is None else max(step_s - seconds, 0.0)
    return joules + min(idle, limit_w) * wait_s, seconds + wait_s


def throttled_nodes(job: Job) -> list[int]:
    """Nodes that throttle for heat, evenly spread."""
    count, n = round(job.cluster.throttled_share * job.n_nodes), job.n_nodes
    return [(2 * i + 1) * n // (2 * count) for i in range(count)]


def _curve(device: Device) -> PowerCurve:
    return CURVES.get(device.name, AMPERE)


def _phi_of_clock(job: Job, device: Device) -> float | None:
    """Speed of products at the job's locked clock; None where it has none."""
    clock, of = job.cluster.clock_mhz, silicon(device)
    if clock is None:
        return None
    if not LEAST_CLOCK * of.boost_mhz <= clock <= MOST_CLOCK * of.boost_mhz:
        raise PrismError(
            f"{job.source or job.name}: cluster.clock_mhz: {clock:g}, expected between "
            f"{LEAST_CLOCK * of.boost_mhz:.0f} and {MOST_CLOCK * of.boost_mhz:.0f} MHz, "
            f"the clocks of {device.name}"
        )
    return math.pow(clock / of.gemm_mhz, GEMM_EXPONENT)
