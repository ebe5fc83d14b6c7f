"""A fitted trace: the graph of its step, and the laws of what happens in it.

Every op's duration is `mean x rank x step x microbatch x rank_step x residual`, each factor of mean
1 over its population. The step factor is a profile over the measured steps, so that one draw (which
of them) moves compute, collectives and gaps together as they moved; the others are laws. The same
tables serve `draw_durations` here and the engine (`prism.simulation.tracemodel.arrays`). Left out:
how it is estimated (`prism.models.fit`), and effects that a trace of one job cannot show.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from prism.common.errors import PrismError
from prism.distributions.law import Law, constant, empirical, quantile_table
from prism.distributions.tables import N_CELLS, sample_table
from prism.jobs.job import Job, job_from_dict
from prism.simulation.tracemodel.graph import TraceGraph, TraceNode, replay

Array = NDArray[np.float64]
Table = NDArray[np.float32]
KNOTS = 257  # of an empirical law
FLOOR = 1e-3  # of the mean: no duration is shorter
POOL_STEPS = 200  # steps that independent ops are drawn from


class OpGroup(NamedTuple):
    """Ops that share their laws: one op_kind of one stage and chunk, or one collective."""

    op_kind: str
    kernel_class: str
    name: str
    stage: int
    chunk: int
    n: int  # durations it rests on
    mean: float  # seconds
    cv: float  # of all its durations together
    p99_p50: float
    ks: float  # of all its durations together against a lognormal
    residual: Law
    content: float  # std of log duration from the microbatch's content
    rank_step: float  # std of log duration from a rank's own drift from step to step
    drift: int = 0  # which draw of rank_step it follows: one for a replica, or one by stage

    @property
    def label(self) -> str:
        """What users read."""
        chunk = f" chunk {self.chunk}" if self.chunk > 0 else ""
        return f"{self.name} stage {self.stage}{chunk}" if self.stage >= 0 else self.name


@dataclass(frozen=True)
class TraceModel:
    """What a trace taught.

    Attributes
    ----------
    nodes : tuple of TraceNode
        The step's graph, negligible gaps folded into the ops after them.
    group : int64 [node]
        Index into ``groups``; -1 for joins.
    mean : float64 [node, replica]
        Seconds; with the rank factor taken out where the op has one.
    profile : float64 [group, replica, step]
        Step factor of each group in each measured step, mean 1; from the fastest step to the
        slowest.
    steps : int64 [step]
        Their numbers.
    weight : float64 [step]
        Probability of drawing each of them; equal unless `conditioned`.
    rank : float64 [op_kind, stage, replica]
        Persistent factor of each traced worker, 1 for a typical one.
    follows : float64 [op_kind, stage, replica]
        Share of a worker's time that follows the shared effects; a lemon held up for a fixed time
        varies less than its slowdown would have it. 1 for the body.
    rank_kinds : tuple of str
        The op_kinds of ``rank``; others have no rank factor.
    rank_law : Law
        Of a worker drawn from the body, for the op_kind with the largest spread; lemons apart.
    rank_power : float64 [op_kind]
        Exponent of the rank law in each op_kind.
    content, rank_step : Law
        Of exp(score) with the score's standard deviation at ``SCORE_STD``.
    correlation_steps, correlation_share : float
        Steps over which the step factor is remembered (0: none was found), and the share of its
        variance that is.
    lemons : tuple of (replica, stage, slowdown)
    measured_mean : float
        Of the measured steps [s].
    period_ratio : float
        Time from one measured step to the next over the step's own time [1]; below 1 where steps
        overlap, as where the host runs ahead of the GPU.
    report : dict
        What `prism fit` prints.
    job : dict
        Blocks of the job file that describes the traced job.
    """

    nodes: tuple[TraceNode, ...]
    n_stages: int
    n_replicas: int
    p2p: str
    group: NDArray[np.int64]
    groups: tuple[OpGroup, ...]
    mean: Array
    profile: Array
    steps: NDArray[np.int64]
    weight: Array
    rank: Array
    follows: Array
    rank_kinds: tuple[str, ...]
    rank_law: Law
    rank_power: Array
    content: Law
    rank_step: Law
    correlation_steps: float
    correlation_share: float
    lemons: tuple[tuple[int, int, float], ...] = ()
    measured_mean: float = 0.0
    period_ratio: float = 1.0
    report: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)

    def rank_index(self, node: TraceNode) -> int:
        """Which rank factor a node has, -1: none."""
        is_op = node.kind == "op" and len(node.stages) == 1 and node.microbatch >= 0
        return (
            self.rank_kinds.index(node.op_kind) if is_op and node.op_kind in self.rank_kinds else -1
        )


SCORE_STD = 0.1  # any number that keeps exp(score) well behaved; loadings are relative to it


def score_law(scores: Array) -> Law:
    """Law of exp(SCORE_STD * z) from scores z, standardised first."""
    z = scores[np.isfinite(scores)]
    if z.size < 2 or z.std() == 0.0:
        return constant()
    return sample_law(np.exp(SCORE_STD * (z - z.mean()) / z.std()))


def sample_law(values: Array) -> Law:
    """Empirical law of mean 1 through the quantiles of positive values."""
    values = values[np.isfinite(values)]
    if values.size < 2 or values.std() <= 1e-6 * abs(values.mean()):
        return constant()
    q = np.linspace(0.0, 1.0, min(values.size, KNOTS))
    if values.size > 4 * KNOTS:  # a finer tail where there are values to fill it
        tail = 0.5 ** np.arange(9, 9 + int(math.log2(values.size / KNOTS)))
        q = np.unique(np.concatenate([q, 1.0 - tail]))
    x = np.maximum(np.quantile(values, q), FLOOR * float(values.mean()))
    law = empirical(q.tolist(), x.tolist())
    scaled = law.scaled_to(float(values.std() / values.mean()))
    return scaled if float(scaled.ppf(np.array([0.0]))[0]) > 0.0 else law


def profile_table(profile: Array, weight: Array) -> Table:
    """Table of a factor that takes one of n values with their probabilities."""
    middles = (np.arange(1024) + 0.5) / 1024.0
    which = np.searchsorted(np.cumsum(weight)[:-1] / weight.sum(), middles)
    table = np.zeros((N_CELLS, 2), np.float32)
    table[:1024, 0] = profile[which] - 1.0
    table[1024:, 0] = table[1023, 0]
    return table


def conditioned(model: TraceModel, steps: NDArray[np.int64]) -> TraceModel:
    """Weigh the measured steps by how likely steps of these numbers are to be like them.

    Parameters
    ----------
    steps : int64 [step]
        Numbers of the steps that are asked for.

    Notes
    -----
    The step factor's normal score has correlation `share exp(-distance / correlation_steps)`; given
    the measured steps' scores it is normal, and the weights are its mean probabilities of the
    intervals that the measured steps stand for.
    """
    n = model.steps.size
    if model.correlation_steps <= 0.0 or n < 2:
        return model

    def correlation(a: NDArray[np.int64], b: NDArray[np.int64]) -> Array:
        distance = np.abs(a[:, None] - b[None, :]).astype(np.float64)
        return np.asarray(model.correlation_share * np.exp(-distance / model.correlation_steps))

    own = correlation(model.steps, model.steps)
    np.fill_diagonal(own, 1.0)
    scores = ndtri((np.arange(n) + 0.5) / n)
    toward = correlation(steps, model.steps)
    gain = np.linalg.solve(own, toward.T).T
    spread = np.sqrt(np.maximum(1.0 - np.einsum("ij,ij->i", gain, toward), 1e-6))
    edges = np.concatenate([[-np.inf], ndtri(np.arange(1, n) / n), [np.inf]])
    below = ndtr((edges[None, :] - (gain @ scores)[:, None]) / spread[:, None])
    return replace(model, weight=np.diff(below, axis=1).mean(axis=0))


# -------------------------------------------------------------------------------- drawing
def draw_durations(model: TraceModel, steps: NDArray[np.int64], rng: np.random.Generator) -> Array:
    """Draw a synthetic measurement of the traced workers.

    Parameters
    ----------
    steps : int64 [step]
        Step numbers; the step factor remembers over their gaps.

    Returns
    -------
    float64 [node, replica, step]
        Seconds; equal over replicas for nodes that wait for all of them.
    """
    n_steps, n_replicas = steps.size, model.n_replicas
    which = _draw_steps(model, steps, rng)
    n_mb = 1 + max(n.microbatch for n in model.nodes)
    n_drifts = 1 + max(g.drift for g in model.groups)
    words = [_uniforms(rng, (n, n_replicas, n_steps)) for n in (n_mb, n_drifts)]
    shared: dict[tuple[int, float], Array] = {}

    def effect(which_law: int, law: Law, std: float) -> Array:
        key = (which_law, std)
        if key not in shared:
            table = quantile_table(law, std / SCORE_STD)
            shared[key] = 1.0 + np.asarray(sample_table(table, words[which_law]), np.float64)
        return shared[key]

    out = np.zeros((len(model.nodes), n_replicas, n_steps))
    residual = [None if g.residual.std == 0.0 else quantile_table(g.residual) for g in model.groups]
    for i, node in enumerate(model.nodes):
        g = int(model.group[i])
        if g < 0:
            continue
        group = model.groups[g]
        base = model.mean[i][:, None] * model.profile[g][:, which]
        if group.content != 0.0 and node.microbatch >= 0:
            base = base * effect(0, model.content, group.content)[node.microbatch]
        if group.rank_step != 0.0:
            base = base * effect(1, model.rank_step, group.rank_step)[group.drift]
        table = residual[g]
        shape = (1, n_steps) if node.is_global else (n_replicas, n_steps)
        if table is not None:
            base = base * (1.0 + np.asarray(sample_table(table, _uniforms(rng, shape))))
        kind = model.rank_index(node)
        if kind >= 0:
            factor, follows = (
                x[kind, node.stages[0]][:, None] for x in (model.rank, model.follows)
            )
            base = factor * (follows * base + (1.0 - follows) * model.mean[i][:, None])
        out[i] = base[:1] if node.is_global else base
    return out


def _uniforms(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint32]:
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32)


def _draw_steps(
    model: TraceModel, steps: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Which measured step each step is like: uniform, remembered over the gaps between steps."""
    z = rng.standard_normal(steps.size)
    if model.correlation_steps > 0.0:
        white, share = rng.standard_normal(steps.size), model.correlation_share
        for i in range(1, steps.size):
            r = math.exp(-abs(float(steps[i] - steps[i - 1])) / model.correlation_steps)
            z[i] = r * z[i - 1] + math.sqrt(1.0 - r * r) * z[i]
        z = math.sqrt(share) * z + math.sqrt(1.0 - share) * white
    n = model.profile.shape[2]
    return np.asarray(np.minimum((ndtr(z) * n).astype(np.int64), n - 1))


