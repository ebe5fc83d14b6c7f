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
from prism.analyses.timelines.played import PlayedOp, PlayedStep, Row, Stream, durations
from prism.common.arrays import Array
from prism.common.errors import PrismError
from prism.common.launchgaps import LaunchGaps
from prism.common.text import format_count
from prism.engine import LANES
from prism.simulation.draws import end_blocks
from prism.simulation.prepare import Prepared
from prism.simulation.program import Program, global_ops, ideal_program, make_keys
from prism.simulation.tracemodel.arrays import earliest_lead
from prism.simulation.tracemodel.devicetime import device_time
from prism.simulation.tracemodel.graph import TraceNode, start_of
from prism.simulation.tracemodel.model import TraceModel
from prism.simulation.variability import is_communication
from prism.workload.kernels import is_compute
from prism.workload.opgraph import StepGraph

MOST_ENDS = 500_000_000  # ends of ops that are kept of one step, 4 bytes each


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
        end, time = self._ideal if replicate is None else self._record(program, replicate)
        if replicate is not None and program.stalls.entity == engine.JOB_STALL:
            end = end * np.float32(program.stalls.quiet)
        return PlayedStep(
            ops, end, final, time, self.step.graph.n_stages, program.n_members, self._nominal,
            gaps=None if self.step.workload else self._gaps(end), label=label,
        )  # fmt: skip

    @cached_property
    def _ideal(self) -> tuple[NDArray[np.float32], float]:
        end, time = self._record(ideal_program(self.step.program), 0)
        return np.broadcast_to(end, (self.step.graph.n_replicas, end.shape[1])), time

    def _record(self, program: Program, replicate: int) -> tuple[NDArray[np.float32], float]:
        """Run one replicate: ends [replica, op] from the step's begin on, step time [s].

        The engine counts from where the first host of a fitted trace begins; its last op takes that
        off again.
        """
        end, time = _record(program, self.seed, replicate)
        source = self.step.source if self.step.workload is None else None
        if isinstance(source, TraceModel) and (lead := earliest_lead(source)) < 0.0:
            last = self._template[1]
            end = np.maximum(np.where(np.arange(end.shape[1]) == last, end, end + lead), 0.0)
        return end, time

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
    end_blocks(step, program.added, block, keys.stream, time[None])
    is_global = global_ops(graph)
    ends[:, is_global] = ends[:1, is_global]
    return ends, float(time[lane])


# ---------------------------------------------------------------------------------- the template
def _ops(step: Prepared) -> tuple[tuple[PlayedOp, ...], int]:
    """Describe the engine's ops, and tell which is the last one."""
    ops, graph, program = step.program.ops, step.graph, step.program
    is_global = global_ops(graph)
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
        nodes = () if step.workload else _nodes(step)
        # a fitted trace may have an op behind its nodes, where its hosts' lead is taken off
        if kind != engine.DRAW or (nodes and _node_of(graph, i) == len(nodes)):
            op = PlayedOp("join", Stream.JOIN, "", (int(ops.stage[i]),), ())
        elif nodes:
            op = describe_node(nodes[_node_of(graph, i)])
        else:
            op = _describe(step, i)
        if kind == engine.DRAW:
            op = op._replace(classes=shares[int(ops.coef[i])])
        found.append(op._replace(preds=preds, is_global=bool(is_global[i])))
        producer[out] = preds[0] if kind == engine.EXPORT else i
    return tuple(found), producer[graph.final_slot]


def _describe(step: Prepared, i: int) -> PlayedOp:
    """Describe the i-th op of a job, without its predecessors."""
    graph, n = step.graph, step.graph.n_stages
    op_type = graph.op_types[int(graph.op_type[i])]
    collective, kernels = op_type.collective, op_type.kernels
    shown: tuple[int, ...] = ()
    if collective is None:
        alone = len(kernels) == 1
        name = kernels[0].name if alone else ""
        stream = Stream.COMMUNICATION if alone and kernels[0].group else Stream.COMPUTE
    elif op_type.op_kind == "transfer":
        name, stream = "", Stream.TRANSFER
        shown = () if step.job.parallelism.p2p == "blocking" else (op_type.stage,)
    else:
        name, computes = collective.name, is_compute(collective.kernel_class)
        stream = Stream.COMPUTE if computes else Stream.COMMUNICATION
    stages = op_type.ends(n).stages or tuple(range(n))
    return PlayedOp(
        op_type.op_kind, stream, name, stages, (), member=op_type.member,
        microbatch=int(graph.microbatch[i]), chunk=int(graph.chunk[i]), shown=shown,
    )  # fmt: skip


def _nodes(step: Prepared) -> tuple[TraceNode, ...]:
    assert isinstance(step.source, TraceModel)
    return step.source.nodes


def _node_of(graph: StepGraph, i: int) -> int:
    """Node of a fitted trace that the i-th op stands for."""
    collective = graph.op_types[int(graph.op_type[i])].collective
    assert collective is not None
    return int(collective.name)


def gaps_by_row(
    nodes: Sequence[TraceNode], start: Array, end: Array
) -> Callable[[Row], LaunchGaps]:
    """Launch gaps of any row, from starts and ends [node, replica] s."""

    def of_row(row: Row) -> LaunchGaps:
        times = start[:, row.replica], end[:, row.replica]
        return device_time(nodes, *times, row.stage).gaps

    return of_row


def describe_node(node: TraceNode) -> PlayedOp:
    """Describe a node of a pipeline trace."""
    if node.kind in ("gap", "join"):
        stream = Stream.HOST if node.kind == "gap" else Stream.JOIN
    elif node.op_kind == "transfer":
        stream = Stream.TRANSFER
    else:
        stream = Stream.COMMUNICATION if is_communication(node.kernel_class) else Stream.COMPUTE
    return PlayedOp(
        node.op_kind, stream, node.name, node.stages, node.preds, node.is_global,
        microbatch=node.microbatch, chunk=node.chunk, only=node.replica,
        classes=((node.kernel_class, 1.0),) if node.kernel_class else (),
    )  # fmt: skip
