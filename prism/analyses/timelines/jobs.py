"""Steps of a simulated job, op by op: the engine's own numbers, recorded.

A replicate is run again with the same keys, so that its step time is the sampled one, bit for bit,
and every op's end is kept. Left out: how long each kernel inside an op took, which at op resolution
is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.analyses.timelines.played import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    JOIN,
    TRANSFER,
    PlayedOp,
    PlayedStep,
    Row,
    durations,
)
from prism.common.errors import PrismError
from prism.common.launchgaps import LaunchGaps
from prism.common.text import format_count
from prism.engine import LANES
from prism.jobs.schedule import make_schedule
from prism.simulation.draws import end_blocks
from prism.simulation.prepare import Prepared
from prism.simulation.program import Program, global_ops, ideal_program, make_keys
from prism.simulation.tracemodel.devicetime import device_time
from prism.simulation.tracemodel.graph import TraceNode, start_of
from prism.simulation.tracemodel.model import TraceModel
from prism.simulation.variability import is_communication
from prism.workload.kernels import is_compute
from prism.workload.opgraph import OpType, StepGraph

MOST_ENDS = 500_000_000
"""Ends of ops that are kept of one step, 4 bytes each."""


def check_size(step: Prepared) -> None:
    """Refuse a job whose step holds too many ops, before hours are spent on sampling it."""
    n_replicas, n_ops = step.graph.n_replicas, step.program.ops.kind.size
    if n_replicas * n_ops > MOST_ENDS:
        raise PrismError(
            f"{step.job.source}: a step of {format_count(n_replicas, 'replica')} with "
            f"{format_count(n_ops, 'op')} each is too "
            f"large for a timeline, which keeps at most {MOST_ENDS:,} ends; lower parallelism.dp "
            "(with cluster.nodes), or take resolution op"
        )


@dataclass(frozen=True)
class JobPlayer:
    """Plays replicates of one job; what they share is made once."""

    step: Prepared  # of all replicas (engine exact)
    seed: int  # of the simulation whose replicates are played

    def play(self, replicate: int | None, /, **label: Any) -> PlayedStep:
        """Play one replicate, or the step with every effect at 1 where None."""
        program, (ops, final) = self.step.program, self._template
        end, time = self._ideal if replicate is None else _record(program, self.seed, replicate)
        if replicate is not None and program.stalls.entity == engine.JOB_STALL:
            end = end * np.float32(program.stalls.quiet)
        return PlayedStep(
            ops, end, final, time, self.step.graph.n_stages, program.n_members, self._nominal,
            gaps=None if self.step.workload else self._gaps(end), label=label,
        )  # fmt: skip

    @cached_property
    def _ideal(self) -> tuple[NDArray[np.float32], float]:
        end, time = _record(ideal_program(self.step.program), self.seed, 0)
        return np.broadcast_to(end, (self.step.graph.n_replicas, end.shape[1])), time

    @cached_property
    def _template(self) -> tuple[tuple[PlayedOp, ...], int]:
        return _ops(self.step)

    @cached_property
    def _nominal(self) -> NDArray[np.float32]:
        return durations(self._template[0], self._ideal[0])

    def _gaps(self, end: NDArray[np.float32]) -> Callable[[Row], LaunchGaps]:
        """Launch gaps of any row of a fitted trace, from ends [replica, op] s."""
        nodes, graph = _nodes(self.step), self.step.graph
        op_of = {_node_of(graph, i): i for i in np.flatnonzero(graph.op_type >= 0).tolist()}
        start, ends = np.zeros((2, len(nodes), end.shape[0], 1))
        for i, node in enumerate(nodes):  # joins are none of the engine's ops
            start[i] = start_of(node, ends)
            ends[i] = end[:, op_of[i], None] if i in op_of else start[i]
        return gaps_by_row(nodes, start[:, :, 0], ends[:, :, 0])


def _record(program: Program, seed: int, replicate: int) -> tuple[NDArray[np.float32], float]:
    """Run one replicate alone, with the keys it has among all others: ends [replica, op], step [s].

    Those of global ops are equal over replicas.
    """
    graph, n_ops = program.graph, program.ops.kind.size
    ends = np.zeros((graph.n_replicas, n_ops), np.float32)
    block, lane = divmod(replicate, LANES)
    keys, step = make_keys(seed), program.arrays(False)
    time = engine.record_block(block, lane, keys, step, ends)
    end_blocks(step, block, keys.stream, time[None], np.empty((1, LANES), np.float32))
    is_global = global_ops(graph)
    ends[:, is_global] = ends[:1, is_global]
    return ends, float(time[lane])


# ---------------------------------------------------------------------------------- the template
def _ops(step: Prepared) -> tuple[tuple[PlayedOp, ...], int]:
    """Describe the engine's ops, and tell which is the last one."""
    ops, graph, program = step.program.ops, step.graph, step.program
    is_global = global_ops(graph)
    actions = _actions(step) if step.workload else {}
    shares = [
        tuple((c, float(x)) for c, x in zip(program.classes, row, strict=True) if x > 0.0)
        for row in program.shares
    ]
    producer: dict[int, int] = {}
    found: list[PlayedOp] = []
    for i in range(ops.kind.size):
        slots = (int(ops.pred0[i]), int(ops.pred1[i]))
        preds = tuple(dict.fromkeys(producer[s] for s in slots if s in producer))
        kind, out = int(ops.kind[i]), int(ops.out[i])
        if kind != engine.DRAW:
            op = PlayedOp("join", JOIN, "", (int(ops.stage[i]),), ())
        elif step.workload is None:
            op = describe_node(_nodes(step)[_node_of(graph, i)])
        else:
            op = _describe(step, i, actions)
        if kind == engine.DRAW:
            op = op._replace(classes=shares[int(ops.coef[i])])
        found.append(op._replace(preds=preds, is_global=bool(is_global[i])))
        producer[out] = preds[0] if kind == engine.EXPORT else i
    return tuple(found), producer[graph.final_slot]


