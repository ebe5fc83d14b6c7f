"""How well step graphs reproduce the steps of a kernel trace.

Every step runs from its own durations through the edges that the other steps show; the ideal step
has every node at its mean. Left out: steps that not all ranks have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.kerneltrace.graph import NODE_KINDS, KernelGraph, replay
from prism.kerneltrace.infer import infer_graph
from prism.kerneltrace.steps import KernelSteps, align, split_steps
from prism.traces.table import Trace

Floats = NDArray[np.float64]


def replay_trace(trace: Trace) -> dict[str, Any]:
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
    Ideal is the step with every node at its mean over the steps.
    """
    steps = split_steps(trace)
    graphs = [infer_graph(steps, step) for step in steps.steps]
    rows: list[dict[str, Any]] = []
    ideal = []
    for graph in graphs:
        spans = replay(graph)
        mean = np.nanmean(node_durations(steps, graph, graphs), axis=1)
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
    ideal_mean = float(np.mean(ideal))
    return {
        "steps": rows,
        "mean_error": float(error.mean()),
        "max_abs_error": float(np.abs(error).max()),
        "measured_mean": measured_mean,
        "replayed_mean": float(np.mean([row["replayed"] for row in rows])),
        "ideal_mean": ideal_mean,
        "slowdown": measured_mean / ideal_mean if ideal_mean > 0.0 else np.nan,
        "edges_recorded": sum(graph.count_edges("recorded") for graph in graphs),
        "edges_inferred": sum(graph.count_edges("inferred") for graph in graphs),
        "late_starts": sum(graph.n_late for graph in graphs),
        "unexplained_starts": sum(graph.n_unexplained for graph in graphs),
        "notes": _replay_notes(trace, steps),
    }


def _replay_notes(trace: Trace, steps: KernelSteps) -> list[str]:
    """Say what the replay cannot see."""
    notes = []
    meta = trace.meta
    if len(steps.ranks) < meta["world_size"]:
        notes.append(
            f"{len(steps.ranks)} of {meta['world_size']} ranks traced: the others enter through "
            "the waiting recorded in the collectives"
        )
    if len(steps.steps) == 1:
        notes.append("one step only: no edge can be inferred from other steps")
    return notes


def node_durations(
    trace: Trace | KernelSteps, graph: KernelGraph, graphs: list[KernelGraph]
) -> Floats:
    """Durations of a graph's nodes in several steps.

    Parameters
    ----------
    trace : Trace or KernelSteps
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
    for s, other in enumerate(graphs):
        place = {
            (int(other.rank[i]), int(other.kind[i]), int(other.event[i])): i
            for i in np.flatnonzero(other.event >= 0)
        }
        for rank in steps.ranks:
            to = align(steps.views[graph.step, rank], steps.views[other.step, rank])
            for i in np.flatnonzero((graph.rank == rank) & ~fixed):
                j = place.get((rank, int(graph.kind[i]), int(to[graph.event[i]])))
                if j is not None:
                    found[i, s] = other.duration[j]
    return found


def typical_step(trace: Trace | KernelSteps) -> int:
    """Find the step of median GPU span."""
    steps = trace if isinstance(trace, KernelSteps) else split_steps(trace)
    span = [max(steps.views[s, rank].span() for rank in steps.ranks) for s in steps.steps]
    order = np.argsort(span, kind="stable")
    return steps.steps[int(order[(len(order) - 1) // 2])]


def step_template(trace: Trace) -> KernelGraph:
    """Build the graph of the typical step, with latencies and edges from all the others."""
    steps = split_steps(trace)
    return infer_graph(steps, typical_step(steps))
