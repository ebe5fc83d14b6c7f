"""Which waits a step has that its trace does not name, learnt from the other steps.

An activity begins when its stream is free, the host has issued it and what it waits for has ended.
Where it begins later than the first two allow, right after the end of an activity of another
stream, in one of the other steps, and never before that end, that is an edge. Left out: waits that
no other step ever spent time on, and slowing by shared bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prism.common.arrays import Array, Flags, Index
from prism.common.means import median
from prism.models.kerneltrace.steps import END, KernelKey, StepView, align

_SOON_S = 5e-6
"""An activity begins this soon [s] after its stream is free, it is issued, and what it waits for
has ended: signals and launches take 1 to 7 us in the traces at hand, whose replays differ by 0.02 %
with 3 to 10 us. Of 52 waits of a made-up job 10 us miss one, and what-ifs of it are 1.5 % off."""

_SIGNALLED_S = 30e-6
"""The same [s] where a call made the stream wait for an event: 14 to 19 us on an A100."""

RESOLUTION_S = 1e-6  # times may be off by this much [s]: older profilers write whole microseconds


@dataclass(frozen=True)
class Learnt:
    """What other steps say of one rank's step."""

    latency: Array  # [event] from the host's issue to the start on an idle stream [s]
    gap: Array  # [event] from the end of the stream's previous activity to the start [s]
    # [event] activities of other streams that it waits for, and the lag after each [s]
    waits: list[list[tuple[int, float]]]
    syncs: list[list[int]]  # [event] the activities a host call returns after
    n_inferred: int  # waits found
    n_late: int  # late starts in the other steps
    n_unexplained: int  # those for which no edge was found


def learn(view: StepView, others: list[StepView], keys: list[KernelKey]) -> Learnt:
    """Learn latencies, gaps and waits of a step from other steps of the same rank.

    An only step tells its own latencies and gaps; that starts follow ends by chance it cannot tell.
    """
    alone, others = not others, others or [view]
    maps = [align(view, other) for other in others]

    def seen(of_step: Callable[[StepView], Array]) -> Array:
        """Collect times [other step, event] of the events' counterparts, NaN where missing."""
        pairs = zip(others, maps, strict=True)
        found = [np.where(to >= 0, of_step(other)[to], np.nan) for other, to in pairs]
        return np.reshape(found, (len(others), view.row.size))

    start, end = seen(lambda other: other.start), seen(lambda other: other.end)
    issued, free = seen(lambda other: other.issued), seen(lambda other: other.free)
    classes = [key.kernel_class for key in keys]
    copies = np.array([c.startswith("mem") and c != "memory" for c in classes], np.int64)
    kind = np.where(view.blocks, 2, copies[view.key])  # 0: kernels
    ran = np.isfinite(start)
    idle = ran & (free < issued)
    latency = _typical(start - issued, idle, kind)
    busy = ran & (issued + latency < free)
    gap = _typical(start - free, busy, kind)
    ready = np.fmax(issued + latency, free + gap)
    on_time = start - ready <= _SOON_S
    waits: list[list[tuple[int, float]]] = [[] for _ in range(view.row.size)]

    def add_wait(awaited: int, waiting: int, lag: float) -> None:
        waits[waiting].append((awaited, lag))
        ready[:, waiting] = np.fmax(ready[:, waiting], end[:, awaited] + lag)

    for awaited, waiting in view.waits:
        lag = start[:, waiting] - end[:, awaited]
        near = lag[(lag >= -RESOLUTION_S) & (lag <= _SOON_S)]  # where it decides
        add_wait(awaited, waiting, float(np.median(near)) if near.size else 0.0)
    late = (start - ready > _SOON_S) & (not alone)
    inferred, n_unexplained = _infer(others, maps, start, end, late)
    for edge in inferred:
        add_wait(*edge)
    # what stays late in most steps waits for what the trace does not hold; without its launch an
    # activity may be late for the host's sake
    unknown = median(np.where(np.isfinite(issued), start - ready, np.nan), axis=0)
    unknown = np.where(unknown > _SOON_S, unknown, 0.0)

    def own(lag: Array, where: Flags, typical: Array) -> Array:
        """Median lag [event] of the event's own counterparts, the typical one if it has none."""
        found = median(np.where(where & on_time, lag, np.nan), axis=0)
        return np.where(np.isnan(found), typical, found) + unknown

    syncs = _syncs(view, seen(lambda other: other.call_end), end)
    return Learnt(
        own(start - issued, idle, latency), own(start - free, busy, gap), waits, syncs,
        len(inferred), int(late.sum()), n_unexplained,
    )  # fmt: skip


