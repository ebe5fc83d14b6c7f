"""What one step does, as data: its kernels and collectives, and how long they would take alone.

A `Workload` holds the nominal work of a job; a calibrated library's two factors scale its
durations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prism.workload.kernels import ChunkWork, is_compute

if TYPE_CHECKING:
    from prism.distributions.library import Library
    from prism.jobs.jobspec.blocks import ParallelismBlock

COMPUTE_FACTOR = "nominal/compute_time_factor"
COMMUNICATION_FACTOR = "nominal/communication_time_factor"
"""Library entries that a calibration adds: factors on nominal durations [1]."""


@dataclass(frozen=True)
class Collective:
    """An op that is one for its whole group, or one GPU's optimizer.

    Attributes
    ----------
    op_kind : str
        ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``transfer`` or ``optimizer``.
    duration : float
        Nominal duration from the last arrival [s].
    bytes : float
        Message size, or memory traffic of the optimizer [byte].
    law : str
        Library entry of its residual.
    group : str
        Who takes part: a group of `Cluster.group`, ``hop`` (two neighbouring stages), or ``""``.
    """

    name: str
    op_kind: str
    kernel_class: str
    duration: float
    bytes: float
    law: str
    group: str = ""


PerChunk = tuple[tuple[Collective | None, ...], ...]


@dataclass(frozen=True)
class Workload:
    """What one step does. Shapes are ``[stage][chunk]`` or ``[stage]``; None is nothing to do.

    Attributes
    ----------
    chunks : tuple
        Kernels; with one stage, chunks are fsdp units or ddp buckets in layer order.
    transfer : Collective or None
        Activation (and its gradient) to a neighbouring stage; None takes no time.
    far_transfers : mapping of int to (Collective, Collective)
        On links that leave a site, by the stage that sends forward: the time a
        transfer holds the uplink, which the next one waits for, and its time on the way.
    gather, reduce, replicate : tuple
        fsdp's parameter all-gather; the gradients' reduction over dp and cp, or within a shard
        group; hsdp's all-reduce of its parts over the shard groups.
    expert_gather, expert_reduce, expert_param_gather : tuple
        The same of routed experts, which fewer ranks share; None or empty without.
    layernorm_reduce, embedding_reduce, grad_norm_reduce : Collective or None
        All-reduces at the end of the step: tp, first and last stage, all ranks.
    optimizer, param_gather : tuple
        Per stage: Adam on one GPU's shard; zero1's parameter all-gather.
    model_flop : float
        Useful work of the job's step, see `count_model_flop` [flop]; 0 if unknown.
    tokens : float
        Tokens of the job's step; 0 if unknown.
    """

    chunks: tuple[tuple[ChunkWork, ...], ...]
    transfer: Collective | None
    gather: PerChunk
    reduce: PerChunk
    layernorm_reduce: Collective | None
    embedding_reduce: Collective | None
    grad_norm_reduce: Collective | None
    optimizer: tuple[Collective, ...]
    param_gather: tuple[Collective | None, ...]
    model_flop: float
    tokens: float
    replicate: PerChunk | None = None
    expert_gather: PerChunk | None = None
    expert_reduce: PerChunk | None = None
    expert_param_gather: tuple[Collective | None, ...] = ()
    far_transfers: Mapping[int, tuple[Collective, Collective]] = field(default_factory=dict)

    def gathers(self, stage: int, chunk: int) -> list[Collective]:
        """All-gathers of a chunk's parameters: of all, or of dense ones and of experts."""
        return _present((self.gather, self.expert_gather), stage, chunk)

    def reduces(self, stage: int, chunk: int) -> list[Collective]:
        """Reductions of a chunk's gradients, one after the other."""
        return _present((self.reduce, self.replicate, self.expert_reduce), stage, chunk)

    def transfers(self, link: int) -> tuple[Collective, ...]:
        """Return what a transfer on a link takes in turn; nothing where it takes no time."""
        if link in self.far_transfers:
            return self.far_transfers[link]
        return (self.transfer,) if self.transfer is not None and self.transfer.duration > 0 else ()


def _present(each: tuple[PerChunk | None, ...], stage: int, chunk: int) -> list[Collective]:
    """Return the collectives of a chunk that there are."""
    found = (rows[stage][chunk] for rows in each if rows is not None)
    return [collective for collective in found if collective is not None]


def nominal_step(workload: Workload, layout: ParallelismBlock) -> float:
    """Step time [s] of the busiest stage: its work, filling and draining, its optimizer.

    Close to a step with every effect at 1, without what the step graph knows of waiting.
    """
    busy = [
        sum(k.duration for chunk in row for k in (*chunk.forward, *chunk.backward))
        for row in workload.chunks
    ]
    chunks = layout.vpp if layout.pp > 1 else 1
    passes = layout.microbatches + (layout.pp - 1) / chunks
    rest = max((o.duration for o in workload.optimizer), default=0.0)
    return max(busy) * passes + rest


def scaled(workload: Workload, library: Library | None) -> Workload:
    """Apply a calibrated library's factors on nominal durations."""
    if library is None or COMPUTE_FACTOR not in library:
        return workload
    compute, communication = library.value(COMPUTE_FACTOR), library.value(COMMUNICATION_FACTOR)

    def one(op: Any) -> Any:
        if op is None:
            return None
        factor = compute if is_compute(op.kernel_class) else communication
        return replace(op, duration=op.duration * factor)

    def chunk(work: ChunkWork) -> ChunkWork:
        halves = work.forward, work.backward, work.inputs, work.weights
        return ChunkWork(*(tuple(map(one, kernels)) for kernels in halves))

    def each(rows: PerChunk) -> PerChunk:
        return tuple(tuple(map(one, row)) for row in rows)

    w = workload
    return replace(
        w,
        chunks=tuple(tuple(map(chunk, row)) for row in w.chunks),
        transfer=one(w.transfer), gather=each(w.gather), reduce=each(w.reduce),
        replicate=None if w.replicate is None else each(w.replicate),
        expert_gather=None if w.expert_gather is None else each(w.expert_gather),
        expert_reduce=None if w.expert_reduce is None else each(w.expert_reduce),
        expert_param_gather=tuple(map(one, w.expert_param_gather)),
        layernorm_reduce=one(w.layernorm_reduce), embedding_reduce=one(w.embedding_reduce),
        grad_norm_reduce=one(w.grad_norm_reduce), optimizer=tuple(map(one, w.optimizer)),
        param_gather=tuple(map(one, w.param_gather)),
        far_transfers={link: (one(a), one(b)) for link, (a, b) in w.far_transfers.items()},
    )  # fmt: skip
