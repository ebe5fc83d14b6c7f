"""From a kernel trace to the graph of one of its steps.

What the trace names (order within streams and host threads, launches, recorded waits) becomes edges
as it stands; latencies and the waits that it does not name come from the other steps. The host's
time between two calls is a node; a thread that was silent while another one worked waited for it.
Left out: what CPU threads wait for other than the device and each other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prism.common.errors import PrismError
from prism.models.kerneltrace.graph import EDGE_KINDS, FIXED_KEY, HOST_KEY, NODE_KINDS, KernelGraph
from prism.models.kerneltrace.steps import KernelKey, KernelSteps, StepView, split_steps
from prism.models.kerneltrace.waits import Learnt, learn
from prism.traces.table import Trace

_HANDOVER_S = 50e-6
"""A host thread that has been silent this long [s] while another one was busy was waiting for it,
as the main thread waits for autograd's; calls of a busy thread are 5 to 30 us apart."""


class _Node(NamedTuple):
    """A node under construction."""

    kind: str
    key: int
    rank: int
    stream: int
    row: int
    event: int
    duration: float
    start: float
    end: float


class _Builder:
    """Collects nodes and edges of one step in any order."""

    def __init__(self, keys: list[KernelKey]) -> None:
        self.keys = [*keys, HOST_KEY, FIXED_KEY]
        self.host, self.fixed = len(keys), len(keys) + 1
        self.nodes: list[_Node] = []
        self.edges: list[list[tuple[int, float, str]]] = []

    def add(
        self, kind: str, duration: float, rank: int, key: int | None = None, stream: int = -1,
        row: int = -1, event: int = -1, start: float = np.nan, end: float = np.nan,
    ) -> int:  # fmt: skip
        """Add a node and return its number."""
        key = self.fixed if key is None else key
        self.nodes.append(
            _Node(kind, key, rank, stream, row, event, max(0.0, duration), start, end)
        )
        self.edges.append([])
        return len(self.nodes) - 1

    def edge(self, before: int, after: int, lag: float, kind: str) -> None:
        """Let node `after` wait for node `before`."""
        self.edges[after].append((before, lag, kind))

    def finish(self, step: int, learnt: list[Learnt]) -> KernelGraph:
        """Order the nodes and make the arrays."""
        order = _topological(self.edges)
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        nodes = [self.nodes[i] for i in order]
        edges = [self.edges[i] for i in order]
        flat = [edge for of_node in edges for edge in of_node]
        return KernelGraph(
            step,
            tuple(self.keys),
            np.array([n.key for n in nodes], dtype=np.int64),
            np.array([NODE_KINDS.index(n.kind) for n in nodes], dtype=np.int64),
            np.array([n.rank for n in nodes], dtype=np.int64),
            np.array([n.stream for n in nodes], dtype=np.int64),
            np.array([n.row for n in nodes], dtype=np.int64),
            np.array([n.event for n in nodes], dtype=np.int64),
            np.array([n.duration for n in nodes]),
            np.array([n.start for n in nodes]),
            np.array([n.end for n in nodes]),
            np.cumsum([0, *(len(of_node) for of_node in edges)]),
            place[np.array([edge[0] for edge in flat], dtype=np.int64)],
            np.array([edge[1] for edge in flat], dtype=np.float64),
            np.array([EDGE_KINDS.index(edge[2]) for edge in flat], dtype=np.int64),
            sum(x.n_late for x in learnt),
            sum(x.n_unexplained for x in learnt),
        )


def _topological(edges: list[list[tuple[int, float, str]]]) -> list[int]:
    """Order nodes so that each follows what it waits for."""
    followers: list[list[int]] = [[] for _ in edges]
    open_edges = [len(of_node) for of_node in edges]
    for after, of_node in enumerate(edges):
        for before, _, _ in of_node:
            followers[before].append(after)
    ready = [i for i, n in enumerate(open_edges) if n == 0]
    order = []
    for i in ready:  # grows while it is walked
        order.append(i)
        for after in followers[i]:
            open_edges[after] -= 1
            if open_edges[after] == 0:
                ready.append(after)
    # joins of crossing collectives can only disagree where ranks call them in different orders
    if len(order) < len(edges):
        raise PrismError(
            "the matched collectives' order differs between ranks, which would deadlock; expected "
            "the same order on all ranks; give the trace of one rank"
        )
    return order


