"""A job as a program: graph, effects, lowering and tables laid into the engine's arrays.

Ops' residuals become quantile tables, persistent effects coefficients that the engine lowers per
cluster.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism import engine
from prism.cluster.groups import Ends, shard_size, sync_units
from prism.cluster.machine import build_cluster
from prism.cluster.nodemap import Placement
from prism.cluster.wiring import Wiring
from prism.distributions.distribution import Distribution
from prism.jobs.job import Job
from prism.simulation.effects import congestion, rank, stall
from prism.simulation.effects.factor import Laying
from prism.simulation.lowering import LoweredOp, Lowerer, Term, lowering_arrays, residual_of
from prism.simulation.no_dependence import pool_program
from prism.simulation.placednodes import needs_memory, site_nodes
from prism.simulation.program import (
    Origin,
    PlacedPart,
    Program,
    Tables,
    global_ops,
    graph_arrays,
    lay_bank,
)
from prism.simulation.variability import Variability
from prism.workload.build import nominal_library
from prism.workload.kernels import is_compute
from prism.workload.opgraph import OpType, StepGraph


def build_program(job: Job, graph: StepGraph, variability: Variability, seed: int) -> Program:
    """Build the engine's arrays of a job; `seed` is of the pools of `dependence: none`."""
    full = _build_full(job, graph, variability)
    return pool_program(full, graph, seed) if variability.dependence == "none" else full


def _build_full(job: Job, graph: StepGraph, v: Variability) -> Program:
    placement = Placement(job)
    default = Placement(job, np.arange(placement.n_slots))
    slowdowns, size = placement.slowdowns(), shard_size(job)
    lowerer = Lowerer(v, needs_memory(slowdowns), call=v.call if size > 1 else None)
    lowered = [lowerer.lower(t) for t in graph.op_types]
    tables = Tables(job.source)
    kernels = bool((graph.call >= 0).any())
    call = None if kernels or size > 1 or v.call.std == 0.0 else v.call
    ranks = rank.lay(v.rank, default, lowerer.rank_exponents, tables)
    low = lowering_arrays(lowered, graph.op_types, default.members(), call)
    op_tables, table_std = _residual_tables(lowered, graph, default, call, tables)
    step_table = tables.optional(v.step.distribution, effect="step")
    shared = {*graph.op_type[global_ops(graph)].tolist()}
    n, units = graph.n_stages, sync_units(job)
    ends = [t.ends(n, c in shared, units) for c, t in enumerate(graph.op_types)]
    links, met = _links(graph, lowered, ends)
    bank, vec = _bank(graph, lowered, v, Laying(tables, default, v.rank), met)
    n_terms = np.array([*(len(op.terms) for op in lowered), 1], np.int32)[graph.op_type]
    stalls, quiet = stall.lay(v.stall, default, graph, tables)
    laid = congestion.lay(v.regime, default, links)
    low = low._replace(table_std=table_std, quiet=quiet)
    classes = tuple(dict.fromkeys(c for op in lowered for c, _ in op.shares))
    shares = [[dict(op.shares).get(c, 0.0) for c in classes] for op in lowered]
    drawn = np.maximum(graph.op_type, 0)
    ops = engine.Ops(
        kind=graph.kind, pred0=graph.pred0, pred1=graph.pred1, out=graph.out, coef=drawn,
        vec=vec, n_terms=n_terms, table=op_tables[drawn].astype(np.int32), draw=graph.draw,
        stage=graph.stage, busy=stall.busy_stage(graph),
    )  # fmt: skip
    places = _places(lowered, ends, default)
    wiring, nominal = None, {}  # where a job gives durations, there are no messages
    if job.model.durations is None:
        wiring = Wiring(build_cluster(job, nominal_library(job, v.library)), default)
        groups = dict.fromkeys(p.part.group for p in places if p.part.group != "stage")
        nominal = {group: wiring.is_nominal(group) for group in groups}
    origin = Origin(
        low, np.ones((len(lowerer.roles), default.n_gpus)), tuple(lowerer.roles),
        tuple(lowerer.loadings), places, wiring, work=_work(lowerer.works, default),
        behind=[op.behind_s for op in lowered], links=links, nominal=nominal,
    )  # fmt: skip
    program = Program(
        ops, graph_arrays(graph), bank, laid, ranks, low, stalls, tables.stack(),
        tuple(factor.name for factor in v.factors), step_table, np.array(shares, np.float32),
        classes, graph.n_draws, 1 + max(t.member for t in graph.op_types) if kernels else 1,
        origin=origin, added=v.added,
    )  # fmt: skip
    return site_nodes(program, placement, slowdowns)


