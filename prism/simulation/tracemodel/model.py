"""A fitted trace: the graph of its step, and the distributions of what happens in it.

Every op's duration is `mean x rank x step x microbatch x rank_step x residual`, each factor of mean
1 over its population. The step factor is a profile over the measured steps, so that one draw (which
of them) moves compute, collectives and gaps together as they moved; the others are distributions.
The same tables serve `draw_durations` here and the engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from prism.common.errors import PrismError
from prism.distributions.distribution import Distribution, constant, quantile_table
from prism.distributions.samples import sample_distribution
from prism.distributions.tables import N_CELLS, sample_table
from prism.jobs.job import Job, job_from_dict
from prism.simulation.tracemodel.graph import TraceGraph, TraceNode, propagate, step_times

Array = NDArray[np.float64]
Table = NDArray[np.float32]
POOL_STEPS = 200  # steps that independent ops are drawn from
MOST_ROUNDS = 200  # steps until the host's lead is steady: it grows by what its device is slower
CLOSE_S = 1e-6


class OpGroup(NamedTuple):
    """Ops that share their distributions: one op_kind of one stage and chunk, or one collective."""

    op_kind: str
    kernel_class: str
    name: str
    stage: int
    chunk: int
    n: int  # durations it is based on
    mean: float  # seconds
    cv: float  # of all its durations together
    p99_p50: float
    ks: float  # of all its durations together against a lognormal
    residual: Distribution
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
    """What a trace taught; workers that are lemons are apart from the body of the others."""

    nodes: tuple[TraceNode, ...]  # of the step, negligible gaps folded into the ops after them
    n_stages: int
    n_replicas: int
    p2p: str
    group: NDArray[np.int64]  # [node] index into groups; -1 for joins
    groups: tuple[OpGroup, ...]
    mean: Array  # [node, replica] s, without the rank factor where the op has one
    profile: Array  # [group, replica, step] step factor, mean 1, from the fastest to the slowest
    steps: NDArray[np.int64]  # their numbers
    weight: Array  # [step] probability of drawing each; equal unless `conditioned`
    rank: Array  # [op_kind, stage, replica] persistent factor of a worker, 1 for a typical one
    # share of a worker's time that follows the shared effects, 1 for the body: a lemon held up for
    # a fixed time varies less than its slowdown would have it
    follows: Array  # [op_kind, stage, replica]
    rank_kinds: tuple[str, ...]  # the op_kinds of `rank`; others have no rank factor
    rank_distribution: (
        Distribution  # of a worker of the body, for the op_kind with the largest spread
    )
    rank_power: Array  # [op_kind] exponent of it
    content: Distribution  # of exp(score) with the score's standard deviation at SCORE_STD
    rank_step: Distribution  # the same
    correlation_steps: float  # steps over which the step factor is remembered; 0: none was found
    correlation_share: float  # share of its variance that is
    lemons: tuple[tuple[int, int, float], ...] = ()  # replica, stage, slowdown
    measured_mean: float = 0.0  # of the measured steps [s]
    most_lead: float = 0.0  # by which a host can be ahead of its device [s]: the queue's depth
    report: dict[str, Any] = field(default_factory=dict)  # what `prism fit` prints
    job: dict[str, Any] = field(default_factory=dict)  # blocks of the traced job's file

    @property
    def mean_error(self) -> float:
        """Standard error of the measured mean step over it; of one step, how steps vary [1]."""
        measured = self.report.get("step_time", {})
        if measured.get("n") == 1:
            return float(self.report["cross_check"]["model"]["cv"])
        return float(measured.get("mean_se", 0.0) / measured.get("mean", 1.0))

    def rank_index(self, node: TraceNode) -> int:
        """Which rank factor a node has, -1: none."""
        is_op = node.kind == "op" and len(node.stages) == 1 and node.microbatch >= 0
        has_rank = is_op and node.op_kind in self.rank_kinds
        return self.rank_kinds.index(node.op_kind) if has_rank else -1


SCORE_STD = 0.1  # any number that keeps exp(score) well behaved; loadings are relative to it


def score_distribution(scores: Array) -> Distribution:
    """Distribution of exp(SCORE_STD * z) from scores z, standardised first."""
    z = scores[np.isfinite(scores)]
    if z.size < 2 or z.std() == 0.0:
        return constant()
    return sample_distribution(np.exp(SCORE_STD * (z - z.mean()) / z.std()))


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

    The step factor's normal score has correlation `share exp(-distance / correlation_steps)`; given
    the measured steps' scores it is normal, and the weights are its mean probabilities of the
    intervals that the measured steps stand for.
    """
    n = model.steps.size
    if model.correlation_steps <= 0.0 or n < 2:
        return model
    distance = np.abs(np.concatenate([model.steps, steps])[:, None] - model.steps)
    correlation = model.correlation_share * np.exp(-distance / model.correlation_steps)
    own, toward = correlation[:n], correlation[n:]
    np.fill_diagonal(own, 1.0)
    scores = ndtri((np.arange(n) + 0.5) / n)
    gain = np.linalg.solve(own, toward.T).T
    spread = np.sqrt(np.maximum(1.0 - np.einsum("ij,ij->i", gain, toward), 1e-6))
    edges = np.concatenate([[-np.inf], ndtri(np.arange(1, n) / n), [np.inf]])
    below = ndtr((edges[None, :] - (gain @ scores)[:, None]) / spread[:, None])
    return replace(model, weight=np.diff(below, axis=1).mean(axis=0))