def infer_graph(
    trace: Trace | KernelSteps, step: int, from_steps: list[int] | None = None
) -> KernelGraph:
    """Build the graph of one step; what the trace does not name is inferred from other steps."""
    steps = trace if isinstance(trace, KernelSteps) else split_steps(trace)
    if step not in steps.steps:
        known = ", ".join(map(str, steps.steps[:20]))
        raise PrismError(f"step {step} is not in the trace; it has {known}; choose one of them")
    others = [s for s in (steps.steps if from_steps is None else from_steps) if s != step]
    builder = _Builder(steps.keys)
    views = [steps.views[step, rank] for rank in steps.ranks]
    learnt = [
        learn(view, [steps.views[s, view.rank] for s in others], steps.keys) for view in views
    ]
    origin = min(view.begin for view in views)
    count: dict[int, int] = {}
    for view in views:
        for number in view.collective[view.collective >= 0]:
            count[int(number)] = count.get(int(number), 0) + 1
    joins: dict[int, int] = {}
    for view, known_ in zip(views, learnt, strict=True):
        _add_rank(builder, view, known_, origin, count, joins)
    return builder.finish(step, learnt)


def _add_rank(
    builder: _Builder,
    view: StepView,
    learnt: Learnt,
    origin: float,
    count: dict[int, int],
    joins: dict[int, int],
) -> None:
    """Add one rank's step to the graph."""
    rank = view.rank
    begin = builder.add("source", view.begin - origin, rank)
    carried = {
        stream: builder.add("source", end - origin, rank, stream=stream)
        for stream, end in view.carried.items()
        if end > view.begin
    }
    waits: dict[int, list[tuple[int, float, bool]]] = {}
    for awaited, waiting, lag, recorded in learnt.waits:
        waits.setdefault(waiting, []).append((awaited, lag, recorded))
    device: dict[int, int] = {}
    point: dict[int, tuple[int, float]] = {}  # per thread: the node and time of its last call
    for i in range(view.row.size):
        issue = _issue(builder, view, i, begin, point)
        if view.on_device[i]:
            entry, device[i] = _add_activity(builder, view, i, origin, count, joins)
            builder.edge(issue[0], entry, issue[1] + learnt.latency[i] * issue[2], "launch")
            if learnt.before[i] >= 0:
                builder.edge(device[int(learnt.before[i])], entry, learnt.gap[i], "stream")
            elif int(view.stream[i]) in carried:
                builder.edge(carried[int(view.stream[i])], entry, learnt.gap[i], "stream")
            for awaited, lag, recorded in waits.get(i, ()):
                builder.edge(device[awaited], entry, lag, "recorded" if recorded else "inferred")
        if not np.isfinite(view.call[i]):
            continue
        node, now = issue[0], float(view.issued[i])
        if view.blocks[i] or not view.on_device[i]:
            awaited_nodes = [j for j in learnt.syncs[i] if view.end[j] <= view.call_end[i] + 2e-6]
            until = max([view.call[i], *(view.end[j] for j in awaited_nodes)])
            now = float(view.call_end[i])
            key = builder.host if view.on_device[i] else int(view.key[i])
            back = builder.add("return", now - until, rank, key, event=i)
            builder.edge(node, back, 0.0, "thread")
            for j in awaited_nodes:
                builder.edge(device[j], back, 0.0, "return")
            node = back
        point[int(view.thread[i])] = (node, now)


def _issue(
    builder: _Builder, view: StepView, i: int, begin: int, point: dict[int, tuple[int, float]]
) -> tuple[int, float, float]:
    """Node that issues event `i`, a lag to it, and whether launch latency follows."""
    if not np.isfinite(view.call[i]):
        return begin, float(view.start[i]) - view.begin, 0.0
    call = float(view.call[i])
    thread = int(view.thread[i])
    node, since = point.get(thread, (begin, -np.inf))
    other = max(
        ((n, t) for th, (n, t) in point.items() if th != thread and t <= call),
        key=lambda pair: pair[1],
        default=(begin, view.begin),
    )
    silent = call - since
    if silent > _HANDOVER_S and call - other[1] < silent / 3.0:
        node, since = other
    until = float(view.issued[i]) if view.on_device[i] else call
    since = max(since, view.begin)
    host = builder.add("host", until - since, view.rank, builder.host, event=i)
    builder.edge(node, host, 0.0, "start" if node == begin else "thread")
    return host, 0.0, 1.0


def _add_activity(
    builder: _Builder,
    view: StepView,
    i: int,
    origin: float,
    count: dict[int, int],
    joins: dict[int, int],
) -> tuple[int, int]:
    """Add a device activity: the node that waits for its edges, and the one that runs."""
    key, stream, row = int(view.key[i]), int(view.stream[i]), int(view.row[i])
    start, end = float(view.start[i]) - origin, float(view.end[i]) - origin
    number = int(view.collective[i])
    if count.get(number, 0) < 2:
        node = builder.add("device", end - start, view.rank, key, stream, row, i, start, end)
        return node, node
    if number not in joins:
        joins[number] = builder.add("join", 0.0, -1)
    entry = builder.add("arrival", 0.0, view.rank, None, stream, row, i)
    node = builder.add(
        "device", float(view.transfer[i]), view.rank, key, stream, row, i, start, end
    )
    builder.edge(entry, joins[number], 0.0, "join")
    builder.edge(joins[number], node, 0.0, "join")
    return entry, node
