"""A trace's graph to distributions and effects: means, profiles over steps, components, residuals.

Compute ops form crossed tables (op_kind and stage, replica, step, microbatch), whose variance
components `prism.models.variance.components` estimates. Transfers, collectives and gaps have a mean
per replica, a profile over steps where they move with the step, and an empirical residual. Left
out: effects that one trace cannot show, see `prism.models.fit`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from prism.common.arrays import Index
from prism.common.errors import PrismError
from prism.common.means import finite_mean
from prism.distributions.distribution import Distribution, bounded_body, constant, lognormal
from prism.distributions.samples import sample_distribution
from prism.models.pipelinetrace.reduce import Crossed, crossed_table, simplify
from prism.models.variance.components import Component, Components, fit_components
from prism.models.variance.draws import N_DRAWS
from prism.simulation.tracemodel.graph import Array, TraceGraph, TraceNode, filled
from prism.simulation.tracemodel.model import SCORE_STD, OpGroup, TraceModel, score_distribution

NEGLIGIBLE = 1e-6  # a spread below this is rounding
LEAST_SCORES = 24  # below, a shared distribution takes a normal shape instead of so few points
RANK_SHAPE = -0.15  # of the body's tail: SGEMM on 388 healthy V100s, facts on GPU variability


def fit_graph(graph: TraceGraph, source: str = "trace") -> TraceModel:
    """Fit distributions and effects to a trace's graph; `source` names it in messages.

    Raises PrismError: fewer than two steps.
    """
    return fit_with_components(graph, source, n_draws=1)[0]


def fit_with_components(
    graph: TraceGraph, source: str = "trace", n_draws: int = N_DRAWS
) -> tuple[TraceModel, Components | None]:
    """Fit as `fit_graph`, and give the variance components too; None where nothing repeats."""
    if graph.steps.size < 2:
        raise PrismError(
            f"{source}: {graph.steps.size} step; at least 2 are needed to learn how steps vary, "
            "and 20 or more to trust it"
        )
    graph, parts = simplify(graph), None
    crossed = crossed_table(graph)
    if crossed:
        parts = fit_components(np.log(crossed.seconds), crossed.columns, graph.steps, n_draws)
    return _Fit(graph, filled(graph), crossed, parts).model(), parts


# ----------------------------------------------------------------------------------- assembly
_Part = tuple[OpGroup, Array, Array]  # with profile [replica, step] and mean [node, replica]


@dataclass
class _Fit:
    graph: TraceGraph
    durations: Array
    crossed: Crossed | None
    parts: Components | None

    def model(self) -> TraceModel:
        graph, p = self.graph, self.parts
        self.slow = {(x.replica, x.stage) for x in p.lemons} if p else set()
        kinds, rank = self._ranks()
        follows = self._follows(kinds)
        mean = np.zeros((len(graph.nodes), graph.n_replicas))
        group = np.full(len(graph.nodes), -1, np.int64)
        groups: list[OpGroup] = []
        profiles: list[Array] = []
        for column, nodes in self._groups():
            if column < 0:
                found, profile, mean[nodes] = self._other(nodes)
            else:
                n = graph.nodes[nodes[0]]
                factor = (
                    rank[kinds.index(n.op_kind), n.stages[0]] if kinds else np.ones(mean.shape[1])
                )
                found, profile, mean[nodes] = self._compute(nodes, column, factor)
            group[nodes] = len(groups)
            groups.append(found)
            profiles.append(np.broadcast_to(profile, (graph.n_replicas, graph.steps.size)))
        profile = np.stack(profiles)
        weight = np.stack([mean[group == g].sum(axis=0) for g in range(len(groups))])
        order = self._step_order(np.einsum("gr,grt->t", weight, profile))
        spread = np.array([p.by_op_kind[k]["rank"].std for k in kinds]) if p else np.zeros(0)
        body = float(spread.max(initial=0.0))
        return TraceModel(
            nodes=graph.nodes, n_stages=graph.n_stages, n_replicas=graph.n_replicas, p2p=graph.p2p,
            group=group, groups=tuple(groups), mean=mean,
            profile=profile[:, :, order], steps=graph.steps[order],
            weight=np.full(order.size, 1.0 / order.size),
            rank=rank, follows=follows, rank_kinds=kinds,
            rank_distribution=bounded_body(body, RANK_SHAPE) if body > 0.0 else constant(),
            rank_power=spread / body if body > 0.0 else np.zeros(len(kinds)),
            content=_shared_distribution(p.content.scores) if p else constant(),
            rank_step=_shared_distribution(p.rank_step.scores) if p else constant(),
            correlation_steps=float(p.step_correlation_steps or 0.0) if p else 0.0,
            correlation_share=float(p.step_correlation_share) if p else 0.0,
            lemons=tuple(
                (x.replica, x.stage, float(np.mean(list(x.slowdown.values()))))
                for x in (p.lemons if p else ())
            ),
            measured_mean=float(graph.measured.mean()),
        )  # fmt: skip

    def _groups(self) -> Iterator[tuple[int, list[int]]]:
        """Ops that share distributions: those of one column, else (-1) of one name."""
        column = np.full(len(self.graph.nodes), -1)
        for c, nodes in enumerate(self.crossed.node if self.crossed else ()):
            column[nodes[nodes >= 0]] = c
        found: dict[tuple[object, ...], list[int]] = {}
        for i, n in enumerate(self.graph.nodes):
            if n.kind != "join":
                name = (n.kind, n.op_kind, n.name, n.stages[0], n.chunk)
                found.setdefault((column[i], *name[5 * (column[i] >= 0) :]), []).append(i)
        for nodes in found.values():
            yield int(column[nodes[0]]), nodes

    def _ranks(self) -> tuple[tuple[str, ...], Array]:
        """Give the persistent factor of every worker, [op_kind, stage, replica]."""
        shape = self.graph.n_stages, self.graph.n_replicas
        if self.crossed is None or self.parts is None or self.graph.n_replicas < 2:
            return (), np.ones((0, *shape))
        columns = self.crossed.columns
        kinds = tuple(dict.fromkeys(c.op_kind for c in columns))
        rank, count = np.zeros((len(kinds), *shape)), np.zeros((len(kinds), shape[0], 1))
        at = [kinds.index(c.op_kind) for c in columns], [c.stage for c in columns]
        np.add.at(rank, at, self.parts.rank)
        np.add.at(count, at, 1.0)
        factor = np.exp(rank / np.maximum(count, 1.0))
        body = np.ones(shape, bool)
        for replica, stage in self.slow:
            body[stage, replica] = False
        # mean 1 over the body of each stage; a stage of lemons only keeps what it has
        centre = finite_mean(np.where(body, factor, np.nan), 2, keepdims=True)
        return kinds, factor / np.where(np.isfinite(centre), centre, 1.0)

    def _follows(self, kinds: tuple[str, ...]) -> Array:
        """Share of each worker's time that follows the shared effects, [op_kind, stage, replica].

        How much a lemon's durations vary within a step against the body's of its column; at most 1.
        """
        out = np.ones((len(kinds), self.graph.n_stages, self.graph.n_replicas))
        if self.crossed is None or self.parts is None:
            return out
        log = np.log(self.crossed.seconds) - self.parts.position[:, None, None, :]
        centred = log - finite_mean(log, 3, keepdims=True)
        within = np.sqrt(finite_mean(centred**2, (2, 3)))  # [column, replica]
        for replica, stage in self.slow:
            for k, kind in enumerate(kinds):
                columns = [(c.op_kind, c.stage) == (kind, stage) for c in self.crossed.columns]
                body = np.median(within[columns][:, self._body(stage)], axis=1)
                ratio = within[columns, replica] / np.maximum(body, NEGLIGIBLE)
                if ratio.size and (ratio > 0.0).all():
                    out[k, stage, replica] = min(1.0, float(ratio.mean()))
        return out

    def _body(self, stage: int) -> list[int]:
        """Replicas whose worker on a stage is no lemon; all where every one is."""
        every = range(self.graph.n_replicas)
        return [r for r in every if (r, stage) not in self.slow] or list(every)

    def _compute(self, nodes: list[int], column: int, factor: Array) -> _Part:
        """Fit one column of the crossed table."""
        assert self.crossed is not None and self.parts is not None
        p, seconds = self.parts, self.crossed.seconds[column]
        first = self.graph.nodes[nodes[0]]
        position, body = np.exp(p.position[column]), self._body(first.stages[0])
        nominal = float(np.nanmean(seconds / (factor[:, None, None] * position)))
        mean = nominal * position[[self.graph.nodes[i].microbatch for i in nodes]]
        profile = np.exp(_step_deviation(p, column, np.log(seconds[body]), body))
        scores = p.residual[column][np.isfinite(p.residual[column])]
        distribution = _relative_distribution(
            np.exp(p.residual_std[column] * scores / (scores.std() or np.inf))
        )
        group = _describe(
            first, p.columns[column].name or first.op_kind, seconds, distribution
        )._replace(content=_loading(p.content, column), rank_step=_loading(p.rank_step, column))
        if p.rank_step_apart:
            group = group._replace(rank_step=abs(group.rank_step), drift=first.stages[0])
        return group, profile / profile.mean(), mean[:, None]

    def _other(self, nodes: list[int]) -> _Part:
        """Fit transfers, collectives, gaps and the rest: a mean, a profile, a residual."""
        first = self.graph.nodes[nodes[0]]
        values = self.durations[nodes]
        if first.is_global:
            values = values[:, :1]
        mean = values.mean(axis=2)
        profile = _profile(values, mean)
        expected = mean[:, :, None] * profile
        with np.errstate(all="ignore"):
            relative = np.where(expected > 0.0, values / expected, np.nan)
        weight = np.broadcast_to(mean[:, :, None], values.shape)
        relative = relative[weight >= 0.1 * mean.max()] if mean.max() > 0 else relative.ravel()
        name = first.name
        if 1 < len(first.stages) < self.graph.n_stages:
            name = f"{name} stages {first.stages[0]}-{first.stages[-1]}"
        return _describe(first, name, values, _relative_distribution(relative)), profile, mean

    def _step_order(self, total: Array) -> Index:
        """Order steps from fast to slow, by the score that memory was estimated of."""
        if self.parts is not None and self.parts.step.scale > 0.0:
            step = self.parts.step
            total = np.nan_to_num(step.scores * np.sign(step.loadings.sum() or 1.0))
        return np.argsort(total, kind="stable")


def _loading(effect: Component, column: int) -> float:
    """Give the standard deviation of a column's log duration the sign of its loading [1]."""
    loading = float(effect.loadings[column] * effect.scale)
    return loading if abs(loading) > NEGLIGIBLE else 0.0


