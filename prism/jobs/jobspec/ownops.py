"""Ops of a model of one's own: what each takes in a job file, how a layout cuts it, what it is.

A new one is a record of `OPS` and a function that makes it of those of `prism.jobs.ops`; sizes
that no other one has are keys of `OpBlock`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field, StrictBool, WithJsonSchema, model_serializer

from prism.common.arrays import Array
from prism.jobs.jobspec.expressions import LONGEST, Size, parse_size
from prism.jobs.jobspec.values import Block, key
from prism.jobs.ops import (
    BF16_BYTES,
    TABLE_BYTES,
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
    table_traffic,
)

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock

Half = tuple[Op, ...]
SAVES = {"swiglu": 4.0, "gelu": 2.0, "routing": 4.0, "convolution": 2.0, "gated_norm": 2.0}
"""Bytes a value that backward keeps, by kind, as in `prism.workload.layers`."""
_BACK = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all"}


@dataclass(frozen=True)
class Cut:
    """An op to be made, and how its share is cut."""

    model: "ModelBlock"
    share: Share
    name: str
    op: "SizedOp"
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


def _product(x: Cut, rows: float, width: float, depth: float, taps: float = 1.0) -> Half:
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


def _conv(x: Cut) -> Half:
    """Product of an operand whose values are read once for each place of the kernel."""
    s = x.sizes
    return _product(x, s["pixels"], s["filters"], s["channels"], s["kernel"])


def _grouped_gemm(x: Cut) -> Half:
    s, split, tp = x.sizes, x.op.block.split, x.share.expert_tp
    widths = x.op.widths or {x.name: s["n"]}
    parts = (Part(n, w / (tp if split == "columns" else 1)) for n, w in widths.items())
    return (
        Product(
            x.name, x.copies(s["m"]), tuple(parts), s["k"] / (tp if split == "rows" else 1),
            "gemm_expert", s["groups"] / x.share.ep, routed=True, in_bf16=x.op.block.bf16,
        ),
    )  # fmt: skip


def _attention(x: Cut) -> Half:
    s, tp = x.sizes, x.share.tp
    queries, keys = s["queries"], s["keys"]
    return (
        Attention(
            x.name, x.tokens(s["samples"] * queries), s["samples"], queries,
            float(x.share.shards), s["heads"] / tp, max(1.0, s["kv_heads"] / tp),
            s["head_dim"], s["v_head_dim"], s.get("window", 0.0), keys if keys != queries else 0.0,
            x.op.block.mask != "full",
        ),
    )  # fmt: skip


def _scan(x: Cut) -> Half:
    s, tp, seq = x.sizes, x.share.tp, float(x.model.seq_len)
    return (
        Scan(
            x.name, x.tokens(x.share.sequences * seq), str(x.op.block.kind), seq, s["heads"] / tp,
            s["head_dim"], s["state"], s["streams"] / tp, s["parameters"] / tp,
        ),
    )  # fmt: skip


def _elementwise(x: Cut) -> Half:
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


def _embedding_bag(x: Cut) -> Half:
    s, spread = x.sizes, x.op.block.spread == "ep"
    ranks, rows = x.share.ep if spread else x.share.tp, x.tokens(s["samples"])
    if not x.op.tables:
        return (Table(x.name, rows, s["dim"], s["rows"] / ranks, s["lookups"], spread),)
    width = sum(t.dim for t in x.op.tables)
    lookups = sum(t.dim * t.lookups for t in x.op.tables) / width
    fullest, by_rank = place_tables(x.op.tables, ranks)
    return (Table(x.name, rows, width, fullest / width, lookups, True, by_rank),)


def place_tables(
    tables: Sequence["SizedTable"], ranks: int
) -> tuple[float, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Put tables on ranks: numbers of the fullest, and traffic of each over the mean.

    The largest traffic first, to the rank with least so far, as TorchRec's
    ``GreedyPerfPartitioner``; what memory they take is not looked at.
    """

    def cost(table: "SizedTable") -> Array:
        forward, backward = table_traffic(table.lookups, TABLE_BYTES)
        return table.dim * np.array([forward, backward, table.rows])

    load = np.zeros((ranks, 3))  # traffic of forward and backward, numbers
    whole = [table for table in tables if not table.by_row]
    for table in tables:
        load += cost(table) / ranks * table.by_row
    for table in sorted(whole, key=lambda t: (t.rank is None, -cost(t)[:2].sum())):
        least = int(load[:, :2].sum(axis=1).argmin()) if table.rank is None else table.rank
        load[min(least, ranks - 1)] += cost(table)  # one rank has all of a whole model
    traffic = load[:, :2] / load[:, :2].mean(axis=0)
    even = bool(np.ptp(traffic) < 1e-9)
    forward, backward = (() if even else tuple(way.tolist()) for way in traffic.T)
    return float(load[:, 2].max()), (forward, backward)


