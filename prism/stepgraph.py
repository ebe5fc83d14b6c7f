"""The step graph: which op waits for which, as arrays for the engine.

Turns a workload and a pipeline schedule into ops with at most two predecessors, in execution
order. All dp replicas share one template of local ops; collectives over replicas are global ops
and split the template into phases. Left out: durations' variability (see `prism.variability`) and
contention between the streams of one GPU.
"""

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from prism.engine import DRAW, EXPORT, JOIN
from prism.errors import PrismError
from prism.schedule import Action, Schedule
from prism.workload import Collective, Kernel, Workload

START = 0  # the node every rank starts from
Message = tuple[str, int, int]  # kind, virtual stage, microbatch


class OpType(NamedTuple):
    """What an op does: the kernels of one action on one group, or one collective."""

    op_kind: str
    stage: int
    kernels: tuple[Kernel, ...] = ()
    collective: Collective | None = None
    member: int = -1  # rank within the tp x cp group, -1: the whole group
    link: int = -1  # of a transfer: from this stage to the next one, or back


class Node(NamedTuple):
    """One node under construction."""

    preds: tuple[int, ...]
    is_global: bool
    op_type: int  # -1: a join without duration
    stage: int
    microbatch: int
    call: int  # which call effect it shares, -1: none


@dataclass(frozen=True)
class StepGraph:
    """Arrays of the step graph, ops in execution order.

    Attributes
    ----------
    kind, pred0, pred1, out, op_type, stage, microbatch, call, draw : ndarray [op]
        `engine.Ops` fields; ``op_type`` and ``call`` are -1 where they do not apply.
    phase_global, phase_lo, phase_hi : ndarray [phase]
        Ranges of ops that run once per replica (0) or once for all replicas (1).
    op_types : tuple of OpType
    n_replicas, n_slots, n_global_slots, final_slot, n_calls : int
    """

    kind: np.ndarray
    pred0: np.ndarray
    pred1: np.ndarray
    out: np.ndarray
    op_type: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    call: np.ndarray
    draw: np.ndarray
    phase_global: np.ndarray
    phase_lo: np.ndarray
    phase_hi: np.ndarray
    op_types: tuple[OpType, ...]
    n_stages: int
    n_microbatches: int
    n_replicas: int
    n_slots: int
    n_global_slots: int
    final_slot: int
    n_calls: int

    @property
    def n_draws(self) -> int:
        """Op-samples of one step replicate (durations drawn), all replicas."""
        total = 0
        for is_global, lo, hi in zip(self.phase_global, self.phase_lo, self.phase_hi, strict=True):
            drawn = int((self.kind[lo:hi] == DRAW).sum())
            total += drawn * (1 if is_global else self.n_replicas)
        return total


@dataclass
class _Builder:
    """Collects nodes; local nodes stand for every replica."""

    nodes: list[Node] = field(default_factory=lambda: [Node((), False, -1, 0, -1, -1)])
    types: dict[OpType, int] = field(default_factory=dict)

    def type_index(self, op_type: OpType) -> int:
        return self.types.setdefault(op_type, len(self.types))

    def add(
        self,
        preds: list[int],
        op_type: OpType | None,
        *,
        is_global: bool = False,
        stage: int = 0,
        microbatch: int = -1,
        call: int = -1,
    ) -> int:
        """Add an op; joins of more than two predecessors become binary joins."""
        index = -1 if op_type is None else self.type_index(op_type)
        preds = self._reduce(list(dict.fromkeys(p for p in preds if p != START)), is_global, stage)
        self.nodes.append(Node(tuple(preds), is_global, index, stage, microbatch, call))
        return len(self.nodes) - 1

    def join(self, preds: list[int], *, is_global: bool = False, stage: int = 0) -> int:
        """Return a node that ends when all predecessors have."""
        unique = list(dict.fromkeys(p for p in preds if p != START))
        if not unique:
            return START
        if len(unique) == 1 and (self.nodes[unique[0]].is_global or not is_global):
            return unique[0]
        return self.add(unique, None, is_global=is_global, stage=stage)

    def _reduce(self, preds: list[int], is_global: bool, stage: int) -> list[int]:
        # Local ends are joined inside the replica first: one export instead of many.
        local = [p for p in preds if not self.nodes[p].is_global]
        other = [p for p in preds if self.nodes[p].is_global]
        if is_global and len(local) > 1:
            local = [self._tree(local, False, stage)]
        preds = local + other
        return preds if len(preds) <= 2 else [self._tree(preds, is_global, stage)]

    def _tree(self, preds: list[int], is_global: bool, stage: int) -> int:
        while len(preds) > 1:
            pairs = [preds[i : i + 2] for i in range(0, len(preds), 2)]
            preds = [p[0] if len(p) == 1 else self._append_join(p, is_global, stage) for p in pairs]
        return preds[0]

    def _append_join(self, pair: list[int], is_global: bool, stage: int) -> int:
        self.nodes.append(Node(tuple(pair), is_global, -1, stage, -1, -1))
        return len(self.nodes) - 1


