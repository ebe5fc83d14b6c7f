"""One step's work: every GPU's kernels by stage and chunk, and the collectives between replicas.

Combines the model, the layout and the cluster into nominal durations, flop and bytes. Parameters
and activations are bfloat16; gradients are reduced in float32 and Adam's state is float32, as in
Megatron-LM and Llama 3. Left out: order and waiting (`prism.jobs.schedule`,
`prism.workload.stepgraph`), how durations vary (`prism.simulation.variability`), fp8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prism.cluster.machine import Cluster, build_cluster
from prism.distributions.library import Library, library_names, load_library
from prism.jobs.job import layer_split
from prism.workload.experts import SparseTransformer
from prism.workload.kernels import (
    LOGNORMAL,
    ChunkWork,
    Kernel,
    Rates,
    build_rates,
    collective_law,
    split_backward,
)
from prism.workload.modelchunks import Slot, chunk_experts, chunk_parameters, lay_slots
from prism.workload.modelsize import attention_flop, count_parameters, resident_parameters
from prism.workload.work import Collective, PerChunk, Workload, nominal_step, scaled

if TYPE_CHECKING:
    from prism.jobs.job import Job

__all__ = [
    "ChunkWork",
    "Collective",
    "Kernel",
    "Workload",
    "build_workload",
    "count_model_flop",
    "count_parameters",
    "nominal_step",
]

PARAMETER_BYTES = 2.0
"""Bytes of a parameter that is gathered: bfloat16."""

GRADIENT_BYTES = 4.0
"""Bytes of a gradient that is reduced: float32 (Llama 3, arXiv:2407.21783, section 3.3.2)."""

OPTIMIZER_BYTES = 30.0
"""Memory traffic of Adam per parameter: read gradient, master copy and two moments in float32
(16), write the last three (12) and the bfloat16 parameter (2); Kingma & Ba, arXiv:1412.6980."""

_DEFAULT_LIBRARY = "h100-healthy"

_REDUCE_CLASS = {
    "tp": "tp_all_reduce",
    "embedding": "embedding_all_reduce",
    "world": "world_all_reduce",
}


def build_workload(job: Job, library: Library | None) -> Workload:
    """Return a job's work with nominal durations.

    Parameters
    ----------
    job : Job
        Model, layout and cluster.
    library : Library or None
        Gives efficiencies and the measured GEMM table. None takes them from the set of the job's
        device, or from ``h100-healthy`` where the device has none.

    Raises
    ------
    PrismError
        If the library lacks a nominal entry.
    """
    if job.model.durations is not None:
        return scaled(_explicit_workload(job), library)
    library = nominal_library(job, library)
    layout, slots = job.parallelism, _slots(job)
    cluster = build_cluster(job, library)
    scale = job.cluster.scale
    rates = replace(
        build_rates(cluster, library),
        compute_factor=scale.compute.time,
        memory_factor=scale.memory.time,
    )
    transformer = SparseTransformer(job.model, layout, cluster, rates)
    experts = _Sharing(
        job, cluster, rates, [[chunk_experts(job, x) for x in row] for row in slots], "expert_dp"
    )
    shared = _Sharing(
        job, cluster, rates, [[chunk_parameters(job, x) for x in row] for row in slots]
    )
    apart = layout.ep > 1
    embedding_bytes = GRADIENT_BYTES * job.model.vocab_size * job.model.hidden_size / layout.tp
    norm_bytes = max(sum(_replicated(job, slot) for slot in row) for row in slots)
    tied = job.model.tied_embeddings and not layout.ends_meet
    workload = Workload(
        chunks=tuple(tuple(_chunk(transformer, slot) for slot in row) for row in slots),
        transfer=_transfer(job, cluster),
        far_transfers=_far_transfers(job, cluster),
        gather=shared.gather(),
        reduce=shared.reduce(),
        replicate=shared.replicate(),
        layernorm_reduce=_all_reduce(cluster, "layernorm_reduce", "tp", norm_bytes)
        if layout.sequence_parallel
        else None,
        embedding_reduce=_all_reduce(cluster, "embedding_reduce", "embedding", embedding_bytes)
        if tied
        else None,
        grad_norm_reduce=_all_reduce(cluster, "grad_norm_reduce", "world", GRADIENT_BYTES),
        optimizer=shared.optimizer(experts),
        param_gather=shared.param_gather(),
        expert_gather=experts.gather() if apart else None,
        expert_reduce=experts.reduce() if apart else None,
        expert_param_gather=experts.param_gather() if apart else (),
        model_flop=count_model_flop(job),
        tokens=float(_sequences(job) * job.model.seq_len),
    )
    return scaled(workload, library)


def nominal_library(job: Job, library: Library | None) -> Library:
    """Return the library of a job's nominal figures: its own, else one for its device."""
    if library is not None:
        return library
    own = f"{job.cluster.device}-healthy"
    return load_library(own if own in library_names() else _DEFAULT_LIBRARY)


