"""A job as the engine's arrays: graph, effects, lowering and tables of one step.

The one module, with `prism.simulate`, that sees both objects and arrays. Shared effects become
vectors of lanes ("bank"), ops' residuals quantile tables, persistent effects coefficients that the
engine lowers per cluster.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.cluster import Placement
from prism.distributions import Law, constant, empirical, lognormal, normal, quantile_table
from prism.job import Job
from prism.lowering import LoweredOp, Lowerer, lowering_arrays, residual_law
from prism.stepgraph import OpType, StepGraph, nominal_duration
from prism.tables import sample_table
from prism.variability import Variability, is_compute

POOL_CLUSTERS = 16  # clusters pooled for `dependence: none`
POOL_SAMPLES = 1 << 16  # samples of each op's pooled law


@dataclass(frozen=True)
class Program:
    """Engine arguments of one job, and the labels of what comes out."""

    ops: engine.Ops
    graph: engine.Graph
    bank: engine.Bank
    links: engine.Links
    ranks: engine.Ranks
    low: engine.Lowering
    stalls: engine.Stalls
    tables: NDArray[np.float32]
    step_table: int
    shares: NDArray[np.float32]  # [coef, class]
    classes: tuple[str, ...]
    n_draws: int
    shared: "Program | None" = None  # before pooling, where `dependence: none` pooled this one

    def arrays(self, track: bool) -> engine.Step:
        """Arrays for `engine.run_range`, with or without tracking of the critical path."""
        shares = self.shares if track else np.zeros((self.shares.shape[0], 0), np.float32)
        return engine.Step(
            self.ops, self.graph, self.bank, self.links, self.ranks, self.low, self.stalls,
            self.tables, self.step_table, shares,
        )  # fmt: skip


class _Tables:
    """Quantile tables, built once per (law, power)."""

    def __init__(self) -> None:
        self.index: dict[tuple[Law, float], int] = {}
        self.arrays: list[NDArray[np.float32]] = []

    def add(self, law: Law, power: float = 1.0) -> int:
        key = (law, power)
        if key not in self.index:
            self.index[key] = len(self.arrays)
            self.arrays.append(quantile_table(law, power))
        return self.index[key]

    def optional(self, law: Law, power: float = 1.0) -> int:
        """Index of the table, -1 where the effect is off."""
        return -1 if power == 0.0 or law.std == 0.0 else self.add(law, power)

    def stack(self) -> NDArray[np.float32]:
        self.add(constant())
        return np.ascontiguousarray(np.stack(self.arrays), np.float32)


class _Bank:
    """Shared-effect vectors, one per distinct product of effects."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], int] = {}
        self.add(-1, -1, 0, -1, -1, -1, 0)

    def add(self, *row: int) -> int:
        return self.rows.setdefault(row, len(self.rows))

    def arrays(self, n_microbatches: int, n_calls: int) -> engine.Bank:
        table = np.array(list(self.rows), np.int32)
        step, mb_table, mb, call_table, call, link, is_global = np.ascontiguousarray(table.T)
        return engine.Bank(
            step, mb_table, mb, call_table, call, link, is_global.astype(np.uint8),
            n_microbatches if bool((mb_table >= 0).any()) else 0, n_calls,
        )  # fmt: skip


def build_program(job: Job, graph: StepGraph, variability: Variability, seed: int) -> Program:
    """Build the engine's arrays of a job.

    Parameters
    ----------
    job : Job
    graph : StepGraph
    variability : Variability
    seed : int
        Seed of the pooled laws (`dependence: none` only).
    """
    full = _build_full(job, graph, variability)
    if variability.dependence == "none":
        return _pool(full, graph, variability, seed)
    return full


