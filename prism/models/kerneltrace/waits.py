"""Which waits a step has that its trace does not name, learnt from the other steps.

An activity begins when its stream is free, the host has issued it and what it waits for has ended.
Where it begins later than the first two allow, right after the end of an activity of another
stream, in one of the other steps, and never before that end, that is an edge. Left out: waits that
no other step ever spent time on, and slowing by shared bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism.common.means import median
from prism.models.kerneltrace.steps import END, KernelKey, StepView, align

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SOON_S = 5e-6
"""An activity begins this soon [s] after its stream is free, it is issued, and what it waits for
has ended: signals and launches take 1 to 7 us in the traces at hand, whose replays differ by 0.02 %
with 3 to 10 us. Of 52 waits of a made-up job 10 us miss one, and what-ifs of it are 1.5 % off."""

_SIGNALLED_S = 30e-6
"""The same [s] where a call made the stream wait for an event: 14 to 19 us on an A100."""

RESOLUTION_S = 1e-6
"""Times may be off by this much [s]: older profilers write whole microseconds."""


@dataclass(frozen=True)
class Learnt:
    """What other steps say of one rank's step."""

    latency: Floats  # [event] from the host's issue to the start on an idle stream [s]
    gap: Floats  # [event] from the end of the stream's previous activity to the start [s]
    # [event] activities of other streams that it waits for, and the lag after each [s]
    waits: list[list[tuple[int, float]]]
    syncs: list[list[int]]  # [event] the activities a host call returns after
    n_recorded: int  # waits that the trace names
    n_inferred: int  # waits found
    n_late: int  # late starts in the other steps
    n_unexplained: int  # those for which no edge was found


@dataclass(frozen=True)
class _Others:
    """Times [other step, event] of the events' counterparts; not a number where missing."""

    start: Floats
    end: Floats
    issued: Floats
    returned: Floats
    free: Floats
    """When the stream became free."""


def learn(view: StepView, others: list[StepView], keys: list[KernelKey]) -> Learnt:
    """Learn latencies, gaps and waits of a step from other steps of the same rank."""
    maps = [align(view, other) for other in others]
    seen = _collect(view, others, maps)
    kind = _kinds(view, keys)
    ran = np.isfinite(seen.start)
    idle = ran & (seen.free < seen.issued)
    latency0 = _typical(seen.start - seen.issued, idle, kind)
    busy = ran & (seen.issued + latency0 < seen.free)
    gap0 = _typical(seen.start - seen.free, busy, kind)
    ready = np.fmax(seen.issued + latency0, seen.free + gap0)
    on_time = seen.start - ready <= _SOON_S
    waits: list[list[tuple[int, float]]] = [[] for _ in range(view.row.size)]
    for awaited, waiting in view.waits:
        lag = _lag(seen, awaited, waiting)
        waits[waiting].append((awaited, lag))
        if len(others):
            ready[:, waiting] = np.fmax(ready[:, waiting], seen.end[:, awaited] + lag)
    late = seen.start - ready > _SOON_S
    inferred, n_unexplained = _infer(others, maps, seen, late)
    for awaited, waiting, lag in inferred:
        waits[waiting].append((awaited, lag))
        ready[:, waiting] = np.fmax(ready[:, waiting], seen.end[:, awaited] + lag)
    # what stays late in most steps waits for what the trace does not hold
    unknown = np.zeros(view.row.size)
    if len(others):  # without its launch an activity may be late for the host's sake
        unknown = median(np.where(np.isfinite(seen.issued), seen.start - ready, np.nan), axis=0)
    unknown = np.where(unknown > _SOON_S, unknown, 0.0)
    return Learnt(
        _own(seen.start - seen.issued, idle & on_time, latency0) + unknown,
        _own(seen.start - seen.free, busy & on_time, gap0) + unknown,
        waits, _syncs(view, seen), len(view.waits), len(inferred), int(late.sum()), n_unexplained,
    )  # fmt: skip


def _before(view: StepView) -> Ints:
    """Find the previous activity of the same stream [event]."""
    last: dict[int, int] = {}
    before = np.full(view.row.size, -1, dtype=np.int64)
    for i in np.flatnonzero(view.on_device):
        stream = int(view.stream[i])
        before[i] = last.get(stream, -1)
        last[stream] = int(i)
    return before


def _kinds(view: StepView, keys: list[KernelKey]) -> Ints:
    """Sort the events [event] into kernels (0), copies (1) and what blocks its call (2)."""
    of_key = [
        1 if key.kernel_class.startswith("mem") and key.kernel_class != "memory" else 0
        for key in keys
    ]
    kind = np.array(of_key, dtype=np.int64)[view.key]
    return np.where(view.blocks, 2, kind)