def synthetic_graph(
    model: TraceModel, steps: NDArray[np.int64], rng: np.random.Generator
) -> TraceGraph:
    """Draw a synthetic trace as a graph with durations, its step times replayed."""
    durations = draw_durations(model, steps, rng)
    graph = TraceGraph(
        model.nodes,
        durations,
        steps,
        np.zeros(steps.size),
        model.n_stages,
        model.n_replicas,
        model.p2p,
    )
    return replace(graph, measured=replay(graph))


def independent_graph(
    model: TraceModel, steps: NDArray[np.int64], rng: np.random.Generator
) -> TraceGraph:
    """Draw a synthetic trace whose ops keep their laws but share nothing.

    Every op's durations are dealt anew to replicas and steps, so its variance stays: workers, steps
    and microbatches no longer have anything of their own.
    """
    n = steps.size
    pool = 1 + POOL_STEPS // n
    durations = draw_durations(model, np.tile(steps, pool), rng)
    out = np.zeros((len(model.nodes), model.n_replicas, n))
    for i, node in enumerate(model.nodes):
        shape = (1, n) if node.is_global else (model.n_replicas, n)
        values = durations[i, :1] if node.is_global else durations[i]
        out[i] = rng.choice(values.ravel(), shape)
    graph = TraceGraph(
        model.nodes, out, steps, np.zeros(n), model.n_stages, model.n_replicas, model.p2p
    )
    return replace(graph, measured=replay(graph))