def _describe(step: Prepared, i: int, actions: dict[int, tuple[int, int]]) -> PlayedOp:
    """Describe the i-th op of a job, without its predecessors."""
    graph = step.graph
    op_type, n = graph.op_types[int(graph.op_type[i])], graph.n_stages
    chunk, microbatch = actions.get(i, (-1, int(graph.microbatch[i])))
    stream, name = _stream(op_type)
    group = op_type.collective.group if op_type.collective else ""
    stages: tuple[int, ...] = (op_type.stage,)
    if op_type.link >= 0:
        stages = (op_type.link, (op_type.link + 1) % n)
    elif group == "world":
        stages = tuple(range(n))
    elif group == "embedding" and n > 1:
        stages = (0, n - 1)
    sends = stream == TRANSFER and step.job.parallelism.p2p != "blocking"
    return PlayedOp(
        op_type.op_kind, stream, name, stages, (), member=op_type.member, microbatch=microbatch,
        chunk=chunk, shown=(op_type.stage,) if sends else stages,
    )  # fmt: skip


def _stream(op_type: OpType) -> tuple[str, str]:
    collective = op_type.collective
    if collective is None:
        only = op_type.kernels[0] if len(op_type.kernels) == 1 else None
        joined = only is not None and only.group != ""
        return COMMUNICATION if joined else COMPUTE, "" if only is None else only.name
    if op_type.op_kind == "transfer":
        return TRANSFER, ""
    return COMPUTE if is_compute(collective.kernel_class) else COMMUNICATION, collective.name


def _actions(step: Prepared) -> dict[int, tuple[int, int]]:
    """Chunk and microbatch of every compute op, by its place in its stage's schedule."""
    graph, p = step.graph, step.job.parallelism
    assert step.workload is not None
    schedule = make_schedule(p.schedule, p.pp, p.microbatches, len(step.workload.chunks[0]))
    computes = np.array([t.collective is None for t in graph.op_types])
    mine = (graph.op_type >= 0) & computes[np.maximum(graph.op_type, 0)]
    found: dict[int, tuple[int, int]] = {}
    for s, actions in enumerate(schedule):
        ops = np.flatnonzero(mine & (graph.stage == s))
        ops = ops[np.argsort(graph.draw[ops], kind="stable")]
        calls = graph.call[ops] if (graph.call >= 0).any() else np.arange(ops.size)
        _, position = np.unique(calls, return_inverse=True)  # calls count up in program order
        for i, k in zip(ops, position, strict=True):
            a = actions[int(k)]
            assert a.microbatch == graph.microbatch[i]
            found[int(i)] = a.chunk, a.microbatch
    return found


def _nodes(step: Prepared) -> tuple[TraceNode, ...]:
    assert isinstance(step.source, TraceModel)
    return step.source.nodes


def _node_of(graph: StepGraph, i: int) -> int:
    """Node of a fitted trace that the i-th op stands for."""
    collective = graph.op_types[int(graph.op_type[i])].collective
    assert collective is not None
    return int(collective.name)


def gaps_by_row(
    nodes: Sequence[TraceNode], start: NDArray[np.float64], end: NDArray[np.float64]
) -> Callable[[Row], LaunchGaps]:
    """Launch gaps of any row, from starts and ends [node, replica] s."""

    def of_row(row: Row) -> LaunchGaps:
        times = start[:, row.replica], end[:, row.replica]
        return device_time(nodes, *times, row.stage).gaps

    return of_row


def describe_node(node: TraceNode) -> PlayedOp:
    """Describe a node of a pipeline trace."""
    if node.kind in ("gap", "join"):
        stream = HOST if node.kind == "gap" else JOIN
    elif node.op_kind == "transfer":
        stream = TRANSFER
    else:
        stream = COMMUNICATION if is_communication(node.kernel_class) else COMPUTE
    return PlayedOp(
        node.op_kind, stream, node.name, node.stages, node.preds, node.is_global,
        microbatch=node.microbatch, chunk=node.chunk, only=node.replica,
        classes=((node.kernel_class, 1.0),) if node.kernel_class else (),
    )  # fmt: skip
