"""One rank's profiler events as columns: device activities, host calls, steps.

Device activities (kernels, copies, fills) take their launch from the runtime call of the same
correlation id, their class and their collective's arguments from the host ops around that call,
and their step from the time of the launch. Left out: Python stacks, memory events, counters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.text import format_count
from prism.traces.file import COPY_AGAIN
from prism.traces.kernelnames import classify, is_communication_kernel, op_role
from prism.traces.kineto.events import Args, Event, RawTrace, arguments, correlation
from prism.traces.kineto.messages import number, numbers, raw_text, read_message, whole
from prism.traces.kineto.stepmarks import NamedRanges, find_steps

Floats = NDArray[np.float64]

_DEVICE = {
    "kernel": "kernel",
    "concurrent_kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "communication": "communication",  # of another profiler, which says so
}
_RUNTIME = frozenset(
    ("cuda_runtime cuda_driver hip_runtime hip_driver xpu_runtime xpu_driver privateuse1_runtime "
     "privateuse1_driver runtime").split()
)  # fmt: skip
_OPS = frozenset({"cpu_op", "user_annotation", "operator"})
_STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
CALLS = (
    (re.compile(r"StreamSynchronize"), "stream_sync"),
    (re.compile(r"DeviceSynchronize|CtxSynchronize|Context Sync", re.I), "device_sync"),
    (re.compile(r"EventSynchronize|Event Sync"), "event_sync"),
    (re.compile(r"StreamWaitEvent|Stream Wait Event"), "stream_wait"),
    (re.compile(r"Stream Sync|urQueueFinish|zeCommand(Queue|List\w*)Synchronize"), "stream_sync"),
    (re.compile(r"urEventWait|ze(Event|Fence)HostSynchronize"), "event_sync"),
    (re.compile(r"EventRecord"), "event_record"),
)

Steps = list[tuple[int, float, float]]
"""Number, start and end [us] of each step, in order of time."""
_FAR_US = 1e12
"""No recording lasts as long, 12 days [us]: those are errors."""


@dataclass
class Calls:
    """Host calls that wait or make a stream wait, in order of time [call].

    Attributes
    ----------
    kind : list of str
        ``stream_sync``, ``device_sync``, ``event_sync`` or ``stream_wait``.
    start, end : list of float
        On the rank's clock [us].
    thread : list of int
    stream : list of int
        The stream waited for, or of a ``stream_wait`` the one that waits; -1 unknown.
    on_stream : list of int
        The stream whose event is waited for; -1 unknown.
    recorded : list of float
        When that event was recorded [us]; not a number where unknown.
    """

    kind: list[str] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    on_stream: list[int] = field(default_factory=list)
    recorded: list[float] = field(default_factory=list)


@dataclass
class RankTrace:
    """Columns [activity] of one rank's device activities, times in us from `origin_us`."""

    rank: int | None
    world_size: int | None
    base_time_ns: int
    origin_us: float
    columns: dict[str, NDArray[Any]]
    start: Floats
    duration: Floats
    launch: Floats
    launch_end: Floats
    step: NDArray[np.int64]
    steps: Steps
    calls: Calls
    n_host_events: int
    n_bad: int
    fine: bool
    """Whether times have fractions of a microsecond."""
    notes: list[str]
    cut: bool
    """Whether the end of its file is missing."""


_COLUMNS = {
    "op_kind": object, "kernel_class": object, "name": object, "stream": np.int64,
    "bytes": np.float64, "group": object, "group_size": np.int64, "correlation": np.int64,
    "thread": np.int64, "op": object, "shape": object, "copy_back": np.bool_,
}  # fmt: skip
"""Columns of a rank's device activities."""


class _Activity:
    """A device activity: its event, decoded arguments and category."""

    __slots__ = ("args", "category", "event")

    def __init__(self, event: Event, category: str) -> None:
        self.event, self.category, self.args = event, category, arguments(event)


