"""A kernel trace step by step: what each rank's host issued, and when it ran on the device.

A step is the ordered list of host events of one rank: launches of device activities, calls that
wait for the device, and the end of the host's step. Steps are aligned event by event, so that one
step can be explained by the others. Its time is its period on the devices: from the end of the work
of the step before, over all ranks, to the end of its own.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.arrays import Array, Flags, Index
from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.table import Trace

_LONG = 20_000
"""Events from which sequences that differ are aligned by count of occurrence instead of by the
longest common subsequence, whose cost grows with the square of the length."""

_SHORTEST_S = 1e-9  # a step whose device time is shorter [s] holds none: no clock tells less

QUEUE_DEPTH = 1024
"""Launches that CUDA queues before the next one blocks; 1,021 in the trace of an H100 at hand."""

END = "end of step"  # kind of the event with which the host's next step begins


class KernelKey(NamedTuple):
    """What makes two device activities or host events the same kernel."""

    op_kind: str
    kernel_class: str
    name: str
    shape: str


HOST = KernelKey("host", "host", "host issue", "")  # the host's time between two calls


@dataclass(frozen=True)
class StepView:
    """Host events of one rank in one step, in the host's order [event]; times in seconds."""

    rank: int
    step: int
    begin: float  # of the step on this rank's host
    row: Index  # of the trace's table, -1 for a call that only waits
    key: Index  # index into the trace's kernel keys
    name: Index  # the same of the first kernel of this name, whatever its launch shape
    stream: Index
    thread: Index
    start: Array  # on the device; not a number for a call that only waits
    end: Array
    call: Array  # the host's; not a number where the launch was not recorded
    call_end: Array
    queued: Array  # of the call, the time in which the device's queue was full
    slot: Index  # row of the activity whose end lets the queue take this one, -1: none
    blocks: Flags  # whether the call returns only when its own activity has ended
    sync: NDArray[np.str_]  # stream_sync, device_sync, event_sync, `END` or ""
    sync_stream: Index  # the stream such a call waits for, -1 unknown
    collective: Index  # number of the one matched over ranks, -1 for none
    transfer: Array  # its duration from the last arrival
    waits_at: Array  # of the call that made its stream wait for what is not recorded; 0: none
    # per stream, when the last activity of earlier steps ends
    carried: dict[int, float] = field(default_factory=dict)
    # recorded ones: event waited for, event that waits
    waits: list[tuple[int, int]] = field(default_factory=list)

    @cached_property
    def on_device(self) -> Flags:
        """[event] Whether the event is a device activity."""
        return self.row >= 0

    @cached_property
    def issued(self) -> Array:
        """[event] From when on the device can begin [s]: the call's end, or start if it blocks."""
        return np.where(self.blocks, self.call, self.call_end)

    @cached_property
    def seconds(self) -> Array:
        """[event] Duration on the device [s]."""
        return self.end - self.start

    @cached_property
    def free(self) -> Array:
        """[event] When the stream of an activity became free [s]."""
        free = np.full(self.row.size, -np.inf)
        ran = np.flatnonzero(self.on_device)
        ran = ran[np.argsort(self.stream[ran], kind="stable")]
        first = np.diff(self.stream[ran], prepend=np.nan) != 0
        free[ran[1:]] = self.end[ran[:-1]]
        free[ran[first]] = [self.carried.get(s, -np.inf) for s in self.stream[ran[first]].tolist()]
        return free

    def span(self) -> float:
        """First start to last end of the device activities [s]."""
        return float(np.nanmax(self.end) - np.nanmin(self.start))