def figures(seconds: Array) -> dict[str, float]:
    """Size, mean, p50, p95 [s] and cv of step times, as reports give them."""
    mean = float(seconds.mean())
    return {
        "n": int(seconds.size), "mean": mean, "p50": float(np.median(seconds)),
        "p95": float(np.quantile(seconds, 0.95)),
        "cv": float(seconds.std(ddof=1)) / mean if seconds.size > 1 else 0.0,
    }  # fmt: skip


def check_trace_job(job: Job, model: TraceModel) -> None:
    """Refuse keys that differ from the traced job's and that its model cannot follow.

    Raises
    ------
    PrismError
        Naming them.
    """
    if job.variability.ranks == "measured" and job.parallelism.dp != model.n_replicas:
        raise PrismError(
            f"{job.source}: variability.ranks: measured holds for dp = {model.n_replicas}, as "
            f"traced, but dp = {job.parallelism.dp}; set drawn, or leave it out"
        )
    traced = job_from_dict(model.job)
    free = {"parallelism.dp", "variability.model", "variability.ranks", "variability.dependence"}
    free |= {
        "variability.model_error",
        "cluster.nodes",
        "cluster.gpus_per_node",
        "cluster.nvlink_domain_gpus",
    }
    changed = []
    for block in ("model", "parallelism", "cluster", "variability"):
        here, there = (getattr(x, block).model_dump() for x in (job, traced))
        changed += [f"{block}.{k}" for k in here if here[k] != there[k]]
    changed = [key for key in changed if key not in free and key != "parallelism.data_parallel"]
    if changed:
        raise PrismError(
            f"{job.source}: {', '.join(changed)}: a fitted trace has its own; with it can be set: "
            "parallelism.dp, variability.ranks, dependence and model_error, and the run block"
        )
