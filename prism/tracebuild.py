"""From a pipeline trace to its graph: chains of what each worker did, and who meets in what.

The order of a stage's ops is the order in which its workers did them; sends pair with receives in
the order of posting; collectives join those whose ends coincide. Every op's duration counts from
the last arrival, gaps from the release before. Left out: traces of kernels (`prism.kerneltrace.graph`).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.errors import PrismError
from prism.tracegraph import COMPUTE, Array, TraceGraph, TraceNode
from prism.tracegroups import (
    EXPECTED,
    REPLICA,
    WORKER,
    Barrier,
    Scope,
    find_scope,
    hidden_barriers,
    joint_arrival,
    release,
)

if TYPE_CHECKING:
    from prism.traces import Trace

LOCAL = (*COMPUTE, "optimizer", "launch_gap", "data_load", "compute", "memory", "other")
RARE = 0.5  # ops that fewer of the workers' steps have are not part of the job's step
DISORDER = 0.02  # share of ops out of their usual order that is still one order

Key = tuple[int, str, int]  # stage, recorded name, its ordinal on the worker within a step


class Times(NamedTuple):
    """Recorded times of every op [s], [key, replica, step]; NaN where it is missing."""

    index: dict[Key, int]
    start: Array
    end: Array
    info: dict[Key, tuple[str, str, int, int]]  # op_kind, kernel_class, chunk, microbatch
    steps: NDArray[np.int64]
    n_stages: int

    def of(self, values: Array, key: Key) -> Array:
        """One op's times, [replica, step]."""
        return np.asarray(values[self.index[key]])

    def on_stages(self, values: Array, name: str, ordinal: int) -> Array:
        """One op's times on all stages, [stage, replica, step]; NaN where a stage has none."""
        rows = [self.index.get((s, name, ordinal)) for s in range(self.n_stages)]
        none = np.full(values.shape[1:], np.nan)
        return np.stack([none if i is None else values[i] for i in rows])


class Item(NamedTuple):
    """What chains hold: an op, a meeting of several chains, an unnamed barrier, or a message."""

    kind: str  # op, barrier, send or receive
    keys: frozenset[Key]
    scope: Scope
    stages: tuple[int, ...]
    replica: int = -1


def build_trace_graph(trace: "Trace") -> TraceGraph:
    """Build the graph of a pipeline trace from the order in which its workers did things.

    Parameters
    ----------
    trace : Trace
        Ops of several steps with start times; each (dp_rank, stage) is one traced worker.

    Raises
    ------
    PrismError
        The trace has no start times, its workers do not repeat themselves from step to step, or
        sends and receives do not fit together.
    """
    notes: list[str] = []
    times = _tabulate(trace)
    measured = np.nanmax(times.end, axis=(0, 1)) - np.nanmin(times.start, axis=(0, 1))
    times = _without_rare(trace.source, _from_zero(times), notes)
    chains = _chains(trace.source, times, float(measured.mean()), notes)
    plan = _Plan(times, chains, float(measured.mean()), notes)
    laying = _Laying(trace.source, times, plan.lay_out(), float(measured.mean()))
    laying.walk()
    return TraceGraph(
        tuple(laying.nodes), np.stack(laying.rows), times.steps, measured, times.n_stages,
        times.start.shape[1], plan.p2p, tuple(notes), plan.recorded, plan.inferred,
    )  # fmt: skip


