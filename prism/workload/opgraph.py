"""Graphs of ops with at most two predecessors, and their arrays for the engine.

A `Builder` takes local nodes, which stand for every dp replica, and global ones, which wait for all
replicas. `build_arrays` orders them and gives their ends to slots that are reused.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import numpy as np

from prism.cluster.groups import Ends, ends_of
from prism.engine import DRAW, EXPORT, JOIN
from prism.workload.build import Collective, Kernel

START = 0  # the node every rank starts from


class OpType(NamedTuple):
    """What an op does: the kernels of one action on one group, or one collective."""

    op_kind: str
    stage: int
    kernels: tuple[Kernel, ...] = ()
    collective: Collective | None = None
    member: int = -1  # rank within the stage of a replica, -1: all of them
    link: int = -1  # of a transfer: from this stage to the next one, or back

    def ends(self, n_stages: int, shared: bool = False, units: int = 1) -> Ends:
        """Stages that its messages join, of all replicas together or of each."""
        group = self.collective.group if self.collective else ""
        return ends_of(group, self.stage, self.link, n_stages, shared, units)


class Node(NamedTuple):
    """One node under construction; its predecessors come before it, START is none of them."""

    preds: tuple[int, ...]
    is_global: bool
    op_type: int  # -1: a join without duration
    stage: int
    microbatch: int
    call: int  # which call effect it shares, -1: none
    chunk: int = -1  # of the model, -1: none


@dataclass(frozen=True)
class StepGraph:
    """Arrays of the step graph, ops in execution order; see `engine.Ops` for the first ones."""

    kind: np.ndarray  # [op]
    pred0: np.ndarray
    pred1: np.ndarray
    out: np.ndarray
    op_type: np.ndarray  # -1: none
    stage: np.ndarray
    microbatch: np.ndarray
    call: np.ndarray  # -1: none
    chunk: np.ndarray  # -1: none
    draw: np.ndarray
    phase_global: np.ndarray  # [phase] whether its ops run once for all replicas, or once for each
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
    nominal_s: float  # the step with nominal durations, without barriers inside ops [s]

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

    def number(self, op_type: OpType) -> int:
        """Give an op type its number; hashing one takes longer than adding an op."""
        return self.types.setdefault(op_type, len(self.types))

    def add(
        self,
        preds: list[int],
        op_type: int,
        *,
        is_global: bool = False,
        stage: int = 0,
        microbatch: int = -1,
        call: int = -1,
        chunk: int = -1,
    ) -> int:
        """Add an op of a type (-1: a join); joins of more than two become binary joins."""
        preds, nodes = _unique(preds), self.nodes
        if len(preds) > 1 or is_global:
            # local ends are joined inside the replica first: one export instead of many
            local = [p for p in preds if not nodes[p].is_global]
            other = [p for p in preds if nodes[p].is_global] if len(local) < len(preds) else []
            if is_global:
                local = self._at_most(1, local, False, stage)
            preds = self._at_most(2, local + other, is_global, stage)
        return self._append(Node(tuple(preds), is_global, op_type, stage, microbatch, call, chunk))

    def join(self, preds: list[int], *, is_global: bool = False, stage: int = 0) -> int:
        """Return a node that ends when all predecessors have."""
        if len(preds) == 1 and not is_global:
            return preds[0]
        unique = _unique(preds)
        if not unique:
            return START
        if len(unique) == 1 and (self.nodes[unique[0]].is_global or not is_global):
            return unique[0]
        return self.add(unique, -1, is_global=is_global, stage=stage)

    def _at_most(self, n: int, preds: list[int], is_global: bool, stage: int) -> list[int]:
        """Predecessors as they are, or one join of all where they are more than n."""
        while len(preds) > n:
            n = 1
            pairs = [preds[i : i + 2] for i in range(0, len(preds), 2)]
            preds = [
                self._append(Node(tuple(p), is_global, -1, stage, -1, -1)) if len(p) > 1 else p[0]
                for p in pairs
            ]
        return preds

    def _append(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1


def _unique(preds: list[int]) -> list[int]:
    return list(dict.fromkeys(filter(None, preds)))  # START is 0


def nominal_duration(op_type: OpType) -> float:
    """Nominal seconds of an op, without the barriers inside it."""
    if op_type.collective is not None:
        return op_type.collective.duration
    return sum(k.duration for k in op_type.kernels)


def _execution_order(
    preds: Sequence[tuple[int, ...]], is_global: Sequence[bool], durations: Sequence[float]
) -> tuple[list[int], list[int], float]:
    """Order nodes by phase and earliest start, so that few ends are alive at a time."""
    phase, start, end = [0], [0.0], [0.0]
    for before, own, duration in zip(preds[1:], is_global[1:], durations[1:], strict=True):
        at, since = (-1 if before or own else 0), 0.0
        for p in before:
            here = phase[p] + (own != is_global[p])
            at = here if here > at else at
            since = end[p] if end[p] > since else since
        phase.append(at)
        start.append(since)
        end.append(since + duration)
    order = np.lexsort((start[1:], phase[1:])) + 1  # of those alike the first comes first
    return order.tolist(), phase, max(end)


def retime(graph: StepGraph, op_types: tuple[OpType, ...]) -> StepGraph:
    """Give a graph's ops other durations: its order, which they decide at first, is kept."""
    nominal = [*map(nominal_duration, op_types), 0.0]  # the last one is a join's
    ends = [0.0] * (graph.n_slots + graph.n_global_slots)
    longest = 0.0
    columns = graph.pred0, graph.pred1, graph.out, graph.op_type
    for a, b, out, t in zip(*(column.tolist() for column in columns), strict=True):
        ends[out] = max(ends[a], ends[b]) + nominal[t]
        longest = max(longest, ends[out])
    return replace(graph, op_types=op_types, nominal_s=longest)