class Meeting(NamedTuple):
    """A blocking transfer: two neighbours exchange messages (kind, virtual stage, microbatch)."""

    stages: tuple[int, int]
    messages: frozenset[Message]


@dataclass(frozen=True)
class GraphOptions:
    """How a step is laid out; see the job file's `parallelism` block for meanings."""

    n_replicas: int = 1
    group_size: int = 1
    resolution: str = "op"
    p2p: str = "async"
    overlap: bool = True
    prefetch: int = 1
    reshard_after_forward: bool = False


@dataclass
class _Stage:
    """What a stage has reached."""

    last: list[int]  # last node of every group member
    starts: list[list[int]] = field(default_factory=list)  # nodes before each use of parameters
    gathered: set[int] = field(default_factory=set)  # chunks
    gather_stream: int = START
    reduce_stream: int = START
    pending: dict[int, int] = field(default_factory=dict)  # chunk -> backwards still to come
    reduces: list[tuple[Collective, int]] = field(default_factory=list)


class _StepBuilder:
    """Walks the schedule once and lays the step's ops into a `_Builder`."""

    def __init__(self, workload: Workload, schedule: Schedule, options: GraphOptions) -> None:
        self.work, self.schedule, self.options = workload, schedule, options
        self.b = _Builder()
        self.n_stages = len(schedule)
        self.n_chunks = len(workload.chunks[0])
        self.n_calls = 0
        members = options.group_size if options.resolution == "kernel" else 1
        self.stages = [_Stage([START] * members) for _ in schedule]
        for stage, actions in zip(self.stages, schedule, strict=True):
            for a in actions:
                if a.kind == "B":
                    stage.pending[a.chunk] = stage.pending.get(a.chunk, 0) + 1
        self.arrived: dict[Message, int] = {}  # message -> node

    def build(self) -> tuple[_Builder, int]:
        """Lay all items in an order in which their inputs exist, then the step's end."""
        blocking = self.options.p2p == "blocking" and self.n_stages > 1
        items: list[list[Action | Meeting]] = (
            blocking_items(self.schedule) if blocking else [list(a) for a in self.schedule]
        )
        heads = [0] * self.n_stages
        progress = True
        while progress:
            progress = False
            for s in range(self.n_stages):
                while heads[s] < len(items[s]) and self._try(s, items, heads, blocking):
                    progress = True
        if any(heads[s] < len(items[s]) for s in range(self.n_stages)):
            raise PrismError("schedule: deadlock; some action comes before its input can exist")
        return self.b, self._end_of_step()

    def _try(
        self, s: int, items: list[list[Action | Meeting]], heads: list[int], blocking: bool
    ) -> bool:
        item = items[s][heads[s]]
        if isinstance(item, Meeting):
            peer = item.stages[0] if item.stages[1] == s else item.stages[1]
            if heads[peer] >= len(items[peer]) or items[peer][heads[peer]] != item:
                return False
            self._meet(item)
            heads[peer] += 1
        else:
            source = _source(item, s, self.n_stages, self.n_chunks)
            if source is not None and source not in self.arrived:
                return False
            self._action(s, item, blocking)
        heads[s] += 1
        return True

    def _meet(self, meeting: Meeting) -> None:
        a, b = (self.stages[s] for s in meeting.stages)
        transfer, low = self.work.transfer, min(meeting.stages)
        preds = a.last + b.last
        if transfer is not None and transfer.duration > 0:
            node = self.b.add(
                preds, OpType("transfer", low, collective=transfer, link=low), stage=low
            )
        else:
            node = self.b.join(preds, stage=low)
        a.last, b.last = [node] * len(a.last), [node] * len(b.last)

    def _action(self, s: int, action: Action, blocking: bool) -> None:
        stage = self.stages[s]
        source = _source(action, s, self.n_stages, self.n_chunks)
        waits = self._gather(s, action.chunk)
        if source is not None:
            waits.append(self.arrived[source])
        work = self.work.chunks[s][action.chunk]
        op_kind = "forward" if action.kind == "F" else "backward"
        kernels = work.forward if action.kind == "F" else work.backward
        if self.options.resolution == "kernel":
            self._lay_kernels(s, op_kind, kernels, waits, action.microbatch)
        else:
            op_type = OpType(op_kind, s, kernels)
            node = self.b.add(stage.last + waits, op_type, stage=s, microbatch=action.microbatch)
            stage.last = [node]
        self._send(s, action, blocking)
        if action.kind == "B":
            self._reduce(s, action.chunk)

    def _lay_kernels(
        self, s: int, op_kind: str, kernels: tuple[Kernel, ...], waits: list[int], microbatch: int
    ) -> None:
        """Lay every kernel on every rank of the group; a collective joins the group."""
        call, self.n_calls = self.n_calls, self.n_calls + 1
        last = [self.b.join([p, *waits], stage=s) for p in self.stages[s].last]
        for kernel in kernels:
            if kernel.group:
                op_type = OpType(op_kind, s, (kernel,))
                node = self.b.add(last, op_type, stage=s, microbatch=microbatch, call=call)
                last = [node] * len(last)
                continue
            for g in range(len(last)):
                op_type = OpType(op_kind, s, (kernel,), member=g)
                last[g] = self.b.add([last[g]], op_type, stage=s, microbatch=microbatch, call=call)
        self.stages[s].last = last

    def _send(self, s: int, action: Action, blocking: bool) -> None:
        end = self.b.join(self.stages[s].last, stage=s)
        transfer = self.work.transfer
        crosses = _target(action, s, self.n_stages, self.n_chunks) is not None
        if crosses and not blocking and transfer is not None and transfer.duration > 0:
            link = s if action.kind == "F" else (s - 1) % self.n_stages
            op_type = OpType("transfer", s, collective=transfer, link=link)
            end = self.b.add([end], op_type, stage=s)
        virtual = action.chunk * self.n_stages + s
        self.arrived[action.kind, virtual, action.microbatch] = end

    # -- data parallelism -------------------------------------------------------------------

    def _gather(self, s: int, chunk: int) -> list[int]:
        """Parameters of a chunk, gathered on a stream of their own, prefetched a few uses ahead."""
        collective = self.work.gather[s][chunk]
        stage = self.stages[s]
        if collective is None:
            return []
        if chunk in stage.gathered and not self.options.reshard_after_forward:
            return []  # the stage's own order already puts this after the gather
        stage.starts.append(list(stage.last))
        ahead = self.options.prefetch if self.options.overlap else 0
        k = len(stage.starts) - 1 - ahead
        issued = stage.starts[k] if k >= 0 else []
        node = self.b.add(
            [stage.gather_stream, *issued],
            OpType(collective.op_kind, s, collective=collective),
            is_global=True,
            stage=s,
        )
        stage.gather_stream = node
        stage.gathered.add(chunk)
        return [node]

    def _reduce(self, s: int, chunk: int) -> None:
        """Gradients of a chunk, reduced on a stream of their own after its last backward."""
        collective, stage = self.work.reduce[s][chunk], self.stages[s]
        stage.pending[chunk] -= 1
        every = self.options.reshard_after_forward
        if collective is None or (stage.pending[chunk] > 0 and not every):
            return
        if self.options.overlap:
            self._lay_reduce(s, collective, stage.last)
        else:
            stage.reduces.append((collective, START))

    def _lay_reduce(self, s: int, collective: Collective, after: list[int]) -> None:
        stage = self.stages[s]
        stage.reduce_stream = self.b.add(
            [*after, stage.reduce_stream],
            OpType(collective.op_kind, s, collective=collective),
            is_global=True,
            stage=s,
        )

    def _end_of_step(self) -> int:
        """Lay the chain of barriers at the end of the step; the last one is global."""
        for s, stage in enumerate(self.stages):
            for collective, _ in stage.reduces:
                self._lay_reduce(s, collective, stage.last)
        done = [
            self.b.join([*st.last, st.reduce_stream], stage=s, is_global=True)
            for s, st in enumerate(self.stages)
        ]
        if self.work.layernorm_reduce is not None:
            done = [self._end_op(s, [d], self.work.layernorm_reduce) for s, d in enumerate(done)]
        if self.work.embedding_reduce is not None and self.n_stages > 1:
            both = self._end_op(0, [done[0], done[-1]], self.work.embedding_reduce)
            done[0] = done[-1] = both
        if self.work.grad_norm_reduce is not None:
            done = [self._end_op(0, done, self.work.grad_norm_reduce)] * self.n_stages
        for per_stage in (self.work.optimizer, self.work.param_gather):
            for s, last in enumerate(per_stage):
                if last is not None:
                    done[s] = self._end_op(s, [done[s]], last)
        return self.b.join(done, is_global=True)

    def _end_op(self, s: int, preds: list[int], collective: Collective) -> int:
        op_type = OpType(collective.op_kind, s, collective=collective)
        return self.b.add(preds, op_type, is_global=True, stage=s)


