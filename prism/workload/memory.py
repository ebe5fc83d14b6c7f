"""Memory of a job's GPUs, part by part: what must be held at the worst moment of each stage.

Parameters, gradients and optimizer by kind of data parallelism and framework; activations from the
table of ops, by walking the schedule, forward by forward and backward by backward; what a backward
needs beside them; what the allocator loses; an allowance for CUDA and NCCL. Left out: dropout's
masks, scores of attention that is not fused, buffers of all-to-alls, and offloading.

References
----------
.. [1] Rajbhandari et al., arXiv:1910.02054: what ZeRO shards.
.. [2] Qi et al., arXiv:2401.10241: split backwards.
.. [3] Megatron Core user guide, "Distributed Optimizer": bytes per parameter.
.. [4] nanotron, ``optim/gradient_accumulator.py``, ``optim/zero.py``: 20 bytes per parameter with
   DistributedDataParallel, 10 + 14 / d with ZeRO-1; measured as such (layout_sweep).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from scipy.special import ndtr

from prism.cluster.groups import shard_size, sync_units
from prism.jobs.devices import find_device
from prism.jobs.frameworks import FRAMEWORKS
from prism.jobs.job import Job, layer_split
from prism.jobs.ops import BF16_BYTES, TABLE_BYTES, share_of
from prism.jobs.schedule import Schedule, make_schedule
from prism.workload.activations import (
    ACTIVATIONS,
    LayerBytes,
    end_bytes,
    layer_bytes,
    quantizes,
    stored_bytes,
)
from prism.workload.layers import Layer, embedding_ops, loss_ops, model_layers
from prism.workload.modelsize import DTYPE_BYTES, Chunk, Weights, lay_slots, slot_weights
from prism.workload.optimizers import master_bytes, moment_bytes

GIB = 2.0**30
PRIMARY = ("fp8", "mxfp8")
"""Precisions in which weights have no bfloat16 copy beside the quantized ones (``fp8_param_gather``
of Megatron Bridge's recipes)."""
MASTER_GRADIENT_BYTES = 4.0
"""A parameter's gradient in float32, as the optimizer takes it: with a master copy and two moments
([1]_, section 3.1) Megatron-LM's 18 bytes per parameter with gradients in float32 and 20 in
bfloat16, 6 + 12 / d and 4 + 16 / d with its distributed optimizer ([3]_)."""
RESERVE_BYTES = 6 * GIB
"""What CUDA and NCCL take beside, an allowance. Published peaks ask for more, but jobs that ran in
80 GB leave no more (``experiments/studies/layouts/memory.py``)."""
DRIVER_SHARE = 79.1 / 80
"""GiB that a driver offers over the data sheet's GB (H100 and A100 of 80 GB, by torch)."""
SPREAD = 0.13
"""Of an estimate, as a standard deviation of its logarithm: calibrated on which of nanotron's
layouts ran (``experiments/validation/layout-sweep/layout_sweep.py``)."""
NORMAL_95 = 1.645
LEAST_P_FITS = 0.9  # probability of fitting below which a layout is not recommended
WARNED_P_FITS = 0.5  # the same below which a job is warned of: it less likely fits than not
STEADY_ROUNDS = 4
"""Rounds of pp microbatches after which no schedule but GPipe holds more than before."""
PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered shards and buckets",
    "checkpoints": "inputs of recomputed layers",
    "norms": "residual stream, for norms",
    "attention": "attention",
    "mlp": "feed-forward",
    "logits": "logits",
    "workspace": "workspace of a backward",
    "fragmentation": "fragmentation",
    "reserve": "CUDA and NCCL",
}
"""Parts of a GPU's memory by name, in words."""
_NOT_TENSORS = ("fragmentation", "reserve")
_schedule = lru_cache(maxsize=256)(make_schedule)


