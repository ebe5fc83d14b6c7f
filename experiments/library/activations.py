"""What a layer keeps for its backward in eager and in compiled PyTorch, tensor by tensor.

    python experiments/library/activations.py

Needs the extra `measure`; no GPU. Counts what autograd saves of the decoder of
experiments/validation/one-gpu, weights left out, in bytes a token, for the memory fields of
`prism.jobs.frameworks`. A GPU's fused kernels stand in for the processor's: a norm saves its input,
attention queries, keys, values and its result head by head. Compiled, the graph is parted as
torch.compile does, without generating code. Keys are repeated for all heads, which the library
takes of eager PyTorch alone: torchtitan's attention takes grouped keys.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "validation" / "one-gpu"))
import model as decoder

SIZES = decoder.Model(1, 256, 1024, 8, 8, 512, 128, 2, 1)
GROUPED = decoder.Model(1, 256, 1024, 8, 4, 512, 128, 2, 1)


class Norm(torch.autograd.Function):
    """An RMSNorm that saves its input, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, weight):  # noqa: D102
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):  # noqa: D102
        return gradient, None


class Attention(torch.autograd.Function):
    """Attention that saves what fused kernels do, its result head by head."""

    @staticmethod
    def forward(ctx, q, k, v):  # noqa: D102
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, gradient):  # noqa: D102
        return gradient, gradient, gradient


def kept(call, x, weights):
    """Give bytes a token of all tensors that a call saves but weights and sums of rows."""
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.ndim > 1 and tensor.shape[-1] > 1:
            found[storage.data_ptr()] = tensor  # kept, or another one would get its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(x)
    n_bytes = sum(tensor.untyped_storage().nbytes() for tensor in found.values())
    return n_bytes / (x.shape[0] * x.shape[1])


def count(sizes, compiled):
    """Give bytes a token that one layer keeps."""
    torch.manual_seed(1)
    layer = decoder.build_layer(torch, sizes).to(torch.bfloat16)
    turn = decoder.rotation(torch, sizes, "cpu", torch.bfloat16)
    functional = nn.functional
    norm, attention = nn.RMSNorm.forward, functional.scaled_dot_product_attention
    call = layer
    if compiled:
        call = torch.compile(layer, backend="aot_eager_decomp_partition", dynamic=False)
    else:
        nn.RMSNorm.forward = lambda self, x: Norm.apply(x, self.weight)
        functional.scaled_dot_product_attention = lambda q, k, v, **_: Attention.apply(
            q.contiguous(), k.contiguous(), v.contiguous()
        )
    x = torch.randn(2, sizes.seq_len, sizes.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    try:
        return kept(lambda x: call(x, *turn), x, [*layer.parameters(), *turn])
    finally:
        nn.RMSNorm.forward, functional.scaled_dot_product_attention = norm, attention


def main():
    print("| framework | key heads | bytes a token | in h, with f = 4 h |\n|---|---|---|---|")
    for compiled in (False, True):
        for sizes in (SIZES, GROUPED):
            n = count(sizes, compiled)
            name = "compiled" if compiled else "eager"
            print(f"| {name} | {sizes.n_kv_heads} of {sizes.n_heads} | {n:.0f} | "
                  f"{n / sizes.hidden_size:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
