"""Kernels of layers that lack a half, and of Mamba-2 layers: approximate, no kernel was measured.

A Mamba-2 layer has two products (in and out), and between them a causal convolution, a chunked scan
and a gated norm, each of which is billed for its bytes, the scan for its flop at attention's
rate as well. Tensor parallelism divides heads and groups, as in Megatron-LM. Left out: context
parallelism's exchange of states, and the scan's state between chunks.

References
----------
.. [1] Dao & Gu, arXiv:2405.21060: the layer (figure 6) and its chunked algorithm (section 6).
.. [2] Nemotron-H, arXiv:2504.03624: layers of one kind each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from prism.workload.experts import SparseTransformer
from prism.workload.kernels import Kernel
from prism.workload.modelsize import mamba_streams, mamba_width, scan_flop


@dataclass(frozen=True)
class HybridTransformer(SparseTransformer):
    """Kernels of a layer that may have Mamba-2 in place of attention, or only one of its halves."""

    @cached_property
    def attention_forward(self) -> tuple[Kernel, ...]:
        """Forward of what mixes tokens, if the layer has it."""
        if not self.layer.mixer:
            return ()
        if self.layer.mixer != "mamba":
            return super().attention_forward
        s, r, (passed, beside, inside) = self.sizes, self.rates, self._widths
        return (
            self._norm("mamba_norm"),
            *self._enter("mamba"),
            r.gemm("mamba_in", "gemm_attention", s.tokens, passed + beside, s.hidden),
            r.memory("convolution", 4.0 * s.tokens * passed),
            self._scan("scan", 1.0),
            r.memory("gated_norm", 6.0 * s.tokens * inside),
            *r.cast("mamba_out_cast", s.tokens * inside),
            r.gemm("mamba_out", "gemm_attention", s.tokens, s.hidden, inside),
            *self._leave("mamba"),
            self._residual("mamba_residual"),
        )

    @cached_property
    def attention_backward(self) -> tuple[Kernel, ...]:
        """Backward of what mixes tokens: twice the scan's work, and its forward once more."""
        if not self.layer.mixer:
            return ()
        if self.layer.mixer != "mamba":
            return super().attention_backward
        s, r, (passed, beside, inside) = self.sizes, self.rates, self._widths
        name = "gemm_attention"
        return (
            *self._enter("mamba_backward"),
            *self._gemm_backward("mamba_out", name, s.hidden, inside),
            r.memory("gated_norm_backward", 10.0 * s.tokens * inside),
            self._scan("scan_backward", 3.0),
            r.memory("convolution_backward", 6.0 * s.tokens * passed),
            *r.cast("mamba_in_backward_cast", s.tokens * (passed + beside)),
            *self._gemm_backward("mamba_in", name, passed + beside, s.hidden, leave="mamba"),
            self._norm("mamba_norm_backward", backward=True),
            self._residual("mamba_residual_backward"),
        )

    @cached_property
    def mlp_forward(self) -> tuple[Kernel, ...]:
        """Forward of the feed-forward part, if the layer has it."""
        return super().mlp_forward if self.layer.mlp else ()

    @cached_property
    def mlp_backward(self) -> tuple[Kernel, ...]:
        """Backward of the feed-forward part, if the layer has it."""
        return super().mlp_backward if self.layer.mlp else ()

    @cached_property
    def _selected(self) -> tuple[Kernel, ...]:
        """What backward runs again, of whole layers of attention only."""
        whole = self.layer.mixer in ("attention", "window") and self.layer.mlp == "dense"
        return super()._selected if whole else ()

    def _scan(self, name: str, passes: float) -> Kernel:
        """State-space scan: inputs read and outputs written, `passes` times."""
        tokens, (passed, _, inside) = self.sizes.tokens, self._widths
        flop = passes * scan_flop(self.model, tokens) / self.layout.tp
        n_bytes = passes * 2.0 * tokens * (passed + inside)
        sizes = self._attention_sizes
        return self.rates.attention(name, flop, n_bytes, sizes, backward=passes > 1.0)

    @property
    def _widths(self) -> tuple[float, float, float]:
        """Widths on this GPU: what the convolution passes, what is beside it, all heads."""
        tp, (passed, beside) = self.layout.tp, mamba_streams(self.model)
        return passed / tp, beside / tp, mamba_width(self.model) / tp
