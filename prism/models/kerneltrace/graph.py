"""The graph of a step of a kernel trace: what waits for what, and what each node took in each step.

What the trace names (order within streams and host threads, launches, recorded waits) becomes edges
as it stands; latencies and the waits that it does not name come from the other steps. The host's
time between two calls is a node; a call follows the last one that had returned, on any thread, as
the main thread waits for autograd's.
A collective matched over ranks is one op, which begins when its last member arrives. Time zero is
the end of the step before, so that the end is the period: sources say by how much the host leads,
and name the node of the step before that they continue. Left out: what CPU threads wait for other
than the device, its queue and each other; ranks that are not traced, which enter through the
waiting in their collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.models.kerneltrace.durations import Roles, node_durations
from prism.models.kerneltrace.steps import END, HOST, KernelKey, KernelSteps, split_steps
from prism.models.kerneltrace.waits import RESOLUTION_S, Learnt, learn
from prism.simulation.tracemodel.graph import ARRIVAL, LEAD, REPLICA, WORKER, TraceGraph, TraceNode
from prism.traces.table import Trace

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class KernelGraph(TraceGraph):
    """Graph of one step, with what the trace knows of its nodes; durations are of all steps."""

    step: int  # whose graph it is
    ranks: tuple[int, ...]  # numbers of the ranks, which are its stages
    keys: tuple[KernelKey, ...]
    key: Ints  # [node] index into `keys`
    roles: Roles
    stream: Ints  # [node] -1 where it does not apply
    most_lead: float  # that the queue of a device allows [s]
    n_late: int  # starts later than stream and launch allow in the steps learnt from
    n_unexplained: int  # those of them for which no edge was found

    @property
    def own(self) -> Ints:
        """Position of the step itself among the steps, [1]."""
        return np.flatnonzero(self.steps == self.step)

    @property
    def lead(self) -> float:
        """By how much hosts begin a step before the end of the one before, in the mean [s]."""
        begins = (self.roles.role == "source") & (self.roles.stream < 0)
        return -float(np.nanmean(self.durations[begins]))

    def op_kinds(self) -> NDArray[np.str_]:
        """Op kind of every node [node]."""
        return np.array([node.op_kind for node in self.nodes])

    def taken_by(self, stage: int) -> NDArray[np.bool_]:
        """Activities of one rank, [node]."""
        return np.array([stage in n.stages and n.kind == "op" for n in self.nodes])


def step_graphs(trace: Trace | KernelSteps) -> Iterator[KernelGraph]:
    """Build the graph of every step, one after another."""
    steps = trace if isinstance(trace, KernelSteps) else split_steps(trace)
    return (step_graph(steps, step) for step in steps.steps)


def step_graph(trace: Trace | KernelSteps, step: int | None = None) -> KernelGraph:
    """Build the graph of one step, of the typical one where None.

    What the trace does not name is inferred from the other steps.
    """
    steps = trace if isinstance(trace, KernelSteps) else split_steps(trace)
    step = steps.typical() if step is None else step
    if step not in steps.steps:
        known = ", ".join(map(str, steps.steps[:20]))
        raise PrismError(f"step {step} is not in the trace; it has {known}; choose one of them")
    builder = _Builder(steps, step)
    learnt = []
    for rank in steps.ranks:
        learnt.append(learn(steps.views[step, rank], steps.others(step, rank), steps.keys))
    for r, of_rank in enumerate(learnt):
        builder.add_rank(r, of_rank)
    return builder.finish(learnt)


class _Row(NamedTuple):
    """A node under construction."""

    role: str
    stages: tuple[int, ...]
    key: int
    event: int
    stream: int
    seconds: float  # of what no step changes
    awaited: list[int]  # events that a return waits for


_QUEUE_EDGES = 64
"""Edges that bound the host by the device's queue, in one depth of it."""