def _collective(x: Cut) -> Half:
    block, values = x.op.block, x.sizes["bytes"] / BF16_BYTES
    kind, group = str(block.kind), str(block.group)
    back = block.back or _BACK.get(kind, "none")
    if group == "expert_tp" and x.share.expert_tp == 1:
        return ()
    cut = {"tp": x.tokens, "ep": x.resident, "expert_tp": x.copies}[group]
    among, back = "ep" if group == "ep" else "tp", "" if back == "none" else back
    routed = group != "tp" and x.model.n_experts > 0  # else all ranks send as much
    return (Exchange(x.name, cut(values), among, kind, 1.0, back, routed=routed),)


@dataclass(frozen=True)
class OwnOp:
    """What a kind of op takes in a job file, and how a layout cuts it.

    Each name in `rows`, `columns`, `depth`, `heads` and `groups` is a size: rows are cut by cp, and
    by tp where the op is not split and sequences are; columns and depth by tp, as `split` says,
    heads by tp in any case, and groups by ep. `make` gives the ops that it is, one GPU's share.
    """

    make: Callable[["Cut"], Half]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    otherwise: Mapping[str, Size] = field(default_factory=dict)  # sizes that may be left out
    kinds: tuple[str, ...] = ()
    rows: str = ""
    columns: str = ""
    depth: str = ""
    heads: tuple[str, ...] = ()
    groups: str = ""
    splits: bool = False  # tp does not know how by itself
    over_cp: bool = True