# ------------------------------------------------------------------------------------- tables
def _tabulate(trace: "Trace") -> Times:
    """Lay the table's rows into arrays by (stage, name, ordinal)."""
    ops = trace.ops
    start = ops["start"].to_numpy()
    if not np.isfinite(start).all():
        raise PrismError(
            f"{trace.source}: ops without a start time cannot be put in order; a column start_s "
            "(or start_ms, start_us) is needed to replay or simulate a trace"
        )
    steps, step_idx = np.unique(ops["step"].to_numpy(), return_inverse=True)
    replicas, replica_idx = np.unique(ops["dp_rank"].to_numpy(), return_inverse=True)
    stages, stage_idx = np.unique(ops["stage"].to_numpy(), return_inverse=True)
    names = ops["name"].astype("category")
    code = names.cat.codes.to_numpy().astype(np.int64)
    order = np.lexsort((start, code, stage_idx, replica_idx, step_idx))
    group = np.stack([step_idx, replica_idx, stage_idx, code])[:, order]
    new = np.ones(order.size, bool)
    new[1:] = (group[:, 1:] != group[:, :-1]).any(axis=0)
    first = np.maximum.accumulate(np.where(new, np.arange(order.size), 0))
    ordinal = np.empty(order.size, np.int64)
    ordinal[order] = np.arange(order.size) - first
    width = int(ordinal.max()) + 1
    flat = (stage_idx * len(names.cat.categories) + code) * width + ordinal
    _, row, inverse = np.unique(flat, return_index=True, return_inverse=True)
    labels = [str(c) for c in names.cat.categories]
    keys = [(int(stage_idx[i]), labels[code[i]], int(ordinal[i])) for i in row]
    begin = np.full((len(keys), replicas.size, steps.size), np.nan)
    end = np.full_like(begin, np.nan)
    begin[inverse, replica_idx, step_idx] = start
    end[inverse, replica_idx, step_idx] = start + ops["duration"].to_numpy()
    columns = [ops[c].to_numpy()[row] for c in ("op_kind", "kernel_class", "chunk", "microbatch")]
    info = {
        key: (str(k), str(c), int(chunk), int(mb))
        for key, k, c, chunk, mb in zip(keys, *columns, strict=True)
    }
    index = {k: i for i, k in enumerate(keys)}
    return Times(index, begin, end, info, steps.astype(np.int64), int(stages.size))


def _from_zero(times: Times) -> Times:
    """Count each step's times from its first op."""
    begin = np.nanmin(times.start, axis=(0, 1))
    return times._replace(start=times.start - begin, end=times.end - begin)


def _without_rare(source: str, times: Times, notes: list[str]) -> Times:
    """Leave out ops that fewer than half of the workers' steps have; count what is missing."""
    share = np.isfinite(times.start).mean(axis=(1, 2))
    rare = [k for k, i in times.index.items() if share[i] < RARE]
    if len(rare) > 0.5 * share.size:
        raise PrismError(
            f"{source}: more than half of the ops occur in fewer than half of the steps and "
            "replicas; give a trace of one job with one layout, all of whose steps do the same"
        )
    kept = share >= RARE
    missing = int((~np.isfinite(times.start[kept])).sum())
    if rare:
        stage, name, ordinal = rare[0]
        notes.append(
            f"{len(rare)} ops that fewer than half of the steps have were left out, such as "
            f"{name} no. {ordinal} of stage {stage}"
        )
    if missing:
        notes.append(f"{missing} ops are missing and were taken at the median of their kind")
    keys = [k for k, i in times.index.items() if kept[i]]
    return times._replace(
        index={k: i for i, k in enumerate(keys)}, start=times.start[kept], end=times.end[kept]
    )


def _chains(source: str, times: Times, step_s: float, notes: list[str]) -> list[list[Key]]:
    """Order every stage's ops by their typical start."""
    typical = np.nanmedian(times.start.reshape(len(times.index), -1), axis=1)
    chains, broken, total = [], 0, 0
    for s in range(times.n_stages):
        chain = [k for _, k in sorted((typical[i], k) for k, i in times.index.items() if k[0] == s)]
        starts = times.start[[times.index[k] for k in chain]]
        steps_back = np.diff(starts, axis=0) < -1e-5 * step_s
        broken, total = broken + int(steps_back.sum()), total + steps_back.size
        chains.append(chain)
    if broken > DISORDER * total:
        raise PrismError(
            f"{source}: in {100 * broken / total:.0f} % of the cases a worker does its ops in "
            "another order than usual; one fixed order per stage is expected"
        )
    if broken:
        notes.append(f"{broken} of {total} ops came in another order than usual")
    return chains


