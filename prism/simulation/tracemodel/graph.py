"""A pipeline trace as a graph: its own order of ops, meetings, and every op's own duration.

Each traced worker is a chain of what it did; transfers and collectives join several chains and
count from the last arrival; the host's gaps between ops are ops of their own. `replay` propagates
durations through the graph, so measured ones reproduce the measured step, and changed ones answer
what-if questions. Left out: contention between streams.
Arrays over workers are [stage, replica, step]; NaN stands for what a trace lacks.
"""

import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
COMPUTE = ("forward", "backward", "backward_weight", "recompute")


class Scope(NamedTuple):
    """Who takes part in one op: each worker alone, those of a stage, of a replica, or all."""

    name: str  # worker, replica, stage, world

    def axes(self) -> tuple[int, ...]:
        """Axes of [stage, replica] that a meeting runs over."""
        return {"worker": (), "replica": (0,), "stage": (1,), "world": (0, 1)}[self.name]

    def latest(self, times: Array) -> Array:
        """Latest of every worker's meeting, [stage, replica, step], NaN ignored."""
        top = times
        with np.errstate(all="ignore"):
            for axis in self.axes():
                top = np.fmax.reduce(top, axis=axis, keepdims=True)
        return np.broadcast_to(top, times.shape)

    def earliest(self, times: Array) -> Array:
        """Earliest of every worker's meeting, as `latest`."""
        return -self.latest(-times)


WORKER, REPLICA, STAGE, WORLD = (Scope(n) for n in ("worker", "replica", "stage", "world"))


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
    """Nodes in topological order, and what was measured of them."""

    nodes: tuple[TraceNode, ...]
    durations: Array  # [node, replica, step] s from the last arrival; 0 for joins, NaN: missing
    steps: NDArray[np.int64]  # their numbers
    measured: Array  # [step] last end - first start [s]
    n_stages: int
    n_replicas: int
    p2p: str  # blocking, async or none
    notes: tuple[str, ...] = ()  # what had to be inferred
    edges_recorded: int = 0  # between workers, that ops name
    edges_inferred: int = 0  # found from coinciding times
    # [node, replica, step] ops that were not recorded, whose duration is what their neighbours
    # leave: good for a replay, no measurement
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
    """Step times [step] in seconds, every node starting at the latest end of its predecessors.

    `durations` [node, replica, step] are the measured ones by default, where a missing one is its
    node's median.
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


def median(
    values: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Array:
    """Median of what is not missing; NaN where all of it is."""
    if values.size and np.isfinite(values).all():  # far faster
        return np.asarray(np.median(values, axis=axis, keepdims=keepdims))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all missing
        return np.asarray(np.nanmedian(values, axis=axis, keepdims=keepdims))


def mean(values: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Mean of what is not missing; NaN where all of it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all missing
        return np.asarray(np.nanmean(values, axis=axis))
