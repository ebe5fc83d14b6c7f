"""What follows from a model's sizes: its parameters, one GPU's widths, attention's flop.

Dense layers and layers of routed and shared experts; heads of one width, or multi-head latent
attention, where queries, keys and values come from narrow latents. Left out: biases, and the
correction that balances DeepSeek-V3's experts (one number for each).

References
----------
.. [1] DeepSeek-V3, arXiv:2412.19437, section 2.1.1 (latent attention) and 2.1.2 (experts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock, ParallelismBlock


@dataclass(frozen=True)
class Sizes:
    """Widths of one GPU's share: heads and feed-forward over tp, tokens over cp.

    Attributes
    ----------
    tokens : float
        Tokens of one microbatch in this GPU's cp part.
    resident : float
        Tokens whose norms and residuals this GPU computes: over tp with sequence parallelism.
    hidden, query, key, value, ffn, vocab : float
        Width of the residual stream, of the queries, of the keys, of the values, of the
        feed-forward layer and of the vocabulary on this GPU.
    out : float
        Width of attention's output before its projection.
    heads : float
        Heads of this GPU.
    expert, shared : float
        Width of one routed expert, and of all shared ones together.
    """

    tokens: float
    resident: float
    hidden: float
    query: float
    key: float
    value: float
    out: float
    heads: float
    ffn: float
    vocab: float
    expert: float
    shared: float


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
    """Return one GPU's widths; where tp exceeds the key heads, each is held by several GPUs."""
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


def layer_parameters(model: ModelBlock) -> float:
    """Parameters of one dense transformer layer: attention, MLP and two norms."""
    return _attention_parameters(model) + _mlp_parameters(model, model.ffn_size)


def sparse_layer_parameters(model: ModelBlock) -> float:
    """Parameters of a layer with experts but for those: attention, router, shared experts."""
    shared = _mlp_parameters(model, model.n_shared_experts * expert_width(model))
    return _attention_parameters(model) + shared + float(model.hidden_size * model.n_experts)


def expert_parameters(model: ModelBlock) -> float:
    """Parameters of one routed expert."""
    return _mlp_parameters(model, expert_width(model))


def count_parameters(model: ModelBlock, active: bool = False) -> float:
    """Parameters of a model, embeddings included (tied ones once).

    With ``active`` those that one token passes: of the routed experts, the ones it goes to.
    """
    embeddings = (1.0 if model.tied_embeddings else 2.0) * model.vocab_size * model.hidden_size
    n_sparse = n_sparse_layers(model)
    total = (model.n_layers - n_sparse) * layer_parameters(model) + embeddings + model.hidden_size
    if n_sparse:
        n_experts = model.experts_per_token if active else model.n_experts
        each = sparse_layer_parameters(model) + n_experts * expert_parameters(model)
        total += n_sparse * each
    return total


def attention_flop(model: ModelBlock, n_sequences: float) -> float:
    """Flop of causal attention's forward in one layer, for whole sequences.

    Notes
    -----
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
