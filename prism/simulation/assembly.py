"""A job as a program: graph, effects, lowering and tables laid into the engine's arrays.

Ops' residuals become quantile tables, persistent effects coefficients that the engine lowers per
cluster.
"""

from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from prism import engine
from prism.cluster.groups import shard_size
from prism.cluster.linkcongestion import congested_links, n_own_links
from prism.cluster.machine import build_cluster
from prism.cluster.nodemap import Placement
from prism.cluster.wiring import Wiring
from prism.common.errors import PrismError
from prism.distributions.distribution import Distribution, lognormal, normal
from prism.jobs.job import Job
from prism.simulation.independent import pool_program
from prism.simulation.lowering import LoweredOp, Lowerer, Term, lowering_arrays, residual_of
from prism.simulation.placednodes import needs_memory, site_nodes
from prism.simulation.program import (
    Bank,
    Origin,
    PlacedPart,
    Program,
    Tables,
    global_ops,
    graph_arrays,
)
from prism.simulation.variability import Variability
from prism.workload.build import nominal_library
from prism.workload.kernels import is_compute
from prism.workload.opgraph import OpType, StepGraph, nominal_duration

SPEED_DRAWS = 4096  # GPUs drawn to tell how far a shard group's slowest is from the others


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
    tables, bank = Tables(job.source), Bank()
    kernels = bool((graph.call >= 0).any())
    call = None if kernels or size > 1 or v.call.std == 0.0 else v.call
    ranks = _ranks(default, v, lowerer, tables)
    low = lowering_arrays(lowered, graph.op_types, default.members(), call)
    op_tables, table_std = _residual_tables(lowered, graph, default, call, tables)
    step_table = tables.optional(v.step, effect="step")
    vec, n_terms = _vectors(default, graph, lowered, v, tables, bank, step_table, kernels)
    stalls, quiet = _stalls(default, graph, v, tables)
    low = low._replace(table_std=table_std, quiet=quiet)
    classes = tuple(dict.fromkeys(c for op in lowered for c, _ in op.shares))
    shares = [[dict(op.shares).get(c, 0.0) for c in classes] for op in lowered]
    drawn = np.maximum(graph.op_type, 0)
    ops = engine.Ops(
        kind=graph.kind, pred0=graph.pred0, pred1=graph.pred1, out=graph.out, coef=drawn,
        vec=vec, n_terms=n_terms, table=op_tables[drawn].astype(np.int32), draw=graph.draw,
        stage=graph.stage, busy=_busy(graph),
    )  # fmt: skip
    jitter = engine.Jitter(v.jitter_s, tables.add(v.jitter)) if v.jitter_s else engine.NO_JITTER
    wiring = None  # where a job gives durations, there are no messages
    if job.model.durations is None:
        wiring = Wiring(build_cluster(job, nominal_library(job, v.library)), default)
    origin = Origin(
        low, np.ones((len(lowerer.roles), default.n_gpus)), lowerer.roles, lowerer.loadings,
        _places(graph, lowered, default), wiring,
    )  # fmt: skip
    program = Program(
        ops, graph_arrays(graph), bank.arrays(graph.n_microbatches), _links(default, v, graph),
        ranks, low, stalls, tables.stack(), step_table, np.array(shares, np.float32), classes,
        graph.n_draws, 1 + max(t.member for t in graph.op_types) if kernels else 1, origin=origin,
        jitter=jitter,
    )  # fmt: skip
    return site_nodes(program, placement, slowdowns)


def _places(
    graph: StepGraph, lowered: list[LoweredOp], default: Placement
) -> tuple[PlacedPart, ...]:
    """Whose nodes the fixed parts of every op type wait for."""
    members, domain = default.members(), default.job.cluster.nvlink_domain_gpus
    n = graph.n_stages
    is_global = np.zeros(len(lowered) + 1, bool)  # [op type], and the last of no type, -1
    is_global[graph.op_type[global_ops(graph)]] = True
    places = []
    for c, (op, op_type) in enumerate(zip(lowered, graph.op_types, strict=True)):
        for part in op.parts:
            stage = peer = op_type.stage
            if part.group == "hop":
                stage, peer = op_type.link, (op_type.link + 1) % n
                far = members[:, stage] // domain != members[:, peer] // domain
                part = part if far.any() else part._replace(role="other")
            elif part.group == "embedding":
                stage, peer = 0, n - 1
            elif part.group == "world":
                stage = peer = -1
            places.append(PlacedPart(c, part, bool(is_global[c]), stage, peer))
    return tuple(places)


