"""What must hold of a model's own layers: their keys, their sizes, and how a layout cuts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prism.common.text import format_count
from prism.jobs.dimensions import STAGE, TOKENS
from prism.jobs.jobspec.ownlayers import MOST_LAYERS, known_names
from prism.jobs.jobspec.ownops import OPS, OpBlock, SizedOp
from prism.jobs.jobspec.problem import Problem, undivided, unmodelled
from prism.jobs.jobspec.yaml import near

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import Blocks, ModelBlock, ParallelismBlock

BESIDE = ("seq_len", "hidden_size", "n_experts", "experts_per_token", "layers", "dims")
"""Keys of a model that have an effect beside layers."""
EXPERT_RANKS = f"{' * '.join(('dp', *STAGE[::-1]))} / expert_tp"


def check_layers(b: Blocks) -> Iterator[Problem]:
    """Check a model's own layers."""
    m, p, layers = b.model, b.parallelism, b.model.layers or ()
    own = [name for name in type(m).model_fields if name not in BESIDE]
    for name in own if m.name is None else ("name",):
        if getattr(m, name) != type(m).model_fields[name].default:
            text = "has no effect beside layers; leave it out, or name it under dims"
            yield text, f"model.{name}", "model.layers"
    for name in m.dims:
        if not name.isidentifier() or name in ("min", "max"):
            yield f"{name!r} is no name; take letters, digits and _", f"model.dims.{name}"
        elif name in known_names(m, 1.0):
            text = "is known without dims, from the keys beside them; take another name"
            yield text, f"model.dims.{name}"
    if any(not layer.ops for layer in layers):
        yield "a layer has no ops; give it some, or drop it", "model.layers"
    odd = [
        (f"layers.{i}.ops.{j}", text)
        for i, layer in enumerate(layers)
        for j, op in enumerate(layer.ops)
        for text in _odd_keys(op)
    ]
    sized, wrong = m.sized(float(p.microbatch_size))
    for key, text in (odd or wrong)[:20]:
        yield text, f"model.{key}"
    if odd or wrong:
        return
    if [layer.repeat for layer in sized] != [layer.repeat for layer in m.sized(1.0)[0]]:
        yield "repeat depends on batch; layers do not come and go with it", "model.layers"
    if not 1 <= m.depth <= MOST_LAYERS:
        text = f"{format_count(m.depth, 'layer')}, expected 1 to {MOST_LAYERS:,}; "
        yield text + "those at first or last do not count", "model.layers", "model.dims"
    for i, layer in enumerate(sized):
        if layer.at != "last" and any(op.block.op == "loss" for op in layer.ops):
            yield "a loss is at the end; give its layer at: last", f"model.layers.{i}.at"
    keys = [f"parallelism.{name}" for name in (*STAGE, "ep", "microbatch_size")]
    for i, layer in enumerate(sized):
        for j, op in enumerate(layer.ops):
            where = f"model.layers.{i}.ops.{j}"
            for size, text in _cuts(op, p):
                yield text, f"{where}.{size}", *keys, "model.dims"
    yield from _check_experts(m, p)


def _odd_keys(op: OpBlock) -> Iterator[str]:
    """Say which keys an op does not take, and which it lacks."""
    own, given = OPS[op.op], op.given
    takes = (*own.needs, *own.takes)
    missing = [name for name in own.needs if name not in given]
    for name in (name for name in given if name not in takes):
        yield f"{op.op} takes no {name}; it takes {', '.join(takes) or 'no sizes'}"
    if missing:
        yield f"{op.op} needs {', '.join(missing)}; give {'it' if len(missing) == 1 else 'them'}"
    if op.kind is not None and own.kinds and op.kind not in own.kinds:
        meant = near(op.kind, own.kinds, 1)
        hint = f"; did you mean {meant[0]}?" if meant else ""
        yield f"{op.op}: expected kind {' or '.join(own.kinds)}, got {op.kind!r}{hint}"
    if op.op == "embedding_bag" and (op.rows is None) == (op.tables is None):
        yield "embedding_bag: expected rows, or several tables; give one of the two"
    if op.tables is not None:
        if op.spread != "ep" or op.lookups is not None:
            text = "embedding_bag: its tables have lookups of their own and lie on ep ranks; "
            yield text + "set spread: ep and leave out lookups"
        if any((t.shard or op.shard) == "row" and t.rank is not None for t in op.tables):
            yield "embedding_bag: a table of shard: row is on all ranks; leave out its rank"
    elif op.shard is not None:
        yield "embedding_bag: shard is of tables; list them, or leave it out"
    if op.op == "elementwise":
        ways = [name for name in ("kind", "passes", "bytes") if name in given]
        values = [name for name in ("elements", "width") if name in given]
        if len(ways) != 1 or len(values) != ("bytes" not in given):
            yield (
                "elementwise: expected bytes, or passes or kind, and of what: elements, or rows "
                "and width"
            )
        if op.kind is not None and op.backward is not None:
            yield "elementwise: a kind knows its backward; drop one of the two, or give passes"