@dataclass(frozen=True)
class KernelSteps:
    """All steps of a kernel trace."""

    keys: list[KernelKey]  # what the events' `key` counts
    begin: Array  # [step] end of the work of the step before, over all ranks [s]
    end: Array  # [step]
    steps: list[int]  # those of known begin in which every rank has device activities, in order
    ranks: list[int]
    views: dict[tuple[int, int], StepView]  # by step and rank, steps of unknown begin too
    queue_depth: int  # launches that wait before the next one blocks

    def periods(self) -> Array:
        """Time from the end of the step before to the end of each step, [step] s."""
        return self.end - self.begin

    def typical(self) -> int:
        """Find the step of median period, among those whose launches were recorded."""
        launched = np.array([
            sum(np.isfinite(self.views[step, rank].call).sum() for rank in self.ranks)
            for step in self.steps
        ])  # fmt: skip
        order = np.argsort(self.periods(), kind="stable")
        order = order[2 * launched[order] >= launched.max()]
        return self.steps[int(order[(order.size - 1) // 2])]

    def others(self, step: int, rank: int) -> list[StepView]:
        """Give the views of a rank's other steps, those of unknown begin too."""
        return [view for (s, r), view in self.views.items() if r == rank and s != step]


def split_steps(trace: Trace) -> KernelSteps:
    """Cut a kernel trace into steps."""
    keys, key = kernel_keys(trace)
    keys += [HOST._replace(name=kind) for kind in (*_SYNCS, END)]
    ranks = sorted(int(about["rank"]) for about in trace.meta["ranks"])
    views: dict[tuple[int, int], StepView] = {}
    depth = 0
    for about in trace.meta["ranks"]:
        of_rank, own_depth = _views_of(trace, about, key, keys)
        views |= {
            (v.step, v.rank): v
            for v in of_rank
            if v.span() > _SHORTEST_S and np.nansum(v.seconds) > 0.0
        }
        depth = max(depth, own_depth)
    known = {int(number): (a, b) for number, a, b in trace.meta["periods"]}
    steps = [number for number in known if all((number, rank) in views for rank in ranks)]
    if not steps:
        raise PrismError(
            f"{trace.source}: no step has device time on all {format_count(len(ranks), 'rank')}; "
            "expected traces of the same steps; give one rank, or files of one recording"
        )
    begin, end = np.array([known[number] for number in steps]).T
    return KernelSteps(keys, begin, end, steps, ranks, views, depth or QUEUE_DEPTH)


_SYNCS = ("stream_sync", "device_sync", "event_sync")


def _views_of(
    trace: Trace, about: dict[str, Any], key: Index, keys: list[KernelKey]
) -> tuple[list[StepView], int]:
    """Cut one rank into views; also how many launches its queue holds, 0: it was never full."""
    ops, rank = trace.ops, int(about["rank"])
    mine = (ops["rank"] == rank).to_numpy() & (ops["op_kind"] != "launch_gap").to_numpy()
    rows = np.flatnonzero(mine)
    columns = [
        "step", "start", "duration", "launch", "launch_end", "stream", "thread", "copy_back",
        "collective", "transfer",
    ]  # fmt: skip
    device = ops[columns].iloc[rows].assign(row=rows, key=key[rows], sync="", sync_stream=-1)
    device = device.rename(
        columns={"launch": "call", "launch_end": "call_end", "copy_back": "blocks"}
    )
    device["end"] = device["start"] + device["duration"]
    device["queued"], device["slot"], depth = _queue(device)
    first = device.groupby("step")[["call", "start"]].min().min(axis=1)
    marked = about["steps"] or [[0, float(first.min()), float(device["call_end"].max())]]
    marks = pd.DataFrame(marked, columns=["step", "begin", "until"])
    follows = (marks["step"].diff(-1) == -1).to_numpy()
    marks.loc[follows, "until"] = marks["begin"].shift(-1)[follows]
    calls = pd.DataFrame(about["calls"])
    if len(calls):
        at = np.searchsorted(marks["begin"], calls["start"], side="right") - 1
        calls["step"] = np.where(at >= 0, marks["step"].to_numpy()[at], -1)
    events = _host_events(device, calls, marks, keys)
    begins = {int(number): float(begin) for number, begin, _ in trace.meta["periods"]}
    begun = {step: begin for step, begin, _ in marked if begin > -np.inf}
    fields = {name: events[name].to_numpy(kind) for name, kind in _COLUMNS.items()}
    numbers, at = np.unique(events["step"].to_numpy(np.int64), return_index=True)
    device_step, start, end, stream = (
        device[name].to_numpy(float, na_value=np.nan) for name in ("step", "start", "end", "stream")
    )
    named: dict[int, list[Any]] = {}  # calls by which a stream waits, by step
    for call in calls[calls["kind"] == "stream_wait"].itertuples() if len(calls) else ():
        named.setdefault(call.step, []).append(call)
    views = []
    for step, (low, high) in zip(numbers.tolist(), pairwise([*at, len(events)]), strict=True):
        part = {name: values[low:high] for name, values in fields.items()}
        if (part["row"] < 0).all():
            continue
        begin = min(float(first[step]), begun.get(step, np.inf))
        view = StepView(rank, step, begin, **part, waits_at=np.zeros(high - low))
        before = (device_step >= 0) | (start < np.nanmin(view.start))
        earlier = (device_step < step) & before & np.isfinite(stream)
        for s in np.unique(stream[earlier]):
            view.carried[int(s)] = float(np.fmax.reduce(end[earlier & (stream == s)]))
        if step in begins:  # what was not recorded has ended by then
            for s in np.unique(view.stream[view.on_device]):
                own = view.start[view.on_device & (view.stream == s)]
                view.carried.setdefault(int(s), min(begins[step], float(np.fmin.reduce(own))))
        view.waits.extend(_recorded_waits(view, named.get(step, [])))
        views.append(view)
    return views, depth


def _host_events(
    device: pd.DataFrame, calls: pd.DataFrame, marks: pd.DataFrame, keys: list[KernelKey]
) -> pd.DataFrame:
    """Put launches, waiting calls and the ends of the host's steps in the host's order."""
    number = {keys[i].name: i for i in range(len(keys) - 4, len(keys))}
    hosted = device["call"].notna().any()
    extra = [
        pd.DataFrame({
            "step": marks["step"], "call": marks["until"], "call_end": marks["until"],
            "sync": END, "thread": -1,
        })[hosted & np.isfinite(marks["until"])],  # of the last step nothing may say it
    ]  # fmt: skip
    if len(calls):
        waiting = calls[calls["kind"] != "stream_wait"]
        extra.append(waiting.rename(columns={
            "start": "call", "end": "call_end", "kind": "sync", "stream": "sync_stream",
        })[["step", "call", "call_end", "sync", "sync_stream", "thread"]])  # fmt: skip
    events = pd.concat([device, *(part for part in extra if len(part))], ignore_index=True)
    whole = dict.fromkeys(("row", "collective", "stream", "sync_stream", "slot"), -1)
    events["blocks"] = events["blocks"].eq(True)  # not known: no
    events = events.fillna({**whole, "queued": 0.0})
    events["key"] = events["sync"].map(number).fillna(events["key"]).astype(np.int64)
    events["order"] = events["call"].fillna(events["start"])
    events["last"] = events["sync"] == END
    events = events[events["step"] >= 0].sort_values(
        ["step", "last", "order", "start"], kind="stable"
    )
    first_of: dict[tuple[str, str, str], int] = {}
    events["name"] = [first_of.setdefault(keys[k][:3], k) for k in events["key"].tolist()]
    return events


_COLUMNS: dict[str, type] = {
    **dict.fromkeys(("row", "key", "name", "stream", "thread", "slot", "sync_stream"), np.int64),
    **dict.fromkeys(("start", "end", "call", "call_end", "queued", "transfer"), np.float64),
    "collective": np.int64, "blocks": np.bool_, "sync": np.str_,
}  # fmt: skip
"""Columns of a `StepView`."""


def _queue(device: pd.DataFrame) -> tuple[Array, Index, int]:
    """Time of each launch in which the queue was full, what made room, and the queue's depth.

    That is the most launches that had not begun to run when a call returned, 0 unless calls that
    returned so took longer for it.
    """
    queued, slot = np.zeros(len(device)), np.full(len(device), -1)
    launched = np.flatnonzero(device["call"].notna())
    call, call_end = (device[name].to_numpy() for name in ("call", "call_end"))
    launched = launched[np.argsort(call[launched], kind="stable")]
    start, row = device["start"].to_numpy(), device["row"].to_numpy()
    ran = launched[np.argsort(start[launched], kind="stable")]
    waiting = np.arange(1, launched.size + 1) - np.searchsorted(
        start[ran], call_end[launched], side="right"
    )
    depth = int(waiting.max(initial=0))
    late = np.arange(depth, launched.size)
    free = start[ran[late - depth]]
    begins, returns = call[launched[late]], call_end[launched[late]]
    inside = np.clip(np.minimum(free, returns) - begins, 0.0, None)
    if depth < 2 or not late.size or inside.sum() < 0.01 * (returns - begins).sum():
        return queued, slot, 0
    queued[launched[late]] = inside
    slot[launched[late[1:]]] = row[launched[late[1:] - depth - 1]]
    return queued, slot, depth


def kernel_keys(trace: Trace) -> tuple[list[KernelKey], Index]:
    """List the kernels of a trace, and the index [row] of each row's."""
    if not trace.has_kernels:
        raise PrismError(
            f"{trace.source}: is a {trace.format} table; expected a profiler's trace, which has "
            "kernels and streams"
        )
    ops = trace.ops
    columns = [ops[name].astype(str).to_numpy() for name in ("op_kind", "kernel_class", "name")]
    shape = ops["shape"].astype(str).to_numpy().copy()
    communicates = np.isin(columns[0], list(COLLECTIVES))
    size = ops["bytes"].to_numpy()
    # a collective's grid says nothing and a copy has none: the size of the message does
    named = (communicates | (shape == "")) & np.isfinite(size)
    shape[named] = [f"{int(value)} byte" for value in size[named]]
    numbers: dict[KernelKey, int] = {}
    rows = zip(*columns, shape, strict=True)
    key = np.array([numbers.setdefault(KernelKey(*row), len(numbers)) for row in rows], np.int64)
    return list(numbers), key


def _recorded_waits(view: StepView, calls: list[Any]) -> list[tuple[int, int]]:
    """Pairs of events (waited for, waiting) that the trace itself names; notes other calls."""
    waits = []
    call = np.where(np.isfinite(view.call) & view.on_device, view.call, np.inf)
    for row in calls:
        if pd.isna(row.recorded):
            after = (view.thread == row.thread) & (call > row.start) & np.isfinite(call)
            view.waits_at[np.flatnonzero(after)[:1]] = row.start
            continue
        waiting = np.flatnonzero((view.stream == row.stream) & (call > row.start))
        awaited = np.flatnonzero((view.stream == row.on_stream) & (call < row.recorded))
        if waiting.size and awaited.size and awaited[-1] < waiting[0]:
            waits.append((int(awaited[-1]), int(waiting[0])))
    return waits


def align(a: StepView, b: StepView) -> Index:
    """Find the event of `b` that corresponds to each of `a`, [event of a], -1 where there is none.

    Longest common subsequence of (stream, kernel key) in the host's order, and between its blocks
    that of (stream, kernel name), as launch shapes may follow the data; for very long steps that
    differ, the n-th occurrence of each.
    """
    if np.array_equal(a.stream, b.stream) and np.array_equal(a.key, b.key):
        return np.arange(a.key.size)
    mine = list(zip(a.stream.tolist(), a.key.tolist(), strict=True))
    theirs = list(zip(b.stream.tolist(), b.key.tolist(), strict=True))
    if max(len(mine), len(theirs)) > _LONG:
        events = [pd.DataFrame({"stream": x.stream, "key": x.key}) for x in (a, b)]
        nth = [table.assign(n=table.groupby(["stream", "key"]).cumcount()) for table in events]
        place = nth[0].merge(nth[1].reset_index(), how="left")["index"]
        return np.asarray(place.fillna(-1), np.int64)
    found = np.full(len(mine), -1, dtype=np.int64)
    my_names = list(zip(a.stream.tolist(), a.name.tolist(), strict=True))
    their_names = list(zip(b.stream.tolist(), b.name.tolist(), strict=True))
    i = j = 0
    for block in _blocks(mine, theirs):
        for part in _blocks(my_names[i : block.a], their_names[j : block.b]):
            at, there = i + part.a, j + part.b
            found[at : at + part.size] = np.arange(there, there + part.size)
        i, j = block.a + block.size, block.b + block.size
        found[block.a : i] = np.arange(block.b, j)
    return found


def _blocks(a: list[Any], b: list[Any]) -> list[difflib.Match]:
    """Blocks that two sequences have in common, in order, the last one empty and at their ends."""
    return difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