def _source(action: Action, stage: int, n_stages: int, n_chunks: int) -> Message | None:
    """Message that an action reads, None where it starts the pipeline or turns around."""
    virtual = action.chunk * n_stages + stage + (-1 if action.kind == "F" else 1)
    if action.kind not in ("F", "B") or not 0 <= virtual < n_stages * n_chunks:
        return None
    return action.kind, virtual, action.microbatch


def _target(action: Action, stage: int, n_stages: int, n_chunks: int) -> int | None:
    """Stage that reads what an action sends, None where no other stage does."""
    virtual = action.chunk * n_stages + stage + (1 if action.kind == "F" else -1)
    if action.kind not in ("F", "B") or not 0 <= virtual < n_stages * n_chunks:
        return None
    return virtual % n_stages if virtual % n_stages != stage else None


def blocking_items(schedule: Schedule) -> list[list[Action | Meeting]]:
    """Interleave a schedule of one chunk per stage with its blocking transfers.

    A send followed at once by a receive from the same neighbour is one meeting where the
    neighbour's order mirrors it, as Megatron's send-forward-recv-backward.
    """
    n = len(schedule)
    adjacent: list[dict[Message, Message]] = []
    for s, actions in enumerate(schedule):
        pairs: dict[Message, Message] = {}
        for a, b in zip(actions, actions[1:], strict=False):
            received, peer = _source(b, s, n, 1), _target(a, s, n, 1)
            if received is not None and peer is not None and received[1] == peer:
                pairs[a.kind, s, a.microbatch] = received
        adjacent.append(pairs)

    def meeting(message: Message, reader: int) -> Meeting:
        sender = message[1]
        messages = {message}
        answer = adjacent[sender].get(message)
        if answer is not None and adjacent[answer[1]].get(answer) == message:
            messages.add(answer)
        return Meeting((min(sender, reader), max(sender, reader)), frozenset(messages))

    items: list[list[Action | Meeting]] = []
    for s, actions in enumerate(schedule):
        row: list[Action | Meeting] = []
        for a in actions:
            received = _source(a, s, n, 1)
            if received is not None:
                before = meeting(received, s)
                if not row or row[-1] != before:
                    row.append(before)
            row.append(a)
            peer = _target(a, s, n, 1)
            if peer is not None:
                row.append(meeting((a.kind, s, a.microbatch), peer))
        items.append(row)
    return items


