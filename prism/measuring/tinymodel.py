"""A small transformer to train: token embedding, causal layers, head and loss, split over stages.

Pre-norm layers with attention by torch's fused kernel and a GELU MLP, next-token loss on random
tokens: the work of training, not its result, is what is measured. Left out: dropout, tied
embeddings, learning-rate schedules.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """Sizes of the model and of one microbatch."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    vocab: int = 2048
    seq: int = 128
    microbatch_size: int = 2


def split_layers(layers: int, stages: int) -> list[int]:
    """Layers of each stage; the first ones take what does not divide.

    Examples
    --------
    >>> split_layers(5, 2)
    [3, 2]
    """
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def build_stage(torch: Any, sizes: Sizes, stage: int, stages: int, dtype: Any, device: str) -> Any:
    """Return one stage as a module: tokens or activations in, activations or logits out."""
    nn: Any = torch.nn

    class Layer(nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            h = sizes.hidden
            self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
            self.qkv, self.out = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
            self.up, self.down = nn.Linear(h, 4 * h, bias=False), nn.Linear(4 * h, h, bias=False)

        def forward(self, x: Any) -> Any:
            b, s, h = x.shape
            qkv = self.qkv(self.norm1(x)).view(b, s, 3, sizes.heads, h // sizes.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    parts: list[Any] = []
    if stage == 0:
        parts.append(nn.Embedding(sizes.vocab, sizes.hidden))
    parts += [Layer() for _ in range(split_layers(sizes.layers, stages)[stage])]
    if stage == stages - 1:
        parts += [nn.LayerNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocab, bias=False)]
    return nn.Sequential(*parts).to(device=device, dtype=dtype)


def make_buckets(torch: Any, module: Any, bucket_bytes: int) -> list[Any]:
    """Lay a module's gradients into flat buffers, in the order in which backward gives them."""
    buffers = []
    group: list[Any] = []
    size = 0
    parameters = list(reversed(list(module.parameters())))
    for i, parameter in enumerate(parameters):
        group.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size < bucket_bytes and i + 1 < len(parameters):
            continue
        flat = torch.zeros(
            sum(p.numel() for p in group), dtype=parameter.dtype, device=parameter.device
        )
        at = 0
        for p in group:
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        buffers.append(flat)
        group, size = [], 0
    return buffers
