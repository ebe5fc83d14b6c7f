"""A pipeline trace as a graph: its own order of ops, meetings, and every op's own duration.

Each traced worker is a chain of what it did, in the order in which it did it; transfers and
collectives join several chains and count from the last arrival; the host's gaps between ops are ops
of their own. `replay` propagates durations through the graph, so measured ones reproduce the
measured step, and changed ones answer what-if questions. `prism.models.pipelinetrace.build` makes
the graph. Left out: contention between streams.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.simulation.tracemodel.scope import Scope, median

Array = NDArray[np.float64]
COMPUTE = ("forward", "backward", "backward_weight", "recompute")


class TraceNode(NamedTuple):
    """One node of the graph, in all replicas."""

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

    @property
    def is_global(self) -> bool:
        """Whether it waits for all replicas."""
        return self.scope.name in ("stage", "world")


@dataclass(frozen=True)
class TraceGraph:
    """Nodes in topological order, and what was measured of them.

    Attributes
    ----------
    nodes : tuple of TraceNode
    durations : float64 [node, replica, step]
        Seconds from the last arrival; 0 for joins; equal over replicas for global nodes; NaN where
        the trace lacks the op.
    steps : int64 [step]
        Step numbers.
    measured : float64 [step]
        Step times, last end - first start [s].
    p2p : str
        ``blocking``, ``async`` or ``none``.
    notes : tuple of str
        What had to be inferred.
    edges_recorded, edges_inferred : int
        Edges between workers that ops name, and those found from coinciding times.
    placed : bool [node, replica, step], optional
        Ops that were not recorded, whose duration is what their neighbours leave: good for a
        replay, no measurement.
    """

    nodes: tuple[TraceNode, ...]
    durations: Array
    steps: NDArray[np.int64]
    measured: Array
    n_stages: int
    n_replicas: int
    p2p: str
    notes: tuple[str, ...] = ()
    edges_recorded: int = 0
    edges_inferred: int = 0
    placed: NDArray[np.bool_] | None = None

    def where(self, **fields: object) -> NDArray[np.int64]:
        """Return indices of nodes whose fields have these values."""
        hit = [all(getattr(n, k) == v for k, v in fields.items()) for n in self.nodes]
        return np.flatnonzero(hit)

    def select(self, keep: NDArray[np.int64]) -> "TraceGraph":
        """Return the same graph with some of the steps, by position."""
        return replace(
            self, durations=self.durations[:, :, keep], steps=self.steps[keep],
            measured=self.measured[keep],
            placed=None if self.placed is None else self.placed[:, :, keep],
        )  # fmt: skip


def replay(graph: TraceGraph, durations: Array | None = None) -> Array:
    """Propagate durations through the graph: start of a node = latest end of its predecessors.

    Parameters
    ----------
    durations : float64 [node, replica, step], optional
        Seconds; the measured ones by default, where a missing one is its node's median.

    Returns
    -------
    float64 [step]
        Step times [s].
    """
    return np.asarray(ends_of(graph, durations).max(axis=(0, 1)))


def ends_of(graph: TraceGraph, durations: Array | None = None) -> Array:
    """Propagate durations as `replay` does: ends of all nodes, [node, replica, step] s."""
    if durations is None:
        durations = filled(graph)
    ends = np.zeros_like(durations)
    replicas = np.arange(graph.n_replicas)[:, None]
    for i, node in enumerate(graph.nodes):
        start = ends[node.preds[0]] if node.preds else np.zeros(durations.shape[1:])
        for p in node.preds[1:]:
            later = np.maximum(start, ends[p])
            if node.replica >= 0:  # preds[0] is a worker's own, which the other replicas keep
                later = np.where(replicas == node.replica, later, start)
            start = later
        if node.is_global:
            start = np.broadcast_to(start.max(axis=0, keepdims=True), start.shape)
        ends[i] = start + durations[i]
    return ends


def filled(graph: TraceGraph) -> Array:
    """Return measured durations, missing ones at the median of their node and replica, or node."""
    durations = graph.durations
    if np.isfinite(durations).all():
        return durations
    own = median(durations, axis=2, keepdims=True)
    node = median(durations, axis=(1, 2), keepdims=True)
    guess = np.where(np.isfinite(own), own, np.where(np.isfinite(node), node, 0.0))
    return np.where(np.isfinite(durations), durations, guess)