def build_step_graph(workload: Workload, schedule: Schedule, options: GraphOptions) -> StepGraph:
    """Build the arrays of one step.

    Parameters
    ----------
    workload : Workload
        Ops with nominal durations [s].
    schedule : Schedule
        Action lists per stage.
    options : GraphOptions

    Raises
    ------
    PrismError
        The schedule deadlocks.
    """
    steps = _StepBuilder(workload, schedule, options)
    builder, final = steps.build()
    op_types = tuple(builder.types)
    order, phase = _execution_order(builder.nodes, op_types)
    return _to_arrays(steps, op_types, order, phase, final, options)


def nominal_duration(op_type: OpType) -> float:
    """Nominal seconds of an op, without the barriers inside it."""
    if op_type.collective is not None:
        return op_type.collective.duration
    return sum(k.duration for k in op_type.kernels)


def _execution_order(
    nodes: list[Node], op_types: tuple[OpType, ...]
) -> tuple[list[int], list[int]]:
    """Order nodes by phase and earliest start, so that few ends are alive at a time."""
    durations = [nominal_duration(t) for t in op_types]
    phase, end = [-1] * len(nodes), [0.0] * len(nodes)
    followers: list[list[int]] = [[] for _ in nodes]
    missing = [len(n.preds) for n in nodes]
    start = [0.0] * len(nodes)
    for i, node in enumerate(nodes):
        for p in node.preds:
            followers[p].append(i)
    ready = [i for i in range(1, len(nodes)) if missing[i] == 0]
    for i in ready:
        phase[i] = -1 if nodes[i].is_global else 0
    heap = [(phase[i], 0.0, i) for i in ready]
    heapq.heapify(heap)
    order = []
    while heap:
        ph, begin, i = heapq.heappop(heap)
        order.append(i)
        node = nodes[i]
        end[i] = begin + (durations[node.op_type] if node.op_type >= 0 else 0.0)
        for j in followers[i]:
            hop = 0 if nodes[j].is_global == node.is_global else 1
            phase[j] = max(phase[j], ph + hop)
            start[j] = max(start[j], end[i])
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(heap, (phase[j], start[j], j))
    return order, phase


