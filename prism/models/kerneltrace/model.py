"""A kernel trace as a model: the typical step's graph, with the distributions of its kernels.

The longest waits of the host and the collectives, whose times depend on each other, take what they
took in one of the steps, all in the same one. The other nodes draw from their kernel's
distribution, times a factor by step that all computing kernels share, and one for the host; launch
latencies are fixed. Left out: rank effects (one job's few ranks do not show a distribution), and
anything slower than a step.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from prism.common.arrays import Index
from prism.common.means import finite_mean
from prism.common.text import format_count, percent_change
from prism.distributions.distribution import Distribution, constant
from prism.distributions.library import Library, load_library
from prism.distributions.samples import sample_distribution
from prism.jobs.devices import LIBRARIES, device_key
from prism.models.kerneltrace.graph import KernelGraph, step_graph
from prism.models.kerneltrace.steps import HOST, KernelKey, split_steps
from prism.models.kerneltrace.table import KernelRow, kernel_table
from prism.simulation.tracemodel.graph import LATENCY, Array, TraceGraph, with_lags_as_nodes
from prism.simulation.tracemodel.model import OpGroup, TraceModel, figures, settled, synthetic_graph
from prism.traces import Trace
from prism.traces.kernelnames import COLLECTIVES

CHECK_STEPS = 500  # simulated steps that the report compares with the measured ones
FAR_OFF = 0.03  # of the mean: a model further off says so
FEW_STEPS = 10  # below, a fit says that it has few data
NOT_IDENTIFIABLE = (
    "rank effects, and their share common to a node: the traced ranks are too few",
    "memory of the step effect, congestion, stalls: a profiler records a few steps in a row",
    "microbatch content: kernels do not say which microbatch they work on",
)
_FIXED = OpGroup(*LATENCY, -1, 0, 0, 0.0, 0.0, 1.0, 0.0, constant(), 0.0, 0.0)


def fit_kernels(trace: Trace) -> TraceModel:
    """Fit a model to a trace of kernels."""
    graph = step_graph(split_steps(trace))
    model = replace(fit_kernel_graph(graph), job=_job(graph))
    warnings = []
    if graph.steps.size == 1:
        device = device_key(trace.meta["device"])
        library = LIBRARIES.get(device, LIBRARIES["h100"])
        model = with_spread_of(model, load_library(library))
        why = "" if device in LIBRARIES else ", as the trace names no device with a library"
        warnings.append(
            f"one step: durations are its own, how they vary is that of {library}{why}; profile "
            "more steps (schedule(active=...) of the profiler) to measure it"
        )
    rng = np.random.Generator(np.random.Philox(0))
    drawn = synthetic_graph(model, np.arange(CHECK_STEPS, dtype=np.int64), rng).measured
    report = _report(trace, graph, drawn)
    return replace(model, report=report | {"warnings": [*warnings, *report["warnings"]]})


_RESIDUALS = {"gemm": "gemm_large", "attention": "attention", "optimizer": "optimizer"}
"""Entries of a library that say how kernels of a class vary; other kernels are bound by memory."""
_PROFILE = 64  # steps that stand for the library's distribution of the step effect


def with_spread_of(model: TraceModel, library: Library) -> TraceModel:
    """Let the kernels of a model vary as the library's do, and their steps."""

    def varied(group: OpGroup) -> OpGroup:
        if group.op_kind == HOST.op_kind:
            return group
        name = f"residual/{_RESIDUALS.get(group.kernel_class, 'memory')}"
        if group.op_kind in COLLECTIVES:
            name = "residual/network_medium"
        residual = library.distribution(name)
        return group._replace(residual=residual, cv=residual.std)

    groups = tuple(map(varied, model.groups))
    factor = library.distribution("step").ppf((np.arange(_PROFILE) + 0.5) / _PROFILE)
    computes = [g.op_kind not in (HOST.op_kind, *COLLECTIVES) for g in groups]
    profile = np.where(np.array(computes)[:, None, None], factor / factor.mean(), 1.0)
    return replace(
        model, groups=groups, profile=profile, steps=model.steps[0] + np.arange(_PROFILE),
        weight=np.full(_PROFILE, 1.0 / _PROFILE),
    )  # fmt: skip


