"""One rank's profiler events as tables: device activities, host calls, steps.

Device activities (kernels, copies, fills) take their launch from the runtime call of the same
correlation id, their class and their collective's arguments from the host ops around that call,
and their step from the time of the launch. Left out: Python stacks, memory events, counters.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from prism.common.arrays import Array, Index
from prism.common.text import format_count
from prism.traces.file import COPY_AGAIN
from prism.traces.kernelnames import classify, is_communication_kernel, op_role
from prism.traces.kineto.events import NO_ARGS, Args, Event, RawTrace, arguments, correlation
from prism.traces.kineto.messages import number, numbers, raw_text, read_message, whole
from prism.traces.kineto.stepmarks import NamedRanges, find_steps, optimizer_steps

_DEVICE = {
    "kernel": "kernel", "concurrent_kernel": "kernel", "gpu_memcpy": "memcpy", "memcpy": "memcpy",
    "gpu_memset": "memset", "memset": "memset",
    "communication": "communication",  # of another profiler, which says so
}  # fmt: skip
_GROUPS = {
    **dict.fromkeys(_DEVICE, "device"),
    **dict.fromkeys(
        ("cuda_runtime cuda_driver hip_runtime hip_driver xpu_runtime xpu_driver runtime "
         "privateuse1_runtime privateuse1_driver").split(), "runtime",
    ),
    **dict.fromkeys(("cpu_op", "user_annotation", "operator"), "op"), "cuda_sync": "sync",
}  # fmt: skip
_TO_PAGEABLE = re.compile(r"DtoH(?!.*Pinned)|D2M")  # M: host memory that is not pinned, of XPU
_MARK = re.compile(r"ProfilerStep#\d{1,15}$|Optimizer\.(step|zero_grad)#")
_CALLS = {
    "stream_sync": "StreamSynchronize|Stream Sync|urQueueFinish|"
                   r"zeCommand(Queue|List\w*)Synchronize",
    "device_sync": "(?i:DeviceSynchronize|CtxSynchronize|Context Sync)",
    "event_sync": "EventSynchronize|Event Sync|urEventWait|ze(Event|Fence)HostSynchronize",
    "stream_wait": "StreamWaitEvent|Stream Wait Event",
}  # fmt: skip

Steps = list[tuple[int, float, float]]  # number, start and end [us] of each step, in order of time
_FAR_US = 1e12  # no recording lasts as long, 12 days [us]: those are errors


@dataclass
class RankTrace:
    """Device activities and host calls of one rank, times in us from `origin_us`."""

    rank: int | None
    world_size: int | None
    base_time_ns: int
    origin_us: float
    table: pd.DataFrame
    """[activity] op_kind, kernel_class, name, stream, bytes, group, thread, shape, copy_back (waits
    for a copy to pageable memory), start, duration, launch, launch_end, step."""
    calls: pd.DataFrame
    """[call] that waits or makes a stream wait, in order of time: kind (stream_sync, device_sync,
    event_sync, stream_wait), start, end, thread, stream (waited for, or of a stream_wait the one
    that waits), on_stream (whose event is waited for; -1 unknown), recorded (when that event was
    recorded; not a number where unknown)."""
    steps: Steps
    marks: str  # what the steps were found by
    n_host_events: int
    n_bad: int
    cut: bool  # whether the end of its file is missing
    notes: list[str]
    device: str  # product name, where it is known

    @property
    def end(self) -> pd.Series[float]:
        """[activity] When it ends [us]."""
        return self.table["start"] + self.table["duration"]


_COLUMNS = {
    "op_kind": object, "kernel_class": object, "name": object, "stream": np.int64,
    "bytes": np.float64, "group": object, "shape": object, "copy_back": np.bool_,
}  # fmt: skip
"""Columns of a rank's device activities that its events' names and arguments give."""


def read_rank(raw: RawTrace, steps: Steps | None = None, stacks: bool = False) -> RankTrace:
    """Turn one file's events into tables; `steps` are those that its clock marks, where known.

    With `stacks` the table also has the host ops around each launch, the outermost first.
    """
    found: dict[str, list[Event]] = {"device": [], "runtime": [], "op": [], "sync": []}
    for event in raw.events:
        if event.ph == "X" and isinstance(event.cat, str):
            group = _GROUPS.get(event.cat) or _GROUPS.get(event.cat.lower())
            if group:
                found[group].append(event)
    raw.events = []
    ts = numbers([event.ts for event in found["device"]])
    ts = ts[np.isfinite(ts)]
    middle = float(np.quantile(ts, 0.5, method="lower")) if ts.size else 0.0  # of any size: no sum
    device, ts, dur = _sound(found["device"], middle, device=True)
    runtime, call_ts, call_dur = _sound(found["runtime"], middle)
    ops, op_ts, op_dur = _sound(found["op"], middle)
    n_host = len(found["runtime"]) + len(found["op"])
    n_far = n_host - len(runtime) - len(ops)
    notes = [f"{format_count(n_far, 'host event')} without a valid time dropped"] if n_far else []
    origin = min((float(part.min()) for part in (ts, call_ts, op_ts) if part.size), default=0.0)
    threads: dict[Any, int] = {}
    calls = pd.DataFrame({
        "start": call_ts - origin, "end": call_ts - origin + call_dur,
        "thread": np.array([threads.setdefault(e.tid, len(threads)) for e in runtime], np.int64),
        "correlation": np.array([whole(correlation(e)) for e in runtime], np.int64),
    })  # fmt: skip
    details = [arguments(event) for event in device]
    by_correlation = {c: i for i, c in enumerate(calls["correlation"].tolist()) if c >= 0}
    index = [by_correlation.get(whole(args.correlation), -1) for args in details]
    hosts = _enclosing_ops(ops, op_ts - origin, op_dur, calls, index, threads)
    marks = "ranges"
    if steps is None:
        ranges = _marks(ops)
        steps, marks = find_steps(ranges), "ProfilerStep"
        if not steps:
            launched = call_ts[[i for i in index if i >= 0]]
            steps, marks = optimizer_steps(ranges, launched), "optimizer"
    steps = [(number, begin - origin, end - origin) for number, begin, end in steps]
    table = pd.DataFrame(_describe(device, details, hosts, index))
    launch = calls.reindex(index)
    table["thread"] = launch["thread"].fillna(-1).to_numpy(np.int64)
    table["start"], table["duration"] = ts - origin, dur
    table["launch"], table["launch_end"] = launch["start"].to_numpy(), launch["end"].to_numpy()
    table["step"] = step_of(issued(table), steps)
    if stacks:
        table["stack"] = [hosts.get(at, _NO_HOST).stack for at in index]
    if raw.cut and len(steps) > 1:
        incomplete = int(table["step"].max()) if len(table) else -1
        table.loc[table["step"] == incomplete, "step"] = -1
        steps = [row for row in steps if row[0] < incomplete]
        notes.append(f"step {incomplete} is incomplete and was left out: {COPY_AGAIN}")
    return RankTrace(
        raw.rank, raw.world_size, raw.base_time_ns or 0, origin, table,
        _waiting_calls(runtime, calls, found["sync"], by_correlation), steps,
        marks if steps else "", n_host, len(found["device"]) - len(device), raw.cut,
        [*raw.notes, *notes], raw.device,
    )  # fmt: skip


def _sound(
    events: list[Event], middle: float, device: bool = False
) -> tuple[list[Event], Array, Array]:
    """Find the events whose times can be true, with their starts and durations [us]."""
    ts, dur = numbers([e.ts for e in events]), numbers([e.dur for e in events])
    if not device:  # when a call began counts even where its end is not known
        dur = np.maximum(0.0, np.nan_to_num(dur))
    with np.errstate(over="ignore", invalid="ignore"):
        kept = np.flatnonzero((np.abs(ts - middle) <= _FAR_US) & (dur >= 0.0) & (dur <= _FAR_US))
    return [events[i] for i in kept.tolist()], ts[kept], dur[kept]


class _Host(NamedTuple):
    """Host ops around a launch: the innermost one, those of a collective, and all."""

    op: str = ""
    optimizer: bool = False
    collective: tuple[Event, ...] = ()
    stack: tuple[Event, ...] = ()


_NO_HOST = _Host()
_DEEPEST = 64  # host ops in one another; what overlaps more was not recorded by one thread


def _enclosing_ops(
    ops: list[Event], start: Array, duration: Array, calls: pd.DataFrame, index: list[int],
    threads: dict[Any, int],
) -> dict[int, _Host]:  # fmt: skip
    """Find for each launching call the ops of its thread that are open at its time."""
    thread = np.array([threads.get(e.tid, -1) for e in ops], dtype=np.int64)
    end = start + duration
    hosts: dict[int, _Host] = {}
    begin = calls["start"].to_numpy()
    called = np.unique(np.array([i for i in index if i >= 0], dtype=np.int64))
    call_thread = np.asarray(calls["thread"])[called]
    for of in np.unique(call_thread):
        mine = called[call_thread == of]
        mine = mine[np.argsort(begin[mine], kind="stable")]
        now = begin[mine]
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
    op = name if isinstance(name, str) else ""
    return _Host(op, optimizer, tuple(collective), tuple(event for _, event in stack))


def _marks(ops: list[Event]) -> NamedRanges:
    """Give the ranges that mark steps in PyTorch, times in us as recorded."""
    marks = [e for e in ops if isinstance(e.name, str) and _MARK.match(e.name)]
    start, length = (numbers([getattr(e, name) for e in marks]) for name in ("ts", "dur"))
    label, names = pd.factorize(np.array([str(e.name) for e in marks], object))
    return NamedRanges(list(names), label.astype(np.int64), start, start + length)


def issued(table: pd.DataFrame) -> Array:
    """When each activity was launched [us], or its predecessor on the stream where that is missing.

    What a stream runs before its first recorded launch was launched before the recording: minus
    infinity. Streams without any launch go by the start of their activities.
    """
    order = np.lexsort((table["start"], table["stream"]))
    by_stream = table["launch"].iloc[order].groupby(table["stream"].iloc[order])
    before = by_stream.ffill().fillna(-np.inf).sort_index()
    never = table["launch"].isna().groupby(table["stream"]).transform("all")
    return np.asarray(before.where(~never, table["start"]))


def step_of(when: Array, steps: Steps) -> Index:
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


def _waiting_calls(
    runtime: list[Event], calls: pd.DataFrame, syncs: list[Event], by_correlation: dict[int, int]
) -> pd.DataFrame:
    """Host calls that wait or make a stream wait, with what synchronisation events add."""
    names = pd.Categorical([e.name if isinstance(e.name, str) else "" for e in runtime])
    kinds = [
        next((k for k, p in _CALLS.items() if re.search(p, name)), "") for name in names.categories
    ]
    kind = np.array([*kinds, ""], object)[names.codes]
    starts = calls["start"]
    calls = calls.assign(kind=kind)[kind != ""]
    detail = {whole(args.correlation): args for args in map(arguments, syncs)}
    args = [detail.get(number, NO_ARGS) for number in calls["correlation"].tolist()]
    record = [by_correlation.get(whole(a.wait_on_cuda_event_record_corr_id), -1) for a in args]
    return calls.assign(
        stream=np.array([whole(a.stream) for a in args], np.int64),
        on_stream=np.array([whole(a.wait_on_stream) for a in args], np.int64),
        recorded=starts.reindex(record).to_numpy(),
    ).sort_values(["start", "end"], kind="stable", ignore_index=True)


def _describe(
    device: list[Event], details: list[Args], hosts: dict[int, _Host], index: list[int]
) -> dict[str, Any]:
    """Columns of names, classes, streams and collectives' arguments."""
    rows = []
    shapes: dict[tuple[bytes, bytes], str] = {}
    for event, args, at in zip(device, details, index, strict=True):
        category = _DEVICE[str(event.cat).lower()]
        name = event.name if isinstance(event.name, str) else ""
        host = hosts.get(at, _NO_HOST)
        stream = whole(args.stream, whole(event.tid))  # XPU's queue stands there alone
        communicates = is_communication_kernel(name) or op_role(host.op) == "communication"
        if category == "communication" or (category == "kernel" and communicates):
            kind, n_bytes, group = read_message(name, args, host.collective)
            kernel_class = kind if kind != "transfer" else "p2p"
        else:
            kind, kernel_class = classify(name, host.op, host.optimizer, category)
            n_bytes, group = number(args.bytes), ""
        shape = ""
        if math.isnan(n_bytes):  # else the message says more than its launch
            key = (bytes(args.grid), bytes(args.block))
            shape = shapes.get(key, "")
            if not shape and key[0]:
                shape = shapes[key] = " ".join(raw_text(x) for x in (args.grid, args.block))
        rows.append((
            kind, kernel_class, name, stream, n_bytes, group, shape,
            category == "memcpy" and _TO_PAGEABLE.search(name) is not None,
        ))  # fmt: skip
    cells = list(zip(*rows, strict=True)) or [()] * len(_COLUMNS)
    return {
        name: pd.Series(values, dtype=kind)
        for (name, kind), values in zip(_COLUMNS.items(), cells, strict=True)
    }