@dataclass(frozen=True)
class StageMemory:
    """What one GPU of a stage holds at the worst moment."""

    stage: int
    parts: Mapping[str, float]  # [byte], by `PARTS`
    lasting: float  # of them, what is there in every action [byte]
    transient: float  # the most that comes and goes in forwards and backwards, unfragmented [byte]

    @property
    def allocated(self) -> float:
        """What the job's tensors take, as torch's ``max_memory_allocated`` [byte]."""
        return sum(n for name, n in self.parts.items() if name not in _NOT_TENSORS)

    @property
    def total(self) -> float:
        """All of it [byte]."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Chunk:
    """What a model chunk adds on one GPU: parameters, and bytes."""

    parameters: float
    experts: float  # of the parameters, those of routed experts where fewer ranks share them
    weights: float  # bytes, whole
    gradients: float  # bytes, whole, before they are reduced
    kept: tuple[float, ...]  # by a forward, by `ACTIVATIONS`
    late: tuple[float, ...]  # left by the input half of a split backward for the weight half
    workspace: float  # beside a backward
    units: int  # that fsdp gathers one by one: its layers
    tables: float  # bytes, of tables that nobody gathers or reduces


def memory_limit(job: Job) -> float:
    """Memory [byte] that a driver offers of a job's card: nearly as many GiB as it has GB."""
    if job.cluster.memory_gib is not None:
        return job.cluster.memory_gib * GIB
    return DRIVER_SHARE * GIB * find_device(job.cluster.device).memory_bytes / 1e9


def fit_probability(needed: float, limit: float) -> float:
    """Probability that an estimate fits a limit (both in one unit): lognormal, by its spread."""
    return float(ndtr((math.log(limit) - math.log(needed)) / SPREAD))


def memory_figures(job: Job, every: bool = True) -> dict[str, Any] | None:
    """Return what is said of a job's memory; None where it has no estimate.

    Of the fullest GPU, in GiB: ``gib`` and its 90 % interval ``ci_gib``, of it ``allocated_gib`` by
    the job's tensors; what the card offers; the probability that it fits; the stage; the parts; and
    with `every` the same of every stage.
    """
    found = estimate_memory(job, every)
    if found is None:
        return None
    fullest, limit = max(found, key=lambda stage: stage.total), memory_limit(job)
    stages = [
        {
            "stage": stage.stage, "gib": stage.total / GIB, "allocated_gib": stage.allocated / GIB,
            "parts": {name: n / GIB for name, n in stage.parts.items()},
        }
        for stage in (found if every else [fullest])
    ]  # fmt: skip
    of_it = next(stage for stage in stages if stage["stage"] == fullest.stage)
    gib = fullest.total / GIB
    return {
        **of_it, "ci_gib": [gib * math.exp(z * SPREAD) for z in (-NORMAL_95, NORMAL_95)],
        "limit_gib": limit / GIB, "p_fits": fit_probability(fullest.total, limit),
        **({"stages": stages} if every else {}),
    }  # fmt: skip


def estimate_memory(job: Job, every: bool = False) -> list[StageMemory] | None:
    """Estimate the memory of stages' GPUs; None where the model's sizes are not known.

    Of stages with the same chunks only the fullest, or `every` one.

    Per parameter, ddp holds 2 bytes of weight, 4 of gradient and 12 of Adam, with gradients in
    bfloat16 2, 2 and 16 ([3]_); zero1 shards Adam's; fsdp and hsdp all but what is gathered: with
    resharding the units in use and prefetched, and the gradients of two (one computed, one on its
    way); without, a chunk's weights from its first forward and its gradients from its first
    backward, both until its last backward. Resharded gradients are reduced after every microbatch,
    as `prism.workload.stepgraph` does. With framework megatron, quantized weights are there once
    for each order in which they are multiplied, without or beside a bfloat16 copy. PyTorch's
    DistributedDataParallel has all gradients once more in its buckets, in bfloat16; nanotron's
    optimizer gathers zero1's parameters by way of copies ([4]_), when the activations are gone.

    Where the backward is split, a weight half still needs the inputs of the matrix products and
    their outputs' gradients, which are as many bytes as a layer's activations ([2]_, appendix: 32
    s b h; in the list of `layer_bytes` the same sum), recomputed ones too; weights stay
    until the last input half, gradients until the last weight half.

    What comes and goes is fragmented by the framework's factor; what lasts is not. Errors are in
    ``experiments/studies/layouts/memory.py`` and
    ``experiments/validation/layout-sweep/layout_sweep.py``.
    """
    model = job.model
    if model.durations is not None or job.variability.model is not None:
        return None
    p, rows, microbatches = job.parallelism, _chunks(job), job.parallelism.microbatches
    if p.schedule != "gpipe" or p.pp == 1:
        microbatches = min(microbatches, STEADY_ROUNDS * p.pp)
    schedule = _schedule(p.schedule, p.pp, microbatches, len(rows[0]))
    # of stages with the same chunks the first has most in flight, unless weights wait
    stages = [s for s, row in enumerate(rows) if every or p.splits or row not in rows[:s]]
    return [_stage(job, s, rows[s], schedule) for s in stages]