def _cuts(op: SizedOp, p: ParallelismBlock) -> Iterator[tuple[str, str]]:
    """Say what a layout cannot cut of an op: the size, and why."""
    own, block, sizes = OPS[op.block.op], op.block, op.sizes
    what = f"{block.op} {block.name or ''}".strip()
    routed = bool(own.groups) or block.routed
    tp, name = (p.expert_shards, "expert_tp") if routed else (p.tp, "tp")

    def uncut(size: str, n: int, by: str, value: float) -> tuple[str, str]:
        text = f"{what}: {by} = {n} does not divide {value:g}; take one that does, or another size"
        return size, text

    if own.splits and tp > 1 and block.split is None:
        ways = "columns or none" if block.op == "elementwise" else "columns, rows or none"
        yield "split", f"{what}: {name} = {tp} cannot split it; give split: {ways}"
    if block.split == "rows" and not own.depth:
        yield "split", f"{what}: has no operand to split by rows; take columns or none"
    cut = {"columns": own.columns, "rows": own.depth}.get(block.split or "", "")
    widths = op.widths if cut == "n" and op.widths else {cut: sizes.get(cut, 0.0)}
    for width in widths.values():
        if width % tp:
            yield uncut(cut, tp, name, width)
            break
    for size in own.heads:
        n = sizes[size]
        if n % p.tp and (size == "heads" or p.tp % n):
            yield uncut(size, p.tp, "tp", n)
    cut_by = STAGE if p.sequence_parallel else TOKENS
    if own.rows in sizes and not routed and not sizes.keys() & {"elements", "bytes"}:
        if sizes[own.rows] % p.gpus(cut_by):
            yield uncut(own.rows, p.gpus(cut_by), p.product(cut_by), sizes[own.rows])
    if own.groups and sizes[own.groups] % p.ep:
        yield uncut(own.groups, p.ep, "ep", sizes[own.groups])
    if p.token_shards > 1 and not own.over_cp:
        by = p.product(TOKENS)
        yield "op", f"{what}: {by} = {p.token_shards} cannot split it; set {by}: 1"
    if block.spread == "ep" and p.ep != p.expert_ranks:
        text = f"{what}: tables of several copies are not modelled yet, ep = {p.ep}; the nearest "
        yield "spread", f"{text}supported setting: ep: {p.expert_ranks}, all ranks of a stage"
    for i, table in enumerate(op.tables):
        if table.rank is not None and table.rank >= p.ep:
            yield f"tables.{i}.rank", f"{what}: {table.rank}, expected at most ep - 1 = {p.ep - 1}"
    if block.op == "attention":
        yield from _attention(op, p)


def _attention(op: SizedOp, p: ParallelismBlock) -> Iterator[tuple[str, str]]:
    queries, keys = op.sizes["queries"], op.sizes["keys"]
    mask = op.block.mask or "causal"
    if mask == "causal" and queries != keys:
        text = f"{queries:g} queries of {keys:g} keys, expected as many under a causal mask; "
        yield "mask", text + "set mask: full"
    if mask == "full" and op.block.window is not None:
        yield "window", unmodelled("a window of a full mask", "mask: causal")[0]
    shards, by = p.token_shards, p.product(TOKENS)
    slices = 2 * shards if mask == "causal" else shards
    if shards > 1 and queries != keys:
        yield "queries", unmodelled(f"{by} of queries that are not the keys", f"{by}: 1")[0]
    elif shards > 1 and queries % slices:
        yield "queries", f"{queries:g} is no multiple of {slices}, for {by} = {shards}; change one"


def _check_experts(m: ModelBlock, p: ParallelismBlock) -> Iterator[Problem]:
    """Check what ep divides."""
    ops = [op for layer in m.layers or () for op in layer.ops]
    groups = any(OPS[op.op].groups for op in ops)
    key = "parallelism.ep"
    if p.ep > 1 and not groups and not any(op.spread == "ep" for op in ops):
        text = f"{p.ep}, but the model has neither grouped_gemm nor tables with spread: ep; "
        yield text + "set ep: 1", key, "model.layers"
    if p.ep > 1 and p.expert_ranks % p.ep:
        yield undivided(p.ep, EXPERT_RANKS, p.expert_ranks, key, "parallelism.dp")
    needs = [
        name for name in ("hidden_size", "n_experts", "experts_per_token") if not getattr(m, name)
    ]
    if groups and p.ep > 1 and needs:
        text = f"needs {', '.join(needs)} beside layers, for how tokens are spread; give them"
        yield text, key, *(f"model.{name}" for name in needs)
    if groups and p.recompute == "selective":
        yield unmodelled("selective with experts", "none or full", "parallelism.recompute")
    if groups and p.tp > 1 and not p.sequence_parallel:
        what, key = "false with experts and tp > 1", "parallelism.sequence_parallel"
        yield unmodelled(what, "true", key, "parallelism.tp")
