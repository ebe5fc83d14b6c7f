"""Nominal durations of kernels on one GPU, from measured tables by shape or a roofline.

Nominal is the mean. Left out: clocks, and kernels that overlap each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from prism.cluster.devices import DEVICES, device_key
from prism.cluster.groups import Group
from prism.cluster.machine import Cluster
from prism.common.errors import PrismError

if TYPE_CHECKING:
    from prism.distributions.kerneltables import KernelTable
    from prism.distributions.library import Library
    from prism.jobs.jobspec.blocks import ParallelismBlock

COMPUTE_CLASSES = frozenset(
    {"gemm_attention", "gemm_mlp", "gemm_expert", "attention", "loss", "compute"}
)
MEMORY_CLASSES = frozenset({"memory", "embedding", "optimizer"})

QUANTIZED_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}
"""Bytes of a number of a matrix product's operand, by `parallelism.precision`."""

SCALE_BYTES = {"fp8_block": 4.0 / 128.0, "mxfp8": 1.0 / 32.0, "nvfp4": 1.0 / 16.0}
"""Bytes of scales per number: float32 per 128, 8 bit per 32 and per 16 (OCP MX; NVIDIA NVFP4)."""

ONE_ORDER = frozenset({"h100", "h200"})
"""Devices whose fp8 products need operands with the summed dimension last, so that an operand of
two products is stored transposed beside (NVIDIA, Transformer Engine)."""

GEMM_TABLES = {"mxfp8": "fp8_block"}
"""Precisions whose products are those of another: on Blackwell both are scaled by block."""

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

    gemm_flop_per_s: float  # of a large product in bf16, where no table has it
    gemm_half_flop: float  # the size that reaches half of it
    attention_flop_per_s: float
    attention_backward_flop_per_s: float
    memory_bytes_per_s: float
    launch_s: float  # fixed time of any kernel
    tables: Mapping[str, KernelTable] = field(default_factory=dict)  # measured, of this device
    precision: str = "bf16"  # of the linear layers' products
    speed_up: float = 1.0  # the precision's peak over that of bf16, for products without a table
    cast_bytes_per_s: float = 0.0
    cast_copies: float = 2.0  # quantized copies of an operand: by rows and by columns
    derate: float = 1.0  # throughput inside training over that of a kernel on its own
    attention_share: float = 1.0  # of the rates above or the tables', with another implementation
    overlap_cost: float = 0.0  # share of hidden collectives that compute beside becomes longer
    expert_layer_s: float = 0.0  # that the host holds up each pass of a layer with experts
    traffic: float = 1.0  # bytes of memory-bound kernels over those that have to move
    compute_factor: float = 1.0  # how many times longer compute takes on a hardware variant
    memory_factor: float = 1.0

    def gemm(
        self, name: str, kernel_class: str, m: float, n: float, k: float, accumulate: bool = False,
        groups: float = 1.0, precision: str = "",
    ) -> Kernel:  # fmt: skip
        """Product of an [m, k] and a [k, n] matrix in the job's precision, or another.

        With `accumulate` the result is added to a float32 buffer, as gradients are. Experts'
        `groups` share the tokens but each has a weight of its own; they are one kernel, with the
        throughput of one expert's shape.
        """
        precision, flop = precision or self.precision, 2.0 * m * n * k
        size = QUANTIZED_BYTES[precision]
        if accumulate:
            n_bytes = size * (m * k + k * n) + 8.0 * groups * m * n
            shape = (m, n, k / groups)
        else:
            n_bytes = size * (m * k + groups * k * n) + 2.0 * m * n
            shape = (m / groups, n, k)
        compute, memory = self.gemm_time(flop, *shape, precision), self.memory_time(n_bytes)
        duration = max(compute, memory)
        # a variant's durations follow its factors, its distributions those of the device
        alone = max(compute / self.compute_factor, memory / self.memory_factor)
        law = "residual/gemm_large" if alone >= GEMM_LARGE_S else "residual/gemm_small"
        return Kernel(name, kernel_class, duration, flop, n_bytes, law)

    def cast(self, name: str, values: float) -> tuple[Kernel, ...]:
        """Quantize an operand: read in bf16, written once for each way it is multiplied."""
        if self.precision == "bf16" or not values:
            return ()
        size = QUANTIZED_BYTES[self.precision] + SCALE_BYTES.get(self.precision, 0.0)
        n_bytes = values * (2.0 + self.cast_copies * size)
        duration = (self.launch_s + n_bytes / self.cast_bytes_per_s) * self.memory_factor
        return (Kernel(name, "memory", duration, 0.0, n_bytes, "residual/memory"),)

    def attention(
        self,
        name: str,
        flop: float,
        n_bytes: float,
        sizes: Mapping[str, float],
        backward: bool = False,
    ) -> Kernel:
        """Fused attention of `flop` operations that reads and writes `n_bytes`.

        `sizes` are those by which a table tells kernels apart: batch, heads, seq, dim.
        """
        rate = self.attention_backward_flop_per_s if backward else self.attention_flop_per_s
        own = self.tables.get("attention_backward/bf16") if backward else None
        table = own or self.tables.get("attention/bf16")
        if table is not None:
            part = rate / self.attention_flop_per_s if backward and own is None else 1.0
            rate = part * table(**{**sizes, "flop": flop})
        rate *= self.attention_share
        compute = (self.launch_s + flop / rate / self.derate) * self.compute_factor
        duration = max(compute, self.memory_time(n_bytes))
        return Kernel(name, "attention", duration, flop, n_bytes, "residual/attention")

    def memory(self, name: str, n_bytes: float, kernel_class: str = "memory") -> Kernel:
        """Kernel bound by the `n_bytes` it reads and writes where all that can be is fused."""
        n_bytes *= self.traffic
        duration = self.memory_time(n_bytes)
        return Kernel(name, kernel_class, duration, 0.0, n_bytes, "residual/memory")

    def expert_layer(self, name: str) -> tuple[Kernel, ...]:
        """Time by which the host, launching kernel by kernel, holds up a layer with experts.

        It waits for the counts of tokens first, so that it is never ahead.
        """
        duration = self.expert_layer_s * self.compute_factor
        return (Kernel(name, "compute", duration, 0.0, 0.0, "residual/compute"),) * (duration > 0.0)

    def gemm_time(
        self, flop: float, m: float = 1.0, n: float = 1.0, k: float = 1.0, precision: str = "bf16"
    ) -> float:
        """Duration [s] of `flop` operations in products of one shape.

        From the precision's table, whose rate is constant beyond its ends. Without one ``flop /
        (rate * flop / (flop + half)) = (flop + half) / rate``. Both over the derate.
        """
        table = self.tables.get(f"gemm/{GEMM_TABLES.get(precision, precision)}")
        if table is not None:
            alone = self.launch_s + flop / table(flop=flop, m=m, n=n, k=k)
        else:
            rate = self.gemm_flop_per_s * (1.0 if precision == "bf16" else self.speed_up)
            alone = self.launch_s + (flop + self.gemm_half_flop) / rate
        return alone / self.derate * self.compute_factor

    def memory_time(self, n_bytes: float) -> float:
        """Duration [s] of reading and writing `n_bytes`."""
        return (self.launch_s + n_bytes / self.memory_bytes_per_s) * self.memory_factor