# -------------------------------------------------------------------------------- drawing
def draw_durations(model: TraceModel, steps: NDArray[np.int64], rng: np.random.Generator) -> Array:
    """Draw a synthetic measurement of the traced workers [node, replica, step], in seconds.

    `steps` are step numbers; the step factor remembers over their gaps. Nodes that wait for all
    replicas are equal over them.
    """
    n_steps, n_replicas = steps.size, model.n_replicas
    which = _draw_steps(model, steps, rng)

    def words(*shape: int) -> NDArray[np.uint32]:
        return rng.integers(0, 1 << 32, (*shape, n_steps), dtype=np.uint32)

    def factor(table: Table, drawn: NDArray[np.uint32]) -> Array:
        return 1.0 + np.asarray(sample_table(table, drawn), np.float64)

    content = words(1 + max(n.microbatch for n in model.nodes), n_replicas)
    drifts = words(1 + max(g.drift for g in model.groups), n_replicas)
    residual = [quantile_table(group.residual) for group in model.groups]
    out = np.zeros((len(model.nodes), n_replicas, n_steps))
    for i in np.flatnonzero(model.group >= 0):
        node, group = model.nodes[i], model.groups[model.group[i]]
        mean = model.mean[i][:, None]
        base = mean * model.profile[model.group[i]][:, which]
        if group.content != 0.0 and node.microbatch >= 0:
            table = quantile_table(model.content, group.content / SCORE_STD)
            base = base * factor(table, content[node.microbatch])
        if group.rank_step != 0.0:
            table = quantile_table(model.rank_step, group.rank_step / SCORE_STD)
            base = base * factor(table, drifts[group.drift])
        if group.residual.std != 0.0:
            own = words(1 if node.is_global else n_replicas)
            base = base * factor(residual[model.group[i]], own)
        kind = model.rank_index(node)
        if kind >= 0:
            rank, follows = (x[kind, node.stages[0], :, None] for x in (model.rank, model.follows))
            base = rank * (follows * base + (1.0 - follows) * mean)
        out[i] = base[:1] if node.is_global else base
    return out