def _step_deviation(p: Components, column: int, log_seconds: Array, body: list[int]) -> Array:
    """Log step factor of a column in each measured step, the noise of the means taken out.

    Each column keeps its own profile, not the first eigenvector's: what whole steps did to all
    columns is resampled together. Where steps remember each other, the component's spread is larger
    than the measured steps'; the profile keeps theirs, since it is to be drawn from again. Of the
    body only: what holds a lemon up for a fixed time follows the step less.
    """
    cells = log_seconds - p.mean[column] - p.rank[column][body, None, None] - p.position[column]
    raw = finite_mean(cells, (0, 2))
    seen = np.isfinite(raw)
    variance = float(np.var(raw[seen])) if seen.any() else 0.0
    if p.step.std[column] <= 0.0 or variance <= 0.0:
        return np.zeros(raw.size)
    within = float(p.content.std[column] ** 2 + p.residual_std[column] ** 2)
    n_mb = max(float(np.isfinite(cells).sum(axis=2).mean()), 1.0)
    noise = (float(p.rank_step.std[column]) ** 2 + within / n_mb) / len(body)
    shrink = math.sqrt(max(0.0, 1.0 - noise / variance))
    return np.asarray(np.where(seen, shrink * (raw - raw[seen].mean()), 0.0))


def _profile(values: Array, mean: Array) -> Array:
    """Factor of each step that a replica's ops of one group share, [replica, step], mean 1.

    The least-squares factor of `values = mean x profile`, shrunk by what independent ops would show
    of themselves; a single op keeps its own times, so that it moves with the step as it did.
    """
    power = (mean**2).sum(axis=0)
    safe = np.where(power > 0.0, power, 1.0)
    profile = np.einsum("nr,nrt->rt", mean, values) / safe[:, None]
    alone = (mean**2 * values.var(axis=2)).sum(axis=0) / safe**2
    count = power**2 / np.maximum((mean**4).sum(axis=0), 1e-300)  # ops that carry it
    with np.errstate(all="ignore"):
        shared = (1.0 - alone / profile.var(axis=1)) / (1.0 - 1.0 / count)
    keep = np.sqrt(np.clip(np.nan_to_num(shared), 0.0, 1.0))
    keep = np.where((len(values) == 1) | (count < 1.5), 1.0, keep)[:, None]
    profile = np.where(power[:, None] > 0.0, np.maximum(1.0 + keep * (profile - 1.0), 0.0), 1.0)
    return np.asarray(profile / profile.mean(axis=1, keepdims=True))


