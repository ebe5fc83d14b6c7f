"""Nominal durations of kernels on one GPU, from a measured table or a roofline.

Nominal is the mean. Left out: shapes (only flop counts choose the throughput), clocks, and kernels
that overlap each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prism.cluster.devices import DEVICES, device_key
from prism.cluster.groups import Group
from prism.cluster.machine import Cluster

if TYPE_CHECKING:
    from prism.distributions.library import GemmTable, Library

COMPUTE_CLASSES = frozenset(
    {"gemm_attention", "gemm_mlp", "gemm_expert", "attention", "loss", "compute"}
)
MEMORY_CLASSES = frozenset({"memory", "embedding", "optimizer"})

MEASURED_GEMM = "measured_gemm"
"""Attribute of a library whose products `prism measure` timed."""

GEMM_LARGE_S = 1e-3
"""Matrix products from this nominal duration on are distributed as ``residual/gemm_large`` [s].

It is where the library's two distributions part: profiles resolve 1 us, so only a product of 1 ms
and more shows its own spread of about a tenth of a percent (microsoft/vidur).
"""

MESSAGE_BYTES = ((1e6, "small"), (1e8, "medium"), (float("inf"), "large"))
"""Size classes of collectives' residual distributions: up to 1 MB, up to 100 MB, larger."""

LOGNORMAL = "lognormal/"
"""Begins a distribution that is no library entry but a lognormal one of the cv that follows."""


def is_compute(kernel_class: str) -> bool:
    """Tell whether a kernel works on the GPU itself rather than on a link."""
    return kernel_class in COMPUTE_CLASSES or kernel_class in MEMORY_CLASSES


@dataclass(frozen=True)
class Kernel:
    """One kernel of one GPU, or one collective of its tp, cp or ep group."""

    name: str
    kernel_class: str
    duration: float  # nominal; of a collective, the exposed part of its transfer [s]
    flop: float
    bytes: float  # memory traffic; of a collective, its message
    law: str  # library entry of its residual
    group: str = ""  # of a collective: nobody passes it before all members have come
    is_weight: bool = False  # gives nothing but a weight's gradient, and may wait
    hidden_s: float = 0.0  # of a collective, what a weight gradient beside it hides [s]
    routed: bool = False  # its work follows how tokens are routed to the ranks of an ep group


@dataclass(frozen=True)
class ChunkWork:
    """One GPU's kernels for one model chunk and one microbatch, in program order."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    inputs: tuple[Kernel, ...] = ()  # halves of a split backward
    weights: tuple[Kernel, ...] = ()


def split_backward(kernels: tuple[Kernel, ...]) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Split a backward into what gives the input's gradient and what gives the weights'.

    Collectives stay with the first half, and what a weight gradient hid of them shows: those come
    later, and another microbatch's beside them are not modelled. Recomputation stays there too.
    """
    inputs = tuple(
        replace(k, duration=k.duration + k.hidden_s, hidden_s=0.0) if k.hidden_s else k
        for k in kernels
        if not k.is_weight
    )
    return inputs, tuple(k for k in kernels if k.is_weight)


