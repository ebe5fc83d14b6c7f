"""Tables of ops from a job's own layers: the records of `prism.workload.ops`, one GPU's share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from prism.workload.ops import (
    BF16_BYTES,
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
    Timed,
)

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock
    from prism.jobs.jobspec.ownlayers import SizedLayer, SizedOp

Half = tuple[Op, ...]
SAVES = {"swiglu": 4.0, "gelu": 2.0, "routing": 4.0, "convolution": 2.0, "gated_norm": 2.0}
"""Bytes a value that backward keeps, by kind, as in `prism.workload.layers`."""
_BACK = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all"}


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
        sized = _Sized(model, share, op.block.name or op.block.op, op, products, kept)
        ops += _MAKE[op.block.op](sized)
    return tuple(ops)


@dataclass(frozen=True)
class _Sized:
    """An op to be made, and how its share is cut."""

    model: ModelBlock
    share: Share
    name: str
    op: SizedOp
    products: str  # kernel class of products
    kept: bool  # its operand, for the op before

    @property
    def sizes(self) -> Mapping[str, float]:
        """Sizes of the whole op."""
        return self.op.sizes

    def tokens(self, rows: float) -> float:
        """Rows of this GPU's part of the tokens."""
        return rows / self.share.shards

    def resident(self, rows: float) -> float:
        """Rows that it computes outside of what tp splits."""
        return self.tokens(rows) / (self.share.tp if self.share.sequence_parallel else 1)

    def copies(self, rows: float) -> float:
        """Of all copies of tokens those that its experts compute, in the mean."""
        return self.tokens(rows) * self.share.expert_tp / self.share.tp


def _product(x: _Sized, rows: float, width: float, depth: float, taps: float = 1.0) -> Half:
    block, tp = x.op.block, x.share.tp
    columns, by_rows = block.split == "columns", block.split == "rows"
    divided = columns or by_rows
    widths = x.op.widths or {x.name: width}
    return (
        Product(
            x.name, x.tokens(rows) if divided else x.resident(rows),
            tuple(Part(n, w / tp if columns else w) for n, w in widths.items()),
            depth * taps / (tp if by_rows else 1), x.products, enter=x.name * columns,
            leave=x.name * by_rows, own=x.resident(rows), resident=not divided,
            in_bf16=block.bf16, keeps=not x.kept, taps=taps,
        ),
    )  # fmt: skip


def _gemm(x: _Sized) -> Half:
    return _product(x, x.sizes["m"], x.sizes["n"], x.sizes["k"])


def _conv(x: _Sized) -> Half:
    """Product of an operand whose values are read once for each place of the kernel."""
    s = x.sizes
    return _product(x, s["pixels"], s["filters"], s["channels"], s["kernel"])


def _grouped_gemm(x: _Sized) -> Half:
    s, split, tp = x.sizes, x.op.block.split, x.share.expert_tp
    widths = x.op.widths or {x.name: s["n"]}
    parts = (Part(n, w / (tp if split == "columns" else 1)) for n, w in widths.items())
    return (
        Product(
            x.name, x.copies(s["m"]), tuple(parts), s["k"] / (tp if split == "rows" else 1),
            "gemm_expert", s["groups"] / x.share.ep, routed=True, in_bf16=x.op.block.bf16,
        ),
    )  # fmt: skip


def _attention(x: _Sized) -> Half:
    s, tp = x.sizes, x.share.tp
    queries, keys = s["queries"], s["keys"]
    return (
        Attention(
            x.name, x.tokens(s["samples"] * queries), s["samples"], queries, float(x.share.shards),
            s["heads"] / tp, max(1.0, s["kv_heads"] / tp), s["head_dim"], s["v_head_dim"],
            s.get("window", 0.0), keys if keys != queries else 0.0, x.op.block.mask != "full",
        ),
    )  # fmt: skip


def _scan(x: _Sized) -> Half:
    s, tp, seq = x.sizes, x.share.tp, float(x.model.seq_len)
    return (
        Scan(
            x.name, x.tokens(x.share.sequences * seq), str(x.op.block.kind), seq, s["heads"] / tp,
            s["head_dim"], s["state"], s["streams"] / tp, s["parameters"] / tp,
        ),
    )  # fmt: skip


def _norm(x: _Sized) -> Half:
    return (Norm(x.name, x.resident(x.sizes["rows"]), x.sizes["width"]),)


def _elementwise(x: _Sized) -> Half:
    """Op of a framework's kind; or of passes or bytes, read and written half each in bf16."""
    s, block = x.sizes, x.op.block
    if block.kind == "sort" and not 1 < x.share.ep < x.model.n_experts:  # there is one to sort for
        return ()
    values = s["bytes"] / (2.0 * BF16_BYTES) if "bytes" in s else s.get("elements", 0.0)
    rows, width = (values, 1.0) if values else (s["rows"], s["width"])
    kind, whole = str(block.kind or ""), rows * width
    saves = s["keeps"] / whole if "keeps" in s else SAVES.get(kind, 0.0)
    columns = block.split == "columns"
    width /= (x.share.expert_tp if block.routed else x.share.tp) if columns else 1
    cut = x.copies if block.routed else x.tokens if columns else x.resident
    rows = cut(rows)
    moved = None
    if not kind:
        forward = s.get("bytes") or s["passes"] * BF16_BYTES * whole
        unit = 1.0 if "bytes" in s else BF16_BYTES * whole
        back = s["backward"] * unit if "backward" in s else forward
        moved = forward * rows * width / whole, back * rows * width / whole
    weights = s.get("parameters", 0.0) / (x.share.tp if columns else 1)
    launches = s.get("launches", 1.0)
    both = launches, s.get("backward_launches", launches)
    return (Pointwise(x.name, rows, kind, width, saves, block.routed, moved, both, weights),)


def _embedding_bag(x: _Sized) -> Half:
    s, spread = x.sizes, x.op.block.spread == "ep"
    ranks = x.share.ep if spread else x.share.tp
    return (
        Table(x.name, x.tokens(s["samples"]), s["dim"], s["rows"] / ranks, s["lookups"], spread),
    )


def _collective(x: _Sized) -> Half:
    block, values = x.op.block, x.sizes["bytes"] / BF16_BYTES
    kind, group = str(block.kind), str(block.group)
    back = block.back or _BACK.get(kind, "none")
    if group == "expert_tp" and x.share.expert_tp == 1:
        return ()
    cut = {"tp": x.tokens, "ep": x.resident, "expert_tp": x.copies}[group]
    among, back = "ep" if group == "ep" else "tp", "" if back == "none" else back
    return (Exchange(x.name, cut(values), among, kind, 1.0, back, routed=group != "tp"),)


def _loss(x: _Sized) -> Half:
    return (Loss(x.name, x.tokens(x.sizes["rows"]), x.sizes["width"] / x.share.tp),)


def _host_wait(x: _Sized) -> Half:
    return (Host(x.name, 0.0),)


def _kernel(x: _Sized) -> Half:
    return (Timed(x.name, 0.0, (x.sizes["seconds"], x.sizes.get("backward", 0.0))),)


_MAKE: dict[str, Callable[[_Sized], Half]] = {
    "gemm": _gemm, "grouped_gemm": _grouped_gemm, "attention": _attention, "conv": _conv,
    "embedding_bag": _embedding_bag, "norm": _norm, "elementwise": _elementwise, "scan": _scan,
    "collective": _collective, "loss": _loss, "host_wait": _host_wait,
    "kernel": _kernel,
}  # fmt: skip