def _typical(lag: Array, where: Flags, kind: Index) -> Array:
    """Take the usual lag [event] over all events of the same kind, 0 where none shows it.

    Hidden waits are among them, so it is the median of those close to the shortest tenth (a quarter
    gives the same; the median of all is 5 % off in made-up jobs, the shortest 3 % in a real one).
    """
    result = np.zeros(kind.size)
    for k in np.unique(kind):
        values = lag[:, kind == k][where[:, kind == k]]
        if values.size:
            short = np.quantile(values, 0.1)
            result[kind == k] = np.median(values[values <= short + _SOON_S])
    return result


def _infer(
    others: list[StepView], maps: list[Index], start: Array, end: Array, late: Flags
) -> tuple[list[tuple[int, int, float]], int]:
    """Choose for each event that begins late the ends that it begins right after.

    Waits are (awaited, waiting, lag [s]); also how many late starts none of them explains.
    """
    # per waiting and awaited event the lag by step
    near: dict[int, dict[int, dict[int, float]]] = {}
    for s, (other, to) in enumerate(zip(others, maps, strict=True)):
        back = {j: i for i, j in enumerate(to.tolist())}
        for waiting in np.flatnonzero(late[s]).tolist():
            for j, lag in _ends_before(other, int(to[waiting])):
                if 0 <= (awaited := back.get(j, -1)) < waiting:
                    near.setdefault(waiting, {}).setdefault(awaited, {})[s] = lag
    edges, n_unexplained = [], 0
    for waiting in np.flatnonzero(late.any(axis=0)).tolist():
        open_steps = set(np.flatnonzero(late[:, waiting]).tolist())
        possible = {
            awaited: (lags.keys(), float(np.median([*lags.values()])))
            for awaited, lags in near.get(waiting, {}).items()
            if not (start[:, waiting] < end[:, awaited] - RESOLUTION_S).any()  # it does not wait
        }
        while possible and open_steps:
            explained = {j: len(steps & open_steps) for j, (steps, _) in possible.items()}
            best = max(possible, key=lambda j: (explained[j], -possible[j][1]))
            if not explained[best]:
                break
            steps, lag = possible.pop(best)
            edges.append((best, waiting, lag))
            open_steps -= steps
        n_unexplained += len(open_steps)
    return edges, n_unexplained


def _ends_before(view: StepView, i: int) -> list[tuple[int, float]]:
    """List the activities of other streams that end right before event `i`, one a stream; lags."""
    lag = view.start[i] - view.end
    soon, until = (_SIGNALLED_S, view.waits_at[i]) if view.waits_at[i] > 0.0 else (_SOON_S, np.inf)
    near = (lag >= -RESOLUTION_S) & (lag <= soon) & (view.stream != view.stream[i])
    near &= ~(view.call > until)  # it waits for what had been launched
    near &= view.start < view.start[i]
    near[i:] = False  # only what was issued before can be waited for
    latest: dict[int, int] = {}  # the last one of a stream is the one waited for
    for j in np.flatnonzero(near).tolist():
        if lag[j] <= lag[latest.setdefault(int(view.stream[j]), j)]:
            latest[int(view.stream[j])] = j
    return [(j, float(lag[j])) for j in latest.values()]


def _syncs(view: StepView, returned: Array, end: Array) -> list[list[int]]:
    """Find the activities each host call waits for [event].

    A call that blocks waits for its own activity. A synchronising call waits for the last activity
    of its stream, the device's for those of all streams. Where the stream is not recorded it is
    that of the thread's last launch, unless another step returned before that had ended.
    """
    last_of_stream: dict[int, int] = {}
    last_stream_of_thread: dict[int, int] = {}
    found: list[list[int]] = []
    for i in range(view.row.size):
        awaited: list[int] = []
        stream = int(view.stream[i] if view.on_device[i] else view.sync_stream[i])
        if view.on_device[i]:
            last_of_stream[stream] = i
            last_stream_of_thread[int(view.thread[i])] = stream
            awaited = [i] if view.blocks[i] else []
        elif view.sync[i] == "device_sync":
            awaited = list(last_of_stream.values())
        elif view.sync[i] != END:
            if stream < 0:
                stream = last_stream_of_thread.get(int(view.thread[i]), -1)
            awaited = [last_of_stream[stream]] if stream in last_of_stream else []
        early = returned[:, i]
        found.append([j for j in awaited if not (early < end[:, j] - RESOLUTION_S).any()])
    return found
