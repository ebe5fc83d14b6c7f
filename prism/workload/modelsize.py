"""What follows from a model's sizes: parameters, one GPU's widths, attention's flop, model chunks.

Experts and latent attention as in DeepSeek-V3, arXiv:2412.19437, section 2.1; Mamba-2 as in
arXiv:2405.21060, figure 6. Left out: biases, norms of queries and keys, attention sinks, and the
correction that balances experts (one number for each).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from prism.jobs.job import Job
    from prism.jobs.jobspec.blocks import ModelBlock, ParallelismBlock

GRADIENT_BYTES = {"fp32": 4.0, "bf16": 2.0}
"""Bytes of a gradient that is added up and reduced, by `parallelism.gradient_dtype`."""


MAMBA_CONVOLUTION = 4
"""Tokens that a Mamba-2 layer's convolution sees, in all published models."""


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


class Layer(NamedTuple):
    """Kind of a layer: what mixes tokens, and its feed-forward part; empty where it has none."""

    mixer: Literal["attention", "window", "mamba", ""] = "attention"
    mlp: Literal["dense", "experts", ""] = "dense"


_PATTERN = {
    "*": Layer("attention", ""), "M": Layer("mamba", ""), "-": Layer("", "dense"),
    "E": Layer("", "experts"),
}  # fmt: skip
"""Layers by their letter in a pattern, as in Megatron-LM's hybrid models."""


class Slot(NamedTuple):
    """What one chunk holds: layers, and the model's ends."""

    layers: tuple[Layer, ...]
    embedding: bool
    loss: bool

    @property
    def n_sparse(self) -> int:
        """Layers with experts."""
        return sum(layer.mlp == "experts" for layer in self.layers)

    @property
    def n_dense(self) -> int:
        """Layers without experts."""
        return len(self.layers) - self.n_sparse


def model_layers(model: ModelBlock) -> tuple[Layer, ...]:
    """Kinds of a model's layers, the first one first."""
    if model.layer_pattern:
        return tuple(_PATTERN[letter] for letter in model.layer_pattern)

    def last_of(interval: int, i: int) -> bool:
        return interval > 0 and i % interval == interval - 1

    def layer(i: int) -> Layer:
        after = i - model.n_dense_layers
        full = not model.window or last_of(model.full_attention_interval, i)
        sparse = model.n_experts > 0 and after >= 0 and last_of(model.moe_layer_interval, after)
        return Layer("attention" if full else "window", "experts" if sparse else "dense")

    return tuple(map(layer, range(model.n_layers)))


def head_sizes(model: ModelBlock) -> tuple[float, float]:
    """Width of one head's queries (and keys), and of its values."""
    own = float(model.head_size or model.hidden_size / model.n_heads)
    return own, float(model.v_head_size or own)


def expert_width(model: ModelBlock) -> int:
    """Width of one expert's feed-forward layer."""
    return int(model.expert_ffn_size or model.ffn_size)


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
        expert=expert_width(model) / layout.expert_shards,
        shared=model.n_shared_experts * expert_width(model) / layout.tp,
    )


def _layers_parameters(model: ModelBlock, layers: Iterable[Layer], n_experts: int) -> float:
    """Parameters of layers, those with experts having a given number of routed ones."""
    each = {
        layer: _mixer_parameters(model, layer) + _feed_forward(model, layer, n_experts)
        for layer in set(layers)
    }
    return sum(each[layer] for layer in layers)


def count_parameters(model: ModelBlock, active: bool = False) -> float:
    """Parameters of a model, embeddings included (tied ones once).

    With ``active`` those that one token passes: of the routed experts, the ones it goes to.
    """
    embeddings = (1.0 if model.tied_embeddings else 2.0) * model.vocab_size * model.hidden_size
    n_experts = model.experts_per_token if active else model.n_experts
    layers = _layers_parameters(model, model_layers(model), n_experts)
    return layers + embeddings + model.hidden_size


def attention_flop(model: ModelBlock, n_sequences: float, window: bool = False) -> float:
    """Flop of causal attention's forward in one layer, for whole sequences.

    Scores and their product with the values: ``2 s^2`` times the heads' widths of queries and of
    values, half of it under the causal mask; ``2 s^2 h`` where both add up to ``2 h``. In a sliding
    window of w < s tokens each of them sees at most w, so that ``s^2`` is ``2 s w - w^2``.
    """
    width, s = model.n_heads * sum(head_sizes(model)), float(model.seq_len)
    seen = min(float(model.window), s) if window else s
    return n_sequences * (2.0 * s * seen - seen**2) * width


