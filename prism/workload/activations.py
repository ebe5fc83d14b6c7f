"""What a layer's forward keeps for its backward on one GPU, from the table of ops.

References
----------
.. [1] Korthikanti et al., arXiv:2205.05198: activations of a layer, recomputation.
.. [2] torchtitan, ``distributed/activation_checkpoint.py``: selective recomputation by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from prism.jobs.frameworks import FRAMEWORKS
from prism.jobs.ops import (
    BF16_BYTES,
    Attention,
    Loss,
    Norm,
    Op,
    Pointwise,
    Product,
    Scan,
    share_of,
)
from prism.workload.expand import expert_imbalance
from prism.workload.kernelcost import NUMBER_BYTES
from prism.workload.kernels import SCALE_BYTES
from prism.workload.layers import Layer, layer_halves

if TYPE_CHECKING:
    from prism.jobs.job import Job
    from prism.jobs.jobspec.blocks import ParallelismBlock

ACTIVATIONS = ("checkpoints", "norms", "attention", "mlp", "logits")
"""What a forward keeps: inputs of recomputed layers, else what its ops keep, by the half of a layer
they are in."""


FUSED_LOGIT_BYTES = 2.0, 2.0
"""Bytes of a logit kept for a fused loss's backward, and beside it while that runs: the product and
its gradient in bfloat16 (Transformer Engine, flash-attn, torch.compile)."""


class LayerBytes(NamedTuple):
    """Bytes of one layer's activations on one GPU for one microbatch."""

    kept: tuple[float, ...]  # by a forward, with the job's recomputation, by `ACTIVATIONS`
    whole: tuple[float, ...]  # without it
    beside: float  # what else is there while its backward runs


def layer_bytes(job: Job, layer: Layer) -> LayerBytes:
    """Add up what the ops of a layer keep.

    With f = 4 h and as many key heads as heads that is 32 h per token in bfloat16 with Megatron,
    where [1]_ has 34 h with dropout's two masks, 18 h + 8 f in eager PyTorch. Routed ops have the
    busiest rank's share. With a quantized `parallelism.precision` Transformer Engine keeps what
    enters a product quantized; torchao keeps bfloat16.

    Selective recomputation is torchtitan's by op ([2]_): the outputs of attention, of
    reduce-scatters and of every other product are kept as far as backward needs them, so of q, v
    and gate (or up), not of k, out and up. Megatron's, of [1]_, is for the scores, which flash
    attention never keeps.
    """
    model, p, share = job.model, job.parallelism, share_of(job.parallelism)
    framework, halves = FRAMEWORKS[p.framework], layer_halves(model, share, layer)
    entering = stored_bytes(p) if quantizes(p) else BF16_BYTES
    last = [op for half in halves for op in half][-1]  # its result enters the next layer
    busiest, saves = expert_imbalance(model, p), dict(framework.saves)
    repeats = framework.passes["repeat"].forward_launches > 0.0  # keys are kept for every head
    whole, products = dict.fromkeys(ACTIVATIONS, 0.0), dict.fromkeys(ACTIVATIONS, 0.0)
    inside, number = 0.0, 0

    def keep(kind: str, op: Op) -> None:
        """Count what an op keeps, and of that what selective recomputation does."""
        nonlocal inside, number
        factor = busiest if getattr(op, "routed", False) else 1.0
        whole["norms" if isinstance(op, Norm) else kind] += factor * op.kept(entering)
        if isinstance(op, Pointwise) and op.kind in ("swiglu", "gelu"):
            whole[kind] += factor * saves.get(op.kind, 0.0) * op.rows * op.width
            width = op.width * op.saves / BF16_BYTES + last.result / last.rows * op.routed
            inside = max(inside, factor * op.rows * width)
        if isinstance(op, Attention):
            expanded = op.query + op.out - op.keys if repeats else 0.0
            extra = saves.get("attention", 0.0) * op.out + BF16_BYTES * expanded
            whole[kind] += op.rows * extra
            products[kind] += BF16_BYTES * op.rows * op.out
        if isinstance(op, Product):
            own = op.parts[number % 2 :: 2] if not op.leave else ()
            products[kind] += BF16_BYTES * op.rows * sum(part.width for part in own)
            number += len(op.parts)

    for half in halves:
        mixes = any(isinstance(op, Attention | Scan) for op in half)
        for op in half:
            keep("attention" if mixes else "mlp", op)
    stream, divided = BF16_BYTES * last.result, p.tp > 1 and p.sequence_parallel
    again = dict.fromkeys(ACTIVATIONS, 0.0) | {"checkpoints": stream}
    if p.recompute == "selective":
        again = products | {"checkpoints": stream * (1.0 + divided)}
    kept = whole if p.recompute == "none" else again
    gathered = framework.gathered_inputs * divided * stream * p.tp
    recomputed = sum(whole.values()) - sum(kept.values())
    beside = gathered + BF16_BYTES * inside + recomputed
    return LayerBytes(tuple(kept.values()), tuple(whole.values()), beside)


def end_bytes(job: Job, ops: Sequence[Op]) -> LayerBytes:
    """Add up what the ops of a model's end keep, logits among them; nothing of it runs again."""
    p = job.parallelism
    entering = stored_bytes(p) if quantizes(p) else BF16_BYTES
    torch = FRAMEWORKS[p.framework].logit_bytes
    logit, beside = FUSED_LOGIT_BYTES if p.fused_loss else (torch[0], torch[1 + (p.tp > 1)])
    logits = sum(op.rows * op.vocab for op in ops if isinstance(op, Loss))
    kept = sum(op.kept(entering) for op in ops)
    late = sum(op.kept(entering) for op in ops if isinstance(op, Product))
    none = (0.0,) * (len(ACTIVATIONS) - 1)
    return LayerBytes(
        (*none, logit * logits + kept), (*none, BF16_BYTES * logits + late), beside * logits
    )


def quantizes(p: ParallelismBlock) -> bool:
    """Whether operands stay quantized from forward to backward, as in Transformer Engine."""
    return FRAMEWORKS[p.framework].keeps_casts and p.precision != "bf16"


def stored_bytes(p: ParallelismBlock) -> float:
    """Bytes of a number of an operand with its share of scales."""
    return NUMBER_BYTES[p.precision] + SCALE_BYTES.get(p.precision, 0.0)
