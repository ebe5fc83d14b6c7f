"""A dense transformer's kernels on one GPU of a tp x cp group: layer, embedding, loss.

Causal attention with grouped heads, balanced over cp; flash attention; tensor parallelism as in
Megatron, and 8- and 4-bit products as in Transformer Engine: operands are quantized where they are
made, before a sequence is gathered. Left out: dropout, biases, and fusions of kernels beyond those
named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from prism.cluster.machine import Cluster
from prism.workload.kernels import QUANTIZED_BYTES, Kernel, Rates, collective_law
from prism.workload.modelsize import Layer, Sizes, attention_flop, shard_sizes

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock, ParallelismBlock

TP_OVERLAP_COST = 0.2
"""Part of a hidden tp collective that stays visible, as slower compute beside it.

Megatron starts the reduction of a column-parallel layer's input gradient (reduce-scatter, or
all-reduce without sequence parallelism) before the weight gradient's product, which hides it. The
collective still takes memory bandwidth and cores: NCCL runs 16 to 32 blocks beside 132
multiprocessors of an H100. An assumption, not a fit.
"""

ATTENTION_BACKWARD_FLOP = 2.5
"""Flop of flash attention's backward over its forward: five products for two (arXiv:2307.08691)."""

LOSS_BYTES_PER_LOGIT = (16.0, 6.0)
"""Memory traffic of cross entropy per logit, forward and backward [byte].

Forward: cast to float32 (2 + 4), maximum (4), exponential and sum (4 + 2 for its store in half
precision); backward: read the probabilities (4), write the gradient in bfloat16 (2).
"""