def _ranks(default: Placement, v: Variability, lowerer: Lowerer, tables: Tables) -> engine.Ranks:
    n = len(lowerer.loadings)
    index = np.full(n, -1, np.int32)
    for j in range(n):
        index[j] = tables.optional(v.rank, lowerer.rank_exponent(j), "rank")
    node_weight = float(np.sqrt(v.node_share)) if v.rank.std > 0.0 else 0.0
    factor = np.ones((n, default.n_gpus), np.float32)
    node_table = tables.add(normal(1.0))
    return engine.Ranks(
        default.n_gpus, default.gpus_per_node, node_weight, node_table, index, factor
    )


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


def _vectors(
    placement: Placement,
    graph: StepGraph,
    lowered: list[LoweredOp],
    v: Variability,
    tables: Tables,
    bank: Bank,
    step_table: int,
    kernels: bool,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Shared-effect vector of every (op, term), and the number of terms of every op.

    The ranks of a shard or ep group have a microbatch each, and all wait for the slowest: the
    longest microbatch, but for one on a faster GPU. Experts take tokens of all ranks alike.
    """
    relative, n_own = _relative_speeds(placement, v), n_own_links(placement.job)
    call_table = tables.optional(v.call, effect="call") if kernels else -1
    width = max(len(op.terms) for op in lowered)
    largest = cache(lambda loading: tables.largest(v.microbatch, loading, relative))
    expert = cache(lambda: tables.optional(v.expert, effect="expert"))

    @cache
    def vectors(c: int, microbatch: int, op_call: int, alone: bool) -> list[int]:
        op_type, out = graph.op_types[c], [0] * width
        for t, term in enumerate(lowered[c].terms):
            mb_table = largest(term.mb_loading)
            called, call = call_table if term.compute else -1, op_call
            if term.routed:  # an ep group's own draw, the same in all layers of a microbatch
                called, call = expert(), microbatch
            called = called if call >= 0 else -1
            out[t] = bank.add(
                step_table, mb_table,
                microbatch if mb_table >= 0 else 0, called, call if called >= 0 else -1,
                _link_of(op_type, term, graph.n_stages, n_own) if v.regime.acts else -1, int(alone),
            )  # fmt: skip
        return out

    uneven = v.microbatch.std > 0.0
    used = [any(t.routed or (uneven and t.mb_loading) for t in op.terms) for op in lowered]
    columns = (x.tolist() for x in (graph.op_type, graph.microbatch, graph.call, global_ops(graph)))
    vec = [
        [0] * width if c < 0 else vectors(c, mb if used[c] else 0, call if kernels else -1, alone)
        for c, mb, call, alone in zip(*columns, strict=True)
    ]
    n_terms = np.array([*(len(op.terms) for op in lowered), 1], np.int32)
    return np.array(vec, np.int32), n_terms[graph.op_type]


def _relative_speeds(placement: Placement, v: Variability) -> NDArray[np.float64]:
    """Slowdown of each data-parallel rank of a shard group over its slowest's [draw, rank]."""
    n = shard_size(placement.job)
    if n == 1 or v.rank.std == 0.0:
        return np.ones((1, n))
    nodes = placement.ranks() // placement.gpus_per_node
    members = nodes.shape[2]  # of every group
    return _draw_speeds(v.rank, v.node_share, n, members, nodes.astype(np.int64).tobytes())


@lru_cache(maxsize=4)  # programs of one job have the same
def _draw_speeds(
    distribution: Distribution, node_share: float, n: int, members: int, nodes_of_groups: bytes
) -> NDArray[np.float64]:
    nodes = np.frombuffer(nodes_of_groups, np.int64).reshape(-1, members)
    rng = np.random.Generator(np.random.Philox(0))
    draws = max(16, SPEED_DRAWS // members)
    own = rng.standard_normal((draws, members))
    at = nodes[np.arange(draws) * len(nodes) // draws]  # groups may lie in different ways
    at = np.cumsum(np.diff(at, axis=1, prepend=at[:, :1]) > 0, axis=1)  # ranks rise in a group
    node = np.take_along_axis(rng.standard_normal((draws, at.max() + 1)), at, axis=1)
    z = np.sqrt(node_share) * node + np.sqrt(1.0 - node_share) * own
    x = distribution.ppf(ndtr(z)).reshape(draws, n, -1).max(axis=2)
    return np.asarray(x / x.max(axis=1, keepdims=True))


def _link_of(op_type: OpType, term: Term, n_stages: int, n_own: int) -> int:
    """Link of a collective by its number in `linkcongestion`; -1: on NVLink, or none."""
    c = op_type.collective
    if term.far:
        return n_stages + op_type.stage
    if c is None or is_compute(c.kernel_class) or c.kernel_class.startswith("tp_"):
        return -1
    if op_type.link >= 0:
        return op_type.link
    if c.group == "shard":
        return n_stages + op_type.stage
    named = {"world": n_own + n_stages, "embedding": n_own + n_stages + 1}
    return named.get(c.group, n_own + op_type.stage)


def _links(placement: Placement, v: Variability, graph: StepGraph) -> engine.Links:
    """Links of the default order: nominal times are means over their congestion."""
    if not v.regime.acts:
        return engine.NO_LINKS
    touched = congested_links(placement, graph.n_stages)
    quiet, congested = v.regime.levels(touched.n_touched)
    if quiet.min() <= 0.0:
        job = placement.job
        raise PrismError(
            f"{job.source or job.name}: cluster.scale.network.cv: {v.regime.spread:g} leaves a "
            "link that is not congested no time; take less than "
            f"{v.regime.spread / (1.0 - quiet.min()):.3g}, or set variability.effects.regime"
        )
    return engine.Links(*touched, quiet, congested, v.regime.probability)


def _stalls(
    placement: Placement, graph: StepGraph, v: Variability, tables: Tables
) -> tuple[engine.Stalls, NDArray[np.float64]]:
    """Stalls of a step, and the multiplier of compute between them, per op type.

    A group stalls at the rate of its entities over its own nominal compute time; a job over the
    whole step. Work between stalls is faster by what stalls take, so that the mean stays 1, unless
    they add to it.
    """
    stall, quiet, job = v.stall, np.ones(len(graph.op_types)), placement.job
    rate, length = stall.rate_per_hour / 3600.0, stall.duration_s
    nominal = np.array([nominal_duration(t) for t in graph.op_types])
    ops, shares, probability = [], [], np.zeros(graph.n_stages)
    entities = _entities(placement, stall.entity)
    busy = _busy(graph)
    for s in range(graph.n_stages):
        hit = np.flatnonzero((busy == s) & (nominal[graph.op_type] > 0.0))
        exposed = nominal[graph.op_type[hit]]
        # members of a group work at the same time: one of them stands for all
        alone = np.array([graph.op_types[t].member <= 0 for t in graph.op_type[hit]], bool)
        busy_s = float(exposed[alone].sum())
        ops.append(hit)
        shares.append(np.cumsum(exposed) / max(exposed.sum(), 1e-30))
        if stall.entity == "job":
            continue
        probability[s] = -np.expm1(-rate * entities * busy_s)
        if busy_s > 0.0:
            here = [t.stage == s and t.collective is None for t in graph.op_types]
            quiet[here] = 1.0 - probability[s] / entities * length / busy_s
    job_quiet = 1.0
    if stall.entity == "job":
        probability[:] = -np.expm1(-rate * graph.nominal_s)
        if not stall.adds:
            job_quiet = 1.0 - probability[0] * length / graph.nominal_s
    if min(job_quiet, float(quiet.min())) <= 0.0:
        raise PrismError(
            f"{job.source}: variability.effects.stall: {stall.rate_per_hour:g} per hour of "
            f"{length:g} s leave no time to work; lower rate_per_hour or duration_s"
        )
    entity = engine.JOB_STALL if stall.entity == "job" else engine.GROUP_STALL
    ptr = np.concatenate([[0], np.cumsum([len(o) for o in ops])])
    return engine.Stalls(
        entity if rate * length > 0.0 else engine.NO_STALL, probability, job_quiet, length,
        tables.add(lognormal(stall.duration_cv)), ptr.astype(np.int32),
        np.concatenate(ops).astype(np.int32), np.concatenate(shares),
    ), quiet  # fmt: skip


def _entities(placement: Placement, entity: str) -> float:
    """Ranks or nodes of one (replica, stage) group, in the mean."""
    ranks = placement.ranks()
    if entity == "rank":
        return float(ranks.shape[2])
    node = np.sort(ranks // placement.gpus_per_node, axis=2)
    return float(1.0 + np.count_nonzero(np.diff(node, axis=2), axis=2).mean())


def _busy(graph: StepGraph) -> NDArray[np.int32]:
    """Stage that computes during each op, -1 for joins, transfers and collectives over replicas."""
    computes = np.array([*(t.collective is None for t in graph.op_types), False])[graph.op_type]
    return np.where(computes, graph.stage, -1).astype(np.int32)