def fit_kernel_graph(graph: KernelGraph) -> TraceModel:
    """Fit a model, without report and job, to the durations of a graph's nodes in its steps."""
    nominal = finite_mean(graph.durations, axis=(1, 2))
    groups = _node_groups(graph, nominal)
    nodes, place, seconds = with_lags_as_nodes(graph)
    seconds[place] = nominal
    group = np.array([-1 if node.kind == "join" else 0 for node in nodes])
    order = np.argsort(graph.measured, kind="stable")
    profile = np.ones((len(groups) + 1, 1, order.size))
    for g, members in enumerate(groups, start=1):
        group[np.array(place)[members.nodes]] = g
        profile[g, 0] = members.profile[order]
    none, no_ranks = constant(), np.ones((0, graph.n_stages, 1))
    varies = np.array([node.continues < 0 for node in nodes])
    seconds = np.where(varies, np.maximum(seconds, 0.0), seconds)
    return settled(TraceModel(
        nodes=nodes, n_stages=graph.n_stages, n_replicas=1, p2p="none", group=group,
        groups=(_FIXED, *(_op_group(graph, nominal, g) for g in groups)),
        mean=seconds[:, None], profile=profile, steps=graph.steps[order],
        weight=np.full(order.size, 1.0 / order.size), rank=no_ranks, follows=no_ranks,
        rank_kinds=(), rank_distribution=none, rank_power=np.zeros(0), content=none, rank_step=none,
        correlation_steps=0.0, correlation_share=0.0, measured_mean=float(graph.measured.mean()),
        most_lead=graph.most_lead,
    ))  # fmt: skip


def redrawn(graph: KernelGraph, drawn: TraceGraph) -> KernelGraph:
    """Return a graph with durations and steps that were drawn from its model."""
    place = with_lags_as_nodes(graph)[1]
    return replace(
        graph, durations=drawn.durations[place], steps=drawn.steps, measured=drawn.measured
    )


_ALONE = 256
"""Nodes that keep their own durations, those that vary most: each costs a table of 24 kB. On the
traces at hand 64 to 1,024 give the same spread."""


class _Group(NamedTuple):
    """Nodes that share a distribution."""

    nodes: Index  # [member]
    profile: Array  # [step] factor of all members in each step, mean 1
    distribution: Distribution  # of what is left, over members and steps, mean 1


def _node_groups(graph: KernelGraph, nominal: Array) -> list[_Group]:
    """Put all nodes that vary into groups; the others keep their `nominal` durations [node] s."""
    durations = graph.durations[:, 0]
    kinds = np.array([_part(key) for key in graph.keys])[graph.key]
    varies = np.isin(graph.role, ("device", "host", "return")) & (nominal > 0.0)
    filled = np.where(np.isfinite(durations), durations, nominal[:, None])
    width = np.where(varies & (kinds != "computes"), np.ptp(filled, axis=1), 0.0)
    alone = np.argsort(-width, kind="stable")[:_ALONE]
    alone = alone[width[alone] > 0.0]
    nothing = sample_distribution(np.zeros(0), 0.0)
    groups = [_Group(np.array([i]), filled[i] / filled[i].mean(), nothing) for i in alone]
    varies[alone] = False
    for kind in np.unique(kinds[varies]):
        members = np.flatnonzero(varies & (kinds == kind))
        profile, variance = _step_factor(durations[members], nominal[members])
        for nodes in _pools(members, graph, nominal):
            ratio = durations[nodes] / nominal[nodes, None]
            groups.append(_Group(nodes, profile, _distribution(ratio, profile, variance)))
    return groups


def _part(key: KernelKey) -> str:
    """Name what shares a step factor: computing kernels, the host, collectives of a kind."""
    if key.op_kind == HOST.op_kind:
        return "host"
    return key.op_kind if key.op_kind in COLLECTIVES else "computes"


def _step_factor(durations: Array, nominal: Array) -> tuple[Array, float]:
    """Split the step's factor off the nodes' own spread: the factor [step] and its variance."""
    # analysis of variance with weights: the sum over nodes varies by the shared factor and, less,
    # by what the nodes have of their own; expected squares are set equal to those found
    whole = np.isfinite(durations).all(axis=1)
    n_steps = durations.shape[1]
    none = np.ones(n_steps), 0.0
    total = float(nominal[whole].sum())
    if whole.sum() < 2 or n_steps < 2 or total <= 0.0:
        return none
    score = durations[whole].sum(axis=0) / total
    found = float(score.var(ddof=1))
    own = float(durations[whole].var(axis=1, ddof=1).sum()) / total**2
    alike = float((nominal[whole] ** 2).sum()) / total**2
    variance = (found - own) / max(1.0 - alike, 1e-9)
    if variance <= 0.0 or score.std() <= 0.0:
        return none
    factor = 1.0 + (score - score.mean()) * min(1.0, np.sqrt(variance) / float(score.std()))
    return factor, float(factor.var())


def _pools(members: Index, graph: KernelGraph, nominal: Array) -> list[Index]:
    """Split nodes by kernel; the host's, which are of few kinds, also by length."""
    host = np.array([key.op_kind == HOST.op_kind for key in graph.keys])[graph.key[members]]
    half_decades = np.round(2.0 * np.log10(nominal[members]))  # long times vary unlike short ones
    size = np.where(host, half_decades, 0.0)
    _, pool = np.unique(np.stack([graph.key[members], size]), axis=1, return_inverse=True)
    pool = pool.ravel()
    return [members[pool == p] for p in range(int(pool.max()) + 1)]


