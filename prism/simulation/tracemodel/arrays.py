"""A fitted trace as a program: its graph and distributions laid into the engine's arrays.

Every node is an op of its own: compute ops take their rank factor from the cluster's GPUs, the
other ops have a mean per replica. Left out: barriers that only one replica knows, which do not move
the step's end.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.distributions.distribution import constant
from prism.distributions.tables import LEVELS, N_CELLS, table_edges
from prism.simulation.effects import EFFECTS
from prism.simulation.placednodes import count_terms, hold_seconds
from prism.simulation.program import Origin, Program, Tables, graph_arrays, lay_bank
from prism.simulation.tracemodel.graph import COMPUTE, WORLD, Array, TraceNode, ops_of
from prism.simulation.tracemodel.model import SCORE_STD, Table, TraceModel, profile_table
from prism.workload.build import Collective
from prism.workload.opgraph import START, Builder, OpType, StepGraph, build_arrays

LAUNCH_GAP = "launch_gap"
ORIGIN = "origin"  # name of the node that takes the earliest lead off again


def kernel_class(node: TraceNode) -> str:
    """Class under which a node's time is counted."""
    if node.kind == "gap":
        return LAUNCH_GAP
    return node.op_kind if node.op_kind in COMPUTE else node.kernel_class or node.op_kind


def build_trace_graph_arrays(model: TraceModel, n_replicas: int) -> StepGraph:
    """Lay the model's nodes into the engine's graph, for any number of replicas.

    Every node has an op type of its own, whose collective is named by the node's index.
    """
    model = _from_zero(model)
    builder = Builder()
    index: list[int] = []
    for i, node in enumerate(model.nodes):
        preds, stage = [index[p] for p in node.preds] or [START], node.stages[0]
        if node.kind == "join" and node.replica >= 0:  # a barrier that the other replicas pass
            index.append(preds[0])
        elif node.kind == "join":
            index.append(builder.join(preds, is_global=node.is_global, stage=stage))
        else:
            seconds = float(model.mean[i].mean())
            own = Collective(str(i), node.op_kind, kernel_class(node), seconds, 0.0, "")
            number = builder.number(OpType(node.op_kind, stage, collective=own))
            mb = -1 if node.is_global else node.microbatch
            index.append(
                builder.add(preds, number, is_global=node.is_global, stage=stage, microbatch=mb)
            )
    final = index[-1]
    if model.nodes[-1].name != ORIGIN:
        final = builder.join([index[i] for i in ops_of(model.nodes)], is_global=True)
    return build_arrays(builder, final, n_replicas, model.n_stages)


FACTORS = "step", "microbatch", "rank_step"


def build_trace_program(model: TraceModel, graph: StepGraph, measured_ranks: bool) -> Program:
    """Build the engine's arrays of a fitted trace on a graph from `build_trace_graph_arrays`.

    Each worker keeps its measured factor; or else ranks are drawn from the body, and lemons are as
    many in proportion.
    """
    model = _from_zero(model)
    node_of = [int(t.collective.name) for t in graph.op_types if t.collective is not None]
    lay = _Layout(model, node_of, graph.n_replicas, measured_ranks)
    low, typical = lay.lowering()
    (factor, ranks, held), (bank, vec) = lay.ranks(), lay.bank(graph)
    roles, loadings = ("compute",) * len(factor), (1.0,) * len(factor)
    origin = Origin(low, factor, roles, loadings, (), None, held)
    if held is not None:
        low = hold_seconds(low, held)
    names = [kernel_class(n) for n in lay.nodes]
    classes = tuple(dict.fromkeys(names))
    shares = np.array([[float(c == name) for c in classes] for name in names], np.float32)
    drawn = np.maximum(graph.op_type, 0)
    residual = np.array([lay.tables.checked(group.residual) for group in lay.groups], np.int32)
    alone = [n.kind == "op" and len(n.stages) == 1 and not n.is_global for n in lay.nodes]
    busy = np.where((graph.op_type >= 0) & np.array(alone)[drawn], graph.stage, -1)
    ops = engine.Ops(
        kind=graph.kind, pred0=graph.pred0, pred1=graph.pred1, out=graph.out, coef=drawn, vec=vec,
        n_terms=count_terms(low)[drawn], table=residual[drawn], draw=graph.draw,
        stage=graph.stage, busy=busy.astype(np.int32),
    )  # fmt: skip
    step_table = lay.tables.add_table(("step",), profile_table(step_profile(model), model.weight))
    n_stages = graph.n_stages
    stalls = engine.Stalls(
        engine.NO_STALL, np.zeros(n_stages), 1.0, 0.0, lay.tables.add(constant()),
        np.zeros(n_stages + 1, np.int32), np.zeros(0, np.int32), np.zeros(0),
    )  # fmt: skip
    return Program(
        ops, graph_arrays(graph), bank, engine.NO_LINKS, ranks, low, stalls, lay.tables.stack(),
        FACTORS, step_table, shares, classes, graph.n_draws, 1, typical=typical, alike=lay.alike(),
        origin=origin,
    )  # fmt: skip


