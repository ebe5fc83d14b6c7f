"""Nominal kernels of a job's device and framework, from the tables of its library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prism.common.errors import PrismError
from prism.jobs.devices import DEVICES, device_key, find_device
from prism.jobs.frameworks import FRAMEWORKS, HELPER_PASSES, Framework
from prism.jobs.ops import Attention, Scan
from prism.workload.kernelcost import KINDS, NUMBER_BYTES, KernelCost, kernel_cost
from prism.workload.kernels import SCALE_BYTES, Kernel

if TYPE_CHECKING:
    from prism.distributions.library import Library
    from prism.jobs.job import Job

SUM_BYTES = 8.0  # traffic of a weight gradient that its product adds to a float32 buffer


@dataclass(frozen=True)
class Costs:
    """Makes one GPU's kernels."""

    library: Library
    framework: Framework
    backend: str  # of attention
    precision: str = "bf16"  # of the linear layers' products
    cast_bytes_per_s: float = 0.0
    cast_copies: float = 2.0  # quantized copies of an operand: by rows and by columns
    overlap_cost: float = 0.0  # share of hidden collectives that compute beside becomes longer
    fp8_backward: float = 1.0  # time of gradients' products in fp8, over their shapes' forward
    compute_factor: float = 1.0  # how many times longer compute takes on a hardware variant
    memory_factor: float = 1.0

    @property
    def operand_bytes(self) -> float:
        """Bytes of a number of a product's operand."""
        return NUMBER_BYTES[self.precision]

    def gemm(
        self, name: str, kernel_class: str, m: float, n: float, k: float, groups: float = 1.0,
        in_bf16: bool = False, weight: bool = False,
    ) -> Kernel:  # fmt: skip
        """Product of an [m, k] and a [k, n] matrix, of each of some experts.

        A `weight` gradient may be added to a float32 buffer by the product itself.
        """
        dtype = "bf16" if in_bf16 else self.precision
        gradient = weight or name.endswith("_dgrad")
        sizes, kind = {"m": m, "n": n, "k": k}, "gemm"
        if groups > 1.0:
            kind = "grouped_gemm"
            sizes |= {"experts": groups}
        together = gradient and (groups > 1.0 or f"gemm/{dtype}/backward" in self.library.kernels)
        if together:  # both gradients were measured together, by the shape of the forward
            rows, width, depth = (k, n, m) if weight else (m, k, n)
            sizes |= {"m": rows, "n": width, "k": depth}
        cost = kernel_cost(
            self.library, kind, backend="", dtype=dtype, backward=together, mask="causal",
            window=0.0, deterministic=False, **sizes,
        )  # fmt: skip
        seconds = 0.5 * cost.seconds if together else cost.seconds
        if dtype == "fp8" and gradient:
            seconds *= self.fp8_backward
        size = NUMBER_BYTES[dtype]
        n_bytes = groups * (size * (m * k + k * n) + 2.0 * m * n)
        summed = groups * (SUM_BYTES - 2.0) * m * n * (weight and self.framework.fused_sums)
        duration = seconds * self.compute_factor + self.moved(summed)
        flop = 2.0 * groups * m * n * k
        launches = self.framework.product_launches
        n_launches = 0.5 * launches[1] if gradient else launches[0]
        return Kernel(
            name, kernel_class, duration, flop, n_bytes + summed, cost.residual, launches=n_launches
        )

    def cast(self, name: str, values: float) -> tuple[Kernel, ...]:
        """Quantize an operand: read in bf16, written once for each way it is multiplied."""
        if self.precision == "bf16" or not values or not self.cast_copies:
            return ()
        size = NUMBER_BYTES[self.precision] + SCALE_BYTES.get(self.precision, 0.0)
        reads = 4.0 if self.framework.casts_weights else 2.0
        n_bytes = values * (reads + self.cast_copies * size)
        duration = n_bytes / self.cast_bytes_per_s * self.memory_factor
        return (Kernel(name, "memory", duration, 0.0, n_bytes, "residual/memory", launches=1.0),)

    def attention(self, op: Attention, backward: bool = False) -> tuple[Kernel, ...]:
        """Fused attention; of shards of tokens each has a part of the queries, as of the heads.

        Queries of other keys take what as many queries of whole sequences of the keys do.
        """
        keys = op.keys_seq or op.seq
        cost = kernel_cost(
            self.library, "attention", backend=self.backend, backward=backward, window=op.window,
            mask="causal" if op.causal else "full", batch=op.sequences * op.seq / keys,
            heads=op.heads / op.shards, kv_heads=op.kv_heads / op.shards, seq=keys,
            head_dim=op.head_size, v_head_dim=op.v_head_size,
        )  # fmt: skip
        launches = self._launches("attention", backward)
        if not backward:
            return (self._compute(op.name, "attention", cost, cost.flop, launches),)
        helpers = self.moved(HELPER_PASSES.get(self.backend, 0.0) * 2.0 * op.rows * op.out)
        helpers = min(helpers / self.memory_factor, 0.5 * cost.seconds)
        rest = replace(cost, seconds=cost.seconds - helpers)
        kernel = self._compute(f"{op.name}_backward", "attention", rest, cost.flop, launches)
        if not helpers:
            return (kernel,)
        n_bytes, distribution = 2.0 * op.rows * op.out, "residual/memory"
        name, duration = f"{op.name}_backward_helpers", helpers * self.memory_factor
        return kernel, Kernel(name, "memory", duration, 0.0, 5.0 * n_bytes, distribution)

    def scan(self, op: Scan, backward: bool = False) -> Kernel:
        """Recurrence over a sequence."""
        state = {"state": op.state} if op.kind == "mamba2" else {}
        cost = kernel_cost(
            self.library, op.kind, backend="", dtype="bf16", backward=backward, mask="causal",
            window=0.0, deterministic=False, tokens=op.rows, seq=op.seq, heads=op.heads,
            head_dim=op.head_size, **state,
        )  # fmt: skip
        name = f"{op.name}_backward" if backward else op.name
        flop = op.flop * (KINDS[op.kind].backward_flop if backward else 1.0)
        return self._compute(name, "attention", cost, flop, 4.0)

    def norm(self, name: str, rows: float, width: float, backward: bool = False) -> Kernel:
        """RMSNorm of rows of some width."""
        launches = self._launches("norm", backward)
        passes = self._passes("norm", backward)
        if passes:
            return self.memory(name, passes * 2.0 * rows * width, launches=launches)
        cost = kernel_cost(
            self.library, "rms_norm", backend=self.framework.norm, backward=backward, rows=rows,
            columns=width,
        )  # fmt: skip
        duration = cost.seconds * self.memory_factor
        return Kernel(name, "memory", duration, 0.0, cost.bytes, cost.residual, launches=launches)

    def pointwise(self, name: str, kind: str, values: float, backward: bool = False) -> Kernel:
        """Op bound by memory, of a kind that the framework knows, on bfloat16 values."""
        n_bytes = self._passes(kind, backward) * 2.0 * values
        return self.memory(name, n_bytes, launches=self._launches(kind, backward))

    def memory(
        self, name: str, n_bytes: float, kernel_class: str = "memory", launches: float = 1.0
    ) -> Kernel:
        """Kernel that reads and writes some bytes at the rate of a copy."""
        duration = self.moved(n_bytes)
        distribution = "residual/memory"
        return Kernel(name, kernel_class, duration, 0.0, n_bytes, distribution, launches=launches)

    def _compute(
        self, name: str, kernel_class: str, cost: KernelCost, flop: float, launches: float
    ) -> Kernel:
        duration = cost.seconds * self.compute_factor
        return Kernel(
            name, kernel_class, duration, flop, cost.bytes, cost.residual, launches=launches
        )

    def moved(self, n_bytes: float) -> float:
        """Duration [s] of reading and writing some bytes."""
        if n_bytes <= 0.0:
            return 0.0
        cost = kernel_cost(self.library, "memory", bytes=n_bytes)
        return cost.seconds * self.memory_factor

    def _passes(self, kind: str, backward: bool) -> float:
        found = self.framework.passes.get(kind)
        return found[1 if backward else 0] if found else 0.0

    def _launches(self, kind: str, backward: bool) -> float:
        found = self.framework.passes.get(kind)
        return found[3 if backward else 2] if found else 1.0


