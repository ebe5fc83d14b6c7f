"""Kernels of one GPU, as a step has them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prism.cluster.groups import Group
from prism.cluster.machine import Cluster

COMPUTE_CLASSES = frozenset(
    {"gemm_attention", "gemm_mlp", "gemm_expert", "attention", "loss", "compute"}
)
MEMORY_CLASSES = frozenset({"memory", "embedding", "optimizer"})
GAPS = "launch_gaps"  # class of what a device waits for its host: no slow GPU makes it longer
_ON_DEVICE = COMPUTE_CLASSES | MEMORY_CLASSES | {GAPS}

SCALE_BYTES = {"fp8_block": 4.0 / 128.0, "mxfp8": 1.0 / 32.0, "nvfp4": 1.0 / 16.0}
"""Bytes of scales per number: float32 per 128, 8 bit per 32 and per 16 (OCP MX; NVIDIA NVFP4)."""

MESSAGE_BYTES = ((1e6, "small"), (1e8, "medium"), (float("inf"), "large"))
"""Size classes of collectives' residual distributions: up to 1 MB, up to 100 MB, larger."""

LOGNORMAL = "lognormal/"
"""Begins a distribution that is no library entry but a lognormal one of the cv that follows."""


def is_compute(kernel_class: str) -> bool:
    """Tell whether a kernel works on the GPU itself rather than on a link."""
    return kernel_class in _ON_DEVICE


@dataclass(frozen=True)
class Kernel:
    """One kernel of one GPU, or one collective of a group of its stage."""

    name: str
    kernel_class: str
    duration: float  # nominal; of a collective, the exposed part of its transfer [s]
    flop: float
    bytes: float  # memory traffic; of a collective, its message
    distribution: str  # library entry of its residual
    group: str = ""  # of a collective: nobody passes it before all members have come
    is_weight: bool = False  # gives nothing but a weight's gradient, and may wait
    hidden_s: float = 0.0  # of a collective, what a weight gradient beside it hides [s]
    routed: bool = False  # its work follows how tokens are routed to the ranks of an ep group
    launches: float = 0.0  # kernels and memsets that it stands for
    by_rank: tuple[float, ...] = ()  # of ep ranks whose work differs, each one's over the mean
    behind_s: float = 0.0  # of a gap, what of it a longer message before the host would hide [s]


@dataclass(frozen=True)
class ChunkWork:
    """One GPU's kernels for one model chunk and one microbatch, in program order."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    inputs: tuple[Kernel, ...] = ()  # halves of a split backward
    weights: tuple[Kernel, ...] = ()

    @property
    def gaps(self) -> list[Kernel]:
        """Gaps between kernels in a microbatch's passes."""
        passes = self.inputs + self.weights or self.backward
        return [k for k in (*self.forward, *passes) if k.kernel_class == GAPS]


def exposed(seconds: float, beside_s: float, cost: float) -> float:
    """Part of communication that shows beside some compute, which it makes longer by a share of it.

    NCCL's kernels take multiprocessors and memory from what runs beside them.

    Examples
    --------
    >>> exposed(3.0, 2.0, 0.25), exposed(3.0, 5.0, 0.0), exposed(3.0, 0.0, 0.5)
    (1.5, 0.0, 3.0)
    """
    return seconds - (1.0 - cost) * min(seconds, beside_s)


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


def collective_distribution(cluster: Cluster, n_bytes: float, group: Group) -> str:
    """Distribution of a collective's residual: of its slowest tier, or a library entry by size.

    Beyond the network the library has no measurements; its distributions of the network stand in.
    """
    cv = cluster.spread(group)
    if cv is not None:
        return f"{LOGNORMAL}{cv!r}"
    size = next(name for limit, name in MESSAGE_BYTES if n_bytes < limit)
    return f"residual/{cluster.tier(group)}_{size}"