def _to_arrays(
    steps: _StepBuilder,
    op_types: tuple[OpType, ...],
    order: list[int],
    phase: list[int],
    final: int,
    options: GraphOptions,
) -> StepGraph:
    nodes = steps.b.nodes
    exported = {
        p for n in nodes if n.is_global for p in n.preds if not nodes[p].is_global and p != START
    }
    slots = _Slots(nodes, order)
    draws = _draw_indices(nodes)
    rows: list[tuple[int, ...]] = []
    phases: list[tuple[int, int, int]] = []
    for i in order:
        node = nodes[i]
        if not phases or phases[-1][0] != phase[i]:
            phases.append((phase[i], len(rows), len(rows)))
        preds = [slots.of(p, node.is_global) for p in node.preds]
        preds += [slots.start] * (2 - len(preds))
        out = slots.allocate(i)
        kind = JOIN if node.op_type < 0 else DRAW
        rows.append(
            (kind, *preds, out, node.op_type, node.stage, node.microbatch, node.call, draws[i])
        )
        if i in exported:
            rows.append((EXPORT, out, slots.start, slots.export(i), -1, node.stage, -1, -1, -1))
        slots.release(i)
        phases[-1] = (phase[i], phases[-1][1], len(rows))
    table = np.array(rows, np.int64).reshape(len(rows), 9)
    n_slots = slots.n_local
    encoded = np.where(table[:, 1:4] < 0, n_slots - 1 - table[:, 1:4], table[:, 1:4])
    final_slot = n_slots - 1 - slots.of(final, True)
    names = ("op_type", "stage", "microbatch", "call", "draw")
    columns = {n: table[:, 4 + k].astype(np.int32) for k, n in enumerate(names)}
    return StepGraph(
        kind=table[:, 0].astype(np.int8),
        pred0=encoded[:, 0].astype(np.int32),
        pred1=encoded[:, 1].astype(np.int32),
        out=encoded[:, 2].astype(np.int32),
        **columns,
        phase_global=np.array([p % 2 for p, _, _ in phases], np.uint8),
        phase_lo=np.array([lo for _, lo, _ in phases], np.int64),
        phase_hi=np.array([hi for _, _, hi in phases], np.int64),
        op_types=op_types,
        n_stages=steps.n_stages,
        n_microbatches=1 + max(n.microbatch for n in nodes),
        n_replicas=options.n_replicas,
        n_slots=n_slots,
        n_global_slots=slots.n_global,
        final_slot=final_slot,
        n_calls=steps.n_calls,
    )