def _distribution(ratio: Array, profile: Array, variance: float) -> Distribution:
    """Distribution of what the step factor leaves of durations over nominal ones [member, step]."""
    seen = np.isfinite(ratio).sum(axis=1)
    rest = (ratio / profile)[seen > 1]
    values = rest[np.isfinite(rest)]
    if not values.size or values.mean() <= 0.0:
        return sample_distribution(np.zeros(0), 0.0)
    n = seen[seen > 1]
    # unbiased, where the sample's own spread would be too small for few steps
    own = np.nanvar(ratio[seen > 1], axis=1) * n / (n - 1)
    std = float(np.sqrt(max(0.0, float(np.average(own, weights=n - 1)) - variance)))
    return sample_distribution(values / values.mean(), std)


def _op_group(graph: KernelGraph, nominal: Array, group: _Group) -> OpGroup:
    """Describe a group as the model keeps it."""
    seconds = graph.durations[group.nodes, 0]
    ratio = seconds / nominal[group.nodes, None]
    ratio = ratio[np.isfinite(ratio)]
    key, median = graph.keys[graph.key[group.nodes[0]]], float(np.median(ratio)) or 1.0
    return OpGroup(
        key.op_kind, key.kernel_class, key.name, -1, 0, int(ratio.size),
        float(np.nanmean(seconds)), float(ratio.std()), float(np.quantile(ratio, 0.99) / median),
        0.0, group.distribution, 0.0, 0.0,
    )  # fmt: skip


def _label(row: KernelRow) -> str:
    """Name a kernel; a collective also by what launched it, as its kernel need not tell."""
    waits = ", includes waiting" if row.measure == "includes waiting" else ""
    kind = f"{row.op_kind}{waits}: " if row.op_kind in COLLECTIVES else ""
    return f"{kind}{row.name}"


def _report(trace: Trace, graph: KernelGraph, simulated: Array) -> dict[str, Any]:
    """Collect what a fit found, as plain values."""
    measured = graph.measured
    begins = (graph.role == "source") & (graph.stream < 0)
    rows = [row.report("empirical", _label(row)) for row in kernel_table(trace)]
    warnings = []
    if 1 < measured.size < FEW_STEPS:
        warnings.append(
            f"{format_count(measured.size, 'step')}: too few for how steps differ; profile "
            f"{FEW_STEPS} or more"
        )
    off = float(simulated.mean() / measured.mean()) - 1.0
    if abs(off) > FAR_OFF:
        warnings.append(
            f"the model's mean step is {percent_change(off)} off the measured one: too few steps "
            "to identify which waits bind; its spread and its what-ifs are uncertain"
        )
    if any(r["measure"] == "includes waiting" for r in rows):
        warnings.append(
            "ranks not traced enter through the waiting in collectives, drawn as recorded: "
            "their stragglers are in it, and are not identifiable"
        )
    return {
        "inputs": [trace.source], "steps": measured.size, "stages": graph.n_stages,
        "dp_size": 1, "p2p": "none",
        "step_time": figures(measured),
        "lead": {"mean": -float(np.nanmean(graph.durations[begins]))},
        "cross_check": {"measured": figures(measured), "model": figures(simulated)},
        "kernels": rows,
        "effects": {"step": {"cv": _step_cv(graph), "ci": [None, None], "share": None}},
        "loadings": {}, "lemons": [], "not_identifiable": list(NOT_IDENTIFIABLE),
        "warnings": warnings, "notes": list(trace.notes),
        "edges_recorded": graph.edges_recorded, "edges_inferred": graph.edges_inferred,
    }  # fmt: skip


def _step_cv(graph: KernelGraph) -> float:
    """CV over the steps of what all computing kernels of a step take together."""
    if graph.steps.size < 2:
        return 0.0
    seconds = graph.durations[:, 0]
    computes = (graph.role == "device") & ~np.isin(
        [node.op_kind for node in graph.nodes], list(COLLECTIVES)
    )
    total = seconds[computes & np.isfinite(seconds).all(axis=1)].sum(axis=0)
    return float(total.std(ddof=1) / total.mean()) if total.any() else 0.0


def _job(graph: KernelGraph) -> dict[str, Any]:
    """Blocks of a job file that describe the traced ranks: one forward stands for all kernels."""
    device = np.flatnonzero(graph.role == "device")
    members = np.array([len(graph.nodes[i].stages) for i in device])
    nominal = finite_mean(graph.durations[device], axis=(1, 2))
    busy = float(np.nansum(nominal * members)) / graph.n_stages
    return {
        "model": {"durations": {"forward_s": busy, "backward_s": busy}},
        "parallelism": {"pp": graph.n_stages, "dp": 1, "microbatches": 1},
        "cluster": {"gpus_per_node": 1},
        "variability": {"library": None},
    }