def _relative_distribution(relative: Array) -> Distribution:
    values = relative[np.isfinite(relative)]
    if values.size < 2 or values.mean() <= 0.0 or values.std() < NEGLIGIBLE:
        return constant()
    return sample_distribution(values / values.mean())


def _shared_distribution(scores: Array) -> Distribution:
    """Distribution of a shared effect: quantiles of its scores, or normal where they are few."""
    z = scores[np.isfinite(scores)]
    if z.size < 2 or z.std() == 0.0:
        return constant()
    few = z.size < LEAST_SCORES
    return lognormal(math.sqrt(math.expm1(SCORE_STD**2))) if few else score_distribution(z)


def _describe(node: TraceNode, name: str, values: Array, distribution: Distribution) -> OpGroup:
    """Statistics of a group's durations, as the fit prints them."""
    values = values[np.isfinite(values)]
    mean = float(values.mean())
    median = float(np.median(values))
    ks = 0.0
    positive = values[values > 0.0]
    if positive.size > 4 and float(np.log(positive).std()) > 0.0:
        z = np.log(positive)
        cdf, i = ndtr(np.sort((z - z.mean()) / z.std())), np.arange(z.size)
        ks = float(max(np.max((i + 1) / z.size - cdf), np.max(cdf - i / z.size)))
    return OpGroup(
        node.op_kind, node.kernel_class, name, node.stages[0] if len(node.stages) == 1 else -1,
        node.chunk, int(values.size), mean, float(values.std() / mean) if mean > 0.0 else 0.0,
        float(np.quantile(values, 0.99) / median) if median > 0.0 else math.inf, ks,
        distribution, 0.0, 0.0,
    )  # fmt: skip