def _work(works: Sequence[tuple[float, ...]], default: Placement) -> NDArray[np.float64] | None:
    """Work of a group's ranks over the mean [loading, member]; None where all are alike.

    Members are the ep ranks in their order, those of an expert next to each other.
    """
    if not any(works):
        return None
    n = default.members().shape[2]
    return np.array([np.repeat(own, n // len(own)) if own else np.ones(n) for own in works])


def _places(
    lowered: list[LoweredOp], each: list[Ends], default: Placement
) -> tuple[PlacedPart, ...]:
    """Whose nodes the fixed parts of every op type wait for."""
    domains, places = default.members() // default.job.cluster.nvlink_domain_gpus, []
    for c, (op, ends) in enumerate(zip(lowered, each, strict=True)):
        for part in op.parts:
            near = part.group == "hop" and not ends.leaves(domains).any()
            places.append(PlacedPart(c, part._replace(role="other") if near else part, ends))
    return tuple(places)


def _residual_tables(
    lowered: list[LoweredOp],
    graph: StepGraph,
    default: Placement,
    call: Distribution | None,
    tables: Tables,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Residual table of every op type at x = 1, and each table's standard deviation."""
    index, stds = np.zeros(len(lowered), np.int64), np.zeros(len(lowered))
    group = default.members().shape[2]
    for c, (op, op_type) in enumerate(zip(lowered, graph.op_types, strict=True)):
        lowered_call = call if op_type.collective is None else None
        distribution = residual_of(op, group if op_type.member < 0 else 1, lowered_call)
        index[c], stds[c] = tables.checked(distribution), distribution.cv
    return index, stds


def _bank(
    graph: StepGraph, lowered: list[LoweredOp], v: Variability, laying: Laying,
    links: list[list[int]],
) -> tuple[engine.Bank, NDArray[np.int32]]:  # fmt: skip
    """Lay the products of factors that terms of ops take, and find which each takes [op, term]."""
    n, width = len(v.factors), max(len(op.terms) for op in lowered)
    draws = np.array([factor.draws(graph) for factor in v.factors], np.int32).reshape(n, -1)
    drawn = [bool((own >= 0).any()) for own in draws]
    index = cache(lambda f, loading: v.factors[f].table(loading, laying))
    laid = np.full((len(lowered) + 1, width, n + 1), -1, np.int32)  # tables, and the link
    for c, op in enumerate(lowered):
        for t, term in enumerate(op.terms):
            own = [index(f, x) if x and drawn[f] else -1 for f, x in enumerate(term.loadings)]
            laid[c, t] = *own, links[c][t] if v.regime.acts else -1
    n_terms = np.array([*(len(op.terms) for op in lowered), 0])[graph.op_type, None]
    alone = global_ops(graph)[:, None, None] & (np.arange(width) < n_terms)[..., None]
    number = np.broadcast_to(draws.T[:, None], (graph.kind.size, width, n))
    table, link = np.split(laid[graph.op_type], [n], axis=2)
    table = np.where(number < 0, -1, table)
    number = np.where(table < 0, -1, number)
    each = np.concatenate([table, number, link, alone], axis=2).reshape(-1, 2 * n + 2)
    none = [*[-1] * (2 * n + 1), 0]
    rows = pd.DataFrame(np.concatenate([[none], each]))
    vec = rows.groupby([*rows], sort=False).ngroup().to_numpy(np.int32)[1:].reshape(-1, width)
    rows = rows.drop_duplicates().to_numpy(np.int32).T
    streams, by_replica = [x.stream for x in v.factors], [x.by_replica for x in v.factors]
    return lay_bank(
        rows[:n, None], rows[n : 2 * n], streams, by_replica, rows[-2].copy(), rows[-1]
    ), vec  # fmt: skip


def _links(
    graph: StepGraph, lowered: list[LoweredOp], each: list[Ends]
) -> tuple[list[Ends], list[list[int]]]:
    """Return links that congestion slows, and that of each op type's terms, -1 for none."""
    ops = zip(graph.op_types, lowered, each, strict=True)
    met = [[x if _may_leave(t, term) else None for term in op.terms] for t, op, x in ops]
    links = [*dict.fromkeys(x for own in met for x in own if x)]
    return links, [[links.index(x) if x else -1 for x in own] for own in met]


def _may_leave(op_type: OpType, term: Term) -> bool:
    """Tell whether a term's messages may leave an NVLink domain."""
    if op_type.collective is None:
        return term.far
    kernel_class = op_type.collective.kernel_class
    return not is_compute(kernel_class) and not kernel_class.startswith("tp_")