def earliest_lead(model: TraceModel) -> float:
    """Give when the first host begins, over the begin of the step [s]: 0 or before."""
    leads = [mean.min() for node, mean in zip(model.nodes, model.mean, strict=True)
             if node.continues >= 0]  # fmt: skip
    return min([0.0, *map(float, leads)])


def _from_zero(model: TraceModel) -> TraceModel:
    """Count from the earliest lead, as no time of the engine is below 0, and take it off again."""
    sources = np.array([node.continues >= 0 for node in model.nodes])
    if not sources.any():
        return model
    lead = earliest_lead(model)
    mean = np.where(sources[:, None], model.mean - lead, model.mean)
    host = model.nodes[int(np.flatnonzero(sources)[0])]
    preds = tuple(ops_of(model.nodes).tolist())
    last = host._replace(name=ORIGIN, preds=preds, continues=-1, scope=WORLD)
    return replace(
        model, nodes=(*model.nodes, last), mean=np.append(mean, np.full_like(mean[:1], lead), 0),
        group=np.append(model.group, model.group[sources][0]),
    )  # fmt: skip


def step_profile(model: TraceModel) -> Array:
    """Factor of whole steps, [step], mean 1: every group's profile, weighted by its time."""
    total = np.zeros(model.weight.size)
    for i in np.flatnonzero(model.group >= 0):
        if model.nodes[i].op_kind in COMPUTE:
            total += model.mean[i] @ model.profile[model.group[i]]
    return total / (total @ model.weight) if total.any() else np.ones_like(total)


class _Layout:
    """Arrays of one program, coefficient by coefficient (one per node)."""

    def __init__(
        self, model: TraceModel, node_of: list[int], n_replicas: int, measured: bool
    ) -> None:
        self.model, self.n_replicas, self.tables = model, n_replicas, Tables()
        self.nodes = [model.nodes[i] for i in node_of]
        self.group = model.group[node_of]
        self.groups = [model.groups[g] for g in self.group]
        self.mean, self.profile = model.mean[node_of], model.profile
        self.measured = measured and n_replicas == model.n_replicas and len(model.rank_kinds) > 0
        self.rows = n_replicas
        if n_replicas != model.n_replicas:  # or else replicas keep what is their own
            self.mean = self.mean.mean(axis=1, keepdims=True)
            self.profile, self.rows = self.profile.mean(axis=1, keepdims=True), 1

    def alike(self) -> NDArray[np.int64]:
        """First coefficient with the same distributions: one group, means in proportion."""
        pattern = self.mean / np.maximum(self.mean.mean(axis=1, keepdims=True), 1e-300)
        key = np.column_stack([self.group, np.round(pattern, 6)])
        _, first, which = np.unique(key, axis=0, return_index=True, return_inverse=True)
        return np.asarray(first[which.ravel()])

    def lowering(self) -> tuple[engine.Lowering, Array]:
        """Durations of every coefficient, and what the fixed ones are with every effect at 1."""
        m, n = self.model, len(self.nodes)
        kind = np.array([m.rank_index(node) for node in self.nodes])
        cv = np.array([group.residual.std for group in self.groups])
        ranked = np.flatnonzero(kind >= 0)
        fixed = np.zeros((self.rows, n, 2))
        fixed[:, :, 0] = np.where(kind >= 0, 0.0, self.mean.T)
        seg_mean = np.zeros((ranked.size, max(1, len(m.rank_kinds))))
        seg_mean[np.arange(ranked.size), kind[ranked]] = self.mean[ranked].mean(axis=1)
        member = np.arange(self.n_replicas * m.n_stages).reshape(self.n_replicas, m.n_stages, 1)
        stage = [node.stages[0] for node in self.nodes]
        return engine.Lowering(
            member=member.astype(np.int32), seg_mean=seg_mean, seg_cv=cv[ranked],
            seg_stretch=np.ones((ranked.size, 2)), seg_cdf=np.zeros(ranked.size, np.int32),
            cdf=engine.cdf_cells(np.zeros((1, engine.CDF_ROWS))),
            coef_stage=np.where(kind >= 0, stage, -1).astype(np.int32),
            coef_seg_ptr=np.cumsum([False, *(kind >= 0)]).astype(np.int32),
            coef_seg=np.arange(ranked.size, dtype=np.int32), coef_count=np.ones(ranked.size),
            coef_split=np.tile([1.0, 0.0], (ranked.size, 1)), coef_member=np.zeros(n, np.int32),
            fixed_mean=fixed, fixed_var=(fixed[:, :, 0] * cv) ** 2, call_cv=np.zeros((n, 2)),
            table_std=cv, quiet=np.ones(n),
        ), fixed.mean(axis=0, keepdims=True)  # fmt: skip

    def ranks(self) -> tuple[Array, engine.Ranks, Array | None]:
        """Mean factor of every GPU [op_kind, gpu], and `Origin.held` of measured ones."""
        m, n_gpus, n_kinds = self.model, self.n_replicas * self.model.n_stages, len(self.model.rank)
        factor, held = np.ones((max(1, n_kinds), n_gpus)), None
        index = np.full(len(factor), -1, np.int32)
        if self.measured:
            both = np.stack([m.rank, 1.0 - m.follows])
            held = np.swapaxes(both, 2, 3).reshape(2, n_kinds, n_gpus)
            factor = np.swapaxes(m.rank * m.follows, 1, 2).reshape(factor.shape)
        else:
            for k in range(n_kinds):
                table, factor[k] = drawn_rank_table(m, k)
                if table[:, 0].any():
                    index[k] = self.tables.add_table(("rank", k), table)
        in_engine = np.ascontiguousarray(factor, np.float32)
        return factor, engine.Ranks(n_gpus, 1, 0.0, 0, index, in_engine), held

    def bank(self, graph: StepGraph) -> tuple[engine.Bank, NDArray[np.int32]]:
        """Shared-effect vectors, one per (group, microbatch), and each op's vector."""
        m = self.model
        rows: dict[tuple[int, int], int] = {(-1, -1): 0}
        vec = np.zeros((graph.kind.size, 2), np.int32)
        for i in np.flatnonzero(graph.op_type >= 0):
            c = graph.op_type[i]
            follows = self.groups[c].content != 0.0 and self.nodes[c].op_kind in COMPUTE
            key = int(self.group[c]), int(graph.microbatch[i]) if follows else -1
            vec[i, 0] = rows.setdefault(key, len(rows))
        table = np.full((len(FACTORS), self.rows, len(rows)), -1, np.int32)
        draw = np.zeros((len(FACTORS), len(rows)), np.int32)
        is_global, (step, content, rank_step) = np.zeros(len(rows), bool), table
        scope = dict(zip(self.group, (node.is_global for node in self.nodes), strict=True))
        profiles = {g: self._profiles(g) for g in {g for g, _ in rows} - {-1}}
        for (g, mb), v in list(rows.items())[1:]:
            group = m.groups[g]
            step[:, v] = profiles[g]
            if mb >= 0:
                content[:, v] = self.tables.optional(m.content, group.content / SCORE_STD)
            rank_step[:, v] = self.tables.optional(m.rank_step, group.rank_step / SCORE_STD)
            draw[:, v], is_global[v] = (0, mb, group.drift), scope[g]
        streams = [EFFECTS[name].streams[0] for name in FACTORS]
        no_link = np.full(len(rows), -1, np.int32)
        return lay_bank(table, draw, streams, (False, True, True), no_link, is_global), vec

    def _profiles(self, g: int) -> list[int]:
        """Tables of a group's step factor, one per replica; -1 where it is 1."""
        return [
            -1 if float(row.std()) < 1e-9
            else self.tables.add_table((g, row.tobytes()), profile_table(row, self.model.weight))
            for row in self.profile[g]
        ]  # fmt: skip