def count_model_flop(job: Job) -> float:
    """Count the useful flop of the job's step, without recomputation.

    Notes
    -----
    ``6 N tokens + 3 L A``: N all parameters that a token passes (of routed experts, those it goes
    to) with embeddings, A = 2 s^2 h per sequence the forward of causal attention in one of L
    layers, and backward twice the forward. Per token that is ``6 N + 6 L s h``. Flash attention's
    backward does 2.5 times its forward; the extra half is recomputation and is not counted.

    References
    ----------
    Narayanan et al., arXiv:2104.04473, equation 3 (without its recomputation, causal); Chowdhery
    et al., arXiv:2204.02311, appendix B.
    """
    sequences = _sequences(job)
    dense = 6.0 * count_parameters(job.model, active=True) * sequences * job.model.seq_len
    return dense + 3.0 * job.model.n_layers * attention_flop(job.model, sequences)


def _sequences(job: Job) -> int:
    """Sequences of one step, all replicas."""
    layout = job.parallelism
    return int(layout.dp * layout.microbatches * layout.microbatch_size)


def _slots(job: Job) -> list[list[Slot]]:
    """Lay out chunks [stage][chunk]; without a pipeline they are units or buckets of layers."""
    layout = job.parallelism
    if layout.pp == 1:
        size = 1 if layout.data_parallel in ("fsdp", "hsdp") else layout.bucket_layers
        n_layers = job.model.n_layers
        counts = [min(size, n_layers - first) for first in range(0, n_layers, size)]
    else:
        counts = layer_split(job)
    return lay_slots(job, counts)


def _chunk(transformer: SparseTransformer, slot: Slot) -> ChunkWork:
    """Kernels of one chunk."""
    forward = transformer.layer_forward * slot.n_dense
    backward = transformer.layer_backward * slot.n_dense
    if slot.n_sparse:
        forward = forward + transformer.sparse_forward * slot.n_sparse
        backward = transformer.sparse_backward * slot.n_sparse + backward
    if slot.embedding:
        forward = transformer.embedding_forward + forward
        backward = backward + transformer.embedding_backward
    if slot.loss:
        forward = forward + transformer.loss_forward
        backward = transformer.loss_backward + backward
    halves = split_backward(backward) if transformer.layout.splits else ()
    return ChunkWork(forward, backward, *halves)


def _replicated(job: Job, slot: Slot) -> float:
    """Bytes of one chunk's gradients that every tp rank has a part of.

    Of what it computes for its own tokens: norms, routers, and the way down to latents.
    """
    n_layers = slot.n_dense + slot.n_sparse
    routers = float(slot.n_sparse * job.model.n_experts * job.model.hidden_size)
    return GRADIENT_BYTES * (n_layers * resident_parameters(job.model) + routers)


def _all_reduce(cluster: Cluster, name: str, group_name: str, n_bytes: float) -> Collective | None:
    """One of the all-reduces at the end of a step, None in a group of one."""
    group = cluster.group(group_name)
    if group.n_ranks == 1:
        return None
    duration = cluster.collective_time("all_reduce", n_bytes, group)
    law = collective_law(cluster, n_bytes, group)
    kernel_class = _REDUCE_CLASS[group_name]
    return Collective(name, "all_reduce", kernel_class, duration, n_bytes, law, group_name)


def _transfer(job: Job, cluster: Cluster) -> Collective | None:
    """Activation sent to the next stage: every tp rank sends its part of the stream."""
    layout = job.parallelism
    if layout.pp == 1:
        return None
    n_bytes = _transfer_bytes(job)
    duration = cluster.transfer_time(n_bytes)
    return Collective("transfer", "transfer", "p2p", duration, n_bytes, "residual/p2p", "hop")


def _transfer_bytes(job: Job) -> float:
    """Bytes that one GPU sends to the next stage for a microbatch [byte]."""
    layout = job.parallelism
    tokens = layout.microbatch_size * job.model.seq_len / layout.cp
    return 2.0 * tokens * job.model.hidden_size / layout.tp


def _far_transfers(job: Job, cluster: Cluster) -> dict[int, tuple[Collective, Collective]]:
    """Transfers on links that leave a site: through the uplink, then on the way."""
    out, n_bytes = {}, _transfer_bytes(job)
    for link in cluster.far_links():
        whole, on_the_way = (cluster.transfer_time(n, link) for n in (n_bytes, 0.0))
        cv = cluster.link_spread(link)
        law = "residual/p2p" if cv is None else f"{LOGNORMAL}{cv!r}"
        sent = Collective("transfer", "transfer", "p2p", whole - on_the_way, n_bytes, law, "hop")
        out[link] = sent, replace(sent, duration=on_the_way, bytes=0.0)
    return out


