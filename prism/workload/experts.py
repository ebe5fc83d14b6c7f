"""Kernels of layers with experts, and of multi-head latent attention.

A token goes to `experts_per_token` routed experts, which an ep group of data-parallel ranks holds
between them: sent there by an all-to-all, computed as one grouped product, sent back by another.
Left out: padding up to a capacity, the loss that balances experts, shared experts beside the
all-to-alls.

References
----------
.. [1] DeepSeek-V3, arXiv:2412.19437, sections 2.1 (layers) and 3.2 (DualPipe, all-to-alls).
.. [2] Wang et al., arXiv:2408.15664, table 2: the busiest expert has 4 % over its share where
   balanced without a loss, and 52 to 72 % with an auxiliary loss, over a validation set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from prism.workload.kernels import Kernel
from prism.workload.transformer import TP_OVERLAP_COST, Transformer

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock, ParallelismBlock

DEFAULT_IMBALANCE = 1.1
"""Tokens of the busiest ep rank over the mean where the job does not say. An assumption between
the figures of [2]_: a microbatch's counts vary more than a validation set's, and a rank that holds
several experts averages over them."""

ROUTING_BYTES = 16.0
"""Memory traffic of routing per token and expert [byte]: logits read in bfloat16 and written as
scores in float32 (6), scores read to choose the top (4) and to normalise, counts written (6)."""


def expert_imbalance(model: ModelBlock, layout: ParallelismBlock) -> float:
    """Tokens of the busiest expert-parallel rank over the mean.

    A token's experts are distinct, so that no rank has more than `experts_per_token` lets it have;
    with a capacity it drops what is beyond that.
    """
    if layout.ep == 1:
        return 1.0
    most = min(layout.ep, model.n_experts / model.experts_per_token)
    given = layout.expert_imbalance
    busiest = min(DEFAULT_IMBALANCE, most) if given is None else float(given)
    return min(busiest, layout.expert_capacity or busiest)


@dataclass(frozen=True)
class SparseTransformer(Transformer):
    """Kernels of a transformer whose layers may have experts and latent attention."""

    @cached_property
    def layer_forward(self) -> tuple[Kernel, ...]:
        """Forward of one layer, all-to-alls that it overlaps being hidden."""
        return self._overlapped((*self.attention_forward, *self.mlp_forward))

    @cached_property
    def layer_backward(self) -> tuple[Kernel, ...]:
        """Backward of one layer, likewise; one with experts recomputes all of it or nothing."""
        if self.layer.mlp != "experts":
            return super().layer_backward
        whole = (*self.attention_forward, *self.mlp_forward)
        again = whole if self.layout.recompute == "full" else ()
        return self._overlapped((*self._again(again), *self.mlp_backward, *self.attention_backward))

    @cached_property
    def mlp_forward(self) -> tuple[Kernel, ...]:
        """Forward of a layer's second half, its all-to-alls exposed."""
        if self.layer.mlp != "experts":
            return super().mlp_forward
        s, r, n_experts = self.sizes, self.rates, float(self.model.n_experts)
        return (
            self._norm("mlp_norm"),
            r.gemm("router", "gemm_mlp", s.resident, n_experts, s.hidden, precision="bf16"),
            r.memory("routing", ROUTING_BYTES * s.resident * n_experts),
            *self._shared(),
            *r.expert_layer("experts_host"),
            self._scatter("permute"),
            *self._routed(),
            self._scatter("unpermute"),
            self._residual("mlp_residual"),
        )

    @cached_property
    def mlp_backward(self) -> tuple[Kernel, ...]:
        """Backward of a layer's second half."""
        if self.layer.mlp != "experts":
            return super().mlp_backward
        s, n_experts = self.sizes, float(self.model.n_experts)
        return (
            *self.rates.expert_layer("experts_backward_host"),
            self._scatter("unpermute_backward"),
            *self._routed_backward(),
            self._scatter("permute_backward"),
            *self._shared_backward(),
            *self._gemm_backward(
                "router", "gemm_mlp", n_experts, s.hidden, tokens=s.resident, precision="bf16"
            ),
            self._norm("mlp_norm_backward", backward=True),
            self._residual("mlp_residual_backward"),
        )

    @property
    def _copies(self) -> float:
        """Tokens that a rank's routed experts compute, in the mean: every token several times."""
        own = self.sizes.tokens * self.layout.expert_shards / self.layout.tp
        return own * self.model.experts_per_token

    @property
    def _held(self) -> float:
        """Routed experts of one rank."""
        return self.model.n_experts / self.layout.ep

    def _routed(self) -> tuple[Kernel, ...]:
        """Dispatch, routed experts, combine."""
        width, n, held = self.sizes.expert, self._copies, self._held
        return self._unbalanced(
            *self._to_all("dispatch"),
            *self._gather_copies("experts_all_gather", "all_gather"),
            *self._sort("sort"),
            *self.rates.cast("expert_cast", n * self.sizes.hidden),
            *self._mlp("expert", width, "gemm_expert", n, held),
            *self._sort("unsort"),
            *self._gather_copies("experts_reduce_scatter", "reduce_scatter"),
            *self._to_all("combine"),
        )

    def _routed_backward(self) -> tuple[Kernel, ...]:
        """Gradients of `_routed`, with its two all-to-alls."""
        width, n, held = self.sizes.expert, self._copies, self._held
        return self._unbalanced(
            *self._to_all("combine_backward"),
            *self._gather_copies("experts_backward_all_gather", "all_gather"),
            *self._sort("unsort_backward"),
            *self.rates.cast("expert_backward_cast", n * self.sizes.hidden),
            *self._mlp_backward("expert", width, "gemm_expert", n, held),
            *self._sort("sort_backward"),
            *self._gather_copies("experts_backward_reduce_scatter", "reduce_scatter"),
            *self._to_all("dispatch_backward"),
        )

    def _shared(self) -> tuple[Kernel, ...]:
        """Experts that every token goes to: a dense MLP beside the routed ones."""
        if not self.model.n_shared_experts:
            return ()
        mlp = self._mlp("shared", self.sizes.shared)
        return (*self._enter("shared"), *mlp, *self._leave("shared"))

    def _shared_backward(self) -> tuple[Kernel, ...]:
        """Gradients of `_shared`."""
        if not self.model.n_shared_experts:
            return ()
        mlp = self._mlp_backward("shared", self.sizes.shared, leave="shared")
        return (*self._enter("shared_backward"), *mlp)

    def _scatter(self, name: str) -> Kernel:
        """Copy tokens to where their experts want them, or add up what came back."""
        copies = 1.0 + self.model.experts_per_token
        return self.rates.memory(name, 2.0 * copies * self.sizes.resident * self.sizes.hidden)

    def _sort(self, name: str) -> tuple[Kernel, ...]:
        """Bring what came from all ranks into the order of the experts here, or back."""
        if self.layout.ep == 1 or self._held == 1.0:
            return ()
        return (self.rates.memory(name, 4.0 * self._copies * self.sizes.hidden),)

    def _to_all(self, name: str) -> tuple[Kernel, ...]:
        """Send every token to the ranks of its experts, or their outputs back [bfloat16]."""
        n_bytes = 2.0 * self.sizes.resident * self.model.experts_per_token * self.sizes.hidden
        return self._collective(name, "ep_all_to_all", "all_to_all", n_bytes, "ep")

    def _gather_copies(self, name: str, op_kind: str) -> tuple[Kernel, ...]:
        """Tensor parallelism inside an expert: its whole tokens, then its parts summed."""
        if self.layout.expert_shards == 1:
            return ()
        return self._tp(name, op_kind, 2.0 * self._copies * self.sizes.hidden)

    def _unbalanced(self, *kernels: Kernel) -> tuple[Kernel, ...]:
        """Take the busiest rank's share of the work; all wait for it at the next all-to-all."""
        if self.layout.ep == 1:
            return kernels
        factor = expert_imbalance(self.model, self.layout)
        return tuple(replace(k, duration=k.duration * factor, routed=True) for k in kernels)

    def _overlapped(self, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """Leave of all-to-alls what is exposed beside another microbatch's compute.

        DualPipe pairs a forward with a backward of another microbatch, so that each direction's
        all-to-alls run beside as much compute as it has itself ([1]_, section 3.2.1). What of them
        is longer is exposed, and at least `TP_OVERLAP_COST`, which stands for the multiprocessors
        that they take (20 of 132 in [1]_, section 3.2.2).
        """
        sent = sum(k.duration for k in kernels if k.group == "ep")
        if not self.layout.expert_overlap or sent == 0.0:
            return kernels
        work = sum(k.duration for k in kernels if not k.group)
        left = max(sent - work, TP_OVERLAP_COST * sent) / sent
        return tuple(
            replace(k, duration=k.duration * left) if k.group == "ep" else k for k in kernels
        )

    def _project(self) -> tuple[Kernel, ...]:
        """Project the stream, or latents that every tp rank computes, to queries, keys, values."""
        if not self.model.kv_lora_rank:
            return super()._project()
        s, r, m, rows = self.sizes, self.rates, self.model, self.sizes.resident
        kv_down = float(m.kv_lora_rank + m.rope_head_size)
        gathered = self._tp("latents_all_gather", "all_gather", self._latent_bytes)
        latents = rows * (m.q_lora_rank + m.kv_lora_rank)
        return (
            *r.cast("attention_cast", rows * s.hidden),
            r.gemm("q_down", "gemm_attention", rows, m.q_lora_rank, s.hidden),
            r.gemm("kv_down", "gemm_attention", rows, kv_down, s.hidden),
            r.memory("latent_norm", 4.0 * latents),
            *r.cast("latents_cast", latents),
            # a rank has the latents of its own tokens
            *(gathered if self.layout.sequence_parallel else ()),
            r.gemm("q_up", "gemm_attention", s.tokens, s.query, m.q_lora_rank),
            r.gemm("kv_up", "gemm_attention", s.tokens, self._kv_up, m.kv_lora_rank),
            r.memory("rope", self._rope_bytes),
        )

    def _project_backward(self) -> tuple[Kernel, ...]:
        """Gradients of `_project`; those of the latents are summed over tp."""
        if not self.model.kv_lora_rank:
            return super()._project_backward()
        s, r, m, rows = self.sizes, self.rates, self.model, self.sizes.resident
        kv_down = float(m.kv_lora_rank + m.rope_head_size)
        summed = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"
        name, latents = "gemm_attention", rows * (m.q_lora_rank + m.kv_lora_rank)
        return (
            r.memory("rope_backward", self._rope_bytes),
            *r.cast("latents_backward_cast", s.tokens * (self._kv_up + s.query)),
            *self._gemm_backward("kv_up", name, self._kv_up, float(m.kv_lora_rank)),
            *self._gemm_backward("q_up", name, s.query, float(m.q_lora_rank)),
            *self._tp(f"latents_{summed}", summed, self._latent_bytes),
            r.memory("latent_norm_backward", 6.0 * latents),
            *r.cast("down_backward_cast", latents),
            *self._gemm_backward("kv_down", name, kv_down, s.hidden, tokens=rows),
            *self._gemm_backward("q_down", name, float(m.q_lora_rank), s.hidden, tokens=rows),
        )

    @property
    def _kv_up(self) -> float:
        """Width of the keys' part without positions, and of the values, on this GPU."""
        return self.sizes.key + self.sizes.value - self.sizes.heads * self.model.rope_head_size

    @property
    def _rope_bytes(self) -> float:
        """Bytes of rotating all queries' part and the one key, and of giving it to all heads."""
        s = self.sizes
        return 2.0 * s.tokens * self.model.rope_head_size * (3.0 * s.heads + 1.0)

    @property
    def _latent_bytes(self) -> float:
        """Bytes of a microbatch's latents in bfloat16."""
        m = self.model
        width = m.q_lora_rank + m.kv_lora_rank + m.rope_head_size
        return 2.0 * self.sizes.tokens * width
