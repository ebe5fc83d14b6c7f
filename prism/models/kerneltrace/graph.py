"""The graph of a step of a kernel trace, and running it.

Nodes are device activities, the host's time from call to call and its returns from waits; edges
are order within a stream and a host thread, launches, and waits that the trace names or that the
other steps show. A collective matched over ranks begins to transfer when its last member arrives.
Left out: ranks that are not traced, which enter through the waiting in their collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.models.kerneltrace.steps import KernelKey

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NODE_KINDS = ("source", "host", "arrival", "join", "device", "return")
"""What a node is: a step's begin on a rank or work carried over from earlier steps; the host's time
up to a call's issue; a collective's member ready to take part; its last member ready; an activity
on the device; a host call's return."""

EDGE_KINDS = ("start", "thread", "launch", "stream", "recorded", "inferred", "join", "return")
"""Why a node waits for another one."""

HOST_KEY = KernelKey("launch_gap", "host", "host issue", "")
"""Key of the host's time between two calls."""

FIXED_KEY = KernelKey("other", "", "", "")
"""Key of nodes that are no work of their own: sources, arrivals, joins."""


@dataclass(frozen=True)
class KernelGraph:
    """Graph of one step, nodes in topological order [node], edges grouped by node [edge].

    Attributes
    ----------
    step : int
    keys : tuple of KernelKey
        What `key` counts.
    key : array of int
        [node] kernel of the node.
    kind : array of int
        [node] index into `NODE_KINDS`.
    rank, stream : array of int
        [node] -1 where it does not apply.
    row : array of int
        [node] row of the trace's table, -1 for host nodes.
    event : array of int
        [node] number of the host event in the step's order on its rank, -1 for sources and joins.
    duration : array
        [node] as recorded in this step; of matched collectives the transfer [s].
    measured_start, measured_end : array
        [node] of device activities, from the first rank's begin of the step [s].
    pred_ptr, pred : array of int
        [node + 1] and [edge]: node i waits for ``pred[pred_ptr[i]:pred_ptr[i + 1]]``.
    lag : array
        [edge] from the other's end to the earliest start [s].
    edge_kind : array of int
        [edge] index into `EDGE_KINDS`.
    n_late, n_unexplained : int
        Starts later than stream and launch allow in the steps learnt from, and those of them for
        which no edge was found.
    """

    step: int
    keys: tuple[KernelKey, ...]
    key: Ints
    kind: Ints
    rank: Ints
    stream: Ints
    row: Ints
    event: Ints
    duration: Floats
    measured_start: Floats
    measured_end: Floats
    pred_ptr: Ints
    pred: Ints
    lag: Floats
    edge_kind: Ints
    n_late: int
    n_unexplained: int

    def nodes(self, kind: str) -> Ints:
        """List the nodes of a kind of `NODE_KINDS`."""
        return np.flatnonzero(self.kind == NODE_KINDS.index(kind))

    def count_edges(self, kind: str) -> int:
        """Count the edges of a kind of `EDGE_KINDS`."""
        return int((self.edge_kind == EDGE_KINDS.index(kind)).sum())

    def measured_span(self, rank: int | None = None) -> float:
        """First start to last end of the device activities as recorded [s]."""
        nodes = self.devices(rank)
        return float(self.measured_end[nodes].max() - self.measured_start[nodes].min())

    def devices(self, rank: int | None = None) -> Ints:
        """List the device nodes of one rank, or of all."""
        nodes = self.nodes("device")
        return nodes if rank is None else nodes[self.rank[nodes] == rank]


@dataclass(frozen=True)
class Spans:
    """Replayed times of a graph's nodes, from the step's begin on the first rank [s].

    Attributes
    ----------
    start, end : array
        [node] or [node, replicate]; a matched collective's start is its last member's arrival.
    gpu_span : dict of int to array
        Per rank, first start to last end of its device activities: [] or [replicate].
    span : array
        The same over all ranks.
    """

    start: Floats
    end: Floats
    gpu_span: dict[int, Floats]
    span: Floats


def replay(graph: KernelGraph, durations: Floats | None = None) -> Spans:
    """Run a graph: every node starts when all it waits for has ended.

    Parameters
    ----------
    durations : array, optional
        [node] or [node, replicate] durations [s]; the recorded ones where None.

    Raises
    ------
    PrismError
        If there is not one duration a node.

    Notes
    -----
    ``start(i) = max over edges (end(j) + lag)``, ``end(i) = start(i) + duration(i)``.
    """
    duration = graph.duration if durations is None else np.asarray(durations, dtype=np.float64)
    n = graph.duration.size
    if duration.shape[:1] != (n,):
        raise PrismError(
            f"step {graph.step}: got durations of shape {duration.shape} for {n:,} nodes; expected "
            "one a node, or [node, replicate]; start from graph.duration"
        )
    ptr, pred = graph.pred_ptr.tolist(), graph.pred
    start = np.zeros(duration.shape)
    end = np.zeros(duration.shape)
    lag = graph.lag
    for i in range(n):
        a, b = ptr[i], ptr[i + 1]
        if b > a:
            lags = lag[a:b] if duration.ndim == 1 else lag[a:b, None]
            start[i] = (end[pred[a:b]] + lags).max(axis=0)
        end[i] = start[i] + duration[i]
    arrival = start.copy()
    joins = graph.nodes("join")
    if joins.size:
        # a member that waits for the others already occupies the device
        arrived = graph.nodes("arrival")
        of_row = dict(zip(graph.row[arrived].tolist(), arrived.tolist(), strict=True))
        for i in graph.nodes("device"):
            arrival[i] = start[of_row.get(int(graph.row[i]), i)]
    spans = {}
    for rank in np.unique(graph.rank[graph.nodes("device")]):
        mine = graph.devices(int(rank))
        spans[int(rank)] = end[mine].max(axis=0) - arrival[mine].min(axis=0)
    mine = graph.devices(None)
    return Spans(start, end, spans, end[mine].max(axis=0) - arrival[mine].min(axis=0))
