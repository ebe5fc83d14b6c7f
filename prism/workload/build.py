"""One step's work: every GPU's kernels by stage and chunk, and the collectives between replicas.

Parameters and activations are bfloat16; gradients are reduced in `parallelism.gradient_dtype`, and
Adam's state is float32. In 8 and 4 bits parameters are gathered quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeVar

from prism.cluster.machine import Cluster, build_cluster
from prism.cluster.power import gpu_power
from prism.distributions.library import Library, library_names, load_library
from prism.jobs.devices import device_key
from prism.jobs.frameworks import Framework
from prism.jobs.job import Job, layer_split
from prism.jobs.ops import Share
from prism.workload.costs import build_costs
from prism.workload.energy import under_power
from prism.workload.expand import Expander, Kernels
from prism.workload.host import Host
from prism.workload.kernels import (
    LOGNORMAL,
    ChunkWork,
    Kernel,
    collective_distribution,
    split_backward,
)
from prism.workload.layers import Layer, model_layers
from prism.workload.modelsize import (
    DTYPE_BYTES,
    Chunk,
    count_parameters,
    count_tensors,
    forward_flop,
    lay_slots,
    passed_on,
    slot_ops,
    slot_weights,
)
from prism.workload.optimizers import orthogonal_matrices, update_seconds
from prism.workload.sharing import Sharing, beside, collective, contended
from prism.workload.work import Collective, PerChunk, Workload, nominal_step, scaled

__all__ = [
    "ChunkWork", "Collective", "Kernel", "Workload", "build_workload", "count_model_flop",
    "count_parameters", "nominal_library", "nominal_step",
]  # fmt: skip

T = TypeVar("T")
NORM_BYTES = 4.0  # the gradients' norm: one number in float32

_DEFAULT_LIBRARY = "h100-healthy"


def build_workload(job: Job, library: Library | None) -> Workload:
    """Return a job's work with nominal durations, from its device's library where None is given."""
    if job.model.durations is not None:
        return scaled(_explicit_workload(job), library)
    library = nominal_library(job, library)
    layout, model, slots = job.parallelism, job.model, _slots(job)
    expander = make_expander(job, library)
    cluster, costs = expander.cluster, expander.costs
    fused = expander.framework.fused_products
    layers = {layer: expander.layer(layer) for layer in dict.fromkeys(model_layers(model))}
    gradient_bytes = DTYPE_BYTES[layout.gradient_dtype]
    dense = Sharing(cluster, layout, "shard" if layout.data_parallel == "hsdp" else "dp_cp")
    experts = Sharing(cluster, layout, "expert_dp", "expert_")
    weights = slot_weights(job, slots)
    held = {slot: (w.others, w.routed) for slot, w in weights.items()}
    of_stage = [[sum(n) for n in zip(*(held[slot] for slot in row), strict=True)] for row in slots]

    def per_chunk(make: Callable[[Chunk, bool], T]) -> tuple[tuple[T, ...], ...]:
        """Make something for each chunk, once of those alike; apart for a stage's first."""
        made = cache(make)
        return tuple(tuple(made(slot, i == 0) for i, slot in enumerate(row)) for row in slots)

    def gathers(slot: Chunk) -> tuple[Collective, ...]:
        others, routed = held[slot]
        return dense.gathers(others) + experts.gathers(routed)

    def reduces(slot: Chunk) -> tuple[Collective, ...]:
        others, routed = held[slot]
        return dense.reduces(others) + experts.reduces(routed)

    def chunk(slot: Chunk, first: bool) -> ChunkWork:
        """Give a chunk's kernels, longer by what is sent beside them."""
        work = _chunk(expander, layers, slot)
        if layout.overlap:
            sent = gathers(slot), reduces(slot) if dense.hides_gradients else ()
            if first and not dense.is_full:
                sent = beside(sent[0]), beside(sent[1])
            again = dense.is_full and layout.reshard_after_forward  # else once for all microbatches
            cost = costs.overlap_cost / (1 if again else layout.microbatches)
            work = contended(cost, again, group, work, *sent)
        if transfer is not None and layout.p2p == "async":
            sending = transfer.duration - cluster.transfer_time(0.0)  # nothing works on the way
            both = (replace(transfer, duration=sending),)
            work = contended(costs.overlap_cost, False, group, work, both, both)
        return work

    def update(row: list[Chunk], a: float, b: float) -> Collective:
        matrices = orthogonal_matrices(
            layout, lambda: (op for slot in row for op in slot_ops(job, slot))
        )
        parts = zip((a, b), (dense.n_shards, experts.n_shards), matrices, strict=True)
        found = [update_seconds(layout, costs, *part) for part in parts]
        seconds, n_bytes = (sum(values) for values in zip(*found, strict=True))
        distribution = "residual/optimizer"
        return Collective("optimizer", "optimizer", "optimizer", seconds, n_bytes, distribution)

    def all_reduce(name: str, n_bytes: float, among: str) -> Collective | None:
        return collective(cluster, f"{name}_reduce", "all_reduce", n_bytes, among)

    def exchange() -> Collective | None:
        tier, group = job.cluster.sync_tier, cluster.group("sync")
        if tier is None or cluster.layout.units == 1:
            return None
        parts = max(1, tier.sync_overlap)
        share = parts / tier.sync_every
        seconds, n_bytes = max(
            tuple(map(sum, zip(dense.exchange(a, parts), experts.exchange(b, parts), strict=True)))
            for a, b in of_stage
        )
        return Collective(
            "parameter_exchange", "all_reduce", "dp_sync_all_reduce", share * seconds, n_bytes,
            collective_distribution(cluster, n_bytes, group), "sync", share=share,
            beside=tier.sync_overlap > 0,
        )  # fmt: skip

    embedding_bytes = gradient_bytes * model.vocab_size * model.hidden_size / layout.tp
    norm_bytes = gradient_bytes * max(sum(weights[s].resident for s in row) for row in slots)
    tied = model.tied_embeddings and not layout.ends_meet
    transfer, far_transfers = _transfers(job, cluster)
    group = "tp" if layout.tp > 1 else ""  # whose ranks send at the same time
    counted = per_chunk(lambda slot, _: count_tensors(slot_ops(job, slot), fused))
    tensors = [[sum(n) for n in zip(*row, strict=True)] for row in counted]
    workload = Workload(
        chunks=per_chunk(chunk),
        hides_gradients=dense.hides_gradients,
        gathers=per_chunk(lambda slot, _: gathers(slot)),
        reduces=per_chunk(lambda slot, _: reduces(slot)),
        transfer=transfer,
        far_transfers=far_transfers,
        layernorm_reduce=all_reduce("layernorm", norm_bytes, "tp")
        if layout.sequence_parallel
        else None,
        embedding_reduce=all_reduce("embedding", embedding_bytes, "embedding") if tied else None,
        grad_norm_reduce=all_reduce("grad_norm", NORM_BYTES, "world"),
        exchange=exchange(),
        optimizer=tuple(update(row, *n) for row, n in zip(slots, of_stage, strict=True)),
        param_gathers=tuple(
            tuple(
                who.param_gather(n[i], count[i]) for n, count in zip(of_stage, tensors, strict=True)
            )
            for i, who in enumerate((dense, experts))
        ),
        model_flop=count_model_flop(job),
        tokens=float(job.tokens_per_step),
    )
    pace = _host(job, library, expander.framework).pace
    return scaled(under_power(job, workload, costs.moved, pace), library)