def drawn_rank_table(model: TraceModel, kind: int) -> tuple[Table, float]:
    """Tabulate a drawn worker's factor in one op_kind over its mean, - 1; and that mean.

    Each lemon is as likely as among the traced workers, with its own slowdown in each op_kind; one
    number draws all of a worker's factors.
    """
    width = np.diff(table_edges())
    rows = np.concatenate([np.arange(first, first + count) for first, count, _ in LEVELS])
    slow = sorted(model.lemons, key=lambda lemon: lemon[2])
    workers = model.n_replicas * model.n_stages
    # cells that together have the lemons' probability: wide ones, and narrow ones for the rest;
    # the narrowest, and the narrow ones that are left, stay the body's upper tail
    (_, n_wide, _), (_, n_narrow, _), _ = LEVELS
    wide = min(int(len(slow) / workers * 2.0**10), n_wide)
    narrow = min(round((len(slow) / workers - wide * 2.0**-10) * 2.0**20), n_narrow)
    cells = np.concatenate([n_wide - 1 - np.arange(wide), n_wide + np.arange(narrow)])
    body = np.ones(width.size, bool)
    body[cells] = False
    values = np.ones(width.size)
    if body.any():
        share = width[body] / width[body].sum()
        middle = np.cumsum(share) - 0.5 * share
        values[body] = model.rank_distribution.ppf(middle) ** float(model.rank_power[kind])
        values[body] /= share @ values[body]
    which = ((np.cumsum(width[cells]) - 0.5 * width[cells]) * workers).astype(np.int64)
    for i, (replica, stage, _) in enumerate(slow):
        values[cells[which == i]] = model.rank[kind, stage, replica]
    mean = float(values @ width)
    table = np.zeros((N_CELLS, 2), np.float32)
    table[rows, 0] = values / mean - 1.0
    return table, mean