@dataclass(frozen=True)
class _Sharing:
    """How replicas share a stage's parameters: collectives of the dp x cp group, the optimizer.

    Routed experts are shared by fewer ranks, those of the group ``expert_dp``.
    """

    job: Job
    cluster: Cluster
    rates: Rates
    parameters: list[list[float]]  # of one GPU, [stage][chunk]
    own_group: str = ""

    @property
    def mode(self) -> str:
        """Kind of data parallelism; cp ranks of a lone replica still reduce, as in ddp."""
        mode = self.job.parallelism.data_parallel
        return "ddp" if mode == "none" else mode

    @property
    def group(self) -> str:
        """Who shares a stage's parameters."""
        return self.own_group or ("shard" if self.mode == "hsdp" else "dp_cp")

    def gather(self) -> PerChunk:
        """All-gather of a chunk's parameters, with fsdp and hsdp."""
        used = self.mode in ("fsdp", "hsdp")
        return self._each("parameter_gather", "all_gather", PARAMETER_BYTES, used)

    def reduce(self) -> PerChunk:
        """Gradients of a chunk: all-reduce in ddp, else reduce-scatter."""
        op_kind = "all_reduce" if self.mode == "ddp" else "reduce_scatter"
        return self._each("gradient_reduce", op_kind, GRADIENT_BYTES, True)

    def replicate(self) -> PerChunk | None:
        """All-reduce of a GPU's part of a chunk's gradients over hsdp's shard groups."""
        if self.mode != "hsdp":
            return None
        n_bytes = GRADIENT_BYTES / self.cluster.group("shard").n_ranks
        return self._each("gradient_replicate", "all_reduce", n_bytes, True, "replicas")

    def param_gather(self) -> tuple[Collective | None, ...]:
        """zero1: all-gather of a stage's parameters after the optimizer."""
        return tuple(
            self._collective("parameter_gather", "all_gather", PARAMETER_BYTES * sum(row))
            if self.mode == "zero1"
            else None
            for row in self.parameters
        )

    @property
    def n_shards(self) -> int:
        """Ranks that divide the optimizer's work, one in ddp."""
        return 1 if self.mode == "ddp" else self.cluster.group(self.group).n_ranks

    def optimizer(self, experts: _Sharing) -> tuple[Collective, ...]:
        """Adam on one GPU's shards of dense parameters and experts, all of them in ddp."""
        out = []
        for row, more in zip(self.parameters, experts.parameters, strict=True):
            n_bytes = OPTIMIZER_BYTES * sum(row) / self.n_shards
            n_bytes += OPTIMIZER_BYTES * sum(more) / experts.n_shards
            duration = self.rates.memory_time(n_bytes)
            law = "residual/optimizer"
            out.append(Collective("optimizer", "optimizer", "optimizer", duration, n_bytes, law))
        return tuple(out)

    def _each(
        self, name: str, op_kind: str, n_bytes: float, used: bool, among: str = ""
    ) -> PerChunk:
        """One collective per chunk, of `n_bytes` per parameter."""
        return tuple(
            tuple(
                self._collective(name, op_kind, n_bytes * n, among) if used else None for n in row
            )
            for row in self.parameters
        )

    def _collective(
        self, name: str, op_kind: str, n_bytes: float, among: str = ""
    ) -> Collective | None:
        """Return a collective of a group (who shares parameters), None in a group of one."""
        among = among or self.group
        group = self.cluster.group(among)
        if group.n_ranks == 1 or (self.own_group and n_bytes == 0.0):
            return None
        name = f"expert_{name}" if self.own_group else name
        duration = self.cluster.collective_time(op_kind, n_bytes, group)
        law = collective_law(self.cluster, n_bytes, group)
        return Collective(name, op_kind, f"dp_{op_kind}", duration, n_bytes, law, among)


def _of_stage(value: float | tuple[float, ...], stage: int) -> float:
    """Seconds of a stage, given one number or one per stage."""
    return float(value[stage] if isinstance(value, tuple | list) else value)


def _explicit_workload(job: Job) -> Workload:
    """Work of a job with explicit durations: no sizes, so no collectives and no flop.

    A duration is that of one microbatch on a whole stage; its chunks take equal parts. Where no
    duration of weight gradients is given, they are half of a backward: a matrix product's two
    gradients take as many flop.
    """
    layout, given = job.parallelism, job.model.durations
    assert given is not None
    rows = []
    for stage in range(layout.pp):

        def chunk(name: str, seconds: float) -> tuple[Kernel, ...]:
            duration = seconds / layout.vpp * job.cluster.scale.compute.time
            return (Kernel(name, "compute", duration, 0.0, 0.0, "residual/compute"),)

        forward, backward = _of_stage(given.forward_s, stage), _of_stage(given.backward_s, stage)
        work = ChunkWork(chunk("forward", forward), chunk("backward", backward))
        if layout.splits:
            late = given.weight_s
            weight = 0.5 * backward if late is None else _of_stage(late, stage)
            work = replace(
                work, inputs=chunk("backward_input", backward - weight),
                weights=chunk("backward_weight", weight),
            )  # fmt: skip
        rows.append((work,) * layout.vpp)
    nothing: PerChunk = ((None,) * layout.vpp,) * layout.pp
    return Workload(
        chunks=tuple(rows),
        transfer=None,
        gather=nothing,
        reduce=nothing,
        layernorm_reduce=None,
        embedding_reduce=None,
        grad_norm_reduce=None,
        optimizer=(),
        param_gather=(None,) * layout.pp,
        model_flop=0.0,
        tokens=0.0,
    )
