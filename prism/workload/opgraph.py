"""Graphs of ops with at most two predecessors, and their arrays for the engine.

A `Builder` takes local nodes, which stand for every dp replica, and global ones, which wait for all
replicas. `build_arrays` orders them by phase and earliest start, and gives ends to slots that are
reused. What the nodes of a training step are is `prism.workload.stepgraph`'s business.
"""

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from prism.engine import DRAW, EXPORT, JOIN
from prism.workload.build import Collective, Kernel

START = 0  # the node every rank starts from


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
    nominal_s : float
        The step with nominal durations [s], without barriers inside ops.
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
    nominal_s: float

    @property
    def n_draws(self) -> int:
        """Op-samples of one step replicate (durations drawn), all replicas."""
        total = 0
        for is_global, lo, hi in zip(self.phase_global, self.phase_lo, self.phase_hi, strict=True):
            drawn = int((self.kind[lo:hi] == DRAW).sum())
            total += drawn * (1 if is_global else self.n_replicas)
        return total


@dataclass
class Builder:
    """Collects nodes; local nodes stand for every replica."""

    nodes: list[Node] = field(default_factory=lambda: [Node((), False, -1, 0, -1, -1)])
    types: dict[OpType, int] = field(default_factory=dict)

    def type_index(self, op_type: OpType) -> int:
        """Index of an op type; equal types share it."""
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


def nominal_duration(op_type: OpType) -> float:
    """Nominal seconds of an op, without the barriers inside it."""
    if op_type.collective is not None:
        return op_type.collective.duration
    return sum(k.duration for k in op_type.kernels)


def _execution_order(
    nodes: list[Node], op_types: tuple[OpType, ...]
) -> tuple[list[int], list[int], float]:
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
    return order, phase, max(end)


def build_arrays(builder: Builder, final: int, n_replicas: int, n_stages: int) -> StepGraph:
    """Lay the nodes into arrays, in execution order and with reused slots.

    Parameters
    ----------
    final : int
        The node with the step's end; global.
    n_replicas, n_stages : int
        How many replicas share the local nodes, and of how many stages.
    """
    nodes, op_types = builder.nodes, tuple(builder.types)
    order, phase, nominal_s = _execution_order(nodes, op_types)
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
        n_stages=n_stages,
        n_microbatches=1 + max(n.microbatch for n in nodes),
        n_replicas=n_replicas,
        n_slots=n_slots,
        n_global_slots=slots.n_global,
        final_slot=final_slot,
        n_calls=1 + max(n.call for n in nodes),
        nominal_s=nominal_s,
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