def scan_flop(model: ModelBlock, n_tokens: float) -> float:
    """Flop of a Mamba-2 scan's forward: 7 a token and value of a state, as Megatron-LM counts.

    The chunked algorithm (arXiv:2405.21060, section 6) does more where chunks are longer than
    states; which, depends on the kernel.
    """
    return 7.0 * n_tokens * mamba_width(model) * model.mamba_state_size


def model_forward_flop(model: ModelBlock, n_sequences: float) -> float:
    """Flop of mixing tokens, forward, in all layers: attention, and scans of Mamba-2."""
    flop = {
        "attention": attention_flop(model, n_sequences),
        "window": attention_flop(model, n_sequences, window=True),
        "mamba": scan_flop(model, n_sequences * model.seq_len),
        "": 0.0,
    }
    return sum(flop[layer.mixer] for layer in model_layers(model))


def mamba_width(model: ModelBlock) -> int:
    """Width of a Mamba-2 layer's heads together."""
    return int(model.mamba_heads * model.mamba_head_size)


def mamba_streams(model: ModelBlock) -> tuple[int, int]:
    """Widths of a Mamba-2 layer: what its convolution passes (x, B, C), and beside it (z, dt)."""
    inside = mamba_width(model)
    return inside + 2 * model.mamba_groups * model.mamba_state_size, inside + model.mamba_heads


def resident_parameters(model: ModelBlock, layer: Layer) -> float:
    """Parameters of one layer that tp does not divide: norms, routers, the way down to latents."""
    hidden = model.hidden_size
    norms = hidden * ((layer.mixer != "") + (layer.mlp != ""))
    router = hidden * model.n_experts if layer.mlp == "experts" else 0
    return float(norms + router) + (
        _latents_down(model) if layer.mixer in ("attention", "window") else 0.0
    )


def _latents_down(model: ModelBlock) -> float:
    """Parameters of the way down to latents, with the latents' norms."""
    q, kv, rope = model.q_lora_rank, model.kv_lora_rank, model.rope_head_size
    return float(model.hidden_size * (q + kv + rope) + q + kv)


def _mlp_parameters(model: ModelBlock, width: int) -> float:
    """Parameters of a feed-forward layer of some width."""
    return model.hidden_size * width * (3.0 if model.gated_mlp else 2.0)


def _feed_forward(model: ModelBlock, layer: Layer, n_experts: int) -> float:
    """Parameters of a layer's second half, its norm included."""
    if not layer.mlp:
        return 0.0
    if layer.mlp == "dense":
        return model.hidden_size + _mlp_parameters(model, model.ffn_size)
    width = expert_width(model)
    shared = _mlp_parameters(model, model.n_shared_experts * width)
    router = model.hidden_size * (model.n_experts + 1.0)  # with the norm
    return router + shared + n_experts * _mlp_parameters(model, width)


def _mixer_parameters(model: ModelBlock, layer: Layer) -> float:
    """Parameters of a layer's first half, its norm included."""
    if not layer.mixer:
        return 0.0
    hidden, heads = model.hidden_size, model.n_heads
    if layer.mixer == "mamba":
        inside, (passed, beside) = mamba_width(model), mamba_streams(model)
        # convolution with bias, dt's bias, A and D of every head, the gated norm
        small = passed * (MAMBA_CONVOLUTION + 1) + 3 * model.mamba_heads + inside
        return float(hidden * (passed + beside + inside) + small + hidden)
    head, v_head = head_sizes(model)
    out = heads * v_head * hidden
    if not model.kv_lora_rank:
        keys = model.n_kv_heads * (head + v_head)
        return hidden * (heads * head + keys) + out + hidden
    q, kv, rope = model.q_lora_rank, model.kv_lora_rank, model.rope_head_size
    up = q * heads * head + kv * heads * (head - rope + v_head)
    return up + out + _latents_down(model) + hidden


def lay_slots(job: Job, counts: Sequence[int]) -> list[list[Slot]]:
    """Lay out chunks by their numbers of layers, as a microbatch passes them, [stage][chunk]."""
    layout = job.parallelism
    last, layers, slots, done = len(counts) - 1, model_layers(job.model), [], 0
    for i, n in enumerate(counts):
        slots.append(Slot(layers[done : done + n], embedding=i == 0, loss=i == last))
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
    total = _layers_parameters(model, slot.layers, n_experts)
    total += table * (slot.embedding + own_output) + (model.hidden_size if slot.loss else 0)
    return total / job.parallelism.tp


def chunk_experts(job: Job, slot: Slot) -> float:
    """Parameters of one chunk's routed experts on one GPU, where ep ranks share them."""
    p, model = job.parallelism, job.model
    if p.ep == 1 or not slot.n_sparse:
        return 0.0
    each = _mlp_parameters(model, expert_width(model))
    return slot.n_sparse * each * model.n_experts / p.ep / p.expert_shards