def _chunks(job: Job) -> list[list[_Chunk]]:
    """Lay out the model's chunks [stage][chunk]; without a pipeline a layer is one."""
    counts = layer_split(job) if job.parallelism.pp > 1 else [1] * job.model.depth
    kinds = {layer: layer_bytes(job, layer) for layer in set(model_layers(job.model))}
    share = share_of(job.parallelism)
    ends = [end_bytes(job, make(job.model, share)) for make in (embedding_ops, loss_ops)]
    slots = lay_slots(job, counts)
    weights = slot_weights(job, slots)
    chunks = {slot: _chunk(job, slot, held, kinds, ends) for slot, held in weights.items()}
    return [[chunks[slot] for slot in row] for row in slots]


def _chunk(
    job: Job, slot: Chunk, held: Weights, kinds: dict[Layer, LayerBytes], ends: list[LayerBytes]
) -> _Chunk:
    """Add up what a chunk has."""
    p, layers = job.parallelism, [kinds[layer] for layer in slot.layers]
    layers += ends[:1] * slot.embedding + ends[1:] * slot.loss
    none = (0.0,) * len(ACTIVATIONS)
    kept = [float(sum(kind)) for kind in zip(none, *(x.kept for x in layers), strict=True)]
    late = [float(sum(kind)) for kind in zip(none, *(x.whole for x in layers), strict=True)]
    workspace = max((x.beside for x in layers), default=0.0)
    n = held.total
    gradients = DTYPE_BYTES[p.gradient_dtype] * n
    return _Chunk(
        n, held.routed, _weight_bytes(job) * n, gradients, tuple(kept), tuple(late), workspace,
        max(1, len(slot.layers)), TABLE_BYTES * held.spread,
    )  # fmt: skip


def _weight_bytes(job: Job) -> float:
    """Bytes of a parameter: in bfloat16, or quantized for each order in which it is multiplied."""
    p = job.parallelism
    if not quantizes(p):
        return BF16_BYTES
    copies = 1 if p.precision == "fp8" and not find_device(job.cluster.device).one_order else 2
    return copies * stored_bytes(p) + (0.0 if p.precision in PRIMARY else BF16_BYTES)


