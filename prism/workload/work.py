"""What one step does, as data: its kernels and collectives, and how long they would take alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from prism.workload.kernels import ChunkWork, Kernel, is_compute

if TYPE_CHECKING:
    from prism.cluster.power import PowerState
    from prism.distributions.library import Library
    from prism.jobs.jobspec.blocks import ParallelismBlock

COMPUTE_FACTOR = "nominal/compute_time_factor"
COMMUNICATION_FACTOR = "nominal/communication_time_factor"
"""Library entries that a calibration adds: factors on nominal durations [1]."""


@dataclass(frozen=True)
class Collective:
    """An op that is one for its whole group, or one GPU's optimizer."""

    name: str
    op_kind: str  # all_gather, reduce_scatter, all_reduce, transfer or optimizer
    kernel_class: str
    duration: float  # nominal, from the last arrival [s]
    bytes: float  # size of a message, or memory traffic of the optimizer [byte]
    distribution: str  # library entry of its residual
    group: str = ""  # who takes part: of `Cluster.group`, or hop: two neighbouring stages
    messages: float = 1.0  # of this many bytes, one after the other
    beside: bool = False  # runs beside its chunk's kernels, not before or after them
    share: float = 1.0  # of the steps, those that have it; `duration` is the mean over all


Parts = TypeVar("Parts")
PerChunk = tuple[tuple[tuple[Collective, ...], ...], ...]


@dataclass(frozen=True)
class Workload:
    """What one step does, [stage][chunk] or [stage]; None or nothing where there is nothing to do.

    With one stage, chunks are fsdp units or ddp buckets in layer order. Routed experts, which fewer
    ranks share, have collectives of their own.
    """

    chunks: tuple[tuple[ChunkWork, ...], ...]
    gathers: PerChunk  # parameters before they are used, one after the other
    reduces: PerChunk  # gradients over dp_cp; hsdp: in a shard group, then over those
    hides_gradients: bool = True  # reduced beside backward, else after it
    transfer: Collective | None = None  # activation or gradient to a neighbouring stage
    # on links that leave a site, by the stage that sends forward: the time that a transfer holds
    # the uplink, which the next one waits for, and its time on the way
    far_transfers: Mapping[int, tuple[Collective, Collective]] = field(default_factory=dict)
    # all-reduces at the end of the step: tp, first and last stage, all ranks
    layernorm_reduce: Collective | None = None
    embedding_reduce: Collective | None = None
    grad_norm_reduce: Collective | None = None
    exchange: Collective | None = None  # of parameters between units, after or beside the step
    optimizer: tuple[Collective, ...] = ()  # Adam on one GPU's shard
    param_gathers: tuple[tuple[Collective | None, ...], ...] = ()  # zero1's, row by row
    model_flop: float = 0.0  # useful work, see `count_model_flop` [flop]; 0 if unknown
    tokens: float = 0.0  # 0 if unknown
    power: PowerState | None = None  # under a power limit or a locked clock

    def transfers(self, link: int) -> tuple[Collective, ...]:
        """Return what a transfer on a link takes in turn; nothing where it takes no time."""
        if link in self.far_transfers:
            return self.far_transfers[link]
        return (self.transfer,) if self.transfer is not None and self.transfer.duration > 0 else ()


def busiest_s(workload: Workload) -> float:
    """Forward and backward of a microbatch on the busiest stage [s]."""
    return max(
        sum(k.duration for chunk in row for k in (*chunk.forward, *chunk.backward))
        for row in workload.chunks
    )


def nominal_step(workload: Workload, layout: ParallelismBlock) -> float:
    """Step time [s] of the busiest stage: its work, filling and draining, its optimizer.

    Close to a step with every effect at 1, without what the step graph knows of waiting.
    """
    chunks = layout.vpp if layout.pp > 1 else 1
    passes = layout.microbatches + (layout.pp - 1) / chunks
    rest = max((o.duration for o in workload.optimizer), default=0.0)
    return busiest_s(workload) * passes + rest


def scaled(parts: Parts, library: Library | None) -> Parts:
    """Apply a calibrated library's factors to all nominal durations in what is given."""
    if library is None or COMPUTE_FACTOR not in library:
        return parts
    compute, communication = library.value(COMPUTE_FACTOR), library.value(COMMUNICATION_FACTOR)

    def scale(part: Any) -> Any:
        if isinstance(part, tuple):
            found = map(scale, part)
            return part.__class__(*found) if hasattr(part, "_fields") else tuple(found)
        if isinstance(part, dict):
            return {key: scale(value) for key, value in part.items()}
        if isinstance(part, Kernel | Collective):
            factor = compute if is_compute(part.kernel_class) else communication
            if isinstance(part, Kernel) and part.behind_s:
                part = replace(part, behind_s=part.behind_s * factor)
            return replace(part, duration=part.duration * factor)
        if isinstance(part, ChunkWork | Workload):
            return replace(part, **{f.name: scale(getattr(part, f.name)) for f in fields(part)})
        return part

    whole: Parts = scale(parts)
    return whole
