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

from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from prism.common.arrays import Array, Index
from prism.common.errors import PrismError
from prism.models.kerneltrace.steps import END, HOST, KernelKey, KernelSteps, StepView, align
from prism.models.kerneltrace.waits import RESOLUTION_S, Learnt, learn
from prism.simulation.tracemodel.graph import ARRIVAL, LEAD, REPLICA, WORKER, TraceGraph, TraceNode


@dataclass(frozen=True, kw_only=True)
class KernelGraph(TraceGraph):
    """Graph of one step, with what the trace knows of its nodes; durations are of all steps.

    Role, a source: when a rank's host began the step, or its stream had done the work of earlier
    steps, after the end of the step before [s], below 0 where it leads; host: the host's time up to
    a call's issue; return from a call that waits; arrival of a member of a matched collective;
    device: an activity.
    """

    step: int  # whose graph it is
    ranks: tuple[int, ...]  # numbers of the ranks, which are its stages
    keys: tuple[KernelKey, ...]
    key: Index  # [node] index into `keys`
    role: NDArray[np.str_]  # [node]
    event: Index  # [node] number in the host's order on its rank, -1 for sources
    stream: Index  # [node] -1 where it does not apply
    awaited: dict[int, list[int]]  # per return the events that it waits for
    most_lead: float  # that the queue of a device allows [s]
    n_late: int  # starts later than stream and launch allow in the steps learnt from
    n_unexplained: int  # those of them for which no edge was found

    @property
    def own(self) -> Index:
        """Position of the step itself among the steps, [1]."""
        return np.flatnonzero(self.steps == self.step)


def step_graph(steps: KernelSteps, step: int | None = None) -> KernelGraph:
    """Build the graph of one step, of the typical one where None.

    What the trace does not name is inferred from the other steps.
    """
    step = steps.typical() if step is None else step
    views = [steps.views[step, rank] for rank in steps.ranks]
    learnt = [learn(view, steps.others(step, view.rank), steps.keys) for view in views]
    builder = _Builder(steps, views)
    for r, of_rank in enumerate(learnt):
        builder.add_rank(r, of_rank)
    order = _topological([row.edges for row in builder.rows])
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    rows = [builder.rows[old] for old in order]
    keys = (*steps.keys, HOST)
    launched = max(int(np.isfinite(view.call[view.on_device]).sum()) for view in views)
    graph = KernelGraph(
        tuple(_node(row, keys[row.key], place) for row in rows), np.zeros((len(rows), 1, 1)),
        np.array(steps.steps), steps.periods(), len(steps.ranks), 1, "none", (),
        sum(len(view.waits) for view in views), sum(of_rank.n_inferred for of_rank in learnt),
        step=step, ranks=tuple(steps.ranks), keys=keys,
        key=np.array([row.key % len(keys) for row in rows]),
        role=np.array([row.role for row in rows]), event=np.array([row.event for row in rows]),
        stream=np.array([row.stream for row in rows]),
        awaited={i: row.awaited for i, row in enumerate(rows) if row.awaited},
        # a queue that holds several steps lets the host lead by as many
        most_lead=steps.queue_depth / max(1, launched) * float(steps.periods().mean()),
        n_late=sum(of_rank.n_late for of_rank in learnt),
        n_unexplained=sum(of_rank.n_unexplained for of_rank in learnt),
    )  # fmt: skip
    return replace(graph, durations=_durations(graph, steps)[:, None])


@dataclass
class _Row:
    """A node under construction."""

    role: str
    stages: tuple[int, ...]
    key: int  # -1: that of the host
    event: int
    stream: int
    awaited: list[int] = field(default_factory=list)  # events that a return waits for
    edges: list[tuple[int, float]] = field(default_factory=list)  # rows before it, and lags
    continues: int = -1  # of a source: the row whose end it is, a step earlier


_QUEUE_EDGES = 64  # edges that bound the host by the device's queue, in one depth of it