def ideal_program(program: Program) -> Program:
    """Return the same step with every effect at 1."""
    program = program.shared or program  # pooled means hold slow GPUs and barriers' waits
    low = program.low
    constant_table = program.tables.shape[0] - 1
    n_vectors = program.bank.mb.shape[0]
    off = np.full(n_vectors, -1, np.int32)
    n_loadings = program.ranks.tables.shape[0]
    return replace(
        program,
        bank=program.bank._replace(step_table=off, mb_table=off, call_table=off, link=off,
                                   n_microbatches=0),
        ranks=program.ranks._replace(
            tables=np.full(n_loadings, -1, np.int32), factor=np.ones_like(program.ranks.factor)
        ),
        low=low._replace(
            seg_cv=np.zeros_like(low.seg_cv), fixed_var=np.zeros_like(low.fixed_var),
            call_cv=np.zeros_like(low.call_cv), quiet=1.0,
        ),
        ops=program.ops._replace(table=np.full_like(program.ops.table, constant_table)),
        stalls=program.stalls._replace(entity=engine.NO_STALL),
        links=program.links._replace(n_leaves=0),
        step_table=-1,
    )  # fmt: skip


def _build_full(job: Job, graph: StepGraph, v: Variability) -> Program:
    placement = Placement(job)
    lowerer = Lowerer(v)
    lowered = [lowerer.lower(t) for t in graph.op_types]
    tables, bank = _Tables(), _Bank()
    kernels = bool((graph.call >= 0).any())
    call_std = 0.0 if kernels else v.call.std
    member = placement.members()
    ranks = _ranks(job, placement, v, lowerer, tables)
    bare = lowering_arrays(lowered, graph.op_types, member, call_std)
    op_tables, table_std = _residual_tables(lowered, graph, bare, v, call_std, tables)
    low = lowering_arrays(lowered, graph.op_types, member, call_std, table_std)
    step_table = tables.optional(v.step)
    links = _links(placement, v, graph)
    low = low._replace(quiet=_quiet(v))
    vec, n_terms = _vectors(graph, lowered, v, tables, bank, step_table, kernels)
    stalls = _stalls(job, graph, v, tables)
    classes = tuple(dict.fromkeys(c for op in lowered for c, _ in op.shares))
    shares = np.zeros((len(lowered), len(classes)), np.float32)
    for c, op in enumerate(lowered):
        for name, share in op.shares:
            shares[c, classes.index(name)] = share
    drawn = np.maximum(graph.op_type, 0)
    ops = engine.Ops(
        kind=graph.kind, pred0=graph.pred0, pred1=graph.pred1, out=graph.out, coef=drawn,
        vec=vec, n_terms=n_terms, table=op_tables[drawn].astype(np.int32), draw=graph.draw,
        stage=graph.stage,
    )  # fmt: skip
    return Program(
        ops, _graph(graph), bank.arrays(graph.n_microbatches, graph.n_calls), links, ranks, low,
        stalls, tables.stack(), step_table, shares, classes, graph.n_draws,
    )  # fmt: skip


def _graph(graph: StepGraph) -> engine.Graph:
    n_local_phases = int((graph.phase_global == 0).sum())
    return engine.Graph(
        graph.phase_global, graph.phase_lo, graph.phase_hi, graph.n_replicas,
        graph.n_replicas if n_local_phases > 1 else 1, graph.n_slots, graph.n_global_slots,
        graph.n_stages, graph.final_slot,
    )  # fmt: skip


def _ranks(
    job: Job, placement: Placement, v: Variability, lowerer: Lowerer, tables: _Tables
) -> engine.Ranks:
    slow = placement.slowdowns()
    factor = np.stack([slow**loading for loading in lowerer.loadings])
    node_weight = float(np.sqrt(v.node_share)) if v.rank.std > 0.0 else 0.0
    return engine.Ranks(
        n_gpus=placement.n_gpus,
        gpus_per_node=placement.gpus_per_node,
        node_weight=node_weight,
        node_table=tables.add(normal(1.0)),
        tables=np.array([tables.optional(v.rank, x) for x in lowerer.loadings], np.int32),
        factor=np.ascontiguousarray(factor, np.float32),
    )