def _draw_steps(
    model: TraceModel, steps: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Which measured step each step is like: uniform, remembered over the gaps between steps."""
    z = rng.standard_normal(steps.size)
    if model.correlation_steps > 0.0:
        white, share = rng.standard_normal(steps.size), model.correlation_share
        kept = np.exp(-np.abs(np.diff(steps)) / model.correlation_steps)
        for i, r in enumerate(kept.tolist(), start=1):
            z[i] = r * z[i - 1] + math.sqrt(1.0 - r * r) * z[i]
        z = math.sqrt(share) * z + math.sqrt(1.0 - share) * white
    n = model.profile.shape[2]
    return np.asarray(np.minimum((ndtr(z) * n).astype(np.int64), n - 1))


def synthetic_graph(
    model: TraceModel, steps: NDArray[np.int64], rng: np.random.Generator
) -> TraceGraph:
    """Draw a synthetic trace as a graph with durations, its step times replayed."""
    return _replayed(model, steps, draw_durations(model, steps, rng))


def independent_graph(
    model: TraceModel, steps: NDArray[np.int64], rng: np.random.Generator
) -> TraceGraph:
    """Draw a synthetic trace whose ops keep their distributions but share nothing.

    Every op's durations are dealt anew to replicas and steps, so its variance stays: workers, steps
    and microbatches no longer have anything of their own.
    """
    durations = draw_durations(model, np.tile(steps, 1 + POOL_STEPS // steps.size), rng)
    out = np.zeros((*durations.shape[:2], steps.size))
    for node, own, pool in zip(model.nodes, out, durations, strict=True):
        rows = 1 if node.is_global else model.n_replicas
        own[:] = rng.choice(pool[:rows].ravel(), (rows, steps.size))
    return _replayed(model, steps, out)


def ideal_graph(model: TraceModel) -> TraceGraph:
    """Step with every effect at 1: each op at its mean over the replicas."""
    mean = np.repeat(model.mean.mean(axis=1, keepdims=True), model.n_replicas, axis=1)
    return _replayed(model, np.zeros(1, np.int64), mean[..., None])


def _replayed(model: TraceModel, steps: NDArray[np.int64], durations: Array) -> TraceGraph:
    times = step_times(model.nodes, propagate(model.nodes, durations))
    shape = model.n_stages, model.n_replicas, model.p2p
    return TraceGraph(model.nodes, durations, steps, times, *shape)


# ------------------------------------------------------------------- steps that follow each other
def steady(nodes: Sequence[TraceNode], seconds: Array, most_lead: float) -> Array:
    """Return durations [node] s whose sources are what steps that follow each other lead to.

    A host that needs less time than its devices gets ahead until its queue is full or something
    blocks it; one that needs more loses its lead and decides the period.
    """
    sources = [i for i, node in enumerate(nodes) if node.continues >= 0]
    before = [nodes[i].continues for i in sources]
    seconds = seconds.copy()
    for _ in range(MOST_ROUNDS if sources else 0):
        ends = propagate(nodes, seconds[:, None, None])
        lead = np.maximum(ends[before, 0, 0] - step_times(nodes, ends), -most_lead)
        far = float(np.abs(lead - seconds[sources]).max())
        seconds[sources] = lead
        if far < CLOSE_S:
            break
    return seconds


def settled(model: TraceModel, factors: Sequence[float] | float = 1.0) -> TraceModel:
    """Return the model with nodes [node] that take this many times as long, its sources steady."""
    is_source = np.array([node.continues >= 0 for node in model.nodes])
    mean = model.mean * np.where(is_source, 1.0, factors)[:, None]
    lead = steady(model.nodes, mean.mean(axis=1), model.most_lead)
    return replace(model, mean=np.where(is_source[:, None], lead[:, None], mean))


def figures(seconds: Array) -> dict[str, float]:
    """Size, mean, p50, p95 [s] and cv of step times, as reports give them, with standard errors.

    That of the CV holds for steps that are normal and independent.
    """
    n, mean = int(seconds.size), float(seconds.mean())
    cv = float(seconds.std(ddof=1)) / mean if n > 1 else 0.0
    return {
        "n": n, "mean": mean, "mean_se": cv * mean / math.sqrt(n),
        "p50": float(np.median(seconds)), "p95": float(np.quantile(seconds, 0.95)),
        "cv": cv, "cv_se": cv * math.sqrt((0.5 + cv**2) / max(1, n - 1)),
    }  # fmt: skip


_FREE: dict[str, tuple[str, ...]] = {  # keys of a job's blocks that a fitted trace can follow
    "model": (), "parallelism": ("dp", "data_parallel"),
    "cluster": ("nodes", "gpus_per_node", "nvlink_domain_gpus"),
    "variability": ("model", "ranks", "dependence", "model_error", "kernel_scale", "host_scale"),
}  # fmt: skip


def check_trace_job(job: Job, model: TraceModel) -> None:
    """Refuse keys that differ from the traced job's and that its model cannot follow."""
    if job.variability.ranks == "measured" and job.parallelism.dp != model.n_replicas:
        raise PrismError(
            f"{job.source}: variability.ranks: measured holds for dp = {model.n_replicas}, as "
            f"traced, not {job.parallelism.dp}; set drawn, or leave it out"
        )
    traced, changed = job_from_dict(model.job), []
    for block, free in _FREE.items():
        here, there = (getattr(x, block).model_dump() for x in (job, traced))
        changed += [f"{block}.{k}" for k in here if here[k] != there[k] and k not in free]
    if changed:
        raise PrismError(
            f"{job.source}: {', '.join(changed)}: a fitted trace has its own; with it can be set: "
            f"parallelism.dp, variability.{', '.join(_FREE['variability'][1:])}, and the run block"
        )