def _stage(job: Job, stage: int, row: list[_Chunk], schedule: Schedule) -> StageMemory:
    """Walk a stage's schedule to the moment when it holds most."""
    p, framework = job.parallelism, FRAMEWORKS[job.parallelism.framework]
    n, experts = (sum(getattr(c, key) for c in row) for key in ("parameters", "experts"))
    shards = p.token_shards * (
        shard_size(job) if p.data_parallel == "hsdp" else p.dp // sync_units(job)
    )
    shared = p.expert_ranks // p.ep // sync_units(job)  # ranks that hold the same routed experts
    whole = p.data_parallel in ("ddp", "none")
    own = n if whole else (n - experts) / shards + experts / shared  # whose state is here
    parts = dict.fromkeys(PARTS, 0.0) | {
        "parameters": sum(c.weights for c in row), "gradients": sum(c.gradients for c in row),
        "reserve": RESERVE_BYTES,
        "optimizer": (master_bytes(p) + moment_bytes(p)) * own,
    }  # fmt: skip
    lasting = False  # gathered weights and gradients not yet reduced stay until a chunk is done
    optimizer = 0.0  # of its step alone
    if p.data_parallel in ("fsdp", "hsdp") and shards > 1:
        lasting = not p.reshard_after_forward
        parts["parameters"] = (master_bytes(p) or BF16_BYTES) * own
        parts["optimizer"] = moment_bytes(p) * own
        parts["gradients"] = (MASTER_GRADIENT_BYTES if master_bytes(p) else BF16_BYTES) * own
        if not lasting:
            weights = [c.weights / c.units for c in row for _ in range(c.units)]
            gradients = [c.gradients / c.units for c in row for _ in range(c.units)]
            units = _neighbours(weights, max(2, 1 + p.prefetch))
            parts["gathered"] = units + _neighbours(gradients, 2)
    else:
        if p.gradient_dtype == "bf16" and p.optimizer_dtype == "fp32":
            parts["optimizer"] += MASTER_GRADIENT_BYTES * own
        if framework.bucket_copies and shards > 1:
            parts["gathered"] = BF16_BYTES * n
        if framework.gathers == "group" and p.data_parallel == "zero1" and shards > 1:
            optimizer = BF16_BYTES * (n + own)
    parts["parameters"] += sum(c.tables for c in row)
    there = sum(parts.values()) - RESERVE_BYTES
    worst = _walk(row, schedule, stage, lasting)
    parts["fragmentation"] = (framework.fragmentation[p.tp > 1] - 1.0) * worst.total
    if optimizer > worst.total + parts["fragmentation"]:  # into blocks of what has gone
        parts["gathered"] += optimizer
        parts["fragmentation"] = 0.0
    else:
        parts["gathered"] += worst.gathered
        parts["gradients"] += worst.reduced
        parts["workspace"] = worst.beside
        for name, counts in (("kept", worst.flights), ("late", worst.waiting)):
            for chunk, k in zip(row, counts, strict=True):
                for kind, size in zip(ACTIVATIONS, getattr(chunk, name), strict=True):
                    parts[kind] += k * size
    return StageMemory(stage, parts, there, worst.total)


class _Moment(NamedTuple):
    """What comes and goes of a stage's memory, at one moment [byte]."""

    total: float = -1.0
    gathered: float = 0.0  # weights
    reduced: float = 0.0  # gradients, not yet
    beside: float = 0.0
    flights: Sequence[int] = ()  # microbatches between a chunk's forward and backward [chunk]
    waiting: Sequence[int] = ()  # between the halves of its backward


def _walk(row: list[_Chunk], schedule: Schedule, stage: int, lasting: bool) -> _Moment:
    """Find the moment when most is held.

    Weights and gradients count only where they last: from a chunk's first forward to its last
    backward, and from the first action that adds to them to the last.
    """
    actions, split = schedule[stage], schedule.split_of(stage)
    uses = Counter(a.chunk for a in actions if a.kind == "B") if lasting else Counter()
    backwards, sums = Counter(uses), Counter(uses)
    kept, late = ([sum(getattr(chunk, name)) for chunk in row] for name in ("kept", "late"))
    flights, waiting = [0] * len(row), [0] * len(row)
    there: set[int] = set()
    held = gathered = reduced = 0.0
    best = _Moment(flights=flights, waiting=waiting)
    for kind, c, microbatch in actions:
        chunk, waits = row[c], (c, microbatch) in split
        adds = kind == ("W" if waits else "B")
        # a product's weight gradient needs nothing beside what was kept for it
        beside = chunk.workspace if kind == "B" else 0.0
        if kind == "F":
            held += kept[c]
            flights[c] += 1
            if lasting and c not in there:
                there.add(c)
                gathered += chunk.weights
        elif adds and lasting and sums[c] == uses[c]:
            reduced += chunk.gradients
        total = held + gathered + reduced + beside
        if total > best.total:
            best = _Moment(total, gathered, reduced, beside, tuple(flights), tuple(waiting))
        if kind == "B":
            held += (late[c] if waits else 0.0) - kept[c]
            flights[c] -= 1
            waiting[c] += waits
            backwards[c] -= 1
            gathered -= chunk.weights * (lasting and backwards[c] == 0)
        elif kind == "W":
            held -= late[c]
            waiting[c] -= 1
        if adds:
            sums[c] -= 1
            reduced -= chunk.gradients * (lasting and sums[c] == 0)
    return best


def _neighbours(sizes: list[float], n: int) -> float:
    """Most of n units that follow each other."""
    return max(sum(sizes[i : i + n]) for i in range(max(1, len(sizes) - n + 1)))