class _Builder:
    """Collects nodes and edges of one step, in any order over the ranks."""

    def __init__(self, steps: KernelSteps, step: int) -> None:
        self.steps, self.step = steps, step
        self.views = [steps.views[step, rank] for rank in steps.ranks]
        self.continues: dict[int, int] = {}  # source: the node whose end it is, a step earlier
        self.keys = [*steps.keys, HOST]
        self.rows: list[_Row] = []
        self.edges: list[list[tuple[int, float]]] = []
        self.members: dict[int, list[int]] = {}
        for r, view in enumerate(self.views):
            for number in view.collective[view.collective >= 0].tolist():
                self.members.setdefault(number, []).append(r)
        self.shared: dict[int, int] = {}  # node of each collective that several ranks take part in

    def add(
        self, role: str, r: int, key: int = -1, event: int = -1, stream: int = -1,
        seconds: float = np.nan, awaited: list[int] | None = None,
    ) -> int:  # fmt: skip
        """Add a node of the r-th rank and return its number."""
        key = len(self.keys) - 1 if key < 0 else key
        self.rows.append(_Row(role, (r,), key, event, stream, seconds, awaited or []))
        self.edges.append([])
        return len(self.rows) - 1

    def add_rank(self, r: int, learnt: Learnt) -> None:
        """Add one rank's step."""
        view = self.views[r]
        begin = self.add("source", r)
        last = {  # activity of each stream that is the last so far
            stream: self.add("source", r, stream=stream)
            for stream in np.intersect1d(list(view.carried), view.stream[view.on_device]).tolist()
        }
        of_stream = dict(last)
        device: dict[int, int] = {}
        point: dict[int, tuple[int, float]] = {}  # per thread: the node and time of its last call
        of_row = {int(row): i for i, row in enumerate(view.row.tolist()) if row >= 0}
        queue: list[int] = []  # activities whose end the next call waits for, to have room
        every = max(1, self.steps.queue_depth // _QUEUE_EDGES)
        for i in range(view.row.size):
            host, since_launch = self._issue(r, i, begin, point)
            if since_launch is None:
                self.edges[host] += [(node, 0.0) for node in queue]
                queue = []
            if view.on_device[i]:
                entry, device[i] = self._activity(r, i)
                lag = float(learnt.latency[i]) if since_launch is None else since_launch
                self.edges[entry].append((host, lag))
                stream = int(view.stream[i])
                if stream in last:
                    self.edges[entry].append((last[stream], float(learnt.gap[i])))
                last[stream] = device[i]
                self.edges[entry] += [(device[j], lag) for j, lag in learnt.waits[i]]
                made_room = device.get(of_row.get(int(view.slot[i]), -1), -1)
                if i % every == 0 and made_room >= 0:
                    queue = [made_room]
            if not np.isfinite(view.call[i]):
                continue
            now = float(view.issued[i])
            if view.blocks[i] or not view.on_device[i]:
                key = -1 if view.on_device[i] else int(view.key[i])
                now = float(view.call_end[i])
                awaited = [j for j in learnt.syncs[i] if view.end[j] <= now + RESOLUTION_S]
                back = self.add("return", r, key, i, awaited=awaited)
                self.edges[back] = [(host, 0.0), *((device[j], 0.0) for j in awaited)]
                host = back
                if view.sync[i] == END:
                    self.continues[begin] = back
            point[int(view.thread[i])] = (host, now)
        self.continues |= {source: last[stream] for stream, source in of_stream.items()}

    def _issue(
        self, r: int, i: int, begin: int, point: dict[int, tuple[int, float]]
    ) -> tuple[int, float | None]:
        """Node that issues event `i`; and where no launch was recorded, the lag to its start."""
        view = self.views[r]
        if not np.isfinite(view.call[i]):
            return begin, float(view.start[i]) - view.begin
        own, call = int(view.thread[i]), float(view.call[i])
        done = [(now, node) for t, (node, now) in point.items() if t == own or now <= call]
        node = max(done, default=(0.0, begin))[1]
        host = self.add("host", r, event=i)
        self.edges[host].append((node, 0.0))
        return host, None

    def _activity(self, r: int, i: int) -> tuple[int, int]:
        """Add a device activity: the node that waits for its edges, and the one that runs."""
        view = self.views[r]
        what = int(view.key[i]), i, int(view.stream[i])
        number = int(view.collective[i])
        members = self.members.get(number, [])
        if len(members) < 2:
            node = self.add("device", r, *what)
            return node, node
        entry = self.add("arrival", r, *what, seconds=0.0)
        if number not in self.shared:
            self.shared[number] = self.add("device", r, *what)
            own = self.rows[self.shared[number]]
            self.rows[self.shared[number]] = own._replace(stages=tuple(members))
        self.edges[self.shared[number]].append((entry, 0.0))
        return entry, self.shared[number]

    def finish(self, learnt: list[Learnt]) -> KernelGraph:
        """Order the nodes, and fill in what they took in every step."""
        order = _topological([[p for p, _ in edges] for edges in self.edges])
        place = {old: new for new, old in enumerate(order)}
        rows = [self.rows[old] for old in order]
        nodes = tuple(
            _node(
                row,
                self.keys[row.key],
                [(place[p], lag) for p, lag in self.edges[old]],
                place.get(self.continues.get(old, -1), -1),
            )
            for old, row in zip(order, rows, strict=True)
        )
        role = np.array([row.role for row in rows])
        ints = (
            np.array(column, np.int64) for column in zip(*(row[2:5] for row in rows), strict=True)
        )
        key, event, stream = ints
        roles = Roles(role, event, np.array([row.stages[0] for row in rows]), stream, {
            i: row.awaited for i, row in enumerate(rows) if row.awaited
        })  # fmt: skip
        steps = self.steps
        launched = max(int(np.isfinite(view.call[view.on_device]).sum()) for view in self.views)
        # a queue that holds several steps lets the host lead by as many
        most = steps.queue_depth / max(1, launched) * float(steps.periods().mean())
        graph = KernelGraph(
            nodes, np.array([row.seconds for row in rows])[:, None, None], np.array(steps.steps),
            steps.periods(), len(steps.ranks), 1, "none", (),
            sum(of_rank.n_recorded for of_rank in learnt),
            sum(of_rank.n_inferred for of_rank in learnt),
            step=self.step, ranks=tuple(steps.ranks),
            keys=tuple(self.keys), key=key, roles=roles, stream=stream, most_lead=most,
            n_late=sum(of_rank.n_late for of_rank in learnt),
            n_unexplained=sum(of_rank.n_unexplained for of_rank in learnt),
        )  # fmt: skip
        durations = node_durations(graph.durations[:, 0, 0], nodes, roles, steps, self.step)
        return replace(graph, durations=durations[:, None])


def _node(row: _Row, key: KernelKey, edges: list[tuple[int, float]], continues: int) -> TraceNode:
    """Make the graph's record of a node."""
    scope = WORKER if len(row.stages) == 1 else REPLICA
    of_role = {
        "device": ("op", key.op_kind, key.kernel_class, key.name),
        "arrival": ("join", "join", "", ARRIVAL),
        "source": ("gap", HOST.op_kind, HOST.kernel_class, LEAD),
    }
    what = of_role.get(row.role, ("gap", HOST.op_kind, HOST.kernel_class, key.name))
    lags = tuple(lag for _, lag in edges)
    preds = tuple(p for p, _ in edges)
    lags = lags if any(lags) else ()
    return TraceNode(*what, scope, row.stages, -1, 0, -1, preds, lags, continues)


def _topological(preds: list[list[int]]) -> list[int]:
    """Order nodes so that each follows what it waits for."""
    followers: list[list[int]] = [[] for _ in preds]
    open_edges = [len(of_node) for of_node in preds]
    for after, of_node in enumerate(preds):
        for before in of_node:
            followers[before].append(after)
    order = [i for i, n in enumerate(open_edges) if n == 0]
    for i in order:  # grows while it is walked
        for after in followers[i]:
            open_edges[after] -= 1
            if open_edges[after] == 0:
                order.append(after)
    # collectives can only disagree where ranks call them in different orders
    if len(order) < len(preds):
        raise PrismError(
            "the matched collectives' order differs between ranks, which would deadlock; expected "
            "the same order on all ranks; give the trace of one rank"
        )
    return order
