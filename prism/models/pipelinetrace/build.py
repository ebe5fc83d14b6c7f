"""From a pipeline trace to its graph: what each worker did in turn, and who meets in what.

The order of a stage's ops is the order in which its workers did them; sends pair with receives to
messages, collectives join the members of their named group, else of their class. Every op's
duration counts from the last arrival; what lies between a worker's release and its next op is a
gap, a node of its own.
"""

from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common.arrays import Index
from prism.common.errors import PrismError
from prism.common.means import median
from prism.common.text import format_share
from prism.models.pipelinetrace.meetings import (
    EXPECTED,
    TransferPair,
    coincide,
    consumers,
    do_block,
    hidden_barriers,
    last_arrival,
    named_scope,
    nobody_leaves_before,
    pair_transfers,
)
from prism.models.pipelinetrace.times import CLOCK_S, Times, ordered, read_times
from prism.simulation.tracemodel.graph import (
    COMPUTE,
    REPLICA,
    STAGE,
    WORKER,
    WORLD,
    Array,
    Scope,
    TraceGraph,
    TraceNode,
    replay,
)

if TYPE_CHECKING:
    from prism.traces import Trace

LOCAL = (*COMPUTE, "optimizer", "launch_gap", "data_load", "compute", "memory", "other")
# of the measured mean: a replay further off says so; production jobs' are 0.00002 off
CLOSE = 0.015
REFUSED = 0.5  # a replay further off is of another job: two in one trace are 0.62 to 1.26 off


def build_trace_graph(trace: "Trace") -> TraceGraph:
    """Build the graph of a pipeline trace from the order in which its workers did things.

    Each (dp_rank, stage) is one traced worker. Refused are traces without start times, whose
    workers do not repeat themselves from step to step, or whose sends and receives do not fit
    together.
    """
    times, measured, notes = read_times(trace)
    if not measured.all():
        raise PrismError(
            f"{trace.source}: step {times.steps[measured == 0.0][0]} takes no time; give what its "
            "ops take, or take its rows out"
        )
    chains = ordered(times)
    pairs = pair_transfers(times, chains)
    laying = _Laying(times, chains, pairs, do_block(times, chains, pairs), notes)
    laying.lay(float(measured.mean()))
    nodes, durations = laying.finish(trace.source)
    p2p = "none" if not pairs else "blocking" if laying.blocking else "async"
    graph = TraceGraph(
        nodes, durations, times.steps, measured, times.n_stages, times.start.shape[1], p2p,
        tuple(notes), laying.recorded, laying.inferred,
    )  # fmt: skip
    off = replay(graph) / graph.measured - 1.0
    if float(np.median(np.abs(off))) > REFUSED:
        raise PrismError(
            f"{trace.source}: replayed op by op, half of the steps are off by more than "
            f"{format_share(REFUSED)} ({format_share(float(off.mean()), 2)} in the mean); expected "
            "every worker's ops one after the other and in one order: give one job's trace, of one "
            "layout, with one traced worker per dp_rank and stage"
        )
    return graph


