"""What ranks send that share a stage's parameters, and what that takes of the compute beside it.

A framework says which of it is hidden, and in which messages (`prism.jobs.frameworks`). Left
out: that the first bucket has to fill before it is sent beside a backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prism.cluster.machine import Cluster
from prism.jobs.frameworks import FRAMEWORKS, Framework
from prism.workload.kernelcost import NUMBER_BYTES
from prism.workload.kernels import ChunkWork, Kernel, collective_distribution
from prism.workload.modelsize import DTYPE_BYTES
from prism.workload.work import Collective

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ParallelismBlock

PARAMETER_BYTES = 2.0  # bytes of a parameter that is gathered: bfloat16


def collective(
    cluster: Cluster, name: str, op_kind: str, n_bytes: float, among: str, of: str = ""
) -> Collective | None:
    """Return a collective of a kind of group, None in groups of one."""
    group = cluster.group(among)
    if group.n_ranks == 1:
        return None
    duration = cluster.collective_time(op_kind, n_bytes, group)
    distribution = collective_distribution(cluster, n_bytes, group)
    return Collective(
        name, op_kind, f"{of or among}_{op_kind}", duration, n_bytes, distribution, among
    )


@dataclass(frozen=True)
class Sharing:
    """Ranks that share parameters of one GPU, and what they do with a given number."""

    cluster: Cluster
    layout: ParallelismBlock
    group: str
    prefix: str = ""  # of names: routed experts, which fewer ranks share

    @property
    def framework(self) -> Framework:
        """What the framework hides, and in which messages."""
        return FRAMEWORKS[self.layout.framework]

    @property
    def is_full(self) -> bool:
        """Whether parameters are shared out, layer by layer."""
        return self.layout.data_parallel in ("fsdp", "hsdp")

    @property
    def hides_gradients(self) -> bool:
        """Whether gradients are reduced beside the last backward."""
        return self.layout.overlap and (self.is_full or self.framework.hides_gradients)

    @property
    def hides_parameters(self) -> bool:
        """Whether parameters are gathered beside forward, rather than after the optimizer."""
        return self.is_full or (self.layout.overlap and self.framework.hides_parameters)

    @property
    def parameter_bytes(self) -> float:
        """Bytes of a parameter that is gathered.

        Eager FSDP quantizes what it has gathered, the others a rank's part before.
        """
        eager = self.framework.norm == "eager"
        return PARAMETER_BYTES if eager else NUMBER_BYTES[self.layout.precision]

    def gathers(self, n: float) -> tuple[Collective, ...]:
        """All-gather of parameters before they are used."""
        if not self.hides_parameters:
            return ()
        return self._gather(n) if self.is_full else _first(self._gather(n, self.bucket_bytes))

    def reduces(self, n: float) -> tuple[Collective, ...]:
        """Gradients: all-reduce in ddp, else reduce-scatter; hsdp: then parts over shard groups."""
        mode, size = self.layout.data_parallel, DTYPE_BYTES[self.layout.gradient_dtype]
        # ranks for tokens of a lone replica still reduce, as in ddp
        whole = mode in ("ddp", "none") or (mode == "zero1" and self.framework.reduces_whole)
        op_kind = "all_reduce" if whole else "reduce_scatter"
        most = math.inf if self.is_full else self.bucket_bytes
        own = self._some("gradient_reduce", op_kind, size * n, self.group, most)
        if not self.is_full:
            return _first(own)[::-1] if self.hides_gradients else own
        if mode != "hsdp":
            return own
        return own + self._some(
            "gradient_replicate", "all_reduce", size / self.n_shards * n, "replicas"
        )

    def param_gather(self, n: float, tensors: float) -> Collective | None:
        """All-gather of a stage's parameters after the optimizer, with zero1."""
        if self.hides_parameters or not tensors:
            return None
        each = self.parameter_bytes * n / tensors
        most = {"each": each, "buckets": self.bucket_bytes, "group": math.inf}
        found = self._gather(n, most[self.framework.gathers])
        if not found or self.framework.gathers != "group":
            return found[0] if found else None
        waits = self.cluster.collective_time("all_gather", 1.0, self.cluster.group(self.group))
        return replace(found[0], duration=max(found[0].duration, tensors * waits))

    def exchange(self, n: float, parts: int) -> tuple[float, float]:
        """Seconds and bytes of one of the parts in which units exchange a GPU's parameters.

        Each rank of a unit averages its share over units; then all gather what they hold.
        """
        alike = "dp_cp" if self.group == "shard" else self.group
        shares = self.cluster.group(alike).n_ranks
        whole = DTYPE_BYTES[self.layout.gradient_dtype] * n / parts
        n_bytes, time = whole / shares, self.cluster.collective_time
        seconds = time("all_reduce", n_bytes, self.cluster.group("sync"))
        if self.n_shards < shares:
            holders = self.cluster.group("replicas" if alike != self.group else alike)
            seconds += time("all_gather", whole / self.n_shards, holders)
        return seconds, n_bytes

    @property
    def bucket_bytes(self) -> float:
        """Bytes of a message at most."""
        least = self.framework.bucket_rank_bytes * self.cluster.group(self.group).n_ranks
        return max(self.framework.bucket_bytes, least)

    @property
    def n_shards(self) -> int:
        """Ranks that divide the optimizer's work, one in ddp."""
        whole = self.layout.data_parallel in ("ddp", "none")
        return 1 if whole else self.cluster.group(self.group).n_ranks

    def _gather(self, n: float, most: float = math.inf) -> tuple[Collective, ...]:
        if self.layout.data_parallel in ("ddp", "none"):
            return ()
        n_bytes = self.parameter_bytes * n
        return self._some("parameter_gather", "all_gather", n_bytes, self.group, most)

    def _some(
        self, name: str, op_kind: str, n_bytes: float, among: str, most: float = math.inf
    ) -> tuple[Collective, ...]:
        """Send in messages of some bytes at most; nothing in a group of one, or of no experts."""
        if self.prefix and n_bytes == 0.0:
            return ()
        messages = max(1.0, n_bytes / most)
        name = self.prefix + name
        found = collective(self.cluster, name, op_kind, n_bytes / messages, among, "dp")
        if found is None:
            return ()
        return (replace(found, messages=messages, duration=found.duration * messages),)


