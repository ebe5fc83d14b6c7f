"""How layers are divided over model chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock


def even_split(n_layers: int, n_chunks: int) -> list[int]:
    """Divide layers over model chunks as evenly as they go, the smaller shares at the ends.

    The embedding and the loss are work of the ends, as Llama 3 405B has one layer fewer on the
    first and on the last stage (arXiv:2407.21783, section 3.3.2).

    Examples
    --------
    >>> even_split(126, 8)
    [15, 16, 16, 16, 16, 16, 16, 15]
    >>> even_split(80, 3)
    [27, 27, 26]
    """
    each, extra = divmod(n_layers, n_chunks)
    first = (n_chunks - extra) // 2
    return [each + (first <= i < first + extra) for i in range(n_chunks)]


def is_even(n_layers: int, n_chunks: int) -> bool:
    """Tell whether chunks are equal, or the ends have one layer fewer, as interleaving needs."""
    return n_layers % n_chunks == 0 or (n_chunks > 1 and (n_layers + 2) % n_chunks == 0)


def cost_split(model: ModelBlock, n_chunks: int) -> list[int]:
    """Divide layers by the cost of their products, logits included, as nanotron does.

    Each chunk is filled to its share, the first one first (``get_block_compute_costs``); where a
    layer fills it exactly, it is full, as measured peaks have it. The logits stay on the last
    chunk, where nanotron may end before it.

    Examples
    --------
    >>> from prism.jobs.jobspec.blocks import ModelBlock
    >>> sizes = {"hidden_size": 2048, "ffn_size": 8192, "n_heads": 32, "vocab_size": 131072}
    >>> cost_split(ModelBlock(n_layers=16, **sizes), 2)
    [10, 6]
    """
    inside = model.n_heads * (model.head_size or model.hidden_size // model.n_heads)
    costs = [model.hidden_size * (4 * inside + 3 * model.ffn_size)] * model.n_layers
    logits = model.vocab_size * model.hidden_size
    return _fill(costs, sum(costs) + logits, n_chunks)


def _fill(costs: Sequence[int], total: int, n_chunks: int) -> list[int]:
    """Count blocks of each chunk: the one that reaches a chunk's share of the total is its last."""
    counts, chunk, done = [0] * n_chunks, 0, 0
    for cost in costs:
        counts[chunk] += 1
        done += cost
        if done * n_chunks >= total * (chunk + 1) and chunk < n_chunks - 1:
            chunk += 1
    return counts