def make_expander(job: Job, library: Library) -> Expander:
    """Return what makes a job's kernels."""
    # a library of a device that no job can name says how it varies, not how long a job's takes
    tables = library if device_key(library.device) else nominal_library(job, None)
    cluster, costs = build_cluster(job, library), build_costs(job, library, tables)
    return Expander(job.model, job.parallelism, cluster, costs)


def _host(job: Job, library: Library, framework: Framework) -> Host:
    """Give what launching takes in a job."""
    forward, backward = (s * job.variability.host_scale for s in framework.launch_s)
    gap_s = library.value("nominal/kernel_launch_s") * job.cluster.scale.memory.time
    wait = "nominal/expert_layer_s"
    wait_s = library.value(wait) if wait in library else 0.0
    return Host((forward, backward), gap_s, wait_s * job.variability.host_scale)


def nominal_library(job: Job, library: Library | None) -> Library:
    """Return the library of a job's nominal figures: its own, else one for its device."""
    if library is not None:
        return library
    own = f"{job.cluster.device}-healthy"
    return load_library(own if own in library_names() else _DEFAULT_LIBRARY)


def count_model_flop(job: Job) -> float:
    """Count the useful flop of the job's step, without recomputation.

    Of a transformer ``6 N tokens + 3 A``: N all parameters that a token passes (of routed experts,
    those it goes to) with embeddings, A the forward of causal attention in every layer, 2 s^2 h per
    sequence and layer (less in a window; scans of Mamba-2 with it), and backward twice the forward.
    Flash attention's backward does 2.5 times its forward; the extra half is recomputation and is
    not counted. Narayanan et al., arXiv:2104.04473,
    equation 3 (without its recomputation, causal); Chowdhery et al., arXiv:2204.02311, appendix B.
    """
    layout = job.parallelism
    each = forward_flop(job.model, float(layout.microbatch_size))
    return 3.0 * layout.dp * layout.microbatches * each