def _first(whole: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Split off the first of a collective's messages: the rest run beside the chunk's kernels."""
    out = []
    for c in whole:
        own = c.duration / c.messages
        out.append(replace(c, duration=own, messages=1.0))
        if c.messages > 1.0:
            left = c.messages - 1.0
            out.append(replace(c, duration=own * left, messages=left, beside=True))
    return tuple(out)


def beside(collectives: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Leave out what no kernels run beside: a first chunk's message before or after them."""
    return tuple(c for c in collectives if c.beside)


def contended(
    cost: float, again: bool, group: str, work: ChunkWork, gathers: tuple[Collective, ...],
    reduces: tuple[Collective, ...],
) -> ChunkWork:  # fmt: skip
    """Lengthen a chunk by what collectives or transfers beside it take from its kernels.

    Their copies and sums occupy multiprocessors and memory: a share `cost` of what compute hides,
    in backward of gathers too where they come `again`.
    """

    def longer(kernels: tuple[Kernel, ...], beside: tuple[Collective, ...]) -> tuple[Kernel, ...]:
        hidden = min(sum(c.duration for c in beside), sum(k.duration for k in kernels))
        if not cost * hidden:
            return kernels
        first = beside[0]
        name, seconds = f"beside_{first.name}", cost * hidden
        return (
            *kernels,
            Kernel(name, first.kernel_class, seconds, 0.0, 0.0, first.distribution, group),
        )

    beside = gathers * again + reduces
    return replace(
        work,
        forward=longer(work.forward, gathers),
        backward=longer(work.backward, beside),
        inputs=longer(work.inputs, beside),
    )
