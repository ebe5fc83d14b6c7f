"""Steps of a trace, op by op: a measured one as it replays, and the same without stragglers.

A pipeline trace replays through its own graph, a profiler's trace through that of its kernels; the
ideal step has every effect at 1, or where only a few steps are known every op at its mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.analyses.replay import same_work
from prism.analyses.timelines.jobs import describe_node, gaps_by_row
from prism.analyses.timelines.played import COMMUNICATION, COMPUTE, JOIN, PlayedOp, PlayedStep
from prism.common.errors import PrismError, named
from prism.common.means import finite_mean
from prism.models.kerneltrace.graph import KernelGraph, step_graph
from prism.models.kerneltrace.steps import split_steps
from prism.models.pipelinetrace.build import build_trace_graph
from prism.simulation.tracemodel.graph import Array, TraceGraph, ends_of, filled
from prism.simulation.tracemodel.model import steady
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.table import Trace


def play_trace(trace: Trace, step: int | None) -> list[PlayedStep]:
    """Play one step of a trace as measured, and with every effect at 1."""
    return _play_kernels(trace, step) if trace.has_kernels else _play_pipeline(trace, step)


def _choose(source: str, steps: list[int], step: int) -> int:
    if step not in steps:
        shown = ", ".join(map(str, steps[:8])) + (f", ... {steps[-1]}" if len(steps) > 8 else "")
        raise PrismError(f"{source}: no step {step}; {named('step')} takes one of {shown}")
    return steps.index(step)


def _label(kind: str, step: int, measured: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "measured_step_time": measured, **more}


# --------------------------------------------------------------------------------- pipeline traces
def _play_pipeline(trace: Trace, step: int | None) -> list[PlayedStep]:
    graph = build_trace_graph(trace)
    steps, measured = [int(s) for s in graph.steps], graph.measured
    nearest = int(np.argmin(np.abs(measured - np.quantile(measured, 0.5))))
    at = nearest if step is None else _choose(trace.source, steps, step)
    ideal, simple = same_work(graph, trace.source)
    same = _same_nodes(graph, simple)
    keep = np.array([at])
    one, bare = graph.select(keep), simple.select(keep)
    nominal = np.full((len(graph.nodes), graph.n_replicas), np.nan)
    nominal[same >= 0] = ideal[same[same >= 0], :, at]
    label = _label("replayed", steps[at], float(measured[at]), notes=list(graph.notes))
    played = _played(one, filled(one), nominal, label)
    best = ideal[:, :, at : at + 1]
    label = label | {"kind": "ideal", "notes": []}
    return [played, _played(bare, best, best[:, :, 0], label)]


def _same_nodes(graph: TraceGraph, simple: TraceGraph) -> NDArray[np.int64]:
    """Node of the simplified graph that each node became, -1: folded away."""
    out, j = np.full(len(graph.nodes), -1), 0
    for i, node in enumerate(graph.nodes):
        there = simple.nodes[j] if j < len(simple.nodes) else None
        if there is not None and node._replace(preds=()) == there._replace(preds=()):
            out[i], j = j, j + 1
    return out


def _played(
    graph: TraceGraph, durations: Array, nominal: Array, label: dict[str, Any]
) -> PlayedStep:
    """Play the only step of a graph; the step is over when its last node is."""
    end = ends_of(graph, durations)[:, :, 0]
    gaps = gaps_by_row(graph.nodes, end - durations[:, :, 0], end)
    ops = [describe_node(node) for node in graph.nodes]
    last = PlayedOp("join", JOIN, "", (0,), tuple(range(len(ops))), True)
    total = float(end.max())
    end = np.concatenate([end, np.full((1, graph.n_replicas), total)])
    nominal = np.concatenate([nominal, np.zeros((1, graph.n_replicas))])
    return PlayedStep(
        (*ops, last),
        end.T,
        len(ops),
        total,
        graph.n_stages,
        nominal=nominal.T,
        label=label,
        gaps=gaps,
    )


# ----------------------------------------------------------------------------------- kernel traces
def _play_kernels(trace: Trace, step: int | None) -> list[PlayedStep]:
    steps = split_steps(trace)
    if step is not None:
        _choose(trace.source, steps.steps, step)
    graph = step_graph(steps, step)
    own = graph.select(graph.own)
    mean = finite_mean(graph.durations, axis=(1, 2))
    mean = steady(graph.nodes, mean, graph.most_lead)[:, None, None]
    label = _label("replayed", graph.step, float(own.measured[0]))
    played = _played_kernels(own, own.durations, mean, label)
    ideal = _played_kernels(own, mean, mean, label | {"kind": "ideal"})
    return [played, ideal] if len(steps.steps) > 1 else [played]


def _played_kernels(
    graph: KernelGraph, durations: Array, nominal: Array, label: dict[str, Any]
) -> PlayedStep:
    """Play a kernel graph; the clock begins with the end of the step before."""
    end, is_op = ends_of(graph, durations), np.array([n.kind == "op" for n in graph.nodes])
    start = end - durations
    gaps = gaps_by_row(graph.nodes, start[:, :, 0], end[:, :, 0])
    ops = [_describe(graph, i) for i in range(len(graph.nodes))]
    last = int(np.argmax(np.where(is_op, end[:, 0, 0], -np.inf)))
    everyone = tuple(range(graph.n_stages))
    ops.append(PlayedOp("join", JOIN, "", everyone, (last,), True, lags=(0.0,)))
    end = np.append(end[:, 0, 0], end[last, 0, 0])
    return PlayedStep(
        tuple(ops), end[None], len(ops) - 1, float(end[-1]), graph.n_stages,
        nominal=np.append(nominal[:, 0, 0], 0.0)[None], label=label | {"ranks": graph.ranks},
        between="rank", gaps=gaps,
    )  # fmt: skip


def _describe(graph: KernelGraph, i: int) -> PlayedOp:
    node = graph.nodes[i]
    op = describe_node(node)
    if node.op_kind in COLLECTIVES:
        op = op._replace(stream=COMMUNICATION)
    if node.kind == "op" and op.stream == COMPUTE and node.kernel_class:
        op = op._replace(op_kind=node.kernel_class)
    track = f"stream {int(graph.stream[i])}" if node.kind == "op" else "host"
    return op._replace(lags=node.lags, track=track)