def _residual_tables(
    lowered: list[LoweredOp],
    graph: StepGraph,
    bare: engine.Lowering,
    v: Variability,
    call_std: float,
    tables: _Tables,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Residual table of every op type at x = 1, and each table's standard deviation."""
    n_gpus = int(bare.member.max()) + 1
    shape = (1, *bare.fixed_mean.shape)
    a, r = np.empty(shape, np.float32), np.empty(shape[:2], np.float32)
    x = np.ones((max(1, bare.seg_mean.shape[1]), n_gpus), np.float32)
    one = bare._replace(member=np.ascontiguousarray(bare.member[:1]))
    engine.lower_groups(one, x, a, r)
    index, stds = np.zeros(len(lowered), np.int64), np.zeros(len(lowered))
    group = bare.member.shape[2]
    for c, op in enumerate(lowered):
        mean = float(a[0, c].sum())
        op_type = graph.op_types[c]
        compute = float(a[0, c, : len(op.terms)] @ [float(t.compute) for t in op.terms])
        call_third = 0.0
        if call_std > 0.0 and op_type.collective is None and mean > 0.0:
            call_third = v.call.skew * (compute / mean) ** 3
        alone = op.single is not None and (
            op_type.collective is not None or group == 1 or op_type.member >= 0
            or not op.segments
        )  # fmt: skip
        if alone and call_third == 0.0 and op.single is not None:
            law = op.single
        else:
            law = residual_law(replace(op, single=None), float(r[0, c]), mean or 1.0, call_third)
        index[c], stds[c] = tables.add(law), law.std
    return index, stds


def _vectors(
    graph: StepGraph,
    lowered: list[LoweredOp],
    v: Variability,
    tables: _Tables,
    bank: _Bank,
    step_table: int,
    kernels: bool,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Shared-effect vector of every (op, term), and the number of terms of every op."""
    call_table = tables.optional(v.call) if kernels else -1
    width = max(len(op.terms) for op in lowered)
    vec = np.zeros((graph.kind.size, width), np.int32)
    n_terms = np.ones(graph.kind.size, np.int32)
    is_global = np.zeros(graph.kind.size, np.int64)
    for g, lo, hi in zip(graph.phase_global, graph.phase_lo, graph.phase_hi, strict=True):
        is_global[lo:hi] = g
    congested = v.regime.probability > 0.0 and v.regime.factor > 1.0
    for i in np.flatnonzero(graph.op_type >= 0):
        op_type, op = graph.op_types[graph.op_type[i]], lowered[graph.op_type[i]]
        n_terms[i] = len(op.terms)
        for t, term in enumerate(op.terms):
            mb_table = tables.optional(v.microbatch, term.mb_loading)
            called = call_table if term.compute and graph.call[i] >= 0 else -1
            vec[i, t] = bank.add(
                step_table,
                mb_table,
                int(graph.microbatch[i]) if mb_table >= 0 else 0,
                called,
                int(graph.call[i]) if called >= 0 else -1,
                _link_of(op_type, graph.n_stages) if congested else -1,
                int(is_global[i]),
            )
    return vec, n_terms


def _link_of(op_type: OpType, n_stages: int) -> int:
    """Link of a collective: 0..p-1 stage to stage, p..2p-1 within a stage, 2p the whole job."""
    c = op_type.collective
    if c is None or is_compute(c.kernel_class):
        return -1
    if op_type.link >= 0:
        return op_type.link
    if c.kernel_class in ("world_all_reduce", "embedding_all_reduce"):
        return 2 * n_stages
    return n_stages + op_type.stage


def _links(placement: Placement, v: Variability, graph: StepGraph) -> engine.Links:
    p, factor = v.regime.probability, v.regime.factor
    congested = p > 0.0 and factor > 1.0
    lo, hi = placement.link_leaves(graph.n_stages)
    mean = 1.0 + p * (factor - 1.0) if congested else 1.0
    return engine.Links(
        np.ascontiguousarray(lo, np.int32), np.ascontiguousarray(hi, np.int32),
        placement.n_leaves if congested else 0, p if congested else 0.0, 1.0 / mean,
        factor / mean if congested else 1.0,
    )  # fmt: skip


def _quiet(v: Variability) -> float:
    """Speed of work between stalls that keeps the mean of working and stalling at nominal."""
    return 1.0 / (1.0 + v.stall.rate_per_hour / 3600.0 * v.stall.duration_s)


def _stalls(job: Job, graph: StepGraph, v: Variability, tables: _Tables) -> engine.Stalls:
    """Stalls over one step: the rate of a group's entities times the step's nominal length."""
    stall = v.stall
    active = stall.rate_per_hour > 0.0 and stall.duration_s > 0.0
    entity = engine.NO_STALL
    probability = 0.0
    if active:
        entity = engine.JOB_STALL if stall.entity == "job" else engine.GROUP_STALL
        probability = -float(np.expm1(-_stalls_per_step(job, graph, v)))
    first_global = {i for lo, hi, g in zip(graph.phase_lo, graph.phase_hi, graph.phase_global,
                                           strict=True) if g for i in range(lo, hi)}  # fmt: skip
    per_stage = [
        [i for i in np.flatnonzero((graph.stage == s) & (graph.op_type >= 0))
         if i not in first_global and graph.op_types[graph.op_type[i]].collective is None]
        for s in range(graph.n_stages)
    ]  # fmt: skip
    ptr = np.concatenate([[0], np.cumsum([len(o) for o in per_stage])])
    return engine.Stalls(
        entity, probability, stall.duration_s, tables.add(lognormal(stall.duration_cv)),
        ptr.astype(np.int32), np.array([i for o in per_stage for i in o], np.int32),
    )  # fmt: skip


def _stalls_per_step(job: Job, graph: StepGraph, v: Variability) -> float:
    """Return the expected stalls of one (replica, stage) group, or of the job, in one step."""
    p = job.parallelism
    # members of a group work at the same time: one of them stands for all
    nominal = np.array([nominal_duration(t) if t.member <= 0 else 0.0 for t in graph.op_types])
    local = graph.op_type[(graph.op_type >= 0) & (graph.microbatch >= 0)]
    step_s = float(nominal[local].sum()) / graph.n_stages
    entities = {"rank": p.tp * p.cp, "node": p.tp * p.cp / job.cluster.gpus_per_node, "job": 1.0}
    return v.stall.rate_per_hour / 3600.0 * step_s * entities[v.stall.entity]


def _pool(program: Program, graph: StepGraph, v: Variability, seed: int) -> Program:
    """`dependence: none`: every op redraws everything from its pooled law, total variance kept."""
    laws, means = _pooled_laws(program, graph, seed)
    tables = _Tables()
    index = np.array([tables.add(law) for law in laws], np.int32)
    n = len(laws)
    fixed = np.zeros((n, 1))
    fixed[:, 0] = means
    low = program.low._replace(
        seg_mean=np.zeros((0, program.low.seg_mean.shape[1])), seg_cv=np.zeros(0),
        seg_cdf=np.zeros(0, np.int32), coef_stage=np.full(n, -1, np.int32),
        coef_seg_ptr=np.zeros(n + 1, np.int32), coef_seg=np.zeros(0, np.int32),
        coef_count=np.zeros(0), coef_split=np.zeros((0, 1)), fixed_mean=fixed,
        fixed_var=np.array([(m * law.std) ** 2 for m, law in zip(means, laws, strict=True)]),
        call_cv=np.zeros((n, 1)), table_std=np.array([law.std for law in laws]),
    )  # fmt: skip
    stalls = program.stalls._replace(table=tables.add(lognormal(v.stall.duration_cv)))
    ranks = program.ranks._replace(
        tables=np.full_like(program.ranks.tables, -1), node_weight=0.0, node_table=0,
        factor=np.ones_like(program.ranks.factor),
    )  # fmt: skip
    ops = program.ops._replace(
        vec=np.zeros((program.ops.vec.shape[0], 1), np.int32),
        n_terms=np.ones_like(program.ops.n_terms), table=index[program.ops.coef],
    )  # fmt: skip
    return replace(
        program, ops=ops, low=low, ranks=ranks, stalls=stalls, tables=tables.stack(),
        bank=_Bank().arrays(0, 0), links=program.links._replace(n_leaves=0), step_table=-1,
        shared=program,
    )  # fmt: skip


def _pooled_laws(program: Program, graph: StepGraph, seed: int) -> tuple[list[Law], list[float]]:
    """Pool each op type's duration over clusters, replicas and all shared effects."""
    rng = np.random.Generator(np.random.Philox(seed))
    pooled_a, pooled_r = _sample_coefficients(program, seed)
    laws, means = [], []
    tables = program.tables.astype(np.float64)
    example = {int(t): i for i, t in enumerate(graph.op_type) if t >= 0}
    for c in range(program.low.table_std.size):
        i = example[c]
        pick = rng.integers(0, pooled_a.shape[0], POOL_SAMPLES)
        samples = np.zeros(POOL_SAMPLES)
        shared: dict[tuple[str, int], NDArray[np.uint32]] = {}
        for t in range(program.ops.n_terms[i]):
            v = program.ops.vec[i, t]
            part = pooled_a[pick, c, t].astype(np.float64)
            for name, column in (
                ("step", program.bank.step_table),
                ("mb", program.bank.mb_table),
                ("call", program.bank.call_table),
            ):
                if column[v] >= 0:
                    u = shared.setdefault((name, 0), _uniforms(rng))
                    part = part * (1.0 + _look_up(tables[column[v]], u))
            if program.bank.link[v] >= 0 and program.links.n_leaves > 0:
                part = part * _link_samples(program, int(program.bank.link[v]), rng)
            samples += part
        residual = _look_up(tables[program.ops.table[i]], _uniforms(rng))
        samples *= 1.0 + pooled_r[pick, c] * residual
        mean = float(samples.mean())
        means.append(mean)
        laws.append(_empirical(samples / mean) if mean > 0.0 else constant())
    return laws, means


def _sample_coefficients(
    program: Program, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Coefficients of several cluster draws, [draw, coef, term] and [draw, coef]."""
    n_coef, n_terms = program.low.fixed_mean.shape
    replicas = program.graph.n_replicas
    clusters = max(POOL_CLUSTERS, 1024 // replicas)
    words = np.empty((4, engine.LANES), np.uint32)
    x = np.ones((program.ranks.tables.shape[0], max(1, program.ranks.n_gpus)), np.float32)
    all_a = np.empty((clusters, replicas, n_coef, n_terms), np.float32)
    all_r = np.empty((clusters, replicas, n_coef), np.float32)
    k0, k1 = split_seed(seed)
    for k in range(clusters):
        engine.draw_ranks(program.ranks, program.tables, k, k0, k1, words, x)
        engine.lower_groups(program.low, x, all_a[k], all_r[k])
    return all_a.reshape(-1, n_coef, n_terms), all_r.reshape(-1, n_coef)


def _uniforms(rng: np.random.Generator) -> NDArray[np.uint32]:
    return rng.integers(0, 1 << 32, POOL_SAMPLES, dtype=np.uint32)


def _look_up(table: NDArray[np.float64], u: NDArray[np.uint32]) -> NDArray[np.float64]:
    return np.asarray(sample_table(table.astype(np.float32), u))


def _link_samples(program: Program, link: int, rng: np.random.Generator) -> NDArray[np.float64]:
    links = program.links
    width = (links.leaf_hi[:, link] - links.leaf_lo[:, link]).sum(axis=1)
    hit = 1.0 - (1.0 - links.probability) ** width[rng.integers(0, width.size, POOL_SAMPLES)]
    return np.where(rng.random(POOL_SAMPLES) < hit, links.congested, links.quiet)


def _empirical(samples: NDArray[np.float64]) -> Law:
    """Empirical law of mean-one samples; a constant where they do not vary."""
    if samples.std() < 1e-9:
        return constant()
    tail = 0.5 ** np.arange(7, 17)
    q = np.unique(np.concatenate([tail, np.linspace(0.0, 1.0, 257), 1.0 - tail]))
    law = empirical(q.tolist(), np.quantile(samples, q).tolist())
    return law.scaled_to(float(samples.std()))


def split_seed(seed: int) -> tuple[np.uint32, np.uint32]:
    """Split a 64-bit seed into the two words of Philox's key."""
    return np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF)
