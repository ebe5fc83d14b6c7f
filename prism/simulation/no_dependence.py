"""`dependence: none`: every op redraws everything from its pooled distribution.

The pooled distribution of an op type is sampled from the very program that it replaces:
coefficients of several cluster draws, all shared effects and the residual, so its variance is that
of `full`. What goes is the dependence between ops, and a tail finer than the samples hold.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.distributions.distribution import Distribution, constant
from prism.distributions.samples import sample_distribution
from prism.distributions.tables import sample_table
from prism.simulation.draws import seed_key
from prism.simulation.program import Program, Tables, lay_bank
from prism.workload.opgraph import StepGraph

POOL_CLUSTERS = 16  # clusters pooled at least
POOL_SAMPLES = 1 << 16  # samples of each op's pooled distribution


def pool_program(program: Program, graph: StepGraph, seed: int) -> Program:
    """Make every op redraw everything from its pooled distribution, its total variance kept."""
    distributions, means = _pooled_distributions(program, graph, seed)
    tables, n = Tables(), len(distributions)
    stds = np.array([distribution.std for distribution in distributions])
    index = np.array([tables.add(distribution) for distribution in distributions], np.int32)
    stall = tables.add_table((), program.tables[program.stalls.table])
    low = program.low._replace(
        seg_mean=np.zeros((0, program.low.seg_mean.shape[1])), seg_cv=np.zeros(0),
        seg_stretch=np.zeros((0, 2)), seg_cdf=np.zeros(0, np.int32),
        coef_stage=np.full(n, -1, np.int32),
        coef_seg_ptr=np.zeros(n + 1, np.int32), coef_seg=np.zeros(0, np.int32),
        coef_count=np.zeros(0), coef_split=np.zeros((0, 1)),
        fixed_mean=np.array(means)[None, :, None],
        fixed_var=((np.array(means) * stds) ** 2)[None, :],
        call_cv=np.zeros((n, 1)), table_std=stds,
        quiet=np.ones(n),
    )  # fmt: skip
    ranks = program.ranks._replace(
        tables=np.full_like(program.ranks.tables, -1), node_weight=0.0, node_table=0,
        factor=np.ones_like(program.ranks.factor),
    )  # fmt: skip
    ops = program.ops._replace(
        vec=np.zeros((program.ops.vec.shape[0], 1), np.int32),
        n_terms=np.ones_like(program.ops.n_terms), table=index[program.ops.coef],
    )  # fmt: skip
    none = np.zeros((1, 1, 1), np.int32)
    return replace(
        program, ops=ops, low=low, ranks=ranks, stalls=program.stalls._replace(table=stall),
        bank=lay_bank(none[:0], none[0, :0], (), (), none[0, 0] - 1, none[0, 0]), factors=(),
        links=program.links._replace(n_leaves=0), step_table=-1,
        tables=tables.stack(), shared=program,
    )  # fmt: skip


def _pooled_distributions(
    program: Program, graph: StepGraph, seed: int
) -> tuple[list[Distribution], list[float]]:
    """Pool each op type's duration over clusters, replicas and all shared effects."""
    rng = np.random.Generator(np.random.Philox(seed))
    n_replicas = program.graph.n_replicas
    n_clusters, key = max(POOL_CLUSTERS, 1024 // n_replicas), seed_key(seed)
    x = engine.draw_clusters(program.ranks, program.tables, 0, n_clusters, key)
    drawn = engine.lower(program.low, x, np.arange(n_replicas))
    pooled_a, pooled_r = (np.concatenate(v) for v in drawn)  # [draw, coef, term], [draw, coef]
    distributions: list[Distribution] = []
    means: list[float] = []
    example = {int(t): i for i, t in enumerate(graph.op_type) if t >= 0}
    alike, bank = program.alike, program.bank
    seconds = pooled_a.sum(axis=2, dtype=np.float64).mean(axis=0)
    for c in range(program.low.table_std.size):
        if alike is not None and alike[c] != c:
            same = int(alike[c])
            distributions.append(distributions[same])
            means.append(means[same] * seconds[c] / seconds[same] if seconds[same] > 0.0 else 0.0)
            continue
        i = example[c]
        pick = rng.integers(0, pooled_a.shape[0], POOL_SAMPLES)
        samples = np.zeros(POOL_SAMPLES)
        shared: dict[str, NDArray[np.uint32]] = {}
        for t in range(program.ops.n_terms[i]):
            v = program.ops.vec[i, t]
            part = pooled_a[pick, c, t].astype(np.float64)
            for name, table in zip(program.factors, bank.table, strict=True):
                rows = table[:, v]
                if rows.max() >= 0:
                    u = shared.setdefault(name, _uniforms(rng))
                    part = part * _factors(program.tables, rows, pick, u)
            if bank.link[v] >= 0 and program.links.n_leaves > 0:
                u = shared.setdefault("link", _even_uniforms(rng))
                part = part * _congestion(program.links, int(bank.link[v]), pick % n_replicas, u)
            samples += part
        residual = sample_table(program.tables[program.ops.table[i]], _uniforms(rng))
        samples *= 1.0 + pooled_r[pick, c] * residual
        mean = float(samples.mean())
        means.append(mean)
        distributions.append(sample_distribution(samples) if mean > 0.0 else constant())
    return distributions, means


def _factors(
    tables: NDArray[np.float32], rows: NDArray[np.int32], pick: NDArray[np.int64],
    u: NDArray[np.uint32],
) -> NDArray[np.float64]:  # fmt: skip
    """Shared effect of each sample, by the table of its replica (or the one for all)."""
    out = np.ones(u.size)
    for row, table in enumerate(rows):
        if table >= 0:
            own = pick % rows.size == row
            out[own] += sample_table(tables[table], u[own])
    return out


def _uniforms(rng: np.random.Generator) -> NDArray[np.uint32]:
    return rng.integers(0, 1 << 32, POOL_SAMPLES, dtype=np.uint32)


def _even_uniforms(rng: np.random.Generator) -> NDArray[np.uint32]:
    """Uniforms that are evenly spread, where a rare value decides the mean."""
    even = (rng.permutation(POOL_SAMPLES) + rng.random(POOL_SAMPLES)) / POOL_SAMPLES
    return (even * 2.0**32).astype(np.uint32)


def _congestion(
    links: engine.Links, link: int, replica: NDArray[np.int64], u: NDArray[np.uint32]
) -> NDArray[np.float64]:
    """Multiplier of a link in each sample, of its replica."""
    n_leaves = links.n_touched[replica, link]
    hit = u < 2.0**32 * (1.0 - (1.0 - links.probability) ** n_leaves)
    level = np.where(hit, links.congested[replica, link], links.quiet[replica, link])
    return np.where(n_leaves == 0, 1.0, level)
