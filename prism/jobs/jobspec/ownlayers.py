"""A model of one's own: layers as tables of ops, with sizes that are expressions of names.

Sizes are those of the whole op, for one microbatch; how a layout cuts them is `OPS`'s.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from prism.jobs.jobspec.expressions import Size, compute, compute_all
from prism.jobs.jobspec.ownops import OPS, Expression, OpBlock, SizedOp, SizedTable
from prism.jobs.jobspec.values import Block, key

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock

MOST_LAYERS = 10_000  # layers of a table together: with this many an estimate takes a second or two


class LayerBlock(Block):
    """A layer, or several alike that follow each other."""

    name: str | None = key("What it is called in tables [its number].")
    repeat: Expression = key("Layers alike, one after the other; no size of a microbatch's.", 1)
    at: Literal["first", "last"] | None = key(
        "Work of the first or the last stage beside its layers, as embedding and loss are: it "
        "counts as no layer where a pipeline divides them [none]."
    )
    ops: tuple[OpBlock, ...] = Field(description="Ops in the order of forward.")


class SizedLayer(NamedTuple):
    """A layer with numbers."""

    name: str
    at: str
    repeat: int
    ops: tuple[SizedOp, ...]


Wrong = list[tuple[str, str]]  # keys below `model`, and what is wrong with each
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