class _Slots:
    """Slots of ends: local ones from 1 are reused once given back; global ones are -1, -2, ..."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.n_local, self.n_global = 1, 0

    def take(self, is_global: bool) -> int:
        if is_global:
            self.n_global += 1
            return -self.n_global
        if self.free:
            return heapq.heappop(self.free)
        self.n_local += 1
        return self.n_local - 1

    def give_back(self, slot: int) -> None:
        if slot > 0:
            heapq.heappush(self.free, slot)


def step_seconds(builder: Builder) -> float:
    """Seconds of the step that `build_arrays` lays, without laying it."""
    nominal = [*map(nominal_duration, builder.types), 0.0]
    preds, is_global, type_of, *_ = zip(*builder.nodes, strict=True)
    return _execution_order(preds, is_global, [nominal[t] for t in type_of])[2]


def build_arrays(builder: Builder, final: int, n_replicas: int, n_stages: int) -> StepGraph:
    """Lay nodes into arrays, in execution order; `final`, a global one, has the step's end."""
    op_types = tuple(builder.types)
    columns = zip(*builder.nodes, strict=True)
    preds, is_global, type_of, stage_of, microbatches, calls, chunks = columns
    nominal = [*map(nominal_duration, op_types), 0.0]  # the last one is a join's
    order, phase, nominal_s = _execution_order(preds, is_global, [nominal[t] for t in type_of])
    # draws are counted within a stage, in the order of the schedule (not of durations)
    counters: dict[tuple[bool, int], count[int]] = defaultdict(count)
    draws = [
        next(counters[own, s]) if t >= 0 else -1
        for own, s, t in zip(is_global, stage_of, type_of, strict=True)
    ]
    seen = {p for own, before in zip(is_global, preds, strict=True) if own for p in before}
    last_reader = [0] * len(preds)  # 0: none
    for i in order:
        for p in preds[i]:
            if is_global[i] == is_global[p]:
                last_reader[p] = i
    slots, slot = _Slots(), [0] * len(preds)
    export: dict[int, int] = {}  # slots of the latest end over the replicas
    rows: list[tuple[int, ...]] = []  # slots of predecessors and end, node (of an export: ~node)
    phases: list[list[int]] = []
    for i in order:
        own = is_global[i]
        if not phases or phases[-1][0] != phase[i]:
            phases.append([phase[i], len(rows), 0])
        before = [slot[p] for p in preds[i]]
        if own:
            before = [export.get(p, slot[p]) for p in preds[i]]
        out = slot[i] = slots.take(own)
        rows.append((*before, *(0,) * (2 - len(before)), out, i))
        if not own and i in seen:
            export[i] = slots.take(True)
            rows.append((out, 0, export[i], ~i))
        for p in preds[i]:
            if last_reader[p] == i:
                slots.give_back(slot[p])
        if not last_reader[i]:
            slots.give_back(out)
        phases[-1][2] = len(rows)
    table = np.array(rows, np.int64).reshape(len(rows), 4)
    ends, node = table[:, :3], table[:, 3]
    pred0, pred1, out_slot = np.where(ends < 0, slots.n_local - 1 - ends, ends).T.astype(np.int32)
    exports, node = node < 0, np.where(node < 0, ~node, node)
    found = np.array([type_of, microbatches, calls, chunks, draws], np.int32)[:, node]
    found[:, exports] = -1
    op_type, microbatch, call, chunk, draw = found
    kind = np.where(exports, EXPORT, np.where(op_type >= 0, DRAW, JOIN))
    return StepGraph(
        kind=kind.astype(np.int8),
        pred0=pred0,
        pred1=pred1,
        out=out_slot,
        op_type=op_type,
        stage=np.array(stage_of, np.int32)[node],
        microbatch=microbatch,
        call=call,
        chunk=chunk,
        draw=draw,
        phase_global=np.array([p % 2 for p, _, _ in phases], np.uint8),
        phase_lo=np.array([lo for _, lo, _ in phases], np.int64),
        phase_hi=np.array([hi for _, _, hi in phases], np.int64),
        op_types=op_types,
        n_stages=n_stages,
        n_microbatches=1 + max(microbatches),
        n_replicas=n_replicas,
        n_slots=slots.n_local,
        n_global_slots=slots.n_global,
        final_slot=slots.n_local - 1 - slot[final],
        n_calls=1 + max(calls),
        nominal_s=nominal_s,
    )
