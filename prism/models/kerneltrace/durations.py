"""What the nodes of one step's graph took in every step of a kernel trace.

An activity took what its counterpart did, a collective matched over ranks its transfer. Left out:
what other steps did beside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.models.kerneltrace.steps import KernelSteps, StepView, align
from prism.models.kerneltrace.waits import RESOLUTION_S
from prism.simulation.tracemodel.graph import TraceNode

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Roles(NamedTuple):
    """What the nodes of a kernel graph are.

    Source: when a rank's host began the step, or its stream had done the work of earlier steps,
    after the end of the step before [s], below 0 where it leads; host: the host's time up to a
    call's issue; return from a call that waits; arrival of a member of a matched collective;
    device: an activity.
    """

    role: NDArray[np.str_]  # [node]
    event: Ints  # [node] number in the host's order on its rank, -1 for sources
    rank: Ints  # [node] position of that rank
    stream: Ints  # [node] -1 where it does not apply
    awaited: dict[int, list[int]]  # per return the events that it waits for


def node_durations(
    fixed: Floats, nodes: tuple[TraceNode, ...], roles: Roles, steps: KernelSteps, step: int
) -> Floats:
    """Durations of a graph's nodes in all steps, [node, step] s.

    Parameters
    ----------
    fixed : array
        [node] what is the same in all steps; not a number for the others.
    step : int
        Whose graph it is.

    Returns
    -------
    array
        Not a number where a step has no counterpart of a node.
    """
    found = np.repeat(fixed[:, None], len(steps.steps), axis=1)
    shared = np.array([len(node.stages) > 1 for node in nodes])
    own = steps.steps.index(step)
    for r, rank in enumerate(steps.ranks):
        sources = np.flatnonzero((roles.rank == r) & (roles.role == "source"))
        on_device = np.flatnonzero((roles.rank == r) & (roles.role == "device"))
        on_host = np.flatnonzero((roles.rank == r) & np.isin(roles.role, ("host", "return")))
        mine = steps.views[step, rank]
        for s in sorted(range(len(steps.steps)), key=lambda s: s != own):
            view = steps.views[steps.steps[s], rank]
            carried = [view.carried.get(stream, np.nan) for stream in roles.stream[sources]]
            when = np.where(roles.stream[sources] < 0, view.begin, carried)
            found[sources, s] = when - steps.begin[s]
            to = align(mine, view)
            there = to[roles.event[on_device]]
            seconds = np.where(shared[on_device], view.transfer[there], view.seconds[there])
            found[on_device, s] = np.where(there < 0, np.nan, seconds)
            found[:, s] = _host_times(on_host.tolist(), nodes, roles, view, to, found[:, [s, own]])
    return found


def _host_times(
    on_host: list[int], nodes: tuple[TraceNode, ...], roles: Roles, view: StepView, to: Ints,
    durations: Floats,
) -> Floats:  # fmt: skip
    """Fill in the host's durations of a rank in another step, of those [node, other and own step].

    A stretch between two calls that both steps have is as long as it was there: calls that only the
    graph has share it in proportion, calls that only the other step has are part of it.
    """
    found, own = durations[:, 0], durations[:, 1]
    now: dict[int, float] = {}  # per node: when it ended in the other step
    # lists, as numbers are picked out of arrays one by one slowly
    counterpart, returns = to[roles.event[on_host]].tolist(), (roles.role == "return").tolist()
    issued = np.where(view.on_device, view.issued, view.call).tolist()
    call, call_end, end = view.call.tolist(), view.call_end.tolist(), view.end.tolist()
    queued = np.cumsum(np.where(np.isfinite(view.call), view.queued, 0.0)).tolist()
    counted = 0.0  # of the time in the queue
    for i, there in zip(on_host, counterpart, strict=True):
        if there < 0:
            continue
        if returns[i]:
            now[i] = call_end[there]
            awaited = to[roles.awaited.get(i, [])].tolist()
            ends = (end[k] for k in awaited if k >= 0)
            until = max([call[there], *(x for x in ends if x <= now[i] + RESOLUTION_S)])
            found[i] = max(0.0, now[i] - until)
            continue
        until = issued[there]
        if not until > -np.inf:
            continue
        stretch = [i]
        while (before := nodes[stretch[-1]].preds[0]) not in now and roles.event[before] >= 0:
            stretch.append(before)
        since = max(now.get(before, view.begin), view.begin)
        share: Floats | float = 1.0 / len(stretch)
        if len(stretch) > 1 and (whole := own[stretch].sum()) > 0.0:
            share = own[stretch] / whole
        found[stretch] = max(0.0, until - since - (queued[there] - counted)) * share
        counted = queued[there]
        for node in stretch[::-1]:
            since = now[node] = since + float(found[node])
        now[i] = until
    return found