def _slots(job: Job) -> list[list[Chunk]]:
    """Lay out chunks [stage][chunk]; without a pipeline they are units or buckets of layers."""
    layout, n_layers = job.parallelism, job.model.depth
    if layout.pp > 1:
        return lay_slots(job, layer_split(job))
    size = 1 if layout.data_parallel in ("fsdp", "hsdp") else layout.bucket_layers
    return lay_slots(job, [min(size, n_layers - first) for first in range(0, n_layers, size)])


def _chunk(
    expander: Expander, layers: dict[Layer, tuple[Kernels, Kernels]], slot: Chunk
) -> ChunkWork:
    """Kernels of one chunk."""
    of = [layers[layer] for layer in slot.layers]
    forward = tuple(k for layer in of for k in layer[0])
    backward = tuple(k for layer in reversed(of) for k in layer[1])
    if slot.embedding:
        first, last = expander.embedding()
        forward, backward = first + forward, backward + last
    if slot.loss:
        first, last = expander.loss()
        forward, backward = forward + first, last + backward
    halves = split_backward(backward) if expander.layout.splits else ()
    return ChunkWork(forward, backward, *halves)


def _transfers(
    job: Job, cluster: Cluster
) -> tuple[Collective | None, dict[int, tuple[Collective, Collective]]]:
    """Lay out what one GPU sends to the next stage: its part of the stream, on far links in two.

    Where layers end in streams of several widths, all stages send the widest.
    """
    layout = job.parallelism
    share = Share(float(layout.microbatch_size), shards=layout.token_shards)
    n_bytes = 2.0 * passed_on(job.model, share) / layout.tp
    duration, distribution = cluster.transfer_time(n_bytes), "residual/p2p"
    sent, far = (
        Collective("transfer", "transfer", "p2p", duration, n_bytes, distribution, "hop"),
        {},
    )
    for link, tier in cluster.far_links.items():
        whole, way = (cluster.transfer_time(n, link) for n in (n_bytes, 0.0))
        own = replace(
            sent, distribution=distribution if tier.cv is None else f"{LOGNORMAL}{tier.cv!r}"
        )
        far[link] = replace(own, duration=whole - way), replace(own, duration=way, bytes=0.0)
    return (sent if layout.pp > 1 else None), far


def _explicit_workload(job: Job) -> Workload:
    """Work of a job with explicit durations: no sizes, so no collectives and no flop.

    A duration is that of one microbatch on a whole stage; its chunks take equal parts. Where no
    duration of weight gradients is given, they are half of a backward: a matrix product's two
    gradients take as many flop.
    """
    layout, given = job.parallelism, job.model.durations
    factor = job.cluster.scale.compute.time * gpu_power(job).slowdown
    assert given is not None

    def seconds(value: float | tuple[float, ...], stage: int) -> float:
        return float(value[stage] if isinstance(value, tuple | list) else value)

    def chunk(name: str, seconds: float) -> tuple[Kernel, ...]:
        duration = seconds / layout.vpp * factor
        return (Kernel(name, "compute", duration, 0.0, 0.0, "residual/compute"),)

    rows = []
    for stage in range(layout.pp):
        forward, backward = seconds(given.forward_s, stage), seconds(given.backward_s, stage)
        work = ChunkWork(chunk("forward", forward), chunk("backward", backward))
        if layout.splits:
            weight = 0.5 * backward if given.weight_s is None else seconds(given.weight_s, stage)
            work = replace(
                work, inputs=chunk("backward_input", backward - weight),
                weights=chunk("backward_weight", weight),
            )  # fmt: skip
        rows.append((work,) * layout.vpp)
    nothing: PerChunk = (((),) * layout.vpp,) * layout.pp
    return Workload(tuple(rows), nothing, nothing)