@dataclass(frozen=True)
class Transformer:
    """Kernels of a layer, the embedding and the loss, for one microbatch on one GPU."""

    model: ModelBlock
    layout: ParallelismBlock
    cluster: Cluster
    rates: Rates
    layer: Layer = Layer()

    @cached_property
    def sizes(self) -> Sizes:
        """Widths of this GPU's share."""
        return shard_sizes(self.model, self.layout)

    @cached_property
    def attention_forward(self) -> tuple[Kernel, ...]:
        """Forward of a layer's first half."""
        s = self.sizes
        return (
            self._norm("attention_norm"),
            *self._project(),
            *self._cp("attention_keys_all_gather", "all_gather"),
            self._attention(),
            *self.rates.cast("projection_cast", s.tokens * s.out),
            self.rates.gemm("projection", "gemm_attention", s.tokens, s.hidden, s.out),
            *self._leave("attention"),
            self._residual("attention_residual"),
        )

    @cached_property
    def layer_forward(self) -> tuple[Kernel, ...]:
        """Forward of one layer."""
        return (*self.attention_forward, *self.mlp_forward)

    @cached_property
    def mlp_forward(self) -> tuple[Kernel, ...]:
        """Forward of a layer's second half."""
        return (
            self._norm("mlp_norm"),
            *self._enter("mlp"),
            *self._mlp("mlp", self.sizes.ffn),
            *self._leave("mlp"),
            self._residual("mlp_residual"),
        )

    @cached_property
    def layer_backward(self) -> tuple[Kernel, ...]:
        """Backward of one layer, with what it recomputes."""
        again = {"none": (), "selective": self._selected, "full": self.layer_forward}
        return (
            *self._again(again[self.layout.recompute]),
            *self.mlp_backward,
            *self.attention_backward,
        )

    def _again(self, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """Forward kernels as they run again in backward.

        PyTorch stops where it has what was saved for backward: before the last product, whose
        output nothing reads (`torch.utils.checkpoint`, early stop, since 2.1). Megatron does not.
        """
        if self.layout.framework != "megatron" and self.layout.recompute == "full":
            products = [i for i, kernel in enumerate(kernels) if kernel.flop]
            kernels = kernels[: products[-1]] if products else kernels
        return tuple(map(recomputed, kernels))

    @cached_property
    def mlp_backward(self) -> tuple[Kernel, ...]:
        """Backward of a layer's second half."""
        return (
            *self._enter("mlp_backward"),
            *self._mlp_backward("mlp", self.sizes.ffn, leave="mlp"),
            self._norm("mlp_norm_backward", backward=True),
            self._residual("mlp_residual_backward"),
        )

    @cached_property
    def _selected(self) -> tuple[Kernel, ...]:
        """Forward kernels that backward runs again with selective recomputation, as in torchtitan.

        Of the products q, k, v, out, gate (or up), up, down every second one, and whatever is
        neither a product nor attention nor a reduce-scatter; see `prism.workload.memory`.
        """
        s, r, activation = self.sizes, self.rates, self._mlp("mlp", self.sizes.ffn)[1]
        second = (r.gemm("mlp_up", "gemm_mlp", s.tokens, s.ffn, s.hidden),)
        return (
            self._norm("attention_norm"),
            *self._enter("attention"),
            r.gemm("key", "gemm_attention", s.tokens, s.key, s.hidden),
            *self._rope("rope"),
            r.gemm("projection", "gemm_attention", s.tokens, s.hidden, s.out),
            *(() if self.layout.sequence_parallel else self._leave("attention")),
            self._residual("attention_residual"),
            self._norm("mlp_norm"),
            *self._enter("mlp"),
            *(second if self.model.gated_mlp else ()),
            activation,
        )

    @cached_property
    def attention_backward(self) -> tuple[Kernel, ...]:
        """Backward of a layer's first half."""
        s = self.sizes
        return (
            *self._enter("attention_backward"),
            *self._gemm_backward("projection", "gemm_attention", s.hidden, s.out),
            *self._cp("attention_backward_keys_all_gather", "all_gather"),
            self._attention(backward=True),
            *self._cp("keys_reduce_scatter", "reduce_scatter"),
            *self._project_backward(),
            self._norm("attention_norm_backward", backward=True),
            self._residual("attention_residual_backward"),
        )

    @cached_property
    def embedding_forward(self) -> tuple[Kernel, ...]:
        """Look-up in the vocabulary-parallel table."""
        s = self.sizes
        lookup = self.rates.memory("embedding", 4.0 * s.tokens * s.hidden, "embedding")
        return (lookup, *self._leave("embedding"))

    @cached_property
    def embedding_backward(self) -> tuple[Kernel, ...]:
        """Scatter of gradients into the float32 table: read 2 + 4, write 4 bytes a value."""
        s = self.sizes
        scatter = self.rates.memory("embedding_backward", 10.0 * s.tokens * s.hidden, "embedding")
        return (*self._gather("embedding_backward"), replace(scatter, is_weight=True))

    @cached_property
    def loss_forward(self) -> tuple[Kernel, ...]:
        """Last norm, vocabulary-parallel logits, cross entropy."""
        s, r = self.sizes, self.rates
        n_bytes = LOSS_BYTES_PER_LOGIT[0] * s.tokens * s.vocab
        return (
            self._norm("final_norm"),
            *self._gather("loss"),
            r.gemm("logits", "loss", s.tokens, s.vocab, s.hidden, precision="bf16"),
            r.memory("cross_entropy", n_bytes, "loss"),
            # maximum, target logit and sum of exponentials of every token, in float32
            *self._tp("loss_reduce", "all_reduce", 12.0 * s.tokens),
        )

    @cached_property
    def loss_backward(self) -> tuple[Kernel, ...]:
        """Backward of cross entropy, logits and last norm."""
        s = self.sizes
        n_bytes = LOSS_BYTES_PER_LOGIT[1] * s.tokens * s.vocab
        return (
            self.rates.memory("cross_entropy_backward", n_bytes, "loss"),
            *self._gemm_backward("logits", "loss", s.vocab, s.hidden, "loss", precision="bf16"),
            self._norm("final_norm_backward", backward=True),
        )

    def _norm(self, name: str, backward: bool = False) -> Kernel:
        """Norm: bfloat16 input and output; backward reads input and gradient, writes a gradient."""
        values = (3.0 if backward else 2.0) * self.sizes.resident * self.sizes.hidden
        return self.rates.memory(name, 2.0 * values)

    def _residual(self, name: str) -> Kernel:
        """Add two streams: two read, one written."""
        return self.rates.memory(name, 6.0 * self.sizes.resident * self.sizes.hidden)

    def _rope(self, name: str) -> tuple[Kernel, ...]:
        """Rotary positions of queries and keys."""
        if not self.model.rope:
            return ()
        s = self.sizes
        return (self.rates.memory(name, 4.0 * s.tokens * (s.query + s.key)),)

    def _project(self) -> tuple[Kernel, ...]:
        """Project the stream to queries, keys and values."""
        s = self.sizes
        return (
            *self._enter("attention"),
            self.rates.gemm("qkv", "gemm_attention", s.tokens, s.query + s.key + s.value, s.hidden),
            *self._rope("rope"),
        )

    def _project_backward(self) -> tuple[Kernel, ...]:
        """Return the gradients of `_project`."""
        s = self.sizes
        heads = s.query + s.key + s.value
        return (
            *self._rope("rope_backward"),
            *self.rates.cast("qkv_backward_cast", s.tokens * heads),
            *self._gemm_backward("qkv", "gemm_attention", heads, s.hidden, leave="attention"),
        )

    def _gemm_backward(
        self, name: str, kernel_class: str, n: float, k: float, leave: str = "",
        tokens: float = 0.0, groups: float = 1.0, precision: str = "",
    ) -> tuple[Kernel, ...]:  # fmt: skip
        """Input and weight gradient of ``[tokens, k] x [k, n]``, a collective between if named."""
        tokens, r = tokens or self.sizes.tokens, self.rates
        weight = r.gemm(f"{name}_wgrad", kernel_class, k, n, tokens, True, groups, precision)
        weight = replace(weight, is_weight=True)
        return (
            r.gemm(f"{name}_dgrad", kernel_class, tokens, k, n, False, groups, precision),
            *(self._leave_backward(leave, weight.duration) if leave else ()),
            weight,
        )

    def _attention(self, backward: bool = False) -> Kernel:
        """Fused causal attention of this GPU's queries with all keys, balanced over cp."""
        s, p = self.sizes, self.layout
        n_bytes = 2.0 * s.tokens * (s.query + s.out + (s.key + s.value) * p.cp)
        window = self.layer.mixer == "window"
        flop = attention_flop(self.model, p.microbatch_size, window) / (p.tp * p.cp)
        if not backward:
            return self.rates.attention("attention", flop, n_bytes, self._attention_sizes)
        name, flop, n_bytes = "attention_backward", ATTENTION_BACKWARD_FLOP * flop, 2.0 * n_bytes
        return self.rates.attention(name, flop, n_bytes, self._attention_sizes, backward=True)

    @property
    def _attention_sizes(self) -> dict[str, float]:
        """Sizes by which a table tells attention kernels apart."""
        s, p = self.sizes, self.layout
        seq, batch = self.model.seq_len / p.cp, float(p.microbatch_size)
        return {"batch": batch, "heads": s.heads, "seq": seq, "dim": s.query / s.heads}

    @property
    def _up(self) -> float:
        """First products of a feed-forward layer: two where it is gated."""
        return 2.0 if self.model.gated_mlp else 1.0

    def _mlp(
        self, name: str, width: float, kernel_class: str = "gemm_mlp", tokens: float = 0.0,
        groups: float = 1.0,
    ) -> tuple[Kernel, ...]:  # fmt: skip
        """Feed-forward layer of `groups` experts, of all tokens by default."""
        tokens, up, hidden = tokens or self.sizes.tokens, self._up * width, self.sizes.hidden
        activation, r = f"{name}_activation".removeprefix("mlp_"), self.rates
        return (
            r.gemm(f"{name}_up", kernel_class, tokens, up, hidden, groups=groups),
            r.memory(activation, 2.0 * tokens * (up + width)),
            *r.cast(f"{name}_down_cast", tokens * width),
            r.gemm(f"{name}_down", kernel_class, tokens, hidden, width, groups=groups),
        )

    def _mlp_backward(
        self, name: str, width: float, kernel_class: str = "gemm_mlp", tokens: float = 0.0,
        groups: float = 1.0, leave: str = "",
    ) -> tuple[Kernel, ...]:  # fmt: skip
        """Gradients of `_mlp`."""
        tokens, up, hidden = tokens or self.sizes.tokens, self._up * width, self.sizes.hidden
        activation = f"{name}_activation_backward".removeprefix("mlp_")
        return (
            *self._gemm_backward(f"{name}_down", kernel_class, hidden, width, "", tokens, groups),
            self.rates.memory(activation, 2.0 * tokens * (2.0 * up + width)),
            *self.rates.cast(f"{name}_up_backward_cast", tokens * up),
            *self._gemm_backward(f"{name}_up", kernel_class, up, hidden, leave, tokens, groups),
        )

    def _enter(self, name: str) -> tuple[Kernel, ...]:
        """Quantize what a column-parallel product reads, and gather the sequence of it."""
        values, size = (
            self.sizes.resident * self.sizes.hidden,
            QUANTIZED_BYTES[self.rates.precision],
        )
        return (*self.rates.cast(f"{name}_cast", values), *self._gather(name, size))

    def _gather(self, name: str, size: float = 2.0) -> tuple[Kernel, ...]:
        """Gather the sequence's values of some bytes."""
        if not self.layout.sequence_parallel:
            return ()
        return self._tp(f"{name}_all_gather", "all_gather", 0.5 * size * self._stream_bytes)

    def _leave(self, name: str) -> tuple[Kernel, ...]:
        """After a row-parallel product: sum over tp, and scatter the sequence."""
        op_kind = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"
        return self._tp(f"{name}_{op_kind}", op_kind, self._stream_bytes)

    def _leave_backward(self, name: str, hidden_s: float) -> tuple[Kernel, ...]:
        """After a column-parallel product's input gradient: sum, hidden by the weight gradient."""
        out = []
        for k in self._leave(f"{name}_backward"):
            visible = max(k.duration - hidden_s, TP_OVERLAP_COST * k.duration)
            out.append(replace(k, duration=visible, hidden_s=k.duration - visible))
        return tuple(out)

    @property
    def _stream_bytes(self) -> float:
        """Bytes of a microbatch's residual stream in bfloat16."""
        return 2.0 * self.sizes.tokens * self.sizes.hidden

    def _cp(self, name: str, op_kind: str) -> tuple[Kernel, ...]:
        """Communicate keys and values [bfloat16] of the cp group."""
        n_bytes = 2.0 * self.sizes.tokens * self.layout.cp * (self.sizes.key + self.sizes.value)
        # one kernel class for gathering keys and scattering their gradients
        return self._collective(name, "cp_all_gather", op_kind, n_bytes, "cp")

    def _tp(self, name: str, op_kind: str, n_bytes: float) -> tuple[Kernel, ...]:
        """Communicate within the tp group."""
        return self._collective(name, f"tp_{op_kind}", op_kind, n_bytes, "tp")

    def _collective(
        self, name: str, kernel_class: str, op_kind: str, n_bytes: float, group_name: str
    ) -> tuple[Kernel, ...]:
        """One collective as a kernel, or nothing where the group is a single GPU."""
        group = self.cluster.group(group_name)
        if group.n_ranks == 1:
            return ()
        duration = self.cluster.collective_time(op_kind, n_bytes, group)
        law = collective_law(self.cluster, n_bytes, group)
        return (Kernel(name, kernel_class, duration, 0.0, n_bytes, law, group_name),)


def recomputed(kernel: Kernel) -> Kernel:
    """Return a forward kernel as it runs again in backward."""
    return replace(kernel, name=f"recompute_{kernel.name}")
