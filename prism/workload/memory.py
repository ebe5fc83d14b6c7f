"""Memory of the busiest GPU of a job: an estimate of what must be held at the worst moment.

Weights, gradients and optimizer by kind of data parallelism; activations by walking the schedule,
forward by forward and backward by backward; what a backward needs beside them; an allowance for
CUDA, NCCL and the allocator. Left out: dropout's masks, scores of attention that is not fused,
buffers of all-to-alls, and offloading.

References
----------
.. [1] Korthikanti et al., arXiv:2205.05198: activations of a layer, recomputation, schedules.
.. [2] Rajbhandari et al., arXiv:1910.02054: what ZeRO shards.
.. [3] Qi et al., arXiv:2401.10241: split backwards.
.. [4] torchtitan, ``distributed/activation_checkpoint.py``: selective recomputation by op.
.. [5] Megatron Core user guide, "Distributed Optimizer": bytes per parameter.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from scipy.special import ndtr

from prism.cluster.devices import find_device
from prism.cluster.groups import shard_size
from prism.jobs.job import layer_split
from prism.jobs.schedule import Schedule, make_schedule
from prism.workload.costs import ONE_ORDER
from prism.workload.expand import expert_imbalance
from prism.workload.frameworks import FRAMEWORKS, family
from prism.workload.kernelcost import NUMBER_BYTES
from prism.workload.kernels import SCALE_BYTES
from prism.workload.layers import Layer, layer_ops, model_layers, share_of, share_sizes
from prism.workload.modelsize import DTYPE_BYTES, Slot, Weights, chunk_weights, lay_slots
from prism.workload.ops import BF16_BYTES, Attention, Pointwise, Product
from prism.workload.optimizers import state_bytes

if TYPE_CHECKING:
    from prism.jobs.job import Job
    from prism.jobs.jobspec.blocks import ParallelismBlock

GIB = 2.0**30
PRIMARY = ("fp8", "mxfp8")
"""Precisions in which weights have no bfloat16 copy beside the quantized ones (``fp8_param_gather``
of Megatron Bridge's recipes)."""
MASTER_GRADIENT_BYTES = 4.0
"""A parameter's gradient in float32, as the optimizer takes it: with a master copy and two moments
([2]_, section 3.1) Megatron-LM's 18 bytes per parameter with gradients in float32 and 20 in
bfloat16, 6 + 12 / d and 4 + 16 / d with its distributed optimizer ([5]_)."""
LOSS_BYTES = {False: (4.0, 10.0), True: (2.0, 2.0)}
"""Bytes of a logit by `parallelism.fused_loss`: kept for the loss's backward, and beside it while
that runs. Torch's cross entropy keeps float32 ([1]_, section 4.3), and has the product in bfloat16
and the gradients of the log-softmax and of its input in float32; a fused one (Transformer Engine,
flash-attn, torch.compile) has the product and its gradient, both in bfloat16."""
LOSS_PARALLEL_BYTES = 14.0
"""The same beside, of torch's loss over a tp group: three sums in float32 and the product
(``torch.distributed.tensor.parallel.loss``)."""
RESERVE_BYTES = 6 * GIB
"""What CUDA, NCCL and the allocator take beside, an allowance. Published peaks ask for more, but
jobs that ran in 80 GB leave no more (``experiments/layouts/memory.py``)."""
DRIVER_SHARE = 79.1 / 80
"""GiB that a driver offers over the data sheet's GB (H100 and A100 of 80 GB, by torch)."""
ERROR_STD = 0.15
"""Of an estimate, as a standard deviation of its logarithm: rms over published peaks of torchtitan
and bigscience (``experiments/layouts/memory.py``). Eager jobs that add up gradients in float32 need
more than it says: nanotron's peaks are 24 % higher in the mean."""
ERROR = 1.645 * ERROR_STD
"""Relative error of an estimate, 90 %."""
LEAST_P_FITS = 0.5
"""Probability of fitting below which a job is warned of, and not recommended."""
STEADY_ROUNDS = 4
"""Rounds of pp microbatches after which no schedule but GPipe holds more than before."""
_schedule = lru_cache(maxsize=256)(make_schedule)


@dataclass(frozen=True)
class Memory:
    """What one GPU of the busiest stage holds at the worst moment [byte]."""

    weights: float  # as far as they are there whole
    gradients: float
    optimizer: float  # Adam's state
    activations: float  # kept from forwards whose backwards are still to come
    workspace: float  # beside them, while a backward runs
    stage: int  # the busiest one
    reserve: float = RESERVE_BYTES

    @property
    def needed(self) -> float:
        """What the job's tensors take [byte]."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace

    @property
    def total(self) -> float:
        """All of it, with the allowance for what is not the job's tensors [byte]."""
        return self.needed + self.reserve

    @property
    def gib(self) -> float:
        """All of it [GiB]."""
        return self.total / GIB


@dataclass(frozen=True)
class _Chunk:
    """What a model chunk adds on one GPU: parameters, and bytes."""

    parameters: float
    experts: float  # of the parameters, those of routed experts where fewer ranks share them
    weights: float  # bytes, whole
    gradients: float  # bytes, whole, before they are reduced
    kept: float  # by a forward
    workspace: float  # beside a backward
    late: float  # left by the input half of a split backward for the weight half


def memory_limit(job: Job) -> float:
    """Memory [byte] that a driver offers of a job's device: nearly as many GiB as it has GB."""
    return DRIVER_SHARE * GIB * find_device(job.cluster.device).memory_bytes / 1e9


def fit_probability(needed: float, limit: float) -> float:
    """Probability that an estimate fits a limit (both in one unit): lognormal, by its error."""
    return float(ndtr(math.log(limit / needed) / ERROR_STD))


def memory_figures(job: Job) -> dict[str, Any] | None:
    """Return what is said of a job's memory; None where it has no estimate.

    Of the fullest GPU and of one device, in GiB; the relative error (90 %); the probability that
    it fits; the stage; and the parts of it, in GiB.
    """
    memory = estimate_memory(job)
    if memory is None:
        return None
    limit = memory_limit(job)
    names = ("weights", "gradients", "optimizer", "activations", "workspace", "reserve")
    return {
        "gib": memory.gib, "limit_gib": limit / GIB, "error": ERROR,
        "p_fits": fit_probability(memory.total, limit), "stage": memory.stage,
        "parts": {name: getattr(memory, name) / GIB for name in names},
    }  # fmt: skip


class _LayerBytes(NamedTuple):
    """Bytes of one layer's activations on one GPU for one microbatch."""

    whole: float
    kept: float  # by a forward, with the job's recomputation
    beside: float  # what else is there while its backward runs


def _layer_bytes(job: Job, layer: Layer) -> _LayerBytes:
    """Add up what the ops of a layer keep.

    All is what the layer's ops keep for backward. With f = 4 h and as many key heads as heads that
    is 32 h per token in bfloat16, where [1]_ has 34 h with dropout's two masks. Routed ops have the
    busiest rank's share. With a quantized `parallelism.precision` Transformer Engine keeps what
    enters a product quantized; torchao keeps bfloat16.

    Selective recomputation is torchtitan's by op ([4]_): the outputs of attention, of
    reduce-scatters and of every other product are kept as far as backward needs them, so of q, v
    and gate (or up), not of k, out and up. Megatron's, of [1]_, is for the scores, which flash
    attention never keeps.
    """
    model, p, share = job.model, job.parallelism, share_of(job.parallelism)
    s, ops = share_sizes(model, share), layer_ops(model, share, layer)
    entering = _stored_bytes(p) if _quantizes(p) else BF16_BYTES
    busiest, saves = expert_imbalance(model, p), dict(FRAMEWORKS[p.framework].saves)
    stream = BF16_BYTES * s.hidden * s.resident
    whole = inside = products = 0.0
    number = 0
    for op in ops:
        factor = busiest if getattr(op, "routed", False) else 1.0
        whole += factor * op.kept(entering)
        if isinstance(op, Pointwise) and op.kind in ("swiglu", "gelu"):
            whole += factor * saves.get(op.kind, 0.0) * op.rows * op.width
            width = op.width * op.saves / BF16_BYTES + s.hidden * op.routed
            inside = max(inside, factor * op.rows * width)
        if isinstance(op, Attention):
            products += op.rows * op.out
        if isinstance(op, Product):
            own = op.parts[number % 2 :: 2] if not op.leave else ()
            products += op.rows * sum(part.width for part in own)
            number += len(op.parts)
    scattered = stream if p.tp > 1 and p.sequence_parallel else 0.0
    selective = stream + BF16_BYTES * products + scattered
    kept = {"none": whole, "selective": selective, "full": stream}[p.recompute]
    # Megatron's sequence parallelism has an input gathered again and its gradient, torch's keeps
    # both inputs gathered and gathers a gradient too
    n_gathered = (2.0 if family(p.framework) == "megatron" else 4.0) * (
        p.tp > 1 and p.sequence_parallel
    )
    beside = BF16_BYTES * (s.tokens * s.hidden * n_gathered + inside) + whole - kept
    return _LayerBytes(whole, kept, beside)


def estimate_memory(job: Job) -> Memory | None:
    """Estimate the memory of the busiest stage's GPUs; None where the model is not known or hybrid.

    Per parameter, ddp holds 2 bytes of weight, 4 of gradient and 12 of Adam, with gradients in
    bfloat16 2, 2 and 16 ([5]_); zero1 shards Adam's; fsdp and hsdp all but what is gathered: with
    resharding the units in use and prefetched, and the gradients of two (one computed, one on its
    way); without, a chunk's weights from its first forward and its gradients from its first
    backward, both until its last backward. Resharded gradients are reduced after every microbatch,
    as `prism.workload.stepgraph` does. With framework megatron, quantized weights are there once
    for each order in which they are multiplied, without or beside a bfloat16 copy.

    Where the backward is split, a weight half still needs the inputs of the matrix products and
    their outputs' gradients, which are as many bytes as a layer's activations ([3]_, appendix: 32
    s b h; in the list of `_layer_bytes` the same sum), recomputed ones too; weights stay
    until the last input half, gradients until the last weight half.

    Errors (``experiments/layouts/memory.py``): -1 % in the mean, 8 % rms against the 13 peaks of
    torchtitan, -13 %, 16 % rms against 48 of Megatron-DeepSpeed in float16; -30 and -28 % against
    15 of its in bfloat16 and 16 of InternEvo, whose optimizers hold more than 16 bytes a parameter.
    """
    model = job.model
    if model.durations is not None or model.layer_pattern or job.variability.model is not None:
        return None
    p, rows, microbatches = job.parallelism, _chunks(job), job.parallelism.microbatches
    if p.schedule != "gpipe" or p.pp == 1:
        microbatches = min(microbatches, STEADY_ROUNDS * p.pp)
    schedule = _schedule(p.schedule, p.pp, microbatches, len(rows[0]))
    # of stages with the same chunks the first has most in flight, unless weights wait
    stages = [s for s, row in enumerate(rows) if p.splits or row not in rows[:s]]
    return max((_peak(job, s, rows[s], schedule) for s in stages), key=lambda memory: memory.total)


def _chunks(job: Job) -> list[list[_Chunk]]:
    """Lay out the model's chunks [stage][chunk]; without a pipeline a layer is one."""
    counts = layer_split(job) if job.parallelism.pp > 1 else [1] * job.model.n_layers
    kinds = {layer: _layer_bytes(job, layer) for layer in set(model_layers(job.model))}
    slots = lay_slots(job, counts)
    weights = chunk_weights(job, slots)
    return [
        [_chunk(job, slot, held, kinds) for slot, held in zip(row, of, strict=True)]
        for row, of in zip(slots, weights, strict=True)
    ]


def _chunk(job: Job, slot: Slot, held: Weights, kinds: dict[Layer, _LayerBytes]) -> _Chunk:
    """Add up what a chunk has."""
    s = share_sizes(job.model, share_of(job.parallelism))
    layers = [kinds[layer] for layer in slot.layers]
    kept, late = sum(x.kept for x in layers), sum(x.whole for x in layers)
    workspace = max((x.beside for x in layers), default=0.0)
    if slot.loss:
        logit, beside = LOSS_BYTES[job.parallelism.fused_loss]
        if not job.parallelism.fused_loss and job.parallelism.tp > 1:
            beside = LOSS_PARALLEL_BYTES
        kept += logit * s.tokens * s.vocab + 4.0 * s.hidden * s.resident
        workspace = max(workspace, beside * s.tokens * s.vocab)
        late += 2.0 * s.tokens * s.vocab + 2.0 * s.hidden * s.resident
    n = held.total
    gradients = DTYPE_BYTES[job.parallelism.gradient_dtype] * n
    return _Chunk(n, held.routed, _weight_bytes(job) * n, gradients, kept, workspace, late)


def _quantizes(p: ParallelismBlock) -> bool:
    """Whether operands stay quantized from forward to backward, as in Transformer Engine."""
    return family(p.framework) == "megatron" and p.precision != "bf16"


def _stored_bytes(p: ParallelismBlock) -> float:
    """Bytes of a number of an operand with its share of scales."""
    return NUMBER_BYTES[p.precision] + SCALE_BYTES.get(p.precision, 0.0)


def _weight_bytes(job: Job) -> float:
    """Bytes of a parameter: in bfloat16, or quantized for each order in which it is multiplied."""
    p = job.parallelism
    if not _quantizes(p):
        return 2.0
    copies = 1 if p.precision == "fp8" and job.cluster.device not in ONE_ORDER else 2
    return copies * _stored_bytes(p) + (0.0 if p.precision in PRIMARY else 2.0)


def _peak(job: Job, stage: int, row: list[_Chunk], schedule: Schedule) -> Memory:
    """Walk a stage's schedule to the moment when it holds most."""
    p = job.parallelism
    n, experts = (sum(getattr(c, key) for c in row) for key in ("parameters", "experts"))
    weights, gradients = ([getattr(c, key) for c in row] for key in ("weights", "gradients"))
    shards = p.cp * (shard_size(job) if p.data_parallel == "hsdp" else p.dp)
    shared = (
        p.cp * p.dp * p.tp // (p.ep * p.expert_shards)
    )  # ranks that hold the same routed experts
    whole = p.data_parallel in ("ddp", "none")
    own = n if whole else (n - experts) / shards + experts / shared  # whose state is here
    held_weights, held_gradients = sum(weights), sum(gradients)
    optimizer = state_bytes(p) * own
    lasting = False  # gathered weights and gradients not yet reduced stay until a chunk is done
    if p.data_parallel in ("fsdp", "hsdp") and shards > 1:
        lasting = not p.reshard_after_forward
        held_weights = 0.0 if lasting else _neighbours(weights, max(2, 1 + p.prefetch))
        held_gradients = MASTER_GRADIENT_BYTES * own
        held_gradients += 0.0 if lasting else _neighbours(gradients, 2)
    elif p.gradient_dtype == "bf16" and p.optimizer_dtype == "fp32":
        optimizer += MASTER_GRADIENT_BYTES * own
    held, gathered, reduced, beside = _worst_moment(row, schedule, stage, lasting)
    return Memory(held_weights + gathered, held_gradients + reduced, optimizer, held, beside, stage)


def _worst_moment(
    row: list[_Chunk], schedule: Schedule, stage: int, lasting: bool
) -> tuple[float, float, float, float]:
    """Activations, gathered weights, whole gradients and workspace when they are most [byte].

    Weights and gradients count only where they last: from a chunk's first forward to its last
    backward, and from the first action that adds to them to the last.
    """
    actions, split = schedule[stage], schedule.split_of(stage)
    uses = Counter(a.chunk for a in actions if a.kind == "B") if lasting else Counter()
    backwards, sums = Counter(uses), Counter(uses)
    there: set[int] = set()
    held = gathered = reduced = 0.0
    best = (-1.0, 0.0, 0.0, 0.0, 0.0)
    for kind, c, microbatch in actions:
        chunk, waits = row[c], (c, microbatch) in split
        adds = kind == ("W" if waits else "B")
        # a product's weight gradient needs nothing beside what was kept for it
        beside = chunk.workspace if kind == "B" else 0.0
        if kind == "F":
            held += chunk.kept
            if lasting and c not in there:
                there.add(c)
                gathered += chunk.weights
        elif adds and lasting and sums[c] == uses[c]:
            reduced += chunk.gradients
        best = max(best, (held + gathered + reduced + beside, held, gathered, reduced, beside))
        if kind == "B":
            held += (chunk.late if waits else 0.0) - chunk.kept
            backwards[c] -= 1
            gathered -= chunk.weights * (lasting and backwards[c] == 0)
        elif kind == "W":
            held -= chunk.late
        if adds:
            sums[c] -= 1
            reduced -= chunk.gradients * (lasting and sums[c] == 0)
    return best[1:]


def _neighbours(sizes: list[float], n: int) -> float:
    """Most of n chunks that follow each other."""
    return max(sum(sizes[i : i + n]) for i in range(max(1, len(sizes) - n + 1)))