@dataclass
class _Laying:
    """Lays messages, then every stage's chain: nodes, what each waits for, and durations."""

    times: Times
    chains: list[Index]
    pairs: list[TransferPair]
    blocking: bool
    notes: list[str]
    recorded: int = 0  # edges that the trace names
    inferred: int = 0
    nodes: list[TraceNode] = field(default_factory=list)
    preds: list[list[int]] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)

    def lay(self, step_s: float) -> None:
        """Lay all nodes."""
        t = self.times
        self.what = list(t.ops.itertuples(index=False))
        self.left = t.end.copy()  # when a worker goes on after each op
        self.of: list[list[int]] = [[] for _ in self.what]  # nodes of each op: itself, or messages
        for pair in self.pairs:
            self._lay_message(pair)
        self.recorded += len(self.pairs)
        transfers = np.flatnonzero(t.ops["op_kind"] == "transfer")
        if alone := [k for k in transfers if not self.of[k]]:
            o = self.what[alone[0]]
            self._note(
                f"{len(alone)} transfers have no other side in the trace, such as {o.name} no. "
                f"{o.ordinal} of stage {o.stage}; their recorded time, waiting included, counts as "
                "their own"
            )
        for ops in t.alike():
            self._lay_ops(np.array([k for k in ops if not self.of[k]], np.int64))
        chains = self.chains
        if not self.blocking:
            sides = [k for p in self.pairs for k in p[:2]]
            chains = [chain[~np.isin(chain, sides)] for chain in chains]
        barriers = self._barriers(chains, step_s)
        for stage, chain in enumerate(chains):
            self._walk(stage, self._actions(stage, chain), barriers)

    def _add(
        self, duration: Array, preds: list[int], stages: tuple[int, ...], scope: Scope = WORKER,
        kind: str = "gap", what: tuple[str, str, str] = ("launch_gap",) * 3,
        chunk: int = 0, microbatch: int = -1, replica: int = -1,
    ) -> int:  # fmt: skip
        self.nodes.append(TraceNode(kind, *what, scope, stages, replica, chunk, microbatch, ()))
        self.preds.append(list(preds))
        self.rows.append(np.maximum(duration, 0.0))
        return len(self.nodes) - 1

    def _add_op(self, op: int, stages: tuple[int, ...], scope: Scope, duration: Array) -> int:
        o = self.what[op]
        what = o.op_kind, o.kernel_class, o.name
        return self._add(duration, [], stages, scope, "op", what, o.chunk, o.microbatch)

    def _lay_message(self, pair: TransferPair) -> None:
        """Lay what passes from the later of two posts on."""
        t, (send, receive) = self.times, pair[:2]
        # what blocks is recorded until its batch ends, of one side or the other; else as received
        end = np.minimum(t.end[send], t.end[receive]) if self.blocking else t.end[receive]
        begin = np.maximum(t.start[send], t.start[receive])
        stages = self.what[send].stage, self.what[receive].stage
        i, end = self._add_op(send, stages, REPLICA, end - begin), np.maximum(begin, end)
        for k in (send, receive):  # an op may be a side of two messages
            self.left[k] = np.maximum(self.left[k], end) if self.of[k] else end
            self.of[k].append(i)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # -- who meets ----------------------------------------------------------------------------
    def _lay_ops(self, ops: Index) -> None:
        """Lay one op of all stages: one node each, or one where they meet."""
        if not ops.size:
            return
        t, scope = self.times, self._find_scope(ops)
        together = [ops] if scope in (REPLICA, WORLD) else ops[:, None]
        for members in together:
            start, end = t.start[members], t.end[members]
            left = scope.earliest(end)
            own = (left - last_arrival(start, scope))[0]
            stages = tuple(self.what[k].stage for k in members)
            node, self.left[members] = self._add_op(members[0], stages, scope, own), left
            for k in members:
                self.of[k] = [node]

    def _find_scope(self, ops: Index) -> Scope:
        """Who meets in one op: by the names of groups, else by its class."""
        t, o = self.times, self.what[ops[0]]
        group, start, end = t.group[ops], t.start[ops], t.end[ops]
        if o.op_kind == "transfer" or (o.op_kind in LOCAL and group.max() < 0):
            return WORKER
        expected = EXPECTED.get(o.kernel_class)
        named = named_scope(group, expected)
        if group.max() >= 0 and named is None:
            self._note(f"{o.name}: its groups join other workers than a stage, a replica or all")
        for what, known in (("groups", named), ("class", expected)):
            if known is not None and nobody_leaves_before(start, end, known):
                self.recorded += known is not WORKER
                return known
            if known is not None:
                self._note(
                    f"{o.name}: its {what} would join a {known.name}, of which some leave before "
                    "all have come; not taken so"
                )
        for scope in (WORLD, STAGE, REPLICA):
            if coincide(start, end, scope):
                self.inferred += 1
                self._note(f"{o.name}: joins a {scope.name}, as coinciding ends tell")
                return scope
        return WORKER

    def _barriers(self, chains: list[Index], step_s: float) -> dict[int, list[Any]]:
        """Lay barriers that no op names: joins by stage, and when they release, by the op after."""
        t = self.times
        before = {int(b): int(a) for chain in chains for a, b in pairwise(chain)}
        found: dict[int, list[Any]] = {}
        for ops in t.alike():
            o, known = self.what[ops[0]], [before[op] for op in ops.tolist() if op in before]
            if len(known) < t.n_stages or o.op_kind in COMPUTE:
                continue
            for (scope, place), released in hidden_barriers(self.left[known], t.start[ops], step_s):
                one = scope == STAGE  # else one replica waits, in every stage
                where = f"all {'replicas of stage' if one else 'stages of replica'} {place}"
                self._note(f"a barrier over {where} before {o.name}, which no op names")
                self.inferred += 1
                joins = {
                    s: self._add(np.zeros(t.start.shape[1:]), [], (s,), scope, "join",
                                 ("join", "", "barrier"), replica=-1 if one else place)
                    for s in ([place] if one else range(t.n_stages))
                }  # fmt: skip
                for op in ops.tolist():
                    found.setdefault(op, []).append((joins, released))
        return found

    # -- chains -------------------------------------------------------------------------------
    def _actions(self, stage: int, chain: Index) -> list[tuple[str, int]]:
        """Tell what workers do in turn: run an op, post a side of a message, wait for it."""
        sides = {k: None for p in self.pairs for k in p[:2] if self.what[k].stage == stage}
        return self._in_batches(chain, sides) if self.blocking else self._in_flight(chain, sides)

    def _in_batches(self, chain: Index, sides: dict[int, None]) -> list[tuple[str, int]]:
        """Transfers that block: those issued as one are posted together, and waited for."""
        found: list[tuple[str, int]] = []
        batch: list[int] = []
        begin, until = self.times.start[chain], self.times.end[chain]
        common = np.minimum(until[1:], until[:-1]) - np.maximum(begin[1:], begin[:-1])
        shorter = np.minimum(until[1:] - begin[1:], until[:-1] - begin[:-1])
        as_one = [False, *(median(common - 0.5 * shorter, (1, 2)) > 0.0), False]  # as that before
        for op, joined in zip([*chain.tolist(), None], as_one, strict=True):
            if batch and not (op in sides and joined):
                found += [(what, k) for what in ("post", "wait") for k in batch]
                batch = []
            if op in sides:
                batch.append(op)
            elif op is not None:
                found.append(("run", op))
        return found

    def _in_flight(self, chain: Index, sides: dict[int, None]) -> list[tuple[str, int]]:
        """Transfers beside the ops: posted before the first op not done by then."""
        t = self.times
        awaits = consumers(t, chain, self.pairs, sides)
        posts: dict[int | None, list[int]] = {}
        for k in sides:
            late = median(t.end[chain] - t.start[k], (1, 2)) > CLOCK_S
            posts.setdefault(int(chain[late.argmax()]) if late.any() else None, []).append(k)
        found = []
        for op in [*chain.tolist(), None]:
            found += [("post", k) for k in posts.get(op, [])]
            found += [("wait", k) for k in awaits.get(op, [])]
            found += [] if op is None else [("run", op)]
        return found

    def _walk(
        self, stage: int, actions: list[tuple[str, int]], barriers: dict[int, list[Any]]
    ) -> None:
        """Join a stage's nodes in the order of its actions, with the host's gaps between."""
        t = self.times
        front: list[int] = []  # what the next node waits for
        ready = np.zeros(t.start.shape[1:])  # and when that is over [s]
        awaited = False  # whether messages are in front
        for action, k in actions:
            of, start = self.of[k], t.start[k]
            if action == "wait":
                front, ready, awaited = front + of, np.maximum(ready, self.left[k]), True
                continue
            for joins, released in barriers.get(k, []):
                if stage in joins:
                    if len(front) > 1 or self.nodes[front[0]].kind == "gap":
                        what = "join", "", "release"
                        none = np.zeros_like(ready)
                        front = [self._add(none, front, (stage,), kind="join", what=what)]
                    for s, join in joins.items():  # its own comes first
                        at = 0 if s == stage else len(self.preds[join])
                        self.preds[join].insert(at, front[0])
                    front, ready, awaited = [joins[stage]], released[stage], False
            op_kind = self.what[k].op_kind
            what = "launch_gap", "launch_gap", f"gap before {op_kind}"
            gap = self._add(start - ready, front, (stage,), what=what)
            for i in of:
                self.preds[i].append(gap)
            if action == "run":
                if op_kind == "transfer":  # without another side: several are one wait
                    self.rows[of[0]] = np.maximum(self.left[k] - np.maximum(start, ready), 0.0)
                front, ready, awaited = of, self.left[k], False
            elif awaited:  # posted after what is awaited has come
                front, ready, awaited = [gap], start, False

    def finish(self, source: str) -> tuple[tuple[TraceNode, ...], Array]:
        """Put nodes in topological order."""
        try:
            order = list(TopologicalSorter(dict(enumerate(self.preds))).static_order())
        except CycleError as e:
            name = next(self.nodes[i].name for i in e.args[1] if self.nodes[i].kind == "op")
            raise PrismError(
                f"{source}: some stage waits forever in {name}: the other side comes in another "
                "order; a trace of one job is expected, with one traced worker per dp_rank and "
                "stage"
            ) from None
        place = {i: at for at, i in enumerate(order)}
        nodes = [
            self.nodes[i]._replace(preds=tuple(dict.fromkeys(place[p] for p in self.preds[i])))
            for i in order
        ]
        return tuple(nodes), np.stack([self.rows[i] for i in order])
