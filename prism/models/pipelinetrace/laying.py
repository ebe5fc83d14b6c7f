"""Nodes of a pipeline trace's graph, from each stage's chain of ops, meetings and messages.

An item is laid as soon as every chain that takes part has reached it, so nodes come in topological
order. Durations count from the last arrival; what lies between a worker's release and its next op
is a gap, a node of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.means import median
from prism.models.pipelinetrace.groups import CLOCK_S, Barrier, release
from prism.models.pipelinetrace.times import Key, Times
from prism.models.pipelinetrace.transfers import Pair
from prism.simulation.tracemodel.graph import (
    COMPUTE,
    REPLICA,
    WORKER,
    Array,
    Scope,
    TraceNode,
)


class Item(NamedTuple):
    """What chains hold: an op or meeting, an unnamed barrier, a message's posting or awaiting."""

    kind: str  # op, barrier, post or wait
    keys: frozenset[Key]
    scope: Scope
    stages: tuple[int, ...]
    place: int = -1  # of a barrier: which stage or replica, -1: all
    pair: Pair | None = None  # of a message


@dataclass
class Laying:
    """Lays items as soon as every chain that takes part has reached them."""

    source: str
    times: Times
    chains: list[list[Item]]
    blocking: bool
    nodes: list[TraceNode] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)
    placed: dict[int, NDArray[np.bool_]] = field(default_factory=dict)  # [replica, step] by node

    def walk(self) -> None:
        """Lay all items."""
        n = self.times.n_stages
        heads = [0] * n
        self.last = [-1] * n  # node each chain has reached
        self.ready = np.zeros((n, *self.times.start.shape[1:]))  # and when [s]
        self.late: list[list[int]] = [[] for _ in range(n)]  # messages the next op waits for
        self.posted: dict[Pair, list[int]] = {}  # nodes after which its sides were posted
        self.sent: dict[Pair, int] = {}
        progress = True
        while progress:
            progress = False
            for s in range(n):
                while heads[s] < len(self.chains[s]) and self._try(self.chains[s][heads[s]], heads):
                    progress = True
        for s, head in enumerate(heads):
            if head < len(self.chains[s]):
                _, name, ordinal = min(self.chains[s][head].keys)
                raise PrismError(
                    f"{self.source}: stage {s} waits forever in {name} no. {ordinal}: the other "
                    "side comes in another order; a trace of one job is expected, with one traced "
                    "worker per dp_rank and stage"
                )

    def _try(self, item: Item, heads: list[int]) -> bool:
        for s in item.stages:
            if heads[s] >= len(self.chains[s]) or self.chains[s][heads[s]] != item:
                return False
        if item.kind == "wait" and item.pair not in self.sent:
            return False
        lay = {"op": self._op, "barrier": self._barrier, "post": self._post, "wait": self._wait}
        lay[item.kind](item)
        for s in item.stages:
            heads[s] += 1
        return True

    def _op(self, item: Item) -> None:
        start, end = self._span(item)
        info = self.times.info[min(item.keys)]
        preds = [self._gap(s, start[s], info.op_kind) for s in item.stages]
        arrived, left = item.scope.latest(start), item.scope.earliest(end)
        first = item.stages[0]
        unknown = item.scope.latest(self._lost(item, start))[first] > 0
        duration = np.where(unknown, np.nan, np.maximum(left[first] - arrived[first], 0.0))
        name = "+".join(sorted({k[1] for k in item.keys}))
        node = TraceNode(
            "op", info.op_kind, info.kernel_class, name, item.scope, item.stages, -1, info.chunk,
            info.microbatch, tuple(preds),
        )  # fmt: skip
        i = self._append(node, duration)
        if self.times.placed is not None:
            rows = [self.times.row[k] for k in item.keys]
            self.placed[i] = np.asarray(self.times.placed[rows].any(axis=0))
        for s in item.stages:
            self.last[s], self.ready[s] = i, left[s]

    def _lost(self, item: Item, start: Array) -> Array:
        """Where it is unknown when a member arrived, 1, [stage, replica, step]; 0 for no member."""
        lost = np.zeros_like(start)
        member = list(item.stages)
        usual = np.isfinite(start[member]).mean(axis=(-1, -2), keepdims=True) >= 0.5
        lost[member] = ~np.isfinite(start[member]) & usual
        return lost

    def _span(self, item: Item) -> tuple[Array, Array]:
        """Start and end of those who meet, [stage, replica, step]; NaN: no part in it."""
        start = np.full_like(self.ready, np.nan)
        end = np.full_like(self.ready, np.nan)
        for s in item.stages:
            rows = [self.times.row[k] for k in item.keys if k[0] == s]
            start[s] = np.fmin.reduce(self.times.start[rows], axis=0)
            end[s] = np.fmax.reduce(self.times.end[rows], axis=0)
        return start, end

    def _gap(self, s: int, start: Array, before: str) -> int:
        """Lay the host's gap between a stage's last op and its next one."""
        preds = tuple(dict.fromkeys(p for p in (self.last[s], *self.late[s]) if p >= 0))
        self.late[s] = []
        node = TraceNode(
            "gap",
            "launch_gap",
            "launch_gap",
            f"gap before {before}",
            WORKER,
            (s,),
            -1,
            0,
            -1,
            preds,
        )
        return self._append(node, np.maximum(start - self.ready[s], 0.0))

    def _barrier(self, item: Item) -> None:
        """Lay an unnamed barrier: a join without duration, per stage where one replica waits."""
        released = release(self.ready, Barrier(item.scope, item.place))
        before = list(self.last)
        replica = item.place if item.scope == REPLICA else -1
        for s in item.stages:
            own = (before[s], *(before[o] for o in item.stages if o != s))
            node = TraceNode("join", "join", "", "barrier", item.scope, (s,), replica, 0, -1, own)
            self.last[s] = self._append(node, np.zeros(self.ready.shape[1:]))
            self.ready[s] = released[s]

    # -- messages that nobody waits for where they are posted ---------------------------------
    def _post(self, item: Item) -> None:
        """Note where one side stands; with both, lay the message."""
        assert item.pair is not None
        (stage,), t = item.stages, self.times
        key = item.pair.send if item.pair.send[0] == stage else item.pair.receive
        if self.late[stage]:  # posted after what is awaited has come
            self.last[stage] = self._gap(stage, t.of(t.start, key), "transfer")
            self.ready[stage] = t.of(t.start, key)
        after = self.last[stage]
        lag = np.maximum(t.of(t.start, key) - self.ready[stage], 0.0)
        if float(median(lag)) > CLOCK_S:  # the host posts it some time after the last op
            preds = () if after < 0 else (after,)
            node = TraceNode(
                "gap", "launch_gap", "launch_gap", "gap before transfer", WORKER, (stage,), -1, 0,
                -1,
                preds,
            )  # fmt: skip
            after = self._append(node, lag)
        sides = self.posted.setdefault(item.pair, [])
        sides.append(after)
        if len(sides) < 2:
            return
        send, receive, _ = item.pair
        begin = np.maximum(t.of(t.start, send), t.of(t.start, receive))
        # a batch that blocks is recorded until its last transfer, a message that does not as sent
        ends = [t.of(t.end, k) for k in ((send, receive) if self.blocking else (receive,))]
        info = t.info[send]
        node = TraceNode(
            "op", info.op_kind, info.kernel_class, send[1], REPLICA, (send[0], receive[0]), -1,
            info.chunk, info.microbatch, tuple(dict.fromkeys(p for p in sides if p >= 0)),
        )  # fmt: skip
        self.sent[item.pair] = self._append(node, np.maximum(np.minimum.reduce(ends) - begin, 0.0))

    def _wait(self, item: Item) -> None:
        """Let the next op here wait for a message."""
        assert item.pair is not None
        (stage,) = item.stages
        self.late[stage].append(self.sent[item.pair])
        send, receive, _ = item.pair
        arrival = self.times.of(self.times.end, send if send[0] == stage else receive)
        self.ready[stage] = np.maximum(self.ready[stage], arrival)  # unknown if either is

    def _append(self, node: TraceNode, duration: Array) -> int:
        self.nodes.append(node)
        self.rows.append(np.array(np.broadcast_to(duration, self.times.start.shape[1:])))
        return len(self.nodes) - 1


def number_microbatches(nodes: Sequence[TraceNode], notes: list[str]) -> tuple[TraceNode, ...]:
    """Count the compute ops of each name and stage where the trace does not tell them apart."""
    found: dict[tuple[int, str, str, int], list[int]] = {}
    for i, n in enumerate(nodes):
        if n.kind == "op" and n.op_kind in COMPUTE:
            found.setdefault((n.stages[0], n.op_kind, n.name, n.chunk), []).append(i)
    out, counted = list(nodes), 0
    for members in found.values():
        named = {nodes[i].microbatch for i in members}
        if min(named) < 0 or len(named) < len(members):
            counted += len(members) > 1
            for number, i in enumerate(members):
                out[i] = nodes[i]._replace(microbatch=number)
    if counted:
        notes.append("compute ops whose microbatch is not known are numbered in their order")
    return tuple(out)