# --------------------------------------------------------------------------------------- plan
@dataclass
class _Plan:
    """Decides who meets in what; `lay_out` gives each stage's chain of items."""

    times: Times
    chains: list[list[Key]]
    step_s: float
    notes: list[str]
    p2p: str = "none"
    recorded: int = 0
    inferred: int = 0

    def lay_out(self) -> list[list[Item]]:
        """Return each stage's items in order."""
        item_of = self._transfers()
        for name, ordinal in dict.fromkeys(k[1:] for k in self.times.index if k not in item_of):
            item_of |= self._collective(name, ordinal)
        barriers = self._barriers()
        chains: list[list[Item]] = []
        for chain in self.chains:
            row: list[Item] = []
            for key in chain:
                item = item_of[key]
                if item not in row[-len(item.keys) :]:
                    row += [b for b in barriers.get(key[1:], []) if key[0] in b.stages]
                    row.append(item)
            chains.append(row)
        return chains

    def _collective(self, name: str, ordinal: int) -> dict[Key, Item]:
        """Items of one op on all stages: one each, or one meeting."""
        t = self.times
        keys = [(s, name, ordinal) for s in range(t.n_stages) if (s, name, ordinal) in t.index]
        op_kind, kernel_class, _, _ = t.info[keys[0]]
        scope = WORKER
        if op_kind not in LOCAL:
            starts, ends = (t.on_stages(v, name, ordinal) for v in (t.start, t.end))
            expected = EXPECTED.get(kernel_class)
            scope, as_expected = find_scope(starts, ends, expected, self.step_s)
            if scope is not WORKER:
                self.recorded, self.inferred = (
                    self.recorded + as_expected, self.inferred + (not as_expected)
                )  # fmt: skip
            if not as_expected:
                self.notes.append(f"{name}: who waits for whom ({scope.name}) from coinciding ends")
        if scope.name in ("replica", "world"):
            item = Item("op", frozenset(keys), scope, tuple(k[0] for k in keys))
            return dict.fromkeys(keys, item)
        return {k: Item("op", frozenset([k]), scope, (k[0],)) for k in keys}

    def _barriers(self) -> dict[tuple[str, int], list[Item]]:
        """Barriers that no op names, by the op before which all of a group resume together."""
        t, found = self.times, {}
        for name, ordinal in dict.fromkeys(k[1:] for k in t.index):
            keys = [(s, name, ordinal) for s in range(t.n_stages)]
            if any(k not in t.index for k in keys) or t.info[keys[0]][0] in COMPUTE:
                continue
            at = [self.chains[k[0]].index(k) for k in keys]
            if min(at) == 0:
                continue
            ready = np.stack([t.of(t.end, self.chains[s][i - 1]) for s, i in enumerate(at)])
            starts = t.on_stages(t.start, name, ordinal)
            items = []
            for barrier in hidden_barriers(ready, starts, self.step_s):
                by_stage = barrier.scope.name == "stage"
                stages = (barrier.index,) if by_stage else tuple(range(t.n_stages))
                replica = -1 if by_stage else barrier.index
                items.append(
                    Item(
                        "barrier", frozenset({(-1, name, ordinal)}), barrier.scope, stages, replica
                    )
                )
                where = f"all replicas of stage {barrier.index}" if by_stage else (
                    f"all stages of replica {barrier.index}"
                )  # fmt: skip
                self.notes.append(f"a barrier over {where} before {name}, which no op names")
                self.inferred += 1
            found[name, ordinal] = items
        return found

    # -- transfers ----------------------------------------------------------------------------
    def _transfers(self) -> dict[Key, Item]:
        """Items of sends and receives: meetings where they block, else messages."""
        pairs = [
            (key, peer)
            for key in self.times.index
            if self.times.info[key][0] == "transfer"
            and (peer := _peer(key, self.times)) is not None
        ]
        if not pairs:
            return {}
        blocking = float(np.mean([self._together(a, b) for a, b in pairs])) >= 0.5
        self.p2p = "blocking" if blocking else "async"
        self.recorded += len(pairs)
        if not blocking:
            return self._messages(pairs)
        sets = _Sets()
        for a, b in pairs:
            sets.join(a, b)
        paired = {k for pair in pairs for k in pair}
        for chain in self.chains:
            for a, b in zip(chain, chain[1:], strict=False):
                if a in paired and b in paired and self._overlap(a, b):
                    sets.join(a, b)
        items = {}
        for keys in sets.members():
            item = Item("op", keys, REPLICA, tuple(sorted({k[0] for k in keys})))
            items |= dict.fromkeys(keys, item)
        return items

    def _messages(self, pairs: list[tuple[Key, Key]]) -> dict[Key, Item]:
        """A send starts a message where it stands; who needs it waits where it arrived."""
        items = {}
        for send, receive in pairs:
            both = frozenset((send, receive))
            items[send] = Item("send", both, REPLICA, (send[0],))
            items[receive] = Item("receive", both, REPLICA, (receive[0],))
        arrival = {k: float(np.nanmedian(self.times.of(self.times.end, k))) for _, k in pairs}
        for s, chain in enumerate(self.chains):
            typical = {
                k: arrival.get(k, float(np.nanmedian(self.times.of(self.times.start, k))))
                for k in chain
            }
            self.chains[s] = sorted(chain, key=lambda k: (typical[k], k not in arrival))
        return items

    def _together(self, a: Key, b: Key) -> bool:
        """Tell whether both sides of a transfer end together."""
        t = self.times
        apart = np.nanmedian(np.abs(t.of(t.end, a) - t.of(t.end, b)))
        wait = np.nanmedian(np.abs(t.of(t.start, a) - t.of(t.start, b)))
        return bool(apart <= max(0.1 * wait, 2e-4 * self.step_s))

    def _overlap(self, a: Key, b: Key) -> bool:
        """Tell whether a worker issued two transfers as one: the second before the first ended."""
        t = self.times
        start, end = (np.stack([t.of(v, a), t.of(v, b)]) for v in (t.start, t.end))
        common = end.min(axis=0) - start.max(axis=0)
        shorter = (end - start).min(axis=0)
        return float(np.nanmean(common > 0.5 * shorter)) > 0.5  # else one followed the other