class _Sorted:
    """The events of a file by what prism does with them."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.device: list[_Activity] = []
        self.runtime: list[Event] = []
        self.ops: list[Event] = []
        self.syncs: list[Event] = []
        for event in events:
            cat = event.cat
            if event.ph != "X" or not isinstance(cat, str):
                continue
            if cat not in _LOWER:
                cat = cat.lower()
            if cat in _DEVICE:
                self.device.append(_Activity(event, _DEVICE[cat]))
            elif cat in _RUNTIME:
                self.runtime.append(event)
            elif cat in _OPS:
                self.ops.append(event)
            elif cat == "cuda_sync":
                self.syncs.append(event)


_LOWER = frozenset(_DEVICE) | _RUNTIME | _OPS | {"cuda_sync"}


def read_rank(raw: RawTrace, steps: Steps | None = None) -> RankTrace:
    """Turn one file's events into columns; `steps` are those that its clock marks, where known."""
    found = _Sorted(raw.events)
    raw.events = []
    ts = numbers([a.event.ts for a in found.device])
    ts = ts[np.isfinite(ts)]
    middle = float(np.quantile(ts, 0.5, method="lower")) if ts.size else 0.0  # of any size: no sum
    kept, ts, dur = _sound([a.event for a in found.device], middle, device=True)
    device = [found.device[i] for i in kept.tolist()]
    calls, call_ts, call_dur = _sound(found.runtime, middle)
    ops, op_ts, op_dur = _sound(found.ops, middle)
    n_bad, n_host = len(found.device) - len(device), len(found.runtime) + len(found.ops)
    found.runtime = [found.runtime[i] for i in calls.tolist()]
    found.ops = [found.ops[i] for i in ops.tolist()]
    n_far = n_host - len(found.runtime) - len(found.ops)
    notes = [f"{format_count(n_far, 'host event')} without a valid time dropped"] if n_far else []
    origin = min((float(part.min()) for part in (ts, call_ts, op_ts) if part.size), default=0.0)
    threads: dict[Any, int] = {}
    launches = _Launches(found.runtime, call_ts - origin, call_dur, threads)
    index = [launches.by_correlation.get(whole(a.args.correlation), -1) for a in device]
    hosts = _enclosing_ops(found.ops, op_ts - origin, op_dur, launches, index, threads)
    steps = find_steps(_marks(found.ops))[0] if steps is None else steps
    steps = [(number, begin - origin, end - origin) for number, begin, end in steps]
    start = ts - origin
    launch = launches.start[index] if len(launches.start) else np.full(len(device), np.nan)
    launch_end = launches.end[index] if len(launches.end) else launch.copy()
    missing = np.array(index, dtype=np.int64) < 0
    launch[missing] = launch_end[missing] = np.nan
    step = step_of(np.where(np.isfinite(launch), launch, start), steps)
    if raw.cut and len(steps) > 1:
        incomplete = int(step.max(initial=-1))
        step[step == incomplete] = -1
        steps = [row for row in steps if row[0] < incomplete]
        notes.append(f"step {incomplete} is incomplete and was left out: {COPY_AGAIN}")
    return RankTrace(
        raw.rank,
        raw.world_size,
        raw.base_time_ns or 0,
        origin,
        _describe(device, hosts, index, launches),
        start,
        dur,
        launch,
        launch_end,
        step,
        steps,
        _calls(found, launches),
        n_host,
        n_bad,
        bool(ts.size) and bool((np.floor(ts) != ts).any()),
        [*raw.notes, *notes],
        raw.cut,
    )


