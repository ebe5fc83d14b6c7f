"""A model of one's own: layers as tables of ops, with sizes that are expressions of names.

Sizes are those of the whole op, for one microbatch; how a layout cuts them is `OPS`'s, and which
kernels, parameters and bytes follow is `prism.workload.ownlayers`'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, StrictBool, WithJsonSchema, model_serializer

from prism.jobs.jobspec.expressions import LONGEST, Size, compute, compute_all, parse_size
from prism.jobs.jobspec.values import Block, key

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock

MOST_LAYERS = 10_000
"""Layers of a table together: with this many an estimate takes a second or two."""


@dataclass(frozen=True)
class OwnOp:
    """What a kind of op takes in a job file, and how a layout cuts it.

    Each name in `rows`, `columns`, `depth`, `heads` and `groups` is a size: rows are cut by cp, and
    by tp where the op is not split and sequences are; columns and depth by tp, as `split` says,
    heads by tp in any case, and groups by ep.
    """

    needs: tuple[str, ...]
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
    "gemm": OwnOp(("m", "n", "k"), ("split", "bf16"), rows="m", columns="n", depth="k",
                  splits=True),
    "grouped_gemm": OwnOp(("groups", "m", "n", "k"), ("split", "bf16"), rows="m", columns="n",
                          depth="k", groups="groups", splits=True),
    "attention": OwnOp(
        ("heads", "head_dim"),
        ("kv_heads", "v_head_dim", "queries", "keys", "samples", "mask", "window"),
        {"samples": "batch", "queries": "seq", "keys": "queries", "kv_heads": "heads",
         "v_head_dim": "head_dim"},
        heads=("heads", "kv_heads"),
    ),
    "conv": OwnOp(("pixels", "channels", "filters", "kernel"), ("split", "bf16"), rows="pixels",
                  columns="filters", depth="channels", splits=True, over_cp=False),
    "embedding_bag": OwnOp(("dim",), ("rows", "lookups", "tables", "shard", "samples",
                                     "spread"),
                           {"lookups": 1, "samples": "batch * seq"}),
    "norm": OwnOp(("width",), ("rows",), _TOKENS, rows="rows"),
    "elementwise": OwnOp(
        (), ("kind", "rows", "width", "elements", "passes", "bytes", "backward", "parameters",
             "keeps", "split", "routed", "launches", "backward_launches"),
        _TOKENS, POINTWISE, rows="rows", columns="width", splits=True,
    ),
    "scan": OwnOp(("kind", "heads", "head_dim"), ("state", "streams", "parameters"),
                  {"state": "head_dim", "streams": "3 * heads * head_dim", "parameters": 0},
                  ("mamba2", "gated_delta"), heads=("heads",), over_cp=False),
    "collective": OwnOp(("kind", "bytes", "group"), ("back",),
                        kinds=("all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
    "loss": OwnOp(("width",), ("rows",), _TOKENS, rows="rows"),
    "host_wait": OwnOp(()),
    "kernel": OwnOp(("seconds",), ("backward",)),
}  # fmt: skip
"""Ops by name. A new one is a line here, and what it is made of in `prism.workload.ownlayers`."""


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


class LayerBlock(Block):
    """A layer, or several alike that follow each other."""

    name: str | None = key("What it is called in tables [its number].")
    repeat: Expression = key("Layers alike, one after the other; no size of a microbatch's.", 1)
    at: Literal["first", "last"] | None = key(
        "Work of the first or the last stage beside its layers, as embedding and loss are: it "
        "counts as no layer where a pipeline divides them [none]."
    )
    ops: tuple[OpBlock, ...] = Field(description="Ops in the order of forward.")


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


class SizedLayer(NamedTuple):
    """A layer with numbers."""

    name: str
    at: str
    repeat: int
    ops: tuple[SizedOp, ...]


Wrong = list[tuple[str, str]]
"""Keys below `model`, and what is wrong with each."""
Sized = tuple[tuple[SizedLayer, ...], Wrong]
_NO_EXPRESSIONS = {"op", "name", "kind", "split", "mask", "spread", "routed", "bf16", "group",
                   "back", "tables", "shard"}  # fmt: skip
_FRACTIONS = {"bytes", "passes", "backward", "keeps", "lookups", "parameters", "elements",
              "seconds", "launches", "backward_launches"}  # fmt: skip
_MOST_WRONG = 20


def known_names(model: "ModelBlock", batch: float) -> dict[str, float]:
    """Names that a model's expressions know without dims, for some samples."""
    own = {"hidden": model.hidden_size, "n_experts": model.n_experts,
           "experts_per_token": model.experts_per_token}  # fmt: skip
    given = {name: float(size) for name, size in own.items() if size}
    return {"batch": batch, "seq": float(model.seq_len)} | given


def size_layers(model: "ModelBlock", batch: float) -> Sized:
    """Compute all sizes of a model's table, and list what is wrong with them (20 at most)."""
    names, wrong = compute_all(model.dims, known_names(model, batch))
    wrong = [(f"dims.{name}", text) for name, text in wrong]
    sized = []
    for i, layer in enumerate(model.layers or ()):
        where, ops = f"layers.{i}", []
        n = _number(layer.repeat, names, f"{where}.repeat", True, wrong)
        for j, op in enumerate(layer.ops):
            ops.append(_size_op(op, names, f"{where}.ops.{j}", wrong))
        sized.append(SizedLayer(layer.name or str(i), layer.at or "", int(n), tuple(ops)))
        if len(wrong) >= _MOST_WRONG:
            break
    return tuple(sized), wrong[:_MOST_WRONG]


def _size_op(op: OpBlock, names: Mapping[str, float], where: str, wrong: Wrong) -> SizedOp:
    own = OPS[op.op]
    values = {name: getattr(op, name) for name in op.given if name not in _NO_EXPRESSIONS}
    sizes, widths = dict[str, float](), dict[str, float]()
    for name, value in values.items():
        key, whole = f"{where}.{name}", name not in _FRACTIONS
        parts = value if isinstance(value, Mapping) else {name: value}
        found = {p: _number(v, names, key, whole, wrong) for p, v in parts.items()}
        sizes[name] = sum(found.values())
        widths |= found if isinstance(value, Mapping) else {}
    for name, size in own.otherwise.items():  # in an order in which they are known
        if name not in sizes and (name in own.needs or name in own.takes):
            sizes[name] = _number(size, {**names, **sizes}, f"{where}.{name}", False, wrong)
    tables = []
    for i, table in enumerate(op.tables or ()):
        place, dim = f"{where}.tables.{i}", op.dim if table.dim is None else table.dim
        tables.append(
            SizedTable(
                _number(table.rows, names, f"{place}.rows", True, wrong),
                _number(1 if dim is None else dim, names, f"{place}.dim", True, wrong),
                _number(table.lookups, names, f"{place}.lookups", False, wrong),
                (table.shard or op.shard) == "row", table.rank,
            )
        )  # fmt: skip
    return SizedOp(op, sizes, widths, tuple(tables))


def _number(size: Size, names: Mapping[str, float], key: str, whole: bool, wrong: Wrong) -> float:
    """Compute a size; 1 where it cannot be, which is noted."""
    try:
        found = compute(size, names)
    except ValueError as error:
        wrong.append((key, str(error)))
        return 1.0
    if found < 0.0 or (whole and (found < 1.0 or found != int(found))):
        kind = "a whole number, at least 1" if whole else "at least 0"
        hint = "; divide by // to round down" if found != int(found) else ""
        wrong.append((key, f"{size} is {found:g}, expected {kind}{hint}"))
        return 1.0
    return found
