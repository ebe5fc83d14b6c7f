"""What one device of a traced step does: when it runs, and its launch gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prism.common.launchgaps import LaunchGaps, launch_gaps
from prism.simulation.tracemodel.graph import ARRIVAL, LATENCY, Array, TraceNode, ends_of, start_of
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
    hosts, issued, begins = [-1], [0.0], [0.0]  # the step begins with an idle device
    for i in ops:
        entry, host = _issue(nodes, i, stage)
        hosts.append(host)
        issued.append(end[host] if host >= 0 else np.nan)
        # a member of a transfer occupies its device as soon as it is issued
        waits = host >= 0 and len(nodes[entry].stages) > 1
        begins.append(issued[-1] if waits else start[entry])
    gaps = launch_gaps(*map(np.array, (begins, [0.0, *end[ops]], issued)))
    since = [
        _host_since(nodes, start, end, hosts[i], float(begin))
        for i, begin in zip(gaps.ended_by, gaps.begin, strict=True)
    ]
    gaps = gaps._replace(begin=np.maximum(gaps.begin, np.array(since, np.float64)))
    busy = _running(start, end, ops)
    others = _running(start, end, [i for i in ops if nodes[i].op_kind != "optimizer"])
    idle = float(end[ops].max(initial=0.0)) - busy - _waits(nodes, start, end, ops, stage)
    return DeviceTime(busy, busy - others, idle, gaps)


def ideal_device_times(model: TraceModel) -> tuple[float, list[DeviceTime]]:
    """Step with every effect at 1 [s], and the time of each stage's device in it."""
    graph = ideal_graph(model)
    ends = ends_of(graph)
    # not end - duration: what takes no time has to begin no later than what waits for it
    start = np.array([start_of(node, ends)[0, 0] for node in graph.nodes])
    each = [device_time(graph.nodes, start, ends[:, 0, 0], s) for s in range(model.n_stages)]
    return float(graph.measured[0]), each


def _running(start: Array, end: Array, ops: list[int]) -> float:
    """Time in which some op runs [s]."""
    if not ops:
        return 0.0
    begin, until = start[ops], end[ops]
    idle = launch_gaps(begin, until, np.full_like(begin, np.nan)).idle
    return float(until.max() - begin.min()) - idle


def _waits(
    nodes: Sequence[TraceNode], start: Array, end: Array, ops: list[int], stage: int
) -> float:
    """Idle time of a device that has come to an op which others have not come to [s]."""
    waits, until = 0.0, 0.0
    for i in sorted(ops, key=lambda i: float(start[i])):
        if len(nodes[i].stages) > 1:
            came = (float(end[p]) for p in nodes[i].preds if stage in nodes[p].stages)
            waits += max(0.0, float(start[i]) - max([until, *came]))
        until = max(until, float(end[i]))
    return waits


def _before(nodes: Sequence[TraceNode], i: int, stage: int, **fields: str) -> int:
    """First predecessor on a stage whose fields have these values, -1 for none."""
    own = (p for p in nodes[i].preds if stage in nodes[p].stages)
    return next((p for p in own if all(getattr(nodes[p], k) == v for k, v in fields.items())), -1)


def _issue(nodes: Sequence[TraceNode], i: int, stage: int) -> tuple[int, int]:
    """Node at which a worker comes to an op, and the host's node that issues it, -1 for none."""
    entry = _before(nodes, i, stage, kind="join", name=ARRIVAL)
    entry = entry if entry >= 0 else i
    host = _before(nodes, entry, stage, kind="gap")
    latency = host >= 0 and nodes[host].name == LATENCY[-1]
    return entry, _before(nodes, host, stage, kind="gap") if latency else host


def _host_since(
    nodes: Sequence[TraceNode], start: Array, end: Array, host: int, begin: float
) -> float:
    """Since when the host has been at work until a node of it ended [s], as far back as `begin`."""
    stage = nodes[host].stages[0]
    while start[host] > begin and nodes[host].preds:
        before = max(nodes[host].preds, key=lambda p: float(end[p]))
        if nodes[before].kind != "gap" or stage not in nodes[before].stages:
            break
        host = before
    return float(start[host])
