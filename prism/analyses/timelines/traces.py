"""Steps of a trace, op by op: a measured one as it replays, and the same without stragglers.

A pipeline trace replays through its own graph, a profiler's trace through that of its kernels; the
ideal step has every effect at 1, or where only a few steps are known every op at its mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from prism.analyses.replay import same_work
from prism.analyses.timelines.jobs import describe_node, gaps_by_row
from prism.analyses.timelines.played import PlayedOp, PlayedStep, Stream
from prism.common.arrays import Index
from prism.common.errors import PrismError, option
from prism.common.means import finite_mean
from prism.models.kerneltrace.graph import KernelGraph, step_graph
from prism.models.kerneltrace.steps import split_steps
from prism.models.pipelinetrace.build import build_trace_graph
from prism.simulation.tracemodel.graph import Array, TraceGraph, ends_of, filled, ops_of
from prism.simulation.tracemodel.model import steady
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.table import Trace


def play_trace(trace: Trace, step: int | None) -> list[PlayedStep]:
    """Play one step of a trace as measured, and with every effect at 1."""
    return _play_kernels(trace, step) if trace.has_kernels else _play_pipeline(trace, step)


def _choose(source: str, steps: list[int], step: int) -> int:
    if step not in steps:
        shown = ", ".join(map(str, steps[:8])) + (f", ... {steps[-1]}" if len(steps) > 8 else "")
        raise PrismError(f"{source}: no step {step}; {option('step')} takes one of {shown}")
    return steps.index(step)


def _play_pipeline(trace: Trace, step: int | None) -> list[PlayedStep]:
    graph = build_trace_graph(trace)
    steps, measured = [int(s) for s in graph.steps], graph.measured
    nearest = int(np.argmin(np.abs(measured - np.quantile(measured, 0.5))))
    at = nearest if step is None else _choose(trace.source, steps, step)
    ideal, simple = same_work(graph, trace.source)
    same = _same_nodes(graph, simple)
    one, bare = (g.select(np.array([at])) for g in (graph, simple))
    nominal = np.full((len(graph.nodes), graph.n_replicas), np.nan)
    nominal[same >= 0] = ideal[same[same >= 0], :, at]
    best = ideal[:, :, at : at + 1]
    about = {"step": steps[at], "measured_step_time": float(measured[at])}
    return [
        replace(_played(one, filled(one), nominal, about, "replayed"), notes=tuple(graph.notes)),
        _played(bare, best, best[:, :, 0], about, "ideal"),
    ]


def _same_nodes(graph: TraceGraph, simple: TraceGraph) -> Index:
    """Node of the simplified graph that each node became, -1: folded away."""
    out, j = np.full(len(graph.nodes), -1), 0
    for i, node in enumerate(graph.nodes):
        there = simple.nodes[j] if j < len(simple.nodes) else None
        if there is not None and node._replace(preds=()) == there._replace(preds=()):
            out[i], j = j, j + 1
    return out


def _play_kernels(trace: Trace, step: int | None) -> list[PlayedStep]:
    steps = split_steps(trace)
    if step is not None:
        _choose(trace.source, steps.steps, step)
    graph = step_graph(steps, step)
    own = graph.select(graph.own)
    mean = finite_mean(graph.durations, axis=(1, 2))
    mean = steady(graph.nodes, mean, graph.most_lead)[:, None, None]
    about = {"step": graph.step, "measured_step_time": float(own.measured[0])}
    played = [_played(own, own.durations, mean[:, :, 0], about, "replayed")]
    if len(steps.steps) > 1:
        played.append(_played(own, mean, mean[:, :, 0], about, "ideal"))
    ops = tuple(_describe(graph, i) for i in range(len(graph.nodes)))
    return [replace(one, ops=(*ops, one.ops[-1]), ranks=graph.ranks) for one in played]


def _describe(graph: KernelGraph, i: int) -> PlayedOp:
    node = graph.nodes[i]
    op = describe_node(node)
    if node.op_kind in COLLECTIVES:
        op = op._replace(stream=Stream.COMMUNICATION)
    if node.kind == "op" and op.stream == Stream.COMPUTE and node.kernel_class:
        op = op._replace(op_kind=node.kernel_class)
    track = f"stream {int(graph.stream[i])}" if node.kind == "op" else "host"
    return op._replace(lags=node.lags, track=track)


def _played(
    graph: TraceGraph, durations: Array, nominal: Array, about: dict[str, Any], kind: str
) -> PlayedStep:
    """Play the only step of a graph; it is over when the last op is, the host may be further."""
    end = ends_of(graph, durations)[:, :, 0]
    gaps = gaps_by_row(graph.nodes, end - durations[:, :, 0], end)
    ops, done = ops_of(graph.nodes), end.max(axis=1)
    last = int(ops[np.argmax(done[ops])])
    join = PlayedOp("join", Stream.JOIN, "", (0,), (last,), True)
    return PlayedStep(
        (*map(describe_node, graph.nodes), join),
        np.vstack([end, np.full((1, graph.n_replicas), done[last])]).T,
        len(end), float(done[last]), graph.n_stages,
        nominal=np.vstack([nominal, np.zeros((1, graph.n_replicas))]).T, gaps=gaps,
        label={"kind": kind, **about},
    )  # fmt: skip
