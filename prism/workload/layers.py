"""Tables of ops: what each kind of layer, and each end of a model, consists of.

Tensor parallelism as in Megatron, causal attention balanced over a sequence's GPUs, a token's
routed experts held by an ep group between them: sent there by an all-to-all, computed as one
grouped product, sent back by another. A new kind of layer is one more table. Left out: dropout,
biases, norms of queries and keys, attention sinks, padding up to a capacity, the loss that balances
experts, shared experts beside the all-to-alls, and sequences of Mamba-2 over several GPUs.

References
----------
.. [1] DeepSeek-V3, arXiv:2412.19437, section 2.1: experts and latent attention; with queries'
   latent alone, Step-3, arXiv:2507.19427.
.. [2] Dao & Gu, arXiv:2405.21060, figure 6: Mamba-2.
.. [3] Nemotron-H, arXiv:2504.03624: layers of one kind each.
.. [4] Yang et al., arXiv:2412.06464: gated delta networks, as in Qwen3-Next.
.. [5] Megatron Core, ``transformer/moe/moe_layer.py``: experts of a latent width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Literal, NamedTuple

from prism.jobs.ops import (
    Attention,
    Exchange,
    Host,
    Loss,
    Norm,
    Op,
    Part,
    Pointwise,
    Product,
    Scan,
    Share,
    Table,
)
from prism.workload.ownlayers import own_end, own_halves

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock

MAMBA_CONVOLUTION = 4  # tokens that a Mamba-2 layer's convolution sees, in every published model


Mixer = Literal["attention", "window", "mamba", "linear", "parallel", ""]
Mlp = Literal["dense", "experts", ""]


class Layer(NamedTuple):
    """Kind of a layer: what mixes tokens, and its feed-forward part; empty where it has none."""

    mixer: Mixer = "attention"
    mlp: Mlp = "dense"
    own: int = -1  # which of the job's own tables it is


_MIXER: dict[str, Mixer] = {
    "*": "attention", "W": "window", "M": "mamba", "L": "linear", "H": "parallel",
}  # fmt: skip
_MLP: dict[str, Mlp] = {"-": "dense", "E": "experts"}
"""Halves of layers by their letter in a pattern: M, *, - and E as in Megatron-LM."""


def model_layers(model: ModelBlock) -> tuple[Layer, ...]:
    """Kinds of a model's layers, the first one first."""
    if model.layers is not None:
        return tuple(chain.from_iterable(
            repeat(Layer("", "", i), layer.repeat)
            for i, layer in enumerate(model.sized(1.0)[0]) if not layer.at
        ))  # fmt: skip
    if model.layer_pattern:
        groups = [Layer(_MIXER.get(g[0], ""), _MLP.get(g[-1], "")) for g in model.layer_groups]
        return tuple(groups * (model.n_layers // len(groups)))

    def last_of(interval: int, i: int) -> bool:
        return interval > 0 and i % interval == interval - 1

    def layer(i: int) -> Layer:
        after = i - model.n_dense_layers
        full = not model.window or last_of(model.full_attention_interval, i)
        sparse = model.n_experts > 0 and after >= 0 and last_of(model.moe_layer_interval, after)
        return Layer("attention" if full else "window", "experts" if sparse else "dense")

    return tuple(map(layer, range(model.n_layers)))


def expert_width(model: ModelBlock) -> int:
    """Width of one expert's feed-forward layer."""
    return int(model.expert_ffn_size or model.ffn_size)


class Sizes(NamedTuple):
    """Widths of one GPU's share: heads and feed-forward over tp, tokens over their shards."""

    tokens: float  # of one microbatch on this GPU
    resident: float  # whose norms and residuals it computes: over tp with sequence parallelism
    hidden: float
    heads: float
    kv_heads: float  # where tp exceeds the key heads, each is held by several GPUs
    head: float
    v_head: float
    ffn: float
    vocab: float


def share_sizes(model: ModelBlock, share: Share) -> Sizes:
    """Size one GPU's share."""
    tokens = share.sequences * model.seq_len / share.shards
    head = float(model.head_size or model.hidden_size / model.n_heads)
    return Sizes(
        tokens=tokens,
        resident=tokens / share.tp if share.sequence_parallel else tokens,
        hidden=float(model.hidden_size),
        heads=model.n_heads / share.tp,
        kv_heads=max(1.0, model.n_kv_heads / share.tp),
        head=head,
        v_head=float(model.v_head_size or head),
        ffn=model.ffn_size / share.tp,
        vocab=model.vocab_size / share.tp,
    )


Half = tuple[Op, ...]


def layer_halves(model: ModelBlock, share: Share, layer: Layer) -> tuple[Half, ...]:
    """Tables of a layer's halves: what mixes tokens, and its feed-forward part."""
    if layer.own >= 0:
        return own_halves(model, share, layer.own)
    s = share_sizes(model, share)
    return _MIXERS[layer.mixer](model, share, s), _MLPS[layer.mlp](model, share, s)


def layer_ops(model: ModelBlock, share: Share, layer: Layer) -> Half:
    """Table of a layer."""
    return tuple(chain.from_iterable(layer_halves(model, share, layer)))


def embedding_ops(model: ModelBlock, share: Share) -> Half:
    """Table of the input embedding."""
    if model.layers is not None:
        return own_end(model, share, "first")
    s = share_sizes(model, share)
    return (Table("embedding", s.tokens, s.hidden, s.vocab),)


def loss_ops(model: ModelBlock, share: Share) -> Half:
    """Table of the last norm, the vocabulary-parallel logits, and the cross entropy."""
    if model.layers is not None:
        return own_end(model, share, "last")
    s = share_sizes(model, share)
    logits = Product(
        "logits", s.tokens, (Part("logits", s.vocab),), s.hidden, "loss", enter="loss",
        own=s.resident, in_bf16=True,
    )  # fmt: skip
    return Norm("final_norm", s.resident, s.hidden), logits, Loss("loss", s.tokens, s.vocab)


def _attention(model: ModelBlock, share: Share, s: Sizes, window: float = 0.0) -> Half:
    """Grouped-query attention, or latent attention [1]_."""
    attention = Attention(
        "attention", s.tokens, share.sequences, float(model.seq_len), float(share.shards),
        s.heads, s.kv_heads, s.head, s.v_head, window,
    )  # fmt: skip
    gated = model.attention_gate
    gate = Pointwise("attention_gate", s.tokens, "swiglu", attention.out, saves=2.0)
    projection = Product(
        "projection", s.tokens, (Part("projection", s.hidden),), attention.out, "gemm_attention",
        leave="attention", own=s.resident, keeps=gated,
    )  # fmt: skip
    latent = model.kv_lora_rank or model.q_lora_rank
    return (
        Norm("attention_norm", s.resident, s.hidden),
        *(_latents(model, s, share, attention) if latent else _qkv(model, s, attention)),
        attention,
        *((gate,) if gated else ()),
        projection,
        Pointwise("attention_residual", s.resident, "residual", s.hidden),
    )


def _qkv(model: ModelBlock, s: Sizes, attention: Attention) -> Half:
    key, value = s.kv_heads * s.head, s.kv_heads * s.v_head
    parts: tuple[Part, ...] = (
        Part("query", attention.query), Part("key", key), Part("value", value)
    )  # fmt: skip
    parts += (Part("gate", attention.out),) if model.attention_gate else ()
    rope = Pointwise("rope", s.tokens, "rope", attention.query + key)
    grouped = s.kv_heads < s.heads
    repeat = Pointwise("repeat_keys", s.tokens, "repeat", attention.query + attention.out)
    layout = Pointwise("head_layout", s.tokens, "layout", attention.query + key + value)
    return (
        Product(
            "qkv", s.tokens, parts, s.hidden, "gemm_attention", enter="attention", own=s.resident
        ),
        *((rope,) if model.rope else ()),
        *((repeat,) if grouped else ()),
        layout,
    )


def _latents(model: ModelBlock, s: Sizes, share: Share, attention: Attention) -> Half:
    """Project to queries, or keys and values, or both, by latents that every tp rank computes."""
    q, kv, rope = float(model.q_lora_rank), float(model.kv_lora_rank), float(model.rope_head_size)
    gathered = "all_gather" if share.sequence_parallel else ""
    summed = "reduce_scatter" if share.sequence_parallel else "all_reduce"
    key, value = s.kv_heads * s.head, s.kv_heads * s.v_head
    pairs: tuple[Part, ...] = (Part("key", key), Part("value", value))
    if kv:  # keys without positions, which one key has for all heads, and values
        pairs = (Part("kv_up", s.heads * (s.head - rope + s.v_head)),)

    def down(name: str, width: float, first: bool) -> Product:
        return Product(
            name, s.resident, (Part(name, width),), s.hidden, "gemm_attention", own=s.resident,
            resident=True, casts=first, keeps=first,
        )  # fmt: skip

    def up(name: str, parts: tuple[Part, ...], rank: float) -> Product:
        made = Product(name, s.tokens, parts, rank, "gemm_attention", own=s.resident)
        direct = replace(made, depth=s.hidden, enter="attention", casts=False, keeps=False)
        return made if rank else direct

    # of latent keys all queries' part is rotated, and the one key, which is given to all heads
    rotated = 0.5 * rope * (3.0 * s.heads + 1.0) if kv else attention.query + key
    return (
        *((down("q_down", q, True),) if q else ()),
        *((down("kv_down", kv + rope, not q),) if kv else ()),
        Norm("latent_norm", s.resident, q + kv),
        Exchange("latents", s.tokens, "tp", gathered, q + kv + rope, summed),
        up("q_up", (Part("q_up", attention.query),), q),
        up("kv_up", pairs, kv),
        *((Pointwise("rope", s.tokens, "rope", rotated),) if model.rope else ()),
    )


def _mamba(model: ModelBlock, share: Share, s: Sizes) -> Half:
    """Mamba-2 [2]_: two products, between them a causal convolution, the scan, a gated norm."""
    heads, tp = model.mamba_heads / share.tp, share.tp
    inside = heads * model.mamba_head_size
    passed = inside + 2.0 * model.mamba_groups * model.mamba_state_size / tp  # x, B and C
    beside = inside + heads  # z and dt
    small = passed * (MAMBA_CONVOLUTION + 1) + 3.0 * heads + inside
    streams = Part("mamba_in", passed + beside)
    return (
        Norm("mamba_norm", s.resident, s.hidden),
        Product(
            "mamba_in", s.tokens, (streams,), s.hidden, "gemm_attention", enter="mamba",
            own=s.resident,
        ),
        Pointwise("convolution", s.tokens, "convolution", passed, saves=2.0),
        Scan(
            "scan", s.tokens, "mamba2", float(model.seq_len), heads, float(model.mamba_head_size),
            float(model.mamba_state_size), passed, small,
        ),
        Pointwise("gated_norm", s.tokens, "gated_norm", inside, saves=2.0),
        Product(
            "mamba_out", s.tokens, (Part("mamba_out", s.hidden),), inside, "gemm_attention",
            leave="mamba", own=s.resident,
        ),
        Pointwise("mamba_residual", s.resident, "residual", s.hidden),
    )  # fmt: skip


def _linear(model: ModelBlock, share: Share, s: Sizes) -> Half:
    """Linear attention by the gated delta rule [4]_: products, a convolution, the rule, a norm."""
    heads, size = model.linear_heads / share.tp, float(model.linear_head_size)
    inside, keys = heads * size, model.linear_key_heads / share.tp * size
    passed = 2.0 * keys + inside  # queries, keys and values
    small = passed * MAMBA_CONVOLUTION + 2.0 * heads + size
    streams = Part("linear_in", passed + inside + 2.0 * heads)  # the gate, decay and step beside
    return (
        Norm("linear_norm", s.resident, s.hidden),
        Product(
            "linear_in", s.tokens, (streams,), s.hidden, "gemm_attention", enter="linear",
            own=s.resident,
        ),
        Pointwise("convolution", s.tokens, "convolution", passed, saves=2.0),
        Scan(
            "delta_rule", s.tokens, "gated_delta", float(model.seq_len), heads, size, size, passed,
            small,
        ),
        Pointwise("gated_norm", s.tokens, "gated_norm", inside, saves=2.0),
        Product(
            "linear_out", s.tokens, (Part("linear_out", s.hidden),), inside, "gemm_attention",
            leave="linear", own=s.resident,
        ),
        Pointwise("linear_residual", s.resident, "residual", s.hidden),
    )  # fmt: skip


def _feed_forward(
    model: ModelBlock, name: str, s: Sizes, width: float, kernel_class: str = "gemm_mlp",
    tokens: float = 0.0, groups: float = 1.0, among: str = "", keeps: bool = True,
    stream: float = 0.0,
) -> Half:  # fmt: skip
    """Two products and the activation between them; `among` names the tp collectives."""
    gated, routed = model.gated_mlp, kernel_class == "gemm_expert"
    rows, stream = tokens or s.tokens, stream or s.hidden
    parts = (Part("gate", width), Part("up", width)) if gated else (Part("up", width),)
    kind = "swiglu" if gated else "gelu"
    activation = f"{name}_activation".removeprefix("mlp_")
    own = 0.0 if routed else s.resident
    up = Product(
        f"{name}_up", rows, parts, stream, kernel_class, groups, enter=among, own=own,
        routed=routed, keeps=keeps,
    )  # fmt: skip
    down = replace(
        up, name=f"{name}_down", parts=(Part("down", stream),), depth=width, enter="",
        leave=among, keeps=True,
    )  # fmt: skip
    return up, Pointwise(activation, rows, kind, width, 2.0 * len(parts), routed), down


def _dense(model: ModelBlock, share: Share, s: Sizes) -> Half:
    return (
        Norm("mlp_norm", s.resident, s.hidden),
        *_feed_forward(model, "mlp", s, s.ffn, among="mlp"),
        Pointwise("mlp_residual", s.resident, "residual", s.hidden),
    )


def _experts(model: ModelBlock, share: Share, s: Sizes) -> Half:
    """Routed experts, of a latent width [5]_ too, and shared ones [1]_."""
    copies = s.tokens * share.expert_tp / share.tp * model.experts_per_token  # in the mean
    width, held = float(expert_width(model)), model.n_experts / share.ep
    router = Product(
        "router", s.resident, (Part("router", float(model.n_experts)),), s.hidden, "gemm_mlp",
        resident=True, in_bf16=True,
    )  # fmt: skip
    wide = (model.shared_ffn_size or model.n_shared_experts * width) / share.tp
    shared = _feed_forward(model, "shared", s, wide, among="shared", keeps=False) if wide else ()
    # latent experts: all tokens are projected before they are sent, and after they are back
    stream = float(model.expert_latent_size or s.hidden)

    def project(name: str, width: float, depth: float) -> Half:
        whole = Product(
            name, s.resident, (Part(name, width),), depth, "gemm_mlp", own=s.resident, resident=True
        )
        return (whole,) if model.expert_latent_size else ()

    # each token to where its experts want it, and what came back summed
    places, ordered = 1.0 + model.experts_per_token, share.ep > 1 and held > 1.0

    def scatter(name: str) -> Op:
        return Pointwise(name, s.resident, "scatter", places * stream)

    def sort(name: str) -> Half:
        own = Pointwise(name, copies, "sort", stream, routed=True)
        return (own,) if ordered else ()

    def to_all(name: str) -> Op:
        sent = s.resident * model.experts_per_token
        return Exchange(name, sent, "ep", "all_to_all", stream, "all_to_all", routed=True)

    def within(op_kind: str, back_kind: str) -> Half:
        """Tensor parallelism inside an expert: its whole tokens, then its parts summed."""
        own = Exchange("experts", copies, "tp", op_kind, stream, back_kind, routed=True)
        return (own,) if share.expert_tp > 1 else ()

    return (
        Norm("mlp_norm", s.resident, s.hidden),
        router,
        Pointwise("routing", s.resident, "routing", float(model.n_experts), saves=4.0),
        *shared,
        *project("latent_down", stream, s.hidden),
        Host("experts_host", s.resident),
        scatter("permute"),
        to_all("dispatch"),
        *within("all_gather", "reduce_scatter"),
        *sort("sort"),
        *_feed_forward(
            model, "expert", s, width / share.expert_tp, "gemm_expert", copies, held, stream=stream
        ),
        *sort("unsort"),
        *within("reduce_scatter", "all_gather"),
        to_all("combine"),
        scatter("unpermute"),
        *project("latent_up", s.hidden, stream),
        Pointwise("mlp_residual", s.resident, "residual", s.hidden),
    )  # fmt: skip


_MIXERS: dict[str, Callable[[ModelBlock, Share, Sizes], Half]] = {
    "attention": _attention,
    "window": lambda model, share, s: _attention(model, share, s, float(model.window)),
    "mamba": _mamba,
    "linear": _linear,
    "parallel": lambda model, share, s: _attention(model, share, s) + _mamba(model, share, s),
    "": lambda model, share, s: (),
}
_MLPS: dict[str, Callable[[ModelBlock, Share, Sizes], Half]] = {
    "dense": _dense,
    "experts": _experts,
    "": lambda model, share, s: (),
}