def _peer(key: Key, times: Times) -> Key | None:
    """Receive that belongs to a send: the same ordinal on the neighbour it goes to."""
    stage, name, ordinal = key
    if not name.endswith("send"):
        return None
    there = (stage + (1 if name.startswith("forward") else -1)) % times.n_stages
    peer = (there, name.removesuffix("send") + "recv", ordinal)
    return peer if peer in times.index else None


class _Sets:
    """Disjoint sets of keys."""

    def __init__(self) -> None:
        self.parent: dict[Key, Key] = {}

    def root(self, key: Key) -> Key:
        self.parent.setdefault(key, key)
        while self.parent[key] != key:
            key = self.parent[key]
        return key

    def join(self, a: Key, b: Key) -> None:
        self.parent[self.root(a)] = self.root(b)

    def members(self) -> list[frozenset[Key]]:
        """All sets."""
        out: dict[Key, set[Key]] = {}
        for key in self.parent:
            out.setdefault(self.root(key), set()).add(key)
        return [frozenset(s) for s in out.values()]


# -------------------------------------------------------------------------------------- nodes
@dataclass
class _Laying:
    """Lays items as soon as every chain that takes part has reached them."""

    source: str
    times: Times
    chains: list[list[Item]]
    step_s: float
    nodes: list[TraceNode] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)

    def walk(self) -> None:
        """Lay all items.

        Raises
        ------
        PrismError
            Chains wait for each other in a circle.
        """
        n = self.times.n_stages
        heads = [0] * n
        self.last = [-1] * n  # node each chain has reached
        self.ready = np.zeros((n, *self.times.start.shape[1:]))  # and when [s]
        self.late: list[list[int]] = [[] for _ in range(n)]  # messages the next op waits for
        self.sent: dict[frozenset[Key], int] = {}
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
                    f"{self.source}: stage {s} waits for ever in {name} no. {ordinal}: the other "
                    "side comes in another order; a trace of one pipeline is expected"
                )

    def _try(self, item: Item, heads: list[int]) -> bool:
        for s in item.stages:
            if heads[s] >= len(self.chains[s]) or self.chains[s][heads[s]] != item:
                return False
        if item.kind == "receive" and item.keys not in self.sent:
            return False
        {"op": self._op, "barrier": self._barrier, "send": self._send, "receive": self._receive}[
            item.kind
        ](item)
        for s in item.stages:
            heads[s] += 1
        return True

    def _op(self, item: Item) -> None:
        start, end = self._span(item)
        op_kind, kernel_class, chunk, microbatch = self.times.info[min(item.keys)]
        preds = [self._gap(s, start[s], op_kind) for s in item.stages]
        arrived, left = item.scope.latest(start), item.scope.earliest(end)
        first = item.stages[0]
        if item.scope is REPLICA and op_kind != "transfer":
            arrived = joint_arrival(arrived, left, float(self.step_s))
        duration = np.maximum(left[first] - arrived[first], 0.0)
        name = "+".join(sorted({k[1] for k in item.keys}))
        node = TraceNode(
            "op", op_kind, kernel_class, name, item.scope, item.stages, -1, chunk, microbatch,
            tuple(preds),
        )  # fmt: skip
        i = self._append(node, duration)
        for s in item.stages:
            self.last[s], self.ready[s] = i, left[s]

    def _span(self, item: Item) -> tuple[Array, Array]:
        """Start and end of those who meet, [stage, replica, step]; NaN: no part in it."""
        start = np.full_like(self.ready, np.nan)
        end = np.full_like(self.ready, np.nan)
        for s in item.stages:
            rows = [self.times.index[k] for k in item.keys if k[0] == s]
            start[s] = np.fmin.reduce(self.times.start[rows], axis=0)
            end[s] = np.fmax.reduce(self.times.end[rows], axis=0)
        return start, end

    def _gap(self, s: int, start: Array, before: str) -> int:
        """Lay the host's gap between a stage's last op and its next one."""
        preds = tuple(dict.fromkeys(p for p in (self.last[s], *self.late[s]) if p >= 0))
        self.late[s] = []
        node = TraceNode(
            "gap", "launch_gap", "launch_gap", f"before {before}", WORKER, (s,), -1, 0, -1, preds
        )
        return self._append(node, np.maximum(start - self.ready[s], 0.0))

    def _barrier(self, item: Item) -> None:
        """Lay an unnamed barrier: a join without duration, per stage where one replica waits."""
        released = release(self.ready, Barrier(item.scope, max(item.stages[0], item.replica)))
        before = list(self.last)
        for s in item.stages:
            own = (before[s], *(before[o] for o in item.stages if o != s))
            node = TraceNode(
                "join", "join", "", "barrier", item.scope, (s,), item.replica, 0, -1, own
            )
            self.last[s] = self._append(node, np.zeros(self.ready.shape[1:]))
            self.ready[s] = released[s]

    def _send(self, item: Item) -> None:
        """Lay a message that nobody waits for here."""
        send, receive = sorted(item.keys, key=lambda k: k[1].endswith("recv"))
        t = self.times
        posted = np.fmax(t.of(t.start, send), t.of(t.start, receive))
        op_kind, kernel_class, chunk, microbatch = t.info[send]
        preds = () if self.last[send[0]] < 0 else (self.last[send[0]],)
        stages = (send[0], receive[0])
        node = TraceNode(
            "op", op_kind, kernel_class, send[1], REPLICA, stages, -1, chunk, microbatch, preds
        )
        self.sent[item.keys] = self._append(node, np.maximum(t.of(t.end, receive) - posted, 0.0))

    def _receive(self, item: Item) -> None:
        """Let the next op here wait for a message."""
        stage = item.stages[0]
        (key,) = (k for k in item.keys if k[1].endswith("recv"))
        self.late[stage].append(self.sent[item.keys])
        self.ready[stage] = np.fmax(self.ready[stage], self.times.of(self.times.end, key))

    def _append(self, node: TraceNode, duration: Array) -> int:
        self.nodes.append(node)
        self.rows.append(np.array(np.broadcast_to(duration, self.times.start.shape[1:])))
        return len(self.nodes) - 1