class _Builder:
    """Collects nodes and edges of one step, in any order over the ranks."""

    def __init__(self, steps: KernelSteps, views: list[StepView]) -> None:
        self.views = views
        self.every = max(1, steps.queue_depth // _QUEUE_EDGES)
        self.rows: list[_Row] = []
        self.members: dict[int, list[int]] = {}
        for r, view in enumerate(views):
            for number in view.collective[view.collective >= 0].tolist():
                self.members.setdefault(number, []).append(r)
        self.shared: dict[int, int] = {}  # node of each collective that several ranks take part in

    def add(
        self, role: str, stages: tuple[int, ...], key: int = -1, event: int = -1, stream: int = -1
    ) -> int:
        """Add a node and return its number."""
        self.rows.append(_Row(role, stages, key, event, stream))
        return len(self.rows) - 1

    def add_rank(self, r: int, learnt: Learnt) -> None:
        """Add one rank's step."""
        view = self.views[r]
        begin = self.add("source", (r,))
        last = {  # activity of each stream that is the last so far
            stream: self.add("source", (r,), stream=stream)
            for stream in np.intersect1d(list(view.carried), view.stream[view.on_device]).tolist()
        }
        of_stream = dict(last)
        device: dict[int, int] = {}
        point: dict[int, tuple[int, float]] = {}  # per thread: the node and time of its last call
        of_row = {int(row): i for i, row in enumerate(view.row.tolist()) if row >= 0}
        queue: list[int] = []  # activities whose end the next call waits for, to have room
        for i in range(view.row.size):
            host, since_launch = self._issue(r, i, begin, point)
            if since_launch is None:
                self.rows[host].edges += [(node, 0.0) for node in queue]
                queue = []
            if view.on_device[i]:
                entry, device[i] = self._activity(r, i)
                lag = float(learnt.latency[i]) if since_launch is None else since_launch
                self.rows[entry].edges.append((host, lag))
                stream = int(view.stream[i])
                if stream in last:
                    self.rows[entry].edges.append((last[stream], float(learnt.gap[i])))
                last[stream] = device[i]
                self.rows[entry].edges += [(device[j], lag) for j, lag in learnt.waits[i]]
                made_room = device.get(of_row.get(int(view.slot[i]), -1), -1)
                if i % self.every == 0 and made_room >= 0:
                    queue = [made_room]
            if not np.isfinite(view.call[i]):
                continue
            now = float(view.issued[i])
            if view.blocks[i] or not view.on_device[i]:
                key = -1 if view.on_device[i] else int(view.key[i])
                now = float(view.call_end[i])
                awaited = [j for j in learnt.syncs[i] if view.end[j] <= now + RESOLUTION_S]
                edges = [(host, 0.0), *((device[j], 0.0) for j in awaited)]
                host = self.add("return", (r,), key, i)
                self.rows[host].awaited, self.rows[host].edges = awaited, edges
                if view.sync[i] == END:
                    self.rows[begin].continues = host
            point[int(view.thread[i])] = (host, now)
        for stream, source in of_stream.items():
            self.rows[source].continues = last[stream]

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
        host = self.add("host", (r,), event=i)
        self.rows[host].edges.append((node, 0.0))
        return host, None

    def _activity(self, r: int, i: int) -> tuple[int, int]:
        """Add a device activity: the node that waits for its edges, and the one that runs."""
        view = self.views[r]
        what = int(view.key[i]), i, int(view.stream[i])
        number = int(view.collective[i])
        members = self.members.get(number, [])
        if len(members) < 2:
            return (self.add("device", (r,), *what),) * 2
        entry = self.add("arrival", (r,), *what)
        if number not in self.shared:
            self.shared[number] = self.add("device", tuple(members), *what)
        self.rows[self.shared[number]].edges.append((entry, 0.0))
        return entry, self.shared[number]


def _node(row: _Row, key: KernelKey, place: dict[int, int]) -> TraceNode:
    """Make the graph's record of a node, where `place` says what became of the rows."""
    of_role = {
        "device": ("op", key.op_kind, key.kernel_class, key.name),
        "arrival": ("join", "join", "", ARRIVAL),
        "source": ("gap", HOST.op_kind, HOST.kernel_class, LEAD),
    }
    what = of_role.get(row.role, ("gap", HOST.op_kind, HOST.kernel_class, key.name))
    preds = tuple(place[p] for p, _ in row.edges)
    lags = tuple(lag for _, lag in row.edges)
    scope = WORKER if len(row.stages) == 1 else REPLICA
    return TraceNode(
        *what, scope, row.stages, -1, 0, -1, preds, lags if any(lags) else (), place[row.continues]
    )


def _topological(edges: list[list[tuple[int, float]]]) -> list[int]:
    """Order nodes so that each follows what it waits for."""
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for i, of_node in enumerate(edges):
        sorter.add(i, *(p for p, _ in of_node))
    try:
        return list(sorter.static_order())
    except CycleError as error:
        # collectives can only disagree where ranks call them in different orders
        raise PrismError(
            "the matched collectives' order differs between ranks, which would deadlock; expected "
            "the same order on all ranks; give the trace of one rank"
        ) from error


def _durations(graph: KernelGraph, steps: KernelSteps) -> Array:
    """Durations of a graph's nodes in every step, [node, step] s; not a number: no counterpart.

    An activity took what its counterpart did, a collective matched over ranks its transfer.
    """
    found = np.full((len(graph.nodes), len(steps.steps)), np.nan)
    found[graph.role == "arrival"] = 0.0
    rank_idx = np.array([node.stages[0] for node in graph.nodes])
    shared = np.array([len(node.stages) > 1 for node in graph.nodes])
    own = steps.steps.index(graph.step)
    for r, rank in enumerate(steps.ranks):
        sources = np.flatnonzero((rank_idx == r) & (graph.role == "source"))
        on_device = np.flatnonzero((rank_idx == r) & (graph.role == "device"))
        on_host = np.flatnonzero((rank_idx == r) & np.isin(graph.role, ("host", "return")))
        mine = steps.views[graph.step, rank]
        for s in sorted(range(len(steps.steps)), key=lambda s: s != own):
            view = steps.views[steps.steps[s], rank]
            carried = [view.carried.get(stream, np.nan) for stream in graph.stream[sources]]
            when = np.where(graph.stream[sources] < 0, view.begin, carried)
            found[sources, s] = when - steps.begin[s]
            to = align(mine, view)
            there = to[graph.event[on_device]]
            seconds = np.where(shared[on_device], view.transfer[there], view.seconds[there])
            found[on_device, s] = np.where(there < 0, np.nan, seconds)
            found[:, s] = _host_times(on_host.tolist(), graph, view, to, found[:, [s, own]])
    return found


def _host_times(
    on_host: list[int], graph: KernelGraph, view: StepView, to: Index, durations: Array
) -> Array:
    """Fill in the host's durations of a rank in another step, of those [node, other and own step].

    A stretch between two calls that both steps have is as long as it was there: calls that only the
    graph has share it in proportion, calls that only the other step has are part of it.
    """
    found, own = durations[:, 0], durations[:, 1]
    now: dict[int, float] = {}  # per node: when it ended in the other step
    # lists, as numbers are picked out of arrays one by one slowly
    counterpart, returns = to[graph.event[on_host]].tolist(), (graph.role == "return").tolist()
    issued = np.where(view.on_device, view.issued, view.call).tolist()
    call, call_end, end = view.call.tolist(), view.call_end.tolist(), view.end.tolist()
    queued = np.cumsum(np.where(np.isfinite(view.call), view.queued, 0.0)).tolist()
    counted = 0.0  # of the time in the queue
    for i, there in zip(on_host, counterpart, strict=True):
        if there < 0:
            continue
        if returns[i]:
            now[i] = call_end[there]
            awaited = to[graph.awaited.get(i, [])].tolist()
            ends = (end[k] for k in awaited if k >= 0)
            until = max([call[there], *(x for x in ends if x <= now[i] + RESOLUTION_S)])
            found[i] = max(0.0, now[i] - until)
            continue
        until = issued[there]
        if not until > -np.inf:
            continue
        stretch = [i]
        while (before := graph.nodes[stretch[-1]].preds[0]) not in now and graph.event[before] >= 0:
            stretch.append(before)
        since = max(now.get(before, view.begin), view.begin)
        share: Array | float = 1.0 / len(stretch)
        if len(stretch) > 1 and (whole := own[stretch].sum()) > 0.0:
            share = own[stretch] / whole
        found[stretch] = max(0.0, until - since - (queued[there] - counted)) * share
        counted = queued[there]
        for node in stretch[::-1]:
            since = now[node] = since + float(found[node])
        now[i] = until
    return found