def attention_backend(job: Job) -> str:
    """Name what a job's attention runs: its own, or its framework's on its device."""
    if job.parallelism.attention is not None:
        return str(job.parallelism.attention)
    own, device = FRAMEWORKS[job.parallelism.framework].attention, find_device(job.cluster.device)
    return {"te": device.te_attention, "flash": device.flash_attention}.get(own, own)


def build_costs(job: Job, library: Library, tables: Library) -> Costs:
    """Costs of a job's device, figures from a library and kernels from the tables of one."""
    device, layout, value = DEVICES[job.cluster.device], job.parallelism, library.value
    precision = layout.precision
    if not device.flop_per_s(precision):
        known = [p for p in NUMBER_BYTES if device.flop_per_s(p)]
        raise PrismError(
            f"parallelism.precision: {device.name} has no {precision} arithmetic; "
            f"take {' or '.join(known)}, or another cluster.device"
        )
    measured = DEVICES.get(device_key(tables.device), device)
    compute = measured.bf16_flop_per_s / device.bf16_flop_per_s
    memory = measured.memory_bytes_per_s / device.memory_bytes_per_s
    speed = library.value("nominal/derate") if "nominal/derate" in library else 1.0
    own = f"nominal/speed_{layout.framework}"
    speed *= library.value(own) if own in library else 1.0
    cast = "nominal/cast_efficiency"
    efficiency = value(cast) if cast in library else 1.0
    return Costs(
        tables,
        FRAMEWORKS[layout.framework],
        attention_backend(job),
        precision,
        cast_bytes_per_s=device.memory_bytes_per_s * efficiency,
        cast_copies=_copies(device.name, precision),
        overlap_cost=_optional(library, "overlap_cost"),
        fp8_backward=_optional(library, "fp8_backward") or 1.0,
        compute_factor=compute / speed * job.cluster.scale.compute.time,
        memory_factor=memory * job.cluster.scale.memory.time,
    )


def _copies(device: str, precision: str) -> float:
    """Quantized copies of an operand; none where the products' table holds quantizing."""
    if DEVICES[device].casts_inside:
        return 0.0
    return 1.0 if precision == "fp8" and not DEVICES[device].one_order else 2.0


def _optional(library: Library, name: str) -> float:
    entry = f"nominal/{name}"
    return library.value(entry) if entry in library else 0.0
