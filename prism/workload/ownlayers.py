"""Tables of ops from a job's own layers: the records of `prism.jobs.ops`, one GPU's share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from prism.jobs.jobspec.ownops import OPS, Cut
from prism.jobs.ops import Attention, Op, Share

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock
    from prism.jobs.jobspec.ownlayers import SizedLayer
    from prism.jobs.jobspec.ownops import SizedOp

Half = tuple[Op, ...]


def own_halves(model: ModelBlock, share: Share, index: int) -> tuple[Half, ...]:
    """Tables of a layer's halves, each of which ends with a residual."""
    return _halves(model, share, model.sized(share.sequences)[0][index])


def own_end(model: ModelBlock, share: Share, at: str) -> Half:
    """Table of the work at one end of a model."""
    ends = [layer for layer in model.sized(share.sequences)[0] if layer.at == at]
    return tuple(chain.from_iterable(
        half for layer in ends for half in _halves(model, share, layer) * layer.repeat
    ))  # fmt: skip


def _halves(model: ModelBlock, share: Share, layer: SizedLayer) -> tuple[Half, ...]:
    halves: list[list[SizedOp]] = [[]]
    for op in layer.ops:
        halves[-1].append(op)
        if op.block.kind == "residual":
            halves.append([])
    return tuple(_half(model, share, half) for half in halves if half)


def _half(model: ModelBlock, share: Share, table: Sequence[SizedOp]) -> Half:
    kinds = {op.block.op for op in table}
    mixes = "gemm_attention" if kinds & {"attention", "scan"} else "gemm_mlp"
    products = "loss" if "loss" in kinds else mixes
    ops: list[Op] = []
    for op in table:
        kept = bool(ops) and isinstance(ops[-1], Attention)
        cut = Cut(model, share, op.block.name or op.block.op, op, products, kept)
        ops += OPS[op.block.op].make(cut)
    return tuple(ops)
