"""What follows from a model's sizes: parameters, one GPU's widths, attention's flop, model chunks.

Experts and latent attention as in DeepSeek-V3, arXiv:2412.19437, section 2.1. Left out: biases, and
the correction that balances its experts (one number for each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prism.jobs.job import Job
    from prism.jobs.jobspec.blocks import ModelBlock, ParallelismBlock

GRADIENT_BYTES = {"fp32": 4.0, "bf16": 2.0}
"""Bytes of a gradient that is added up and reduced, by `parallelism.gradient_dtype`."""


@dataclass(frozen=True)
class Sizes:
    """Widths of one GPU's share: heads and feed-forward over tp, tokens over cp."""

    tokens: float  # of one microbatch in this GPU's cp part
    resident: float  # whose norms and residuals it computes: over tp with sequence parallelism
    hidden: float
    query: float
    key: float
    value: float
    out: float  # attention's output before its projection
    heads: float
    ffn: float
    vocab: float
    expert: float  # one routed expert
    shared: float  # all shared experts together


class Slot(NamedTuple):
    """What one chunk holds: layers without and with experts, and the model's ends."""

    n_dense: int
    n_sparse: int
    embedding: bool
    loss: bool


def head_sizes(model: ModelBlock) -> tuple[float, float]:
    """Width of one head's queries (and keys), and of its values."""
    own = float(model.head_size or model.hidden_size / model.n_heads)
    return own, float(model.v_head_size or own)


def expert_width(model: ModelBlock) -> int:
    """Width of one expert's feed-forward layer."""
    return int(model.expert_ffn_size or model.ffn_size)


def n_sparse_layers(model: ModelBlock) -> int:
    """Layers with experts."""
    return int(model.n_layers - model.n_dense_layers) if model.n_experts else 0


def shard_sizes(model: ModelBlock, layout: ParallelismBlock) -> Sizes:
    """Size one GPU's share; where tp exceeds the key heads, each is held by several GPUs."""
    tokens = layout.microbatch_size * model.seq_len / layout.cp
    head, v_head = head_sizes(model)
    n_keys = max(1.0, model.n_kv_heads / layout.tp)
    return Sizes(
        tokens=tokens,
        resident=tokens / layout.tp if layout.sequence_parallel else tokens,
        hidden=float(model.hidden_size),
        query=model.n_heads * head / layout.tp,
        key=n_keys * head,
        value=n_keys * v_head,
        out=model.n_heads * v_head / layout.tp,
        heads=model.n_heads / layout.tp,
        ffn=model.ffn_size / layout.tp,
        vocab=model.vocab_size / layout.tp,
        expert=expert_width(model) / layout.tp,
        shared=model.n_shared_experts * expert_width(model) / layout.tp,
    )


def _layers_parameters(model: ModelBlock, n_dense: int, n_sparse: int, n_experts: int) -> float:
    """Parameters of layers without and with experts, a given number of these routed in each."""
    attention = _attention_parameters(model)
    total = n_dense * (attention + _mlp_parameters(model, model.ffn_size))
    if n_sparse:
        shared = _mlp_parameters(model, model.n_shared_experts * expert_width(model))
        each = attention + shared + float(model.hidden_size * model.n_experts)
        total += n_sparse * (each + n_experts * _mlp_parameters(model, expert_width(model)))
    return total


def count_parameters(model: ModelBlock, active: bool = False) -> float:
    """Parameters of a model, embeddings included (tied ones once).

    With ``active`` those that one token passes: of the routed experts, the ones it goes to.
    """
    embeddings = (1.0 if model.tied_embeddings else 2.0) * model.vocab_size * model.hidden_size
    n_sparse = n_sparse_layers(model)
    n_experts = model.experts_per_token if active else model.n_experts
    layers = _layers_parameters(model, model.n_layers - n_sparse, n_sparse, n_experts)
    return layers + embeddings + model.hidden_size


def attention_flop(model: ModelBlock, n_sequences: float) -> float:
    """Flop of causal attention's forward in one layer, for whole sequences.

    Scores and their product with the values: ``2 s^2`` times the heads' widths of queries and of
    values, half of it under the causal mask; ``2 s^2 h`` where both add up to ``2 h``.
    """
    width = model.n_heads * sum(head_sizes(model))
    return n_sequences * float(model.seq_len) ** 2 * width


def resident_parameters(model: ModelBlock) -> float:
    """Parameters of one layer that tp does not divide: norms, and the way down to latents."""
    q, kv, rope = model.q_lora_rank, model.kv_lora_rank, model.rope_head_size
    down = model.hidden_size * (q + kv + rope) + q + kv  # with the latents' norms
    return down + 2.0 * model.hidden_size


def _mlp_parameters(model: ModelBlock, width: int) -> float:
    """Parameters of a feed-forward layer of some width."""
    return model.hidden_size * width * (3.0 if model.gated_mlp else 2.0)


def _attention_parameters(model: ModelBlock) -> float:
    """Parameters of one layer's attention, and the layer's two norms."""
    head, v_head = head_sizes(model)
    hidden, heads = model.hidden_size, model.n_heads
    out = heads * v_head * hidden
    if not model.kv_lora_rank:
        keys = model.n_kv_heads * (head + v_head)
        return hidden * (heads * head + keys) + out + 2.0 * hidden
    q, kv, rope = model.q_lora_rank, model.kv_lora_rank, model.rope_head_size
    up = q * heads * head + kv * heads * (head - rope + v_head)
    return up + out + resident_parameters(model)


def lay_slots(job: Job, counts: Sequence[int]) -> list[list[Slot]]:
    """Lay out chunks by their numbers of layers, as a microbatch passes them, [stage][chunk]."""
    layout = job.parallelism
    last, first_sparse = len(counts) - 1, job.model.n_layers - n_sparse_layers(job.model)
    slots, done = [], 0
    for i, n in enumerate(counts):
        n_dense = min(n, max(0, first_sparse - done))
        slots.append(Slot(n_dense, n - n_dense, embedding=i == 0, loss=i == last))
        done += n
    return layout.virtual_stages(len(slots) // layout.pp).rows(slots)


def chunk_parameters(job: Job, slot: Slot) -> float:
    """Parameters of one chunk on one GPU; a tied matrix counts once per stage.

    Routed experts that ep ranks hold between them are `chunk_experts`.
    """
    model = job.model
    table = float(model.vocab_size * model.hidden_size)
    own_output = slot.loss and not (model.tied_embeddings and job.parallelism.ends_meet)
    n_experts = model.n_experts if job.parallelism.ep == 1 else 0
    total = _layers_parameters(model, slot.n_dense, slot.n_sparse, n_experts)
    total += table * (slot.embedding + own_output) + (model.hidden_size if slot.loss else 0)
    return total / job.parallelism.tp


def chunk_experts(job: Job, slot: Slot) -> float:
    """Parameters of one chunk's routed experts on one GPU, where ep ranks share them."""
    p, model = job.parallelism, job.model
    if p.ep == 1 or not slot.n_sparse:
        return 0.0
    each = _mlp_parameters(model, expert_width(model))
    return slot.n_sparse * each * model.n_experts / p.ep / p.tp