@dataclass(frozen=True)
class Rates:
    """What a GPU achieves, and the kernels that follow from it."""

    gemm_flop_per_s: float  # of a large product
    gemm_half_flop: float  # the size that reaches half of it
    attention_flop_per_s: float
    attention_backward_flop_per_s: float
    memory_bytes_per_s: float
    launch_s: float  # fixed time of any kernel
    table: GemmTable | None = None  # measured throughput by size, for this device
    gemm_derate: float = 1.0  # throughput inside training over that of a product on its own
    compute_factor: float = 1.0  # how many times longer compute takes on a hardware variant
    memory_factor: float = 1.0

    def gemm(
        self, name: str, kernel_class: str, m: float, n: float, k: float, accumulate: bool = False,
        groups: float = 1.0,
    ) -> Kernel:  # fmt: skip
        """Product of an [m, k] and a [k, n] matrix in bfloat16.

        With `accumulate` the result is added to a float32 buffer, as gradients are. Experts'
        `groups` share the tokens but each has a weight of its own; they are one kernel, whose
        throughput is that of its whole work.
        """
        flop = 2.0 * m * n * k
        if accumulate:
            n_bytes = 2.0 * (m * k + k * n) + 8.0 * groups * m * n
        else:
            n_bytes = 2.0 * (m * k + groups * k * n) + 2.0 * m * n
        compute, memory = self.gemm_time(flop), self.memory_time(n_bytes)
        duration = max(compute, memory)
        # a variant's durations follow its factors, its distributions those of the device
        alone = max(compute / self.compute_factor, memory / self.memory_factor)
        law = "residual/gemm_large" if alone >= GEMM_LARGE_S else "residual/gemm_small"
        return Kernel(name, kernel_class, duration, flop, n_bytes, law)

    def attention(self, name: str, flop: float, n_bytes: float, backward: bool = False) -> Kernel:
        """Fused attention of `flop` operations that reads and writes `n_bytes`."""
        rate = self.attention_backward_flop_per_s if backward else self.attention_flop_per_s
        compute = (self.launch_s + flop / rate) * self.compute_factor
        duration = max(compute, self.memory_time(n_bytes))
        return Kernel(name, "attention", duration, flop, n_bytes, "residual/attention")

    def memory(self, name: str, n_bytes: float, kernel_class: str = "memory") -> Kernel:
        """Kernel bound by the `n_bytes` it reads and writes."""
        duration = self.memory_time(n_bytes)
        return Kernel(name, kernel_class, duration, 0.0, n_bytes, "residual/memory")

    def gemm_time(self, flop: float) -> float:
        """Duration [s] of a matrix product of `flop` operations.

        From the table, interpolated in log size and constant beyond its ends. Without one
        ``flop / (rate * flop / (flop + half)) = (flop + half) / rate``. Both over the derate.
        """
        if self.table is None:
            alone = self.launch_s + (flop + self.gemm_half_flop) / self.gemm_flop_per_s
        else:
            size = np.log(self.table.flop)
            alone = flop / float(np.interp(np.log(flop), size, self.table.throughput))
        return alone / self.gemm_derate * self.compute_factor

    def memory_time(self, n_bytes: float) -> float:
        """Duration [s] of reading and writing `n_bytes`."""
        return (self.launch_s + n_bytes / self.memory_bytes_per_s) * self.memory_factor


def build_rates(cluster: Cluster, library: Library) -> Rates:
    """Rates of a cluster's device from a library's ``nominal`` entries.

    A table that `prism measure` wrote is used by jobs on its device, however that is spelt, or on
    one of the same bfloat16 rate (H100 and H200); so is that of a set whose device is a job's name
    for it. The shipped sets have none: their efficiencies were fitted to measured sizes and then
    calibrated on training. Jobs on other devices take the library's efficiencies only.
    """
    device, peak, value = cluster.device, cluster.device.bf16_flop_per_s, library.value
    own = device_key(library.device) if MEASURED_GEMM in library.attrs else library.device
    measured = DEVICES.get(own)
    same = measured is not None and measured.bf16_flop_per_s == peak
    return Rates(
        gemm_flop_per_s=peak * value("nominal/gemm_efficiency_max"),
        gemm_half_flop=value("nominal/gemm_half_flop"),
        attention_flop_per_s=peak * value("nominal/attention_efficiency"),
        attention_backward_flop_per_s=peak * value("nominal/attention_backward_efficiency"),
        memory_bytes_per_s=device.memory_bytes_per_s * value("nominal/memory_efficiency"),
        launch_s=value("nominal/kernel_launch_s"),
        table=library.gemm if same else None,
        gemm_derate=value("nominal/training_gemm_derate"),
    )


def collective_law(cluster: Cluster, n_bytes: float, group: Group) -> str:
    """Distribution of a collective's residual: of its slowest tier, or a library entry by size.

    Beyond the network the library has no measurements; its distributions of the network stand in.
    """
    cv = cluster.spread(group)
    if cv is not None:
        return f"{LOGNORMAL}{cv!r}"
    size = next(name for limit, name in MESSAGE_BYTES if n_bytes < limit)
    tier = "nvlink" if cluster.tier(group) == "nvlink" else "network"
    return f"residual/{tier}_{size}"
