"""How well step graphs reproduce the steps of a kernel trace.

Every step runs from its own durations through the edges that the other steps show; the ideal step
has every node at its mean. Left out: steps that not all ranks have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.models.kerneltrace.graph import EDGE_KINDS, NODE_KINDS, KernelGraph, replay
from prism.models.kerneltrace.infer import infer_graph
from prism.models.kerneltrace.steps import KernelSteps, StepView, align, split_steps
from prism.traces.table import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class StepGraphs(NamedTuple):
    """The steps of a trace, and of each its graph and its nodes' means over the steps [node] s."""

    steps: KernelSteps
    graphs: list[KernelGraph]
    means: list[Floats]


def step_graphs(trace: Trace) -> StepGraphs:
    """Build the graph of every step with the edges that the other steps show."""
    steps = split_steps(trace)
    graphs = [infer_graph(steps, step) for step in steps.steps]
    means = [np.nanmean(node_durations(steps, graph, graphs), axis=1) for graph in graphs]
    return StepGraphs(steps, graphs, means)


def replay_trace(trace: Trace | StepGraphs) -> dict[str, Any]:
    """Replay every step from its own durations and the edges that the other steps show.

    Returns
    -------
    dict
        ``steps``: list of step, rank, measured, replayed [s] and error; ``mean_error``,
        ``max_abs_error``; ``measured_mean``, ``replayed_mean`` and ``ideal_mean`` [s] of the GPU
        span (first start to last end of what was launched in the step), ``slowdown``;
        ``edges_recorded``, ``edges_inferred``, ``late_starts`` and ``unexplained_starts`` over
        all steps; ``notes`` on what the replay cannot see.

    Notes
    -----
    Ideal is the step with every node at its mean over the steps; the slowdown compares the
    replayed steps with it, so that what the replay lacks does not count.
    """
    steps, graphs, means = trace if isinstance(trace, StepGraphs) else step_graphs(trace)
    rows: list[dict[str, Any]] = []
    ideal = []
    for graph, mean in zip(graphs, means, strict=True):
        spans = replay(graph)
        best = replay(graph, mean)
        for rank, span in spans.gpu_span.items():
            measured = graph.measured_span(rank)
            rows.append(
                {
                    "step": graph.step,
                    "rank": rank,
                    "measured": measured,
                    "replayed": float(span),
                    "error": float(span) / measured - 1.0,
                }
            )
            ideal.append(float(best.gpu_span[rank]))
    error = np.array([row["error"] for row in rows])
    measured_mean = float(np.mean([row["measured"] for row in rows]))
    replayed_mean = float(np.mean([row["replayed"] for row in rows]))
    ideal_mean = float(np.mean(ideal))
    return {
        "steps": rows,
        "mean_error": float(error.mean()),
        "max_abs_error": float(np.abs(error).max()),
        "measured_mean": measured_mean,
        "replayed_mean": replayed_mean,
        "ideal_mean": ideal_mean,
        "slowdown": replayed_mean / ideal_mean if ideal_mean > 0.0 else np.nan,
        "edges_recorded": sum(graph.count_edges("recorded") for graph in graphs),
        "edges_inferred": sum(graph.count_edges("inferred") for graph in graphs),
        "late_starts": sum(graph.n_late for graph in graphs),
        "unexplained_starts": sum(graph.n_unexplained for graph in graphs),
        "notes": _replay_notes(steps),
    }


def _replay_notes(steps: KernelSteps) -> list[str]:
    """Say what the replay cannot see."""
    notes = []
    if len(steps.steps) == 1:
        notes.append("one step only: no edge can be inferred from other steps")
    return notes


def node_durations(
    trace: Trace | KernelSteps, graph: KernelGraph, graphs: list[KernelGraph]
) -> Floats:
    """Durations of a graph's nodes in several steps.

    Parameters
    ----------
    graph : KernelGraph
        Whose nodes are asked for.
    graphs : list of KernelGraph
        The steps' graphs.

    Returns
    -------
    array
        [node, step] durations [s]: of the counterpart in each step; the graph's own for sources,
        and not a number where a step has no counterpart.
    """
    steps = trace if isinstance(trace, KernelSteps) else split_steps(trace)
    found = np.full((graph.duration.size, len(graphs)), np.nan)
    fixed = (graph.event < 0) | (graph.kind == NODE_KINDS.index("arrival"))
    found[fixed] = graph.duration[fixed, None]
    host = graph.kind == NODE_KINDS.index("host")
    for s, other in enumerate(graphs):
        place = {
            (int(other.rank[i]), int(other.kind[i]), int(other.event[i])): i
            for i in np.flatnonzero(other.event >= 0)
        }
        for rank in steps.ranks:
            view = steps.views[other.step, rank]
            to = align(steps.views[graph.step, rank], view)
            for i in np.flatnonzero((graph.rank == rank) & ~fixed & ~host):
                j = place.get((rank, int(graph.kind[i]), int(to[graph.event[i]])))
                if j is not None:
                    found[i, s] = other.duration[j]
            _host_times(graph, view, to, found[:, s])
    return found


def _host_times(graph: KernelGraph, view: StepView, to: Ints, found: Floats) -> None:
    """Fill in the host's durations [node] that a graph has in another step of the same rank.

    A stretch between two calls that both steps have is as long as it was there: calls that only the
    graph has share it in proportion, calls that only the other step has are part of it.
    """
    on_host = np.isin(graph.kind, [NODE_KINDS.index("host"), NODE_KINDS.index("return")])
    by_thread = np.isin(graph.edge_kind, [EDGE_KINDS.index("thread"), EDGE_KINDS.index("start")])
    now: dict[int, float] = {}  # per node of this rank: when it ended in the other step
    before: dict[int, int] = {}
    for i in np.flatnonzero((graph.rank == view.rank) & (on_host | (graph.event < 0))).tolist():
        edges = np.arange(graph.pred_ptr[i], graph.pred_ptr[i + 1])
        edges = edges[by_thread[edges]]
        if not edges.size:
            now[i] = view.begin
            continue
        before[i] = int(graph.pred[edges[0]])
        there = int(to[graph.event[i]])
        if there < 0:
            continue
        if NODE_KINDS[graph.kind[i]] == "return":
            now[i] = float(view.call_end[there])
            continue
        until = float(view.issued[there] if view.on_device[there] else view.call[there])
        stretch = [i]
        while before[stretch[-1]] not in now:
            stretch.append(before[stretch[-1]])
        since = max(now[before[stretch[-1]]], view.begin)
        own = graph.duration[stretch]
        share = own / own.sum() if own.sum() > 0.0 else np.eye(len(stretch))[0]
        found[stretch] = max(0.0, until - since) * share
        for node, seconds in zip(stretch[::-1], found[stretch[::-1]], strict=True):
            since = now[node] = since + float(seconds)
        now[i] = until


def typical_step(trace: Trace | KernelSteps) -> int:
    """Find the step of median GPU span."""
    steps = trace if isinstance(trace, KernelSteps) else split_steps(trace)
    span = [max(steps.views[s, rank].span() for rank in steps.ranks) for s in steps.steps]
    order = np.argsort(span, kind="stable")
    return steps.steps[int(order[(len(order) - 1) // 2])]