def _draw_indices(nodes: list[Node]) -> list[int]:
    """Index of each draw within its stage, in the order of the schedule (not of durations)."""
    counters: dict[tuple[bool, int], int] = {}
    draws = []
    for node in nodes:
        if node.op_type < 0:
            draws.append(-1)
            continue
        key = (node.is_global, node.stage)
        draws.append(counters.get(key, 0))
        counters[key] = draws[-1] + 1
    return draws


class _Slots:
    """Slots of ends: local ones are reused once nobody reads them; global ones are -1, -2, ..."""

    start = 0

    def __init__(self, nodes: list[Node], order: list[int]) -> None:
        self.nodes = nodes
        self.last_reader: dict[int, int] = {}
        for i in order:
            for p in nodes[i].preds:
                if nodes[i].is_global == nodes[p].is_global:
                    self.last_reader[p] = i
        self.slot: dict[int, int] = {START: 0}
        self.exports: dict[int, int] = {}
        self.free: list[int] = []
        self.n_local, self.n_global = 1, 0

    def of(self, node: int, reader_is_global: bool) -> int:
        """Slot a reader finds a node's end in."""
        if reader_is_global and not self.nodes[node].is_global:
            return self.exports[node] if node != START else self.start
        return self.slot[node]

    def _new_global(self) -> int:
        self.n_global += 1
        return -self.n_global

    def allocate(self, node: int) -> int:
        """Slot for a node's own end."""
        if self.nodes[node].is_global:
            self.slot[node] = self._new_global()
        else:
            if not self.free:
                self.free.append(self.n_local)
                self.n_local += 1
            self.slot[node] = heapq.heappop(self.free)
        return self.slot[node]

    def export(self, node: int) -> int:
        """Global slot that takes the latest end over the replicas."""
        self.exports[node] = self._new_global()
        return self.exports[node]

    def release(self, node: int) -> None:
        """Free what this node was the last to read, and its own slot if nobody reads it."""
        done = {p for p in self.nodes[node].preds if self.last_reader.get(p) == node}
        if node not in self.last_reader:
            done.add(node)
        for p in done:
            if p != START and not self.nodes[p].is_global:
                heapq.heappush(self.free, self.slot[p])