_TOKENS = {"rows": "batch * seq"}
POINTWISE = (
    "residual", "rope", "swiglu", "gelu", "repeat", "layout", "routing", "scatter", "sort",
    "convolution", "gated_norm",
)  # fmt: skip
"""Kinds of op bound by memory of which each framework has its passes."""
OPS: dict[str, OwnOp] = {
    "gemm": OwnOp(
        lambda x: _product(x, x.sizes["m"], x.sizes["n"], x.sizes["k"]), ("m", "n", "k"),
        ("split", "bf16"), rows="m", columns="n", depth="k", splits=True,
    ),
    "grouped_gemm": OwnOp(
        _grouped_gemm, ("groups", "m", "n", "k"), ("split", "bf16"), rows="m", columns="n",
        depth="k", groups="groups", splits=True,
    ),
    "attention": OwnOp(
        _attention, ("heads", "head_dim"),
        ("kv_heads", "v_head_dim", "queries", "keys", "samples", "mask", "window"),
        {"samples": "batch", "queries": "seq", "keys": "queries", "kv_heads": "heads",
         "v_head_dim": "head_dim"},
        heads=("heads", "kv_heads"),
    ),
    "conv": OwnOp(
        _conv, ("pixels", "channels", "filters", "kernel"), ("split", "bf16"), rows="pixels",
        columns="filters", depth="channels", splits=True, over_cp=False,
    ),
    "embedding_bag": OwnOp(
        _embedding_bag, ("dim",), ("rows", "lookups", "tables", "shard", "samples", "spread"),
        {"lookups": 1, "samples": "batch * seq"},
    ),
    "norm": OwnOp(
        lambda x: (Norm(x.name, x.resident(x.sizes["rows"]), x.sizes["width"]),),
        ("width",), ("rows",), _TOKENS, rows="rows",
    ),
    "elementwise": OwnOp(
        _elementwise, (), ("kind", "rows", "width", "elements", "passes", "bytes", "backward",
                           "parameters", "keeps", "split", "routed", "launches",
                           "backward_launches"),
        _TOKENS, POINTWISE, rows="rows", columns="width", splits=True,
    ),
    "scan": OwnOp(
        _scan, ("kind", "heads", "head_dim"), ("state", "streams", "parameters"),
        {"state": "head_dim", "streams": "3 * heads * head_dim", "parameters": 0},
        ("mamba2", "gated_delta"), heads=("heads",), over_cp=False,
    ),
    "collective": OwnOp(
        _collective, ("kind", "bytes", "group"), ("back",),
        kinds=("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    ),
    "loss": OwnOp(
        lambda x: (Loss(x.name, x.tokens(x.sizes["rows"]), x.sizes["width"] / x.share.tp),),
        ("width",), ("rows",), _TOKENS, rows="rows",
    ),
    "host_wait": OwnOp(lambda x: (Host(x.name, 0.0),)),
    "kernel": OwnOp(
        lambda x: (Timed(x.name, 0.0, (x.sizes["seconds"], x.sizes.get("backward", 0.0))),),
        ("seconds",), ("backward",),
    ),
}  # fmt: skip
"""Ops by name: keys of a job file, checks, and what a step does of each follow from them."""


def _sizes(value: Any) -> Any:
    """Check a size, or sizes by name."""
    if isinstance(value, Mapping) and value:
        return {str(name): parse_size(size) for name, size in value.items()}
    return parse_size(value)


_FORMS = {"type": ["number", "string"], "maxLength": LONGEST}
Expression = Annotated[int | float | str, BeforeValidator(parse_size), WithJsonSchema(_FORMS)]
Widths = Annotated[
    int | float | str | dict[str, int | float | str],
    BeforeValidator(_sizes),
    WithJsonSchema({"type": ["number", "string", "object"], "maxLength": LONGEST}),
]


class TableBlock(Block):
    """One of several tables of an embedding_bag."""

    rows: Expression = Field(description="Its rows.")
    dim: Expression | None = key("Width of a row [the op's].")
    lookups: Expression = key("Rows that are summed for a sample.", 1)
    shard: Literal["table", "row"] | None = key("How ep ranks hold it [the op's].")
    rank: Annotated[int, Field(ge=0)] | None = key("The ep rank that holds it [as shard says].")


class OpBlock(Block):
    """An op of a layer."""

    op: Literal[tuple(OPS)] = Field(description="Kind of the op.")  # type: ignore[valid-type]
    name: str | None = key("What its kernels are called [the op's].")
    kind: str | None = key(
        f"elementwise: one of which the framework has its passes ({', '.join(POINTWISE)}), a "
        "residual ends a half of a layer; scan: mamba2 or gated_delta; collective: all_reduce, "
        "all_gather, reduce_scatter or all_to_all."
    )
    split: Literal["columns", "rows", "none"] | None = key(
        "How tp cuts a gemm, grouped_gemm (there expert_tp), conv or elementwise op: columns (its "
        "result's width; what enters is gathered), rows (its operand's width; the result is "
        "summed), or none: each rank has all weights, and with sequence_parallel its own rows."
    )
    m: Expression | None = key(
        "gemm: rows of operand and result; grouped_gemm: those of all groups."
    )
    n: Widths | None = key(
        "gemm, grouped_gemm: columns of the result; or those of several matrices of one operand, "
        "by name, such as {query: hidden, key: 1024, value: 1024}."
    )
    k: Expression | None = key("gemm, grouped_gemm: columns of the operand.")
    groups: Expression | None = key("grouped_gemm: experts, which ep ranks hold between them.")
    heads: Expression | None = key("attention, scan: heads.")
    kv_heads: Expression | None = key("attention: heads of keys and values [heads].")
    head_dim: Expression | None = key("attention, scan: width of a head.")
    v_head_dim: Expression | None = key("attention: width of a head's values [head_dim].")
    queries: Expression | None = key("attention: queries of a sequence [seq].")
    keys: Expression | None = key("attention: keys of a sequence [queries].")
    mask: Literal["causal", "full"] | None = key("attention: which keys a query sees [causal].")
    window: Expression | None = key("attention: keys that a query sees at most [all].")
    state: Expression | None = key("scan: width of a head's state [head_dim].")
    streams: Expression | None = key("scan: width of what it reads [3 * heads * head_dim].")
    pixels: Expression | None = key("conv: places of the result, of all samples.")
    channels: Expression | None = key("conv: channels of what it reads.")
    filters: Expression | None = key("conv: channels of the result.")
    kernel: Expression | None = key("conv: places of the kernel, such as 3 * 3.")
    rows: Expression | None = key(
        "norm, elementwise, loss: rows [batch * seq]; embedding_bag: rows of its table."
    )
    width: Expression | None = key(
        "norm, elementwise: values of a row [elementwise: 1]; loss: classes."
    )
    dim: Expression | None = key("embedding_bag: width of a row.")
    lookups: Expression | None = key("embedding_bag: rows that are summed for a sample [1].")
    tables: Annotated[tuple[TableBlock, ...], Field(min_length=1)] | None = key(
        "embedding_bag with spread: ep: several tables instead of rows and lookups."
    )
    shard: Literal["table", "row"] | None = key(
        "embedding_bag with tables: row: all ep ranks hold each table between them; table: one "
        "holds it, that with least to read so far, the largest table first, as TorchRec's planner "
        "places them, and all wait for the rank with most. Shards of columns are tables of fewer "
        "columns [table]."
    )
    samples: Expression | None = key(
        "embedding_bag: samples of a microbatch [batch * seq]; attention: sequences [batch]."
    )
    spread: Literal["tp", "ep"] | None = key(
        "embedding_bag: whose ranks hold its rows between them: tp, a vocabulary-parallel table in "
        "bf16 with an optimizer's states; or ep, in float32, updated where it lies as it is read "
        "(give the all_to_all of its results after it) [tp]."
    )
    elements: Expression | None = key("elementwise: values, instead of rows and width.")
    passes: Expression | None = key(
        "elementwise: reads and writes of its values in bf16 by forward, instead of kind."
    )
    seconds: Expression | None = key(
        "kernel: what forward takes of a microbatch, on any device and in any layout [s]."
    )
    bytes: Expression | None = key(
        "elementwise: bytes that forward moves, instead of passes; collective: a rank's message, "
        "as nccl-tests counts it, before any layout cuts it [byte]."
    )
    backward: Expression | None = key(
        "elementwise: passes, or bytes, of backward [those of forward]; kernel: its time [0; s]."
    )
    launches: Expression | None = key(
        "elementwise with passes or bytes: kernels that it stands for, which the host launches [1]."
    )
    backward_launches: Expression | None = key("elementwise: those of backward [launches].")
    parameters: Expression | None = key("elementwise, scan: weights [0].")
    keeps: Expression | None = key(
        "elementwise: bytes that backward needs of it [what its kind does, else 0]."
    )
    routed: StrictBool = key(
        "elementwise: it works on copies of tokens, as the experts' own ops do.", False
    )
    bf16: StrictBool = key("gemm, conv: in bf16, whatever parallelism.precision.", False)
    group: Literal["tp", "ep", "expert_tp"] | None = key("collective: who takes part.")
    back: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "none"] | None = key(
        "collective: the one of backward [all_gather and reduce_scatter each other, all_to_all "
        "itself, all_reduce none]."
    )

    @model_serializer(mode="wrap")
    def _short(self, handler: Any) -> dict[str, Any]:
        """Leave out what is not set."""
        return {k: v for k, v in handler(self).items() if v is not None and v is not False}

    @property
    def given(self) -> list[str]:
        """Keys that are set, beside op and name."""
        return [k for k, v in self if k not in ("op", "name") and v is not None and v is not False]


class SizedTable(NamedTuple):
    """A table of an embedding_bag with its sizes as numbers."""

    rows: float
    dim: float
    lookups: float
    by_row: bool
    rank: int | None


class SizedOp(NamedTuple):
    """An op with its sizes as numbers; widths of several matrices by name."""

    block: OpBlock
    sizes: Mapping[str, float]
    widths: Mapping[str, float]
    tables: tuple[SizedTable, ...] = ()