def build_rates(cluster: Cluster, library: Library, layout: ParallelismBlock) -> Rates:
    """Rates of a cluster's device from a library's ``nominal`` entries.

    Its tables are used by jobs on its device, however that is spelt, or on one of the same rate
    (H100 and H200). Jobs on other devices take the library's efficiencies only.

    Raises
    ------
    PrismError
        The device has no such arithmetic.
    """
    device, peak, value = cluster.device, cluster.device.bf16_flop_per_s, library.value
    precision = layout.precision
    if not device.flop_per_s(precision):
        known = [p for p in QUANTIZED_BYTES if device.flop_per_s(p)]
        raise PrismError(
            f"parallelism.precision: {device.name} has no {precision} arithmetic; "
            f"take {' or '.join(known)}, or another cluster.device"
        )
    measured = DEVICES.get(device_key(library.device))
    same = measured is not None and measured.bf16_flop_per_s == peak
    own = {
        name: value(f"nominal/{name}_{layout.framework}")
        for name in ("derate", "attention", "traffic")
        if f"nominal/{name}_{layout.framework}" in library
    }
    cast = "nominal/cast_efficiency"
    cast = cast if cast in library else "nominal/memory_efficiency"  # a library of bf16 alone
    added = {
        name: value(f"nominal/{name}")
        for name in ("overlap_cost", "expert_layer_s")
        if f"nominal/{name}" in library
    }
    if layout.cuda_graphs:
        added["expert_layer_s"] = 0.0
    return Rates(
        gemm_flop_per_s=peak * value("nominal/gemm_efficiency_max"),
        gemm_half_flop=value("nominal/gemm_half_flop"),
        attention_flop_per_s=peak * value("nominal/attention_efficiency"),
        attention_backward_flop_per_s=peak * value("nominal/attention_backward_efficiency"),
        memory_bytes_per_s=device.memory_bytes_per_s * value("nominal/memory_efficiency"),
        launch_s=value("nominal/kernel_launch_s"),
        tables=library.tables if same else {},
        precision=precision,
        speed_up=device.flop_per_s(precision) / peak,
        cast_bytes_per_s=device.memory_bytes_per_s * value(cast),
        cast_copies=1.0 if precision == "fp8" and device.name not in ONE_ORDER else 2.0,
        derate=own.get("derate") or value("nominal/training_gemm_derate"),
        attention_share=own.get("attention", 1.0),
        traffic=own.get("traffic", 1.0),
        **added,
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
