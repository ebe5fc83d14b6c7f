"""A traced step as a graph: its own order of ops, meetings, and every op's own duration.

One type for traces of pipelines and of kernels. Transfers and collectives join several chains and
count from the last arrival; the host's time between ops is nodes of its own. `replay` propagates
durations through the graph, so measured ones reproduce the measured step, and changed ones answer
what-if questions. Left out: contention between streams.
Arrays over workers are [stage, replica, step]; NaN stands for what a trace lacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from prism.common.means import median

Array = NDArray[np.float64]
COMPUTE = ("forward", "backward", "backward_weight", "recompute")
ARRIVAL = "arrival"  # name of a join before an op of several workers, where one of them comes
LATENCY = ("host", "host", "launch latency")  # op_kind, kernel_class and name of a lag
LEAD = "lead"  # name of a source: when a host or stream begins, after the end of the step before


class Scope(NamedTuple):
    """Who takes part in one op: each worker alone, those of a stage, of a replica, or all."""

    name: str  # worker, replica, stage, world

    def axes(self) -> tuple[int, ...]:
        """Axes of [stage, replica] that a meeting runs over."""
        return {"worker": (), "replica": (0,), "stage": (1,), "world": (0, 1)}[self.name]

    def latest(self, times: Array) -> Array:
        """Latest of every worker's meeting, [stage, replica, step], NaN ignored."""
        top = np.fmax.reduce(times, axis=self.axes(), keepdims=True)
        return np.broadcast_to(top, times.shape)

    def earliest(self, times: Array) -> Array:
        """Earliest of every worker's meeting, as `latest`."""
        return -self.latest(-times)


WORKER, REPLICA, STAGE, WORLD = (Scope(n) for n in ("worker", "replica", "stage", "world"))


class TraceNode(NamedTuple):
    """One node of the graph, in every replica."""

    kind: str  # op, gap or join
    op_kind: str
    kernel_class: str
    name: str
    scope: Scope
    stages: tuple[int, ...]  # that take part
    replica: int  # the only one that waits in it, others pass; -1: all
    chunk: int
    microbatch: int
    preds: tuple[int, ...]
    lags: tuple[float, ...] = ()  # from each predecessor's end to the earliest start [s]; (): none
    continues: int = -1  # of a source: the node of the step before whose end it is

    @property
    def is_global(self) -> bool:
        """Whether it waits for all replicas."""
        return self.scope.name in ("stage", "world")


@dataclass(frozen=True)
class TraceGraph:
    """Nodes in topological order, and what was measured of them."""

    nodes: tuple[TraceNode, ...]
    durations: Array  # [node, replica, step] s from the last arrival; 0 for joins, NaN: missing
    steps: NDArray[np.int64]  # their numbers
    measured: Array  # [step] from the step's begin, or the end of the one before, to its end [s]
    n_stages: int
    n_replicas: int
    p2p: str  # blocking, async or none
    notes: tuple[str, ...] = ()  # what had to be inferred
    edges_recorded: int = 0  # between workers or streams, that the trace names
    edges_inferred: int = 0  # found from coinciding times

    def select(self, keep: NDArray[np.int64]) -> Self:
        """Return the same graph with some of the steps, by position."""
        return replace(
            self, durations=self.durations[:, :, keep], steps=self.steps[keep],
            measured=self.measured[keep],
        )  # fmt: skip


def replay(graph: TraceGraph, durations: Array | None = None) -> Array:
    """Step times [step] in seconds, every node starting at the latest end of its predecessors.

    `durations` [node, replica, step] are the measured ones by default, where a missing one is its
    node's median.
    """
    return step_times(graph.nodes, ends_of(graph, durations))


def step_times(nodes: Sequence[TraceNode], ends: Array) -> Array:
    """Find when steps end [step] s, by the ends of their nodes [node, replica, step] s."""
    return np.asarray(ends[ops_of(nodes)].max(axis=(0, 1)))


def ops_of(nodes: Sequence[TraceNode]) -> NDArray[np.int64]:
    """Nodes whose last end is that of the step: a host may be further."""
    return np.flatnonzero([node.kind == "op" for node in nodes])


def ends_of(graph: TraceGraph, durations: Array | None = None) -> Array:
    """Find the ends of all nodes, [node, replica, step] s, of durations as `replay` takes them."""
    return propagate(graph.nodes, filled(graph) if durations is None else durations)


def propagate(nodes: Sequence[TraceNode], durations: Array) -> Array:
    """Find the ends of nodes from their durations, both [node, replica, step] s."""
    ends = np.zeros_like(durations)
    for i, node in enumerate(nodes):
        ends[i] = start_of(node, ends) + durations[i]
    return ends


def start_of(node: TraceNode, ends: Array) -> Array:
    """When a node starts, [replica, step] s: the latest of its predecessors' ends and lags."""
    come = [ends[p] for p in node.preds]
    if not come:
        return np.zeros(ends.shape[1:])
    if node.lags:
        come = [end + lag for end, lag in zip(come, node.lags, strict=True)]
    start: Array = reduce(np.maximum, come) if node.replica < 0 else come[0].copy()
    if node.replica >= 0:  # preds[0] is a worker's own, which the other replicas keep
        start[node.replica] = np.max([end[node.replica] for end in come], axis=0)
    if node.is_global:
        start = np.broadcast_to(start.max(axis=0, keepdims=True), start.shape)
    return start


def with_lags_as_nodes(graph: TraceGraph) -> tuple[tuple[TraceNode, ...], list[int], Array]:
    """Lay each lag as a gap of its own, as the engine needs it: nodes, places, and lags [node] s.

    Places say which of the new nodes each old one is; a lag below 0 is left out.
    """
    nodes: list[TraceNode] = []
    lags: list[float] = []
    place: list[int] = []
    found: dict[tuple[int, float], int] = {}
    for node in graph.nodes:
        preds: dict[int, None] = {}
        for p, lag in zip(node.preds, node.lags or (0.0,) * len(node.preds), strict=True):
            key = place[p], lag
            if lag > 0.0 and key not in found:
                found[key], stage = len(nodes), node.stages[:1]
                nodes.append(TraceNode("gap", *LATENCY, WORKER, stage, -1, 0, -1, (place[p],)))
                lags.append(lag)
            preds[found.get(key, place[p])] = None
        place.append(len(nodes))
        nodes.append(node._replace(preds=tuple(preds), lags=()))
        lags.append(0.0)
    there = (n if n.continues < 0 else n._replace(continues=place[n.continues]) for n in nodes)
    return tuple(there), place, np.array(lags)


def filled(graph: TraceGraph) -> Array:
    """Return measured durations, missing ones at the median of their node and replica, or node."""
    durations = graph.durations
    if np.isfinite(durations).all():
        return durations
    own = median(durations, axis=2, keepdims=True)
    node = median(durations, axis=(1, 2), keepdims=True)
    guess = np.where(np.isfinite(own), own, np.where(np.isfinite(node), node, 0.0))
    return np.where(np.isfinite(durations), durations, guess)