def _sound(
    events: list[Event], middle: float, device: bool = False
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Find the events whose times can be true: index, start and duration [us]."""
    ts, dur = numbers([e.ts for e in events]), numbers([e.dur for e in events])
    if not device:  # when a call began counts even where its end is not known
        dur = np.maximum(0.0, np.nan_to_num(dur))
    with np.errstate(over="ignore", invalid="ignore"):
        kept = np.flatnonzero((np.abs(ts - middle) <= _FAR_US) & (dur >= 0.0) & (dur <= _FAR_US))
    return kept, ts[kept], dur[kept]


class _Launches:
    """Runtime calls as columns, found by correlation id."""

    def __init__(
        self, events: list[Event], start: Floats, duration: Floats, threads: dict[Any, int]
    ) -> None:
        self.names = [e.name if isinstance(e.name, str) else "" for e in events]
        self.start, self.end = start, start + duration
        self.thread = [threads.setdefault(e.tid, len(threads)) for e in events]
        self.correlation = [whole(correlation(e)) for e in events]
        self.by_correlation = {c: i for i, c in enumerate(self.correlation) if c >= 0}


class _Host(NamedTuple):
    """Host ops around a launch: the innermost one, and those of a collective."""

    op: str = ""
    optimizer: bool = False
    collective: tuple[Event, ...] = ()


_NO_HOST = _Host()
_DEEPEST = 64  # host ops in one another; what overlaps more was not recorded by one thread


def _enclosing_ops(
    ops: list[Event],
    start: Floats,
    duration: Floats,
    launches: _Launches,
    index: list[int],
    threads: dict[Any, int],
) -> dict[int, _Host]:
    """Find for each launching call the ops of its thread that are open at its time."""
    thread = np.array([threads.get(e.tid, -1) for e in ops], dtype=np.int64)
    end = start + duration
    hosts: dict[int, _Host] = {}
    called = np.unique(np.array([i for i in index if i >= 0], dtype=np.int64))
    call_thread = np.array(launches.thread, dtype=np.int64)[called]
    for of in np.unique(call_thread):
        mine = called[call_thread == of]
        mine = mine[np.argsort(launches.start[mine], kind="stable")]
        now = launches.start[mine]
        rows = np.flatnonzero((thread == of) & (end >= start))
        # most ops launch nothing
        first, last = np.searchsorted(now, start[rows]), np.searchsorted(now, end[rows], "right")
        rows = rows[last > first]
        rows = rows[np.lexsort((-end[rows], start[rows]))]
        opened = np.searchsorted(start[rows], now, side="right")
        begins, ends, events = start[rows].tolist(), end[rows].tolist(), [ops[r] for r in rows]
        stack: list[tuple[float, Event]] = []
        at = 0
        for i, until, time in zip(mine.tolist(), opened.tolist(), now.tolist(), strict=True):
            while at < until:
                while stack and stack[-1][0] < begins[at]:
                    stack.pop()
                stack.append((ends[at], events[at]))
                at += 1
            while stack and stack[-1][0] < time:
                stack.pop()
            hosts[i] = _around(stack[-_DEEPEST:]) if stack else _NO_HOST
    return hosts


def _around(stack: list[tuple[float, Event]]) -> _Host:
    """Tell what is known of a launch inside the ops of `stack`, the outermost first."""
    optimizer, collective = False, []
    for _, event in stack:
        role = op_role(event.name)
        if role == "communication":
            collective.append(event)
        elif role:
            optimizer = True
    name = stack[-1][1].name
    return _Host(name if isinstance(name, str) else "", optimizer, tuple(collective))


def _marks(ops: list[Event]) -> NamedRanges:
    """Give the ranges that PyTorch's profiler marks steps with, times in us as recorded."""
    marks = [e for e in ops if isinstance(e.name, str) and _STEP.match(e.name)]
    start, length = (numbers([getattr(e, name) for e in marks]) for name in ("ts", "dur"))
    return NamedRanges([str(e.name) for e in marks], np.arange(len(marks)), start, start + length)


def step_of(when: Floats, steps: Steps) -> NDArray[np.int64]:
    """Step in which each time lies: -1 outside of all, 0 where no step is marked."""
    if not steps:
        return np.zeros(when.size, dtype=np.int64)
    bounds = np.array([row[1] for row in steps])
    place = np.searchsorted(bounds, when, side="right") - 1
    ends = np.array([row[2] for row in steps])
    inside = (place >= 0) & (when <= ends[np.maximum(place, 0)])
    # the few microseconds between two annotations belong to the step before
    inside |= (place >= 0) & (place < len(steps) - 1)
    return np.where(inside, np.array([row[0] for row in steps])[np.maximum(place, 0)], -1)


def _calls(found: _Sorted, launches: _Launches) -> Calls:
    """Host calls that wait or make a stream wait, with what synchronisation events add."""
    detail: dict[int, Args] = {}
    for event in found.syncs:
        args = arguments(event)
        detail[whole(args.correlation)] = args
    rows: list[tuple[float, float, str, int, int, int, float]] = []
    kinds: dict[str, str] = {}
    for i, name in enumerate(launches.names):
        kind = kinds.get(name)
        if kind is None:
            kind = next((kind for pattern, kind in CALLS if pattern.search(name)), "")
            kinds[name] = kind
        if not kind or kind == "event_record":
            continue
        args = detail.get(launches.correlation[i], Args())
        record = launches.by_correlation.get(whole(args.wait_on_cuda_event_record_corr_id), -1)
        rows.append(
            (
                float(launches.start[i]),
                float(launches.end[i]),
                kind,
                launches.thread[i],
                whole(args.stream),
                whole(args.wait_on_stream),
                float(launches.start[record]) if record >= 0 else math.nan,
            )
        )
    rows.sort(key=lambda row: row[:2])
    columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(7)]
    start, end, kind_, thread, stream, on_stream, recorded = columns
    return Calls(kind_, start, end, thread, stream, on_stream, recorded)


def _describe(
    device: list[_Activity],
    hosts: dict[int, _Host],
    index: list[int],
    launches: _Launches,
) -> dict[str, NDArray[Any]]:
    """Columns of names, classes, streams and collectives' arguments."""
    rows = []
    shapes: dict[tuple[bytes, bytes], str] = {}
    for activity, at in zip(device, index, strict=True):
        args, category = activity.args, activity.category
        name = activity.event.name if isinstance(activity.event.name, str) else ""
        host = hosts.get(at, _NO_HOST)
        stream = whole(args.stream, whole(activity.event.tid))  # XPU's queue stands there alone
        communicates = is_communication_kernel(name) or op_role(host.op) == "communication"
        if category == "communication" or (category == "kernel" and communicates):
            kind, n_bytes, group, size = read_message(name, args, host.collective)
            kernel_class = kind if kind != "transfer" else "p2p"
        else:
            kind, kernel_class = classify(name, host.op, host.optimizer, category)
            n_bytes, group, size = number(args.bytes), "", -1
        shape = ""
        if math.isnan(n_bytes):  # else the message says more than its launch
            key = (bytes(args.grid), bytes(args.block))
            shape = shapes.get(key, "")
            if not shape and key[0]:
                shape = shapes[key] = " ".join(raw_text(x) for x in (args.grid, args.block))
        rows.append((
            kind, kernel_class, name, stream, n_bytes, group, size,
            whole(args.correlation), launches.thread[at] if at >= 0 else -1, host.op, shape,
            category == "memcpy" and "DtoH" in name and "Pinned" not in name,
        ))  # fmt: skip
    cells = list(zip(*rows, strict=True)) or [()] * len(_COLUMNS)
    return {
        name: np.array(values, dtype=kind)
        for (name, kind), values in zip(_COLUMNS.items(), cells, strict=True)
    }
