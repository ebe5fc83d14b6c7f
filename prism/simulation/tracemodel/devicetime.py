"""What one device of a traced step does: when it runs, and its launch gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prism.common.launchgaps import LaunchGaps, launch_gaps
from prism.simulation.tracemodel.graph import (
    ARRIVAL,
    LATENCY,
    Array,
    TraceNode,
    ends_of,
    ops_of,
    start_of,
)
from prism.simulation.tracemodel.model import TraceModel, ideal_graph

NO_DEVICE_OPS = ("launch_gap", "data_load")  # op kinds during which a device has nothing to run


class DeviceTime(NamedTuple):
    """Time of one device in a step [s], and its launch gaps."""

    busy: float  # its ops run
    optimizer: float  # of that, its optimizer alone runs
    idle: float  # from the step's begin to its last op, where it waits for no other device
    gaps: LaunchGaps


def device_time(nodes: Sequence[TraceNode], start: Array, end: Array, stage: int) -> DeviceTime:
    """Find what a device does in a step, from starts and ends [node] s.

    A device that waits in a collective or transfer is neither busy nor in a launch gap.
    """
    ops = [
        i for i, n in enumerate(nodes)
        if n.kind == "op" and stage in n.stages and n.op_kind not in NO_DEVICE_OPS
    ]  # fmt: skip
    if not ops:
        return DeviceTime(0.0, 0.0, 0.0, launch_gaps(*np.zeros((3, 1))))
    entries = [_entry(nodes, i, stage) for i in ops]
    hosts = np.array([_host_before(nodes, i, stage) for i in entries])
    issued = np.where(hosts < 0, np.nan, end[hosts])
    # a member of a transfer occupies its device as soon as it is issued
    waits = np.array([len(nodes[i].stages) > 1 for i in entries]) & (hosts >= 0)
    begins = np.where(waits, issued, start[entries])
    first = np.zeros(1)  # the step begins with an idle device
    gaps = launch_gaps(*map(np.concatenate, ([first, begins], [first, end[ops]], [first, issued])))
    since = [
        _host_since(nodes, start, end, int(hosts[i - 1]), float(begin))
        for i, begin in zip(gaps.ended_by, gaps.begin, strict=True)
    ]
    gaps = gaps._replace(begin=np.maximum(gaps.begin, np.array(since, np.float64)))
    busy = _running(start[ops], end[ops])
    rest = [i for i in ops if nodes[i].op_kind != "optimizer"]
    others = _running(start[rest], end[rest]) if rest else 0.0
    idle = float(end[ops].max()) - busy - _waits(nodes, start, end, ops, stage)
    return DeviceTime(busy, busy - others, idle, gaps)


def ideal_device_times(model: TraceModel) -> tuple[float, list[DeviceTime]]:
    """Step with every effect at 1 [s], and the time of each stage's device in it."""
    graph = ideal_graph(model)
    ends = ends_of(graph)
    # not end - duration: what takes no time has to begin no later than what waits for it
    start = np.array([start_of(node, ends)[0, 0] for node in graph.nodes])
    end = ends[:, 0, 0]
    each = [device_time(graph.nodes, start, end, s) for s in range(model.n_stages)]
    return float(end[ops_of(graph.nodes)].max()), each


def _running(start: Array, end: Array) -> float:
    """Time in which some op runs [s]."""
    return (
        float(end.max() - start.min()) - launch_gaps(start, end, np.full_like(start, np.nan)).idle
    )


def _waits(
    nodes: Sequence[TraceNode], start: Array, end: Array, ops: Sequence[int], stage: int
) -> float:
    """Idle time of a device that has come to an op which others have not come to [s]."""
    waits, until = 0.0, 0.0
    for i in sorted(ops, key=lambda i: float(start[i])):
        came = [end[p] for p in nodes[i].preds if stage in nodes[p].stages]
        if len(nodes[i].stages) > 1:
            waits += max(0.0, float(start[i]) - max([until, *came]))
        until = max(until, float(end[i]))
    return waits


def _entry(nodes: Sequence[TraceNode], i: int, stage: int) -> int:
    """Node at which a worker comes to an op: the op itself, or its own arrival."""
    own = (p for p in nodes[i].preds if nodes[p].kind == "join" and nodes[p].name == ARRIVAL)
    return next((p for p in own if stage in nodes[p].stages), i)


def _host_before(nodes: Sequence[TraceNode], i: int, stage: int) -> int:
    """Host's node that issues a node, -1 for none."""
    found = next((p for p in nodes[i].preds if _is_host(nodes[p], stage)), -1)
    if found >= 0 and nodes[found].name == LATENCY[-1]:
        found = nodes[found].preds[0]
    return found if found >= 0 and _is_host(nodes[found], stage) else -1


def _is_host(node: TraceNode, stage: int) -> bool:
    return node.kind == "gap" and stage in node.stages


def _host_since(
    nodes: Sequence[TraceNode], start: Array, end: Array, host: int, begin: float
) -> float:
    """Since when the host has been at work until a node of it ended [s], as far back as `begin`."""
    while start[host] > begin and nodes[host].preds:
        before = max(nodes[host].preds, key=lambda p: float(end[p]))
        if not _is_host(nodes[before], nodes[host].stages[0]):
            break
        host = before
    return float(start[host])