def _collect(view: StepView, others: list[StepView], maps: list[Ints]) -> _Others:
    """Collect the times of the events' counterparts in the other steps."""
    shape = (len(others), view.row.size)
    start, end, issued, returned, free = (np.full(shape, np.nan) for _ in range(5))
    for s, (other, place) in enumerate(zip(others, maps, strict=True)):
        here = np.flatnonzero(place >= 0)
        there = place[here]
        start[s, here] = other.start[there]
        end[s, here] = other.end[there]
        issued[s, here] = other.issued[there]
        returned[s, here] = other.call_end[there]
        previous = _before(other)[there]
        first = np.array([other.carried.get(int(k), -np.inf) for k in other.stream[there]])
        free[s, here] = np.where(previous >= 0, other.end[previous], first)
    return _Others(start, end, issued, returned, free)


def _typical(lag: Floats, where: NDArray[np.bool_], kind: Ints) -> Floats:
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


def _own(lag: Floats, where: NDArray[np.bool_], typical: Floats) -> Floats:
    """Median lag [event] of the event's own counterparts, the typical one where it has none."""
    result = typical.copy()
    for i in np.flatnonzero(where.any(axis=0)):
        result[i] = np.median(lag[where[:, i], i])
    return result


def _lag(seen: _Others, awaited: int, waiting: int) -> float:
    """Lag [s] from an end to the start that waits for it, where it decides."""
    lag = seen.start[:, waiting] - seen.end[:, awaited]
    near = lag[(lag >= -RESOLUTION_S) & (lag <= _SOON_S)]
    return float(np.median(near)) if near.size else 0.0


def _infer(
    others: list[StepView], maps: list[Ints], seen: _Others, late: NDArray[np.bool_]
) -> tuple[list[tuple[int, int, float]], int]:
    """Choose for each event that begins late the ends that it begins right after."""
    near: dict[
        int, dict[int, dict[int, float]]
    ] = {}  # per waiting and awaited event the lag by step
    for s, other in enumerate(others):
        back = np.full(other.row.size, -1, dtype=np.int64)
        here = np.flatnonzero(maps[s] >= 0)
        back[maps[s][here]] = here
        for waiting in np.flatnonzero(late[s]).tolist():
            for j, lag in _ends_before(other, int(maps[s][waiting])):
                if 0 <= back[j] < waiting:
                    near.setdefault(waiting, {}).setdefault(int(back[j]), {})[s] = lag
    edges, n_unexplained = [], 0
    for waiting in np.flatnonzero(late.any(axis=0)).tolist():
        open_steps = set(np.flatnonzero(late[:, waiting]).tolist())
        possible = {
            awaited: lags
            for awaited, lags in near.get(waiting, {}).items()
            if not _began_before(seen, awaited, waiting)
        }
        while possible and open_steps:
            explained = {j: len(lags.keys() & open_steps) for j, lags in possible.items()}
            best = max(possible, key=lambda j: (explained[j], -_median(possible[j])))
            if not explained[best]:
                break
            lags = possible.pop(best)
            edges.append((best, waiting, _median(lags)))
            open_steps -= lags.keys()
        n_unexplained += len(open_steps)
    return edges, n_unexplained


def _median(lags: dict[int, float]) -> float:
    """Median of the lags over the steps [s]."""
    return float(np.median(list(lags.values())))


def _began_before(seen: _Others, awaited: int, waiting: int) -> bool:
    """Tell whether an event ever began before another one's end, so does not wait for it."""
    return bool((seen.start[:, waiting] < seen.end[:, awaited] - RESOLUTION_S).any())


def _ends_before(view: StepView, i: int) -> list[tuple[int, float]]:
    """List the activities of other streams that end right before event `i`, one a stream; lags."""
    lag = view.start[i] - view.end
    soon, until = (_SIGNALLED_S, view.waits_at[i]) if view.waits_at[i] > 0.0 else (_SOON_S, np.inf)
    near = (lag >= -RESOLUTION_S) & (lag <= soon) & (view.stream != view.stream[i])
    near &= ~(view.call > until)  # it waits for what had been launched
    near &= view.start < view.start[i]
    near[i:] = False  # only what was issued before can be waited for
    latest: dict[int, int] = {}
    for j in np.flatnonzero(near).tolist():
        # the last one of a stream is the one waited for
        stream = int(view.stream[j])
        if stream not in latest or lag[j] <= lag[latest[stream]]:
            latest[stream] = j
    return [(j, float(lag[j])) for j in latest.values()]


def _syncs(view: StepView, seen: _Others) -> list[list[int]]:
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
        if view.on_device[i]:
            last_of_stream[int(view.stream[i])] = i
            last_stream_of_thread[int(view.thread[i])] = int(view.stream[i])
            awaited = [i] if view.blocks[i] else []
        elif view.sync[i] == END:
            pass
        elif view.sync[i] == "device_sync":
            awaited = list(last_of_stream.values())
        else:
            stream = int(view.sync_stream[i])
            if stream < 0:
                stream = last_stream_of_thread.get(int(view.thread[i]), -1)
            awaited = [last_of_stream[stream]] if stream in last_of_stream else []
        early = seen.returned[:, i]
        found.append([j for j in awaited if not (early < seen.end[:, j] - RESOLUTION_S).any()])
    return found
